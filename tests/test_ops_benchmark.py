"""The benchmark of the ops: what it times is checked first, and every case runs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.benchmark_scripts import modules

ops = modules("ops")


def small(case: Any) -> Any:
    return replace(case, tokens=64, heads=2, key_value_heads=2, head_size=8, chunk=8, retrieved=2, window=16)


def test_every_case_runs_and_ours_is_within_budget(ops: ModuleType) -> None:
    results = []
    for case in {small(case) for case in ops.cases("cpu")}:
        if case.implementation in ops.OURS:
            ops.check(case, "cpu")
        run = ops.measure(case, "cpu", enough=0)
        assert len(run["seconds"]) == 3
        seconds = dict.fromkeys(("p20", "p50", "p80"), min(run["seconds"]))
        results.append({**asdict(case), "flops": case.flops(), "seconds": seconds, "extra_bytes": 0})
    assert len(ops.table(results).splitlines()) == len(results) + 2
    assert {r["implementation"] for r in results} >= {"torch", "reference", "sdpa", "causal", "bmm", "mm"}


@pytest.mark.parametrize("op", ["gca", "select", "window"])
def test_a_wrong_result_is_not_timed(ops: ModuleType, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number of ours is off by a thousandth of the largest."""
    case = next(small(c) for c in ops.cases("cpu") if (c.op, c.implementation) == (op, "torch"))
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
