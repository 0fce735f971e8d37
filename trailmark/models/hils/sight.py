"""How far each position of a call sees in its window, and which chunks lie beyond it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trailmark.models.grid import Grid, Integers
from trailmark.models.step import Step


class Sight(NamedTuple):
    """Of each position [b, P]; absent ones see themselves and no chunk."""

    windows: Integers  # positions that it sees, itself included
    candidates: Integers  # so many of the text's first chunks: those before its window
    first: Integers  # the first of them that is of its document

    @classmethod
    def of(cls, grid: Grid, window: int, step: Step | None = None) -> Sight:
        """The window of ``window`` positions, and on to the beginning of the chunk in which the last of them lies.

        Args:
            step: the call on a cache; None: a whole text.
        """
        present = grid.chunk >= 0
        B = len(grid.chunk) if step is None else len(step.end)
        number, chunk = (np.broadcast_to(x, (B, grid.num_positions)) for x in (grid.numbers, grid.chunk))
        starts = _chunk_starts(grid)
        if step is None:
            earlier, gone = np.zeros((B, 0), np.int64), np.zeros(B, np.int64)
        else:
            begin = (step.end - step.counts)[:, None]
            number, starts = number + begin, starts + begin
            # chunks have a token or more: with these, all that a window may reach
            earlier, gone = step.cache.memory.last_starts(step.before.memory, window + 1)
        edge = np.maximum(number - window + 1, 0 if step is not None else grid.document_starts)
        windows, candidates = np.ones_like(number), np.zeros_like(number)
        for b in range(B):
            known = np.concatenate([earlier[b][earlier[b] >= 0], starts[b if len(starts) > 1 else 0]])
            holds = np.searchsorted(known, edge[b], side="right") - 1
            windows[b] = number[b] - known[holds.clip(0)] + 1
            candidates[b] = gone[b] + holds.clip(0)
        # a saved memory may have been signed by a stranger, with other places of its chunks
        windows = windows.clip(1, window + (grid.chunk_size or 1) - 1)
        there = np.broadcast_to(present, number.shape)
        first = np.zeros_like(number)
        if grid.document is not None:
            first = np.take_along_axis(
                np.broadcast_to(grid.first_chunks, (B, grid.num_chunks)), chunk.clip(0), 1
            )
        return cls(np.where(there, windows, 1), np.where(there, candidates, 0), np.where(there, first, 0))

    def with_chunks(self, grid: Grid, known: Integers) -> Sight:
        """The same windows, and of each row the first ``known`` [B] chunks as candidates, those in sight too."""
        return self._replace(candidates=np.where(grid.chunk >= 0, known[:, None], 0))

    @classmethod
    def of_windows(cls, grid: Grid, window: int, step: Step | None = None) -> Sight:
        """The window of ``window`` positions and nothing beyond it; arguments as of :meth:`of`."""
        B = len(grid.chunk) if step is None else len(step.end)
        present = np.broadcast_to(grid.chunk >= 0, (B, grid.num_positions))
        none = np.zeros_like(present, dtype=np.int64)
        return cls(np.where(present, window, 1), none, none)


def _chunk_starts(grid: Grid) -> Integers:
    """[b, N] the number in the call of each chunk's first token, negative for one of an earlier call."""
    starts = np.full((len(grid.chunk), grid.num_chunks), 2**60)  # beyond all where a row has fewer
    row, place = np.nonzero(grid.chunk >= 0)
    np.minimum.at(starts, (row, grid.chunk[row, place]), grid.numbers[row, place])
    if grid.num_chunks:
        starts[:, 0] -= grid.phases
    return starts
