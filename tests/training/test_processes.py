"""Several processes train as one does: the same batches, losses and checkpoints; none waits; signals are heard."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training import killed
from tests.training.killed import Seen, begin, newest, watched
from tests.training.tiny import TEXT, prose, run_config, write_run
from trailmark.files import read_json
from trailmark.training.config import RunConfig
from trailmark.training.forecast import estimate_of, forecast
from trailmark.training.run import HISTORY_FILE, Run

ROUNDING = 1e-12  # of losses in float64, where sums are taken in another order

# 5 steps of 4 texts
EXACT: dict[str, Any] = {
    "precision": "float64",
    "optimizer": "adamw",
    "steps": 5,
    "tokens_per_step": 320,
    "logging_steps": 1,
    "save_steps": 100,
}


def config_of(folder: Path, **settings: Any) -> RunConfig:
    return run_config(folder, **(EXACT | settings))


def alone(folder: Path, **settings: Any) -> Seen:
    (seen,) = begin(watched, config_of(folder, **settings)).results()
    return seen


def together(folder: Path, at: dict[int, killed.Act] | None = None, **settings: Any) -> list[Seen]:
    return begin(watched, config_of(folder, **settings), at, processes=2).results()


def assert_same_history(
    ours: Seen | Run, other: Seen | Run, names: Iterable[str] = ("step_loss", "grad_norm")
) -> None:
    assert [entry["step"] for entry in ours.history] == [entry["step"] for entry in other.history]
    for mine, theirs in zip(ours.history, other.history, strict=True):
        for name in names:
            assert mine[name] == pytest.approx(theirs[name], rel=ROUNDING, abs=0), (mine["step"], name)


def assert_same_batches(several: list[Seen], one: Seen) -> None:
    """Row for row; a mask or marks that change nothing may be left out."""
    default = {"attention_mask": True, "close_chunk": False, "document_ids": 0}

    def rows(seen: Seen) -> dict[tuple[int, int], dict[str, Tensor]]:
        found = {}
        for step, first, batch in seen.batches:
            shape = batch["input_ids"].shape
            full = {key: torch.full(shape, value) for key, value in default.items()} | batch
            for row in range(len(batch["input_ids"])):
                found[step, first + row] = {key: x[row] for key, x in full.items()}
        return found

    parts = [rows(seen) for seen in several]
    assert sum(map(len, parts)) == len(rows(one)), "rows that two processes took"
    union = {place: row for part in parts for place, row in part.items()}
    expected = rows(one)
    assert union.keys() == expected.keys()
    for place, row in expected.items():
        assert union[place].keys() == row.keys()
        assert all(torch.equal(union[place][key], x) for key, x in row.items()), place


# --- the same training -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Seen]:
    return cache(lambda model: alone(tmp_path_factory.mktemp("one"), model=model))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("model", ["drt", "landmark, drawing", "window"])
@pytest.mark.sampled(6)
def test_two_processes_train_as_one(
    model: str, parallel: str, one: Callable[[str], Seen], tmp_path: Path
) -> None:
    micro = 1 if model == "drt" else None  # twice two rows, or two at once
    seen = together(tmp_path, model=model, parallel=parallel, micro_batch_size=micro)
    for each in seen:
        assert_same_history(each, one(model))
        assert not each.without_gradient
    assert len(seen[0].batches) == (10 if micro else 5)
    assert_same_batches(seen, one(model))


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ("drt", None),
        pytest.param("landmark", None, marks=pytest.mark.slow),
        pytest.param("drt", "fsdp", marks=pytest.mark.slow),
        pytest.param("window", "ddp", marks=pytest.mark.slow),
    ],
)
def test_logits_of_few_tokens_at_a_time_change_nothing(
    model: str, parallel: str | None, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"model": model, "steps": 3, "gradient_checkpointing": model == "drt"}
    settings |= {"eval_steps": 3, "eval_windows": 2}

    def config(name: str, **more: Any) -> RunConfig:
        made = config_of(tmp_path / name, **settings, **more)
        made.data.validation = [str(tmp_path / "held-out.txt")]
        return made

    (tmp_path / "held-out.txt").write_text(prose(100)[50:])
    (whole,) = begin(watched, config("whole")).results()
    few = config("few", loss_slab=33, parallel=parallel or "ddp")
    for each in begin(watched, few, processes=2 if parallel else 1).results():
        assert_same_history(each, whole)
        assert each.history[-1]["eval_loss"] == pytest.approx(whole.history[-1]["eval_loss"], rel=ROUNDING)
        assert not each.without_gradient


def full_chunks(folder: Path, **settings: Any) -> RunConfig:
    config = config_of(folder, **settings)
    config.data.early_landmarks = 0
    return config


@pytest.mark.parametrize(
    ("model", "parallel", "processes", "checkpointing"),
    [
        ("drt", "ddp", 2, False),
        pytest.param("drt", "fsdp", 4, False, marks=pytest.mark.slow),
        pytest.param("window", "fsdp", 2, False, marks=pytest.mark.slow),
        pytest.param("drt", "ddp", 4, True, marks=pytest.mark.slow),
    ],
)
def test_two_processes_share_each_text(
    model: str, parallel: str, processes: int, checkpointing: bool, tmp_path: Path
) -> None:
    """Four of them in two groups, which have texts of their own."""
    settings: dict[str, Any] = {"model": model, "gradient_checkpointing": checkpointing}
    settings["micro_batch_size"] = 1 if processes == 2 else None  # of two texts and of one
    (single,) = begin(watched, full_chunks(tmp_path / "one", **settings)).results()
    settings["loss_slab"] = 13 if processes == 4 else None
    config = full_chunks(tmp_path / "several", parallel=parallel, context_parallel=2, **settings)
    names = [name for name in single.history[0] if name.startswith(("step_loss", "grad_norm", "retrieval_"))]
    assert len(names) == (2 if model == "window" else 7)
    for each in begin(watched, config, processes=processes).results():
        assert_same_history(each, single, names)
        assert not each.without_gradient


@pytest.mark.slow
def test_shared_texts_are_measured_one_by_one_and_gone_on_with_alone(tmp_path: Path) -> None:
    (tmp_path / "held-out.txt").write_text(prose(100)[50:])

    def config(name: str, **settings: Any) -> RunConfig:
        made = full_chunks(tmp_path / name, steps=6, eval_steps=2, eval_windows=3, **settings)
        made.data.validation = [str(tmp_path / "held-out.txt")]
        return made

    (single,) = begin(watched, config("one")).results()
    stopped = begin(
        watched, config("run", context_parallel=2), {3: killed.ask_to_stop}, processes=2
    ).results()
    assert [each.done for each in stopped] == [False, False]
    (last,) = begin(watched, config("run")).results()
    assert_same_history(last, single)
    assert last.history[-1]["eval_loss"] == pytest.approx(single.history[-1]["eval_loss"], rel=ROUNDING)


@pytest.mark.parametrize("model", ["drt", "landmark, drawing"])
@pytest.mark.slow
def test_documents_that_stay_apart(model: str, tmp_path: Path) -> None:
    """Some micro-batches lie in one document, some in several: all processes add up the same numbers all the same."""
    for number in range(6):
        (tmp_path / "texts" / f"{number}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{number}.txt").write_text(prose(20 + 60 * number))
    config = config_of(tmp_path / "one", model=model)
    config.data.paths, config.data.separate_documents = [str(tmp_path / "texts")], True
    (single,) = begin(watched, config).results()
    shared = [batch for _, _, batch in single.batches if "document_ids" in batch]
    assert shared
    config.output = str(tmp_path / "two")
    seen = begin(watched, config, processes=2).results(120)
    assert_same_batches(seen, single)
    for each in seen:
        assert_same_history(each, single)


@pytest.mark.slow
def test_muon_puts_shared_matrices_together(tmp_path: Path) -> None:
    single = alone(tmp_path / "one", optimizer="muon")
    for each in together(tmp_path / "two", parallel="fsdp", optimizer="muon"):
        assert_same_history(each, single)


@pytest.mark.parametrize("model", ["drt", "landmark, drawing", "window"])
@pytest.mark.slow
def test_one_by_one_trains_as_all_at_once(model: str, one: Callable[[str], Seen], tmp_path: Path) -> None:
    seen = alone(tmp_path, model=model, micro_batch_size=1)
    assert len(seen.batches) == 20
    assert_same_history(seen, one(model))
    assert_same_batches([seen], one(model))


@pytest.mark.slow
def test_needles_and_their_levels(tmp_path: Path) -> None:
    settings = config_of(tmp_path / "one", task="needles", steps=7, tokens_per_step=1280)
    names = ("step_loss", "grad_norm", "level", "accuracy", "recall")
    (single,) = begin(watched, settings, None, -1.0).results()
    settings.output = str(tmp_path / "two")
    seen = begin(watched, settings, None, -1.0, processes=2).results()
    assert single.levels == [0, 2, 4, 6, 8]
    for each in seen:
        assert each.levels == single.levels
        assert_same_history(each, single, names)
    assert_same_batches(seen, single)


@pytest.mark.slow
def test_measuring_beside_the_training(tmp_path: Path) -> None:
    """Two processes share three windows of validation text out."""
    (tmp_path / "held-out.txt").write_text(prose(100)[50:])
    config = config_of(tmp_path / "one", steps=2, eval_steps=1, eval_windows=3)
    config.data.validation = [str(tmp_path / "held-out.txt")]
    (single,) = begin(watched, config).results()
    config.output = str(tmp_path / "two")
    for each in begin(watched, config, processes=2).results():
        assert_same_history(each, single, ("eval_loss", "eval_perplexity"))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.slow
def test_needles_asked_during_training(parallel: str, tmp_path: Path) -> None:
    """Texts are read piece by piece, which a model in shards cannot."""
    settings = config_of(tmp_path / "one", task="needles", steps=2, eval_steps=2, tokens_per_step=1280)
    (single,) = begin(killed.asked, settings).results()
    settings.output, settings.training.parallel = str(tmp_path / "two"), parallel
    seen = begin(killed.asked, settings, processes=2).results()
    names = {name for name in single.history[-1] if name.startswith("eval_needles")}
    assert len(names) == 2
    for each in seen:
        assert_same_history(each, single)
        assert {name: each.history[-1][name] for name in names} == {
            name: single.history[-1][name] for name in names
        }


@pytest.mark.slow
def test_a_run_moves_between_machines(tmp_path: Path) -> None:
    """FSDP2 on two processes, DDP on two, one alone, two again: each goes on from the last one's checkpoint."""
    whole = alone(tmp_path / "whole", steps=8)
    output, stop = tmp_path / "run", killed.ask_to_stop
    first = together(output, {1: stop}, steps=8, parallel="fsdp")
    second = together(output, {3: stop}, steps=8)
    (third,) = begin(watched, config_of(output, steps=8), {5: stop}).results()
    last = together(output, steps=8, parallel="fsdp")
    # heard of at the next step, by all
    assert [[s.step for s in seen] for seen in (first, second, [third], last)] == [
        [2, 2],
        [4, 4],
        [6],
        [8, 8],
    ]
    assert [s.done for s in (*first, *second, third, *last)] == [False] * 5 + [True] * 2
    for seen in last:
        assert_same_history(seen, whole)
    assert read_json(output / HISTORY_FILE)["steps"] == last[0].history


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.slow
def test_activation_checkpointing_changes_nothing(parallel: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"parallel": parallel, "steps": 3, "precision": "float32"}
    plain = together(tmp_path / "plain", **settings)
    saving = together(tmp_path / "saving", **settings, gradient_checkpointing=True)
    for ours, other in zip(saving, plain, strict=True):
        assert [h["step_loss"] for h in ours.history] == [h["step_loss"] for h in other.history]
    names = [tmp_path / name / "model.safetensors" for name in ("plain", "saving")]
    assert names[0].read_bytes() == names[1].read_bytes()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.slow
