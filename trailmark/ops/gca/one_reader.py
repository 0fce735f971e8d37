"""Grouped Cross-Attention in PyTorch where one chunk of a row reads, a few positions at a time: decoding on a CPU.

Nothing is kept for a backward, and slabs would be detours. Positions of one chunk read the same chunks, call after
call: what these calls share can be made ready once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trailmark.ops.arguments import without_autocast
from trailmark.ops.gca.call import CrossAttentionCall
from trailmark.ops.gca.rows import FEW_ROWS

_GATHERED = 1 << 18  # numbers in the keys that all rows gather at once; with more, slabs are faster


def takes(call: CrossAttentionCall) -> bool:
    """Whether :class:`OneReader` takes a call: one chunk reads in each row, with few positions, and not too much.

    What a row chose has no part in it, so that it changes nothing in how others are computed.
    """
    (B, N, R, H, D), (M, S, J) = call.q.shape, call.k.shape[1:4]
    K = call.indices.shape[-1]
    if N != 1 or not B * M or call.q.device.type != "cpu":  # a look at values would wait for another device
        return False
    # what decoding has fetched is a table of its own, in which nothing has to be gathered
    own_table = K == M and (B == 1 or call.k.stride(0) > 0)
    return H // J * R <= FEW_ROWS and (own_table or B * J * K * S * D <= _GATHERED)


class OneReader(NamedTuple):
    """What one chunk of each row reads: V keys of each of its K chunks.

    V is S; or S + 1, where the virtual key of the off-by-one softmax (Eq. 3: score 0, value 0) is one of them.
    """

    asked: torch.dtype  # of the queries
    dtype: torch.dtype  # what is computed in
    keys: Tensor  # [B * J, D, K * V]
    values: Tensor  # [B * J, K * V, D]
    bias: Tensor | None  # [B * J, 1 or g, K, V or 1] added to scores; None: 0
    weight: (
        Tensor | None
    )  # [B * J, 1 or g, K, 1] of probabilities; None: values or scores are weighed already
    num_chunks: int
    scale: float
    off_by_one: bool
    is_padded: bool  # V is S + 1

    @classmethod
    def of(cls, call: CrossAttentionCall, is_kept: bool = False) -> OneReader:
        """Of the chunks and weights of a call. Nothing that is absent has an effect, not even as NaN.

        ``is_kept``: for many calls, so that one pass over keys and values may save each of them a step.
        """
        dtype, alone = call.dtype, call.beside_lse is None
        keys, values, weight, present = _what_is_read(call)
        keys, values, weight = (x.to(dtype) for x in (keys, values, weight))
        bias = None
        if present is not None:
            absent = torch.arange(keys.shape[2]) >= present[..., None]  # [B * J, K, S]
            keys, values = (x.masked_fill(absent[..., None], 0) for x in (keys, values))
            bias = torch.zeros(absent.shape, dtype=dtype).masked_fill_(absent, -torch.inf)[:, None]
        if not alone:
            bias = weight.log() if bias is None else weight.log() + bias
        is_padded = is_kept and call.off_by_one and alone
        weighs_values = is_padded and weight.shape[1] == 1
        if is_padded:
            keys, values = (F.pad(x, (0, 0, 0, 1)) for x in (keys, values))
            bias = None if bias is None else F.pad(bias, (0, 1))
        if weighs_values:
            values = values * weight.transpose(1, 2)
        return cls(
            call.q.dtype,
            dtype,
            keys.flatten(1, 2).transpose(1, 2),
            values.flatten(1, 2),
            bias,
            weight if alone and not weighs_values else None,
            weight.shape[2],
            call.scale,
            call.off_by_one,
            is_padded,
        )

    def fits(self, q: Tensor) -> bool:
        """Whether positions with these queries [B, N, R, H, D] are such as it was made for."""
        B, N, R, H, _ = q.shape
        return N == 1 and H * B // len(self.keys) * R <= FEW_ROWS and q.dtype == self.asked

    @without_autocast
    def read(self, q: Tensor, beside: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """What positions with the queries q [B, 1, R, H, D] read, in their dtype; ``beside`` as of the op."""
        groups, _, count = self.keys.shape
        J = groups // len(q)
        scores = torch.bmm(_folded(q, J).to(self.dtype) * self.scale, self.keys)
        scores = scores.view(groups, -1, self.num_chunks, count // self.num_chunks)
        if self.bias is not None:
            scores.add_(_of_rows(self.bias, scores))
        if beside is not None:
            lse = beside[1].clamp(min=torch.finfo(beside[1].dtype).min / 4)  # as of the op
            null = _folded(lse[..., None], J).to(self.dtype)
            shares = torch.cat([scores.flatten(2), null], dim=-1).softmax(-1)[..., :-1]
        else:
            shares = self._softmax(scores)
            if self.weight is not None:
                shares = shares * _of_rows(self.weight, scores)
            shares = shares.flatten(2)
        out = torch.bmm(shares, self.values)
        if beside is not None:
            out.addcmul_(shares.sum(-1, keepdim=True), _folded(beside[0], J).to(self.dtype), value=-1)
        return _unfolded(out, q).to(q.dtype)

    def _softmax(self, scores: Tensor) -> Tensor:
        """Of scores [B * J, g R, K, V], within each chunk."""
        if self.off_by_one and not self.is_padded:
            return F.pad(scores, (0, 1)).softmax(-1)[..., :-1]
        shares = scores.softmax(-1)
        if self.off_by_one or self.bias is None:
            return shares
        return shares.masked_fill(self.bias == -torch.inf, 0)  # NaN in chunks without keys


@dataclass
class ReadAgain:
    """What calls of :func:`grouped_cross_attention` that differ in their queries alone share; new, it is empty."""

    reader: OneReader | None = None

    def serves(self, q: Tensor) -> bool:
        """Whether a call with these queries may do without its other arguments."""
        return (
            self.reader is not None
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and self.reader.fits(q)
        )

    def read(self, q: Tensor, beside: tuple[Tensor, Tensor] | None) -> Tensor:
        assert self.reader is not None
        return self.reader.read(q, beside)


def _what_is_read(call: CrossAttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Keys and values [B * J, K, S, D], weights [B * J, 1 or g, K, 1], and the keys of each chunk [B * J, K].

    These are None where all have S; what is not read has none, and a weight of 0.
    """
    k, v, indices, weights, lengths = call.k, call.v, call.indices, call.weights, call.lengths
    B, M, S, J, _ = k.shape
    K, chosen = indices.shape[-1], indices[:, 0]  # [B, J, K]
    weight = weights.view(B, J, weights.shape[2] // J, K)
    nothing = None if call.beside is None else (weight == 0).all(2)  # [B, J, K] what is not read; None: none
    order, read = torch.arange(K), chosen
    if int(chosen.min()) < 0:
        missing = chosen < 0
        read = order.where(missing, chosen)
        nothing = missing if nothing is None else nothing | missing
    if K == M and torch.equal(read, order.expand_as(read)):  # in order, maybe with gaps
        keys, values = (x.permute(0, 3, 1, 2, 4) for x in (k, v))  # [B, J, K, S, D]
        present = None if lengths is None else lengths[:, None].expand(B, J, K)
    else:
        row, at, head = torch.arange(B)[:, None, None], chosen.clamp(min=0), torch.arange(J)[:, None]
        keys, values = (x[row, at, :, head] for x in (k, v))
        present = None if lengths is None else lengths[row, at]
    if nothing is not None and bool(nothing.any()):
        present = (torch.full_like(chosen, S) if present is None else present).masked_fill(nothing, 0)
        weight = weight.masked_fill(nothing[:, :, None], 0)
    if present is not None:
        present = present.flatten(0, 1) if bool((present < S).any()) else None
    # no copies of keys and values, if those of each head stand side by side
    return keys.flatten(0, 1), values.flatten(0, 1), weight.flatten(0, 1)[..., None], present


def _of_rows(x: Tensor, scores: Tensor) -> Tensor:
    """What query heads have, [B * J, 1 or g, ...], for each of their rows of scores [B * J, g R, ...]."""
    return x if x.shape[1] == 1 else x.repeat_interleave(scores.shape[1] // x.shape[1], dim=1)


def _folded(x: Tensor, J: int) -> Tensor:
    """Of positions x [B, 1, R, H, D] the rows of each key/value head, [B * J, g R, D]."""
    B, _, R, H, D = x.shape
    if R == 1:
        return x.reshape(B * J, H // J, D)
    return x.reshape(B, R, J, H // J, D).permute(0, 2, 3, 1, 4).reshape(B * J, -1, D)


def _unfolded(rows: Tensor, like: Tensor) -> Tensor:
    """Rows [B * J, g R, D] as positions [B, 1, R, H, D], as ``like`` has them."""
    B, _, R, H, D = like.shape
    return rows.view(B, H, R, D).transpose(1, 2).reshape(like.shape)
