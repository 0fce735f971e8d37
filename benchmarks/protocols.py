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
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

import compare
import landmark_models
from common import data_folder, expect_settings
from compare_measure import row_config
from compare_rows import ROWS, SEEDED, SEEDS, TEXT_STEPS
from compare_tables import over_seeds
from tables import Column, Columns, Row, on_machine, record, table
from training_text import train

from trailmark.evaluation.evaluate import evaluate
from trailmark.evaluation.protocols import perplexity_protocol
from trailmark.evaluation.record import environment
from trailmark.evaluation.suite import Request
from trailmark.files import write_json
from trailmark.machine import start_again_set_up
from trailmark.report.console import Progress
from trailmark.training.config import load_run_config

OUTPUT = Path(__file__).with_suffix(".json")
TEXT_MODEL = "Landmark, of bytes"
SETTINGS = {"tokens": 131_072}  # of the text that are read
_KEPT = ("length", "windows", "tokens", "perplexity", "perplexity_low", "perplexity_high")


@cache
def of_compare(row: str, seed: int) -> Path:
    """The folder of a row of compare.py's text, trained."""
    comparison = compare.Comparison(compare.parse(["text"]))
    comparison.corpus()
    config = row_config(comparison.job("text", row, seed, TEXT_STEPS))
    train(config)
    return Path(config.output)


@cache
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


def gca_table() -> str:
    """The second paper's: the lengths of Figure 3b, of which Table 1 has two, the same windows."""
    found = kept("gca-figure-3b")

    def mean(length: int) -> Column:
        def shown(row: Row) -> str:
            cells = (cell for one in row["of"] for cell in one["cells"])
            return over_seeds([cell["perplexity"] for cell in cells if cell["length"] == length], ".1f")

        return shown

    by_row = {name: [one for one in found if one["row"] == name] for name in SEEDED}
    rows = [
        {"row": name, "of": of, "seeds": len(of), "paper": asdict(ROWS[name].paper)}
        for name, of in by_row.items()
        if of
    ]
    lengths = sorted({cell["length"] for one in found for cell in one["cells"]})
    columns: Columns = {"model": "{row}", "seeds": "{seeds}"}
    columns |= {f"{length:,}": mean(length) for length in lengths}
    columns |= {"paper, 2,048": "{paper[at_2k]:.2f}", "paper, 16,384": "{paper[at_16k]:.2f}"}
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
    cells = [cell for one in kept(protocol) for cell in one["cells"]]
    asked = perplexity_protocol(protocol).cells(None) if cells else []
    rows = [cell | {"paper": of.published[0]} for cell, of in zip(cells, asked, strict=True)]
    return table(LANDMARK, rows)


def text() -> str:
    """Both papers' tables."""
    found = kept()
    if not found:
        return "Nothing was measured yet."
    lengths = {one["row"]: one["context_length"] for one in found}
    trained = ", ".join(f"{row} at {length:,}" for row, length in lengths.items() if row in SEEDED)
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
