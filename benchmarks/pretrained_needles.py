"""Needles in books for the models of pretrained.py, and the way of Landmark Attention back to what its base knew."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from pretrained_models import (
    STEP_TOKENS,
    UNSEEN,
    Losses,
    Models,
    by_step,
    converted,
    held_out_books,
    interval,
    latex,
    name_of,
    named,
    opened,
    subject,
    trained,
    window_fields,
)  # fmt: skip

from trailmark.data.corpus import Tokens, load_tokenizer, read_text, tokenize
from trailmark.evaluation.needles.ask import measure as ask
from trailmark.evaluation.needles.suite import NeedleSettings
from trailmark.files import read_json, write_json
from trailmark.models.drt.config import DRTConfig
from trailmark.models.landmark.config import LandmarkConfig
from trailmark.report.console import Progress
from trailmark.training.config import load_run_config
from trailmark.training.run import HISTORY_FILE

FACTORS = (1, 2, 4, 8, 16, 32)  # of the training length, for Landmark
TOGETHER = 25  # needles in a text, each of which is asked for
_LONGEST_BASE = 8192
_CELL = 504  # tokens that Landmark sees beside what it retrieves


class Needles:
    """Questions about a sentence in a book; what is known is kept in a file, so that nothing is asked twice."""

    def __init__(self, options: argparse.Namespace, progress: Progress) -> None:
        self.file: Path = options.folder / "needles.json"
        self.questions: int = options.questions
        self.progress = progress
        self.known: dict[str, Any] = read_json(self.file) or {}
        tokenizer = load_tokenizer(str(converted(options.folder, "sliding_window")))
        self.text: Tokens = tokenize(map(read_text, held_out_books()), tokenizer)

    def ask(
        self,
        folder: Path,
        changes: tuple[str, ...],
        length: int,
        chat: bool = False,
        together: int = 1,
        questions: int | None = None,
        format: str = "sentences",
    ) -> dict[str, Any]:
        """``together``: needles in a text, each of which is asked for. ``questions``: others than told."""
        questions = self.questions if questions is None else questions
        settings = NeedleSettings(
            (length,), "single" if together == 1 else "multi-key", format=format, chat=chat, needles=together,
            questions=questions, sight="window",
        )  # fmt: skip
        how = f"{format}, chat" if chat else format
        if together > 1:
            how += f", {together} in a text"
        key = " | ".join([name_of(folder), *changes, str(length), str(questions), how])

        def say(message: str) -> None:
            self.progress.show(f"{key}: {message}")

        if key not in self.known:
            own = subject(folder, *changes)
            (row,) = ask(own, settings, self.text, say)
            row["dtype"] = str(own.model.dtype).removeprefix("torch.")  # in which it was computed
            # another process may have written meanwhile
            self.known = (read_json(self.file) or {}) | self.known | {key: row}
            write_json(self.file, self.known)
        return {name: x for name, x in self.known[key].items() if name != "asked"}  # question by question


def needles(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """A sentence far behind the window: it is to be completed, and with ``--chat`` asked for through the template."""
    models, asked = Models.of(options), Needles(options, progress)
    rows = []
    for model, folder, changes in _cases(options, models):
        for length, chat in product(options.needles, (False, True) if options.chat else (False,)):
            if (folder / "config.json").exists() and (folder != models.base or length <= _LONGEST_BASE):
                rows.append({"model": model, "chat": chat} | asked.ask(folder, changes, length, chat))
    found = {"rows": rows}
    taught = trained(options.folder, "needles", options.window, options.seed)
    if (history := read_json(taught / HISTORY_FILE)) is not None:
        found |= {"taught_tokens": history["tokens"], "taught_seconds": history["seconds"]}
    return models.training() | found


def _cases(options: argparse.Namespace, models: Models) -> Iterator[tuple[str, Path, tuple[str, ...]]]:
    fields = window_fields(options.window)
    yield "DRT", models.drt, fields
    yield "DRT, taught", trained(options.folder, "needles", options.window, options.seed), fields
    yield "window", models.window, fields
    config = DRTConfig.from_pretrained(models.drt)
    kinds = ["sliding_attention"] * config.num_lower_layers + ["full_attention"] * config.num_upper_layers
    # what layers that read could find at best, of what lower ones with a window leave them
    looking = f"base, window below layer {config.num_lower_layers}"
    yield looking, models.base, (*fields, f"layer_types={json.dumps(kinds)}")
    yield "base", models.base, ()


def landmark(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """A converted Landmark Attention model: its losses on LaTeX while it is trained, and needles beyond its length."""
    folder = trained(options.folder, "landmark", 0, options.seed)
    if (history := read_json(folder / HISTORY_FILE)) is None:
        sys.exit(
            f"{folder} is not there. Train it: python benchmarks/pretrained_train.py landmark --seed {options.seed}"
        )
    base, begun = converted(options.folder, "sliding_window"), converted(options.folder, "landmark")
    length, window = load_run_config(folder / "run.yaml").training.context_length, options.window
    assert length is not None
    losses, rows = Losses(options.folder / "losses.json", progress), []
    texts = latex(load_tokenizer(str(base)), length)
    marks = {"full": losses.of("base", partial(opened, base), texts),
             "window": losses.of(*named(base, window), texts)}  # fmt: skip
    means = {name: np.array([x[UNSEEN - 1 :].mean() for x in own]) for name, own in marks.items()}
    for step, own in sorted(({0: begun} | by_step(folder)).items()):
        found = losses.of(name_of(own), partial(opened, own), texts)
        nats = np.array([x[UNSEEN - 1 :].mean() for x in found])
        above = interval("above", nats - means["window"])
        rows.append({"tokens": step * STEP_TOKENS, "loss": float(nats.mean())} | above)
    asked = Needles(options, progress)
    found_needles = [
        {"model": model} | asked.ask(own, (f"local_length={_CELL}",), factor * length)
        for model, own in (("trained", folder), ("as converted", begun))
        for factor in (options.factors if own == folder else options.factors[:1])
    ]
    config = LandmarkConfig.from_pretrained(folder)
    sees = {"cell": _CELL, "chunk_size": config.chunk_size, "chunks": config.num_retrieved_chunks}
    return sees | {
        "length": length, "window": window, "texts": len(texts), "seconds": history["seconds"],
        "base": {name: float(own.mean()) for name, own in means.items()}, "rows": rows, "needles": found_needles,
    }  # fmt: skip
