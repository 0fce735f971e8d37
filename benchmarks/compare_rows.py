"""The rows of benchmarks/compare.py: which configuration each model is, for text and for needles.

And the row of arXiv 2410.01651, Table 1, that it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from common import CONFIGS

from tests.wheels import minilm
from trailmark.data.needles.curriculum_texts import Level
from trailmark.training.config import RunConfig, load_run_config
from trailmark.training.run import Run


@dataclass(frozen=True)
class Paper:
    """Table 1 of arXiv 2410.01651, 128M, trained at 16K: time of training, perplexity of PG19's test split; and Table
    2: single NIAH, in percent. None: not in the table."""

    time: float | None = None
    at_2k: float | None = None
    at_16k: float | None = None
    needles_16k: float | None = None
    needles_64k: float | None = None


@dataclass(frozen=True)
class Row:
    """One model. ``text``, ``needles``: a file of configs/ and changes of it; None: not measured there."""

    text: tuple[str, ...] | None
    needles: tuple[str, ...] | None
    paper: Paper = Paper()
    cost_only: bool = False
    needle_steps: int = 1  # times those of the others


# --- needles: byte models of the demo's width, three layers so that two groups can retrieve ------------------

_WINDOW = ("needle-window", "data.first_level=0")
_DRT = ("needle-drt", "model.num_hidden_layers=3", "model.num_lower_layers=1", "model.num_retrieved_chunks=4")
_LANDMARK = ("needle-landmark", "data.packed=false")
_RPT = (
    *_WINDOW, "model.architecture=rpt", "model.num_lower_layers=1", "model.num_encoder_layers=1", "model.chunk_size=32",
    "model.num_retrieved_chunks=4", "model.retriever=encoder",
)  # fmt: skip
_LAPTOP_DRT = ("laptop-drt-x1",)
_LAPTOP_HILS = ("laptop-hils", "model.rope_scaling.original_max_position_embeddings=1024")  # trained so far
_HILS = ("needle-hils",)
# nothing that chooses is learned
_MOBA = ("model.chunk_score=mean", "model.chunk_weights=keys")
_SPARSE = ("model.chunk_score=mass", "model.chunk_weights=keys")
_HASH = "model.embedder=hash"
_MINILM = "model.embedder=MINILM"  # the folder is filled in, so that no path stands in a record

ROWS = {
    "Base": Row(("laptop-base-128",), _WINDOW, paper=Paper(1.0, 14.10, 13.68)),
    "Base, wider window": Row(
        ("laptop-base-192",),
        (*_WINDOW, "model.sliding_window=118"),
        Paper(1.03, 13.96, 13.49),
    ),
    "Base, more layers": Row(
        ("laptop-base-plus1-153",),
        (*_WINDOW, "model.num_hidden_layers=4", "model.intermediate_size=232", "model.sliding_window=89"),
        Paper(1.15, 13.92, 13.37, 3.89, 0.0),
    ),
    "full attention": Row(
        ("laptop-full-attention",),
        # with fast turns alone no place is told from one a few turns away
        (*_WINDOW, "model.sliding_window=null", "model.rope_theta=10000.0"),
    ),
    "RPT, hash encoder": Row(
        ("laptop-rpt",),
        (*_RPT, _HASH),
        paper=Paper(2.5, 13.92, 13.52, 4.24, 2.86),
    ),
    "RPT, MiniLM": Row(("laptop-rpt", _MINILM), (*_RPT, _MINILM)),
    "Landmark": Row(
        ("laptop-landmark",),
        _LANDMARK,
        Paper(1.5, 13.40, 13.21, 97.88, 0.0),
    ),
    "Landmark, twice the steps": Row(None, _LANDMARK, needle_steps=2),
    "Block-Recurrent": Row(
        ("laptop-block-recurrent",),
        (*_WINDOW, "model.architecture=block_recurrent", "model.sliding_window=48",
         "model.block_size=32"),
        Paper(2.0, 15.00, 14.60, 6.01, 4.29),
    ),
    "DRT x1": Row(_LAPTOP_DRT, _DRT, paper=Paper(1.22, 13.78, 13.21, 98.59, 100.0)),
    "DRT x2": Row(
        ("laptop-drt-x2",),
        (*_DRT, "model.num_retrieval_groups=2"),
        paper=Paper(1.24, 13.69, 13.18, 99.65, 100.0),
    ),
    "HiLS": Row(_LAPTOP_HILS, _HILS),
    "HSA": Row(
        ("laptop-hsa",),
        ("needle-hsa", "model.num_hidden_layers=3", "model.num_lower_layers=1", "model.num_retrieved_chunks=4"),
    ),
    "MoBA": Row(
        (*_LAPTOP_HILS, *_MOBA, "model.calibration_rank=0"),
        (*_HILS, *_MOBA, "model.summary_query=landmark", "model.summary_tokens=null"),
    ),
    "Block-sparse": Row(
        (*_LAPTOP_HILS, *_SPARSE, "model.calibration_rank=0"),
        (*_HILS, *_SPARSE, "model.summary_query=landmark", "model.summary_tokens=null"),
    ),
}  # fmt: skip
_ABLATIONS: dict[str, tuple[tuple[str, ...], Paper]] = {
    "without noise": (("model.retrieval_noise=false",), Paper(1.22, None, 13.46)),
    "random retriever": (("model.retriever=random",), Paper(1.22, None, 13.67)),
    "hash encoder": (("model.retriever=encoder", _HASH), Paper(2.5, None, 13.69)),
    "MiniLM": (("model.retriever=encoder", _MINILM), Paper()),
    "added to the residual": (("model.residual_gca=true",), Paper()),
    "without projections": (("model.retrieval_projections=false",), Paper()),
    "visible chunks excluded": (("model.exclude_visible_chunks=true",), Paper()),
}
for _name, (_changes, _paper) in _ABLATIONS.items():
    ROWS[f"DRT x1, {_name}"] = Row((*_LAPTOP_DRT, *_changes), (*_DRT, *_changes), paper=_paper)
ROWS["DRT x1, naive GCA"] = Row(
    (*_LAPTOP_DRT, "model.gca_implementation=reference"),
    None,
    paper=Paper(1.45),
    cost_only=True,
)

# what is measured first, if not all is
PRIORITY = ("Base", "DRT x1", "DRT x2", "Landmark", "Base, more layers", "Base, wider window", "full attention",
            "RPT, hash encoder", "Block-Recurrent")  # fmt: skip
SEEDED = ("Base", "Landmark", "DRT x1", "DRT x2")
SEEDS = (0, 1, 2)


def folder_name(row: str) -> str:
    """Of a row's trainings."""
    return "".join(c if c.isalnum() else "-" for c in row.lower().replace(", ", "-"))


