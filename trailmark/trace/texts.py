"""Tracing texts: what each chunk reads of its past, and what each token costs with that and without (docs/trace.md)."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trailmark.data.corpus import Tokens, text_pieces, text_tokens
from trailmark.settings import Settings, coerce, setting
from trailmark.trace.lines import Entry, TraceHeader, TraceSource
from trailmark.trace.tracer import Subject, Tracer, expect_choice, expect_retrieval

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Source(Settings):
    """What the notes of a memory say of a file that was read into it."""

    path: str
    tokens: int = setting(least=0)
    """That were read."""
    sha256: str = setting()
    """Of these tokens."""
    done: bool = setting()
    """Whether they are all of the file."""
    file_sha256: str | None = None
    """Of the file's bytes, once all of it was read; older memories do not say it."""


def sources_of(notes: dict[str, Any], memory: Path) -> list[dict[str, Any]]:
    """The notes of each file that a memory holds, which are added to as more are read.

    Raises:
        ValueError: they are none.
    """
    found = notes.setdefault("sources", [])
    try:
        coerce("sources", found, list[Source])
    except ValueError as error:
        raise ValueError(
            f"memory: expected the notes of trailmark read in {str(memory)!r}, got others "
            f"({str(error).rstrip('.')}). Read the text again, into another memory."
        ) from error
    assert isinstance(found, list)
    return found


def trace_header(subject: Subject, memory_dtype: torch.dtype | None) -> TraceHeader:
    """What a trace says of the model; ``memory_dtype`` of keys and values in memory, None: the model's.

    Without a date: the same reading gives the same trace.
    """
    model = subject.model
    config = model.config
    reads = model.follow_reads()
    dtype = str(memory_dtype or model.dtype).removeprefix("torch.")
    here = subject.environment()
    del here["date"]
    return TraceHeader(
        subject.identity(),
        reads.num_groups,
        config.chunk_size,
        config.num_retrieved_chunks,
        reads.group_name,
        config.sliding_window,
        {"memory_dtype": dtype} | reads.settings,
        here,
    )


def trace_texts(
    subject: Subject,
    files: Sequence[Path],
    progress: Progress = lambda tokens: None,
    memory_dtype: torch.dtype | None = None,
) -> tuple[TraceHeader, Iterator[Entry]]:
    """Read files one after the other, as one text, and say what each chunk read.

    Args:
        progress: called with the tokens read so far, after each piece of a few thousand.
        memory_dtype: of keys and values in memory; None: the model's.

    Returns:
        The header, and the other lines of a trace, as the text is read: memory stays constant beside the model's.

    Raises:
        ValueError: a model that retrieves nothing, files that are not there or no text, a text in which nothing can
            be retrieved; while iterating: an error that only shows further on in a file.
    """
    expect_retrieval(subject)
    if not files:
        raise ValueError("files: expected at least one text file, got none.")
    parts = _file_tokens(subject, files)
    # the beginning is read ahead, so that a text that is too short is known at once
    (needed, in_words), ahead = subject.model.before_reading(), []
    tokens = 0
    for part in parts:
        ahead.append(part)
        tokens += len(part[1])
        if tokens > needed:
            break
    else:
        raise ValueError(
            f"text: expected more than {needed:,} tokens, got {tokens:,} in {', '.join(map(str, files))}: the model "
            f"can read nothing of its past before it has read {in_words}. Choose a longer text."
        )
    every = itertools.chain(ahead, parts)
    return trace_header(subject, memory_dtype), _traced(subject, every, progress, memory_dtype)


def trace_memory(
    subject: Subject, memory: Path, progress: Progress = lambda tokens: None
) -> tuple[TraceHeader, Iterator[Entry]]:
    """The trace of the texts that a memory of ``trailmark read`` holds, which are read again.

    Their tokens are compared with what was read before any of them is read again; keys and values are of the memory's
    type.

    Raises:
        ValueError: as :func:`trace_texts`; no memory, another model's, one without its texts (not made by
            ``trailmark read``), or whose files are gone or have changed since.
    """
    expect_retrieval(subject)
    expect_choice(subject)
    cache = subject.model.load_cache(memory)
    dtype, tier = cache.memory.dtype, "tokens" if cache.memory.keeps_tokens else "host"
    sources = sources_of(cache.notes, memory)
    if not sources or sum(source["tokens"] for source in sources) != cache.get_seq_length():
        raise ValueError(
            f"memory: expected one that trailmark read made, which names its files, {str(memory)!r} does not: its text "
            "is not known. Name the text's files instead of the memory."
        )
    del cache
    for number, source in enumerate(sources):
        _expect_unchanged(subject, source, memory, () if number else subject.beginning)
    paths = [Path(source["path"]) for source in sources]
    tokens = sum(source["tokens"] for source in sources)
    needed, in_words = subject.model.before_reading()
    if tokens <= needed:
        raise ValueError(
            f"memory: expected more than {needed:,} tokens, {str(memory)!r} holds {tokens:,}: the model can read "
            f"nothing of its past before it has read {in_words}. Read a longer text."
        )
    limits = [source["tokens"] for source in sources]
    parts = _file_tokens(subject, paths, limits)
    return trace_header(subject, dtype), _traced(subject, parts, progress, dtype, tier)


