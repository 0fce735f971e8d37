"""Records used last, kept in front of a slower tier: which stay, and what Ctrl-C leaves."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.memory.interrupts import interrupt, stopped_at
from tests.memory.tiers.test_base import SHAPE, every, filled, records, same_bits
from trailmark.memory.tiers import disk, files, recent, resident
from trailmark.memory.tiers import records as records_module
from trailmark.memory.tiers.base import TIERS
from trailmark.memory.tiers.disk import DiskStore
from trailmark.memory.tiers.recent import RecentRecords
from trailmark.memory.tiers.resident import HostStore

pytestmark = pytest.mark.usefixtures("one_thread")

MODULES = (records_module, files, resident, disk, recent)


class Counting(HostStore):
    """What it was asked for."""

    def __init__(self) -> None:
        super().__init__(SHAPE, torch.float32, "cpu")
        self.write(0, records(100))
        self.asked: list[list[int]] = []

    def gather(self, numbers: Tensor) -> Tensor:
        self.asked.append(numbers.tolist())
        return super().gather(numbers)


def test_what_was_not_used_for_longest_makes_room() -> None:
    store = Counting()
    recent = RecentRecords(store, 3)
    calls = [[1, 2], [3], [1], [4], [1, 3], [2], [5, 5, 1], [5, 1]]
    for numbers in calls:
        assert same_bits(recent.gather(torch.tensor(numbers)), records(100)[numbers])
    assert store.asked == [[1, 2], [3], [4], [2], [5]]
    assert (recent.hits, recent.misses) == (1 + 2 + 1 + 2, 2 + 1 + 1 + 1 + 2)
    assert recent.num_bytes() == 3 * store.record_bytes


def test_more_than_there_is_room_for_comes_straight_from_the_store() -> None:
    store = Counting()
    recent = RecentRecords(store, 3)
    recent.gather(torch.tensor([7, 8]))
    many = torch.tensor([1, 2, 3, 4, 4, 7])
    assert same_bits(recent.gather(many), records(100)[many])
    recent.gather(torch.tensor([7, 8]))  # still there
    assert store.asked == [[7, 8], many.tolist()]
    assert (recent.hits, recent.misses) == (1 + 2, 2 + 5)


@pytest.mark.parametrize("again", [1, 2])
def test_a_record_that_came_back_elsewhere_stays_when_its_first_place_is_taken(again: int) -> None:
    recent = RecentRecords(Counting(), 3)
    for number in (9, 1, 2):
        recent.gather(torch.tensor([number]))
    recent.forget(1, 2)
    for numbers in ([again], [again, 3]):
        assert same_bits(recent.gather(torch.tensor(numbers)), records(100)[numbers])


@pytest.mark.parametrize(("first", "count"), [(0, 5), (2, 1), (4, 60)])
def test_overwritten_records_are_forgotten(first: int, count: int) -> None:
    store = Counting()
    recent = RecentRecords(store, 10)
    numbers = torch.arange(8)
    recent.gather(numbers)
    recent.write(first, records(count, seed=1))
    assert same_bits(recent.gather(numbers), every(store)[:8])
    assert store.asked[1] == [n for n in range(8) if first <= n < first + count]


def test_ctrl_c_at_any_line_leaves_no_wrong_record() -> None:
    stopped, line = True, 0
    while stopped:
        line += 1
        recent = RecentRecords(Counting(), 3)
        recent.gather(torch.tensor([1, 2, 3]))
        with contextlib.suppress(KeyboardInterrupt), stopped_at(line, interrupt, *MODULES) as lines:
            recent.gather(torch.tensor([3, 4, 5]))
            recent.forget(3, 2)
        stopped = lines.run == line
        assert torch.is_grad_enabled()
        for numbers in ([1, 2, 3], [4, 5, 3], [5, 6, 7], [4, 6, 7]):
            assert same_bits(recent.gather(torch.tensor(numbers)), records(100)[numbers])
    assert line > 20


@pytest.mark.parametrize("tier", [*TIERS, "a file that was there"])
@pytest.mark.parametrize("count", [0, 60])
def test_ctrl_c_at_any_line_of_a_write_leaves_the_records_before(
    tier: str, count: int, tmp_path: Path
) -> None:
    stopped, line = True, 0
    while stopped:
        line += 1
        if tier in TIERS:
            store = filled(tier, count)
        else:
            path = tmp_path / f"{line}.bin"
            filled("disk", 60, path=path).close()
            store = DiskStore(path, SHAPE, torch.float32, "cpu", count=count or 50)
        before = len(store)
        with contextlib.suppress(KeyboardInterrupt), stopped_at(line, interrupt, *MODULES) as lines:
            store.write(before, records(90, seed=1))
        stopped = lines.run == line
        assert torch.is_grad_enabled()
        assert len(store) == (before if stopped else before + 90)
        store.write(before, records(200, seed=2))
        assert same_bits(every(store), torch.cat([records(60)[:before], records(200, seed=2)]))
        store.close()
    assert line > 15
