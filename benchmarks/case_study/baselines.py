"""What else could have chosen the chunks: each rule ranks the same candidates for the same query, of text already read.

A chunk is read by what the chunk before it, the asking one, selects: the asking chunk's text is the query. Two rules
are marks more than rivals: one is told the text of the reading chunk itself, which nothing that reads left to right
could know; one asks nothing and takes what the model itself read most often before, which shows what asking adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trailmark.data.neighbours.bm25 import Bm25
from trailmark.data.neighbours.embedders import HashEmbedder
from trailmark.trace.lines import TracedChunk

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

RULES = {  # as tables name them
    "bm25": "BM25",  # asked with the asking chunk
    "bm25_two": "BM25, two chunks",  # asked with it and the chunk before
    "hash": "hashed bag",
    "recent": "most recent",
    "random": "random",  # what is expected
    "hubs": "most read before",
    "bm25_told": "BM25, told",  # asked with the reading chunk
}
_ROWS = 256  # queries at a time


class Rules:
    """Of one text.

    Args:
        chunks: of the trace, in order.
        statistics: BM25's, of the training text: those of this text would tell of what comes later.
        tokenizer: of the model.
    """

    def __init__(self, chunks: Sequence[TracedChunk], statistics: Bm25, tokenizer: Any) -> None:
        size = max(len(chunk.ids) for chunk in chunks)
        self.lengths = np.array([len(chunk.ids) for chunk in chunks], np.int64)
        self.ids = np.stack([np.pad(chunk.ids, (0, size - len(chunk.ids))) for chunk in chunks])
        self.reads = [
            sorted(set().union(*(read.chunks.tolist() for read in chunk.reads))) for chunk in chunks
        ]
        self.statistics = statistics
        self.vectors = HashEmbedder(tokenizer)(torch.from_numpy(self.ids), torch.from_numpy(self.lengths))[0]

    def scores(self, rule: str, reading: Integers) -> Floats:
        """[n, C] of all chunks, for chunks ``reading`` [n], each at least 1."""
        asking = reading - 1
        match rule:
            case "bm25":
                return self._bm25(self.ids[asking], self.lengths[asking])
            case "bm25_two":
                return self._bm25(*self._joined(asking))
            case "bm25_told":
                return self._bm25(self.ids[reading], self.lengths[reading])
            case "hash":
                return (self.vectors[asking].double() @ self.vectors.double().T).numpy()
            case "recent":
                return np.broadcast_to(
                    np.arange(len(self.ids), dtype=np.float64), (len(asking), len(self.ids))
                )
            case "hubs":
                return self._read_before(reading)
        raise ValueError(f"rule: expected one with scores of {', '.join(RULES)}, got {rule!r}.")

    def each(self, reading: Integers) -> Iterator[tuple[str, int, Floats]]:
        """Of each rule that has scores, each chunk of ``reading`` and its scores [C]: a few hundred at a time."""
        for rule in RULES:
            if rule == "random":
                continue
            for first in range(0, len(reading), _ROWS):
                rows = reading[first : first + _ROWS]
                for chunk, scores in zip(rows.tolist(), self.scores(rule, rows), strict=True):
                    yield rule, chunk, scores

    def _bm25(self, queries: Integers, lengths: Integers) -> Floats:
        return self.statistics.scores(self.ids, self.lengths, queries, lengths)

    def _read_before(self, reading: Integers) -> Floats:
        """How many of the chunks before each one of ``reading`` read each chunk."""
        counts, done = np.zeros((len(reading), len(self.ids))), 0
        times = np.zeros(len(self.ids))
        for row in np.argsort(reading, kind="stable"):
            while done < reading[row]:
                times[self.reads[done]] += 1
                done += 1
            counts[row] = times
        return counts

    def _joined(self, asking: Integers) -> tuple[Integers, Integers]:
        """The asking chunk and, if there is one, the chunk before it: tokens first, what stands past them last."""
        before = np.where(asking > 0, asking - 1, 0)
        lengths = np.where(asking > 0, self.lengths[before], 0)
        ids = np.zeros((len(asking), 2 * self.ids.shape[1]), np.int64)
        for row, (own, other, n) in enumerate(zip(asking, before, lengths, strict=True)):
            ids[row, :n] = self.ids[other, :n]
            ids[row, n : n + self.lengths[own]] = self.ids[own, : self.lengths[own]]
        return ids, lengths + self.lengths[asking]


def best_rank(scores: Floats, candidates: int, wanted: Sequence[int]) -> int | None:
    """From 0, of the best ranked of the chunks ``wanted`` among the first ``candidates``; None: none is among them.

    Ties: the earlier chunk, as everywhere.
    """
    allowed = scores[:candidates]
    ranks = [
        int((allowed > allowed[chunk]).sum() + (allowed[:chunk] == allowed[chunk]).sum())
        for chunk in wanted
        if chunk < candidates
    ]
    return min(ranks, default=None)


def chance(candidates: int, wanted: int, drawn: int) -> float:
    """That of ``drawn`` different candidates at least one is among ``wanted`` of them."""
    return 1 - comb(candidates - wanted, min(drawn, candidates)) / comb(candidates, min(drawn, candidates))
