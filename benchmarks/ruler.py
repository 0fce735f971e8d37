"""RULER's tasks in lm-eval, of models that are there: needles, chains of variables, words that occur most often.

    python benchmarks/ruler.py "demo DRT=runs/demo/drt" "SmolLM2 as a HiLS=models/hils" --lengths 4096 65536 --limit 20

Each NAME=FOLDER is asked the tasks that make their own texts (docs/evaluation.md). Writes benchmarks/ruler.json, where
what was asked before stays; stopped, the same command goes on.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import ROOT

from trailmark.evaluation.harness.ruler import MADE
from trailmark.evaluation.harness.run import run
from trailmark.evaluation.harness.suite import HarnessSettings
from trailmark.evaluation.record import Record, environment
from trailmark.evaluation.subject import load
from trailmark.files import read_json, write_json
from trailmark.machine import start_again_set_up
from trailmark.report.console import Progress

OUTPUT = Path(__file__).with_suffix(".json")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="NAME=FOLDER of each")
    parser.add_argument("--tasks", nargs="+", choices=MADE, default=list(MADE))
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16_384, 65_536])
    parser.add_argument("--limit", type=int, default=20, help="texts of each task and length")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "benchmark-ruler", help="of the records"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    start_again_set_up()  # as the commands do
    progress = Progress()
    kept: list[dict[str, Any]] = read_json(options.output) or []
    for named in options.models:
        name, _, folder = named.partition("=")
        subject = load(Path(folder), any_model=True)
        record = Record(options.folder / name.replace(" ", "-"), "lm-eval", subject.identity())
        for task in options.tasks:
            for length in options.lengths:
                settings = HarnessSettings(tasks=(task,), lengths=(length,), limit=options.limit)
                row: dict[str, Any] = {"model": name, "task": task, "length": length}
                try:
                    (found,) = run(subject, settings, record, progress.show)
                except ValueError as error:  # a length at which this tokenizer has no text
                    progress.say(f"{name}, {task}, {length:,}: {error}")
                    continue
                row |= {"texts": found["texts"], **found["metrics"]["score"], "seconds": found["seconds"]}
                same = ("model", "task", "length")
                kept = [old for old in kept if any(old[key] != row[key] for key in same)]
                kept.append(row | {"environment": environment()})
                write_json(options.output, kept)
                progress.say(f"{name}, {task}, {length:,} tokens: {row['score']:.2f} of {row['texts']} texts")


if __name__ == "__main__":
    main()
