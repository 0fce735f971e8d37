"""What the implementations of a search over landmarks are called with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
