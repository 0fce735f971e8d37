"""Real text: laptop-size models of the second paper's Table 1 trained on books, and their perplexity by length.

    TRAILMARK_DATA=... python benchmarks/training.py text [--minutes 8] [--seeds 0 1]     benchmarks/training_text.json

configs/laptop-*.yaml on TRAILMARK_DATA/books/train, all with the same tokens in the same order, by ``trailmark
prepare``'s shards of a small vocabulary that is trained on the same books. Measured on books/test, cut into stretches
of 16 training lengths: each stretch is read in windows of 1, 4 and 16 training lengths, so that every model, and every
length, meets the same text. Stopped at any time, the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from common import CONFIGS, ROOT, data_folder, expect_settings, parameters, peak_memory, showing

from trailmark.data.corpus import (
    Tokens,
    files_below,
    load_tokenizer,
    read_text,
    standard_library_texts,
    tokenize,
    tokenizer_fingerprint,
)
from trailmark.data.prepare import prepare
from trailmark.data.recipes import parse_source
from trailmark.data.shards import Corpus
from trailmark.evaluation.perplexity.run import evaluate_perplexity
from trailmark.evaluation.record import environment
from trailmark.evaluation.subject import load
from trailmark.files import read_json, write_json, write_text
from trailmark.models import TrailmarkForCausalLM
from trailmark.report.console import Progress
from trailmark.training.config import RunConfig, load_run_config
from trailmark.training.forecast import measure_speed
from trailmark.training.run import HISTORY_FILE, Run

OUTPUT = Path(__file__).with_suffix(".json")
FOLDER = ROOT / "runs" / "benchmark-training"
MODELS = {
    "window only": "laptop-base-128",
    "window only, more layers": "laptop-base-plus1-153",  # as many parameters and positions in sight as DRT
    "DRT x1": "laptop-drt-x1",
    "DRT x2": "laptop-drt-x2",
}
FACTORS = (1, 4, 16)  # of the training length
VOCABULARY = 4096
_COST_FILE = "cost.json"


# --- data --------------------------------------------------------------------------------------------------


def prepared(texts: Path, folder: Path, tokenizer: Path | str = "bytes") -> Corpus:
    """Shards of a folder's texts, made in this process: others would first import all that this one has."""
    return prepare(parse_source([str(texts)]), folder, str(tokenizer), processes=1)


def prepared_bytes(folder: Path) -> Corpus:
    """Shards of bytes for the loader: the books, or without TRAILMARK_DATA the standard library's sources."""
    if os.environ.get("TRAILMARK_DATA"):
        return prepared(data_folder("books") / "train", folder / "books-bytes")
    sources = folder / "standard-library"
    for number, text in enumerate(standard_library_texts("train")):
        write_text(sources / f"{number:04d}.txt", text)
    return prepared(sources, folder / "standard-library-bytes")


def settings_of(config: RunConfig, corpus: Corpus, tokenizer: Any) -> dict[str, Any]:
    """What models that are compared must have alike."""
    return {
        "tokens_per_step": config.training.tokens_per_step,
        "context_length": config.training.context_length,
        "vocabulary": len(tokenizer),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "corpus": corpus.fingerprint,
        "corpus_tokens": len(corpus),
    }


