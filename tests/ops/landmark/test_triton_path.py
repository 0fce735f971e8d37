"""The kernels of Landmark Attention: on a GPU where there is one, else interpreted on the CPU (no bfloat16 there)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.budgets import (
    assert_low_precision_within_budget,
    assert_same_bits,
    assert_within_budget,
    values_and_gradients,
)
from tests.pairwise import pairwise
from trailmark.ops import LandmarkLayout, landmark_attention

pytest.importorskip("triton")
sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from gpu_checks import has_enough_numbers

from tests.ops.landmark.cases import COVER, DEVICE, GPU, assert_budget, documents, inputs, marks, op
from trailmark.ops.landmark import triton_path as kernels
from trailmark.ops.landmark.call import LandmarkCall

# what an interpreter can do while the other tests wait: small, no bfloat16
CHEAP_COVER = pairwise(
    {
        "D": (16, 80),
        "g": (1, 3),
        "S": (3, 15, 50),
        "T": (20, 60),
        "P": (None, 9),
        "J": (1, 2),
        "marks_kind": ("regular", "phase", "random", "pairs"),
        "documents_kind": (None, "several", "between", "mixed"),
        "causal": (True, False),
        "dtype": (torch.float32, torch.float16),
        "fused": (False, True),
    }
)
HALF = torch.float16


pytestmark = pytest.mark.usefixtures("poisoned_memory")


# The grid of sizes


@pytest.mark.parametrize(
    "case",
    list(filter(has_enough_numbers, COVER)) if GPU else CHEAP_COVER,
    ids=lambda c: "-".join(str(v).split(".")[-1] for v in c.values()),
)
@pytest.mark.sampled(7)  # both dtypes, causal and not, pairs of landmarks
def test_error_budget(case: dict[str, Any]) -> None:
    assert_budget(*inputs(B=2 if GPU else 1, **case))


@pytest.mark.parametrize("S", [1, 15, 63, 64, pytest.param(130, marks=pytest.mark.slow)])
def test_every_chunk_size_from_mid_chunk_on(S: int) -> None:
    """The first chunk is cut short and the last has no landmark; 64 and more take several tiles."""
    T = max(20, 2 * S + S // 2)
    assert_budget(*inputs(B=1, T=T, S=S, J=1, marks_kind="phase", dtype=HALF, seed=3))


@pytest.mark.parametrize(("causal", "dtype"), [(True, torch.float32), (False, HALF)])
def test_chunks_longer_than_a_tile(causal: bool, dtype: torch.dtype) -> None:
    """Several documents, and queries in the middle of a chunk."""
    rest: dict[str, Any] = {"T": 190, "S": 70, "P": 80, "J": 1, "documents_kind": "several"}
    assert kernels.tiles(80, 70, 16, dtype, "forward").per_chunk > 1 or dtype == HALF
    assert kernels.tiles(80, 70, 16, dtype, "keys").per_chunk > 1
    assert_budget(*inputs(B=1, causal=causal, dtype=dtype, marks_kind="phase", **rest))


@pytest.mark.parametrize("kind", ["none", "all"])
def test_without_landmarks_and_with_nothing_else(kind: str) -> None:
    """No landmark: ordinary causal attention; nothing but landmarks: nothing to attend to."""
    tensors, rest = inputs(B=1, T=20 if kind == "all" else 150, J=1, marks_kind=kind, dtype=HALF)
    if kind == "none":
        assert_budget(tensors, rest)
        return
    out, lse, *gradients = values_and_gradients(op(rest, "triton"), *tensors)
    assert torch.equal(lse, torch.full_like(lse, 8))  # stands for -inf
    for x in (out, *gradients):
        assert not bool(x.any())


@pytest.mark.parametrize("where", ["left", "right"])
def test_ragged_rows_of_queries(where: str) -> None:
    """Each row of the batch asks from places of its own, absent queries before or after them."""
    tensors, rest = inputs(T=40, S=7, J=1, documents_kind=where, places_kind=where)
    assert bool((rest["query_places"] < 0).any())
    assert_budget(tensors, rest)


@pytest.mark.parametrize("own", [True, False])
def test_a_layout_that_shows_some_chunks_only(own: bool) -> None:
    tensors, rest = inputs(B=2, T=40, S=5, J=1, marks_kind="phase")
    layout = LandmarkLayout.of(rest["is_landmark"])
    far = torch.arange(layout.num_chunks, device=DEVICE) % 2 == 0
    given = {"is_landmark": layout.seeing(far.expand_as(layout.far), own)}
    assert_budget(tensors, given)


def test_b3_more_chunks_than_64() -> None:
    """There groups beyond a fixed number are merged without a word."""
    tensors, rest = inputs(B=1, T=140, P=20, S=1, J=1, dtype=HALF)
    assert LandmarkLayout.of(rest["is_landmark"]).num_chunks == 70
    assert_budget(tensors, rest)


def test_a_gradient_of_the_log_sum_exp_alone() -> None:
    tensors, rest = inputs(B=1, T=30, S=7, J=1)

    def lse(name: str) -> Callable[..., Tensor]:
        return lambda q, k, v: op(rest, name)(q, k, v)[1]

    assert_low_precision_within_budget(lse("triton"), lse("reference"), *tensors)


# What need not be there


def test_what_is_absent_has_no_effect_not_even_as_nan() -> None:
    """Padding, landmarks' values, the keys of landmarks that close no token."""
    tensors, rest = inputs(T=40, S=5, J=1, marks_kind="pairs", documents_kind="left", dtype=HALF)
    before = values_and_gradients(op(rest, "triton"), *tensors)
    q, k, v = (x.clone() for x in tensors)
    absent = rest["document_ids"] < 0
    assert bool(absent.any())
    for x in (q, k, v):
        x[absent] = torch.nan
    v[rest["is_landmark"]] = torch.nan
    second = rest["is_landmark"] & torch.nn.functional.pad(rest["is_landmark"][:, :-1], (1, 0))
    assert bool(second.any())
    k[second] = torch.nan
    assert_same_bits(before, values_and_gradients(op(rest, "triton"), q, k, v))


