"""The charts that a suite declares (:mod:`trailmark.evaluation.suite`), as figures of its rows.

What a figure shows is rows as well: one for each point, cell, bar or question. Its table and its drawing read them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

from trailmark.evaluation.suite import (
    Bars,
    ChunkMap,
    Column,
    HeatMap,
    Lines,
    Panel,
    Row,
    Suite,
    Value,
    read,
)
from trailmark.evaluation.tables import table_of
from trailmark.report.figures import Figure, look, panels, short
from trailmark.report.theme import LIGHT, SERIES, heat_ink, heat_level
from trailmark.values import count, grouped, number, short_length

# of many models more of them would be neither read nor quickly drawn
_MOST_MAPS = 8
_MOST_CHUNK_CHARTS = 4
_MOST_QUESTIONS = 40
_MOST_NUMBERS = 400  # of a heat map's cells: more are coloured alone
_RULE: Any = {"color": LIGHT["muted"], "linestyle": ":", "linewidth": 1}


@dataclass(frozen=True)
class Series:
    """Rows that make one line or map."""

    label: str
    look: int
    rows: Sequence[Row]


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


def charts_of(suite: Suite, heading: str, place: int, rows: Sequence[Row]) -> Iterator[Figure | str]:
    """The charts of the rows under one heading, and a sentence where some could not be drawn."""
    for declared in suite.charts:
        title = f"{heading}: {declared.title}" if heading else declared.title
        chart = replace(declared, name=f"{suite.name}-{place}-{declared.name}", title=title)
        if isinstance(chart, Lines):
            yield from line_chart(chart, series_of(suite, rows))
        elif isinstance(chart, HeatMap):
            yield from heat_chart(chart, series_of(suite, rows))
        elif isinstance(chart, Bars):
            yield from bar_chart(chart, rows)


def _figure(
    chart: Lines | HeatMap | Bars | ChunkMap,
    columns: Sequence[Column],
    rows: Sequence[Row],
    draw: Any,
    **more: Any,
) -> Figure:
    numbers = table_of(f"Numbers: {chart.title}", columns, rows, "page")
    return Figure(chart.name, chart.title, chart.caption, numbers, draw, **more)


def _measured(row: Row, panel: Panel) -> dict[str, float | None]:
    """What a panel draws of a row, and the ends of its interval."""
    low, high = panel.interval or ("", "")
    read_from = {"value": panel.value, "low": low, "high": high}
    return {name: number(read(row, value)) for name, value in read_from.items()}


def _left_out(what: str, names: Sequence[str], where: str) -> Iterator[str]:
    """What is not drawn, so that a page of many models stays one that can be read, and where its numbers stand."""
    if names:
        yield f"{what} of {len(names)} more are not drawn; {where}: {', '.join(names)}."


# --- lines ---------------------------------------------------------------------------------------------------------

Curves = Sequence[tuple[Panel, Sequence[Series]]]
"""The lines of each panel: their rows are points, with "x", "value", "low" and "high"."""


def curves_of(chart: Lines, series: Sequence[Series]) -> Curves:
    """Of each series and panel that has two points or more."""
    curves = []
    for panel in chart.panels:
        lines = [replace(one, rows=points_of(chart.points(one.rows), chart.x, panel)) for one in series]
        if long := [line for line in lines if len(line.rows) > 1]:
            curves.append((panel, long))
    return curves


def points_of(rows: Iterable[Row], x: Value, panel: Panel) -> list[Row]:
    """In the order of x; of several rows with the same x the last one counts."""
    points = {}
    for row in rows:
        at, measured = number(read(row, x)), _measured(row, panel)
        if at is not None and measured["value"] is not None:
            points[at] = {"x": at, **measured}
    return [points[at] for at in sorted(points)]


def line_chart(chart: Lines, series: Sequence[Series]) -> Iterator[Figure]:
    """Lines with bands by length, in panels that share the x axis."""
    curves = curves_of(chart, series)
    drawn = {line.label for _, lines in curves for line in lines}
    rule = None
    if chart.rule is not None:
        marks = [number(read(row, chart.rule)) for one in series if one.label in drawn for row in one.rows]
        rules = {mark for mark in marks if mark is not None}
        rule = rules.pop() if len(rules) == 1 else None
    if left := len(series) - len(drawn):
        chart = replace(
            chart, caption=f"{chart.caption} {left} series of one point stand in the table alone."
        )
    if curves:
        yield line_figure(chart, curves, rule)


def line_figure(
    chart: Lines, curves: Curves, rule: float | None = None, lengths: bool = True, every: int = 1
) -> Figure:
    """What :func:`curves_of` a chart gave.

    Args:
        rule: where the chart's rule is drawn, in the first panel.
        lengths: x is a number of tokens, on a logarithmic axis where they lie far apart; else points lie too near for
            markers.
        every: of each line the table holds every point with a number divisible by this, and the last.
    """
    wide = len(curves) > 1
    columns = (
        Column("panel", "panel"),
        Column("series", "series"),
        Column(chart.x_label, lambda point: _plain(point["x"])),
        *(Column(name, name, ".4g") for name in ("value", "low", "high")),
    )
    rows = [
        {"panel": panel.title if wide else None, "series": line.label, **point}
        for panel, lines in curves
        for line in lines
        for n, point in enumerate(line.rows)
        if n % every == 0 or n == len(line.rows) - 1
    ]
    return _figure(chart, columns, rows, partial(_draw_lines, chart, curves, rule, lengths), wide=wide)


def _draw_lines(chart: Lines, curves: Curves, rule: float | None, lengths: bool) -> Any:
    figure, fields = panels(len(curves), 2.75)
    handles: dict[str, Any] = {}
    for axes, (panel, lines) in zip(fields, curves, strict=True):
        for line in lines:
            handles.setdefault(line.label, _draw_line(axes, line, lengths))
        points = [point for line in lines for point in line.rows]
        places = sorted({point["x"] for point in points})
        if lengths:
            if places[0] > 0 and places[-1] > 4 * places[0]:
                axes.set_xscale("log", base=2)
            ticks = _chosen(places, axes.get_xscale() == "log")
            axes.set_xticks(ticks, [short_length(x) for x in ticks])
            axes.xaxis.minorticks_off()
        if panel.share:
            axes.set_ylim(-0.02, 1.02)
        else:
            _value_scale(axes, [point["value"] for point in points])
        if rule is not None and axes is fields[0]:
            axes.axvline(rule, **_RULE)
            axes.annotate(
                chart.rule_label, (rule, 0.5), xycoords=("data", "axes fraction"), xytext=(4, 0),
                textcoords="offset points", fontsize=7.5, color=LIGHT["muted"],
            )  # fmt: skip
        axes.grid(True, axis="y")
        axes.set(title=short(panel.title, 60), xlabel=chart.x_label, ylabel=panel.label)
    # below the panels, one entry for each label, in as many columns as fit
    longest = max(len(short(label)) for label in handles)
    columns = min(len(handles), max(1, int(figure.get_figwidth() * 11 / (longest + 7))))
    figure.set_figheight(figure.get_figheight() + 0.19 * (math.ceil(len(handles) / columns) - 1))
    figure.legend(handles=list(handles.values()), loc="outside lower left", ncols=columns)
    return figure


def _draw_line(axes: Any, line: Series, marked: bool) -> Any:
    """A line with its band; its entry for the legend."""
    colour, dashes, marker = look(line.look)
    xs, ys = [point["x"] for point in line.rows], [point["value"] for point in line.rows]
    (drawn,) = axes.plot(
        xs, ys, color=colour, linestyle=dashes, marker=marker if marked else None, label=short(line.label),
        clip_on=False, zorder=3,
    )  # fmt: skip
    ends = [(point["x"], point["low"], point["high"]) for point in line.rows]
    band = [end for end in ends if None not in end]
    if len(band) == 1:  # a band needs two points
        axes.vlines(*band[0], color=colour, alpha=0.5, linewidth=3)
    elif band:
        axes.fill_between(*zip(*band, strict=True), color=colour, alpha=0.16, linewidth=0)
    return drawn


def _chosen(places: Sequence[float], logarithmic: bool, most: int = 8) -> list[float]:
    """At most so many of the places, none near another, the first and the last among them."""
    at = [math.log(x) if logarithmic else x for x in places]
    least = (at[-1] - at[0]) / most
    kept = [0]
    for n in range(1, len(places) - 1):
        if at[n] - at[kept[-1]] >= least and at[-1] - at[n] >= least:
            kept.append(n)
    return [places[n] for n in (*kept, len(places) - 1)]


def _value_scale(axes: Any, values: Sequence[float]) -> None:
    """Logarithmic where the values lie more than ten times apart."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.ticklabel_format(axis="y", useOffset=False, style="plain")
    least, most = min(values), max(values)
    if (span := most - least) > 0.2 * max(map(abs, values)):
        # bands far wider than the lines differ do not flatten these
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, least - span), min(high, most + span))
    if 0 < 10 * least < most:
        axes.set_ylim(least / 1.3, most * 1.3)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        between = FuncFormatter(lambda y, _: f"{y:g}" if f"{y:e}"[0] in "25" else "")
        axes.yaxis.set_minor_formatter(between if most < 100 * least else NullFormatter())


