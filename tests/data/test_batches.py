"""Slices of one token stream."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.counts import assert_equally_likely
from trailmark.data.batches import TextSlices

TOKENS = np.arange(1000, dtype=np.int32)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(first=st.integers(0, 10**12), count=st.integers(1, 6), seed=st.integers(0, 2**63 - 1))
def test_a_sample_depends_on_seed_and_number_alone(first: int, count: int, seed: int) -> None:
    batch = TextSlices(TOKENS, 7, seed).batch(first, count)
    assert batch.dtype == torch.int64
    assert (batch[:, 1:] - batch[:, :-1] == 1).all(), "not a slice"
    single = [TextSlices(TOKENS, 7, seed).batch(n, 1) for n in range(first, first + count)]
    assert torch.equal(torch.cat(single), batch)


def test_samples_and_seeds_differ_and_reach_every_place() -> None:
    starts = TextSlices(TOKENS[:20], 18).batch(0, 100)[:, 0]
    assert starts.unique().tolist() == [0, 1, 2]
    a, b = (TextSlices(TOKENS, 5, seed).batch(0, 50) for seed in (0, 1))
    assert not torch.equal(a, b)


def test_the_whole_text_as_one_slice() -> None:
    assert TextSlices(TOKENS, 1000).batch(3, 1)[0].tolist() == TOKENS.tolist()


def test_too_short_a_text() -> None:
    with pytest.raises(ValueError, match=r"^data: expected at least sequence_length = 1001 tokens, got 1000"):
        TextSlices(TOKENS, 1001)


# Early landmarks


def sizes_of(close: torch.Tensor, chunk_size: int) -> list[tuple[int, bool]]:
    """Tokens of each chunk of one text and whether it is closed early, as a model divides it."""
    sizes, size = [], 0
    for mark in close.tolist():
        size += 1
        if mark or size == chunk_size:
            assert not (mark and size == chunk_size), "marked though full"
            sizes.append((size, mark))
            size = 0
    return sizes


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    first=st.integers(0, 10**12),
    count=st.integers(1, 6),
    seed=st.integers(0, 2**63 - 1),
    share=st.floats(0, 1),
    chunk_size=st.integers(2, 40),
)
def test_early_landmarks_depend_on_seed_and_number_alone(
    first: int, count: int, seed: int, share: float, chunk_size: int
) -> None:
    close = TextSlices(TOKENS, 100, seed).close_chunk(first, count, chunk_size, share)
    assert close.dtype == torch.bool
    assert close.shape == (count, 100)
    single = [
        TextSlices(TOKENS, 100, seed).close_chunk(n, 1, chunk_size, share)
        for n in range(first, first + count)
    ]
    assert torch.equal(torch.cat(single), close)
    for row in close:
        sizes_of(row, chunk_size)


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_the_share_and_the_sizes_of_early_chunks(share: float) -> None:
    rows = TextSlices(TOKENS, 1000).close_chunk(0, 200, 8, share)
    # chunks that begin in the last 8 tokens may be cut by the text's end: those before are a fair sample
    chunks = []
    for row in rows:
        end = 0
        for size, early in sizes_of(row, 8):
            if end <= 1000 - 8:
                chunks.append((size, early))
            end += size
    n, sizes = len(chunks), [size for size, mark in chunks if mark]
    assert abs(len(sizes) - n * share) <= 4 * (n * share * (1 - share)) ** 0.5
    assert_equally_likely([sizes.count(size) for size in range(1, 8)])


def test_no_chunk_or_every_chunk_is_closed_early() -> None:
    slices = TextSlices(TOKENS, 300)
    assert not slices.close_chunk(0, 5, 8, 0.0).any()
    assert not slices.close_chunk(0, 5, 1, 0.0).any()
    for row in slices.close_chunk(0, 50, 8, 1.0):
        assert all(early for _, early in sizes_of(row, 8))
    assert slices.close_chunk(0, 2, 2, 1.0).all()  # after each token


def test_samples_and_seeds_have_landmarks_of_their_own() -> None:
    a, b = (TextSlices(TOKENS, 100, seed).close_chunk(0, 20, 8, 0.5) for seed in (0, 1))
    assert a.unique(dim=0).shape[0] == 20
    assert not torch.equal(a, b)


@pytest.mark.parametrize(
    ("chunk_size", "share", "message"),
    [
        (8, 1.5, r"^early_landmarks: expected a share from 0 to 1, got 1.5"),
        (8, -0.1, r"^early_landmarks: "),
        (8, float("nan"), r"^early_landmarks: "),
        (1, 0.5, r"^chunk_size: expected at least 2 tokens to close chunks early, got 1"),
    ],
)
def test_early_landmarks_that_cannot_be(chunk_size: int, share: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextSlices(TOKENS, 10).close_chunk(0, 1, chunk_size, share)
