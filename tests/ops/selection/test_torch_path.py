"""The search in PyTorch: the same bits from any split of batch, landmarks and queries, in bounded memory."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.budgets import (
    assert_all_same_in_float64,
    assert_same_bits,
    assert_same_in_float64,
    values_and_gradients,
)
from tests.ops.memory_use import Largest
from tests.ops.selection.test_api import Case, blocks, cases, cut, noisy_case, weights_and_scores
from trailmark.ops import ChunkSelection, select_chunks
from trailmark.ops.selection import torch_path as module

__all__ = ["blocks"]  # a fixture


# The same bits from any split


def test_any_split_of_the_batch() -> None:
    query, landmarks, rest = noisy_case()
    whole = select_chunks(query, landmarks, **rest)
    for rows in (slice(0, 1), slice(1, 4)):
        part = {name: x[rows] if isinstance(x, Tensor) else x for name, x in rest.items()}
        assert_same_bits(
            select_chunks(query[rows], landmarks[rows], **part), ChunkSelection(*(x[rows] for x in whole))
        )


@pytest.mark.parametrize("size", [1, 4, 7, 29])
def test_any_block_of_landmarks(size: int, blocks: Callable[[int], None]) -> None:
    query, landmarks, rest = noisy_case()
    shared = landmarks[:1].expand_as(landmarks)
    whole = [select_chunks(query, x, **rest) for x in (landmarks, shared)]
    blocks(size)
    for x, before in zip((landmarks, shared), whole, strict=True):
        assert_same_bits(select_chunks(query, x, **rest), before)


@settings(max_examples=60)
@given(cases, st.lists(st.integers(0, 5), max_size=4), st.sampled_from(["torch", "reference"]))
def test_segments_are_one_table(case: Case, at: list[int], implementation: str) -> None:
    (query, landmarks), rest = case.make()
    ends = sorted(min(x, case.M) for x in at)  # some segments are empty

    def op(q: Tensor, l: Tensor, *, segments: bool) -> tuple[Tensor, Tensor]:
        return weights_and_scores(q, cut(l, *ends) if segments else l, implementation=implementation, **rest)

    assert torch.equal(
        select_chunks(query, cut(landmarks, *ends), implementation=implementation, **rest).indices,
        select_chunks(query, landmarks, **rest).indices,
    )
    one, several = (
        values_and_gradients(partial(op, segments=segments), query, landmarks) for segments in (False, True)
    )
    assert_all_same_in_float64(several, one)


@pytest.mark.parametrize("J", [0, 2])
@pytest.mark.parametrize("noisy", [False, True])
def test_segments_may_differ_in_dtype_and_in_being_shared(J: int, noisy: bool) -> None:
    """A text that all rows share, in bfloat16, then each row's own chunks."""
    (query, landmarks), rest = Case(B=3, J=J, M=60, K=6, E=8, noisy=noisy).make()
    base, own, last = cut(landmarks, 30, 50)
    base = base[:1].bfloat16().expand(base.shape)
    for x, y in ((own, last), (own.float(), last), (own.bfloat16(), last.bfloat16())):
        table = torch.cat([base.double(), x.double(), y.double()], 1)
        # the widest computes: all is in float64, as of a table in float64
        exact = select_chunks(query, table, **rest)
        assert_same_bits(select_chunks(query, [base, x, y], **rest), exact)
        given = select_chunks(query, (base, x, y), **rest, indices=exact.indices)
        assert_same_bits(given, exact)


def test_a_segment_that_nothing_was_chosen_from_has_a_zero_gradient() -> None:
    (query, landmarks), rest = Case(J=0, M=6).make()
    segments = [x.clone().requires_grad_() for x in cut(landmarks, 3, 3)]
    indices = torch.tensor([1, 2]).expand(2, 3, 2)
    select_chunks(query, segments, **rest, indices=indices).scores.sum().backward()
    assert segments[0].grad is not None
    assert segments[0].grad.any()
    for segment in segments[1:]:
        assert segment.grad is not None
        assert torch.equal(segment.grad, torch.zeros_like(segment))


def test_no_segment_is_a_memory_without_chunks() -> None:
    (query, landmarks), rest = Case(M=0).make()
    assert_same_bits(select_chunks(query, [], **rest), select_chunks(query, landmarks, **rest))


