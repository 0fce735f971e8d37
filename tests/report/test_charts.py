"""Figures show their numbers, as files and in the page; the same numbers give the same bytes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from trailmark.report import charts
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
from trailmark.report.theme import LIGHT, SERIES, heat_level

np = pytest.importorskip("numpy")
pytest.importorskip("matplotlib")
HOSTILE = '<script>alert("$x^2$")</script>&'


def lines(*shares: float, label: str = "DRT", look: int = 0, band: float | None = None) -> Line:
    """At 1K, 4K, 16K ... tokens; ``band``: half the width of each interval."""
    points = [
        Point(
            1024 * 4**n, share, None if band is None else share - band, None if band is None else share + band
        )
        for n, share in enumerate(shares)
    ]
    return Line(label, look, points)


def named(name: str) -> dict[str, str]:
    return {"name": name, "title": f"Title of {name}", "description": "What it shows."}


def line_chart(*drawn: Line, name: str = "a", **more: Any) -> LineChart:
    return LineChart(**named(name), x_label="tokens", panels=[Panel("Right", "share", drawn, **more)])


CHARTS: dict[str, Chart] = {
    "lines": line_chart(lines(0.9, 0.8, 0.7, band=0.1), share=True, rule=(1024, "trained")),
    "heat": HeatChart(
        **named("h"), x_label="tokens", y_label="depth",
        panels=[HeatMap("DRT", ["1K", "4K"], ["0", "1"], [[1.0, 0.25], [0.0, None]])],
    ),
    "bars": BarChart(
        **named("b"), x_label="ratio", unit="×", base=1.0,
        panels=[BarPanel("16K", [Bar("base", 0, 1.0), Bar("full", 1, None, says="out of memory")])],
    ),
    "dots": BarChart(
        **named("d"), x_label="F", dots=True, panels=[BarPanel("ROUGE-1", [Bar("DRT", 2, 0.3, 0.29, 0.32)])]
    ),
    "chunks": ChunkChart(**named("c"), panels=[[Asked(3, [0, 3], [0.1, 0.9])]]),
}  # fmt: skip


def pixels(path: Path, colour: str) -> int:
    """How many pixels have about this colour."""
    from matplotlib.image import imread

    wanted = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return int((np.abs(imread(path)[..., :3] - wanted).max(-1) < 0.03).sum())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", CHARTS)
def test_one_drawing_gives_both_files_and_the_page(kind: str, tmp_path: Path) -> None:
    chart = CHARTS[kind]
    text = chart.write(tmp_path / "new")
    assert (tmp_path / "new" / f"{chart.name}.svg").read_text() == text
    assert (tmp_path / "new" / f"{chart.name}.png").read_bytes().startswith(b"\x89PNG")
    ElementTree.fromstring(text)  # a file of its own, in the light colours
    assert "<dc:date>" not in text
    assert "var(" not in text
    part = inline(text, chart.name, chart.title, chart.description)
    assert not re.findall(r"#[0-9a-f]{6}\b", part)  # colours are the page's
    assert "font-family" not in part
    root = ElementTree.fromstring(part)
    assert root.get("role") == "img"
    spoken = {node.get("id"): node.text for node in root.iter() if node.tag in ("title", "desc")}
    assert [spoken[name] for name in str(root.get("aria-labelledby")).split()] == [
        chart.title,
        chart.description,
    ]


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
    line_chart(lines(1, 0.9, 0.8)).write(tmp_path)
    alone = pixels(tmp_path / "a.png", LIGHT[SERIES[0]])
    assert alone > 500
    line_chart(lines(1, 0.9, 0.8), lines(0.1, 0, 0, label="window", look=1), name="two").write(tmp_path)
    assert pixels(tmp_path / "two.png", LIGHT[SERIES[1]]) > 500
    banded = lines(1, 0.9, 0.8, band=0.1)
    text = line_chart(banded, name="band").write(tmp_path)
    assert "fill-opacity" in text
    assert "fill-opacity" not in line_chart(lines(1, 0.9), name="none").write(tmp_path)


def test_more_series_than_colours_differ_in_their_dashes(tmp_path: Path) -> None:
    several = [lines(0.1 * n, 0.1 * n, label=f"m{n}", look=n) for n in range(len(SERIES) + 1)]
    drawn = [charts._look(line.look) for line in several]
    assert len(set(map(str, drawn))) == len(several)
    assert drawn[0][0] == drawn[-1][0]
    text = line_chart(*several).write(tmp_path)
    assert all(f">{line.label}<" in text for line in several)  # each has its entry in the legend


def test_a_heat_map_has_the_colour_of_each_value(tmp_path: Path) -> None:
    text = CHARTS["heat"].write(tmp_path)
    for value in (1.0, 0.25, 0.0):
        assert LIGHT[f"heat-{heat_level(value)}"] in text
    assert re.findall(r">([01]\.\d\d)<", text) == ["1.00", "0.25", "0.00"]  # what was not measured is empty


def test_what_could_not_be_measured_is_said_in_words(tmp_path: Path) -> None:
    assert "out of memory" in CHARTS["bars"].write(tmp_path)
    assert ["16K", "full", "out of memory"] in CHARTS["bars"].table()[1]


@pytest.mark.parametrize("kind", CHARTS)
def test_the_table_holds_the_numbers(kind: str) -> None:
    header, rows = CHARTS[kind].table()
    assert rows
    assert {len(row) for row in rows} == {len(header)}


def test_the_table_of_lines() -> None:
    header, rows = CHARTS["lines"].table()
    assert header == ["series", "tokens", "value", "low", "high"]
    assert rows[0] == ["DRT", "1,024", "0.9", "0.8", "1"]
    long = LineChart(**named("l"), x_label="x", panels=[Panel("p", "y", [lines(*[0.5] * 10)])], every=4)
    assert len(long.table()[1]) == 4  # the first, the fifth, the ninth and the last


def test_names_are_text_and_no_formulas(tmp_path: Path) -> None:
    text = line_chart(lines(1, 0.5, label=HOSTILE)).write(tmp_path)
    part = inline(text, "a", HOSTILE, HOSTILE)
    assert "<script" not in part
    assert "alert(" in part
    assert "$x^2$" in part


def test_without_matplotlib_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'trailmark\[figures\]'"):
        CHARTS["lines"].write(tmp_path)


@pytest.mark.slow
def test_many_panels(tmp_path: Path) -> None:
    """Of many models fields are coloured alone, and the numbers stand in the table."""
    maps = [HeatMap(f"m{n}", ["1K"] * 5, ["0"] * 5, [[0.5] * 5] * 5) for n in range(17)]
    chart = HeatChart(**named("h"), x_label="tokens", y_label="depth", panels=maps, what="What is shown")
    text = chart.write(tmp_path)
    assert ">What is shown<" in text  # the file alone says it
    assert ">0.50<" not in text
    assert all(f">m{n}<" in text for n in range(17))
    assert len(chart.table()[1]) == 17 * 25
