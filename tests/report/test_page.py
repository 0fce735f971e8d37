"""The page holds what was found, whatever was found; text of others stays text; a browser is not needed."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.report import runs
from tests.report.runs import SECTIONS
from trailmark.evaluation.needles.suite import pooled
from trailmark.evaluation.suite import suite_named
from trailmark.report.collect import collect
from trailmark.report.page import Built, build
from trailmark.report.sections import rows_of
from trailmark.statistics import wilson_interval
from trailmark.values import percent

pytest.importorskip("matplotlib")
HOSTILE = "</style></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
VOID = {"meta", "link", "img", "br", "input", "hr"}


class Page(HTMLParser):
    """The elements of a page, and whether they close as they opened."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)
            if {"td", "th"} & set(self.open):
                self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def named(self, tag: str, attribute: str) -> list[str | None]:
        return [found.get(attribute) for name, found in self.attributes if name == tag]


def report(folder: Path, *paths: Path, **more: Any) -> tuple[Page, Built]:
    built = build(paths or (folder,), folder / "out" / "report.html", **more)
    return Page(built.page), built


@pytest.fixture(scope="module")
def everything(whole_report: tuple[Built, list[str]]) -> tuple[Page, Built, list[str]]:
    built, said = whole_report
    return Page(built.page), built, said


def test_all_sections_are_there_and_can_be_reached(everything: tuple[Page, Built, list[str]]) -> None:
    page = everything[0]
    assert page.named("section", "id") == list(SECTIONS)
    ids = [found["id"] for _, found in page.attributes if "id" in found]
    assert len(set(ids)) == len(ids)
    links = [link for link in page.named("a", "href") if link and link.startswith("#")]
    assert {link[1:] for link in links} <= set(ids)
    assert {f"#{name}" for name in SECTIONS} <= set(links)


def test_each_figure_lies_beside_the_page_and_in_it(everything: tuple[Page, Built, list[str]]) -> None:
    page, built, said = everything
    folder = built.page.with_name("report-figures")
    assert sorted(folder.iterdir()) == sorted(built.figures)
    assert {path.suffix for path in built.figures} == {".svg", ".png"}
    links = {str(link) for link in page.named("a", "href")}
    assert {f"report-figures/{path.name}" for path in built.figures} <= links
    assert page.tags["svg"] == page.tags["figure"] == len(built.figures) // 2 == 11
    assert f"11 figures in {folder}/" in said[-1]


def test_the_page_asks_the_network_for_nothing(everything: tuple[Page, Built, list[str]]) -> None:
    page = everything[0]
    assert page.tags["img"] == page.tags["iframe"] == 0
    assert not any("src" in found for _, found in page.attributes)
    assert page.named("link", "href") == ["data:,"]
    for tag, found in page.attributes:
        for name, value in found.items():
            assert not (tag != "a" and value and re.search(r"https?:", value)), (tag, name, value)
    css = re.search(r"<style>(.*?)</style>", page.html, re.DOTALL)
    assert css is not None
    assert "url(" not in css[1]
    assert "@import" not in css[1]
    (policy,) = (content for content in page.named("meta", "content") if content and "default-src" in content)
    assert policy.startswith("default-src 'none';")
    assert "script-src 'sha256-" in policy


