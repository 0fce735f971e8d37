"""Table 3 of arXiv 2410.01651 at its own sizes, with random weights: what a token costs after a long prompt.

    python benchmarks/table_3.py            writes benchmarks/table_3.json, on a machine that does nothing else
    python benchmarks/table_3.py tables     what was found so far

The suite "cost" of configs/*-128m.yaml. Without a GPU the tiers device and host are one memory, so that what is timed
is timed once, and the bytes that host leaves on a device are those of the formula, which is exact. Stopped, the same
command goes on with the prompt that it was at.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import CONFIGS, ROOT, keep
from tables import Column, Columns, Row, on_machine, record, table

from trailmark.evaluation.cost import run as cost
from trailmark.evaluation.cost.models import random_subject
from trailmark.evaluation.cost.suite import CostSettings
from trailmark.evaluation.record import Record
from trailmark.machine import start_again_set_up
from trailmark.report.console import Progress
from trailmark.settings import read_yaml

OUTPUT = Path(__file__).with_suffix(".json")
FOLDER = ROOT / "runs" / "benchmark-table-3"
ROUNDS = 3
MODELS = {  # by the file of its sizes: what the table calls it, and what the paper does
    "base-512-128m": ("Base", ""),
    "drt-x1-128m": ("DRT x1", "DRT retrieval x1"),
    "drt-x2-128m": ("DRT x2", ""),
    "landmark-128m": ("Landmark", "Landmark Attn."),
    "block-recurrent-128m": ("Block-Recurrent", "Block Recurrent TFM"),
    "rpt-128m": ("RPT", ""),
}
PROMPTS = (16_384, 49_152)
_KEPT = (
    "parameters", "dtype", "problem", "ms_per_token", "time_ratio", "time_ratio_quartiles", "device_bytes",
    "formula_device_bytes", "paper_formula_bytes",
)  # fmt: skip


def sizes(file: str) -> dict[str, Any]:
    """A configuration, without what would need the network: an encoder's and a tokenizer's files."""
    found = read_yaml(CONFIGS / f"{file}.yaml", "model")
    model = found["model"] | ({"embedder": "hash"} if "embedder" in found["model"] else {})
    return {"model": model, "data": {"tokenizer": "bytes"}}


def measure(folder: Path) -> list[Row]:
    """A row for each prompt and model."""
    progress = Progress()
    subjects = [replace(random_subject(sizes(file)), folder=Path(file)) for file in MODELS]
    kept = Record(folder, "cost", [subject.identity() for subject in subjects])
    settings = CostSettings(lengths=PROMPTS, tiers=("device",), rounds=ROUNDS)
    cells = cost.run(subjects, settings, kept, progress.show)
    progress.clear()
    found = []
    for prompt, measured in zip(PROMPTS, cells, strict=True):
        rows = zip(measured["rows"], subjects, MODELS.values(), strict=True)
        for row, subject, (own, paper) in rows:
            takes = subject.model.cache_bytes(prompt, settings.generate - 1)
            printed = [
                each
                for each in cost.TABLE_3
                if (each["model"], each["prompt"]) == (paper, f"{prompt >> 10}K")
            ]
            found.append(
                {"prompt": prompt, "row": own, "host_formula_bytes": takes.on_device("host", "cuda")}
                | {name: row[name] for name in _KEPT}
                | {"paper": {each["tier"]: each for each in printed}}
            )
    return found


def text() -> str:
    """The table of what was measured."""
    found = record("table_3").get("cost")
    if found is None:
        return "Nothing was measured yet."
    rows = found["results"]
    base = {row["prompt"]: row for row in rows if row["row"] == "Base"}

    def of_base(name: str) -> Column:
        """Bytes, and as a multiple of Base's."""

        def shown(row: Row) -> str:
            own, other = row[name], base[row["prompt"]][name]
            return "-" if own is None or other is None else f"{own / 2**20:,.0f} MiB, {own / other:.2f}x"

        return shown

    columns: Columns = {
        "prompt": "{prompt:,}",
        "model": "{row}",
        "parameters": "{parameters:,}",
        "ms per token": "{ms_per_token[median]:,.0f}",
        "time": "{time_ratio:.2f}x ({time_ratio_quartiles[0]:.2f}-{time_ratio_quartiles[1]:.2f})",
        "paper, time": "{paper[device][time_ratio]:g}x",
        "memory, device": of_base("device_bytes"),
        "paper, device": "{paper[device][memory_ratio]:g}x",
        "memory, host (formula)": of_base("host_formula_bytes"),
        "paper, host": "{paper[host][memory_ratio]:g}x",
        "by the paper's formula": "{paper_formula_bytes:mib ,.0f}",
        "why not": "{problem}",
    }
    return on_machine(table(columns, rows), found["environment"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="*", choices=[[], "tables"])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    start_again_set_up()
    if not options.part:
        keep(OUTPUT, "cost", measure(options.folder))
    print(text())


if __name__ == "__main__":
    main()