@pytest.mark.parametrize("S", [4, 70])
def test_what_attends_to_nothing_has_no_gradient_not_even_as_nan(S: int) -> None:
    """Two documents that begin with landmarks, the second in the tile where the first ends; chunks of several tiles."""
    (q, k, v), rest = inputs(B=1, T=S + 20, S=S, J=1)
    rest["document_ids"] = (torch.arange(S + 20, device=DEVICE) >= S + 3).long()[None]
    for begin in (0, S + 3):
        rest["is_landmark"][:, begin : begin + 2] = True
    leaves = [x.requires_grad_() for x in (q, k, v)]
    results = landmark_attention(*leaves, **rest, implementation="triton", return_lse=True)
    alone = results[1] == -torch.inf
    assert bool(alone.any())
    assert not bool(alone.all())
    random = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=random).to(x) for x in results]
    zero, nan = ([x.clone() for x in cotangents] for _ in range(2))
    for these, value in ((zero, 0.0), (nan, torch.nan)):
        for x in these:
            x[alone] = value
    before = torch.autograd.grad(results, leaves, zero, retain_graph=True)
    for x, y in zip(before, torch.autograd.grad(results, leaves, nan), strict=True):
        assert bool(x.any())
        assert torch.equal(x, y)


@pytest.mark.parametrize("sizes", [{"B": 0}, {"T": 0}, {"P": 0}])
def test_empty_sizes(sizes: dict[str, int]) -> None:
    shape: dict[str, Any] = {"B": 1, "T": 12, **sizes}
    tensors, rest = inputs(**shape)
    out, lse, *gradients = values_and_gradients(op(rest, "triton"), *tensors)
    assert lse.shape == out.shape[:3]
    for x, like in zip((out, *gradients), (tensors[0], *tensors), strict=True):
        assert torch.equal(x, torch.zeros_like(like))


def test_a_future_token_changes_no_earlier_bit() -> None:
    tensors, rest = inputs(B=1, T=40, S=7, J=1)
    before = op(rest, "triton")(*tensors)
    for place in (12, 15, 39):  # inside a chunk, a landmark, the last
        changed = [x.clone() for x in tensors]
        for x in changed:
            x[:, place] = 9.0
        for x, y in zip(before, op(rest, "triton")(*changed), strict=True):
            assert torch.equal(x[:, :place], y[:, :place])
            assert not torch.equal(x[:, place], y[:, place])


