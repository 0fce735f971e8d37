"""A memory that several processes write: the chunks of each stretch of a text, all of them in one file.

The file is that of the memory's first save. Whoever has written a stretch leaves a folder, which says what the memory
holds of it beside its records, and their SHA-256: so it is known to be whole, or not to be there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trailmark.files import NoSpaceError, in_threads, lock
from trailmark.memory import hashes, manifest, saved
from trailmark.memory.chunks import ChunkMemory, MemorySize
from trailmark.memory.hashes import Signed, pieces_of
from trailmark.memory.manifest import BYTES_OF, MOST, expect_digests, record_bytes
from trailmark.memory.saved import Saved
from trailmark.memory.schema import (
    Expected,
    expect_numbers,
    expect_record_shape,
    expect_tables,
    expect_tensors,
)
from trailmark.memory.snapshot import fill, read_state, state_tensors
from trailmark.memory.state import CacheState
from trailmark.memory.tiers.disk import DiskStore
from trailmark.memory.tiers.files import open_records
from trailmark.settings import Settings, from_mapping, setting
from trailmark.untrusted import brief, open_regular

FILE = "chunks-1.bin"
_STRETCHES_STAY = "Stretches that are whole stay: free some space, and the same command goes on."


class Part(NamedTuple):
    """A stretch of the text, by its whole chunks."""

    folder: Path
    first: int
    """The number of its first chunk."""
    chunks: int


@dataclass(frozen=True)
class Records(Settings):
    """What the folder of a stretch says of its records in the file."""

    first: int = setting(least=0, most=MOST)
    count: int = setting(least=1, most=MOST)
    record_shape: tuple[int, ...] = setting(least=1, most=MOST)
    dtype: str = setting(choices=tuple(BYTES_OF))
    sha256: tuple[str, ...] = setting(())
    """Of what lies of them in each block of the file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_digests("sha256", *self.sha256)

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.record_shape, self.dtype)

    @property
    def begin(self) -> int:
        """The first byte in the file."""
        return self.first * self.record_bytes

    @property
    def end(self) -> int:
        return self.begin + self.count * self.record_bytes

    def blocks(self) -> range:
        """Blocks of the file that hold some of them."""
        return range(self.begin // hashes.BLOCK_BYTES, -(-self.end // hashes.BLOCK_BYTES))

    def within(self, block: int) -> tuple[int, int]:
        """The first of their bytes in a block, and where they end there."""
        start = block * hashes.BLOCK_BYTES
        return max(self.begin, start), min(self.end, start + hashes.BLOCK_BYTES)


# --- a stretch --------------------------------------------------------------------------------------------------


def begin_part(memory: ChunkMemory, first_chunk: int) -> None:
    """Have a memory, which is empty, write its chunks into the file in its folder, from ``first_chunk`` on."""
    assert memory.folder is not None
    file, first = memory.folder / FILE, first_chunk * memory.planes
    memory.own_store = lambda layout: DiskStore(file, *layout, before=first, way_out=_STRETCHES_STAY)


def save_part(
    memory: ChunkMemory, size: MemorySize, folder: Path, header: dict[str, Any], end: CacheState | None = None
) -> None:
    """Say in ``folder`` what was written of a stretch, once it lies on the disk.

    Args:
        end: of the last stretch, what a cache carries on from the text.

    Raises:
        ValueError: as :func:`trailmark.memory.saved.save`.
    """
    store, told = memory.store, None
    if store is not None and size.records:
        assert isinstance(store, DiskStore)
        store.sync()
        dtype = str(store.dtype).removeprefix("torch.")
        records = Records(store.before, size.records, store.record_shape, dtype)
        ranges = [[x - records.begin for x in records.within(block)] for block in records.blocks()]
        digests = tuple(hashes.digest(store.pieces, begin, end) for begin, end in ranges)
        told = asdict(replace(records, sha256=digests))
    tensors = memory.tables(size) | ({} if end is None else dict(state_tensors(end)))
    try:
        saved.save(folder, tensors, header | {"records": told}, None, 0)
    except NoSpaceError as error:
        raise NoSpaceError("memory_folder", folder.parent, error.needed, _STRETCHES_STAY) from error


def lies_there(part: Path, folder: Path) -> bool:
    """Whether a stretch was written, and the file in ``folder`` is as long as that takes.

    Raises:
        ValueError: what the folder ``part`` says of it was damaged.
    """
    if not os.path.lexists(part / manifest.NAME):
        return False
    records, file = _told(header_of(part), part), folder / FILE
    return records is None or (file.exists() and file.stat().st_size >= records.end)


def header_of(folder: Path) -> dict[str, Any]:
    """What was said in the folder of a stretch, see :func:`save_part`.

    Raises:
        ValueError: it was damaged.
    """
    try:
        return manifest.read(folder).header
    except ValueError as error:
        raise _other(folder, str(error)) from error


def _told(header: dict[str, Any], folder: Path) -> Records | None:
    if (told := header.get("records")) is None:
        return None
    try:
        records = from_mapping(Records, told)
        blocks = records.blocks()
        if len(records.sha256) != (count := blocks.stop - blocks.start):
            raise ValueError(f"sha256: expected {count}, got {len(records.sha256)}")
    except ValueError as error:
        raise _other(folder, str(error)) from error
    return records


def _other(folder: Path, reason: str) -> ValueError:
    return ValueError(
        f"parts: expected what a process wrote of its stretch in {str(folder)!r}, got something else "
        f"({reason.rstrip('.')}). Remove that folder, and run the same command again."
    )


def records_of(header: dict[str, Any], part: Part, planes: int) -> Records | None:
    """What ``header``, that of a stretch's folder, says of its records; None: it has no whole chunk.

    Args:
        planes: records of a chunk.

    Raises:
        ValueError: records of other chunks, or what says nothing of records.
    """
    records = _told(header, part.folder)
    found = (part.first * planes, 0) if records is None else (records.first, records.count)
    if found != (expected := (part.first * planes, part.chunks * planes)):
        raise _other(part.folder, f"records: expected {expected[1]} from {expected[0]} on, got {found}")
    return records


# --- all of them ------------------------------------------------------------------------------------------------


def expect_quiet(folder: Path) -> None:
    """Raise a ValueError where a process, perhaps of an earlier start, still writes into the file in ``folder``."""
    # a text without a whole chunk has none
    with contextlib.suppress(FileNotFoundError), open_regular(folder / FILE, "memory") as file:
        if not lock(file.fileno()):
            raise ValueError(
                f"memory: expected that nothing else writes {str(folder / FILE)!r}, another process does. End what an "
                "earlier start has left, and run the same command again."
            )


def sign(folder: Path, parts: Sequence[Part], planes: int, number: int, among: int) -> dict[int, str]:
    """The SHA-256 of those blocks of the file in ``folder`` whose number modulo ``among`` is ``number``.

    Args:
        parts: all stretches, in the text's order.
        planes: records of a chunk.

    Raises:
        ValueError: records that are not as they were written, with the folder of their stretch.
    """
    own: dict[int, list[tuple[Part, int, str]]] = {}
    file = folder / FILE
    size = file.stat().st_size if file.exists() else 0
    for part in parts:
        if (records := records_of(header_of(part.folder), part, planes)) is not None:
            if records.end > size:
                raise _other(part.folder, f"{str(file)!r} ends before its chunks do")
            for block, digest in zip(records.blocks(), records.sha256, strict=True):
                if block % among == number:
                    own.setdefault(block, []).append((part, records.within(block)[1], digest))
    if not own:
        return {}
    with open_records(file, 0, 1) as opened:
        pieces = pieces_of(opened.fileno(), file)

        def signed(block: int) -> tuple[str, list[Part]]:
            ends = [end for _, end, _ in own[block]]
            whole, each = hashes.digests_of_parts(pieces, block * hashes.BLOCK_BYTES, ends)
            found = zip(own[block], each, strict=True)
            return whole, [part for (part, _, expected), digest in found if digest != expected]

        all_signed = dict(zip(own, in_threads(signed, list(own)), strict=True))
    if wrong := sorted({part.folder for _, parts in all_signed.values() for part in parts}):
        more = f", as {', '.join(map(repr, map(str, wrong[1:])))} have" if wrong[1:] else ""
        raise _other(wrong[0], f"its chunks in {str(file)!r} are not as they were written{more}")
    return {block: whole for block, (whole, _) in all_signed.items()}


def put_together(
    memory: ChunkMemory,
    folder: Path,
    parts: Sequence[Part],
    sha256: Mapping[int, str],
    device: torch.device,
    expected: Expected,
    empty: Callable[[int], CacheState],
) -> tuple[MemorySize, CacheState]:
    """Fill ``memory``, which is empty, with the chunks of all stretches; no record is read.

    Its file is then kept from all others. Returned with its size is what the last stretch says of the text's end.

    Args:
        parts: in the text's order.
        sha256: of every block, see :func:`sign`.
        empty: the state of so many rows before anything was read.

    Raises:
        ValueError: other chunks than so many of this model, or a process that still writes there.
    """
    tables: list[dict[str, Tensor]] = []
    size, end, last = MemorySize(np.zeros(1, np.int64), 0), empty(1), None
    for part in parts:
        there = saved.load(part.folder)
        records = records_of(there.header, part, memory.planes)
        with _naming(part.folder):
            expect_tensors(there.tensors, expected)
            tensors = there.tensors
            if part is parts[-1]:
                end, tensors = read_state(tensors, empty, device)
                expect_numbers(end, expected)
                _expect_end(end, part)
            _expect_chunks(part, tensors, records, last, memory, expected)
        if records is None:
            continue
        short = bool((tensors["lengths"] < memory.keys_of_shape(records.record_shape)).any())
        tables.append(tensors | {"records": tensors["records"] + size.records})
        size = MemorySize(size.chunks + part.chunks, size.records + records.count, size.short or short)
        last = records
    if last is None:
        return size, end
    joined = {
        name: torch.cat([x[name] for x in tables], dim=-2 if name == "landmarks" else -1)
        for name in ("records", "starts", "lengths", "landmarks")
    }
    digests = tuple(sha256[block] for block in range(last.blocks().stop))
    signed = Signed(folder / FILE, size.records, last.record_bytes, digests)
    shape, dtype = last.record_shape, getattr(torch, last.dtype)
    fill(memory, Saved(joined, {}, size.records, folder / FILE, shape, dtype, signed), joined, device)
    assert memory.store is not None
    memory.store.hold()
    os.truncate(folder / FILE, last.end)  # a reading that was stopped may have written more
    return size, end


def _expect_chunks(
    part: Part,
    tensors: dict[str, Tensor],
    records: Records | None,
    before: Records | None,
    memory: ChunkMemory,
    expected: Expected,
) -> None:
    sizes, count, rows = expected.sizes, 0, None
    if records is not None:
        count, rows = records.count, memory.keys_of_shape(records.record_shape)
        expect_record_shape(records.record_shape, expected, memory.keeps_tokens)
        own, others = ((x.record_shape, x.dtype) for x in (records, before or records))
        if own != others:
            raise ValueError(
                f"record_shape, dtype: expected those of the stretch before, {others}, got {own}"
            )
    counts = torch.tensor([part.chunks])
    expect_tables(tensors, counts, count, rows, sizes.get("LP"), memory.planes, sizes.get("LE"))


def _expect_end(end: CacheState, part: Part) -> None:
    if (chunks := end.memory.chunks.tolist()) != [part.first + part.chunks]:
        raise ValueError(f"num_chunks: expected {part.first + part.chunks}, got {brief(chunks)}")


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """What is wrong inside is so with the folder of a stretch."""
    try:
        yield
    except (ValueError, RuntimeError, IndexError) as error:
        raise _other(folder, str(error)) from error
