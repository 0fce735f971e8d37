"""Attention inside many small blocks: ``scaled_dot_product_attention``, or on a CPU two batched GEMMs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from trailmark.ops.arguments import arithmetic_dtype, without_autocast

# Up to this many scores per block and head, the CPU's SDPA spends most of its time around the arithmetic:
# 1.5x (forward) to 2x (backward) that of GEMMs over all blocks at once (benchmarks/README.md).
_SMALL_BLOCK = 64 * 128
_SLAB_ELEMENTS = 1 << 20  # scores that stand in memory at a time where the log-sum-exp alone is wanted


@without_autocast
def block_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale q k^T + mask) v within each block; scores and softmax in float32 or wider.

    Args:
        q: [b, c, H, D]. k, v: [b, p, J, D]; query head h uses key/value head h // (H // J).
        mask: additive, or bool (True is seen), broadcastable to [b, H, c, p]; every row must see some key. It
            gets no gradient. On CUDA, low precision with an additive mask is computed in float32, slower.

    Returns:
        [b, c, H, D] in the dtype of q.
    """
    c, p = q.shape[1], k.shape[1]
    additive = mask is not None and mask.dtype != torch.bool
    dtype = attention_dtype(q, k, v, biased=additive)
    if mask is not None and not additive and q.device.type == "cpu":
        mask = torch.where(mask, torch.zeros((), dtype=dtype), -torch.inf)
    small = q.device.type == "cpu" and c * p <= _SMALL_BLOCK
    if small and (mask is None or mask.dim() < 4):
        return _BatchedGemms.apply(q, k, v, mask, scale)
    queries, keys, values = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    if mask is not None:
        mask = mask if mask.dtype == torch.bool else mask.to(dtype)
        mask = mask.expand(q.shape[0], q.shape[2], c, p) if mask.dim() < 4 else mask
    out = F.scaled_dot_product_attention(
        queries, keys, values, mask, scale=scale, enable_gqa=q.shape[2] != k.shape[2]
    )
    return out.transpose(1, 2).to(q.dtype)


def attention_dtype(q: Tensor, k: Tensor, v: Tensor, biased: bool) -> torch.dtype:
    """What ``scaled_dot_product_attention`` gets: one low precision stays on CUDA, else float32 or wider.

    All its CUDA kernels have scores and softmax in float32 inside, but a bias must be of the inputs' dtype, and
    ALiBi's would be rounded.
    """
    if q.device.type == "cuda" and not biased and q.dtype == k.dtype == v.dtype:
        return q.dtype
    return arithmetic_dtype(q, k, v)


def block_lse(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The log-sum-exp of the scores of :func:`block_attention`, [b, c, H], in float32 or wider: -inf for no key."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(
            mask, torch.zeros((), dtype=arithmetic_dtype(q, k), device=mask.device), -torch.inf
        )
    out: Tensor = _BlockLse.apply(q, k, mask, scale)
    return out


