"""Chunks of many planes, and memories that keep the newest chunks only, against lists of chunks."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory.interrupts import interrupt, stopped_at
from tests.memory.lists import EACH_TIER, KEEP_RECORDS, D, E, J, Lists, S, entries
from trailmark.memory import ChunkMemory, MemoryEntries, MemorySize, chunks
from trailmark.memory.tiers import disk, files, records, resident

MODULES = (chunks, records, files, resident, disk)


@st.composite
def lives(draw: st.DrawFn) -> tuple[int, list[Any]]:
    rows, steps = draw(st.integers(1, 3)), []
    for _ in range(draw(st.integers(1, 7))):
        n = draw(st.sampled_from([1, 1, 2, 9, 70]))
        counts = [n] * rows if draw(st.booleans()) else [draw(st.integers(0, n)) for _ in range(rows)]
        steps.append(
            draw(st.sampled_from([(counts, False)] * 4 + [(counts, True)] * 2 + ["move", "branch", "reload"]))
        )
    return rows, steps


@settings(max_examples=100)
@given(
    lives(),
    st.sampled_from(KEEP_RECORDS),
    st.sampled_from([1, 3]),
    st.sampled_from([None, None, None, 1, 5, 40]),
    st.sampled_from([0, 5, 300]),
)
def test_what_counts_is_found(
    life: tuple[int, list[Any]], tier: str, planes: int, max_chunks: int | None, capacity: int
) -> None:
    """After unfinished writes, with rows that change places, in branches of branches, saved and loaded."""
    rows, steps = life
    lists = Lists(ChunkMemory(tier, capacity, planes=planes, max_chunks=max_chunks), rows)
    with contextlib.ExitStack() as stack:
        for step in steps:
            if step == "move":
                lists.move([(2 * b) % rows for b in range(rows)])
            elif step == "branch":
                lists = lists.branch() if rows == 1 else lists
            elif step == "reload":
                if lists.size.chunks.any():
                    folder = stack.enter_context(tempfile.TemporaryDirectory())
                    lists.reload(folder, tier, max_chunks)
            else:
                lists.write(*step)
            lists.check()


@EACH_TIER
@pytest.mark.parametrize("planes", [1, 3])
def test_a_text_that_is_read_on_and_on(tier: str, planes: int) -> None:
    """The store, the landmarks and the tables stay as large as what counts."""
    lists = Lists(ChunkMemory(tier, planes=planes, max_chunks=40), 2)
    landmark = planes * D if planes > 1 else E
    bytes_of_one = 8 * (planes * 2 * S * J * D + landmark) + 24
    for n in range(200):
        lists.write([3, 3])
        if n in (13, 99, 199):
            lists.check()
    memory = lists.memory
    assert memory.store is not None
    assert len(memory.store) == lists.size.records == 2 * 43 * planes
    assert memory.num_bytes(lists.size) == 80 * bytes_of_one + 6 * planes * 8 * 2 * S * J * D
    assert sum(block.shape[1] for block in memory._landmarks.segments) <= 40 + 2 * 64
    assert memory._tables.records.shape[1] <= 2 * 64


@EACH_TIER
def test_a_write_that_is_stopped_at_any_line(tier: str) -> None:
    """What counted before it counts still, and it can be written again."""
    stopped, line = True, 0
    while stopped:
        line += 7
        lists = Lists(ChunkMemory(tier, planes=2, max_chunks=5), 2)
        for counts in ([5, 4], [3, 0], [2, 4], [60, 60]):
            lists.write(counts)
        with contextlib.suppress(KeyboardInterrupt), stopped_at(line, interrupt, *MODULES) as lines:
            lists.write([4, 2])
        stopped = lines.run == line
        lists.check()
        lists.write([1, 4])
        lists.check()
    assert line > 70


def test_a_call_that_writes_many_times() -> None:
    """Until it is done, what counted before it is whole, however much it has written."""
    lists = Lists(ChunkMemory(planes=2, max_chunks=5), 2)
    lists.bounded = False
    for counts in ([5, 4], [3, 0], [2, 4]):
        lists.write(counts)
    memory = lists.memory
    for stopped in (True, True, False):
        lists.memory = memory.frozen(lists.size)
        size, written = lists.size, [list(row) for row in lists.rows]
        for _ in range(40):
            seed = next(lists.numbers)
            new, starts = entries(3, 2, 2, seed), 1000 * seed + np.arange(3)[None].repeat(2, axis=0)
            size = memory.write(size, new, starts, np.array([3, 3]))
            for b, i in np.ndindex(2, 3):
                written[b].append((*(part[b, i] for part in new[:4]), int(starts[b, i])))
            lists.check()
        if stopped:
            memory.go_back(lists.memory)
            lists.memory = memory
            lists.check()
    lists.memory, lists.size, lists.rows = memory, size, written
    lists.check()
    for _ in range(2):
        lists.write([1, 1])
        lists.check()
    assert len(memory.store or ()) <= 2 * 2 * (5 + 5 + 3)


@EACH_TIER
@pytest.mark.sampled(3)
def test_branches_keep_what_they_need(tier: str, tmp_path: Path) -> None:
    """Their source goes on and evicts it; once they are gone, it is written over."""
    parent = Lists(ChunkMemory(tier, planes=2, max_chunks=6))
    parent.bounded = False
    parent.write([9])
    child, other = parent.branch(3), parent.branch()
    child.write([2, 0, 7])  # of the first rows some of the base count, of the last none
    grandchild = other.branch(2)
    for _ in range(30):
        parent.write([2])
        grandchild.write([1, 0])
        for lists in (parent, child, grandchild):
            lists.check()
    child.move([2, 0])
    child.write([0, 3])
    child.check()
    child.reload(tmp_path, "host", 6)
    child.check()
    child.write([4, 1])
    child.check()
    store = parent.memory.store
    assert store is not None
    assert len(store) == 2 * (6 + 6 + 2)  # what the branches need, what counts, and what is written
    del child, other, grandchild, lists
    gc.collect()
    parent.write([8])
    assert len(store) == 2 * (6 + 8)
    parent.check()


def test_what_was_evicted_does_not_come_back() -> None:
    """Loaded where more may count, what was written over still does not."""
    lists = Lists(ChunkMemory(planes=2, max_chunks=4), 2)
    for counts in ([3, 1], [4, 1], [5, 1]):
        lists.write(counts)
    with tempfile.TemporaryDirectory() as folder:
        lists.reload(folder, "host", None)
        assert lists.memory.first_chunk(lists.size).tolist() == [8, 0]
        lists.reload(folder, "disk", 100)
        assert lists.memory.first_chunk(lists.size).tolist() == [8, 0]
        lists.write([7, 7])
        assert lists.memory.first_chunk(lists.size).tolist() == [8, 0]
        records, _ = lists.memory.gather(np.array([[8, 18], [0, 9]]), np.array([[0, 1], [1, 0]]))
        for (b, i), m, p in zip(np.ndindex(2, 2), (8, 18, 0, 9), (0, 1, 1, 0), strict=True):
            k, v = (x[:, p * J : (p + 1) * J].transpose(0, 1) for x in lists.rows[b][m][:2])
            assert torch.equal(records[b, i], torch.stack([k, v]))
        lists.bounded = False
        lists.reload(folder, "host", 2)  # and fewer
        lists.check()


@EACH_TIER
def test_replaced_chunks_of_many_planes(tier: str) -> None:
    """They come back, also for a branch whose source has gone on."""
    lists = Lists(ChunkMemory(tier, planes=3, max_chunks=60))
    for _ in range(7):
        lists.write([9])
    branch = lists.branch()
    for _ in range(3):
        lists.write([3])  # into larger tables
    assert lists.memory._tables.lengths is not branch.memory.base[0]._tables.lengths  # type: ignore[index]
    lists.bounded = False
    new = entries(4, 3, seed=99)
    old = lists.memory.replace(45, new)
    before = [one.rows[0][45:49] for one in (lists, branch)]
    for one in (lists, branch):
        one.rows[0][45:49] = [(*(part[0, i] for part in new[:4]), one.rows[0][45 + i][4]) for i in range(4)]
        one.check()
    lists.memory.replace(45, old)
    for one, held in zip((lists, branch), before, strict=True):
        one.rows[0][45:49] = held
        one.check()
    with pytest.raises(ValueError, match="first: expected 4 chunks that this memory owns, got 8"):
        lists.memory.replace(8, new)  # the first of them was written over


def test_one_token_of_all_layers_stays_on_the_device() -> None:
    """Layer after layer, each head 8 chunks of its own; the next token finds them there."""
    planes, heads, size = 60, 5, 128  # 4 MiB a chunk, the whole slab 64 MiB
    memory = ChunkMemory("disk", planes=planes)
    kv, landmarks = torch.randn(1, 20, size, planes, 64), torch.randn(1, 20, planes, 64)
    new = MemoryEntries(kv, kv, landmarks, torch.full((1, 20), size))
    memory.write(MemorySize(np.zeros(1, np.int64), 0), new, np.zeros((1, 20), np.int64), np.array([20]))
    recent = memory._recent
    assert recent is not None
    chosen = np.stack([np.random.default_rng(p).permutation(20)[:8] for p in range(planes)])
    for _ in range(2):
        for first in range(0, planes, heads):
            plane = np.arange(first, first + heads).repeat(8)
            memory.gather(chosen[first : first + heads].reshape(1, -1), plane[None])
    assert recent.misses == recent.hits == planes * 8


def test_nothing_asked_for_is_not_fetched() -> None:
    lists = Lists(ChunkMemory("disk", planes=2), 2)
    lists.write([3, 2])
    none, zero = np.full((2, 5), -1), np.zeros((2, 5), np.int64)
    records, lengths = lists.memory.gather(none, zero)
    assert records.shape == (2, 5, 2, J, S, D)
    assert not records.any()
    assert not lengths.any()
    assert lists.memory.fetched == 0
    alone = Lists(ChunkMemory())
    alone.write([3])
    alone.memory.gather(np.array([[1, 2, 1, 1]]))
    assert alone.memory.fetched == 2
    for any_planes in (lists, alone):
        shape = len(any_planes.rows), 0
        records, _ = any_planes.memory.gather(np.zeros(shape, np.int64), np.zeros(shape, np.int64))
        assert records.shape == (*shape, 2, J, S, D)


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="planes: expected at least 1 record a chunk, got 0"):
        ChunkMemory(planes=0)
    with pytest.raises(ValueError, match="max_chunks: expected at least 1 chunk, got 0"):
        ChunkMemory(max_chunks=0)
    lists = Lists(ChunkMemory(planes=3))
    lists.write([2])
    with pytest.raises(
        ValueError, match="planes: expected the number of a plane for each chunk, which has 3"
    ):
        lists.memory.gather(np.array([[0]]))