def trained_tokenizer(files: Sequence[Path], vocabulary: int, folder: Path) -> Path:
    """A byte-level BPE of ``vocabulary`` tokens, trained on the files' text; made once.

    A vocabulary of 50,257 would be most of a laptop-size model's work, and bytes make 2,048 tokens a page of text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").exists():
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        made.train_from_iterator(map(read_text, files), trainer)
        PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


def stretches(files: Sequence[Path], tokenizer: Any, length: int) -> list[Tokens]:
    """The text of each file in pieces of exactly ``length`` tokens, what is left of a file left out."""
    found = []
    for file in files:
        tokens = tokenize([read_text(file)], tokenizer)
        found += [tokens[n : n + length] for n in range(0, len(tokens) - length + 1, length)]
    return found


# --- training ----------------------------------------------------------------------------------------------


def model_folder(folder: Path, name: str, seed: int) -> Path:
    return folder / f"{MODELS[name]}-seed-{seed}"


def run_config(name: str, seed: int, steps: int, folder: Path, changes: Sequence[str] = ()) -> RunConfig:
    return load_run_config(
        CONFIGS / f"{MODELS[name]}.yaml",
        [
            f"output={model_folder(folder, name, seed)}",
            f"data.paths=[{folder / 'train'}]",
            "data.validation=null",
            "training.eval_steps=null",
            f"data.tokenizer={folder / 'tokenizer'}",
            f"training.seed={seed}",
            f"training.steps={steps}",
            "training.precision=float32",  # models of several machines stand beside each other
            *changes,
        ],
    )


def train(config: RunConfig, change: Callable[[Run], None] = lambda run: None) -> None:
    """One model, in a process of its own: its peak memory is then its own. SystemExit 1 if it was stopped.

    ``change`` is made to the run before its first step.
    """
    transformers.utils.logging.disable_progress_bar()
    progress = Progress()
    run = Run(config, showing(progress), say=progress.say)
    if run.finished:
        return
    change(run)
    try:
        stopped = run.train() is None
    except KeyboardInterrupt:
        stopped = True
    progress.clear()
    if stopped:
        raise SystemExit(1)
    cuda = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    write_json(Path(config.output) / _COST_FILE, {"peak_bytes": cuda or peak_memory()})


def trained(folder: Path, model: TrailmarkForCausalLM) -> dict[str, Any]:
    """What a finished training tells."""
    history = read_json(folder / HISTORY_FILE)
    # a process killed between the two files leaves none
    cost = read_json(folder / _COST_FILE) or {"peak_bytes": None}
    return {
        "parameters": parameters(model),
        "layers": model.config.num_hidden_layers,
        "seconds": history["seconds"],
        "tokens": history["tokens"],
        "training_loss": history["steps"][-1]["loss"],
        "peak_bytes": cost["peak_bytes"],
    }


def losses(model: TrailmarkForCausalLM, pieces: Sequence[Tokens], factor: int, length: int) -> dict[str, Any]:
    """Of pieces of a text, each read ``factor`` training lengths at a time."""
    began = time.perf_counter()
    found = [evaluate_perplexity(model, piece, factor * length, len(piece)) for piece in pieces]
    return {
        "factor": factor,
        "length": factor * length,
        "losses": [r.loss for r in found],  # nats per token, of each piece
        "tokens": [r.tokens for r in found],  # that bear a loss: all but the first of a window
        "seconds": time.perf_counter() - began,
    }


class Benchmark:
    """The JSON file and the folder of the models."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.folder, self.output = arguments, arguments.folder, arguments.output
        self.record: dict[str, Any] = read_json(self.output) or {}

    def prepare(self) -> None:
        """Vocabulary, shards and the settings; a record of others is refused."""
        books = data_folder("books") / "train"
        tokenizer = trained_tokenizer(
            files_below(books), self.arguments.vocabulary, self.folder / "tokenizer"
        )
        corpus = prepared(books, self.folder / "train", tokenizer)
        self.tokenizer = load_tokenizer(str(tokenizer))
        kept = self.record.get("settings", {})
        if self.arguments.steps is None:
            self.arguments.steps = kept.get("steps") or self._steps_that_fit()
        config = self.config("DRT x1", 0)
        self.length = config.training.context_length
        settings = {
            "steps": self.arguments.steps,
            **settings_of(config, corpus, self.tokenizer),
            "stretches": self.arguments.stretches,
            "changes": self.arguments.set,
        }
        if kept:
            expect_settings("text", self.output, kept, settings)
        self.record |= {"settings": settings}
        self.record.setdefault("environment", environment())
        self.record.setdefault("models", [])
        self.record.setdefault("results", [])
        self.keep()

    def keep(self) -> None:
        write_json(self.output, self.record)

    def config(self, name: str, seed: int) -> RunConfig:
        return run_config(name, seed, self.arguments.steps or 1, self.folder, self.arguments.set)

    def _steps_that_fit(self) -> int:
        """As many for all as the slowest takes ``--minutes`` for."""
        slowest = max(measure_speed(Run(self.config(name, 0))) for name in MODELS)
        return max(1, int(self.arguments.minutes * 60 / slowest))

    def train(self, name: str, seed: int) -> None:
        if self._has("models", model=name, seed=seed):
            return
        config = self.config(name, seed)
        if read_json(Path(config.output) / HISTORY_FILE) is None:
            print(f"{name}, seed {seed}: {config.training.steps} steps", flush=True)
            task = {"name": name, "seed": seed, "steps": config.training.steps, "changes": self.arguments.set}
            command = [sys.executable, __file__, str(self.folder), json.dumps(task)]
            if subprocess.run(command).returncode:
                raise SystemExit(f"text: the training of {name} ended early. The same command goes on.")
        model = load(Path(config.output)).model
        self.record["models"].append(
            {"model": name, "seed": seed, "config": MODELS[name]}
            | {"sliding_window": model.config.sliding_window}
            | {"tokens_per_second": read_json(Path(config.output) / HISTORY_FILE)["tokens_per_second"]}
            | trained(Path(config.output), model)
        )
        self.keep()

    def evaluate(self, name: str, seed: int, pieces: Sequence[Tokens], words: Sequence[int]) -> None:
        """The loss of every stretch at every length."""
        model = None
        for factor in FACTORS:
            if self._has("results", model=name, seed=seed, factor=factor):
                continue
            if model is None:
                model = load(model_folder(self.folder, name, seed)).model.eval()
            found = losses(model, pieces, factor, self.length)
            self.record["results"].append({"model": name, "seed": seed, "words": list(words)} | found)
            self.keep()
            print(
                f"{name}, seed {seed}, {factor * self.length:,} tokens: {perplexity(self.record['results'][-1]):.3f}"
            )

    def _has(self, part: str, **asked: Any) -> bool:
        return any(asked.items() <= found.items() for found in self.record[part])


