"""Scores of chosen landmarks in slabs: the plain products, bit for bit, and repeatable gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.budgets import (
    assert_all_same_in_float64,
    assert_low_precision_within_budget,
    assert_repeats_bit_for_bit,
    assert_same_bits,
    values_and_gradients,
)
from trailmark.ops import select_chunks
from trailmark.ops.selection import row_scores as module
from trailmark.ops.selection.row_scores import row_scores

ROWS = torch.randint(-1, 9, (7, 3), generator=torch.Generator().manual_seed(0))


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(n, 5, dtype=torch.float64, generator=random).to(dtype) for n in (7, 9)]


def plain(query: Tensor, table: Tensor) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    picked = table.to(wide).index_select(0, ROWS.clamp(min=0).flatten()).view(7, 3, 5)
    return (query.to(wide)[:, None] * picked).sum(-1).masked_fill(ROWS < 0, 0)


@pytest.fixture(params=[1, 30, 1000])
def slabs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLAB_ELEMENTS", request.param)


@pytest.mark.usefixtures("slabs")
def test_equals_the_plain_products() -> None:
    query, table = inputs()
    ours = values_and_gradients(lambda q, t: row_scores(q, t, ROWS), query, table)
    assert_all_same_in_float64(ours, values_and_gradients(plain, query, table))
    leaves = [x.requires_grad_() for x in (query, table)]
    torch.autograd.gradcheck(lambda q, t: row_scores(q, t, ROWS), leaves)
    with torch.no_grad():
        assert torch.equal(row_scores(*leaves, ROWS), plain(*leaves))


@pytest.mark.usefixtures("slabs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_budget(dtype: torch.dtype) -> None:
    assert_low_precision_within_budget(lambda q, t: row_scores(q, t, ROWS), plain, *inputs(dtype))


def test_what_stands_for_nothing_has_no_effect_as_nan() -> None:
    query, table = inputs()
    rows = torch.tensor([[3, -1]] * 7)
    table[0] = torch.nan
    for x in values_and_gradients(lambda q, t: row_scores(q, t, rows), query, table):
        assert x.isfinite().all()


@pytest.mark.parametrize("J", [1, 2])
@pytest.mark.parametrize("shared", [True, False])
def test_selection_in_slabs_equals_the_plain_selection(
    J: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trailmark.ops.selection import api as selection

    random = torch.Generator().manual_seed(2)
    query = torch.randn(2, 4, J, 6, dtype=torch.float64, generator=random)
    table = torch.randn(1 if shared else 2, 5, J, 6, dtype=torch.float64, generator=random)
    indices = torch.tensor([[0, 4], [1, -1], [-1, -1], [2, 3]])[None, :, None].expand(2, 4, J, 2)

    def chosen(query: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        table = table.expand(2, -1, -1, -1) if shared else table
        selection = select_chunks(query, table, 2, torch.tensor([5] * 4), indices=indices)
        return selection.weights, selection.scores.masked_fill(indices < 0, 0)

    expected = values_and_gradients(chosen, query, table)
    monkeypatch.setattr(selection, "SLAB_ELEMENTS", 0)
    monkeypatch.setattr(module, "SLAB_ELEMENTS", 20)
    called = []
    monkeypatch.setattr(selection, "row_scores", lambda *args: called.append(1) or row_scores(*args))
    values = values_and_gradients(chosen, query, table)
    assert called
    assert_same_bits(values[:2], expected[:2])
    assert_all_same_in_float64(values[2:], expected[2:])


def test_gradients_repeat_bit_for_bit_on_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query reads the same rows: their gradients are sums of 500 products."""
    monkeypatch.setattr(module, "SLAB_ELEMENTS", 1 << 16)
    random = torch.Generator().manual_seed(3)
    query, table = torch.randn(500, 64, generator=random), torch.randn(8, 64, generator=random)
    rows = torch.randint(0, 8, (500, 8), generator=random)
    assert_repeats_bit_for_bit(lambda q, t: row_scores(q, t, rows), query, table)


def test_a_memory_that_learns_nothing_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    query, table = torch.randn(6, 8, requires_grad=True), torch.randn(1000, 8)
    rows, made, zeros = torch.randint(1000, (6, 4)), list[Any](), torch.zeros
    scores = row_scores(query, table, rows)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", lambda *size, **how: made.append(size) or zeros(*size, **how))
        scores.sum().backward()
    assert [tuple(size[0]) for size in made] == [(6, 8)]
    assert query.grad is not None
    assert torch.allclose(query.grad, table[rows].sum(1), atol=1e-5)
