"""Rings of keys and values: what each new position sees, in any calls, and that nothing grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from trailmark.memory import Span, Window, WindowCall

J, D = 2, 3


@dataclass(frozen=True)
class Step:
    counts: tuple[int, ...]  # new positions of each row
    gaps: tuple[int, ...]  # positions left out before them
    fails: bool = False  # the call does not come to its end


@st.composite
def lives(draw: st.DrawFn) -> tuple[int | None, int, list[Step]]:
    """A window, the sinks before it, and the calls."""
    window, B = draw(st.sampled_from([1, 2, 3, 5, 8, None])), draw(st.integers(1, 3))
    sinks = draw(st.integers(0, 6)) if window is not None else 0
    steps = []
    for _ in range(draw(st.integers(1, 9))):
        n = draw(st.sampled_from([1, 1, 1, 2, 4, 11, 40]))
        counts = [n] * B if draw(st.booleans()) else [n] + [draw(st.integers(0, n)) for _ in range(B - 1)]
        gaps = [0] * B
        if window is not None and not draw(st.integers(0, 3)):
            gaps = [draw(st.sampled_from([0, 1, 9])) for _ in range(B)]
        steps.append(Step(tuple(counts), tuple(gaps), not draw(st.integers(0, 3))))
    return window, sinks, steps


def numbers(first: np.ndarray, width: int) -> Tensor:
    """Keys [B, J, width, D] that say which position of which row they are."""
    place = torch.from_numpy(first)[:, None] + torch.arange(width)
    place = place + 1000 * torch.arange(len(first))[:, None]
    return place[:, None, :, None].double().expand(-1, J, -1, D).contiguous()


def seen_by(call: WindowCall, joined: Tensor, window: int | None, n: int = 0) -> list[list[list[int]]]:
    """Per row and new position, what it sees in joined keys [B, J, P, D], as attention is told."""
    B, P, T = len(joined), joined.shape[2], call.width
    if call.positions is None:
        key = torch.arange(P).expand(B, P)
        query = key[:, P - T :]
    else:
        query, key = (x.expand(B, -1) for x in call.positions)
    distance = query[:, :, None] - key[:, None]
    visible = (distance >= 0) & (key >= 0)[:, None] & (query >= 0)[:, :, None]
    if call.positions is not None:  # the sinks stand first, apart
        assert window is not None or not n
        visible[..., :n] &= distance[..., :n] >= (window or 0)
        visible[..., n:] &= distance[..., n:] < (window or 2**40)
    elif window is not None:
        visible &= (distance < window) | (torch.arange(P) < n)
    in_ring = T == 1 and window is not None and bool((call.counts == 1).all())
    assert call.shows_all == (in_ring and bool(visible.all()) and n + (window or 0) == P)
    return [
        [sorted(int(n) - 1000 * b for n in joined[b, 0, visible[b, t], 0]) for t in range(int(count))]
        for b, count in enumerate(call.counts)
    ]


@settings(max_examples=120)
@given(lives())
@example((3, 2, [Step((9, 2), (0, 0)), Step((1, 1), (0, 0)), Step((1, 1), (9, 0)), Step((1, 1), (0, 0))]))
@example((2, 3, [Step((1, 1), (0, 0), i == 2) for i in range(9)]))
@example(
    (3, 0, [Step((1, 1), (0, 0)), Step((1, 0), (0, 0)), Step((1, 1), (0, 0), True), Step((1, 1), (0, 0))])
)
@example((None, 0, [Step((64,), (0,)), Step((1,), (0,)), Step((1,), (0,)), Step((40,), (0,))]))
@example((None, 0, [Step((60, 3), (0, 0))] + [Step((1, 1), (0, 0))] * 9))
def test_each_position_sees_its_window_and_the_sinks(life: tuple[int | None, int, list[Step]]) -> None:
    """What is left out begins after the sinks: these are seen by every layer."""
    window, n, steps = life
    zero = np.zeros(len(steps[0].counts), np.int64)
    span, layers, begins = Span(zero, zero), [Window(window, n), Window(window, n)], zero
    for step in steps:
        gaps = np.where(span.end >= n, np.array(step.gaps), 0)
        first, counts = span.end + gaps, np.array(step.counts)
        call = WindowCall(span, first, counts, int(counts.max()), window, torch.device("cpu"), n)
        started = np.where(gaps > 0, first, begins)
        keys = numbers(first, call.width)
        for layer in layers:
            joined = layer.update(keys, -keys, call)
            assert torch.equal(joined[1], -joined[0])
            for b, row in enumerate(seen_by(call, joined[0], window, n)):
                for t, found in enumerate(row):
                    place = int(first[b]) + t
                    oldest = 0 if window is None else place - window + 1
                    seen = {*range(min(n, max(0, oldest))), *range(max(oldest, int(started[b])), place + 1)}
                    assert found == sorted(seen)
            for b, ring in enumerate(joined[0] if window is not None else ()):
                here = range(int(started[b]), int(first[b] + counts[b]))
                kept = [p for p in here if p > int(first[b]) - window]
                found = ring[0, call.places(np.array([kept] * len(first)))[b], 0]
                assert found.tolist() == [p + 1000 * b for p in kept]
        if not step.fails:
            span, begins = Span(*call.after), started
            layers = [call.staged(layer) for layer in layers]
            for layer in layers:
                assert layer.keys.shape == layer.values.shape
                if window is not None:
                    assert layer.keys.shape == (len(zero), J, n + window, D)
                    assert layer.num_bytes() == 2 * len(zero) * J * (n + window) * D * 8


def run(window: int | None, counts: Sequence[int], rows: int = 2) -> list[Window]:
    """The layer after each call."""
    zero = np.zeros(rows, np.int64)
    span, layer, found = Span(zero, zero), Window(window), []
    for n in counts:
        call = WindowCall(span, span.end, zero + n, n, window, torch.device("cpu"))
        layer.update(numbers(span.end, n), numbers(span.end, n), call)
        span, layer = Span(*call.after), call.staged(layer)
        found.append(layer)
    return found


@pytest.mark.parametrize("window", [1, 7, 64])
def test_a_ring_has_w_slots_from_the_first_call_on(window: int) -> None:
    layers = run(window, [1, 1, 100, 1, 5, 1, 300, 1])
    assert {layer.num_bytes() for layer in layers} == {2 * 2 * window * J * D * 8}
    assert {layer.keys.shape[2] for layer in layers} == {window}


def test_one_position_at_a_time_is_written_in_place() -> None:
    places = {layer.keys.data_ptr() for layer in run(7, [20] + [1] * 30)}
    assert len(places) == 1


def test_without_a_window_the_buffer_grows_by_halves() -> None:
    counts = [1] * 1000
    slots = [layer.keys.shape[2] for layer in run(None, counts)]
    assert slots == sorted(slots)
    assert len(set(slots)) < 10
    assert all(held >= t + 1 for t, held in enumerate(slots))
    assert slots[-1] <= 1.5 * 1000


def test_rows_are_copied() -> None:
    (layer,) = run(7, [20])
    other = layer.take_rows(torch.tensor([1, 1, 0]))
    assert torch.equal(other.keys, layer.keys[[1, 1, 0]])
    assert torch.equal(other.values, layer.values[[1, 1, 0]])
    before = layer.keys.clone()
    other.keys.zero_()
    assert torch.equal(layer.keys, before)
    assert Window(7).take_rows(torch.tensor([0])).keys is None
    assert Window(7).num_bytes() == 0


def test_gradients_of_a_call_stay_in_it() -> None:
    """They reach the new keys and values, in whatever way they were joined; the ring keeps none."""
    zero = np.zeros(1, np.int64)
    span, layer = Span(zero, zero), Window(3)
    for n in (5, 1, 1, 4):
        call = WindowCall(span, span.end, zero + n, n, 3, torch.device("cpu"))
        k, v = (numbers(span.end, n).requires_grad_() for _ in range(2))
        joined = layer.update(k, v, call)
        (joined[0].sum() + 2 * joined[1].sum()).backward()
        assert torch.equal(k.grad, torch.ones_like(k))
        assert torch.equal(v.grad, torch.full_like(v, 2))
        span, layer = Span(*call.after), call.staged(layer)
        assert not layer.keys.requires_grad
        assert not layer.values.requires_grad
