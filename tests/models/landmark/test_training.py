"""Training Landmark Attention: phases, jumps and gates as drawn, what bears loss, and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.landmark.naive import NaiveWhole
from tests.models.tiny import (
    EXACT,
    assert_same,
    landmark,
    logits_of,
    tokens,
)
from trailmark.models import LandmarkForCausalLM
from trailmark.models.landmark.model import _GATE, _JUMP, _PHASE
from trailmark.ops import fold_seed

S, LENGTH = 4, 46
SEEDS = torch.tensor([11, 12])


def trained(model: LandmarkForCausalLM, ids: Tensor, seeds: Tensor | None = SEEDS, **options: Any) -> Any:
    return model.train()(ids, labels=ids, noise_seed=seeds, **options)


def drawn(model: LandmarkForCausalLM, seed: int) -> dict[str, Any]:
    """What a sample's seed draws, for the naive model."""
    c, chunks = model.config, torch.arange(LENGTH + 1)
    found: dict[str, Any] = {"phase": int(fold_seed(seed, _PHASE)) % c.chunk_size}
    if c.landmark_phase == "fixed":
        found = {"phase": 0}
    if c.position_jump:
        jumps = fold_seed(seed, _JUMP, chunks) % c.position_jump
        found["jumps"] = [0, *jumps.cumsum(0).tolist()]
    if model.gate is not None:
        share = fold_seed(seed, _GATE, chunks) / 2**32
        found["controlled"] = chunks[share < c.gate_probability].tolist()
    return found


# --- the equations ---------------------------------------------------------------------------------------

VARIANTS: list[dict[str, Any]] = [
    {},
    {"landmark_phase": "fixed", "norm": "layer", "mlp": "gelu"},
    {"position_jump": 9},
    {"gate_probability": 0.5},
    {"gate_probability": 1.0, "num_key_value_heads": 1},
    {"gate_probability": 0.3, "position_jump": 5, "tie_word_embeddings": False, "logit_scale": 0.5},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.sampled(3)
def test_a_step_is_the_equations(options: dict[str, Any], early: bool) -> None:
    """Logits, loss, and the gradient of every parameter."""
    model, ids = landmark(**options), tokens(LENGTH, batch=2)
    marks = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(0)) < (0.2 if early else 0)
    out = trained(model, ids, close_chunk=marks)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(out.loss, list(parameters.values()))
    exact = [
        NaiveWhole(model, ids[b], marks[b].tolist(), **drawn(model, int(seed))).logits
        for b, seed in enumerate(SEEDS)
    ]
    logits = torch.stack(exact)
    assert_same(out.logits.detach(), logits.detach())
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert_same(out.loss.detach(), loss.detach())
    expected = torch.autograd.grad(loss, list(parameters.values()))
    for name, ours, theirs in zip(parameters, gradients, expected, strict=True):
        assert theirs.abs().max() > 0, name
        assert_same(ours, theirs)


