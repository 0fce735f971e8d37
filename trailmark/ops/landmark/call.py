"""What the implementations of Landmark Attention are called with."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from trailmark.ops.landmark.layout import LandmarkLayout


class LandmarkCall(NamedTuple):
    """A checked call of :func:`landmark_attention`; keys and queries stand in the layout's order."""

    q: Tensor  # [B, P, H, D]
    k: Tensor  # [B, T, J, D]
    v: Tensor  # [B, T, J, D]
    layout: LandmarkLayout
    scale: float
