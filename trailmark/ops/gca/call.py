"""What the implementations of Grouped Cross-Attention are called with."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class CrossAttentionCall(NamedTuple):
    """A checked call of :func:`grouped_cross_attention`."""

    q: Tensor  # [B, N, R, H, D]
    k: Tensor  # [B, M, S, J, D]
    v: Tensor  # [B, M, S, J, D]
    indices: Tensor  # [B, N, J, K]
    weights: Tensor  # [B, N, J, K]
    lengths: Tensor | None  # [B, M]
    off_by_one: bool
    scale: float
