"""A text that is read from several places on at once: exact where a memory depends on windows alone.

What the layers below the memory make of a token depends on the few tokens before it that their windows pass on. A
reading that begins so many tokens early therefore keeps what one from the text's beginning does, bit for bit where its
pieces are the same and windows are full.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from trailmark.memory import CacheState, ChunkCache
from trailmark.memory.chunks import MemorySize


def expect_partable(model: Any) -> None:
    """Raise a ValueError where a memory depends on more than windows."""
    config = model.config
    if config.retrieves and model.can_be_planted:
        return
    if not config.retrieves:
        raise ValueError(
            f"model: expected one with a memory of chunks for several processes, got {type(model).__name__} without: "
            "only the end of a text is left of it. Read it with one process."
        )
    raise ValueError(
        f"model: expected one whose memory depends on windows alone (DRT, HSA, RPT, a HiLS with reading 'windows') for "
        f"several processes, got {type(model).__name__}: what it keeps of a chunk depends on all that it read before. "
        "Read each document into a memory of its own, with one process each."
    )


def tokens_of_windows(model: Any) -> int:
    """How many tokens, whole chunks, are read until what windows carry has the shapes that it has from there on.

    Rows of other shapes may round otherwise: before that, what is read is equal, and not bit for bit.
    """
    size: int = model.config.chunk_size
    return -(-max(window for window in model.config.windows if window is not None) // size) * size


def tokens_before_chunks(model: Any) -> int:
    """How many tokens before a chunk are read for what the memory keeps of it."""
    size: int = model.config.chunk_size
    return (int(model.encoding_reach()) + 1) * size


def tokens_before_end(model: Any) -> int:
    """How many of a text's last tokens are read for all but the memory that a cache carries on from it."""
    config = model.config
    windows = sum(window for window in config.windows if window is not None)
    return tokens_before_chunks(model) + max(windows, model.reach() or 0) + 2 * int(config.chunk_size)


def begin_at(cache: ChunkCache, num_tokens: int, config: Any, beginning: ChunkCache | None) -> None:
    """Let an empty cache go on after ``num_tokens`` of a text, whole chunks, of which it knows the sinks alone.

    Chunks that it reads are numbered from there.

    Args:
        config: of its model.
        beginning: what has read the text's sinks, where the model has some.
    """
    if num_tokens == 0:
        return
    assert num_tokens % config.chunk_size == 0
    begun = (cache if beginning is None else beginning.branch()).begun(1)
    marks = num_tokens // config.chunk_size * int(config.counts_landmarks)
    cache.state = replace(
        begun,
        num_tokens=np.array([num_tokens]),
        num_positions=np.array([num_tokens + marks]),
        phases=np.zeros(1, np.int64),
        memory=MemorySize(np.zeros(1, np.int64), 0),
        open_states=None,
        open_ids=None,
        deferred=None,
    )


def keep_from_here(cache: ChunkCache, empty: ChunkCache) -> None:
    """Forget the chunks that were read so far: what follows goes into the memory of ``empty``."""
    cache.memory = empty.memory
    cache.state = replace(cache.begun(1), memory=MemorySize(np.zeros(1, np.int64), 0))


def carried_on(end: CacheState, size: MemorySize) -> CacheState:
    """What a cache whose memory holds a whole text's chunks carries on from one that has read its end."""
    waiting = end.deferred
    if waiting is not None:
        waiting = waiting._replace(first_chunk=size.chunks - waiting.is_landmark.sum(1))
    # who reads from the first token on has seen all of it
    spans = tuple(span._replace(start=np.zeros_like(span.start)) for span in end.spans)
    return replace(end, memory=size, deferred=waiting, spans=spans)
