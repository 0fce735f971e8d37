"""Chunked cross-attention against its oracle, and the oracle against one softmax written out."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.budgets import (
    assert_all_same_in_float64,
    assert_autocast_changes_nothing,
    assert_low_precision_within_budget,
    assert_same_in_float64,
    assert_widest_input_sets_the_precision,
    values_and_gradients,
)
from trailmark.ops import chunked_cross_attention

SHAPES = [  # B, N, R, L, H, J, D
    (1, 1, 1, 1, 1, 1, 1),
    (2, 3, 4, 6, 4, 2, 4),
    (2, 2, 3, 5, 6, 3, 2),
    (1, 3, 2, 0, 2, 1, 4),  # nothing was retrieved by any chunk
    (2, 0, 2, 3, 2, 2, 4),  # nothing reads
    (1, 2, 70, 130, 2, 2, 4),  # past the small blocks of a CPU
]


def make(B: int, N: int, R: int, L: int, H: int, J: int, D: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(B + N + R + L)
    normal = partial(torch.randn, dtype=torch.float64, generator=random)
    return [normal(B, N, R, H, D), normal(B, N, L, J, D), normal(B, N, L, J, D), normal(J, D), normal(J, D)]


def mask_of(kind: str, q: Tensor, k: Tensor) -> Tensor | None:
    B, N, L = k.shape[:3]
    if kind == "none":
        return None
    if kind == "empty":
        return torch.zeros(B, N, L, dtype=torch.bool)
    return torch.rand(B, N, L, generator=torch.Generator().manual_seed(5)) < 0.5


@pytest.mark.parametrize("kind", ["none", "some", "empty"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_oracle_in_float64(shape: tuple[int, ...], kind: str) -> None:
    inputs = make(*shape)
    mask = mask_of(kind, *inputs[:2])
    fast, slow = (
        values_and_gradients(
            partial(chunked_cross_attention, mask=mask, scale=0.6, implementation=way), *inputs
        )
        for way in (None, "reference")
    )
    assert_all_same_in_float64(fast, slow)


@pytest.mark.parametrize("way", ["reference", "torch"])
def test_one_softmax_over_all_keys_and_the_null_key(way: str) -> None:
    q, k, v, null_k, null_v = make(2, 2, 3, 5, 4, 2, 4)
    mask = mask_of("some", q, k)
    assert mask is not None
    ours = chunked_cross_attention(q, k, v, null_k, null_v, mask, implementation=way)
    for b, n, r, h in ((b, n, r, h) for b in range(2) for n in range(2) for r in range(3) for h in range(4)):
        j = h // 2
        seen = [i for i in range(5) if mask[b, n, i]]
        keys = [null_k[j], *(k[b, n, i, j] for i in seen)]
        values = [null_v[j], *(v[b, n, i, j] for i in seen)]
        weights = [math.exp(float(q[b, n, r, h] @ key) / 2) for key in keys]
        expected = sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)
        assert_same_in_float64(ours[b, n, r, h], torch.as_tensor(expected))


@pytest.mark.parametrize("way", ["reference", "torch"])
@pytest.mark.parametrize("kind", ["none", "some", "empty"])
def test_gradcheck(way: str, kind: str) -> None:
    inputs = make(1, 2, 2, 3, 4, 2, 2)
    op = partial(chunked_cross_attention, mask=mask_of(kind, *inputs[:2]), scale=0.7, implementation=way)
    torch.autograd.gradcheck(op, [x.requires_grad_() for x in inputs])


@pytest.mark.parametrize("way", ["reference", "torch"])
def test_a_chunk_that_retrieved_nothing_reads_the_null_value(way: str) -> None:
    q, k, v, null_k, null_v = make(1, 2, 3, 4, 4, 2, 4)
    mask = torch.tensor([[[False] * 4, [True] * 4]])
    k[:, 0], v[:, 0] = torch.nan, torch.nan  # what is not seen has no effect
    out, *gradients = values_and_gradients(
        partial(chunked_cross_attention, mask=mask, implementation=way), q, k, v, null_k, null_v
    )
    assert_same_in_float64(out[:, 0], null_v.repeat_interleave(2, 0).expand(1, 3, 4, 4))
    assert all(x.isfinite().all() for x in gradients)
    assert not gradients[1][:, 0].any()
    assert gradients[1][:, 1].any()
    assert_same_in_float64(gradients[0][:, 0], torch.zeros_like(q[:, 0]))  # one key, whatever is asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision(dtype: torch.dtype) -> None:
    inputs = [x.to(dtype) for x in make(2, 3, 8, 20, 4, 2, 16)]
    mask = mask_of("some", *inputs[:2])
    fast, slow = (
        partial(chunked_cross_attention, mask=mask, implementation=way) for way in ("torch", "reference")
    )
    assert_low_precision_within_budget(fast, slow, *inputs)
    assert_autocast_changes_nothing(fast, *inputs)


def test_the_widest_input_sets_the_precision() -> None:
    inputs = make(1, 2, 3, 5, 2, 1, 4)
    fast, slow = (partial(chunked_cross_attention, implementation=way) for way in ("torch", "reference"))
    assert_widest_input_sets_the_precision(fast, slow, *inputs)


def test_other_chunks_have_no_say() -> None:
    q, k, v, null_k, null_v = make(2, 3, 4, 6, 2, 2, 4)
    before = chunked_cross_attention(q, k, v, null_k, null_v)
    k, v = k.clone(), v.clone()
    k[:, 1], v[0] = 3.0, -1.0
    after = chunked_cross_attention(q, k, v, null_k, null_v)
    assert torch.equal(before[1, [0, 2]], after[1, [0, 2]])
    assert not torch.equal(before[1, 1], after[1, 1])


def test_what_does_not_fit_is_refused() -> None:
    q, k, v, null_k, null_v = make(2, 3, 4, 6, 4, 2, 4)
    with pytest.raises(ValueError, match=r"q: expected shape \[B, N, R, H, D\]"):
        chunked_cross_attention(q[0], k, v, null_k, null_v)
    with pytest.raises(ValueError, match=r"k: expected shape \[B, N, L, J, D\]"):
        chunked_cross_attention(q, k[:, :2], v, null_k, null_v)
    with pytest.raises(ValueError, match=r"v: expected shape \[B, N, L, J, D\]"):
        chunked_cross_attention(q, k, v[:, :, :5], null_k, null_v)
    with pytest.raises(ValueError, match=r"null_v: expected shape \[J, D\] = \(2, 4\), got \(1, 4\)"):
        chunked_cross_attention(q, k, v, null_k, null_v[:1])
    with pytest.raises(ValueError, match="q: expected a number of query heads"):
        chunked_cross_attention(q[:, :, :, :3], k, v, null_k, null_v)
    mask = torch.ones(2, 3, 6)
    with pytest.raises(ValueError, match=r"mask: expected bool, got torch\.float32"):
        chunked_cross_attention(q, k, v, null_k, null_v, mask)
    with pytest.raises(ValueError, match=r"mask: expected shape \[B, N, L\]"):
        chunked_cross_attention(q, k, v, null_k, null_v, mask[:, :, :4].bool())
    with pytest.raises(ValueError, match="implementation: expected None or one of 'reference', 'torch'"):
        chunked_cross_attention(q, k, v, null_k, null_v, implementation="triton")
    with pytest.raises(ValueError, match="k: expected a floating dtype"):
        chunked_cross_attention(q, k.long(), v, null_k, null_v)
