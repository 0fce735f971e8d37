"""The command ``explore``. It parses, calls and prints; what it does lies in the floors below."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def explore(
    model: Annotated[
        Path | None, typer.Argument(help="A folder with a trailmark model; none with --trace.")
    ] = None,
    texts: Annotated[
        list[Path] | None, typer.Argument(help="Text files of any length, read one after the other.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("explore.html"),
    memory: Annotated[
        Path | None,
        typer.Option(help="Instead of texts: a memory of trailmark read, whose texts are read again."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Instead of a model and texts: what trailmark read --trace wrote.")
    ] = None,
    memory_dtype: Annotated[
        str | None,
        typer.Option(help="Of keys and values: float32, bfloat16 or float16; default: the model's."),
    ] = None,
    keep_trace: Annotated[
        Path | None, typer.Option(help="Write the trace too, for scripts and for other pages of it.")
    ] = None,
) -> None:
    """A page of what a model read in a text: each chunk, the past chunks that it read, and what they were worth."""
    from trailmark.report.console import Progress
    from trailmark.report.explorer import build, expect_inputs, expect_output, keeping
    from trailmark.trace.lines import read_trace

    expect_inputs(model, texts or [], memory, trace, memory_dtype, keep_trace, output)
    expect_output(output)
    progress = Progress()

    def say(message: str) -> None:
        progress.clear()
        typer.echo(message)

    if trace is not None:
        header, entries = read_trace(trace)
        say(f"Taking {trace}, which {header.model.get('name', 'a model')} wrote.")
    else:
        from trailmark.evaluation.reading import parse_dtype
        from trailmark.evaluation.subject import load
        from trailmark.trace.texts import trace_memory, trace_texts

        assert model is not None
        subject = load(model)
        what = f"the texts of {memory}" if memory else ", ".join(map(str, texts or []))
        say(f"Reading {what} twice at once: as {subject.name} retrieves, and with retrieval off.")
        if memory is not None:
            header, entries = trace_memory(subject, memory)
        else:
            header, entries = trace_texts(subject, texts or [], memory_dtype=parse_dtype(memory_dtype))
    with keeping(header, entries, keep_trace) as kept:
        build(header, kept, output, say=say, progress=progress.show)
    progress.clear()
    if keep_trace is not None:
        say(
            f"Trace: {keep_trace} ({keep_trace.stat().st_size / 1e6:,.1f} MB). docs/trace.md tells how to use it."
        )
