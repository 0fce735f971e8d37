"""GCA in slabs on a CPU: bits that repeat, memory that is bounded, tables that are not copied."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.budgets import (
    assert_equals_the_oracle,
    assert_repeats_bit_for_bit,
    assert_same_bits,
    values_and_gradients,
)
from tests.ops.gca.test_api import Case, gca
from tests.ops.memory_use import Largest
from trailmark.ops.gca import torch_path as module
from trailmark.ops.gca.rows import Table


def small_slabs(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    monkeypatch.setattr(module, "_SLAB_ELEMENTS", elements)


def in_larger_buffer(x: Tensor, dim: int, extra: int = 1) -> Tensor:
    size = list(x.shape)
    size[dim] += extra
    return torch.full(size, torch.nan, dtype=x.dtype).narrow(dim, extra, x.shape[dim]).copy_(x)


def head_major(x: Tensor, dim: int | None = None, extra: int = 1) -> Tensor:
    x = x.transpose(2, 3).contiguous()  # [B, M, J, S, D]
    return (x if dim is None else in_larger_buffer(x, dim, extra)).transpose(2, 3)


LAYOUTS = {
    "some chunks of a buffer": lambda x: in_larger_buffer(x, 1),
    "some features": lambda x: in_larger_buffer(x, 4),
    "features first": lambda x: x.movedim(4, 0).contiguous().movedim(0, 4),
    "head-major": head_major,
    "head-major, some chunks of a buffer": lambda x: head_major(x, 1),
    "head-major, some heads": lambda x: head_major(x, 2),
    "head-major, some keys": lambda x: head_major(x, 3),
    "head-major, half the keys": lambda x: head_major(x, 3, x.shape[2]),
    "head-major, some features": lambda x: head_major(x, 4),
    "head-major, half the features": lambda x: head_major(x, 4, x.shape[4]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_repeat_bit_for_bit_on_two_threads(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many chunks read the same two: their gradients are long sums."""
    small_slabs(monkeypatch, 1 << 16)
    inputs, rest = Case(N=32, R=16, M=2, S=16, K=4, D=16, with_lengths=True).make()
    inputs = [x.to(dtype) for x in inputs]
    assert_repeats_bit_for_bit(partial(gca, **rest), *inputs)


@pytest.mark.parametrize("layout", ["as it is", *LAYOUTS])
@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize(("dtype", "S"), [(torch.float32, 3), (torch.bfloat16, 1)])
def test_heads_put_together_slab_by_slab_equal_a_copy(
    layout: str, per_head: bool, dtype: torch.dtype, S: int
) -> None:
    """A chunk's heads lie apart in memory: whole chunks are read where all heads read the same."""
    (q, k, v, weights), rest = Case(M=5, S=S, K=3, D=4, per_head=per_head, with_lengths=True).make()
    q, k, v, weights = (x.to(dtype) for x in (q, k, v, weights))
    expected = values_and_gradients(partial(gca, **rest), q, head_major(k), head_major(v), weights)
    moved = [x if layout == "as it is" else LAYOUTS[layout](x) for x in (k, v)]
    assert_same_bits(values_and_gradients(partial(gca, **rest), q, *moved, weights), expected)


def test_tables_are_not_copied_where_rows_can_be_read() -> None:
    x = torch.randn(2, 5, 3, 2, 4)  # [B, M, S, J, D]
    by_head, one_head = head_major(x), torch.randn(2, 5, 3, 1, 4)
    for table, of in (
        (Table(x, by_chunk=True), x),
        (Table(x[:1].expand(3, -1, -1, -1, -1), by_chunk=True), x),
        (Table(by_head), by_head),
        (Table(by_head, by_chunk=True), by_head),
        (Table(by_head[:, 2:]), by_head[:, 2:]),
        (Table(one_head), one_head),
        (Table(one_head[1:]), one_head[1:]),
    ):
        assert table.rows.data_ptr() == of.data_ptr()
    assert Table(x).rows.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("off_by_one", [True, False])
def test_what_a_neighbour_in_the_slab_lacks_changes_no_bit(off_by_one: bool) -> None:
    """Slabs without a -1 and without a short chunk leave out what those need."""
    (q, k, v, weights), rest = Case(B=1, N=3, M=6, S=8, K=2, D=8, off_by_one=off_by_one).make()
    q, k, v, weights = (x.float() for x in (q, k, v, weights))
    rest["indices"] = torch.tensor([[[0, 1], [2, 3], [4, 5]]])
    rest["lengths"] = torch.tensor([[8, 8, 8, 8, 8, 8]])
    whole = values_and_gradients(partial(gca, **rest), q, k, v, weights)
    rest["indices"] = torch.tensor([[[0, 1], [2, -1], [4, 5]]])
    rest["lengths"] = torch.tensor([[8, 8, 3, 8, 8, 8]])
    part = values_and_gradients(partial(gca, **rest), q, k, v, weights)
    for x, y, own in zip(whole, part, ([0, 2], [0, 2], [0, 1, 4, 5], [0, 1, 4, 5], [0, 2]), strict=True):
        assert torch.equal(x[:, own], y[:, own])
    assert not torch.equal(whole[0], part[0])


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("off_by_one", [True, False])
def test_no_fresh_memory_is_read(off_by_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    small_slabs(monkeypatch, 1000)
    inputs, rest = Case(N=7, R=3, M=5, S=4, K=3, with_lengths=True, off_by_one=off_by_one).make()
    assert_equals_the_oracle(
        *(partial(gca, implementation=name, **rest) for name in ("torch", "reference")), *inputs
    )


@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_nothing_is_k_fold_while_it_runs(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_slabs(monkeypatch, 1 << 14)
    inputs, rest = Case(B=1, N=60, R=8, g=1, D=16, M=60, S=8, K=8).make()
    inputs = [x.clone() for x in inputs]  # k and v are one tensor there
    with Largest() as largest:
        values_and_gradients(partial(gca, implementation=implementation, **rest), *inputs)
    one, many = inputs[1].nbytes, 8 * inputs[1].nbytes
    assert largest.bytes >= many if implementation == "reference" else largest.bytes <= one
