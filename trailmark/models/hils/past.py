"""What the positions of a call choose and read of the chunks beyond their windows, layer by layer.

The chunks lie in a whole text or in a memory: two places, behind one interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trailmark.memory import ChunkMemory, MemoryEntries
from trailmark.memory.chunks import Rows
from trailmark.models.candidates import NOTHING, distinct_chunks, in_all_rows, no_selection
from trailmark.models.grid import Grid, Integers, Take
from trailmark.models.hils.config import HiLSConfig
from trailmark.models.hils.focus import in_focus
from trailmark.models.hils.sight import Sight
from trailmark.models.layers import Place, rotary_where_a_window_ends, rotate
from trailmark.models.step import Step
from trailmark.ops import (
    ChunkSelection,
    grouped_cross_attention,
    score_for_tokens,
    select_for_tokens,
    summarize_chunks,
)


class Past(ABC):
    """The past of the positions of a call.

    Args:
        x: [B, P, E] any tensor of the call. step: the call on a cache; None: a whole text.
    """

    def __init__(
        self, config: HiLSConfig, grid: Grid, sight: Sight, x: Tensor, step: Step | None = None
    ) -> None:
        self.config, self.grid = config, grid
        self.candidates, self.first = (
            torch.from_numpy(np.ascontiguousarray(part)).to(x.device)
            for part in (sight.candidates, sight.first)
        )
        self.rows = ChunkRows.of(config, grid, step)
        self.selected: list[ChunkSelection] = []
        """What each layer chose, once it has."""
        self.states: list[Tensor] = []
        """[B, P, X] of each layer that noted what its memory will be made of; reading in a memory notes it too."""

    def read(
        self,
        q: Tensor,
        scoring: Tensor | None,
        k: Tensor,
        v: Tensor,
        place: Place,
        window: tuple[Tensor, Tensor],
    ) -> Tensor:
        """The output of one layer's attention to all that its positions see, [B, P, H, D].

        Args:
            q: [B, P, H, D], k and v [B, P, J, D], as they are before they are turned by their positions.
            scoring: [B, P, H, D] the queries that score chunks; None: q.
            window: what the window gave [B, P, H, D], and its log-sum-exp [B, P, H].
        """
        q, scoring, states = self._turned(q, scoring, k, v, place)
        return self._read(q, scoring, states, window)

    def note(self, q: Tensor, scoring: Tensor | None, k: Tensor, v: Tensor, place: Place) -> None:
        """Keep what one layer's memory will be made of, of heads as :meth:`read` takes them, and read nothing."""
        self.states.append(self._turned(q, scoring, k, v, place)[2])

    def closed(self, states: Sequence[Tensor]) -> MemoryEntries:
        """What a memory holds of the chunks that close; ``states`` of each layer, behind the open chunk's."""
        parts = [self.rows.entries(x) for x in states]
        k, v = torch.cat([part.k for part in parts], 3), torch.cat([part.v for part in parts], 3)
        landmarks = torch.cat([part.landmarks.flatten(2, 3) for part in parts], 2)
        return MemoryEntries(k, v, landmarks, parts[0].lengths)

    def _turned(
        self, q: Tensor, scoring: Tensor | None, k: Tensor, v: Tensor, place: Place
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and scoring queries [B, P, H, D], turned; states [B, P, X] for :meth:`ChunkRows.entries`."""
        if self.config.far_position == "window":
            assert self.config.sliding_window is not None
            back = self.config.far_distance or self.config.sliding_window
            turn = rotary_where_a_window_ends(q, back, self.config.rope)
        else:
            assert place.rotary is not None
            turn, k = place.rotary, rotate(k, place.rotary)
        q = rotate(q, turn)
        scoring = q if scoring is None else rotate(scoring, turn)
        summing_up = [scoring] if self.config.chunk_score == "expansion" else []
        return q, scoring, torch.cat([x.flatten(2) for x in (k, v, *summing_up)], -1)

    @abstractmethod
    def _read(self, q: Tensor, scoring: Tensor, states: Tensor, window: tuple[Tensor, Tensor]) -> Tensor:
        """``read`` for turned queries; states [B, P, X] as :meth:`ChunkRows.entries` takes them."""

    def _attend(
        self, q: Tensor, scores: Tensor, indices: Tensor, chunks: MemoryEntries, window: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Attention to the window and to chunks ``indices`` [B, P, J, K] of a table, scored [B, P, H, K]."""
        out, lse = (x[:, :, None] for x in window)
        by_keys = self.config.chunk_weights == "keys"
        if by_keys:
            weights = torch.ones_like(scores[:, :, : indices.shape[2]])
        else:
            shares = torch.cat([scores, lse.transpose(2, 3)], -1).softmax(-1)
            weights = shares[..., :-1]
        read = grouped_cross_attention(
            q[:, :, None],
            chunks.k,
            chunks.v,
            indices,
            weights,
            chunks.lengths,
            softmax_off_by_one=by_keys,
            implementation=self.config.implementation,
            beside=(out, lse) if by_keys else None,
        )[:, :, 0]
        return window[0] + read if by_keys else (window[0] * shares[..., -1:]).to(read.dtype) + read

    def _select(
        self,
        q: Tensor,
        lse: Tensor,
        landmarks: list[Tensor],
        keys: MemoryEntries | None,
        rows: Rows = slice(None),
        among: Integers | None = None,
    ) -> tuple[ChunkSelection, Tensor]:
        """What the tokens of some rows choose, and what each head scores it with.

        ``among`` [b, n]: of these chunks alone, ascending.
        """
        return select_for_tokens(
            q,
            lse,
            self.config.num_retrieved_chunks,
            self.candidates[rows],
            self.config.num_key_value_heads,
            landmarks if keys is None else None,
            None if keys is None else (keys.k, keys.lengths),
            self.first[rows],
            among=None if among is None else torch.from_numpy(among),
        )


class TextPast(Past):
    """The chunks of a whole text."""

    def _read(self, q: Tensor, scoring: Tensor, states: Tensor, window: tuple[Tensor, Tensor]) -> Tensor:
        chunks = self.rows.entries(states)
        exact = chunks if self.config.chunk_score == "mass" else None
        chosen, scores = self._select(scoring, window[1], [chunks.landmarks], exact)
        self.selected.append(chosen)
        if self.config.chunk_weights == "score":  # checkpointing repeats a forward with and without gradients
            scores = score_for_tokens(scoring, chunks.landmarks, chosen.indices)
        return self._attend(q, scores, chosen.indices, chunks, window)


class MemoryPast(Past):
    """The chunks of a memory, in which no chunk that the call closes is wanted before the call is over."""

    def __init__(self, config: HiLSConfig, grid: Grid, sight: Sight, x: Tensor, step: Step) -> None:
        super().__init__(config, grid, sight, x, step)
        self.step = step
        self._num_chunks = int(sight.candidates.max(initial=0))
        focuses = step.before.focus or (None,) * len(x)
        self._has_focus = np.array([focus is not None for focus in focuses])
        self._in_focus = in_focus(focuses, step.before.memory.chunks, config.num_focus_chunks or 0)

    def _read(self, q: Tensor, scoring: Tensor, states: Tensor, window: tuple[Tensor, Tensor]) -> Tensor:
        config, layer = self.config, len(self.states)
        self.states.append(states)
        P, J, K = q.shape[1], config.num_key_value_heads, config.num_retrieved_chunks
        if not self._num_chunks:
            self.selected.append(no_selection(window[1], P, J, K))
            return window[0]
        if config.chunk_score == "mass":
            number = np.arange(self._num_chunks)
            there = number < self.step.before.memory.chunks[:, None]
            every = self._fetched(np.where(there, number, -1), layer)
            chosen, scores = self._select(scoring, window[1], [], every)
            self.selected.append(chosen)
            return self._attend(q, scores, chosen.indices, every, window)
        chosen, scores = self._chosen(scoring, window[1], layer)
        self.selected.append(chosen)
        chunks, places = distinct_chunks(chosen.indices.cpu().numpy())  # what many chose is fetched once
        if P == 1 and chunks.size:  # how many those are must decide no shape: a neighbour chose some of them
            chunks = np.pad(chunks, ((0, 0), (0, J * K + 1 - chunks.shape[1])), constant_values=-1)
        if not chunks.size:
            return window[0]
        indices = torch.from_numpy(places).to(q.device)
        return self._attend(q, scores, indices, self._fetched(chunks, layer), window)

    def _chosen(self, scoring: Tensor, lse: Tensor, layer: int) -> tuple[ChunkSelection, Tensor]:
        """What tokens choose in one layer, each row in its memory; and what each head scores it with."""
        config, B = self.config, len(lse)
        n, heads, width = config.summary_shape
        own = slice(layer * n * heads, (layer + 1) * n * heads)

        def select(rows: Rows, landmarks: list[Tensor]) -> tuple[Tensor, ...]:
            kept = self._in_focus[rows] if self._has_focus[rows].any() else None
            chosen, scores = self._select(scoring[rows], lse[rows], landmarks, None, rows, kept)
            if config.chunk_weights == "score" and torch.is_grad_enabled() and scoring.requires_grad:
                scores = score_for_tokens(scoring[rows], torch.cat(landmarks, 1), chosen.indices)
            return *chosen, scores

        def found(rows: Rows, memory: ChunkMemory) -> tuple[Tensor, ...]:
            blocks = memory.blocks(int(self.candidates[rows].max()), len(scoring[rows]))
            landmarks = [x[:, :, own].view(*x.shape[:2], n, heads, width) for x in blocks]
            has = self._has_focus[rows]
            if has.all() or not has.any():
                return select(rows, landmarks)
            alone = enumerate(np.arange(B)[rows].tolist())  # they look over different numbers of chunks
            each = [select([row], [x[i : i + 1] for x in landmarks]) for i, row in alone]
            return tuple(torch.cat(x) for x in zip(*each, strict=True))

        asking = (self.candidates > 0).any(1).cpu().numpy()
        every = in_all_rows(self.step.cache.memory.parts(asking), found, B, (*NOTHING, -torch.inf))
        assert every is not None, "some row has candidates"
        return ChunkSelection(*every[:3]), every[3]

    def _fetched(self, chunks: Integers, layer: int) -> MemoryEntries:
        """Of one layer, keys and values of chunks [B, n]; -1 gives any."""
        records, lengths = self.step.cache.memory.gather(chunks, np.full_like(chunks, layer))
        k, v = (records[:, :, part].transpose(2, 3) for part in (0, 1))
        return MemoryEntries(k, v, k, torch.from_numpy(lengths).to(k.device))

    def remember(self) -> None:
        """Write the chunks that the call closes into the memory, once all layers have run."""
        states = torch.cat(self.states, -1)
        if self.grid.num_closed:
            layers = self.step.with_open(states).unflatten(-1, (len(self.states), -1))
            self.step.remember(self.closed(layers.unbind(2)))
        self.step.keep_open(states)


class ChunkRows(NamedTuple):
    """Where the keys of the chunks that close stand. Sinks, which every window shows, are none of them."""

    config: HiLSConfig
    take: (
        Take  # positions (after the open chunk's) -> [B, C * (S + 1), X]: the keys, and in row S the landmark
    )
    lengths: Integers  # [b, C] keys of each chunk

    @classmethod
    def of(cls, config: HiLSConfig, grid: Grid, step: Step | None) -> ChunkRows:
        """Of the chunks of a layout; ``step``: of a call on a cache."""
        C, n = grid.num_closed, config.num_sinks
        if not n or not C:
            return cls(config, grid.encoder_rows, grid.lengths)
        begin = np.zeros(1, np.int64) if step is None else step.end - step.counts
        places = np.broadcast_to(grid.landmark_places.clip(0), (len(grid.chunk), C))
        starts = grid.chunk_starts - np.take_along_axis(grid.document_starts, places, 1) + begin[:, None]
        sinks = np.clip(n - starts, 0, grid.lengths)  # [B, C] of each chunk
        if not sinks.any():
            return cls(config, grid.encoder_rows, grid.lengths)
        index, S = grid.encoder_rows.index.reshape(len(grid.chunk), C, -1), config.chunk_size
        index = np.broadcast_to(index, (len(sinks), *index.shape[1:])).copy()
        row = np.arange(S) + sinks[..., None]
        after = np.take_along_axis(index[:, :, :S], row.clip(max=S - 1), 2)
        index[:, :, :S] = np.where(row < S, after, -1)
        lengths = np.where(grid.lengths > 0, grid.lengths - sinks, 0)
        return cls(config, Take(index.reshape(len(index), -1), grid.encoder_rows.size), lengths)

    def entries(self, states: Tensor) -> MemoryEntries:
        """One layer's entries, of states [B, P, X]: keys, values and, for the expansion, queries."""
        config, B, C = self.config, len(states), self.lengths.shape[1]
        J, D, S = config.num_key_value_heads, config.head_dim, config.chunk_size
        rows = self.take(states).view(B, C, S + 1, states.shape[2] // D, D)
        lengths = torch.from_numpy(self.lengths).to(states.device).expand(B, C)
        tokens = rows[:, :, :S]
        k, v = tokens[:, :, :, :J], tokens[:, :, :, J : 2 * J]
        asking = None if config.chunk_score != "expansion" else rows[:, :, :, 2 * J :]
        with torch.set_grad_enabled(torch.is_grad_enabled() and config.chunk_weights == "score"):
            landmarks = self._summaries(k, asking, lengths)
        return MemoryEntries(k, v, landmarks, lengths)

    def _summaries(self, k: Tensor, asking: Tensor | None, lengths: Tensor) -> Tensor:
        """Landmark vectors [B, C, n, heads, D + 1] of keys [B, C, S, J, D] and queries [B, C, S + 1, H, D]."""
        config, (B, C, S) = self.config, k.shape[:3]
        n, heads, width = config.summary_shape
        if not n:
            return k.new_zeros(B, C, n, heads, width)
        size = config.summary_tokens or S
        first = torch.arange(n, device=k.device) * size
        of_parts = (lengths[..., None] - first).clamp(0, size).flatten(1)  # [B, C n]

        def parts(x: Tensor) -> Tensor:
            padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, n * size - S))
            return padded.unflatten(2, (n, size)).flatten(1, 2)  # [B, C n, size, ..., D]

        query = None
        if asking is not None and config.summary_query == "landmark":
            query = asking[:, :, S:].expand(-1, -1, n, -1, -1).flatten(1, 2)
        elif asking is not None:  # what is absent is 0
            wide = asking[:, :, :S].to(torch.promote_types(asking.dtype, torch.float32))
            query = parts(wide).sum(2) / of_parts.clamp(min=1)[..., None, None]
        return summarize_chunks(parts(k), query, of_parts).view(B, C, n, heads, width)
