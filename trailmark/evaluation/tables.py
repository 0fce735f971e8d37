"""Tables made from a suite's columns: for pages, for a terminal, and what a record keeps for the model's card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trailmark.evaluation.suite import Column, Place, Row, Suite, read
from trailmark.values import MISSING, interval, perplexity, perplexity_interval, share, shown, size, times

_MOST_OPEN = 60  # rows of a table that stands open


@dataclass(frozen=True)
class Table:
    """A table without the columns in which nothing stands; the first column names the rows.

    Args:
        words: the columns, beside the first, that hold words and not numbers.
        legend: headings that do not say themselves what they mean, and what that is.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = ()
    legend: Sequence[tuple[str, str]] = ()

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
    legend = [(column.title, column.about) for column in kept if column.about]
    return Table(caption, [column.title for column in kept], body, words, legend)


def cell(row: Row, column: Column) -> str:
    """What stands in a row's cell; "-" where nothing is known."""
    value, form = read(row, column.value), column.form
    if isinstance(value, tuple | list) and len(value) == 2:
        low, high = value
        if form == "perplexity":
            return perplexity_interval(low, high)
        return interval(low, high, form or ".3f")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if form == "bytes":
        return size(value)
    if form == "perplexity":
        return perplexity(value)
    if form == "share":
        return share(value)
    return times(value) if form == "times" else shown(value, form)


def card_table(suite: Suite, results: Sequence[Row]) -> dict[str, Any]:
    """What a model card shows of results: the suite's title, a header, and rows with the number of their result.

    It stands in the record: a card is made too where a model is saved, which knows of no suite. The settings that tell
    results apart and that no column shows stand in a last column, "also".
    """
    columns = [column for column in suite.columns if "card" in column.on]
    found = [(number, row) for number, result in enumerate(results) for row in suite.rows(result)]
    names = dict.fromkeys(name for _, row in found for name in row["settings"])
    varying = [name for name in names if len({str(row["settings"].get(name)) for _, row in found}) > 1]
    also = [
        name
        for name in varying
        if not any(_tells(column, row, name) for column in columns for _, row in found)
    ]

    def told(row: Row) -> str | None:
        return ", ".join(f"{name} {shown(row['settings'].get(name))}" for name in also) or None

    rows = [row for _, row in found]
    table = table_of(suite.title, [*columns, Column("also", told, on=("card",))], rows, "card")
    numbered = [{"result": n, "cells": cells} for (n, _), cells in zip(found, table.rows, strict=False)]
    return {"title": suite.title, "header": table.header, "rows": numbered}


def _tells(column: Column, row: Row, name: str) -> bool:
    """Whether a column shows a setting: without it, another cell would stand there."""
    settings = {key: value for key, value in row["settings"].items() if key != name}
    without = {key: value for key, value in row.items() if key != name} | {"settings": settings}
    return cell(without, column) != cell(row, column)
