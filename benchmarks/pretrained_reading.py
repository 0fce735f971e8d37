"""How fast converted models read books, and in how much memory: the part ``reading`` of pretrained.py."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import data_folder, peak_memory
from pretrained_models import converted, opened, precision, windowed

from trailmark.data.corpus import load_tokenizer, read_text, tokenize
from trailmark.machine import SET_UP
from trailmark.models.drt.config import DRTConfig
from trailmark.report.console import Progress


def reading(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Tokens/s and peak memory, each model and length in a process of its own."""
    base, drt = (converted(options.folder, to) for to in ("sliding_window", "drt"))
    rows = []
    cases = [("DRT", drt, n) for n in options.read]
    cases += [("window", base, n) for n in options.read]
    cases += [("full attention", base, n) for n in options.full]
    for name, model, length in cases:
        progress.show(f"{name}, {length:,} tokens")
        script = [sys.executable, __file__, name, str(model), str(length), str(options.windows[-1])]
        environment = os.environ | SET_UP  # as `trailmark read` has it
        done = subprocess.run(script, check=True, capture_output=True, text=True, env=environment)
        seconds, peak, kept = map(float, done.stdout.split()[-3:])
        rows.append({"model": name, "tokens": length, "seconds": seconds, "tokens_per_second": length / seconds,
                     "peak": peak, "memory": kept})  # fmt: skip
    config = DRTConfig.from_pretrained(drt)
    about = {"window": options.windows[-1], "num_lower_layers": config.num_lower_layers}
    return about | {"dtype": precision(), "rows": rows}


def _read_one(name: str, folder: Path, length: int, window: int) -> None:
    model = opened(folder) if name == "full attention" else windowed(folder, window)
    tokenizer = load_tokenizer(str(folder))
    files = sorted((data_folder("books") / "train").glob("*.txt"))
    ids: list[int] = []
    for file in files:
        if len(ids) < length:
            ids += tokenize([read_text(file)], tokenizer).tolist()
    model.cpu()  # what is compared is what a laptop takes
    tokens, kept = torch.tensor(ids[:length])[None], model.new_cache("host")
    began = time.perf_counter()
    model.read(tokens, kept)
    took = time.perf_counter() - began
    print(took, peak_memory(), kept.num_bytes())


if __name__ == "__main__":
    case, model_folder, tokens_to_read, sliding_window = sys.argv[1:]
    _read_one(case, Path(model_folder), int(tokens_to_read), int(sliding_window))
