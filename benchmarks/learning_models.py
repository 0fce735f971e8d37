"""The retrievers of learning.py: what each begins with, how its memory is fitted and how it learns."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pretrained_models import FOLDER, LAYERS, STEP_TOKENS, converted
from pretrained_train import corpus
from training_text import train as train_run

from trailmark.files import write_text
from trailmark.training.config import RunConfig, load_run_config

WINDOW, LENGTH, FIT_STEPS, STEPS = 256, 4096, 48, 60
# with noise: a chunk that scores a little lower is read too, so that the loss says something of it
FIELDS = (f"sliding_window={WINDOW}", *LAYERS, "num_retrieved_chunks=16")


class Way(NamedTuple):
    """How a retriever learns."""

    fit: str
    """Of ``distil.fit_retriever``: what it begins with."""
    rate: float
    """Of its training."""
    train: str = "retriever"
    """What of the model."""


WAYS = {
    "nothing": Way("nothing", 0.001),
    "text": Way("text", 0.001),
    "slowly": Way("text", 0.0002),
    "additions": Way("text", 0.0002, "additions"),
}


def fitted(begin: str, seed: int, folder: Path = FOLDER) -> Path:
    """Where the DRT lies whose memory was fitted, and whose retriever was set to what it begins with."""
    return folder / f"fitted-{WAYS[begin].fit}-{seed}"


def trained(
    begin: str, seed: int, folder: Path = FOLDER, rate: float | None = None, retriever: float | None = None
) -> Path:
    """Where what was trained lies; ``rate``: another than its way's; ``retriever``: another of what scores chunks."""
    name = at_rate(f"learning-{begin}-{seed}", rate, usual := WAYS[begin].rate)
    return folder / (name if retriever in (None, rate or usual) else f"{name}-retriever-at-{retriever}")


def at_rate(name: str, rate: float | None, usual: float) -> str:
    """The name of what was trained, with its learning rate where that is not the usual one."""
    return name if rate in (None, usual) else f"{name}-at-{rate}"


def run_config(folder: Path, seed: int, *settings: str) -> RunConfig:
    """A run on the texts of pretrained_train.py, a text a step."""
    file, base = folder / "learning.yaml", converted(folder, "sliding_window")
    write_text(file, "model: {}\n")
    return load_run_config(file, [
        f"data.paths=[{corpus(folder, base)}]", f"data.tokenizer={base}", f"training.seed={seed}",
        f"training.tokens_per_step={STEP_TOKENS}", f"training.context_length={LENGTH}",
        "training.micro_batch_size=1", "training.precision=auto",
        "training.optimizer=adamw", "training.weight_decay=0", "training.logging_steps=1", *settings,
    ])  # fmt: skip


def learn(
    begin: str,
    seed: int,
    *settings: str,
    folder: Path = FOLDER,
    rate: float | None = None,
    retriever: float | None = None,
) -> None:
    """A seed's runs: the fit, then the retriever, or all that the base lacks; rates as in :func:`trained`."""
    teacher, way, begun = converted(folder, "sliding_window"), WAYS[begin], fitted(begin, seed, folder)
    own = rate or way.rate
    fit = (
        f"output={begun}", f"init_from={converted(folder, 'drt', *FIELDS)}",
        f"distil.model={teacher}", "distil.weight=0", f"distil.fit_steps={FIT_STEPS}",
        f"distil.fit_retriever={way.fit}", "training.train=retriever", "training.steps=1",
        "training.learning_rate=0",
    )  # fmt: skip
    learned = (
        f"output={trained(begin, seed, folder, rate, retriever)}", f"init_from={begun}",
        f"training.train={way.train}", f"training.steps={STEPS}", f"training.learning_rate={own}",
        f"training.retriever_learning_rate_factor={(retriever or own) / own}",
        "training.warmup_steps=8", "training.save_steps=15", *settings,
    )  # fmt: skip
    for run_of in (fit, learned):
        train_run(run_config(folder, seed, *run_of))
