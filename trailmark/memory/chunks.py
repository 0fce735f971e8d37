"""The memory of past chunks: records of keys and values in a store, landmark vectors, and where to find them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from trailmark.memory.encoding import EncodedRecords, EncodedStore, Encoder
from trailmark.memory.fetching import Located, fetch_each, fetch_once
from trailmark.memory.saved import next_chunk_file
from trailmark.memory.search import ExactSearch, anew
from trailmark.memory.tables import Booleans, Integers, Landmarks, Tables, as_read, as_stored
from trailmark.memory.tiers.base import TIERS, tier_named
from trailmark.memory.tiers.disk import expect_there
from trailmark.memory.tiers.recent import RecentRecords
from trailmark.memory.tiers.records import ChunkStore, RecordLayout
from trailmark.ops.arguments import require

Rows = slice | list[int]
"""Some rows of a batch."""
TABLE_BYTES = 24  # of a chunk besides its record and landmark: record number, first position, length
_RECENT_CHUNKS, _RECENT_BYTES = 512, 16 << 20  # kept on the device in front of host and disk
_LEAST_RECENT = 16  # chunks of many planes so kept: one token's of all layers, and the last one's


def recent_chunks(record_bytes: int, planes: int = 1) -> int:
    """How many chunks, used last, a memory keeps on the device in front of host and disk: ``planes`` records each.

    Args:
        record_bytes: of a record as it is given.
    """
    least = 64 if planes == 1 else _LEAST_RECENT
    return min(_RECENT_CHUNKS, max(least, _RECENT_BYTES // (planes * record_bytes)))


def landmark_dtype(own: torch.dtype, dtype: torch.dtype | None, keeps_tokens: bool) -> torch.dtype:
    """What landmark vectors of the type ``own`` are kept in, in a memory of ``dtype`` that may keep tokens."""
    if keeps_tokens:
        return dtype or own
    return torch.bfloat16 if dtype == torch.int8 and own.itemsize > 2 else own


class MemoryEntries(NamedTuple):
    """What is kept of n chunks."""

    k: Tensor  # [B, n, S, planes * J, D]; what is absent is any, and has a part in the scales of int8: best 0
    v: Tensor  # [B, n, S, planes * J, D]
    landmarks: Tensor  # [B, n, E], or of any trailing shape [B, n, ..., E]
    lengths: Tensor  # [B, n] int64: keys that exist
    tokens: Tensor | None = None  # [B, n, S] int64, for a memory that keeps these; what is absent is any

    def each(self, change: Callable[[Tensor], Tensor]) -> MemoryEntries:
        """With every tensor that there is changed."""
        return MemoryEntries(*(None if x is None else change(x) for x in self))  # type: ignore[arg-type]


class MemorySize(NamedTuple):
    """How much of a memory counts; what an unfinished call wrote beyond it is written over."""

    chunks: Integers  # [B] of each row, those of the base included
    records: int  # written to the store
    short: bool = False  # some chunk was closed early
    rows: tuple[MemorySize, ...] = ()  # of memories that were joined, each one's; of one memory, none

    @classmethod
    def joined(cls, rows: Sequence[MemorySize]) -> MemorySize:
        """Of several memories of one row, as one of a batch; of one, its own."""
        if len(rows) == 1:
            return rows[0]
        chunks = np.concatenate([size.chunks for size in rows])
        return cls(chunks, sum(size.records for size in rows), any(size.short for size in rows), tuple(rows))

    def take_rows(self, rows: Integers) -> MemorySize:
        """Row b is a copy of row ``rows[b]``."""
        if self.rows:
            return self.joined([self.rows[b] for b in rows])
        return self._replace(chunks=self.chunks[rows])


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

    On a tier that keeps tokens the store holds these instead, and ``encoder`` makes keys and values of them again
    when they are read (:mod:`trailmark.memory.encoding`); a branch keeps tokens too.

    Args:
        capacity: chunks of all rows to make room for at once.
        folder: of tier "disk"; None: a temporary one.
        dtype: of keys and values, or of a memory of tokens of landmark vectors; None: as they come. With int8 wider
            landmark vectors are kept in bfloat16.
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
        require(
            tier_named(tier).needs_folder or folder is None,
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
        self._makes_folder = folder is not None and not folder.exists()
        self.planes, self.max_chunks = planes, max_chunks
        self.capacity = capacity if max_chunks is None else min(capacity, max_chunks)
        self.search = search or ExactSearch()
        self.head_searches: dict[int, Any] = {}
        """Of each plane, its own copy of ``search``, for models whose heads search by themselves."""
        self.store: ChunkStore | None = None
        self.own_store: Callable[[RecordLayout], ChunkStore] | None = None
        """Makes the store of a memory that writes into a file which others write too; None: one of its tier."""
        self.base: tuple[ChunkMemory, int] | None = None  # of one row; so many of its chunks
        self.encoder: Encoder | None = None
        """Of a memory that keeps tokens, what makes keys and values of them; who makes the memory sets it."""
        self.fetched = 0
        """Records that :meth:`gather` needed: each counts once a call, however often it was asked for."""
        self._recent: RecentRecords | None = None
        self._landmarks = Landmarks()
        self._tables = Tables.empty()
        self._gone = np.zeros(1, np.int64)  # [1 or B] chunks of a row that may have been written over
        # if records may be written over: what branches go on from and an unfinished call began with, and the
        # records that they need
        self._frozen: WeakSet[ChunkMemory] = WeakSet()
        self._needed = np.zeros(0, np.int64)

    # --- writing -------------------------------------------------------------------------------------------

    def first_chunk(self, size: MemorySize) -> Integers:
        """[B] the first chunk of each row that counts: 0 without ``max_chunks``."""
        if not size.chunks.any():  # whatever a first call that failed has left, of another batch perhaps
            return np.zeros_like(size.chunks)
        oldest = 0 if self.max_chunks is None else size.chunks - self.max_chunks
        return np.maximum(self._gone + np.zeros_like(size.chunks), oldest)

    def write(
        self,
        size: MemorySize,
        entries: MemoryEntries,
        starts: Integers,
        counts: Integers,
    ) -> MemorySize:
        """Write the first ``counts`` [B] of n chunks after those that count; returns the size with them.

        Of what counts in ``size`` nothing is changed: a call that is stopped before the new size is put in place
        goes on from the old one. What counts only there (chunks evicted by this write) can be read until the next; a
        call that writes several times, and may have to go back to where it began, holds that with :meth:`frozen`.

        Args:
            starts: [B, n] number of each chunk's first position in its text.
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
        if not size.chunks.any():
            self._landmarks, self._tables = Landmarks(), Tables.empty()
        self._gone = self.first_chunk(size)
        numbers = self._take_records(size, len(row))
        self._write_records(numbers, records)
        end, gone = int((first + counts).max()), self._num_gone()
        tables = self._tables = self._tables.with_room(B, end, gone, self.capacity)
        place = first[row] + chunk - tables.first
        tables.records[row, place] = numbers
        tables.starts[row, place] = np.broadcast_to(starts, (B, n))[row, chunk]
        tables.lengths[row, place] = lengths[row, chunk]
        landmarks = entries.landmarks.detach()
        landmarks = landmarks.to(landmark_dtype(landmarks.dtype, self.dtype, self.keeps_tokens))
        self._landmarks = self._landmarks.with_room(landmarks, end, gone, self.capacity, self.max_chunks)
        self._landmarks.write(landmarks, first, counts)
        short = size.short or bool((lengths[row, chunk] < self.keys_of_shape(records.shape)).any())
        end = max(size.records, int(numbers.max(initial=-1)) + self.planes)
        return MemorySize(size.chunks + counts, end, short)

    @property
    def keeps_tokens(self) -> bool:
        """Whether its records are tokens."""
        return TIERS[self.tier].keeps_tokens

    @property
    def keeps_kv(self) -> bool:
        """Whether its records are keys and values."""
        return not self.keeps_tokens

    def keys_of_shape(self, record: Sequence[int]) -> int:
        """S, of a record [2, J, S, D] or of tokens [S]."""
        return record[-1 if self.keeps_tokens else -2]

    def expect_whole(self) -> None:
        """Compare every record that lies in a saved memory with its manifest: what is copied is signed anew."""
        if self.store is not None and self.store.signed is not None:
            self.store.signed.compare(self.store.pieces, 0, self.store.vouched * self.store.record_bytes)
        if self.base is not None:
            self.base[0].expect_whole()

    def _as_records(
        self, entries: MemoryEntries
    ) -> Tensor:  # [B, n, planes, 2, J, S, D], or [B, n, 1, S] of tokens
        if self.keeps_tokens:
            assert entries.tokens is not None, "a step that was not told its tokens"
            return entries.tokens[:, :, None]
        parts = (x.transpose(2, 3).unflatten(2, (self.planes, -1)) for x in (entries.k, entries.v))
        return torch.stack(list(parts), dim=3)

    def _make_store(self, records: Tensor) -> ChunkStore:
        if self.folder is not None and not self._makes_folder:
            expect_there(self.folder)
        layout = RecordLayout(tuple(records.shape[1:]), self.dtype or records.dtype, records.device)
        if self.encoder is not None:
            layout = RecordLayout(layout.shape, self.encoder.token_dtype, "cpu")
        if self.own_store is not None:
            return self.own_store(layout)
        path = None if self.folder is None else next_chunk_file(self.folder)
        return tier_named(self.tier).made(layout, self.capacity * self.planes, path)

    def _use(self, store: ChunkStore) -> None:
        self.store = store
        if self.encoder is not None:
            encoded = EncodedStore(store, self.encoder.layout)
            self._recent = RecentRecords(encoded, recent_chunks(encoded.record_bytes))
        elif store.keeps_recent(store.device):
            recent = recent_chunks(store.layout.given_bytes, self.planes)
            self._recent = RecentRecords(store, recent * self.planes)

    def _take_records(self, size: MemorySize, n: int) -> Integers:
        """First record [n] of each of n new chunks: of those that nothing needs, then after the last."""
        free = np.zeros(0, np.int64)
        end = size.records // self.planes
        if self.max_chunks is not None:
            needed = np.zeros(end, bool)
            for numbers in (self._records_of(size), *(memory._needed for memory in self._frozen)):
                places = numbers // self.planes
                needed[places[places < end]] = True
            free = np.flatnonzero(~needed)[:n]
        return np.concatenate([free, end + np.arange(n - len(free))]) * self.planes

    def _records_of(self, size: MemorySize) -> Integers:
        """First records of the own chunks that count in ``size``, of all rows."""
        first, records, *_ = self._tables
        if not len(records) or not size.chunks.any():
            return np.zeros(0, np.int64)
        chunk = self._num_base + first + np.arange(records.shape[1])
        counts = (chunk >= self.first_chunk(size)[:, None]) & (chunk < size.chunks[:, None])  # [B, m]
        return records[counts]

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

    def _num_gone(self) -> int:
        """Own chunks, from the first, that no row needs any more."""
        return max(0, int(self._gone.min()) - self._num_base)

    # --- reading -------------------------------------------------------------------------------------------

    @property
    def _num_base(self) -> int:
        return 0 if self.base is None else self.base[1]

    def parts(self, asking: Booleans) -> list[tuple[Rows, ChunkMemory]]:
        """Which rows look among the same landmarks: all, or of joined texts some of those that are ``asking``.

        Args:
            asking: [B].
        """
        return [(slice(0, len(asking)), self)]

    def blocks(self, num_chunks: int, rows: int, first: int = 0) -> list[Tensor]:
        """Landmarks of chunks ``first ... num_chunks - 1`` in parts [rows, m, ..., E]; a base's are shared (stride 0).

        In memory they stand as [..., rows, m, E]: those of one plane side by side. ``first`` is at least the
        smallest :meth:`first_chunk`; for chunks that do not count in a row, its landmarks are any numbers.
        """
        shared = []
        if self.base is not None and first < self.base[1]:
            below, count = self.base
            shared = [
                x.expand(rows, *x.shape[1:]) if rows > 1 else x
                for x in below.blocks(min(count, num_chunks), 1, first)
            ]
        base, landmarks = self._num_base, self._landmarks
        assert not landmarks.segments or max(first, base) >= base + landmarks.first, "evicted in every row"
        return shared + landmarks.between(first - base, num_chunks - base)

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
        if self.planes == 1 and not self.keeps_tokens:
            parts = list(self._located(rows, np.maximum(wanted, self._oldest()), plane))
            records, lengths, needed = fetch_each(parts, wanted)
        else:
            there = np.flatnonzero(wanted >= 0)
            parts = [
                part._replace(places=there[part.places])
                for part in self._located(rows[there], wanted[there], plane[there])
            ]
            records, lengths, needed = fetch_once(parts, wanted)
        self.fetched += needed
        if records is None:
            store = self._some_store()
            with torch.inference_mode(False):
                dtype = store.layout.given_dtype
                none = torch.zeros(1, *store.record_shape, dtype=dtype, device=store.device)
            records = none.expand(len(wanted), *store.record_shape)
        return records.view(B, n, *records.shape[1:]), lengths.reshape(B, n)

    def _located(self, rows: Integers, chunks: Integers, plane: Integers) -> Iterator[Located]:
        """Where chunks [n] lie, in parts by memory."""
        for memory, here, at in self._homes(rows, chunks):
            numbers = memory._tables.records[at] + plane[here]
            source: Any = memory._recent or memory.store
            if memory.encoder is not None:
                source = EncodedRecords(memory, memory.encoder, source, at[0], chunks[here], numbers)
            yield Located(source, here, numbers, memory._tables.lengths[at])

    def _homes(
        self, rows: Integers, chunks: Integers
    ) -> Iterator[tuple[ChunkMemory, Integers, tuple[Integers, Integers]]]:
        """Memories in which chunks [n] lie: which of them do, and their rows and columns of its tables."""
        assert chunks.min(initial=0) >= 0
        memory, left = self, np.arange(len(chunks))
        while len(left):
            base = memory._num_base
            own = chunks[left] >= base
            here = left[own]
            if len(here):
                row = rows[here] if memory is self else np.zeros_like(here)  # a base has one
                at = row, chunks[here] - base - memory._tables.first
                assert at[1].min() >= 0, "evicted in every row"
                yield memory, here, at
            left = left[~own]
            memory = memory if memory.base is None else memory.base[0]

    def tokens(self, row: int, first: int, stop: int) -> tuple[Tensor, Integers, Integers]:
        """Of chunks ``first ... stop - 1`` of a row of a memory that keeps tokens: these, lengths and starts.

        Returns:
            int64 [stop - first, S] on the CPU, [stop - first], and [stop - first] the number of the first position.
        """
        chunks = np.arange(first, stop)
        lengths, starts = np.zeros_like(chunks), np.zeros_like(chunks)
        together: Tensor | None = None
        for memory, here, at in self._homes(np.full_like(chunks, row), chunks):
            assert memory.store is not None
            tokens = memory.store.gather(torch.from_numpy(memory._tables.records[at])).long()
            if together is None:
                together = tokens.new_zeros(len(chunks), tokens.shape[1])
            together[torch.from_numpy(here)] = tokens
            lengths[here], starts[here] = memory._tables.lengths[at], memory._tables.starts[at]
        assert together is not None
        return together, lengths, starts

    def _oldest(self) -> int:
        """The first chunk that is known, of any row."""
        return self._tables.first if self.base is None else self.base[0]._oldest()

    def _some_store(self) -> ChunkStore:
        """One whose records are what :meth:`gather` gives."""
        if self.store is not None:
            return self.store if self._recent is None else self._recent.store
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

    def _entries(self, chunks: Integers, landmarks: Tensor) -> MemoryEntries:
        """Entries of chunks [B, n] with landmarks [B, n, ..., E]; of a memory of tokens without keys and values."""
        if not self.keeps_tokens:
            k, v, lengths = self._whole(chunks)
            return MemoryEntries(k, v, landmarks, lengths)
        rows = []
        for row, of_row in enumerate(chunks):
            there = of_row[of_row >= 0]
            rows.append(self.tokens(row, int(there.min()), int(there.max()) + 1)[:2])
        n = chunks.shape[1]
        tokens = torch.stack([nn.functional.pad(x, (0, 0, 0, n - len(x))) for x, _ in rows])
        lengths = torch.from_numpy(np.stack([np.pad(x, (0, n - len(x))) for _, x in rows]))
        return MemoryEntries(tokens[..., :0], tokens[..., :0], landmarks, lengths, tokens)

    def starting_before(self, row: int, num_chunks: int, position: int) -> int:
        """How many of a row's first chunks start before ``position``; those that were evicted count."""
        count = self._num_base
        if self.base is not None:
            before = self.base[0].starting_before(0, min(count, num_chunks), position)
            if before < count:
                return before
        first, _, starts, _ = self._tables
        own = starts[row, : max(0, num_chunks - count - first)] if len(starts) else starts.reshape(-1)
        return count + first + int(np.searchsorted(own, position))

    def starts(self, row: int, chunks: Integers) -> Integers:
        """[n] the number of the first position of chunks [n] of a row, which count."""
        return self._starts_at(np.full_like(chunks, row), chunks)

    def _starts_at(self, rows: Integers, chunks: Integers) -> Integers:
        found = np.zeros_like(chunks)
        for memory, here, at in self._homes(rows, chunks):
            found[here] = memory._tables.starts[at]
        return found

    def last_starts(self, size: MemorySize, count: int) -> tuple[Integers, Integers]:
        """Where each row's last ``count`` chunks start [B, n], -1 before its first; how many are before them [B].

        Of a memory that keeps all chunks.
        """
        assert self.max_chunks is None
        n = min(count, int(size.chunks.max(initial=0)))
        last = size.chunks[:, None] - n + np.arange(n)  # [B, n] their numbers
        starts = np.full(last.shape, -1)
        row, at = np.nonzero(last >= 0)
        starts[row, at] = self._starts_at(row, last[row, at])
        return starts, np.maximum(size.chunks - n, 0)

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
        return tables | {"landmarks": torch.cat([as_stored(x) for x in blocks], dim=-2)}

    def fill(self, store: ChunkStore, tables: dict[str, Tensor]) -> None:
        """Begin with what a saved memory holds."""
        self._use(store)
        self.dtype = tables["landmarks"].dtype if self.keeps_tokens else store.dtype
        if "first_chunks" in tables:
            self._gone = tables["first_chunks"].numpy().copy()
        first = self._num_gone()
        self._landmarks = Landmarks(first, (as_read(tables["landmarks"]),))
        numbers = (tables[name].numpy().copy() for name in ("records", "starts", "lengths"))
        self._tables = Tables(first, *numbers)

    def flattened(self, size: MemorySize) -> tuple[ChunkMemory, MemorySize]:
        """The same chunks in a memory without a base, on disk; one of tokens holds these in RAM."""
        tier = self.tier if self.keeps_tokens else "disk"
        other = ChunkMemory(tier, dtype=self.dtype, planes=self.planes, max_chunks=self.max_chunks)
        other.encoder = self.encoder
        other._gone = first = self.first_chunk(size)  # [B]
        empty, B = MemorySize(first, 0), len(first)
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
                begins = np.zeros_like(there)
                row, column = np.nonzero(there >= 0)
                begins[row, column] = self._starts_at(row, there[row, column])
                empty = other.write(empty, self._entries(there, part), begins, counts)
            begin += block.shape[1]
        return other, empty

    # --- whole rows ----------------------------------------------------------------------------------------

    def branch(self, size: MemorySize) -> ChunkMemory:
        """A memory that goes on after these chunks of the one row."""
        tier, dtype = "device", self.dtype
        if self.keeps_tokens:
            tier = self.tier
        elif self.store is not None:
            dtype = self.store.dtype
        other = ChunkMemory(tier, 0, None, dtype, self.search, self.planes, self.max_chunks)
        other.encoder, other.head_searches = self.encoder, self.head_searches
        other._gone = self.first_chunk(size)
        if size.chunks[0]:
            other.base = (self.frozen(size), int(size.chunks[0]))
        return other

    def frozen(self, size: MemorySize) -> ChunkMemory:
        """This memory as it is now: while it lives, records that count in ``size`` are not written over.

        Without ``max_chunks`` they never are, and it is this memory itself.
        """
        if self.max_chunks is None:
            return self
        frozen = copy(self)
        frozen._needed = self._records_of(size)
        self._frozen.add(frozen)
        return frozen

    def go_back(self, frozen: ChunkMemory) -> None:
        """Be again what :meth:`frozen` gave, as if nothing had been written since."""
        self._landmarks, self._tables, self._gone = frozen._landmarks, frozen._tables, frozen._gone
        self._frozen.discard(frozen)

    def emptied(self) -> ChunkMemory:
        """A memory like this one, with nothing in it."""
        tier, capacity, folder = self.tier, self.capacity, self.folder
        if self.base is not None:
            tier, capacity, folder = self.tier if self.keeps_tokens else "device", 0, None
        search = anew(self.search)  # another text's landmarks may follow
        other = ChunkMemory(tier, capacity, folder, self.dtype, search, self.planes, self.max_chunks)
        other.encoder = self.encoder
        return other

    def with_rows(self, rows: Integers) -> ChunkMemory:
        """A memory whose row b is this one's row ``rows[b]``. Keys and values stay where they are."""
        other = copy(self)
        other._landmarks, other._tables = self._landmarks.take_rows(rows), self._tables.take_rows(rows)
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
        landmarks = torch.cat(self.blocks(first + n, 1, first), dim=1)
        old = self._entries(np.arange(first, first + n)[None], landmarks).each(Tensor.clone)
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
                    memory._landmarks.write(entries.landmarks[:, i : i + 1], np.array([chunk]), np.array([1]))
        return old

    def num_bytes(self, size: MemorySize) -> int:
        """Records in the store; landmarks and 24 bytes of own chunks that count."""
        if self.store is None:
            return 0
        own = int((size.chunks - np.maximum(self.first_chunk(size), self._num_base)).sum())
        landmark = sum(math.prod(x.shape[2:]) * x.element_size() for x in self._landmarks.segments[:1])
        return size.records * self.store.record_bytes + own * (landmark + TABLE_BYTES)
