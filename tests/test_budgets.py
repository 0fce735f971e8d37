"""The error budget itself: right arithmetic keeps it in any order of summation, wrong arithmetic does not."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.budgets import (
    SHARP,
    assert_chooses_the_best,
    assert_low_precision_within_budget,
    assert_within_budget,
    values_and_gradients,
)
from trailmark.ops import (
    LandmarkLayout,
    grouped_cross_attention,
    landmark_attention,
    select_chunks,
    sliding_window_attention,
)

LOW = (torch.bfloat16, torch.float16)


def made(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T) v of q [T, D], in float32 or wider: the oracle of this file."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(dtype) @ k.to(dtype).T / q.shape[-1] ** 0.5
    return (scores.softmax(-1) @ v.to(dtype)).to(q.dtype)


def in_lanes(a: Tensor, b: Tensor, lanes: int) -> Tensor:
    """a @ b, with sums over so many lanes that are added up at the end, as wider or narrower registers do."""
    return torch.stack([a[:, i::lanes] @ b[i::lanes] for i in range(lanes)]).sum(0)


def attention_in_lanes(lanes: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = in_lanes(q.to(dtype), k.to(dtype).T, lanes) / q.shape[-1] ** 0.5
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    total = in_lanes(exponentials, torch.ones(len(k), 1, dtype=dtype), lanes)
    return in_lanes(exponentials / total, v.to(dtype), lanes).to(q.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_any_order_of_summation_keeps_the_budget_however_few_the_numbers(dtype: torch.dtype) -> None:
    """Of 120 cases with 32 numbers each, where a single draw of the oracle's error refuses some in float32."""
    refused = 0
    for seed in range(30):
        inputs = [made((n, 8), 3 * seed + i, dtype) for i, n in enumerate((4, 40, 40))]
        for lanes in (1, 3, 4, 8):
            fast = partial(attention_in_lanes, lanes)
            assert_low_precision_within_budget(fast, attention, *inputs)
            triples = zip(
                values_and_gradients(fast, *inputs),
                values_and_gradients(attention, *inputs),
                values_and_gradients(attention, *(x.double() for x in inputs)),
                strict=True,
            )
            try:
                for triple in triples:
                    assert_within_budget(*triple)
            except AssertionError:
                refused += 1
    assert refused < 30
    assert refused or dtype in LOW


def narrowed(x: Tensor) -> Tensor:
    """Rounded to bfloat16 or float16 and back, as arithmetic that forgets to promote rounds."""
    return x.to(torch.bfloat16).to(x.dtype)


