"""What the landmarks of a DRT select, by its own scores, at random or as an encoder finds, and what is then read.

The chunks lie in a whole text or in a memory: two places, behind one interface.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trailmark.memory import MemoryEntries, Retrieved
from trailmark.models.candidates import (
    MemoryCandidates,
    TextCandidates,
    distinct_chunks,
    expect_selectable,
    no_selection,
)
from trailmark.models.context_parallel import ContextParallel
from trailmark.models.drt.config import DRTConfig
from trailmark.models.embedding import Given, Vectors, as_selection, expect_earlier, expect_selected
from trailmark.models.grid import Grid, Integers, lay_out
from trailmark.models.layered import Chunks
from trailmark.models.step import Step
from trailmark.ops import ChunkSelection, fold_seed, random_chunks


class Reading(NamedTuple):
    """What the chunks of a call read: K chunks each, out of a table."""

    grid: Grid  # of the chunks that read
    k: Tensor  # [B, M, S, J, D]
    v: Tensor
    indices: Tensor  # [B, N, K] into the table
    weights: Tensor  # [B, N, K]
    lengths: Tensor | None  # [B, M]; None: all S
    again: Any = None  # where later calls read the same, ReadAgain by set of heads; after of_set, of that one


def of_set(reading: Reading, number: int, heads: int) -> Reading:
    """Of keys and values of several sets of J heads, those of one."""
    reading = reading._replace(again=None if reading.again is None else reading.again[number])
    if reading.k.shape[-2] == heads:
        return reading
    own = slice(number * heads, (number + 1) * heads)
    return reading._replace(k=reading.k[..., own, :], v=reading.v[..., own, :])


class DRTChunks(Chunks):
    """Selects for each group in turn; ``noise_seed`` [B]: in training."""

    candidates: TextCandidates | MemoryCandidates

    def __init__(self, config: DRTConfig, noise_seed: Tensor | None = None) -> None:
        self.config, self.noise_seed = config, noise_seed
        self.scale = config.retrieval_scale * config.hidden_size**-0.5
        self.recency = config.retrieval_recency

    def _heads_of(self, group: int) -> slice:
        """The heads of a chunk's keys and values that a group reads."""
        if self.config.memory_kv == "shared":
            return slice(None)
        count = self.config.kv_per_group * self.config.num_key_value_heads
        return slice(group * count, (group + 1) * count)

    def select(self, group: int, query: Tensor | None) -> ChunkSelection:
        if query is None:
            return self._nearest
        seed = None if self.noise_seed is None else fold_seed(self.noise_seed, group)
        if self.config.retriever == "encoder":
            return self._score(query, self._nearest.indices, None)
        if self.config.retriever == "random":
            return self._score(query, self._draw(group, seed, len(query)), None)
        return self._score(query, None, seed if self.config.retrieval_noise else None)

    @property
    @abstractmethod
    def own(self) -> Tensor:
        """The learned landmark vectors of the chunks that ask, [B, C, E]."""

    @abstractmethod
    def _score(self, query: Tensor, indices: Tensor | None, noise_seed: Tensor | None) -> ChunkSelection:
        """What queries [B, C, E] score best, or chunks [B, C, K] weighed by their scores."""

    @property
    @abstractmethod
    def _nearest(self) -> ChunkSelection:
        """What the encoder finds, the same for all groups."""

    def _draw(self, group: int, seed: Tensor | None, rows: int) -> Tensor:
        """Chunks [B, C, K] at random; outside training (no seed) the same in every call, row and document."""
        candidates = self.candidates
        numbers, device = candidates.numbers(in_document=seed is None), candidates.limits.device
        if seed is None:
            seed = fold_seed(torch.zeros(rows, dtype=torch.int64, device=device), group)
        number = self.config.num_retrieved_chunks
        return random_chunks(number, candidates.limits, candidates.first, numbers, seed.to(device))


