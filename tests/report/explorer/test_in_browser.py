"""The explorer's page as a person uses it, in headless Chromium (see browser.py): choosing, moving, searching, keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.browser import until, windows
from tests.report.traces import CHUNK_SIZE
from trailmark.trace.lines import TracedChunk

READY = "performance.getEntriesByName('ready').length > 0"
CHOSEN = "Number(document.querySelector('#chunk-text').dataset.chunk)"
IS_CHOSEN = f"n => {CHOSEN} === n"
# how many pixels of a canvas have any colour, from a line of it to another
PAINTED = """([id, from, to]) => {
    const canvas = document.getElementById(id), scale = canvas.height / canvas.clientHeight;
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
    copy.drawImage(canvas, 0, 0);
    const { data } = copy.getImageData(0, from * scale, canvas.width, (to - from) * scale);
    let painted = 0;
    for (let i = 3; i < data.length; i += 4) painted += data[i] > 0;
    return painted;
}"""
PICTURE = "id => document.getElementById(id).toDataURL()"
# [chunk, group, weight] of each entry
ENTRIES = """id => [...document.querySelectorAll(`#${id} li[data-chunk]`)].map(
    li => [li.dataset.chunk, li.dataset.group, li.dataset.weight].map(Number))"""
ARCS = ["strip", 20, 100]
LATER = ["strip", 212, 260]


@pytest.fixture(scope="module")
def shared(browser: Any, file: Path) -> Iterator[Any]:
    """One window for the tests that leave nothing behind but a choice: opening takes longer than they do."""
    with windows(browser) as open_one:
        page = open_one(file)
        until(page, READY)
        yield page


@pytest.fixture
def page(shared: Any) -> Any:
    """The whole text in view, chunk 40 chosen, nothing searched for."""
    shared.locator("#search").fill("")
    shared.locator("#zoom-all").click()
    choose(shared, 40)
    shared.evaluate("scrollTo(0, 0)")
    return shared


def choose(page: Any, chunk: int) -> None:
    page.evaluate("n => { location.hash = `chunk=${n}`; }", chunk)
    until(page, IS_CHOSEN, chunk)
    settle(page)


def settle(page: Any) -> None:
    """What was asked to be drawn is drawn."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def status(page: Any) -> str:
    return page.locator("#status").text_content()


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


def test_the_numbers_of_the_page_are_those_of_the_trace(page: Any, chunks: list[TracedChunk]) -> None:
    losses, without = terms(chunks)
    helped = sum(without > loss for loss, without in zip(losses, without, strict=True))
    assert value(page, "#helped") == helped
    assert page.locator("#helped").text_content() == f"{helped / len(losses):.1%}"
    expect_sum(value(page, "#loss"), losses)
    expect_sum(value(page, "#loss-without"), without)
    for number in (0, 1, 2, 40, len(chunks) - 1):
        choose(page, number)
        losses, without = terms([chunks[number]])
        expect_sum(value(page, "#gain"), [*without, *(-loss for loss in losses)])
        assert sorted(page.evaluate(ENTRIES, "reads")) == sorted(
            [chunk, group, weight]
            for group, read in enumerate(chunks[number].reads)
            for chunk, weight in zip(read.chunks.tolist(), read.weights.tolist(), strict=True)
        )
        readers = sorted(
            [later.number, group, float(read.weights[read.chunks == number][0])]
            for later in chunks
            for group, read in enumerate(later.reads)
            if number in read.chunks
        )
        assert value(page, "#times-read") == len(readers)
        shown = page.evaluate(ENTRIES, "read-by")
        assert len(shown) == min(len(readers), 100)
        assert all(entry in readers for entry in shown)
        # the strongest first
        assert [weight for *_, weight in shown] == sorted((w for *_, w in readers), reverse=True)[
            : len(shown)
        ]


def test_a_click_chooses_what_is_there_and_can_be_taken_back(page: Any, chunks: list[TracedChunk]) -> None:
    box = page.locator("#strip").bounding_box()
    wanted = 70
    page.mouse.click(box["x"] + box["width"] * (wanted + 0.5) / len(chunks), box["y"] + 150)
    until(page, IS_CHOSEN, wanted)
    assert page.evaluate("location.hash") == f"#chunk={wanted}"
    assert page.locator("#chunk-text .own").text_content().replace("↵", "") == chunks[wanted].text
    assert page.locator("#chunk-number").text_content() == f"Chunk {wanted}"
    page.go_back()
    until(page, IS_CHOSEN, 40)
    page.go_forward()
    until(page, IS_CHOSEN, wanted)


