"""The figures of a suite, made from its rows as its charts are declared (:mod:`trailmark.evaluation.suite`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from markupsafe import Markup

from trailmark.evaluation import suite as declared
from trailmark.evaluation.suite import Row, Suite, read
from trailmark.evaluation.tables import Table
from trailmark.report.charts import (
    Asked,
    Bar,
    BarChart,
    BarPanel,
    Chart,
    ChunkChart,
    HeatChart,
    HeatMap,
    Line,
    LineChart,
    Panel,
    Point,
)
from trailmark.report.svg import inline
from trailmark.values import count, grouped, number, short_length

# of many models more of them would be neither read nor quickly drawn
_MOST_MAPS = 8
_MOST_CHUNK_CHARTS = 4
_MOST_QUESTIONS = 40


@dataclass(frozen=True)
class Figure:
    """A chart on the page: its drawing, and the same numbers as a table."""

    chart: Chart
    numbers: Table
    drawing: Markup | None  # None: nothing can draw
    files: Sequence[tuple[str, str]] = ()  # what they are, and where they lie from the page


@dataclass
class Figures:
    """Draws charts, or gives their numbers alone where nothing can draw."""

    folder: Path | None  # for the files; None: no drawing
    progress: Callable[[str], None] = lambda message: None
    written: list[Path] = field(default_factory=list)

    def show(self, chart: Chart) -> Figure:
        header, rows = chart.table()
        numbers = Table(f"Numbers: {chart.title}", header, rows, chart.words)
        if self.folder is None:
            return Figure(chart, numbers, None)
        self.progress(f"drawing {chart.title}")
        drawing = inline(chart.write(self.folder), chart.name, chart.title, chart.description)
        files = [self.folder / f"{chart.name}.{kind}" for kind in ("svg", "png")]
        self.written += files
        links = [(file.suffix[1:].upper(), f"{self.folder.name}/{file.name}") for file in files]
        return Figure(chart, numbers, drawing, links)


@dataclass
class Series:
    """Rows that make one line or map."""

    label: str
    look: int
    rows: list[Row]


def series_of(suite: Suite, rows: Sequence[Row]) -> list[Series]:
    """The rows by model and by what else tells them apart; each label says as much as is needed for that."""
    groups = grouped(rows, lambda row: (row["model"], *suite.series(row)))
    differing = [n for n, words in enumerate(zip_longest(*groups)) if n == 0 or len(set(words)) > 1]
    looks = [group[0]["look"] for group in groups.values()]
    alone = len(set(looks)) == len(looks)
    return [
        Series(
            ", ".join(str(key[n]) for n in differing if n < len(key) and key[n]),
            group[0]["look"] if alone else place,
            group,
        )
        for place, (key, group) in enumerate(groups.items())
    ]


def charts_of(suite: Suite, heading: str, place: int, rows: Sequence[Row]) -> Iterator[Chart | str]:
    """The charts of the rows under one heading, and a sentence where some could not be drawn."""
    for chart in suite.charts:
        name = f"{suite.name}-{place}-{chart.name}"
        title = f"{heading}: {chart.title}" if heading else chart.title
        if isinstance(chart, declared.Lines):
            yield from _line_chart(replace(chart, name=name, title=title), series_of(suite, rows))
        elif isinstance(chart, declared.HeatMap):
            yield from _heat_chart(replace(chart, name=name, title=title), series_of(suite, rows))
        elif isinstance(chart, declared.Bars):
            yield from _bar_chart(replace(chart, name=name, title=title), rows)


def _line_chart(chart: declared.Lines, series: Sequence[Series]) -> Iterator[Chart]:
    panels = []
    drawn: set[str] = set()
    for panel in chart.panels:
        lines = []
        for one in series:
            points = points_of(chart.points(one.rows), chart.x, panel)
            if len(points) > 1:
                lines.append(Line(one.label, one.look, points))
                drawn.add(one.label)
        if lines:
            panels.append(Panel(panel.title, panel.label, lines, panel.share))
    if not panels:
        return
    if chart.rule is not None:
        marks = [number(read(row, chart.rule)) for one in series if one.label in drawn for row in one.rows]
        rules = {mark for mark in marks if mark is not None}
        if len(rules) == 1:
            panels[0] = replace(panels[0], rule=(rules.pop(), chart.rule_label))
    left = len(series) - len(drawn)
    alone = f" {left} series of one point stand in the table alone." if left else ""
    yield LineChart(
        name=chart.name,
        title=chart.title,
        description=chart.caption + alone,
        panels=panels,
        x_label=chart.x_label,
    )


def points_of(rows: Iterable[Row], x: declared.Value, panel: declared.Panel) -> list[Point]:
    """In the order of x; of several rows with the same x the last one counts."""
    points = {}
    for row in rows:
        at, (value, low, high) = number(read(row, x)), _measured(row, panel)
        if at is not None and value is not None:
            points[at] = Point(at, value, low, high)
    return [points[at] for at in sorted(points)]


def _measured(row: Row, panel: declared.Panel) -> tuple[float | None, float | None, float | None]:
    """What a panel draws of a row, and the ends of its interval."""
    low, high = panel.interval or ("", "")
    return number(read(row, panel.value)), number(read(row, low)), number(read(row, high))


def _heat_chart(chart: declared.HeatMap, series: Sequence[Series]) -> Iterator[Chart | str]:
    maps = []
    for one in series:
        cells: dict[tuple[float, float], float] = {}
        for row in one.rows:
            x, y, value = (number(read(row, name)) for name in (chart.x, chart.y, chart.value))
            if x is not None and y is not None and value is not None:
                cells[y, x] = value
        ys, xs = (sorted({cell[axis] for cell in cells}) for axis in (0, 1))
        if len(ys) > 1:
            values = [[cells.get((y, x)) for x in xs] for y in ys]
            maps.append(HeatMap(one.label, [short_length(x) for x in xs], [f"{y:g}" for y in ys], values))
    if maps:
        yield HeatChart(
            name=chart.name,
            title=chart.title,
            description=chart.caption,
            panels=maps[:_MOST_MAPS],
            x_label=chart.x_label,
            y_label=chart.y_label,
            what=chart.title,
        )
    yield from _left_out(
        "Heat maps", [heat.title for heat in maps[_MOST_MAPS:]], "their numbers stand in the table below"
    )


def _bar_chart(chart: declared.Bars, rows: Sequence[Row]) -> Iterator[Chart]:
    panels = []
    for by, group in grouped(rows, chart.by).items():
        rows_of_model = Counter(row["model"] for row in group)
        for panel in chart.panels:
            bars = []
            for n, row in enumerate(group, 1):
                label = f"{row['model']}, {n}" if rows_of_model[row["model"]] > 1 else row["model"]
                value, low, high = _measured(row, panel)
                says = "" if value is not None else str(read(row, chart.instead) or "not measured")
                bars.append(Bar(label, row["look"], value, low, high, says))
            if any(bar.value is not None for bar in bars):
                title = by if by and len(chart.panels) == 1 else ", ".join(filter(None, (panel.title, by)))
                panels.append(BarPanel(title, bars))
    if panels:
        yield BarChart(
            name=chart.name,
            title=chart.title,
            description=chart.caption,
            panels=panels,
            x_label=chart.x_label,
            form=".2f" if chart.form == "times" else chart.form,
            unit="×" if chart.form == "times" else "",
            base=chart.base,
            dots=any(panel.interval for panel in chart.panels),
        )


def chunk_charts(suite: Suite, rows: Sequence[Row]) -> Iterator[Chart | str]:
    """For some models, which chunks were read in the longest text for which that is known."""
    for chart in suite.charts:
        if not isinstance(chart, declared.ChunkMap):
            continue
        drawn, left_out = 0, []
        for model, group in grouped(rows, lambda row: row["model"]).items():
            longest_first = sorted(group, key=lambda row: -(number(row.get("length")) or 0.0))
            farthest = next((row for row in longest_first if _asked(chart, row)), None)
            if farthest is not None and drawn == _MOST_CHUNK_CHARTS:
                left_out.append(model)
            elif farthest is not None:
                drawn += 1
                yield _chunk_chart(suite, chart, farthest, group)
        where = (
            f"what was read for each question stands in {suite.name}.generations.jsonl beside their records"
        )
        yield from _left_out(f"The {chart.title}", left_out, where)


def _chunk_chart(suite: Suite, chart: declared.ChunkMap, farthest: Row, rows: Sequence[Row]) -> Chart:
    """The questions of one task at one length, as many of each of its rows."""
    task = suite.heading(farthest), farthest.get("length")
    same = [_asked(chart, row) for row in rows if (suite.heading(row), row.get("length")) == task]
    turns = [question for turn in zip_longest(*same) for question in turn if question is not None]
    questions = sorted(turns[:_MOST_QUESTIONS], key=lambda question: question.needle)
    return ChunkChart(
        name=f"{chart.name}-{farthest['look'] + 1}",
        title=f"{farthest['model']}: {chart.title} at {count(farthest.get('length'))} tokens",
        description=f"{len(questions)} questions. {chart.caption}",
        panels=[questions],
    )


def _asked(chart: declared.ChunkMap, row: Row) -> list[Asked]:
    """The questions of a row of which it is known what the first group read for them."""
    questions = []
    for question in chart.asked(row):
        needle = number(next(iter(_first_list([question.get("needle", question.get("gold_chunks"))])), None))
        chosen = [
            int(chunk)
            for chunk in _first_list(question.get("selected"))
            if number(chunk) is not None and chunk >= 0
        ]
        weights = [min(1.0, max(0.0, number(w) or 0.0)) for w in _first_list(question.get("weights"))]
        if needle is not None and chosen:
            weights += [0.0] * (len(chosen) - len(weights))
            questions.append(Asked(int(needle), chosen, weights[: len(chosen)]))
    return questions


def _first_list(lists: Any) -> list[Any]:
    """Of nested lists the innermost first one."""
    while isinstance(lists, list) and lists and isinstance(lists[0], list):
        lists = lists[0]
    return lists if isinstance(lists, list) else []


def _left_out(what: str, names: Sequence[str], where: str) -> Iterator[str]:
    """What is not drawn, so that a page of many models stays one that can be read, and where its numbers stand."""
    if names:
        yield f"{what} of {len(names)} more are not drawn; {where}: {', '.join(names)}."
