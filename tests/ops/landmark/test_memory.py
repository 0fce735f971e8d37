"""Landmark Attention over kept chunks: the oracle, error budgets, and what must not matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.budgets import assert_within_budget
from trailmark.ops import reference
from trailmark.ops.landmark.memory import (
    landmark_attention_of_one,
    landmark_memory_attention,
    log_sum_exp,
)

shapes = st.tuples(*(st.integers(1, n) for n in (2, 3, 2, 9, 3, 5)), st.sampled_from([2, 4, 6]))


def case(shape: tuple[int, ...], seed: int, short: bool = False, missing: bool = False) -> dict[str, Any]:
    """Arguments in float64 for B, U, Y, R, k, S, D."""
    B, U, Y, R, k, S, D = shape
    generator = torch.Generator().manual_seed(seed)

    def drawn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    angle = 7 * drawn(B, U, 1, k, D // 2)
    present = torch.rand(B, U, Y, k, generator=generator) < (0.5 if missing else 2)
    lengths = torch.randint(1, S + 1, (B, U, Y, k), generator=generator) if short else None
    return {
        "q": drawn(B, U, Y, R, D),
        "keys": drawn(B, U, Y, k, S + 1, D),
        "values": drawn(B, U, Y, k, S, D),
        "turns": torch.stack([angle.cos(), angle.sin()], -1),
        "present": present,
        "lengths": lengths,
    }


def cast(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {n: x.to(dtype) if x is not None and x.is_floating_point() else x for n, x in arguments.items()}


@settings(max_examples=40, deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**31), short=st.booleans(), missing=st.booleans())
def test_it_equals_the_oracle(shape: tuple[int, ...], seed: int, short: bool, missing: bool) -> None:
    arguments = case(shape, seed, short, missing)
    for ours, exact in zip(
        landmark_memory_attention(**arguments),
        reference.landmark_memory_attention(**arguments),
        strict=True,
    ):
        torch.testing.assert_close(ours, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 3, 2, 1, 4, 8, 16), (1, 2, 1, 30, 5, 9, 8)], ids=str)
@pytest.mark.parametrize("missing", [False, True])
def test_error_budget(shape: tuple[int, ...], missing: bool) -> None:
    exact = case(shape, 5, True, missing)
    exact = cast(cast(exact, torch.float32), torch.float64)
    narrow = cast(exact, torch.float32)
    ours, oracle = landmark_memory_attention(**narrow), reference.landmark_memory_attention(**narrow)
    truth = reference.landmark_memory_attention(**exact)
    for x, y, z, finite in zip(ours, oracle, truth, (t.isfinite() for t in truth), strict=True):
        assert torch.equal(x.isfinite(), finite)
        assert_within_budget(x[finite], y[finite], z[finite])


def test_what_is_absent_has_no_say() -> None:
    arguments = case((2, 3, 2, 4, 3, 5, 4), 1, short=True, missing=True)
    before = landmark_memory_attention(**arguments)
    present, lengths = arguments["present"], arguments["lengths"]
    gone = torch.arange(5) >= lengths[..., None]
    arguments["keys"][..., :5, :][gone] = 1e30
    arguments["keys"][~present], arguments["values"][~present] = -7.0, 9.0
    for one, other in zip(before, landmark_memory_attention(**arguments), strict=True):
        assert torch.equal(one, other)


def test_a_unit_without_chunks_reads_nothing() -> None:
    arguments = case((1, 2, 2, 3, 2, 4, 4), 0)
    arguments["present"][0, 1] = False
    out, lse, gates = landmark_memory_attention(**arguments)
    assert not out[0, 1].any()
    assert (lse[0, 1] == -torch.inf).all()
    assert (gates[0, 1] == -torch.inf).all()
    assert lse[0, 0].isfinite().all()


@given(
    chunks=st.integers(0, 3),
    tail=st.integers(1, 4),
    room=st.integers(0, 11),
    groups=st.integers(1, 2),
    seed=st.integers(0, 2**31),
)
def test_one_query_that_turns_is_landmark_attention_over_turned_keys(
    chunks: int, tail: int, room: int, groups: int, seed: int
) -> None:
    S, J, D, B = 4, 2, 6, 2
    n = chunks * (S + 1) + tail
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(B, 1, J * groups, D, generator=generator, dtype=torch.float64)
    keys, values = torch.randn(2, B, n, J, D, generator=generator, dtype=torch.float64)
    frequency = 3.0 ** -torch.arange(D // 2, dtype=torch.float64)
    begins = torch.arange(chunks + 1) * (S + 1)
    angle = begins[:, None] * frequency  # of each chunk's beginning
    turns = torch.polar(torch.ones_like(angle), angle)
    more = torch.full((B, room, J, D), 1e30, dtype=torch.float64)  # slots that hold nothing yet
    slots = (torch.cat([x, more], 1).transpose(1, 2) for x in (keys, values))
    ours, lse = landmark_attention_of_one(q, *slots, turns.conj()[:, None], S, n)
    pairs = torch.view_as_complex(keys.unflatten(-1, (-1, 2)))
    of_place = turns[torch.arange(n) // (S + 1)][:, None]  # [n, 1, D / 2]
    turned = torch.view_as_real(pairs * of_place).flatten(-2)
    is_landmark = (torch.arange(n) % (S + 1) == S).expand(B, n)
    exact, exact_lse = reference.landmark_attention(
        q, turned, values, is_landmark, torch.zeros(B, n), True, D**-0.5, torch.full((B, 1), n - 1)
    )
    torch.testing.assert_close(ours, exact, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, exact_lse, rtol=0, atol=1e-12)


@given(chunks=st.integers(0, 3), tail=st.integers(1, 4), room=st.integers(0, 11), seed=st.integers(0, 2**31))
def test_one_query_in_bfloat16_is_computed_in_float32_to_the_last_bit(
    chunks: int, tail: int, room: int, seed: int
) -> None:
    S, n = 4, chunks * 5 + tail
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 1, 4, 6, generator=generator).bfloat16()
    keys, values = torch.randn(2, 2, 2, n + room, 6, generator=generator).bfloat16()
    turns = torch.polar(torch.ones(chunks + 1, 1, 3), torch.randn(chunks + 1, 1, 3, generator=generator))
    ours, lse = landmark_attention_of_one(q, keys, values, turns, S, n)
    wide, wide_lse = landmark_attention_of_one(*(x.float() for x in (q, keys, values)), turns, S, n)
    assert torch.equal(ours, wide.bfloat16())
    assert torch.equal(lse, wide_lse)


def test_log_sum_exp_of_nothing_and_of_large_numbers() -> None:
    x = torch.tensor([[-torch.inf, -torch.inf], [1e4, 1e4], [-1e4, -torch.inf]], dtype=torch.float64)
    torch.testing.assert_close(log_sum_exp(x, 1)[:, 0], x.logsumexp(1))
