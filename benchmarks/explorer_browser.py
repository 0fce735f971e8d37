"""The explorer's page in headless Chromium: when it is there, and how long each interaction takes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import spread

from tests.report.browser import chromium, until

# from the input (as the browser saw it) until the frame after it is done: what was drawn for it stands on the screen
_ARM = """type => {
    window.took = null;
    addEventListener(type, function listen(event) {
        if (type === "pointermove" && !event.buttons) return;  // a drag is meant
        removeEventListener(type, listen, {capture: true});
        const began = event.timeStamp;
        requestAnimationFrame(() => requestAnimationFrame(() => { window.took = performance.now() - began; }));
    }, {capture: true});
}"""
_WIDTH, _HEIGHT = 1280, 900


def in_a_browser(path: Path, rounds: int) -> dict[str, Any]:
    """Milliseconds until the first paint and until the strip is drawn, and of each interaction.

    Of an interaction: from the input to the end of the frame after it.
    """
    with chromium() as browser:
        opened = [_open(browser, path) for _ in range(rounds)]
        context = browser.new_context(viewport={"width": _WIDTH, "height": _HEIGHT})
        page = context.new_page()
        page.goto(path.as_uri(), wait_until="commit")
        _ready(page)
        found = {}
        for name, (kind, act) in _interactions(page).items():
            times = [_timed(page, kind, act, number) for number in range(rounds + 1)]
            found[name] = spread(times[1:])  # the first compiles
            print(name, {key: round(value, 1) for key, value in found[name].items()}, flush=True)
        version = browser.version
        context.close()
    first = {name: spread([one[name] for one in opened]) for name in opened[0]}
    print(first, flush=True)
    return {"chromium": version, "open": first, "interactions": found}


def _timed(page: Any, kind: str, act: Callable[[int], None], number: int) -> float:
    page.evaluate(_ARM, kind)
    act(number)
    until(page, "window.took !== null", seconds=30)
    took: float = page.evaluate("window.took")
    return took


def _ready(page: Any) -> None:
    until(page, "performance.getEntriesByName('ready').length > 0", seconds=120)


def _open(browser: Any, path: Path) -> dict[str, float]:
    """Of a page that no other tab has open: milliseconds since the file was asked for."""
    context = browser.new_context(viewport={"width": _WIDTH, "height": _HEIGHT})
    page = context.new_page()
    page.goto(path.as_uri(), wait_until="commit")
    _ready(page)
    found = page.evaluate("""() => ({
        first_paint: performance.getEntriesByName("first-contentful-paint")[0].startTime,
        ready: performance.getEntriesByName("ready")[0].startTime,
    })""")
    context.close()
    return found


def _interactions(page: Any) -> dict[str, tuple[str, Callable[[int], None]]]:
    """Of each interaction the event that begins it, and what a person does, the n-th time."""
    draw = random.Random(0)
    strip, search, jump = page.locator("#strip"), page.locator("#search"), page.locator("#jump")
    shades = page.locator("input[name=shade]")
    chunks = int(page.evaluate("JSON.parse(document.getElementById('about').textContent).chunks"))
    words = ("the", "of the", "and", "zzzz", "a", "that which")

    def place() -> tuple[float, float]:
        """A point of the strip."""
        strip.scroll_into_view_if_needed()
        box = strip.bounding_box()
        return box["x"] + box["width"] * draw.uniform(0.1, 0.9), box["y"] + box["height"] / 2

    def wheel(delta: int) -> Callable[[int], None]:
        def act(number: int) -> None:
            page.mouse.move(*place())
            page.mouse.wheel(0, delta)

        return act

    def drag(number: int) -> None:
        """Its first move is timed; each draws the same."""
        x, y = place()
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + 60, y)
        page.mouse.up()

    def choose(number: int) -> None:
        page.mouse.click(*place())

    def go_on(number: int) -> None:
        strip.focus()
        page.keyboard.press("ArrowRight")

    def look_for(number: int) -> None:
        search.fill(words[number % len(words)])

    def next_match(number: int) -> None:
        search.focus()
        page.keyboard.press("Enter")

    def jump_to(number: int) -> None:
        jump.fill(f"{draw.randrange(101)}%" if number % 2 else str(draw.randrange(chunks)))
        page.keyboard.press("Enter")

    def shade(number: int) -> None:
        shades.nth((number + 1) % shades.count()).check(force=True)

    def sort(number: int) -> None:
        page.locator("#sort").select_option(index=(number + 1) % 3)

    def far(number: int) -> None:
        page.locator("#far").select_option(index=1 + number % 3)

    def link(number: int) -> None:
        page.evaluate("n => { location.hash = `chunk=${n}`; }", draw.randrange(chunks))

    return {
        "choose a chunk": ("click", choose),
        "next chunk": ("keydown", go_on),
        "zoom in": ("wheel", wheel(-240)),
        "pan": ("pointermove", drag),
        "zoom out": ("wheel", wheel(240)),
        "search": ("input", look_for),
        "next match": ("keydown", next_match),
        "jump": ("keydown", jump_to),
        "change of shading": ("change", shade),
        "strongest, sorted": ("change", sort),
        "strongest, filtered": ("change", far),
        "deep link": ("hashchange", link),
    }
