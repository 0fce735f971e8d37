"""Training on rows of different lengths with early landmarks: each row's own logits, and their gradients' sum."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.models.naive import NaiveDRT
from tests.models.tiny import (
    assert_same,
    block_recurrent,
    chunk_lengths,
    drt,
    hils,
    hsa,
    landmark,
    pad,
    place,
    tokens,
    window_model,
)
from trailmark.models import TrailmarkForCausalLM


@dataclass(frozen=True)
class Batch:
    lengths: tuple[int, ...]
    side: str = "right"
    extra: int = 0  # columns that are padding in every row
    early: float = 0.2  # how often a landmark comes early
    groups: int = 2
    chunk_size: int = 4
    sliding_window: int = 7
    num_retrieved_chunks: int = 3
    exclude_visible_chunks: bool = False
    seed: int = 0

    def model(self) -> TrailmarkForCausalLM:
        names = ("groups", "chunk_size", "sliding_window", "num_retrieved_chunks", "exclude_visible_chunks")
        return drt(**{name: getattr(self, name) for name in names})

    def texts(self) -> list[Tensor]:
        return [tokens(n, seed=self.seed + b)[0] for b, n in enumerate(self.lengths)]

    def marks(self) -> list[Tensor]:
        drawn = random.Random(self.seed)
        return [torch.tensor([drawn.random() < self.early for _ in range(n)]) for n in self.lengths]

    def arguments(self) -> dict[str, Any]:
        """Of the one call for all rows."""
        side, extra = self.side, self.extra
        present = pad([torch.ones(n, dtype=torch.bool) for n in self.lengths], side, extra)
        ids = pad(self.texts(), side, extra)
        return {
            "input_ids": ids,
            "attention_mask": present.long(),
            "labels": ids.masked_fill(~present, -100),
            "close_chunk": pad(self.marks(), side, extra),
        }


def batches() -> st.SearchStrategy[Batch]:
    return st.builds(
        Batch,
        lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
        side=st.sampled_from(["left", "right"]),
        extra=st.sampled_from([0, 0, 2]),
        early=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        groups=st.integers(1, 3),
        chunk_size=st.sampled_from([1, 2, 4, 5]),
        sliding_window=st.sampled_from([1, 3, 7, 60]),
        num_retrieved_chunks=st.integers(2, 4),
        exclude_visible_chunks=st.booleans(),
        seed=st.integers(0, 99),
    )


def trained(model: TrailmarkForCausalLM, **arguments: Any) -> tuple[Any, list[Tensor]]:
    """Outputs, and the gradients of the summed loss."""
    model.zero_grad()
    out = model.train()(num_items_in_batch=1, **arguments)
    out.loss.backward()
    return out, [p.grad for p in model.parameters()]


@settings(max_examples=50)
@given(batches())
@example(Batch((30, 1, 17)))
@example(Batch((9, 7), "left", extra=3, early=0.0))
@example(Batch((12, 12, 12), early=0.0))
@pytest.mark.slow
def test_a_padded_batch_trains_as_its_rows_do(batch: Batch) -> None:
    """Logits, selections under noise, and parameter gradients."""
    model, arguments = batch.model(), batch.arguments()
    seeds = torch.arange(len(batch.lengths)) + 5
    together, gradients = trained(model, **arguments, noise_seed=seeds, output_retrieval=True)
    loss, sums = torch.zeros((), dtype=torch.float64), [torch.zeros_like(g) for g in gradients]
    for b, (text, marks) in enumerate(zip(batch.texts(), batch.marks(), strict=True)):
        alone, own = trained(
            model,
            input_ids=text[None],
            labels=text[None],
            close_chunk=marks[None],
            noise_seed=seeds[b : b + 1],
            output_retrieval=True,
        )
        columns = place(len(text), len(arguments["input_ids"][0]), batch.side)
        assert_same(together.logits[b, columns].detach(), alone.logits[0].detach())
        for ours, theirs in zip(together.retrieval, alone.retrieval, strict=True):
            closed = theirs.indices.shape[1]
            assert torch.equal(ours.indices[b, :closed], theirs.indices[0])
            assert (ours.indices[b, closed:] == -1).all()
        loss += alone.loss.detach()
        for total, gradient in zip(sums, own, strict=True):
            total += gradient
    assert_same(together.loss.detach(), loss)
    for ours, total in zip(gradients, sums, strict=True):
        assert_same(ours, total)


@settings(max_examples=20)
@given(batches())
@example(Batch((30, 1, 17)))
@pytest.mark.slow
def test_early_landmarks_are_the_equations(batch: Batch) -> None:
    model, arguments = batch.model(), batch.arguments()
    del arguments["labels"]
    with torch.no_grad():
        logits = model(**arguments).logits
    for b, (text, marks) in enumerate(zip(batch.texts(), batch.marks(), strict=True)):
        exact = NaiveDRT(model, text, *chunk_lengths(marks.tolist(), batch.chunk_size))
        columns = place(len(text), logits.shape[1], batch.side)
        assert_same(logits[b, columns], exact.logits)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (window_model, {}),
        (window_model, {"window_position": "rope"}),
        (window_model, {"sliding_window": None}),
        (block_recurrent, {"state_gate": "fixed"}),
        (block_recurrent, {"state_gate": "lstm"}),
        (landmark, {}),
        (hils, {}),
        (hils, {"num_sinks": 2, "summary_query": "tokens", "far_position": "window"}),
        (hsa, {}),
        (landmark, {"landmark_loss": "text", "position_jump": 5}),
    ],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
@pytest.mark.sampled(4)
def test_the_other_models_too(make: Callable[..., TrailmarkForCausalLM], options: Any, side: str) -> None:
    model, batch, seeds = make(**options), Batch((30, 1, 17), side, extra=1, early=0.0), torch.arange(5, 8)
    together, gradients = trained(model, **batch.arguments(), noise_seed=seeds)
    sums = [torch.zeros_like(g) for g in gradients]
    for b, text in enumerate(batch.texts()):
        alone, own = trained(model, input_ids=text[None], labels=text[None], noise_seed=seeds[b : b + 1])
        assert_same(together.logits[b, place(len(text), 31, side)].detach(), alone.logits[0].detach())
        for total, gradient in zip(sums, own, strict=True):
            total += gradient
    for ours, total in zip(gradients, sums, strict=True):
        assert_same(ours, total)


def test_training_repeats_bit_for_bit() -> None:
    batch = Batch((60, 13, 41))
    runs = [trained(batch.model(), **batch.arguments(), noise_seed=torch.arange(3))[1] for _ in range(2)]
    assert all(map(torch.equal, *runs))
