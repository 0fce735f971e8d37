"""The memory of past chunks: records of keys and values in a store, landmark vectors, and where to find them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from trailmark.memory.recent import RecentRecords
from trailmark.memory.records import ChunkStore
from trailmark.memory.saved import next_chunk_file
from trailmark.memory.search import ExactSearch
from trailmark.memory.store import TIERS, make_store
from trailmark.ops import ChunkSelection, select_chunks
from trailmark.ops.arguments import require
from trailmark.ops.selection_torch import gather

Integers = np.ndarray[Any, np.dtype[np.int64]]

TABLE_BYTES = 24  # of a chunk besides its record and landmark: record number, first position, length
_RECENT_CHUNKS, _RECENT_BYTES = 512, 16 << 20  # kept on the device in front of host and disk
_LEAST_RECENT = 16  # chunks of many planes so kept: one token's of all layers, and the last one's
# of the first segment, in chunks and in bytes a row; each further one doubles what is there
_FIRST_LANDMARKS, _FIRST_BYTES = 1024, 16 << 20


def recent_chunks(record_bytes: int, planes: int = 1) -> int:
    """How many chunks, used last, a memory keeps on the device in front of host and disk: ``planes`` records each."""
    least = 64 if planes == 1 else _LEAST_RECENT
    return min(_RECENT_CHUNKS, max(least, _RECENT_BYTES // (planes * record_bytes)))


class MemoryEntries(NamedTuple):
    """What is kept of n chunks."""

    k: Tensor  # [B, n, S, planes * J, D]
    v: Tensor  # [B, n, S, planes * J, D]
    landmarks: Tensor  # [B, n, E], or of any trailing shape [B, n, ..., E]
    lengths: Tensor  # [B, n] int64: keys that exist


class MemorySize(NamedTuple):
    """How much of a memory counts; what an unfinished call wrote beyond it is written over."""

    chunks: Integers  # [B] of each row, those of the base included
    records: int  # written to the store
    short: bool = False  # some chunk was closed early


class _Tables(NamedTuple):
    """Of own chunks ``first ...``, int64 [B, m] each. Replaced as one: Ctrl-C leaves the old ones or the new."""

    first: int
    records: Integers  # number of the chunk's first record
    starts: Integers
    lengths: Integers

    @classmethod
    def empty(cls) -> _Tables:
        return cls(0, *(np.zeros((0, 0), np.int64) for _ in range(3)))


class _Landmarks(NamedTuple):
    """Of own chunks ``first ...``, as :class:`_Tables`."""

    first: int = 0
    segments: tuple[Tensor, ...] = ()  # [B, m, ..., E]; in memory [..., B, m, E]


class _Located(NamedTuple):
    """Chunks that were asked for and lie in one memory."""

    memory: ChunkMemory
    places: Integers  # [m] which of those asked for
    numbers: Integers  # [m] of records
    lengths: Integers  # [m]


class ChunkMemory:
    """Chunks 0, 1, ... of each row of a batch.

    Keys and values go to a store (tier device, host or disk) and are read by chunk number; landmark vectors
    stay on the device, in segments that are never copied again. A branch adds to a ``base`` of one row, which
    it shares with its source and other branches.

    A chunk is ``planes`` records side by side in the store. Plane p holds the key/value heads
    ``p * J ... (p + 1) * J - 1`` of what is written, and is read alone: a model that keeps every layer's keys
    numbers its layers and heads so.

    With ``max_chunks`` only that many of the newest chunks of a row count: from :meth:`first_chunk` on. Numbers
    stay absolute. Records of the others are written over, so that the store holds at most ``max_chunks`` a row
    and what one call writes, as long as no branch needs more; landmarks and tables are let go of once a chunk
    is evicted in every row. On tier "disk" a memory that was saved, and read on with, is then no longer what
    the folder's manifest says: loading it is refused until it is saved again.

    Args:
        capacity: chunks of all rows to make room for at once.
        folder: of tier "disk"; None: a temporary one.
        dtype: of keys and values; None: as they come.
        search: over landmarks; None: exact.
        planes: records of a chunk.
        max_chunks: chunks of a row that count; None: all.

    Raises:
        ValueError: for another tier, a folder that is not for a disk, or a number below 1.
    """

    def __init__(
        self,
        tier: str = "device",
        capacity: int = 0,
        folder: Path | None = None,
        dtype: torch.dtype | None = None,
        search: Any = None,
        planes: int = 1,
        max_chunks: int | None = None,
    ) -> None:
        require(tier in TIERS, "memory_tier", repr(tier), "one of " + ", ".join(map(repr, TIERS)))
        require(
            folder is None or tier == "disk",
            "memory_folder",
            repr(str(folder)),
            f"none for memory_tier={tier!r}",
            "Pass memory_tier='disk', or save the cache once the text is read.",
        )
        require(planes >= 1, "planes", planes, "at least 1 record a chunk")
        require(
            max_chunks is None or max_chunks >= 1,
            "max_chunks",
            max_chunks,
            "at least 1 chunk",
            "None keeps every chunk.",
        )
        self.tier, self.folder, self.dtype = tier, folder, dtype
        self.planes, self.max_chunks = planes, max_chunks
        self.capacity = capacity if max_chunks is None else min(capacity, max_chunks)
        self.search = search or ExactSearch()
        self.head_searches: dict[int, Any] = {}
        """Of each plane, its own copy of ``search``, for models whose heads search by themselves."""
        self.store: ChunkStore | None = None
        self.base: tuple[ChunkMemory, int] | None = None  # of one row; so many of its chunks
        self.fetched = 0
        """Records that :meth:`gather` needed: each counts once a call, however often it was asked for."""
        self._recent: RecentRecords | None = None
        self._landmarks = _Landmarks()
        self._tables = _Tables.empty()
        self._gone = np.zeros(1, np.int64)  # [1 or B] chunks of a row that may have been written over
        # what branches go on from, if records may be written over, and the records that they need
        self._frozen: WeakSet[ChunkMemory] = WeakSet()
        self._needed = np.zeros(0, np.int64)

    # --- writing -------------------------------------------------------------------------------------------

    def first_chunk(self, size: MemorySize) -> Integers:
        """[B] the first chunk of each row that counts: 0 without ``max_chunks``."""
        if (
            not size.chunks.any()
        ):  # a first call that failed, for another batch perhaps, left nothing that counts
            return np.zeros_like(size.chunks)
        oldest = 0 if self.max_chunks is None else size.chunks - self.max_chunks
        return np.maximum(self._gone + np.zeros_like(size.chunks), oldest)

    def write(
        self,
        size: MemorySize,
        entries: MemoryEntries,
        starts: Integers,
        counts: Integers,
        whole: MemorySize | None = None,
    ) -> MemorySize:
        """Write the first ``counts`` [B] of n chunks after those that count; returns the size with them.

        Of what counts in ``size`` nothing is changed: a call that is stopped before the new size is put in place
        goes on from the old one. What counts only there (chunks evicted by this write) can be read until the next.

        Args:
            starts: [B, n] number of each chunk's first position in its text.
            whole: an earlier size that must stay whole too: a call may write several times. None: ``size``.
        """
        B, n = entries.landmarks.shape[:2]
        if not n:
            return size
        first = size.chunks - self._num_base
        lengths = np.broadcast_to(entries.lengths.cpu().numpy(), (B, n))
        row, chunk = np.nonzero(np.arange(n) < counts[:, None])
        records = self._as_records(entries)
        if len(row) < B * n:
            records = records[torch.from_numpy(row), torch.from_numpy(chunk)]
        else:
            records = records.flatten(0, 1)
        records = records.flatten(0, 1).detach()
        if self.store is None:
            self._use(self._make_store(records))
        # of a first call that failed, for another batch
        if len(self._tables.records) not in (0, B) or len(self._gone) not in (1, B):
            self._landmarks, self._tables = _Landmarks(), _Tables.empty()
            self._gone = np.zeros(1, np.int64)
        self._gone = self.first_chunk(size if whole is None else whole)
        numbers = self._take_records(size, len(row))
        self._write_records(numbers, records)
        self._grow_tables(B, int((first + counts).max()))
        tables = self._tables
        place = first[row] + chunk - tables.first
        tables.records[row, place] = numbers
        tables.starts[row, place] = np.broadcast_to(starts, (B, n))[row, chunk]
        tables.lengths[row, place] = lengths[row, chunk]
        self._write_landmarks(entries.landmarks.detach(), first, counts)
        short = size.short or bool((lengths[row, chunk] < entries.k.shape[2]).any())
        end = max(size.records, int(numbers.max(initial=-1)) + self.planes)
        return MemorySize(size.chunks + counts, end, short)

    def _as_records(self, entries: MemoryEntries) -> Tensor:  # [B, n, planes, 2, J, S, D]
        parts = (x.transpose(2, 3).unflatten(2, (self.planes, -1)) for x in (entries.k, entries.v))
        return torch.stack(list(parts), dim=3)

    def _make_store(self, records: Tensor) -> ChunkStore:
        path = None if self.folder is None else next_chunk_file(self.folder)
        shape, capacity = tuple(records.shape[1:]), self.capacity * self.planes
        return make_store(self.tier, shape, self.dtype or records.dtype, records.device, capacity, path)

    def _use(self, store: ChunkStore) -> None:
        self.store = store
        if store.tier == "disk" or (store.tier == "host" and store.device.type != "cpu"):
            recent = recent_chunks(store.record_bytes, self.planes)
            self._recent = RecentRecords(store, recent * self.planes)

    def _take_records(self, size: MemorySize, n: int) -> Integers:
        """First record [n] of each of n new chunks: of those that nothing needs, then after the last."""
        free = np.zeros(0, np.int64)
        end = size.records // self.planes
        if self.max_chunks is not None and len(self._tables.records):
            tables = self._tables
            column = self._num_base + tables.first + np.arange(tables.records.shape[1])
            counts = (column >= self._gone[:, None]) & (column < size.chunks[:, None])  # [B, m]
            needed = np.zeros(end, bool)
            for numbers in (tables.records[counts], *(memory._needed for memory in self._frozen)):
                places = numbers // self.planes
                needed[places[places < end]] = True
            free = np.flatnonzero(~needed)[:n]
        return np.concatenate([free, end + np.arange(n - len(free))]) * self.planes

    def _write_records(self, numbers: Integers, records: Tensor) -> None:
        """Write ``planes`` records from each number [n], ascending, on; at most one run of numbers is appended."""
        runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != self.planes) + 1)
        done = len(records)
        store = self._recent or self.store
        assert store is not None
        for run in reversed(runs):  # what is appended first: only that can find a disk full
            done -= len(run) * self.planes
            if len(run):
                store.write(int(run[0]), records[done : done + len(run) * self.planes])

    def _grow_tables(self, B: int, chunks: int) -> None:
        """Make room for so many own chunks; columns that no row needs any more are left behind."""
        first, *tables = self._tables
        end = first + tables[0].shape[1]
        if chunks > end:
            kept = self._num_gone()
            old = max(0, end - kept)
            grown = np.zeros((3, B, max(chunks - kept, old + old // 2, self.capacity, 64)), np.int64)
            for table, before in zip(grown, tables, strict=True):
                table[: len(before), :old] = before[:, before.shape[1] - old :]
            self._tables = _Tables(kept, *grown)

    def _num_gone(self) -> int:
        """Own chunks, from the first, that no row needs any more."""
        return max(0, int(self._gone.min()) - self._num_base)

    def _write_landmarks(self, landmarks: Tensor, first: Integers, counts: Integers) -> None:
        B, _, *shape = landmarks.shape
        begin, segments = self._landmarks
        gone = self._num_gone()
        while segments and begin + segments[0].shape[1] <= gone:
            begin, segments = begin + segments[0].shape[1], segments[1:]
        if not segments:
            begin = gone
        held = sum(segment.shape[1] for segment in segments)
        need = int((first + counts).max()) - begin
        if need > held:
            least = _FIRST_BYTES // (math.prod(shape) * landmarks.element_size())
            size = max(held, self.capacity if not held else 0, min(_FIRST_LANDMARKS, max(64, least)))
            if self.max_chunks is not None:  # let go of whole, so not much larger than what counts
                size = min(size, max(64, self.max_chunks // 2))
            with torch.inference_mode(False):
                new = landmarks.new_empty(*shape[:-1], B, max(need - held, size), shape[-1])
            segments = (*segments, _as_read(new))
        self._landmarks = _Landmarks(begin, segments)
        self._put_landmarks(landmarks, first, counts)

    def _put_landmarks(self, landmarks: Tensor, first: Integers, counts: Integers) -> None:
        B = len(landmarks)
        alike = bool((first == first[0]).all() and (counts == counts[0]).all())
        for b in [slice(None)] if alike else [slice(b, b + 1) for b in range(B)]:
            at, end = int(first[b][0]), int((first + counts)[b][0])
            begin = self._landmarks.first
            for segment in self._landmarks.segments:
                done, stop = max(at, begin), min(end, begin + segment.shape[1])
                if done < stop:
                    segment[b, done - begin : stop - begin] = landmarks[b, done - at : stop - at]
                begin += segment.shape[1]

    # --- reading -------------------------------------------------------------------------------------------

    @property
    def _num_base(self) -> int:
        return 0 if self.base is None else self.base[1]

    def blocks(self, num_chunks: int, rows: int, first: int = 0) -> list[Tensor]:
        """Landmarks of chunks ``first ... num_chunks - 1`` in parts [rows, m, ..., E]; a base's are shared (stride 0).

        In memory they stand as [..., rows, m, E]: those of one plane side by side. ``first`` is at least the
        smallest :meth:`first_chunk`; for chunks that do not count in a row, its landmarks are any numbers.
        """
        found = []
        if self.base is not None and first < self.base[1]:
            below, count = self.base
            found = [
                x.expand(rows, *x.shape[1:]) if rows > 1 else x
                for x in below.blocks(min(count, num_chunks), 1, first)
            ]
        begin = self._num_base + self._landmarks.first
        assert not self._landmarks.segments or max(first, self._num_base) >= begin, "evicted in every row"
        for segment in self._landmarks.segments:
            low, high = max(first - begin, 0), min(num_chunks - begin, segment.shape[1])
            if low < high:
                found.append(segment[:, low:high])
            begin += segment.shape[1]
        return found

    def select(
        self,
        query: Tensor,
        num_chunks: int,
        num_retrieved: int,
        num_candidates: Tensor,
        scale: float,
        part: slice | None = None,
    ) -> ChunkSelection:
        """:func:`select_chunks` for queries [B, n, E] among the first chunks, by ``part`` of the landmark vectors."""
        blocks = self._parts(query, num_chunks, part)
        return self.search.select(query, blocks, num_retrieved, num_candidates, scale)

    def weigh(
        self, query: Tensor, num_chunks: int, indices: Tensor, scale: float, part: slice | None = None
    ) -> ChunkSelection:
        """The same of chunks [B, n, K] that are selected already."""
        blocks = self._parts(query, num_chunks, part)
        ends = torch.zeros(query.shape[1], dtype=torch.int64, device=query.device)  # not asked for
        return select_chunks(query, blocks, indices.shape[-1], ends, indices=indices, scale=scale)

    def _parts(self, query: Tensor, num_chunks: int, part: slice | None) -> list[Tensor]:
        blocks = self.blocks(num_chunks, query.shape[0])
        return [x if part is None else x[..., part] for x in blocks] or [query[:, :0]]

    def landmarks_of(self, chunks: Tensor, num_chunks: int, part: slice) -> Tensor:
        """``part`` of the landmark vectors [B, n, E] of chunks [B, n] among the first ``num_chunks``."""
        blocks = [x[:, :, None, part] for x in self.blocks(num_chunks, len(chunks))]
        return gather(blocks, chunks[:, :, None, None], blocks[0].dtype)[:, :, 0, 0]

    def gather(self, chunks: Integers, planes: Integers | None = None) -> tuple[Tensor, Integers]:
        """Records [B, n, 2, J, S, D] (keys, values) and lengths [B, n] of chunks [B, n]; -1 gives any record.

        Args:
            planes: [B, n] which of a chunk's planes; None: the only one. Of chunks with many the store is asked for
                each record once, however many ask for it, and for -1 not at all.

        Raises:
            ValueError: no ``planes`` for chunks that have many.
        """
        if planes is None and self.planes > 1:
            raise ValueError(
                f"planes: expected the number of a plane for each chunk, which has {self.planes}, got None."
            )
        B, n = chunks.shape
        rows, wanted = np.repeat(np.arange(B), n), chunks.reshape(-1)
        plane = np.zeros_like(wanted) if planes is None else planes.reshape(-1)
        assert not wanted.size or 0 <= plane.min() <= plane.max() < self.planes
        records, lengths = (self._fetch if self.planes == 1 else self._fetch_once)(rows, wanted, plane)
        return records.view(B, n, *records.shape[1:]), lengths.reshape(B, n)

    def _fetch(self, rows: Integers, chunks: Integers, plane: Integers) -> tuple[Tensor, Integers]:
        parts = list(self._located(rows, np.maximum(chunks, self._oldest()), plane))
        self.fetched += sum(len(np.unique(part.numbers)) for part in parts)
        found = [part.memory._gather_own(part.numbers) for part in parts]
        if len(parts) == 1:
            return found[0], parts[0].lengths
        if not parts:
            return self._some_store().gather(torch.from_numpy(chunks)), chunks
        lengths = np.empty(len(chunks), np.int64)
        with torch.inference_mode(False):
            records = found[0].new_empty(len(chunks), *found[0].shape[1:])
            for part, some in zip(parts, found, strict=True):
                records[torch.from_numpy(part.places)] = some
                lengths[part.places] = part.lengths
        return records, lengths

    def _fetch_once(self, rows: Integers, chunks: Integers, plane: Integers) -> tuple[Tensor, Integers]:
        there = np.flatnonzero(chunks >= 0)
        lengths, source = (np.zeros(len(chunks), np.int64) for _ in range(2))
        found: list[Tensor] = []
        count = 0
        for part in self._located(rows[there], chunks[there], plane[there]):
            distinct, which = np.unique(part.numbers, return_inverse=True)
            if len(distinct) == len(chunks):  # all in this memory, each once: in order, and not copied again
                self.fetched += len(distinct)
                return part.memory._gather_own(part.numbers), part.lengths
            found.append(part.memory._gather_own(distinct))
            source[there[part.places]] = count + which
            lengths[there[part.places]] = part.lengths
            count += len(distinct)
        self.fetched += count
        with torch.inference_mode(False):
            if not found:
                store = self._some_store()
                none = torch.zeros(1, *store.record_shape, dtype=store.dtype, device=store.device)
                return none.expand(len(chunks), *store.record_shape), lengths
            records = found[0] if len(found) == 1 else torch.cat(found)
            return records.index_select(0, torch.from_numpy(source).to(records.device)), lengths

    def _located(self, rows: Integers, chunks: Integers, plane: Integers) -> Iterator[_Located]:
        """Where chunks [n] lie, in parts by memory."""
        memory, left = self, np.arange(len(chunks))
        while len(left):
            base = memory._num_base
            own = chunks[left] >= base
            here = left[own]
            if len(here):
                row = rows[here] if memory is self else 0  # a base has one
                at = row, chunks[here] - base - memory._tables.first
                assert at[1].min() >= 0, "evicted in every row"
                numbers = memory._tables.records[at] + plane[here]
                yield _Located(memory, here, numbers, memory._tables.lengths[at])
            left = left[~own]
            memory = memory if memory.base is None else memory.base[0]

    def _gather_own(self, numbers: Integers) -> Tensor:
        assert self.store is not None
        source = self.store if self._recent is None else self._recent
        return source.gather(torch.from_numpy(numbers))

    def _oldest(self) -> int:
        """The first chunk that is known, of any row."""
        return self._tables.first if self.base is None else self.base[0]._oldest()

    def _some_store(self) -> ChunkStore:
        if self.store is not None:
            return self.store
        assert self.base is not None, "nothing written yet"
        return self.base[0]._some_store()

    def _whole(self, chunks: Integers) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [B, n, S, planes * J, D] and lengths [B, n] of chunks [B, n]."""
        P = self.planes
        records, lengths = self.gather(
            chunks.repeat(P, axis=1),
            np.broadcast_to(np.arange(P), (*chunks.shape, P)).reshape(len(chunks), -1),
        )
        records = records.unflatten(1, (chunks.shape[1], P)).transpose(2, 3)  # [B, n, 2, planes, J, S, D]
        k, v = (records[:, :, i].flatten(2, 3).transpose(2, 3) for i in (0, 1))
        return k, v, torch.from_numpy(lengths[:, ::P].copy())

    def starting_before(self, row: int, num_chunks: int, position: int) -> int:
        """How many of a row's first chunks start before ``position``; those that were evicted count."""
        count = self._num_base
        if self.base is not None:
            found = self.base[0].starting_before(0, min(count, num_chunks), position)
            if found < count:
                return found
        first, _, starts, _ = self._tables
        own = starts[row, : max(0, num_chunks - count - first)] if len(starts) else starts.reshape(-1)
        return count + first + int(np.searchsorted(own, position))

    # --- saving --------------------------------------------------------------------------------------------

    def tables(self, size: MemorySize) -> dict[str, Tensor]:
        """What a saved memory holds beside the records: landmarks [..., B, M, E], and int64 [B, M] tables.

        They begin with the first chunk that counts in any row; ``first_chunks`` [B] says which do, if not all.
        """
        end = int(size.chunks.max()) - self._num_base
        if self.store is None or not end:
            return {}
        first = self.first_chunk(size)
        begin = int(first.min())
        held, *numbers = self._tables
        counts = begin + np.arange(end - begin) < size.chunks[:, None]  # beyond: of calls that were stopped
        tables = {
            name: torch.from_numpy(np.where(counts, x[:, begin - held : end - held], 0))
            for name, x in zip(("records", "starts", "lengths"), numbers, strict=True)
        }
        if first.any():
            tables["first_chunks"] = torch.from_numpy(first)
        blocks = self.blocks(end, len(first), begin)
        return tables | {"landmarks": torch.cat([_as_stored(x) for x in blocks], dim=-2)}

    def fill(self, store: ChunkStore, tables: dict[str, Tensor]) -> None:
        """Begin with what a saved memory holds."""
        self._use(store)
        self.dtype = store.dtype
        if "first_chunks" in tables:
            self._gone = tables["first_chunks"].numpy().copy()
        first = self._num_gone()
        self._landmarks = _Landmarks(first, (_as_read(tables["landmarks"]),))
        numbers = (tables[name].numpy().copy() for name in ("records", "starts", "lengths"))
        self._tables = _Tables(first, *numbers)

    def flattened(self, size: MemorySize) -> tuple[ChunkMemory, MemorySize]:
        """The same chunks in a memory without a base, on disk."""
        other = ChunkMemory("disk", dtype=self.dtype, planes=self.planes, max_chunks=self.max_chunks)
        other._gone = first = self.first_chunk(size)  # [B]
        empty, B = MemorySize(first, 0), len(first)
        starts = self._all_starts(size)
        begin, step = int(first.min()), max(1, 256 // self.planes)
        for block in self.blocks(int(size.chunks.max()), B, begin):
            for at in range(0, block.shape[1], step):
                part = block[:, at : at + step]
                n = part.shape[1]
                here = begin + at + np.arange(n)
                skipped = (first[:, None] > here).sum(1)  # [B] evicted
                columns = np.minimum(np.arange(n) + skipped[:, None], n - 1)  # [B, n]
                counts = (size.chunks[:, None] > here).sum(1) - skipped
                if skipped.any():
                    part = part[torch.arange(B)[:, None], torch.from_numpy(columns)]
                there = np.where(np.arange(n) < counts[:, None], here[columns], -1)
                k, v, lengths = self._whole(there)
                begins = np.take_along_axis(starts[:, here], columns, axis=1)
                empty = other.write(empty, MemoryEntries(k, v, part, lengths), begins, counts)
            begin += block.shape[1]
        return other, empty

    def _all_starts(self, size: MemorySize) -> Integers:
        B, total = len(size.chunks), int(size.chunks.max())
        starts = np.zeros((B, total), np.int64)
        own = self._num_base
        if self.base is not None:
            starts[:, :own] = self.base[0]._all_starts(MemorySize(np.array([own]), 0))
        first = own + self._tables.first
        if total > first:
            starts[:, first:] = self._tables.starts[:, : total - first]
        return starts

    # --- whole rows ----------------------------------------------------------------------------------------

    def branch(self, size: MemorySize) -> ChunkMemory:
        """A memory that goes on after these chunks of the one row."""
        dtype = self.dtype if self.store is None else self.store.dtype
        other = ChunkMemory("device", 0, None, dtype, self.search, self.planes, self.max_chunks)
        other._gone = self.first_chunk(size)
        if size.chunks[0]:
            other.base = (self if self.max_chunks is None else self._freeze(size), int(size.chunks[0]))
        return other

    def _freeze(self, size: MemorySize) -> ChunkMemory:
        """This memory as it is now: while it lives, records that count in ``size`` are not written over."""
        frozen = copy(self)
        first, end = (int(x[0]) - self._num_base for x in (self.first_chunk(size), size.chunks))
        if end > 0:
            at = self._tables.first
            frozen._needed = self._tables.records[0, max(first, 0) - at : end - at].copy()
        self._frozen.add(frozen)
        return frozen

    def emptied(self) -> ChunkMemory:
        """A memory like this one, with nothing in it."""
        tier, capacity, folder = self.tier, self.capacity, self.folder
        if self.base is not None:
            tier, capacity, folder = "device", 0, None
        return ChunkMemory(tier, capacity, folder, self.dtype, self.search, self.planes, self.max_chunks)

    def with_rows(self, rows: Integers) -> ChunkMemory:
        """A memory whose row b is this one's row ``rows[b]``. Keys and values stay where they are."""
        other = copy(self)
        index = torch.from_numpy(rows)
        with torch.inference_mode(False):  # they are written to later
            segments = (
                _as_read(_as_stored(x).index_select(-3, index.to(x.device))) for x in self._landmarks.segments
            )
            other._landmarks = _Landmarks(self._landmarks.first, tuple(segments))
        if len(self._tables.records):
            first, *tables = self._tables
            other._tables = _Tables(first, *(x[rows] for x in tables))
        if len(self._gone) > 1:
            other._gone = self._gone[rows]
        return other

    def replace(self, first: int, entries: MemoryEntries) -> MemoryEntries:
        """Overwrite chunks ``first ...`` of the one row in place, also for every branch; returns the old ones."""
        n = entries.landmarks.shape[1]
        store = self._recent or self.store
        held, records, _, lengths = self._tables
        own = self.base is None and store is not None and len(records) == 1
        at = first - held
        there = lengths[0, max(at, 0) : max(at + n, 0)] if own else np.zeros(0, np.int64)
        # a chunk has at least one token
        if first < self._gone[0] or at < 0 or len(there) < n or not there.all():
            raise ValueError(f"first: expected {n} chunks that this memory owns, got {first}.")
        assert store is not None
        k, v, old_lengths = self._whole(np.arange(first, first + n)[None])
        landmarks = torch.cat(self.blocks(first + n, 1, first), dim=1)
        old = MemoryEntries(k.clone(), v.clone(), landmarks.clone(), old_lengths)
        numbers = records[0, at : at + n].copy()
        for number, record in zip(numbers, self._as_records(entries)[0], strict=True):
            store.write(int(number), record)
        new_lengths = entries.lengths[0].cpu().numpy()
        for memory in (self, *self._frozen):
            begin, records, _, lengths = memory._tables
            for i in range(n):
                chunk = first + i
                if 0 <= chunk - begin < records.shape[1] and records[0, chunk - begin] == numbers[i]:
                    lengths[0, chunk - begin] = new_lengths[i]
                    memory._put_landmarks(entries.landmarks[:, i : i + 1], np.array([chunk]), np.array([1]))
        return old

    def num_bytes(self, size: MemorySize) -> int:
        """Records in the store (2 S J D numbers of its type each); landmarks and 24 bytes of own chunks that count."""
        if self.store is None:
            return 0
        own = int((size.chunks - np.maximum(self.first_chunk(size), self._num_base)).sum())
        landmark = sum(math.prod(x.shape[2:]) * x.element_size() for x in self._landmarks.segments[:1])
        return size.records * self.store.record_bytes + own * (landmark + TABLE_BYTES)


def _as_read(landmarks: Tensor) -> Tensor:
    """[..., B, m, E] -> [B, m, ..., E], the same memory."""
    return landmarks.movedim((-3, -2), (0, 1))


def _as_stored(landmarks: Tensor) -> Tensor:
    return landmarks.movedim((0, 1), (-3, -2))
