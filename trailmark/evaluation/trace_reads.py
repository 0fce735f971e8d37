"""What chunks read, out of what a model's calls return as ``retrieval``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from trailmark.data.traces import Floats, Integers, Read
from trailmark.models import LandmarkForCausalLM
from trailmark.ops import ChunkSelection

NOTHING = Read(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
Chunks = tuple[tuple[Read, ...], ...]  # of each chunk, of each group


class Reads(Protocol):
    """Of one architecture. What is carried is of the chunks that have no line yet and of the one that opens next."""

    def begin(self) -> Chunks:
        """Before the first token."""

    def add(self, reads: Chunks, retrieval: Sequence[ChunkSelection], first_token: int, count: int) -> Chunks:
        """After a call that read so many tokens from that one on."""

    def finish(self, reads: tuple[Read, ...], length: int) -> tuple[Read, ...]:
        """Of a chunk of so many tokens, as its line says it."""


class SelectedReads:
    """A chunk reads what the end of the chunk before it selected: DRT (design, semantics 2) and RPT (RETRO's shift)."""

    def __init__(self, groups: int) -> None:
        self._groups = groups

    def begin(self) -> Chunks:
        return ((NOTHING,) * self._groups,)

    def add(self, reads: Chunks, retrieval: Sequence[ChunkSelection], first_token: int, count: int) -> Chunks:
        parts = [
            [x[0].cpu().numpy() for x in (chosen.indices, chosen.weights, chosen.scores)]
            for chosen in retrieval
        ]  # [N, K] each
        found = []
        for c in range(len(parts[0][0])):
            own = []
            for indices, weights, scores in parts:
                k = int((indices[c] >= 0).sum())  # -1 comes last
                own.append(Read(indices[c, :k], weights[c, :k], scores[c, :k]))
            found.append(tuple(own))
        return reads + tuple(found)

    def finish(self, reads: tuple[Read, ...], length: int) -> tuple[Read, ...]:
        return reads


class AveragedReads:
    """Landmark Attention: every token and head selects for itself, in every layer.

    Carried are sums of weights over a chunk's tokens and heads; a line has of each layer the K chunks with the largest
    means, and the mean weight of all others. Weights are of the chunks among each other: they sum to 1 where a token
    reads of the memory at all.
    """

    def __init__(self, layers: int, heads: int, num_retrieved: int, chunk_size: int) -> None:
        self._layers, self._heads, self._kept = layers, heads, num_retrieved
        self._chunk_size = chunk_size

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

    def _most(self, sums: Read, count: int) -> Read:
        means = sums.weights / count
        kept = np.sort(np.argsort(-means, kind="stable")[: self._kept])  # of equals the earlier chunk
        left = np.delete(means, kept)
        return Read(sums.chunks[kept], means[kept], None, float(left.sum()))


def _sums(rows: Integers, chunks: Integers, weights: Floats, count: int) -> list[Read]:
    """Of each of ``count`` rows the chunks, ascending, and the sum of their weights."""
    width = int(chunks.max(initial=0)) + 1
    keys, place = np.unique(rows * width + chunks, return_inverse=True)
    sums: Floats = np.bincount(place, weights, len(keys)).astype(np.float64)
    borders = np.searchsorted(keys, np.arange(count + 1) * width)
    return [Read(keys[a:b] % width, sums[a:b]) for a, b in itertools.pairwise(borders)]


def _merged(one: Read, other: Read) -> Read:
    chunks = np.concatenate([one.chunks, other.chunks])
    return _sums(np.zeros_like(chunks), chunks, np.concatenate([one.weights, other.weights]), 1)[0]


def reads_of(model: Any) -> Reads:
    """How to follow a model that retrieves."""
    config = model.config
    if isinstance(model, LandmarkForCausalLM):
        return AveragedReads(
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_retrieved_chunks,
            config.chunk_size,
        )
    return SelectedReads(getattr(config, "num_retrieval_groups", 1))
