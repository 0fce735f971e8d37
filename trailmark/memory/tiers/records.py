"""Chunk records: how they are written, gathered and streamed, wherever they live."""

from __future__ import annotations

import math
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from trailmark.memory.hashes import PIECE_BYTES, Signed
from trailmark.memory.manifest import record_bytes
from trailmark.memory.tiers.quantized import dequantize, quantize
from trailmark.ops.arguments import require

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]


class RecordLayout(NamedTuple):
    """What the records of a store are, and where they are wanted."""

    shape: tuple[int, ...]  # (2, J, S, D), or of tokens (S,)
    dtype: torch.dtype  # what records are kept in: keys and values floating or int8, tokens otherwise
    device: torch.device | str  # where ``gather`` puts them

    @property
    def quantizes(self) -> bool:
        """Whether they are kept as :mod:`trailmark.memory.tiers.quantized` has them."""
        return self.dtype == torch.int8

    @property
    def kept(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a record as it lies in the store."""
        return ((self.record_bytes,), torch.uint8) if self.quantizes else (self.shape, self.dtype)

    @property
    def record_bytes(self) -> int:
        """Of a record as it lies in the store."""
        return record_bytes(self.shape, str(self.dtype).removeprefix("torch."))

    @property
    def given_dtype(self) -> torch.dtype:
        """What ``gather`` gives records in."""
        return torch.float32 if self.quantizes else self.dtype

    @property
    def given_bytes(self) -> int:
        """Of a record as ``gather`` gives it."""
        return math.prod(self.shape) * self.given_dtype.itemsize


class ChunkStore(ABC):
    """A log of chunk records, numbered in the order written.

    A record [2, J, S, D] holds a chunk's keys (0) and values (1), as GCA reads them: a head's stand together.
    The log of n records takes n * 2 * J * S * D * bytes of a number, and in int8 4 bytes for each head's keys and
    values; nothing else. On a tier that ``keeps_tokens`` a record [S] holds a chunk's tokens.

    A tier is a subclass that :func:`trailmark.memory.tiers.base.register_tier` knows. It says where records lie in
    ``write``, ``pieces`` and ``_collect``; what others ask of a tier are the attributes and class methods here.
    """

    tier: ClassVar[str]
    """The name that ``memory_tier`` gives it."""
    takes: ClassVar[Literal["device", "host", "disk"]] = "host"
    """Whose room its records take: the device's memory, the main memory or a disk."""
    needs_folder: ClassVar[bool] = False
    """Whether its records lie in files of a folder, which ``memory_folder`` may name."""
    keeps_tokens: ClassVar[bool] = False
    """Whether its records are tokens, of which keys and values are encoded again."""
    no_room: ClassVar[str] = "Choose memory_tier 'disk', memory_dtype 'int8', or a shorter one."
    """The way out, as a sentence, for a text whose memory does not fit."""
    path: Path | None = None
    """The file of its records, one after the other, which a memory saved beside it need not copy; None: none."""
    vouched: int = 0
    """Records at the start that are as their last manifest says."""
    signed: Signed | None = None
    """What that manifest says of them; None: nothing is known, or no memory was saved yet."""

    @classmethod
    def made(cls, layout: RecordLayout, capacity: int = 0, path: str | Path | None = None) -> ChunkStore:
        """A new, empty store.

        Args:
            capacity: records to make room for at once on device and host; 0: no guess. On the CPU a guess costs no
                memory before it is used.
            path: the file of a tier with files; None: one in a temporary folder that goes with the store.
        """
        return cls(*layout)

    @classmethod
    def of_file(cls, path: str | Path, layout: RecordLayout, count: int) -> ChunkStore | None:
        """A store that begins with the first ``count`` records of a file; None: they must be written to a new one.

        Raises:
            ValueError: a file that is missing or too short, or no room.
        """
        return None

    @classmethod
    def keeps_recent(cls, device: torch.device | str) -> bool:
        """Whether a memory on ``device`` keeps the records used last there, in front of this tier."""
        return cls.takes == "disk" or (cls.takes == "host" and torch.device(device).type != "cpu")

    def __init__(self, record_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> None:
        require(
            record_shape_fits(record_shape, holds_kv(dtype)) and min(record_shape) > 0,
            "record_shape",
            tuple(record_shape),
            "[2, J, S, D] of numbers or [S] of tokens, none of them 0",
        )
        self.layout = RecordLayout(tuple(record_shape), dtype, torch.device(device))
        self.record_shape = self.layout.shape
        """(2, J, S, D), or of tokens (S,)"""
        self.dtype = dtype
        """What records are kept in."""
        self.device = torch.device(device)
        """Where :meth:`gather` puts records."""
        self.record_bytes = self.layout.record_bytes
        self._count = 0
        self._stream: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        """Records written."""
        return self._count

    def num_bytes(self) -> int:
        """Bytes of the records; spare capacity does not count."""
        return self._count * self.record_bytes

    @abstractmethod
    def write(self, first: int, records: Tensor) -> None:
        """Write records at the numbers ``first ...``, after the last or over what is there.

        It begins with ``_expect_records``, which compares what is overwritten with its manifest.

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

    def lies_in(self, folder: Path) -> bool:
        """Whether its very file is found in ``folder``."""
        return False

    def hold(self) -> None:
        """Keep other writers out of its file, until :meth:`close`.

        Raises:
            ValueError: if something else writes the file, has written to it since, or it cannot be written.
        """
        raise NotImplementedError

    def sync(self) -> None:
        """Have everything written on the disk itself (fsync)."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of memory, files and locks. The store cannot be used any more."""
        self._count = 0

    def gather(self, numbers: Tensor) -> Tensor:
        """Copies [n, 2, J, S, D] on ``device`` of the records ``numbers``, in ``layout.given_dtype``.

        On a CUDA device the current stream waits for the copy, which begins at once; the CPU does not.

        Args:
            numbers: int64 [n] on the CPU, in any order, also repeated.

        Raises:
            ValueError: for a number that was not written.
        """
        records = self._gather(self._expect_numbers(numbers))
        if not self.layout.quantizes:
            return records
        with torch.inference_mode(False):
            return dequantize(records, self.record_shape)

    def _gather(self, wanted: Numbers) -> Tensor:
        """The same, as they are kept."""
        cuda = self.device.type == "cuda"
        records = self._empty(len(wanted), "cpu", pin_memory=cuda)
        self._collect(wanted, bytes_of(records))
        if self.device.type == "cpu":
            return records
        with torch.inference_mode(False):
            if not cuda:
                return records.to(self.device)
            if self._stream is None:
                self._stream = torch.cuda.Stream(self.device)
            with torch.cuda.stream(self._stream):
                # Neither stream waits for the other before the copy: the pinned buffer was filled by the CPU and
                # goes back to PyTorch's pool, which hands it out again only after this copy; what is copied to
                # is of this stream's own pool, and goes back when all that read it are done (record_stream).
                copy = records.to(self.device, non_blocking=True)
            reading = torch.cuda.current_stream(self.device)
            reading.wait_stream(self._stream)
            copy.record_stream(reading)
            return copy

    def copy_to(self, other: ChunkStore, count: int) -> None:
        """Write the first ``count`` records to the start of ``other``, 4 MiB (or one record) a time."""
        require(0 <= count <= self._count, "count", count, f"at most the {self._count} records written")
        step = max(1, PIECE_BYTES // self.record_bytes)
        for first in range(
            0, count, step
        ):  # in int8 too: a record that is quantized again stays the same bits
            other.write(first, self.gather(torch.arange(first, min(first + step, count))))

    def _expect_records(self, first: int, records: Tensor) -> Tensor:
        """What is to be written of them: in int8 as they are kept, else in any dtype."""
        require(
            tuple(records.shape[1:]) == self.record_shape,
            "records",
            tuple(records.shape),
            f"shape [n, 2, J, S, D] = (n, {', '.join(map(str, self.record_shape))})",
        )
        require(
            0 <= first <= self._count, "first", first, f"a number up to the {self._count} records written"
        )
        if first < self.vouched and len(records):
            self._give_up(first)
        return quantize(records.detach()) if self.layout.quantizes else records.detach()

    def _give_up(self, first: int) -> None:
        """Records from ``first`` on are to be overwritten: they are compared with their manifest a last time.

        What is kept of the same blocks could not be compared later.

        Raises:
            ValueError: they were damaged; the store is then as it was.
        """
        if self.signed is not None:
            self.signed.compare(self.pieces, first * self.record_bytes, self.vouched * self.record_bytes)
        self.vouched = first

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

    def _empty(self, n: int, device: torch.device | str, pin_memory: bool = False) -> Tensor:
        # never of inference mode: outside it, such a tensor can be neither written to nor part of a graph
        shape, dtype = self.layout.kept
        with torch.inference_mode(False):
            return torch.empty(n, *shape, dtype=dtype, device=device, pin_memory=pin_memory)


def free_bytes(place: str, device: torch.device | str, folder: str | Path | None = None) -> int | None:
    """Bytes that are free on a "device", on the "host" or on the "disk" of ``folder``; None: nobody knows.

    A device that is the CPU has the host's. ``folder`` need not exist yet; None: where temporary files go.
    """
    device = torch.device(device)
    if place == "disk":
        where = Path(tempfile.gettempdir() if folder is None else folder).absolute()
        while not where.exists():
            where = where.parent
        return shutil.disk_usage(where).free
    if place == "host" or device.type == "cpu":
        return int(psutil.virtual_memory().available)
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def holds_kv(dtype: torch.dtype) -> bool:
    """Whether records of this dtype are keys and values; else tokens, whose numbers are of other types than int8."""
    return dtype.is_floating_point or dtype == torch.int8


def record_shape_fits(shape: tuple[int, ...], is_kv: bool) -> bool:
    """Whether a record may have this shape: keys and values (2, J, S, D), or tokens (S,)."""
    return (len(shape) == 4 and shape[0] == 2) if is_kv else len(shape) == 1


def bytes_of(records: Tensor) -> Bytes:
    """The same memory as [n, bytes of a record]; contiguous, on the CPU."""
    width = math.prod(records.shape[1:]) * records.element_size()
    return records.view(torch.uint8).numpy().reshape(len(records), width)
