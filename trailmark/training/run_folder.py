"""A run's output folder: whose it is, what a killed process left there, what a full disk says."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from trailmark import __version__, untrusted
from trailmark.models.card.files import README
from trailmark.processes import world_size
from trailmark.settings import Settings, from_file, from_mapping, setting
from trailmark.training import checkpoints
from trailmark.training.config import FREE_TO_CHANGE, RunConfig
from trailmark.training.final_model import MODEL_MANIFEST
from trailmark.training.guards import REPORT_FILE
from trailmark.untrusted import read_json, read_yaml

HISTORY_FILE = "history.json"  # written at the end: the run is complete
RUN_FILE = "run.yaml"
STATE_FILE = "run.json"  # of a checkpoint
_TRAINER_FILE = "trainer_state.json"  # beside it
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
    return other_than(output, config) == []


def other_than(output: Path, config: RunConfig) -> list[str] | None:
    """What a folder's run has other than this one, in words; None: nothing there says what it holds."""
    try:
        other = read_yaml(output / RUN_FILE, "output")
    except (OSError, ValueError):
        return None
    if not isinstance(other, dict):
        return None
    own = yaml.safe_load(config.to_yaml())
    other = yaml.safe_load(RunConfig().to_yaml()) | other  # settings that are newer than the folder
    for section in ("data", "training", "distil"):
        if isinstance(other[section], dict):
            other[section] = vars(getattr(RunConfig(), section)) | other[section]
    there, here = _flat(_decisive(other)), _flat(_decisive(own))
    return [
        f"{name} {_told(there, name)} there, {_told(here, name)} here"
        for name in {**here, **there}
        if there.get(name, _NOTHING) != here.get(name, _NOTHING)
    ]


_NOTHING = object()


def _told(run: dict[str, Any], name: str) -> str:
    return untrusted.brief(run[name]) if name in run else "nothing"


def _flat(run: dict[str, Any]) -> dict[str, Any]:
    """Its keys as a command line has them."""
    found: dict[str, Any] = {}
    for name, value in run.items():
        found |= (
            {f"{name}.{key}": x for key, x in value.items()}
            if isinstance(value, dict) and value
            else {name: value}
        )
    return found


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


_MOST = 2**63 - 1  # "for ever", as transformers writes it


@dataclass(frozen=True)
class _Trainer(Settings):
    """What the Trainer of transformers writes, and believes when it goes on: of its types, with names that it knows."""

    global_step: int = setting(least=0, most=_MOST)
    train_batch_size: int = setting(least=1, most=_MOST)
    epoch: float | None = None
    max_steps: int = setting(0, least=0, most=_MOST)
    logging_steps: float = setting(0, least=0)
    eval_steps: float = setting(0, least=0)
    save_steps: float = setting(0, least=0)
    num_train_epochs: int = setting(0, least=0, most=_MOST)
    num_input_tokens_seen: int = setting(0, least=0, most=_MOST)
    total_flos: float = 0.0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = setting(None, least=0, most=_MOST)
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        callbacks = [values for parts in self.stateful_callbacks.values() for values in parts.values()]
        for values in (*self.log_history, self.trial_params or {}, *callbacks):
            for name, value in values.items():
                if isinstance(value, dict | list):
                    raise ValueError(f"{name}: expected one value, got {untrusted.brief(value)}.")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What a run knew at a checkpoint.

    Raises:
        ValueError: another file, or of another step than the checkpoint's trainer.
    """
    place = f"output: {str(checkpoint / STATE_FILE)!r}"
    try:
        raw = untrusted.read_json(checkpoint / STATE_FILE, "output", finite=False)
        state = from_mapping(_State, raw)
        place = f"output: {str(checkpoint / _TRAINER_FILE)!r}"
        trainer = untrusted.read_json(checkpoint / _TRAINER_FILE, "output", finite=False)
        known = from_mapping(_Trainer, trainer)
        for name, value in trainer.items():
            if isinstance(value, str) and not isinstance(
                getattr(known, name), str
            ):  # it is read again as it stands
                raise ValueError(f"{name}: expected a number, got {untrusted.brief(value)}.")
        if known.global_step != state.step:
            raise ValueError(f"expected the trainer at step {state.step}, got {known.global_step}.")
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
    """The part of a configuration that decides weights: a folder may be moved, some settings may change.

    What text there is says its fingerprint, however it is named.
    """
    training, data = run["training"], run["data"]
    if isinstance(training, dict):
        training = {key: value for key, value in training.items() if key not in FREE_TO_CHANGE}
    if isinstance(data, dict):
        data = {key: value for key, value in data.items() if key not in ("paths", "validation")}
    return run | {"output": "", "training": training, "data": data}


def environment() -> dict[str, Any]:
    """What a checkpoint was made with."""
    return {
        "trailmark": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "processes": world_size(),
    }
