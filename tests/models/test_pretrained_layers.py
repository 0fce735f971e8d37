"""What pretrained weights ask of the layers, against transformers itself: Llama, Mistral, Qwen2, Qwen3, OLMo 2.

Random weights in float64, mapped by hand. The models as a whole are tested where the others are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention, Olmo2RotaryEmbedding

from tests.models.tiny import (
    LINEAR,
    LLAMA3,
    MIXED,
    YARN,
    assert_same,
    block_recurrent_config,
    drt,
    drt_config,
    landmark,
    logits_of,
    rpt_config,
    split,
    tokens,
    window_config,
    window_model,
)
from tests.models.transformers64 import attention_weights, build, in_float64, rope, scaled_rope, weights_of
from trailmark.models import SlidingWindowForCausalLM, TrailmarkForCausalLM
from trailmark.models.grid import lay_out
from trailmark.models.layers import MLP, ChunkAttention, Place, RMSNorm, WindowAttention, rotary_table
from trailmark.models.rope import attention_factor, inverse_frequencies, rope_of
from trailmark.training.optimizer import MuonAdamW

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}
SCALINGS: list[dict[str, Any]] = [
    LINEAR,
    LLAMA3,
    YARN,
    YARN | {"truncate": False, "beta_fast": 8, "beta_slow": 0.5},
    YARN | {"mscale": 0.7, "mscale_all_dim": 0.4, "attention_factor": None},
    YARN | {"attention_factor": 1.25},
    YARN | {"mscale": 1.0, "factor": 1.0},
]
# theirs, and what our configuration says beside the sizes
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, **rope(500.0), tie_word_embeddings=True), {}),
    "llama, wide heads": (LlamaForCausalLM, LlamaConfig(**SIZES, **rope(500.0), head_dim=10), {}),
    **{
        f"llama, {n}": (LlamaForCausalLM, LlamaConfig(**SIZES, **rope(500.0, scaling)), {"rope_scaling": scaling})
        for n, scaling in enumerate(SCALINGS)
    },
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, **rope(500.0), sliding_window=7), {"sliding_window": 7}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, **rope(1e6)), {"attention_bias": True}),
    "qwen2, mixed windows": (
        Qwen2ForCausalLM,
        Qwen2Config(
            **SIZES, **rope(1e6), layer_types=MIXED, use_sliding_window=True, sliding_window=7
        ),
        {"attention_bias": True, "layer_types": MIXED, "sliding_window": 7},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, **rope(1e6), head_dim=12), {"qk_norm": "head"}),
    "qwen3, a width that heads do not divide": (
        Qwen3ForCausalLM,
        Qwen3Config(**SIZES | {"hidden_size": 46}, **rope(1e6), head_dim=6),
        {"qk_norm": "head"},
    ),
    "qwen3, yarn": (
        Qwen3ForCausalLM,
        Qwen3Config(**SIZES, **rope(1e4, YARN), head_dim=12),
        {"qk_norm": "head", "rope_scaling": YARN},
    ),
}  # fmt: skip


def ours_of(theirs: Any, fields: dict[str, Any]) -> SlidingWindowForCausalLM:
    """The window model with the weights of one of transformers."""
    c = theirs.config
    kept = [name for name in SIZES if name != "max_position_embeddings"]
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    changes = {name: getattr(c, name) for name in kept} | {
        "head_dim": head_dim,
        "window_position": "rope",
        "sliding_window": None,
        "rope_theta": c.rope_parameters["rope_theta"],
        "tie_word_embeddings": c.tie_word_embeddings,
    }
    model = window_model(**changes | fields)
    model.load_state_dict(weights_of(theirs, head_dim))
    return model


@pytest.mark.parametrize("name", CASES)
def test_the_window_model_with_pretrained_weights_is_transformers_own(name: str) -> None:
    kind, config, fields = CASES[name]
    theirs, ids = build(kind, config), tokens(70, batch=2)
    with torch.no_grad(), in_float64():
        expected = theirs(ids).logits
    ours = ours_of(theirs, fields)
    assert_same(logits_of(ours, ids), expected)
    cache = ours.new_cache()
    parts = [logits_of(ours, part, past_key_values=cache) for part in split(ids, [3, 1, 9])]
    assert_same(torch.cat(parts, dim=1), expected)


@pytest.mark.parametrize("scaling", [LLAMA3, YARN], ids=lambda x: str(x["rope_type"]))
def test_attention_with_norms_over_all_heads_is_olmos(scaling: dict[str, Any]) -> None:
    config = Olmo2Config(**SIZES, **rope(500.0, scaling))
    theirs = build(Olmo2Attention, config, 0)
    x = torch.randn(2, 20, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad(), in_float64():
        table = Olmo2RotaryEmbedding(config)(x, torch.arange(20)[None])
        expected = theirs(x, table, None)[0]
    own = {name: value for name, value in SIZES.items() if name != "max_position_embeddings"}
    fields = {"qk_norm": "all", "window_position": "rope", "sliding_window": None, "rope_theta": 500.0}
    made = window_config(**own | fields, rope_scaling=scaling)
    ours = WindowAttention(made).double()
    ours.load_state_dict(attention_weights(theirs, 8))
    with torch.no_grad():
        assert_same(ours(x, Place.of(made, lay_out(x.shape[1], None), x)), expected)


def test_a_chunk_s_layer_is_the_window_s_at_short_distances() -> None:
    """With the same weights, where every row of a chunk would see all: rotary positions are scaled in both."""
    config = drt_config(
        window_position="rope", rope_scaling=YARN, qk_norm="head", attention_bias=True, head_dim=6
    )
    window, chunk = WindowAttention(config).double(), ChunkAttention(config).double()
    chunk.load_state_dict(window.state_dict())
    x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rotary = rotary_table(5, config.head_dim, config.rope, x)
    causal = torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)
    with torch.no_grad():
        assert_same(chunk(x, rotary, causal), window(x, Place.of(config, lay_out(x.shape[1], None), x)))


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize(("head_dim", "theta"), [(8, 500.0), (64, 10000.0), (128, 1e6)])
def test_frequencies_are_those_of_transformers(scaling: dict[str, Any], head_dim: int, theta: float) -> None:
    for trained in (64, 8192):
        scaled = dict(scaling)
        if "original_max_position_embeddings" in scaled:
            scaled["original_max_position_embeddings"] = trained
        expected, factor = scaled_rope(head_dim, theta, scaled)
        assert_same(inverse_frequencies(head_dim, rope_of(theta, scaled)), expected)
        assert attention_factor(scaled) == factor


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"rope_type": "dynamic", "factor": 2.0}, "a rope_type out of 'linear', 'llama3', 'yarn'.*got 'dynamic'"),
    ({"type": "linear", "factor": 2.0}, "a rope_type out of .*, got None"),
    ({"rope_type": "linear"}, "factor with rope_type 'linear', got none"),
    (LINEAR | {"rope_theta": 2.0}, "factor with rope_type 'linear', got 'rope_theta'.*the field rope_theta"),
    (LINEAR | {"factor": 0.5}, "1 or more for factor, got 0.5"),
    (LINEAR | {"factor": "2"}, "1 or more for factor, got '2'"),
    (LINEAR | {"factor": float("nan")}, "1 or more for factor, got nan"),
    ({name: x for name, x in LLAMA3.items() if name != "low_freq_factor"}, "low_freq_factor with .*, got none"),
    (LLAMA3 | {"low_freq_factor": 4.0}, "high_freq_factor above low_freq_factor, got 4.0 and 4.0"),
    (YARN | {"beta_fast": 0}, "a positive number for beta_fast, got 0"),
    (YARN | {"beta_fast": 1, "beta_slow": 2}, "beta_fast of at least beta_slow, got 1 and 2"),
    (YARN | {"truncate": 1}, "true or false for truncate, got 1"),
    (YARN | {"attention_factor": True}, "a positive number for attention_factor, got True"),
    (YARN | {"mscale": -1.0}, "0 or more for mscale, got -1.0"),
    ({"rope_type": "in_range", "turns": 2}, "original_max_position_embeddings with rope_type 'in_range', got none"),
    ({"rope_type": "in_range", "turns": 0, "original_max_position_embeddings": 64}, "a positive number for turns"),
]  # fmt: skip


@pytest.mark.parametrize(("scaling", "message"), WRONG, ids=str)
def test_a_scaling_that_is_none_is_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^rope_scaling: expected " + message):
        window_config(window_position="rope", rope_scaling=scaling)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (window_config, {"rope_scaling": LINEAR}, "rope_scaling: expected None with window_position 'alibi'"),
        (window_config, {"rope_parameters": {}}, "rope_parameters: expected rope_theta and rope_scaling instead"),
        (window_config, {"per_layer_config": {0: {"sliding_window": 9}}}, "per_layer_config: expected None"),
        (window_config, {"per_layer_config": {}}, "per_layer_config: expected None"),
        (window_config, {"head_dim": 0}, "head_dim: expected None or at least 1, got 0"),
        (window_config, {"head_dim": 5, "window_position": "rope"}, "head_dim: expected an even size"),
        (window_config, {"layer_types": MIXED[:2]}, "layer_types: expected None or one of .* 3 layers"),
        (window_config, {"layer_types": ["linear_attention"] * 3}, "layer_types: expected None or one of "),
        (window_config, {"layer_types": MIXED, "sliding_window": None}, "sliding_window: expected a number"),
        (window_config, {"qk_norm": "heads"}, "qk_norm: expected 'head' or 'all' or None, got 'heads'"),
        (drt_config, {"layer_types": MIXED}, "layer_types: expected 'sliding_attention' for every layer"),
        (rpt_config, {"head_dim": 6}, "head_dim: expected None .* with a RPTConfig"),
        (rpt_config, {"qk_norm": "head"}, "qk_norm: expected None with a RPTConfig"),
        (block_recurrent_config, {"attention_bias": True}, "attention_bias: expected False with a BlockRecurrent"),
        (
            block_recurrent_config,
            {"rope_scaling": LINEAR, "window_position": "rope"},
            "rope_scaling: expected None with a BlockRecurrent",
        ),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit_are_refused(make: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        make(**changes)


def test_new_fields_that_say_nothing_are_not_written() -> None:
    """So hashes of configurations are what they were, and a width that is changed takes its heads along."""
    plain = window_config().to_dict()
    assert not {"head_dim", "attention_bias", "qk_norm", "rope_scaling", "layer_types"} & plain.keys()
    assert type(window_config()).from_dict(plain | {"hidden_size": 32}).head_dim == 8
    assert window_config(head_dim=4).to_dict() == plain
    assert window_config(head_dim=6).to_dict()["head_dim"] == 6


FIELDS = {"window_position": "rope", "head_dim": 6, "attention_bias": True, "rope_scaling": YARN}
MADE: dict[str, Any] = {
    "window": lambda: window_model(**FIELDS, qk_norm="all", layer_types=MIXED),
    "drt": lambda: drt(2, **FIELDS, qk_norm="head"),
    "landmark": lambda: landmark(**FIELDS, qk_norm="head"),
}


@pytest.mark.parametrize("name", MADE)
def test_a_model_and_its_memory_survive_their_files(name: str, tmp_path: Path) -> None:
    model, ids = MADE[name](), tokens(43)
    model.save_pretrained(tmp_path / "model")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert config.arithmetic_fields() == model.config.arithmetic_fields()
    assert config.to_diff_dict() == model.config.to_diff_dict()
    loaded = type(model).from_pretrained(tmp_path / "model", dtype=torch.float64)
    cache = model.read(ids[:, :33])
    cache.save(tmp_path / "memory")
    mine = logits_of(model, ids[:, 33:], past_key_values=cache)
    again = model.load_cache(tmp_path / "memory", memory_tier="device")
    assert torch.equal(logits_of(model, ids[:, 33:], past_key_values=again), mine)
    again = loaded.load_cache(tmp_path / "memory", memory_tier="device")
    # matrices of a mapped file lie at other addresses, and products of them may round otherwise
    assert_same(logits_of(loaded, ids[:, 33:], past_key_values=again), mine)
    for field, value in (("rope_scaling", LINEAR), ("qk_norm", None), ("attention_bias", False)):
        other = MADE[name]()
        setattr(other.config, field, value)
        with pytest.raises(ValueError, match="written with another " + re.escape(field)):
            other.load_cache(tmp_path / "memory")


def test_mixed_windows_keep_what_their_layers_see() -> None:
    model: TrailmarkForCausalLM = MADE["window"]()
    cache = model.new_cache()
    for part in split(tokens(90), [7, 1]):
        logits_of(model, part, past_key_values=cache)
    kept = [layer.keys.shape[2] for layer in cache.layers]
    assert (kept[0], kept[2]) == (7, 7)
    assert kept[1] >= 90
    expected = model.cache_bytes(90, 0)
    assert expected is not None
    assert expected.window == (7 + 7 + 90) * 2 * 2 * 6 * 8
    assert model.reach() is None
    pairs = {"window": 2 * 24 * 2 * (7 * 8 // 2 + 83 * 7), "all": 2 * 24 * 90 * 91 // 2}
    assert model.attention_multiply_adds(90) == pairs
    assert model.config.with_fewer_layers(1) is model.config


@pytest.mark.parametrize(
    ("make", "layers", "kind"),
    [
        (window_model, 6, "sliding_attention"),
        (window_model, 6, "full_attention"),
        (drt, 8, "sliding_attention"),
    ],
)
def test_layers_of_one_kind_may_be_fewer(make: Callable[..., Any], layers: int, kind: str) -> None:
    config = make(num_hidden_layers=layers, layer_types=[kind] * layers).config
    fewer = config.with_fewer_layers(1)
    assert fewer.num_hidden_layers < layers
    assert fewer.layer_types == [kind] * fewer.num_hidden_layers


def test_a_saved_window_of_another_layer_s_size_is_refused(tmp_path: Path) -> None:
    model = MADE["window"]()
    cache = model.new_cache()
    logits_of(model, tokens(9), past_key_values=cache)
    state = cache.state
    assert state is not None
    layers = list(state.layers)
    layers[0] = layers[1]  # 64 slots, where 7 are right
    object.__setattr__(state, "layers", tuple(layers))
    cache.save(tmp_path)
    with pytest.raises(ValueError, match=r"layers\.0\.keys"):
        model.load_cache(tmp_path, memory_tier="device")


def test_muon_takes_the_matrices_of_projections_with_biases_one_by_one() -> None:
    """As those without: the same update of the matrix from the same gradient, and the bias is AdamW's."""
    found = []
    for bias in (False, True):
        attention = WindowAttention(window_config(head_dim=6, attention_bias=bias)).double()
        weight = attention.qkv_proj.weight
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
        optimizer = MuonAdamW(attention)
        weight.grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        if bias:
            attention.qkv_proj.bias.grad = torch.ones_like(attention.qkv_proj.bias)
            before = attention.qkv_proj.bias.detach().clone()
        optimizer.step()
        found.append(weight.detach())
        if bias:
            assert (attention.qkv_proj.bias != before).all()
    assert torch.equal(*found)


def test_biases_begin_at_zero_and_norms_at_one() -> None:
    model = SlidingWindowForCausalLM(window_config(attention_bias=True, qk_norm="all", head_dim=6))
    attention = model.layers[0].attention
    assert not attention.qkv_proj.bias.any()
    assert (attention.q_norm.weight == 1).all()
    assert (attention.q_norm.weight.shape, attention.k_norm.weight.shape) == ((24,), (12,))
    assert {type(m) for m in model.modules() if hasattr(m, "into_residual")} == {torch.nn.Linear}
    assert isinstance(model.layers[0].mlp, MLP)
    assert isinstance(attention.q_norm, RMSNorm)
