"""The explorer's page in headless Chromium: when it is there, and how long each interaction takes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reading import spread

from tests.report.browser import chromium, until

# from the input (as the browser saw it) until the frame after it is done: what was drawn for it stands on the screen
_ARM = """type => {
    window.took = null;
    addEventListener(type, event => {
        const began = event.timeStamp;
        requestAnimationFrame(() => requestAnimationFrame(() => { window.took = performance.now() - began; }));
    }, {capture: true, once: true});
}"""
# what blocks the page longer than 50 ms, also after that frame
_WATCH = """() => {
    window.longest = 0;
    new PerformanceObserver(list => {
        for (const entry of list.getEntries()) window.longest = Math.max(window.longest, entry.duration);
    }).observe({type: "longtask"});
}"""
_SETTLE = 250  # milliseconds after an interaction in which long tasks still count as its own
_WIDTH, _HEIGHT = 1280, 900


def in_a_browser(path: Path, rounds: int) -> dict[str, Any]:
    """Milliseconds until the first paint and until the strip is drawn, and of each interaction."""
    with chromium() as browser:
        opened = [_open(browser, path) for _ in range(rounds)]
        context = browser.new_context(viewport={"width": _WIDTH, "height": _HEIGHT})
        page = context.new_page()
        page.goto(path.as_uri(), wait_until="commit")
        _ready(page)
        page.evaluate(_WATCH)
        found = {}
        for name, (kind, act) in _interactions(page).items():
            times, longest = [], 0.0
            for number in range(rounds + 1):
                page.evaluate("() => { window.longest = 0; }")
                page.evaluate(_ARM, kind)
                act(number)
                until(page, "window.took !== null", seconds=30)
                page.wait_for_timeout(_SETTLE)
                if number:  # the first compiles
                    times.append(page.evaluate("window.took"))
                    longest = max(longest, page.evaluate("window.longest"))
            found[name] = spread(times) | {"longest_task": longest}
            print(name, {key: round(value, 1) for key, value in found[name].items()}, flush=True)
        version = browser.version
        context.close()
    first = {name: spread([one[name] for one in opened]) for name in opened[0]}
    print(first, flush=True)
    return {"chromium": version, "open": first, "interactions": found}


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
