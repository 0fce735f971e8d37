"""A figure of a report: the numbers that it shows as a table, and its drawing by matplotlib (the ``figures`` extra).

It is drawn once, in the light colours of :mod:`trailmark.report.theme`. From that one drawing come the PNG and the SVG
file, and the SVG in the page, whose colours follow the reader's choice.
"""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from trailmark.evaluation.tables import Table
from trailmark.files import write_text
from trailmark.report.svg import inline
from trailmark.report.theme import LIGHT, SERIES

MARKERS = "osD^vPX*"
_DASHES = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (5, 1.4, 1.2, 1.4)))
_MOST_LAID_OUT = 16  # panels
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


def available() -> bool:
    """Whether matplotlib is there to draw."""
    return importlib.util.find_spec("matplotlib") is not None


@dataclass
class Figure:
    """What stands on the page for a chart.

    Args:
        name: of its files, no other figure's.
        description: what it shows, in a sentence or two.
        numbers: the same numbers as a table.
        draw: makes matplotlib's figure.
        wide: whether it has panels beside each other.
        drawing: an ``<svg>`` for the page; None: it is not drawn yet, or cannot be.
        files: where the drawing lies beside the page.
    """

    name: str
    title: str
    description: str
    numbers: Table
    draw: Callable[[], Any]
    wide: bool = False
    drawing: Markup | None = None
    files: Sequence[Path] = ()

    def write(self, folder: Path) -> str:
        """Draw it, into ``NAME.svg`` and ``NAME.png`` in ``folder`` and for the page; the SVG's text is returned.

        Raises:
            ValueError: matplotlib is not there.
        """
        if not available():
            raise ValueError("figures: matplotlib is not installed. pip install 'trailmark[figures]'.")
        import matplotlib

        folder.mkdir(parents=True, exist_ok=True)
        svg, png = (folder / f"{self.name}.{kind}" for kind in ("svg", "png"))
        with matplotlib.rc_context(_STYLE):
            figure = self.draw()
            if figure.get_layout_engine() is not None:
                figure.draw_without_rendering()
                figure.set_layout_engine(None)  # it is laid out: the files need not be again
            picture = io.StringIO()
            figure.savefig(picture, format="svg", metadata={"Date": None, "Creator": None})
            figure.savefig(png, dpi=160, metadata={"Software": None})
        text = picture.getvalue()
        write_text(svg, text)
        self.files = (svg, png)
        self.drawing = inline(text, self.name, self.title, self.description)
        return text


def panels(count: int, height: float, head: float = 0.0) -> tuple[Any, list[Any]]:
    """A figure with ``count`` axes, each ``height`` inches high, below ``head`` inches for a title."""
    from matplotlib.figure import Figure as Drawn

    columns = min(2, count)
    rows = math.ceil(count / columns)
    tall = height * rows + 0.4 + head
    # the layout of many panels would take longer than all else
    laid_out = count <= _MOST_LAID_OUT
    size = (_WIDTH if columns == 1 else _WIDE, tall)
    figure = Drawn(figsize=size, layout="constrained" if laid_out else None)
    if not laid_out:
        top, bottom = 1 - (0.3 + head) / tall, 0.5 / tall
        figure.subplots_adjust(0.07, bottom, 0.99, top, wspace=0.16, hspace=0.8 / height)
    fields = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in fields[count:]:
        unused.remove()
    return figure, fields[:count]


def look(number: int) -> tuple[str, Any, str]:
    """Colour, dashes and marker: a model has the same in every figure."""
    dashes = _DASHES[number // len(SERIES) % len(_DASHES)]
    return LIGHT[SERIES[number % len(SERIES)]], dashes, MARKERS[number % len(MARKERS)]


def short(name: str, most: int = 36) -> str:
    """A name in a figure; the table below it has all of it."""
    return name if len(name) <= most else f"{name[: most - 14]}…{name[-13:]}"
