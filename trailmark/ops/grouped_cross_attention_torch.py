"""Grouped Cross-Attention in PyTorch: slabs of reading chunks whose working memory stays in a core's caches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trailmark.ops.arguments import arithmetic_dtype

# Reading chunks are walked in slabs whose gathered keys, values and scores have about this many elements:
# small enough for a core's caches, large enough to keep the GEMMs busy.
_SLAB_ELEMENTS = 1 << 20


def forward(
    q: Tensor,  # [B, N, R, H, D]
    k: Tensor,  # [B, M, S, J, D]
    v: Tensor,
    indices: Tensor,  # [B, N, J, K]
    weights: Tensor,  # [B, N, J, K]
    lengths: Tensor | None,  # [B, M]
    off_by_one: bool,
    scale: float,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """The output, and with ``keep`` one log-sum-exp per row, head and chunk for the backward (else empty)."""
    slabs = _Slabs(q, k, v, indices, weights, lengths, scale)
    # ONE buffer outside the slabs for each result: its size is that of q, not K times it
    out = torch.zeros(slabs.query_shape, dtype=q.dtype, device=q.device)  # [B N, R, J, g, D]
    lse = torch.empty(slabs.lse_shape if keep else (0,), dtype=slabs.dtype, device=q.device)
    for rows in slabs:
        scores = slabs.scores(rows)  # [c J, g R, K, S]
        top = scores.amax(-1, keepdim=True)
        # off by one: the running maximum starts at 0 and the running sum at 1 (Eq. 3)
        top = top.clamp_(min=0) if off_by_one else top.masked_fill_(top == -torch.inf, 0)
        exponentials = scores.sub_(top).exp_()
        total = exponentials.sum(-1, keepdim=True)
        if off_by_one:
            total = total + (-top).exp()
        empty = total == 0
        total = total.masked_fill(empty, 1)
        if keep:
            lse[rows] = (top + total.log()).view(-1, *slabs.lse_shape[1:])
        # the weights go into the probabilities: one GEMM over all K chunks at once
        exponentials.mul_(slabs.weight(rows) / total)
        out[rows] = slabs.unfold(torch.bmm(exponentials.flatten(2), slabs.values(rows)))
    return out.view(q.shape), lse


def backward(
    grad: Tensor,  # [B, N, R, H, D]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    weights: Tensor,
    lengths: Tensor | None,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and weights. The chunks are gathered again."""
    slabs = _Slabs(q, k, v, indices, weights, lengths, scale)
    (B, M, S, J, D), dtype = k.shape, slabs.dtype
    grad = grad.reshape(slabs.query_shape)
    dq = torch.zeros(slabs.query_shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(B * M * J, S * D, dtype=dtype, device=q.device) for _ in range(2))
    dw = torch.zeros(B * indices.shape[1], *indices.shape[2:], dtype=dtype, device=q.device)
    into = _numbers_of_contiguous(indices, M)
    with torch.autocast(q.device.type, enabled=False):  # the backward runs outside the op
        for rows in slabs:
            c = rows.stop - rows.start
            probabilities = slabs.scores(rows).sub_(lse[rows].view(c * J, -1, slabs.K, 1)).exp_()
            weight = slabs.weight(rows)  # [c J, 1, K, 1]
            out_grad = slabs.fold(grad, rows)  # [c J, g R, D]
            values, keys, query = slabs.values(rows), slabs.keys(rows), slabs.fold(slabs.q, rows)
            # dP without the weight: dO V^T; its row sums with P give both D and the weights' gradient
            dp = torch.bmm(out_grad, values.transpose(1, 2)).view_as(probabilities)
            inner = (dp * probabilities).sum(-1, keepdim=True)  # [c J, g R, K, 1]
            dw[rows] = inner.sum(1).view(c, J, slabs.K)
            probabilities.mul_(weight)
            ds = dp.sub_(inner).mul_(probabilities).flatten(2)
            dq[rows] = slabs.unfold(torch.bmm(ds, keys).mul_(slabs.scale))
            numbers = into[rows].reshape(-1)
            by_key = torch.bmm(ds.transpose(1, 2), query).mul_(slabs.scale)
            dk.index_add_(0, numbers, by_key.view(-1, S * D))
            by_value = torch.bmm(probabilities.flatten(2).transpose(1, 2), out_grad)
            dv.index_add_(0, numbers, by_value.view(-1, S * D))
    dw = dw.view(indices.shape).masked_fill_(indices < 0, 0).to(weights.dtype)
    dk, dv = (x.view(B, M, J, S, D).transpose(2, 3) for x in (dk, dv))
    return dq.view(q.shape), dk.to(k.dtype), dv.to(v.dtype), dw


