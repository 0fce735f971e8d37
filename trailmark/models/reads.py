"""What chunks read, out of what a model's calls return as ``retrieval``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trailmark.memory.tables import Integers
from trailmark.ops import ChunkSelection

Floats = npt.NDArray[np.floating[Any]]


class Selection(NamedTuple):
    """What one search selected."""

    group: int  # a model that selects anew in every layer: the layer
    chunks: list[int]
    weights: list[float]  # of each

    @classmethod
    def of(cls, group: int, indices: Tensor, weights: Tensor) -> Selection:
        """The chunks and weights, both [K], of which those with index -1 were not selected."""
        kept = [(m, w) for m, w in zip(indices.tolist(), weights.tolist(), strict=True) if m >= 0]
        return cls(group, [m for m, _ in kept], [w for _, w in kept])


class BeforeReading(NamedTuple):
    """How much of a text a model must have read before it can read anything of its past."""

    tokens: int
    in_words: str


@dataclass(frozen=True)
class Read:
    """What one group read in one chunk: k chunks, ascending; none where there was nothing to read."""

    chunks: Integers  # [k]
    weights: Floats  # [k]
    scores: Floats | None = None  # [k]; None where there is no one score, as in Landmark Attention
    rest: float | None = None  # weight of the chunks that are not listed; None: all are


NOTHING = Read(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
Chunks = tuple[tuple[Read, ...], ...]  # of each chunk, of each group


class Reads(Protocol):
    """Follows what the chunks of a text read, call by call.

    What is carried from call to call are the reads of the chunks that have no line yet and of the one that opens next.
    """

    group_name: str
    """What reads: "group", or "layer"."""
    num_groups: int
    settings: dict[str, Any]
    """Fields of the configuration that say what a read means."""

    def begin(self) -> Chunks:
        """The reads before the first token."""

    def add(self, reads: Chunks, retrieval: Sequence[ChunkSelection], first_token: int, count: int) -> Chunks:
        """The reads after a call that read ``count`` tokens from ``first_token`` on."""

    def finish(self, reads: tuple[Read, ...], length: int) -> tuple[Read, ...]:
        """The reads of a chunk of ``length`` tokens, as its line says them."""

    def through(
        self, now: tuple[Read, ...], retrieval: Sequence[ChunkSelection], count: int
    ) -> tuple[tuple[Read, ...], tuple[Read, ...]]:
        """What the first of ``count`` tokens of a call read, in a chunk that reads ``now``; and the chunk after them.

        Unlike :meth:`add` it asks nothing about where chunks lie: early landmarks may close them.
        """


class SelectedReads:
    """A chunk reads what the end of the chunk before it selected: DRT (guarantee 2) and RPT (RETRO's shift)."""

    group_name = "group"

    def __init__(self, num_groups: int, settings: dict[str, Any] | None = None) -> None:
        self.num_groups, self.settings = num_groups, settings or {}

    def begin(self) -> Chunks:
        return ((NOTHING,) * self.num_groups,)

    def add(self, reads: Chunks, retrieval: Sequence[ChunkSelection], first_token: int, count: int) -> Chunks:
        parts = [
            [x[0].cpu().numpy() for x in (chosen.indices, chosen.weights, chosen.scores)]
            for chosen in retrieval
        ]  # [N, K] each
        added = []
        for c in range(len(parts[0][0])):
            own = []
            for indices, weights, scores in parts:
                k = int((indices[c] >= 0).sum())  # -1 comes last
                own.append(Read(indices[c, :k], weights[c, :k], scores[c, :k]))
            added.append(tuple(own))
        return reads + tuple(added)

    def finish(self, reads: tuple[Read, ...], length: int) -> tuple[Read, ...]:
        return reads

    def through(
        self, now: tuple[Read, ...], retrieval: Sequence[ChunkSelection], count: int
    ) -> tuple[tuple[Read, ...], tuple[Read, ...]]:
        return now, self.add((now,), retrieval, 0, count)[-1]


class AveragedReads:
    """Landmark Attention, HiLS and HSA: every token and head selects for itself, in every layer or group.

    Sums of weights over a chunk's tokens and heads are carried; a line has for each layer the K chunks with the largest
    means, and the mean weight of all others. Weights are those of the chunks among each other: they sum to 1 where a
    token reads of the memory at all, of an HSA with stick-breaking to at most 1.
    """

    def __init__(
        self,
        groups: int,
        heads: int,
        num_retrieved: int,
        chunk_size: int,
        settings: Any,
        group_name: str = "layer",
    ) -> None:
        self.num_groups, self._heads, self._kept = groups, heads, num_retrieved
        self._chunk_size, self.settings, self.group_name = chunk_size, settings, group_name

    def begin(self) -> Chunks:
        return ()

    def add(self, reads: Chunks, retrieval: Sequence[ChunkSelection], first_token: int, count: int) -> Chunks:
        S = self._chunk_size
        first = first_token // S
        rows = (first_token + np.arange(count)) // S - first  # [T] chunk of each token
        layers = []
        for chosen in retrieval:
            indices = chosen.indices[0].flatten(1).cpu().numpy()  # [T, H K]
            weights = chosen.weights[0].flatten(1).cpu().double().numpy()
            t, at = np.nonzero(indices >= 0)
            layers.append(_sums(rows[t], indices[t, at], weights[t, at], int(rows[-1]) + 1))
        fresh = [tuple(own) for own in zip(*layers, strict=True)]
        if first_token % S:  # goes on with the chunk that is open
            merged = tuple(map(_merged, reads[-1], fresh[0]))
            return (*reads[:-1], merged, *fresh[1:])
        return (*reads, *fresh)

    def finish(self, reads: tuple[Read, ...], length: int) -> tuple[Read, ...]:
        return tuple(self._most(read, length * self._heads) for read in reads)

    def through(
        self, now: tuple[Read, ...], retrieval: Sequence[ChunkSelection], count: int
    ) -> tuple[tuple[Read, ...], tuple[Read, ...]]:
        by_chunk = self.add((), retrieval, 0, count)
        own = self.finish(
            tuple(functools.reduce(_merged, sums) for sums in zip(*by_chunk, strict=True)), count
        )
        return own, own

    def _most(self, sums: Read, count: int) -> Read:
        means = sums.weights / count
        kept = np.sort(np.argsort(-means, kind="stable")[: self._kept])  # of equals the earlier chunk
        left = np.delete(means, kept)
        return Read(sums.chunks[kept], means[kept], None, float(left.sum()))


def _sums(rows: Integers, chunks: Integers, weights: Floats, count: int) -> list[Read]:
    """For each of ``count`` rows the chunks, ascending, and the sum of their weights."""
    width = int(chunks.max(initial=0)) + 1
    keys, place = np.unique(rows * width + chunks, return_inverse=True)
    sums: Floats = np.bincount(place, weights, len(keys)).astype(np.float64)
    borders = np.searchsorted(keys, np.arange(count + 1) * width)
    return [Read(keys[a:b] % width, sums[a:b]) for a, b in itertools.pairwise(borders)]


def _merged(one: Read, other: Read) -> Read:
    chunks = np.concatenate([one.chunks, other.chunks])
    return _sums(np.zeros_like(chunks), chunks, np.concatenate([one.weights, other.weights]), 1)[0]
