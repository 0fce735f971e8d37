"""One self-contained page of what a model read in a text: ``trailmark explore MODEL TEXT -o page.html``.

The page asks the network for nothing. Its numbers and its text lie in it as arrays (:class:`Document`), which its
script unpacks; text never becomes markup.
"""

from __future__ import annotations

import datetime
import json
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os.path import realpath
from pathlib import Path
from typing import Any

from markupsafe import Markup

from trailmark import __version__
from trailmark.files import expect_replaceable, expect_writable, replacing, write_text
from trailmark.report.explorer.data import Document, collect, pack
from trailmark.report.rendering import expect_page, render
from trailmark.trace.lines import BEGINNING, Entry, TraceHeader, encode
from trailmark.values import MOST_PERPLEXITY, all_visible, count, listed

# joined in this order; all share one scope
SCRIPTS = (
    "explorer/data.js",
    "explorer/shades.js",
    "explorer/strip.js",
    "explorer/pointers.js",
    "explorer/chunk.js",
    "explorer/search.js",
    "explorer/main.js",
)
_NAMES = 3  # sources that a title names
_NAME = 60  # characters of each; the page names them in full elsewhere
_HEAVY = 100_000_000  # bytes of a page, from which on a browser needs seconds to open it


@dataclass(frozen=True)
class Built:
    """What :func:`build` wrote."""

    page: Path
    bytes: int
    about: dict[str, Any]
    """What the page says of itself: title, model, sizes, sources; ``bearing`` tokens that bear a loss, the sums
    ``loss`` and ``loss_without`` over them in nats, and ``helped``, how many of them cost less with retrieval."""
    document: Document


def expect_inputs(
    model: Path | None,
    texts: Sequence[Path],
    memory: Path | None,
    trace: Path | None,
    memory_dtype: str | None,
    keep_trace: Path | None,
    output: Path,
) -> None:
    """A ValueError where it is not clear what ``trailmark explore`` is asked for, or a file would be overwritten."""
    named = [("TEXT", bool(texts)), ("--memory", memory is not None), ("--trace", trace is not None)]
    given = [name for name, there in named if there]
    if trace is not None and model is not None:
        raise ValueError(
            f"trace: expected no model beside a trace, got {str(model)!r}. Say: trailmark explore --trace {trace}"
        )
    if len(given) != 1:
        raise ValueError(
            f"explore: expected one of TEXT, --memory and --trace, got {' and '.join(given) or 'none of them'}. "
            "Say: trailmark explore MODEL TEXT, or trailmark explore MODEL --memory FOLDER, or trailmark explore "
            "--trace FILE"
        )
    if trace is None and model is None:
        raise ValueError(
            f"model: expected a folder with a model, got none. Say: trailmark explore MODEL --memory {memory}"
        )
    if memory_dtype is not None and not texts:
        raise ValueError(
            f"memory_dtype: expected it for texts alone, got {memory_dtype!r} with {given[0]}, which has its own."
        )
    if keep_trace is not None and trace is not None:
        raise ValueError(
            f"keep_trace: expected no --keep-trace beside --trace, got {str(keep_trace)!r}: the trace is there already."
        )
    if keep_trace is not None and keep_trace.is_dir():
        raise ValueError(f"keep_trace: expected a file, {str(keep_trace)!r} is a folder.")
    written = [("output", output)] + ([("keep_trace", keep_trace)] if keep_trace else [])
    taken = [realpath(path) for path in (*texts, *([trace] if trace else []))]  # also of a link to itself
    for name, path in written:
        if realpath(path) in taken:
            raise ValueError(f"{name}: expected another file than the one that is read, got {str(path)!r}.")
    if keep_trace is not None and realpath(keep_trace) == realpath(output):
        raise ValueError(f"keep_trace: expected another file than the page, got {str(keep_trace)!r}.")
    if keep_trace is not None:
        expect_writable("keep_trace", keep_trace.parent)
        expect_replaceable("keep_trace", keep_trace, BEGINNING)


@contextmanager
def keeping(header: TraceHeader, entries: Iterable[Entry], path: Path | None) -> Iterator[Iterable[Entry]]:
    """The same entries, which are written to the trace ``path`` as they are taken; None: to none.

    The file appears in one step when all were taken; what follows may fail without losing it.
    """
    if path is None:
        yield entries
        return

    def written(kept: Path) -> Generator[Entry, None, None]:
        with replacing(kept) as file:
            file.write(encode(header))
            for entry in entries:
                file.write(encode(entry))
                yield entry

    taken = written(path)
    try:
        yield taken
    finally:
        taken.close()  # where not all were taken: the file is removed


