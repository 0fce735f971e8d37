"""Products of queries with a few chosen rows of a table, on a CPU, without K-fold copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trailmark.ops.arguments import arithmetic_dtype

# Queries are walked in slabs whose gathered rows have about this many elements: they stay in a core's caches.
SLAB_ELEMENTS = 1 << 19


def row_scores(query: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    """Products [P, K] of queries [P, E] with rows [P, K] of a table [m, E]; 0 for row -1. All on a CPU.

    Nothing gathered is kept for the backward, which gathers again and repeats bit for bit (guarantee 7).
    """
    if torch.is_grad_enabled() and (query.requires_grad or table.requires_grad):
        return _RowScores.apply(query, table, rows)
    return _forward(query, table, rows)


def _forward(query: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    dtype = arithmetic_dtype(query, table)
    scores = torch.empty(rows.shape, dtype=dtype)
    for slab, picked in _picked(table, rows, dtype):
        torch.sum(picked.mul_(query[slab, None]), -1, out=scores[slab])
    return scores


class _RowScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(query, table, rows)
        return _forward(query, table, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        query, table, rows = ctx.saved_tensors
        grad = grad.masked_fill(rows < 0, 0)
        dquery = torch.zeros(query.shape, dtype=grad.dtype)
        # of a memory that learns nothing there is none: it may have millions of rows
        dtable = torch.zeros(table.shape, dtype=grad.dtype) if ctx.needs_input_grad[1] else None
        for slab, picked in _picked(table, rows, grad.dtype):
            weight = grad[slab, :, None]  # [p, K, 1]
            torch.sum(picked.mul_(weight), 1, out=dquery[slab])
            if dtable is not None:
                torch.mul(weight, query[slab, None].to(grad.dtype), out=picked)
                dtable.index_add_(0, rows[slab].clamp(min=0).reshape(-1), picked.flatten(0, 1))
        return dquery.to(query.dtype), None if dtable is None else dtable.to(table.dtype), None


def _picked(table: Tensor, rows: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Slabs of queries and the rows of each, [p, K, E] in one buffer; zeros for row -1: row 0 may hold NaN."""
    (P, K), E = rows.shape, table.shape[1]
    step = max(1, min(P, SLAB_ELEMENTS // max(1, K * E)))
    buffer = torch.empty(step * K, E, dtype=dtype)
    for first in range(0, P, step):
        slab = slice(first, min(first + step, P))
        numbers = rows[slab].reshape(-1)
        picked = buffer[: len(numbers)]
        if table.dtype == dtype:
            torch.index_select(table, 0, numbers.clamp(min=0), out=picked)
        else:
            picked.copy_(table.index_select(0, numbers.clamp(min=0)))
        picked.index_fill_(0, (numbers < 0).nonzero()[:, 0], 0)
        yield slab, picked.view(-1, K, E)
