"""A memory of chunks beside the lists of all that was written to it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trailmark.memory import ChunkMemory, MemoryEntries, MemorySize, saved
from trailmark.memory.tiers.base import TIERS, open_store
from trailmark.memory.tiers.records import RecordLayout

S, J, D, E = 3, 2, 4, 8
# but of tokens, of which a model makes keys and values
KEEP_RECORDS = [name for name, kind in TIERS.items() if not kind.keeps_tokens]
EACH_TIER = pytest.mark.parametrize("tier", KEEP_RECORDS)
Chunk = tuple[Any, ...]  # k, v [S, planes * J, D], landmark [planes, D] or [E], length, start


def entries(
    count: int, planes: int = 1, rows: int = 1, seed: int = 0, dtype: torch.dtype = torch.float64
) -> MemoryEntries:
    """Random chunks; of several planes, each has a landmark of D numbers, else there is one of E."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    k, v = draw(2, rows, count, S, planes * J, D)
    landmarks = draw(rows, count, planes, D) if planes > 1 else draw(rows, count, E)
    return MemoryEntries(k, v, landmarks, torch.randint(1, S + 1, (rows, count), generator=generator))


class Lists:
    """A memory beside the list of all chunks of each row."""

    def __init__(self, memory: ChunkMemory, rows: int = 1) -> None:
        self.memory, self.size = memory, MemorySize(np.zeros(rows, np.int64), 0)
        self.rows: list[list[Chunk]] = [[] for _ in range(rows)]
        self.most = 0  # chunks of all rows written by one call
        self.bounded = True  # no branch, nor an earlier life, makes the store larger
        self.numbers = itertools.count(1)

    def write(self, counts: Sequence[int], unfinished: bool = False) -> None:
        n, rows, seed = max(counts), len(self.rows), next(self.numbers)
        new = entries(n, self.memory.planes, rows, seed)
        starts = 1000 * seed + np.arange(n)[None] * 5 + np.zeros((rows, 1), np.int64)
        self.most = max(self.most, sum(counts))
        size = self.memory.write(self.size, new, starts, np.array(counts))
        if unfinished:
            return
        written = new.lengths[torch.arange(n) < torch.tensor(counts)[:, None]]
        assert size.short == (self.size.short or bool((written < S).any()))
        self.size = size
        for b, count in enumerate(counts):
            self.rows[b] += [(*(part[b, i] for part in new[:4]), int(starts[b, i])) for i in range(count)]

    def branch(self, rows: int = 1) -> Lists:
        child = Lists(self.memory.branch(self.size), rows)
        child.size = MemorySize(self.size.chunks.repeat(rows), 0, self.size.short)
        child.rows = [list(self.rows[0]) for _ in range(rows)]
        child.numbers = itertools.count(1000 * next(self.numbers))
        return child

    def move(self, rows: Sequence[int]) -> None:
        self.memory = self.memory.with_rows(np.array(rows))
        self.size = self.size._replace(chunks=self.size.chunks[list(rows)])
        self.rows = [list(self.rows[b]) for b in rows]

    def reload(self, folder: str | Path, tier: str, max_chunks: int | None) -> None:
        memory, size = self.memory, self.size
        if memory.base is not None:
            memory, size = memory.flattened(size)
        saved.save(folder, memory.tables(size), {}, memory.store, size.records)
        found = saved.load(folder)
        self.memory = ChunkMemory(tier, planes=memory.planes, max_chunks=max_chunks)
        if found.chunk_file is not None:
            assert found.record_shape is not None
            assert found.dtype is not None
            layout = RecordLayout(found.record_shape, found.dtype, "cpu")
            opened = open_store(tier, found.chunk_file, layout, found.count)
            self.memory.fill(opened, found.tensors)
        self.size = size._replace(records=found.count)

    def firsts(self) -> list[int]:
        most = self.memory.max_chunks
        return [0 if most is None else max(0, len(row) - most) for row in self.rows]

    def check(self) -> None:
        memory, P, B = self.memory, self.memory.planes, len(self.rows)
        first, longest = self.firsts(), max(map(len, self.rows))
        assert self.size.chunks.tolist() == [len(row) for row in self.rows]
        assert memory.first_chunk(self.size).tolist() == first
        if self.bounded and memory.store is not None and memory.max_chunks is not None:
            assert len(memory.store) <= (B * memory.max_chunks + self.most) * P
        if not longest:
            return
        # every plane of every chunk that counts, in any order, some twice, with gaps
        random = np.random.default_rng(longest)
        asked = [
            [(m, p) for m in range(low, len(row)) for p in range(P)]
            for row, low in zip(self.rows, first, strict=True)
        ]
        n = max(map(len, asked)) + 3
        wanted = np.full((B, n, 2), (-1, 0))
        for b, pairs in enumerate(asked):
            if pairs:
                filled = [pairs[i] for i in random.permutation(len(pairs))] + [pairs[0], pairs[-1]]
                wanted[b, random.permutation(n)[: len(filled)]] = filled
        before = memory.fetched
        records, lengths = memory.gather(wanted[..., 0], wanted[..., 1] if P > 1 else None)
        distinct = {
            (id(self.rows[b][m]), p) for b, i in np.ndindex(B, n) for m, p in [wanted[b, i]] if m >= 0
        }
        assert records.shape == (B, n, 2, J, S, D)
        if P > 1:  # of one plane, -1 is fetched as if it were a chunk
            assert memory.fetched - before == len(distinct)
        blocks = memory.blocks(longest, B, min(first))
        for b, i in np.ndindex(B, n):
            m, p = wanted[b, i]
            if m >= 0:
                k, v, _, length, _ = self.rows[b][m]
                heads = torch.stack([k, v])[:, :, p * J : (p + 1) * J]
                assert torch.equal(records[b, i], heads.transpose(1, 2))
                assert lengths[b, i] == length
        landmarks = torch.cat(blocks, dim=1)
        assert landmarks.shape == (B, longest - min(first), *((P, D) if P > 1 else (E,)))
        for b, row in enumerate(self.rows):
            for m in range(first[b], len(row)):
                assert torch.equal(landmarks[b, m - min(first)], row[m][2])
                assert memory.starting_before(b, len(row), row[m][4]) == m
                assert memory.starting_before(b, len(row), row[m][4] + 1) == m + 1
        for block, b, p in itertools.product(blocks, range(B), range(P)):
            assert (block[..., p, :] if P > 1 else block)[b].is_contiguous()  # side by side
