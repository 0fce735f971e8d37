"""Where a memory's keys and values live: stores of chunk records on the device, on the host or on disk."""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import shutil
import sys
import tempfile
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trailmark.ops.arguments import require

try:
    import fcntl
except ImportError:  # not on Windows: two writers of one file are not noticed there
    fcntl = None  # type: ignore[assignment]

TIERS = ("device", "host", "disk")

_FIRST_SEGMENT = 64  # records
_SEGMENT_BYTES = 256 << 20
_PIECE_BYTES = 4 << 20  # working memory of streaming and converting
_KEEP_FREE = 64 << 20  # of a disk, for the rest of a memory: landmark vectors, windows
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]


class NoSpaceError(ValueError):
    """A disk is full. What was written before stays valid."""

    def __init__(self, argument: str, folder: Path, needed: int, way_out: str) -> None:
        self.needed = needed
        """Bytes that were to be written, or kept free."""
        self.free = shutil.disk_usage(folder).free
        """Bytes that are free."""
        limited = "" if self.free < needed else " and a quota or limit of file size below it"
        super().__init__(
            f"{argument}: expected {in_units(needed)} free on the disk of {str(folder)!r}, "
            f"got {in_units(self.free)}{limited}. {way_out}"
        )


def in_units(num_bytes: int) -> str:
    """A number of bytes for people: "2.5 MiB"."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.1f} {unit}"
    return f"{num_bytes} bytes"


def is_no_space(error: OSError) -> bool:
    """Whether the disk, a quota or a limit of file size is what stopped a write."""
    return error.errno in _NO_SPACE


class Gathered:
    """Records on their way to a device; :meth:`wait` gives them to the current stream."""

    def __init__(self, records: Tensor, copied: torch.cuda.Event | None = None) -> None:
        self._records, self._copied = records, copied

    def wait(self) -> Tensor:
        """[n, 2, J, S, D]. Work queued on the current stream from now on waits for the copy; the CPU does not."""
        if self._copied is not None:
            stream = torch.cuda.current_stream(self._records.device)
            stream.wait_event(self._copied)
            # allocated on the copying stream: not given to another copy before this stream has read it
            self._records.record_stream(stream)
        return self._records


class ChunkStore(ABC):
    """A log of chunk records, numbered in the order written.

    A record [2, J, S, D] holds a chunk's keys (0) and values (1), as GCA reads them: a head's stand together.
    The log of n records takes n * 2 * J * S * D * bytes of a number, nothing else.
    """

    tier: str

    def __init__(self, record_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> None:
        require(
            len(record_shape) == 4 and record_shape[0] == 2 and min(record_shape) > 0,
            "record_shape",
            tuple(record_shape),
            "[2, J, S, D], none of them 0",
        )
        self.record_shape = tuple(record_shape)
        """(2, J, S, D)"""
        self.dtype = dtype
        self.device = torch.device(device)
        """Where :meth:`gather` puts records."""
        self.record_bytes = math.prod(record_shape) * dtype.itemsize
        self._count = 0
        self._stream: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        """Records written."""
        return self._count

    def num_bytes(self) -> int:
        """Bytes of the records: ``len * 2 * J * S * D * itemsize``; spare capacity does not count."""
        return self._count * self.record_bytes

    @abstractmethod
    def write(self, first: int, records: Tensor) -> None:
        """Write records at the numbers ``first ...``, after the last or over what is there.

        Args:
            first: at most the number of records.
            records: [n, 2, J, S, D] of any strides, device and dtype; the store's dtype is what is kept.

        Raises:
            ValueError: for a shape or number that does not fit, or no room; the store is then as it was.
        """

    @abstractmethod
    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """The log's bytes ``start ... stop - 1`` in order, at most 4 MiB a time; threads may do this together."""

    @abstractmethod
    def _collect(self, wanted: Numbers, out: Bytes) -> None:
        """Copy records to ``out`` [n, record_bytes], on the CPU."""

    def close(self) -> None:
        """Let go of memory, files and locks. The store cannot be used any more."""
        self._count = 0

    def gather(self, numbers: Tensor) -> Tensor:
        """Copies [n, 2, J, S, D] on ``device`` of the records ``numbers``.

        Args:
            numbers: int64 [n] on the CPU, in any order, also repeated.

        Raises:
            ValueError: for a number that was not written.
        """
        return self.gather_async(numbers).wait()

    def gather_async(self, numbers: Tensor) -> Gathered:
        """As :meth:`gather`; on a CUDA device the copy goes on while other work is queued or computed."""
        wanted = self._expect_numbers(numbers)
        cuda = self.device.type == "cuda"
        records = self._empty(len(wanted), "cpu", pin_memory=cuda)
        self._collect(wanted, bytes_of(records))
        if self.device.type == "cpu":
            return Gathered(records)
        with torch.inference_mode(False):
            if not cuda:
                return Gathered(records.to(self.device))
            if self._stream is None:
                self._stream = torch.cuda.Stream(self.device)
            with torch.cuda.stream(self._stream):
                # Neither stream waits for the other before the copy: the pinned buffer was filled by the CPU and
                # goes back to PyTorch's pool, which hands it out again only after this copy; what is copied to
                # is of this stream's own pool, and goes back when all that read it are done (Gathered.wait).
                copy = records.to(self.device, non_blocking=True)
                return Gathered(copy, self._stream.record_event())

    def write_file(self, file: BinaryIO, count: int) -> None:
        """Stream the bytes of the first ``count`` records to a binary file; 4 MiB of working memory."""
        self._expect_count(count)
        for piece in self.pieces(0, count * self.record_bytes):
            file.write(piece)

    def copy_to(self, other: ChunkStore, count: int) -> None:
        """Write the first ``count`` records to the start of ``other``, 4 MiB (or one record) a time."""
        self._expect_count(count)
        step = max(1, _PIECE_BYTES // self.record_bytes)
        buffer = self._empty(min(step, count), "cpu")
        for first in range(0, count, step):
            n = min(step, count - first)
            self._collect(np.arange(first, first + n), bytes_of(buffer[:n]))
            other.write(first, buffer[:n])

    def _expect_records(self, first: int, records: Tensor) -> Tensor:
        require(
            tuple(records.shape[1:]) == self.record_shape,
            "records",
            tuple(records.shape),
            f"shape [n, 2, J, S, D] = (n, {', '.join(map(str, self.record_shape))})",
        )
        require(
            0 <= first <= self._count, "first", first, f"a number up to the {self._count} records written"
        )
        return records.detach()

    def _expect_numbers(self, numbers: Tensor) -> Numbers:
        wanted = numbers.numpy()
        require(
            wanted.dtype == np.int64 and wanted.ndim == 1,
            "numbers",
            f"{numbers.dtype} {list(numbers.shape)}",
            "int64 [n]",
        )
        if (wanted.view(np.uint64) >= self._count).any():  # a negative number is large without its sign
            came = f"{wanted.min()} ... {wanted.max()}"
            require(False, "numbers", came, f"numbers of the {self._count} records written")
        return wanted

    def _expect_count(self, count: int) -> None:
        require(0 <= count <= self._count, "count", count, f"at most the {self._count} records written")

    def _empty(self, n: int, device: torch.device | str, pin_memory: bool = False) -> Tensor:
        # never of inference mode: outside it, such a tensor can be neither written to nor part of a graph
        with torch.inference_mode(False):
            return torch.empty(n, *self.record_shape, dtype=self.dtype, device=device, pin_memory=pin_memory)


def bytes_of(records: Tensor) -> Bytes:
    """The same memory as [n, bytes of a record]; contiguous, on the CPU."""
    width = math.prod(records.shape[1:]) * records.element_size()
    return records.view(torch.uint8).numpy().reshape(len(records), width)


class _Mapped:
    """The first records of a file, mapped: read from the disk when they are first used.

    Private, where it can be written to: what is overwritten is copied to RAM, and the file stays as it is.
    """

    def __init__(self, descriptor: int, count: int, record_bytes: int, private: bool) -> None:
        access = mmap.ACCESS_COPY if private else mmap.ACCESS_READ
        self._map = mmap.mmap(descriptor, count * record_bytes, access=access)
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8).reshape(count, record_bytes)

    def fetch(self, wanted: Numbers) -> None:
        """Begin to read all these records at once, not page by page as they are touched.

        20 times as fast where they are not in RAM, half a microsecond each where they are; one each for records
        side by side.
        """
        if not hasattr(mmap, "MADV_WILLNEED"):
            return
        count, width = self.bytes.shape
        there = wanted[wanted < count]
        ends = np.flatnonzero(np.diff(there) != 1)  # of records side by side
        firsts, lasts = there[np.append(0, ends + 1)[: len(there)]], there[np.append(ends, -1)[: len(there)]]
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            start = first * width // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, start, (last + 1) * width - start)


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
        tier: str,
        record_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
        capacity: int = 0,
    ) -> None:
        super().__init__(record_shape, dtype, device)
        require(tier in ("device", "host"), "tier", repr(tier), "'device' or 'host'")
        require(capacity >= 0, "capacity", capacity, "a number of records, 0 for no guess")
        self.tier = tier
        self._home = self.device if tier == "device" else torch.device("cpu")
        self._pinned = tier == "host" and self.device.type == "cuda"
        self._capacity = capacity
        self._segments = _Segments()
        self._mapped: _Mapped | None = None

    @classmethod
    def of_file(
        cls,
        tier: str,
        path: str | Path,
        record_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
        count: int,
    ) -> ResidentStore:
        """A store in RAM that begins with the first ``count`` records of a file.

        They are mapped, and read when they are first used; writing over them does not change the file. The file
        may be removed, but while the store lives nothing may be written to these records in it.

        Raises:
            ValueError: for a file that is missing or too short, or larger than RAM allows.
        """
        store = cls(tier, record_shape, dtype, device)
        assert store._home.type == "cpu"
        if not count:
            return store
        with _open_records(Path(path), count, store.record_bytes) as file:
            try:
                store._mapped = _Mapped(file.fileno(), count, store.record_bytes, private=True)
            except OSError as error:  # Linux lets no private map be larger than RAM and swap
                raise store._no_room(count) from error
        with torch.inference_mode(False):
            records = torch.from_numpy(store._mapped.bytes).view(dtype).view(count, *store.record_shape)
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
        others = "memory_tier='host' or 'disk'" if self.tier == "device" else "memory_tier='disk'"
        return ValueError(
            f"memory_tier: expected room for another {in_units(n * self.record_bytes)} on tier {self.tier!r} "
            f"({self._home}), got none beside the {in_units(self.num_bytes())} there. {others} holds more; "
            "what was read so far stays valid and can be saved and loaded there."
        )

    def gather_async(self, numbers: Tensor) -> Gathered:
        if self._home.type == "cpu":
            return super().gather_async(numbers)
        wanted = self._expect_numbers(numbers)
        tensors = self._segments.tensors
        with torch.inference_mode(False):
            if not len(wanted):
                return Gathered(self._empty(0, self._home))
            if len(tensors) == 1:
                return Gathered(tensors[0].index_select(0, torch.from_numpy(wanted).to(self._home)))
            if (runs := self._runs(wanted)) is None:
                return Gathered(torch.stack([tensors[place][row] for place, row in self._places(wanted)]))
            records = self._empty(len(wanted), self._home)
            for place, rows, out in runs:
                torch.index_select(tensors[place], 0, torch.from_numpy(rows).to(self._home), out=records[out])
            return Gathered(records)

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
            for low in range(max(start, offset), end, _PIECE_BYTES):
                yield flat[low - offset : min(low + _PIECE_BYTES, end) - offset].cpu().numpy().data

    def close(self) -> None:
        super().close()
        self._segments, self._mapped = _Segments(), None