def test_tables_and_pictures_can_be_heard(everything: tuple[Page, Built, list[str]]) -> None:
    page = everything[0]
    assert page.tags["caption"] == page.tags["table"] > 20
    assert set(page.named("th", "scope")) == {"col", "row"}
    assert set(page.named("svg", "role")) == {"img"}
    levels = [int(tag[1]) for tag, _ in page.attributes if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert page.tags["main"] == page.tags["nav"] == 1
    regions = [found for _, found in page.attributes if found.get("role") == "region"]
    assert all(found.get("tabindex") == "0" and found.get("aria-label") for found in regions)


def test_numbers_are_those_of_the_results(everything: tuple[Page, Built, list[str]]) -> None:
    page = everything[0]
    rows = {tuple(row) for row in page.rows}
    asked = ("65,536", "64×", "anywhere", "1", "100", "95", "0.950", "0.900–1.000", "0.950", "0.750", "0.800")
    assert ("demo/drt", *asked, "250,000", "32 MiB", "device") in rows
    assert any(row[:2] == ("base", "1,024") and "1.6000" in row and "4.804–5.102" in row for row in rows)
    assert any(row[0] == "base" and "0.2800" in row and "0.2700–0.2920" in row for row in rows)
    assert any(
        row[1:7] == ("DRTForCausalLM", "16,384", "host", "3.000", "2.900–3.200", "1.5×") for row in rows
    )
    trained = ("needles", "1,024", "300", "1,228,800", "4:47", "34,600", "0.1667", "1.000", "0.983")
    assert ("base", *trained) in rows
    assert "95.0%" in page.words  # the overview's
    assert "demo/drt, one needle; 95% interval 0.900–1.000" in page.words
    assert "DRT, G = 1" in page.text  # as printed
    assert "Another one." in page.text


def test_wrong_answers_come_first(everything: tuple[Page, Built, list[str]]) -> None:
    page = everything[0]
    shown = [row for row in page.rows if row[-1] in ("yes", "no") and len(row) == 5]
    assert [row[2:] for row in shown[:2]] == [["48214", "11111", "no"]] * 2
    assert [row[2:] for row in shown[2:]] == [["48213", "48213", "yes"]] * 2


def test_what_is_not_shown_and_what_must_be_known_is_said_twice(
    everything: tuple[Page, Built, list[str]],
) -> None:
    page, built, said = everything
    assert len(built.notes) == 1
    assert "2 versions of trailmark" in page.text
    assert any(line.startswith("Note: ") and "2 versions of trailmark" in line for line in said)
    (entry,) = built.not_shown
    assert str(entry.path) in page.text
    assert entry.reason in page.text
    assert f"Not shown: {entry.path}: {entry.reason}" in said


@pytest.mark.usefixtures("undrawn")
def test_how_to_measure_again(tmp_path: Path) -> None:
    kept = runs.needle(1024, command="trailmark evaluate 'my model' --suite needles --lengths 1024")
    made = [runs.needle(x, 90, depth) for x in (1024, 4096) for depth in (0.0, 0.5)]
    runs.record(tmp_path / "a" / "evaluation", "needles", [kept])
    runs.record(tmp_path / "b c" / "evaluation", "needles", made)
    runs.training(tmp_path / "run")
    runs.demo(tmp_path / "demo")
    runs.record(
        tmp_path / "c", "cost", [runs.cost(["x", "y"], 4096)], [runs.identity(x, f"/{x}", x) for x in "xy"]
    )
    page, _ = report(tmp_path)
    assert "trailmark evaluate /x /y --suite cost --lengths 4096 --generate 128 --tiers device" in page.text
    assert "trailmark evaluate 'my model' --suite needles --lengths 1024" in page.text
    (made_of_settings,) = (line for line in page.text.splitlines() if f"evaluate '{tmp_path}/b c'" in line)
    for option in ("--kind single", "--questions 100", "--lengths 1024,4096", "--depths 0,0.5"):
        assert option in made_of_settings
    assert f"trailmark train {tmp_path}/run/run.yaml output=" in page.text
    assert f"trailmark demo --output {tmp_path}/demo --seed 0 --questions 100" in page.text


def test_text_of_others_stays_text(tmp_path: Path) -> None:
    """Names, generations, settings, versions, notes and file names."""
    model = runs.identity(HOSTILE, f"/nowhere/{HOSTILE}") | {
        "architecture": HOSTILE,
        "set": {HOSTILE: HOSTILE},
    }
    needle = runs.needle(1024, kind=HOSTILE, format=HOSTILE, command=f"trailmark {HOSTILE}") | {HOSTILE: 1.5}
    said = [{"id": "needles0", "expected": HOSTILE, "generated": HOSTILE, "correct": False}]
    cells = [
        needle,
        runs.needle(4096, kind=HOSTILE, format=HOSTILE, depth=0.5),
        runs.needle(4096, depth=0.25),
    ]
    for cell in cells:
        cell["settings"] |= {HOSTILE: HOSTILE}
    folder = tmp_path / "<img src=x onerror=alert(3)>"
    runs.record(folder, "needles", cells, model, {HOSTILE: HOSTILE, "torch": HOSTILE}, said)
    paper = {"arxiv": HOSTILE, "table": HOSTILE, "model": HOSTILE, HOSTILE: 1}
    runs.record(
        folder, "perplexity", [runs.perplexity(x, published=[paper], note=HOSTILE) for x in (64, 128)], model
    )
    lines = [{"id": "summarization0", "document": HOSTILE, "reference": HOSTILE, "generated": HOSTILE}]
    runs.record(folder, "summarization", [runs.rouge()], model, lines=lines)
    cost = runs.cost([HOSTILE, "other"], tier=HOSTILE)
    cost["rows"][0] |= {"problem": HOSTILE, "time_ratio": None}
    runs.record(folder, "cost", [cost], [model, runs.identity("other", "/other")])
    runs.training(folder / "run", levels=HOSTILE)
    runs.write(folder / "bad.json", json.dumps({"kind": "trailmark evaluation", "format": HOSTILE}))
    page, built = report(tmp_path)
    assert page.tags["script"] == page.tags["style"] == 1
    assert page.tags["img"] == 0
    assert not any(name.startswith("on") for _, found in page.attributes for name in found)
    assert page.text.count(HOSTILE) > 20
    assert all("<" not in path.name for path in built.figures)


@pytest.mark.parametrize("odd", ["\x00", "\x0b", "\x1b", "\ud800", "\uffff", "\x9f"])
@pytest.mark.sampled(3)
def test_characters_that_no_page_can_hold_are_replaced(odd: str, tmp_path: Path) -> None:
    """In names, settings and what a model wrote: a small model writes any byte."""
    name = f"a{odd}b"
    model = runs.identity(name, f"/nowhere/{name}") | {"set": {name: name}}
    said = [{"id": "needles0", "expected": "1", "generated": name, "correct": False}]
    runs.record(tmp_path, "needles", [runs.needle(64), runs.needle(128)], model, {"processor": name}, said)
    with open(tmp_path / "needles.generations.jsonl", "a") as file:
        file.write("[" * 100_000 + "\n")
    page, built = report(tmp_path)
    assert odd not in page.html
    assert page.text.count("a\ufffdb") > 4
    assert len(built.figures) == 2


FIELDS = [
    *("length", "depth", "needles", "questions", "correct", "accuracy", "accuracy_low", "accuracy_high", "recall"),
    *("settings", "tokens_per_second", "memory_bytes", "windows", "loss", "perplexity", "by_position", "rouge1"),
    *("rows", "documents", "perplexity_low"),
]  # fmt: skip


ODD = [None, "text", float("nan"), float("inf"), [], {}, [[]], -1, True, 10**400]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("value", ODD, ids=[str(value)[:5] for value in ODD])
@pytest.mark.sampled(5)
def test_fields_that_are_missing_or_odd_do_no_harm(value: Any, tmp_path: Path) -> None:
    """What an older or newer version wrote, or a hand: a page all the same, with "-" where nothing is known."""
    for place, change in enumerate(FIELDS):
        cells = {
            "needles": [runs.needle(x, depth=d) for x in (1024, 4096) for d in (0.0, 1.0)],
            "perplexity": [runs.perplexity(x) for x in (1024, 4096)],
            "summarization": [runs.rouge()],
            "cost": [runs.cost(["base", "drt"])],
        }
        for suite, results in cells.items():
            for result in results:
                if change in result:
                    result[change] = value
            runs.record(tmp_path / str(place), suite, results)
    page, _ = report(tmp_path)
    assert page.tags["table"] > 8


@pytest.mark.parametrize("missing", ["steps", "loss", "step"])
def test_a_history_with_holes(missing: str, tmp_path: Path) -> None:
    steps: list[Any] = [{"step": n, "loss": 1.0 / n, "recall": None} for n in range(1, 5)]
    for step in steps[1:3]:
        step.pop(missing, None)
    runs.training(tmp_path, 4, steps=[] if missing == "steps" else [*steps, 5, None])
    page, _ = report(tmp_path)
    assert page.named("section", "id") == ["overview", "training", "reproduce", "environment"]


@pytest.mark.usefixtures("undrawn")
def test_without_matplotlib_there_are_tables_and_a_note(tmp_path: Path) -> None:
    page, built = report(runs.everything(tmp_path))
    assert built.figures == []
    assert not built.page.with_name("report-figures").exists()
    assert page.tags["svg"] == page.tags["figure"] == 0
    assert "No figures: matplotlib is not installed. pip install 'trailmark[figures]'" in page.text
    assert any("Training curves" in row for row in page.words)


def test_one_result_is_enough(tmp_path: Path) -> None:
    path = runs.record(tmp_path / "drt" / "evaluation", "needles", [runs.needle(1024)])
    page, built = report(tmp_path, path)
    assert built.figures == []  # nothing to draw a line through
    assert "<h1>drt</h1>" in page.html
    assert built.notes == []


def test_what_is_wrong_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none that can be shown"):
        build([tmp_path], tmp_path / "report.html")
    runs.record(tmp_path, "needles", [runs.needle(1024)])
    with pytest.raises(ValueError, match=r"output: expected a file.*Try '.*page\.html'"):
        build([tmp_path], tmp_path)
    runs.write(tmp_path / "file", "")
    with pytest.raises(ValueError, match="output"):
        build([tmp_path], tmp_path / "file" / "report.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "needles.json"]


@pytest.mark.usefixtures("undrawn")
def test_a_second_report_replaces_the_first(tmp_path: Path) -> None:
    runs.record(tmp_path, "needles", [runs.needle(x) for x in (1024, 4096)])
    first, second = (report(tmp_path)[1].page.read_bytes() for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (1.0, "100.0%"),
        (0.9996, "> 99.9%"),
        (0.9994, "99.9%"),
        (0.0, "0.0%"),
        (0.0001, "< 0.1%"),
        (0.25, "25.0%"),
    ],
)
def test_all_and_nothing_are_not_reached_by_rounding(share: float, said: str) -> None:
    assert percent(share) == said


# --- pooling ------------------------------------------------------------------------------------------------


def test_depths_are_pooled_and_of_two_the_larger_or_last_counts(tmp_path: Path) -> None:
    cells = [runs.needle(1024, 10, 0.0), runs.needle(1024, 90, 0.0), runs.needle(1024, 50, 1.0, asked=200)]
    cells.append(runs.needle(1024, 7, 1.0, asked=20))  # fewer questions
    runs.record(tmp_path, "needles", cells)
    pool = pooled(rows_of(suite_named("needles"), collect([tmp_path]).results))
    assert pool["accuracy"] == pytest.approx(140 / 300)
    assert pool["recall"] == pytest.approx(140 / 300)
    assert (pool["accuracy_low"], pool["accuracy_high"]) == wilson_interval(140, 300)


def test_where_needles_lie_anywhere_depths_are_not_mixed_in(tmp_path: Path) -> None:
    runs.record(tmp_path, "needles", [runs.needle(1024, 10, 0.0), runs.needle(1024, 90)])
    assert pooled(rows_of(suite_named("needles"), collect([tmp_path]).results))["accuracy"] == 0.9


@pytest.mark.usefixtures("undrawn")
def test_of_many_models_some_are_drawn_and_the_others_named(tmp_path: Path) -> None:
    asked = [{"needle": 1, "selected": [[0, 1]], "weights": [[0.1, 0.9]]}]
    for n in range(14):
        cells = [runs.needle(x, depth=d) | {"asked": asked} for x in (1024, 4096) for d in (0.0, 1.0)]
        runs.record(tmp_path / f"m{n:02}" / "evaluation", "needles", cells)
    page, _ = report(tmp_path)
    assert (
        "Heat maps of 6 more are not drawn; their numbers stand in the table below: m08, m09, m10, m11, m12, m13."
        in page.words
    )
    (chunks,) = (
        words for words in page.words if words.startswith("The chunks read of 10 more are not drawn")
    )
    left_out = ", ".join(f"m{n:02}" for n in range(4, 14))
    assert chunks.endswith(f"needles.generations.jsonl beside their records: {left_out}.")
    assert sum("chunks read at 4,096 tokens: numbers" in words for words in page.words) == 4
    assert len([row for row in page.rows if row[0] == "m13"]) >= 4  # its cells are in the table


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("count", "folded"), [(60, False), (61, True)])
def test_a_long_table_does_not_hide_what_stands_below_it(count: int, folded: bool, tmp_path: Path) -> None:
    runs.record(tmp_path, "needles", [runs.needle(1024 + n) for n in range(count)])
    page, _ = report(tmp_path)
    assert (f"One needle: all cells ({count})" in page.words) == folded
    assert "One needle: all cells" in page.words


