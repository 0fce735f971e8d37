"""benchmarks/gpu.py runs from beginning to end; on a CPU as its own rehearsal, interpreted and tiny."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


@pytest.mark.slow
def test_a_rehearsal_leaves_nothing_out(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command = [sys.executable, str(SCRIPT), "--rehearse", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    assert found["rehearsal"] is True
    for part in ("budgets", "repeats", "many elements", "synchronisation", "others"):
        assert found[part]
        assert all(row["passed"] for row in found[part])
    for part in ("gca", "decoding", "selection", "window", "training step"):
        assert found[part]
    assert not any(key.endswith(": left out") for key in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "--rehearse" in done.stderr
