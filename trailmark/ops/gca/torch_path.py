"""Grouped Cross-Attention in PyTorch: slabs of reading chunks whose working memory stays in a core's caches.

GEMMs take most of the time; what stands around them is kept off the memory: each slab works in the buffers of
the one before, and scores lie transposed, [.., S, rows], so that maxima and sums run along whole cache lines
and no GEMM but one of two (forward) and one of five (backward) reads its large operand transposed. Powers
are of 2: `exp2` is one vectorised pass, where `exp` may be three times slower (MKL's on other makers' CPUs).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trailmark.ops.gca import by_chunk
from trailmark.ops.gca.call import CrossAttentionCall
from trailmark.ops.gca.rows import (
    FEW_ROWS,
    LOG2_E,
    Gradients,
    Places,
    Rows,
    Table,
    numbers_of_contiguous,
    unless_unread,
)
from trailmark.ops.slabs import in_slabs

# Reading chunks are walked in slabs whose gathered keys, values and scores have about this many elements:
# small enough for a core's caches, large enough to keep the GEMMs busy.
_SLAB_ELEMENTS = 1 << 20


def forward(call: CrossAttentionCall, keep: bool) -> tuple[Tensor, Tensor]:
    """The output, and with ``keep`` log-sum-exps (base 2) for the backward: of each row, head and chunk.

    They are [B * N, J, K, g R], ready to be broadcast over scores. With something beside, [B * N, J, 2, g R] in
    float64: the largest score, and the log-sum-exp of all. Without ``keep``, empty.
    """
    q, off_by_one = call.q, call.off_by_one
    if by_chunk.pays(call):
        return by_chunk.forward(call, keep)
    slabs = _Slabs(call)
    beside = None if call.beside is None else call.beside.reshape(slabs.query_shape)
    # ONE buffer outside the slabs for each result: its size is that of q, not K times it
    out = slabs.result(slabs.query_shape, q.dtype)  # [B N, R, J, g, D]
    lse = slabs.result(slabs.lse_shape if keep else (0,), slabs.lse_dtype)
    for rows in slabs:
        scores = slabs.scores(rows, slabs.keys(rows), slabs.fold(slabs.q, rows))  # [c J, K, S, g R]
        top = scores.amax(2, keepdim=True)
        null, weight = slabs.null(rows), slabs.weight(rows)
        if null is None:
            # off by one: the running maximum starts at 0 and the running sum at 1 (Eq. 3)
            top = top.clamp_(min=0) if off_by_one else top.masked_fill_(top == -torch.inf, 0)
            exponentials = scores.sub_(top).exp2_()
            total = exponentials.sum(2, keepdim=True)
            if off_by_one:
                total.add_(top.neg().exp2_())
            else:
                total.masked_fill_(total == 0, 1)
            weight = weight / total
            if keep:
                torch.add(top, total.log2(), out=lse[rows].view(top.shape))
        else:  # one softmax over all
            top = top.masked_fill_(weight == 0, -torch.inf).amax(1, keepdim=True)  # [c J, 1, 1, g R]
            exponentials = scores.sub_(unless_unread(top, weight)).exp2_()
            found = (exponentials.sum(2, keepdim=True) * weight).sum(1, keepdim=True)
            total = torch.logaddexp2(top + found.double().log2(), null)
            of_found = (top - total).exp2_().to(found.dtype)
            share, weight = (found * of_found).view(len(found), -1, 1), weight * of_found
            if keep:
                torch.cat([top, total], dim=1, out=lse[rows].view(-1, 2, 1, top.shape[-1]))
        # the weights go into the probabilities: one GEMM over all K chunks at once
        exponentials.mul_(weight)
        values = slabs.values(rows, "keys")  # which have done their part
        read = torch.bmm(exponentials.flatten(1, 2).transpose(1, 2), values)
        if beside is not None:
            read.addcmul_(share, slabs.fold(beside, rows), value=-1)
        out[rows] = slabs.unfold(read)
    return out.view(q.shape), lse


def backward(
    grad: Tensor, call: CrossAttentionCall, lse: Tensor, of_memory: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, weights, beside and its log-sum-exp; without ``of_memory`` those of k and v are empty.

    The chunks are gathered again.
    """
    if by_chunk.pays(call):
        return by_chunk.backward(grad, call, lse, of_memory)
    beside, slabs = call.beside, _Slabs(call)
    S, D, dtype = slabs.S, slabs.D, slabs.dtype
    grad = grad.reshape(slabs.query_shape)
    gradients = Gradients(slabs, call, of_memory)
    if beside is not None:
        beside = beside.reshape(slabs.query_shape)
    into = numbers_of_contiguous(call.indices, slabs.M)
    with torch.autocast(grad.device.type, enabled=False):  # the backward runs outside the op
        for rows in slabs:
            numbers = into[rows].reshape(-1)
            query, out_grad = slabs.fold(slabs.q, rows), slabs.fold(grad, rows)  # [c J, g R, D]
            keys = slabs.keys(rows)
            probabilities = slabs.scores(rows, keys, query)  # [c J, K, S, g R]
            null, weight = slabs.null(rows), slabs.weight(rows)
            kept = lse[rows].view(len(keys), -1, 1, query.shape[1])
            if null is None:
                probabilities.sub_(kept).exp2_()
            else:
                top, total = kept[:, :1], kept[:, 1:]
                probabilities.sub_(unless_unread(top.to(dtype), weight)).exp2_()
                probabilities.mul_(weight * (top - total).exp2_().to(dtype))
            values = slabs.values(rows, "values")
            # dP without the weight: dO V^T; its row sums with P give both D and the weights' gradient
            dp = torch.bmm(
                values, out_grad.transpose(1, 2), out=slabs.of_keys("dp", rows, query.shape[1])
            ).unflatten(1, probabilities.shape[1:3])
            if beside is not None:  # values count from it
                own = (out_grad * slabs.fold(beside, rows)).sum(-1)  # [c J, g R]
                dp.sub_(own[:, None, None])
            # the values have done their part
            product = slabs.of_keys("values", rows, query.shape[1]).unflatten(1, dp.shape[1:3])
            torch.mul(dp, probabilities, out=product)
            inner = product.sum(2 if null is None else (1, 2), keepdim=True)  # [c J, K or 1, 1, g R]
            if null is None:
                gradients.weights[rows] = slabs.of_weights(inner)
                probabilities.mul_(weight)
            else:
                of_null = (null - total).exp2_().to(dtype).mul_(inner).neg_()  # [c J, 1, 1, g R]
                gradients.lse[rows] = slabs.unfold(of_null.view(len(keys), -1, 1))
                share = probabilities.sum((1, 2))[
                    ..., None
                ]  # not 1 - that of the virtual key: it may be tiny
                gradients.beside[rows] = slabs.unfold(out_grad * share).neg_()
            if of_memory:
                by_value = torch.bmm(probabilities.flatten(1, 2), out_grad, out=values)
                gradients.v.index_add_(0, numbers, by_value.view(-1, S * D))
            ds = dp.sub_(inner).mul_(probabilities)
            if null is not None:
                own_weight = slabs.weights[rows]
                by_weight = slabs.of_weights(ds.sum(2, keepdim=True)) / own_weight
                gradients.weights[rows] = by_weight.masked_fill_(own_weight == 0, 0)
            ds = ds.flatten(1, 2)
            gradients.q[rows] = slabs.unfold(torch.bmm(ds.transpose(1, 2), keys).mul_(slabs.scale))
            if of_memory:
                by_key = keys.baddbmm_(ds, query, beta=0, alpha=slabs.scale)
                gradients.k.index_add_(0, numbers, by_key.view(-1, S * D))
    return gradients.of_inputs()


