"""Windows: per layer, the keys and values of the last W positions in a ring that never grows."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from trailmark.memory.tables import Integers


class Span(NamedTuple):
    """Positions [start, end) of each row that some layers have seen since their windows were last empty."""

    start: Integers  # [B]
    end: Integers  # [B]


class Window(CacheLayerMixin):
    """Keys and values of one layer: [B, J, W, D], position p in slot p % W; without a window, slot p of a
    buffer that grows.
    """

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the ring for the batch, heads and type of keys [B, J, T, D]."""
        B, J, T, D = key_states.shape
        slots = self.window or max(64, T)
        with torch.inference_mode(False):  # else only ever written to inside inference mode
            self.keys = key_states.new_zeros(B, J, slots, D)
            self.values = value_states.new_zeros(B, J, slots, D)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take in keys and values [B, J, T, D] of one call: what its positions attend to, [B, J, P, D].

        ``call`` (:class:`WindowCall`) says where the new positions stand; its ``commit`` makes them stay.
        """
        call: WindowCall = kwargs["call"] if "call" in kwargs else args[0]
        return call.join(self, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = 0 if self.keys is None else self.keys.shape[2]
        return held + query_length, 0

    def get_seq_length(self) -> int:
        """Slots; the cache itself counts the tokens."""
        return 0 if self.keys is None else self.keys.shape[2]

    def get_max_length(self) -> int:
        return self.window or -1

    def reset(self) -> None:
        self.keys, self.values = None, None  # type: ignore[assignment]
        self.is_initialized = False

    def take_rows(self, rows: Tensor) -> Window:
        """A layer whose row b is a copy of this one's row ``rows[b]``."""
        other = Window(self.window)
        if self.keys is not None:
            assert self.values is not None
            with torch.inference_mode(False):
                other.keys, other.values = (
                    x.index_select(0, rows.to(x.device)) for x in (self.keys, self.values)
                )
            other.is_initialized = True
        return other

    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.keys, self.values) if x is not None)