@pytest.mark.usefixtures("undrawn")
def test_the_chunks_read_are_those_of_all_depths_of_the_longest_text(tmp_path: Path) -> None:
    cells = []
    for length, depth, chunk in ((1024, None, 3), (4096, 0.0, 5), (4096, 1.0, 60)):
        asked = [{"needle": chunk, "selected": [chunk], "weights": [1.0]}] * 40
        cells.append(runs.needle(length, depth=depth) | {"asked": asked})
    runs.record(tmp_path / "m" / "evaluation", "needles", cells)
    page, _ = report(tmp_path)
    read = [row[1] for row in page.rows if len(row) == 3 and row[2].endswith("(1.00)")]
    assert read == ["5"] * 20 + ["60"] * 20


@pytest.mark.slow
def test_five_times_the_runs_take_far_less_than_five_times_as_long(tmp_path: Path) -> None:
    """Of one process, one after the other: seconds alone are of a machine."""
    seconds = {}
    for count in (10, 50):
        for n in range(count):
            folder = tmp_path / f"{count}" / f"run-{n:02}"
            runs.training(folder, 260)
            lengths = [1024 * 4**k for k in range(6)]
            cells = [runs.needle(x, 100 - n) for x in lengths]
            asked = [
                {"needle": k, "selected": [[k, *range(40, 47)]], "weights": [[0.5] * 8]} for k in range(40)
            ]
            cells += [
                runs.needle(x, 100 - n, depth / 4) | {"asked": asked} for x in lengths for depth in range(5)
            ]
            runs.record(folder / "evaluation", "needles", cells)
            losses = [runs.perplexity(x, 1.5 + n / 100) for x in lengths]
            runs.record(folder / "evaluation", "perplexity", losses)
            runs.record(folder / "evaluation", "summarization", [runs.rouge(0.2 + n / 300)])
        began = time.process_time()
        built = build([tmp_path / f"{count}"], tmp_path / f"out-{count}" / "report.html")
        seconds[count] = time.process_time() - began
    assert seconds[50] < 4 * seconds[10], seconds
    page = Page(built.page)
    assert len({row[0] for row in page.rows if row and row[0].startswith("run-")}) == 50
    assert len(built.figures) == 2 * (6 + 4)
    assert built.page.stat().st_size < 5_000_000