def test_keys_on_the_strip_and_they_fill_no_history(page: Any, chunks: list[TracedChunk]) -> None:
    page.locator("#strip").focus()
    before = page.evaluate("history.length")
    for key, expected in (
        *(("ArrowRight", 41), ("ArrowRight", 42), ("ArrowLeft", 41), ("ArrowDown", 51), ("ArrowUp", 41)),
        *(("End", len(chunks) - 1), ("ArrowRight", len(chunks) - 1), ("Home", 0), ("ArrowLeft", 0)),
        *(("j", 1), ("k", 0)),
    ):
        page.keyboard.press(key)
        assert page.evaluate(CHOSEN) == expected, key
        assert page.locator("#strip").get_attribute("aria-valuenow") == str(expected)
    assert page.evaluate("history.length") == before
    assert page.evaluate("location.hash") == "#chunk=0"


def test_arcs_lead_to_what_was_read_and_to_who_read_it(page: Any, chunks: list[TracedChunk]) -> None:
    above, below = page.evaluate(PAINTED, ARCS), page.evaluate(PAINTED, LATER)
    choose(page, 0)  # reads nothing; its file's border alone stands above
    assert all(len(read.chunks) == 0 for read in chunks[0].reads)
    assert page.evaluate(PAINTED, ARCS) < above / 4
    assert page.evaluate(PAINTED, LATER) > below
    last = len(chunks) - 1
    choose(page, last)  # nobody reads the last one
    assert page.evaluate(PAINTED, LATER) == 0
    assert page.locator("#nobody").is_visible()
    assert page.evaluate(PAINTED, ARCS) > above / 4


def test_zoom_and_pan_by_wheel_buttons_keys_and_mouse(page: Any) -> None:
    def changed(act: Any) -> None:
        before = page.evaluate(PICTURE, "strip")
        act()
        settle(page)
        assert page.evaluate(PICTURE, "strip") != before

    box = page.locator("#strip").bounding_box()
    at = (box["x"] + box["width"] * 0.4, box["y"] + 150)
    whole = page.evaluate(PICTURE, "strip")
    page.mouse.move(*at)
    changed(lambda: page.mouse.wheel(0, -300))
    changed(lambda: page.mouse.wheel(200, 0))
    changed(lambda: page.keyboard.press("+"))
    changed(page.locator("#zoom-in").click)
    changed(page.locator("#zoom-chunk").click)
    changed(lambda: page.keyboard.press("-"))

    def drag() -> None:
        page.mouse.move(*at)
        page.mouse.down()
        page.mouse.move(at[0] + 80, at[1], steps=4)
        page.mouse.up()

    changed(drag)
    assert page.evaluate(CHOSEN) == 40  # dragging chooses nothing
    page.locator("#strip").focus()
    changed(lambda: page.keyboard.press("]"))
    over = page.locator("#overview").bounding_box()
    changed(lambda: page.mouse.click(over["x"] + over["width"] * 0.8, over["y"] + 10))
    page.keyboard.press("0")
    page.mouse.move(0, 0)
    settle(page)
    assert page.evaluate(PICTURE, "strip") == whole


def test_shades_change_the_strip_and_the_legend(page: Any) -> None:
    seen = set()
    for number in range(3):
        page.locator("input[name=shade]").nth(number).check()
        settle(page)
        seen.add((page.evaluate(PICTURE, "strip"), page.locator("#legend-note").text_content()))
        assert any(c.isdigit() for c in page.locator("#legend-high").text_content())
    page.locator("input[name=shade]").nth(0).check()
    assert len({picture for picture, _ in seen}) == len({note for _, note in seen}) == 3


def test_search_counts_all_matches_and_goes_round(page: Any, chunks: list[TracedChunk]) -> None:
    text = "".join(chunk.text for chunk in chunks).lower()
    word = "\\label{eq"
    places = [n for n in range(len(text)) if text.startswith(word, n)]
    starts = [0]
    for chunk in chunks:
        starts.append(starts[-1] + len(chunk.text))
    holding = [max(c for c in range(len(chunks)) if starts[c] <= place) for place in places]
    assert len(places) > 2
    before = page.evaluate(PAINTED, ["strip", 204, 211])
    page.keyboard.press("/")
    page.keyboard.type(word.upper())
    settle(page)
    assert (
        page.locator("#matches")
        .text_content()
        .startswith(f"{len(places)} matches in {len(set(holding))} chunks")
    )
    assert page.evaluate(PAINTED, ["strip", 204, 211]) > before
    for key, expected in (("Enter", 0), ("Enter", 1), ("Shift+Enter", 0), ("Shift+Enter", -1), ("Enter", 0)):
        page.keyboard.press(key)
        until(page, IS_CHOSEN, holding[expected])
        assert page.locator("#chunk-text .match").count() >= 1
    page.keyboard.press("Shift+Enter")
    assert page.locator("#matches").text_content() == f"match {len(places)} of {len(places)}"
    page.locator("#search").fill("no such words")
    assert page.locator("#matches").text_content() == "0 matches in 0 chunks"