class DiskStore(ChunkStore):
    """Records in one file: appended with ``pwrite``, read through a memory map, never read whole.

    A full disk is then an error of ``pwrite``, where writing through a map would end the process. The map is
    read-only, so it may be larger than RAM and swap; no record stays in anonymous memory.

    The file is opened for writing, and locked against other writers, at the first write.

    Args:
        path: the file; its folder is made. None: one in a temporary folder that goes with the store.
        count: records of an existing file to begin with, of which a manifest knows (``vouched``); 0: a new file.
        keep_free: bytes of the disk that no write takes.

    Raises:
        ValueError: for a file that is missing or shorter than ``count`` records, or that is in a new one's way.
    """

    tier = "disk"

    def __init__(
        self,
        path: str | Path | None,
        record_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
        count: int = 0,
        keep_free: int = _KEEP_FREE,
    ) -> None:
        super().__init__(record_shape, dtype, device)
        require(count >= 0, "count", count, "a number of records, 0 for a new file")
        self._temporary = temporary_folder(self) if path is None else None
        self.path = Path(path) if path is not None else Path(str(self._temporary)) / "chunks.bin"
        self.vouched = min(count, overwritten_from(self.path)) if count else 0
        """Records at the start that are as the last manifest of this file says."""
        self.keep_free = keep_free
        self._files = _Files()
        weakref.finalize(self, self._files.close)
        self._seen: tuple[int, ...] | None = None  # what the file was when it was opened for reading
        self._mapped: _Mapped | None = None
        if count:
            self._files.reader = _open_records(self.path, count, self.record_bytes)
            self._seen = _stamp(self._files.reader)
        elif self.path.exists() and self.path.stat().st_size:
            raise ValueError(
                f"path: expected no file, or an empty one, for a new memory, {str(self.path)!r} is in the way. "
                "Choose another folder, or load the memory that is there."
            )
        self._count = count

    def hold(self) -> None:
        """Open the file for writing and keep other writers out, until :meth:`close`. Writing does it by itself.

        Raises:
            ValueError: if something else writes the file, has written to it since, or it cannot be written.
        """
        if self._files.writer is not None:
            return
        new = self._files.reader is None
        path = str(self.path)
        try:
            if new:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.touch()
            writer = open(self.path, "r+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ValueError(
                f"memory_folder: expected a chunk file to write to, {path!r} is not ({error.strerror}). "
                "Choose another folder; a saved memory can be loaded with memory_tier='host' and saved elsewhere."
            ) from error
        if not lock(writer.fileno()):
            writer.close()
            raise ValueError(
                f"memory_folder: expected a chunk file that nothing else writes, {path!r} is being written by "
                "another process or cache. Close that one, or load the memory with memory_tier='host'."
            )
        if os.fstat(writer.fileno()).st_size > 0 if new else _stamp(writer) != self._seen:
            writer.close()
            raise ValueError(
                f"memory_folder: expected {path!r} as it was when this cache opened it, something else has "
                "written to it since. Load the memory again."
            )
        self._files.writer = writer

    def write(self, first: int, records: Tensor) -> None:
        records = self._expect_records(first, records)
        n = len(records)
        if not n:
            return
        self.hold()
        writer = self._descriptor()
        size = os.fstat(writer).st_size
        needed = (first + n) * self.record_bytes - size
        if needed > 0 and needed + self.keep_free > shutil.disk_usage(self.path.parent).free:
            raise self._no_space(needed + self.keep_free)
        new = min(n, max(0, self._count - first))  # row of the first record that is appended
        try:
            if first < self.vouched:
                self._note_overwriting(first)
            # what is appended first: only that can find the disk full, and then nothing else has changed
            self._write_rows(writer, first + new, records[new:])
            self._write_rows(writer, first, records[:new])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(writer, size)
            if is_no_space(error):
                raise self._no_space(max(needed, 0)) from error
            raise
        self._count = max(self._count, first + n)

    def _write_rows(self, writer: int, first: int, records: Tensor) -> None:
        step = max(1, _PIECE_BYTES // self.record_bytes)
        for start in range(0, len(records), step):
            rows = records[start : start + step].to("cpu", self.dtype).contiguous()
            write_at(writer, bytes_of(rows).reshape(-1).data, (first + start) * self.record_bytes)

    def _note_overwriting(self, first: int) -> None:
        """A manifest knows other records than will stand there: whoever loads it finds out, even after a kill."""
        with open(overwritten_note(self.path), "w", encoding="ascii") as file:
            file.write(str(first))
            file.flush()
            os.fsync(file.fileno())
        self.vouched = first

    def _no_space(self, needed: int) -> NoSpaceError:
        return NoSpaceError(
            "memory_folder",
            self.path.parent,
            needed,
            f"The {self._count} chunks written so far stay valid: free some space and read on from there, or "
            "save the cache in a folder on another disk and load it from that.",
        )

    def _collect(self, wanted: Numbers, out: Bytes) -> None:
        if not len(wanted):
            return
        mapped = self._mapped
        if mapped is None or int(wanted.max()) >= len(mapped.bytes):
            mapped = _Mapped(self._descriptor(), self._count, self.record_bytes, private=False)
            self._mapped = mapped
        mapped.fetch(wanted)
        np.take(mapped.bytes, wanted, axis=0, out=out, mode="clip")  # "raise" would copy twice

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        while start < stop:
            read = os.pread(self._descriptor(), min(_PIECE_BYTES, stop - start), start)
            if not read:
                raise ValueError(
                    f"path: expected {stop} bytes in {str(self.path)!r}, got {start}. It was cut off."
                )
            yield memoryview(read)
            start += len(read)

    def _descriptor(self) -> int:
        file = self._files.writer or self._files.reader
        assert file is not None, "closed, or nothing written yet"
        return file.fileno()

    def lies_in(self, folder: Path) -> bool:
        """Whether this very file is found in ``folder`` (another memory saved there may have replaced it)."""
        file = self._files.writer or self._files.reader
        if file is None:
            return self.path.parent.resolve() == folder.resolve()
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(folder / self.path.name))
        except OSError:
            return False

    def sync(self) -> None:
        """Have everything written on the disk itself (fsync)."""
        if self._files.writer is not None:
            try:
                os.fsync(self._files.writer.fileno())
            except OSError as error:
                if is_no_space(error):  # a network's disk says it this late
                    raise self._no_space(self.num_bytes()) from error
                raise

    def close(self) -> None:
        super().close()
        self._mapped = None
        self._files.close()
        if self._temporary is not None:
            _remove_folder(self._temporary, os.getpid())


