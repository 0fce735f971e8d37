"""The site that ``make docs`` makes is a folder: opened as files, without a server or a network, it can be searched."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.browser import chromium

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: make docs does it")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


def test_it_is_searched_as_files(site: Path) -> None:
    with chromium() as browser:
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.click(".md-search__input")
        page.keyboard.type("sinks", delay=20)
        page.wait_for_selector(".md-search-result__item a", timeout=30_000)
        found = page.locator(".md-search-result__item h1").all_inner_texts()
        assert any("pretrained checkpoint" in title for title in found), found
        page.locator(".md-search-result__item a").first.click()
        page.wait_for_url("**?h=*")
        assert "sinks" in page.inner_text("article").lower()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))] == []
