"""SIGKILL while texts are appended. ``python benchmarks/serving.py kills`` does it 50 times."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.server.killed import NAME, Killer, Process


@pytest.mark.slow
def test_a_killed_server_leaves_what_it_acknowledged(models: dict[str, Path], tmp_path: Path) -> None:
    killer = Killer(models["bytes"], tmp_path / "memories", seed=0)
    killer.run(3)
    assert killer.found.kills == 3
    # it goes on, and is told to stop in peace
    server = Process(models["bytes"], tmp_path / "memories")
    server.http.post("/v1/memories", json={"name": NAME})
    texts = f"/v1/memories/{NAME}/texts/last.txt"
    assert server.http.put(texts, content=b"The last words.\n").status_code == 200
    assert server.stop(signal.SIGTERM) in (0, -signal.SIGTERM, 143)
    leftovers = [path.name for path in (tmp_path / "memories" / NAME / "texts").iterdir()]
    assert not [name for name in leftovers if name.startswith(".")]
