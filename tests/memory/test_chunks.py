"""The memory of chunks: what was written is found again, on every tier, in branches and in rows that moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.memory.lists import EACH_TIER, D, E, J, Lists, S, entries
from trailmark.memory import ChunkMemory, MemorySize
from trailmark.ops import select_chunks


@EACH_TIER
def test_branches_of_many_rows(tier: str) -> None:
    """Each row has chunks of the base and its own."""
    parent = Lists(ChunkMemory(tier))
    parent.write([70])
    child = parent.branch(3)
    child.write([3, 0, 80])
    parent.write([5])  # goes on by itself
    child.write([0, 2, 1])
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
    Lists(memory, 3).write([70, 2, 0], unfinished=True)
    Lists(memory, 1).write([9], unfinished=True)
    lists = Lists(memory, 2)
    lists.write([9, 9])
    lists.check()


def test_landmarks_are_never_copied_again() -> None:
    memory = ChunkMemory()
    lists, places = Lists(memory), {}
    for n in range(300):
        lists.write([10])
        begin = 0
        for block in memory.blocks(10 * n + 10, 1):
            assert places.setdefault(begin, block.data_ptr()) == block.data_ptr()
            begin += block.shape[1]
    assert 1 < len(places) < 10


@EACH_TIER
def test_selection_is_over_all_blocks(tier: str) -> None:
    parent = Lists(ChunkMemory(tier))
    parent.write([70])
    child = parent.branch(2)
    child.write([80, 33])
    query = torch.randn(2, 3, E, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    limits = torch.tensor([[0, 71, 150], [69, 103, 5]])
    whole = torch.cat(child.memory.blocks(150, 2), dim=1)
    ours = child.memory.search.select(query, child.memory.blocks(150, 2), 4, limits, 0.3)
    for one, other in zip(ours, select_chunks(query, whole, 4, limits, scale=0.3), strict=True):
        assert torch.equal(one, other)


@EACH_TIER
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


@EACH_TIER
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


@EACH_TIER
def test_replaced_chunks_come_back(tier: str) -> None:
    lists = Lists(ChunkMemory(tier))
    lists.write([70])
    before, new = held(lists.memory, 70), entries(3, seed=2)
    branch = lists.memory.branch(lists.size)
    old = lists.memory.replace(62, new)  # over two segments of landmarks
    for memory in (lists.memory, branch):
        records, lengths, landmarks = held(memory, 70)
        assert torch.equal(records[:, 62:65, 0].transpose(2, 3), new.k)
        assert torch.equal(lengths[:, 62:65], new.lengths)
        assert torch.equal(landmarks[:, 62:65], new.landmarks)
        assert torch.equal(landmarks[:, :62], before[2][:, :62])
    lists.memory.replace(62, old)
    assert all(map(torch.equal, held(lists.memory, 70), before))
    assert all(map(torch.equal, held(branch, 70), before))


@pytest.mark.parametrize("first", [-1, 7, 9, 60, 70])
def test_replacing_chunks_that_are_not_there_is_refused(first: int) -> None:
    lists = Lists(ChunkMemory())
    lists.write([9])
    before = held(lists.memory, 9)
    with pytest.raises(ValueError, match=f"first: expected 3 chunks that this memory owns, got {first}"):
        lists.memory.replace(first, entries(3))
    assert all(map(torch.equal, held(lists.memory, 9), before))


def test_only_the_one_row_of_a_memory_is_replaced() -> None:
    parent, batch = Lists(ChunkMemory()), Lists(ChunkMemory(), 2)
    parent.write([9])
    batch.write([9, 9])
    for memory in (parent.memory.branch(parent.size), batch.memory, ChunkMemory()):
        with pytest.raises(ValueError, match="first: expected 1 chunks that this memory owns, got 0"):
            memory.replace(0, entries(1))


# --- refused ---------------------------------------------------------------------------------------------


def test_a_folder_is_for_the_disk(tmp_path: Any) -> None:
    for tier in ("device", "host"):
        with pytest.raises(ValueError, match=f"memory_folder: expected none for memory_tier='{tier}'"):
            ChunkMemory(tier, folder=tmp_path)