@pytest.mark.usefixtures("undrawn")
def test_a_curve_is_of_one_text(tmp_path: Path) -> None:
    cells = [runs.perplexity(x) for x in (64, 128, 256, 512)]
    for n, cell in enumerate(cells):
        cell["settings"]["text"] = "ab"[n // 2] * 64
    runs.record(tmp_path, "perplexity", cells)
    page, _ = report(tmp_path)
    for text in ("aaaaaaaa", "bbbbbbbb"):
        assert f"Windows of the text (Text: {text}): perplexity by length: numbers" in page.words
        assert f"Text: {text}." in page.words


@pytest.mark.usefixtures("undrawn")
def test_what_models_wrote_for_version_0_1_0_is_shown(tmp_path: Path) -> None:
    answer = {"id": "needles0", "answer": "48213", "text": "11111", "correct": False}
    runs.record(tmp_path / "m" / "evaluation", "needles", [runs.needle(1024)], lines=[answer])
    summary = {"id": "summarization0", "document": "All of it.", "summary": "It.", "text": "Else."}
    runs.record(tmp_path / "m" / "evaluation", "summarization", [runs.rouge()], lines=[summary])
    page, _ = report(tmp_path)
    assert ["m", "1,024", "48213", "11111", "no"] in page.rows
    assert ["m", "All of it.", "It.", "Else."] in page.rows


@pytest.mark.usefixtures("undrawn")
def test_summaries_are_shown_with_the_whole_of_which_their_blocks_are_parts(tmp_path: Path) -> None:
    fixture = Path(__file__).parents[1] / "fixtures" / "version-0.1.0"
    (written,) = fixture.rglob("summarization.generations.jsonl")
    shutil.copytree(written.parent, tmp_path / "evaluation")
    page, _ = report(tmp_path)
    assert [row[-2] for row in page.rows].count("a boat") == 2


@pytest.mark.usefixtures("undrawn")
def test_summaries_that_are_not_all_written_are_said(tmp_path: Path) -> None:
    block = {"settings": {"suite": "summarization", "block": [0, 20]}, "documents": 20, "scores": [[0.1]]}
    runs.record(tmp_path / "a" / "evaluation", "summarization", [dict(block)])
    runs.record(tmp_path / "b" / "evaluation", "summarization", [dict(block), runs.rouge()])
    page, _ = report(tmp_path)
    assert "a/evaluation/summarization.json: not all is measured yet" in page.text
    assert "b/evaluation/summarization.json: not all" not in page.text
