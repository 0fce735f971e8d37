"""Calls of Grouped Cross-Attention as rows: of queries, of weights, and of tables that are read by number."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trailmark.ops.gca.call import CrossAttentionCall

LOG2_E = math.log2(math.e)
FEW_ROWS = 16
"""Of a token that retrieves, at most: too few for its products to pay for what they fetch."""


class Rows:
    """A call with batch and N flattened.

    Folded rows are [c * J, g * R, D]: the g query heads of a key/value head stand below each other.
    """

    def __init__(self, call: CrossAttentionCall) -> None:
        q, k, indices, weights, lse = call.q, call.k, call.indices, call.weights, call.beside_lse
        self.dtype, self.scale = call.dtype, call.scale
        B, N, R, H, D = q.shape
        self.M, self.S, self.J = k.shape[1:4]
        self.K, self.D = indices.shape[-1], D
        self.width = H // self.J * R  # rows of a folded query
        self.query_shape = (B * N, R, self.J, H // self.J, D)
        self.lse_shape = (B * N, self.J, self.K if lse is None else 2, self.width)
        self.lse_dtype = self.dtype if lse is None else torch.float64
        self.q = q.reshape(self.query_shape)
        self.beside_lse = None if lse is None else lse.reshape(*self.query_shape[:-1], 1)
        # [B N, J, K, g], or 1 for all query heads of a key/value head
        per = weights.shape[2] // self.J
        weights = weights.reshape(B * N, self.J, per, self.K).transpose(2, 3).to(self.dtype)
        nothing = indices.reshape(B * N, self.J, self.K) < 0
        if lse is not None:
            nothing = nothing | (weights == 0).all(-1)
        self.nothing = Places(nothing)
        self.weights = weights.masked_fill(nothing[..., None], 0) if self.nothing.any else weights

    def result(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What the slabs fill; zeros if there is nothing to read."""
        return (torch.empty if self.M else torch.zeros)(shape, dtype=dtype, device=self.q.device)

    def fold(self, x: Tensor, rows: slice) -> Tensor:
        """[B N, R, J, g, D] -> [c * J, g * R, D] of these rows."""
        part = x[rows].to(self.dtype).permute(0, 2, 3, 1, 4)  # [c, J, g, R, D]
        c, J, g, R, D = part.shape
        return part.reshape(c * J, g * R, D)

    def unfold(self, x: Tensor) -> Tensor:
        """[c * J, g * R, D] -> [c, R, J, g, D]."""
        _, R, J, g, _ = self.query_shape
        return x.reshape(-1, J, g, R, x.shape[-1]).permute(0, 3, 1, 2, 4)

    def null(self, rows: slice) -> Tensor | None:
        """[c * J, 1, 1, g * R] in base 2: the score of what is beside; None: nothing is.

        In float64: it may stand far above the scores, and there float32 would round what is left of them.
        """
        if self.beside_lse is None:
            return None
        return (self.fold(self.beside_lse, rows).double() * LOG2_E).view(-1, 1, 1, self.lse_shape[-1])

    def weight(self, rows: slice) -> Tensor:
        """[c * J, K, 1, g * R], or 1 for all rows."""
        own = self.weights[rows]
        if own.shape[-1] > 1:
            own = own.repeat_interleave(self.query_shape[1], dim=-1)
        return own.reshape(len(own) * self.J, self.K, 1, own.shape[-1])

    def of_weights(self, x: Tensor) -> Tensor:
        """Sums of x [c * J, K, 1, g * R], or [c, J, K, g * R], over the rows that have a weight in common:
        [c, J, K, g or 1]."""
        return x.reshape(
            -1, self.J, self.K, self.weights.shape[-1], x.shape[-1] // self.weights.shape[-1]
        ).sum(-1)


