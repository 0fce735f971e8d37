"""The page in headless Chromium (see browser.py): text is only ever text; links, themes, other traces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.browser import Open, rgb, until, windows
from tests.report.explorer.test_in_browser import CHOSEN, IS_CHOSEN, PICTURE, READY, settle, status
from tests.report.traces import HOSTILE, chunks_of, hostile, made_up, of_bytes
from trailmark.report.explorer.page import Built, build
from trailmark.report.theme import DARK, LIGHT
from trailmark.trace.lines import TracedChunk

pytestmark = pytest.mark.slow  # a window of its own for each
SHOWN = "n => document.querySelector('#chunk-text')?.dataset.chunk === String(n)"


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    with windows(browser) as open_one:
        yield open_one


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(*made_up(3000, num_groups=3), tmp_path_factory.mktemp("explorer") / "page.html")


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(*hostile(), tmp_path_factory.mktemp("hostile") / "page.html").page


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


@pytest.fixture
def open_ready(open_page: Open, file: Path) -> Open:
    def one(*size: int, **options: Any) -> Any:
        page = open_page(file, *size, **options)
        until(page, READY)
        return page

    return one


def test_a_link_to_a_chunk_that_is_not_there_is_said(open_ready: Open, chunks: list[TracedChunk]) -> None:
    page = open_ready(fragment="#chunk=96")
    gains = [float(np.nansum(chunk.losses_without - chunk.losses)) for chunk in chunks]
    assert page.evaluate(CHOSEN) == gains.index(
        max(gains)
    )  # where none is asked for, the one that gained most
    assert "There is no chunk 96: the last one is 95" in status(page)
    page.evaluate("location.hash = 'chunk=12'")
    until(page, IS_CHOSEN, 12)
    page.evaluate("location.hash = 'chunk=1000'")
    until(page, "/There is no chunk 1,000/.test(document.querySelector('#status').textContent)")
    assert page.evaluate(CHOSEN) == 12


def test_more_readers_are_shown_when_asked_for(open_ready: Open, chunks: list[TracedChunk]) -> None:
    most_read = max(
        range(len(chunks)), key=lambda n: sum((r.chunks == n).sum() for c in chunks for r in c.reads)
    )
    weights = sorted(
        (float(w) for c in chunks for r in c.reads for w in r.weights[r.chunks == most_read]), reverse=True
    )
    assert len(weights) > 100
    page = open_ready(fragment=f"#chunk={most_read}")
    shown = "[...document.querySelectorAll('#read-by li')].map(row => Number(row.dataset.weight))"
    rows = page.locator("#read-by li")
    rows.nth(99).wait_for()
    assert page.evaluate(shown) == weights[:100]
    page.locator("#more-readers").click()
    rows.nth(len(weights) - 1).wait_for()
    assert page.evaluate(shown) == weights
    assert not page.locator("#more-readers").is_visible()


def test_themes_and_print(open_ready: Open) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    page = open_ready(color_scheme="dark")
    assert page.evaluate(ground) == rgb(DARK["paper"])
    before = page.evaluate(PICTURE, "strip")
    page.locator("#theme").click()
    settle(page)
    assert page.evaluate(ground) == rgb(LIGHT["paper"])
    assert page.evaluate(PICTURE, "strip") != before
    page.reload()
    until(page, READY)
    assert page.evaluate(ground) == rgb(LIGHT["paper"])
    page.locator("#theme").click()
    settle(page)
    before = page.evaluate(PICTURE, "strip")
    page.emulate_media(media="print")  # paper is light whatever the screen is
    until(page, "before => document.getElementById('strip').toDataURL() !== before", before)
    assert not page.locator("#search").is_visible()
    assert page.evaluate("getComputedStyle(document.body).color") == rgb(LIGHT["ink"])


def test_where_not_all_is_listed_that_is_said(open_page: Open, tmp_path: Path) -> None:
    """As of Landmark Attention, which reads all chunks in each layer."""
    header, entries = made_up(2000)
    partly = [
        replace(chunk, reads=tuple(replace(read, rest=0.25 * n) for n, read in enumerate(chunk.reads)))
        for chunk in chunks_of(entries)
    ]
    header = replace(header, group_name="layer")
    page = open_page(build(header, partly, tmp_path / "page.html").page, fragment="#chunk=40")
    until(page, SHOWN, 40)
    lead = "2 layers that read past chunks of 32 tokens, of which the 8 with the largest weights are shown"
    assert lead in page.locator(".lead").text_content()
    assert page.locator("#reads .group .rest").all_text_contents() == ["Other chunks together: weight 0.250."]
    assert page.locator("#reads h4").all_text_contents() == ["Layer 0", "Layer 1"]
    page.evaluate("location.hash = 'chunk=0'")
    until(page, SHOWN, 0)
    assert page.locator("#reads .none").all_text_contents() == ["reads nothing"] * 2
    assert page.locator("#reads .rest").count() == 0


def test_letters_of_several_signs_stay_whole(open_page: Open, tmp_path: Path) -> None:
    """A token for each byte: most hold no character, and none stands for one that another ends."""
    line = "\U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301 \u0646\u0645\u06cc\u200c\u062e \U0001d538 "
    page = open_page(build(*of_bytes(line * 4, 32), tmp_path / "page.html").page, fragment="#chunk=1")
    until(page, SHOWN, 1)
    text = page.locator("#chunk-text").text_content()
    assert text == line * 4
    page.evaluate("location.hash = 'chunk=0'")
    until(page, SHOWN, 0)
    pieces = page.locator("#chunk-text .own [data-token]").all_text_contents()
    assert pieces[:4] == ["\U0001f468\u200d\U0001f469\u200d\U0001f467", " ", "e\u0301", " "]
    assert "".join(pieces) == line[: len("".join(pieces))]
    page.locator("#search").fill("\u0646\u0645\u06cc\u200c")
    assert page.locator("#matches").text_content().startswith("4 matches")
