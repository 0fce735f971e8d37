"""Configurations: sizes that do not fit are refused, defaults are the papers' 128M models."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.models.tiny import drt_config, window_config
from trailmark.models import MODELS, DRTConfig, DRTForCausalLM, SlidingWindowConfig, SlidingWindowForCausalLM

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": 0}, "vocab_size: expected at least 1, got 0"),
    ({"hidden_size": 0}, "hidden_size: expected at least 1, got 0"),
    ({"intermediate_size": -1}, "intermediate_size: expected at least 1, got -1"),
    ({"num_hidden_layers": 0}, "num_hidden_layers: expected at least 1, got 0"),
    ({"num_attention_heads": 5}, "num_attention_heads: expected a divisor of hidden_size = 16, got 5"),
    ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of num_attention_heads = 4, got 3"),
    ({"num_key_value_heads": 0}, "num_key_value_heads: expected a divisor of num_attention_heads = 4, got 0"),
    ({"sliding_window": 0}, "sliding_window: expected .* at least 1, got 0"),
    ({"implementation": "triton"}, "implementation: expected None, 'reference' or 'torch', got 'triton'"),
    (
        {"num_attention_heads": 16, "num_key_value_heads": 16, "window_position": "rope"},
        "num_attention_heads: expected an even head size",
    ),
]
WRONG_FOR_DRT: list[tuple[dict[str, Any], str]] = [
    ({"chunk_size": 0}, "chunk_size: expected at least 1, got 0"),
    ({"num_retrieved_chunks": -1}, r"num_retrieved_chunks: expected 0 \(retrieval off\) or more, got -1"),
    ({"num_retrieval_groups": 0}, "num_retrieval_groups: expected at least 1, got 0"),
    ({"num_encoder_layers": 0}, "num_encoder_layers: expected at least 1, got 0"),
    ({"num_lower_layers": 3}, r"num_lower_layers: expected 0 to 2 \(num_hidden_layers - 1.*got 3"),
    ({"num_lower_layers": -1}, "num_lower_layers: expected 0 to 2 .*got -1"),
    ({"num_retrieval_groups": 3}, "num_retrieval_groups: expected a divisor of the 2 upper layers, got 3"),
    ({"sliding_window": None}, "sliding_window: expected a number of positions, got None"),
    (
        {"num_attention_heads": 16, "num_key_value_heads": 16},
        "num_attention_heads: expected an even head size",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG + WRONG_FOR_DRT, ids=str)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        drt_config(**changes)


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=str)
def test_sizes_that_do_not_fit_are_refused_without_retrieval(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        window_config(**changes)


def test_no_heads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^num_attention_heads: expected at least 1, got 0"):
        drt_config(num_attention_heads=0)


WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"window_position": "rotary"}, "window_position: expected 'alibi' or 'rope', got 'rotary'."),
    ({"initialization": "fan-in"}, "initialization: expected 'normal' or 'fan_in', got 'fan-in'."),
    ({"hidden_size": "16"}, "hidden_size: expected int, got '16'."),
    ({"hidden_size": 16.0}, "hidden_size: expected int, got 16.0."),
    ({"sliding_window": True}, "sliding_window: expected int or None, got True."),
    ({"logit_scale": None}, "logit_scale: expected float or int, got None."),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected bool, got 1."),
]


@pytest.mark.parametrize("make", [drt_config, window_config])
@pytest.mark.parametrize(("changes", "message"), WRONG_TYPES, ids=str)
def test_a_value_of_another_type_or_an_unknown_choice_is_refused(
    make: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        make(**changes)
    config = make()
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        setattr(config, *next(iter(changes.items())))


def test_whole_numbers_are_numbers() -> None:
    assert drt_config(logit_scale=1, rope_theta=10000).logit_scale == 1


def test_a_changed_configuration_that_does_not_fit_is_not_saved(tmp_path: Any) -> None:
    config = drt_config()
    config.num_retrieval_groups = 5
    with pytest.raises(ValueError, match=r"^num_retrieval_groups: expected a divisor"):
        config.save_pretrained(tmp_path)


def test_defaults() -> None:
    config = DRTConfig()
    assert (config.num_lower_layers, config.num_upper_layers, config.num_key_value_heads) == (6, 6, 12)
    assert (config.chunk_size, config.num_retrieved_chunks, config.sliding_window) == (63, 8, 512)
    assert config.head_dim == 64
    assert DRTConfig(num_hidden_layers=5, num_retrieval_groups=3).num_lower_layers == 2
    assert SlidingWindowConfig(sliding_window=None).sliding_window is None


@pytest.mark.parametrize(
    "config", [drt_config(3, window_position="rope", retriever="encoder"), window_config()]
)
def test_a_configuration_survives_its_file(config: Any, tmp_path: Any) -> None:
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is type(config)
    assert loaded.to_diff_dict() == config.to_diff_dict()
    assert loaded.model_type in MODELS


def test_a_file_with_sizes_that_do_not_fit_is_refused(tmp_path: Any) -> None:
    drt_config().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"num_retrieval_groups": 1', '"num_retrieval_groups": 5'))
    with pytest.raises(ValueError, match="num_retrieval_groups: expected a divisor"):
        AutoConfig.from_pretrained(tmp_path)


def parameters(vocab: int, E: int, F: int, layers: int, drt: tuple[int, int, int] | None = None) -> int:
    """By formula, embeddings tied, as many key/value heads as heads; drt = upper, encoder layers, groups."""
    layer = 4 * E * E + 3 * E * F + 2 * E  # qkv and output, SwiGLU, two norms
    total = vocab * E + layers * layer + E
    if drt:
        upper, encoder, groups = drt
        total += upper * (2 * E * E + E)  # query, output and norm of GCA
        total += encoder * layer + 2 * E + 3 * E * E  # two norms, keys and values, landmark vectors
        total += groups * (E * E + E) + E  # queries; the landmark token
    return total


def test_the_128m_models_have_their_published_size() -> None:
    with torch.device("meta"):
        drt, window = DRTForCausalLM(DRTConfig()), SlidingWindowForCausalLM(SlidingWindowConfig())
        plain = DRTForCausalLM(DRTConfig(retrieval_projections=False, num_retrieval_groups=2))
        wide = DRTForCausalLM(DRTConfig(num_retrieval_groups=2))
    assert {p.device.type for p in drt.parameters()} == {"meta"}
    sizes = (50257, 768, 2048)
    assert drt.num_parameters() == parameters(*sizes, 12, (6, 2, 1)) == 147_154_944
    assert wide.num_parameters() == parameters(*sizes, 12, (6, 2, 2))
    assert plain.num_parameters() == parameters(*sizes, 12, (6, 2, 2)) - 3 * 768**2  # W_l and two W_h
    assert window.num_parameters() == parameters(*sizes, 12) == 123_551_232
    # the published code, without projections and with 50265 tokens: 146.0M and 123.5M
    assert round((plain.num_parameters() - 768 + 8 * 768) / 1e6, 1) == 146.0
