"""The blocks: norms, rotary positions, attention with carried keys, attention inside a chunk."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.budgets import assert_low_precision_within_budget, values_and_gradients
from tests.models.naive import NaiveWindow
from tests.models.tiny import assert_same, logits_of, tokens, window_config, window_model
from trailmark.models.layers import (
    MLP,
    ChunkEncoderLayer,
    RMSNorm,
    WindowLayer,
    fused_linear,
    rms_normalize,
    rotary_table,
    rotate,
    slopes_like,
)

EPS = 1e-6


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# --- norms -----------------------------------------------------------------------------------------------


def test_rms_normalize_is_torchs() -> None:
    x, weight = draw(3, 5, 16), draw(16, seed=1)
    for inputs in ((x,), (x, weight)):
        ours = values_and_gradients(lambda x, w=None: rms_normalize(x, EPS, w), *inputs)
        theirs = values_and_gradients(lambda x, w=None: F.rms_norm(x, (16,), w, EPS), *inputs)
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b)


def test_rms_normalize_of_zeros_is_zeros() -> None:
    values = values_and_gradients(lambda x: rms_normalize(x, EPS), torch.zeros(2, 4, dtype=torch.float64))
    assert all(x.isfinite().all() for x in values)
    assert not values[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norms_are_computed_in_float32(dtype: torch.dtype) -> None:
    x, weight = (100 * draw(3, 5, 64)).to(dtype), draw(64, seed=1).to(dtype)

    def oracle(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * w).to(x.dtype)

    # in float16 the squares would be infinite
    assert_low_precision_within_budget(lambda x, w: rms_normalize(x, EPS, w), oracle, x, weight)
    for own in (None, weight, weight.double()):  # of its dtype, and of another
        with torch.no_grad():
            without_graph = rms_normalize(x, EPS, own)
        assert torch.equal(without_graph, rms_normalize(x, EPS, own).detach())


def test_norms_without_a_graph_under_autocast() -> None:
    x, weight = draw(3, 5, 64, dtype=torch.bfloat16), draw(64, seed=1, dtype=torch.bfloat16)
    with torch.no_grad():
        alone = rms_normalize(x, EPS, weight)
        with torch.autocast("cpu", torch.bfloat16):
            under = rms_normalize(x, EPS, weight)
    torch.testing.assert_close(under, alone)


def test_a_norm_of_a_bfloat16_model_puts_out_bfloat16() -> None:
    norm = RMSNorm(16, EPS).bfloat16()
    out = norm(draw(2, 16, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert RMSNorm(16, EPS)(draw(2, 16, dtype=torch.float32)).dtype == torch.float32


# --- slopes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_slopes_are_rounded_once_to_float32_or_wider(dtype: torch.dtype) -> None:
    exact = 2.0 ** (-8 * torch.arange(1, 7, dtype=torch.float64) / 6)
    assert torch.equal(
        slopes_like(draw(2, 5, 6, 4, dtype=dtype)), exact.to(torch.promote_types(dtype, torch.float32))
    )


def test_slopes_follow_the_configuration() -> None:
    """They differ for 6 heads, not for 4."""
    ids, sizes = tokens(30), {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2}
    both = [window_model(**sizes, alibi_slopes=rule) for rule in ("geometric", "interpolated")]
    logits = [logits_of(model, ids) for model in both]
    for model, ours in zip(both, logits, strict=True):
        assert_same(ours[0], NaiveWindow(model, ids[0]).logits)
    assert not torch.equal(*logits)
    alike = [logits_of(window_model(alibi_slopes=rule), ids) for rule in ("geometric", "interpolated")]
    assert torch.equal(*alike)


def test_slopes_are_nothing_that_a_model_saves_or_casts() -> None:
    assert not list(WindowLayer(window_config()).buffers())


# --- rotary positions ------------------------------------------------------------------------------------


def test_rotation_turns_neighbours_by_their_positions_angle() -> None:
    x, theta = draw(2, 9, 3, 8), 100.0
    turned = rotate(x, rotary_table(9, 8, theta, x))
    for p in range(9):
        for i in range(4):
            angle = torch.tensor(p * theta ** (-2 * i / 8), dtype=torch.float64)
            a, b = x[:, p, :, 2 * i], x[:, p, :, 2 * i + 1]
            assert_same(turned[:, p, :, 2 * i], a * angle.cos() - b * angle.sin())
            assert_same(turned[:, p, :, 2 * i + 1], a * angle.sin() + b * angle.cos())


def test_only_distances_matter() -> None:
    q, k = draw(1, 1, 1, 8), draw(1, 1, 1, 8, seed=1)
    table = rotary_table(1000, 8, 10000.0, q)
    scores = [(rotate(q, table[p + 7 :][:1]) * rotate(k, table[p:][:1])).sum() for p in (0, 5, 900)]
    assert_same(scores[0], scores[1])
    assert_same(scores[0], scores[2])


def test_the_rotary_table_is_exact_far_out_in_every_dtype() -> None:
    exact = rotary_table(100_000, 8, 10000.0, torch.zeros(1, dtype=torch.float64))
    assert exact.dtype == torch.float64
    for dtype in (torch.float32, torch.bfloat16):
        table = rotary_table(100_000, 8, 10000.0, torch.zeros(1, dtype=dtype))
        assert table.dtype == torch.float32
        assert (table - exact).abs().max() < 1e-7
    assert rotate(draw(1, 3, 2, 8, dtype=torch.bfloat16), table[:3]).dtype == torch.bfloat16


# --- layers ----------------------------------------------------------------------------------------------


def test_swiglu() -> None:
    mlp, x = MLP(window_config()).double(), draw(2, 3, 16)
    gate, up = mlp.gate_up_proj.weight.split(24)
    exact = (F.silu(x @ gate.T) * (x @ up.T)) @ mlp.down_proj.weight.T
    assert_same(mlp(x), exact)


def test_a_fused_matrix_says_where_it_parts() -> None:
    linear = fused_linear(16, (8, 4, 4))
    assert linear.weight.shape == (16, 16)
    assert linear.block_rows == (8, 4, 4)
    assert linear.bias is None


def test_the_encoder_sees_a_chunk_both_ways_and_no_other() -> None:
    layer, rows = ChunkEncoderLayer(window_config()).double(), draw(2, 3, 5, 16)
    rotary = rotary_table(5, 4, 10000.0, rows)
    before = layer(rows, rotary, None)
    changed = rows.clone()
    changed[1, 2, 4] += 1
    moved = (layer(changed, rotary, None) != before).any(-1)
    assert moved[1, 2].all()
    assert moved.sum() == 5


def test_the_encoder_does_not_see_rows_that_are_masked() -> None:
    """Rows 2 and 3 do not exist: the others are those of a shorter chunk whose landmark keeps row 4."""
    layer, rows = ChunkEncoderLayer(window_config()).double(), draw(1, 1, 5, 16)
    rotary, exist = rotary_table(5, 4, 10000.0, rows), [0, 1, 4]
    mask = torch.full((1, 1, 1, 5), -torch.inf, dtype=torch.float64)
    mask[..., exist] = 0
    assert_same(layer(rows, rotary, mask)[:, :, exist], layer(rows[:, :, exist], rotary[exist], None))