class _Files:
    """Files of a store, apart from it, so that they are closed when it is collected."""

    def __init__(self) -> None:
        self.reader: FileIO | None = None
        self.writer: FileIO | None = None

    def close(self) -> None:
        for file in (self.reader, self.writer):
            if file is not None:
                file.close()
        self.reader = self.writer = None


def _open_records(path: Path, count: int, record_bytes: int) -> FileIO:
    """A file that holds as many records."""
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise ValueError(
            f"path: expected a chunk file to read, got {str(path)!r} ({error.strerror})."
        ) from error
    size = os.fstat(file.fileno()).st_size
    if size < count * record_bytes:
        file.close()
        raise ValueError(
            f"path: expected at least {count * record_bytes} bytes ({count} chunks) in {str(path)!r}, got {size}. "
            "The file was cut off: take it from a copy, or read the text again."
        )
    return file


def lock(descriptor: int) -> bool:
    """Keep others from this file or folder until the descriptor is closed; False: another has it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _stamp(file: FileIO) -> tuple[int, ...]:
    """What changes when a file is replaced or written to."""
    stat = os.fstat(file.fileno())
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """All of ``data`` at ``offset`` of a file."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def overwritten_note(path: Path) -> Path:
    """The file beside a chunk file that says from which record on a manifest may not hold."""
    return path.with_name(path.name + ".overwritten")


