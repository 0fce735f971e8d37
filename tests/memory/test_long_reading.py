"""Reading long texts: what grows, and where (slow)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_million_tokens(tier: str, tmp_path: Path) -> None:
    """Windows stay as they are; RAM grows by the formula on host, hardly on disk."""
    command = [sys.executable, str(ROOT / "benchmarks" / "reading.py"), "--memory-case", tier]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    grown = found["grown"]
    assert grown["window"] == 0
    assert grown["memory"] > 400 << 20
    if tier == "host":
        # it may be less: what the process held before is used again
        assert grown["RssAnon"] < 1.02 * grown["memory"]
    else:
        assert grown["RssAnon"] < 0.1 * grown["memory"]