def test_jump(page: Any, chunks: list[TracedChunk]) -> None:
    assert len(chunks) == 96
    for written, chunk in (("17", 17), ("0%", 0), ("50 %", 47), ("100%", 95), ("#3", 3), ("0,040", 40)):
        page.locator("#jump").fill(written)
        page.keyboard.press("Enter")
        assert page.evaluate(CHOSEN) == chunk
    for nowhere in ("96", "101%", "-1", "what", ",", "."):
        page.locator("#jump").fill(nowhere)
        page.keyboard.press("Enter")
        assert f"There is no {nowhere}: write a chunk from 0 to 95" in status(page)
        assert page.evaluate(CHOSEN) == 40
    page.locator("#jump").fill("")
    page.keyboard.press("Enter")
    assert "There is no such place" in status(page)


def test_letters_are_no_commands_where_one_writes_or_chooses(page: Any) -> None:
    for place in ("#search", "#jump", "#sort", "#far"):
        page.locator(place).focus()
        for key in ("j", "n", "z", "?"):
            page.keyboard.press(key)
            assert page.evaluate(CHOSEN) == 40, (place, key)
    assert not page.locator("#help").is_visible()
    page.locator("#strip").focus()
    for modifier in ("Control", "Alt", "Meta"):
        page.keyboard.press(f"{modifier}+j")
        page.keyboard.press(f"{modifier}+ArrowRight")
        assert page.evaluate(CHOSEN) == 40, modifier
    page.keyboard.press("j")
    assert page.evaluate(CHOSEN) == 41
    for name, chosen in (("far", "0"), ("sort", "weight")):
        page.locator(f"#{name}").select_option(chosen)


def test_a_chunk_names_the_files_that_it_holds(page: Any, chunks: list[TracedChunk]) -> None:
    """The second file begins at token 2,000, within chunk 31."""
    for chunk, files in ((30, ["part-0.tex"]), (31, ["part-0.tex", "part-1.tex"]), (32, ["part-1.tex"])):
        choose(page, chunk)
        assert page.locator("#chunk-place bdi").all_text_contents() == files


def test_the_strongest_retrievals(page: Any, chunks: list[TracedChunk]) -> None:
    entries = [
        (chunk.number, int(read), group, float(weight))
        for chunk in chunks
        for group, reads in enumerate(chunk.reads)
        for read, weight in zip(reads.chunks, reads.weights, strict=True)
    ]

    def rows() -> list[tuple[int, int, int, float]]:
        return [
            (int(row["reader"]), int(row["chunk"]), int(row["group"]), float(row["weight"]))
            for row in page.evaluate(
                "[...document.querySelectorAll('#strongest tbody tr')].map(row => ({...row.dataset}))"
            )
        ]

    by_weight = sorted(entries, key=lambda entry: -entry[3])
    assert rows() == by_weight[:25]
    page.locator("#list-next").click()
    assert rows() == by_weight[25:50]
    page.locator("#far").select_option("2048")
    page.locator("#which-group").select_option("1")
    far = [e for e in by_weight if e[2] == 1 and (e[0] - e[1]) * CHUNK_SIZE >= 2048]
    assert rows() == far[:25]
    assert page.locator("#list-place").text_content() == f"1–25 of {len(far)}"
    page.locator("#sort").select_option("distance")
    assert rows() == sorted(far, key=lambda e: (-(e[0] - e[1]), entries.index(e)))[:25]
    # a link of the list chooses, and the chosen chunk comes into view
    reader = rows()[0][0]
    page.locator("#strongest tbody a").first.click()
    until(page, IS_CHOSEN, reader)
    until(page, "document.querySelector('#chunk-number').getBoundingClientRect().top < innerHeight")
    for name, value in (("far", "0"), ("which-group", "-1"), ("sort", "weight")):
        page.locator(f"#{name}").select_option(value)


