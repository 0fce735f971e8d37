"""Texts that were read apart as rows of one batch: their memories stay where they are, their windows are copied."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trailmark.memory.cell import Cell
from trailmark.memory.chunks import ChunkMemory, MemoryEntries, MemorySize, Rows
from trailmark.memory.state import STATES, CacheState, Deferred, Focus, Retrieved
from trailmark.memory.tables import Booleans, Integers, as_read
from trailmark.memory.window import Span, Window


class JoinedMemory(ChunkMemory):
    """Row b lies in ``memories[b]``, of one row: what is written, fetched and searched goes there.

    So each row may lie on a tier of its own, and many over one base. It has no landmarks of its own: who searches asks
    :meth:`parts`.
    """

    def __init__(self, memories: Sequence[ChunkMemory]) -> None:
        first = memories[0]
        super().__init__(
            dtype=first.dtype, search=first.search, planes=first.planes, max_chunks=first.max_chunks
        )
        self.memories = tuple(memories)

    @classmethod
    def of(cls, memories: Sequence[ChunkMemory]) -> ChunkMemory:
        """The memories as one; of one, itself."""
        return memories[0] if len(memories) == 1 else cls(memories)

    @property
    def keeps_tokens(self) -> bool:
        return any(memory.keeps_tokens for memory in self.memories)

    @property
    def keeps_kv(self) -> bool:
        return any(memory.keeps_kv for memory in self.memories)

    def first_chunk(self, size: MemorySize) -> Integers:
        return np.concatenate([m.first_chunk(own) for m, own in zip(self.memories, size.rows, strict=True)])

    def write(
        self, size: MemorySize, entries: MemoryEntries, starts: Integers, counts: Integers
    ) -> MemorySize:
        B, n = entries.landmarks.shape[:2]
        starts, lengths = np.broadcast_to(starts, (B, n)), entries.lengths.expand(B, n)
        sizes = list(size.rows)
        for b in np.flatnonzero(counts):
            row = slice(b, b + 1)
            own = entries._replace(lengths=lengths).each(lambda x, row=row: x[row])  # type: ignore[misc]
            sizes[b] = self.memories[b].write(sizes[b], own, starts[row], counts[row])
        return MemorySize.joined(sizes)

    def parts(self, asking: Booleans) -> list[tuple[Rows, ChunkMemory]]:
        found: dict[tuple[int, int], list[int]] = {}
        for b in np.flatnonzero(asking).tolist():
            base = self.memories[b].base
            alone = base is None or self.max_chunks is not None
            found.setdefault((-1, b) if alone or base is None else (id(base[0]), base[1]), []).append(b)
        return [
            (rows, self.memories[rows[0]] if len(rows) == 1 else _Branches([self.memories[b] for b in rows]))
            for rows in found.values()
        ]

    def blocks(self, num_chunks: int, rows: int, first: int = 0) -> list[Tensor]:
        raise AssertionError("rows have landmarks of their own: see parts")

    def gather(self, chunks: Integers, planes: Integers | None = None) -> tuple[Tensor, Integers]:
        found: dict[int, Tensor] = {}
        lengths = np.zeros(chunks.shape, np.int64)
        for b in np.flatnonzero((chunks >= 0).any(1)).tolist():
            row, memory = slice(b, b + 1), self.memories[b]
            before = memory.fetched
            found[b], lengths[row] = memory.gather(chunks[row], None if planes is None else planes[row])
            self.fetched += memory.fetched - before
        with torch.inference_mode(False):
            if found:
                some = next(iter(found.values()))
                dtype = widest(list(found.values()))
                records = some.new_zeros((*chunks.shape, *some.shape[2:]), dtype=dtype)
            else:
                store = next(m for m in self.memories if m.store or m.base)._some_store()
                shape = *chunks.shape, *store.record_shape
                records = torch.zeros(shape, dtype=store.layout.given_dtype, device=store.device)
            for b, own in found.items():
                records[b] = own[0]
        missing = np.setdiff1d(np.arange(len(chunks)), list(found))
        lengths[missing] = records.shape[-2]  # as if whole: what stands for nothing makes no chunk short
        return records, lengths

    def starting_before(self, row: int, num_chunks: int, position: int) -> int:
        return self.memories[row].starting_before(0, num_chunks, position)

    def starts(self, row: int, chunks: Integers) -> Integers:
        return self.memories[row].starts(0, chunks)

    def last_starts(self, size: MemorySize, count: int) -> tuple[Integers, Integers]:
        parts = [m.last_starts(own, count) for m, own in zip(self.memories, size.rows, strict=True)]
        starts = np.full((len(parts), max(own.shape[1] for own, _ in parts)), -1)
        for row, (own, _) in zip(starts, parts, strict=True):
            row[len(row) - own.shape[1] :] = own[0]
        return starts, np.concatenate([before for _, before in parts])

    def frozen(self, size: MemorySize) -> ChunkMemory:
        if self.max_chunks is None:
            return self
        return JoinedMemory([m.frozen(own) for m, own in zip(self.memories, size.rows, strict=True)])

    def go_back(self, frozen: ChunkMemory) -> None:
        assert isinstance(frozen, JoinedMemory)
        for memory, before in zip(self.memories, frozen.memories, strict=True):
            memory.go_back(before)

    def with_rows(self, rows: Integers) -> ChunkMemory:
        if len(np.unique(rows)) < len(rows):
            raise ValueError(
                f"rows: expected each row of joined caches at most once, got {rows.tolist()}: each writes to a memory "
                "of its own. Take a row out with cache.leave([row]), and call branch() on it."
            )
        return self.of([self.memories[b] for b in rows])

    def num_bytes(self, size: MemorySize) -> int:
        return sum(m.num_bytes(own) for m, own in zip(self.memories, size.rows, strict=True))


class _Branches(JoinedMemory):
    """Rows that go on from the same chunks of one memory, so that one product scores these for all."""

    def blocks(self, num_chunks: int, rows: int, first: int = 0) -> list[Tensor]:
        base = self.memories[0].base
        assert base is not None
        below, count = base
        shared = [x.expand(rows, *x.shape[1:]) for x in below.blocks(min(count, num_chunks), 1, first)]
        begin = max(first - count, 0)
        own = [memory._landmarks.between(begin, num_chunks - count) for memory in self.memories]
        most = max(sum(x.shape[1] for x in parts) for parts in own)
        if not most:
            return shared
        like = next(x for parts in own for x in parts)
        with torch.inference_mode(False):
            mine = as_read(like.new_zeros(*like.shape[2:-1], rows, most, like.shape[-1]))
        for row, parts in zip(mine, own, strict=True):
            at = 0
            for x in parts:
                row[at : at + x.shape[1]] = x[0]
                at += x.shape[1]
        return [*shared, mine]


def of_each_row(memory: ChunkMemory, size: MemorySize) -> list[tuple[ChunkMemory, MemorySize]]:
    """A memory of one row for each row, and how much of it counts. What rows share lies before all of theirs."""
    if isinstance(memory, JoinedMemory):
        return list(zip(memory.memories, size.rows, strict=True))
    if len(size.chunks) == 1:
        return [(memory, size)]
    alone = []
    for b in range(len(size.chunks)):
        row = np.array([b])
        own = size.take_rows(row)
        # they write no more to the store that they share
        alone.append((memory.with_rows(row).branch(own), own._replace(records=0)))
    return alone


def join_states(states: Sequence[CacheState], memory: MemorySize) -> CacheState:
    """The rows of several states of one model as one state; what a smaller one has not is absent, or zeros.

    Args:
        memory: of all rows.
    """
    rows = [len(state.num_tokens) for state in states]

    def numbers(name: str) -> Any:
        return np.concatenate([getattr(state, name) for state in states])

    alone: dict[str, Any] = {name: _joined([getattr(x, name) for x in states], rows) for name in STATES}
    return CacheState(
        num_tokens=numbers("num_tokens"),
        num_positions=numbers("num_positions"),
        phases=numbers("phases"),
        memory=memory,
        spans=tuple(
            Span(*map(np.concatenate, zip(*spans, strict=True)))
            for spans in zip(*(x.spans for x in states), strict=True)
        ),
        layers=tuple(_join_windows(layers, rows) for layers in zip(*(x.layers for x in states), strict=True)),
        pending=tuple(_join_pending(parts, rows) for parts in zip(*(x.pending for x in states), strict=True)),
        deferred=_join_deferred(states, rows),
        cell=_join_cells(states, rows),
        focus=_join_focuses(states, rows),
        **alone,
    )


def _join_focuses(states: Sequence[CacheState], rows: list[int]) -> tuple[Focus | None, ...]:
    if not any(state.focus for state in states):
        return ()
    return tuple(focus for x, count in zip(states, rows, strict=True) for focus in x.focus or (None,) * count)


def _join_windows(layers: Sequence[Window], rows: list[int]) -> Window:
    joined = Window(layers[0].window, layers[0].sinks)
    keys, values = (_joined([getattr(x, name) for x in layers], rows) for name in ("keys", "values"))
    if keys is not None and values is not None:
        joined.keys, joined.values, joined.is_initialized = keys, values, True
    return joined


def _join_pending(parts: Sequence[Retrieved | None], rows: list[int]) -> Retrieved | None:
    k, v, weights = (
        _joined([None if x is None else getattr(x, name) for x in parts], rows)
        for name in ("k", "v", "weights")
    )
    if k is None or v is None or weights is None:
        return None
    S = k.shape[2]
    indices = _tables([None if x is None else x.indices for x in parts], rows, -1)
    lengths = _tables([None if x is None else x.lengths for x in parts], rows, S)
    short = any(x is not None and x.short is not None for x in parts)
    return Retrieved.of(indices, lengths, weights, k, v, short)


def _join_deferred(states: Sequence[CacheState], rows: list[int]) -> Deferred | None:
    parts = [state.deferred for state in states]
    joined = _joined([None if x is None else x.states for x in parts], rows)
    if joined is None:
        return None

    def of_rows(table: Any, count: int) -> Any:  # one row where all are alike
        return np.broadcast_to(table, (count, *table.shape[1:]))

    chunk, is_landmark, begun, first = [], [], [], []
    for state, part, count in zip(states, parts, rows, strict=True):
        if part is None:  # what follows goes on in the open chunk
            nothing = np.zeros((count, 0), np.int64)
            part = Deferred(joined, nothing, nothing.astype(bool), state.memory.chunks, state.phases)
        chunk.append(of_rows(part.chunk, count))
        is_landmark.append(of_rows(part.is_landmark, count))
        begun.append(of_rows(part.begun, count))
        first.append(part.first_chunk)
    tables = _tables(chunk, rows, -1), _tables(is_landmark, rows, False)
    return Deferred(joined, *tables, np.concatenate(first), np.concatenate(begun))


def _join_cells(states: Sequence[CacheState], rows: list[int]) -> Cell | None:
    if all(state.cell is None for state in states):
        return None
    num_layers = len(states[0].layers)
    cells = [state.cell or Cell.empty(n, num_layers) for state, n in zip(states, rows, strict=True)]
    offset = min(int(cell.offset[0]) for cell in cells)
    running, chosen = [], []
    for layer in range(num_layers):
        parts, indices = [], []
        for cell in cells:
            behind, maxima, mine = int(cell.offset[0]) - offset, cell.running[layer], cell.chosen[layer]
            parts.append(None if maxima is None else _padded(maxima, behind))
            indices.append(None if mine is None else torch.where(mine < 0, mine, mine + behind))
        running.append(_joined(parts, rows, -torch.inf))
        chosen.append(_joined(indices, rows, -1))
    return Cell(
        tokens=np.concatenate([cell.tokens for cell in cells]),
        counts=np.concatenate([cell.counts for cell in cells]),
        chunk=_tables([cell.chunk for cell in cells], rows, -1),
        slot=_tables([cell.slot for cell in cells], rows, 0),
        is_landmark=_tables([cell.is_landmark for cell in cells], rows, False),
        running=tuple(running),
        chosen=tuple(chosen),
        offset=np.array([offset]),
        retrievals=sum((cell.retrievals for cell in cells), np.zeros(2, np.int64)),
    )


def _padded(maxima: Tensor, behind: int) -> Tensor:
    return torch.nn.functional.pad(maxima, (behind, 0), value=-torch.inf)


def widest(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype that holds the numbers of all."""
    return reduce(torch.promote_types, [x.dtype for x in tensors])


def _joined(parts: Sequence[Tensor | None], rows: list[int], nothing: float = 0) -> Tensor | None:
    """Tensors [rows_i, ...] one after another, as large as the largest; None: all are."""
    there = [x for x in parts if x is not None]
    if not there:
        return None
    shape = [max(sizes) for sizes in zip(*(x.shape[1:] for x in there), strict=True)]
    with torch.inference_mode(False):  # it is written to later
        joined = there[0].new_full((sum(rows), *shape), nothing, dtype=widest(there))
        for x, own in zip(parts, joined.split(rows), strict=True):
            if x is not None:
                own[tuple(slice(0, size) for size in x.shape)] = x
    return joined


def _tables(parts: Sequence[Any], rows: list[int], nothing: Any) -> Any:
    """The same of arrays [rows_i, n_i]; at least one is there."""
    there = [x for x in parts if x is not None]
    joined = np.full((sum(rows), max(x.shape[1] for x in there)), nothing, there[0].dtype)
    for x, end, count in zip(parts, np.cumsum(rows), rows, strict=True):
        if x is not None:
            joined[end - count : end, : x.shape[1]] = x
    return joined
