"""Older checkpoints go, and never the last whole one."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.disks import flip
from tests.training.test_checkpoints import FILES, names, write
from trailmark.training import checkpoints as module
from trailmark.training.checkpoints import (
    find_newest_whole,
    is_whole,
    remove_leftovers,
    retain,
    step_folder,
    steps,
)


@settings(max_examples=25, deadline=None)
@given(
    saved=st.lists(st.integers(1, 30), min_size=1, max_size=8, unique=True),
    broken=st.sets(st.integers(1, 30)),
    keep=st.integers(1, 4),
    fresh=st.booleans(),
)
def test_the_newest_whole_ones_stay(saved: list[int], broken: set[int], keep: int, fresh: bool) -> None:
    """Damage of the worst kind, that only a hash finds; ``fresh``: in a process that wrote none of them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for step in saved:
            write(folder, step)
        for step in broken & set(saved):
            flip(step_folder(folder, step) / FILES[-1], 50)
        if fresh:
            module._vouched.clear()
        whole = sorted(set(saved) - broken)
        removed = retain(folder, keep)
        left = steps(folder)
        assert set(whole[-keep:]) <= set(left)
        assert removed == sorted(set(saved) - set(left))
        assert [step for step in left if is_whole(step_folder(folder, step))] == whole[-keep:]
        assert {step for step in saved if step > max(whole, default=0)} <= set(left)
        assert find_newest_whole(folder)[0] == (step_folder(folder, whole[-1]) if whole else None)
        assert retain(folder, keep) == []


def test_what_this_process_wrote_is_not_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    hashed: list[Path] = []
    real = module.verify
    monkeypatch.setattr(module, "verify", lambda folder: [hashed.append(folder), real(folder)])
    assert retain(tmp_path, 1) == [1]
    assert hashed == []
    module._vouched.clear()
    assert retain(tmp_path, 1) == []
    assert hashed == [step_folder(tmp_path, 2)]


def test_a_removal_that_is_stopped_leaves_no_checkpoint_with_a_part_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # killed before the first file
    assert retain(tmp_path, 1) == [1]
    monkeypatch.undo()
    assert steps(tmp_path) == [2]
    assert remove_leftovers(tmp_path) == [f"step-00000001.removed-{os.getpid()}"]
    assert names(tmp_path) == ["step-00000002"]
