"""Traces: what each chunk of a text read of its past, and what each token cost with it and without. Format 1.

A trace is a file of JSON lines (docs/trace.md describes each field): first a header, then for each chunk, in order,
a line; before the chunk in which a file begins, a line that names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trailmark.models.reads import Floats, Integers, Read
from trailmark.settings import Settings, from_file, setting
from trailmark.untrusted import brief, open_regular, parse_json

FORMAT = 1
KIND = "trailmark trace"
BEGINNING = f'{{"kind":"{KIND}",'.encode()
"""Of every trace's file."""
_MOST_LINE = 256 << 20  # bytes: a chunk has some KiB
_MOST_NUMBER = (1 << 53) - 1  # a page's script counts so far


@dataclass(frozen=True)
class TraceHeader(Settings):
    """Of the whole trace."""

    model: dict[str, Any]
    """name, folder, architecture, parameters, weights_sha256 and what else identifies it."""
    num_groups: int = setting(least=1, most=1 << 16)
    """G of a DRT or an RPT; of Landmark Attention and HiLS the layers that read, each for itself."""
    chunk_size: int = setting(least=1, most=_MOST_NUMBER)
    num_retrieved_chunks: int = setting(least=0, most=_MOST_NUMBER)
    """K of each group; of Landmark Attention and HiLS per layer the chunks that a trace keeps, the most read ones."""
    group_name: str = setting("group", choices=("group", "layer"))
    """"group", or "layer"."""
    window: int | None = setting(None, least=1, most=_MOST_NUMBER)
    """Positions that self-attention sees; None: no such number."""
    settings: dict[str, Any] = field(default_factory=dict)
    """memory_dtype, fields of the configuration that were set for the reading, and the like."""
    environment: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TraceSource(Settings):
    """A file of the text; its tokens begin at ``first_token`` of the trace."""

    name: str
    first_token: int = setting(least=0, most=_MOST_NUMBER)
    path: str | None = None


@dataclass(frozen=True)
class TracedChunk:
    """One chunk of n tokens: the text of all chunks, joined, is the text that was read."""

    number: int
    first_token: int
    closed: bool  # False: the last one, if the text ends in it
    ids: Integers  # [n]
    text: str
    starts: Integers  # [n] characters of ``text`` before each token
    reads: tuple[Read, ...]  # of each group
    losses: Floats  # [n] nats; NaN where there is none: at a text's first token
    losses_without: Floats  # [n] of the same model with retrieval off


Entry = TraceSource | TracedChunk


# --- lines -------------------------------------------------------------------------------------------------


def encode(entry: TraceHeader | Entry) -> str:
    """A line of the file, with its end. Numbers are written as short as gives them back exactly."""
    if isinstance(entry, TraceHeader):
        about = {name: getattr(entry, name) for name in TraceHeader.__dataclass_fields__}
        return _line({"kind": KIND, "format": FORMAT} | about)
    if isinstance(entry, TraceSource):
        return _line({"source": entry.name, "first_token": entry.first_token, "path": entry.path})
    reads = []
    for read in entry.reads:
        own: dict[str, Any] = {"chunks": read.chunks.tolist(), "weights": _numbers(read.weights)}
        if read.scores is not None:
            own["scores"] = _numbers(read.scores)
        if read.rest is not None:
            own["rest"] = read.rest
        reads.append(own)
    return _line(
        {
            "chunk": entry.number,
            "first_token": entry.first_token,
            "closed": entry.closed,
            "ids": entry.ids.tolist(),
            "text": entry.text,
            "starts": entry.starts.tolist(),
            "reads": reads,
            "losses": _numbers(entry.losses),
            "losses_without": _numbers(entry.losses_without),
        }
    )


def _line(content: dict[str, Any]) -> str:
    # halves of characters (surrogates) are written as escapes: the file is UTF-8 whatever the text holds
    return json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n"


def _numbers(values: Floats) -> list[float | None]:
    """Of float32, the shortest decimals that are read back as the same float32; null where it is not a number."""
    # str of each, not astype(str): within that numpy loses a Ctrl-C
    found = list(map(float, map(str, values))) if values.dtype == np.float32 else values.tolist()
    if np.isfinite(values).all():
        return found
    if np.isinf(values).any():
        raise ValueError(
            "trace: expected finite numbers, got an infinite one. The model's weights are damaged."
        )
    return [None if value != value else value for value in found]


def decode(line: str) -> TraceHeader | Entry:
    """What :func:`encode` wrote.

    Raises:
        ValueError: something else.
    """
    try:
        content = parse_json(line, "it", finite=False)  # infinite numbers are refused where they are used
        if not isinstance(content, dict):
            raise ValueError("it is no object")
        if "chunk" in content:
            return _chunk(content)
        if "source" in content:
            return from_file(TraceSource, content | {"name": content["source"]})
        if content.get("kind") == KIND and content.get("format") == FORMAT:
            return from_file(TraceHeader, content)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        why = f"there is no {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise ValueError(f"trace: expected a line of a trace, got {line[:80]!r} ({why}).") from error
    if content.get("kind") == KIND:
        raise ValueError(
            f"trace: expected format {FORMAT}, got {brief(content.get('format'))}. Read it with the trailmark that "
            "wrote it, or write it anew."
        )
    raise ValueError(f"trace: expected a line of a trace, got {line[:80]!r}.")


_NUMBERS = {int, float, type(None)}