def overwritten_from(path: Path) -> int:
    """The first record of a chunk file that a manifest may not know; 2 ** 63 - 1 without a note."""
    try:
        return int(overwritten_note(path).read_text(encoding="ascii"))
    except FileNotFoundError:
        return sys.maxsize
    except ValueError:  # cut off while it was written
        return 0


def temporary_folder(owner: object, parent: str | Path | None = None) -> Path:
    """A new folder, removed when ``owner`` is collected or the interpreter exits.

    Below ``parent``; None: where temporary files go (``TMPDIR``), which on some systems is RAM.
    """
    folder = Path(tempfile.mkdtemp(prefix="trailmark-", dir=parent))
    weakref.finalize(owner, _remove_folder, folder, os.getpid())
    return folder


def _remove_folder(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not a fork's to remove
        shutil.rmtree(folder, ignore_errors=True)


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
            self._slab = torch.empty(capacity, *store.record_shape, dtype=store.dtype, device=store.device)
        self._slab_bytes = bytes_of(self._slab) if self._slab.device.type == "cpu" else None
        # Ctrl-C may come between any two lines: a number's row is forgotten before another record comes there
        self._rows = np.full(0, -1, np.int32)  # of the slab, by number; -1: not here
        self._numbers = np.full(
            capacity, -1
        )  # by row; -1: none yet. It may be forgotten, or in another row since
        self._used = np.full(capacity, -1)  # by row: in which call; -1: never
        self._calls = 0

    def gather(self, numbers: Tensor) -> Tensor:
        """As :meth:`ChunkStore.gather`, bit for bit; the store is asked at most once, for what is not here.

        More different records than ``capacity`` come straight from the store.
        """
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
            return self.store.gather(numbers)
        self._used[rows[held]] = self._calls
        self._fetch(missing)
        return self._take(self._rows[wanted].astype(np.int64))

    def _fetch(self, missing: Numbers) -> None:
        """Put records in place of those that were not used for longest."""
        records = self.store.gather(torch.from_numpy(missing))
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
        return self.capacity * self.store.record_bytes


def make_store(
    tier: str,
    record_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
    capacity: int = 0,
    path: str | Path | None = None,
) -> ChunkStore:
    """A new, empty store.

    Args:
        tier: "device", "host" or "disk".
        record_shape: (2, J, S, D).
        dtype: what records are kept in.
        device: where :meth:`ChunkStore.gather` puts them.
        capacity: records to make room for at once on device and host; 0: no guess. On the CPU a guess costs
            no memory before it is used.
        path: the file of tier "disk"; None: one in a temporary folder that goes with the store.

    Raises:
        ValueError: for another tier, or a ``path`` for a tier without files.
    """
    _expect_tier(tier)
    if tier == "disk":
        return DiskStore(path, record_shape, dtype, device)
    require(
        path is None,
        "memory_folder",
        repr(str(path)),
        f"none for memory_tier={tier!r}",
        "Only tier 'disk' keeps its chunks in files; the others are saved when they are asked to.",
    )
    return ResidentStore(tier, record_shape, dtype, device, capacity)


def open_store(
    tier: str,
    path: str | Path,
    record_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
    count: int,
) -> ChunkStore:
    """A store of any tier that begins with the first ``count`` records of a file.

    In RAM and on disk nothing is read before it is used; a device other than the CPU is filled. Only tier "disk"
    writes to the file.

    Raises:
        ValueError: for another tier, a file that is missing or too short, or no room.
    """
    _expect_tier(tier)
    if tier == "disk":
        return DiskStore(path, record_shape, dtype, device, count)
    if tier == "host" or torch.device(device).type == "cpu":
        return ResidentStore.of_file(tier, path, record_shape, dtype, device, count)
    store = ResidentStore(tier, record_shape, dtype, device, count)
    if count:
        source = DiskStore(path, record_shape, dtype, "cpu", count)
        source.copy_to(store, count)
        source.close()
    return store


def _expect_tier(tier: str) -> None:
    require(
        tier in TIERS,
        "memory_tier",
        repr(tier),
        "one of " + ", ".join(map(repr, TIERS)),
        "'device' is fastest, 'disk' holds most.",
    )