def with_a_mistake(mistake: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The attention of this file with something wrong."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(dtype) @ k.to(dtype).T / q.shape[-1] ** 0.5
    if mistake == "rounded scores":
        scores = narrowed(scores)
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    total = exponentials.sum(-1, keepdim=True)
    if mistake == "rounded sums":
        total = torch.zeros(len(q), 1, dtype=dtype)
        for column in exponentials.T:
            total = narrowed(total + column[:, None])
    if mistake == "rounded probabilities":
        exponentials = narrowed(exponentials)
    if mistake == "a key too few":
        exponentials = exponentials * (torch.arange(len(k)) < len(k) - 1)
    return (exponentials / total @ v.to(dtype)).to(q.dtype)


MISTAKES = ["rounded scores", "rounded sums", "a key too few"]


@pytest.mark.parametrize(
    ("mistake", "dtype"),
    [
        *((mistake, dtype) for mistake in ("none", *MISTAKES) for dtype in (torch.float32, *LOW)),
        # of lower precision, these are kernels' operands by design
        ("rounded probabilities", torch.float32),
    ],
)
def test_one_mistake_breaks_the_budget(mistake: str, dtype: torch.dtype) -> None:
    q, k, v = (made((64, 32), i, dtype) for i in range(3))
    if mistake == "rounded scores":
        q = SHARP * q
    wrong = partial(with_a_mistake, mistake)
    if mistake == "none":
        assert_low_precision_within_budget(wrong, attention, q, k, v)
        return
    with pytest.raises(AssertionError, match="oracle's"):
        assert_low_precision_within_budget(wrong, attention, q, k, v)


def module(name: str) -> ModuleType:
    """By its file: the package has functions under the same names."""
    return importlib.import_module(f"trailmark.ops.{name}")


def gca(implementation: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [2, 6, 9, 4, 32] reads chunks of k [2, 8, 17, 2, 32]."""
    indices = torch.arange(4).expand(2, 6, 4)
    weights = made((2, 6, 4), 5, torch.float32).softmax(-1).to(q.dtype)
    return grouped_cross_attention(q, k, v, indices, weights, implementation=implementation)


def landmarks(implementation: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    layout = LandmarkLayout.of((torch.arange(120) % 16 == 15).expand(2, 120))
    out = landmark_attention(q, k, v, layout, implementation=implementation)
    assert isinstance(out, Tensor)
    return out


def window(implementation: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = sliding_window_attention(q, k, v, 40, implementation=implementation)
    assert isinstance(out, Tensor)
    return out


def scores(implementation: str, query: Tensor, table: Tensor) -> Tensor:
    if implementation == "reference":
        wide = torch.promote_types(query.dtype, torch.float32)
        return (query.to(wide) @ table.to(wide).mT / 32**0.5).softmax(-1)
    given, ends = torch.arange(9).expand(2, 20, 9), torch.full((20,), 9)
    return select_chunks(query, table, 9, ends, indices=given).weights.float()


OPS: list[tuple[Callable[..., Tensor], str, tuple[tuple[int, ...], ...]]] = [
    (gca, "gca.call", ((2, 6, 9, 4, 32), (2, 8, 17, 2, 32), (2, 8, 17, 2, 32))),
    (landmarks, "landmark.torch_path", ((2, 120, 4, 32), (2, 120, 2, 32), (2, 120, 2, 32))),
    (window, "block_attention", ((2, 120, 4, 32), (2, 120, 2, 32), (2, 120, 2, 32))),
    (scores, "selection.api", ((2, 20, 32), (2, 9, 32))),
]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(("op", "name", "shapes"), OPS, ids=[op.__name__ for op, *_ in OPS])
def test_an_op_that_forgets_to_promote_breaks_the_budget(
    op: Callable[..., Tensor],
    name: str,
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each op with the inputs' own dtype in place of float32 for its scores, its softmax and its sums."""
    inputs = [made(shape, i, dtype) for i, shape in enumerate(shapes)]
    inputs[0] = SHARP * inputs[0]
    fast, oracle = (partial(op, implementation) for implementation in ("torch", "reference"))
    assert_low_precision_within_budget(fast, oracle, *inputs)

    def unpromoted(*arguments: Tensor) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(module(name), "arithmetic_dtype", lambda first, *others: first.dtype)
            return fast(*arguments)

    with pytest.raises(AssertionError, match="oracle's"):
        assert_low_precision_within_budget(unpromoted, oracle, *inputs)


def test_only_equals_may_be_swapped_in_a_choice() -> None:
    exact = torch.tensor([[1.0, 2.0, 2.0 - 1e-8, 3.0, 9.0]], dtype=torch.float64)
    may = torch.tensor([[True, True, True, True, False]])

    def accepts(*chosen: int) -> bool:
        try:
            assert_chooses_the_best(torch.tensor([chosen]), exact, exact.float(), may)
        except AssertionError:
            return False
        return True

    assert accepts(1, 3)
    assert accepts(2, 3)  # rounding decides
    assert accepts(0, 1, 2, 3, -1)
    for wrong in ((0, 3), (3, 1), (3, -1), (1, 4), (3, 3), (0, 1, 2, 3, 4), (1, 2)):
        assert not accepts(*wrong), wrong