def build(
    header: TraceHeader,
    entries: Iterable[Entry],
    output: Path,
    title: str | None = None,
    say: Callable[[str], None] = lambda message: None,
    progress: Callable[[str], None] = lambda message: None,
) -> Built:
    """Write the page ``output`` about a trace; one that is there is replaced in one step.

    Args:
        header, entries: of :func:`trailmark.trace.lines.read_trace`, or as a model reads; taken once.
        title: None: the names of the files that were read, and of the model.
        say: told what was written.
        progress: told often how many tokens were read and how fast.

    Raises:
        ValueError: an output that cannot be written, fewer than two chunks, none that read anything, or a trace that
            contradicts itself.
    """
    expect_page(output)
    first: tuple[int, float] | None = None  # what came before was loading

    def show(tokens: int) -> None:
        nonlocal first
        now = time.monotonic()
        first = first or (tokens, now)
        speed = f", {(tokens - first[0]) / (now - first[1]):,.0f} tokens/s" if now > first[1] else ""
        progress(f"{tokens:,} tokens read, with retrieval and without{speed}")

    document = collect(header, entries, show)
    progress(f"writing {output}")
    about = _about(header, document, title)
    written = page(about, document)
    write_text(output, written)
    size = output.stat().st_size
    loss, without = (about[name] / about["bearing"] for name in ("loss", "loss_without"))
    say(
        f"Loss with retrieval {loss:.4f} nats a token, without {without:.4f}: retrieval changed it by "
        f"{loss - without:+.4f}."
    )
    say(
        f"Page: {output} ({size / 1e6:,.1f} MB, {document.num_tokens:,} tokens in {document.num_chunks:,} chunks). "
        "Open it in a browser; it asks the network for nothing."
    )
    if size > _HEAVY:
        say(
            "Note: browsers open a page of this size slowly. Explore a part of the text, or each file by itself."
        )
    return Built(output, size, about, document)


def page(about: dict[str, Any], document: Document) -> str:
    """The whole HTML. The frame stands before the data: it is seen while the browser still reads those."""
    places, packed = pack(document.arrays)
    told = json.dumps(about | {"arrays": places}, allow_nan=False).replace("<", "\\u003c")
    bearing = max(1, about["bearing"])
    return render(
        "explorer.html",
        "explorer/page.css",
        SCRIPTS,
        title=about["title"],
        about=about,
        model=_model(about, "read_rest" in document.arrays),
        loss=about["loss"] / bearing,
        loss_without=about["loss_without"] / bearing,
        helped=about["helped"] / bearing,
        perplexity=_perplexity,
        groups=[(group, str(group)) for group in range(about["num_groups"])],
        weights=str(about["model"].get("weights_sha256", ""))[:12],
        told=Markup(told),
        data=Markup(packed),
    )


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):,.2f}" if loss <= math.log(MOST_PERPLEXITY) else f"beyond {MOST_PERPLEXITY:,}"


def _model(about: dict[str, Any], some: bool) -> str:
    """What the model is and how it reads; ``some``: a trace lists only the chunks that were read most."""
    groups, name, most = about["num_groups"], about["group_name"], about["num_retrieved_chunks"]
    many = f"{groups} {name}{'s' * (groups != 1)} that read{'s' * (groups == 1)}"
    if some:
        of = f"past chunks of {about['chunk_size']} tokens, of which the {most} with the largest weights are shown"
    else:
        of = f"up to {most} past chunks of {about['chunk_size']} tokens"
    parts = [str(about["model"].get("name", "a model")), f"{many} {of}"]
    if about["window"]:
        parts.append(f"a window of {count(about['window'])} positions")
    return "; ".join(parts) + "."


def _about(header: TraceHeader, document: Document, title: str | None) -> dict[str, Any]:
    """What the page says before its data are unpacked. No half of a character and no control character is in it."""
    own = vars(header) | {
        "title": title or _title(header, document),
        "tokens": document.num_tokens,
        "chunks": document.num_chunks,
        "sources": document.sources,
        "bearing": document.bearing,
        "loss": document.loss,
        "loss_without": document.loss_without,
        "helped": document.helped,
        "version": __version__,
        "date": datetime.date.today().isoformat(),
    }
    clean: dict[str, Any] = all_visible(own)
    return clean


def _title(header: TraceHeader, document: Document) -> str:
    names = [_short(own["name"]) for own in document.sources]
    model = _short(header.model.get("name", "a model"))
    if not names:
        return f"What {model} read"
    more = f" and {len(names) - _NAMES + 1} more files" if len(names) > _NAMES else ""
    shown = names[: _NAMES - 1] if more else names
    text = ", ".join(shown) + more if more else listed(shown)
    return f"{text}, read by {model}"


def _short(name: str) -> str:
    half = _NAME // 2  # both ends tell files apart
    return name if len(name) <= _NAME else f"{name[: half - 1]}…{name[-half:]}"