class _BlockLse(torch.autograd.Function):
    """Scores stand in memory for a slab of blocks at a time; the backward computes them again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        (b, c, H, _), dtype = q.shape, arithmetic_dtype(q, k)
        lse = q.new_empty((b, H, c), dtype=dtype)
        for rows, scores in _scores(q, k, mask, scale):
            torch.logsumexp(scores, -1, out=lse[rows])
        ctx.save_for_backward(q, k, mask, lse)
        ctx.scale = scale
        return lse.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, mask, lse = ctx.saved_tensors
        (_, c, H, D), (p, J), dtype = q.shape, k.shape[1:3], lse.dtype
        dq, dk = torch.empty_like(q, dtype=dtype), torch.empty_like(k, dtype=dtype)
        empty = lse == -torch.inf
        lse = lse.masked_fill(empty, 0)
        grad = (grad.transpose(1, 2) * ctx.scale).masked_fill(empty, 0)  # [b, H, c]
        with torch.autocast(grad.device.type, enabled=False):  # the backward runs outside the op
            for rows, scores in _scores(q, k, mask, ctx.scale):
                ds = scores.sub_(lse[rows][..., None]).exp_().mul_(grad[rows][..., None])
                ds = ds.view(-1, J, H // J * c, p)
                of_queries = (ds @ k[rows].to(dtype).transpose(1, 2)).view(-1, H, c, D)
                dq[rows] = of_queries.transpose(1, 2)
                queries = q[rows].to(dtype).transpose(1, 2).reshape(-1, J, H // J * c, D)
                dk[rows] = (ds.transpose(2, 3) @ queries).transpose(1, 2)
        return dq.to(q.dtype), dk.to(k.dtype), None, None


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Iterator[tuple[slice, Tensor]]:
    """Slabs of blocks, and their scores [n, H, c, p]."""
    (b, c, H, D), (p, J), dtype = q.shape, k.shape[1:3], arithmetic_dtype(q, k)
    # a GPU wants many at once
    elements = _SLAB_ELEMENTS if q.device.type == "cpu" else 64 * _SLAB_ELEMENTS
    step = max(1, elements // max(1, H * c * p))
    for first in range(0, b, step):
        rows = slice(first, min(first + step, b))
        n = rows.stop - first
        queries = q[rows].to(dtype).transpose(1, 2).reshape(n, J, H // J * c, D) * scale
        scores = (queries @ k[rows].to(dtype).permute(0, 2, 3, 1)).view(n, H, c, p)
        if mask is not None:
            scores.add_(mask[rows] if mask.dim() == 4 and len(mask) == b else mask)
        yield rows, scores


class _BatchedGemms(torch.autograd.Function):
    """All blocks at once; keeps the probabilities, b * H * c * p numbers."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        dtype, J = arithmetic_dtype(q, k, v), k.shape[2]
        b, c, H, D = q.shape
        queries, keys, values = _fold(q, J, dtype).mul(scale), _fold(k, J, dtype), _fold(v, J, dtype)
        scores = torch.bmm(queries, keys.transpose(1, 2)).view(b, H, c, k.shape[1])
        if mask is not None:
            scores += mask
        probabilities = torch.softmax(scores, -1).view(b * J, H // J * c, k.shape[1])
        out = torch.bmm(probabilities, values)
        ctx.save_for_backward(queries, keys, values, probabilities)
        ctx.scale, ctx.shape, ctx.dtypes = scale, (b, c, H, D, J), (q.dtype, k.dtype, v.dtype)
        return _unfold(out, b, H, c).to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, probabilities = ctx.saved_tensors
        b, c, H, _, J = ctx.shape
        p = keys.shape[1]
        grad = _fold(grad, J, queries.dtype)
        with torch.autocast(grad.device.type, enabled=False):  # the backward runs outside the op
            dv = torch.bmm(probabilities.transpose(1, 2), grad)
            ds = torch.bmm(grad, values.transpose(1, 2))
            inner = torch.linalg.vecdot(ds, probabilities)[..., None]
            ds.sub_(inner).mul_(probabilities)
            dq = torch.bmm(ds, keys).mul_(ctx.scale)
            dk = torch.bmm(ds.transpose(1, 2), queries)  # the queries carry the scale already
        of_q, of_k, of_v = ctx.dtypes
        return (
            _unfold(dq, b, H, c).to(of_q),
            _unfold(dk, b, J, p).to(of_k),
            _unfold(dv, b, J, p).to(of_v),
            None,
            None,
        )


def _fold(x: Tensor, J: int, dtype: torch.dtype) -> Tensor:
    """[b, c, heads, D] -> [b * J, heads / J * c, D]."""
    b, c, heads, D = x.shape
    return x.transpose(1, 2).to(dtype).reshape(b * J, heads // J * c, D)


def _unfold(x: Tensor, b: int, heads: int, c: int) -> Tensor:
    """[b * J, heads / J * c, D] -> [b, c, heads, D]."""
    return x.view(b, heads, c, x.shape[-1]).transpose(1, 2)