def _plain(x: float) -> str:
    return f"{round(x):,}" if x == round(x) else f"{x:.4g}"


# --- heat maps -----------------------------------------------------------------------------------------------------


def heat_chart(chart: HeatMap, series: Sequence[Series]) -> Iterator[Figure | str]:
    """Shares by two numbers, in a map for each series; its rows are cells, without a value where none was measured."""
    maps = []
    for one in series:
        known: dict[tuple[float, float], float] = {}
        for row in one.rows:
            x, y, value = (number(read(row, name)) for name in (chart.x, chart.y, chart.value))
            if x is not None and y is not None and value is not None:
                known[y, x] = value
        ys, xs = (sorted({cell[axis] for cell in known}) for axis in (0, 1))
        if len(ys) > 1:
            cells = [{"model": one.label, "x": x, "y": y, "value": known.get((y, x))} for y in ys for x in xs]
            maps.append(replace(one, rows=cells))
    if shown := maps[:_MOST_MAPS]:
        columns = (
            Column("model", "model"),
            Column(chart.x_label, lambda cell: short_length(cell["x"])),
            Column(chart.y_label, "y", "g"),
            Column("value", "value", ".3f"),
        )
        rows = [cell for one in shown for cell in one.rows]
        yield _figure(chart, columns, rows, partial(_draw_maps, chart, shown), wide=len(shown) > 1)
    left = [one.label for one in maps[_MOST_MAPS:]]
    yield from _left_out("Heat maps", left, "their numbers stand in the table below")


