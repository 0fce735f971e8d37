"""The report's page in a real browser: see browser.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.report.browser import Open, rgb, until, windows
from tests.report.runs import SECTIONS
from trailmark.report.page import Built
from trailmark.report.theme import DARK, LIGHT


@pytest.fixture(scope="module")
def report(whole_report: tuple[Built, list[str]]) -> Path:
    return whole_report[0].page


@pytest.fixture
def open_page(browser: Any, report: Path) -> Iterator[Open]:
    with windows(browser) as open_one:
        yield partial(open_one, report)


def colour(page: Any, what: str = "background-color", of: str = "body") -> str:
    return page.evaluate(f"getComputedStyle(document.querySelector('{of}')).getPropertyValue('{what}')")


def test_all_sections_are_seen_and_the_navigation_leads_to_each(open_page: Open) -> None:
    page = open_page()
    assert page.title().startswith("trailmark report: ")
    assert [part.get_attribute("id") for part in page.locator("main > section").all()] == list(SECTIONS)
    for link in page.locator("nav a").all():
        link.click()
        target = page.locator(link.get_attribute("href"))
        until(
            page,
            "id => Math.abs(document.querySelector(id).getBoundingClientRect().top) < innerHeight",
            link.get_attribute("href"),
        )
        assert target.is_visible()


def test_figures_are_as_large_as_they_should_be(open_page: Open) -> None:
    page = open_page()
    boxes = page.evaluate("""[...document.querySelectorAll('figure svg')].map(svg => {
        const box = svg.getBoundingClientRect(), inside = svg.viewBox.baseVal;
        return [box.width, box.height, inside.width / inside.height];
    })""")
    assert len(boxes) == 11
    for width, height, ratio in boxes:
        assert 370 < width <= 1024
        assert abs(width / height - ratio) < 0.02
    outside = page.evaluate("""[...document.querySelectorAll('figure svg')].flatMap(svg => {
        const box = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('text')].filter(text => {
            const own = text.getBoundingClientRect();
            return own.left < box.left - 6 || own.right > box.right + 6;
        }).map(text => text.textContent);
    })""")
    assert outside == []


@pytest.mark.parametrize("width", [320, 360, 768])
@pytest.mark.sampled(3)
def test_a_narrow_screen_scrolls_tables_and_not_the_page(open_page: Open, width: int) -> None:
    page = open_page(width, 700)
    for opened in (False, True):
        page.evaluate("opened => document.querySelectorAll('details').forEach(d => d.open = opened)", opened)
        assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
        wide = page.evaluate("""[...document.querySelectorAll('.scroll')].filter(box => {
            const own = box.getBoundingClientRect();
            return own.width && (own.left < -1 || own.right > innerWidth + 1);
        }).length""")
        assert wide == 0
    page.evaluate("const box = document.querySelector('#needles .scroll:has(table)'); box.scrollLeft = 300")
    header = page.locator("#needles tbody th").first.bounding_box()
    assert header["x"] >= 0  # the row's name stays in sight
    size = page.evaluate("""Math.min(...[...document.querySelectorAll('figure svg text')].map(text =>
        text.getBBox().height * text.ownerSVGElement.getBoundingClientRect().width
        / text.ownerSVGElement.viewBox.baseVal.width))""")
    assert size > 7.5  # pixels, of the smallest words in a figure


def test_colours_follow_the_system(open_page: Open) -> None:
    for scheme, theme in (("light", LIGHT), ("dark", DARK)):
        page = open_page(color_scheme=scheme)
        assert colour(page) == rgb(theme["paper"])
        assert colour(page, "color") == rgb(theme["ink"])
        drawn = page.evaluate(
            """[...document.querySelectorAll('figure svg path, figure svg text, figure svg use')]
            .map(node => getComputedStyle(node)).flatMap(style => [style.stroke, style.fill])"""
        )
        assert {rgb(theme[name]) for name in ("series-1", "series-2", "muted", "ink")} <= set(drawn)
        other = DARK if theme is LIGHT else LIGHT
        assert not {rgb(other[name]) for name in ("series-1", "ink", "muted")} & set(drawn)


def test_the_button_changes_colours_and_the_tab_remembers(open_page: Open) -> None:
    page = open_page(color_scheme="light")
    button = page.locator("#theme")
    assert button.get_attribute("aria-label") == "Show in dark colours"
    button.click()
    assert colour(page) == rgb(DARK["paper"])
    assert button.get_attribute("aria-label") == "Show in light colours"
    page.reload()
    assert colour(page) == rgb(DARK["paper"])
    page.locator("#theme").click()
    assert colour(page) == rgb(LIGHT["paper"])
    other = open_page(color_scheme="dark")  # another tab follows the system
    assert colour(other) == rgb(DARK["paper"])
    other.locator("#theme").click()
    assert colour(other) == rgb(LIGHT["paper"])


def test_paper_is_light_and_all_is_open(open_page: Open) -> None:
    page = open_page(color_scheme="dark")
    page.locator("#theme").click()
    page.locator("#theme").click()  # chosen, and dark
    assert colour(page) == rgb(DARK["paper"])
    page.emulate_media(media="print")
    assert colour(page) == rgb(LIGHT["paper"])
    assert not page.locator("nav").is_visible()
    until(page, "!document.querySelector('details:not([open])')")
    assert page.locator("#reproduce details table").first.is_visible()
    page.emulate_media(media="screen")
    until(page, "!document.querySelector('details[open]')")
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_the_keyboard_reaches_all_and_focus_is_seen(open_page: Open) -> None:
    page = open_page()
    focused = "document.activeElement"
    page.keyboard.press("Tab")
    assert page.evaluate(f"{focused}.className") == "skip"
    until(page, "document.querySelector('.skip').getBoundingClientRect().top >= 0")
    order = []
    for _ in range(len(SECTIONS) + 6):
        page.keyboard.press("Tab")
        order.append(page.evaluate(f"{focused}.id || {focused}.getAttribute('href') || {focused}.className"))
        assert page.evaluate(f"getComputedStyle({focused}).outlineStyle") == "solid"
    links = [place for place in order if place.startswith("#")]
    assert [f"#{name}" for name in SECTIONS] == links[-len(SECTIONS) :]
    assert "theme" in order
    assert "scroll" in order  # a table, to be scrolled with the arrow keys
    page.locator("#theme").focus()
    before = colour(page)
    page.keyboard.press("Enter")
    assert colour(page) != before
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate(f"{focused}.id") == "main"
    page.locator("#needles details summary").first.focus()
    page.keyboard.press("Space")
    assert page.locator("#needles details").first.get_attribute("open") is not None


def test_what_a_screen_reader_hears(open_page: Open) -> None:
    """The names that the browser gives to assistive technology."""
    page = open_page()
    least = {"img": 11, "region": 20, "main": 1, "navigation": 1, "banner": 1, "table": 5}
    for role, number in least.items():
        assert page.get_by_role(role).count() >= number, role
    assert page.get_by_role("main").count() == page.get_by_role("heading", level=1).count() == 1
    unnamed = page.evaluate("""[...document.querySelectorAll('svg[role=img], [role=region], nav, button, a')]
        .filter(node => {
            const ids = (node.getAttribute('aria-labelledby') || '').split(' ');
            const said = ids.map(id => document.getElementById(id)?.textContent || '').join('');
            return !(node.getAttribute('aria-label') || said || node.textContent).trim();
        }).length""")
    assert unnamed == 0
    assert page.get_by_role("img", name="Training curves").count() == 1
    assert page.get_by_role("table", name="One needle: all cells").count() >= 1
    lost = page.evaluate("[...document.querySelectorAll('th')].filter(th => !th.scope).length")
    assert lost == 0
    assert page.evaluate("document.documentElement.lang") == "en"


def test_without_scripts_all_is_there(open_page: Open) -> None:
    page = open_page(java_script_enabled=False, color_scheme="dark")
    assert not page.locator("#theme").is_visible()  # it could do nothing
    assert page.locator("main > section").count() == len(SECTIONS)
    page.locator("#needles details summary").first.click()
    assert page.locator("#needles details table").first.is_visible()