class TextChunks(DRTChunks):
    """The chunks of a whole text.

    Args:
        vectors: the encoder's, or what a caller gave in their place; None: there is no encoder. Where scores choose,
            what a caller gave is read whatever it scores.
        parallel: the processes that share the text, of which this one has the chunks of ``grid``; None: it has all.
    """

    candidates: TextCandidates

    def __init__(
        self,
        config: DRTConfig,
        grid: Grid,
        entries: MemoryEntries,
        vectors: Vectors | Given | None,
        noise_seed: Tensor | None = None,
        parallel: ContextParallel | None = None,
    ) -> None:
        super().__init__(config, noise_seed)
        self.grid, self.vectors, self.parallel = grid, vectors, parallel
        reference = config.implementation == "reference"
        device = entries.landmarks.device
        whole, begins, own = grid, 0, grid.num_closed
        if parallel is not None:
            tokens, begins = parallel.size * own * config.chunk_size, parallel.rank * own
            whole = lay_out(tokens, config.chunk_size, counts_landmarks=grid.counts_landmarks)
            entries = entries.each(parallel.gathered)
        self.entries, self._begins = entries, begins
        self.candidates = TextCandidates(whole, config.first_visible, reference, device, begins, own)
        self._queries: list[Tensor] = []

    def select(self, group: int, query: Tensor | None) -> ChunkSelection:
        if query is not None:
            self._queries.append(query)
        found = super().select(group, query)
        if query is None or not self.config.completes_neighbours or not isinstance(self.vectors, Given):
            return found
        given = self.vectors.indices.to(found.indices.device)
        return self._score(query, _with_given(found, given), None)

    @property
    def own(self) -> Tensor:
        return self.entries.landmarks[:, self._begins : self._begins + self.candidates.asking]

    def scores(self) -> tuple[Tensor, ...]:
        keys = self.entries.landmarks
        return tuple(self.candidates.scores(query, keys, self.scale, self.recency) for query in self._queries)

    def _score(self, query: Tensor, indices: Tensor | None, noise_seed: Tensor | None) -> ChunkSelection:
        K, keys = self.config.num_retrieved_chunks, self.entries.landmarks
        return self.candidates.select(query, keys, K, self.scale, indices, noise_seed, self.recency)

    @cached_property
    def _nearest(self) -> ChunkSelection:
        assert self.vectors is not None
        config, landmarks = self.config, self.entries.landmarks
        wide = torch.promote_types(landmarks.dtype, torch.float32)
        if isinstance(self.vectors, Given):
            return as_selection(self.vectors.to(landmarks.device), config.retrieval_scale, wide)
        queries, keys = (part.to(wide) for part in self.vectors)  # as a memory holds them
        return self.candidates.select(queries, keys, config.num_retrieved_chunks, config.retrieval_scale)

    def reading(self, group: int, selection: ChunkSelection) -> tuple[Any, ...]:
        """Each chunk reads what the landmark before it selected; the first, and the first of a document, nothing."""
        grid, entries, (B, _, K) = self.grid, self.entries, selection.indices.shape
        if self.parallel is None:
            before = selection.indices.new_full((B, 1, K), -1), selection.weights.new_zeros(B, 1, K)
        else:  # numbers are passed on as one more, so that none is 0
            last = selection.indices[:, -1:] + 1, selection.weights[:, -1:]
            before = self.parallel.from_previous(last[0]) - 1, self.parallel.from_previous(last[1])
        indices = torch.cat([before[0], selection.indices[:, : grid.num_chunks - 1]], dim=1)
        weights = torch.cat([before[1], selection.weights[:, : grid.num_chunks - 1]], dim=1)
        if (begins := grid.begins_document_on(indices.device)) is not None:
            indices, weights = indices.masked_fill(begins, -1), weights.masked_fill(begins, 0)
        lengths = entries.lengths if grid.has_short_chunks else None
        k, v = (x[..., self._heads_of(group), :] for x in (entries.k, entries.v))
        return Reading(grid, k, v, indices, weights, lengths)


