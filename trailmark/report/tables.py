"""Tables of results as Markdown that reads well in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trailmark.evaluation.suite import Suite
from trailmark.evaluation.tables import table_of
from trailmark.values import grouped, shown, size


def result_table(suite: Suite, results: Sequence[Mapping[str, Any]], train_length: int | None = None) -> str:
    """What ``trailmark evaluate`` measured: a table for each heading, and what is to be noted of the results."""
    rows = [{"train_length": train_length, **row} for result in results for row in suite.rows(result)]
    groups = grouped(rows, suite.heading)
    parts, legends = [], dict[str, str]()
    for (title, _), group in groups.items():
        table = table_of(title, suite.columns, group, "terminal")
        parts += [title] * (len(groups) > 1) + [markdown_table(table.header, table.rows)]
        legends |= dict(table.legend)
    parts += [legend_text(legends)] * bool(legends)
    parts += dict.fromkeys(str(row["note"]) for row in rows if row.get("note"))
    return "\n\n".join(parts)


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


def legend_text(legend: Mapping[str, str]) -> str:
    """What headings mean, below their table."""
    return " ".join(f"*{title}*: {about}." for title, about in legend.items())


NEEDLE_LEGEND = {
    "x train": "tokens, as a multiple of the longest text trained on",
    "needles": "hidden in the text at once",
    "chunk retrieved": "share of questions at which the needle's chunk was read",
    "memory": "of past chunks' keys, values and landmarks",
}
"""What headings of :func:`needle_table` mean."""


def needle_table(results: Sequence[Mapping[str, Any]], train_length: int) -> str:
    """One row per length and number of needles; ``results`` are those of the suite with a ``model``."""
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
            shown(r["recall"], ".3f"),
            f"{r['tokens_per_second']:,.0f}",
            size(r["memory_bytes"]),
        ]
        for r in results
    ]
    return markdown_table(header, rows)
