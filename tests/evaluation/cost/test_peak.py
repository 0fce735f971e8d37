"""The most memory that a stretch of work takes."""

from __future__ import annotations

import math

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
