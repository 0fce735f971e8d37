"""The figures of a report: what each shows, as data, drawn by matplotlib (the ``figures`` extra) and as a table.

A chart is drawn once, in the light colours of :mod:`trailmark.report.theme`. From that one drawing come the PNG and
the SVG file, and the SVG in the page, whose colours follow the reader's choice.
"""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trailmark.files import write_text
from trailmark.report.theme import LIGHT, SERIES, heat_ink, heat_level
from trailmark.values import MISSING, short_length, shown

_MARKERS = "osD^vPX*"
_DASHES = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (5, 1.4, 1.2, 1.4)))
_MOST_LAID_OUT = 16  # panels
_MOST_NUMBERS = 400  # of a heat chart's fields: more are coloured alone
_WIDTH = 5.8  # inches, of a figure with one column of panels
_WIDE = 9.2
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "trailmark",
    "font.family": "DejaVu Sans",  # matplotlib brings it: the same drawing on every machine
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.edgecolor": LIGHT["muted"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.titlecolor": LIGHT["ink"],
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.axisbelow": True,
    "text.color": LIGHT["ink"],
    "text.parse_math": False,  # "$" is a letter of the needles
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "figure.facecolor": LIGHT["paper"],
    "savefig.facecolor": LIGHT["paper"],
}
_RULE: Any = {"color": LIGHT["muted"], "linestyle": ":", "linewidth": 1}


def available() -> bool:
    """Whether matplotlib is there to draw."""
    return importlib.util.find_spec("matplotlib") is not None


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What every figure has: a name for its files, a title, what it shows in a sentence or two, and panels."""

    name: str
    title: str
    description: str
    panels: Sequence[Any]
    x_label: str = ""
    words: Sequence[int] = field(
        default=(), init=False
    )  # columns of the table that hold words, beside the first

    @property
    def wide(self) -> bool:
        return len(self.panels) > 1

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The same numbers: header and rows."""
        raise NotImplementedError

    def _draw(self) -> Any:
        """The figure."""
        raise NotImplementedError

    def write(self, folder: Path) -> str:
        """Write ``NAME.svg`` and ``NAME.png`` into ``folder``; the SVG's text is returned.

        Raises:
            ValueError: matplotlib is not there.
        """
        if not available():
            raise ValueError("figures: matplotlib is not installed. pip install 'trailmark[figures]'.")
        import matplotlib

        folder.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(_STYLE):
            figure = self._draw()
            if figure.get_layout_engine() is not None:
                figure.draw_without_rendering()
                figure.set_layout_engine(None)  # it is laid out: the files need not be again
            picture = io.StringIO()
            figure.savefig(picture, format="svg", metadata={"Date": None, "Creator": None})
            figure.savefig(folder / f"{self.name}.png", dpi=160, metadata={"Software": None})
        write_text(folder / f"{self.name}.svg", picture.getvalue())
        return picture.getvalue()


