"""The evaluation suites on the demo's model: needles by length and depth, 1M tokens against the clock, 50 reports.

    trailmark demo                                       # trains runs/demo/drt, in about seven minutes
    python benchmarks/evaluation.py [--model runs/demo/drt] [--work runs/benchmark-evaluation]

writes benchmarks/evaluation.json and docs/needle-grid.png. A second start goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from trailmark.evaluation.evaluate import evaluate
from trailmark.evaluation.record import environment
from trailmark.evaluation.suite import Request
from trailmark.files import read_json, write_json
from trailmark.report.console import Progress
from trailmark.report.page import build

HERE = Path(__file__).resolve().parent
TRAIN_LENGTH = 1024  # tokens of the demo's longest training text
FACTORS = (1, 4, 16, 64, 256, 1024)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
QUESTIONS = 60  # of a cell
MILLION, ASKED = 1 << 20, 300
RUNS = 50
_KEPT = (  # of a result, beside the settings that differ
    *(
        "length",
        "depth",
        "questions",
        "correct",
        "accuracy",
        "accuracy_low",
        "accuracy_high",
        "recall",
        "mean_weight",
    ),
    *("haystacks", "tokens_read", "seconds_reading", "seconds_asking", "seconds", "memory_bytes"),
)


def grid(model: Path, work: Path) -> list[dict[str, Any]]:
    """Every length at every depth."""
    options = {
        "lengths": tuple(TRAIN_LENGTH * factor for factor in FACTORS),
        "depths": DEPTHS,
        "questions": QUESTIONS,
    }
    return asked(model, work / "grid", options)


def million(model: Path, work: Path) -> list[dict[str, Any]]:
    """One haystack of 1M tokens, read once for 300 questions on branches of its memory."""
    return asked(model, work / "million", {"lengths": (MILLION,), "questions": ASKED})


def asked(model: Path, output: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    progress = Progress()
    request = Request(models=(model,), suite=("needles",), output=output)
    (found,) = evaluate(request, options, say=print, progress=progress.show)
    progress.clear()
    return [{name: result[name] for name in _KEPT} for result in found.results]


def reports(work: Path, runs: int) -> dict[str, Any]:
    """The page of many runs: the grid's results under as many names."""
    (record,) = (work / "grid").rglob("needles.json")
    content = read_json(record)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(runs):
            place = Path(folder) / f"model-{number}" / "evaluation"
            place.mkdir(parents=True)
            content["model"] |= {"name": place.parent.name, "folder": str(place.parent)}
            write_json(place / "needles.json", content)
        began = time.perf_counter()
        page = Path(folder) / "report.html"
        build([Path(folder)], page)
        return {"runs": runs, "seconds": time.perf_counter() - began, "bytes": page.stat().st_size}


def picture(work: Path) -> None:
    """The heat map of the grid, for the README beside it."""
    with tempfile.TemporaryDirectory() as folder:
        build([work / "grid"], Path(folder) / "report.html")
        (drawn,) = Path(folder).rglob("needles-*-depth.png")
        shutil.copy(drawn, HERE.parent / "docs" / "needle-grid.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("runs/demo/drt"))
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-evaluation"))
    arguments = parser.parse_args()
    found: dict[str, Any] = {
        "environment": environment(),
        "train_length": TRAIN_LENGTH,
        "grid": grid(arguments.model, arguments.work),
        "million": million(arguments.model, arguments.work),
        "report": reports(arguments.work, RUNS),
    }
    picture(arguments.work)
    path = HERE / "evaluation.json"
    write_json(path, found)
    took = found["million"][0]["seconds"]
    print(
        f"{MILLION:,} tokens, {ASKED} questions: {took:.0f} s; {RUNS} runs: {found['report']['seconds']:.1f} s"
    )
    print(f"Numbers: {path}")


if __name__ == "__main__":
    main()
