"""How a thread of OpenMP waits for the others: what it costs alone, and what beside a process that keeps a core busy.

    python benchmarks/waiting.py [--rounds 3]

Reading, generating and training with a model of the demo's size, each way in a process of its own, in turn. Writes
benchmarks/waiting.json: seconds as a ratio to those of OpenMP's default, in the same situation. Run it alone on a
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from common import CONFIGS, keep, seconds, spread

from trailmark.data.corpus import standard_library_texts
from trailmark.machine import KEEP_FREED_MEMORY, SPINS, WAITING
from trailmark.report.console import Progress
from trailmark.training.config import load_run_config
from trailmark.training.forecast import seconds_per_step
from trailmark.training.run import Run

OUTPUT = Path(__file__).with_suffix(".json")
READ, GENERATED, STEPS = 20_000, 150, 12
WAYS: dict[str, dict[str, str]] = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    **{f"{spins:,} spins": {"GOMP_SPINCOUNT": str(spins)} for spins in (1_000, 3_000, 10_000)},
}


def measured() -> dict[str, float]:
    """Seconds of each kind of work, in this process."""
    config = load_run_config(CONFIGS / "needle-drt.yaml", ["data.first_level=3"])
    run = Run(config)
    steps = seconds_per_step(run, STEPS)
    model = run.model.eval()
    text = "\n".join(standard_library_texts("haystack"))[:READ].encode()
    ids = torch.tensor([list(text)])

    def read() -> None:
        model.read(ids, model.new_cache())

    def generate() -> None:
        model.generate(ids[:, :500], max_new_tokens=GENERATED, min_new_tokens=GENERATED, do_sample=False)

    found = {"training step": statistics.median(steps[2:])}
    for name, work in (("reading", read), ("generating", generate)):
        work()
        found[name] = statistics.median(seconds(work) for _ in range(3))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--one", action="store_true", help="measure in this process, as it was started")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured()))
        return
    progress = Progress()
    (commands,) = (name for name, variables in WAYS.items() if variables == WAITING)
    clean = {name: x for name, x in os.environ.items() if name not in SPINS}
    found: dict[tuple[bool, str, str], list[float]] = defaultdict(list)
    for number in range(options.rounds):
        for busy in (False, True):
            for way, variables in WAYS.items():
                progress.show(f"round {number + 1}, {'beside a busy process' if busy else 'alone'}: {way}")
                environment = clean | KEEP_FREED_MEMORY | variables
                loop = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
                try:
                    script = [sys.executable, __file__, "--one"]
                    done = subprocess.run(script, check=True, capture_output=True, text=True, env=environment)
                finally:
                    if loop is not None:
                        loop.kill()
                        loop.wait()
                for work, took in json.loads(done.stdout.splitlines()[-1]).items():
                    found[busy, way, work].append(took)
        keep(options.output, "waiting", _results(found, commands, number + 1))
    progress.say(f"Measured, in {options.output}")


def _results(found: dict[tuple[bool, str, str], list[float]], commands: str, rounds: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for (busy, way, work), took in found.items():
        ratio = [a / b for a, b in zip(took, found[busy, "default", work], strict=True)]
        rows.append({"busy": busy, "way": way, "work": work, "seconds": spread(took), "ratio": spread(ratio)})
    about = {"rounds": rounds, "commands": commands, "threads": torch.get_num_threads()}
    return about | {"read": READ, "generated": GENERATED, "rows": rows}


if __name__ == "__main__":
    main()
