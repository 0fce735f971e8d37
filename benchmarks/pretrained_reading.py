"""How fast converted models read books and learn, and in how much memory: parts ``reading`` and ``steps``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from common import data_folder, peak_memory, seconds, spread
from pretrained_models import converted, opened, precision, windowed
from pretrained_train import LENGTHS, config

from trailmark.data.corpus import load_tokenizer, read_text, tokenize
from trailmark.evaluation.subject import own_device
from trailmark.machine import SET_UP, fast_precision
from trailmark.models.conversion.convert import convert
from trailmark.models.drt.config import DRTConfig
from trailmark.report.console import Progress
from trailmark.training.forecast import seconds_per_step
from trailmark.training.run import Run

STEPS = 3  # that are timed, after one that is not
FULL, THEIRS = "full attention", "full attention, transformers"


def reading(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Tokens/s and peak memory, each model and length in a process of its own."""
    base, drt = (converted(options.folder, to) for to in ("sliding_window", "drt"))
    rows = []
    cases = [("DRT", drt, n) for n in options.read]
    cases += [("window", base, n) for n in options.read]
    cases += [(FULL, base, n) for n in options.full]
    if options.full and not (theirs := options.folder / "llama").exists():
        convert(base, theirs, "llama")  # back again: transformers reads no GGUF as fast as its own files
    cases += [(THEIRS, options.folder / "llama", n) for n in options.full]
    for name, model, length in cases:
        progress.show(f"{name}, {length:,} tokens")
        script = [sys.executable, __file__, name, str(model), str(length), str(options.windows[-1])]
        environment = os.environ | SET_UP  # as `trailmark read` has it
        done = subprocess.run(script, check=True, capture_output=True, text=True, env=environment)
        took, peak, kept = map(float, done.stdout.split()[-3:])
        rows.append({"model": name, "tokens": length, "seconds": took, "tokens_per_second": length / took,
                     "peak": peak, "memory": kept})  # fmt: skip
    config = DRTConfig.from_pretrained(drt)
    about = {"window": options.windows[-1], "num_lower_layers": config.num_lower_layers}
    return about | {"dtype": precision(), "rows": rows}


def steps(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Seconds of a training's step in bfloat16 and in float32: adapters of the base, of which nothing else learns."""
    how = argparse.Namespace(**vars(options))
    rows = []
    for name in ("bfloat16", "float32"):
        progress.show(name)
        how.set = [f"training.precision={name}", f"training.tokens_per_step={LENGTHS['recall']}"]
        run = Run(config("recall", 1, how))
        taken = seconds_per_step(run, STEPS + 1)[1:]
        rows.append({"precision": name, "seconds": spread(taken)})
    fast = fast_precision(own_device(None).type)[1]
    return {"tokens": LENGTHS["recall"], "fast": fast, "rows": rows}


def _read_one(name: str, folder: Path, length: int, window: int) -> None:
    tokenizer = load_tokenizer(str(folder))
    files = sorted((data_folder("books") / "train").glob("*.txt"))
    ids: list[int] = []
    for file in files:
        if len(ids) < length:
            ids += tokenize([read_text(file)], tokenizer).tolist()
    tokens = torch.tensor(ids[:length])[None]
    # what is compared is what a laptop takes
    took, kept = (
        _by_transformers(folder, tokens)
        if name == THEIRS
        else _by_ours((opened(folder) if name == FULL else windowed(folder, window)).cpu(), tokens)
    )
    print(took, peak_memory(), kept)


def _by_ours(model: Any, tokens: torch.Tensor) -> tuple[float, int]:
    """Seconds, and bytes that are kept of the text."""
    kept = model.new_cache("host")
    took = seconds(lambda: model.read(tokens, kept))
    return took, kept.num_bytes()


@torch.no_grad()
def _by_transformers(folder: Path, tokens: torch.Tensor) -> tuple[float, int]:
    """The same by its own class, as its ``generate`` reads a prompt: at once, without the logits of what is read."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision())).eval()
    kept = DynamicCache()
    took = seconds(lambda: model(tokens, past_key_values=kept, logits_to_keep=1))
    return took, sum(x.nbytes for layer in kept.layers for x in (layer.keys, layer.values))


if __name__ == "__main__":
    case, model_folder, tokens_to_read, sliding_window = sys.argv[1:]
    _read_one(case, Path(model_folder), int(tokens_to_read), int(sliding_window))
