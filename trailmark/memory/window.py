"""Windows: per layer, the keys and values of the last W positions in a ring that never grows, and of the sinks."""

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

    Before them stand those of the text's first ``sinks`` positions: [B, J, sinks + W, D].
    """

    def __init__(self, window: int | None, sinks: int = 0) -> None:
        super().__init__()
        assert sinks == 0 or window is not None
        self.window, self.sinks = window, sinks

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the ring for the batch, heads and type of keys [B, J, T, D]."""
        B, J, T, D = key_states.shape
        slots = self.sinks + (self.window or max(64, T))
        with torch.inference_mode(False):  # else only ever written to inside inference mode
            self.keys = key_states.new_zeros(B, J, slots, D)
            self.values = value_states.new_zeros(B, J, slots, D)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take in keys and values [B, J, T, D] of one call: what its positions attend to, [B, J, P, D].

        The argument after them, a :class:`WindowCall`, says where the new positions stand.
        """
        call: WindowCall = args[0]
        return call.join(self, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = 0 if self.keys is None else self.keys.shape[2]
        return held + query_length, 0

    def get_seq_length(self) -> int:
        """Slots; the cache itself counts the tokens."""
        return 0 if self.keys is None else self.keys.shape[2]

    def get_max_length(self) -> int:
        return self.window or -1

    def take_rows(self, rows: Tensor) -> Window:
        """A layer whose row b is a copy of this one's row ``rows[b]``."""
        other = Window(self.window, self.sinks)
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
        sinks: first positions of each row that stay visible; these layers must have seen them all, or see them now.
    """

    def __init__(
        self,
        span: Span,
        first: Integers,
        counts: Integers,
        width: int,
        window: int | None,
        device: torch.device,
        sinks: int = 0,
    ) -> None:
        self.start = np.where(first == span.end, span.start, first)
        self.first, self.counts, self.width = first, counts, width
        self._span = span
        self.window, self.device, self.sinks = window, device, sinks
        self._staged: dict[int, Window] = {}
        self._layers: list[Window] = []
        self._sources: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # of ``_ring_rows``

    @property
    def after(self) -> Span:
        return Span(self.start, self.first + self.counts)

    @cached_property
    def _alike(self) -> bool:
        """All rows have as much before them, and as much new, at the same places."""
        same = all((x == x[0]).all() for x in (self.first, self.start))
        return bool(same and (self.counts == self.width).all())

    @cached_property
    def carried(self) -> int:
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
    def from_the_start(self) -> bool:
        """What the new positions attend to is the text from its first position on: the sinks are among it."""
        return self._alike and bool(self.first[0] == self.carried and self.start[0] == 0)

    @cached_property
    def _begins(self) -> bool:
        """Some row's sinks may be among the new positions."""
        return bool((self.first < self.sinks).any())

    @cached_property
    def first_positions(self) -> Tensor:
        """[1 or B] number of the first new position of each row, or of all."""
        first = self.first[:1] if (self.first == self.first[0]).all() else self.first
        return torch.from_numpy(first).to(self.device)

    def goes_on(self, span: Span, window: int | None, sinks: int, device: torch.device) -> bool:
        """Whether layers that have seen ``span`` through a window like this are where those of this call are.

        Without a limit they are not: how many slots they have room in depends on how they came there.
        """
        if window is None or (self.window, self.sinks, self.device) != (window, sinks, device):
            return False
        return all((a == b).all() for a, b in zip(self._span, span, strict=True))

    def stands_as(self, other: WindowCall) -> bool:
        """Whether the new positions are the same."""
        return self.width == other.width and bool((self.first == other.first).all())

    @cached_property
    def positions(self) -> tuple[Tensor, Tensor] | None:
        """What :func:`sliding_window_attention` is told; None: the new ones are the last of consecutive ones.

        For what ``join`` returned, once it did.
        """
        if self._in_ring:
            if self._alone:
                return None
            slots = self._slots
            newest = self.first[:, None]
            # the position p <= newest with p % W == slot
            key = newest - (newest - np.arange(slots)) % slots
            key = np.where(key >= self.start[:, None], key, -1)
            return self._tensors(newest, key)
        if self._alike and (not self.sinks or self.from_the_start):
            return None
        new = np.arange(self.width)
        query = np.where(new < self.counts[:, None], self.first[:, None] + new, -1)
        old = self.first[:, None] - self.carried + np.arange(self.carried)
        key = np.concatenate([np.where(old >= self.start[:, None], old, -1), query], axis=1)
        return self._tensors(query, key)

    @cached_property
    def shows_all(self) -> bool:
        """One new position in each row, which sees every key that ``join`` returned, each once.

        Where distances have no part in scores, their places need not be told then.
        """
        if not self._in_ring or self.window is None:
            return False
        full = self.first - self.start >= self.window - 1
        apart = self.first >= self.sinks + self.window - 1  # no sink stands in the window
        return bool((full & apart).all())

    @cached_property
    def _alone(self) -> bool:
        """One new position, of each row, that sees itself alone."""
        alone = self._alike and self.first[0] - self.start[0] < 1
        return bool(alone and (not self.sinks or self.first[0] == 0))

    def places(self, positions: Integers) -> Integers:
        """[B, ...] where in what ``join`` returned stand positions [B, ...], beside those of the sinks; -1: nowhere."""
        rows = (-1,) + (1,) * (positions.ndim - 1)
        first, start, counts = (x.reshape(rows) for x in (self.first, self.start, self.counts))
        there = (positions >= np.maximum(start, first - self.carried)) & (positions < first + counts)
        if self._in_ring and not self._alone:
            assert self.window is not None
            place = self.sinks + positions % self.window
        else:
            place = positions - first + self.carried
            place = place + (0 if self._alone or self.from_the_start else self.sinks)
        return np.where(there & (positions >= 0), place, -1)

    def _tensors(self, query: Integers, key: Integers) -> tuple[Tensor, Tensor]:
        if self.sinks:
            sinks = np.broadcast_to(np.arange(self.sinks), (len(key), self.sinks))
            key = np.concatenate([sinks, key], axis=1)
        return torch.from_numpy(query).to(self.device), torch.from_numpy(np.ascontiguousarray(key)).to(
            self.device
        )

    # --- keys and values -----------------------------------------------------------------------------------

    def join(self, layer: Window, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What the new positions attend to, from keys and values [B, J, P, D]."""
        held = layer
        if layer.keys is None:
            held = Window(self.window, self.sinks)
            held.lazy_initialization(k, v)
        assert held.keys is not None
        assert held.values is not None
        n = self.sinks
        self._slots = held.keys.shape[2] - n
        if self._in_ring:
            # the slot holds what no position from here on sees, so a call that fails has harmed nothing
            for ring, new in ((held.keys, k.detach()), (held.values, v.detach())):
                if self._slot is not None:
                    ring[:, :, n + self._slot] = new[:, :, 0]
                else:
                    row = torch.arange(len(ring), device=ring.device)
                    ring[row, :, n + self._slot_of_first] = new[:, :, 0]
                if self._begins:
                    ring[:, :, :n] = self._sinks_after(ring, new)
            self._stage(layer, held)
            if self._alone:
                return k, v
            if k.requires_grad:  # a copy, through which the call's gradients reach the new ones
                newest = torch.arange(self._slots, device=k.device) == self._slot_of_first[:, None]
                if n:
                    first = torch.from_numpy(self.first).to(k.device)[:, None]
                    newest = torch.cat([torch.arange(n, device=k.device) == first, newest], dim=1)
                newest = newest[:, None, :, None]
                return torch.where(newest, k, held.keys), torch.where(newest, v, held.values)
            return held.keys, held.values
        after = Window(self.window, n)
        joined = torch.cat([self._before(held.keys), k], 2), torch.cat([self._before(held.values), v], 2)
        after.keys, after.values = (
            self._ring(ring, part.detach())
            for ring, part in zip((held.keys, held.values), joined, strict=True)
        )
        after.is_initialized = True
        self._stage(layer, after)
        if not n:
            return joined
        sinks = self._sinks_after(held.keys, k), self._sinks_after(held.values, v)
        for ring, part in zip((after.keys, after.values), sinks, strict=True):
            ring[:, :, :n] = part.detach()
        if self.from_the_start:
            return joined
        return torch.cat([sinks[0], joined[0]], 2), torch.cat([sinks[1], joined[1]], 2)

    def _sinks_after(self, ring: Tensor, new: Tensor) -> Tensor:
        """The sinks [B, J, n, D], those that are new included."""
        held = ring[:, :, : self.sinks]
        if not self._begins:
            return held
        number = np.arange(self.sinks)
        is_new = number >= np.maximum(self.first, self._span.end)[:, None]
        is_new &= number < (self.first + self.counts)[:, None]
        place = np.where(is_new, self.sinks + number - self.first[:, None], number)
        B, J, _, D = ring.shape
        index = torch.from_numpy(place).to(ring.device)[:, None, :, None].expand(B, J, -1, D)
        return torch.cat([held, new], dim=2).gather(2, index)

    def _stage(self, layer: Window, after: Window) -> None:
        self._staged[id(layer)] = after
        self._layers.append(layer)  # keeps the id its own

    def staged(self, layer: Window) -> Window:
        """The layer as it is after the call."""
        return self._staged.get(id(layer), layer)

    @cached_property
    def _slot(self) -> int | None:
        """The slot that all rows' first new position takes; None: they take different ones."""
        first = int(self.first[0])
        return first % self._slots if (self.first == first).all() else None

    @cached_property
    def _slot_of_first(self) -> Tensor:
        return torch.from_numpy(self.first % self._slots).to(self.device)

    @cached_property
    def _order(self) -> Tensor:
        """[1 or B, carried] slots of the positions before the new ones, in their order."""
        places = self.first[:, None] - self.carried + np.arange(self.carried)
        places = places[:1] if (places == places[0]).all() else places
        return torch.from_numpy(np.maximum(places, 0) % self._slots).to(self.device)

    def _before(self, ring: Tensor) -> Tensor:
        ring = ring[:, :, self.sinks :]
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
                slots += max(1, slots // 2)
            kept = int((end - self.start).max())
        else:
            slots = self._slots
            kept = min(slots, self.carried + self.width)
        position = end[:, None] - kept + np.arange(kept)  # the last of each row
        place = position - (self.first[:, None] - self.carried)
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

    @cached_property
    def _places_of_slots(self) -> Tensor | None:
        """[slots] where in the joined keys stands what each slot gets, the same in all rows; None: some get nothing."""
        slot, place, slots = self._kept
        if len(slot) > 1 or slot.shape[1] < slots or bool((slot < 0).any()):
            return None
        return torch.empty_like(place[0]).index_copy_(0, slot[0], place[0])

    def _ring(self, old: Tensor, joined: Tensor) -> Tensor:
        slot, place, slots = self._kept
        B, J, _, D = joined.shape
        if self._places_of_slots is not None and not self.sinks:
            with torch.inference_mode(False):
                return joined.index_select(2, self._places_of_slots)
        with torch.inference_mode(False):
            ring = joined.new_zeros(B, J, self.sinks + slots, D)
        if self.window is None:  # what was held before is in its place already
            ring[:, :, : old.shape[2]] = old
        if len(slot) == 1:
            used = slot[0] >= 0
            ring[:, :, self.sinks + slot[0][used]] = joined.index_select(2, place[0][used])
            return ring
        source, missing = self._ring_rows(J, joined.shape[2])
        with torch.inference_mode(False):
            taken = joined.reshape(B * J * joined.shape[2], D).index_select(0, source).view(B, J, slots, D)
        own = ring[:, :, self.sinks :]
        own.copy_(torch.where(missing, own, taken))
        return ring

    def _ring_rows(self, J: int, P: int) -> tuple[Tensor, Tensor]:
        """Where in keys [B, J, P, D] stands what slots get, [B * J * slots]; which get nothing, [B, 1, slots, 1]."""
        if (J, P) not in self._sources:
            slot, place, slots = self._kept
            B = len(slot)
            inverse = torch.full((B, slots + 1), -1, device=slot.device)
            inverse.scatter_(1, torch.where(slot < 0, slots, slot), place)  # the last is no one's
            inverse = inverse[:, None, :slots]
            row = torch.arange(B * J, device=slot.device).view(B, J, 1) * P
            source = (row + inverse.clamp(min=0)).view(-1)
            self._sources[J, P] = source, (inverse < 0)[..., None]
        return self._sources[J, P]
