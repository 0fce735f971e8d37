"""Cases for Landmark Attention, and their budget; benchmarks/gpu_checks.py runs them too: no pytest, no hypothesis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.budgets import assert_low_precision_within_budget
from tests.pairwise import pairwise
from trailmark.ops import landmark_attention

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def marks(kind: str, B: int, T: int, S: int, random: torch.Generator) -> Tensor:
    """bool [B, T]: landmarks after every S regular tokens, or what ``kind`` says."""
    place = torch.arange(T).expand(B, T)
    if kind == "regular":
        return place % (S + 1) == S
    if kind == "phase":  # rows begin inside a chunk, each elsewhere
        return (place + torch.randint(1, S + 1, (B, 1), generator=random)) % (S + 1) == S
    if kind == "random":
        return torch.rand(B, T, generator=random) < 1 / (S + 1)
    if kind == "pairs":  # the second of each closes a chunk without tokens; the first place is a landmark
        return (place % (S + 2) >= S) | (place == 0)
    return torch.full((B, T), {"none": False, "all": True}[kind])


def documents(kind: str | None, B: int, T: int, random: torch.Generator) -> Tensor | None:
    """int64 [B, T] or None: padding on a side or between, or several documents."""
    if kind is None:
        return None
    place = torch.arange(T)
    size = torch.randint(0, max(T // 2, 1), (B, 1), generator=random)
    if kind == "left":
        return -(place < size).long()
    if kind == "right":
        return -(place >= T - size).long()
    if kind == "between":  # inside chunks too
        return -(torch.rand(B, T, generator=random) < 0.2).long()
    if kind == "several":  # one after the other, ids in no order, padding last
        ids = (place * 3 + size) // max(T, 1)
        return torch.tensor([7, 2, 5, -1])[ids.clamp(max=3)]
    assert kind == "mixed"  # documents take turns
    return torch.randint(-1, 3, (B, T), generator=random)


def places(kind: str | None, document_ids: Tensor | None, B: int, T: int) -> Tensor | None:
    """int64 [B, P] or None: each row's last queries stand elsewhere, absent ones before or after them."""
    if kind is None:
        return None
    present = torch.ones(B, T, dtype=torch.bool) if document_ids is None else document_ids >= 0
    P = max(T // 2, 1)
    found = torch.full((B, P), -1)
    for b in range(B):
        row = present[b].nonzero()[:, 0]
        row = row[len(row) - min(len(row), P - b % P) :]  # each row one query fewer
        if len(row):
            at = slice(P - len(row), P) if kind == "left" else slice(0, len(row))
            found[b, at] = row
    return found


def inputs(
    B: int = 2,
    T: int = 40,
    P: int | None = None,
    J: int = 2,
    g: int = 1,
    D: int = 16,
    S: int = 7,
    marks_kind: str = "regular",
    documents_kind: str | None = None,
    places_kind: str | None = None,
    causal: bool = True,
    dtype: torch.dtype = torch.float32,
    fused: bool = False,
    seed: int = 0,
) -> tuple[list[Tensor], dict[str, Any]]:
    """([q, k, v], the other arguments of landmark_attention), rounded to ``dtype``.

    ``P``: the last P places ask. ``fused``: q, k and v are views of wider tensors, as a fused projection makes them.
    """
    random = torch.Generator().manual_seed(seed)
    is_landmark = marks(marks_kind, B, T, S, random)
    document_ids = documents(documents_kind, B, T, random)
    query_places = places(places_kind, document_ids, B, T)
    P = query_places.shape[1] if query_places is not None else T if P is None else P

    def normal(*shape: int) -> Tensor:
        if fused:
            wide = torch.randn(*shape[:-1], 3 * shape[-1], generator=random, dtype=torch.float64)
            return wide.to(DEVICE, dtype)[..., shape[-1] : 2 * shape[-1]]
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(DEVICE, dtype)

    tensors = [normal(B, P, J * g, D), normal(B, T, J, D), normal(B, T, J, D)]
    rest = {"is_landmark": is_landmark, "document_ids": document_ids, "query_places": query_places}
    moved = {name: None if x is None else x.to(DEVICE) for name, x in rest.items()}
    return tensors, moved | {"causal": causal}


def op(
    rest: dict[str, Any], implementation: str | None, **options: Any
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The output and the log-sum-exps, 8 where there is none: -inf has no difference to -inf."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = landmark_attention(
            q, k, v, **rest, implementation=implementation, return_lse=True, **options
        )
        return out, lse.masked_fill(lse == -torch.inf, 8)

    return run


def assert_budget(
    tensors: list[Tensor], rest: dict[str, Any], implementation: str = "triton", **options: Any
) -> None:
    """The output, the log-sum-exps and all three gradients."""
    fast, oracle = (op(rest, name, **options) for name in (implementation, "reference"))
    names = ("out", "lse", "dq", "dk", "dv")
    assert_low_precision_within_budget(fast, oracle, *tensors, names=names)


# Triton's, on a GPU
COVER = pairwise(
    {
        "D": (16, 32, 64, 80, 96, 128, 256),
        "g": (1, 2, 3, 4, 8),
        "S": (1, 2, 15, 50, 63, 64, 130),
        "T": (64, 200, 513),
        "P": (None, 1, 37),
        "J": (1, 2),
        "marks_kind": ("regular", "phase", "random", "pairs", "none", "all"),
        "documents_kind": (None, "left", "right", "several", "between", "mixed"),
        "causal": (True, False),
        "dtype": (torch.float32, torch.bfloat16, torch.float16),
        "fused": (False, True),
    }
)