def test_what_is_drawn_is_drawn_in_training_only() -> None:
    model = landmark(position_jump=50, gate_probability=0.5)
    ids = tokens(LENGTH, batch=2)
    plain = logits_of(model, ids)
    assert torch.equal(logits_of(model, ids, noise_seed=SEEDS), plain)
    with torch.no_grad():
        exact = [NaiveWhole(model, row).logits for row in ids]
    assert_same(plain, torch.stack(exact))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"landmark_phase": "fixed", "position_jump": 9},
        {"landmark_phase": "fixed", "gate_probability": 0.5},
    ],
    ids=str,
)
def test_draws_are_a_function_of_the_sample_and_its_seed(options: dict[str, Any]) -> None:
    model, ids = landmark(**options), tokens(LENGTH).expand(4, -1)
    seeds = torch.tensor([1, 1, 2, 5])
    rows = trained(model, ids, seeds).logits
    assert_same(rows[0].detach(), rows[1].detach())
    assert not torch.equal(rows[0], rows[2])
    for apart in (slice(0, 1), slice(1, 4)):
        assert_same(trained(model, ids[apart], seeds[apart]).logits.detach(), rows[apart].detach())
    torch.manual_seed(0)
    first, other = (trained(model, ids, None).logits for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(trained(model, ids, None).logits, first)
    assert not torch.equal(first, other)


def test_a_text_begins_at_each_phase_as_often() -> None:
    model, ids = landmark(), tokens(2 * S).expand(200, -1)
    with torch.no_grad():
        rows = model.train()(ids, noise_seed=torch.arange(200)).logits
        exact = [NaiveWhole(model, ids[0], phase=phase).logits for phase in range(S)]
    near = torch.stack([(rows - logits).abs().amax((1, 2)) <= EXACT for logits in exact])
    assert (near.sum(0) == 1).all()
    assert (near.sum(1) - 50).abs().max() < 25  # 4 standard deviations
    fixed = landmark(landmark_phase="fixed")
    assert_same(trained(fixed, ids[:2]).logits.detach(), logits_of(fixed.eval(), ids[:2]))


@pytest.mark.parametrize("jump", [0, 1])
def test_no_jump_is_a_step_of_one(jump: int) -> None:
    model, ids = landmark(landmark_phase="fixed", position_jump=jump), tokens(LENGTH, batch=2)
    assert torch.equal(trained(model, ids).logits, logits_of(model.eval(), ids))


def test_without_a_gate_there_is_no_parameter_for_it() -> None:
    assert landmark().gate is None
    assert "gate" not in landmark().state_dict()
    assert landmark(gate_probability=0.01).gate is not None


def test_the_gate_controls_the_share_of_landmarks_that_was_asked_for() -> None:
    """1: all. Where it controls nothing it changes nothing: a text of one chunk."""
    model = landmark(gate_probability=1.0, landmark_phase="fixed")
    ids = tokens(LENGTH, batch=2)
    with torch.no_grad():
        exact = NaiveWhole(model, ids[0], controlled=range(LENGTH)).logits
        assert_same(model.train()(ids, noise_seed=SEEDS).logits[0], exact)
        short = model(ids[:, :S], noise_seed=SEEDS).logits
    assert_same(short, logits_of(model.eval(), ids[:, :S]))
    counts = [len(drawn(landmark(gate_probability=0.3), seed)["controlled"]) for seed in range(40)]
    share = sum(counts) / (40 * (LENGTH + 1))
    assert abs(share - 0.3) < 4 * math.sqrt(0.3 * 0.7 / (40 * (LENGTH + 1)))


# --- what bears loss -------------------------------------------------------------------------------------


def text_losses(model: LandmarkForCausalLM, ids: Tensor, seed: int, marks: list[bool]) -> Tensor:
    """[T - 1]: cross entropies over the V + 1 tokens of the text with landmarks in it, of token t and of the
    landmark before it, if there is one."""
    naive = NaiveWhole(model, ids, marks, **drawn(model, seed))
    scaled = naive.states * model.config.logit_scale
    logits = torch.cat([model.lm_head(scaled), (scaled @ model.landmark)[:, None]], -1)  # [P, V + 1]
    spots, V = naive.spots, model.config.vocab_size
    losses = torch.zeros(len(ids), dtype=torch.float64)
    for i in range(1, len(spots)):
        target = torch.tensor(V if spots[i].is_landmark else int(ids[spots[i].token]))
        t = spots[i].token + int(spots[i].is_landmark)  # a landmark is on the way to the next token
        if t < len(ids):
            losses = losses.index_add(0, torch.tensor([t]), F.cross_entropy(logits[i - 1], target)[None])
    return losses[1:]


@pytest.mark.parametrize("options", [{}, {"logit_scale": 0.5, "tie_word_embeddings": False}], ids=str)
def test_landmarks_of_the_text_are_predicted_and_predict(options: dict[str, Any]) -> None:
    model, ids = landmark(landmark_loss="text", **options), tokens(LENGTH, batch=2)
    marks = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.1
    out = trained(model, ids, close_chunk=marks)
    exact = torch.stack(
        [text_losses(model, ids[b], int(seed), marks[b].tolist()) for b, seed in enumerate(SEEDS)]
    )
    without = F.cross_entropy(out.logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    assert_same((without + out.landmark_loss[:, :-1]).detach(), exact.detach())
    assert_same(out.loss.detach(), exact.mean().detach())  # a token's loss: its landmark's is part of it
    summed = trained(model, ids, close_chunk=marks, num_items_in_batch=3)
    assert_same(summed.loss.detach(), exact.sum().detach() / 3)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(out.loss, parameters)
    for ours, theirs in zip(gradients, torch.autograd.grad(exact.mean(), parameters), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("eos", [7, [7, 9]])
def test_what_follows_an_end_of_text_may_bear_no_loss(eos: Any) -> None:
    ids = tokens(LENGTH, batch=2)
    ids[0, [3, 20, LENGTH - 1]] = 7
    ids[1, [0, 12]] = 9
    model = landmark(landmark_loss="none_after_eos", eos_token_id=eos)
    plain = landmark(eos_token_id=eos)
    losses = []
    for one in (model, plain):
        out = trained(one, ids)
        losses.append(out.loss.detach())
    each = F.cross_entropy(out.logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").detach()
    after = torch.isin(ids[:, :-1], torch.tensor(eos))
    assert after.sum() >= 3
    assert_same(losses[0], each[~after].mean())
    assert_same(losses[1], each.mean())


def test_by_default_landmarks_neither_are_predicted_nor_predict() -> None:
    """The last token of a chunk predicts the token after the landmark."""
    model, ids = landmark(landmark_phase="fixed"), tokens(LENGTH)
    out = trained(model, ids, SEEDS[:1])
    assert out.landmark_loss is None
    naive = NaiveWhole(model, ids[0])
    at = [i for i, s in enumerate(naive.spots) if not s.is_landmark]
    logits = model.lm_head(naive.states[at])
    assert_same(out.loss.detach(), F.cross_entropy(logits[:-1], ids[0, 1:]).detach())


# --- batches, precision, memory --------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, S - 1, S])
@pytest.mark.parametrize("options", [{}, {"gate_probability": 0.5, "landmark_loss": "text"}], ids=str)
def test_what_was_not_used_gets_zeros_as_gradient(length: int, options: dict[str, Any]) -> None:
    """A tensor, not None: DDP waits for it."""
    model, ids = landmark(landmark_phase="fixed", **options), tokens(length, batch=2)
    out = trained(model, ids)
    (out.loss + out.logits.square().mean()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "gate_probability": 0.5,
            "position_jump": 9,
            "landmark_loss": "text",
            "norm": "layer",
            "mlp": "gelu",
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_step_in_bfloat16(options: dict[str, Any], autocast: bool) -> None:
    """In it, or under autocast; the loss is in float32."""
    ids, model = tokens(LENGTH, batch=2), landmark(**options)
    model = model.float() if autocast else model.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = trained(model, ids)
    out.loss.backward()
    assert out.loss.dtype == torch.float32
    assert all(p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in model.parameters())
