"""Perplexity as the two papers measured it, of laptop models: `trailmark evaluate --suite perplexity --protocol ...`.

    TRAILMARK_DATA=... python benchmarks/protocols.py            what benchmarks/protocols.json lacks
    TRAILMARK_DATA=... python benchmarks/protocols.py --seeds 1
    python benchmarks/protocols.py tables                        what was found so far

The protocols of arXiv 2410.01651 (Table 1, Figure 3b) are asked of rows of compare.py's text, those of arXiv 2305.16300
(Tables 1 and 2) of landmark_models.py's text model; both are trained where they are not there yet. The text is the
first tokens of TRAILMARK_DATA/books/test. Stopped at any time, the same command goes on.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import compare
import landmark_models
from common import data_folder, expect_settings
from compare_measure import row_config
from compare_rows import SEEDED, SEEDS
from tables import Column, Columns, Row, on_machine, record, table
from training_text import train

from trailmark.evaluation.evaluate import evaluate
from trailmark.evaluation.protocols import PUBLISHED
from trailmark.evaluation.record import environment
from trailmark.evaluation.suite import Request
from trailmark.files import write_json
from trailmark.machine import start_again_set_up
from trailmark.report.console import Progress
from trailmark.training.config import load_run_config

OUTPUT = Path(__file__).with_suffix(".json")
PAPER = {"Base": "Base", "Landmark": "Landmark Attention", "DRT x1": "DRT, G = 1", "DRT x2": "DRT, G = 2"}
TEXT_MODEL = "Landmark, of bytes"
SETTINGS = {"tokens": 131_072}  # of the text that are read
_KEPT = ("length", "windows", "tokens", "perplexity", "perplexity_low", "perplexity_high")


def of_compare(row: str, seed: int) -> Path:
    """The folder of a row of compare.py's text, trained."""
    comparison = compare.Comparison(compare.parse(["text"]))
    comparison.corpus()
    config = row_config(comparison.job("text", row, seed, comparison.sizes.text_steps))
    train(config)
    return Path(config.output)


def of_landmark() -> Path:
    """The folder of landmark_models.py's text model, trained."""
    benchmark = landmark_models.Benchmark(landmark_models.FOLDER, landmark_models.OUTPUT)
    benchmark.model("text")
    return benchmark.folder / "text"


def jobs(seeds: list[int]) -> list[tuple[str, str, int, Callable[[], Path]]]:
    """Protocol, row, seed, and what gives its model."""
    rows = [(row, seed, partial(of_compare, row, seed)) for seed in seeds for row in SEEDED]
    found = [(name, *row) for row in rows for name in ("gca-table-1", "gca-figure-3b")]
    return found + [(name, TEXT_MODEL, 0, of_landmark) for name in ("landmark-table-1", "landmark-table-2")]


def measure(protocol: str, model: Path) -> Row:
    """What the suite finds, cell by cell, of a model that was trained so."""
    progress = Progress()
    text = (data_folder("books") / "test",)
    request = Request(models=(model,), suite=("perplexity",), text=text, output=model / "protocols")
    options = {"protocol": protocol, "max_tokens": SETTINGS["tokens"]}
    (found,) = evaluate(request, options, say=print, progress=progress.show)
    progress.clear()
    training = load_run_config(model / "run.yaml").training
    return {
        "steps": training.steps,
        "context_length": training.context_length,
        "environment": environment(),
        "cells": [
            {name: result[name] for name in _KEPT} | {"set": result["settings"]["set"]}
            for result in found.results
        ],
    }


# --- tables --------------------------------------------------------------------------------------------------


def kept(*protocols: str) -> list[Row]:
    found = record("protocols").get("results", [])
    return [one for one in found if not protocols or one["protocol"] in protocols]


def _published(protocol: str, **wanted: Any) -> Row:
    return next(row for row in PUBLISHED[protocol] if all(row[name] == wanted[name] for name in wanted))


