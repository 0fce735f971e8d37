"""What an RPT reads: neighbours of the chunks of a whole text, or out of a memory, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trailmark.memory import Retrieved
from trailmark.models.candidates import MemoryCandidates, TextCandidates, no_selection
from trailmark.models.embedding import Given, Vectors, as_selection
from trailmark.models.grid import Booleans, Grid, Integers
from trailmark.models.layered import Chunks
from trailmark.models.rpt.config import RPTConfig
from trailmark.models.rpt.neighbours import Readers
from trailmark.models.rpt.ranking import Ranking, best_candidates
from trailmark.models.step import Step
from trailmark.ops import ChunkSelection, select_chunks

# rows of neighbours [B, C, K, L, E], which exist, rows [B, C, S, E] of the chunks that ask, which exist
Prepare = Callable[[Tensor, Tensor | None, Tensor, Tensor | None], Tensor]


class TextChunks(Chunks):
    """The chunks of a whole text.

    Args:
        x: [B, P, E] any tensor of the call. states: [B, C, S, E] of the chunks that close, and which of their rows
            exist, bool [B, C, S]; None: all.
        vectors: their queries and keys [B, C, d]; None: the chunks to read are ``given``.
        prepare: what neighbours go through before they are read; None: nothing.
        ranking: how chunks are learned to be ranked, in training.
        noise_seed: int64 [B] in training.
    """

    def __init__(
        self,
        config: RPTConfig,
        grid: Grid,
        x: Tensor,
        states: tuple[Tensor, Tensor | None],
        vectors: Vectors | None,
        given: Given | None,
        prepare: Prepare | None,
        ranking: Ranking,
        noise_seed: Tensor | None,
    ) -> None:
        self.config, self.x, self.vectors, self.given = config, x, vectors, given
        self.states, self.present = states
        self.prepare, self.rank, self.noise_seed = prepare, ranking, noise_seed
        self.readers = Readers.of(grid)
        self.scale = retrieval_scale(config)
        reference = config.implementation == "reference"
        self.candidates = TextCandidates(grid, config.first_visible, reference, x.device)

    def select(self, group: int, query: Tensor | None) -> ChunkSelection:
        """For each chunk, chunks of its document before it; sets ``ranking`` where candidates are given with scores."""
        K, given, scale = self.config.num_retrieved_chunks, self.given, self.scale
        if self.vectors is None:
            assert given is not None
            return as_selection(given, 1.0, torch.promote_types(self.x.dtype, torch.float32))
        queries, keys = self.vectors
        selection = self.candidates.select(queries, keys, K, scale)
        if given is None:
            return selection
        limits, count = self.candidates.limits, given.indices.shape[2]
        scores = select_chunks(queries, keys, count, limits, indices=given.indices, scale=scale).scores
        self.ranking = self.rank.loss(scores, given)
        if self.noise_seed is None:
            return selection
        gold = self.rank.reads_gold(self.noise_seed)[:, None, None]
        chosen = torch.where(gold, best_candidates(given, K), selection.indices)
        return select_chunks(queries, keys, K, limits, indices=chosen, scale=scale)

    def reading(self, group: int, selection: ChunkSelection) -> tuple[Any, ...]:
        chosen, states, present = selection.indices, self.states, self.present
        B, C, K = chosen.shape
        if not C:
            return self._nothing_closed(chosen)
        rows, exist = states, present
        if self.config.continuation:
            rows = _with_next(states)
            exist = None if present is None else _with_next(present)
        if self.prepare is None:
            return self._of_table(self.readers.take(chosen), rows, exist)
        first = torch.arange(B, device=chosen.device)[:, None, None] * C
        flat = (chosen.clamp(min=0) + first).flatten()
        pairs = rows.flatten(0, 1).index_select(0, flat).view(B, C, K, *rows.shape[2:])
        if exist is not None:
            exist = exist.flatten(0, 1).index_select(0, flat).view(B, C, K, -1)
        pairs = self.prepare(pairs, exist, states, present)
        place = torch.arange(C * K, device=chosen.device).view(C, K)
        indices = self.readers.take(torch.where(chosen < 0, -1, place))
        return self._of_table(indices, pairs.flatten(1, 2), None if exist is None else exist.flatten(1, 2))

    def _nothing_closed(self, chosen: Tensor) -> tuple[Any, ...]:
        """A table of one chunk that nothing reads: its projections too get zeros for gradients."""
        B, _, S, E = self.states.shape
        rows = self.states.new_zeros(B, 1, S * (2 if self.config.continuation else 1), E)
        zero = self.states.sum()
        if self.prepare is not None:
            rows = self.prepare(rows[:, :, None], None, self.states.new_zeros(B, 1, S, E), None)[:, :, 0]
        return self._of_table(self.readers.take(chosen), rows + zero, None)

    def _of_table(self, indices: Tensor, rows: Tensor, present: Tensor | None) -> tuple[Any, ...]:
        return self.readers.reading(self.config, self.x, indices, rows, present)


class _Part(NamedTuple):
    """Some neighbours, ready to be read."""

    k: Tensor  # [B, K, L, n J, D], of the n layers that read
    v: Tensor
    present: Tensor | None  # bool [B, K, L] rows that exist; None: all


class MemoryChunks(Chunks):
    """The chunks of a memory, those that the call closes included.

    Args:
        x: [B, P, E] any tensor of the call: its rows, dtype and device. size: d of a query or a key.
        first_chunk: int64 [B] number of the grid's first chunk.
        prepare: what neighbours go through before they are read; None: nothing.
        project: rows [B, K, L, E] to keys and values [B, K, L, n J, D] of the n layers that read.
    """

    def __init__(
        self,
        config: RPTConfig,
        grid: Grid,
        step: Step,
        first_chunk: Integers,
        x: Tensor,
        size: int,
        prepare: Prepare | None,
        project: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> None:
        self.config, self.grid, self.step, self.size = config, grid, step, size
        self.S, self.K = config.chunk_size, config.num_retrieved_chunks
        self.parts = 2 if config.continuation else 1  # chunks of a neighbour
        self.x, self.dtype, self.device = x, x.dtype, x.device
        self.prepare, self.project = prepare, project
        self.readers = Readers.of(grid)
        self.asks = grid.num_closed > 0
        if self.asks:
            self.candidates = MemoryCandidates(grid, step, first_chunk, config.first_visible, x.device)

    def select(self, group: int, query: Tensor | None) -> ChunkSelection:
        if not self.asks:  # decoding, in the middle of a chunk
            return no_selection(self.x, 0, self.K)
        return self.candidates.select_nearest(0, self.size, self.K, retrieval_scale(self.config))

    def reading(self, group: int, selection: ChunkSelection) -> tuple[Any, ...]:
        """What the groups of the call read; and, left for later calls, what the chunk that stays open will.

        The table: what earlier calls left for the first group; what each row's last chunk selected, which is left for
        the next call with the keys and values of every layer; what the others selected.
        """
        if not self.asks:
            return self._reading_left()
        grid, asking, chosen = self.grid, self.candidates.asking, selection.indices.cpu().numpy()
        pending = self.step.take_pending(0, grid)
        B, C, K = chosen.shape
        row, last = np.arange(B), np.zeros(B, np.int64) + grid.closed - 1  # [B]; -1: none was closed
        is_last = np.arange(C) == last[:, None]  # [B, C]
        newest = np.where((last >= 0)[:, None], chosen[row, last.clip(0)], -1)  # [B, K]
        rows, present, lengths = self._fetch(newest[:, None], asking[row, last.clip(0)][:, None])
        fetched = _Part(*self.project(rows[:, 0]), None if present is None else present[:, 0])
        self._leave(newest, lengths[:, 0], fetched, pending, last < 0)

        parts = [fetched] if pending is None else [self._left(pending), fetched]
        middle, exist = None, None
        if C > 1:
            wanted = np.where(is_last[..., None], -1, chosen)[:, : C - 1]
            middle, exist, _ = self._fetch(wanted, asking[:, : C - 1])
            middle, exist = middle.flatten(1, 2), None if exist is None else exist.flatten(1, 2)
        begin, place = K * (len(parts) - 1), np.arange(K)
        others = begin + K + K * np.arange(C)[:, None] + place  # [C, K]
        index = np.where(chosen < 0, -1, np.where(is_last[..., None], begin + place, others))
        indices = self.readers.take(torch.from_numpy(index).to(self.device))
        if pending is not None:
            indices[:, 0] = self._places_left(pending)
        k, v = torch.cat([part.k for part in parts], dim=1), torch.cat([part.v for part in parts], dim=1)
        exist = _joined(parts, middle, exist)
        return self.readers.reading(self.config, self.x, indices, middle, exist, k, v)

    def _reading_left(self) -> tuple[Any, ...]:
        """Of a call that closes no chunk: what earlier ones left for the open chunk's tokens."""
        pending = self.step.take_pending(0, self.readers.grid)
        if pending is None:
            return self.readers.nothing(self.config, self.x)
        left, places = self._left(pending), self._places_left(pending)
        present = left.present
        if (pending.indices < 0).any():
            there = (places >= 0)[..., None].expand(left.k.shape[:3])
            present = there if present is None else present & there
        # one group, which reads all of it
        return self.readers.reading(self.config, self.x, None, None, present, left.k, left.v)

    # --- out of the memory -----------------------------------------------------------------------------------

    def _fetch(self, wanted: Integers, asking: Integers) -> tuple[Tensor, Tensor | None, Integers]:
        """Neighbours [B, C, K, L, E] of chunks ``asking`` [B, C], the rows that exist, and lengths [B, C, K, L / S]."""
        B, C, K = wanted.shape
        numbers = self._with_next(wanted)
        rows, lengths = self._states(numbers.reshape(B, -1))
        rows, lengths = rows.reshape(B, C, K, self.parts * self.S, -1), lengths.reshape(numbers.shape)
        present = self._present(lengths)
        present = None if present is None else present.flatten(3)
        if self.prepare is not None:
            written = self.step.size.chunks[:, None]  # a row that closes fewer has none to ask
            own, own_lengths = self._states(np.minimum(asking, written - 1))
            rows = self.prepare(rows, present, own, self._present(own_lengths))
        return rows, present, lengths

    def _with_next(self, numbers: Integers) -> Integers:
        """Chunks [...] as [..., L / S]: with the one after each, if it is read too; -1 stays."""
        return np.where(numbers[..., None] < 0, -1, numbers[..., None] + np.arange(self.parts))

    def _states(self, chunks: Integers) -> tuple[Tensor, Integers]:
        """States [B, n, S, E] and lengths [B, n] of chunks [B, n]."""
        records, lengths = self.step.cache.memory.gather(chunks)  # [B, n, 2, 1, S, E / 2]
        return records[:, :, :, 0].transpose(2, 3).flatten(3).to(self.dtype), lengths

    def _present(self, lengths: Integers) -> Tensor | None:
        """Rows that exist, bool [..., S]; None: all."""
        if not self.step.has_short(lengths):
            return None
        return torch.arange(self.S, device=self.device) < torch.from_numpy(lengths).to(self.device)[..., None]

    # --- from call to call -----------------------------------------------------------------------------------

    def _leave(
        self,
        chosen: Integers,  # [B, K]
        lengths: Integers,  # [B, K, L / S]
        fetched: _Part,
        earlier: Retrieved | None,
        stays: Booleans,  # [B]: rows that closed no chunk
    ) -> None:
        """Keep what the open chunk's tokens read, in pieces of S rows."""
        B = len(chosen)
        numbers, lengths = self._with_next(chosen).reshape(B, -1), lengths.reshape(B, -1)
        k, v = (x.detach().unflatten(2, (-1, self.S)).flatten(1, 2) for x in (fetched.k, fetched.v))
        if stays.any() and earlier is not None:
            numbers = np.where(stays[:, None], earlier.indices, numbers)
            lengths = np.where(stays[:, None], earlier.lengths, lengths)
            rows = torch.from_numpy(stays).to(k.device)[:, None, None, None, None]
            k, v = torch.where(rows, earlier.k, k), torch.where(rows, earlier.v, v)
        if (numbers < 0).all():
            self.step.pending[0] = None
            return
        weights = torch.from_numpy(numbers >= 0).to(k)
        self.step.pending[0] = Retrieved.of(numbers, lengths, weights, k, v, self.step.has_short(lengths))

    def _left(self, pending: Retrieved) -> _Part:
        k, v = (x.unflatten(1, (self.K, -1)).flatten(2, 3) for x in (pending.k, pending.v))
        if pending.short is None:
            return _Part(k, v, None)
        present = torch.arange(self.S, device=self.device) < pending.short[..., None]
        return _Part(k, v, present.unflatten(1, (self.K, -1)).flatten(2))

    def _places_left(self, pending: Retrieved) -> Tensor:
        """[B, K] where the neighbours left stand in the table, at its beginning; -1: none."""
        own = pending.indices.reshape(-1, self.K, self.parts)[..., 0]
        return torch.from_numpy(np.where(own < 0, -1, np.arange(self.K))).to(self.device)


def _joined(parts: list[_Part], middle: Tensor | None, exist: Tensor | None) -> Tensor | None:
    """Which rows of a table of parts and ``middle`` exist, [B, M, L]; None: all."""
    pieces = [(part.k.shape[:3], part.present) for part in parts]
    if middle is not None:
        pieces.append((middle.shape[:3], exist))
    if all(present is None for _, present in pieces):
        return None
    device = parts[0].k.device
    whole = (
        torch.ones(shape, dtype=torch.bool, device=device) if present is None else present
        for shape, present in pieces
    )
    return torch.cat(list(whole), dim=1)


def retrieval_scale(config: RPTConfig) -> float:
    """What the products of queries and keys are multiplied by."""
    return config.hidden_size**-0.5 if config.retriever == "learned" else 1.0


def _with_next(states: Tensor) -> Tensor:
    """[B, C, S, ...] -> [B, C, 2 S, ...]: each chunk and the one after it; after the last, zeros."""
    return torch.cat([states, torch.cat([states[:, 1:], torch.zeros_like(states[:, :1])], dim=1)], dim=2)
