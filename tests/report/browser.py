"""Pages in a real browser: headless Chromium, driven by playwright.

Without them the tests are skipped; with TRAILMARK_BROWSER=required in the environment they fail.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trailmark.report.theme import channels

CHROMIUM = os.environ.get("TRAILMARK_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
Open = Callable[..., Any]


def missing(what: str) -> None:
    if os.environ.get("TRAILMARK_BROWSER") == "required":
        pytest.fail(f"TRAILMARK_BROWSER=required, but {what}")
    pytest.skip(what)


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed: pip install playwright")
    if not Path(CHROMIUM).exists():
        missing(f"there is no {CHROMIUM}: apt-get install chromium")
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as play:
        running = play.chromium.launch(executable_path=CHROMIUM, args=root)
        yield running
        running.close()


@contextmanager
def windows(browser: Any) -> Iterator[Open]:
    """Opens files in windows; at the end nothing was complained of and nothing asked for but the file of each."""
    contexts, said, asked, opened = [], [], [], []

    def open_one(file: Path, width: int = 1280, height: int = 900, fragment: str = "", **options: Any) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": height}, reduced_motion="reduce", **options
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url.partition("#")[0]))
        opened.append(file.as_uri())
        page.goto(file.as_uri() + fragment)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert said == []
    assert set(asked) - {"data:,"} == set(opened)
    assert len([url for url in asked if url in opened]) >= len(opened)


def rgb(value: str) -> str:
    """A colour of the theme as a browser names it."""
    return "rgb({}, {}, {})".format(*channels(value))


def until(page: Any, condition: str, argument: Any = None, seconds: float = 30.0) -> None:
    """Ask until it is so. (playwright's own waiting evaluates text in the page, which the page forbids.)"""
    for _ in range(round(seconds / 0.02)):
        if page.evaluate(condition, argument):
            return
        page.wait_for_timeout(20)
    pytest.fail(f"it never became true: {condition}")
