"""Files of a memory: maps of their records, notes of what was overwritten, temporary folders."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import sys
import tempfile
import weakref
from pathlib import Path
from typing import BinaryIO

import numpy as np

from trailmark import untrusted
from trailmark.memory.tiers.records import Bytes, Numbers


class Mapped:
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


def open_records(path: Path, count: int, record_bytes: int) -> BinaryIO:
    """A file that holds as many records, to read: no link, FIFO or device."""
    try:
        file = untrusted.open_regular(path, "path")
    except FileNotFoundError as error:
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


def open_to_write(path: Path, new: bool = False, clear: bool = False) -> BinaryIO:
    """A file in a folder of ours, to read and to write: never one that has another place or name too.

    Args:
        new: it is made if there is none. clear: what it holds is forgotten.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is a link, a FIFO or a device, or has a second name: what that names would be changed.
    """
    flags = os.O_RDWR | (os.O_CREAT if new else 0) | (os.O_TRUNC if clear else 0)
    with contextlib.suppress(FileNotFoundError):
        untrusted.expect_regular(path, "folder")
        if path.lstat().st_nlink > 1:
            raise ValueError(
                f"folder: expected a file with one name, {str(path)!r} has others (hard links), whose content would "
                "change with it. Copy the folder (cp -r) and use the copy."
            )
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    return os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)


def stamp(file: BinaryIO) -> tuple[int, ...]:
    """What changes when a file is replaced or written to."""
    stat = os.fstat(file.fileno())
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def overwritten_note(path: Path) -> Path:
    """The file beside a chunk file that says from which record on a manifest may not hold."""
    return path.with_name(path.name + ".overwritten")


def overwritten_from(path: Path) -> int:
    """The first record of a chunk file that a manifest may not know; 2 ** 63 - 1 without a note."""
    try:
        note = untrusted.read_bytes(overwritten_note(path), "folder", most=64)
    except FileNotFoundError:
        return sys.maxsize
    # else it was cut off while it was written
    return int(note) if note.isdigit() else 0


def note_overwriting(path: Path, first: int) -> None:
    """Say on the disk itself that a manifest may not know the records from ``first`` on of a chunk file."""
    with open_to_write(overwritten_note(path), new=True, clear=True) as file:
        file.write(str(first).encode())
        os.fsync(file.fileno())


def temporary_folder(owner: object, parent: str | Path | None = None) -> Path:
    """A new folder, removed when ``owner`` is collected or the interpreter exits.

    Below ``parent``; None: where temporary files go (``TMPDIR``), which on some systems is RAM.
    """
    folder = Path(tempfile.mkdtemp(prefix="trailmark-", dir=parent))
    weakref.finalize(owner, remove_if_own, folder, os.getpid())
    return folder


def remove_if_own(folder: Path, process: int) -> None:
    """Remove a temporary folder that ``process`` made; a fork of that process leaves it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