class MemoryChunks(DRTChunks):
    """The chunks of a memory, those that the call closes included.

    Args:
        x: [B, P, E] any tensor of the call. first_chunk: int64 [B] number of the grid's first chunk.
        size: d of the encoder's vectors, which stand after the learned landmark vectors; 0: there are none.
    """

    candidates: MemoryCandidates

    def __init__(
        self, config: DRTConfig, grid: Grid, step: Step, first_chunk: Integers, x: Tensor, size: int
    ) -> None:
        super().__init__(config)
        self.grid, self.step, self.size = grid, step, size
        self.asks = grid.num_closed > 0
        if self.asks:
            self.candidates = MemoryCandidates(grid, step, first_chunk, config.first_visible, x.device)
        else:  # decoding, in the middle of a chunk
            self._nothing = no_selection(x, 0, config.num_retrieved_chunks)

    def select(self, group: int, query: Tensor | None) -> ChunkSelection:
        return super().select(group, query) if self.asks else self._nothing

    @property
    def own(self) -> Tensor:
        return self.candidates.own(slice(0, self.config.hidden_size))

    def _score(self, query: Tensor, indices: Tensor | None, noise_seed: Tensor | None) -> ChunkSelection:
        assert noise_seed is None  # in training there is no memory
        # beside an encoder's vectors, or alone
        own = slice(0, self.config.hidden_size) if self.size else None
        K = self.config.num_retrieved_chunks
        return self.candidates.select(query, own, K, self.scale, indices, self.recency)

    @cached_property
    def _nearest(self) -> ChunkSelection:
        config = self.config
        begin = config.hidden_size if config.scores_chunks else 0
        K, scale = config.num_retrieved_chunks, config.retrieval_scale
        return self.candidates.select_nearest(begin, self.size, K, scale)

    def reading(self, group: int, selection: ChunkSelection) -> tuple[Any, ...]:
        """Fetches what the chunks of the call read, and what the open chunk will in later calls."""
        step, grid = self.step, self.grid
        pending = step.take_pending(group, grid)
        if not self.asks:
            return self._reading_pending(pending)
        (B, _, K), N = selection.indices.shape, grid.num_chunks
        chosen = selection.indices.cpu().numpy()
        step.put_pending(group, grid, chosen, selection.weights, pending, self._heads_of(group))
        if N == 1:
            return self._reading_pending(pending)
        if pending is None:
            first = np.full((B, 1, K), -1), selection.weights.new_zeros(B, 1, K)
        else:
            first = pending.indices[:, None], pending.weights[:, None]
        wanted = np.concatenate([first[0], chosen[:, : N - 1]], axis=1)  # [B, N, K]
        weights = torch.cat([first[1], selection.weights[:, : N - 1]], dim=1)
        if (wanted < 0).all():
            return ()
        chunks, indices = distinct_chunks(wanted)  # what many landmarks chose is fetched once
        k, v, lengths = step.fetch(chunks, self._heads_of(group))
        short = torch.from_numpy(lengths).to(weights.device) if step.has_short(lengths) else None
        return Reading(grid, k, v, torch.from_numpy(indices).to(weights.device), weights, short)

    def _reading_pending(self, pending: Retrieved | None) -> tuple[Any, ...]:
        """What the open chunk reads: fetched already."""
        if pending is None:
            return ()
        weights = pending.weights[:, None]
        return Reading(self.grid, pending.k, pending.v, pending.slots, weights, pending.short, pending.again)


def with_vectors(config: DRTConfig, entries: MemoryEntries, vectors: Vectors | None) -> MemoryEntries:
    """With the encoder's vectors, a memory's landmark vectors are [B, C, E + 2d]: learned (or none), key, query.

    The query too: a later call may be the first that runs the upper layers on this chunk's landmark, and then its
    tokens are gone.
    """
    if vectors is None:
        return entries
    queries, keys = vectors
    own = entries.landmarks if config.scores_chunks else entries.landmarks[..., :0]
    return entries._replace(landmarks=torch.cat([own, keys, queries], dim=-1))  # of the widest dtype


def _with_given(found: ChunkSelection, given: Tensor) -> Tensor:
    """Chunks [B, C, K]: those given [B, C, n], n <= K, then the best of those found; ascending, -1 last.

    The best by their scores without noise: in training, noise has a part in what was found and none in what is kept.
    """
    again = (found.indices[..., :, None] == given[..., None, :]).any(-1)
    rest = found.scores.detach().masked_fill(again | (found.indices < 0), -torch.inf)
    first = torch.where(given >= 0, torch.inf, -torch.inf).to(rest)
    ranks, order = torch.cat([first, rest], -1).sort(dim=-1, descending=True, stable=True)
    K, none = found.indices.shape[-1], torch.iinfo(torch.int64).max
    chosen = torch.cat([given, found.indices], -1).gather(-1, order)[..., :K]
    chosen = chosen.masked_fill(ranks[..., :K] == -torch.inf, none).sort(-1).values
    return chosen.masked_fill(chosen == none, -1)


def expect_given(config: DRTConfig, given: Given, grid: Grid, rows: int) -> None:
    """Check that chunks given for the landmarks of a whole text are ones that these may select.

    Raises:
        ValueError: they are not, or cannot be read as they are.
    """
    K, completed = config.num_retrieved_chunks, config.completes_neighbours
    expect_selected(given, K, not config.scores_chunks, completed)
    expect_earlier(given, grid, rows)
    expect_selectable(given, grid, config.first_visible)
