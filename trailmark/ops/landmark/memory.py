"""Landmark Attention (arXiv 2305.16300) over chunks that were kept: keys stay as they lie, and queries turn to them.

RoPE turns pairs of numbers by an angle that grows with place, and only differences of places count. Keys are kept
turned by their place in their chunk; a query is turned by the distance between that chunk's beginning and its own.
Both functions are for reading alone: what a cache or a memory carries has no gradient.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from trailmark.ops.arguments import arithmetic_dtype


def landmark_memory_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    turns: Tensor,
    present: Tensor,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over the landmarks of the chunks that each unit reads, and inside each of these chunks.

    A unit is a set of R queries that read the same k chunks, in float32 or wider:

        g = softmax over chunks of q_c . k_landmark,   out = sum over chunks of g times softmax(q_c . K) V

    where q_c is q turned to chunk c, and scores are divided by sqrt(D).

    Args:
        q: [B, U, Y, R, D] of U units, each with Y key/value heads.
        keys: [B, U, Y, k, S + 1, D], a chunk's landmark in row S. values: [B, U, Y, k, S, D].
        turns: [B, U, Y or 1, k, D / 2, 2], (cos, sin) of the angles that queries turn by for each chunk.
        present: bool [B, U, Y, k]; False: there is no such chunk.
        lengths: int64 [B, U, Y, k] tokens of each chunk, at least 1; None: S.

    Returns:
        The output [B, U, Y, R, D], the log-sum-exp of the landmarks' scores [B, U, Y, R] (-inf and 0 where nothing is
        read), and these scores [B, U, Y, R, k].
    """
    S, dtype = values.shape[-2], q.dtype
    pairs = torch.view_as_complex(q.contiguous().unflatten(-1, (-1, 2)))
    turn = torch.view_as_complex(turns.contiguous())
    turned = torch.view_as_real(pairs.unsqueeze(-3) * turn.unsqueeze(-2)).flatten(-2)  # [B, U, Y, k, R, D]
    scores = (turned @ keys.mT).mul_(q.shape[-1] ** -0.5)  # [B, U, Y, k, R, S + 1]
    gates, scores = scores[..., S], scores[..., :S]
    if lengths is not None:
        absent = torch.arange(S, device=q.device) >= lengths[..., None, None]
        scores = scores.masked_fill(absent, -math.inf)
    gates = gates.masked_fill(~present[..., None], -math.inf)  # [B, U, Y, k, R]
    lse = log_sum_exp(gates, 3)
    weights = gates - lse.clamp(min=torch.finfo(dtype).min)
    inside = scores.softmax(-1).mul_(weights.exp_()[..., None])
    if inside.shape[4] < S // 2:  # few rows: one product a chunk, where values need no copy side by side
        out = (inside @ values).sum(3)
    else:
        out = inside.transpose(3, 4).flatten(4) @ values.flatten(3, 4)
    return out, lse[:, :, :, 0], gates.transpose(3, 4)


def landmark_attention_of_one(
    q: Tensor, keys: Tensor, values: Tensor, turns: Tensor, chunk_size: int, count: int
) -> tuple[Tensor, Tensor]:
    """:func:`trailmark.ops.landmark_attention` of one query a row, the last position: it turns instead of the keys.

    Args:
        q: [B, 1, H, D], turned by its place.
        keys, values: [B, J, N, D] slots, of which the first ``count`` hold whole chunks, S + 1 positions each with the
            landmark last, and then the open chunk that the query is in; keys are turned by their place in their chunk.
            Where N is a number of whole chunks and they lie without gaps, keys need no copy.
        turns: complex [C + 1, 1, D / 2]: turns q back by the beginning of each of these C + 1 chunks.

    Returns:
        The output [B, 1, H, D] in the dtype of q, and the log-sum-exp [B, 1, H] of its group, float32 or wider.
    """
    L, C = chunk_size + 1, len(turns) - 1
    B, J, N, D = keys.shape
    dtype = arithmetic_dtype(q, keys, values)
    if keys.dtype != dtype or N % L:  # a copy holds no more than is looked at
        keys = keys[:, :, : (C + 1) * L].to(dtype)
    if keys.shape[2] % L:
        keys = F.pad(keys, (0, 0, 0, -keys.shape[2] % L))
    m = keys.shape[2] // L
    pairs = torch.view_as_complex(q.to(dtype).reshape(B * J, 1, -1, D // 2, 2))
    turned = torch.view_as_real(pairs * (turns if m == C + 1 else F.pad(turns, (0, 0, 0, 0, 0, m - C - 1))))
    scores = torch.bmm(turned.view(B * J * m, -1, D), keys.reshape(-1, L, D).mT).mul_(D**-0.5)
    scores = scores.view(B * J, m, -1, L)  # each chunk's keys by the query that was turned to it
    far, own = scores[:, :C], scores[:, C, :, : count - C * L]  # [B J, C, g, L] and [B J, g, t]
    # a softmax over the landmarks and the open chunk's tokens, and one inside each chunk whose landmark is among them
    group = torch.cat([far[..., -1].mT, own], dim=-1)
    shares = group.softmax(-1)
    inside = far[..., :-1].softmax(-1) * shares[..., :C].mT[..., None]
    weights = torch.cat([F.pad(inside, (0, 1)).transpose(1, 2).flatten(2), shares[..., C:]], dim=-1)
    out = torch.bmm(weights, values[:, :, :count].to(dtype).flatten(0, 1))
    return out.view(B, 1, -1, D).to(q.dtype), group.logsumexp(-1).view(B, 1, -1)


def log_sum_exp(x: Tensor, dim: int) -> Tensor:
    """With ``dim`` kept; -inf where all are. Fewer passes than torch's, whose time is felt in decoding."""
    top = x.amax(dim, keepdim=True).clamp_(min=torch.finfo(x.dtype).min)
    return (x - top).exp_().sum(dim, keepdim=True).log_().add_(top)