def _draw_maps(chart: HeatMap, maps: Sequence[Series]) -> Any:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    tallest = max(len({cell["y"] for cell in one.rows}) for one in maps)
    numbered = sum(len(one.rows) for one in maps) <= _MOST_NUMBERS
    figure, fields = panels(len(maps), 0.9 + 0.3 * tallest, head=0.22)
    # for a reader who has the picture alone
    figure.suptitle(chart.title, x=0.01, ha="left", fontsize=9.5, color=LIGHT["muted"])
    for axes, one in zip(fields, maps, strict=True):
        xs, ys = (list(dict.fromkeys(cell[axis] for cell in one.rows)) for axis in "xy")
        known = [
            (xs.index(cell["x"]), ys.index(cell["y"]), cell["value"])
            for cell in one.rows
            if cell["value"] is not None
        ]
        boxes = [Rectangle((column - 0.48, row - 0.47), 0.96, 0.94) for column, row, _ in known]
        colours = [LIGHT[f"heat-{heat_level(value)}"] for *_, value in known]
        axes.add_collection(PatchCollection(boxes, facecolors=colours, edgecolors="none"))
        for column, row, value in known if numbered else ():
            axes.text(
                column, row, _in_cell(value), ha="center", va="center",
                fontsize=8 if len(xs) <= 8 else 6, color=LIGHT[heat_ink(heat_level(value))],
            )  # fmt: skip
        axes.set(xlim=(-0.5, len(xs) - 0.5), ylim=(len(ys) - 0.5, -0.5))
        axes.set_xticks(range(len(xs)), map(short_length, xs))
        axes.set_yticks(range(len(ys)), [f"{y:g}" for y in ys])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set(title=short(one.label), xlabel=chart.x_label, ylabel=chart.y_label)
    return figure