def test_tokens_tell_their_losses(page: Any, chunks: list[TracedChunk]) -> None:
    gains = chunks[40].losses_without - chunks[40].losses
    best = int(gains.argmax())
    token = page.locator(f"#chunk-text [data-token='{chunks[40].first_token + best}']")
    assert "helped" in token.get_attribute("class")
    token.hover()
    tip = page.locator("#tip").text_content()
    assert f"gain +{gains[best]:.3f}" in tip
    assert f"loss {chunks[40].losses[best]:.3f}" in tip
    page.locator("summary", has_text="helped and hurt").click()
    assert page.locator("#most-helped tr").first.locator("td").first.text_content() == f"+{gains[best]:.3f}"
    page.locator("summary", has_text="helped and hurt").click()
    page.mouse.move(0, 0)


def test_what_was_read_stands_beside_with_its_neighbours(page: Any, chunks: list[TracedChunk]) -> None:
    first = page.locator("#reads li").first
    read = int(first.get_attribute("data-chunk"))
    assert chunks[read].text.split("\n")[0].strip() in first.text_content()
    first.locator("summary").click()
    until(page, "document.querySelector('#reads li details a') !== null")  # filled after it has opened
    links = first.locator("details a")
    assert [link.get_attribute("href") for link in links.all()] == [
        f"#chunk={n}" for n in (read - 1, read, read + 1) if n >= 0
    ]
    first.locator("a").first.click()
    until(page, IS_CHOSEN, read)


@pytest.mark.parametrize(
    "width", [320, *(pytest.param(width, marks=pytest.mark.slow) for width in (360, 768))]
)
def test_a_narrow_window_scrolls_down_alone(page: Any, width: int) -> None:
    page.locator("summary", has_text="helped and hurt").click()
    page.set_viewport_size({"width": width, "height": 800})
    settle(page)
    sizes = page.evaluate("[innerWidth, document.scrollingElement.scrollWidth]")
    box = page.locator("#strip").bounding_box()
    page.set_viewport_size({"width": 1280, "height": 900})
    page.locator("summary", has_text="helped and hurt").click()
    assert sizes == [width, width]
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width


def test_everything_can_be_reached_by_tab(page: Any) -> None:
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    page.locator("#search").fill("the")  # without a match there is no next one
    page.locator(".skip").focus()
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.name"))
    wanted = {
        "help-open",
        "theme",
        "search",
        "search-next",
        "jump",
        "shade",
        "zoom-in",
        "zoom-all",
        "strip",
        "chunk-text",
    }
    assert wanted <= reached, wanted - reached
    assert {"previous", "next"} <= reached


def test_help_opens_and_closes_by_key(page: Any) -> None:
    page.locator("#strip").focus()
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("ArrowRight")  # the page behind it stays as it is
    assert page.evaluate(CHOSEN) == 40
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()


def test_what_a_screen_reader_meets(page: Any) -> None:
    seen = page.locator("body").aria_snapshot()
    for part in (
        "- main:",
        "- banner:",
        "- contentinfo:",
        "- status:",
        '- heading "The text" [level=2]',
        '- heading "Chunk 40" [level=2]',
        '- heading "What it read" [level=3]',
        '- heading "Group 0" [level=4]',
        '- heading "The strongest retrievals" [level=2]',
        '- slider "The text as a strip of chunks. Arrow keys choose a chunk."',
        '- searchbox "Search"',
        '- textbox "Go to"',
        '- radio "times read" [checked]',
        '- button "Zoom in"',
        '- button "Next chunk"',
        '- region "Text of the chosen chunk"',
        "- columnheader",
    ):
        assert part in seen, part
    strip = page.locator("#strip")
    assert strip.get_attribute("aria-valuetext").startswith("Chunk 40 of 96: gain ")
    assert strip.get_attribute("aria-valuemax") == "95"
    assert status(page) == strip.get_attribute("aria-valuetext")


def test_words_that_are_shared_and_rare_are_underlined(page: Any, chunks: list[TracedChunk]) -> None:
    """Some chunk of the made-up text shares a rare word with what it read: found here, then looked for there."""
    text = "".join(chunk.text for chunk in chunks)
    for chunk in chunks:
        reads = " ".join(chunks[int(n)].text for read in chunk.reads for n in read.chunks).split()
        rare = [
            w for w in chunk.text.split() if w.isalpha() and len(w) > 2 and w in reads and text.count(w) <= 8
        ]
        if rare:
            break
    choose(page, chunk.number)
    until(page, "CSS.highlights.has('shared')")
    words = page.evaluate("[...CSS.highlights.get('shared')].map(range => range.toString())")
    assert rare[0] in words
    assert page.locator("#shared").is_visible()