class Gradients:
    """Of a call's inputs: what slabs fill, and the tables of k and v that they add to, empty without ``of_memory``."""

    def __init__(self, rows: Rows, call: CrossAttentionCall, of_memory: bool) -> None:
        (B, M, S, J, D), q, beside = call.k.shape, call.q, call.beside
        self._rows, self._call, self._of_memory = rows, call, of_memory
        self.q = rows.result(rows.query_shape, q.dtype)
        tables = (B * M * J if of_memory else 0, S * D)
        self.k, self.v = (torch.zeros(tables, dtype=rows.dtype, device=q.device) for _ in range(2))
        self.weights = rows.result(tuple(rows.weights.shape), rows.dtype)
        self.beside, self.lse = q.new_empty(0), q.new_empty(0)
        if beside is not None:
            self.beside = rows.result(rows.query_shape, beside.dtype)
            self.lse = rows.result((*rows.query_shape[:-1], 1), rows.dtype)

    def of_inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """In the shapes and dtypes of q, k, v, weights, beside and its log-sum-exp; empty where there is none."""
        q, k, v, indices, weights, _, beside, beside_lse, _, _ = self._call
        B, M, S, J, D = k.shape
        unread = (indices < 0).repeat_interleave(weights.shape[2] // J, dim=2)
        of_weights = self.weights.permute(0, 1, 3, 2).reshape(weights.shape)
        of_weights = of_weights.masked_fill_(unread, 0).to(weights.dtype)
        more = self.beside, self.lse
        if beside is not None and beside_lse is not None:
            more = self.beside.view(q.shape), self.lse.view(q.shape[:-1]).to(beside_lse.dtype)
        memory = k.new_empty(0), v.new_empty(0)
        if self._of_memory:
            dk, dv = (x.view(B, M, J, S, D).transpose(2, 3) for x in (self.k, self.v))
            memory = dk.to(k.dtype), dv.to(v.dtype)
        return self.q.view(q.shape), *memory, of_weights, *more


class Places:
    """Where nothing is read: [B N, ...] bool, with the chunks that have any known beforehand."""

    def __init__(self, where: Tensor) -> None:
        self.where = where
        # a GPU would be waited for
        known = where.device.type == "cpu"
        self._chunks: list[bool] = where.flatten(1).any(1).tolist() if known else [True] * len(where)
        self.any = True in self._chunks

    def among(self, rows: slice) -> bool:
        return self.any and True in self._chunks[rows]

    def fill(self, gathered: Tensor, rows: slice) -> None:
        """Zeros at these places of [c * J, K * S, D]."""
        if not self.among(rows):
            return
        where = self.where[rows].reshape(-1)
        if where.device.type == "cpu":  # there the quicker of the two
            gathered.view(len(where), -1).index_fill_(0, where.nonzero()[:, 0], 0)
        else:
            gathered.view(len(where), -1).masked_fill_(where[:, None], 0)


class Table:
    """Keys or values as rows, read by number: one ``index_select`` of them is a slab's.

    A row is a head of a chunk, [S, D], a ready operand of ``bmm``; or, with ``by_chunk``, a whole chunk
    [S, J, D] where that is how it lies in memory: then heads are put together slab by slab, not in a copy of all.
    """

    def __init__(self, x: Tensor, by_chunk: bool = False) -> None:  # [B, M, S, J, D]
        S, J, D = x.shape[2:]
        heads = x.transpose(2, 3)  # [B, M, J, S, D]
        unit, outer = S * D, _steps(heads, 3)
        in_rows = (D == 1 or x.stride(4) == 1) and (S == 1 or x.stride(2) == D)
        self.by_chunk = by_chunk and (not in_rows or any(step % unit for step in outer))
        if self.by_chunk:
            heads, unit, outer = x, S * J * D, _steps(x, 2)
            in_rows = x[:1, :1].is_contiguous()
        if not in_rows or any(step % unit for step in outer):
            heads = heads.contiguous()
            outer = _steps(heads, len(outer))
        self.steps = [step // unit for step in outer]
        count = 1 + sum(step * (size - 1) for step, size in zip(self.steps, heads.shape, strict=False))
        self.rows = heads.as_strided((count if len(x) else 0, unit), (unit, 1))

    def numbers(self, indices: Tensor) -> Tensor:
        """Row numbers [B, N, J, K] of chunks ``indices`` [B, N, J, K], of whole chunks [B, N, 1, K]; -1 has
        those of chunk 0."""
        row = torch.arange(indices.shape[0], device=indices.device)[:, None, None, None] * self.steps[0]
        if self.by_chunk:
            return row + indices[:, :, :1].clamp(min=0) * self.steps[1]
        head = torch.arange(indices.shape[2], device=indices.device)[:, None] * self.steps[2]
        return row + indices.clamp(min=0) * self.steps[1] + head


def _steps(x: Tensor, dims: int) -> list[int]:
    """Strides of the first dimensions; 0 for one of size 1, whose stride may be anything."""
    return [step if size > 1 else 0 for step, size in zip(x.stride()[:dims], x.shape, strict=False)]


def numbers_of_contiguous(indices: Tensor, M: int) -> Tensor:
    """Row numbers [B N, J, K] in a contiguous [B, M, J] table: where gradients are added."""
    B, N, J, K = indices.shape
    row = torch.arange(B, device=indices.device)[:, None, None, None] * M
    head = torch.arange(J, device=indices.device)[:, None]
    return ((row + indices.clamp(min=0)) * J + head).reshape(B * N, J, K)


def unless_unread(top: Tensor, weight: Tensor) -> Tensor:
    """What is taken from the scores of chunks: the largest of all, or all that there is."""
    return torch.where((weight == 0) | (top == -torch.inf), torch.inf, top)
