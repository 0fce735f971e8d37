"""What the implementations of Grouped Cross-Attention are called with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trailmark.ops.arguments import arithmetic_dtype


class CrossAttentionCall(NamedTuple):
    """A checked call of :func:`grouped_cross_attention`."""

    q: Tensor  # [B, N, R, H, D]
    k: Tensor  # [B, M, S, J, D]
    v: Tensor  # [B, M, S, J, D]
    indices: Tensor  # [B, N, J, K]
    weights: Tensor  # [B, N, J or H, K]
    lengths: Tensor | None  # [B, M]
    beside: Tensor | None  # [B, N, R, H, D]
    beside_lse: Tensor | None  # [B, N, R, H]; finite
    off_by_one: bool
    scale: float

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        given = (self.q, self.k, self.v, self.weights, self.beside, self.beside_lse)
        return arithmetic_dtype(*(x for x in given if x is not None))
