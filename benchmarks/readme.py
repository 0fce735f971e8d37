"""Put the demo's numbers into the README and this folder: nothing there is typed by hand.

python benchmarks/readme.py [runs/demo]
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from trailmark.demo import NAMES
from trailmark.report.console import duration
from trailmark.report.tables import needle_table

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    run = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
    record = json.loads((run / "demo.json").read_text())
    for result in record["results"]:
        # single questions are for the figures; the counts stay
        result.pop("asked", None)
    (ROOT / "benchmarks/demo.json").write_text(json.dumps(record, indent=1) + "\n")
    shutil.copy(run / "accuracy.png", ROOT / "docs/accuracy.png")
    shutil.copy(run / "chunks-read.png", ROOT / "docs/chunks-read.png")
    table = needle_table(
        [r | {"model": NAMES[r["model"]]} for r in record["results"]], record["train_length"]
    )
    where, training = record["environment"], record["training"]
    trained = ", ".join(
        f"{NAMES[name]} {duration(t['seconds'])} at {t['tokens_per_second']:,.0f} tokens/s"
        for name, t in training.items()
    )
    text = (
        f"{table}\n\n"
        f"Trained: {trained}. Machine: {where['processor']}, {where['threads']} threads, torch {where['torch']}, "
        f"{where['date']}, seed {record['settings']['seed']}.\n\n"
        f"![Accuracy by length](docs/accuracy.png)"
    )
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split("<!-- demo -->")
    after = rest.split("<!-- /demo -->")[1]
    readme.write_text(f"{before}<!-- demo -->\n{text}\n<!-- /demo -->{after}")
    print(text)


if __name__ == "__main__":
    main()
