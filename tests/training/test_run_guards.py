"""What a run does when its numbers, its disk or a stranger's files go wrong."""

from __future__ import annotations

import ast
import errno
import json
import math
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import trailmark
from tests.training.killed import half_written, newest, spoil
from tests.training.tiny import TEXT, run_config, without_seconds, write_run
from trailmark.cli import main
from trailmark.training import checkpoints, tensors
from trailmark.training.guards import REPORT_FILE, NonFiniteError
from trailmark.training.run import HISTORY_FILE, Run

State = dict[str, Tensor]


class Watched:
    """A run with weights and moments of every step; ``prepare`` may spoil its model."""

    def __init__(
        self, output: Path, prepare: Callable[[Run], None], stop_at: int = 0, **settings: Any
    ) -> None:
        self.weights: list[State] = []
        self.stop_at = stop_at
        self.run = Run(run_config(output, **({"logging_steps": 1} | settings)), self._look, TEXT)
        self.weights.append(self._state())
        prepare(self.run)

    def _state(self) -> State:
        return {name: x.clone() for name, x in self.run.model.state_dict().items()}

    def _look(self, run: Run) -> None:
        self.weights.append(self._state())
        if run.step == self.stop_at:
            signal.raise_signal(signal.SIGINT)

    def moments(self) -> dict[str, Tensor]:
        assert self.run.trainer is not None
        inner = self.run.trainer.optimizer
        found = tensors.optimizer_state(self.run.model, getattr(inner, "optimizer", inner))["state"]
        return {
            f"{name} {key}": torch.as_tensor(x).clone()
            for name, state in found.items()
            for key, x in state.items()
        }


def same(ours: State, other: State) -> bool:
    """Bit for bit, NaN too."""
    return ours.keys() == other.keys() and all(
        x.numpy().tobytes() == ours[name].numpy().tobytes() for name, x in other.items()
    )


def spoil_gradient(run: Run, steps: set[int], name: str = "lower_layers.0.mlp.down_proj.weight") -> None:
    """The gradient of one parameter is infinite in these steps; the loss is not."""

    def put(gradient: Tensor) -> Tensor | None:
        return gradient * math.inf if run.step + 1 in steps else None

    run.model.get_parameter(name).register_hook(put)


# --- losses and gradients that are not finite ------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.sampled(4)
def test_a_loss_that_is_not_finite_stops_before_the_step(
    optimizer: str, value: float, tmp_path: Path
) -> None:
    watched = Watched(
        tmp_path,
        lambda run: spoil(run, {4}, "upper_layers.0.mlp", value),
        optimizer=optimizer,
        micro_batch_size=1,
    )
    with pytest.raises(
        NonFiniteError, match=r"^training: the loss is nan at step 4\. It was not taken: "
    ) as caught:
        watched.run.train()
    assert "First in the output of upper_layers.0.mlp (MLP)." in str(caught.value)
    assert len(watched.weights) == 4
    assert same(watched._state(), watched.weights[3])
    assert not same(watched.weights[3], watched.weights[2])
    report = json.loads((tmp_path / REPORT_FILE).read_text())
    assert report["step"] == 4
    assert report["samples"] == [6, 7]
    assert report["first_module"] == "upper_layers.0.mlp (MLP)"
    assert report["parameters"] == []
    assert report["not_repeated"] is None


