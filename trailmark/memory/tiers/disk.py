"""Chunk records in a file."""

from __future__ import annotations

import contextlib
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
import torch
from torch import Tensor

from trailmark.files import NoSpaceError, is_no_space, lock, write_at
from trailmark.memory.hashes import PIECE_BYTES, pieces_of
from trailmark.memory.tiers.files import (
    Mapped,
    note_overwriting,
    open_records,
    open_to_write,
    overwritten_from,
    remove_if_own,
    stamp,
    temporary_folder,
)
from trailmark.memory.tiers.records import Bytes, ChunkStore, Numbers, RecordLayout, bytes_of
from trailmark.ops.arguments import require

_KEEP_FREE = 64 << 20  # of a disk, for the rest of a memory: landmark vectors, windows
_READ_ON = (
    "What was read stays valid: free some space and read on from there, or go on in a folder on another disk."
)


def expect_there(folder: Path) -> None:
    """Raise a ValueError where a folder that chunks are written to was removed."""
    try:
        os.stat(folder)
    except OSError as error:
        raise ValueError(
            f"memory_folder: expected the folder {str(folder)!r}, which chunks are written to, it is gone "
            f"({error.strerror}). Leave it alone while something is read into it; read the text again."
        ) from error


class DiskStore(ChunkStore):
    """Records in one file: appended with ``pwrite``, read through a memory map, never read whole.

    A full disk is then an error of ``pwrite``, where writing through a map would end the process. The map is
    read-only, so it may be larger than RAM and swap; no record stays in anonymous memory.

    The file is opened for writing, and locked against other writers, at the first write.

    Args:
        path: the file; its folder is made. None: one in a temporary folder that goes with the store.
        count: records of an existing file to begin with, of which a manifest knows (``vouched``); 0: a new file.
        keep_free: bytes of the disk that no write takes.
        before: of a new file that several stores write, each its own records: how many of others come before these.
            None: the file is this store's alone.
        way_out: what the error of a disk that is full says last.

    Raises:
        ValueError: for a file that is missing or shorter than ``count`` records, or that is in a new one's way.
    """

    tier = "disk"
    takes = "disk"
    needs_folder = True
    no_room = "Choose another memory_folder (or TMPDIR), memory_dtype 'int8', or a shorter one."

    def __init__(
        self,
        path: str | Path | None,
        record_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
        count: int = 0,
        keep_free: int = _KEEP_FREE,
        before: int | None = None,
        way_out: str = _READ_ON,
    ) -> None:
        super().__init__(record_shape, dtype, device)
        require(count >= 0, "count", count, "a number of records, 0 for a new file")
        require(before is None or not count, "before", before, "None for an existing file")
        self._temporary = temporary_folder(self) if path is None else None
        self.path: Path = Path(path) if path is not None else Path(str(self._temporary)) / "chunks.bin"
        self.vouched = min(count, overwritten_from(self.path)) if count else 0
        self.keep_free, self._way_out = keep_free, way_out
        self._shared, self.before = before is not None, before or 0
        self._files = _Files()
        weakref.finalize(self, self._files.close)
        self._seen: tuple[int, ...] | None = None  # what the file was when it was opened for reading
        self._mapped: Mapped | None = None
        if count:
            self._files.reader = open_records(self.path, count, self.record_bytes)
            self._seen = stamp(self._files.reader)
        elif not self._shared and self.path.exists() and self.path.stat().st_size:
            raise ValueError(
                f"path: expected no file, or an empty one, for a new memory, {str(self.path)!r} is in the way. "
                "Choose another folder, or load the memory that is there."
            )
        self._count = count

    @classmethod
    def made(cls, layout: RecordLayout, capacity: int = 0, path: str | Path | None = None) -> Self:
        return cls(path, *layout)

    @classmethod
    def of_file(cls, path: str | Path, layout: RecordLayout, count: int) -> Self:
        return cls(path, *layout, count)

    def hold(self) -> None:
        """As :meth:`ChunkStore.hold`: opens the file for writing. Writing does it by itself."""
        if self._files.writer is not None:
            return
        new = self._files.reader is None
        path = str(self.path)
        try:
            if new:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            writer = open_to_write(self.path, new)
        except OSError as error:
            raise ValueError(
                f"memory_folder: expected a chunk file to write to, {path!r} is not ({error.strerror}). "
                "Choose another folder; a saved memory can be loaded with memory_tier='host' and saved elsewhere."
            ) from error
        if not lock(writer.fileno(), self._shared):
            writer.close()
            raise ValueError(
                f"memory_folder: expected a chunk file that nothing else writes, {path!r} is being written by "
                "another process or cache. Close that one, or load the memory with memory_tier='host'."
            )
        changed = os.fstat(writer.fileno()).st_size > 0 if new else stamp(writer) != self._seen
        if changed and not self._shared:
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
        size = self.num_bytes() if self._shared else os.fstat(writer).st_size
        needed = (first + n) * self.record_bytes - size
        if needed > 0 and needed + self.keep_free > self._free():
            raise self._no_space(needed + self.keep_free)
        new = min(n, max(0, self._count - first))  # row of the first record that is appended
        try:
            # what is appended first: only that can find the disk full, and then nothing else has changed
            self._write_rows(writer, first + new, records[new:])
            self._write_rows(writer, first, records[:new])
        except OSError as error:
            if not self._shared:
                with contextlib.suppress(OSError):
                    os.ftruncate(writer, size)
            if is_no_space(error):
                raise self._no_space(max(needed, 1)) from error
            raise
        self._count = max(self._count, first + n)

    def _write_rows(self, writer: int, first: int, records: Tensor) -> None:
        step = max(1, PIECE_BYTES // self.record_bytes)
        _, dtype = self.layout.kept
        for start in range(0, len(records), step):
            rows = records[start : start + step].to("cpu", dtype).contiguous()
            place = (self.before + first + start) * self.record_bytes
            write_at(writer, bytes_of(rows).reshape(-1).data, place)

    def _give_up(self, first: int) -> None:
        """A manifest knows other records than will stand there: whoever loads it finds out, even after a kill."""
        self.hold()
        vouched = self.vouched
        super()._give_up(first)
        try:
            note_overwriting(self.path, first)
        except BaseException as error:
            self.vouched = vouched
            if isinstance(error, OSError) and is_no_space(error):
                raise self._no_space(1) from error
            raise

    def _free(self) -> int:
        expect_there(self.path.parent)
        return shutil.disk_usage(self.path.parent).free

    def _no_space(self, needed: int) -> NoSpaceError:
        return NoSpaceError("memory_folder", self.path.parent, needed, self._way_out)

    def _collect(self, wanted: Numbers, out: Bytes) -> None:
        if not len(wanted):
            return
        mapped, wanted = self._mapped, wanted + self.before
        if mapped is None or int(wanted.max()) >= len(mapped.bytes):
            end = self.before + self._count
            mapped = Mapped(self._descriptor(), end, self.record_bytes, private=False)
            self._mapped = mapped
        mapped.fetch(wanted)
        np.take(mapped.bytes, wanted, axis=0, out=out, mode="clip")  # "raise" would copy twice

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        place = self.before * self.record_bytes
        return pieces_of(self._descriptor(), self.path)(place + start, place + stop)

    def _descriptor(self) -> int:
        file = self._files.writer or self._files.reader
        assert file is not None, "closed, or nothing written yet"
        return file.fileno()

    def lies_in(self, folder: Path) -> bool:
        """As :meth:`ChunkStore.lies_in`: another memory saved there may have replaced the file."""
        file = self._files.writer or self._files.reader
        if file is None:
            return self.path.parent.resolve() == folder.resolve()
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(folder / self.path.name))
        except OSError:
            return False

    def sync(self) -> None:
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
            remove_if_own(self._temporary, os.getpid())


class _Files:
    """Files of a store, apart from it, so that they are closed when it is collected."""

    def __init__(self) -> None:
        self.reader: BinaryIO | None = None
        self.writer: BinaryIO | None = None

    def close(self) -> None:
        for file in (self.reader, self.writer):
            if file is not None:
                file.close()
        self.reader = self.writer = None
