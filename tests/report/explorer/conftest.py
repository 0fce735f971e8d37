"""A page of a made-up trace, for all tests that look at it in a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.traces import CHUNK_SIZE, chunks_of, made_up
from trailmark.report.explorer.page import build
from trailmark.trace.lines import Entry, TracedChunk, TraceHeader


@pytest.fixture(scope="session")
def trace() -> tuple[TraceHeader, list[Entry]]:
    return made_up(6000, CHUNK_SIZE, words=True)


@pytest.fixture(scope="session")
def chunks(trace: tuple[TraceHeader, list[Entry]]) -> list[TracedChunk]:
    return chunks_of(trace[1])


@pytest.fixture(scope="session")
def file(trace: tuple[TraceHeader, list[Entry]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(*trace, tmp_path_factory.mktemp("explorer-app") / "page.html").page
