"""Put measured numbers into README.md and benchmarks/README.md: nothing there is typed by hand.

python benchmarks/readme.py [runs/demo]    with a demo's folder, its numbers and figures are taken over first
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from cpu import table as cpu_table

from trailmark.demo import NAMES
from trailmark.report.console import duration
from trailmark.report.tables import markdown_table, needle_table

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "benchmarks"


def take_over(run: Path) -> None:
    """Keep a demo's numbers and figures."""
    record = json.loads((run / "demo.json").read_text())
    for result in record["results"]:
        result.pop("asked", None)  # single questions are for the figures; the counts stay
    (HERE / "demo.json").write_text(json.dumps(record, indent=1) + "\n")
    for figure in ("accuracy.png", "chunks-read.png"):
        shutil.copy(run / figure, ROOT / "docs" / figure)


def machine(where: dict[str, Any]) -> str:
    threads = f"{where['threads']} thread{'s' * (where['threads'] > 1)}"
    return f"{where['processor']}, {threads}, torch {where['torch']}, {where['date']}"


def demo_text() -> str:
    record = json.loads((HERE / "demo.json").read_text())
    results = [r | {"model": NAMES[r["model"]]} for r in record["results"]]
    trained = ", ".join(
        f"{NAMES[name]} {duration(t['seconds'])} at {t['tokens_per_second']:,.0f} tokens/s"
        for name, t in record["training"].items()
    )
    return (
        f"{needle_table(results, record['train_length'])}\n\n"
        f"Trained: {trained}. Machine: {machine(record['environment'])}, seed {record['settings']['seed']}.\n\n"
        f"![Accuracy by length](docs/accuracy.png)"
    )


def needles_text() -> str:
    cases = json.loads((HERE / "needles.json").read_text())
    demo = json.loads((HERE / "demo.json").read_text())
    asked = [(r["length"], r["needles"]) for r in cases[0]["results"]]
    own = {"case": "demo", "seed": demo["settings"]["seed"], "steps": demo["steps"]["drt"]}
    own["results"] = [r for r in demo["results"] if r["model"] == "drt"]
    rows = []
    for case in sorted([own, *cases], key=lambda c: (c["case"] != "demo", c["case"], c["seed"])):
        found = {(r["length"], r["needles"]): f"{r['accuracy']:.3f}" for r in case["results"]}
        cells = [found.get(task, "-") for task in asked]
        rows.append([case["case"], str(case["seed"]), f"{case['steps']:,}", *cells])
    header = ["case", "seed", "steps", *(f"{n} in {length:,}" for length, n in asked)]
    questions = min(r["questions"] for case in cases for r in case["results"])
    return (
        f"{markdown_table(header, rows)}\n\nAt least {questions} questions each; columns: needles in tokens. "
        f"Machine: {machine(cases[0]['environment'])}."
    )


def cpu_text() -> str:
    record = json.loads((HERE / "cpu.json").read_text())
    return f"{cpu_table(record['results'])}\n\nMachine: {machine(record['environment'])}."


def fill(path: Path, name: str, text: str) -> None:
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, rest = path.read_text().split(begin)
    path.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def main() -> None:
    if len(sys.argv) > 1:
        take_over(Path(sys.argv[1]))
    fill(ROOT / "README.md", "demo", demo_text())
    fill(HERE / "README.md", "needles", needles_text())
    fill(HERE / "README.md", "cpu", cpu_text())


if __name__ == "__main__":
    main()
