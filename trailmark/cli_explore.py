"""The command ``explore``. It parses, calls and prints; what it does lies in the floors below."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trailmark.evaluation.suite import device_setting, dtype_setting
from trailmark.settings import Settings, setting, takes


@dataclass(frozen=True)
class ExploreSettings(Settings):
    """The options of ``trailmark explore``."""

    model: Path | None = setting(None, "A folder with a trailmark model; none with --trace.", argument=True)
    texts: tuple[Path, ...] = setting(
        (), "Text files of any length, read one after the other.", argument=True
    )
    output: Path = setting(Path("explore.html"), "File of the page.", option="--output -o")
    memory: Path | None = setting(
        None, "Instead of texts: a memory of trailmark read, whose texts are read again."
    )
    trace: Path | None = setting(None, "Instead of a model and texts: what trailmark read --trace wrote.")
    memory_dtype: str | None = dtype_setting()
    device: str | None = device_setting()
    keep_trace: Path | None = setting(None, "Write the trace too, for scripts and for other pages of it.")


@takes(ExploreSettings)
def explore(settings: ExploreSettings) -> None:
    """A page of what a model read in a text: each chunk, the past chunks that it read, and what they were worth."""
    from trailmark.report.console import Progress
    from trailmark.report.explorer.page import build, expect_inputs, keeping
    from trailmark.report.rendering import expect_page
    from trailmark.trace.lines import read_trace

    model, texts, output, memory = settings.model, list(settings.texts), settings.output, settings.memory
    keep = settings.keep_trace
    expect_inputs(model, texts, memory, settings.trace, settings.memory_dtype, keep, output)
    expect_page(output)
    progress = Progress()
    if settings.trace is not None:
        header, entries = read_trace(settings.trace)
        progress.say(f"Taking {settings.trace}, which {header.model.get('name', 'a model')} wrote.")
    else:
        from trailmark.evaluation.reading import parse_dtype
        from trailmark.evaluation.subject import load, own_device
        from trailmark.trace.texts import trace_memory, trace_texts

        assert model is not None
        subject = load(model, device=own_device(settings.device))
        what = f"the texts of {memory}" if memory else ", ".join(map(str, texts))
        progress.say(f"Reading {what} twice at once: as {subject.name} retrieves, and with retrieval off.")
        if memory is not None:
            header, entries = trace_memory(subject, memory)
        else:
            dtype = parse_dtype(settings.memory_dtype)
            header, entries = trace_texts(subject, texts, memory_dtype=dtype)
    with keeping(header, entries, keep) as kept:
        build(header, kept, output, say=progress.say, progress=progress.show)
    progress.clear()
    if keep is not None:
        progress.say(
            f"Trace: {keep} ({keep.stat().st_size / 1e6:,.1f} MB). docs/trace.md tells how to use it."
        )
