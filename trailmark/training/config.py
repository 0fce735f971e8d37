"""Training configurations: YAML with ``key=value`` overrides; an unknown key is an error with a suggestion."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from trailmark.data.needles.curriculum_texts import CURRICULUM
from trailmark.models import TrailmarkConfig
from trailmark.models.fields import build_config, saved_fields
from trailmark.settings import from_mapping, parse_override, read_yaml, setting
from trailmark.training.checks import check

Precision = Literal["float32", "bfloat16", "float64"]
Train = Literal["retriever", "additions", "additions_and_upper", "all"]
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
    needle_share: float = setting(
        0.0,
        "text: share of the samples that hold facts and questions about them, in words that no evaluation has "
        "(docs/data.md).",
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
    answer_weight: float = setting(
        1.0,
        "niah, summarization, and text with needle_share: weight of the loss on the tokens of an answer or a summary "
        "(others weigh 1), which are few of a text's.",
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
    packed: bool = setting(
        False,
        "needles: two levels stand before first_level, texts of needles side by side and as many questions, for "
        "models that compare keys token by token (docs/landmark.md); one that sees too few tokens never leaves them.",
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
    precision: Literal["auto", "float32", "bfloat16", "float64"] = setting(
        "float32",
        "bfloat16: mixed, the weights stay float32. auto: bfloat16 where the GPU, or else the processor, multiplies it "
        "in hardware, float32 elsewhere; a run goes on in what it began with. float64: all of it, for comparisons.",
    )
    train: Train = setting(
        "all",
        "Which weights are trained; the others stay as init_from has them. retriever: those that score chunks, for "
        "layers that read already (distil.fit_steps). additions: those that a plain language "
        "model does not have (a DRT's landmark, encoder, retrievers and what reads the chunks). "
        "additions_and_upper: and the layers that read, with all above them.",
    )
    addition_learning_rate_factor: float = setting(
        1.0,
        "The learning rates of the additions, as a multiple of those of the rest.",
        least=0,
        most=MOST_RATE,
    )
    retriever_learning_rate_factor: float = setting(
        1.0,
        "The learning rates of what scores chunks, as a multiple of those of the other additions.",
        least=0,
        most=MOST_RATE,
    )
    lora_rank: int = setting(
        0,
        "Rank of the adapters (LoRA) that the matrices of layers get which are not trained themselves; 0: none. The "
        "weights that are saved have them merged. Needs the package peft.",
        least=0,
        most=MOST_CHUNK,
    )
    lora_alpha: int = setting(
        16, "What an adapter adds is multiplied by lora_alpha / lora_rank.", least=0, most=MOST_NORM
    )
    loss_positions: float = setting(
        1.0,
        "text: share of each sample's tokens, drawn anew in each step, after which the next one is predicted, at least "
        "one; the loss of the others is estimated by theirs.",
        least=0,
        most=1,
    )
    loss_slab: int | None = setting(
        None,
        "text: tokens whose logits are there at a time, computed again in the backward: for long samples and large "
        "vocabularies. None: those of a whole micro-batch.",
        least=1,
        most=MOST_TOKENS,
    )
    optimizer: Literal["muon", "adamw"] = setting("muon", "muon (for matrices; AdamW for the rest) or adamw.")
    learning_rate: float = setting(3e-3, "Learning rate of AdamW.", least=0, most=MOST_RATE)
    matrix_learning_rate: float = setting(0.0035, "Learning rate of Muon.", least=0, most=MOST_RATE)
    adam_beta1: float = setting(0.9, "AdamW's decay of the mean of gradients.", least=0, below=1)
    adam_beta2: float = setting(0.95, "AdamW's decay of the mean of squared gradients.", least=0, below=1)
    adam_epsilon: float = setting(1e-8, "AdamW's epsilon, which is added to the root.", least=0, most=1)
    weight_decay: float = setting(
        0.0,
        "Decoupled weight decay of matrices (but see decay_embeddings); of vectors too with decay_vectors.",
        least=0,
        most=MOST_WEIGHT,
    )
    decay_vectors: bool = setting(
        False,
        "Whether norms and other vectors decay too, as in the published code of arXiv 2410.01651.",
    )
    decay_embeddings: bool = setting(
        True,
        "Whether the embedding and the output projection decay as other matrices do.",
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
    context_parallel: int = setting(
        1,
        "Processes that share each text, each with a stretch of it, exactly: for texts too long for one device "
        "(drt and sliding_window, data.task text).",
        least=1,
        most=MOST_CHUNK,
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

    @property
    def computes_in(self) -> Precision:
        """The precision; of a run, which has settled what ``auto`` is (:mod:`trailmark.training.precision`)."""
        assert self.precision != "auto"
        return self.precision


# settings of ``training`` that change no weight: a run may go on with others
FREE_TO_CHANGE = (
    "micro_batch_size",
    "gradient_checkpointing",
    "parallel",
    "context_parallel",
    "loss_slab",
    "save_steps",
    "keep_checkpoints",
    "logging_steps",
    "report_to",
    "eval_steps",
    "eval_windows",
    "skip_nonfinite",
)


@dataclass
class DistilConfig:
    """What to learn from a teacher, beside the text."""

    model: str | None = setting(
        None,
        "A folder (or a name on the hub) with a causal language model of the same tokenizer that reads the same texts, "
        "such as the base with full attention; None: no teacher.",
    )
    weight: float = setting(
        1.0,
        "Weight of the divergence KL(teacher, model) of the next token, beside the text's loss.",
        least=0,
        most=MOST_WEIGHT,
    )
    retrieval_weight: float = setting(
        0.0,
        "Weight of the divergence of the retrieval's scores from the attention that the teacher's upper layers put on "
        "each past chunk; it falls to 0 over the run.",
        least=0,
        most=MOST_WEIGHT,
    )
    fit_steps: int = setting(
        0,
        "Before the first step, on the texts of so many steps: fit the memory's keys and values to those of the "
        "teacher's layers by least squares, and the retriever as fit_retriever says; 0: the memory is learned alone.",
        least=0,
    )
    fit_retriever: Literal["teacher", "text", "nothing"] = setting(
        "teacher",
        "What fit_steps set the retriever to: teacher: what the teacher's layers look at; text: chunks that are like "
        "the one that comes next, in which no teacher has a part; nothing: it stays as it is. After the latter two it "
        "learns from the text's loss alone, in layers that read.",
    )
    retrieval_from: Literal["reading", "asking"] = setting(
        "reading",
        "Whose attention that is: of the chunk that reads, or of the chunk before it, at whose end it is asked.",
    )

    @property
    def teaches(self) -> bool:
        """Whether a teacher has a part in the loss of a step."""
        return self.model is not None and bool(self.weight or self.retrieval_weight)


@dataclass
class RunConfig:
    """One training run."""

    output: str = "runs/model"
    model: dict[str, Any] = field(default_factory=dict)
    """``architecture``, the short name of one that is registered, and the fields of its config class.

    Without an architecture, and with ``init_from``: the fields that differ from those of the model there.
    """
    init_from: str | None = None
    """A folder with a trained or converted model whose weights to begin with; nothing of its training is taken."""
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    distil: DistilConfig = field(default_factory=DistilConfig)

    def model_config(self, vocab_size: int | None = None) -> TrailmarkConfig:
        """The model's configuration; a ValueError for unknown fields and sizes that do not fit."""
        fields = self.model
        if self.init_from is not None and "architecture" not in fields:
            fields = saved_fields(self.init_from) | fields
        known = {} if vocab_size is None or "vocab_size" in fields else {"vocab_size": vocab_size}
        return build_config(fields, known)

    def rows_per_step(self) -> int:
        """Samples of the global batch, of all tasks whose samples are ``context_length`` tokens.

        Raises:
            ValueError: a global batch of no whole samples.
        """
        tokens, length = self.training.tokens_per_step, self.training.context_length
        if tokens < length or tokens % length:
            near = max(1, round(tokens / length)) * length
            raise ValueError(
                f"training.tokens_per_step: expected whole samples of context_length = {length} tokens, got {tokens}. "
                f"{near} would be {near // length}."
            )
        return tokens // length

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False)


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file and apply ``a.b=value`` overrides, the last one of a key; ``~`` in paths is the user's home.

    Raises:
        ValueError: a missing file, broken YAML, an unknown key (with the nearest valid one), a wrong type, a list that
            is given in parts.
    """
    try:
        raw = read_yaml(Path(path), "config")
    except ValueError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            lie = "Those that come with trailmark lie in the folder configs/ of its repository."
            raise ValueError(f"{error} {lie}") from error.__cause__
        raise
    given = set()
    for override in overrides:
        key, parsed = parse_override("override", override)
        if key in given and key in ("data.paths", "data.validation"):
            raise ValueError(f"{key}: expected one list, it is given twice. Write {key}='[first, second]'.")
        given.add(key)
        target = raw
        *parents, last = key.split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ValueError(f"{key}: {parent} is no section.")
        target[last] = parsed
    config = _at_home(from_mapping(RunConfig, raw))
    check(config)
    return config


def _at_home(config: RunConfig) -> RunConfig:
    """The configuration with ``~`` of its paths spelled out, which a shell does not do within key=value."""

    def spelled(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(spelled, value))
        return os.path.expanduser(value) if isinstance(value, str) else value

    def of(section: Any, *names: str) -> Any:
        return dataclasses.replace(section, **{name: spelled(getattr(section, name)) for name in names})

    data = of(config.data, "paths", "validation", "tokenizer", "neighbours")
    config = dataclasses.replace(config, data=data, distil=of(config.distil, "model"))
    return cast(RunConfig, of(config, "output", "init_from"))
