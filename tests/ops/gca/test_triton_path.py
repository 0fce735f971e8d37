"""The kernels of GCA: on a GPU where there is one, else interpreted on the CPU (bfloat16 needs the GPU)."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.budgets import assert_same_bits, assert_within_budget, values_and_gradients
from trailmark.ops import grouped_cross_attention

pytest.importorskip("triton")
from tests.ops.gca.cases import CHEAP_COVER, COVER, DEVICE, GPU, assert_budget, inputs, op, unsplit
from trailmark.ops.gca import triton_path as kernels
from trailmark.ops.gca.call import CrossAttentionCall

# the package has the function under the same name as the module
module = importlib.import_module("trailmark.ops.gca.api")


pytestmark = pytest.mark.usefixtures("poisoned_memory")


# The grid of sizes


@pytest.mark.parametrize(
    "case",
    COVER if GPU else CHEAP_COVER,
    ids=lambda c: "-".join(str(v).split(".")[-1] for v in c.values()),
)
@pytest.mark.sampled(5)  # both dtypes, with the virtual key and without it
def test_error_budget(case: dict[str, Any]) -> None:
    case = dict(case)
    off_by_one = case.pop("off_by_one")
    # the budget compares largest errors: of many numbers, or chance decides
    tensors, rest = inputs(B=1, N=max(8, 24 // case["K"]), M=5, **case)
    with unsplit():  # as with many queries; what follows is split where there are few
        assert_budget(tensors, rest, softmax_off_by_one=off_by_one)


def test_a_single_key() -> None:
    assert_budget(*inputs(B=1, S=1, N=24, R=16))


# Tokens that retrieve: one row, sets of key/value heads, weights of query heads


@pytest.mark.slow
@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 8), st.sampled_from((1, 7, 16)), st.integers(1, 5),
    st.sampled_from((1, 5, 16, 65)), st.booleans(), st.sampled_from(("off by one", "plain", "beside")),
    st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=3, deadline=None)
@example(B=1, J=2, g=8, D=16, K=4, S=16, lengths=True, softmax="plain", seed=0)  # HiLS, in small
@example(B=1, J=2, g=3, D=16, K=4, S=16, lengths=True, softmax="beside", seed=0)  # where keys are weighed
def test_tokens_that_retrieve_equal_the_oracle(
    B: int, J: int, g: int, D: int, K: int, S: int, lengths: bool, softmax: str, seed: int
) -> None:
    if softmax == "plain":
        S = max(
            S, 2
        )  # of a single key the oracle's gradients are 0 without any rounding: no measure for a product
    dtype = torch.float16 if S == 1 else torch.float32  # as in the cover
    tensors, rest = inputs(
        B=B, N=12, R=1, J=J, g=g, D=D, M=5, S=S, K=K, per_query_head=True, lengths=lengths, dtype=dtype, seed=seed,
        beside=softmax == "beside",
    )  # fmt: skip
    off_by_one = softmax != "plain"
    with unsplit():
        assert_budget(tensors, rest, softmax_off_by_one=off_by_one)


# One softmax with what is beside


@pytest.mark.parametrize("far", [-30, 5, 20])
@pytest.mark.sampled(3)
def test_what_is_beside_may_leave_next_to_nothing_or_all(far: int) -> None:
    tensors, rest = inputs(B=1, N=8, R=9, g=2, M=6, S=17, K=3, lengths=True, beside=True)
    tensors[5] += far
    assert_budget(tensors, rest)


def test_beside_something_a_weight_of_zero_is_an_index_of_none() -> None:
    """Of all query heads or of one; what the chunk holds may be NaN if nobody weighs it."""
    (q, k, v, w, *beside), rest = inputs(B=1, N=4, g=2, M=4, S=20, K=3, per_query_head=True, beside=True)
    rest["indices"] = rest["indices"].clamp(0, 2)
    rest["indices"][..., 1], w[..., 1] = 3, 0
    k[:, 3], v[:, 3] = torch.nan, torch.nan
    w[:, :, ::2, 0] = 0
    own = values_and_gradients(op(rest, "triton"), q, k, v, w, *beside)
    rest["indices"] = torch.where(rest["indices"] == 3, -1, rest["indices"])
    assert_same_bits(own, values_and_gradients(op(rest, "triton"), q, k, v, w, *beside))
    assert_budget([q, k.nan_to_num(), v.nan_to_num(), w, *beside], rest)


def test_beside_something_the_largest_score_may_weigh_nothing() -> None:
    """It would overflow against the largest of those that count."""
    (q, k, v, w, *beside), rest = inputs(B=1, N=2, M=2, S=4, K=2, per_query_head=True, g=2, beside=True)
    rest["indices"][:] = torch.arange(2)
    k[:, 1] *= 1000
    w[..., 1] = 0
    assert_budget([q, k, v, w, *beside], rest)
    assert all(x.isfinite().all() for x in values_and_gradients(op(rest, "triton"), q, k, v, w, *beside))


@pytest.mark.parametrize("R", [1, 3])
@pytest.mark.sampled(2)
def test_a_query_head_with_weights_of_its_own_is_as_alone(R: int) -> None:
    """Bit for bit what all heads give where all weigh as it does; gradients of its own query and weights too."""
    (q, k, v, w), rest = inputs(B=1, N=3, R=R, g=3, K=3, S=20, per_query_head=True, lengths=True)
    own, of_own, *_, weights = values_and_gradients(op(rest, "triton"), q, k, v, w)
    for h in (0, 2, 3):
        same = w.unflatten(2, (2, 3))[:, :, :, h % 3]  # of the key/value head: [B, N, J, K]
        out, dq, *_, dw = values_and_gradients(op(rest, "triton"), q, k, v, same)
        assert torch.equal(own[..., h, :], out[..., h, :])
        assert torch.equal(of_own[..., h, :], dq[..., h, :])
        every = weights[:, :, h // 3 * 3 : h // 3 * 3 + 3].sum(2)
        torch.testing.assert_close(every, dw[:, :, h // 3])  # the heads that share a weight are summed


# Bugs of the official kernel (reference/gca.md 2.4)


@pytest.mark.parametrize(
    "sizes",
    [
        {
            "B": 1,
            "R": 65,
            "N": 2,
            "K": 3,
            "S": 20,
            "J": 1,
        },  # rows after the last whole tile stayed uninitialised
        {"B": 1, "K": 3, "M": 3},  # no power of two
        pytest.param({"B": 1, "K": 5, "M": 5}, marks=pytest.mark.slow),
        pytest.param({"B": 1, "K": 6, "M": 6}, marks=pytest.mark.slow),
        {"B": 1, "K": 7, "M": 7},
        {"R": 64, "S": 64, "N": 3, "dtype": torch.float16},
        {"D": 1, "S": 64, "R": 16},  # small heads
        pytest.param({"D": 8, "S": 64, "R": 16}, marks=pytest.mark.slow),
        pytest.param({"D": 16, "S": 64, "R": 16}, marks=pytest.mark.slow),
        {"D": 17, "S": 64, "R": 16},
    ],
    ids=str,
)
@pytest.mark.sampled(4)
def test_sizes_that_the_official_kernel_gets_wrong(sizes: dict[str, Any]) -> None:
    assert_budget(*inputs(**sizes))


@pytest.mark.gpu
def test_more_programs_than_65_535() -> None:
    """Batch times chunks times heads stood on an axis of the grid that has 65,535. (Interpreted: ten minutes.)"""
    tensors, rest = inputs(B=3, N=11_000, R=1, J=2, M=2, S=1, K=1)
    exact = op(rest, "reference")(*(x.double() for x in tensors))
    assert_within_budget(op(rest, "triton")(*tensors), op(rest, "reference")(*tensors), exact)


# What need not be there


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.sampled(3)
def test_nothing_selected_gives_zeros(per_query_head: bool, beside: bool) -> None:
    tensors, rest = inputs(N=2, lengths=True, g=2, per_query_head=per_query_head, beside=beside)
    rest["indices"][0] = -1
    out, dq, *others = values_and_gradients(op(rest, "triton"), *tensors)
    for x in (out[0], dq[0], *(x[0] for x in others)):
        assert torch.equal(x, torch.zeros_like(x))
    assert_budget(tensors, rest)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.sampled(4)
def test_what_does_not_exist_has_no_effect_not_even_as_nan(per_query_head: bool, beside: bool) -> None:
    more: dict[str, Any] = {"per_query_head": per_query_head, "beside": beside}
    tensors, rest = inputs(N=4, M=4, S=20, lengths=True, K=3, g=2, **more)
    rest["indices"][rest["indices"] == 2] = 1  # chunk 2 is read by nobody
    before = values_and_gradients(op(rest, "triton"), *tensors)
    q, k, v, w, *others = (x.clone() for x in tensors)
    absent = torch.arange(20, device=DEVICE) >= rest["lengths"][..., None]
    k[absent], v[absent] = torch.nan, torch.nan
    k[:, 2], v[:, 2] = torch.nan, torch.inf
    w[(rest["indices"] < 0).repeat_interleave(2 if per_query_head else 1, dim=2)] = torch.nan
    assert_same_bits(before, values_and_gradients(op(rest, "triton"), q, k, v, w, *others))


@pytest.mark.parametrize("sizes", [{"B": 0}, {"N": 0}, {"M": 0}])
def test_empty_sizes(sizes: dict[str, int]) -> None:
    tensors, rest = inputs(**({"M": 3} | sizes | {"N": sizes.get("N", 2)}) if "M" not in sizes else {"M": 1})
    if "M" in sizes:
        tensors[1:3] = (x[:, :0] for x in tensors[1:3])
        rest["indices"].fill_(-1)
    for x, like in zip(
        values_and_gradients(op(rest, "triton"), *tensors), (tensors[0], *tensors), strict=True
    ):
        assert torch.equal(x, torch.zeros_like(like))


def test_keys_of_a_memory_seen_head_by_head() -> None:
    """[B, M, J, S, D] through a transpose, and one memory for the whole batch."""
    (q, k, v, w), rest = inputs()
    k, v = (x.transpose(2, 3).contiguous().transpose(2, 3)[:1].expand_as(x) for x in (k, v))
    assert_budget([q, k, v, w], rest)


def test_numbers_of_a_head_apart_from_each_other() -> None:
    tensors, rest = inputs(B=1, N=3)
    wide = [x.repeat_interleave(2, dim=-1) for x in tensors[:3]]
    apart = [x[..., ::2] for x in wide]
    assert apart[0].stride(-1) == 2
    out = op(rest, "triton")
    assert_same_bits(values_and_gradients(out, *tensors), values_and_gradients(out, *apart, tensors[3]))


def test_a_gradient_of_stride_0() -> None:
    """Of a sum: one number for all."""
    tensors, rest = inputs(B=1, N=2)
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = op(rest, "triton")(*leaves)
    expanded = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    assert_same_bits(expanded, torch.autograd.grad(out, leaves, torch.ones_like(out)))


@pytest.mark.parametrize(("implementation", "compiled"), [("torch", True), ("triton", False)])
def test_a_frozen_memory_costs_no_gradient(implementation: str, compiled: bool) -> None:
    (q, k, v, w), rest = inputs(B=1, N=2)
    run = op(rest, implementation)
    if compiled:
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    grad = torch.ones_like(q)
    frozen, every = ([x.clone().requires_grad_() for x in some] for some in ((q, w), (q, k, v, w)))
    ours = torch.autograd.grad(run(frozen[0], k, v, frozen[1]), frozen, grad)
    full = torch.autograd.grad(op(rest, implementation)(*every), every, grad)
    assert torch.equal(ours[0], full[0])
    assert torch.equal(ours[1], full[3])
    only_keys = k.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(run(q, only_keys, v, w), only_keys, grad)[0], full[1])
    chosen = (x[:, :, None].expand(1, 2, 2, 2) for x in (rest["indices"], w))
    call = CrossAttentionCall(q, k, v, *chosen, None, None, None, True, 0.25)
    kept = module._forward(call, implementation, True)[1]
    gradients = module._backward(grad, call, kept, None, implementation, False)
    assert gradients[1].numel() == gradients[2].numel() == 0


# The inverted index


@given(
    st.integers(1, 3), st.integers(1, 9), st.integers(1, 3), st.integers(1, 4), st.integers(1, 6),
    st.integers(1, 7), st.booleans(), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_every_reader_of_a_chunk_is_in_one_part(
    B: int, N: int, J: int, K: int, M: int, per_part: int, per_head: bool, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    own = torch.randint(-1, M, (B, N, J if per_head else 1, K), generator=random)
    table = kernels.invert(own.expand(B, N, J, K), M, per_part)
    heads = J if per_head and J > 1 else 1
    wanted: list[list[int]] = [[] for _ in range(B * M * heads)]
    flat = own.expand(B, N, J, K)[:, :, :heads].flatten().tolist()
    for number, m in enumerate(flat):
        b, j = number // (N * heads * K), number // K % heads
        if m >= 0:
            wanted[(b * M + m) * heads + j].append(number)
    found: list[list[int]] = [[] for _ in wanted]
    slots = set()
    for part, c in enumerate(table.chunk_of.tolist()):
        if c == len(wanted):
            continue
        first = int(table.ends[c - 1]) if c else 0
        parts = int(table.ends[c]) - first
        begin = int(table.starts[c]) + (part - first) * per_part
        end = min(int(table.starts[c + 1]), begin + per_part)
        assert end > begin or parts == 1
        found[c] += table.readers[begin:end].tolist()
        if parts > 1:
            slots.add(int(table.slots_before[c]) + part - first)
    assert found == wanted
    assert slots == set(range(len(slots)))
    assert len(slots) <= 2 * table.readers.numel() // per_part


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("per_part", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_popular_chunk_is_added_up_from_parts(per_part: int, per_head: bool) -> None:
    tensors, rest = inputs(B=1, N=6, R=2, K=3, M=4, g=2, S=16, per_head=per_head)
    rest["indices"][:, 2:, ..., 0] = 1  # long and short lists
    q, k, v, w = tensors
    J, K = 2, 3
    indices, weights = rest["indices"], w
    if not per_head:
        indices, weights = (x[:, :, None].expand(1, 6, J, K) for x in (indices, weights))
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    call = CrossAttentionCall(q, k, v, indices, weights, None, None, None, True, 0.25)
    _, lse = kernels.forward(call, True)
    whole = kernels.backward(grad, call, lse)
    parts = kernels.backward(grad, call, lse, readers_of_a_part=per_part)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = grouped_cross_attention(*leaves, indices, weights.double(), scale=0.25, implementation="reference")
    exact = torch.autograd.grad(out, leaves, grad.double())
    assert torch.equal(whole[0], parts[0])
    for one, several, truth in zip(whole[1:3], parts[1:3], exact[1:], strict=True):
        assert_within_budget(several, one, truth)


# Repeatability


@pytest.mark.gpu  # an interpreted kernel runs in one order
@pytest.mark.parametrize("per_query_head", [False, True])
def test_the_same_bits_again(per_query_head: bool) -> None:
    tensors, rest = inputs(B=1, R=20, N=4, S=20, lengths=True, per_query_head=per_query_head)
    before = values_and_gradients(op(rest, "triton"), *tensors)
    for _ in range(250):
        assert_same_bits(before, values_and_gradients(op(rest, "triton"), *tensors))


@pytest.mark.parametrize("sizes", [{}, {"R": 1, "g": 3, "per_query_head": True}], ids=["chunks", "tokens"])
def test_neighbours_have_no_effect(sizes: dict[str, Any]) -> None:
    """Neither another row of the batch nor another chunk, or token, that reads."""
    tensors, rest = inputs(B=2, N=3, **sizes)
    out = op(rest, "triton")(*tensors)
    q, k, v, w = (x.clone() for x in tensors)
    for x in (q, k, v):
        x[1:] = torch.nan
    q[0, 1:] = torch.nan
    assert torch.equal(op(rest, "triton")(q, k, v, w)[0, 0], out[0, 0])


# Many elements


def test_offsets_inside_a_tile_are_wide_where_they_must_be() -> None:
    def shapes(R: int, S: int) -> tuple[Tensor, Tensor, Tensor]:
        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, device="meta", dtype=torch.bfloat16)

        return empty(1, 4, R, 16, 128), empty(1, 3, S, 4, 128), empty(1, 3, S, 4, 128)

    q, k, v = shapes(64, 64)
    assert not kernels.needs_wide_offsets(q, k, v)
    # the number of chunks does not matter: their offsets have 64 bits always
    assert not kernels.needs_wide_offsets(q.expand(1 << 20, -1, -1, -1, -1), k, v)
    assert kernels.needs_wide_offsets(*shapes(1 << 20, 64))
    assert kernels.needs_wide_offsets(*shapes(64, 1 << 22))
    far_apart = torch.empty_strided((1, 4, 64, 16, 128), (1, 1, 1 << 26, 128, 1), device="meta")
    assert kernels.needs_wide_offsets(far_apart, k, v)
    assert kernels.needs_wide_offsets(q, far_apart, v)
    assert kernels.needs_wide_offsets(q, k, v, far_apart)  # the gradient that comes in


def test_wide_offsets_give_the_same_bits() -> None:
    (q, k, v, w), rest = inputs(R=9, g=2, N=3, S=20, lengths=True, per_query_head=True)
    results = []
    for wide in (False, True):
        call = CrossAttentionCall(q, k, v, rest["indices"], w, rest["lengths"], None, None, True, 0.25)
        out, lse = kernels.forward(call, True, wide=wide)
        results.append([out, lse, *kernels.backward(out, call, lse, wide=wide)])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x.nan_to_num(7), y.nan_to_num(7))  # nothing is kept where nothing was selected


# Decoding


@pytest.mark.parametrize(("K", "beside", "R"), [(1, False, 1), (8, False, 1), (5, True, 3)])
def test_few_queries_split_over_the_chunks(K: int, beside: bool, R: int) -> None:
    tensors, rest = inputs(B=1, N=1, R=R, g=3, J=1, K=K, M=9, S=63, lengths=True, beside=beside)
    assert kernels._parts(1, K) > 1 or K == 1
    assert_budget(tensors, rest)


# The op


@pytest.mark.parametrize(("per_query_head", "beside"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.sampled(4)
def test_torch_compile_does_not_break_on_it(implementation: str, per_query_head: bool, beside: bool) -> None:
    tensors, rest = inputs(B=1, N=2, g=2, per_query_head=per_query_head, beside=beside)
    eager = values_and_gradients(op(rest, implementation), *tensors)
    compiled = torch.compile(op(rest, implementation), fullgraph=True, backend="aot_eager")
    assert_same_bits(eager, values_and_gradients(compiled, *tensors))
    with torch.no_grad():
        assert torch.equal(compiled(*tensors), eager[0])


@pytest.mark.parametrize(
    "implementation",
    ["torch", "torch, beside", "torch, low", "triton", "triton, beside", "triton, half, beside"],
)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.sampled(5)
def test_the_registered_op_keeps_its_promises(implementation: str, keep: bool) -> None:
    dtype = torch.bfloat16 if "low" in implementation else torch.float32
    dtype = torch.float16 if "half" in implementation else dtype
    (q, k, v, w), rest = inputs(g=2, per_query_head=True, lengths=True, dtype=dtype)
    chosen = rest["indices"].clamp(min=0), w, rest["lengths"]
    beside = (q.clone(), q[..., 0].float()) if "beside" in implementation else (None, None)
    name = implementation.split(",")[0]
    arguments = (q, k, v, *chosen, *beside, True, 0.25, name, keep)
    registered = torch.ops.trailmark.grouped_cross_attention.default
    if not keep:
        torch.library.opcheck(registered, arguments, test_utils=("test_schema", "test_faketensor"))
        return
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(
        registered,
        (*leaves, *arguments[3:]),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_checkpointing_gives_the_same_bits() -> None:
    tensors, rest = inputs(B=1, N=2)

    def checkpointed(*leaves: Tensor) -> Tensor:
        out = torch.utils.checkpoint.checkpoint(op(rest, "triton"), *leaves, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out

    plain = values_and_gradients(op(rest, "triton"), *tensors)
    assert_same_bits(plain, values_and_gradients(checkpointed, *tensors))


@pytest.mark.skipif(GPU, reason="values are checked on a CPU")
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_a_wrong_chunk_number_is_told_in_a_compiled_graph_too(implementation: str) -> None:
    """It would be a chunk of the next row."""
    tensors, rest = inputs()
    rest["indices"][0, 0, 0] = 6
    compiled = torch.compile(op(rest, implementation), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"^indices: .*below M = 6"):
        compiled(*tensors)


# Errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, w: (q.double(), k.double(), v.double(), w), "implementation: .*float64.* Convert"),
        (lambda q, k, v, w: (q, k.half(), v, w), "implementation: .*float32, torch.float16.* Convert"),
        (lambda q, k, v, w: (q, k, v, w.double()), "implementation: .*weights torch.float64"),
        (
            lambda q, k, v, w: (q, k, v, w, q, q[..., 0].double()),
            r"implementation: .*beside\[1\] torch.float64",
        ),
        (
            lambda q, k, v, w: (*(x.repeat(1, 1, 1, 1, 17) for x in (q, k, v)), w),
            "implementation: .*D is 272.* at most 256",
        ),
    ],
)
def test_what_the_kernels_do_not_take(change: Callable[..., Any], message: str) -> None:
    tensors, rest = inputs()
    with pytest.raises(ValueError, match=message):
        op(rest, "triton")(*change(*tensors))


def test_errors_come_at_once() -> None:
    tensors, rest = inputs()
    times = []
    for _ in range(30):
        began = time.process_time()
        with pytest.raises(ValueError, match=r"^q: "):
            op(rest, "triton")(tensors[0][..., :1, :], *tensors[1:])
        times.append(time.process_time() - began)
    assert sorted(times)[15] < 1e-3  # seconds


@pytest.mark.gpu
def test_no_synchronisation_on_a_gpu() -> None:
    tensors, rest = inputs(lengths=True)
    values_and_gradients(op(rest, "triton"), *tensors)  # compiled
    leaves = [x.detach().requires_grad_() for x in tensors]
    torch.cuda.set_sync_debug_mode("error")
    try:
        op(rest, "triton")(*leaves).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str
)
@pytest.mark.parametrize(
    "sizes",
    [{"R": 16}, {"R": 16, "beside": True}, {"R": 1, "g": 4, "per_query_head": True, "beside": True}],
    ids=str,
)
@pytest.mark.sampled(6)
def test_weights_of_float32(sizes: dict[str, Any], dtype: torch.dtype) -> None:
    """As in a model: scores and weights are float32 whatever the rest is."""
    tensors, rest = inputs(dtype=dtype, S=20, N=4, K=3, **sizes)
    tensors[3] = tensors[3].float()
    assert_budget(tensors, rest)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
def test_the_kernels_compile_for_an_h200_ahead_of_time() -> None:
    """In a process of its own, which does not interpret: no spills, and within the shared memory."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).parents[3] / "benchmarks" / "sm90.py"
    done = subprocess.run(
        [sys.executable, str(script), "--quick"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wgmma" in done.stdout