class _Slabs(Rows):
    """Slabs of reading chunks (batch and N flattened) and what each computes from them."""

    def __init__(self, call: CrossAttentionCall) -> None:
        super().__init__(call)
        indices, lengths = call.indices, call.lengths
        self.absent: Places | None = None
        if self.M:
            shared = indices.stride(2) == 0  # all heads read the same chunks
            self.k_table, self.v_table = Table(call.k, shared), Table(call.v, shared)
            self.k_numbers = self.k_table.numbers(indices).flatten(0, 1)
            self.v_numbers = (
                self.k_numbers
                if self.v_table.steps == self.k_table.steps
                else self.v_table.numbers(indices).flatten(0, 1)
            )
            if lengths is not None:
                row = torch.arange(len(indices), device=indices.device)[:, None, None, None]
                present = lengths[row, indices.clamp(min=0)].reshape(*self.nothing.where.shape, 1)
                self.absent = Places(torch.arange(self.S, device=indices.device) >= present)  # [B N, J, K, S]
        # a GPU wants many at once
        elements = _SLAB_ELEMENTS if self.q.device.type == "cpu" else 64 * _SLAB_ELEMENTS
        if self.width <= FEW_ROWS:  # or one token fills them, and calls take as long as what they do
            elements *= 2
        self.step = max(1, elements // max(1, self.J * self.K * self.S * (2 * self.D + self.width)))
        self._widest = {"values": self.width}  # what takes their place once they have done their part
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def __iter__(self) -> Iterator[slice]:
        return in_slabs(self.query_shape[0] if self.M else 0, self.step, self.q)

    def buffer(self, name: str, rows: slice, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """[c * J, K * S, width], the same memory for each slab: fresh pages cost more than what fills them."""
        dtype = dtype or self.dtype
        count = (rows.stop - rows.start) * self.J
        if (name, dtype) not in self._buffers:  # the first slab is the largest
            size = count * self.K * self.S * max(width, self._widest.get(name, 0))
            self._buffers[name, dtype] = torch.empty(size, dtype=dtype, device=self.q.device)
        part = self._buffers[name, dtype][: count * self.K * self.S * width]
        return part.view(count, self.K * self.S, width)

    def of_keys(self, name: str, rows: slice, width: int) -> Tensor:
        """[c * J, K * S, width], scores or what is like them; a view of [c * J, width, K * S] where rows are few."""
        buffer = self.buffer(name, rows, width)
        if width > FEW_ROWS:  # with fewer, cache lines are too short for sums along them
            return buffer
        return buffer.view(len(buffer), width, self.K * self.S).transpose(1, 2)

    def keys(self, rows: slice) -> Tensor:
        """[c * J, K * S, D]"""
        return self._gather(self.k_table, self.k_numbers[rows], rows, "keys")

    def values(self, rows: slice, buffer: str) -> Tensor:
        return self._gather(self.v_table, self.v_numbers[rows], rows, buffer)

    def _gather(self, table: Table, numbers: Tensor, rows: slice, buffer: str) -> Tensor:
        """Zeros where nothing is read: a NaN there times a weight of 0 would be NaN."""
        out = self.buffer(buffer, rows, self.D)
        numbers = numbers.reshape(-1)
        if table.rows.dtype == self.dtype and not table.by_chunk:
            torch.index_select(table.rows, 0, numbers, out=out.view(len(numbers), -1))
        else:  # through a buffer in the table's dtype
            raw = self.buffer("raw", rows, self.D, table.rows.dtype).view(len(numbers), -1)
            torch.index_select(table.rows, 0, numbers, out=raw)
            if table.by_chunk:
                chunks = raw.view(-1, self.K, self.S, self.J, out.shape[-1]).permute(0, 3, 1, 2, 4)
                out.view(chunks.shape).copy_(chunks)
            else:
                out.view(raw.shape).copy_(raw)
        self.nothing.fill(out, rows)
        if self.absent is not None:
            self.absent.fill(out, rows)
        return out

    def scores(self, rows: slice, keys: Tensor, query: Tensor) -> Tensor:
        """[c * J, K, S, g * R] in base 2, -inf at keys that do not exist."""
        scores = self.of_keys("scores", rows, query.shape[1])
        scores.baddbmm_(keys, query.transpose(1, 2), beta=0, alpha=self.scale * LOG2_E)
        if self.absent is not None and self.absent.among(rows):
            # added, which is several times faster than masked_fill_; those keys are zeros, never NaN
            absent = self.absent.where[rows].reshape(len(scores), -1, 1)
            scores.add_(torch.zeros_like(absent, dtype=self.dtype).masked_fill_(absent, -torch.inf))
        return scores.unflatten(1, (self.K, self.S))
