"""Selecting past chunks by score: the retrieval of DRT (arXiv 2410.01651, Sec. 3.1)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trailmark.ops import reference
from trailmark.ops.arguments import (
    arithmetic_dtype,
    require,
    require_chunk_numbers,
    require_implementation,
    require_shape,
    whole_numbers,
    without_autocast,
)

# Scores held at once: N is walked in slabs so that N x M never stands in memory whole.
_SLAB_ELEMENTS = 1 << 22


class ChunkSelection(NamedTuple):
    """What a chunk retrieves: K columns always, ascending chunk numbers, the missing ones last."""

    indices: Tensor
    """[B, N, (J,) K] int64; -1 where nothing was left to select."""
    weights: Tensor
    """Same shape; softmax over the selected noise-free scores, 0 where -1; differentiable."""
    scores: Tensor
    """Same shape; the selected noise-free scores, -inf where -1; differentiable."""


@without_autocast
def select_chunks(
    query: Tensor,
    landmarks: Tensor,
    num_retrieved: int,
    num_candidates: Tensor,
    first_candidate: Tensor | int = 0,
    indices: Tensor | None = None,
    noise_seed: Tensor | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> ChunkSelection:
    r"""Select for each query the ``num_retrieved`` chunks whose landmarks score best.

    .. math::
        r_{nm} = \mathrm{scale} \cdot q_n^\top l_m, \qquad
        I_n = \mathrm{topK}_{m}(r_{nm} + \gamma_{nm}), \qquad
        w_{nk} = \frac{\exp r_{n, I_{nk}}}{\sum_{k'} \exp r_{n, I_{nk'}}}

    with :math:`f_n \le m < c_n` (first and number of candidates) and Gumbel noise :math:`\gamma` that takes
    part in the choice only. Equal scores select the earlier chunk. Source: arXiv 2410.01651, Sec. 3.1.

    Args:
        query: [B, N, E], or [B, N, J, E] to select per key/value head.
        landmarks: [B, M, E] or [B, M, J, E]. A batch of stride 0 (``expand``) is shared, not copied.
        num_retrieved: K >= 1.
        num_candidates: int64 [N] or [B, N]: query n may select chunks m < num_candidates[n].
        first_candidate: an int or int64 of the same shapes: and m >= first_candidate[n].
        indices: int64 [B, N, (J,) K], ascending with -1 last: no search; these chunks are scored and weighed.
        noise_seed: int64 [B]: the noise is an integer hash of (seed, head, n, m). None: no noise.
        scale: None is E ** -0.5.
        implementation: None, "reference" or "torch".

    Raises:
        ValueError: for shapes that do not fit together or chunks that do not exist.
    """
    require_implementation(implementation, ("reference", "torch"))
    per_head = query.dim() == 4
    require(query.dim() in (3, 4), "query", tuple(query.shape), "shape [B, N, E] or [B, N, J, E]")
    require(
        landmarks.dim() == query.dim(), "landmarks", tuple(landmarks.shape), "as many dimensions as query has"
    )
    require(num_retrieved >= 1, "num_retrieved", num_retrieved, "at least 1")
    if not per_head:
        query, landmarks = query[:, :, None], landmarks[:, :, None]
    B, N, J, E = query.shape
    M = landmarks.shape[1]
    require_shape("landmarks", landmarks, (B, M, J, E), "[B, M, (J,) E]")
    scale = E**-0.5 if scale is None else scale

    if indices is not None:
        wanted = (B, N, J, num_retrieved) if per_head else (B, N, num_retrieved)
        require_shape("indices", indices, wanted, "[B, N, (J,) K]")
        chosen = whole_numbers("indices", indices if per_head else indices[:, :, None])
        require_chunk_numbers("indices", chosen, M)
    else:
        end = _bounds("num_candidates", num_candidates, B, N, query.device)
        start = _bounds("first_candidate", first_candidate, B, N, query.device)
        if end.numel():
            require(int(end.max()) <= M, "num_candidates", int(end.max()), f"at most M = {M} chunks")
            require(int(start.min()) >= 0, "first_candidate", int(start.min()), "no negative chunk")
        if noise_seed is not None:
            require_shape("noise_seed", noise_seed, (B,), "[B]")
            noise_seed = whole_numbers("noise_seed", noise_seed)
        if implementation == "reference":
            noise = None if noise_seed is None else gumbel_noise(noise_seed, 0, N, J, M)
            out = reference.select_chunks(query, landmarks, num_retrieved, end, start, noise, scale)
            return ChunkSelection(*(x if per_head else x[:, :, 0] for x in out))
        chosen = _search(query.detach(), landmarks.detach(), num_retrieved, start, end, noise_seed, scale)

    scores = _score_selected(query, landmarks, chosen, scale)
    weights = _weigh(scores, chosen)
    out = (chosen, weights, scores)
    return ChunkSelection(*(x if per_head else x[:, :, 0] for x in out))


def fold_seed(seed: Tensor | int, *numbers: Tensor | int) -> Tensor:
    """Mix integers into one non-negative int64 seed by a 32-bit integer hash (design, semantics 3).

    ``fold_seed(seed, step, sample, group)`` is the seed of one sample's noise in one group. Any argument may
    be a tensor; they broadcast. Only 32-bit multiplications, xors and shifts, so a kernel draws the same bits.
    """
    mixed = _mix(whole_numbers("seed", torch.as_tensor(seed)))
    for number in numbers:
        other = whole_numbers("numbers", torch.as_tensor(number))
        # what has no dimension goes where the other is
        device = mixed.device if mixed.dim() else other.device
        mixed = _mix(mixed.to(device) * 0x9E3779B1 + other.to(device) + 0x7F4A7C15)
    return mixed


def gumbel_noise(noise_seed: Tensor, first_query: int, num_queries: int, num_heads: int, M: int) -> Tensor:
    """Standard Gumbel noise [B, N, J, M] for queries ``first_query ...``, a hash of (seed, head, n, m)."""
    device = noise_seed.device
    n = torch.arange(first_query, first_query + num_queries, device=device)[:, None, None]
    head = torch.arange(num_heads, device=device)[:, None]
    m = torch.arange(M, device=device)
    bits = _mix(fold_seed(noise_seed[:, None, None, None], head, n) * 0x9E3779B1 + m)
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-32  # inside (0, 1): both logarithms are finite
    return -torch.log(-torch.log(uniform)).to(torch.float32)


def _mix(x: Tensor) -> Tensor:
    # The finaliser of MurmurHash3 (public domain) on the low 32 bits; int64 products wrap harmlessly.
    mask = 0xFFFFFFFF
    x = (x ^ (x >> 32)) & mask
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & mask
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & mask
    return x ^ (x >> 16)


def _bounds(argument: str, bound: Tensor | int, B: int, N: int, device: torch.device) -> Tensor:
    bound = torch.as_tensor(bound, device=device)
    require(
        tuple(bound.shape) in ((), (N,), (B, N)),
        argument,
        tuple(bound.shape),
        f"shape [N] = ({N},) or [B, N]",
    )
    return whole_numbers(argument, bound).expand(B, N)


def _search(
    query: Tensor,  # [B, N, J, E]
    landmarks: Tensor,  # [B, M, J, E]
    K: int,
    start: Tensor,  # [B, N]
    end: Tensor,  # [B, N]
    noise_seed: Tensor | None,
    scale: float,
) -> Tensor:
    """The chosen chunks [B, N, J, K], in slabs of queries."""
    B, N, J, _ = query.shape
    M = landmarks.shape[1]
    dtype = arithmetic_dtype(query, landmarks)
    if B == 0 or N == 0 or M == 0:
        return torch.full((B, N, J, K), -1, dtype=torch.int64, device=query.device)
    shared = B > 1 and landmarks.stride(0) == 0
    table = (landmarks[:1] if shared else landmarks).permute(0, 2, 3, 1).to(dtype)  # [B or 1, J, E, M]
    lengths = table.norm(dim=2)[:, :, None]  # [B or 1, J, 1, M]
    chunk = torch.arange(M, device=query.device)
    step = max(1, _SLAB_ELEMENTS // (B * J * M))
    found = []
    for first in range(0, N, step):
        rows = slice(first, min(first + step, N))
        asked = query[:, rows].transpose(1, 2).to(dtype) * scale  # [B, J, n, E]
        n = asked.shape[2]
        if shared:
            flat = asked.transpose(0, 1).reshape(1, J, B * n, -1)
            scores = (flat @ table).view(J, B, n, M).transpose(0, 1)
        else:
            scores = asked @ table  # [B, J, n, M]
        noise = None
        if noise_seed is not None:
            noise = gumbel_noise(noise_seed, first, n, J, M).transpose(1, 2)
            scores = scores + noise
        outside = (chunk < start[:, rows, None]) | (chunk >= end[:, rows, None])  # [B, n, M]
        # filled, not added to: NaN - inf is NaN, which topk takes for the largest
        scores = scores.masked_fill(outside[:, None], -torch.inf)
        rounding = 8 * torch.finfo(dtype).eps * asked.norm(dim=-1)  # of a score by a landmark of length 1
        chosen, contested = _top(scores, K, rounding, lengths.expand(B, J, n, M))
        if bool(contested.any()):
            # A GEMM rounds equal columns differently; a sum per chunk does not, so equal chunks tie (semantics 9).
            for places in contested.nonzero().split(max(1, _SLAB_ELEMENTS // (M * asked.shape[-1]))):
                b, j, row = places.unbind(1)
                exact = (asked[b, j, row][:, None] * landmarks[b, :, j].to(dtype)).sum(-1)
                exact = exact if noise is None else exact + noise[b, j, row]
                exact = exact.masked_fill(outside[b, row], -torch.inf)
                order = exact.sort(dim=-1, descending=True, stable=True)
                chosen[b, j, row] = _ascending(order.values, order.indices, K)
        found.append(chosen)
    return torch.cat(found, dim=2).transpose(1, 2)


def _top(scores: Tensor, K: int, rounding: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The K best of the last dimension, and where the last place is contested within rounding.

    What rounds are the two scores for that place; another chunk's length, or NaN, has no say in it.
    """
    kept = min(K, scores.shape[-1])
    values, chosen = scores.topk(min(K + 1, scores.shape[-1]), dim=-1)
    contested = torch.zeros(scores.shape[:-1], dtype=torch.bool, device=scores.device)
    if values.shape[-1] > kept:
        last, next_best = values[..., kept - 1], values[..., kept]
        longest = lengths.gather(-1, chosen[..., kept - 1 : kept + 1]).amax(-1)
        contested = (last - next_best <= rounding * longest) & next_best.isfinite()
    return _ascending(values, chosen, K), contested


