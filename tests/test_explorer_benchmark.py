"""The benchmark of the explorer: it runs, and what it times is of the whole text."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.benchmark_scripts import modules
from tests.models.tiny import drt
from tests.trace.test_trace import V, some_bytes, subject_of
from trailmark.trace.lines import TracedChunk, read_trace

explorer = modules("explorer")


def test_each_way_reads_the_text(
    explorer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explorer, "_TURN", 100)
    monkeypatch.setattr("trailmark.trace.tracer._PIECE", 40)
    subject = subject_of(drt(vocab_size=V).float())
    text = some_bytes(250).numpy()
    found = explorer.reading(subject, text, tmp_path / "text.jsonl")
    _, entries = read_trace(tmp_path / "text.jsonl")
    chunks = [entry for entry in entries if isinstance(entry, TracedChunk)]
    assert torch.equal(torch.cat([torch.from_numpy(chunk.ids) for chunk in chunks]), torch.from_numpy(text))
    assert found["bytes"] == (tmp_path / "text.html").stat().st_size
    for name in ("read", "forward", "trace", "page"):
        assert found[name]["tokens_per_second"] == pytest.approx(250 / found[name]["seconds"])
    whole = found["trace"]["seconds"] + found["page"]["seconds"]
    for name in ("read", "forward"):
        ratio = found["ratios"][f"trace and page / {name}"]["seconds"]
        assert ratio == pytest.approx(whole / found[name]["seconds"])
