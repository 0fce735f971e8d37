"""Weights of selected chunks: against the closed forms, their gradients, and where nothing was selected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.budgets import (
    assert_equals_the_oracle,
    assert_low_precision_within_budget,
    assert_same_in_float64,
)
from trailmark.ops import reference, weigh_chunks

KINDS = ["softmax", "decay", "stick_breaking"]


def drawn(rows: int, K: int, seed: int, scale: float = 4) -> Tensor:
    """Scores [rows, K] of 0 to K chunks."""
    generator = torch.Generator().manual_seed(seed)
    scores = scale * torch.randn(rows, K, generator=generator, dtype=torch.float64)
    count = torch.randint(K + 1, (rows, 1), generator=generator)
    return scores.masked_fill(torch.arange(K) >= count, -torch.inf)


def of(op: Any, kind: str) -> Callable[..., Tensor]:
    """Of scores, and with "decay" the decay."""
    return lambda scores, *decay: op(scores, kind.replace("decay", "softmax"), *decay)


def inputs(kind: str, scores: Tensor) -> list[Tensor]:
    return [scores, torch.tensor([-0.3], dtype=scores.dtype)] if kind == "decay" else [scores]


SIZES = st.tuples(
    st.integers(0, 5), st.integers(1, 9), st.integers(0, 2**20), st.sampled_from([1, 4, 16, 64])
)


@pytest.mark.parametrize("kind", KINDS)
@given(SIZES)
def test_it_is_the_oracle(kind: str, sizes: tuple[int, int, int, float]) -> None:
    given = inputs(kind, drawn(*sizes))
    assert_equals_the_oracle(of(weigh_chunks, kind), of(reference.weigh_chunks, kind), *given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1, 4, 16, 64])
def test_low_precision_keeps_the_budget(kind: str, dtype: torch.dtype, scale: float) -> None:
    given = inputs(kind, drawn(64, 9, 0, scale).to(dtype))
    ops = (of(op, kind) for op in (weigh_chunks, reference.weigh_chunks))
    assert_low_precision_within_budget(*ops, *given)
    assert of(weigh_chunks, kind)(*given).dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind: str) -> None:
    scores = drawn(6, 4, 1).masked_fill_(
        torch.arange(4) >= torch.tensor([0, 1, 2, 3, 4, 4])[:, None], -torch.inf
    )
    there = scores > -torch.inf

    def weigh(present: Tensor, *decay: Tensor) -> Tensor:
        return of(weigh_chunks, kind)(
            torch.full_like(scores, -torch.inf).masked_scatter(there, present), *decay
        )

    given = inputs(kind, scores[there])
    assert torch.autograd.gradcheck(weigh, [x.requires_grad_() for x in given])


@given(SIZES)
def test_a_stick_is_broken_by_the_closed_form(sizes: tuple[int, int, int, float]) -> None:
    """w_k = exp(r_k - sum of softplus(r) of it and all more recent), and what they sum to."""
    scores = drawn(*sizes)
    missing = scores == -torch.inf
    # torch's softplus is the number itself above 20
    softplus = -torch.nn.functional.logsigmoid(-scores.masked_fill(missing, 0)).masked_fill(missing, 0)
    closed = (scores - softplus.flip(-1).cumsum(-1).flip(-1)).exp()
    weights = weigh_chunks(scores, "stick_breaking")
    assert_same_in_float64(weights, closed)
    left = torch.where(missing, 1, 1 - scores.sigmoid()).prod(-1)
    assert_same_in_float64(weights.sum(-1), 1 - left)


def test_a_stick_has_the_gradient_of_the_closed_form() -> None:
    """dr_k = w_k dw_k - sigma(r_k) sum of w dw of it and all older ones."""
    scores, grad = (
        drawn(5, 6, 3).nan_to_num(neginf=-2.0).requires_grad_(),
        torch.randn(5, 6, dtype=torch.float64),
    )
    weights = weigh_chunks(scores, "stick_breaking")
    (found,) = torch.autograd.grad(weights, scores, grad)
    share = (weights * grad).detach()
    closed = share - scores.detach().sigmoid() * share.cumsum(-1)  # older ones stand before
    assert_same_in_float64(found, closed)


@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_was_selected_weights_and_gradients_are_zeros(kind: str) -> None:
    scores = torch.full((3, 4), -torch.inf, requires_grad=True)
    weights = of(weigh_chunks, kind)(*inputs(kind, scores))
    weights.sum().backward()
    assert torch.equal(weights, torch.zeros(3, 4))
    assert torch.equal(scores.grad, torch.zeros(3, 4))


def test_scores_far_from_zero_break_no_stick_to_nan() -> None:
    scores = torch.tensor([[-500.0, 500.0], [500.0, -500.0], [-500.0, -500.0]], requires_grad=True)
    weights = weigh_chunks(scores, "stick_breaking")
    weights.square().sum().backward()
    assert torch.equal(weights, torch.tensor([[0.0, 1], [1, 0], [0, 0]]))
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "sum"}, "kind: expected 'softmax' or 'stick_breaking', got sum"),
        ({"kind": "stick_breaking", "decay": torch.zeros(1)}, "decay: expected None with stick-breaking"),
        ({"decay": torch.zeros(2)}, r"decay: expected shape \[1\]"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weigh_chunks(torch.zeros(2, 3), **arguments)
