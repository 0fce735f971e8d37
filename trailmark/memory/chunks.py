"""The memory of past chunks: records of keys and values in a store, landmark vectors, and where to find them."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trailmark.memory.saved import next_chunk_file
from trailmark.memory.search import ExactSearch
from trailmark.memory.store import TIERS, ChunkStore, RecentRecords, make_store
from trailmark.ops import ChunkSelection
from trailmark.ops.arguments import require

Integers = np.ndarray[Any, np.dtype[np.int64]]

_TABLE_BYTES = 24  # of a chunk besides its record and landmark: record number, first position, length
_RECENT_RECORDS, _RECENT_BYTES = 512, 16 << 20  # kept on the device in front of host and disk
_FIRST_LANDMARKS = 1024  # of the first segment; each further one doubles what is there


class MemoryEntries(NamedTuple):
    """What is kept of n chunks."""

    k: Tensor  # [B, n, S, J, D]
    v: Tensor  # [B, n, S, J, D]
    landmarks: Tensor  # [B, n, E]
    lengths: Tensor  # [B, n] int64: keys that exist


class MemorySize(NamedTuple):
    """How much of a memory counts; what an unfinished call wrote beyond it is written over."""

    chunks: Integers  # [B] of each row, those of the base included
    records: int  # written to the store
    short: bool = False  # some chunk was closed early


class ChunkMemory:
    """Chunks 0, 1, ... of each row of a batch.

    Keys and values go to a store (tier device, host or disk) and are read by chunk number; landmark vectors
    stay on the device, in segments that are never copied again. A branch adds to a ``base`` of one row, which
    it shares with its source and other branches.
    """

    def __init__(
        self,
        tier: str = "device",
        capacity: int = 0,
        folder: Path | None = None,
        dtype: torch.dtype | None = None,
        search: Any = None,
    ) -> None:
        require(tier in TIERS, "memory_tier", repr(tier), "one of " + ", ".join(map(repr, TIERS)))
        require(
            folder is None or tier == "disk",
            "memory_folder",
            repr(str(folder)),
            f"none for memory_tier={tier!r}",
            "Pass memory_tier='disk', or save the cache once the text is read.",
        )
        self.tier, self.capacity, self.folder, self.dtype = tier, capacity, folder, dtype
        self.search = search or ExactSearch()
        self.store: ChunkStore | None = None
        self.base: tuple[ChunkMemory, int] | None = None  # of one row; so many of its chunks
        self._recent: RecentRecords | None = None
        self._segments: list[Tensor] = []  # landmarks [B, m, E]
        self._records, self._starts, self._lengths = (np.zeros((0, 0), np.int64) for _ in range(3))

    # --- writing -------------------------------------------------------------------------------------------

    def write(
        self, size: MemorySize, entries: MemoryEntries, starts: Integers, counts: Integers
    ) -> MemorySize:
        """Write the first ``counts`` [B] of n chunks after those that count; returns the size with them.

        ``starts`` [B, n]: number of each chunk's first position in its text.
        """
        B, n = entries.landmarks.shape[:2]
        if not n:
            return size
        first = size.chunks - self._num_base
        lengths = np.broadcast_to(entries.lengths.cpu().numpy(), (B, n))
        row, chunk = np.nonzero(np.arange(n) < counts[:, None])
        records = torch.stack(
            [x.transpose(2, 3) for x in (entries.k, entries.v)], dim=2
        )  # [B, n, 2, J, S, D]
        if len(row) < B * n:
            records = records[torch.from_numpy(row), torch.from_numpy(chunk)]
        else:
            records = records.flatten(0, 1)
        if self.store is None:
            self._use(self._make_store(records))
        assert self.store is not None
        if len(self._records) not in (0, B):  # of a first call that failed, for another batch
            self._segments = []
            self._records, self._starts, self._lengths = (np.zeros((0, 0), np.int64) for _ in range(3))
        (self._recent or self.store).write(size.records, records.detach())
        self._grow_tables(B, int((first + counts).max()))
        place = first[row] + chunk
        self._records[row, place] = size.records + np.arange(len(row))
        self._starts[row, place] = np.broadcast_to(starts, (B, n))[row, chunk]
        self._lengths[row, place] = lengths[row, chunk]
        self._write_landmarks(entries.landmarks.detach(), first, counts)
        short = size.short or bool((lengths[row, chunk] < entries.k.shape[2]).any())
        return MemorySize(size.chunks + counts, size.records + len(row), short)

    def _make_store(self, records: Tensor) -> ChunkStore:
        path = None if self.folder is None else next_chunk_file(self.folder)
        shape = tuple(records.shape[1:])
        return make_store(self.tier, shape, self.dtype or records.dtype, records.device, self.capacity, path)

    def _use(self, store: ChunkStore) -> None:
        self.store = store
        if store.tier == "disk" or (store.tier == "host" and store.device.type != "cpu"):
            recent = min(_RECENT_RECORDS, max(64, _RECENT_BYTES // store.record_bytes))
            self._recent = RecentRecords(store, recent)

    def _grow_tables(self, B: int, chunks: int) -> None:
        held = self._records.shape[1]
        if chunks > held:
            width = max(chunks, held + held // 2, self.capacity, 64)
            grown = np.zeros((3, B, width), np.int64)
            for table, old in zip(grown, (self._records, self._starts, self._lengths), strict=True):
                table[: len(old), :held] = old[:, :held]
            self._lengths, self._starts, self._records = grown[2], grown[1], grown[0]

    def _write_landmarks(self, landmarks: Tensor, first: Integers, counts: Integers) -> None:
        B, _, E = landmarks.shape
        held = sum(segment.shape[1] for segment in self._segments)
        need = int((first + counts).max())
        if need > held:
            size = max(need - held, held, self.capacity if not held else 0, _FIRST_LANDMARKS)
            with torch.inference_mode(False):
                self._segments.append(landmarks.new_empty(B, size, E))
        alike = bool((first == first[0]).all() and (counts == counts[0]).all())
        for b in [slice(None)] if alike else [slice(b, b + 1) for b in range(B)]:
            at, end = int(first[b][0]), int((first + counts)[b][0])
            done, begin = at, 0
            for segment in self._segments:
                stop = min(end, begin + segment.shape[1])
                if done < stop:
                    segment[b, done - begin : stop - begin] = landmarks[b, done - at : stop - at]
                    done = stop
                begin += segment.shape[1]

    # --- reading -------------------------------------------------------------------------------------------

    @property
    def _num_base(self) -> int:
        return 0 if self.base is None else self.base[1]

    def blocks(self, num_chunks: int, rows: int) -> list[Tensor]:
        """Landmarks of the first chunks, [rows, m, E] each; those of the base are shared (stride 0)."""
        found = []
        if self.base is not None:
            below, count = self.base
            found = [
                x.expand(rows, *x.shape[1:]) if rows > 1 else x
                for x in below.blocks(min(count, num_chunks), 1)
            ]
        left = num_chunks - self._num_base
        for segment in self._segments:
            if left <= 0:
                break
            found.append(segment[:, :left])
            left -= segment.shape[1]
        return found

    def select(
        self, query: Tensor, num_chunks: int, num_retrieved: int, num_candidates: Tensor, scale: float
    ) -> ChunkSelection:
        """:func:`select_chunks` for queries [B, n, E] among the first chunks."""
        blocks = self.blocks(num_chunks, query.shape[0]) or [query[:, :0]]
        return self.search.select(query, blocks, num_retrieved, num_candidates, scale)

    def gather(self, chunks: Integers) -> tuple[Tensor, Integers]:
        """Records [B, n, 2, J, S, D] (keys, values) and lengths [B, n] of chunks [B, n]; -1 gives any record."""
        B, n = chunks.shape
        rows = np.repeat(np.arange(B), n)
        records, lengths = self._fetch(rows, chunks.reshape(-1).clip(0))
        return records.view(B, n, *records.shape[1:]), lengths.reshape(B, n)

    def _fetch(self, rows: Integers, chunks: Integers) -> tuple[Tensor, Integers]:
        if self.base is None:
            return self._fetch_own(rows, chunks)
        below, count = self.base
        shared = chunks < count
        if shared.all():
            return below._fetch(np.zeros_like(rows), chunks)
        if not shared.any():
            return self._fetch_own(rows, chunks - count)
        there, here = np.flatnonzero(shared), np.flatnonzero(~shared)
        one, one_lengths = below._fetch(np.zeros_like(there), chunks[there])
        two, two_lengths = self._fetch_own(rows[here], chunks[here] - count)
        records = one.new_empty(len(chunks), *one.shape[1:])
        records[torch.from_numpy(there)] = one
        records[torch.from_numpy(here)] = two
        lengths = np.empty(len(chunks), np.int64)
        lengths[there], lengths[here] = one_lengths, two_lengths
        return records, lengths

    def _fetch_own(self, rows: Integers, chunks: Integers) -> tuple[Tensor, Integers]:
        assert self.store is not None
        numbers = torch.from_numpy(self._records[rows, chunks])
        source = self.store if self._recent is None else self._recent
        return source.gather(numbers), self._lengths[rows, chunks]

    def starting_before(self, row: int, num_chunks: int, position: int) -> int:
        """How many of a row's first chunks start before ``position``."""
        count = self._num_base
        if self.base is not None:
            found = self.base[0].starting_before(0, min(count, num_chunks), position)
            if found < count:
                return found
        own = (
            self._starts[row, : max(0, num_chunks - count)] if len(self._starts) else self._starts.reshape(-1)
        )
        return count + int(np.searchsorted(own, position))

    # --- saving --------------------------------------------------------------------------------------------

    def tables(self, size: MemorySize) -> dict[str, Tensor]:
        """What a saved memory holds beside the records: landmarks [B, M, E], and int64 [B, M] tables."""
        count = int(size.chunks.max()) - self._num_base
        if self.store is None or not count:
            return {}
        numbers = {"records": self._records, "starts": self._starts, "lengths": self._lengths}
        tables = {name: torch.from_numpy(x[:, :count].copy()) for name, x in numbers.items()}
        return tables | {"landmarks": torch.cat(self.blocks(count, len(size.chunks)), dim=1)}

    def fill(self, store: ChunkStore, tables: dict[str, Tensor]) -> None:
        """Begin with what a saved memory holds."""
        self._use(store)
        self.dtype = store.dtype
        self._segments = [tables["landmarks"]]
        self._records, self._starts, self._lengths = (
            tables[name].numpy().copy() for name in ("records", "starts", "lengths")
        )

    def flattened(self, size: MemorySize) -> tuple[ChunkMemory, MemorySize]:
        """The same chunks in a memory without a base, on disk."""
        other, empty = ChunkMemory("disk", dtype=self.dtype), MemorySize(np.zeros_like(size.chunks), 0)
        total = int(size.chunks.max())
        landmarks = self.blocks(total, len(size.chunks))
        starts = self._all_starts(size)
        begin = 0
        for block in landmarks:
            for first in range(0, block.shape[1], 256):
                part = block[:, first : first + 256]
                n = part.shape[1]
                here = begin + first + np.arange(n)
                counts = (size.chunks[:, None] > here).sum(1)
                there = np.where(here < size.chunks[:, None], here, -1)
                records, lengths = self.gather(there)
                entries = MemoryEntries(
                    records[:, :, 0].transpose(2, 3),
                    records[:, :, 1].transpose(2, 3),
                    part,
                    torch.from_numpy(lengths),
                )
                empty = other.write(empty, entries, starts[:, here], counts)
            begin += block.shape[1]
        return other, empty

    def _all_starts(self, size: MemorySize) -> Integers:
        B, total = len(size.chunks), int(size.chunks.max())
        starts = np.zeros((B, total), np.int64)
        own = self._num_base
        if self.base is not None:
            starts[:, :own] = self.base[0]._all_starts(MemorySize(np.array([own]), 0))
        if total > own:
            starts[:, own:] = self._starts[:, : total - own]
        return starts

    # --- whole rows ----------------------------------------------------------------------------------------

    def branch(self, size: MemorySize) -> ChunkMemory:
        """A memory that goes on after these chunks of the one row."""
        other = ChunkMemory("device", dtype=self.dtype if self.store is None else self.store.dtype)
        other.search = self.search
        other.base = (self, int(size.chunks[0])) if size.chunks[0] else None
        return other

    def emptied(self) -> ChunkMemory:
        """A memory like this one, with nothing in it."""
        if self.base is not None:
            return ChunkMemory("device", dtype=self.dtype, search=self.search)
        return ChunkMemory(self.tier, self.capacity, self.folder, self.dtype, self.search)

    def with_rows(self, rows: Integers) -> ChunkMemory:
        """A memory whose row b is this one's row ``rows[b]``. Keys and values stay where they are."""
        other = copy(self)
        index = torch.from_numpy(rows)
        with torch.inference_mode(False):  # they are written to later
            other._segments = [x.index_select(0, index.to(x.device)) for x in self._segments]
        if len(self._records):
            other._records, other._starts, other._lengths = (
                x[rows] for x in (self._records, self._starts, self._lengths)
            )
        return other

    def replace(self, first: int, entries: MemoryEntries) -> MemoryEntries:
        """Overwrite chunks ``first ...`` of the one row in place, also for every branch; returns the old ones."""
        n = entries.landmarks.shape[1]
        store = self._recent or self.store
        own = self.base is None and store is not None and len(self._records) == 1
        there = self._lengths[0, max(first, 0) : first + n] if own else np.zeros(0, np.int64)
        if first < 0 or len(there) < n or not there.all():  # a chunk has at least one token
            raise ValueError(f"first: expected {n} chunks that this memory owns, got {first}.")
        assert store is not None
        here = slice(first, first + n)
        records, lengths = self.gather(np.arange(first, first + n)[None])
        old = MemoryEntries(
            records[:, :, 0].transpose(2, 3).clone(),
            records[:, :, 1].transpose(2, 3).clone(),
            torch.cat(self.blocks(first + n, 1), dim=1)[:, first:].clone(),
            torch.from_numpy(lengths.copy()),
        )
        new = torch.stack([x.transpose(2, 3) for x in (entries.k, entries.v)], dim=2)[0]
        for number, record in zip(self._records[0, here], new, strict=True):
            store.write(int(number), record[None])
        self._lengths[0, here] = entries.lengths[0].cpu().numpy()
        self._write_landmarks(entries.landmarks, np.array([first]), np.array([n]))
        return old

    def num_bytes(self, size: MemorySize) -> int:
        """Own chunks of all rows: (2 S J D) of the store's type, E of the landmarks' type, and 24 bytes each."""
        if self.store is None:
            return 0
        record = self.store.record_bytes
        own = int((size.chunks - self._num_base).sum())
        landmark = sum(x.shape[-1] * x.element_size() for x in self._segments[:1])
        return size.records * record + own * (landmark + _TABLE_BYTES)