@pytest.mark.parametrize("norm", [0.0, 1.0])
@pytest.mark.sampled(2)
def test_a_gradient_that_is_not_finite_stops_before_the_step(norm: float, tmp_path: Path) -> None:
    """Also where gradients are not clipped."""
    watched = Watched(tmp_path, lambda run: spoil_gradient(run, {4}), max_grad_norm=norm)
    with pytest.raises(
        NonFiniteError, match=r"^training: the norm of the gradients is (nan|inf) at step 4\."
    ):
        watched.run.train()
    assert same(watched._state(), watched.weights[3])
    report = json.loads((tmp_path / REPORT_FILE).read_text())
    assert math.isfinite(report["loss"])
    assert report["first_module"] is None
    assert report["gradients"] == ["lower_layers.0.mlp.down_proj.weight"]


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    def prepare(run: Run) -> None:
        with torch.no_grad():
            run.model.get_parameter("lower_layers.0.mlp.down_proj.weight")[0, 0] = math.nan

    watched = Watched(tmp_path, prepare)
    before = watched._state()
    with pytest.raises(NonFiniteError, match="the loss is nan at step 1"):
        watched.run.train()
    assert same(watched._state(), before)
    report = json.loads((tmp_path / REPORT_FILE).read_text())
    assert report["parameters"] == ["lower_layers.0.mlp.down_proj.weight"]
    assert report["first_module"] == "lower_layers.0.mlp.down_proj (Linear)"


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.sampled(2)
def test_steps_that_may_be_left_out_change_nothing(optimizer: str, tmp_path: Path) -> None:
    """Neither weights, though they would decay, nor moments; the third one stops the run."""
    moments: dict[int, State] = {}

    def prepare(run: Run) -> None:
        spoil(run, {3, 8})
        spoil_gradient(run, {5})

    watched = Watched(tmp_path, prepare, optimizer=optimizer, skip_nonfinite=2, weight_decay=0.1)
    look = watched.run.progress
    watched.run.progress = lambda run: (look(run), moments.update({run.step: watched.moments()}))  # type: ignore[assignment,func-returns-value]
    with pytest.raises(NonFiniteError, match=r"the loss is nan at step 8 after 2 skipped steps\."):
        watched.run.train()
    assert watched.run.guard.skipped == [3, 5]
    changed = [n for n in range(1, 8) if not same(watched.weights[n], watched.weights[n - 1])]
    assert changed == [1, 2, 4, 6, 7]
    assert same(moments[3], moments[2])
    assert same(moments[5], moments[4])
    assert not same(moments[6], moments[5])
    assert same(watched._state(), watched.weights[7])
    assert all(math.isfinite(entry["loss"]) for entry in watched.run.history)


@pytest.mark.slow
def test_a_run_that_skipped_goes_on_as_if_it_was_not_stopped(tmp_path: Path) -> None:
    def prepare(run: Run) -> None:
        spoil(run, {3})
        spoil_gradient(run, {9})

    settings: dict[str, Any] = {"skip_nonfinite": 2, "steps": 10}
    whole = Watched(tmp_path / "whole", prepare, **settings)
    whole.run.train()
    first = Watched(tmp_path / "run", prepare, stop_at=4, **settings)
    with pytest.raises(KeyboardInterrupt):
        first.run.train()
    second = Watched(tmp_path / "run", prepare, **settings)
    second.run.train()
    assert second.run.guard.skipped == whole.run.guard.skipped == [3, 9]
    assert same(second._state(), whole._state())
    assert without_seconds(second.run.history) == without_seconds(whole.run.history)


# --- the command, a full disk -------------------------------------------------------------------------


