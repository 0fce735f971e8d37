"""The tables of benchmarks/training.json, and the figure of time by length; benchmarks/readme.py puts them in place.

A part that was not measured is left out.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from tables import Columns, Row, crossed, line_figure, table
from training import deviations, time_per_token

COLOURS = {"window only": "#777777", "full attention": "#c2571a", "DRT x1": "#1f5fa8", "DRT x2": "#3d7f3f"}


def part_texts(found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Text and environment of each part of training.json."""
    makers = {"overhead": overhead_text, "loader": loader_text, "length": length_text}
    return [
        (make(found[name]), found[name]["environment"])
        for name, make in makers.items()
        if found.get(name, {}).get("results")
    ]


def _ratios(result: Row) -> str:
    ratios = result["ratios"]
    return f"{statistics.median(ratios):.1%} ({min(ratios):.1%}-{max(ratios):.1%})"


OVERHEAD: Columns = {
    "configuration": "{config}",
    "bare loop": "{tokens_per_second[bare]:spread}",
    "trailmark train": "{tokens_per_second[trailmark]:spread}",
    "of the bare loop": _ratios,
    "a median step": "{median_step_ratio:.1%}",
    "weights after it": lambda r: "bit-equal" if r["same_weights"] else "differ",
}


def overhead_text(part: dict[str, Any]) -> str:
    parts = [f"{r['config']}: {_lost(r['milliseconds_of_a_step'])}" for r in part["results"]]
    settings = part["settings"]
    return (
        "**Overhead of `trailmark train`** (tokens/s; a step of each in turn on the same batches, "
        f"{settings['blocks']} blocks of {settings['steps']} steps, each with a checkpoint: median, lowest and "
        "highest).\n\n"
        f"{table(OVERHEAD, part['results'])}\n\n"
        f"Milliseconds of a step, ours less the bare loop's: {'; '.join(parts)}."
    )


def _lost(parts: dict[str, dict[str, float]]) -> str:
    """What is lost by part, the largest first; parts below a hundredth of a millisecond are not named."""
    own, bare = parts["trailmark"], parts["bare"]
    lost = {name: own.get(name, 0.0) - bare.get(name, 0.0) for name in {*own, *bare}}
    named = sorted(lost.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {ms:+.2f}" for name, ms in named if abs(ms) >= 0.01)


LOADER: Columns = {
    "batches of": "{what}",
    "tokens/s": "{tokens_per_second:spread}",
    "of the demo's model": "{times_the_model:,.0f}x",
}


def loader_text(part: dict[str, Any]) -> str:
    corpus = part["corpus"]
    return (
        f"**Batches alone** (tokens/s, one process; shards of {corpus['tokens']:,} tokens in {corpus['documents']:,} "
        "documents, in the page cache; the demo's model trains in a bare loop).\n\n"
        + table(LOADER, part["results"])
    )


def length_text(part: dict[str, Any]) -> str:
    apart, settings = deviations(part), part["settings"]
    rows = [
        {"model": name, "length": length, "seconds": seconds}
        for name, times in time_per_token(part).items()
        for length, seconds in times.items()
        if length in settings["lengths"]
    ]
    shown = crossed(
        rows,
        {"model": "{model}"},
        "{length:,} tokens",
        "{seconds:us ,.1f}",
        {"most from the median": lambda own: f"{apart[own[0]['model']]:.1%}"},
    )
    return (
        f"**Time per token by context length** (microseconds; forward, backward and optimizer, "
        f"{settings['tokens_per_step']:,} tokens a step, medians of {settings['rounds']} rounds).\n\n{shown}"
    )


def length_figure(path: Path, part: dict[str, Any]) -> None:
    """Like Figure 3a of arXiv 2410.01651: what a token's training step costs by context length."""
    lines = {
        name: {length: seconds * 1e6 for length, seconds in times.items()}
        for name, times in time_per_token(part).items()
    }
    ticks = {length: f"{length // 1024}K" for length in part["settings"]["lengths"]}
    titles = (
        "A training step: time per token by context length",
        "context length (tokens)",
        "microseconds per token",
    )
    line_figure(path, lines, ticks, titles, COLOURS)
