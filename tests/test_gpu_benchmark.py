"""benchmarks/gpu.py runs from beginning to end; on a CPU as its own rehearsal, interpreted and tiny."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.benchmark_scripts import BENCHMARKS, modules

pytest.importorskip("triton")
SCRIPT = BENCHMARKS / "gpu.py"


gpu = modules("gpu")


@pytest.fixture
def checks(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = sys.modules[gpu.CHECKS["budgets"].__module__]
    monkeypatch.setattr(module, "DEVICE", "cuda" if torch.cuda.is_available() else "cpu")
    return module


@pytest.mark.slow
def test_a_rehearsal_leaves_nothing_out(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command = [sys.executable, str(SCRIPT), "--rehearse", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    assert found["rehearsal"] is True
    checks = ("budgets", "repeats", "many elements", "synchronisation", "others", "landmark kernels", "demo")
    for part in checks:
        assert found[part]
        assert all(row["passed"] for row in found[part])
    assert any("in parts" in row["check"] for row in found["budgets"])
    assert [row["passed"] for row in found["tests"]] in ([True], [None])  # None: the machine was too slow
    for part in ("gca", "tokens", "landmark", "decoding", "selection", "window", "training step"):
        assert found[part]
        assert not any("left_out" in row for row in found[part])
    assert not any(key.endswith(": left out") for key in found)
    for at in (
        "J=2, S=63",
        "J=1, S=64",
        "D=16, S=50",
        "tokens that retrieve, forward + backward / sdpa",
    ):  # goals
        assert at in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.slow
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "--rehearse" in done.stderr


def work(job: tuple[str, str]) -> list[dict[str, Any]]:
    name, what = job
    if what == "die":
        os._exit(3)
    if what == "hang":
        time.sleep(600)
    if what == "raise":
        raise RuntimeError("of the device")
    wrong = {"error": "AssertionError: off"} if what == "wrong" else {}
    return [{"check": name, "passed": what == "right", **wrong} for _ in range(2)]


@pytest.mark.slow
def test_a_process_that_dies_has_failed_and_the_others_go_on(checks: ModuleType) -> None:
    jobs = [("a", "die"), ("b", "wrong"), ("c", "raise"), ("d", "right"), ("e", "right")]
    rows: list[dict[str, Any]] = []
    checks.in_processes(work, jobs, rows, workers=2, seconds=120)
    found = {row["check"]: row for row in rows}
    assert len(rows) == 8
    assert [name for name, row in sorted(found.items()) if row["passed"]] == ["d", "e"]
    assert "ended with 3" in found["a"]["error"]
    assert "of the device" in found["c"]["error"]


def test_a_process_that_hangs_has_failed(checks: ModuleType) -> None:
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    checks.in_processes(work, [("a", "hang"), ("b", "right")], rows, workers=1, seconds=1)
    assert time.monotonic() - began < 60
    assert [(row["check"], row["passed"]) for row in rows] == [("a", False), ("b", False)]


def test_worse_chunks_are_noticed(checks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    checks.select_well(3, 40, 4, 16, torch.float32, noisy=True)
    right = checks.select_chunks

    def wrong(query: torch.Tensor, *rest: Any, implementation: str, **more: Any) -> Any:
        sign = -1 if implementation == "triton" else 1
        return right(sign * query, *rest, implementation=implementation, **more)

    monkeypatch.setattr(checks, "select_chunks", wrong)
    with pytest.raises(AssertionError, match="apart"):
        checks.select_well(3, 40, 4, 16, torch.float32, noisy=True)


def test_a_row_that_fails_is_left_out_and_the_rest_is_timed(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "REHEARSAL", True)
    output = tmp_path / "gpu.json"
    record = gpu.Record(output, minutes=10, names=set())
    seen = []

    def passes() -> dict[str, Any]:
        seen.append(json.loads(output.read_text())["gca"] if output.exists() else [])
        return {"seconds": {"p50": 1.0}}

    def fails() -> dict[str, Any]:
        raise RuntimeError("no room")

    def rows() -> list[Any]:
        return [gpu.Timing({"op": "gca"}, run) for run in (passes, fails, passes)]

    record.time("gca", (), rows())
    assert [len(x) for x in seen] == [0, 2]  # written after every row
    found = json.loads(output.read_text())["gca"]
    assert [row.get("left_out") for row in found] == [None, "RuntimeError: no room", None]
    assert len(record.left_out()) == 1

    record.minutes = 0
    record.time("gca", (), rows())
    assert [row["left_out"] for row in record.found["gca"][3:]] == ["no time"] * 3

    record.check("budgets", lambda rows: rows.append({"check": "one", "passed": False}))
    assert record.found["budgets: left out"] == "no time"
    record.minutes = 10
    record.check("repeats", lambda rows: rows.append({"check": "one", "passed": False}))
    record.time("window", ("repeats",), rows())
    assert "window" not in record.found
    assert "one" in record.found["window: left out"]


def test_parts_that_are_made_again_leave_the_others_in_the_file(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "REHEARSAL", True)
    output = tmp_path / "gpu.json"
    for names, passed in (({"budgets", "others", "repeats"}, True), ({"others", "budgets"}, False)):
        record = gpu.Record(output, minutes=10, names=names)
        for name in names:
            record.check(name, lambda rows, own=passed: rows.append({"check": "float32", "passed": own}))
    found = json.loads(output.read_text())
    assert [found[name][0]["passed"] for name in ("repeats", "budgets", "others")] == [True, False, False]
    # attention is timed in half precision, and needs no check of float32
    record.time("gca", ("budgets",), [])
    record.time("selection", ("others",), [])
    assert "gca: left out" not in record.found
    assert "float32" in record.found["selection: left out"]
    machine = json.loads(output.read_text()) | {"device": "another"}
    output.write_text(json.dumps(machine))
    assert "budgets" not in gpu.Record(output, minutes=10, names={"repeats"}).found
    output.write_text(json.dumps(found | {"date": "2000-01-01"}))
    assert "budgets" in gpu.Record(output, minutes=10, names={"repeats"}).found
