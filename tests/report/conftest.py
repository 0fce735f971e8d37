"""One report of everything, drawn once for all tests that look at it, and a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.report import runs
from tests.report.browser import chromium
from trailmark.report.page import Built, build


@pytest.fixture(scope="session")
def whole_report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, list[str]]:
    """What was built, and what was said of it."""
    pytest.importorskip("matplotlib")
    folder = Path(tmp_path_factory.mktemp("whole-report"))
    said: list[str] = []
    return build([runs.everything(folder)], folder / "out" / "report.html", say=said.append), said


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running
