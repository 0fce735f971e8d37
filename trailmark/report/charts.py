"""The figures of a report: what each shows, as data, drawn by matplotlib (the ``figures`` extra) and as a table.

A chart is drawn once, in the light colours of :mod:`trailmark.report.theme`. From that one drawing come the PNG and
the SVG file, and the SVG in the page, whose colours follow the reader's choice.
"""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trailmark.data.files import write_text
from trailmark.report.markup import MISSING, short_length, shown
from trailmark.report.theme import LIGHT, SERIES, heat_ink, heat_level

_MARKERS = "osD^vPX*"
_DASHES = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (5, 1.4, 1.2, 1.4)))
_MOST_LAID_OUT = 16  # panels
_MOST_NUMBERS = 400  # of a heat chart's fields: more are coloured alone
_WIDTH = 5.8  # inches, of a figure with one column of panels
_WIDE = 9.2
_SETTINGS: Any = {
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


def available() -> bool:
    """Whether matplotlib is there to draw."""
    return importlib.util.find_spec("matplotlib") is not None


@dataclass(frozen=True)
class Line:
    """One line of a chart, perhaps with a band.

    Args:
        label: whose it is; lines of one label are one entry of the legend.
        look: chooses colour, marker and dashes: a model has the same in every figure.
        x, y: the points.
        low, high: of each point's interval; None: none.
    """

    label: str
    look: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    marked: bool = True  # a marker on each point


@dataclass(frozen=True)
class Panel:
    """One field of a chart."""

    title: str
    y_label: str
    lines: Sequence[Line]
    share: bool = False  # between 0 and 1
    rule: tuple[float, str] | None = None  # a vertical line at x, and what it says


@dataclass(frozen=True)
class Chart:
    """What every figure has: a name for its files, a title, and what it shows in a sentence or two."""

    name: str
    title: str
    description: str

    @property
    def wide(self) -> bool:
        return False

    def draw(self) -> Any:
        raise NotImplementedError

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The same numbers: header and rows."""
        raise NotImplementedError

    def write(self, folder: Path) -> str:
        """Write ``NAME.svg`` and ``NAME.png`` into ``folder``; the SVG's text.

        Raises:
            ValueError: matplotlib is not there.
        """
        if not available():
            raise ValueError("figures: matplotlib is not installed. pip install 'trailmark[figures]'.")
        import matplotlib

        folder.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(_SETTINGS):
            figure = self.draw()
            if figure.get_layout_engine() is not None:
                figure.draw_without_rendering()
                figure.set_layout_engine(None)  # it is laid out: the files need not be again
            picture = io.StringIO()
            figure.savefig(picture, format="svg", metadata={"Date": None, "Creator": None})
            figure.savefig(folder / f"{self.name}.png", dpi=160, metadata={"Software": None})
        write_text(folder / f"{self.name}.svg", picture.getvalue())
        return picture.getvalue()


@dataclass(frozen=True)
class LineChart(Chart):
    """Lines with bands over lengths or steps, in panels that share the x axis."""

    x_label: str = ""
    panels: Sequence[Panel] = ()
    lengths: bool = True  # x is a number of tokens, on a logarithmic axis where they lie far apart
    every: int = 1  # the table holds every so manieth point

    @property
    def wide(self) -> bool:
        return len(self.panels) > 1

    def draw(self) -> Any:
        figure, fields = _panels(len(self.panels), 2.75)
        for axes, panel in zip(fields, self.panels, strict=True):
            for line in panel.lines:
                self._line(axes, line)
            self._axes(axes, panel)
        _legend(figure, ((line.label, line.look, line.marked) for p in self.panels for line in p.lines))
        return figure

    def _line(self, axes: Any, line: Line) -> None:
        colour, dashes = _look(line.look)
        marker = _MARKERS[line.look % len(_MARKERS)] if line.marked else None
        axes.plot(line.x, line.y, color=colour, linestyle=dashes, marker=marker, clip_on=False, zorder=3)
        if line.low is not None and line.high is not None:
            band = [
                point
                for point in zip(line.x, line.low, line.high, strict=True)
                if point[1] is not None and point[2] is not None
            ]
            if len(band) == 1:  # a band needs two points
                x, low, high = band[0]
                axes.vlines([x], [low], [high], color=colour, alpha=0.5, linewidth=3)
            elif band:
                axes.fill_between(*zip(*band, strict=True), color=colour, alpha=0.16, linewidth=0)

    def _axes(self, axes: Any, panel: Panel) -> None:
        points = sorted({x for line in panel.lines for x in line.x})
        if self.lengths and points:
            if points[0] > 0 and points[-1] > 4 * points[0]:
                axes.set_xscale("log", base=2)
            ticks = _chosen(points, axes.get_xscale() == "log")
            axes.set_xticks(ticks, [short_length(x) for x in ticks])
            axes.xaxis.minorticks_off()
        if panel.share:
            axes.set_ylim(-0.02, 1.02)
        else:
            _value_scale(axes, [y for line in panel.lines for y in line.y])
        if panel.rule is not None:
            x, says = panel.rule
            axes.axvline(x, color=LIGHT["muted"], linestyle=":", linewidth=1)
            axes.annotate(
                says, (x, 0.5), xycoords=("data", "axes fraction"), xytext=(4, 0), textcoords="offset points",
                fontsize=7.5, color=LIGHT["muted"],
            )  # fmt: skip
        axes.grid(True, axis="y")
        axes.set_title(_short(panel.title, 60))
        axes.set_xlabel(self.x_label)
        axes.set_ylabel(panel.y_label)

    def table(self) -> tuple[list[str], list[list[str]]]:
        bands = any(line.low is not None for panel in self.panels for line in panel.lines)
        header = [*(["panel"] if self.wide else []), "series", self.x_label, "value"]
        header += ["low", "high"] if bands else []
        rows = []
        for panel in self.panels:
            for line in panel.lines:
                last = len(line.x) - 1
                for n, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
                    if n % self.every and n != last:
                        continue
                    ends = [shown(end[n], ".4g") if end else MISSING for end in (line.low, line.high)]
                    row = [*([panel.title] if self.wide else []), line.label, _plain(x), f"{y:.4g}"]
                    rows.append(row + (ends if bands else []))
        return header, rows


@dataclass(frozen=True)
class HeatMap:
    """One field of a heat chart: ``values[row][column]``; None where nothing was measured."""

    title: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class HeatChart(Chart):
    """Shares by length and depth."""

    x_label: str = ""
    y_label: str = ""
    maps: Sequence[HeatMap] = ()
    what: str = ""  # what the numbers are, for a reader who has the picture alone

    @property
    def wide(self) -> bool:
        return len(self.maps) > 1

    def draw(self) -> Any:
        from matplotlib.collections import PatchCollection
        from matplotlib.patches import Rectangle

        tallest = max(len(field.rows) for field in self.maps)
        numbered = sum(len(field.rows) * len(field.columns) for field in self.maps) <= _MOST_NUMBERS
        figure, fields = _panels(len(self.maps), 0.9 + 0.3 * tallest, head=0.22 if self.what else 0.0)
        if self.what:
            figure.suptitle(self.what, x=0.01, ha="left", fontsize=9.5, color=LIGHT["muted"])
        for axes, heat in zip(fields, self.maps, strict=True):
            known = [
                (column, row, value)
                for row, values in enumerate(heat.values)
                for column, value in enumerate(values)
                if value is not None
            ]
            fields_of = [Rectangle((column - 0.48, row - 0.47), 0.96, 0.94) for column, row, _ in known]
            colours = [LIGHT[f"heat-{heat_level(value)}"] for *_, value in known]
            axes.add_collection(PatchCollection(fields_of, facecolors=colours, edgecolors="none"))
            for column, row, value in known if numbered else ():
                axes.text(
                    column, row, _cell(value), ha="center", va="center",
                    fontsize=8 if len(heat.columns) <= 8 else 6, color=LIGHT[heat_ink(heat_level(value))],
                )  # fmt: skip
            axes.set_xlim(-0.5, len(heat.columns) - 0.5)
            axes.set_ylim(len(heat.rows) - 0.5, -0.5)
            axes.set_xticks(range(len(heat.columns)), heat.columns)
            axes.set_yticks(range(len(heat.rows)), heat.rows)
            axes.tick_params(length=0)
            for side in axes.spines.values():
                side.set_visible(False)
            axes.set_title(_short(heat.title))
            axes.set_xlabel(self.x_label)
            axes.set_ylabel(self.y_label)
        return figure

    def table(self) -> tuple[list[str], list[list[str]]]:
        header = ["model", self.x_label, self.y_label, "value"]
        rows = [
            [heat.title, heat.columns[c], heat.rows[r], shown(value, ".3f")]
            for heat in self.maps
            for r, values in enumerate(heat.values)
            for c, value in enumerate(values)
        ]
        return header, rows


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
    title: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class BarChart(Chart):
    """Horizontal bars in panels."""

    x_label: str = ""
    panels: Sequence[BarPanel] = ()
    form: str = ".2f"
    unit: str = ""
    base: float | None = None  # a line to compare with
    dots: bool = False  # dots with whiskers instead of bars: the axis need not begin at 0
    columns: int = 2

    @property
    def wide(self) -> bool:
        return len(self.panels) > 1

    def draw(self) -> Any:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        most = max(len(panel.bars) for panel in self.panels)
        figure, fields = _panels(len(self.panels), 0.75 + 0.26 * most, self.columns)
        for axes, panel in zip(fields, self.panels, strict=True):
            known = [bar for bar in panel.bars if bar.value is not None]
            reach = max([bar.high or bar.value or 0.0 for bar in known], default=1.0) or 1.0
            for place, bar in enumerate(panel.bars):
                self._bar(axes, place, bar, reach)
            if self.base is not None:
                axes.axvline(self.base, color=LIGHT["muted"], linestyle=":", linewidth=1)
            axes.set_yticks(range(len(panel.bars)), [_short(bar.label) for bar in panel.bars])
            axes.set_ylim(len(panel.bars) - 0.4, -0.6)
            axes.tick_params(axis="y", length=0)
            axes.spines["left"].set_visible(False)
            if self.dots:
                axes.margins(x=0.18)
                axes.grid(True, axis="x")
            else:
                axes.set_xlim(0, reach * 1.22)
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.6g}"))
            axes.set_title(_short(panel.title, 60))
            axes.set_xlabel(self.x_label)
        return figure

    def _bar(self, axes: Any, place: int, bar: Bar, reach: float) -> None:
        colour, _ = _look(bar.look)
        if bar.value is None:
            axes.text(
                0, place, f" {_short(bar.says) or MISSING}", va="center", fontsize=8, color=LIGHT["muted"]
            )
            return
        end = bar.value
        if self.dots:
            axes.plot([bar.value], [place], marker=_MARKERS[bar.look % len(_MARKERS)], color=colour, zorder=3)
            if bar.low is not None and bar.high is not None:
                axes.hlines([place], [bar.low], [bar.high], color=colour, linewidth=1.6)
                end = bar.high
        else:
            axes.barh([place], [bar.value], height=0.66, color=colour, alpha=0.85)
        text = f"{bar.value:{self.form}}{self.unit}"
        axes.annotate(
            text, (end, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8,
            color=LIGHT["ink"],
        )  # fmt: skip

    def table(self) -> tuple[list[str], list[list[str]]]:
        bands = any(bar.low is not None for panel in self.panels for bar in panel.bars)
        header = ["panel", "model", self.x_label, *(["low", "high"] if bands else [])]
        rows = []
        for panel in self.panels:
            for bar in panel.bars:
                value = bar.says or MISSING if bar.value is None else f"{bar.value:{self.form}}{self.unit}"
                ends = [shown(bar.low, self.form), shown(bar.high, self.form)] if bands else []
                rows.append([panel.title, bar.label, value, *ends])
        return header, rows


@dataclass(frozen=True)
class ChunkChart(Chart):
    """For some questions, which chunks of the text were read and with what weight, and where the needle lies."""

    asked: Sequence[Mapping[str, Any]] = ()  # each with "needle", "selected" [chunks], "weights"
    chunks: int = 1  # of the text

    def draw(self) -> Any:
        figure, (axes,) = _panels(1, 3.6)
        rows = range(len(self.asked))
        axes.hlines(
            rows, -0.01 * self.chunks, 1.01 * self.chunks, colors=LIGHT["grid"], linewidth=0.4, zorder=0
        )
        # all marks of a kind at once: a call for each question would take longer than all other figures
        marks = [
            (chunk, row, 3 + 45 * weight)
            for row, question in enumerate(self.asked)
            for chunk, weight in zip(question["selected"], question["weights"], strict=True)
        ]
        chosen, places, sizes = zip(*marks, strict=True) if marks else ((), (), ())
        axes.scatter(chosen, places, s=sizes, color=LIGHT[SERIES[0]], alpha=0.6, linewidths=0)
        needles = [question["needle"] for question in self.asked]
        axes.scatter(needles, rows, marker="|", s=70, color=LIGHT[SERIES[1]], linewidths=1.3)
        axes.set_xlim(-0.01 * self.chunks, 1.01 * self.chunks)
        axes.xaxis.set_major_formatter(lambda x, _: _plain(x))
        axes.set_xlabel("chunk of the text")
        axes.set_ylabel("question")
        axes.set_yticks([])
        handles = [
            axes.scatter([], [], s=30, color=LIGHT[SERIES[0]], alpha=0.6, linewidths=0, label="read (area: weight)"),
            axes.scatter([], [], marker="|", s=70, color=LIGHT[SERIES[1]], linewidths=1.3, label="the needle"),
        ]  # fmt: skip
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
        return figure

    def table(self) -> tuple[list[str], list[list[str]]]:
        rows = []
        for n, question in enumerate(self.asked, 1):
            read = ", ".join(
                f"{chunk} ({weight:.2f})"
                for chunk, weight in zip(question["selected"], question["weights"], strict=False)
            )
            rows.append([str(n), str(question["needle"]), read or MISSING])
        return ["question", "needle in chunk", "chunks read (weight)"], rows


# --- drawing ------------------------------------------------------------------------------------------------


def _panels(count: int, height: float, columns: int = 2, head: float = 0.0) -> tuple[Any, list[Any]]:
    """A figure with ``count`` axes, each ``height`` inches high, below ``head`` inches for a title."""
    from matplotlib.figure import Figure

    columns = min(columns, count)
    rows = math.ceil(count / columns)
    width = _WIDTH if columns == 1 else _WIDE
    tall = height * rows + 0.4 + head
    # the layout of many panels would take longer than all else
    figure = Figure(figsize=(width, tall), layout="constrained" if count <= _MOST_LAID_OUT else None)
    if count > _MOST_LAID_OUT:
        figure.subplots_adjust(
            left=0.07,
            right=0.99,
            top=1 - (0.3 + head) / tall,
            bottom=0.5 / tall,
            wspace=0.16,
            hspace=0.8 / height,
        )
    fields = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in fields[count:]:
        unused.remove()
    return figure, fields[:count]


def _look(number: int) -> tuple[str, Any]:
    """Colour and dashes."""
    return LIGHT[SERIES[number % len(SERIES)]], _DASHES[number // len(SERIES) % len(_DASHES)]


def _legend(figure: Any, entries: Iterable[tuple[str, int, bool]]) -> None:
    from matplotlib.lines import Line2D

    handles = {}
    for label, number, marked in entries:
        colour, dashes = _look(number)
        marker = _MARKERS[number % len(_MARKERS)] if marked else None
        handles[label] = Line2D([], [], color=colour, linestyle=dashes, marker=marker, label=_short(label))
    longest = max((len(_short(label)) for label in handles), default=0)
    fit = max(1, int(figure.get_figwidth() * 11 / (longest + 7)))
    if handles:
        rows = math.ceil(len(handles) / min(fit, len(handles)))
        figure.set_figheight(figure.get_figheight() + 0.19 * (rows - 1))
        figure.legend(handles=list(handles.values()), loc="outside lower left", ncols=min(fit, len(handles)))


def _chosen(points: Sequence[float], logarithmic: bool, most: int = 8) -> list[float]:
    """At most so many of the points, none near another, the first and the last among them."""
    if len(points) < 2:
        return list(points)
    at = [math.log(x) if logarithmic else x for x in points]
    least = (at[-1] - at[0]) / most
    kept = [0]
    for n in range(1, len(points) - 1):
        if at[n] - at[kept[-1]] >= least and at[-1] - at[n] >= least:
            kept.append(n)
    return [points[n] for n in (*kept, len(points) - 1)]


def _value_scale(axes: Any, values: Sequence[float]) -> None:
    """Logarithmic where the values lie more than ten times apart."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.ticklabel_format(axis="y", useOffset=False, style="plain")
    if values and (span := max(values) - min(values)) > 0.2 * max(map(abs, values)):
        # bands far wider than the lines differ do not flatten these
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, min(values) - span), min(high, max(values) + span))
    if values and min(values) > 0 and max(values) > 10 * min(values):
        axes.set_ylim(min(values) / 1.3, max(values) * 1.3)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        if max(values) < 100 * min(values):
            axes.yaxis.set_minor_formatter(
                FuncFormatter(lambda y, _: f"{y:g}" if f"{y:e}"[0] in "25" else "")
            )
        else:
            axes.yaxis.set_minor_formatter(NullFormatter())


def _cell(value: float) -> str:
    if 0 < value < 0.005 or 0.995 <= value < 1:  # neither nothing nor all
        return "<.01" if value < 0.5 else ">.99"
    return f"{value:.2f}"


def _short(name: str, most: int = 36) -> str:
    """A name in a figure; the table below it has all of it."""
    return name if len(name) <= most else f"{name[: most - 14]}…{name[-13:]}"


def _plain(x: float) -> str:
    return f"{round(x):,}" if x == round(x) else f"{x:.4g}"