def _in_cell(value: float) -> str:
    if 0 < value < 0.005 or 0.995 <= value < 1:  # neither nothing nor all
        return "<.01" if value < 0.5 else ">.99"
    return f"{value:.2f}"


# --- bars ----------------------------------------------------------------------------------------------------------


def bar_chart(chart: Bars, rows: Sequence[Row]) -> Iterator[Figure]:
    """Horizontal bars, or dots with whiskers where there are intervals; a row without a value says why."""
    form, unit = (".2f", "×") if chart.form == "times" else (chart.form, "")
    fields: list[list[Row]] = []
    for by, group in grouped(rows, chart.by).items():
        rows_of_model = Counter(row["model"] for row in group)
        for panel in chart.panels:
            title = by if by and len(chart.panels) == 1 else ", ".join(filter(None, (panel.title, by)))
            bars: list[Row] = []
            for n, row in enumerate(group, 1):
                label = f"{row['model']}, {n}" if rows_of_model[row["model"]] > 1 else row["model"]
                measured = _measured(row, panel)
                if measured["value"] is None:
                    says = str(read(row, chart.instead) or "not measured")
                else:
                    says = f"{measured['value']:{form}}{unit}"
                bars.append({"panel": title, "model": label, "look": row["look"], "says": says, **measured})
            if any(bar["value"] is not None for bar in bars):
                fields.append(bars)
    if fields:
        columns = (
            Column("panel", "panel"),
            Column("model", "model", text=True),
            Column(chart.x_label, "says", text=True),
            Column("low", "low", form),
            Column("high", "high", form),
        )
        every = [bar for bars in fields for bar in bars]
        yield _figure(chart, columns, every, partial(_draw_bars, chart, fields), wide=len(fields) > 1)


def _draw_bars(chart: Bars, every: Sequence[Sequence[Row]]) -> Any:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    dots = any(panel.interval for panel in chart.panels)  # then the axis need not begin at 0
    figure, fields = panels(len(every), 0.75 + 0.26 * max(map(len, every)))
    for axes, bars in zip(fields, every, strict=True):
        for place, bar in enumerate(bars):
            _draw_bar(axes, place, bar, dots)
        if chart.base is not None:
            axes.axvline(chart.base, **_RULE)
        axes.set_yticks(range(len(bars)), [short(bar["model"]) for bar in bars])
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        if dots:
            axes.margins(x=0.18)
            axes.grid(True, axis="x")
        else:
            longest = max(bar["value"] for bar in bars if bar["value"] is not None)
            axes.set_xlim(0, (longest or 1.0) * 1.22)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.6g}"))
        axes.set(title=short(bars[0]["panel"], 60), xlabel=chart.x_label)
    return figure


