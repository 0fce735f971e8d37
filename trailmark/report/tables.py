"""Tables made from results, as Markdown that also reads well in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trailmark.report.console import size


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to equal width; all but the first are right-aligned."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def needle_table(results: Sequence[dict[str, Any]], train_length: int) -> str:
    """One row per length and number of needles; ``results`` are NeedleResult summaries with a ``model``."""
    header = ["model", "tokens", "x train", "needles", "questions", "all digits right", "95% interval"]
    header += ["chunk retrieved", "tokens/s", "memory"]
    rows = [
        [
            str(r["model"]),
            f"{r['length']:,}",
            f"{r['length'] / train_length:g}x",
            str(r["needles"]),
            str(r["questions"]),
            f"{r['accuracy']:.3f}",
            f"{r['accuracy_low']:.3f}-{r['accuracy_high']:.3f}",
            "-" if r["recall"] is None else f"{r['recall']:.3f}",
            f"{r['tokens_per_second']:,.0f}",
            size(r["memory_bytes"]),
        ]
        for r in results
    ]
    return markdown_table(header, rows)


def perplexity_table(results: Sequence[dict[str, Any]]) -> str:
    header = ["tokens", "windows", "loss", "perplexity"]
    rows = [
        [f"{r['length']:,}", str(r["windows"]), f"{r['loss']:.4f}", f"{r['perplexity']:.3f}"] for r in results
    ]
    return markdown_table(header, rows)