def test_neighbours_have_no_effect() -> None:
    """Neither another row of the batch nor another head."""
    tensors, rest = inputs(B=2, T=30, S=7, J=2)
    out, lse = op(rest, "triton")(*tensors)
    changed = [x.clone() for x in tensors]
    for x in changed:
        x[1], x[:, :, 1] = torch.nan, torch.nan
    for x, y in zip((out, lse), op(rest, "triton")(*changed), strict=True):
        assert torch.equal(x[0, :, 0], y[0, :, 0])


# Layouts in memory


def test_numbers_of_a_head_apart_from_each_other() -> None:
    tensors, rest = inputs(B=1, T=20, J=1)
    apart = [x.repeat_interleave(2, dim=-1)[..., ::2] for x in tensors]
    assert apart[0].stride(-1) == 2
    out = op(rest, "triton")
    assert_same_bits(values_and_gradients(out, *tensors), values_and_gradients(out, *apart))


def test_heads_first_in_memory() -> None:
    """[B, H, T, D] seen through a transpose: read as it lies, with the same bits."""
    tensors, rest = inputs(B=1, T=20, J=2, g=2)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    out = op(rest, "triton")
    assert_same_bits(values_and_gradients(out, *tensors), values_and_gradients(out, *turned))


def test_a_gradient_of_stride_0() -> None:
    """Of a sum: one number for all."""
    tensors, rest = inputs(B=1, T=20, J=1)
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = op(rest, "triton")(*leaves)[0]
    expanded = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    assert_same_bits(expanded, torch.autograd.grad(out, leaves, torch.ones_like(out)))


def test_offsets_inside_a_tile_are_wide_where_they_must_be() -> None:
    def far_apart(step: int) -> Tensor:
        return torch.empty_strided((1, 9, 2, 16), (1, step, 16, 1), device="meta", dtype=torch.bfloat16)

    near = torch.empty(1, 1 << 30, 8, 128, device="meta", dtype=torch.bfloat16)  # tiles have 64 bits always
    assert not kernels.needs_wide_offsets(near, near, far_apart(1 << 20))
    assert kernels.needs_wide_offsets(near, far_apart(1 << 24))


def test_wide_offsets_give_the_same_bits() -> None:
    (q, k, v), rest = inputs(B=1, T=30, S=7, g=2, J=1, dtype=HALF)
    layout, results = LandmarkLayout.of(rest["is_landmark"]), []
    for wide in (False, True):
        call = LandmarkCall(q, k, v, layout, 0.25)
        out, lse = kernels.forward(call, wide=wide)
        results.append([out, lse, *kernels.backward(out, lse, call, out, lse, wide=wide)])
    assert_same_bits(*results)


# The tables


