"""What a page is made of, as data that templates/report.html shows, and the section of a suite."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trailmark.evaluation.suite import Column, Row, Suite, Tile
from trailmark.evaluation.tables import Table, table_of
from trailmark.report.charts import charts_of, chunk_charts
from trailmark.report.collect import MOST_GENERATIONS, Collected, Result, generations
from trailmark.report.figures import Figure
from trailmark.values import MISSING, grouped, shown

_SAID_BEFORE = {"answer": "expected", "text": "generated", "summary": "reference"}  # in records of 0.1.0
_MOST_WRITTEN = 3  # of what a model wrote, for each result
_MOST_WRITTEN_IN_ALL = 24
_MOST_CHARACTERS = 1200  # of each


@dataclass
class Part:
    """What stands under one heading, in this order.

    Args:
        code: commands.
        folded: what opens when it is asked for: tables under a summary.
    """

    title: str = ""
    fine: str = ""
    notices: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    folded: dict[str, list[Table]] = field(default_factory=dict)

    @property
    def pair(self) -> bool:
        """Whether the figures stand side by side."""
        return len(self.figures) > 1 and not any(figure.wide for figure in self.figures)


@dataclass
class Section:
    """A section of the page.

    Args:
        name: its address on the page.
        short: its name where there is little room; else the title.
        of_files: whether the parts' titles are names of files.
    """

    name: str
    title: str
    parts: Sequence[Part]
    about: str = ""
    tiles: Sequence[Tile] = ()
    short: str = ""
    of_files: bool = False


def rows_of(suite: Suite, results: Sequence[Result]) -> list[Row]:
    """The rows of results, each with the label and the look of its model and with what the model wrote for it."""
    rows: list[Row] = []
    of_parts: dict[str, list[dict[str, Any]]] = {}
    for result, lines in generations(results):
        own = {"train_length": result.train_length, **result.values, "settings": result.settings}
        own["asked"] = own.get("asked") or lines
        written = lines
        if suite.parts:  # what is written for parts is shown with the whole, which comes after them
            alike = {name: value for name, value in result.settings.items() if name not in suite.parts}
            key = f"{result.model.label} {json.dumps(alike, sort_keys=True)}"
            written = of_parts[key] = [*of_parts.get(key, ()), *lines]
        for row in suite.rows(own):
            model = result.named(row.get("model")) if len(result.models) > 1 else result.model
            rows.append({**row, "model": model.label, "look": model.look, "written": written})
    return rows


def suite_section(suite: Suite, results: Sequence[Result], rows: Sequence[Row]) -> Section:
    """All that was measured in a suite."""
    parts = []
    if unfinished := _unfinished(suite, results):
        parts.append(Part(notices=unfinished))
    groups = grouped(rows, suite.heading)
    titles = [title for title, _ in groups]
    for place, ((title, fine), group) in enumerate(groups.items(), 1):
        # what is read without the line below the heading says itself of what it is
        whole = f"{title} ({fine.removesuffix('.')})" if fine and titles.count(title) > 1 else title
        part = _charted(charts_of(suite, whole, place, group), title, fine)
        caption = f"{whole or suite.title}: all cells"
        part.tables.append(table_of(caption, suite.columns, group, "page"))
        part.notes += dict.fromkeys(str(row["note"]) for row in group if row.get("note"))
        part.folded = _published(group) | _written(suite, group)
        parts.append(part)
    parts += [_charted([chart]) for chart in chunk_charts(suite, rows)]
    return Section(suite.name, suite.title, parts, suite.about)


def _charted(charts: Iterable[Figure | str], title: str = "", fine: str = "") -> Part:
    """Figures, and notes of what is not drawn."""
    part = Part(title, fine)
    for chart in charts:
        if isinstance(chart, str):
            part.notes.append(chart)
        else:
            part.figures.append(chart)
    return part


def _unfinished(suite: Suite, results: Sequence[Result]) -> list[str]:
    """Which files hold nothing of this suite that could be shown yet."""
    return [
        f"{source}: not all is measured yet; the same command goes on."
        for source, group in grouped(results, lambda result: result.source).items()
        if not rows_of(suite, group)
    ]


def _written(suite: Suite, rows: Sequence[Row]) -> dict[str, list[Table]]:
    """Some of what the models wrote, what is wrong first."""

    def wrong_first(lines: Iterable[Row]) -> list[Row]:
        return sorted(lines, key=lambda line: line.get("correct") is not False)

    def named(line: Row) -> Row:
        return {_SAID_BEFORE[name]: text for name, text in line.items() if name in _SAID_BEFORE} | dict(line)

    lines = wrong_first(
        {"model": row["model"], "length": row.get("length"), **named(line)}
        for row in rows
        for line in wrong_first(row["written"])[:_MOST_WRITTEN]
    )[:_MOST_WRITTEN_IN_ALL]
    if not lines or not suite.written:
        return {}
    said = f"{len(lines)} examples, wrong ones first, of the first {MOST_GENERATIONS:,} in each file"
    columns = [Column("model", "model", text=True), Column("tokens", "length", ",d"), *suite.written]
    table = table_of(said, columns, lines, "page")
    cut = [[_quote(text) for text in cells] for cells in table.rows]
    return {said: [Table(said, table.header, cut, table.words)]}


def _quote(text: str) -> str:
    """Text that a model wrote; what is left out is said."""
    rest = len(text) - _MOST_CHARACTERS
    return text if rest <= 0 else f"{text[:_MOST_CHARACTERS]} … ({rest:,} more characters)"


def _published(rows: Iterable[Row]) -> dict[str, list[Table]]:
    """What papers printed, as the results' protocols noted it: a table for each of theirs."""
    tables: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        given = row.get("published")
        for printed in given if isinstance(given, list) else [given]:
            if isinstance(printed, dict):
                about = [f"arXiv {printed['arxiv']}"] if "arxiv" in printed else []
                about += [str(printed["table"])] if "table" in printed else []
                key = json.dumps(printed, sort_keys=True, default=str)
                tables.setdefault(", ".join(about) or "the paper", {})[key] = printed
    folded = {}
    for source, entries in tables.items():
        names = {name: None for entry in entries.values() for name in entry if name not in ("arxiv", "table")}
        ordered = sorted(names, key=lambda name: name != "model")
        values = [[_value(entry.get(name)) for name in ordered] for entry in entries.values()]
        header = [name.replace("_", " ") for name in ordered]
        folded[f"Published: {source}"] = [Table(f"As printed in {source}", header, values)]
    return folded


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value(part)}" for key, part in value.items()) or MISSING
    return shown(value, ".5g") if isinstance(value, float) else shown(value)


def sections_of_suites(collected: Collected, known: Mapping[str, Suite]) -> tuple[list[Section], list[Tile]]:
    """The section of each suite, and the numbers that sum them up."""
    sections: list[Section] = []
    tiles: list[Tile] = []
    for suite in known.values():
        if results := collected.of(suite.name):
            rows = rows_of(suite, results)
            tiles += suite.tiles(rows) if rows else ()
            sections.append(suite_section(suite, results, rows))
    return sections, tiles
