"""The ranking loss against its equation, pair by pair."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.budgets import assert_autocast_changes_nothing, assert_same_in_float64
from trailmark.ops import ranking_loss


def make(B: int, N: int, n: int, seed: int = 0, ties: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(B, N, n, dtype=torch.float64, generator=random)
    targets = 2 * torch.randn(B, N, n, dtype=torch.float64, generator=random)
    if ties:
        scores, targets = scores.round(), targets.round()
    return scores, targets, torch.rand(B, N, n, generator=random) < 0.8


def direct(
    scores: Tensor, targets: Tensor, candidates: Tensor, margin: float, threshold: float
) -> list[float]:
    """Of each row: sum over queries and pairs, over the number of pairs."""
    rows = []
    for b in range(len(scores)):
        total, pairs = 0.0, 0
        for n in range(scores.shape[1]):
            own = [i for i in range(scores.shape[2]) if candidates[b, n, i]]
            s, y = scores[b, n].tolist(), targets[b, n].tolist()
            best_first = sorted(own, key=lambda i: -s[i])
            rank = {i: place + 1 for place, i in enumerate(best_first)}
            gains = sorted((max(math.expm1(math.log(2) * y[i]), 0) for i in own), reverse=True)
            ideal = sum(gain / math.log2(1 + place + 1) for place, gain in enumerate(gains))
            for i in own:
                for j in own:
                    if y[i] > y[j] and y[i] > threshold:
                        gain = 2 ** y[j] * math.expm1(math.log(2) * (y[i] - y[j]))  # 2^y_i - 2^y_j
                        change = gain * (math.log2(1 + rank[i]) - math.log2(1 + rank[j]))
                        total += abs(change) / ideal * max(margin - (s[i] - s[j]), 0)
                        pairs += 1
        rows.append(total / max(pairs, 1))
    return rows


@settings(max_examples=60)
@given(
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(0, 6),
    st.integers(0, 99),
    st.booleans(),
    st.sampled_from([0.0, 1.0, 2.5]),
    st.sampled_from([0.0, 0.7]),
)
def test_equals_the_pairs_one_by_one(
    B: int, N: int, n: int, seed: int, ties: bool, margin: float, threshold: float
) -> None:
    inputs = make(B, N, n, seed, ties)
    ours = ranking_loss(*inputs, margin, threshold)
    assert_same_in_float64(ours, torch.tensor(direct(*inputs, margin, threshold), dtype=torch.float64))


def test_gradcheck() -> None:
    scores, targets, candidates = make(2, 3, 4)
    op = partial(ranking_loss, targets=targets, candidates=candidates, margin=1.5)
    torch.autograd.gradcheck(op, scores.requires_grad_())


def test_the_gradient_raises_what_is_worth_more() -> None:
    scores = torch.zeros(1, 1, 3, requires_grad=True)
    ranking_loss(scores, torch.tensor([[[2.0, 0.5, -1.0]]]), torch.ones(1, 1, 3, dtype=torch.bool)).backward()
    assert scores.grad is not None
    best, middle, worst = scores.grad[0, 0].tolist()
    assert best < 0 < worst
    assert best < middle < worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gains_of_hundreds_do_not_overflow(dtype: torch.dtype) -> None:
    scores = torch.tensor([[[0.0, 1.0, 2.0]]], dtype=dtype, requires_grad=True)
    large = torch.tensor([[[600.0, 599.0, -400.0]]])
    everything = torch.ones(1, 1, 3, dtype=torch.bool)
    loss = ranking_loss(scores, large, everything)
    assert loss.dtype == torch.float32
    exact = direct(scores.detach().double(), large.double(), everything, 1.0, 0.0)
    assert loss.tolist() == pytest.approx(exact, rel=1e-6)
    loss.sum().backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("size", [1e-2, 1e-5, 1e-8])
def test_small_gains_keep_their_digits(size: float) -> None:
    scores, targets, candidates = make(1, 2, 5)
    inputs = scores.float(), size * targets.float(), candidates
    exact = direct(inputs[0].double(), inputs[1].double(), candidates, 1.0, 0.0)
    assert ranking_loss(*inputs).tolist() == pytest.approx(exact, rel=1e-6)


def test_what_is_no_candidate_has_no_effect() -> None:
    scores, targets, candidates = make(2, 3, 5)
    before = ranking_loss(scores, targets, candidates)
    scores, targets = (x.masked_fill(~candidates, torch.nan) for x in (scores, targets))
    assert torch.equal(ranking_loss(scores, targets, candidates), before)


def test_no_pair_no_loss_and_a_gradient_of_zeros() -> None:
    for candidates in (torch.zeros(2, 3, 4, dtype=torch.bool), torch.ones(2, 3, 4, dtype=torch.bool)):
        scores = torch.randn(2, 3, 4, requires_grad=True)
        loss = ranking_loss(scores, torch.full((2, 3, 4), -1.0), candidates)
        loss.sum().backward()
        assert loss.tolist() == [0, 0]
        assert scores.grad is not None
        assert not scores.grad.any()


def test_autocast_changes_nothing() -> None:
    scores, targets, candidates = make(2, 3, 4)
    op = partial(ranking_loss, targets=targets.float(), candidates=candidates)
    assert_autocast_changes_nothing(op, scores.float())


def test_what_does_not_fit_is_refused() -> None:
    scores, targets, candidates = make(2, 3, 4)
    with pytest.raises(ValueError, match=r"scores: expected shape \[B, N, n\]"):
        ranking_loss(scores[0], targets, candidates)
    with pytest.raises(ValueError, match=r"targets: expected shape of scores"):
        ranking_loss(scores, targets[:, :2], candidates)
    with pytest.raises(ValueError, match="candidates: expected bool"):
        ranking_loss(scores, targets, candidates.long())
    with pytest.raises(ValueError, match="threshold: expected 0 or more, got -1"):
        ranking_loss(scores, targets, candidates, threshold=-1.0)