def test_a_batch_that_retrieves_nothing(parallel: str, tmp_path: Path) -> None:
    """Texts shorter than a chunk: the retriever gets gradients of zeros in both processes, and no one waits."""
    config = config_of(tmp_path, parallel=parallel, steps=2, context_length=16, tokens_per_step=32)
    config.data.early_landmarks = 0
    for each in begin(watched, config, processes=2).results():
        assert not each.without_gradient
        of_memory = ("retrievers.", "encoder.", "upper_layers.0.gca_")
        expected = {name for name in each.parameters if name.startswith(of_memory)}
        assert len(expected) > 8
        assert expected <= set(each.zero_gradient) < set(each.parameters)


# --- processes that leave --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "parallel"),
    [
        (killed.die_as_second, "ddp"),
        (killed.die_as_main, "fsdp"),
        (killed.fail_as_second, "ddp"),
        pytest.param(killed.die_as_second, "fsdp", marks=pytest.mark.slow),
        pytest.param(killed.die_as_main, "ddp", marks=pytest.mark.slow),
        pytest.param(killed.fail_as_second, "fsdp", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(3)
def test_nobody_waits_for_the_dead(act: killed.Act, parallel: str, tmp_path: Path) -> None:
    started = begin(watched, config_of(tmp_path, parallel=parallel, save_steps=1), {2: act}, processes=2)
    codes = started.wait()
    assert 0 not in codes
    if act is killed.fail_as_second:
        assert "data: a shard that only this process reads is damaged." in started.printed(1)
    assert newest(tmp_path) >= 1


def test_a_full_disk_is_told_to_all(tmp_path: Path) -> None:
    config = config_of(tmp_path, save_steps=1)
    started = begin(watched, config, {2: killed.fill_the_disk}, processes=2)
    assert started.wait() == [1, 1]
    for number in range(2):
        printed = started.printed(number)
        assert "ValueError: output: cannot save in" in printed
        assert "No space left on device" in printed
        assert "the last whole checkpoint is step 1" in printed
    assert newest(tmp_path) == 1


def wait_for_a_checkpoint(output: Path, started: killed.Together) -> None:
    end = time.monotonic() + 180
    while not newest(output):
        assert time.monotonic() < end, started.printed()
        assert started.alive(), started.printed()
        time.sleep(0.05)


def test_sigterm_saves_and_the_command_goes_on(tmp_path: Path) -> None:
    arguments = ["train", str(write_run(tmp_path, steps=100_000, save_steps=1))]
    started = begin(killed.command, arguments)
    wait_for_a_checkpoint(tmp_path / "run", started)
    started.processes[0].terminate()
    assert started.wait() == [0]
    step = newest(tmp_path / "run")
    assert f"Stopped and saved at step {step}. The same command goes on from here." in started.printed()
    again = begin(killed.command, arguments)
    while newest(tmp_path / "run") == step:
        assert again.alive(), again.printed()
        time.sleep(0.05)
    again.processes[0].terminate()
    assert again.wait() == [0]
    assert f"Going on from step {step}: the newest whole checkpoint is" in again.printed()


def test_a_second_sigterm_leaves_at_once(tmp_path: Path) -> None:
    config = run_config(tmp_path, save_steps=2)
    started = begin(watched, config, {3: killed.terminate_again_later})
    assert started.wait() == [-signal.SIGTERM]
    assert newest(tmp_path) == 2


def test_the_echo_of_a_sigterm_is_none(tmp_path: Path) -> None:
    (seen,) = begin(watched, run_config(tmp_path), {3: killed.terminate_twice}).results()
    assert not seen.done
    assert newest(tmp_path) == seen.step


def test_sigterm_to_all_saves(tmp_path: Path) -> None:
    started = begin(watched, config_of(tmp_path, steps=10_000, save_steps=1), processes=2)
    wait_for_a_checkpoint(tmp_path, started)
    for process in started.processes:
        process.terminate()
    seen = started.results()
    assert [s.done for s in seen] == [False, False]
    assert seen[0].step == seen[1].step == newest(tmp_path)


@pytest.mark.slow
def test_what_one_process_finds_not_finite_all_leave_out(tmp_path: Path) -> None:
    act = {2: killed.spoil_as_second}
    seen = together(tmp_path / "skips", act, skip_nonfinite=1)
    assert [[h["step"] for h in s.history] for s in seen] == [[1, 2, 3, 4, 5]] * 2
    report = read_json(tmp_path / "skips" / "nan-report.json")
    assert report["step"] == 3
    assert report["samples"] == [8, 9, 10, 11]
    started = begin(watched, config_of(tmp_path / "stops"), act, processes=2)
    assert started.wait() == [1, 1]
    for number in range(2):
        assert "NonFiniteError: training: the loss is nan at step 3. It was not taken" in started.printed(
            number
        )


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["text", "needles"])
def test_a_batch_that_does_not_divide_is_refused_before_a_model_is_made(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(Run, "_make_model", lambda run: pytest.fail("a model was made"))
    message = r"^training\.tokens_per_step: expected a global batch that divides among 3 processes, got \d+ samples\. "
    with pytest.raises(ValueError, match=message):
        Run(run_config(tmp_path, task, tokens_per_step=320), text=TEXT)
    assert not list(tmp_path.iterdir())


def test_processes_that_make_no_groups_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(Run, "_make_model", lambda run: pytest.fail("a model was made"))
    run = Run(full_chunks(tmp_path, context_parallel=2), text=TEXT)
    with pytest.raises(
        ValueError, match=r"training\.context_parallel: expected a divisor of the 3 processes, got 2"
    ):
        run.train()
    assert not list(tmp_path.iterdir())


def test_samples_that_do_not_divide_among_groups_are_told_by_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        ValueError, match=r"divides among 4 processes, got 3 samples\. Start 2 or 6 processes"
    ):
        Run(full_chunks(tmp_path, context_parallel=2, tokens_per_step=240), text=TEXT)


def test_what_texts_that_are_shared_take_is_told_to_one_process(tmp_path: Path) -> None:
    """Two rows of half the length each, and the chunks of all."""
    whole, shared = (
        estimate_of(Run(full_chunks(tmp_path, context_parallel=size, tokens_per_step=80), text=TEXT))
        for size in (1, 2)
    )
    assert shared.world_size == 2
    assert shared.tokens_per_step == whole.tokens_per_step
    assert shared.activations < whole.activations
    assert shared.logits == whole.logits / 2
    run = Run(full_chunks(tmp_path, context_parallel=2, tokens_per_step=80), text=TEXT)
    assert "No step is taken with several processes" in list(forecast(run))[-1]


# --- the commands ----------------------------------------------------------------------------------------------

LAUNCHERS = {
    "torchrun": "torch.distributed.run --nproc-per-node 2 --standalone",  # any free port
    "accelerate": "accelerate.commands.launch --num_processes 2 --cpu --num_machines 1 --mixed_precision no "
    "--dynamo_backend no",
}


_OURS = re.compile(r"Training |\[[#.]+\] |Trained in |  loss |The model lies in |$")


def launched(launcher: str | None, config: RunConfig, *more: str) -> subprocess.Popen[str]:
    """``trailmark train`` in a process of its own, or as a launcher starts it; its text lies beside its output."""
    output = Path(config.output)
    output.with_name("text.txt").write_text(prose())
    config.data.paths = [str(output.with_name("text.txt"))]
    file = output.with_suffix(".yaml")
    file.write_text(config.to_yaml())
    start = ["-m", *LAUNCHERS[launcher].split()] if launcher else []
    return subprocess.Popen(
        [sys.executable, *start, "-m", "trailmark.cli", "train", str(file), *more],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_command_under_a_launcher(launcher: str, tmp_path: Path) -> None:
    def trained(launcher: str | None, name: str, *more: str) -> tuple[str, list[float]]:
        process = launched(launcher, config_of(tmp_path / name, steps=2), *more)
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0, printed
        return printed, [h["step_loss"] for h in read_json(tmp_path / name / HISTORY_FILE)["steps"]]

    _, expected = trained(None, "one")
    for parallel in ("ddp", "fsdp"):
        printed, found = trained(launcher, parallel, f"training.parallel={parallel}")
        assert printed.count("Training DRTForCausalLM") == 1  # one of them speaks
        assert [line for line in printed.splitlines() if not _OURS.match(line)] == []
        assert found == pytest.approx(expected, rel=ROUNDING, abs=0)


@pytest.mark.slow
def test_sigterm_to_torchrun(tmp_path: Path) -> None:
    """As a cluster does it: the launcher passes the signal on, all save, the next start goes on."""
    process = launched("torchrun", config_of(tmp_path / "run", steps=100_000, save_steps=1))
    end = time.monotonic() + 120
    while not newest(tmp_path / "run") and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=120)
    step = newest(tmp_path / "run")
    assert f"Stopped and saved at step {step}." in printed, printed