def _integers(content: dict[str, Any], name: str) -> Integers:
    values = content[name]
    if type(values) is not list or not set(map(type, values)) <= {int}:
        raise ValueError(f"{name} is no list of whole numbers")
    try:
        return np.array(values, np.int64)
    except OverflowError as error:
        raise ValueError(f"{name} holds a number of more than 64 bits") from error


def _floats(content: dict[str, Any], name: str) -> Floats:
    """NaN stands where null does."""
    values = content[name]
    if type(values) is not list or not set(map(type, values)) <= _NUMBERS:
        raise ValueError(f"{name} is no list of numbers")
    return np.array(values, np.float64)


def _chunk(content: dict[str, Any]) -> TracedChunk:
    for name, kind in (
        ("chunk", int),
        ("first_token", int),
        ("closed", bool),
        ("text", str),
        ("reads", list),
    ):
        if type(content[name]) is not kind:
            raise ValueError(f"{name} is {brief(content[name])}, no {kind.__name__}")
    reads = []
    for own in content["reads"]:
        if not isinstance(own, dict):
            raise ValueError(f"reads holds {brief(own)}, no object")
        rest = own.get("rest")
        if not {type(rest)} <= _NUMBERS:
            raise ValueError(f"rest is {brief(rest)}, no number")
        scores = _floats(own, "scores") if "scores" in own else None
        reads.append(Read(_integers(own, "chunks"), _floats(own, "weights"), scores, rest))
    found = TracedChunk(
        content["chunk"],
        content["first_token"],
        content["closed"],
        _integers(content, "ids"),
        content["text"],
        _integers(content, "starts"),
        tuple(reads),
        _floats(content, "losses"),
        _floats(content, "losses_without"),
    )
    n = len(found.ids)
    if any(len(part) != n for part in (found.starts, found.losses, found.losses_without)):
        raise ValueError(f"chunk {found.number} has {n} ids and another number of starts or losses")
    for read in reads:
        parts = (read.weights,) if read.scores is None else (read.weights, read.scores)
        if any(len(part) != len(read.chunks) for part in parts):
            raise ValueError(f"chunk {found.number} reads chunks and has another number of weights or scores")
    return found


def read_trace(path: Path) -> tuple[TraceHeader, Iterator[Entry]]:
    """A trace's header, and its other lines as they are asked for.

    Raises:
        ValueError: no such file, no trace, another format; while iterating: a broken line, or a chunk out of order.
    """
    try:
        file = open_regular(path, "trace", links=True)  # closed by the generator
    except FileNotFoundError as error:
        raise ValueError(
            f"trace: cannot read {str(path)!r}: {error.strerror}. Write one with: trailmark read MODEL TEXT --memory "
            "FOLDER --trace FILE"
        ) from error
    try:
        first = _entry(file.readline(_MOST_LINE), 1, path)
        if not isinstance(first, TraceHeader):
            raise ValueError(f"trace: expected {str(path)!r} to begin with a trace's header, it does not.")
    except BaseException:
        file.close()
        raise

    def entries() -> Iterator[Entry]:
        number = 1

        def lines() -> Iterator[TraceHeader | Entry]:
            nonlocal number
            for number, line in enumerate(iter(partial(file.readline, _MOST_LINE), b""), 2):
                yield _entry(line, number, path)

        with file:
            try:
                yield from in_order(first, lines())
            except Disorder as error:
                raise ValueError(f"{error} (line {number} of {path})") from error

    return first, entries()


class Disorder(ValueError):
    """A trace contradicts itself."""

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(f"trace: expected {expected}, got {got}. Write the trace anew.")


def in_order(header: TraceHeader, entries: Iterable[TraceHeader | Entry]) -> Iterator[Entry]:
    """The same entries, each of which is checked against those before it.

    Raises:
        Disorder: a second header, chunks or files out of order, or what another number of groups read.
    """
    count = tokens = source = 0
    for entry in entries:
        if isinstance(entry, TraceHeader):
            raise Disorder("one header, at the beginning", "another")
        if isinstance(entry, TraceSource):
            if entry.first_token < max(tokens, source):
                raise Disorder(
                    "files one after the other, each before the chunk in which it begins",
                    f"{entry.name!r} at token {entry.first_token} before the chunk at token {tokens}",
                )
            source = entry.first_token
        else:
            if (entry.number, entry.first_token) != (count, tokens):
                raise Disorder(
                    f"chunk {count} at token {tokens}", f"chunk {entry.number} at token {entry.first_token}"
                )
            if len(entry.reads) != header.num_groups:
                raise Disorder(
                    f"what {header.num_groups} groups read, as the header says",
                    f"{len(entry.reads)} in chunk {entry.number}",
                )
            count, tokens = count + 1, tokens + len(entry.ids)
        yield entry


def _entry(line: bytes, number: int, path: Path) -> TraceHeader | Entry:
    """A line of a file; a ValueError that says where it is broken."""
    try:
        try:
            return decode(line.decode())
        except UnicodeDecodeError as error:
            raise ValueError(f"trace: expected UTF-8, got something else ({error}).") from error
    except ValueError as error:
        unfinished = not line.endswith(b"\n")
        way_out = (
            " The file ends within this line: its reading was stopped, or is under way. Run the same trailmark read "
            "once more."
            if line and unfinished
            else ""
        )
        raise ValueError(f"{error} (line {number} of {path}){way_out}") from error


def write_lines(path: Path, entries: Iterable[TraceHeader | Entry]) -> None:
    """A whole trace at once."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(map(encode, entries))
