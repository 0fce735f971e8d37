"""Training configurations: YAML with ``key=value`` overrides; an unknown key is an error with a suggestion."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from trailmark.data.needles.curriculum_texts import CURRICULUM
from trailmark.models import TrailmarkConfig, architectures_with, short_name
from trailmark.models.fields import build_config
from trailmark.settings import expect_bounds, from_mapping, parse_override, read_yaml, setting

# beyond these nothing trains, and a machine's numbers end
MOST_RATE, MOST_WEIGHT, MOST_NORM = 1000, 1_000_000, 1_000_000_000
MOST_STEPS, MOST_TOKENS, MOST_ROWS, MOST_CHUNK = 10**9, 1 << 34, 1 << 20, 1 << 16


@dataclass
class DataConfig:
    """What to train on."""

    task: Literal["text", "needles", "niah", "summarization"] = setting(
        "text",
        "text: windows of the text, loss on every token. needles: the demo's, hidden in the "
        "text by a curriculum. niah: needles of one or more hops as in arXiv 2410.01651, App. "
        "D. summarization: pairs of a document and its summary.",
    )
    paths: list[str] | None = setting(
        None,
        "Files and folders of text, or one folder that trailmark prepare made; None: the Python "
        "standard library's sources. (summarization: files of pairs.)",
    )
    validation: list[str] | None = setting(
        None,
        "Like ``paths``: text whose loss is measured every ``training.eval_steps``.",
    )
    revision: str | None = setting(
        None, "Revision of prepared hub datasets; another one is refused. None: any."
    )
    tokenizer: str = setting("bytes", '"bytes", a folder, or a hub name.')
    neighbours: str | None = setting(
        None,
        "text: a folder that trailmark neighbours (for model.retriever encoder) or trailmark "
        "targets (for learned) made of this very corpus. Training windows stand on its grid "
        "then, and no embedder is asked.",
    )
    separate_documents: bool = setting(
        False,
        "text: attention and retrieval never cross from a document to the next, and chunks restart there.",
    )
    early_landmarks: float = setting(
        0.1,
        "text: share of chunks that are closed early, so that a prompt may end anywhere; a "
        "model without chunks has none. niah: above 0, a question ends at any place of a chunk. "
        "(needles: the curriculum's levels say how many do.)",
        least=0,
        most=1,
    )
    chunk_size: int = setting(
        32,
        "needles: tokens per chunk of the task; a DRT's own chunk_size must be the same. (niah: "
        "of chunkless models.)",
        least=1,
        most=MOST_CHUNK,
    )
    filler_weight: float = setting(
        0.0,
        "needles: weight of the loss on all tokens that are no answer (a digit weighs 1).",
        least=0,
        most=MOST_WEIGHT,
    )
    first_digit_weight: float = setting(
        3.0,
        "needles: weight of each answer's first digit, the only one that trains the retriever.",
        least=0,
        most=MOST_WEIGHT,
    )
    first_level: int = setting(
        0,
        "needles: the level of the curriculum to begin with; a model that cannot retrieve never leaves it.",
        least=0,
        most=len(CURRICULUM) - 1,
    )
    level_accuracy: float = setting(
        0.9,
        "needles: the next level begins when this share of first digits is right, as a moving average.",
        least=0,
        below=1,
    )
    hops: int = setting(
        1,
        "niah: needles from the question to the last part of its answer; 1: the passkey.",
        least=1,
        most=1000,
    )
    chains: int | None = setting(
        None,
        "niah: chains of needles in a text, one of which is asked for; None: one of a single "
        "hop, two of more.",
        least=1,
        most=1000,
    )
    distractors: int = setting(0, "niah: needles more that belong to no chain.", least=0, most=MOST_ROWS)
    num_landmarks: int = setting(
        1,
        "niah: landmarks between question and answer: a group sees an earlier group's finds one "
        "landmark later.",
        least=1,
        most=2,
    )


@dataclass
class TrainingConfig:
    """How to train. The batches depend on the seed and the step alone, whatever the processes and micro-batches."""

    steps: int = setting(1000, "Optimizer steps.", least=1, most=MOST_STEPS)
    tokens_per_step: int = setting(
        4096, "Tokens of the global batch, over all processes and micro-batches.", least=1, most=MOST_TOKENS
    )
    context_length: int = setting(
        1024,
        "Tokens of one sample. (needles: the curriculum's chunks; at most 32 of them.)",
        least=2,
        most=MOST_TOKENS,
    )
    micro_batch_size: int | None = setting(
        None,
        "Samples that a process takes at once; None: its whole part of the batch, without accumulation.",
        least=1,
        most=MOST_ROWS,
    )
    precision: Literal["float32", "bfloat16", "float64"] = setting(
        "float32",
        "bfloat16: mixed, the weights stay float32. float64: all of it, for comparisons.",
    )
    optimizer: Literal["muon", "adamw"] = setting("muon", "muon (for matrices; AdamW for the rest) or adamw.")
    learning_rate: float = setting(3e-3, "Learning rate of AdamW.", least=0, most=MOST_RATE)
    matrix_learning_rate: float = setting(0.0035, "Learning rate of Muon.", least=0, most=MOST_RATE)
    adam_beta1: float = setting(0.9, "AdamW's decay of the mean of gradients.", least=0, below=1)
    adam_beta2: float = setting(0.95, "AdamW's decay of the mean of squared gradients.", least=0, below=1)
    adam_epsilon: float = setting(1e-8, "AdamW's epsilon, which is added to the root.", least=0, most=1)
    weight_decay: float = setting(
        0.0,
        "Decoupled weight decay of matrices; of vectors too with decay_vectors.",
        least=0,
        most=MOST_WEIGHT,
    )
    decay_vectors: bool = setting(
        False,
        "Whether norms and other vectors decay too, as in the published code of arXiv 2410.01651.",
    )
    schedule: Literal["linear", "cosine"] = setting(
        "linear",
        "How the learning rate falls after its constant part.",
    )
    warmup_steps: int = setting(
        30, "Steps in which the learning rate rises from 0.", least=0, most=MOST_STEPS
    )
    constant_fraction: float = setting(
        0.5,
        "The learning rate is constant to this part of the run, then falls to final_fraction as "
        "``schedule`` says.",
        least=0,
        most=1,
    )
    final_fraction: float = setting(
        0.03, "The learning rate at the end, as a share of its peak.", least=0, most=1
    )
    max_grad_norm: float = setting(
        1.0, "Norm that gradients are clipped to; 0: no clipping.", least=0, most=MOST_NORM
    )
    gradient_checkpointing: bool = setting(
        False,
        "Compute activations again in the backward instead of keeping them.",
    )
    parallel: Literal["ddp", "fsdp"] = setting(
        "ddp",
        "How several processes share the work: fsdp (FSDP2) divides weights, gradients and "
        "optimizer among them.",
    )
    skip_nonfinite: int = setting(
        0,
        "Steps with a loss or gradient that is not finite that may be left out over the run; "
        "the next one stops it.",
        least=0,
        most=MOST_STEPS,
    )
    save_steps: int = setting(200, "Steps between two checkpoints.", least=1, most=MOST_STEPS)
    keep_checkpoints: int = setting(2, "How many checkpoints stay, the newest.", least=1, most=MOST_STEPS)
    logging_steps: int = setting(10, "Steps between two lines of the history.", least=1, most=MOST_STEPS)
    report_to: list[Literal["tensorboard", "trackio", "wandb"]] = field(default_factory=list)
    """By transformers' Trainer; the package has to be installed."""
    eval_steps: int | None = setting(
        None,
        "Measure on ``data.validation`` (needles: ask for some) after every so many steps; None: never.",
        least=1,
        most=MOST_STEPS,
    )
    eval_windows: int = setting(
        64, "Windows of ``context_length`` tokens to measure on.", least=1, most=MOST_STEPS
    )
    seed: int = setting(0, "Seed of weights, batches and noise.", least=0, most=2**32 - 1)


