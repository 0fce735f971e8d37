"""Figures show their numbers, as files and in the page; the same numbers give the same bytes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from trailmark.evaluation.suite import Bars, HeatMap, Lines, Panel, Row, suite_named
from trailmark.report import figures
from trailmark.report.charts import (
    Series,
    bar_chart,
    chunk_charts,
    curves_of,
    heat_chart,
    line_chart,
    line_figure,
)
from trailmark.report.figures import Figure, look
from trailmark.report.svg import inline
from trailmark.report.theme import LIGHT, SERIES, heat_level

np = pytest.importorskip("numpy")
pytest.importorskip("matplotlib")
HOSTILE = '<script>alert("$x^2$")</script>&'
LINES = Lines("a", "Title", "What.", "tokens", "tokens", (Panel("Right", "share", "y", ("low", "high")),))
HEAT = HeatMap("h", "What is shown", "What.", "tokens", "tokens", "depth", "depth", "y")
BARS = Bars("b", "Title", "What.", "ratio", (Panel("16K", "", "y"),), form="times", base=1.0)
DOTS = Bars("d", "Title", "What.", "F", (Panel("ROUGE-1", "F", "y", ("low", "high")),))


def line(*shares: float, label: str = "DRT", look: int = 0, band: float | None = None) -> Series:
    """At 1K, 4K, 16K ... tokens; ``band``: half the width of each interval."""
    return Series(
        label,
        look,
        [
            {"tokens": 1024 * 4**n, "y": share, "rule": 1024}
            | ({} if band is None else {"low": share - band, "high": share + band})
            for n, share in enumerate(shares)
        ],
    )


def lines(*drawn: Series, **changed: Any) -> Figure:
    (figure,) = line_chart(replace(LINES, **changed), drawn)
    return figure


def maps(*values: float | None, label: str = "DRT", columns: int = 2) -> Series:
    """``values`` of the first depth, then of the next, each with so many lengths."""
    cells = enumerate(values)
    return Series(
        label, 0, [{"tokens": 1024 * (1 + n % columns), "depth": n // columns, "y": y} for n, y in cells]
    )


def charts() -> dict[str, Figure]:
    (heat,) = heat_chart(HEAT, [maps(1.0, 0.25, 0.0, None)])
    (bars,) = bar_chart(
        BARS, [{"model": "base", "look": 0, "y": 1.0}, {"model": "full", "look": 1, "problem": "no room"}]
    )
    (dots,) = bar_chart(DOTS, [{"model": "DRT", "look": 2, "y": 0.3, "low": 0.29, "high": 0.32}])
    asked = [{"needle": 3, "selected": [0, 3], "weights": [0.1, 0.9]}]
    read: Row = {"model": "DRT", "look": 0, "length": 1024, "needles": 1, "asked": asked}
    (chunks,) = chunk_charts(suite_named("needles"), [read])
    one = lines(
        line(0.9, 0.8, 0.7, band=0.1),
        panels=(replace(LINES.panels[0], share=True),),
        rule="rule",
        rule_label="trained",
    )
    drawn = {"lines": one, "heat": heat, "bars": bars, "dots": dots, "chunks": chunks}
    return {kind: figure for kind, figure in drawn.items() if isinstance(figure, Figure)}


CHARTS = charts()


def pixels(path: Path, colour: str) -> int:
    """How many pixels have about this colour."""
    from matplotlib.image import imread

    wanted = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return int((np.abs(imread(path)[..., :3] - wanted).max(-1) < 0.03).sum())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["lines", "heat", "bars", "dots", "chunks"])
def test_one_drawing_gives_both_files_the_page_and_a_table(kind: str, tmp_path: Path) -> None:
    chart = CHARTS[kind]
    text = chart.write(tmp_path / "new")
    assert (tmp_path / "new" / f"{chart.name}.svg").read_text() == text
    assert (tmp_path / "new" / f"{chart.name}.png").read_bytes().startswith(b"\x89PNG")
    ElementTree.fromstring(text)  # a file of its own, in the light colours
    assert "<dc:date>" not in text
    assert "var(" not in text
    part = str(chart.drawing)
    assert not re.findall(r"#[0-9a-f]{6}\b", part)  # colours are the page's
    assert "font-family" not in part
    root = ElementTree.fromstring(part)
    assert root.get("role") == "img"
    spoken = {node.get("id"): node.text for node in root.iter() if node.tag in ("title", "desc")}
    assert [spoken[name] for name in str(root.get("aria-labelledby")).split()] == [
        chart.title,
        chart.description,
    ]
    assert chart.numbers.rows
    assert {len(row) for row in chart.numbers.rows} == {len(chart.numbers.header)}


def test_ids_are_the_figures_own_and_all_references_lead_somewhere(tmp_path: Path) -> None:
    text = CHARTS["lines"].write(tmp_path)
    one, other = (inline(text, name, "t", "d") for name in ("one", "two"))
    ids = [set(re.findall(r'\bid="([^"]+)"', part)) for part in (one, other)]
    assert ids[0]
    assert not ids[0] & ids[1]
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', one))
    assert used
    assert used <= ids[0]


@pytest.mark.parametrize("kind", ["lines", "chunks"])
def test_the_same_numbers_give_the_same_bytes(kind: str, tmp_path: Path) -> None:
    for folder in ("1", "2"):
        CHARTS[kind].write(tmp_path / folder)
    for suffix in ("svg", "png"):
        one, other = (tmp_path / folder / f"{CHARTS[kind].name}.{suffix}" for folder in ("1", "2"))
        assert one.read_bytes() == other.read_bytes()


def test_a_line_and_its_band_are_drawn(tmp_path: Path) -> None:
    text = lines(line(1, 0.9, 0.8)).write(tmp_path)
    assert pixels(tmp_path / "a.png", LIGHT[SERIES[0]]) > 500
    assert "fill-opacity" not in text
    lines(line(1, 0.9, 0.8), line(0.1, 0, 0, label="window", look=1), name="two").write(tmp_path)
    assert pixels(tmp_path / "two.png", LIGHT[SERIES[1]]) > 500
    assert "fill-opacity" in lines(line(1, 0.9, 0.8, band=0.1), name="band").write(tmp_path)


def test_more_series_than_colours_differ_in_their_dashes(tmp_path: Path) -> None:
    several = [line(0.1 * n, 0.1 * n, label=f"m{n}", look=n) for n in range(len(SERIES) + 1)]
    drawn = [look(one.look)[:2] for one in several]
    assert len(set(map(str, drawn))) == len(several)
    assert drawn[0][0] == drawn[-1][0]
    text = lines(*several).write(tmp_path)
    assert all(f">{one.label}<" in text for one in several)  # each has its entry in the legend


def test_a_heat_map_has_the_colour_of_each_value(tmp_path: Path) -> None:
    text = CHARTS["heat"].write(tmp_path)
    for value in (1.0, 0.25, 0.0):
        assert LIGHT[f"heat-{heat_level(value)}"] in text
    assert re.findall(r">([01]\.\d\d)<", text) == ["1.00", "0.25", "0.00"]  # what was not measured is empty


def test_what_could_not_be_measured_is_said_in_words(tmp_path: Path) -> None:
    assert "no room" in CHARTS["bars"].write(tmp_path)
    assert ("16K", "full", "no room") in CHARTS["bars"].numbers.rows


def test_the_table_of_lines() -> None:
    numbers = CHARTS["lines"].numbers
    assert numbers.header == ["series", "tokens", "value", "low", "high"]
    assert numbers.rows[0] == ("DRT", "1,024", "0.9", "0.8", "1")
    long = line_figure(LINES, curves_of(LINES, [line(*[0.5] * 10)]), every=4)
    assert len(long.numbers.rows) == 4  # the first, the fifth, the ninth and the last


def test_names_are_text_and_no_formulas(tmp_path: Path) -> None:
    part = inline(lines(line(1, 0.5, label=HOSTILE)).write(tmp_path), "a", HOSTILE, HOSTILE)
    assert "<script" not in part
    assert "alert(" in part
    assert "$x^2$" in part


def test_without_matplotlib_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'trailmark\[figures\]'"):
        CHARTS["lines"].write(tmp_path)


@pytest.mark.slow
def test_many_numbers_and_many_panels(tmp_path: Path) -> None:
    """Of large maps fields are coloured alone, and the numbers stand in the table; any number of panels is drawn."""
    (heat,) = heat_chart(HEAT, [maps(*[0.5] * 60, label=f"m{n}", columns=5) for n in range(8)])
    assert isinstance(heat, Figure)
    text = heat.write(tmp_path)
    assert ">What is shown<" in text  # the file alone says it
    assert ">0.50<" not in text
    assert all(f">m{n}<" in text for n in range(8))
    assert len(heat.numbers.rows) == 8 * 60
    rows = [{"model": "DRT", "look": 0, "y": n, "at": f"p{n}"} for n in range(17)]
    (bars,) = bar_chart(replace(BARS, by=lambda row: row["at"]), rows)
    text = bars.write(tmp_path)
    assert all(f">p{n}<" in text for n in range(17))
    assert len(bars.numbers.rows) == 17
