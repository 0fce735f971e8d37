"""What the implementations of a search over landmarks are called with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class SearchCall(NamedTuple):
    """A checked call of :func:`select_chunks` that searches."""

    query: Tensor  # [B, N, J, E]
    segments: Sequence[Tensor]  # [B, m, J, E] each
    num_retrieved: int  # K
    start: Tensor  # [B, N]: the first candidate of each query
    end: Tensor  # [B, N]: and the one after its last
    noise_seed: Tensor | None  # [B]
    scale: float
    recency: float  # 0 or more
    first_query: int  # what number the noise knows query 0 by


def less_for_age(recency: float, end: Tensor, chunk: Tensor, dtype: torch.dtype) -> Tensor:
    """What a chunk's score loses that is the ``end - chunk``-th from the last candidate.

    The logarithm is taken in float64: in float32 it may depend on where in a block a number stands (guarantee 7).
    """
    return ((end - chunk).clamp(min=1).double().log() * recency).to(dtype)
