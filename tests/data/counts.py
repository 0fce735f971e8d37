"""Whether draws are as likely as they should be."""

from __future__ import annotations

from collections.abc import Sequence


def assert_equally_likely(counts: Sequence[int]) -> None:
    """Chi-square of k equally likely outcomes: mean k - 1, variance 2 (k - 1); four deviations are let pass."""
    expected = sum(counts) / len(counts)
    assert expected >= 20, "too few draws to tell"
    chi_square = sum((count - expected) ** 2 for count in counts) / expected
    free = len(counts) - 1
    assert chi_square <= free + 4 * (2 * free) ** 0.5, f"{chi_square:.1f} of {free}: {list(counts)}"