def read_in_order(
    q: Tensor,  # [B, 1, R, H, D]
    k: Tensor,  # [B, K, S, J, D]
    v: Tensor,
    weights: Tensor,  # [B, 1, J, K]
    lengths: Tensor | None,  # [B, K]
    off_by_one: bool,
    scale: float,
) -> Tensor:
    """Decoding: one chunk reads a table of its own from end to end, which needs no gathering."""
    (B, _, R, H, D), (K, S, J) = q.shape, k.shape[1:4]
    dtype = arithmetic_dtype(q, k, v, weights)
    # no copies, if each head's keys stand side by side
    keys, values = (x.to(dtype).permute(0, 3, 1, 2, 4).reshape(B * J, K * S, D) for x in (k, v))
    folded = q.view(B, R, J, H // J, D).permute(0, 2, 3, 1, 4).reshape(B * J, -1, D).to(dtype)
    scores = torch.bmm(folded * scale, keys.transpose(1, 2)).view(B * J, -1, K, S)
    if lengths is not None:
        absent = torch.arange(S, device=q.device) >= lengths[..., None]  # [B, K, S]
        absent = absent[:, None].expand(B, J, K, S).reshape(B * J, 1, K, S)
        scores.masked_fill_(absent, -torch.inf)
        values = values.masked_fill(absent.view(B * J, K * S, 1), 0)  # not even NaN has an effect
    if off_by_one:  # a virtual key with score 0 and value 0 (Eq. 3)
        probabilities = torch.nn.functional.pad(scores, (0, 1)).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
        if lengths is not None:
            probabilities = probabilities.masked_fill(absent, 0)  # NaN in chunks without keys
    weighted = probabilities * weights.reshape(B * J, 1, K, 1).to(dtype)
    out = torch.bmm(weighted.flatten(2), values)
    return out.view(B, J, H // J, R, D).permute(0, 3, 1, 2, 4).reshape(B, 1, R, H, D).to(q.dtype)


class _Table:
    """Keys or values as rows of S * D numbers, one per (batch row, chunk, head), read by number.

    One ``index_select`` of such rows is a ready operand of ``bmm``: [.., J, K, S, D] needs no permuted copy.
    """

    def __init__(self, x: Tensor) -> None:  # [B, M, S, J, D]
        B, M, S, J, D = x.shape
        x = x.transpose(2, 3)  # [B, M, J, S, D]
        unit = S * D
        outer = x.stride()[:3]
        in_rows = (D == 1 or x.stride(4) == 1) and (S == 1 or x.stride(3) == D)
        if not in_rows or any(step % unit for step in outer):
            x = x.contiguous()
            outer = x.stride()[:3]
        steps = [step // unit for step in outer]
        count = 1 + sum(step * (size - 1) for step, size in zip(steps, (B, M, J), strict=True)) if B else 0
        self.rows = x.as_strided((count, unit), (unit, 1))
        self.steps = steps
        self.shape = (S, D)

    def numbers(self, indices: Tensor) -> Tensor:
        """Row numbers [B, N, J, K] of chunks ``indices`` [B, N, J, K]; -1 has those of chunk 0."""
        by_row, by_chunk, by_head = self.steps
        row = torch.arange(indices.shape[0], device=indices.device)[:, None, None, None] * by_row
        head = torch.arange(indices.shape[2], device=indices.device)[:, None] * by_head
        return row + indices.clamp(min=0) * by_chunk + head

    def gather(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """[c, J, K] row numbers -> [c * J, K * S, D]."""
        c, J, K = numbers.shape
        S, D = self.shape
        return self.rows.index_select(0, numbers.reshape(-1)).view(c * J, K * S, D).to(dtype)


class _Slabs:
    """Slabs of reading chunks (batch and N flattened) and what each computes from them.

    Folded rows are [c * J, g * R, D]: the g query heads of a key/value head stand below each other.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indices: Tensor,
        weights: Tensor,
        lengths: Tensor | None,
        scale: float,
    ) -> None:
        B, N, R, H, D = q.shape
        self.M, self.S, self.J = k.shape[1:4]
        self.K = indices.shape[-1]
        self.scale = scale
        self.dtype = arithmetic_dtype(q, k, v, weights)
        self.query_shape = (B * N, R, self.J, H // self.J, D)
        self.lse_shape = (B * N, self.J, H // self.J * R, self.K)
        self.q = q.reshape(self.query_shape)
        self.nothing = (indices < 0).reshape(B * N, self.J, self.K)
        self.weights = weights.reshape(B * N, self.J, self.K).masked_fill(self.nothing, 0).to(self.dtype)
        if self.M:
            self.k_table, self.v_table = _Table(k), _Table(v)
            self.k_numbers = self.k_table.numbers(indices).reshape(B * N, self.J, self.K)
            self.v_numbers = self.v_table.numbers(indices).reshape(B * N, self.J, self.K)
        self.absent: Tensor | None = None  # [B N, J, K, S], and as what is added to scores
        if lengths is not None and self.M:
            row = torch.arange(B, device=q.device)[:, None, None, None]
            present = lengths[row, indices.clamp(min=0)].reshape(B * N, self.J, self.K, 1)
            self.absent = torch.arange(self.S, device=q.device) >= present  # [B N, J, K, S]
            self.mask = torch.zeros_like(self.absent, dtype=self.dtype).masked_fill_(self.absent, -torch.inf)
        per_chunk = self.J * self.K * self.S * (2 * D + H // self.J * R)
        self.step = max(1, _SLAB_ELEMENTS // max(1, per_chunk))

    def __iter__(self) -> Iterator[slice]:
        if self.M:
            count = self.query_shape[0]
            for first in range(0, count, self.step):
                yield slice(first, min(first + self.step, count))

    def fold(self, x: Tensor, rows: slice) -> Tensor:
        """[B N, R, J, g, D] -> [c * J, g * R, D] of these rows."""
        part = x[rows].to(self.dtype).permute(0, 2, 3, 1, 4)  # [c, J, g, R, D]
        c, J, g, R, D = part.shape
        return part.reshape(c * J, g * R, D)

    def unfold(self, x: Tensor) -> Tensor:
        """[c * J, g * R, D] -> [c, R, J, g, D]."""
        _, R, J, g, D = self.query_shape
        return x.view(-1, J, g, R, D).permute(0, 3, 1, 2, 4)

    def keys(self, rows: slice) -> Tensor:
        return self._existing(self.k_table.gather(self.k_numbers[rows], self.dtype), rows)

    def values(self, rows: slice) -> Tensor:
        return self._existing(self.v_table.gather(self.v_numbers[rows], self.dtype), rows)

    def _existing(self, gathered: Tensor, rows: slice) -> Tensor:
        """[c * J, K * S, D] with zeros where nothing is read: a NaN there times a weight of 0 would be NaN."""
        slots = gathered.view(-1, self.S, gathered.shape[-1])
        slots.index_fill_(0, self.nothing[rows].reshape(-1).nonzero()[:, 0], 0)
        if self.absent is not None:
            keys = gathered.view(-1, gathered.shape[-1])
            keys.index_fill_(0, self.absent[rows].reshape(-1).nonzero()[:, 0], 0)
        return gathered

    def weight(self, rows: slice) -> Tensor:
        return self.weights[rows].reshape(-1, 1, self.K, 1)

    def scores(self, rows: slice) -> Tensor:
        """[c * J, g * R, K, S], -inf at keys that do not exist."""
        query = self.fold(self.q, rows).mul(self.scale)
        keys = self.keys(rows).transpose(1, 2)
        if self.absent is None:
            scores = torch.bmm(query, keys)
        else:  # in the GEMM: on a CPU, masked_fill_ afterwards takes half as long again
            scores = torch.baddbmm(self.mask[rows].reshape(-1, 1, self.K * self.S), query, keys)
        return scores.view(*scores.shape[:2], self.K, self.S)


def _numbers_of_contiguous(indices: Tensor, M: int) -> Tensor:
    """Row numbers [B N, J, K] in a contiguous [B, M, J] table: where gradients are added."""
    B, N, J, K = indices.shape
    row = torch.arange(B, device=indices.device)[:, None, None, None] * M
    head = torch.arange(J, device=indices.device)[:, None]
    return ((row + indices.clamp(min=0)) * J + head).reshape(B * N, J, K)