@pytest.mark.parametrize("size", [4, 100])
@pytest.mark.parametrize("neighbour", ["others", "equal", "nan"])
def test_no_effect_of_a_neighbour(neighbour: str, size: int, blocks: Callable[[int], None]) -> None:
    """Bit for bit, also where the neighbour's last place is contested and its own is not."""
    blocks(size)
    (query, landmarks), rest = Case(B=3, N=5, J=0, M=33, E=16, K=4).make()
    query, landmarks = query.float(), landmarks.float()
    rest |= {"num_candidates": torch.full((5,), 33), "first_candidate": 0}
    before = select_chunks(query, landmarks, **rest)
    landmarks, query = landmarks.clone(), query.clone()
    if neighbour == "others":
        landmarks[1:], query[1:] = landmarks[1:].flip(1), query[1:].flip(2)
    elif neighbour == "equal":
        landmarks[1:] = landmarks[1:, :1]
    else:
        landmarks[1], query[2] = torch.nan, torch.nan
    after = select_chunks(query, landmarks, **rest)
    assert_same_bits(ChunkSelection(*(x[0] for x in after)), ChunkSelection(*(x[0] for x in before)))
    shared = landmarks[:1].expand_as(landmarks)
    ours, theirs = (select_chunks(q, shared, **rest) for q in (query, query.roll(1, 0)))
    assert_same_bits(ChunkSelection(*(x[0] for x in ours)), ChunkSelection(*(x[1] for x in theirs)))


def test_any_slab_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    query, landmarks, rest = noisy_case()
    whole = select_chunks(query, landmarks, **rest)
    for elements in (1, 500, 1000):
        monkeypatch.setattr(module, "_SLAB_ELEMENTS", elements)
        assert_same_bits(select_chunks(query, landmarks, **rest), whole)


@pytest.mark.parametrize("J", [0, 2])
def test_shared_landmarks_equal_a_copy(J: int) -> None:
    (query, landmarks), rest = Case(B=3, J=J, M=20, K=4, E=8).make()

    def selected(op: Any) -> list[Tensor]:
        return values_and_gradients(lambda q, l: weights_and_scores(q, op(l), **rest), query, landmarks[:1])

    sizes = (3, *landmarks.shape[1:])
    shared, copied = selected(lambda l: l.expand(sizes)), selected(lambda l: l.expand(sizes).contiguous())
    assert_same_bits(shared[:3], copied[:3])
    assert_same_in_float64(shared[3], copied[3])  # the sum over the batch in another order
    indices = [
        select_chunks(query, x, **rest).indices
        for x in (landmarks[:1].expand(sizes), landmarks[:1].expand(sizes).contiguous())
    ]
    assert torch.equal(*indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_block(dtype: torch.dtype) -> None:
    landmarks = torch.randn(1, 30_000, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert landmarks.numel() > module._BLOCK_ELEMENTS
    segments, query = cut(landmarks, 20_000), torch.randn(1, 1, 64).to(dtype)
    with Largest(landmarks) as largest:
        select_chunks(query, segments, 8, torch.tensor([30_000]))
    assert largest.bytes <= 4 * module._BLOCK_ELEMENTS  # in float32


EXTRA_MEMORY = """
import sys

import torch
from trailmark.evaluation.cost.peak import with_peak
from trailmark.ops import select_chunks

dtype = getattr(torch, sys.argv[1])
landmarks = torch.empty(1, 300_000, 64, dtype=dtype).normal_()
segments = [landmarks[:, :200_000], landmarks[:, 200_000:]]
query = torch.randn(1, 1, 64).to(dtype)
select_chunks(query, landmarks[:, :9], 8, torch.tensor([9]))  # what the first call loads
cpu = torch.device("cpu")
print(with_peak(cpu, lambda: select_chunks(query, segments, 8, torch.tensor([300_000])))[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_search_holds_a_block_whatever_the_memory(dtype: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(EXTRA_MEMORY), dtype]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if said == "None\n":
        pytest.skip("this system does not say what a process holds at most")
    extra = int(said)
    # a block in float32, and as much again for scores and what torch allocates once; the table takes 77 MB
    assert extra < 2 * 4 * module._BLOCK_ELEMENTS


def test_a_place_that_a_second_product_loses_is_found_by_sums() -> None:
    """What is within rounding is known by another product, which may put one of the best below."""
    query, landmarks = torch.randn(3, 8), [torch.randn(2, 40, 1, 8)[:1].expand(2, -1, -1, -1)]
    row, head = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    rest = (64, 4, torch.zeros(3, dtype=torch.int64), torch.tensor([40, 2, 40]), None, 0.0, 0.5)
    scores = query @ landmarks[0][0, :, 0].T * 0.5
    lowest = scores.amax(1) - 1e-6  # all but the best are below it
    near = module._rescore_near(query, row, head, landmarks, *rest, lowest)
    assert torch.equal(near, module._rescore(query, row, head, landmarks, *rest, lowest))
    assert (near >= 0).sum(1).tolist() == [4, 2, 4]
