"""Tables made from results: the columns of each suite, for pages and as Markdown that reads well in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trailmark.evaluation.suite import Column, Place, Row, Suite, read
from trailmark.report.values import MISSING, grouped, interval, share, shown, size, times

_MOST_OPEN = 60  # rows of a table that stands open


@dataclass(frozen=True)
class Table:
    """A table without the columns in which nothing stands; the first column names the rows.

    Args:
        words: the columns, beside the first, that hold words and not numbers.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = ()

    @property
    def long(self) -> bool:
        """Whether it would hide what stands below it."""
        return len(self.rows) > _MOST_OPEN


def table_of(caption: str, columns: Sequence[Column], rows: Sequence[Row], place: Place) -> Table:
    """What the columns for this place say of the rows."""
    cells = {column: [cell(row, column) for row in rows] for column in columns if place in column.on}
    kept = [column for column in cells if any(text != MISSING for text in cells[column])]
    words = [number for number, column in enumerate(kept) if column.text]
    body = list(zip(*(cells[column] for column in kept), strict=True))
    return Table(caption, [column.title for column in kept], body, words)


def cell(row: Row, column: Column) -> str:
    """What stands in a row's cell; "-" where nothing is known."""
    value, form = read(row, column.value), column.form
    if isinstance(value, tuple | list) and len(value) == 2:
        low, high = value
        return interval(low, high, form or ".3f")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if form == "bytes":
        return size(value)
    if form == "share":
        return share(value)
    return times(value) if form == "times" else shown(value, form)


def result_table(suite: Suite, results: Sequence[Mapping[str, Any]], train_length: int | None = None) -> str:
    """What ``trailmark evaluate`` measured: a table for each heading, and what is to be noted of the results."""
    rows = [{"train_length": train_length, **row} for result in results for row in suite.rows(result)]
    groups = grouped(rows, suite.heading)
    parts = []
    for (title, _), group in groups.items():
        table = table_of(title, suite.columns, group, "terminal")
        parts += [title] * (len(groups) > 1) + [markdown_table(table.header, table.rows)]
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
