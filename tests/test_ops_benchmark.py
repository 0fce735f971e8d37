"""The benchmark of the ops: what it times is checked first, and every case runs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.benchmark_scripts import modules

ops = modules("ops")


def small(case: Any) -> Any:
    sizes = {"heads": 2 if case.heads == case.key_value_heads else 4, "key_value_heads": 2, "head_size": 8}
    reading = case.reading and 16
    return replace(case, tokens=64, chunk=8, retrieved=2, window=16, reading=reading, **sizes)


@pytest.mark.parametrize("part", ["chunks", "tokens"])
def test_every_case_runs_and_ours_is_within_budget(ops: ModuleType, part: str) -> None:
    results = []
    for case in {small(case) for case in ops.PARTS[part]("cpu")}:
        if case.implementation in ops.OURS:
            ops.check(case, "cpu")
        run = ops.measure(case, "cpu", enough=0)
        assert len(run["seconds"]) == len(run["processor_seconds"]) == 3
        seconds = dict.fromkeys(("p20", "p50", "p80"), min(run["seconds"]))
        results.append({**asdict(case), "flops": case.flops(), "seconds": seconds, "extra_bytes": 0})
        results[-1]["processor_seconds"] = seconds
    assert len(ops.table(results, part).splitlines()) == len(results) + 2
    compared = {"causal", "bmm", "mm"} if part == "chunks" else {"per chunk"}
    assert {r["implementation"] for r in results} >= compared | {"torch", "reference", "sdpa"}


@pytest.mark.slow
def test_one_part_leaves_the_others_in_the_file(
    ops: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "ops.json"
    before = {"environment": {"processor": "another"}, "results": [{"op": "gca"}]}
    output.write_text(json.dumps(before))
    cases = [small(case) for case in ops.token_cases("cpu") if case.op == "tokens"]
    monkeypatch.setitem(ops.PARTS, "tokens", lambda device: cases[:1])
    monkeypatch.setattr(sys, "argv", ["ops.py", "--only", "tokens", "--rounds", "1", "--output", str(output)])
    ops.main()
    found = json.loads(output.read_text())
    assert {name: found[name] for name in before} == before
    assert [row["op"] for row in found["tokens"]["results"]] == ["tokens"]


@pytest.mark.parametrize("op", ["gca", "select", "window", "tokens", "select for tokens"])
def test_a_wrong_result_is_not_timed(ops: ModuleType, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number of ours is off by a thousandth of the largest."""
    every = [case for part in ops.PARTS.values() for case in part("cpu")]
    case = next(small(c) for c in every if (c.op, c.implementation) == (op, "torch"))
    make = ops.MAKE[op]

    def wrong(case: Any, device: str) -> Any:
        function, leaves = make(case, device)

        def nudged(*x: Tensor) -> Tensor:
            out = function(*x)
            one = torch.zeros(out.shape)
            one.view(-1)[-1] = 1e-3 * out.detach().abs().max()
            return out + one if case.implementation == "torch" else out

        return nudged, leaves

    monkeypatch.setitem(ops.MAKE, op, wrong)
    with pytest.raises(AssertionError, match="error"):
        ops.check(case, "cpu")


@pytest.mark.slow
def test_a_case_in_a_process_of_its_own(ops: ModuleType) -> None:
    case = json.dumps(asdict(small(ops.Case("gca", "torch", 64))))
    done = subprocess.run(
        [sys.executable, ops.__file__, "--case", case], capture_output=True, text=True, check=True
    )
    assert len(json.loads(done.stdout)["seconds"]) >= 3


def test_sdpa_is_held_to_one_kernel_on_a_gpu(ops: ModuleType) -> None:
    def backend(name: str, device: str = "cuda", dtype: str = "bfloat16") -> str | None:
        found: str | None = ops.sdpa_backend(ops.Case("gca", name, 64, dtype), device)
        return found

    assert backend("sdpa") == backend("causal") == "FLASH_ATTENTION"
    assert backend("sdpa cudnn") == "CUDNN_ATTENTION"
    assert backend("sdpa", device="cpu") is backend("sdpa", dtype="float32") is backend("triton") is None
    for name in ("sdpa", "causal", "sdpa cudnn"):
        assert hasattr(ops.SDPBackend, backend(name) or "")
