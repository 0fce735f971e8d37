"""What the tokens of an HSA select and read, of a whole text or out of a memory, behind one interface."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trailmark.memory import ChunkMemory, MemoryEntries
from trailmark.memory.chunks import Rows
from trailmark.models.candidates import distinct_chunks, select_in_each
from trailmark.models.grid import Grid, Integers
from trailmark.models.hsa.config import HSAConfig
from trailmark.models.layered import Chunks
from trailmark.models.step import Step
from trailmark.ops import ChunkSelection, fold_seed, select_chunks, weigh_chunks

# Of a memory, positions read in slabs whose chunks have about this many numbers: a long call on a long memory would
# else fetch nearly all of it at once.
_FETCHED = 1 << 25


class Reading(NamedTuple):
    """What the positions of a slab read: K chunks each, out of a table."""

    k: Tensor  # [B, M, S, J, D]
    v: Tensor
    indices: Tensor  # [B, P, J, K] into the table, J of the heads that choose: 1 for all
    weights: Tensor  # [B, P, J, K]
    lengths: Tensor | None  # [B, M]; None: all S


class HSAChunks(Chunks):
    """Every position asks; its candidates are the chunks that closed before its own.

    Args:
        decays: of each group, what is added to a score for each chunk chosen that is more recent; None: nothing.
        limits: int64 [P] or [B, P] how many of a row's first chunks each position may select; 0 where it is absent.
    """

    def __init__(
        self, config: HSAConfig, decays: Sequence[Tensor | None], limits: Integers, device: torch.device
    ) -> None:
        self.config, self.decays = config, decays
        self.limits = torch.from_numpy(np.ascontiguousarray(limits)).to(device)

    def of_heads(self, x: Tensor) -> Tensor:
        """Queries or landmark vectors [B, n, d] of each head that chooses, [B, n, J, d / J]."""
        return x.unflatten(-1, (self.config.num_retrieval_heads, -1))

    def select(self, group: int, query: Tensor | None) -> ChunkSelection:
        """What each position selects, [B, P, J, K], by queries [B, P, d]."""
        assert query is not None
        found = self._find(group, query)
        weights = weigh_chunks(found.scores, self.config.chunk_weights, self.decays[group])
        return found._replace(weights=weights)

    def reading(self, group: int, selection: ChunkSelection) -> tuple[Any, ...]:
        """One iterator, over slabs of positions and what they read; see :meth:`_slabs`."""
        return (self._slabs(selection),)

    @abstractmethod
    def _find(self, group: int, query: Tensor) -> ChunkSelection:
        """``select`` with other weights."""

    @abstractmethod
    def _slabs(self, selection: ChunkSelection) -> Iterator[tuple[slice, tuple[Any, ...]]]:
        """Positions of a call, and the Reading of these; empty: they read nothing."""


class TextChunks(HSAChunks):
    """The chunks of a whole text; ``noise_seed`` [B]: in training."""

    def __init__(
        self,
        config: HSAConfig,
        decays: Sequence[Tensor | None],
        grid: Grid,
        entries: MemoryEntries,
        noise_seed: Tensor | None = None,
    ) -> None:
        limits = grid.chunk.clip(0)
        super().__init__(config, decays, limits if len(limits) > 1 else limits[0], entries.landmarks.device)
        self.grid, self.entries, self.noise_seed = grid, entries, noise_seed
        self.first: Tensor | int = 0
        if grid.document is not None:
            first = np.take_along_axis(grid.first_chunks, grid.chunk.clip(0), 1)
            self.first = torch.from_numpy(first).expand(len(entries.k), -1).to(self.limits.device)

    def _find(self, group: int, query: Tensor) -> ChunkSelection:
        config, seed = self.config, self.noise_seed
        if seed is not None:
            seed = fold_seed(seed, group) if config.retrieval_noise else None
        return select_chunks(
            self.of_heads(query),
            self.of_heads(self.entries.landmarks),
            config.num_retrieved_chunks,
            self.limits,
            self.first,
            noise_seed=seed,
            scale=config.score_scale,
            implementation="reference" if config.implementation == "reference" else None,
        )

    def _slabs(self, selection: ChunkSelection) -> Iterator[tuple[slice, tuple[Any, ...]]]:
        entries = self.entries
        lengths = entries.lengths if self.grid.has_short_chunks else None
        yield slice(None), Reading(entries.k, entries.v, selection.indices, selection.weights, lengths)


class MemoryChunks(HSAChunks):
    """The chunks of a memory, those that the call closes included.

    Args:
        first_chunk: int64 [B] number of the grid's first chunk.
    """

    def __init__(
        self,
        config: HSAConfig,
        decays: Sequence[Tensor | None],
        grid: Grid,
        step: Step,
        first_chunk: Integers,
        device: torch.device,
    ) -> None:
        limits = np.where(grid.chunk >= 0, first_chunk[:, None] + grid.chunk, 0)
        super().__init__(config, decays, limits, device)
        self.step = step

    def _find(self, group: int, query: Tensor) -> ChunkSelection:
        config, K = self.config, self.config.num_retrieved_chunks
        scale = config.score_scale

        def search(rows: Rows, memory: ChunkMemory, blocks: list[Tensor]) -> ChunkSelection:
            asked, limits = query[rows], self.limits[rows]
            blocks = blocks or [asked[:, :0]]
            if config.num_retrieval_heads == 1:  # as indexes know them
                found = memory.search.select(asked, blocks, K, limits, scale)
                return ChunkSelection(*(x[:, :, None] for x in found))
            return memory.search.select(
                self.of_heads(asked), [self.of_heads(x) for x in blocks], K, limits, scale
            )

        memory, shape = self.step.cache.memory, (query.shape[1], config.num_retrieval_heads, K)
        return select_in_each(memory, self.step.size, self.limits, shape, query, search)

    def _slabs(self, selection: ChunkSelection) -> Iterator[tuple[slice, tuple[Any, ...]]]:
        config, (B, P, J, K) = self.config, selection.indices.shape
        record = 2 * config.num_memory_heads * config.chunk_size * config.head_dim
        size = max(1, _FETCHED // max(1, B * J * K * record))
        for first in range(0, max(P, 1), size):
            columns = slice(first, min(first + size, P))
            yield columns, self._fetched(selection.indices[:, columns], selection.weights[:, columns])

    def _fetched(self, indices: Tensor, weights: Tensor) -> tuple[Any, ...]:
        """A table of the chunks [B, p, J, K] that some positions chose."""
        chosen = indices.cpu().numpy()
        if (chosen < 0).all():
            return ()
        if chosen.shape[1] == 1:
            # a table of what each head chose, however many did: shapes depend on nothing else
            chunks = chosen.reshape(len(chosen), -1)
            place = np.arange(chunks.shape[1]).reshape(1, 1, *chosen.shape[2:])
            places = np.where(chosen < 0, -1, place)
        else:
            chunks, places = distinct_chunks(chosen)  # what many chose is fetched once
        k, v, lengths = self.step.fetch(chunks)
        short = torch.from_numpy(lengths).to(weights.device) if self.step.has_short(lengths) else None
        return Reading(k, v, torch.from_numpy(places).to(weights.device), weights, short)
