"""The second paper's Table 1 at laptop size: every model and ablation with the same tokens and the same steps.

    TRAILMARK_DATA=... python benchmarks/compare.py                 all that benchmarks/compare.json lacks
    TRAILMARK_DATA=... python benchmarks/compare.py needles --rows "DRT x1" Landmark --seeds 0 1
    python benchmarks/compare.py tables                             what was found so far

Parts: "text" (configs/laptop-*.yaml on TRAILMARK_DATA/books/train; perplexity of a stretch of each test book at 1, 4
and 16 training lengths, the same tokens for every row and length), "needles" (byte models of the demo's size; a single
needle at 1 to 64 training lengths), "cost" (a training step of each row in turn, and the memory it takes; on a machine
that does nothing else). Rows come in the order of their weight, each is trained in a process of its own and kept at
once; stopped at any time, the same command goes on, trainings from their checkpoints. compare_rows.py says what the
rows are.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import compare_tables
from common import ROOT, Timers, data_folder, expect_settings, interleaved, parameters
from compare_measure import MEASURED_FILE, asked, recorded_levels, row_config, text_tokenizer
from compare_rows import (
    NEEDLE_LENGTH,
    NEEDLE_STEPS,
    ROWS,
    SEEDS,
    TEXT_STEPS,
    TOKENS_PER_STEP,
    VOCABULARY,
    jobs,
    measured,
    times,
)
from training import BareLoop
from training_text import prepared, settings_of

from trailmark.data.corpus import files_below, load_tokenizer
from trailmark.data.shards import Corpus
from trailmark.evaluation.record import environment
from trailmark.files import read_json, write_json
from trailmark.machine import start_again_set_up
from trailmark.training.run import Run

OUTPUT = Path(__file__).with_suffix(".json")
FOLDER = ROOT / "runs" / "benchmark-compare"
MEASURE = str(Path(__file__).with_name("compare_measure.py"))
Found = dict[str, Any]


# --- the record ----------------------------------------------------------------------------------------------


class Comparison:
    """The JSON file; a part of other settings is refused, not mixed."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.output: Path = arguments.output
        self.folder: Path = arguments.folder
        self.record: Found = read_json(self.output) or {}

    def part(self, name: str, settings: Found) -> Found:
        kept = self.record.setdefault(
            name, {"settings": settings, "environment": environment(), "results": []}
        )
        if "levels" in kept["settings"]:  # fields that came later were at their defaults
            kept["settings"]["levels"] = recorded_levels(kept["settings"]["levels"])
        expect_settings(name, self.output, kept["settings"], settings)
        assert isinstance(kept, dict)
        return kept

    def keep(self) -> None:
        write_json(self.output, self.record)

    def job(self, part: str, row: str, seed: int, steps: int) -> Found:
        return {
            "part": part,
            "row": row,
            "seed": seed,
            "steps": steps,
            "folder": str(self.folder.resolve()),
            "vocabulary": self.arguments.vocabulary,
            "changes": self.arguments.set,
            "asked": asked() if part == "needles" else None,
        }

    def corpus(self) -> tuple[Corpus, Any]:
        """What the rows of text train on, made where it is not there yet, and its tokenizer."""
        folder = self.folder.resolve() / "text"
        tokenizer = text_tokenizer(folder, self.arguments.vocabulary)
        corpus = prepared(data_folder("books") / "train", folder / "train", tokenizer)
        return corpus, load_tokenizer(str(tokenizer))

    def text(self) -> None:
        corpus, loaded = self.corpus()
        base = row_config(self.job("text", "Base", 0, 1))
        settings = {
            "steps": self._steps("text", TEXT_STEPS),
            **settings_of(base, corpus, loaded),
            "books": [file.name for file in files_below(data_folder("books") / "test")],
            "changes": self.arguments.set,
        }
        self._rows("text", settings)

    def needles(self) -> None:
        settings = {
            "steps": self._steps("needles", NEEDLE_STEPS),
            "tokens_per_step": TOKENS_PER_STEP,
            "length": NEEDLE_LENGTH,
            **asked(),
            "changes": self.arguments.set,
        }
        self._rows("needles", settings)

    def _steps(self, part: str, default: int) -> int:
        """Of all rows: those of --steps, or of the record."""
        if self.arguments.steps is not None:
            return int(self.arguments.steps)
        return int(self.record[part]["settings"]["steps"]) if part in self.record else default

    def _rows(self, name: str, settings: Found) -> None:
        part, failed = self.part(name, settings), []
        self.keep()
        for row, seed in jobs(name, self.arguments.rows, self.arguments.seeds):
            if any((r["row"], r["seed"]) == (row, seed) for r in part["results"]):
                continue
            job = self.job(name, row, seed, times(name, row) * settings["steps"])
            path = Path(row_config(job).output) / MEASURED_FILE
            print(f"{name}: {row}, seed {seed}: {job['steps']:,} steps", flush=True)
            if not (read_json(path) or {}).get("measured"):
                code = subprocess.run([sys.executable, MEASURE, json.dumps(job)]).returncode
                if not (read_json(path) or {}).get("measured"):
                    failed.append(f"{row}, seed {seed} (exit status {code})")
                    continue  # others are not its fault
            kept = read_json(path)
            part["results"].append({key: kept[key] for key in kept if key not in ("job", "measured")})
            self.keep()
        if failed:
            raise SystemExit(f"{name}: ended early: {'; '.join(failed)}. The same command goes on.")

    # --- cost --------------------------------------------------------------------------------------------------

    def cost(self) -> None:
        """Steps of every row in turn, so that all meet the same machine; then memory, each in its own process."""
        rounds = self.arguments.rounds
        settings = {"rounds": rounds, "vocabulary": self.arguments.vocabulary}
        settings |= {"changes": self.arguments.set}
        part = self.part("cost", settings)
        names = [name for name in ROWS if measured("cost", name)]
        if part["results"]:
            print(f"cost: measured already, in {self.output}")
            return
        self.corpus()
        loops = {}
        for name in names:
            run = Run(row_config(self.job("text", name, 0, rounds + 2)))
            loops[name] = BareLoop(run, Timers())
            del run.__dict__["model"]  # the loop has a copy of its own
        numbers = dict.fromkeys(names, 0)

        def step(name: str) -> float:
            """Seconds per token of the next step."""
            began = time.perf_counter()
            tokens = loops[name].step(numbers[name])
            numbers[name] += 1
            return (time.perf_counter() - began) / tokens

        seconds = interleaved({name: partial(step, name) for name in names}, rounds)
        counts = {name: parameters(loop.model) for name, loop in loops.items()}
        loops.clear()
        gc.collect()
        for name in names:
            job = self.job("text", name, 0, rounds + 2)
            command = [sys.executable, MEASURE, json.dumps(job | {"part": "memory", "of": "text"})]
            memory = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
            ratios = [own / base for own, base in zip(seconds[name], seconds["Base"], strict=True)]
            part["results"].append(
                {
                    "row": name,
                    "parameters": counts[name],
                    "microseconds_per_token": statistics.median(seconds[name]) * 1e6,
                    "ratio": statistics.median(ratios),
                    "ratio_lowest": min(ratios),
                    "ratio_highest": max(ratios),
                    **memory,
                }
            )
        part["environment"] = environment()
        self.keep()


# --- the command ---------------------------------------------------------------------------------------------

PARTS = {"needles": Comparison.needles, "text": Comparison.text, "cost": Comparison.cost}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="*", choices=[[], *PARTS, "tables"], help="default: all")
    parser.add_argument(
        "--rows", nargs="+", choices=list(ROWS), metavar="ROW", help="of text and needles; default: all"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, help="of all rows; default: compare_rows.py's")
    parser.add_argument("--rounds", type=int, default=7, help="of cost")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="of text")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes of all rows")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    start_again_set_up()  # as trailmark train does; processes that are started inherit it
    try:
        compare(arguments)
    except KeyboardInterrupt:
        raise SystemExit("Stopped. The same command goes on from here.") from None


def compare(arguments: argparse.Namespace) -> None:
    comparison = Comparison(arguments)
    for name, part in PARTS.items():
        if name in (arguments.part or PARTS):
            part(comparison)
    print(compare_tables.text(comparison.record))
    print(f"\nNumbers: {comparison.output}")


if __name__ == "__main__":
    main()
