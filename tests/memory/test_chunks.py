"""The memory of chunks: what was written is found again, on every tier, in branches and in rows that moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trailmark.memory import ChunkMemory, MemoryEntries, MemorySize
from trailmark.ops import select_chunks

S, J, D, E = 4, 2, 3, 8
TIERS = pytest.mark.parametrize("tier", ["device", "host", "disk"])


def entries(count: int, rows: int = 1, seed: int = 0, dtype: torch.dtype = torch.float64) -> MemoryEntries:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, rows, count, S, J, D, generator=generator, dtype=torch.float64).to(dtype)
    landmarks = torch.randn(rows, count, E, generator=generator, dtype=torch.float64).to(dtype)
    return MemoryEntries(k, v, landmarks, torch.randint(1, S + 1, (rows, count), generator=generator))


class Plain:
    """A memory as lists of single chunks (k, v, landmark, length, start)."""

    def __init__(self, memory: ChunkMemory, rows: int, size: MemorySize | None = None) -> None:
        self.memory, self.rows = memory, [[] for _ in range(rows)]  # type: Any
        self.size = size or MemorySize(np.zeros(rows, np.int64), 0)

    def write(self, counts: Sequence[int], seed: int, unfinished: bool = False) -> None:
        n, rows = max(counts), len(self.rows)
        new = entries(n, rows, seed)
        starts = 1000 * seed + np.arange(n)[None] * 5 + np.zeros((rows, 1), np.int64)
        size = self.memory.write(self.size, new, starts, np.array(counts))
        if unfinished:
            return
        self.size = size
        for b, count in enumerate(counts):
            for i in range(count):
                self.rows[b].append((*(part[b, i] for part in new), int(starts[b, i])))

    def check(self) -> None:
        longest = max(map(len, self.rows))
        assert self.size.chunks.tolist() == [len(row) for row in self.rows]
        assert self.size.short == any(chunk[3] < S for row in self.rows for chunk in row)
        if not longest:
            return
        wanted = np.full((len(self.rows), longest), -1)
        for b, row in enumerate(self.rows):
            wanted[b, : len(row)] = np.arange(len(row))[::-1]  # from the last
        records, lengths = self.memory.gather(wanted)
        landmarks = torch.cat(self.memory.blocks(longest, len(self.rows)), dim=1)
        for b, row in enumerate(self.rows):
            for i, (k, v, landmark, length, start) in enumerate(row):
                record = records[b, len(row) - 1 - i].transpose(1, 2)
                assert torch.equal(record, torch.stack([k, v]))
                assert torch.equal(landmarks[b, i], landmark)
                assert lengths[b, len(row) - 1 - i] == length
                assert self.memory.starting_before(b, len(row), start) == i
                assert self.memory.starting_before(b, len(row), start + 1) == i + 1


@st.composite
def lives(draw: st.DrawFn) -> tuple[int, list[Any]]:
    rows, steps = draw(st.integers(1, 3)), []
    for _ in range(draw(st.integers(1, 5))):
        n = draw(st.sampled_from([1, 1, 2, 40, 70]))
        counts = [n] * rows if draw(st.booleans()) else [draw(st.integers(0, n)) for _ in range(rows)]
        steps.append(draw(st.sampled_from([(counts, False)] * 3 + [(counts, True), "move", "branch"])))
    return rows, steps


@settings(max_examples=40)
@given(lives(), st.sampled_from(["device", "host", "disk"]), st.sampled_from([0, 5, 300]))
def test_what_was_written_is_found(life: tuple[int, list[Any]], tier: str, capacity: int) -> None:
    """After unfinished writes, with rows that change places, and in branches of branches."""
    rows, steps = life
    plain = Plain(ChunkMemory(tier, capacity), rows)
    for seed, step in enumerate(steps, start=1):
        if step == "move":
            order = [(2 * b) % len(plain.rows) for b in range(len(plain.rows))]
            plain.memory = plain.memory.with_rows(np.array(order))
            plain.size = plain.size._replace(chunks=plain.size.chunks[order])
            plain.rows = [list(plain.rows[b]) for b in order]
        elif step == "branch":
            if len(plain.rows) == 1:
                plain.memory = plain.memory.branch(plain.size)
                plain.size = plain.size._replace(records=0)
        else:
            counts, unfinished = step
            plain.write([*counts, *counts][: len(plain.rows)], seed, unfinished)
        plain.check()


@TIERS
def test_branches_of_many_rows(tier: str) -> None:
    """Each row has chunks of the base and its own."""
    parent = Plain(ChunkMemory(tier), 1)
    parent.write([70], 1)
    child = Plain(parent.memory.branch(parent.size), 3, MemorySize(np.array([70] * 3), 0, parent.size.short))
    child.rows = [list(parent.rows[0]) for _ in range(3)]
    child.write([3, 0, 80], 2)
    parent.write([5], 3)  # goes on by itself
    child.write([0, 2, 1], 4)
    child.check()
    parent.check()
    flat, size = child.memory.flattened(child.size)
    child.memory, child.size = flat, size
    child.check()
    assert flat.base is None
    assert flat.store is not None
    assert len(flat.store) == size.records == sum(map(len, child.rows))


def test_after_a_first_write_that_was_not_finished_another_batch_may_come() -> None:
    memory = ChunkMemory()
    Plain(memory, 3).write([70, 2, 0], 1, unfinished=True)
    for rows in (1, 2):
        plain = Plain(memory, rows)
        plain.write([9] * rows, 2, unfinished=rows == 1)
        if rows == 2:
            plain.check()


def test_landmarks_are_never_copied_again() -> None:
    memory = ChunkMemory()
    plain, places = Plain(memory, 1), {}
    for seed in range(300):
        plain.write([10], seed)
        begin = 0
        for block in memory.blocks(10 * seed + 10, 1):
            assert places.setdefault(begin, block.data_ptr()) == block.data_ptr()
            begin += block.shape[1]
    assert 1 < len(places) < 10


@TIERS
def test_selection_is_over_all_blocks(tier: str) -> None:
    parent = Plain(ChunkMemory(tier), 1)
    parent.write([70], 1)
    child = Plain(parent.memory.branch(parent.size), 2, MemorySize(np.array([70, 70]), 0))
    child.write([80, 33], 2)
    query = torch.randn(2, 3, E, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    limits = torch.tensor([[0, 71, 150], [69, 103, 5]])
    whole = torch.cat(child.memory.blocks(150, 2), dim=1)
    ours = child.memory.search.select(query, child.memory.blocks(150, 2), 4, limits, 0.3)
    for one, other in zip(ours, select_chunks(query, whole, 4, limits, scale=0.3), strict=True):
        assert torch.equal(one, other)


@TIERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bytes_of_a_thousand_chunks(tier: str, dtype: torch.dtype) -> None:
    """Keys, values, landmark vectors and 24 bytes a chunk; spare capacity does not count."""
    memory, zero = ChunkMemory(tier, capacity=5000), np.zeros(1, np.int64)
    new = entries(1000, dtype=dtype)
    size = memory.write(MemorySize(zero, 0), new, np.zeros((1, 1000), np.int64), zero + 1000)
    assert memory.num_bytes(size) == 1000 * ((2 * S * J * D + E) * dtype.itemsize + 24)
    assert ChunkMemory(tier).num_bytes(MemorySize(zero, 0)) == 0
    branch = memory.branch(size)
    assert branch.num_bytes(MemorySize(size.chunks, 0)) == 0


@TIERS
def test_keys_in_a_lower_precision(tier: str) -> None:
    memory, zero = ChunkMemory(tier, dtype=torch.bfloat16), np.zeros(1, np.int64)
    new = entries(20)
    size = memory.write(MemorySize(zero, 0), new, np.zeros((1, 20), np.int64), zero + 20)
    records, _ = memory.gather(np.arange(20)[None])
    assert torch.equal(records[:, :, 0].transpose(2, 3), new.k.bfloat16())
    assert torch.equal(torch.cat(memory.blocks(20, 1), dim=1), new.landmarks)  # these stay as they are
    assert memory.num_bytes(size) == 20 * (2 * S * J * D * 2 + E * 8 + 24)
    assert memory.branch(size).dtype == torch.bfloat16


# --- replacing -------------------------------------------------------------------------------------------


def held(memory: ChunkMemory, count: int) -> list[Tensor]:
    records, lengths = memory.gather(np.arange(count)[None])
    return [records, torch.from_numpy(lengths), torch.cat(memory.blocks(count, 1), dim=1)]


@TIERS
def test_replaced_chunks_come_back(tier: str) -> None:
    plain = Plain(ChunkMemory(tier), 1)
    plain.write([70], 1)
    before, new = held(plain.memory, 70), entries(3, seed=2)
    branch = plain.memory.branch(plain.size)
    old = plain.memory.replace(62, new)  # over two segments of landmarks
    for memory in (plain.memory, branch):
        records, lengths, landmarks = held(memory, 70)
        assert torch.equal(records[:, 62:65, 0].transpose(2, 3), new.k)
        assert torch.equal(lengths[:, 62:65], new.lengths)
        assert torch.equal(landmarks[:, 62:65], new.landmarks)
        assert torch.equal(landmarks[:, :62], before[2][:, :62])
    plain.memory.replace(62, old)
    assert all(map(torch.equal, held(plain.memory, 70), before))
    assert all(map(torch.equal, held(branch, 70), before))


@pytest.mark.parametrize("first", [-1, 7, 9, 60, 70])
def test_replacing_chunks_that_are_not_there_is_refused(first: int) -> None:
    plain = Plain(ChunkMemory(), 1)
    plain.write([9], 1)
    before = held(plain.memory, 9)
    with pytest.raises(ValueError, match=f"first: expected 3 chunks that this memory owns, got {first}"):
        plain.memory.replace(first, entries(3))
    assert all(map(torch.equal, held(plain.memory, 9), before))


def test_only_the_one_row_of_a_memory_is_replaced() -> None:
    parent, batch = Plain(ChunkMemory(), 1), Plain(ChunkMemory(), 2)
    parent.write([9], 1)
    batch.write([9, 9], 1)
    for memory in (parent.memory.branch(parent.size), batch.memory, ChunkMemory()):
        with pytest.raises(ValueError, match="first: expected 1 chunks that this memory owns, got 0"):
            memory.replace(0, entries(1))


# --- refused ---------------------------------------------------------------------------------------------


def test_a_tier_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="memory_tier: expected one of 'device', 'host', 'disk', got 'tape'"):
        ChunkMemory("tape")


def test_a_folder_is_for_the_disk(tmp_path: Any) -> None:
    for tier in ("device", "host"):
        with pytest.raises(ValueError, match=f"memory_folder: expected none for memory_tier='{tier}'"):
            ChunkMemory(tier, folder=tmp_path)
