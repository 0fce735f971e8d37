"""Grouped Cross-Attention in PyTorch: slabs of reading chunks whose working memory stays in a core's caches.

GEMMs take most of the time; what stands around them is kept off the memory: each slab works in the buffers of
the one before, and scores lie transposed, [.., S, rows], so that maxima and sums run along whole cache lines
and no GEMM but one of two (forward) and one of five (backward) reads its large operand transposed. Powers
are of 2: `exp2` is one vectorised pass, where `exp` may be three times slower (MKL's on other makers' CPUs).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from trailmark.ops.gca.call import CrossAttentionCall
from trailmark.ops.slabs import in_slabs

# Reading chunks are walked in slabs whose gathered keys, values and scores have about this many elements:
# small enough for a core's caches, large enough to keep the GEMMs busy.
_SLAB_ELEMENTS = 1 << 20
# Up to these rows, as tokens that retrieve have, cache lines are too short for sums along them: scores lie row by row.
# Slabs are twice as large, or one token fills them, and calls take as long as what they do.
_FEW_ROWS = 16
_LOG2_E = math.log2(math.e)


def forward(call: CrossAttentionCall, keep: bool) -> tuple[Tensor, Tensor]:
    """The output, and with ``keep`` log-sum-exps (base 2) for the backward: of each row, head and chunk.

    They are [B * N, J, K, g R], ready to be broadcast over scores. With something beside, [B * N, J, 2, g R] in
    float64: the largest score, and the log-sum-exp of all. Without ``keep``, empty.
    """
    q, off_by_one = call.q, call.off_by_one
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
            exponentials = scores.sub_(_unless_unread(top, weight)).exp2_()
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
    q, k, v, indices, weights, _, beside, beside_lse, _, scale = call
    slabs = _Slabs(call)
    (B, M, S, J, D), dtype = k.shape, slabs.dtype
    grad = grad.reshape(slabs.query_shape)
    dq = slabs.result(slabs.query_shape, q.dtype)
    tables = (B * M * J, S * D) if of_memory else (0, S * D)
    dk, dv = (torch.zeros(tables, dtype=dtype, device=q.device) for _ in range(2))
    dw = slabs.result(slabs.weights.shape, dtype)
    d_beside, d_lse = q.new_empty(0), q.new_empty(0)
    if beside is not None:
        d_beside = slabs.result(slabs.query_shape, beside.dtype)
        d_lse = slabs.result((*slabs.query_shape[:-1], 1), dtype)
        beside = beside.reshape(slabs.query_shape)
    into = _numbers_of_contiguous(indices, M)
    with torch.autocast(q.device.type, enabled=False):  # the backward runs outside the op
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
                probabilities.sub_(_unless_unread(top.to(dtype), weight)).exp2_()
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
                dw[rows] = slabs.of_weights(inner)
                probabilities.mul_(weight)
            else:
                of_null = (null - total).exp2_().to(dtype).mul_(inner).neg_()  # [c J, 1, 1, g R]
                d_lse[rows] = slabs.unfold(of_null.view(len(keys), -1, 1))
                share = probabilities.sum((1, 2))[
                    ..., None
                ]  # not 1 - that of the virtual key: it may be tiny
                d_beside[rows] = slabs.unfold(out_grad * share).neg_()
            if of_memory:
                by_value = torch.bmm(probabilities.flatten(1, 2), out_grad, out=values)
                dv.index_add_(0, numbers, by_value.view(-1, S * D))
            ds = dp.sub_(inner).mul_(probabilities)
            if null is not None:
                own_weight = slabs.weights[rows]
                by_weight = slabs.of_weights(ds.sum(2, keepdim=True)) / own_weight
                dw[rows] = by_weight.masked_fill_(own_weight == 0, 0)
            ds = ds.flatten(1, 2)
            dq[rows] = slabs.unfold(torch.bmm(ds.transpose(1, 2), keys).mul_(scale))
            if of_memory:
                by_key = keys.baddbmm_(ds, query, beta=0, alpha=scale)
                dk.index_add_(0, numbers, by_key.view(-1, S * D))
    dw = dw.permute(0, 1, 3, 2).reshape(weights.shape)
    unread = (indices < 0).repeat_interleave(weights.shape[2] // J, dim=2)
    dw = dw.masked_fill_(unread, 0).to(weights.dtype)
    if beside is None or beside_lse is None:
        more = d_beside, d_lse
    else:
        more = d_beside.view(q.shape).to(beside.dtype), d_lse.view(q.shape[:-1]).to(beside_lse.dtype)
    if not of_memory:
        return dq.view(q.shape), k.new_empty(0), v.new_empty(0), dw, *more
    dk, dv = (x.view(B, M, J, S, D).transpose(2, 3) for x in (dk, dv))
    return dq.view(q.shape), dk.to(k.dtype), dv.to(v.dtype), dw, *more


def read_in_order(call: CrossAttentionCall) -> Tensor:
    """Decoding: one chunk reads a table of its own from end to end, which needs no gathering: N = 1, M = K."""
    q, k, v, _, weights, lengths, beside, beside_lse, off_by_one, scale = call
    (B, _, R, H, D), (K, S, J) = q.shape, k.shape[1:4]
    dtype = call.dtype
    # no copies, if each head's keys stand side by side
    keys, values = (x.to(dtype).permute(0, 3, 1, 2, 4).reshape(B * J, K * S, D) for x in (k, v))
    folded = q.view(B, R, J, H // J, D).permute(0, 2, 3, 1, 4).reshape(B * J, -1, D).to(dtype)
    scores = torch.bmm(folded * scale, keys.transpose(1, 2)).view(B * J, -1, K, S)
    if lengths is not None:
        absent = torch.arange(S, device=q.device) >= lengths[..., None]  # [B, K, S]
        absent = absent[:, None].expand(B, J, K, S).reshape(B * J, 1, K, S)
        scores.masked_fill_(absent, -torch.inf)
        values = values.masked_fill(absent.view(B * J, K * S, 1), 0)  # not even NaN has an effect
    weight = weights.reshape(B * J, weights.shape[2] // J, K, 1).to(dtype)
    if weight.shape[1] > 1:  # of each query head
        weight = weight.repeat_interleave(R, dim=1)
    if beside_lse is not None:
        null = beside_lse.view(B, R, J, H // J).permute(0, 2, 3, 1).reshape(B * J, -1, 1).to(dtype)
        counted = scores.add_(weight.log()).flatten(2)
        weighted = torch.cat([counted, null], dim=-1).softmax(-1)[..., :-1].view_as(scores)
    elif off_by_one:  # a virtual key with score 0 and value 0 (Eq. 3)
        probabilities = torch.nn.functional.pad(scores, (0, 1)).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
        if lengths is not None:
            probabilities = probabilities.masked_fill(absent, 0)  # NaN in chunks without keys
    if beside is None:
        weighted = probabilities * weight
    out = torch.bmm(weighted.flatten(2), values)
    if beside is not None:
        own = beside.view(B, R, J, H // J, D).permute(0, 2, 3, 1, 4).reshape(out.shape).to(dtype)
        out.addcmul_(weighted.sum((2, 3))[..., None], own, value=-1)
    return out.view(B, J, H // J, R, D).permute(0, 3, 1, 2, 4).reshape(B, 1, R, H, D).to(q.dtype)


class _Table:
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


class _Slabs:
    """Slabs of reading chunks (batch and N flattened) and what each computes from them.

    Folded rows are [c * J, g * R, D]: the g query heads of a key/value head stand below each other.
    """

    def __init__(self, call: CrossAttentionCall) -> None:
        q, k, v, indices, weights, lengths, _, lse, _, self.scale = call
        self.dtype = call.dtype
        B, N, R, H, D = q.shape
        self.M, self.S, self.J = k.shape[1:4]
        self.K, self.D = indices.shape[-1], D
        self.query_shape = (B * N, R, self.J, H // self.J, D)
        self.lse_shape = (B * N, self.J, self.K if lse is None else 2, H // self.J * R)
        self.lse_dtype = self.dtype if lse is None else torch.float64
        self.q = q.reshape(self.query_shape)
        self.beside_lse = None if lse is None else lse.reshape(*self.query_shape[:-1], 1)
        # [B N, J, K, g], or 1 for all query heads of a key/value head
        per = weights.shape[2] // self.J
        weights = weights.reshape(B * N, self.J, per, self.K).transpose(2, 3).to(self.dtype)
        nothing = indices.reshape(B * N, self.J, self.K) < 0
        if lse is not None:
            nothing = nothing | (weights == 0).all(-1)
        self.nothing = _Places(nothing)
        self.weights = weights.masked_fill(nothing[..., None], 0) if self.nothing.any else weights
        self.absent: _Places | None = None
        if self.M:
            shared = indices.stride(2) == 0  # all heads read the same chunks
            self.k_table, self.v_table = _Table(k, shared), _Table(v, shared)
            self.k_numbers = self.k_table.numbers(indices).flatten(0, 1)
            self.v_numbers = (
                self.k_numbers
                if self.v_table.steps == self.k_table.steps
                else self.v_table.numbers(indices).flatten(0, 1)
            )
            if lengths is not None:
                row = torch.arange(B, device=q.device)[:, None, None, None]
                present = lengths[row, indices.clamp(min=0)].reshape(B * N, self.J, self.K, 1)
                self.absent = _Places(torch.arange(self.S, device=q.device) >= present)  # [B N, J, K, S]
        rows = H // self.J * R
        # a GPU wants many at once
        elements = _SLAB_ELEMENTS if q.device.type == "cpu" else 64 * _SLAB_ELEMENTS
        if rows <= _FEW_ROWS:
            elements *= 2
        self.step = max(1, elements // max(1, self.J * self.K * self.S * (2 * D + rows)))
        self._widest = {"values": rows}  # what takes their place once they have done their part
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def __iter__(self) -> Iterator[slice]:
        return in_slabs(self.query_shape[0] if self.M else 0, self.step, self.q)

    def result(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What the slabs fill; zeros if there is nothing to read."""
        return (torch.empty if self.M else torch.zeros)(shape, dtype=dtype, device=self.q.device)

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
        if width > _FEW_ROWS:
            return buffer
        return buffer.view(len(buffer), width, self.K * self.S).transpose(1, 2)

    def fold(self, x: Tensor, rows: slice) -> Tensor:
        """[B N, R, J, g, D] -> [c * J, g * R, D] of these rows."""
        part = x[rows].to(self.dtype).permute(0, 2, 3, 1, 4)  # [c, J, g, R, D]
        c, J, g, R, D = part.shape
        return part.reshape(c * J, g * R, D)

    def unfold(self, x: Tensor) -> Tensor:
        """[c * J, g * R, D] -> [c, R, J, g, D]."""
        _, R, J, g, _ = self.query_shape
        return x.reshape(-1, J, g, R, x.shape[-1]).permute(0, 3, 1, 2, 4)

    def keys(self, rows: slice) -> Tensor:
        """[c * J, K * S, D]"""
        return self._gather(self.k_table, self.k_numbers[rows], rows, "keys")

    def values(self, rows: slice, buffer: str) -> Tensor:
        return self._gather(self.v_table, self.v_numbers[rows], rows, buffer)

    def _gather(self, table: _Table, numbers: Tensor, rows: slice, buffer: str) -> Tensor:
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

    def null(self, rows: slice) -> Tensor | None:
        """[c * J, 1, 1, g * R] in base 2: the score of what is beside; None: nothing is.

        In float64: it may stand far above the scores, and there float32 would round what is left of them.
        """
        if self.beside_lse is None:
            return None
        return (self.fold(self.beside_lse, rows).double() * _LOG2_E).view(-1, 1, 1, self.lse_shape[-1])

    def weight(self, rows: slice) -> Tensor:
        """[c * J, K, 1, g * R], or 1 for all rows."""
        own = self.weights[rows]
        if own.shape[-1] > 1:
            own = own.repeat_interleave(self.query_shape[1], dim=-1)
        return own.reshape(len(own) * self.J, self.K, 1, own.shape[-1])

    def of_weights(self, x: Tensor) -> Tensor:
        """Sums of x [c * J, K, 1, g * R] over the rows that have a weight in common: [c, J, K, g or 1]."""
        per = self.weights.shape[-1]
        rows = x.shape[-1] // per
        return x.reshape(len(x), self.K, per, rows).sum(-1).view(len(x) // self.J, self.J, self.K, per)

    def scores(self, rows: slice, keys: Tensor, query: Tensor) -> Tensor:
        """[c * J, K, S, g * R] in base 2, -inf at keys that do not exist."""
        scores = self.of_keys("scores", rows, query.shape[1])
        scores.baddbmm_(keys, query.transpose(1, 2), beta=0, alpha=self.scale * _LOG2_E)
        if self.absent is not None and self.absent.among(rows):
            # added, which is several times faster than masked_fill_; those keys are zeros, never NaN
            absent = self.absent.where[rows].reshape(len(scores), -1, 1)
            scores.add_(torch.zeros_like(absent, dtype=self.dtype).masked_fill_(absent, -torch.inf))
        return scores.unflatten(1, (self.K, self.S))


class _Places:
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


def _unless_unread(top: Tensor, weight: Tensor) -> Tensor:
    """What is taken from the scores of chunks: the largest of all, or all that there is."""
    return torch.where((weight == 0) | (top == -torch.inf), torch.inf, top)


def _numbers_of_contiguous(indices: Tensor, M: int) -> Tensor:
    """Row numbers [B N, J, K] in a contiguous [B, M, J] table: where gradients are added."""
    B, N, J, K = indices.shape
    row = torch.arange(B, device=indices.device)[:, None, None, None] * M
    head = torch.arange(J, device=indices.device)[:, None]
    return ((row + indices.clamp(min=0)) * J + head).reshape(B * N, J, K)
