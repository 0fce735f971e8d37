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
    """What one chunk of each row reads, ready for queries like those of the call that it was made of."""

    call: CrossAttentionCall
    keys: Tensor  # [B * J, D, K * S]
    values: Tensor  # [B * J, K * S, D]
    weight: Tensor  # [B * J, 1 or g, K, 1]
    # [B * J, 1 or g, K, S or 1] added to scores: what is absent, and beside something else the weights; None: nothing
    bias: Tensor | None

    @classmethod
    def of(cls, call: CrossAttentionCall) -> OneReader:
        """Of the chunks and weights of a call. Nothing that is absent has an effect, not even as NaN."""
        keys, values, weight, present = _what_is_read(call)
        keys, values, weight = (x.to(call.dtype) for x in (keys, values, weight))
        bias = None
        if present is not None:
            absent = torch.arange(keys.shape[2]) >= present[..., None]  # [B * J, K, S]
            keys, values = (x.masked_fill(absent[..., None], 0) for x in (keys, values))
            bias = torch.zeros(absent.shape, dtype=keys.dtype).masked_fill_(absent, -torch.inf)[:, None]
        if call.beside is not None:
            bias = weight.log() if bias is None else weight.log() + bias
        return cls(call, keys.flatten(1, 2).transpose(1, 2), values.flatten(1, 2), weight, bias)

    def fits(self, q: Tensor, beside: tuple[Tensor, Tensor] | None) -> bool:
        """Whether it can be asked so: by any few positions, and else as the call that it was made of."""
        like = self.call.q
        if (beside is None) != (self.call.beside is None) or q.dim() != 5 or q.device != like.device:
            return False
        if beside is not None and (beside[0].shape != q.shape or beside[1].shape != q.shape[:4]):
            return False
        (B, N, R, H, D), J = q.shape, self.call.k.shape[3]
        same = q.dtype == like.dtype and (len(like), *like.shape[3:]) == (B, H, D)
        return same and N == 1 and H // J * R <= FEW_ROWS

    def read(self, q: Tensor, beside: Tensor | None, beside_lse: Tensor | None) -> Tensor:
        """What positions with the queries q [B, 1, R, H, D] read, in their dtype; the rest as in a call."""
        (J, K), dtype = (self.call.k.shape[3], self.weight.shape[2]), self.keys.dtype
        groups, _, count = self.keys.shape
        scores = torch.bmm(_folded(q, J).to(dtype) * self.call.scale, self.keys)
        scores = scores.view(groups, -1, K, count // K)
        if self.bias is not None:
            scores.add_(_of_rows(self.bias, scores))
        if beside_lse is not None:
            null = _folded(beside_lse[..., None], J).to(dtype)
            shares = torch.cat([scores.flatten(2), null], dim=-1).softmax(-1)[..., :-1]
        else:
            shares = (self._softmax(scores) * _of_rows(self.weight, scores)).flatten(2)
        out = torch.bmm(shares, self.values)
        if beside is not None:
            out.addcmul_(shares.sum(-1, keepdim=True), _folded(beside, J).to(dtype), value=-1)
        return _unfolded(out, q).to(q.dtype)

    def _softmax(self, scores: Tensor) -> Tensor:
        """Of scores [B * J, g R, K, S], within each chunk."""
        if self.call.off_by_one:  # a virtual key with score 0 and value 0 (Eq. 3)
            return F.pad(scores, (0, 1)).softmax(-1)[..., :-1]
        shares = scores.softmax(-1)
        if self.bias is None:
            return shares
        return shares.masked_fill(self.bias == -torch.inf, 0)  # NaN in chunks without keys


@dataclass
class ReadAgain:
    """What calls of :func:`grouped_cross_attention` that differ in their queries alone share; new, it is empty."""

    reader: OneReader | None = None

    def serves(self, q: Tensor, beside: tuple[Tensor, Tensor] | None, implementation: str | None) -> bool:
        """Whether a call may do without its other arguments."""
        if self.reader is None or implementation not in (None, "torch"):
            return False
        return (
            not torch.is_grad_enabled() and not torch.compiler.is_compiling() and self.reader.fits(q, beside)
        )


def _what_is_read(call: CrossAttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Keys and values [B * J, K, S, D], weights [B * J, 1 or g, K, 1], and the keys of each chunk [B * J, K].

    The last are None where every chunk has S; what is not read has none, and a weight of 0.
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
