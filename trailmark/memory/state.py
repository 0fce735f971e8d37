"""The state of a cache: one moment of all that a model carries from call to call."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trailmark.memory.cell import Cell
from trailmark.memory.chunks import MemorySize
from trailmark.memory.tables import Booleans, Integers
from trailmark.memory.window import Span, Window
from trailmark.ops import ReadAgain


class Retrieved(NamedTuple):
    """What the open chunk of each row reads, for one group: K chunks, fetched once and kept until it closes."""

    indices: Integers  # [B, K] chunk numbers; -1: nothing
    lengths: Integers  # [B, K] keys that exist
    weights: Tensor  # [B, K]
    k: Tensor  # [B, K, S, J, D]
    v: Tensor
    slots: Tensor  # [B, 1, K] where each chunk stands in k and v; -1: nothing
    short: Tensor | None  # [B, K] the lengths, if some chunk may have fewer keys than S
    again: defaultdict[int, ReadAgain]  # what calls share, by the set of heads that they read

    @classmethod
    def of(
        cls, indices: Integers, lengths: Integers, weights: Tensor, k: Tensor, v: Tensor, short: bool
    ) -> Retrieved:
        """Made ready for many calls: keys of a head side by side, tables on the device."""
        place = np.where(indices < 0, -1, np.arange(indices.shape[1]))
        with torch.inference_mode(False):  # else no graph could hold them afterwards
            slots = torch.from_numpy(place[:, None]).to(k.device)
            given = torch.from_numpy(lengths).to(k.device) if short else None
            if weights.is_inference():
                weights = weights.clone()
            k, v = _head_major(k), _head_major(v)
            return cls(indices, lengths, weights, k, v, slots, given, defaultdict(ReadAgain))

    def replaced(self, rows: Booleans, new: Retrieved) -> Retrieved:
        """With what is new for the rows [B] that are True."""
        place = torch.from_numpy(np.flatnonzero(rows)).to(self.k.device)

        def joined(old: Tensor, fresh: Tensor) -> Tensor:
            dtype = torch.promote_types(old.dtype, fresh.dtype)  # memories may be kept in several
            with torch.inference_mode(False):
                return old.to(dtype, copy=True).index_copy_(0, place, fresh.index_select(0, place).to(dtype))

        indices, lengths = (
            np.where(rows[:, None], fresh, old)
            for fresh, old in ((new.indices, self.indices), (new.lengths, self.lengths))
        )
        weights, k, v = (joined(getattr(self, name), getattr(new, name)) for name in ("weights", "k", "v"))
        return self.of(indices, lengths, weights, k, v, self.short is not None or new.short is not None)

    def without(self, rows: Booleans) -> Retrieved:
        """Nothing for the rows [B] that are True."""
        indices = np.where(rows[:, None], -1, self.indices)
        return self.of(indices, self.lengths, self.weights, self.k, self.v, self.short is not None)


STATES = ("open_states", "open_ids", "states", "state_kv")
"""The tensors of a :class:`CacheState` that are one row a text and nothing more."""


class Deferred(NamedTuple):
    """Positions that only the layers below the memory have seen: the others run when something needs them."""

    states: Tensor  # [B, P, E]
    chunk: Integers  # [b, P] counted from first_chunk; -1: absent
    is_landmark: Booleans  # [b, P]
    first_chunk: Integers  # [B]
    begun: Integers  # [b] positions of the first chunk before these


class Focus(NamedTuple):
    """What a question found, and may choose with its answer."""

    chunks: Integers  # ascending: of those that were there when it looked these alone
    known: int  # how many were; all that close later may be chosen


@dataclass(frozen=True)
class CacheState:
    """One moment of a cache. A call makes a new one and puts it in place at its very end, so a call that is
    stopped half-way (Ctrl-C, a full disk) leaves the cache as it was.
    """

    num_tokens: Integers  # [B] read
    num_positions: Integers  # [B] the same with landmarks
    phases: Integers  # [B] tokens of the open chunk
    memory: MemorySize
    spans: tuple[Span, ...]  # one per stage of layers
    layers: tuple[Window, ...]
    pending: tuple[Retrieved | None, ...]  # one per group
    open_states: Tensor | None = None  # [B, S, E]: the open chunk's states below the memory, or its kv
    open_ids: Tensor | None = None  # [B, S]: its tokens, for models that embed text
    deferred: Deferred | None = None
    cell: Cell | None = None  # of a model that cuts its text in cells
    states: Tensor | None = None  # [B, M, E]: of a recurrent model, as the open block reads them
    state_kv: Tensor | None = None  # [B, M, 2 J D]: their keys and values
    focus: tuple[Focus | None, ...] = ()
    """Of each row what may be chosen; None: every chunk. Not saved."""


def take_rows(state: CacheState, rows: Integers) -> CacheState:
    """Row b is a copy of row ``rows[b]``."""
    index = torch.from_numpy(rows)

    def take(x: Tensor) -> Tensor:
        with torch.inference_mode(False):  # what is taken is written to later
            return x.index_select(0, index.to(x.device))

    alone: dict[str, Any] = {name: take(x) for name in STATES if (x := getattr(state, name)) is not None}
    deferred = state.deferred
    if deferred is not None:
        b = len(deferred.chunk) > 1
        deferred = Deferred(
            take(deferred.states),
            deferred.chunk[rows] if b else deferred.chunk,
            deferred.is_landmark[rows] if b else deferred.is_landmark,
            deferred.first_chunk[rows],
            deferred.begun[rows] if len(deferred.begun) > 1 else deferred.begun,
        )
    return CacheState(
        num_tokens=state.num_tokens[rows],
        num_positions=state.num_positions[rows],
        phases=state.phases[rows],
        memory=state.memory.take_rows(rows),
        spans=tuple(Span(x.start[rows], x.end[rows]) for x in state.spans),
        layers=tuple(x.take_rows(index) for x in state.layers),
        pending=tuple(
            None
            if x is None
            else Retrieved.of(
                x.indices[rows],
                x.lengths[rows],
                take(x.weights),
                take(x.k),
                take(x.v),
                x.short is not None,
            )
            for x in state.pending
        ),
        deferred=deferred,
        cell=None if state.cell is None else state.cell.take_rows(rows),
        focus=tuple(state.focus[row] for row in rows) if state.focus else (),
        **alone,
    )


def _head_major(x: Tensor) -> Tensor:
    """[B, K, S, J, D], each head's keys of all chunks side by side in memory, as GCA reads them."""
    x = x.permute(0, 3, 1, 2, 4).contiguous()
    return (x.clone() if x.is_inference() else x).permute(0, 2, 3, 1, 4)
