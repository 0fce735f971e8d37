"""What a call with a cache reads: neighbours out of the memory, and what earlier calls left of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trailmark.memory import Retrieved
from trailmark.models.configuration import RPTConfig
from trailmark.models.grid import Booleans, Grid, Integers
from trailmark.models.rpt_neighbours import Readers, Reading
from trailmark.models.step import Step

# rows of neighbours [B, C, K, L, E], which exist, rows [B, C, S, E] of the chunks that ask, which exist
Prepare = Callable[[Tensor, Tensor | None, Tensor, Tensor | None], Tensor]


class _Part(NamedTuple):
    """Some neighbours, ready to be read."""

    k: Tensor  # [B, K, L, n J, D], of the n layers that read
    v: Tensor
    present: Tensor | None  # bool [B, K, L] rows that exist; None: all


def nothing_read(readers: Readers, x: Tensor) -> Reading:
    """Of groups that read the null key alone; x [B, ...] is any tensor of the call."""
    nothing = torch.zeros(x.shape[0], readers.grid.num_chunks, 0, dtype=torch.int64, device=x.device)
    return Reading(nothing, None, None, None, None)


class MemoryReader:
    """Neighbours of one call.

    Args:
        x: [B, P, E] any tensor of the call: its rows, dtype and device.
        prepare: what neighbours go through before they are read; None: nothing.
        project: rows [B, K, L, E] to keys and values [B, K, L, n J, D] of the n layers that read.
    """

    def __init__(
        self,
        config: RPTConfig,
        step: Step,
        x: Tensor,
        prepare: Prepare | None,
        project: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> None:
        self.S, self.K = config.chunk_size, config.num_retrieved_chunks
        self.parts = 2 if config.continuation else 1  # chunks of a neighbour
        self.step, self.x, self.dtype, self.device = step, x, x.dtype, x.device
        self.prepare, self.project = prepare, project

    def read_left(self, readers: Readers) -> Reading:
        """Of a call that closes no chunk: what earlier ones left for the open chunk's tokens."""
        pending = self.step.take_pending(0, readers.grid)
        if pending is None:
            return nothing_read(readers, self.x)
        left, places = self._left(pending), self._places_left(pending)
        present = left.present
        if (pending.indices < 0).any():
            there = (places >= 0)[..., None].expand(left.k.shape[:3])
            present = there if present is None else present & there
        return Reading(None, left.k, left.v, None, present)  # one group, which reads all of it

    def read(self, chosen: Integers, asking: Integers, grid: Grid, readers: Readers) -> Reading:
        """What the groups of a call read; and what the tokens of the chunk that stays open will.

        ``chosen`` [B, C, K]: what the chunks ``asking`` [B, C] that the call closes selected. The table: what earlier
        calls left for the first group; what each row's last chunk found, which is left for the next call with the keys
        and values of every layer; what the others found.
        """
        pending = self.step.take_pending(0, grid)
        B, C, K = chosen.shape
        row, last = np.arange(B), np.zeros(B, np.int64) + grid.closed - 1  # [B]; -1: none was closed
        is_last = np.arange(C) == last[:, None]  # [B, C]
        newest = np.where((last >= 0)[:, None], chosen[row, last.clip(0)], -1)  # [B, K]
        rows, present, lengths = self._fetch(newest[:, None], asking[row, last.clip(0)][:, None])
        found = _Part(*self.project(rows[:, 0]), None if present is None else present[:, 0])
        self._leave(newest, lengths[:, 0], found, pending, last < 0)

        parts = [found] if pending is None else [self._left(pending), found]
        middle, exist = None, None
        if C > 1:
            wanted = np.where(is_last[..., None], -1, chosen)[:, : C - 1]
            middle, exist, _ = self._fetch(wanted, asking[:, : C - 1])
            middle, exist = middle.flatten(1, 2), None if exist is None else exist.flatten(1, 2)
        begin, place = K * (len(parts) - 1), np.arange(K)
        others = begin + K + K * np.arange(C)[:, None] + place  # [C, K]
        index = np.where(chosen < 0, -1, np.where(is_last[..., None], begin + place, others))
        indices = readers.take(torch.from_numpy(index).to(self.device))
        if pending is not None:
            indices[:, 0] = self._places_left(pending)
        k, v = torch.cat([part.k for part in parts], dim=1), torch.cat([part.v for part in parts], dim=1)
        return Reading(indices, k, v, middle, _joined(parts, middle, exist))

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
            written = int(self.step.size.chunks.max())  # a row that closes fewer has none to ask
            own, own_lengths = self._states(asking.clip(max=written - 1))
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
        found: _Part,
        earlier: Retrieved | None,
        stays: Booleans,  # [B]: rows that closed no chunk
    ) -> None:
        """Keep what the open chunk's tokens read, in pieces of S rows."""
        B = len(chosen)
        numbers, lengths = self._with_next(chosen).reshape(B, -1), lengths.reshape(B, -1)
        k, v = (x.detach().unflatten(2, (-1, self.S)).flatten(1, 2) for x in (found.k, found.v))
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
    found = [(part.k.shape[:3], part.present) for part in parts]
    if middle is not None:
        found.append((middle.shape[:3], exist))
    if all(present is None for _, present in found):
        return None
    device = parts[0].k.device
    whole = (
        torch.ones(shape, dtype=torch.bool, device=device) if present is None else present
        for shape, present in found
    )
    return torch.cat(list(whole), dim=1)
