"""Landmark Attention of a whole text, as in training, against the equations written naively; and what is refused."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.budgets import assert_within_budget
from tests.models.landmark.naive import NaiveWhole
from tests.models.tiny import (
    PRETRAINED,
    assert_same,
    early,
    landmark,
    landmark_config,
    logits_of,
    pad,
    padded,
    place,
    tokens,
)
from trailmark.models import LandmarkConfig

S = 4


def naive(model: Any, ids: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        return NaiveWhole(model, ids[0], **options).logits


# --- the equations ---------------------------------------------------------------------------------------

VARIANTS: list[dict[str, Any]] = [
    {},
    {"norm": "layer", "mlp": "gelu"},
    {"landmark_loss": "text", "norm": "layer"},
    {"num_key_value_heads": None, "mlp": "gelu"},
    {"num_key_value_heads": 1, "chunk_size": 1},
    {"chunk_size": 15, "rope_theta": 500},
    {"chunk_size": 100},
    {"logit_scale": 0.25, "tie_word_embeddings": False, "landmark_loss": "text"},
    {"gate_probability": 0.5},
    PRETRAINED,
    {"qk_norm": "all", "norm": "layer", "head_dim": 2},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_one_forward_is_the_equations(options: dict[str, Any]) -> None:
    model, ids, marks = landmark(**options), tokens(46), early(46)
    assert_same(logits_of(model, ids)[0], naive(model, ids))
    assert_same(logits_of(model, ids, close_chunk=marks)[0], naive(model, ids, marks=marks[0].tolist()))


@pytest.mark.parametrize("length", [1, S - 1, S, S + 1, 2 * S, 2 * S + 1, 61])
def test_any_length(length: int) -> None:
    model, ids = landmark(), tokens(length)
    assert_same(logits_of(model, ids)[0], naive(model, ids))
    ends = [False] * (length - 1) + [True]
    assert_same(logits_of(model, ids, close_chunk=True)[0], naive(model, ids, marks=ends))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", [{}, {"landmark_loss": "text"}], ids=str)
def test_a_padded_batch_is_its_rows(side: str, options: dict[str, Any]) -> None:
    model, lengths = landmark(**options), [30, 1, 17]
    ids, mask = padded(lengths, side, extra=2)
    marks = [early(n, seed=n)[0] for n in lengths]
    close = pad(marks, side, extra=2)
    together = logits_of(model, ids, attention_mask=mask, close_chunk=close)
    for b, n in enumerate(lengths):
        alone = naive(model, tokens(n, seed=b), marks=marks[b].tolist())
        assert_same(together[b, place(n, ids.shape[1], side)], alone)


def test_the_reference_implementation_agrees() -> None:
    ids, marks = tokens(46, batch=2), early(46).expand(2, -1)
    fast, oracle = landmark(), landmark(implementation="reference")
    assert_same(logits_of(fast, ids, close_chunk=marks), logits_of(oracle, ids, close_chunk=marks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precisions_keep_the_error_budget(dtype: torch.dtype) -> None:
    ids = tokens(46, batch=16)  # the largest of few errors is a matter of luck
    fast, oracle = (landmark(implementation=name).to(dtype) for name in (None, "reference"))
    exact = copy.deepcopy(oracle).double()
    assert_within_budget(*(logits_of(model, ids) for model in (fast, oracle, exact)))


# --- configurations --------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"chunk_size": 0}, "chunk_size: expected at least 1, got 0."),
    ({"num_retrieved_chunks": -1}, "num_retrieved_chunks: expected 0 (retrieval off) or more, got -1."),
    ({"num_retrieved_chunks": None}, "num_retrieved_chunks: expected int, got None."),
    ({"max_position_embeddings": 0}, "max_position_embeddings: expected at least 1, got 0."),
    ({"local_length": 0}, "local_length: expected None or at least 1, got 0."),
    ({"max_memory_chunks": 0}, "max_memory_chunks: expected None or at least 1, got 0."),
    ({"position_jump": -1}, "position_jump: expected at least 0, got -1."),
    ({"gate_probability": 1.5}, "gate_probability: expected 0 to 1, got 1.5."),
    ({"gate_probability": 0.5, "gate_cutoff": -0.1}, "gate_cutoff: expected 0 to 1, got -0.1."),
    (
        {"gate_cutoff": 0.3},
        "gate_cutoff: expected 0 for a model without a retrieval gate (gate_probability 0), got 0.3.",
    ),
    (
        {"sliding_window": 7},
        "sliding_window, window_position: expected None and 'rope': local_length says what is local, "
        "got (7, 'rope').",
    ),
    (
        {"window_position": "alibi"},
        "sliding_window, window_position: expected None and 'rope': local_length says what is local, "
        "got (None, 'alibi').",
    ),
    (
        {"landmark_loss": "none_after_eos"},
        "landmark_loss: expected 'none' or 'text' without an eos_token_id, got 'none_after_eos'.",
    ),
    (
        {"num_attention_heads": 16, "num_key_value_heads": 16},
        "num_attention_heads: expected an even head size",
    ),
    (
        {"max_position_embeddings": 36},
        "max_position_embeddings: expected at least 20 for 3 + 1 chunks and 17 for a cell of 11 tokens. Lower "
        "num_retrieved_chunks, chunk_size or local_length, or train on longer texts, got 36.",
    ),
    (
        {"retrieve_per": "block"},
        "retrieve_per: expected 'token_and_head' or 'token' or 'head' or 'cell', got 'block'.",
    ),
    ({"memory_position": "exact"}, "memory_position: expected 'stingy' or 'true', got 'exact'."),
    ({"landmark_phase": 3}, "landmark_phase: expected 'random' or 'fixed', got 3."),
    (
        {"landmark_loss": True},
        "landmark_loss: expected 'none' or 'none_after_eos' or 'text', got True.",
    ),
    ({"mlp": "relu"}, "mlp: expected 'swiglu' or 'gelu', got 'relu'."),
    ({"norm": "batch"}, "norm: expected 'rms' or 'layer', got 'batch'."),
    ({"causal_retrieval": 1}, "causal_retrieval: expected bool, got 1."),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=str)
def test_sizes_and_choices_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        landmark_config(**changes)


def test_what_just_fits_is_taken() -> None:
    """Four slots of 5 places, and a cell of 11 tokens that may begin with 3 of an open chunk: 14 and 3 landmarks."""
    assert landmark_config(max_position_embeddings=37).cell_positions() == 17
    # true positions need no prefix
    assert landmark_config(max_position_embeddings=1, memory_position="true").cell_positions() == 17


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 441),  # 768 - 5 * 64 = 448 places: 7 chunks of 64
        ({"chunk_size": 50, "max_position_embeddings": 512, "num_retrieved_chunks": 2}, 350),  # the paper's
        ({"memory_position": "true"}, 441),
        ({"chunk_size": 63, "num_retrieved_chunks": 1, "max_position_embeddings": 200}, 63),
    ],
    ids=str,
)
def test_local_length_is_the_most_whole_chunks_that_fit(changes: dict[str, Any], expected: int) -> None:
    config = LandmarkConfig(**changes)
    assert config.local_length == expected
    assert expected % config.chunk_size == 0
    needed = (config.num_retrieved_chunks + 1) * (config.chunk_size + 1) + config.cell_positions()
    assert config.max_position_embeddings - config.chunk_size - 1 < needed <= config.max_position_embeddings


def test_one_retrieved_chunk_keeps_two_slots() -> None:
    """Sec. 3.2.1: else the last chunk could not be told from the others by its place."""
    sizes: dict[str, Any] = {"num_retrieved_chunks": 1, "local_length": 8, "chunk_size": 4}
    assert landmark_config(max_position_embeddings=20, **sizes).cell_positions() == 10
    with pytest.raises(ValueError, match=r"at least 10 for 1 \+ 1 chunks and 10 for a cell of 8 tokens"):
        landmark_config(max_position_embeddings=19, **sizes)


# --- caches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_size": 5},
        {"num_retrieved_chunks": 2},
        {"local_length": 12},
        {"retrieve_per": "token"},
        {"memory_position": "true"},
        {"max_memory_chunks": 7},
        {"gate_probability": 0.5},
    ],
    ids=str,
)
def test_a_cache_of_another_setting_is_refused(changes: dict[str, Any], tmp_path: Any) -> None:
    model, other, ids = landmark(), landmark(**changes), tokens(30)
    (name,) = changes
    cache = model.read(ids)
    with pytest.raises(ValueError, match=f"past_key_values: expected a cache of this model .*{name}"):
        logits_of(other, ids, past_key_values=cache)
    cache.save(tmp_path)
    with pytest.raises(ValueError, match="folder: expected a memory written by this model"):
        other.load_cache(tmp_path)


def test_what_changes_no_arithmetic_may_differ(tmp_path: Any) -> None:
    model = landmark()
    model.read(tokens(30)).save(tmp_path)
    other = landmark(position_jump=5, landmark_phase="fixed", max_position_embeddings=60)
    assert_same(
        logits_of(other, tokens(9, seed=1), past_key_values=other.load_cache(tmp_path)),
        logits_of(model, tokens(9, seed=1), past_key_values=model.load_cache(tmp_path)),
    )


def test_nothing_is_taken_back_from_a_cache_but_all() -> None:
    model = landmark()
    cache = model.read(tokens(30))
    with pytest.raises(
        ValueError, match="tokens_to_remove: expected tokens whose past is still there, got 2"
    ):
        cache.crop(-2)
    cache.crop(-30)
    assert cache.get_seq_length() == 0
    assert_same(logits_of(model, tokens(9), past_key_values=cache), logits_of(model, tokens(9)))