@given(
    st.integers(1, 2), st.integers(1, 24), st.integers(1, 5), st.booleans(), st.integers(0, 999),
    st.sampled_from(("regular", "phase", "random", "pairs", "none", "all")),
    st.sampled_from((None, "left", "right", "between", "several", "mixed")),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_tables_say_who_sees_what(
    B: int, T: int, S: int, causal: bool, seed: int, kind: str, padding: str | None
) -> None:
    random = torch.Generator().manual_seed(seed)
    is_landmark = marks(kind, B, T, S, random)
    layout = LandmarkLayout.of(
        is_landmark, documents(padding, B, T, random), causal, num_queries=T - seed % 2
    )
    if layout.num_chunks == 0:  # then no kernel runs
        return
    made = kernels._tables(layout)
    own, limit, first, end = made.rows.long()
    for b in range(B):
        standing = [-1] * layout.num_queries
        for c in range(layout.num_chunks):
            start, count = int(layout.query_starts[b, c]), int(layout.query_counts[b, c])
            for i in range(start, start + count):
                standing[i] = c
                slot = int(layout.query_slots[b, c]) + i - start
                length = int(layout.lengths[b, c])
                assert limit[b, i] == (min(length, slot + 1) if causal else length)
                assert (first[b, i], end[b, i]) == (layout.first[b, c], layout.end[b, c])
        assert own[b].tolist() == standing
        far = layout.far[b].nonzero()[:, 0].tolist()
        assert made.far[b, : len(far), 2].tolist() == far
        assert made.ranks[b].tolist() == [sum(m < c for m in far) for c in range(layout.num_chunks + 1)]
        for m in range(layout.num_chunks):
            low, high, slot, count = made.readers[b, m].tolist()
            for i, c in enumerate(standing):
                sees = c == m or (c >= 0 and m in far and bool(first[b, i] <= m < end[b, i]))
                assert low <= i < high or not sees
            if count:  # the kernel leaves out the first of these where they see nothing of a tile
                assert (low, slot) == (int(layout.query_starts[b, m]), int(layout.query_slots[b, m]))


def test_tables_are_made_once_for_all_layers() -> None:
    layout = LandmarkLayout.of(marks("regular", 1, 20, 4, torch.Generator()))
    assert kernels.tables(layout) is kernels.tables(layout)
    assert kernels.tables(layout) is not kernels.tables(layout.seeing(layout.far))


# Repeatability


@pytest.mark.gpu  # an interpreted kernel runs in one order
def test_the_same_bits_again() -> None:
    tensors, rest = inputs(B=1, T=40, S=7, g=2, J=1, marks_kind="phase")
    before = values_and_gradients(op(rest, "triton"), *tensors)
    for _ in range(250):
        assert_same_bits(before, values_and_gradients(op(rest, "triton"), *tensors))


def test_query_heads_in_parts_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few chunks several programs share the query heads of a key/value head."""
    (q, k, v), rest = inputs(B=1, T=20, S=7, g=5, J=1)
    exact = values_and_gradients(op(rest, "reference"), *(x.double() for x in (q, k, v)))
    found = []
    for programs, parts in ((0, 1), (6, 2), (256, 5)):  # 6: of 3 heads and of 2
        monkeypatch.setattr(kernels, "_PROGRAMS", programs)
        assert kernels._parts(3, 5) == parts
        found.append(values_and_gradients(op(rest, "triton"), q, k, v))
    whole = found[0]
    for several in found[1:]:
        assert_same_bits(several[:3], whole[:3])
        for x, y, truth in zip(several[3:], whole[3:], exact[3:], strict=True):
            assert_within_budget(x, y, truth)


@pytest.mark.gpu
def test_b12_more_programs_than_an_axis_of_a_grid_has() -> None:
    """Batch times heads stood on an axis that has 65,535. (Interpreted it would take ten minutes.)"""
    tensors, rest = inputs(B=2200, T=8, S=3, J=4, g=8)
    exact = op(rest, "reference")(*(x.double() for x in tensors))
    same = op(rest, "reference")(*tensors)
    for ours, theirs, truth in zip(op(rest, "triton")(*tensors), same, exact, strict=True):
        assert_within_budget(ours, theirs, truth)


@pytest.mark.gpu
def test_no_synchronisation_on_a_gpu() -> None:
    tensors, rest = inputs(T=300, S=50, documents_kind="several")
    layout = LandmarkLayout.of(rest["is_landmark"], rest["document_ids"])
    leaves = [x.detach().requires_grad_() for x in tensors]
    ready = {"is_landmark": layout}
    values_and_gradients(op(ready, "triton"), *tensors)  # compiled
    again = op({"is_landmark": layout.seeing(layout.far)}, "triton")  # its tables are made anew
    torch.cuda.set_sync_debug_mode("error")
    try:
        again(*leaves)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: [x.double() for x in (q, k, v)], r"float64.* Convert"),
        (lambda q, k, v: [x.repeat(1, 1, 1, 17) for x in (q, k, v)], r"D is 272.* at most 256"),
        (lambda q, k, v: [q, k.half(), v], r"float32, torch.float16.* Convert"),
    ],
)
def test_what_the_kernels_do_not_take(change: Callable[..., list[Tensor]], message: str) -> None:
    tensors, rest = inputs(B=1, T=10)
    with pytest.raises(ValueError, match=f"implementation: .*'triton'.*{message}"):
        op(rest, "triton")(*change(*tensors))


def test_more_chunks_times_tiles_than_a_grid_has() -> None:
    """One chunk of half the text, the others of one token each: said in the forward, before anything runs."""
    T, J = 600_000, 4
    is_landmark = (torch.arange(T, device=DEVICE) % 2 == 1)[None]
    is_landmark[:, : T // 2] = False
    q, k = (torch.ones(1, n, J, 1, device=DEVICE, dtype=HALF, requires_grad=True) for n in (1, T))
    with pytest.raises(
        ValueError, match=r"^is_landmark: .* 150,000 chunks.*300,001 tokens.*implementation='torch'"
    ):
        landmark_attention(q, k, k, is_landmark, implementation="triton")
