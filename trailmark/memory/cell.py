"""Cells: what a model that cuts its text in cells of a fixed length holds of the present one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from trailmark.memory.tables import Booleans, Integers


@dataclass(frozen=True)
class Cell:
    """The positions of each row's present cell, after those of the chunk that it began in.

    Their keys and values are in the layers' windows, position i of a row in slot i.
    """

    tokens: Integers  # [B] of the cell that were read
    counts: Integers  # [B] positions held
    chunk: Integers  # [B, n] counted from the first that is not in the memory; -1: absent
    slot: Integers  # [B, n] place in the chunk; a landmark's is S
    is_landmark: Booleans  # [B, n]
    running: tuple[Tensor | None, ...] = ()  # of each layer [B, H or 1, M]: see ``select_by_landmarks``
    chosen: tuple[Tensor | None, ...] = ()  # of each layer int64 [B, H or 1, k]: what the open unit reads
    offset: Integers = field(default_factory=lambda: np.zeros(1, np.int64))
    """[1]: the chunk that M counts from."""
    retrievals: Integers = field(default_factory=lambda: np.zeros(2, np.int64))
    """[2]: of a model with a retrieval gate, what was asked for in all layers that ran, of all rows, and how many of
    those the gate skipped. A unit that shares one selection counts once in each call."""

    @classmethod
    def empty(cls, batch_size: int, num_layers: int) -> Cell:
        zero, none = np.zeros(batch_size, np.int64), np.zeros((batch_size, 0), np.int64)
        nothing = (None,) * num_layers
        return cls(zero, zero, none, none, none.astype(bool), nothing, nothing)

    @property
    def tables(self) -> tuple[Integers, Integers, Booleans]:
        return self.chunk, self.slot, self.is_landmark

    def next_place(self) -> tuple[Integers, Integers]:
        """The chunk [B] and slot [B] of each row's next token. The slot is the tokens of the open chunk; 0: none is."""
        last = self.counts - 1
        if not self.chunk.shape[1]:
            return np.zeros_like(last), np.zeros_like(last)
        row, at = np.arange(len(last)), last.clip(0)
        closed = self.is_landmark[row, at]
        chunk = np.where(last < 0, 0, self.chunk[row, at] + closed)
        return chunk, np.where((last < 0) | closed, 0, self.slot[row, at] + 1)

    def open_units(self) -> Booleans:
        """[B] whether the row's next position belongs to a chunk of which this cell has seen a position."""
        return (self.tokens > 0) & (self.next_place()[1] > 0)

    def take_rows(self, rows: Integers) -> Cell:
        """Row b is a copy of row ``rows[b]``."""
        index, counts = torch.from_numpy(rows), self.counts[rows]
        width = int(counts.max(initial=0))

        def take(x: Tensor | None) -> Tensor | None:
            with torch.inference_mode(False):
                return None if x is None else x.index_select(0, index.to(x.device))

        return replace(
            self,
            tokens=self.tokens[rows],
            counts=counts,
            chunk=self.chunk[rows, :width],
            slot=self.slot[rows, :width],
            is_landmark=self.is_landmark[rows, :width],
            running=tuple(map(take, self.running)),
            chosen=tuple(map(take, self.chosen)),
        )

    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (*self.running, *self.chosen) if x is not None)
