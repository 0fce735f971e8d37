"""Cases for the kernels of GCA, and their budget; benchmarks/gpu.py runs them too: no pytest, no hypothesis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.budgets import assert_low_precision_within_budget
from tests.pairwise import pairwise
from trailmark.ops import grouped_cross_attention
from trailmark.ops.gca import triton_path as kernels

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def inputs(
    B: int = 2,
    N: int = 5,
    R: int = 3,
    J: int = 2,
    g: int = 1,
    D: int = 16,
    M: int = 6,
    S: int = 16,
    K: int = 2,
    dtype: torch.dtype = torch.float32,
    per_head: bool = False,
    per_query_head: bool = False,
    lengths: bool = False,
    fused: bool = False,
    beside: bool = False,
    seed: int = 0,
) -> tuple[list[Tensor], dict[str, Any]]:
    """([q, k, v, weights, and what is beside], indices and lengths), rounded to ``dtype``; -1 anywhere, chunks chosen
    twice, empty ones.

    ``per_query_head``: key/value heads select for themselves, and each query head weighs that for itself.

    ``fused``: q, k and v are views of wider tensors, as a fused projection makes them. ``beside``: as of a window.
    """
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        if fused:
            wide = torch.randn(*shape[:-1], 3 * shape[-1], generator=random).to(DEVICE, dtype)
            return wide[..., shape[-1] : 2 * shape[-1]]
        return torch.randn(*shape, generator=random).to(DEVICE, dtype)

    q, k, v = normal(B, N, R, J * g, D), normal(B, M, S, J, D), normal(B, M, S, J, D)
    chosen = (B, N, J, K) if per_head or per_query_head else (B, N, K)
    indices = torch.randint(-1, M, chosen, generator=random).to(DEVICE)
    weighed = (B, N, J * g, K) if per_query_head else chosen
    weights = torch.rand(weighed, generator=random).to(DEVICE, dtype)
    present = torch.randint(0, S + 1, (B, M), generator=random).to(DEVICE) if lengths else None
    more = [normal(B, N, R, J * g, D), normal(B, N, R, J * g)] if beside else []
    return [q, k, v, weights, *more], {"indices": indices, "lengths": present}


@contextmanager
def unsplit() -> Iterator[None]:
    """The forward walks over all retrieved chunks in one program, as it does where there are many queries."""
    before = kernels._PROGRAMS
    kernels._PROGRAMS = 0
    try:
        yield
    finally:
        kernels._PROGRAMS = before


def op(rest: dict[str, Any], implementation: str, **options: Any) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, *beside: Tensor) -> Tensor:
        given = (beside[0], beside[1]) if beside else None
        return grouped_cross_attention(
            q,
            k,
            v,
            rest["indices"],
            weights,
            rest["lengths"],
            implementation=implementation,
            beside=given,
            **options,
        )

    return run


def assert_budget(tensors: list[Tensor], rest: dict[str, Any], **options: Any) -> None:
    """The output and all gradients."""
    fast, oracle = (op(rest, name, **options) for name in ("triton", "reference"))
    names = ("out", "dq", "dk", "dv", "dw", "d beside", "d its lse")
    assert_low_precision_within_budget(fast, oracle, *tensors, names=names[: 1 + len(tensors)])


COVER = pairwise(
    {
        "D": (16, 32, 64, 80, 96, 128, 256),
        "g": (1, 2, 3, 4, 8, 12),
        "S": (1, 16, 63, 64, 65, 128, 130),
        "K": (1, 2, 7, 8, 32),
        "R": (1, 3, 63, 64, 65),
        "J": (1, 2, 3),
        "dtype": (torch.float32, torch.bfloat16, torch.float16),
        "per_head": (False, True),
        "per_query_head": (False, True),
        "lengths": (False, True),
        "off_by_one": (True, False),
        "fused": (False, True),
    }
)
# what an interpreter can do: small, no bfloat16
CHEAP_COVER = pairwise(
    {
        "D": (16, 32, 80),
        "g": (1, 2, 3),
        "S": (1, 16, 63, 65),
        "K": (1, 2, 7),
        "R": (1, 3, 20),
        "J": (1, 2),
        "dtype": (torch.float32, torch.float16),
        "per_head": (False, True),
        "per_query_head": (False, True),
        "lengths": (False, True),
        "off_by_one": (True, False),
        "fused": (False, True),
    }
)
for _number, _case in enumerate((*COVER, *CHEAP_COVER)):
    _case["beside"] = _number % 3 == 0
    _case["off_by_one"] |= _case["beside"]  # which is the virtual key
    # the oracle sums a product with a single key in several lanes, more exactly than any matrix product: in
    # float32 that is no measure for one (test_a_single_key has it at a size where it is)
    if _case["S"] == 1 and _case["dtype"] == torch.float32:
        _case["dtype"] = torch.float16
