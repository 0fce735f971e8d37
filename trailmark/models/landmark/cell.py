"""One piece of a call that lies in one cell of each row: its positions, and what the cell holds of every layer."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trailmark.memory import CacheState, Cell, ChunkCache, MemoryEntries, Window
from trailmark.models.grid import Booleans, Grid, Integers, Take
from trailmark.models.landmark.config import LandmarkConfig
from trailmark.models.layers import rotary_at, rotary_table, rotate
from trailmark.ops import LandmarkLayout, landmark_attention
from trailmark.ops.arguments import without_autocast
from trailmark.ops.landmark.memory import landmark_attention_of_one


class CellStep:
    """Collects what a piece changes; ``commit`` puts it in place in one go.

    Args:
        cache: what is carried. part: the new positions; with them no row's cell has more than ``local_length`` tokens.
        x: [B, ...] any tensor of theirs: rows, dtype and device.
    """

    def __init__(self, cache: ChunkCache, part: Grid, config: LandmarkConfig, x: Tensor) -> None:
        B, P = x.shape[0], part.num_positions
        self.cache, self.config, self.part, self.device = cache, config, part, x.device
        self._dtype = x.dtype  # under autocast keys may come narrower, in one call and not in the next
        self.before: CacheState = cache.begun(B)
        self.cell = self.before.cell or Cell.empty(B, config.num_hidden_layers)
        self.new = np.zeros(B, np.int64) + part.counts  # [B] positions
        self.new_tokens = np.zeros(B, np.int64) + (part.token >= 0).sum(1)
        self.counts = self.cell.counts + self.new
        self.width = int(self.counts.max())
        self.continues = self.cell.open_units()  # [B]
        # chunks, counted from the piece's first; -1: absent
        self.units: Integers = np.broadcast_to(part.chunk, (B, P))
        self.present: Booleans = self.units >= 0
        self._alike = bool((self.cell.counts == self.cell.counts[0]).all() and self.present.all())
        self._place()
        self._staged: dict[int, Window] = {}
        self.running, self.chosen = list(self.cell.running), list(self.cell.chosen)
        self.offset = int(self.cell.offset[0])
        self.asked = self.skipped = 0
        # positions in the model: chunk by chunk, each of S + 1
        row, at = np.arange(B)[:, None], self.places.clip(0)
        chunk, slot = (
            np.where(self.present, held[row, at] if P else 0, 0) for held in (self.chunk, self.slot)
        )
        L = config.chunk_size + 1
        local = chunk * L + slot  # [B, P]
        most = (int(self.chunk.max(initial=0)) + 1) * L
        self._table = rotary_table(most, config.head_dim, config.rope, x)
        self.query_rotary = self._turns(local)  # [1 or B, P, D / 2, 2]
        self.slot_rotary = self._turns(slot)

    def _turns(self, places: Integers) -> Tensor:
        """The turns [1 or B, n, D / 2, 2] to places [B, n]."""
        rows = places[:1] if self._alike and bool((places == places[:1]).all()) else places
        return self._table[torch.from_numpy(rows).to(self.device)]

    @cached_property
    def chunk_rotary(self) -> Tensor:
        """[1 or B, n, D / 2, 2]: what keys, that are turned by their place in their chunk, turn further in the cell."""
        return self._turns(self.chunk.clip(0) * (self.config.chunk_size + 1))

    @cached_property
    def layout(self) -> LandmarkLayout:
        return LandmarkLayout.of(
            torch.from_numpy(self.is_landmark).to(self.device),
            document_ids=torch.from_numpy(np.where(self.chunk >= 0, 0, -1)).to(self.device),
            causal=True,
            query_places=torch.from_numpy(self.places).to(self.device),
            num_queries=self.part.num_positions,
        )

    def _place(self) -> None:
        """Where the new positions stand: after those held."""
        cell, (B, P) = self.cell, self.present.shape
        flags = np.broadcast_to(self.part.is_landmark, (B, P))
        chunk, slot = cell.next_place()
        slots = self.part.slots + np.where(self.units == 0, slot[:, None], 0)
        slots = np.where(flags, self.config.chunk_size, slots)
        self.places = np.where(self.present, cell.counts[:, None] + np.arange(P), -1)  # [B, P]
        news = (chunk[:, None] + self.units, slots, flags)
        joined: list[Any] = []
        for held, new, nothing in zip(cell.tables, news, (-1, 0, False), strict=True):
            table = np.full((B, self.width), nothing, held.dtype)
            table[:, : held.shape[1]] = held
            b, i = np.nonzero(self.present)
            table[b, self.places[b, i]] = new[b, i]
            joined.append(table)
        self.chunk: Integers = joined[0]  # [B, n], as the next two
        self.slot: Integers = joined[1]
        self.is_landmark: Booleans = joined[2]

    # --- keys and values -----------------------------------------------------------------------------------

    def append(self, number: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys before RoPE and values [B, P, J, D] of a layer's new positions -> all slots of its cell, [B, J, N, D].

        Keys are kept, and come, turned by their place in their chunk, as the memory will have them.
        """
        k = rotate(k, self.slot_rotary)
        held = self.before.layers[number]
        if held.keys is None or held.keys.shape[2] < self.width:
            held = self._longer(held, k)
        assert held.keys is not None
        assert held.values is not None
        # these slots are beyond what is held, so a call that fails has harmed nothing
        first = int(self.cell.counts[0])
        for ring, new in ((held.keys, k.detach()), (held.values, v.detach())):
            if self._alike:
                ring[:, :, first : first + k.shape[1]] = new.transpose(1, 2)
            else:
                b, i = np.nonzero(self.present)
                row, at = torch.from_numpy(b), torch.from_numpy(self.places[b, i])
                ring[row, :, at] = new[row, torch.from_numpy(i)]
        self._staged[number] = held
        return held.keys, held.values

    def _longer(self, held: Window, k: Tensor) -> Window:
        """Room for a cell, or for half as much again as there was."""
        B, _, J, D = k.shape
        longer, old = Window(None), 0 if held.keys is None else held.keys.shape[2]
        size = max(self.width, old * 3 // 2 or self.config.cell_positions())
        with torch.inference_mode(False):
            longer.keys, longer.values = (k.new_zeros(B, J, size, D, dtype=self._dtype) for _ in range(2))
        if held.keys is not None and held.values is not None:
            longer.keys[:, :, :old], longer.values[:, :, :old] = held.keys, held.values
        longer.is_initialized = True
        return longer

    # --- attending -----------------------------------------------------------------------------------------

    @without_autocast
    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """q [B, P, H, D], turned by ``query_rotary``, and what ``append`` gave: output and lse [B, P, H]."""
        if self._single:
            return landmark_attention_of_one(q, keys, values, self._back, self.config.chunk_size, self.width)
        keys, values = (x[:, :, : self.width].transpose(1, 2) for x in (keys, values))
        keys = rotate(keys, self.chunk_rotary)
        name = self.config.implementation
        out = landmark_attention(q, keys, values, self.layout, implementation=name, return_lse=True)
        assert isinstance(out, tuple)
        return out

    @cached_property
    def _single(self) -> bool:
        """One new position in each row, in an open chunk after full ones, as in decoding."""
        if self.present.shape[1] != 1 or not self._alike or self.device.type != "cpu":
            return False
        place, L = np.arange(self.width), self.config.chunk_size + 1
        return (
            self.config.implementation in (None, "torch")
            and bool((self.chunk == place // L).all() and (self.slot == place % L).all())
            and self.width % L != 0
        )

    @cached_property
    def _back(self) -> Tensor:
        """[C + 1, 1, D / 2] complex: queries turn back by the beginning of each of the cell's chunks."""
        L = self.config.chunk_size + 1
        return torch.view_as_complex(self._table[: self.width : L].contiguous()).conj_physical()[:, None]

    # --- the end -------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Keep the positions; cells that are full hand their chunks to the memory and begin anew."""
        before, config = self.before, self.config
        tokens = self.cell.tokens + self.new_tokens
        ends = tokens == config.local_length
        assert (tokens <= config.local_length).all()
        layers = tuple(self._staged.get(n, layer) for n, layer in enumerate(before.layers))
        cell = replace(
            self.cell,
            tokens=np.where(ends, 0, tokens),
            counts=self.counts,
            chunk=self.chunk,
            slot=self.slot,
            is_landmark=self.is_landmark,
            running=tuple(self.running),
            chosen=tuple(self.chosen),
            offset=np.array([self.offset]),
            retrievals=self.cell.retrievals + np.array([self.asked, self.skipped]),
        )
        size, end = before.memory, before.num_positions + self.new
        if ends.any():
            closed = np.where(ends, (self.is_landmark & (self.chunk >= 0)).sum(1), 0)
            if config.retrieves and closed.any():
                entries, starts = self._entries(layers, closed, end)
                size = self.cache.memory.write(size, entries, starts, closed)
            cell, layers = self._begin(cell, layers, ends)
        self.cache.state = replace(
            before,
            num_tokens=before.num_tokens + self.new_tokens,
            num_positions=end,
            phases=cell.next_place()[1],
            memory=size,
            layers=layers,
            cell=cell,
        )

    def _entries(
        self, layers: tuple[Window, ...], closed: Integers, end: Integers
    ) -> tuple[MemoryEntries, Integers]:
        """The closed chunks of the cell, the landmark in row S of each."""
        config, S = self.config, self.config.chunk_size
        B, C = len(closed), int(closed.max())
        index = np.full((B, C, S + 1), -1)
        b, i = np.nonzero((self.chunk >= 0) & (self.chunk < closed[:, None]))
        index[b, self.chunk[b, i], self.slot[b, i]] = i
        lengths = (index >= 0).sum(2)  # the landmark's key is one of them
        take = Take(index.reshape(B, -1), self.width)
        keys, values, marks = [], [], []
        landmark_table = None
        if config.memory_position == "true":  # where they stand in the text, for every later query
            number = torch.from_numpy(self.before.memory.chunks[:, None] + np.arange(C)).to(self.device)
            landmark_table = rotary_at(number * (S + 1), config.head_dim, config.rope, self._table.dtype)
        for layer in layers:
            assert layer.keys is not None
            assert layer.values is not None
            k, v = (
                take(x[:, :, : self.width].transpose(1, 2)).unflatten(1, (C, S + 1))
                for x in (layer.keys, layer.values)
            )  # [B, C, S + 1, J, D]
            keys.append(k)
            marks.append(k[:, :, S] if landmark_table is None else rotate(k[:, :, S], landmark_table))
            values.append(v)
        k, v = torch.cat(keys, dim=3), torch.cat(values, dim=3)  # [B, C, S + 1, layers J, D]
        landmarks = torch.cat(marks, dim=2)
        starts = (end - self.counts)[:, None] + np.where(index >= 0, index, self.width).min(2)
        return MemoryEntries(k, v, landmarks, torch.from_numpy(lengths)), starts

    def _begin(
        self, cell: Cell, layers: tuple[Window, ...], ends: Booleans
    ) -> tuple[Cell, tuple[Window, ...]]:
        """New cells for the rows that end: they hold the tokens of the chunk that stays open."""
        B, n = self.chunk.shape
        place = np.arange(n)
        after_last = np.where(self.is_landmark, place + 1, 0).max(1, initial=0)  # [B] of the landmarks
        first = np.where(ends, after_last, 0)
        counts = self.counts - first
        width = int(counts.max())
        index = first[:, None] + np.arange(width)
        index = np.where(np.arange(width) < counts[:, None], index, -1)
        row, at = np.arange(B)[:, None], index.clip(0)
        absent = index < 0
        chunk = np.where(ends[:, None], 0, self.chunk[row, at])
        rings = []
        take = Take(index, n)
        for layer in layers:
            ring = Window(None)
            assert layer.keys is not None
            assert layer.values is not None
            with torch.inference_mode(False):
                ring.keys, ring.values = torch.zeros_like(layer.keys), torch.zeros_like(layer.values)
            for new, old in ((ring.keys, layer.keys), (ring.values, layer.values)):
                new[:, :, :width] = take(old[:, :, :n].transpose(1, 2)).transpose(1, 2)
            ring.is_initialized = True
            rings.append(ring)
        running: tuple[Tensor | None, ...] = (None,) * len(layers)
        if not ends.all():  # nothing was asked yet in the rows that begin
            gone = torch.from_numpy(ends)[:, None, None].to(self.device)
            running = tuple(None if x is None else x.masked_fill(gone, -torch.inf) for x in cell.running)
        begun = replace(
            cell,
            counts=counts,
            chunk=np.where(absent, -1, chunk),
            slot=np.where(absent, 0, self.slot[row, at]),
            is_landmark=np.where(absent, False, self.is_landmark[row, at]),
            running=running,
        )
        return begun, tuple(rings)
