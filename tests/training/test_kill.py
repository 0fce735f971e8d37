"""SIGKILL, mostly while saving: the run that goes on is the run that was never disturbed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.training.killed import Killer
from tests.training.tiny import run_config

SEED = int(os.environ.get("TRAILMARK_FUZZ_SEED", "0"))  # others draw other moments
# everything that a checkpoint keeps: Muon's and AdamW's moments, levels of the curriculum, statistics of the retrieval
VARIANTS = {
    "text": {"task": "text", "optimizer": "adamw"},
    "needles": {"task": "needles", "optimizer": "muon"},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_never_was(variant: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, **VARIANTS[variant], steps=8, save_steps=1, logging_steps=1)
    config.data.level_accuracy = -1.0  # every level is passed
    killer = Killer(config, tmp_path, seed=SEED)
    assert len(killer.expected[1]) == 8
    killer.run(10)
    found = killer.found
    print(f"{variant}: {found}")
    assert found.kills == 10
    assert not found.damaged
    assert found.in_saving > found.kills / 2, found  # else this would prove little


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_that_are_killed(parallel: str, tmp_path: Path) -> None:
    """One of them, or both; the other one leaves too."""
    config = run_config(
        tmp_path, optimizer="adamw", parallel=parallel, steps=6, save_steps=1, logging_steps=1
    )
    killer = Killer(config, tmp_path, seed=SEED, processes=2)
    killer.run(4)
    print(f"{parallel}: {killer.found}")
    assert killer.found.kills == 4
    assert not killer.found.damaged
