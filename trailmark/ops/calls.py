"""What an op's implementations are called with, typed once: a tuple for each, and its fields for ``torch.library``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar, get_type_hints

from torch import Tensor

from trailmark.ops.landmark.layout import LandmarkLayout

R = TypeVar("R")


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


class LandmarkCall(NamedTuple):
    """A checked call of :func:`landmark_attention`; keys and queries stand in the layout's order."""

    q: Tensor  # [B, P, H, D]
    k: Tensor  # [B, T, J, D]
    v: Tensor  # [B, T, J, D]
    layout: LandmarkLayout
    scale: float


class SearchCall(NamedTuple):
    """A checked call of :func:`select_chunks` that searches."""

    query: Tensor  # [B, N, J, E]
    segments: Sequence[Tensor]  # [B, m, J, E] each
    num_retrieved: int  # K
    start: Tensor  # [B, N]: the first candidate of each query
    end: Tensor  # [B, N]: and the one after its last
    noise_seed: Tensor | None  # [B]
    scale: float


def spelled_out(function: Callable[..., R]) -> Callable[..., R]:
    """``function`` with the fields of its NamedTuples as arguments of their own.

    ``torch.library`` reads an op's schema off a signature and knows tensors and numbers alone: in the place of a
    parameter that is a NamedTuple stand its fields, in order. What is registered so is called with ``*call`` there.
    """
    kinds = get_type_hints(function)
    returned = kinds.pop("return")
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
        for given, whole in kinds.items()
        for name, kind in (get_type_hints(whole) if hasattr(whole, "_fields") else {given: whole}).items()
    ]

    def run(*arguments: Any) -> R:
        left = iter(arguments)
        return function(
            *(
                kind(*islice(left, len(kind._fields))) if hasattr(kind, "_fields") else next(left)
                for kind in kinds.values()
            )
        )

    run.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
    return run
