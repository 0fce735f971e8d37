"""Attention inside blocks: both ways to compute it against torch's own in float64."""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.budgets import (
    assert_autocast_changes_nothing,
    assert_equals_the_oracle,
    assert_low_precision_within_budget,
    assert_same_bits,
    assert_same_in_float64,
    values_and_gradients,
)
from trailmark.ops import block_attention

module = importlib.import_module("trailmark.ops.block_attention")


@pytest.fixture(params=["gemms", "sdpa"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SMALL_BLOCK", 10**9 if request.param == "gemms" else 0)


def make(b: int, c: int, p: int, H: int, J: int, D: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, dtype=torch.float64, generator=random)
    return [normal(b, c, H, D), normal(b, p, J, D), normal(b, p, J, D)]


def mask_of(kind: str, H: int, c: int, p: int) -> Tensor | None:
    """In the shapes that the op documents; no row is empty."""
    seen = torch.arange(p) <= torch.arange(c)[:, None] + p - c
    causal = torch.zeros(c, p, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    per_head = causal - torch.arange(1, H + 1)[:, None, None] * 0.25
    additive = {"none": None, "causal": causal, "per head": per_head, "per block": per_head[None]}
    return {**additive, "bool": seen, "bool per block": seen.expand(1, 1, c, p)}[kind]


def oracle(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.to(dtype).repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bchd,bphd->bhcp", q.to(dtype), k) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return torch.einsum("bhcp,bphd->bchd", scores.softmax(-1), v).to(q.dtype)


MASKS = ["none", "causal", "per head", "per block", "bool", "bool per block"]


@pytest.mark.parametrize("kind", MASKS)
def test_gradcheck(kind: str) -> None:
    inputs = make(2, 2, 3, 4, 2, 2)
    mask = mask_of(kind, 4, 2, 3)
    torch.autograd.gradcheck(
        partial(block_attention, mask=mask, scale=0.7), [x.requires_grad_() for x in inputs]
    )


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("c", "p", "H", "J"), [(1, 1, 1, 1), (1, 9, 6, 2), (5, 9, 6, 3), (7, 7, 2, 2)])
def test_equals_the_oracle_in_float64(kind: str, c: int, p: int, H: int, J: int) -> None:
    inputs = make(3, c, p, H, J, 4)
    rest = {"mask": mask_of(kind, H, c, p), "scale": 0.5}
    assert_equals_the_oracle(partial(block_attention, **rest), partial(oracle, **rest), *inputs)


def test_equals_torch() -> None:
    q, k, v = make(2, 5, 5, 4, 4, 8)
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    ours = block_attention(q, k, v, mask_of("causal", 4, 5, 5), 8**-0.5)
    assert_same_in_float64(ours, expected.transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision(dtype: torch.dtype) -> None:
    inputs = [x.to(dtype) for x in make(3, 20, 40, 4, 2, 16)]
    mask = mask_of("per head", 4, 20, 40).float()  # quarters and infinities: exact
    fast, slow = (partial(op, mask=mask, scale=0.25) for op in (block_attention, oracle))
    assert_low_precision_within_budget(fast, slow, *inputs)
    assert_autocast_changes_nothing(fast, *inputs)


def test_a_backward_pass_under_autocast_changes_nothing() -> None:
    inputs = [x.float() for x in make(3, 20, 40, 4, 2, 16)]
    op = partial(block_attention, mask=None, scale=0.25)
    plain = values_and_gradients(op, *inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(values_and_gradients(op, *inputs), plain)
