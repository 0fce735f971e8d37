"""What the doctor finds out, and what it says of it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trailmark.evaluation.doctor import _within_budget

Command = Callable[..., tuple[int, str, str]]
INPUTS = [torch.linspace(-1, 1, 12).view(3, 4), torch.linspace(1, 2, 12).view(3, 4)]


@pytest.mark.parametrize("wrong", ["nothing", "output", "gradient"])
def test_a_kernel_that_is_wrong_is_found_out(wrong: str) -> None:
    def op(implementation: str, x: Tensor, y: Tensor) -> Tensor:
        out = x * y
        if implementation == "fast" and wrong == "output":
            out = out + 1e-5
        if implementation == "fast" and wrong == "gradient":
            out = out.detach() + 1.001 * (out - out.detach())
        return out

    check = _within_budget("op", op, "fast", torch.device("cpu"), INPUTS)
    assert check.passed is (wrong == "nothing")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.slow
def test_kernels_are_compared_with_their_oracles_where_they_run() -> None:
    script = (
        "import torch; from trailmark.evaluation.doctor import _kernels\n"
        "for c in _kernels(torch.device('cpu')): print(c.passed, c.name, c.finding)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    lines = done.stdout.splitlines()
    assert [line.split(" (cpu)")[0] for line in lines] == [
        "True exactness of GCA's kernels",
        "True exactness of landmark attention's kernels",
        "True exactness of selection's kernels",
    ]


def test_doctor(command: Command) -> None:
    code, out, _ = command("doctor")
    assert code == 0
    lines = out.splitlines()
    assert all(line.startswith("ok ") for line in lines)
    for name in ("python", "torch", "transformers", "precision: auto", "exactness", "reading", "disk"):
        assert any(line.startswith(f"ok   {name}: ") for line in lines), name
    for use in (
        "grouped cross-attention",
        "selection of chunks",
        "landmark attention",
        "window attention in training and reading",
    ):
        assert any(line.startswith(f"ok   {use} (cpu): torch: ") for line in lines), use


@pytest.mark.slow
def test_doctor_says_what_is_not_as_it_should_be(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    code, out, _ = command("doctor")
    assert code == 1
    assert "NOT  torch: 2.10.1" in out
