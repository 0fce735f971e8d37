"""What a command's processes share: work in its order, every failure, one folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import multiprocessing

from trailmark import processes


def pieces(rank: int, folder: Path) -> list[list[list[int]]]:
    """Of 0 to 4 pieces which process made each, as the first one took them."""
    found = []
    for count in range(5):
        taken: list[list[int]] = []
        processes.share_out(range(count), lambda mine: ([n, rank] for n in mine), taken.append)
        found.append(taken)
    return found


def a_failure(rank: int, folder: Path) -> None:
    processes.share_out([2, 0, 1, 4], lambda mine: (1 / n for n in mine), lambda made: None)


def a_failure_of_the_first(rank: int, folder: Path) -> None:
    processes.share_out([2, 1], lambda mine: (n for n in mine), lambda made: [][made])  # type: ignore[call-overload]


def a_difference(rank: int, folder: Path) -> None:
    processes.expect_agreed({"model": "m", "text": f"text {rank}"})


def one_that_lacks_a_name(rank: int, folder: Path) -> None:
    processes.expect_agreed({"model": "m"} if rank else {"version": 1, "model": "m"})


def a_folder_of_all(rank: int, folder: Path) -> None:
    processes.expect_shared("output", folder / "made")
    assert not [*(folder / "made").iterdir()]


def a_folder_of_each(rank: int, folder: Path) -> None:
    processes.expect_shared("output", folder / f"made by {rank}")


def alone(rank: int, folder: Path) -> list[int]:
    """As a script of a user's does, where the others do not share."""
    taken: list[int] = []
    processes._sharing = False
    if not rank:
        processes.share_out([1, 2, 3], lambda mine: (n for n in mine), taken.append)
    processes._sharing = True
    return taken


def a_count(rank: int, folder: Path) -> list[int]:
    """What two processes add to it, each when it likes, in sum; and how often who is first looked meanwhile."""
    count, looked = processes.Count(), []
    count.add(rank + 1)
    if rank:
        time.sleep(0.3)  # the others wait
        count.add(10)
    processes.wait_for_all(lambda: looked.append(count.add(0)), 0.05)
    return [count.add(0), len(looked)]


ACTS: dict[str, Callable[[int, Path], object]] = {
    act.__name__: act
    for act in (
        pieces, a_failure, a_failure_of_the_first, a_difference, one_that_lacks_a_name, a_folder_of_all,
        a_folder_of_each, alone, a_count,
    )
}  # fmt: skip


def work(rank: int, count: int, folder: Path) -> None:
    """One of ``count`` processes: it writes down what came of each act."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count)
    found = {}
    with processes.together():
        assert processes.is_main() == (not rank)
        for name, act in ACTS.items():
            try:
                found[name] = act(rank, folder)
            except (ValueError, ArithmeticError, LookupError) as error:
                found[name] = f"{type(error).__name__}: {error}"
        (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_two_share_their_work_and_hear_of_every_failure(tmp_path: Path) -> None:
    multiprocessing.spawn(work, (2, tmp_path), nprocs=2)  # type: ignore[no-untyped-call]
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert one["pieces"] == [[[n, n % 2] for n in range(count)] for count in range(5)]
    assert not any(other["pieces"])
    # who failed tells it as it was, with its traceback; the others are told who failed
    assert other["a_failure"] == "ZeroDivisionError: division by zero"
    assert one["a_failure"] == "ValueError: process 1: ZeroDivisionError: division by zero"
    assert one["a_failure_of_the_first"] == "IndexError: list index out of range"
    assert other["a_failure_of_the_first"] == "ValueError: process 0: IndexError: list index out of range"
    for name, said in (
        ("a_difference", "processes: expected the text of process 0 in all, process 1 has another"),
        (
            "one_that_lacks_a_name",
            "processes: expected the version of process 0 in all, process 1 has another",
        ),
        ("a_folder_of_each", "output: expected a folder that all processes share, process 1 does not see"),
    ):
        assert one[name] == other[name]
        assert said in one[name]
    assert one["a_folder_of_all"] is other["a_folder_of_all"] is None
    assert (one["alone"], other["alone"]) == ([1, 2, 3], [])
    assert one["a_count"][0] == other["a_count"][0] == 1 + 2 + 10
    assert one["a_count"][1] > 0  # it waited for the other, and could see it go on


def test_one_process_does_all() -> None:
    taken: list[int] = []
    with processes.together():
        assert processes.is_main()
        assert not processes.sharing()
        processes.share_out(range(3), lambda mine: (n * n for n in mine), taken.append)
        assert processes.by_first(lambda: 7) == 7
    assert taken == [0, 1, 4]