def _traced(
    subject: Subject,
    parts: Iterator[tuple[Path | None, Tokens]],
    progress: Progress,
    memory_dtype: torch.dtype | None,
    tier: str = "host",
) -> Iterator[Entry]:
    """Parts of files, each with the file's path where it is the first of one."""
    # on a GPU keys and values of a long text wait in RAM
    tracer = Tracer(subject, subject.model.new_cache(tier, memory_dtype=memory_dtype))
    for path, tokens in parts:
        source = None if path is None else source_of(path, tracer.moment.tokens)
        for piece in tracer.pieces(tokens):
            tracer.feed(piece, source)
            source = None
            yield from tracer.take()
            progress(tracer.moment.tokens)
    yield from tracer.rest()


def source_of(path: Path, first_token: int) -> TraceSource:
    """A file whose tokens begin there."""
    return TraceSource(path.name, first_token, os.path.realpath(path))


def _file_tokens(
    subject: Subject, files: Sequence[Path], limits: Sequence[int] | None = None
) -> Iterator[tuple[Path | None, Tokens]]:
    """The tokens of files, of each at most as many as ``limits`` says, in parts as ``trailmark read`` takes them."""
    for number, path in enumerate(files):
        name: Path | None = path
        left = None if limits is None else limits[number]
        for whole in file_tokens(path, subject.tokenizer, () if number else subject.beginning):
            tokens = whole[:left]
            if len(tokens):
                yield name, tokens
                name = None
            if left is not None:
                left -= len(tokens)
                if not left:
                    break


def file_tokens(
    path: Path, tokenizer: Any, begin: Sequence[int] = (), look: Callable[[bytes], None] | None = None
) -> Iterator[Tokens]:
    """The tokens of a file, piece by piece, as a memory holds them: text alone, no control token.

    Args:
        begin: tokens before it, of a memory's first file what begins a text.
        look: see :func:`~trailmark.data.corpus.text_pieces`.
    """
    for text in text_pieces(path, look=look):
        tokens = text_tokens(text, tokenizer)
        yield np.concatenate([np.asarray(begin, np.int32), tokens]) if begin else tokens
        begin = ()


def tokens_after(
    path: Path,
    tokenizer: Any,
    source: Mapping[str, Any],
    digest: Any,
    argument: str,
    way_out: str,
    look: Callable[[bytes], None] | None = None,
    begin: Sequence[int] = (),
) -> Iterator[Tokens]:
    """The tokens of a file after those that were read, if those are still its beginning.

    Args:
        source: what a memory's notes say of the file: "tokens" that were read, and "sha256" of them.
        digest: a fresh SHA-256; the tokens that were read before are added to it.
        argument, way_out: of the error.
        look, begin: see :func:`file_tokens`.

    Raises:
        ValueError: the file does not begin with the tokens that were read.
    """
    count = skip = source["tokens"]
    changed = (
        f"{argument}: expected {str(path)!r} as it was when its first {count:,} tokens were read, "
        "it has changed since"
    )
    for tokens in file_tokens(path, tokenizer, begin, look):
        if skip:
            known, tokens = tokens[:skip], tokens[skip:]
            digest.update(known.tobytes())
            skip -= len(known)
            if not skip and digest.hexdigest() != source["sha256"]:
                raise ValueError(f"{changed}. {way_out}")
        if len(tokens):
            yield tokens
    if skip:
        raise ValueError(f"{changed}: it has {skip:,} fewer now. {way_out}")


def _expect_unchanged(
    subject: Subject, source: Mapping[str, Any], memory: Path, begin: Sequence[int]
) -> None:
    """A ValueError where a file does not begin with what a memory holds of it."""
    path = Path(source["path"])
    way_out = "Bring it back as it was, or read the text anew into another memory."
    if not path.is_file():
        raise ValueError(
            f"memory: expected the file {str(path)!r}, which {str(memory)!r} holds, it is gone. {way_out}"
        )
    for _ in tokens_after(path, subject.tokenizer, source, hashlib.sha256(), "memory", way_out, begin=begin):
        break