class WindowCall:
    """Where the new positions of one call stand, for all layers that saw the same ones before it.

    Args:
        span: what these layers have seen.
        first: [B] number of each row's first new position; where it is not ``span.end``, the windows of that
            row are empty.
        counts: [B] new positions of each row; width: P, the most of any row.
        window: W; None: no limit.
    """

    def __init__(
        self,
        span: Span,
        first: Integers,
        counts: Integers,
        width: int,
        window: int | None,
        device: torch.device,
    ) -> None:
        self.start = np.where(first == span.end, span.start, first)
        self.first, self.counts, self.width = first, counts, width
        self.window, self.device = window, device
        self._staged: dict[int, Window] = {}
        self._layers: list[Window] = []

    @property
    def after(self) -> Span:
        return Span(self.start, self.first + self.counts)

    @cached_property
    def _alike(self) -> bool:
        """All rows have as much before them, and as much new, at the same places."""
        same = all((x == x[0]).all() for x in (self.first, self.start))
        return bool(same and (self.counts == self.width).all())

    @cached_property
    def _carried(self) -> int:
        """The most positions of any row that the new ones can see."""
        most = int((self.first - self.start).max(initial=0))
        return most if self.window is None else min(most, self.window - 1)

    @cached_property
    def _in_ring(self) -> bool:
        """One new position in each row: it takes the slot of the one that it does not see.

        Without a window, as long as there are slots.
        """
        fits = self.window is not None or int(self.first.max()) < self._slots
        return self.width == 1 and bool((self.counts == 1).all()) and fits

    @cached_property
    def first_positions(self) -> Tensor:
        """[1 or B] number of the first new position of each row, or of all."""
        first = self.first[:1] if (self.first == self.first[0]).all() else self.first
        return torch.from_numpy(first).to(self.device)

    def stands_as(self, other: WindowCall) -> bool:
        """Whether the new positions are the same."""
        return self.width == other.width and bool((self.first == other.first).all())

    @cached_property
    def positions(self) -> tuple[Tensor, Tensor] | None:
        """What :func:`sliding_window_attention` is told; None: the new ones are the last of consecutive ones.

        For what ``join`` returned, once it did.
        """
        if self._in_ring:
            if self._alike and self.first[0] - self.start[0] < 1:
                return None
            slots = self._slots
            newest = self.first[:, None]
            # the position p <= newest with p % W == slot
            key = newest - (newest - np.arange(slots)) % slots
            key = np.where(key >= self.start[:, None], key, -1)
            return self._tensors(newest, key)
        if self._alike:
            return None
        new = np.arange(self.width)
        query = np.where(new < self.counts[:, None], self.first[:, None] + new, -1)
        old = self.first[:, None] - self._carried + np.arange(self._carried)
        key = np.concatenate([np.where(old >= self.start[:, None], old, -1), query], axis=1)
        return self._tensors(query, key)

    def _tensors(self, query: Integers, key: Integers) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(query).to(self.device), torch.from_numpy(np.ascontiguousarray(key)).to(
            self.device
        )

    # --- keys and values -----------------------------------------------------------------------------------

    def join(self, layer: Window, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What the new positions attend to, from keys and values [B, J, P, D]."""
        held = layer
        if layer.keys is None:
            held = Window(self.window)
            held.lazy_initialization(k, v)
        assert held.keys is not None
        assert held.values is not None
        self._slots = held.keys.shape[2]
        if self._in_ring:
            # the slot holds what no position from here on sees, so a call that fails has harmed nothing
            for ring, new in ((held.keys, k.detach()), (held.values, v.detach())):
                if (self.first == self.first[0]).all():
                    ring[:, :, int(self.first[0]) % self._slots] = new[:, :, 0]
                else:
                    row = torch.arange(len(ring), device=ring.device)
                    ring[row, :, self._slot_of_first] = new[:, :, 0]
            self._stage(layer, held)
            if self.positions is None:
                return k, v
            if k.requires_grad:  # a copy, through which the call's gradients reach the new ones
                newest = torch.arange(self._slots, device=k.device) == self._slot_of_first[:, None]
                newest = newest[:, None, :, None]
                return torch.where(newest, k, held.keys), torch.where(newest, v, held.values)
            return held.keys, held.values
        after = Window(self.window)
        joined = torch.cat([self._before(held.keys), k], 2), torch.cat([self._before(held.values), v], 2)
        after.keys, after.values = (
            self._ring(ring, part.detach())
            for ring, part in zip((held.keys, held.values), joined, strict=True)
        )
        after.is_initialized = True
        self._stage(layer, after)
        return joined

    def _stage(self, layer: Window, after: Window) -> None:
        self._staged[id(layer)] = after
        self._layers.append(layer)  # keeps the id its own

    def staged(self, layer: Window) -> Window:
        """The layer as it is after the call."""
        return self._staged.get(id(layer), layer)

    @cached_property
    def _slot_of_first(self) -> Tensor:
        return torch.from_numpy(self.first % self._slots).to(self.device)

    @cached_property
    def _order(self) -> Tensor:
        """[1 or B, carried] slots of the positions before the new ones, in their order."""
        places = self.first[:, None] - self._carried + np.arange(self._carried)
        places = places[:1] if (places == places[0]).all() else places
        return torch.from_numpy(np.maximum(places, 0) % self._slots).to(self.device)

    def _before(self, ring: Tensor) -> Tensor:
        if len(self._order) == 1:
            return ring.index_select(2, self._order[0])
        B, J, _, D = ring.shape
        return ring.gather(2, self._order[:, None, :, None].expand(B, J, -1, D))

    @cached_property
    def _kept(self) -> tuple[Tensor, Tensor, int]:
        """Slots [1 or B, n] and where in the joined keys their new content stands; slots of the new ring."""
        end = self.first + self.counts
        if self.window is None:
            slots = self._slots
            while slots < int(end.max()):
                slots += slots // 2
            kept = int((end - self.start).max())
        else:
            slots = self._slots
            kept = min(slots, self._carried + self.width)
        position = end[:, None] - kept + np.arange(kept)  # the last of each row
        place = position - (self.first[:, None] - self._carried)
        # what was never there keeps zeros' place: it stands in a slot that no one reads
        usable = (place >= 0) & (position >= 0)
        slot = np.where(usable, position % slots, -1)
        if all((x == x[0]).all() for x in (place, slot)):
            place, slot = place[:1], slot[:1]
        return (
            torch.from_numpy(slot).to(self.device),
            torch.from_numpy(np.maximum(place, 0)).to(self.device),
            slots,
        )

    def _ring(self, old: Tensor, joined: Tensor) -> Tensor:
        slot, place, slots = self._kept
        B, J, _, D = joined.shape
        with torch.inference_mode(False):
            ring = joined.new_zeros(B, J, slots, D)
        if self.window is None:  # what was held before is in its place already
            ring[:, :, : old.shape[2]] = old
        if len(slot) == 1:
            used = slot[0] >= 0
            ring[:, :, slot[0][used]] = joined.index_select(2, place[0][used])
            return ring
        for b in range(B):
            used = slot[b] >= 0
            ring[b, :, slot[b][used]] = joined[b].index_select(1, place[b][used])
        return ring
