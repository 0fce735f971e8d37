"""The model with a window alone: its equations, reading in pieces, causality."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.naive import NaiveWindow
from tests.models.tiny import PRETRAINED, assert_same, logits_of, split, tokens, window_model

VARIANTS: list[dict[str, Any]] = [
    {},
    {"window_position": "rope"},
    {"sliding_window": 1},
    {"sliding_window": 500},
    {"sliding_window": None},
    {"sliding_window": None, "window_position": "rope"},
    {"num_key_value_heads": None, "logit_scale": 0.25, "tie_word_embeddings": False},
    {"implementation": "reference"},
    {"norm": "layer", "mlp": "gelu"},
    {"norm": "layer"},
    {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    PRETRAINED | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    {"head_dim": 3, "qk_norm": "all"},
    PRETRAINED
    | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "num_sinks": 2},
    {"num_sinks": 3},
    {"num_sinks": 2, "max_sink_distance": 20, "window_position": "rope"},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("length", [1, 6, 7, 8, 90])
def test_one_forward_is_the_equations(options: dict[str, Any], length: int) -> None:
    model, ids = window_model(**options), tokens(length)
    assert_same(logits_of(model, ids)[0], NaiveWindow(model, ids[0]).logits)


@pytest.mark.parametrize(
    "options", [{}, {"window_position": "rope"}, {"sliding_window": None}, *VARIANTS[-2:]], ids=str
)
@pytest.mark.parametrize("place", [0, 6, 7, 40, 89])
def test_no_token_changes_an_earlier_logit_bit_for_bit(options: dict[str, Any], place: int) -> None:
    model, ids = window_model(**options), tokens(90)
    changed = ids.clone()
    changed[0, place] = (ids[0, place] + 1) % 50
    before, after = logits_of(model, ids), logits_of(model, changed)
    assert torch.equal(before[:, :place], after[:, :place])
    moved = (before != after).any(-1)[0].nonzero().flatten().tolist()
    assert moved[0] == place
    reach = 3 * 6 if model.config.sliding_window and place >= model.config.num_sinks else 90
    assert moved[-1] == min(89, place + reach)  # and no further than the layers reach


def test_the_cache_does_not_grow() -> None:
    model = window_model()
    cache = model.new_cache()
    for piece in split(tokens(90), [7]):
        logits_of(model, piece, past_key_values=cache)
        assert cache.layers[0].keys.shape == (1, 2, 7, 4)  # [B, J, W, D]
    assert cache.window_bytes() == 3 * 2 * 7 * 2 * 4 * 8
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