def _draw_bar(axes: Any, place: int, bar: Row, dots: bool) -> None:
    colour, _, marker = look(bar["look"])
    end = bar["value"]
    if end is None:
        axes.text(0, place, f" {short(bar['says'])}", va="center", fontsize=8, color=LIGHT["muted"])
        return
    if not dots:
        axes.barh([place], [end], height=0.66, color=colour, alpha=0.85)
    else:
        axes.plot([end], [place], marker=marker, color=colour, zorder=3)
        if bar["low"] is not None and bar["high"] is not None:
            axes.hlines([place], [bar["low"]], [bar["high"]], color=colour, linewidth=1.6)
            end = bar["high"]
    axes.annotate(
        bar["says"], (end, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8,
        color=LIGHT["ink"],
    )  # fmt: skip


# --- chunks --------------------------------------------------------------------------------------------------------


def chunk_charts(suite: Suite, rows: Sequence[Row]) -> Iterator[Figure | str]:
    """For some models, which chunks were read in the longest text for which that is known."""
    for chart in suite.charts:
        if not isinstance(chart, ChunkMap):
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


def _chunk_chart(suite: Suite, chart: ChunkMap, farthest: Row, rows: Sequence[Row]) -> Figure:
    """The questions of one task at one length, as many of each of its rows."""
    task = suite.heading(farthest), farthest.get("length")
    same = [_asked(chart, row) for row in rows if (suite.heading(row), row.get("length")) == task]
    turns = [question for turn in zip_longest(*same) for question in turn if question is not None]
    asked = sorted(turns[:_MOST_QUESTIONS], key=lambda question: question["needle"])
    columns = (
        Column("question", "number"),
        Column("needle in chunk", "needle"),
        Column(
            "chunks read (weight)", lambda row: ", ".join(f"{chunk} ({w:.2f})" for chunk, w in row["read"])
        ),
    )
    named = replace(
        chart,
        name=f"{chart.name}-{farthest['look'] + 1}",
        title=f"{farthest['model']}: {chart.title} at {count(farthest.get('length'))} tokens",
        caption=f"{len(asked)} questions. {chart.caption}",
    )
    numbered = [{"number": n, **question} for n, question in enumerate(asked, 1)]
    return _figure(named, columns, numbered, partial(_draw_chunks, asked))


def _asked(chart: ChunkMap, row: Row) -> list[Row]:
    """The questions of a row of which it is known what the first group read for them: chunks, each with its weight."""
    questions: list[Row] = []
    for question in chart.asked(row):
        needle = number(next(iter(_first_list([question.get("needle", question.get("gold_chunks"))])), None))
        chosen = [
            int(chunk)
            for chunk in _first_list(question.get("selected"))
            if number(chunk) is not None and chunk >= 0
        ]
        weights = [min(1.0, max(0.0, number(w) or 0.0)) for w in _first_list(question.get("weights"))]
        if needle is not None and chosen:
            weighed = zip_longest(chosen, weights[: len(chosen)], fillvalue=0.0)
            questions.append({"needle": int(needle), "read": list(weighed)})
    return questions


def _first_list(lists: Any) -> list[Any]:
    """Of nested lists the innermost first one."""
    while isinstance(lists, list) and lists and isinstance(lists[0], list):
        lists = lists[0]
    return lists if isinstance(lists, list) else []


def _draw_chunks(asked: Sequence[Row]) -> Any:
    figure, (axes,) = panels(1, 3.6)
    rows = range(len(asked))
    # all marks of a kind at once: a call for each question would take longer than all other figures
    marks = [(chunk, row, weight) for row, question in enumerate(asked) for chunk, weight in question["read"]]
    chosen, places, weights = zip(*marks, strict=True)
    needles = [question["needle"] for question in asked]
    chunks = 1 + max(*needles, *chosen)
    ends = -0.01 * chunks, 1.01 * chunks
    axes.hlines(rows, *ends, colors=LIGHT["grid"], linewidth=0.4, zorder=0)
    read_style: Any = {"color": LIGHT[SERIES[0]], "alpha": 0.6, "linewidths": 0}
    needle_style: Any = {"marker": "|", "s": 70, "color": LIGHT[SERIES[1]], "linewidths": 1.3}
    axes.scatter(chosen, places, s=[3 + 45 * weight for weight in weights], **read_style)
    axes.scatter(needles, rows, **needle_style)
    axes.set(xlim=ends, xlabel="chunk of the text", ylabel="question", yticks=[])
    axes.xaxis.set_major_formatter(lambda x, _: _plain(x))
    handles = [
        axes.scatter([], [], s=30, label="read (area: weight)", **read_style),
        axes.scatter([], [], label="the needle", **needle_style),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure
