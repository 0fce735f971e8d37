"""The first form of the cache: a constant window, a growing memory of chunks, and the open chunk's tokens."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from trailmark.ops import ChunkSelection

_ALL = sys.maxsize  # chunks


class MemoryEntries(NamedTuple):
    """What is kept of n closed chunks."""

    k: Tensor  # [B, n, S, J, D]
    v: Tensor  # [B, n, S, J, D]
    landmarks: Tensor  # [B, n, E]
    lengths: Tensor  # [B, n] int64: keys that exist


class MemoryMark(NamedTuple):
    """A state of a :class:`ChunkMemory`."""

    written: int
    waiting: tuple[MemoryEntries, ...]
    short: bool


class ChunkMemory:
    """Keys, values, landmark vectors and lengths of past chunks, in buffers that grow.

    Buffers hold [B, capacity, J, S, D]: a chunk's keys of one head stand together, as GCA reads them. New
    entries wait in a list until they are asked for, so that a branch that closes one chunk copies nothing.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self._buffers: list[Tensor] = []
        self._count = 0
        self._waiting: list[MemoryEntries] = []
        self._held = 0  # chunks at the start that another memory reads: nothing is appended there
        self._short = False  # some chunk was closed early

    def __len__(self) -> int:
        """M: the chunks in memory."""
        return self._count + sum(entry.landmarks.shape[1] for entry in self._waiting)

    def append(self, entries: MemoryEntries, all_full: bool) -> None:
        """Add chunks after the last. ``all_full``: every length is S."""
        if entries.landmarks.shape[1]:
            self._waiting.append(MemoryEntries(*(x.detach() for x in entries)))
            self._short = self._short or not all_full

    def tables(self) -> MemoryEntries:
        """All entries, as views [B, M, ...]; a branch's batch has stride 0."""
        self._write_waiting()
        assert self._buffers
        k, v, landmarks, lengths = (buffer[:, : self._count] for buffer in self._buffers)
        return MemoryEntries(k.transpose(2, 3), v.transpose(2, 3), landmarks, lengths)

    @property
    def has_short_chunks(self) -> bool:
        return self._short

    def mark(self) -> MemoryMark:
        """Where the memory ends now, for :meth:`rewind`."""
        return MemoryMark(self._count, tuple(self._waiting), self._short)

    def rewind(self, mark: MemoryMark) -> None:
        """Forget the chunks after the mark."""
        self._count, self._short = mark.written, mark.short
        self._waiting = list(mark.waiting)  # written again, if they were written since

    def branch(self, batch_size: int) -> ChunkMemory:
        """A memory of ``batch_size`` rows that share this one row's buffers and never write them."""
        self._write_waiting()
        self._held = max(self._held, self._count)
        other = ChunkMemory()
        other._buffers = [buffer.expand(batch_size, *buffer.shape[1:]) for buffer in self._buffers]
        other._count, other._held, other._short = self._count, _ALL, self._short
        return other

    def replace(self, first: int, entries: MemoryEntries) -> MemoryEntries:
        """Overwrite chunks ``first ...`` in place (also for every branch); returns copies of the old ones."""
        self._write_waiting()
        n = entries.landmarks.shape[1]
        if self._held == _ALL or first < 0 or first + n > self._count:
            raise ValueError(
                f"first: expected {n} chunks inside the {self._count} that this memory owns, got {first}."
            )
        rows = slice(first, first + n)
        old = [buffer[:, rows].clone() for buffer in self._buffers]
        for buffer, new in zip(self._buffers, _head_major(entries), strict=True):
            buffer[:, rows] = new
        self._short = self._short or bool((entries.lengths < entries.k.shape[2]).any())
        k, v, landmarks, lengths = old
        return MemoryEntries(k.transpose(2, 3), v.transpose(2, 3), landmarks, lengths)

    def reorder(self, rows: Tensor) -> None:
        """Row b becomes what row ``rows[b]`` was; rows that share one memory still do."""
        self._write_waiting()
        if not self._buffers:
            return
        if self._buffers[0].stride(0) == 0:
            self._buffers = [b[:1].expand(len(rows), *b.shape[1:]) for b in self._buffers]
        else:
            self._buffers = [b.index_select(0, rows) for b in self._buffers]
            self._held = 0

    def num_bytes(self) -> int:
        """Bytes of the entries themselves (not of spare capacity)."""
        self._write_waiting()
        return sum(b[:, : self._count].numel() * b.element_size() for b in self._buffers)

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        total = len(self)
        parts = [_head_major(entry) for entry in self._waiting]
        self._waiting = []
        if not self._buffers or self._count < self._held or self._buffers[0].shape[1] < total:
            # half as much again: few copies, and pages never touched cost nothing
            capacity = max(self.capacity, total + total // 2 if self._buffers else total, 16)
            with torch.inference_mode(False):  # else only ever written to inside inference mode
                grown = [x.new_empty(x.shape[0], capacity, *x.shape[2:]) for x in parts[0]]
            for new, old in zip(grown, self._buffers, strict=False):
                new[:, : self._count] = old[:, : self._count]
            self._buffers, self._held = grown, 0
        for part in parts:
            end = self._count + part[0].shape[1]
            for buffer, new in zip(self._buffers, part, strict=True):
                buffer[:, self._count : end] = new
            self._count = end


class CacheMark(NamedTuple):
    """A state of a :class:`ChunkCache`."""

    window: list[tuple[Tensor, Tensor] | None]
    pending: list[ChunkSelection | None]
    open_tokens: Tensor | None
    num_tokens: int
    memory: MemoryMark


class ChunkCache:
    """What a model carries: window keys and values at the last chunk end, memory, and the open chunk's tokens.

    The open chunk is read again by the next call, so any split of a text into calls gives the same result.
    All rows have equal lengths; a padded batch is carried as one cache per row (``rows``).
    """

    is_compileable = False  # asked by transformers' generate

    def __init__(self, num_layers: int, num_groups: int = 0, capacity: int = 0) -> None:
        self.window: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        """Per layer, keys and values [B, at most W - 1, J, D] of the positions before the next chunk."""
        self.memory = ChunkMemory(capacity)
        self.pending: list[ChunkSelection | None] = [None] * num_groups
        """Per group, what the last landmark selected [B, 1, K]: the next chunk reads it."""
        self.open_tokens: Tensor | None = None
        """[B, r] tokens since the last chunk end, r < S."""
        self.num_tokens = 0
        """Tokens read, the open ones included."""
        self.rows: list[ChunkCache] | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read (landmarks are not counted)."""
        return max(row.num_tokens for row in self.rows) if self.rows else self.num_tokens

    @property
    def batch_size(self) -> int | None:
        """B, the rows that were read; None: nothing yet."""
        if self.rows is not None:
            return len(self.rows)
        carried = [self.open_tokens, *(kept[0] for kept in self.window if kept is not None)]
        return next((x.shape[0] for x in carried if x is not None), None)

    def branch(self, batch_size: int = 1) -> ChunkCache:
        """A cache of ``batch_size`` rows that go on from here; this one (of one row) stays as it is."""
        if self.rows is not None or self.batch_size not in (None, 1):
            raise ValueError(
                f"branch: expected a cache of one row, got a batch of {self.batch_size}. Read one text a time."
            )
        other = ChunkCache(len(self.window), len(self.pending))
        other.window = [
            None if kept is None else (_repeat(kept[0], batch_size), _repeat(kept[1], batch_size))
            for kept in self.window
        ]
        other.memory = self.memory.branch(batch_size)
        other.pending = [
            None if chosen is None else ChunkSelection(*(_repeat(x, batch_size) for x in chosen))
            for chosen in self.pending
        ]
        other.open_tokens = None if self.open_tokens is None else _repeat(self.open_tokens, batch_size)
        other.num_tokens = self.num_tokens
        return other

    def mark(self) -> CacheMark:
        """The present state, to come back to: what is read after it can be taken back, at no cost."""
        if self.rows is not None:
            raise ValueError("mark: expected rows of equal length, got a padded batch.")
        return CacheMark(
            list(self.window), list(self.pending), self.open_tokens, self.num_tokens, self.memory.mark()
        )

    def rewind(self, mark: CacheMark) -> None:
        """Go back to ``mark``: many questions can be asked of one text that was read once."""
        self.window, self.pending = list(mark.window), list(mark.pending)
        self.open_tokens, self.num_tokens = mark.open_tokens, mark.num_tokens
        self.memory.rewind(mark.memory)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows change places (beam search)."""
        if self.rows is not None:
            raise ValueError(
                "num_beams: expected 1 for prompts of unequal length in this version. Search one prompt a time."
            )
        self.window = [
            None if kept is None else (kept[0].index_select(0, beam_idx), kept[1].index_select(0, beam_idx))
            for kept in self.window
        ]
        if len(self.memory):
            self.memory.reorder(beam_idx)
        self.pending = [
            None if chosen is None else ChunkSelection(*(x.index_select(0, beam_idx) for x in chosen))
            for chosen in self.pending
        ]
        if self.open_tokens is not None:
            self.open_tokens = self.open_tokens.index_select(0, beam_idx)

    def window_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for kept in self.window if kept is not None for x in kept)


def _head_major(entries: MemoryEntries) -> list[Tensor]:
    k, v, landmarks, lengths = entries
    return [k.transpose(2, 3), v.transpose(2, 3), landmarks, lengths]


def _repeat(x: Tensor, batch_size: int) -> Tensor:
    return x.expand(batch_size, *x.shape[1:])
