"""The model with a window alone: its equations, reading in pieces, causality."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.tiny import NaiveWindow, assert_same, logits_of, split, tokens, window_model
from trailmark.models import causal_lm

OPTIONS = pytest.mark.parametrize(
    "options",
    [
        {},
        {"window_position": "rope"},
        {"sliding_window": 1},
        {"sliding_window": 500},
        {"sliding_window": None},
        {"sliding_window": None, "window_position": "rope"},
        {"num_key_value_heads": None, "logit_scale": 0.25, "tie_word_embeddings": False},
        {"implementation": "reference"},
    ],
    ids=str,
)


@OPTIONS
@pytest.mark.parametrize("length", [1, 6, 7, 8, 90])
def test_one_forward_is_the_equations(options: dict[str, Any], length: int) -> None:
    model, ids = window_model(**options), tokens(length)
    assert_same(logits_of(model, ids)[0], NaiveWindow(model, ids[0]).logits)


@OPTIONS
@pytest.mark.parametrize("pieces", [[1], [3, 5, 8, 1, 26], [60, 30]], ids=str)
def test_any_split_into_calls_is_one_forward(options: dict[str, Any], pieces: list[int]) -> None:
    model, ids = window_model(**options), tokens(90, batch=2)
    cache = model.new_cache()
    parts = [logits_of(model, piece, past_key_values=cache) for piece in split(ids, pieces)]
    assert_same(torch.cat(parts, dim=1), logits_of(model, ids))
    assert cache.num_tokens.tolist() == [90, 90]
    assert cache.get_seq_length() == 90


@OPTIONS
def test_reading_then_forward_is_one_forward(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal_lm, "_READ_TOKENS", 11)
    model, ids = window_model(**options), tokens(90, batch=2)
    for read in (1, 11, 47, 89):
        cache = model.new_cache()
        model.read(ids[:, :read], cache)
        assert_same(logits_of(model, ids[:, read:], past_key_values=cache), logits_of(model, ids)[:, read:])


@pytest.mark.parametrize("options", [{}, {"window_position": "rope"}, {"sliding_window": None}], ids=str)
@pytest.mark.parametrize("place", [0, 6, 7, 40, 89])
def test_no_token_changes_an_earlier_logit_bit_for_bit(options: dict[str, Any], place: int) -> None:
    model, ids = window_model(**options), tokens(90)
    changed = ids.clone()
    changed[0, place] = (ids[0, place] + 1) % 50
    before, after = logits_of(model, ids), logits_of(model, changed)
    assert torch.equal(before[:, :place], after[:, :place])
    moved = (before != after).any(-1)[0].nonzero().flatten().tolist()
    assert moved[0] == place
    reach = 3 * 6 if model.config.sliding_window else 90
    assert moved[-1] == min(89, place + reach)  # and no further than the layers reach


def test_the_cache_does_not_grow() -> None:
    model = window_model()
    cache = model.new_cache()
    for piece in split(tokens(90), [7]):
        logits_of(model, piece, past_key_values=cache)
        assert cache.layers[0].keys.shape == (1, 2, 7, 4)  # [B, J, W, D]
    assert cache.window_bytes() == 3 * 2 * 7 * 2 * 4 * 8
    assert cache.memory_bytes() == 0


def test_every_parameter_learns() -> None:
    model, ids = window_model().train(), tokens(90, batch=2)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("position", ["alibi", "rope"])
def test_activation_checkpointing_changes_no_bit(position: str, use_reentrant: bool) -> None:
    ids = tokens(90, batch=2)
    plain, checkpointed = (window_model(window_position=position).float().train() for _ in range(2))
    checkpointed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    losses = [model(ids, labels=ids).loss for model in (plain, checkpointed)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for ours, theirs in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_cache_is_refused_in_training() -> None:
    model = window_model().train()
    for call in (model.read, lambda ids, cache: model(ids, past_key_values=cache)):
        with pytest.raises(ValueError, match="past_key_values: expected None in training"):
            call(tokens(30), model.new_cache())


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_memory_tier_changes_nothing_without_a_memory(tier: str) -> None:
    model, ids = window_model(), tokens(30)
    cache = model.new_cache(memory_tier=tier)
    model.read(ids, cache)
    assert cache.memory_bytes() == 0


@pytest.mark.parametrize(("window", "reach"), [(7, 18), (1, 0), (None, None)])
def test_what_the_layers_reach(window: int | None, reach: int | None) -> None:
    """Three layers, W - 1 positions each."""
    assert window_model(sliding_window=window).reach() == reach


def test_reading_runs_no_layer_before_logits_are_wanted() -> None:
    model, ids = window_model(), tokens(90)
    seen: list[int] = []
    model.layers[0].register_forward_hook(lambda _, inputs, out: seen.append(inputs[0].shape[1]))
    cache = model.read(ids[:, :80])
    assert seen == []
    logits_of(model, ids[:, 80:], past_key_values=cache)
    assert seen == [18 + 10]