# settings of ``training`` that change no weight: a run may go on with others
FREE_TO_CHANGE = (
    "micro_batch_size",
    "gradient_checkpointing",
    "parallel",
    "save_steps",
    "keep_checkpoints",
    "logging_steps",
    "report_to",
    "eval_steps",
    "eval_windows",
    "skip_nonfinite",
)


@dataclass
class RunConfig:
    """One training run."""

    output: str = "runs/model"
    model: dict[str, Any] = field(default_factory=dict)
    """``architecture``, the short name of one that is registered, and the fields of its config class."""
    init_from: str | None = None
    """A folder with a trained model whose weights to begin with; nothing else of it is taken."""
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def model_config(self, vocab_size: int | None = None) -> TrailmarkConfig:
        """The model's configuration; a ValueError for unknown fields and sizes that do not fit."""
        known = {} if vocab_size is None or "vocab_size" in self.model else {"vocab_size": vocab_size}
        return build_config(self.model, known)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False)


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file and apply ``a.b=value`` overrides (values are YAML).

    Raises:
        ValueError: a missing file, broken YAML, an unknown key (with the nearest valid one), a wrong type.
    """
    raw = read_yaml(Path(path), "config")
    for override in overrides:
        key, parsed = parse_override("override", override)
        target = raw
        *parents, last = key.split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ValueError(f"{key}: {parent} is no section.")
        target[last] = parsed
    config = from_mapping(RunConfig, raw)
    _check(config)
    return config


def _check(config: RunConfig) -> None:
    expect_bounds(config.data, "data")
    expect_bounds(config.training, "training")
    _check_data(config)
    if config.data.task != "needles":
        rows_per_step(config)
    model = config.model_config()
    chunk_size = getattr(model, "chunk_size", None)
    if config.data.task == "needles" and chunk_size is not None and chunk_size != config.data.chunk_size:
        raise ValueError(
            f"data.chunk_size: expected the model's chunk_size {chunk_size}, got {config.data.chunk_size}: "
            "a question's landmark must fall right after it."
        )
    try:
        model.expect_trainable()
    except ValueError as error:
        raise ValueError(f"model.{error}") from error
    _check_lengths(config, model)
    _check_neighbours(config, model)


def _check_neighbours(config: RunConfig, model: TrailmarkConfig) -> None:
    """That a model whose chunks come from outside has them, and no other."""
    data, retriever = config.data, getattr(model, "retriever", None)
    if data.neighbours is None:
        if retriever == "encoder" and getattr(model, "embedder", None) is None:
            raise ValueError(
                "model.embedder: expected an embedder ('hash', 'transformers:FOLDER', ...) or a table of its "
                "neighbours (data.neighbours) with model.retriever 'encoder', got neither. trailmark neighbours makes "
                "one."
            )
        if retriever == "learned" and config.init_from is None:
            raise ValueError(
                "data.neighbours: expected a table of target scores with model.retriever 'learned', got none: its "
                "ranking learns from nothing else. trailmark targets makes one of a prepared corpus; or set "
                "model.retriever to 'encoder', or init_from to a model whose retriever is trained."
            )
        return
    if not model.needs_neighbours:
        name = short_name(model.model_type)
        own = f"{name} with model.retriever {retriever!r}" if retriever else name
        ways = (f"{kind!r} ({' or '.join(architectures_with(kind))})" for kind in ("encoder", "learned"))
        raise ValueError(
            f"data.neighbours: expected none for {own}, which finds what it reads by itself, got {data.neighbours!r}. "
            f"Leave it out, or train with model.retriever {' or '.join(ways)}."
        )
    for name, expected, why in (
        ("task", "text", "a table is one of windows of a text"),
        ("separate_documents", False, "a table's windows are one text each"),
        ("early_landmarks", 0, "a table's chunks are full"),
    ):
        if (came := getattr(data, name)) != expected:
            raise ValueError(
                f"data.{name}: expected {str(expected).lower()} with data.neighbours, got {str(came).lower()}: {why}. "
                f"Set data.{name}={str(expected).lower()}, or leave data.neighbours out."
            )


def _check_data(config: RunConfig) -> None:
    data, training = config.data, config.training
    for name in ("paths", "validation"):
        if getattr(data, name) == []:
            raise ValueError(
                f"data.{name}: expected files or folders, got an empty list. Name some, or null for "
                f"{'the Python standard library' if name == 'paths' else 'none'}."
            )
    if data.separate_documents and data.task != "text":
        raise ValueError(
            f"data.separate_documents: expected false with data.task {data.task}, whose samples are one document each."
        )
    if data.task == "summarization" and data.paths is None:
        raise ValueError(
            "data.paths: expected files of pairs (document, summary) with data.task summarization, got none. "
            "trailmark prepare xsum --pairs makes one."
        )
    if data.task == "summarization" and (data.validation is not None or training.eval_steps is not None):
        raise ValueError(
            "data.validation, training.eval_steps: expected none with data.task summarization: only text is measured "
            "on the way."
        )
    if training.eval_steps is not None and data.validation is None and data.task != "needles":
        raise ValueError(
            "data.validation: expected text to measure on every training.eval_steps, got none. Name files, or leave "
            "eval_steps out."
        )


def rows_per_step(config: RunConfig) -> int:
    """Samples of the global batch, of all tasks whose samples are ``context_length`` tokens.

    Raises:
        ValueError: a global batch of no whole samples.
    """
    tokens, length = config.training.tokens_per_step, config.training.context_length
    if tokens < length or tokens % length:
        near = max(1, round(tokens / length)) * length
        raise ValueError(
            f"training.tokens_per_step: expected whole samples of context_length = {length} tokens, got {tokens}. "
            f"{near} would be {near // length}."
        )
    return tokens // length


def _check_lengths(config: RunConfig, model: TrailmarkConfig) -> None:
    """That the model has positions for the training texts, and that chunks begin where the task needs them."""
    data, last = config.data, CURRICULUM[-1].chunks
    if data.task == "needles":
        if model.begins_texts_inside_chunks:
            raise ValueError(
                "model.landmark_phase: expected 'fixed' with data.task needles, got 'random': the task says where "
                "chunks begin."
            )
        most = model.longest_training_text()
        if most is not None and last * data.chunk_size > most:
            raise ValueError(
                f"model.max_position_embeddings: expected positions for the {last} chunks of {data.chunk_size} tokens "
                f"that the last level has, got as many as {most} tokens take."
            )
        return
    early = {"niah": data.num_landmarks + (data.early_landmarks > 0), "summarization": 1}
    most, length = model.longest_training_text(early.get(data.task, 0)), config.training.context_length
    if most is not None and length > most:
        positions = getattr(model, "max_position_embeddings", most)
        raise ValueError(
            f"training.context_length: expected at most {most} tokens, which have {positions} positions with their "
            f"landmarks (model.max_position_embeddings), got {length}."
        )
