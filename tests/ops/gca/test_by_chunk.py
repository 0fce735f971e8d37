"""GCA chunk by chunk: the same function however tokens are laid out in tiles, groups and slabs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.budgets import (
    assert_equals_the_oracle,
    assert_low_precision_within_budget,
    assert_repeats_bit_for_bit,
    assert_same_bits,
    two_threads,
    values_and_gradients,
)
from tests.ops.gca.test_api import Case, cases, gca
from tests.ops.gca.test_torch_path import LAYOUTS
from tests.ops.memory_use import Largest
from trailmark.ops.gca import by_chunk as module


@contextmanager
def chunk_by_chunk(case: Case, tile: int = 3, group: int = 1 << 18, slab: int = 1 << 22) -> Iterator[None]:
    """Whatever the shapes, with tiles (of so many tokens), groups and slabs of such sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "pays", lambda call: call.k.numel() > 0)
        patch.setattr(module, "_TILE_ROWS", (tile * case.g * case.R,))
        patch.setattr(module, "_GROUP_ELEMENTS", group)
        patch.setattr(module, "_SLAB_ELEMENTS", slab)
        yield


sizes = st.tuples(st.integers(1, 9), st.integers(1, 2000), st.integers(1, 2000))


@settings(max_examples=40)
@given(cases(6), sizes)
@example(Case(N=40, R=1, g=4, M=5, S=7, K=3, with_lengths=True, per_head=True, beside=True), (9, 900, 700))
@example(Case(N=40, R=1, g=4, M=5, S=7, K=3, per_head=True, per_query_head=True, beside=True), (2, 1, 1))
@example(Case(N=40, R=2, g=2, M=9, K=4, with_lengths=True, off_by_one=False), (5, 900, 700))
@example(Case(N=20, M=1, K=5, S=1, with_lengths=True, seed=1), (9, 1, 300))
def test_equals_the_oracle_in_float64(case: Case, sizes: tuple[int, int, int]) -> None:
    inputs, rest = case.make()
    with chunk_by_chunk(case, *sizes):
        assert_equals_the_oracle(
            *(partial(gca, implementation=name, **rest) for name in ("torch", "reference")), *inputs
        )


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("off_by_one", [True, False])
def test_gradcheck(beside: bool, off_by_one: bool) -> None:
    case = Case(B=1, N=4, R=1, g=2, M=2, K=3, per_head=True, with_lengths=True)
    case = replace(case, per_query_head=beside, beside=beside, off_by_one=off_by_one)
    inputs, rest = case.make()
    with chunk_by_chunk(case, 2, 60, 20):
        torch.autograd.gradcheck(partial(gca, **rest), [x.requires_grad_() for x in inputs], fast_mode=True)


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sharpness", [1, 4])
def test_error_budget(dtype: torch.dtype, beside: bool, sharpness: int) -> None:
    case = Case(
        N=50, R=1, g=3, D=16, M=10, S=17, K=6, with_lengths=True, per_head=True, beside=beside, seed=3
    )
    (q, k, v, *others), rest = case.make()
    rounded = [sharpness * q.to(dtype), k.to(dtype), v.to(dtype), *(x.float() for x in others)]
    fast, oracle = (partial(gca, implementation=name, **rest) for name in ("torch", "reference"))
    with chunk_by_chunk(case):
        assert_low_precision_within_budget(fast, oracle, *rounded)


def test_few_tokens_many_rows_and_chunks_without_readers_are_read_token_by_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = list[int]()
    plain = module.forward
    monkeypatch.setattr(module, "forward", lambda call, keep: calls.append(1) or plain(call, keep))

    def taken(case: Case) -> bool:
        inputs, rest = case.make()
        calls.clear()
        gca(*inputs, **rest)
        return bool(calls)

    one = Case(N=64, R=1, M=2, S=4, K=2, per_head=True)
    assert taken(one)
    assert taken(replace(one, R=4, g=4))
    assert taken(replace(one, J=1, per_head=False))
    assert not taken(replace(one, N=63))
    assert not taken(replace(one, S=3))
    assert not taken(replace(one, M=0))
    assert not taken(replace(one, R=24, g=1))
    assert not taken(replace(one, g=5))
    assert not taken(replace(one, per_head=False))


@pytest.mark.parametrize("beside", [True, False])
def test_few_tokens_of_a_batch_read_a_large_table(beside: bool) -> None:
    """Many chunks have no reader, and some selections nothing."""
    case = Case(B=2, N=64, R=1, M=1000, S=4, K=2, per_head=True, with_lengths=True, beside=beside)
    inputs, rest = case.make()
    rest["indices"][torch.rand(rest["indices"].shape, generator=torch.Generator().manual_seed(1)) < 0.3] = -1
    assert_equals_the_oracle(
        *(partial(gca, implementation=name, **rest) for name in ("torch", "reference")), *inputs
    )


def test_what_is_hardly_read_beside_a_window_keeps_its_gradient() -> None:
    inputs, rest = Case(B=1, N=64, R=1, M=3, S=4, K=2, per_head=True, beside=True).make()
    inputs = [x.float() for x in inputs]
    inputs[5] = inputs[5] + 25  # the window's share: all but about e^-25
    fast, oracle = (partial(gca, implementation=name, **rest) for name in ("torch", "reference"))
    assert_low_precision_within_budget(fast, oracle, *inputs)


