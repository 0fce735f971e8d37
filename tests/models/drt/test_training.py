"""Training the DRT: noise in selection, and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.tiny import assert_same, drt, logits_of, tokens
from trailmark.models import DRTForCausalLM

S = 4
LENGTH = 103

# --- noise -----------------------------------------------------------------------------------------------

SEEDS = torch.tensor([11, 12])


def trained(model: DRTForCausalLM, ids: Tensor, seeds: Tensor | None = SEEDS) -> Any:
    return model.train()(ids, labels=ids, noise_seed=seeds, output_retrieval=True)


def test_there_is_no_noise_outside_training() -> None:
    model, ids = drt(), tokens(LENGTH, batch=2)
    assert torch.equal(logits_of(model, ids, noise_seed=SEEDS), logits_of(model, ids))


@pytest.mark.parametrize("noise", [False, True])
def test_noise_is_a_function_of_its_seed(noise: bool) -> None:
    model, ids = drt(retrieval_noise=noise), tokens(LENGTH, batch=2)
    first, again = trained(model, ids), trained(model, ids)
    other = trained(model, ids, SEEDS + 1)
    assert torch.equal(first.logits, again.logits)
    assert torch.equal(first.logits, other.logits) is not noise
    if not noise:
        assert torch.equal(first.logits, logits_of(model.eval(), ids))


def test_without_a_seed_noise_comes_from_the_global_generator() -> None:
    model, ids = drt(), tokens(LENGTH, batch=2)
    torch.manual_seed(0)
    first, other = trained(model, ids, None), trained(model, ids, None)
    torch.manual_seed(0)
    again = trained(model, ids, None)
    assert torch.equal(first.logits, again.logits)
    assert not torch.equal(first.logits, other.logits)


def test_noise_selects_but_does_not_weigh() -> None:
    ids, N = tokens(LENGTH, batch=2), LENGTH // S
    # group 1 asks before anything is read: its scores are those without noise
    every = drt(num_retrieved_chunks=N)(ids, output_retrieval=True).retrieval[0]
    scores = torch.full((2, N, N + 1), -torch.inf, dtype=torch.float64)
    scores.scatter_(2, every.indices.where(every.indices >= 0, N), every.scores.detach())
    scores[..., N] = -torch.inf
    model = drt()
    calm, noisy = model(ids, output_retrieval=True).retrieval[0], trained(model, ids).retrieval[0]
    assert not torch.equal(calm.indices, noisy.indices)
    exact = scores.gather(2, noisy.indices.where(noisy.indices >= 0, N))
    assert torch.equal(noisy.scores.isfinite(), exact.isfinite())
    assert_same(noisy.scores.nan_to_num(neginf=0).detach(), exact.nan_to_num(neginf=0))
    assert_same(noisy.weights.detach()[:, 1:], exact.softmax(-1)[:, 1:])


def test_groups_samples_and_chunks_draw_their_own_noise() -> None:
    model, ids = drt(groups=2), tokens(40 * S).expand(2, -1)
    with torch.no_grad():
        for retriever in model.retrievers:
            retriever.q_proj.weight.zero_()  # noise alone selects
    retrieval = trained(model, ids).retrieval
    assert not torch.equal(retrieval[0].indices, retrieval[1].indices)
    assert not torch.equal(retrieval[0].indices[0], retrieval[0].indices[1])
    assert len(set(map(tuple, retrieval[0].indices[0, 20:].tolist()))) > 15
    counts = torch.bincount(retrieval[0].indices[:, 30:].flatten(), minlength=30)[:30]
    assert counts.max() < 12  # of 20 rows that draw 3 of 30 and more: no chunk is favoured


def test_any_batch_split_draws_the_same_noise() -> None:
    model, ids, seeds = drt(groups=2), tokens(LENGTH, batch=4), torch.tensor([5, 6, 7, 8])
    together = trained(model, ids, seeds)
    for rows in (slice(0, 1), slice(1, 3), slice(3, 4)):
        apart = trained(model, ids[rows], seeds[rows])
        assert_same(apart.logits.detach(), together.logits[rows].detach())
        for ours, whole in zip(apart.retrieval, together.retrieval, strict=True):
            assert torch.equal(ours.indices, whole.indices[rows])


# --- gradients -------------------------------------------------------------------------------------------


def test_retrievers_learn_from_the_loss_of_later_tokens_alone() -> None:
    """The landmark of chunk t is judged by the tokens that chunk t + 1 predicts."""
    model, ids = drt(), tokens(8 * S)
    labels = torch.full_like(ids, -100)
    labels[:, 3 * S + 1 : 4 * S + 1] = ids[:, 3 * S + 1 : 4 * S + 1]  # what chunk 3 predicts
    out = model.train()(ids, labels=labels, output_retrieval=True, noise_seed=SEEDS[:1])
    (by_weight,) = torch.autograd.grad(out.loss, out.retrieval[0].weights)
    # chunk 2 asked for chunk 3; chunk 1 for chunk 2, which chunk 3 sees through the window
    judged = by_weight[0].abs().amax(-1) > 0
    assert judged[2]
    assert not judged[3:].any()


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2},
        {"window_position": "rope", "num_sinks": 2, "max_sink_distance": 9, "landmarks_as_keys": False},
    ],
    ids=["plain", "sinks"],
)
def test_gradients_are_those_of_finite_differences(options: dict[str, Any]) -> None:
    model, ids = drt(**options), tokens(46, batch=2)
    model(ids, labels=ids).loss.backward()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        losses = []
        with torch.no_grad():
            for step in (1e-6, -1e-6):
                parameter.add_(direction, alpha=step)
                losses.append(float(model(ids, labels=ids).loss))
                parameter.sub_(direction, alpha=step)
        slope = (losses[0] - losses[1]) / 2e-6
        assert slope == pytest.approx(float((parameter.grad * direction).sum()), rel=1e-4, abs=1e-7), name


def test_one_retrieved_chunk_is_refused_in_training_only() -> None:
    model, ids = drt(num_retrieved_chunks=1), tokens(30)
    logits_of(model, ids)
    with pytest.raises(ValueError, match="num_retrieved_chunks: expected at least 2 in training, got 1"):
        trained(model, ids, None)
