"""Chunk records in RAM or on a device."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from trailmark.files import in_units
from trailmark.memory.hashes import PIECE_BYTES
from trailmark.memory.tiers.files import Mapped, open_records
from trailmark.memory.tiers.records import Bytes, ChunkStore, Numbers, RecordLayout, bytes_of
from trailmark.ops.arguments import require

_FIRST_SEGMENT = 64  # records
_SEGMENT_BYTES = 256 << 20


class _Segments(NamedTuple):
    """Replaced as one: what Ctrl-C interrupts leaves either the old table or the new one."""

    starts: tuple[int, ...] = ()  # the number of a segment's first record
    tensors: tuple[Tensor, ...] = ()  # [n, 2, J, S, D]
    bytes: tuple[Bytes, ...] = ()  # the same memory [n, record_bytes]; none on a device
    end: int = 0  # records that there is room for


class ResidentStore(ChunkStore):
    """Records in RAM or on the device, in segments that never move: growing copies nothing.

    The first segment has room for ``capacity`` records (0: 64), each further one for as many as all before it,
    256 MiB at most. On the CPU, pages that were never written to take no memory; pinned ones (tier "host" of a
    CUDA device) are taken at once.
    """

    def __init__(
        self,
        record_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
        capacity: int = 0,
    ) -> None:
        super().__init__(record_shape, dtype, device)
        require(capacity >= 0, "capacity", capacity, "a number of records, 0 for no guess")
        self._home = self.device if self.takes == "device" else torch.device("cpu")
        self._pinned = self.takes == "host" and self.device.type == "cuda"
        self._capacity = capacity
        self._segments = _Segments()
        self._mapped: Mapped | None = None

    @classmethod
    def made(cls, layout: RecordLayout, capacity: int = 0, path: str | Path | None = None) -> Self:
        return cls(*layout, capacity)

    @classmethod
    def of_file(cls, path: str | Path, layout: RecordLayout, count: int) -> Self | None:
        """In RAM: records are mapped, and read when they are first used; writing over them does not change the file.

        The file may be removed, but while the store lives nothing may be written to these records in it. None: the
        records lie on a device other than the CPU.
        """
        store = cls(*layout)
        if store._home.type != "cpu":
            return None
        if not count:
            return store
        with open_records(Path(path), count, store.record_bytes) as file:
            try:
                store._mapped = Mapped(file.fileno(), count, store.record_bytes, private=True)
            except OSError as error:  # Linux lets no private map be larger than RAM and swap
                raise store._no_room(count) from error
        with torch.inference_mode(False):
            shape, dtype = layout.kept
            records = torch.from_numpy(store._mapped.bytes).view(dtype).view(count, *shape)
        store._segments = _Segments((0,), (records,), (store._mapped.bytes,), count)
        store._count = count
        return store

    def write(self, first: int, records: Tensor) -> None:
        records = self._expect_records(first, records)
        end = first + len(records)
        while self._segments.end < end:
            self._grow()
        starts, tensors, _, _ = self._segments
        while first < end:
            place = bisect_right(starts, first) - 1
            row = first - starts[place]
            n = min(end - first, len(tensors[place]) - row)
            tensors[place][row : row + n].copy_(records[len(records) - (end - first) :][:n])
            first += n
        self._count = max(self._count, end)

    def _grow(self) -> None:
        starts, tensors, views, end = self._segments
        if tensors:
            n = max(1, min(end, _SEGMENT_BYTES // self.record_bytes))
        else:
            n = self._capacity or _FIRST_SEGMENT
        try:
            segment = self._empty(n, self._home, self._pinned)
        except (MemoryError, RuntimeError) as error:  # torch's allocators raise RuntimeError
            raise self._no_room(n) from error
        view = (bytes_of(segment),) if self._home.type == "cpu" else ()
        self._segments = _Segments((*starts, end), (*tensors, segment), (*views, *view), end + n)

    def _no_room(self, n: int) -> ValueError:
        others = "memory_tier='host' or 'disk'" if self.takes == "device" else "memory_tier='disk'"
        return ValueError(
            f"memory_tier: expected room for another {in_units(n * self.record_bytes)} on tier {self.tier!r} "
            f"({self._home}), got none beside the {in_units(self.num_bytes())} there. {others} holds more; "
            "what was read so far stays valid and can be saved and loaded there."
        )

    def _gather(self, wanted: Numbers) -> Tensor:
        if self._home.type == "cpu":
            return super()._gather(wanted)
        tensors = self._segments.tensors
        with torch.inference_mode(False):
            if not len(wanted):
                return self._empty(0, self._home)
            if len(tensors) == 1:
                return tensors[0].index_select(0, torch.from_numpy(wanted).to(self._home))
            if (runs := self._runs(wanted)) is None:
                return torch.stack([tensors[place][row] for place, row in self._places(wanted)])
            records = self._empty(len(wanted), self._home)
            for place, rows, out in runs:
                torch.index_select(tensors[place], 0, torch.from_numpy(rows).to(self._home), out=records[out])
            return records

    def _collect(self, wanted: Numbers, out: Bytes) -> None:
        # numpy's copies, on this thread: torch's are no faster at this size, and wait for each other's threads
        # when the machine is busy (64 ms for 8 records of 258 KiB, which take 0.1 ms)
        _, tensors, views, _ = self._segments
        if self._mapped is not None:
            self._mapped.fetch(wanted)
        if self._home.type != "cpu":
            for n, (place, row) in enumerate(self._places(wanted)):
                out[n] = bytes_of(tensors[place][row : row + 1].cpu())
        elif len(views) == 1:
            np.take(views[0], wanted, axis=0, out=out, mode="clip")  # "raise" would copy twice
        elif (runs := self._runs(wanted)) is not None:
            for place, rows, here in runs:
                np.take(views[place], rows, axis=0, out=out[here], mode="clip")
        else:
            for n, (place, row) in enumerate(self._places(wanted)):
                out[n] = views[place][row]

    def _runs(self, wanted: Numbers) -> list[tuple[int, Numbers, slice]] | None:
        """Of numbers in ascending order: segment, rows there, and which of them; None: in another order."""
        if (np.diff(wanted) < 0).any():
            return None
        starts = self._segments.starts
        cuts = [*np.searchsorted(wanted, starts).tolist(), len(wanted)]
        return [
            (place, wanted[low:high] - starts[place], slice(low, high))
            for place, (low, high) in enumerate(pairwise(cuts))
            if low < high
        ]

    def _places(self, wanted: Numbers) -> Iterator[tuple[int, int]]:
        """Segment and row of each record."""
        starts = self._segments.starts
        for number in wanted.tolist():
            place = bisect_right(starts, number) - 1
            yield place, number - starts[place]

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        starts, tensors, _, _ = self._segments
        for first, segment in zip(starts, tensors, strict=True):
            offset, flat = first * self.record_bytes, segment.view(torch.uint8).view(-1)
            end = min(stop, offset + len(flat))
            for low in range(max(start, offset), end, PIECE_BYTES):
                yield flat[low - offset : min(low + PIECE_BYTES, end) - offset].cpu().numpy().data

    def close(self) -> None:
        super().close()
        self._segments, self._mapped = _Segments(), None


class DeviceStore(ResidentStore):
    """Tier "device": beside the model, fastest."""

    tier = "device"
    takes = "device"
    no_room = "Choose memory_tier 'host', memory_dtype 'int8', or a shorter one."


class HostStore(ResidentStore):
    """Tier "host": in main memory, pinned where the model is on a CUDA device."""

    tier = "host"