def gca_table() -> str:
    """The second paper's. What both its protocols measure is the same windows."""
    found: dict[str, dict[int, dict[int, float]]] = {}  # by row, length and seed
    for one in kept("gca-table-1", "gca-figure-3b"):
        for cell in one["cells"]:
            of_row = found.setdefault(one["row"], {})
            of_row.setdefault(cell["length"], {})[one["seed"]] = cell["perplexity"]

    def mean(length: int) -> Column:
        def shown(row: Row) -> str:
            values = [*row["of"].get(length, {}).values()]
            if not values:
                return "-"
            average = f"{statistics.fmean(values):.1f}"
            return average if len(values) < 3 else f"{average} ± {statistics.stdev(values):.1f}"

        return shown

    def paper(length: int) -> Column:
        of = partial(_published, "gca-table-1", size="128M", length=length)
        return lambda row: f"{of(model=PAPER[row['row']])['pg19_test']:.2f}"

    rows = [
        {"row": row, "of": of, "seeds": max(map(len, of.values()))} for row in PAPER if (of := found.get(row))
    ]
    columns: Columns = {"model": "{row}", "seeds": "{seeds}"}
    columns |= {f"{length:,}": mean(length) for length in sorted({n for of in found.values() for n in of})}
    columns |= {f"paper, {length:,}": paper(length) for length in (2048, 16384)}
    return table(columns, rows)


LANDMARK: Columns = {
    "length": "{length:,}",
    "selects for itself": lambda row: row["set"]["retrieve_per"].replace("_", " "),
    "local": "{set[local_length]}",
    "chunks kept": "{set[max_memory_chunks]}",
    "k": "{set[num_retrieved_chunks]}",
    "perplexity of bytes": "{perplexity:.3f} ({perplexity_low:.3f}-{perplexity_high:.3f})",
    "paper, of tokens": "{paper[pg19]:.2f}",
}


def landmark_table(protocol: str) -> str:
    """One of the first paper's two."""
    fields = ["local_length", "max_memory_chunks", "num_retrieved_chunks"]
    fields += ["retrieve_per"] if protocol == "landmark-table-2" else []
    rows = []
    for cell in (cell for one in kept(protocol) for cell in one["cells"]):
        wanted = {name: cell["set"][name] for name in fields}
        rows.append(cell | {"paper": _published(protocol, length=cell["length"], **wanted)})
    return table(LANDMARK, rows)


def text() -> str:
    """Both papers' tables."""
    found = kept()
    if not found:
        return "Nothing was measured yet."
    lengths = {one["row"]: one["context_length"] for one in found}
    trained = ", ".join(f"{row} at {length:,}" for row, length in lengths.items() if row in PAPER)
    tokens = record("protocols")["settings"]["tokens"]
    blocks = [
        f"Windows one after another of the first {tokens:,} tokens of held-out books, each read cold. *gca-table-1* "
        f"and *gca-figure-3b*, of compare.py's models (trained at so many tokens: {trained}), mean of seeds and, from "
        "three on, their standard deviation; *paper*: Table 1, PG19 test, 128M, trained at 16K:",
        gca_table(),
        f"*landmark-table-1*, of one model of bytes that was trained at {lengths.get(TEXT_MODEL)}, one seed, with 95% "
        "intervals over windows; *paper*: PG19:",
        landmark_table("landmark-table-1"),
        "*landmark-table-2*, of the same model:",
        landmark_table("landmark-table-2"),
    ]
    return on_machine("\n\n".join(blocks), found[0]["environment"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="*", choices=[[], "tables"])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    options = parser.parse_args()
    start_again_set_up()
    expect_settings("protocols", OUTPUT, record("protocols").get("settings", SETTINGS), SETTINGS)
    for protocol, row, seed, model in jobs(options.seeds) if not options.part else ():
        asked = {"protocol": protocol, "row": row, "seed": seed}
        if asked not in [{name: one[name] for name in asked} for one in kept()]:
            print(f"{protocol}: {row}, seed {seed}", flush=True)
            results = [*kept(), asked | measure(protocol, model())]
            write_json(OUTPUT, {"settings": SETTINGS, "results": results})
    print(text())


if __name__ == "__main__":
    main()
