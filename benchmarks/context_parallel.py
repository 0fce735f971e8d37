"""Training with processes that share each text: measured beside one process, and on paper for a million tokens.

    python benchmarks/context_parallel.py            # benchmarks/context_parallel.json, the tables of docs/training.md

Measured: ``trailmark train`` on configs/laptop-drt-x2.yaml, one process with two threads and two processes with one,
in turn, on a machine that does nothing else. On paper: no network is there to measure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import CONFIGS, ROOT, interleaved, keep, spread, together
from tables import Columns, on_machine, record, table

from trailmark.files import read_json

OUTPUT = Path(__file__).with_suffix(".json")
FOLDER = ROOT / "runs" / "benchmark-context-parallel"
CONFIG = CONFIGS / "laptop-drt-x2.yaml"
LENGTHS = (8192, 32_768)
STEPS = 4  # of one text; the first one warms up
ROUNDS = 3
PROCESSES = 2  # and threads of the one that stands beside them
TEXT, SLAB = 1 << 20, 4096  # tokens, and those whose logits are there at a time
MODELS, GPUS = ("drt-x1-128m", "drt-x1-350m"), (8, 16, 32)


def train(length: int, processes: int, threads: int) -> dict[str, float]:
    """Seconds of a step after the first, the largest process's peak memory, and the last step's loss."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    changes = [
        f"output={FOLDER}", f"training.steps={STEPS}", f"training.tokens_per_step={length}",
        f"training.context_length={length}", "training.precision=float32", "training.logging_steps=1",
        "training.save_steps=1000", f"training.context_parallel={processes}",
    ]  # fmt: skip
    command = [sys.executable, "-m", *together(processes), "trailmark", "train", str(CONFIG), *changes]
    started = subprocess.Popen(
        command, env=os.environ | {"OMP_NUM_THREADS": str(threads)}, stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(started.pid, 0)  # of the processes that it waited for, too, the largest
    if status:
        raise SystemExit(f"{' '.join(command)}: ended with status {status}.")
    steps = read_json(FOLDER / "history.json")["steps"]
    took = (steps[-1]["seconds"] - steps[0]["seconds"]) / (len(steps) - 1)
    return {"seconds": took, "peak_bytes": used.ru_maxrss * 1024, "loss": steps[-1]["step_loss"]}


def measured(length: int, count: int) -> dict[str, Any]:
    kept: dict[str, list[dict[str, float]]] = {"one": [], "several": []}

    def run(name: str, processes: int, threads: int) -> float:
        kept[name].append(train(length, processes, threads))
        return kept[name][-1]["seconds"]

    cases = {"one": lambda: run("one", 1, count), "several": lambda: run("several", count, 1)}
    found = interleaved(cases, ROUNDS)
    one, several = (kept[name][-1]["loss"] for name in ("one", "several"))
    return {
        "length": length,
        "processes": count,
        "seconds": {name: spread(values) for name, values in found.items()},
        "ratios": spread([one / several for one, several in zip(*found.values(), strict=True)]),
        "peak_bytes": {name: max(run["peak_bytes"] for run in runs) for name, runs in kept.items()},
        "loss_difference": abs(one - several) / one,
    }


def on_paper(name: str, gpus: int) -> dict[str, Any]:
    """A text of ``TEXT`` tokens a step: what one of ``gpus`` keeps, computes and sends, in bfloat16."""
    from trailmark.models.context_parallel import gathered_bytes
    from trailmark.training.config import load_run_config
    from trailmark.training.estimate import estimate

    model: Any = load_run_config(CONFIGS / f"{name}.yaml").model_config(50_258)
    chunks = gathered_bytes(model, TEXT, 2)
    whole, found = (
        estimate(
            model, context_length=TEXT // gpus, rows=gpus, micro_rows=1, world_size=gpus, precision="bfloat16",
            gradient_checkpointing=True, sharded=True, device="cuda", loss_slab=slab, gathered=chunks,
        )
        for slab in (None, SLAB)
    )  # fmt: skip
    kv = 2 * model.num_key_value_heads * model.head_dim * 2  # bytes of a position's keys and values
    halos = model.num_hidden_layers * (model.sliding_window - 1) * kv
    return {
        "model": name,
        "gpus": gpus,
        "tokens": TEXT,
        "stretch": TEXT // gpus,
        "peak_bytes": {"whole": whole.peak, "slabs": found.peak},
        "chunk_bytes": chunks,
        # forward, and again in the backward, which computes it anew; then gradients
        "halo_bytes_sent": 3 * halos,
        "chunk_bytes_received": 2 * chunks * (gpus - 1) // gpus,
        "flops": found.executed_flops * TEXT / gpus,
    }


def measured_text() -> str:
    part = record("context_parallel")["measured"]
    columns: Columns = {
        "tokens of a text": "{length:,}",
        "a step of one process, s": "{seconds[one][median]:.2f}",
        "of several": "{seconds[several][median]:.2f}",
        "processes": "{processes}",
        "times as fast": "{ratios:spread .2f}",
        "peak of one": "{peak_bytes[one]:size}",
        "of each of several": "{peak_bytes[several]:size}",
        "losses differ by": "{loss_difference:.0e}",
    }
    return on_machine(table(columns, part["results"]), part["environment"])


def paper_text() -> str:
    columns: Columns = {
        "configuration": "{model}",
        "GPUs": "{gpus}",
        "tokens of each": "{stretch:,}",
        "memory of each": "{peak_bytes[slabs]:size}",
        "with all logits at once": "{peak_bytes[whole]:size}",
        "chunks of the whole text": "{chunk_bytes:size}",
        "received for chunks, a step": "{chunk_bytes_received:size}",
        "sent for windows": "{halo_bytes_sent:size}",
        "PFLOP of each": lambda row: f"{row['flops'] / 1e15:.2f}",
    }
    return table(columns, record("context_parallel")["paper"]["results"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], "measured", "paper"], help="default: both")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    parts = options.parts or ["measured", "paper"]
    if "measured" in parts:
        keep(options.output, "measured", [measured(length, PROCESSES) for length in options.lengths])
    if "paper" in parts:
        keep(options.output, "paper", [on_paper(name, gpus) for name in MODELS for gpus in GPUS])
    print(f"Numbers: {options.output}")


if __name__ == "__main__":
    main()
