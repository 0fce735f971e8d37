"""All scores of a selection, for a loss over every candidate: :func:`select_chunks` returns those selected alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trailmark.ops.arguments import arithmetic_dtype, require, without_autocast
from trailmark.ops.selection.api import bounds_of
from trailmark.ops.selection.call import less_for_age


@without_autocast
def score_chunks(
    query: Tensor,
    landmarks: Tensor,
    num_candidates: Tensor | int,
    first_candidate: Tensor | int = 0,
    scale: float | None = None,
    recency: float = 0.0,
) -> Tensor:
    r"""The scores :math:`r_{nm}` of :func:`trailmark.ops.select_chunks`, without noise, of all candidates.

    Memory is [B, N, M]: of a training text, never of a memory of millions of tokens. Differentiable in query and
    landmarks.

    Args:
        query: [B, N, E]. landmarks: [B, M, E].
        num_candidates, first_candidate: int64 [N] or [B, N] (or an int), as in :func:`select_chunks`.
        recency: as there.
        scale: None is E ** -0.5.

    Returns:
        [B, N, M] in float32 or wider; -inf where chunk m is no candidate of query n.

    Raises:
        ValueError: for shapes that do not fit together.
    """
    require(0 <= recency < math.inf, "recency", recency, "at least 0, and finite")
    require(query.dim() == 3, "query", tuple(query.shape), "shape [B, N, E]")
    fits = landmarks.dim() == 3 and landmarks.shape[::2] == query.shape[::2]
    require(fits, "landmarks", tuple(landmarks.shape), "shape [B, M, E], B and E as of query")
    dtype = arithmetic_dtype(query, landmarks)
    scores = query.to(dtype) @ landmarks.to(dtype).mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    (B, N, _), chunk = query.shape, torch.arange(landmarks.shape[1], device=query.device)
    start = bounds_of("first_candidate", _of_all(first_candidate), B, N, query.device, False).each[..., None]
    end = bounds_of("num_candidates", _of_all(num_candidates), B, N, query.device, False).each[..., None]
    candidate = (chunk >= start) & (chunk < end)
    if recency:
        scores = scores - less_for_age(recency, end, chunk, dtype)
    return scores.masked_fill(~candidate, -torch.inf)


def _of_all(bound: Tensor | int) -> Tensor | int:
    """[N] for [1, N], which are the same for all rows."""
    return bound[0] if isinstance(bound, Tensor) and bound.dim() == 2 and len(bound) == 1 else bound
