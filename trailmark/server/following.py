"""Which chunks a row's tokens read, out of what the model's calls return as ``retrieval``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trailmark.memory import ChunkCache
from trailmark.models.reads import NOTHING, Read
from trailmark.ops import ChunkSelection


@dataclass(frozen=True)
class Retrieved:
    """A chunk that was read."""

    group: int  # of a model that selects in every layer: the layer
    chunk: int  # counted from the text's first
    weight: float
    positions: tuple[int, int]  # of its tokens in the text: the first, and the one after the last


class Follower:
    """What one row reads from call to call.

    Args:
        model: a model; one that retrieves nothing reads nothing.
    """

    def __init__(self, model: Any) -> None:
        self._reads = model.follow_reads() if model.config.retrieves else None
        self._by_chunk = model.selects_by_chunk
        layouts = model.layouts
        self._counts_landmarks = layouts.landmarks and layouts.counts_landmarks
        self._now: tuple[Read, ...] = (NOTHING,) * (0 if self._reads is None else self._reads.num_groups)
        self._next: tuple[Retrieved, ...] = ()

    def branch(self) -> Follower:
        """Another row that goes on from here."""
        other = object.__new__(Follower)
        other.__dict__.update(self.__dict__)
        return other

    @property
    def follows(self) -> bool:
        """Whether it wants to know what is selected."""
        return self._reads is not None

    def after(
        self, retrieval: Sequence[ChunkSelection] | None, row: int, closed: int, count: int, cache: ChunkCache
    ) -> tuple[Retrieved, ...]:
        """What the last of ``count`` tokens of a call read; where tokens select for themselves, what all of them read.

        Args:
            retrieval: what the call selected, row by row. row: which of them is meant.
            closed: how many chunks the row closed in the call.
            cache: after the call.
        """
        if self._reads is None or retrieval is None:
            return ()
        if not self._by_chunk:
            own = [ChunkSelection(*(x[row : row + 1, :count] for x in chosen)) for chosen in retrieval]
            heard, self._now = self._reads.through(self._now, own, count)
            self._next = self._placed(heard, cache, row)
            return self._next
        state = cache.state
        assert state is not None
        # a chunk that the last token closes selects for the tokens after it
        before = closed - (1 if closed and not state.phases[row] else 0)
        shown = self._next
        for first, last in ((0, before), (before, closed)):
            if first < last:
                own = [
                    ChunkSelection(*(x[row : row + 1, first:last] for x in chosen)) for chosen in retrieval
                ]
                _, self._now = self._reads.through(self._now, own, count)
                self._next = self._placed(self._now, cache, row)
            if last == before:
                shown = self._next
        return shown

    def _placed(self, reads: tuple[Read, ...], cache: ChunkCache, row: int) -> tuple[Retrieved, ...]:
        state = cache.state
        assert state is not None
        held = int(state.memory.chunks[row])
        waits = state.phases[row] if state.cell is None else state.cell.counts[row]
        # a cell of a Landmark model with a bounded memory may have read what its own chunks have put out since
        if (first := int(cache.memory.first_chunk(state.memory)[row])) > 0:
            reads = tuple(
                replace(read, chunks=read.chunks[own], weights=read.weights[own])
                for read in reads
                for own in [read.chunks >= first]
            )
        chunks = np.concatenate([read.chunks for read in reads])
        # it ends where the next one begins; the one after the last, where what is not in memory does
        wanted = np.concatenate([chunks, chunks + 1])
        there = wanted < held
        starts = np.full(len(wanted), state.num_positions[row] - waits)
        starts[there] = cache.memory.starts(row, wanted[there])
        if self._counts_landmarks:
            starts -= wanted  # each chunk before it has a landmark, which is no token
        spans = zip(starts[: len(chunks)].tolist(), starts[len(chunks) :].tolist(), strict=True)
        return tuple(
            Retrieved(group, chunk, weight, next(spans))
            for group, read in enumerate(reads)
            for chunk, weight in zip(read.chunks.tolist(), read.weights.tolist(), strict=True)
        )
