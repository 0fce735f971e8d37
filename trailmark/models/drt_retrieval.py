"""What the landmarks of a DRT select: by its own scores, at random, or as an encoder from outside finds.

Chunks lie in a whole text or, in a call with a cache, in a memory; one code path selects among both.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trailmark.memory import MemoryEntries
from trailmark.models.candidates import expect_selectable, numbers_in_memory
from trailmark.models.configuration import DRTConfig
from trailmark.models.embedding import Given, as_selection, expect_earlier, expect_selected
from trailmark.models.grid import Grid, Integers
from trailmark.models.step import Step
from trailmark.ops import ChunkSelection, fold_seed, random_chunks, select_chunks

Vectors = tuple[Tensor, Tensor]  # queries and keys [B, C, d] of an encoder


class TextChunks:
    """The chunks of a whole text, each a candidate for the landmarks after it in its document.

    Args:
        landmarks: [B, C, E] landmark vectors.
        found: the encoder's vectors, or what a caller gave in their place; None: there is no encoder.
    """

    def __init__(
        self, config: DRTConfig, grid: Grid, landmarks: Tensor, found: Vectors | Given | None
    ) -> None:
        self.config, self.grid, self.landmarks, self.found = config, grid, landmarks, found
        self.limits = grid.candidates(config.first_visible, landmarks.device)
        self.first = grid.first_candidates(landmarks.device)

    def numbers(self, in_document: bool) -> Tensor:
        """[C] or [B, C] of the chunks that close, counted through the row or in their documents."""
        numbers = torch.arange(self.grid.num_closed, device=self.landmarks.device)
        return numbers - self.first if in_document else numbers

    def search(self, query: Tensor, noise_seed: Tensor | None) -> ChunkSelection:
        """Those that score best with queries [B, C, E]. Noise is drawn for pairs of chunks as the row counts them."""
        return self._select(query, self.landmarks, None, noise_seed, _scale(self.config))

    def weigh(self, query: Tensor, chosen: Tensor) -> ChunkSelection:
        """Chunks [B, C, K] weighed by their scores."""
        return self._select(query, self.landmarks, chosen, None, _scale(self.config))

    def nearest(self) -> ChunkSelection:
        """Those that the encoder finds, or found before."""
        assert self.found is not None
        wide = torch.promote_types(self.landmarks.dtype, torch.float32)
        if isinstance(self.found, Given):
            indices, scores = (x if x is None else x.to(self.landmarks.device) for x in self.found)
            assert indices is not None
            return as_selection(Given(indices, scores), self.config.retrieval_scale, wide)
        queries, keys = (part.to(wide) for part in self.found)  # as a memory holds them
        return self._select(queries, keys, None, None, self.config.retrieval_scale)

    def _select(
        self,
        query: Tensor,
        landmarks: Tensor,
        chosen: Tensor | None,
        noise_seed: Tensor | None,
        scale: float,
    ) -> ChunkSelection:
        return select_chunks(
            query,
            landmarks,
            self.config.num_retrieved_chunks,
            self.limits,
            self.first,
            chosen,
            noise_seed=noise_seed,
            scale=scale,
            implementation="reference" if self.config.implementation == "reference" else None,
        )


class MemoryChunks:
    """The chunks of a memory, for the landmarks that a call closes: chunks before each, of this call or earlier ones.

    Args:
        first_chunk: int64 [B] number of the grid's first chunk.
        size: d of the encoder's vectors, which stand after the learned landmark vectors; 0: there are none.
    """

    def __init__(
        self,
        config: DRTConfig,
        grid: Grid,
        step: Step,
        first_chunk: Integers,
        device: torch.device,
        size: int,
    ) -> None:
        self.config, self.grid, self.step, self.size = config, grid, step, size
        self.memory, self.num_chunks = step.cache.memory, int(step.size.chunks.max())
        self._numbers = first_chunk[:, None] + np.arange(grid.num_closed)  # as if every row closed as many
        self.device, self.first = device, 0
        limits = numbers_in_memory(step, grid, self._numbers, config.first_visible)
        self.limits = torch.from_numpy(limits).to(device)

    def numbers(self, in_document: bool) -> Tensor:
        """[B, C] of the chunks that close."""
        return torch.from_numpy(self._numbers).to(self.device)

    def search(self, query: Tensor, noise_seed: Tensor | None) -> ChunkSelection:
        """Those that score best with queries [B, C, E]."""
        assert noise_seed is None  # in training there is no memory
        rest = self.config.num_retrieved_chunks, self.limits, _scale(self.config)
        return self.memory.select(query, self.num_chunks, *rest)

    def weigh(self, query: Tensor, chosen: Tensor) -> ChunkSelection:
        """Chunks [B, C, K] weighed by their scores."""
        own = slice(0, self.config.hidden_size)
        return self.memory.weigh(query, self.num_chunks, chosen, _scale(self.config), own)

    def nearest(self) -> ChunkSelection:
        """Those that the encoder finds."""
        begin = self.config.hidden_size if self.config.scores_chunks else 0
        middle, end = begin + self.size, begin + 2 * self.size
        asking = self.numbers(False).clamp(max=self.num_chunks - 1)
        queries = self.memory.landmarks_of(asking, self.num_chunks, slice(middle, end))
        rest = self.config.num_retrieved_chunks, self.limits, self.config.retrieval_scale
        return self.memory.select(queries, self.num_chunks, *rest, slice(begin, middle))


class Selector:
    """Who selects, for each group in turn, among the chunks of a call; ``noise_seed`` [B]: in training."""

    def __init__(
        self, config: DRTConfig, chunks: TextChunks | MemoryChunks, noise_seed: Tensor | None = None
    ) -> None:
        self.config, self.chunks, self.noise_seed = config, chunks, noise_seed
        # for all groups
        self.found = chunks.nearest() if config.retriever == "encoder" else None

    def select(self, group: int, query: Tensor | None) -> ChunkSelection:
        """For queries [B, C, E] of the group's landmarks; None: of a model without scores of its own."""
        seed = None if self.noise_seed is None else fold_seed(self.noise_seed, group)
        if query is None:
            assert self.found is not None
            return self.found
        if self.found is not None:
            return self.chunks.weigh(query, self.found.indices)
        if self.config.retriever == "random":
            return self.chunks.weigh(query, self._draw(group, seed, len(query)))
        return self.chunks.search(query, seed if self.config.retrieval_noise else None)

    def _draw(self, group: int, seed: Tensor | None, rows: int) -> Tensor:
        """Chunks [B, C, K] at random; outside training (no seed) the same in every call, row and document."""
        chunks = self.chunks
        numbers, device = chunks.numbers(in_document=seed is None), chunks.limits.device
        if seed is None:
            seed = fold_seed(torch.zeros(rows, dtype=torch.int64, device=device), group)
        number = self.config.num_retrieved_chunks
        return random_chunks(number, chunks.limits, chunks.first, numbers, seed.to(device))


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


def expect_given(config: DRTConfig, given: Given, grid: Grid, rows: int) -> None:
    """That chunks given for the landmarks of a whole text are ones that these may select.

    Raises:
        ValueError: they are not, or cannot be read as they are.
    """
    expect_selected(given, config.num_retrieved_chunks, not config.scores_chunks)
    expect_earlier(given, grid, rows)
    expect_selectable(given, grid, config.first_visible)


def _scale(config: DRTConfig) -> float:
    return config.retrieval_scale * config.hidden_size**-0.5
