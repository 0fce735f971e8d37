"""A run's output folder: whose it is, what a killed process left there, what a full disk says."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from trailmark import __version__, untrusted
from trailmark.models.card.files import README
from trailmark.settings import Settings, from_file, from_mapping, setting
from trailmark.training import checkpoints
from trailmark.training.config import FREE_TO_CHANGE, RunConfig
from trailmark.training.final_model import MODEL_MANIFEST
from trailmark.training.guards import REPORT_FILE
from trailmark.training.processes import world_size
from trailmark.untrusted import read_json, read_yaml

HISTORY_FILE = "history.json"  # written at the end: the run is complete
RUN_FILE = "run.yaml"
STATE_FILE = "run.json"  # of a checkpoint
SAVING = ".saving-"
# beginnings of names that no file keeps
_LEFTOVERS = (
    SAVING,
    *(f".{name}." for name in (RUN_FILE, HISTORY_FILE, REPORT_FILE, README, MODEL_MANIFEST)),
)


@dataclass(frozen=True)
class History(Settings):
    """What ``history.json`` must hold to stand for a finished training."""

    steps: list[dict[str, Any]]
    seconds: float = setting(least=0)
    tokens_per_second: float = setting(least=0)
    data: str | None = None


def read_history(output: Path) -> History:
    """The history of a finished training.

    Raises:
        ValueError: there is none, or it was changed.
    """
    path = output / HISTORY_FILE
    try:
        return from_file(History, read_json(path, "output", finite=False))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"output: {str(path)!r} is no history of a finished training ({error}) Remove the folder to train anew."
        ) from error


def holds_run(output: Path, config: RunConfig) -> bool:
    """Whether a folder says that it belongs to this very run."""
    try:
        other = read_yaml(output / RUN_FILE, "output")
    except (OSError, ValueError):
        return False
    if not isinstance(other, dict):
        return False
    own = yaml.safe_load(config.to_yaml())
    other = yaml.safe_load(RunConfig().to_yaml()) | other  # settings that are newer than the folder
    for section in ("data", "training"):
        if isinstance(other[section], dict):
            other[section] = vars(getattr(RunConfig(), section)) | other[section]
    return _decisive(own) == _decisive(other)


def remove_leftovers(output: Path) -> None:
    """Remove what processes that were killed left half-written beside the model."""
    for path in output.glob(".*"):
        if path.name.startswith(_LEFTOVERS):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


# --- the state of a run, in a checkpoint -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Curriculum(Settings):
    starts: list[int] = setting()
    samples: list[int] = setting()
    average: float = setting()


@dataclass(frozen=True)
class _Guard(Settings):
    skipped: list[int] = setting()


@dataclass(frozen=True)
class _State(Settings):
    """What :meth:`trailmark.training.running.RunningState.state` gives, and the text's fingerprint."""

    step: int = setting(least=0)
    data: str = setting()
    curriculum: _Curriculum = setting()
    history: list[dict[str, Any]] = setting()
    averages: dict[str, Any] = setting()
    measured: dict[str, Any] = setting()
    seconds: float = setting(least=0)
    tokens: int = setting(least=0)
    guard: _Guard = setting()

    def __post_init__(self) -> None:
        super().__post_init__()
        for numbers in (
            *self.history,
            self.averages,
            self.measured,
        ):  # of a loss that was none they may be NaN
            for name, value in numbers.items():
                if not isinstance(value, int | float):
                    raise ValueError(f"{name}: expected a number, got {untrusted.brief(value)}.")
        if any("step" not in line for line in self.history):
            raise ValueError("history: expected a step in each line, one has none.")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What a run knew at a checkpoint.

    Raises:
        ValueError: another file, or of another step than the checkpoint's trainer.
    """
    place = f"output: {str(checkpoint / STATE_FILE)!r}"
    try:
        raw = untrusted.read_json(checkpoint / STATE_FILE, "output", finite=False)
        state = from_mapping(_State, raw)
        trainer = untrusted.read_json(checkpoint / "trainer_state.json", "output", finite=False)
        at = trainer.get("global_step") if isinstance(trainer, dict) else None
        if at != state.step:
            raise ValueError(f"expected the trainer at step {state.step}, got {untrusted.brief(at)}.")
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(
            f"{place} is not what a training wrote ({str(error).rstrip('.')}). Remove that checkpoint to go on from "
            "one before it."
        ) from error
    return asdict(state)


def saving(folder: Path) -> AbstractContextManager[None]:
    """A block whose errors of files become a ValueError; each library has an error of its own for a full disk."""
    return checkpoints.telling_of_files(folder, lambda: "what was saved before is whole")


def config_hash(config: RunConfig) -> str:
    """The SHA-256 of what decides a run's weights."""
    return hashlib.sha256(json.dumps(_decisive(config.to_dict()), sort_keys=True).encode()).hexdigest()


def _decisive(run: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that decides weights: a folder may be moved, some settings may change."""
    training = run["training"]
    if isinstance(training, dict):
        training = {key: value for key, value in training.items() if key not in FREE_TO_CHANGE}
    return run | {"output": "", "training": training}


def environment() -> dict[str, Any]:
    """What a checkpoint was made with."""
    return {
        "trailmark": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "processes": world_size(),
    }