def test_the_command_says_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_run(tmp_path)
    begun = Run(run_config(tmp_path / "begun"), text=TEXT).model
    with torch.no_grad():
        begun.get_parameter("norm.weight").fill_(3e38)  # finite, which its multiples are not
    begun.save_pretrained(tmp_path / "begun")
    capsys.readouterr()  # of saving
    with pytest.raises(SystemExit) as caught:
        main(["train", str(config), f"init_from={tmp_path / 'begun'}"])
    assert caught.value.code == 1
    *progress, line = capsys.readouterr().err.strip().splitlines()
    assert all(not other or other.startswith("[#") for other in progress)
    assert line.startswith("trailmark: training: the ")
    assert f"Report: {tmp_path / 'run' / REPORT_FILE}." in line


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last checkpoint is there, the model is not yet: the same command writes it."""
    run = Run(run_config(tmp_path), text=TEXT)
    save = PreTrainedModel.save_pretrained

    def full(model: Any, folder: Any, *more: Any, **options: Any) -> None:
        if ".saving-" in str(folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(model, folder, *more, **options)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(ValueError, match=r"^output: cannot save in .* \(.*No space left on device\)"):
        run.train()
    assert newest(tmp_path) == 12
    assert not (tmp_path / HISTORY_FILE).exists()
    assert not half_written(tmp_path)
    monkeypatch.undo()
    weights = run.model.state_dict()
    again = Run(run_config(tmp_path), text=TEXT)
    again.train()
    assert again.finished
    assert same(again.model.state_dict(), weights)


# --- a stranger's files ----------------------------------------------------------------------------------------


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.target, "executed"))


PICKLES = (
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "scaler.pt",
    "training_args.bin",
    "pytorch_model.bin",
    "pytorch_model_fsdp.bin",
    "rng_state.pth",
    "rng_state_0.pth",
)


def put_canaries(folder: Path, target: Path) -> None:
    for number, name in enumerate(PICKLES):
        if number % 2:
            (folder / name).write_bytes(pickle.dumps(Canary(target)))
        else:
            torch.save({"state": Canary(target)}, folder / name)


def test_the_canary_sings(tmp_path: Path) -> None:
    song = tmp_path / "song"
    put_canaries(tmp_path, song)
    for number, name in enumerate(PICKLES):
        if number % 2:
            pickle.loads((tmp_path / name).read_bytes())
        else:
            torch.load(tmp_path / name, weights_only=False)
        assert song.read_text() == "executed", name
        song.unlink()


def test_nothing_beside_a_checkpoint_is_unpickled(tmp_path: Path) -> None:
    """Files that are not in the manifest make it damaged; a stranger may well write a manifest that names them."""
    run = Watched(tmp_path / "run", lambda run: None, stop_at=3).run
    with pytest.raises(KeyboardInterrupt):
        run.train()
    folder = tmp_path / "run" / "checkpoints"
    song = tmp_path / "song"
    own = folder / "step-00000003"
    with checkpoints.writing(folder, 4, checkpoints.read_about(own)) as staging:
        for file in own.iterdir():
            if file.name != checkpoints.MANIFEST:
                (staging / file.name).write_bytes(file.read_bytes())
        put_canaries(staging, song)
    told: list[str] = []
    again = Run(run_config(tmp_path / "run", logging_steps=1), text=TEXT, say=told.append)
    again.train()
    assert told == [f"Going on from step 3: the newest whole checkpoint is {folder / 'step-00000004'}."]
    assert again.finished
    assert not song.exists()


@pytest.mark.slow
def test_a_file_that_was_not_saved_makes_a_checkpoint_damaged(tmp_path: Path) -> None:
    run = Watched(tmp_path / "run", lambda run: None, stop_at=3).run
    with pytest.raises(KeyboardInterrupt):
        run.train()
    put_canaries(tmp_path / "run" / "checkpoints" / "step-00000003", tmp_path / "song")
    told: list[str] = []
    Run(run_config(tmp_path / "run", logging_steps=1), text=TEXT, say=told.append).train()
    assert told[0].startswith("step 3 is damaged: optimizer.bin: is not in the manifest")
    assert not (tmp_path / "song").exists()


def test_init_from_unpickles_nothing(tmp_path: Path) -> None:
    """With a model in safetensors the pickles are not looked at."""
    run = Run(run_config(tmp_path / "run", steps=1), text=TEXT)
    run.train()
    put_canaries(tmp_path / "run", tmp_path / "song")
    config = run_config(tmp_path / "other", steps=1)
    config.init_from = str(tmp_path / "run")
    assert same(Run(config, text=TEXT).model.state_dict(), run.model.state_dict())
    assert not (tmp_path / "song").exists()


# what runs code that a file holds; and what hands objects over by pickle between a run's own processes
_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
_CALLS = {
    "eval",
    "exec",
    "compile",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "np.load",
}
_OPTIONS = {"weights_only": False, "trust_remote_code": True, "allow_pickle": True}
_ALLOWED: dict[str, str] = {}  # "file: finding": reason


def findings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] in _MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in _MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            if (called := ast.unparse(node.func)) in _CALLS:
                yield called
            for option in node.keywords:
                if option.arg in _OPTIONS and ast.unparse(option.value) != str(not _OPTIONS[option.arg]):
                    yield option.arg


def test_no_code_of_ours_unpickles_or_runs_what_it_reads(tmp_path: Path) -> None:
    root = Path(trailmark.__file__).parent
    found = {f"{path.relative_to(root)}: {what}" for path in root.rglob("*.py") for what in findings(path)}
    assert found == set(_ALLOWED)
    (tmp_path / "bad.py").write_text(
        "import pickle\nfrom marshal import loads\ntorch.load(x, weights_only=False)\nf(trust_remote_code=flag)\n"
        "eval(x)\nmodel.eval()\nyaml.load(x)\nyaml.safe_load(x)\nf(trust_remote_code=False)\n"
    )
    assert sorted(findings(tmp_path / "bad.py")) == [
        "eval", "marshal", "pickle", "torch.load", "trust_remote_code", "weights_only", "yaml.load",
    ]  # fmt: skip
