"""The most memory that a stretch of work takes."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch

from trailmark.evaluation.cost.peak import peak_kind, with_peak

CPU = torch.device("cpu")


def test_peak_is_what_work_takes_at_most() -> None:
    """To a power of two: the system counts pages in lots."""
    for power in (24, 27):
        found, peak = with_peak(CPU, lambda n=power: float(torch.ones(1 << (n - 2)).sum()))  # type: ignore[misc]
        assert found == 1 << (power - 2)
        if peak_kind(CPU) is None:
            assert peak is None
        else:
            assert peak is not None
            assert round(math.log2(peak)) == power


@pytest.mark.skipif(peak_kind(CPU) is None, reason="the system does not say what a process held at most")
def test_what_was_garbage_before_is_not_held_against_the_work() -> None:
    cycle: list[Any] = [torch.ones(1 << 25)]
    cycle.append(cycle)
    del cycle

    def work() -> float:
        gc.collect()
        return float(torch.ones(1 << 22).sum())

    peak = with_peak(CPU, work)[1]
    assert peak is not None
    assert round(math.log2(peak)) == 24