def jobs(part: str, names: Sequence[str] | None, seeds: Sequence[int]) -> list[tuple[str, int]]:
    """(row, seed) of "text" or "needles" by their weight: every row once, then more seeds of those in SEEDED.

    Rows that were named are run with all ``seeds``.
    """
    ordered = [*PRIORITY, *(name for name in ROWS if name not in PRIORITY)]
    ordered = [name for name in ordered if measured(part, name) and (names is None or name in names)]
    first = [(name, seeds[0]) for name in ordered]
    more = ordered if names is not None else [name for name in ordered if name in SEEDED]
    return first + [(name, seed) for seed in seeds[1:] for name in more]


def measured(part: str, name: str) -> bool:
    """Whether a row has a part: "text", "needles" or "cost"."""
    row = ROWS[name]
    if part == "needles":
        return row.needles is not None and _MINILM not in row.needles  # random letters say nothing to it
    return row.text is not None and not (part == "text" and row.cost_only)


def times(part: str, name: str) -> int:
    """How often a row takes the steps of the others."""
    return ROWS[name].needle_steps if part == "needles" else 1


# --- sizes ---------------------------------------------------------------------------------------------------

TEXT_STEPS, NEEDLE_STEPS, TOKENS_PER_STEP = 200, 500, 4096
CONTEXT_LENGTH = 1024  # of text; Landmark Attention's is its own
VOCABULARY = 4096  # of text
QUESTIONS = 200, 100  # of each length; of models that read a haystack anew for each question
FACTORS, NEEDLE_FACTORS = (1, 4, 16), (1, 4, 16, 64)  # of the training length: text, needles
CHUNK_SIZE, NEEDLE_LENGTH = 32, 1024
FULL_UP_TO = 16  # training lengths: with full attention a single question at 64 takes minutes on a CPU


