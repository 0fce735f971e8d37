"""The most memory that a stretch of work takes.

Each is measured in a process of its own: malloc cannot give back all that a hundred tests freed before it, and what it
kept would be used again unseen.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from trailmark.evaluation.cost.peak import peak_kind, with_peak

CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(peak_kind(CPU) is None, reason="the system does not say what a process held at most"),
]


def peak_of(power: int, garbage: int) -> int:
    """The peak of work that makes a tensor of 2 ** power bytes, to a power of two: the system counts pages in lots.

    Args:
        garbage: bytes that a cycle held before, which the work collects.
    """
    cycle: list[object] = [torch.ones(garbage // 4)]
    cycle.append(cycle)
    del cycle

    def work() -> float:
        gc.collect()
        return float(torch.ones(1 << (power - 2)).sum())

    found, peak = with_peak(CPU, work)
    assert found == 1 << (power - 2)
    assert peak is not None
    return round(math.log2(peak))


@pytest.mark.parametrize(
    ("power", "garbage"),
    [
        pytest.param(24, 0, id="small"),
        pytest.param(27, 0, id="large"),
        pytest.param(24, 1 << 27, id="after garbage, which is not held against the work"),
    ],
)
def test_peak_is_what_work_takes_at_most(power: int, garbage: int) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(peak_of, power, garbage).result() == power
