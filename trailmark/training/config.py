"""Training configurations: YAML with ``key=value`` overrides; an unknown key is an error with a suggestion."""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from huggingface_hub.errors import StrictDataclassError

from trailmark.data.needles import CURRICULUM
from trailmark.models import MODELS, LandmarkConfig, TrailmarkConfig
from trailmark.models.fields import coerce, field_types, nearest, parse_override

# values of training.* that have bounds; the seed's are numpy's
_RANGES = (
    ("learning_rate", 0, math.inf),
    ("matrix_learning_rate", 0, math.inf),
    ("weight_decay", 0, math.inf),
    ("warmup_steps", 0, math.inf),
    ("constant_fraction", 0, 1),
    ("final_fraction", 0, 1),
    ("max_grad_norm", 0, math.inf),
    ("seed", 0, 2**32 - 1),
)

ARCHITECTURES = {name.removeprefix("trailmark_"): model for name, model in MODELS.items()}


@dataclass
class DataConfig:
    """What to train on."""

    task: Literal["text", "needles"] = "text"
    """text: random slices, loss on every token. needles: needles hidden in the text, questions about them."""
    paths: list[str] | None = None
    """Files and folders; None: the Python standard library's sources."""
    tokenizer: str = "bytes"
    """"bytes", a folder, or a hub name."""
    chunk_size: int = 32
    """needles: tokens per chunk of the task; a DRT's own chunk_size must be the same."""
    filler_weight: float = 0.0
    """needles: weight of the loss on all tokens that are no answer (a digit weighs 1)."""
    first_digit_weight: float = 3.0
    """needles: weight of each answer's first digit, the only one that trains the retriever."""
    early_landmarks: float = 0.1
    """text: share of chunks that are closed early, so that a prompt may end anywhere; a model without chunks has none.
    (needles: the curriculum's levels say how many questions are early.)"""
    first_level: int = 0
    """needles: the level of the curriculum to begin with; a model that cannot retrieve never leaves it."""
    level_accuracy: float = 0.9
    """needles: the next level begins when this share of first digits is right, as a moving average."""


@dataclass
class TrainingConfig:
    """How to train."""

    steps: int = 1000
    tokens_per_step: int = 4096
    sequence_length: int = 1024
    """text: tokens of one sample. (needles: the curriculum's chunks; at most 32 of them.)"""
    optimizer: Literal["muon", "adamw"] = "muon"
    learning_rate: float = 3e-3
    """of AdamW."""
    matrix_learning_rate: float = 0.0035
    """of Muon."""
    weight_decay: float = 0.0
    warmup_steps: int = 30
    constant_fraction: float = 0.5
    """The learning rate is constant to this part of the run, then falls linearly to final_fraction."""
    final_fraction: float = 0.03
    max_grad_norm: float = 1.0
    save_steps: int = 200
    gradient_checkpointing: bool = False
    seed: int = 0


@dataclass
class RunConfig:
    """One training run."""

    output: str = "runs/model"
    model: dict[str, Any] = field(default_factory=dict)
    """``architecture`` (drt, landmark, sliding_window) and the fields of its config class."""
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def model_config(self, vocab_size: int | None = None) -> TrailmarkConfig:
        """The model's configuration; a ValueError for unknown fields and sizes that do not fit."""
        fields = dict(self.model)
        name = fields.pop("architecture", "drt")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise ValueError(
                f"model.architecture: expected {' or '.join(ARCHITECTURES)}, got {name!r}."
                + nearest(name, ARCHITECTURES)
            )
        cls = ARCHITECTURES[name].config_class
        hints = field_types(cls)
        for key in fields:
            if key not in hints:
                raise ValueError(f"model.{key}: unknown field of {name}.{nearest(key, hints)}")
            fields[key] = coerce(f"model.{key}", fields[key], hints[key])
        if vocab_size is not None:
            fields.setdefault("vocab_size", vocab_size)
        try:
            return cls(**fields)
        except StrictDataclassError as error:
            raise ValueError(f"model: {_innermost(error)}") from error

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False)


