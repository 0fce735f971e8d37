"""Slices of one token stream."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
