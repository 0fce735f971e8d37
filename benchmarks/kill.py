"""Kills runs at random moments, most of them while saving, and compares what comes of them with undisturbed ones.

    python benchmarks/kill.py            writes benchmarks/kill.json: 200 kills of one process and of two
    python benchmarks/kill.py 20         so many of each

A tiny DRT learns needles for 8 steps and saves after each. Every start goes on with what the last one left, until the
run ends; then its final weights must be those of an undisturbed run to the bit, and so every number it logged. Of two
processes (DDP, FSDP2) one or both are killed, by chance.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import common  # noqa: F401  # by which the tests are found: they do the killing

from tests.training.killed import Killer
from tests.training.tiny import run_config
from trailmark.evaluation.record import environment
from trailmark.files import write_json

PLAN: dict[str, tuple[int, float, dict[str, Any]]] = {
    "one process": (1, 1.0, {"optimizer": "muon"}),
    "two processes, DDP": (2, 0.5, {"optimizer": "muon"}),
    "two processes, FSDP2": (2, 0.5, {"optimizer": "adamw", "parallel": "fsdp"}),
}


def measure(name: str, kills: int, seed: int, say: Any = print) -> dict[str, Any]:
    """One row of the plan. An AssertionError ends it: what it says is what a kill broke."""
    processes, share, settings = PLAN[name]
    wanted = max(1, round(kills * share))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="trailmark-kill-") as folder:
        config = run_config(
            Path(folder),
            "needles",
            steps=8,
            save_steps=1,
            logging_steps=1,
            tokens_per_step=1280,  # two rows at the last level: they divide among two processes
            **settings,
        )
        config.data.level_accuracy = -1.0  # every level is passed
        killer = Killer(config, Path(folder), seed, processes)
        while killer.found.kills < wanted:
            killer.run(min(20, wanted - killer.found.kills))
            say(f"{name}: {killer.found}", flush=True)
    found = asdict(killer.found)
    return {"name": name, "processes": processes} | found | {"seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kills", type=int, nargs="?", default=200, help="of one process, and of two")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    rows = [measure(name, arguments.kills, arguments.seed) for name in PLAN]
    record = {"environment": environment(), "kills": arguments.kills, "seed": arguments.seed, "rows": rows}
    write_json(arguments.output, record)
    print(f"Numbers: {arguments.output}")


if __name__ == "__main__":
    main()
