"""The explorer's page in a real browser (see browser.py): its numbers are the trace's, its text is only ever text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.browser import Open, until, windows
from tests.report.traces import HOSTILE, hostile, made_up
from trailmark.data.traces import TracedChunk
from trailmark.report.explorer import Built, build

SHOWN = "n => document.querySelector('#chunk-text')?.dataset.chunk === String(n)"
# [chunk, group, weight] of each entry
ENTRIES = """id => [...document.querySelectorAll(`#${id} li[data-chunk]`)].map(
    li => [li.dataset.chunk, li.dataset.group, li.dataset.weight].map(Number))"""


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    with windows(browser) as open_one:
        yield open_one


@pytest.fixture(scope="module")
def trace() -> list[TracedChunk]:
    return [entry for entry in made_up(3000, num_groups=3)[1] if isinstance(entry, TracedChunk)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(*made_up(3000, num_groups=3), tmp_path_factory.mktemp("explorer") / "page.html")


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(*hostile(), tmp_path_factory.mktemp("hostile") / "page.html").page


def value(page: Any, of: str) -> float:
    return float(page.evaluate("of => document.querySelector(of).dataset.value", of))


def expect_sum(found: float, terms: Sequence[float]) -> None:
    """Within what double precision loses when so many are added one after the other, in any order."""
    room = len(terms) * np.finfo(float).eps * math.fsum(map(abs, terms))
    assert abs(found - math.fsum(terms)) <= room


def terms(chunks: Sequence[TracedChunk]) -> tuple[list[float], list[float]]:
    """The losses with and without retrieval, as far as there are some."""
    losses = np.concatenate([chunk.losses for chunk in chunks]).astype(float)
    without = np.concatenate([chunk.losses_without for chunk in chunks]).astype(float)
    known = np.isfinite(losses)
    return losses[known].tolist(), without[known].tolist()


def test_the_numbers_of_the_page_are_those_of_the_trace(
    open_page: Open, built: Built, trace: list[TracedChunk]
) -> None:
    page = open_page(built.page, fragment="#chunk=0")
    until(page, SHOWN, 0)
    losses, without = terms(trace)
    expect_sum(value(page, "#loss"), losses)
    expect_sum(value(page, "#loss-without"), without)
    for number in (0, 1, 2, 40, len(trace) - 1):
        page.evaluate("n => { location.hash = `chunk=${n}`; }", number)
        until(page, SHOWN, number)
        losses, without = terms([trace[number]])
        expect_sum(value(page, "#gain"), [*without, *(-loss for loss in losses)])
        assert sorted(page.evaluate(ENTRIES, "reads")) == sorted(
            [chunk, group, weight]
            for group, read in enumerate(trace[number].reads)
            for chunk, weight in zip(read.chunks.tolist(), read.weights.tolist(), strict=True)
        )
        readers = sorted(
            [later.number, group, float(read.weights[read.chunks == number][0])]
            for later in trace
            for group, read in enumerate(later.reads)
            if number in read.chunks
        )
        assert value(page, "#times-read") == len(readers)
        shown = page.evaluate(ENTRIES, "read-by")
        assert len(shown) == min(len(readers), 100) or len(shown) == len(readers)
        assert all(entry in readers for entry in shown)
        # the strongest first
        assert [weight for *_, weight in shown] == sorted((w for *_, w in readers), reverse=True)[
            : len(shown)
        ]


def test_hostile_text_is_shown_and_never_obeyed(open_page: Open, hostile_page: Path) -> None:
    page = open_page(hostile_page)
    title = page.title()
    assert "<b>bold</b></title><script>1</script>" in title
    scripts = page.evaluate("document.scripts.length")
    for number, text in enumerate([*HOSTILE, *HOSTILE[:9]]):
        page.evaluate("n => { location.hash = `chunk=${n}`; }", number)
        until(page, SHOWN, number)
        shown = page.evaluate("document.querySelector('#chunk-text').textContent")
        seen = "".join(c for c in text if c.isprintable() and c.isascii())
        assert seen in "".join(c for c in shown if c.isprintable() and c.isascii())
        strange = page.evaluate(
            "document.querySelectorAll('main img, main script, main iframe, main b, main [onerror]').length"
        )
        assert strange == 0
    assert page.evaluate("document.scripts.length") == scripts == 3
    assert page.title() == title
    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")


def test_a_damaged_page_says_so(open_page: Open, built: Built, tmp_path: Path) -> None:
    html = built.page.read_text(encoding="utf-8")
    begin = html.index('id="data">') + len('id="data">')
    for name, damaged in (
        ("cut.html", html[: begin + 4000] + html[html.index("</script>", begin) :]),
        ("changed.html", html[: begin + 400] + "*" + html[begin + 401 :]),
    ):
        (tmp_path / name).write_text(damaged, encoding="utf-8")
        page = open_page(tmp_path / name)
        until(page, "/damaged/.test(document.querySelector('#status').textContent)")
        assert page.locator("#status").is_visible()