class Point(NamedTuple):
    """One point of a line, perhaps with an interval."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """One line of a chart, with a band where its points have intervals.

    Args:
        label: whose it is; lines of one label are one entry of the legend.
        look: chooses colour, marker and dashes: a model has the same in every figure.
        marked: whether each point has a marker.
    """

    label: str
    look: int
    points: Sequence[Point]
    marked: bool = True


@dataclass(frozen=True)
class Panel:
    """One field of a line chart."""

    title: str
    y_label: str
    lines: Sequence[Line]
    share: bool = False  # between 0 and 1
    rule: tuple[float, str] | None = None  # a vertical line at x, and what it says


@dataclass(frozen=True, kw_only=True)
class LineChart(Chart):
    """Lines with bands over lengths or steps, in panels that share the x axis."""

    panels: Sequence[Panel]
    lengths: bool = True  # x is a number of tokens, on a logarithmic axis where they lie far apart
    every: int = 1  # of each line the table holds every point with a number divisible by this, and the last

    def _draw(self) -> Any:
        figure, fields = _panels(len(self.panels), 2.75)
        for axes, panel in zip(fields, self.panels, strict=True):
            for line in panel.lines:
                _draw_line(axes, line)
            self._draw_axes(axes, panel)
        _legend(figure, [line for panel in self.panels for line in panel.lines])
        return figure

    def _draw_axes(self, axes: Any, panel: Panel) -> None:
        places = sorted({point.x for line in panel.lines for point in line.points})
        if self.lengths and places:
            if places[0] > 0 and places[-1] > 4 * places[0]:
                axes.set_xscale("log", base=2)
            ticks = _chosen(places, axes.get_xscale() == "log")
            axes.set_xticks(ticks, [short_length(x) for x in ticks])
            axes.xaxis.minorticks_off()
        if panel.share:
            axes.set_ylim(-0.02, 1.02)
        else:
            _value_scale(axes, [point.y for line in panel.lines for point in line.points])
        if panel.rule is not None:
            x, says = panel.rule
            axes.axvline(x, **_RULE)
            axes.annotate(
                says, (x, 0.5), xycoords=("data", "axes fraction"), xytext=(4, 0), textcoords="offset points",
                fontsize=7.5, color=LIGHT["muted"],
            )  # fmt: skip
        axes.grid(True, axis="y")
        axes.set(title=_short(panel.title, 60), xlabel=self.x_label, ylabel=panel.y_label)

    def table(self) -> tuple[list[str], list[list[str]]]:
        named = [(panel, line) for panel in self.panels for line in panel.lines]
        bands = any(point.low is not None for _, line in named for point in line.points)
        header = ["panel"] * self.wide + ["series", self.x_label, "value"] + ["low", "high"] * bands
        rows = []
        for panel, line in named:
            for n, point in enumerate(line.points):
                if n % self.every == 0 or n == len(line.points) - 1:
                    ends = [shown(point.low, ".4g"), shown(point.high, ".4g")] * bands
                    place = [panel.title] * self.wide + [line.label, _plain(point.x)]
                    rows.append([*place, f"{point.y:.4g}", *ends])
        return header, rows


@dataclass(frozen=True)
class HeatMap:
    """One field of a heat chart: ``values[row][column]``; None where nothing was measured."""

    title: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float | None]]

    @property
    def cells(self) -> list[tuple[int, int, float | None]]:
        """Column, row and value of each."""
        return [(c, r, value) for r, values in enumerate(self.values) for c, value in enumerate(values)]


@dataclass(frozen=True, kw_only=True)
class HeatChart(Chart):
    """Shares by length and depth."""

    panels: Sequence[HeatMap]
    y_label: str = ""
    what: str = ""  # what the numbers are, for a reader who has the picture alone

    def _draw(self) -> Any:
        from matplotlib.collections import PatchCollection
        from matplotlib.patches import Rectangle

        tallest = max(len(heat.rows) for heat in self.panels)
        numbered = sum(len(heat.cells) for heat in self.panels) <= _MOST_NUMBERS
        figure, fields = _panels(len(self.panels), 0.9 + 0.3 * tallest, head=0.22 if self.what else 0.0)
        if self.what:
            figure.suptitle(self.what, x=0.01, ha="left", fontsize=9.5, color=LIGHT["muted"])
        for axes, heat in zip(fields, self.panels, strict=True):
            known = [(column, row, value) for column, row, value in heat.cells if value is not None]
            boxes = [Rectangle((column - 0.48, row - 0.47), 0.96, 0.94) for column, row, _ in known]
            colours = [LIGHT[f"heat-{heat_level(value)}"] for *_, value in known]
            axes.add_collection(PatchCollection(boxes, facecolors=colours, edgecolors="none"))
            for column, row, value in known if numbered else ():
                axes.text(
                    column, row, _cell(value), ha="center", va="center",
                    fontsize=8 if len(heat.columns) <= 8 else 6, color=LIGHT[heat_ink(heat_level(value))],
                )  # fmt: skip
            axes.set(xlim=(-0.5, len(heat.columns) - 0.5), ylim=(len(heat.rows) - 0.5, -0.5))
            axes.set_xticks(range(len(heat.columns)), heat.columns)
            axes.set_yticks(range(len(heat.rows)), heat.rows)
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
            axes.set(title=_short(heat.title), xlabel=self.x_label, ylabel=self.y_label)
        return figure

    def table(self) -> tuple[list[str], list[list[str]]]:
        header = ["model", self.x_label, self.y_label, "value"]
        return header, [
            [heat.title, heat.columns[column], heat.rows[row], shown(value, ".3f")]
            for heat in self.panels
            for column, row, value in heat.cells
        ]


@dataclass(frozen=True)
class Bar:
    """One bar, or with an interval one dot with whiskers; a value of None is said in words."""

    label: str
    look: int
    value: float | None
    low: float | None = None
    high: float | None = None
    says: str = ""


@dataclass(frozen=True)
class BarPanel:
    """One field of a bar chart."""

    title: str
    bars: Sequence[Bar]


@dataclass(frozen=True, kw_only=True)
class BarChart(Chart):
    """Horizontal bars in panels."""

    panels: Sequence[BarPanel]
    form: str = ".2f"
    unit: str = ""
    base: float | None = None  # a line to compare with
    dots: bool = False  # dots with whiskers instead of bars: the axis need not begin at 0
    words: Sequence[int] = field(default=(1, 2), init=False)

    def _draw(self) -> Any:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        most = max(len(panel.bars) for panel in self.panels)
        figure, fields = _panels(len(self.panels), 0.75 + 0.26 * most)
        for axes, panel in zip(fields, self.panels, strict=True):
            for place, bar in enumerate(panel.bars):
                self._draw_bar(axes, place, bar)
            if self.base is not None:
                axes.axvline(self.base, **_RULE)
            axes.set_yticks(range(len(panel.bars)), [_short(bar.label) for bar in panel.bars])
            axes.set_ylim(len(panel.bars) - 0.4, -0.6)
            axes.tick_params(axis="y", length=0)
            axes.spines["left"].set_visible(False)
            if self.dots:
                axes.margins(x=0.18)
                axes.grid(True, axis="x")
            else:
                longest = max((bar.value for bar in panel.bars if bar.value is not None), default=0.0)
                axes.set_xlim(0, (longest or 1.0) * 1.22)
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.6g}"))
            axes.set(title=_short(panel.title, 60), xlabel=self.x_label)
        return figure

    def _draw_bar(self, axes: Any, place: int, bar: Bar) -> None:
        colour, _ = _look(bar.look)
        if bar.value is None:
            said = f" {_short(bar.says) or MISSING}"
            axes.text(0, place, said, va="center", fontsize=8, color=LIGHT["muted"])
            return
        end = bar.value
        if self.dots:
            axes.plot([bar.value], [place], marker=_MARKERS[bar.look % len(_MARKERS)], color=colour, zorder=3)
            if bar.low is not None and bar.high is not None:
                axes.hlines([place], [bar.low], [bar.high], color=colour, linewidth=1.6)
                end = bar.high
        else:
            axes.barh([place], [bar.value], height=0.66, color=colour, alpha=0.85)
        axes.annotate(
            self._said(bar), (end, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8,
            color=LIGHT["ink"],
        )  # fmt: skip

    def _said(self, bar: Bar) -> str:
        return bar.says or MISSING if bar.value is None else f"{bar.value:{self.form}}{self.unit}"

    def table(self) -> tuple[list[str], list[list[str]]]:
        bands = any(bar.low is not None for panel in self.panels for bar in panel.bars)
        return ["panel", "model", self.x_label] + ["low", "high"] * bands, [
            [panel.title, bar.label, self._said(bar)]
            + [shown(bar.low, self.form), shown(bar.high, self.form)] * bands
            for panel in self.panels
            for bar in panel.bars
        ]


@dataclass(frozen=True)
class Asked:
    """A question: the chunk in which its needle lies, and the chunks that were read, with their weights."""

    needle: int
    selected: Sequence[int]
    weights: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class ChunkChart(Chart):
    """For some questions, which chunks of the text were read and with what weight, and where the needle lies."""

    panels: Sequence[Sequence[Asked]]  # one

    def _draw(self) -> Any:
        figure, (axes,) = _panels(1, 3.6)
        (asked,) = self.panels
        rows = range(len(asked))
        chunks = 1 + max(max(question.needle, *question.selected) for question in asked)
        ends = -0.01 * chunks, 1.01 * chunks
        axes.hlines(rows, *ends, colors=LIGHT["grid"], linewidth=0.4, zorder=0)
        # all marks of a kind at once: a call for each question would take longer than all other figures
        chosen, places, sizes = zip(
            *(
                (chunk, row, 3 + 45 * weight)
                for row, question in enumerate(asked)
                for chunk, weight in zip(question.selected, question.weights, strict=True)
            ),
            strict=True,
        )
        read: Any = {"color": LIGHT[SERIES[0]], "alpha": 0.6, "linewidths": 0}
        needle: Any = {"marker": "|", "s": 70, "color": LIGHT[SERIES[1]], "linewidths": 1.3}
        axes.scatter(chosen, places, s=sizes, **read)
        axes.scatter([question.needle for question in asked], rows, **needle)
        axes.set(xlim=ends, xlabel="chunk of the text", ylabel="question", yticks=[])
        axes.xaxis.set_major_formatter(lambda x, _: _plain(x))
        handles = [
            axes.scatter([], [], s=30, label="read (area: weight)", **read),
            axes.scatter([], [], label="the needle", **needle),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
        return figure

    def table(self) -> tuple[list[str], list[list[str]]]:
        rows = []
        for n, question in enumerate(self.panels[0], 1):
            pairs = zip(question.selected, question.weights, strict=True)
            read = ", ".join(f"{chunk} ({weight:.2f})" for chunk, weight in pairs)
            rows.append([str(n), str(question.needle), read])
        return ["question", "needle in chunk", "chunks read (weight)"], rows


# --- drawing ------------------------------------------------------------------------------------------------


def _panels(count: int, height: float, head: float = 0.0) -> tuple[Any, list[Any]]:
    """A figure with ``count`` axes, each ``height`` inches high, below ``head`` inches for a title."""
    from matplotlib.figure import Figure

    columns = min(2, count)
    rows = math.ceil(count / columns)
    tall = height * rows + 0.4 + head
    # the layout of many panels would take longer than all else
    laid_out = count <= _MOST_LAID_OUT
    size = (_WIDTH if columns == 1 else _WIDE, tall)
    figure = Figure(figsize=size, layout="constrained" if laid_out else None)
    if not laid_out:
        top, bottom = 1 - (0.3 + head) / tall, 0.5 / tall
        figure.subplots_adjust(0.07, bottom, 0.99, top, wspace=0.16, hspace=0.8 / height)
    fields = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in fields[count:]:
        unused.remove()
    return figure, fields[:count]


def _draw_line(axes: Any, line: Line) -> None:
    colour, dashes = _look(line.look)
    marker = _MARKERS[line.look % len(_MARKERS)] if line.marked else None
    xs, ys = [point.x for point in line.points], [point.y for point in line.points]
    axes.plot(xs, ys, color=colour, linestyle=dashes, marker=marker, clip_on=False, zorder=3)
    band = [(p.x, p.low, p.high) for p in line.points if p.low is not None and p.high is not None]
    if len(band) == 1:  # a band needs two points
        axes.vlines(*band[0], color=colour, alpha=0.5, linewidth=3)
    elif band:
        axes.fill_between(*zip(*band, strict=True), color=colour, alpha=0.16, linewidth=0)


def _look(number: int) -> tuple[str, Any]:
    """Colour and dashes."""
    return LIGHT[SERIES[number % len(SERIES)]], _DASHES[number // len(SERIES) % len(_DASHES)]


def _legend(figure: Any, lines: Sequence[Line]) -> None:
    """Below the panels, one entry for each label, in as many columns as fit."""
    from matplotlib.lines import Line2D

    handles = {}
    for line in lines:
        colour, dashes = _look(line.look)
        marker = _MARKERS[line.look % len(_MARKERS)] if line.marked else None
        handles[line.label] = Line2D(
            [], [], color=colour, linestyle=dashes, marker=marker, label=_short(line.label)
        )
    if handles:
        longest = max(len(_short(label)) for label in handles)
        columns = min(len(handles), max(1, int(figure.get_figwidth() * 11 / (longest + 7))))
        rows = math.ceil(len(handles) / columns)
        figure.set_figheight(figure.get_figheight() + 0.19 * (rows - 1))
        figure.legend(handles=list(handles.values()), loc="outside lower left", ncols=columns)


def _chosen(places: Sequence[float], logarithmic: bool, most: int = 8) -> list[float]:
    """At most so many of the places, none near another, the first and the last among them."""
    if len(places) < 2:
        return list(places)
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
    if not values:
        return
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


def _cell(value: float) -> str:
    if 0 < value < 0.005 or 0.995 <= value < 1:  # neither nothing nor all
        return "<.01" if value < 0.5 else ">.99"
    return f"{value:.2f}"


def _short(name: str, most: int = 36) -> str:
    """A name in a figure; the table below it has all of it."""
    return name if len(name) <= most else f"{name[: most - 14]}…{name[-13:]}"


def _plain(x: float) -> str:
    return f"{round(x):,}" if x == round(x) else f"{x:.4g}"
