"""95% intervals of means over texts hold what they say they do, by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import comb

import numpy as np
import pytest

from trailmark import statistics
from trailmark.statistics import (
    bootstrap_mean,
    bootstrap_ratio,
    score_interval,
    student_quantile,
    wilson_interval,
)

SETS = 600
Draw = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def even(generator: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Means around 3 of windows of one length."""
    return 3 + generator.normal(size=(n, SETS)), np.ones((n, SETS))


def uneven(generator: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents of 50 to 500 tokens, whose tokens have something in common: 3 nats each."""
    counts = generator.integers(50, 500, size=(n, SETS)).astype(float)
    return counts * (3 + 0.3 * generator.normal(size=(n, SETS))), counts


@pytest.mark.parametrize(("draw", "n"), [(even, 3), (even, 10), (even, 60), (uneven, 60)])
def test_coverage(draw: Draw, n: int) -> None:
    low, high = bootstrap_ratio(*draw(np.random.default_rng(n), n))
    inside = int(((low <= 3) & (high >= 3)).sum())
    least, most = wilson_interval(inside, SETS, z=3.89)  # by chance, outside of it once in 10,000
    assert least < 0.95 < most


def test_percentiles_alone_would_be_too_narrow_at_four_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = even(np.random.default_rng(4), 4)
    wide = bootstrap_ratio(*draws)
    monkeypatch.setattr(statistics, "_widening", lambda texts: 1.0)
    narrow = bootstrap_ratio(*draws)
    covered = [float(((low <= 3) & (high >= 3)).mean()) for low, high in (wide, narrow)]
    assert covered[1] < 0.85 < covered[0]
    ratio = (wide[1] - wide[0]) / (narrow[1] - narrow[0])
    np.testing.assert_allclose(ratio, 3.18245 / 1.95996 * math.sqrt(4 / 3), rtol=1e-5)


@pytest.mark.parametrize(
    ("degrees", "printed"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (10, 2.228), (30, 2.042), (120, 1.980)],
)
def test_student_as_printed(degrees: int, printed: float) -> None:
    assert round(student_quantile(degrees), 3) == printed


def test_with_many_texts_student_is_normal() -> None:
    # Abramowitz and Stegun, 26.7.5: an expansion whose terms fall by n
    z, n = 1.959963984540054, 5000
    first, second = (z**3 + z) / (4 * n), (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    assert abs(student_quantile(n) - z - first) < 2 * second
    with pytest.raises(ValueError, match="degrees: expected at least 1, got 0"):
        student_quantile(0)


def test_one_text_has_no_interval() -> None:
    assert all(map(math.isnan, bootstrap_ratio([3.0], [2.0])))
    # nor has a bin that one text alone reaches
    low, high = bootstrap_ratio([[4.0, 1.0], [6.0, 0.0], [5.5, 0.0]], [[2.0, 1.0], [2.0, 0.0], [2.0, 0.0]])
    assert low[0] < 15.5 / 6 < high[0]
    assert math.isnan(low[1])
    assert math.isnan(high[1])


def test_equal_texts_leave_nothing_open() -> None:
    assert bootstrap_ratio([6.0, 3.0, 9.0], [2.0, 1.0, 3.0]) == (3.0, 3.0)


def test_draws_do_not_depend_on_how_many_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=20)
    one = bootstrap_mean(values, seed=3)
    assert bootstrap_mean(values, seed=3) == one
    assert bootstrap_mean(values, seed=4) != one
    monkeypatch.setattr(statistics, "_SLAB", 130)
    assert bootstrap_mean(values, seed=3) == one


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sums, counts: expected equal shapes .* got \(2,\) and \(3,\)"):
        bootstrap_ratio([1.0, 2.0], [1.0, 2.0, 3.0])


# --- proportions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (0, 0, 0.0, 1.0),
        (0, 10, 0.0, 0.27753279),
        (10, 10, 0.72246721, 1.0),
        (5, 10, 0.23659309, 0.76340691),
        (
            81,
            263,
            0.25528904,
            0.36621008,
        ),  # Newcombe (1998), Statistics in Medicine 17, 857-872: .2553, .3662
        (1, 29, 0.00611, 0.17174),  # the same: .0061, .1718
    ],
)
def test_wilson_interval(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=1e-4)


def test_wilson_covers() -> None:
    """Exactly, from the binomial distribution: on average over p in 95 of 100, at each p in more than 80."""
    for n in (10, 50, 100):
        intervals = [wilson_interval(k, n) for k in range(n + 1)]
        places = np.linspace(0, 1, 1001)[1:-1]
        covered = [
            sum(
                comb(n, k) * p**k * (1 - p) ** (n - k)
                for k, (low, high) in enumerate(intervals)
                if low <= p <= high
            )
            for p in places.tolist()
        ]
        assert min(covered) > 0.8
        assert 0.95 <= np.mean(covered) < 0.96


def test_scores_that_are_all_alike_have_an_interval() -> None:
    assert score_interval([0.0] * 10) == wilson_interval(0, 10)
    assert score_interval([1.0, 0.0, 1.0]) == wilson_interval(2, 3)
    assert score_interval([0.5]) == (None, None)
    low, high = score_interval([0.9, 1.0, 0.7, 0.95])
    assert low is not None
    assert high is not None
    assert 0 < low < 0.8875 < high <= 1
