"""Keys and values in eight bits: how far off, and what stays the same."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trailmark.memory.manifest import record_bytes
from trailmark.memory.tiers.base import TIERS, tier_named
from trailmark.memory.tiers.quantized import dequantize, quantize
from trailmark.memory.tiers.records import RecordLayout

SHAPES = st.tuples(st.just(2), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))
SIZES = st.sampled_from([0.0, 1e-41, 1e-30, 1e-6, 1.0, 77.7, 1e30])


@st.composite
def some_records(draw: st.DrawFn) -> Tensor:
    """[n, 2, J, S, D] of any sizes, heads of very different ones among them."""
    shape = (draw(st.integers(0, 3)), *draw(SHAPES))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    scale = torch.tensor(draw(st.lists(SIZES, min_size=shape[2], max_size=shape[2])))
    return x * scale[:, None, None]


@settings(max_examples=60, deadline=None)
@given(some_records())
def test_no_number_is_off_by_more_than_half_a_step(x: Tensor) -> None:
    kept, shape = quantize(x), tuple(x.shape[1:])
    y = dequantize(kept, shape)
    assert (y.dtype, y.shape) == (torch.float32, x.shape)
    steps = (
        kept[:, math.prod(shape) :].reshape(-1).clone().view(torch.float32).view(len(x), *shape[:2]).double()
    )
    largest = x.double().abs().amax((-2, -1))
    # 17 bits of a scale, and none for what is next to nothing
    assert ((steps * 127 - largest).abs() <= largest / 2**17 + 127 * torch.finfo(torch.float32).tiny).all()
    off = (x.double() - y.double()).abs().amax((-2, -1))
    assert ((off <= steps / 2 * (1 + 2**-20)) | ((steps == 0) & (off == largest))).all()


@settings(max_examples=60, deadline=None)
@given(some_records())
def test_quantized_again_the_bits_are_the_same(x: Tensor) -> None:
    kept = quantize(x)
    assert kept.shape == (len(x), record_bytes(tuple(x.shape[1:]), "int8"))
    assert torch.equal(quantize(dequantize(kept, tuple(x.shape[1:]))), kept)


def test_heads_and_keys_and_values_have_scales_of_their_own() -> None:
    x = torch.ones(1, 2, 2, 3, 4) * torch.tensor([[1.0, 1e-3], [1e3, 1e-6]])[:, :, None, None]
    torch.testing.assert_close(dequantize(quantize(x), (2, 2, 3, 4)), x, rtol=2**-17, atol=0)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_seen(odd: float) -> None:
    """And spoils no other head."""
    x = torch.randn(2, 2, 1, 3, 4, generator=torch.Generator().manual_seed(0))
    fine = dequantize(quantize(x), (2, 1, 3, 4))
    x[1, 0, 0, 2, 1] = odd
    found = dequantize(quantize(x), (2, 1, 3, 4))
    assert found[1, 0].isnan().all()
    assert torch.equal(quantize(found), quantize(x))
    assert torch.equal(found[0], fine[0])
    assert torch.equal(found[1, 1], fine[1, 1])


@pytest.mark.parametrize("tier", TIERS)
def test_a_copy_is_the_same_bytes(tier: str) -> None:
    layout = RecordLayout((2, 1, 3, 4), torch.int8, "cpu")
    store, copy = tier_named("disk").made(layout), tier_named(tier).made(layout)
    records = torch.randn(70, *layout.shape, generator=torch.Generator().manual_seed(0))
    records[7, 0, 0, 1, 1] = math.nan
    store.write(0, records)
    store.copy_to(copy, 70)
    assert b"".join(copy.pieces(0, copy.num_bytes())) == b"".join(store.pieces(0, store.num_bytes()))
    store.close()
    copy.close()