# --- numbers -----------------------------------------------------------------------------------------------


def mean_loss(result: dict[str, Any]) -> float:
    """Nats per token, over all stretches."""
    return float(np.average(result["losses"], weights=result["tokens"]))


def perplexity(result: dict[str, Any]) -> float:
    return math.exp(mean_loss(result))


def word_perplexity(result: dict[str, Any]) -> float:
    """Per word of white space between: what two tokenizers may be compared by."""
    return math.exp(float(np.dot(result["losses"], result["tokens"])) / sum(result["words"]))


def difference(
    result: dict[str, Any], other: dict[str, Any], draws: int = 10_000
) -> tuple[float, float, float]:
    """``result`` less ``other`` in nats per token: mean, and a 95% interval by drawing stretches anew (bootstrap).

    Both read the same stretches: what makes one hard for both does not widen the interval.
    """
    assert result["tokens"] == other["tokens"]
    apart, weights = np.subtract(result["losses"], other["losses"]), np.asarray(result["tokens"], float)
    drawn = np.random.default_rng(0).integers(len(apart), size=(draws, len(apart)))
    means = (apart * weights)[drawn].sum(1) / weights[drawn].sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(np.average(apart, weights=weights)), float(low), float(high)


# --- the command -------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--folder", type=Path, default=FOLDER / "text")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="of the slowest model: decides the steps of all"
    )
    parser.add_argument("--steps", type=int, help="default: by --minutes, at the first start")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument(
        "--stretches", type=int, help="of 16 training lengths to measure on; default: all of books/test"
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes of all configurations"
    )
    parser.add_argument("--train-only", action="store_true", help="measure later")


def run(arguments: argparse.Namespace) -> None:
    benchmark = Benchmark(arguments)
    benchmark.prepare()
    for seed in arguments.seeds:
        for name in MODELS:
            benchmark.train(name, seed)
    if arguments.train_only:
        return
    pieces = stretches(
        files_below(data_folder("books") / "test"), benchmark.tokenizer, FACTORS[-1] * benchmark.length
    )
    pieces = pieces[: arguments.stretches]
    words = [len(benchmark.tokenizer.decode(piece).split()) for piece in pieces]
    for seed in arguments.seeds:
        for name in MODELS:
            benchmark.evaluate(name, seed, pieces, words)
    print(f"Numbers: {arguments.output}")


if __name__ == "__main__":  # a training: see Benchmark.train
    task = json.loads(sys.argv[2])
    train(run_config(task["name"], task["seed"], task["steps"], Path(sys.argv[1]), task["changes"]))
