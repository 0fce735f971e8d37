"""Tables made from results, as Markdown that also reads well in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trailmark.evaluation.suite import Column, Row, Suite, number, one_row, read, suites
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
            "-" if r["recall"] is None else f"{r['recall']:.3f}",
            f"{r['tokens_per_second']:,.0f}",
            size(r["memory_bytes"]),
        ]
        for r in results
    ]
    return markdown_table(header, rows)


def result_table(suite: Suite, results: Sequence[dict[str, Any]], train_length: int) -> str:
    """What ``trailmark evaluate`` found in one suite: a table for each heading, and what is to be minded."""
    rows = [{"train_length": train_length, **row} for result in results for row in suite.rows(result)]
    groups: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        groups.setdefault(suite.heading(row), []).append(row)
    tables = [
        (f"{heading}\n\n" if len(groups) > 1 else "") + column_table(suite.columns, group)
        for (heading, _), group in groups.items()
    ]
    return "\n\n".join([*tables, *dict.fromkeys(row["note"] for row in rows if row.get("note"))])


def column_table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """The columns that a terminal shows, without those in which nothing stands."""
    filled = {
        column: [written(read(row, column.value), column.form) for row in rows]
        for column in columns
        if "terminal" in column.on
    }
    kept = {column: cells for column, cells in filled.items() if any(cell != "-" for cell in cells)}
    return markdown_table([column.title for column in kept], list(zip(*kept.values(), strict=True)))


def written(value: Any, form: str) -> str:
    """A value as :class:`Column` says."""
    if isinstance(value, list | tuple):
        return "-".join(written(end, form) for end in value)
    if value is None or isinstance(value, str) or number(value) is None:
        return "-" if value is None else str(value)
    match form:
        case "bytes":
            return size(value)
        case "share":
            return f"{value:.3f}"
        case "times":
            return f"{value:.2f}"
    return f"{round(value) if form.endswith('d') else value:{form}}"


def perplexity_table(results: Sequence[dict[str, Any]]) -> str:
    """A row for each length; an interval, words and bytes where they were counted."""
    return column_table(suites()["perplexity"].columns, [row for r in results for row in one_row(r)])
