"""Chunk records used last, kept on the device in front of a slower tier."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from trailmark.memory.tiers.records import ChunkStore, Numbers, bytes_of
from trailmark.ops.arguments import require


class RecentRecords:
    """The records used last, kept on the device in front of a store on host or disk.

    Args:
        store: what is asked for the others.
        capacity: records kept, in one slab that never moves.
    """

    def __init__(self, store: ChunkStore, capacity: int) -> None:
        require(capacity >= 1, "capacity", capacity, "at least 1 record")
        self.store, self.capacity = store, capacity
        self.hits = 0
        """Numbers asked for whose records were here."""
        self.misses = 0
        """All other numbers asked for."""
        with torch.inference_mode(False):
            shape, dtype = store.record_shape, store.layout.given_dtype
            self._slab = torch.empty(capacity, *shape, dtype=dtype, device=store.device)
        self._slab_bytes = bytes_of(self._slab) if self._slab.device.type == "cpu" else None
        # Ctrl-C may come between any two lines: a number's row is forgotten before another record comes there
        self._rows = np.full(0, -1, np.int32)  # of the slab, by number; -1: not here
        # by row; -1: none yet. It may be forgotten, or in another row since
        self._numbers = np.full(capacity, -1)
        self._used = np.full(capacity, -1)  # by row: in which call; -1: never
        self._calls = 0

    def gather(self, numbers: Tensor, fetch: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """As :meth:`ChunkStore.gather`, bit for bit; the store is asked at most once, for what is not here.

        More different records than ``capacity`` come straight from the store.

        Args:
            fetch: what is asked in place of the store's own ``gather``.
        """
        fetch = fetch or self.store.gather
        wanted = self.store._expect_numbers(numbers)
        if len(self._rows) < len(self.store):
            grown = np.full(len(self.store) * 3 // 2, -1, np.int32)
            grown[: len(self._rows)] = self._rows
            self._rows = grown
        rows = self._rows[wanted].astype(np.int64)
        held = rows >= 0
        num_held = int(held.sum())
        self.hits, self.misses = self.hits + num_held, self.misses + len(wanted) - num_held
        self._calls += 1
        if num_held == len(wanted):
            self._used[rows] = self._calls
            return self._take(rows)
        missing = np.unique(wanted[~held])
        if len(missing) + len(np.unique(rows[held])) > self.capacity:
            return fetch(numbers)
        self._used[rows[held]] = self._calls
        self._put(missing, fetch(torch.from_numpy(missing)))
        return self._take(self._rows[wanted].astype(np.int64))

    def _put(self, missing: Numbers, records: Tensor) -> None:
        """Keep records in place of those that were not used for longest."""
        rows = np.argpartition(self._used, len(missing) - 1)[: len(missing)]
        old = self._numbers[rows]
        self._rows[old[(old >= 0) & (self._rows[old] == rows)]] = -1
        self._used[rows] = -1
        if self._slab_bytes is None:
            with torch.inference_mode(False):
                self._slab.index_copy_(0, torch.from_numpy(rows).to(self._slab.device), records)
        else:
            self._slab_bytes[rows] = bytes_of(records)
        self._numbers[rows] = missing
        self._used[rows] = self._calls
        self._rows[missing] = rows

    def _take(self, rows: Numbers) -> Tensor:
        with torch.inference_mode(False):
            if self._slab_bytes is None:
                return self._slab.index_select(0, torch.from_numpy(rows).to(self._slab.device))
            records = torch.empty(len(rows), *self._slab.shape[1:], dtype=self._slab.dtype)
        np.take(self._slab_bytes, rows, axis=0, out=bytes_of(records), mode="clip")
        return records

    def write(self, first: int, records: Tensor) -> None:
        """As :meth:`ChunkStore.write`; what was kept of these numbers is forgotten."""
        self.forget(first, len(records))
        self.store.write(first, records)

    def forget(self, first: int, count: int) -> None:
        """Keep nothing of the numbers ``first ... first + count - 1``, which are to be overwritten."""
        there = self._rows[first : first + count]  # a view
        rows = there[there >= 0]
        there[:] = -1
        self._used[rows] = -1

    def clear(self) -> None:
        """Keep nothing."""
        self._rows[:] = -1
        self._used[:] = -1

    def num_bytes(self) -> int:
        """Bytes of the slab."""
        return self.capacity * self.store.layout.given_bytes
