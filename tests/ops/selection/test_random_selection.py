"""Chunks at random: every set of K is equally likely, and nothing but its own numbers has a say in a draw."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trailmark.ops import fold_seed, random_chunks


def floyd(K: int, first: int, end: int, asking: int, seed: int) -> list[int]:
    """The same in Python's sets: the oracle."""
    count = end - first
    if count <= K:
        return list(range(first, max(first, end)))
    chosen: set[int] = set()
    for k, j in enumerate(range(count - K, count)):
        place = int(fold_seed(seed, asking, k)) * (j + 1) >> 32
        chosen.add(j if place in chosen else place)
    return [first + place for place in sorted(chosen)]


numbers = st.integers(0, 40)


@settings(max_examples=100)
@given(
    st.integers(1, 9),
    st.lists(
        st.lists(st.tuples(numbers, numbers, st.integers(0, 2**40)), min_size=3, max_size=3), min_size=1
    ),
    st.integers(-(2**62), 2**62),
)
def test_equals_the_oracle(K: int, rows: list[list[tuple[int, int, int]]], seed: int) -> None:
    first, end, asking = torch.tensor(rows).unbind(-1)  # [B, 3]
    seeds = seed + torch.arange(len(rows))
    found = random_chunks(K, end, first, asking, seeds)
    assert found.dtype == torch.int64
    assert found.shape == (len(rows), 3, K)
    for b, row in enumerate(rows):
        for n, (low, high, number) in enumerate(row):
            exact = floyd(K, low, high, number, int(seeds[b]))
            assert found[b, n].tolist() == exact + [-1] * (K - len(exact))


def draws(K: int, count: int, samples: int, seed: int = 0) -> Tensor:
    """[samples, K]"""
    ends = torch.full((samples,), count)
    return random_chunks(K, ends, 0, torch.arange(samples), torch.tensor([seed]))[0]


def unevenness(seen: Sequence[tuple[int, ...]], K: int, count: int) -> tuple[float, float]:
    """Pearson's chi-square of sets against even odds, and its 0.999 quantile (Wilson and Hilferty, 1931)."""
    counts, sets = Counter(seen), list(combinations(range(count), K))
    assert set(counts) <= set(sets)
    expected, free = len(seen) / len(sets), len(sets) - 1
    chi = sum((counts[each] - expected) ** 2 / expected for each in sets)
    return chi, free * (1 - 2 / (9 * free) + 3.0902 * math.sqrt(2 / (9 * free))) ** 3


@pytest.mark.parametrize(("K", "count"), [(1, 7), (2, 5), (3, 6), (4, 6), (8, 9)])
def test_every_set_is_equally_likely(K: int, count: int) -> None:
    chi, limit = unevenness(list(map(tuple, draws(K, count, 20000).tolist())), K, count)
    assert chi < limit


def test_a_biased_draw_is_found() -> None:
    """Two draws, and the next number where they are equal: neighbours are likelier than others."""
    pairs = torch.randint(6, (20000, 2), generator=torch.Generator().manual_seed(0))
    pairs[:, 1] = torch.where(pairs[:, 0] == pairs[:, 1], (pairs[:, 1] + 1) % 6, pairs[:, 1])
    chi, limit = unevenness(list(map(tuple, pairs.sort(-1).values.tolist())), 2, 6)
    assert chi > limit


def test_far_candidates_are_drawn_as_often() -> None:
    places = draws(8, 1 << 20, 4000).flatten().double() / (1 << 20)
    counts = torch.histc(places, 16, 0, 1)
    expected = len(places) / 16
    assert float(((counts - expected) ** 2 / expected).sum()) < 37.7  # 0.999 quantile, 15 degrees of freedom


def test_seeds_and_numbers_draw_differently() -> None:
    assert not torch.equal(draws(3, 50, 20), draws(3, 50, 20, seed=1))
    assert len(set(map(tuple, draws(3, 50, 20).tolist()))) == 20


def test_bounds_of_all_rows_are_those_of_each() -> None:
    ends, asking, seeds = torch.arange(12), torch.arange(12), torch.tensor([1, 2])
    each = random_chunks(4, ends.expand(2, -1), torch.ones(2, 12, dtype=torch.int64), asking, seeds)
    assert torch.equal(each, random_chunks(4, ends, 1, asking, seeds))
    assert torch.equal(each, random_chunks(4, ends, torch.ones(12, dtype=torch.int32), asking, seeds))


def test_nothing_asked_is_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert random_chunks(3, none, 0, none, torch.tensor([1, 2])).shape == (2, 0, 3)
    assert random_chunks(3, none.view(0, 0), 0, none.view(0, 0), none).shape == (0, 0, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_retrieved": 0}, "num_retrieved: expected at least 1, got 0"),
        ({"seed": torch.tensor(3)}, r"seed: expected shape \[B\], got \(\)"),
        ({"asking": torch.tensor(3)}, r"asking: expected shape \[N\] or \[B, N\], got \(\)"),
        ({"num_candidates": torch.arange(3)}, r"num_candidates: expected shape \[N\] = \(5,\), got \(3,\)"),
        (
            {"first_candidate": torch.zeros(1, 5, dtype=torch.int64)},
            r"first_candidate: expected shape \[B, N\] = \(2, 5\), got \(1, 5\)",
        ),
        ({"num_candidates": torch.ones(5)}, "num_candidates: expected an integer tensor"),
        ({"num_candidates": torch.full((5,), 2**31)}, "num_candidates: expected fewer than 2.31 candidates"),
    ],
    ids=list("abcdefg"),
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    fitting: dict[str, object] = {
        "num_retrieved": 3, "num_candidates": torch.arange(5), "first_candidate": 0, "asking": torch.arange(5),
        "seed": torch.tensor([1, 2]),
    }  # fmt: skip
    with pytest.raises(ValueError, match="^" + message):
        random_chunks(**(fitting | changes))  # type: ignore[arg-type]
