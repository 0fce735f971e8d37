"""Disks that are full, bytes that flip, files that another process holds, and what a folder holds."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LOCK = (
    "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB); "
)


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip(path: Path, offset: int) -> None:
    """One bit of the byte there; which one depends on the place."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << (offset % 8)
    path.write_bytes(content)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file can grow beyond ``size`` bytes: writing fails halfway, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))  # Python ignores its signal
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def small_disk(megabytes: int) -> Iterator[Path]:
    """A disk of that size; the test is skipped where none may be mounted."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder]
        try:
            mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:
            mounted = False
        if not mounted:
            pytest.skip("may not mount a small disk here")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def held_by_another(path: Path) -> Iterator[None]:
    """Another process holds the lock of a file or folder until it is killed, or this ends."""
    command = [sys.executable, "-c", LOCK + "print('held', flush=True); sys.stdin.read()", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            other.kill()