def load_run_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> RunConfig:
    """Read a YAML file and apply ``a.b=value`` overrides (values are YAML).

    Raises:
        ValueError: a missing file, broken YAML, an unknown key (with the nearest valid one), a wrong type.
    """
    path = Path(path)
    try:
        raw = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"config: cannot read {str(path)!r}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"config: {str(path)!r} is no YAML file: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"config: expected a mapping in {str(path)!r}, got {type(raw).__name__}.")
    for override in overrides:
        key, parsed = parse_override("override", override)
        target = raw
        *parents, last = key.split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ValueError(f"{key}: {parent} is no section.")
        target[last] = parsed
    config: RunConfig = _build(RunConfig, raw, "")
    _check(config)
    return config


def _build(cls: Any, raw: Any, prefix: str) -> Any:
    if not isinstance(raw, dict):
        raise ValueError(f"{prefix or 'config'}: expected a section with keys, got {raw!r}.")
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in raw.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if key not in hints:
            raise ValueError(f"{name}: unknown key.{nearest(key, hints)}")
        values[key] = (
            _build(hints[key], value, name)
            if dataclasses.is_dataclass(hints[key])
            else coerce(name, value, hints[key])
        )
    return cls(**values)


def _check(config: RunConfig) -> None:
    training = config.training
    for name in ("steps", "tokens_per_step", "sequence_length", "save_steps"):
        if getattr(training, name) < 1:
            raise ValueError(f"training.{name}: expected at least 1, got {getattr(training, name)}.")
    for name, lowest, highest in _RANGES:
        value = getattr(training, name)
        if not lowest <= value <= highest:
            upto = f" to {highest}" if highest < math.inf else " or more"
            raise ValueError(f"training.{name}: expected {lowest}{upto}, got {value}.")
    if not 0 <= config.data.early_landmarks <= 1:
        raise ValueError(
            f"data.early_landmarks: expected a share from 0 to 1, got {config.data.early_landmarks}."
        )
    if not 0 <= config.data.level_accuracy < 1:
        raise ValueError(
            f"data.level_accuracy: expected a share from 0 to below 1, got {config.data.level_accuracy}."
        )
    if config.data.paths == []:
        raise ValueError(
            "data.paths: expected files or folders, got an empty list. Name some, or null for the Python "
            "standard library's sources."
        )
    if config.data.task == "text" and training.tokens_per_step < training.sequence_length:
        raise ValueError(
            f"training.tokens_per_step: expected at least sequence_length = {training.sequence_length}, "
            f"got {training.tokens_per_step}."
        )
    if not 0 <= config.data.first_level < len(CURRICULUM):
        raise ValueError(
            f"data.first_level: expected 0 to {len(CURRICULUM) - 1}, got {config.data.first_level}."
        )
    model = config.model_config()
    chunk_size = getattr(model, "chunk_size", None)
    if config.data.task == "needles" and chunk_size is not None and chunk_size != config.data.chunk_size:
        raise ValueError(
            f"data.chunk_size: expected the model's chunk_size {chunk_size}, got {config.data.chunk_size}: "
            "a question's landmark must fall right after it."
        )
    if isinstance(model, LandmarkConfig):
        _check_landmark(config, model)


def _check_landmark(config: RunConfig, model: LandmarkConfig) -> None:
    """Positions of a training text, and where its chunks begin."""
    S, most = model.chunk_size, model.max_position_embeddings
    if config.data.task == "needles":
        if model.landmark_phase != "fixed":
            raise ValueError(
                f"model.landmark_phase: expected 'fixed' with data.task needles, got {model.landmark_phase!r}: the "
                "task says where chunks begin."
            )
        if (longest := CURRICULUM[-1].chunks * (S + 1)) > most:
            raise ValueError(
                f"model.max_position_embeddings: expected at least the {longest} positions of "
                f"{CURRICULUM[-1].chunks} chunks, got {most}."
            )
    elif (length := config.training.sequence_length) + length // S > most:
        raise ValueError(
            f"training.sequence_length: expected at most {most - most // (S + 1)} tokens, which have {most} positions "
            f"with their landmarks (model.max_position_embeddings), got {length}."
        )


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[-1].strip()