def _ascending(values: Tensor, chosen: Tensor, K: int) -> Tensor:
    """The first K of a descending order as ascending chunk numbers, -1 (no candidate) last."""
    last = 1 << 53  # after every chunk; what pad can pass on exactly
    chosen = chosen[..., :K].masked_fill(values[..., :K] == -torch.inf, last).sort(dim=-1).values
    chosen = torch.nn.functional.pad(chosen, (0, K - chosen.shape[-1]), value=last)
    return chosen.masked_fill(chosen == last, -1)


def _score_selected(query: Tensor, landmarks: Tensor, chosen: Tensor, scale: float) -> Tensor:
    """Scores [B, N, J, K] of the chosen chunks; -inf where -1. Differentiable in query and landmarks."""
    B, N, J, E = query.shape
    M, K = landmarks.shape[1], chosen.shape[-1]
    dtype = arithmetic_dtype(query, landmarks)
    if M == 0:
        # keeps the graph: a zero gradient, not None (DDP)
        empty = query.sum(-1, keepdim=True).to(dtype) * 0 + landmarks.sum().to(dtype) * 0
        return empty.expand(B, N, J, K).masked_fill(chosen < 0, -torch.inf)
    if B > 1 and landmarks.stride(0) == 0:
        table, row = landmarks[0], torch.zeros((), dtype=torch.int64, device=query.device)
    else:
        table, row = landmarks.flatten(0, 1), torch.arange(B, device=query.device)[:, None, None, None] * M
    head = torch.arange(J, device=query.device)[:, None]
    flat = ((row + chosen.clamp(min=0)) * J + head).reshape(-1)
    # index_select, not table[flat]: its backward repeats bit for bit on several threads (semantics 7)
    picked = table.reshape(-1, E).index_select(0, flat).view(B, N, J, K, E)
    scores = (query[..., None, :].to(dtype) * picked.to(dtype)).sum(-1) * scale
    return scores.masked_fill(chosen < 0, -torch.inf)


def _weigh(scores: Tensor, chosen: Tensor) -> Tensor:
    """Softmax over the selected scores; rows that selected nothing get zeros and zero gradients."""
    none = (chosen < 0).all(-1, keepdim=True)
    return scores.masked_fill(none, 0).softmax(-1).masked_fill(chosen < 0, 0)