@pytest.mark.parametrize(("S", "D"), [(7, 16), (1024, 64), (64, 256)])
def test_the_future_changes_no_bit_on_two_threads(S: int, D: int) -> None:
    """Nor how many tiles it has: BLAS makes one product in another way than several."""
    case = Case(B=1, N=64, R=1, g=4, J=1, M=5, S=S, K=2, D=D, per_head=True, beside=True)
    inputs, rest = case.make()
    inputs = [x.float() for x in inputs]
    with two_threads():
        before = gca(*inputs, **rest)
        for seed in range(1, 4):
            others, of_others = replace(case, seed=seed).make()
            q, indices = inputs[0].clone(), rest["indices"].clone()
            q[:, 32:], indices[:, 32:] = others[0][:, 32:].float(), of_others["indices"][:, 32:]
            after = gca(q, *inputs[1:], **rest | {"indices": indices})
            assert torch.equal(after[:, :32], before[:, :32])
            assert not torch.equal(after, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("g", [1, 2, 3, 4, 6, 8, 12, 16])
@pytest.mark.parametrize("beside", [True, False])
def test_a_token_gets_the_same_bits_in_whatever_company(dtype: torch.dtype, g: int, beside: bool) -> None:
    """Its gradient, too. Others stand before it in its tiles, or in tiles of other chunks."""
    case = Case(N=80, R=1, g=g, M=6, S=7, K=3, D=16, per_head=True, with_lengths=True, beside=beside)
    inputs, rest = case.make()
    other, of_other = replace(case, seed=1).make()
    inputs, other = ([x.to(dtype) for x in own] for own in (inputs, other))
    own = torch.arange(80) % 3 == 1
    mixed = [
        x if i in (1, 2) else torch.where(_rows(own, x), x, y)
        for i, (x, y) in enumerate(zip(inputs, other, strict=True))
    ]
    changed = rest | {
        "indices": torch.where(_rows(own, rest["indices"]), rest["indices"], of_other["indices"])
    }
    alone, among = (
        values_and_gradients(partial(gca, **r), *x) for r, x in ((rest, inputs), (changed, mixed))
    )
    for i in (0, 1, *range(4, len(alone))):
        assert torch.equal(alone[i][:, own], among[i][:, own])
        assert not torch.equal(alone[i], among[i])


def _rows(own: Tensor, x: Tensor) -> Tensor:
    return own.view(1, -1, *[1] * (x.dim() - 2))


@pytest.mark.parametrize("beside", [True, False])
def test_what_a_token_or_an_absent_key_has_wrong_stays_there(beside: bool) -> None:
    case = Case(B=1, N=70, R=1, g=3, M=3, S=4, K=2, per_head=True, beside=beside, seed=2)
    (q, k, v, *others), rest = case.make()
    rest["lengths"] = torch.tensor([[4, 0, 2]])
    for x in (k, v):
        x[:, 1], x[:, 2, 2:] = torch.nan, torch.inf
    values = values_and_gradients(partial(gca, **rest), q, k, v, *others)
    assert all(bool(x.isfinite().all()) for x in values)
    assert all(bool((x[:, 1] == 0).all() and (x[:, 2, 2:] == 0).all()) for x in values[2:4])
    q[0, 7] = torch.nan
    spoiled, rest_of_it = gca(q, k, v, *others, **rest), torch.arange(70) != 7
    assert_same_bits([spoiled[:, rest_of_it]], [values[0][:, rest_of_it]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_repeat_bit_for_bit_on_two_threads(dtype: torch.dtype) -> None:
    inputs, rest = Case(
        N=100, R=1, g=4, M=3, S=16, K=4, D=16, per_head=True, with_lengths=True, beside=True
    ).make()
    inputs = [x.to(dtype) for x in inputs]
    assert_repeats_bit_for_bit(partial(gca, **rest), *inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_layouts(layout: str, dtype: torch.dtype) -> None:
    (q, k, v, weights), rest = Case(N=70, R=1, M=4, S=5, D=4, per_head=True, with_lengths=True).make()
    q, k, v, weights = (x.to(dtype) for x in (q, k, v, weights))
    expected = values_and_gradients(partial(gca, **rest), q, k, v, weights)
    moved = [LAYOUTS[layout](x) for x in (k, v)]
    assert_same_bits(values_and_gradients(partial(gca, **rest), q, *moved, weights), expected)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("beside", [True, False])
def test_no_fresh_memory_is_read(beside: bool) -> None:
    case = Case(N=30, R=1, M=5, S=4, K=3, with_lengths=True, beside=beside)
    inputs, rest = case.make()
    with chunk_by_chunk(case, group=300, slab=1000):
        assert_equals_the_oracle(
            *(partial(gca, implementation=name, **rest) for name in ("torch", "reference")), *inputs
        )


@pytest.mark.parametrize("M", [4, 1000])
@pytest.mark.sampled(2)
def test_what_stands_in_memory_does_not_grow_with_the_tokens(M: int) -> None:
    """However few of them read a chunk."""

    def largest(N: int) -> int:
        case = Case(B=1, N=N, R=1, D=16, M=M, S=8, K=4, per_head=True, beside=True)
        inputs, rest = case.make()
        with chunk_by_chunk(case, slab=1 << 12), Largest() as largest:
            values_and_gradients(partial(gca, **rest), *inputs)
        return largest.bytes - max(x.nbytes for x in inputs)

    assert largest(2048) <= max(0, largest(256))