def text_config(name: str, seed: int, changes: Sequence[str]) -> RunConfig:
    """Every row trains on as many tokens a step, in whole texts of its own training length."""
    row = ROWS[name]
    assert row.text is not None
    file, *own = row.text
    path = CONFIGS / f"{file}.yaml"
    has = yaml.safe_load(path.read_text())["model"]
    if has["architecture"] != "landmark":
        own = [f"training.context_length={CONTEXT_LENGTH}", *own]
    overrides = [*_filled_in(own), f"training.seed={seed}", *changes]
    length = int(_setting(path, overrides, "context_length"))
    batch = [f"training.tokens_per_step={TOKENS_PER_STEP}", *changes]
    asked = int(_setting(path, batch, "tokens_per_step"))
    tokens = max(1, round(asked / length)) * length
    return load_run_config(path, [*overrides, f"training.tokens_per_step={tokens}"])


def _filled_in(changes: Sequence[str]) -> list[str]:
    """With the folder of the encoder."""
    return [f"model.embedder=transformers:{minilm()}" if change == _MINILM else change for change in changes]


def _setting(path: Path, overrides: Sequence[str], key: str) -> Any:
    """The last override of a setting of the training, else the file's."""
    found = yaml.safe_load(path.read_text())["training"].get(key)
    for override in overrides:
        name, _, value = override.partition("=")
        if name == f"training.{key}":
            found = yaml.safe_load(value)
    return found


def needle_config(name: str, seed: int, changes: Sequence[str]) -> RunConfig:
    """Byte models of the demo's size, each with its own configuration's optimizer."""
    needles = ROWS[name].needles
    assert needles is not None
    file, *own = needles
    settings = ["training.constant_fraction=0.5", f"training.tokens_per_step={TOKENS_PER_STEP}"]
    overrides = [*_filled_in(own), *settings, f"training.seed={seed}", *changes]
    return load_run_config(CONFIGS / f"{file}.yaml", overrides)


# The curriculum's levels for a single needle, each for a share of the steps and not until some accuracy: all rows see
# the same texts. First blank texts full of needles, where keys are learnt; then text with fewer of them, and decoys.
LEVELS = (
    (0.4, Level(8, 1.0, 1.0, 0.0)),
    (0.6, Level(32, 0.2, 0.7, 0.0, 0.4, 0.5, 0.5)),
)


def fix_levels(run: Run) -> None:
    """The curriculum goes on by the step alone."""
    curriculum, settings = run.curriculum, run.config.training
    curriculum.levels = tuple(level for _, level in LEVELS)
    shares = [share for share, _ in LEVELS]
    curriculum.starts = [round(sum(shares[:n]) * settings.steps) for n in range(len(LEVELS))]
    samples = [0]
    for n in range(1, len(LEVELS)):
        rows = curriculum.rows(n - 1, settings.tokens_per_step, run.config.data.chunk_size)
        samples.append(samples[-1] + (curriculum.starts[n] - curriculum.starts[n - 1]) * rows)
    curriculum.samples = samples
