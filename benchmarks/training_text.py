"""Texts that models of several benchmarks are trained on and measured by."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from common import data_folder, parameters, showing

from trailmark.data.corpus import (
    Tokens,
    read_text,
    standard_library_texts,
    tokenize,
    tokenizer_fingerprint,
)
from trailmark.data.prepare import prepare
from trailmark.data.recipes import parse_source
from trailmark.data.shards import Corpus
from trailmark.evaluation.perplexity.run import evaluate_perplexity
from trailmark.files import read_json, write_text
from trailmark.models import TrailmarkForCausalLM
from trailmark.report.console import Progress
from trailmark.training.config import RunConfig
from trailmark.training.run import HISTORY_FILE, Run

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


def train(config: RunConfig, change: Callable[[Run], None] = lambda run: None) -> None:
    """One model. SystemExit 1 if it was stopped.

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


def trained(folder: Path, model: TrailmarkForCausalLM) -> dict[str, Any]:
    """What a finished training tells."""
    history = read_json(folder / HISTORY_FILE)
    return {
        "parameters": parameters(model),
        "layers": model.config.num_hidden_layers,
        "seconds": history["seconds"],
        "tokens": history["tokens"],
        "training_loss": history["steps"][-1]["loss"],
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


def mean_loss(result: dict[str, Any]) -> float:
    """Nats per token, over all stretches."""
    return float(np.average(result["losses"], weights=result["tokens"]))
