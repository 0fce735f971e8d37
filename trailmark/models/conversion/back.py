"""A model with a window alone as one of the families that transformers knows: the way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from trailmark.models.conversion import parts as p
from trailmark.models.conversion.base import ARGUMENT, FAMILIES, SAME, layer_kinds
from trailmark.models.conversion.parts import Part, Parts, Read
from trailmark.models.rope import ROPE_TYPES
from trailmark.models.window.config import SlidingWindowConfig
from trailmark.settings import coerce, nearest
from trailmark.untrusted import brief

BACK = tuple(FAMILIES)
"""The families that a model of ours can become."""
_LENGTH = "max_position_embeddings"


def theirs(config: Any, to: str, given: Mapping[str, Any], trained_length: int | None) -> Any:
    """The configuration of transformers under which a family computes what a model of ours computes.

    Args:
        given: fields that a user sets: max_position_embeddings alone.
        trained_length: what the model's conversion kept of it.

    Raises:
        ValueError: the model has something that the family has not.
    """
    if not isinstance(config, SlidingWindowConfig):
        raise ValueError(
            f"{ARGUMENT}: expected a model with a window alone (sliding_window) to go back to {to}, got "
            f"{config.model_type!r}: a {to} has nothing that reads chunks."
        )
    _expect_plain(config, to)
    for name in given:
        if name != _LENGTH:
            raise ValueError(f"fields: {name}: unknown field of the way back.{nearest(name, [_LENGTH])}")
    length = given.get(_LENGTH, trained_length)
    if length is None:
        raise ValueError(
            f"fields: expected {_LENGTH}=NUMBER, the tokens of the longest text that the model was trained on: no "
            "conversion.json lies beside it that says so."
        )
    fields: dict[str, Any] = {}
    if to == "mistral":
        fields["sliding_window"] = config.windows[0]  # that of all its layers, whatever they are called
    if to in ("qwen2", "qwen3") and config.sliding_window is not None:
        kinds = layer_kinds(config.windows)
        fields |= {"use_sliding_window": True, "sliding_window": config.sliding_window, "layer_types": kinds}
    return family_config(config, to, coerce(f"fields: {_LENGTH}", length, int), **fields)


def family_config(config: Any, to: str, length: int, **windows: Any) -> Any:
    """The configuration of transformers of a family whose layers are those of a model of ours.

    Args:
        length: tokens of the longest training text. windows: fields that say how far its layers see.
    """
    from transformers import AutoConfig

    fields = {name: getattr(config, name) for name in SAME} | {_LENGTH: length, **windows}
    scaling = config.rope_scaling or {"rope_type": "default"}
    fields["rope_parameters"] = {**scaling, "rope_theta": config.rope_theta}
    if to != "qwen2":
        fields["head_dim"] = config.head_dim
    return AutoConfig.for_model(to, **fields)


def _expect_plain(config: Any, to: str) -> None:
    """The first thing that the family lacks is refused by its name."""
    for name, came in lacking(config, to).items():
        others = [other for other in BACK if not lacking(config, other)]
        if others:
            way_out = f"Go back to {' or '.join(others)}."
        else:
            way_out = (
                f"Nor can {', '.join(other for other in BACK if other != to)}: after import trailmark, transformers "
                "loads the model as it is."
            )
        raise ValueError(
            f"to: a {to} cannot compute what this model does with {name} = {brief(came)}. {way_out}"
        )


def lacking(config: Any, to: str) -> dict[str, object]:
    """Fields of a model, with their values, that the family has nothing for."""
    family = FAMILIES[to]
    windows = set(config.windows)
    own_size = config.head_dim != config.hidden_size // config.num_attention_heads
    refused = {
        "num_sinks": config.num_sinks > 0,
        "window_position": config.window_position != "rope",
        "logit_scale": config.logit_scale != 1,
        "mlp": config.mlp != "swiglu",
        "norm": config.norm != "rms",
        "attention_bias": config.attention_bias != family.attention_bias,
        "qk_norm": config.qk_norm != family.qk_norm,
        "sliding_window": to == "llama" and windows != {None},
        "layer_types": to == "mistral" and len(windows) > 1,
        "head_dim": to == "qwen2" and own_size,
        "rope_scaling": (config.rope_scaling or {}).get("rope_type", "linear") not in ROPE_TYPES,
    }
    return {name: getattr(config, name) for name, is_refused in refused.items() if is_refused}


def parts_of(config: Any) -> Parts:
    """Of which tensors of ours each of theirs is made."""
    sizes = tuple(
        n * config.head_dim for n in (config.num_attention_heads, *[config.num_key_value_heads] * 2)
    )
    parts = {
        "model.embed_tokens.weight": p.own("embed_tokens.weight"),
        "model.norm.weight": p.own("norm.weight"),
    }
    if not config.tie_word_embeddings:
        parts["lm_head.weight"] = p.own("lm_head.weight")
    for number in range(config.num_hidden_layers):
        ours, prefix = f"layers.{number}", f"model.layers.{number}"
        parts[f"{prefix}.input_layernorm.weight"] = p.own(f"{ours}.attention_norm.weight")
        parts[f"{prefix}.post_attention_layernorm.weight"] = p.own(f"{ours}.mlp_norm.weight")
        for kind in ("weight", "bias") if config.attention_bias else ("weight",):
            for place, name in enumerate("qkv"):
                turn = p.from_neighbours if name != "v" else None
                parts[f"{prefix}.self_attn.{name}_proj.{kind}"] = _rows(
                    f"{ours}.attention.qkv_proj.{kind}", sizes, place, config.head_dim, turn
                )
        if config.qk_norm is not None:
            for name in "qk":
                parts[f"{prefix}.self_attn.{name}_norm.weight"] = _rows(
                    f"{ours}.attention.{name}_norm.weight", None, 0, config.head_dim, p.from_neighbours
                )
        parts[f"{prefix}.self_attn.o_proj.weight"] = p.own(f"{ours}.attention.o_proj.weight")
        halves = (config.intermediate_size,) * 2
        for place, name in enumerate(("gate", "up")):
            parts[f"{prefix}.mlp.{name}_proj.weight"] = _rows(
                f"{ours}.mlp.gate_up_proj.weight", halves, place, config.head_dim, None
            )
        parts[f"{prefix}.mlp.down_proj.weight"] = p.own(f"{ours}.mlp.down_proj.weight")
    return parts


def _rows(
    name: str,
    sizes: tuple[int, ...] | None,
    place: int,
    head_dim: int,
    turn: Callable[[torch.Tensor, int], torch.Tensor] | None,
) -> Part:
    """The rows of one of the matrices that stand below each other in one of ours."""

    def make(read: Read) -> torch.Tensor:
        x = read(name)
        x = x if sizes is None else x.split(sizes)[place]
        return x if turn is None else turn(x, head_dim)

    return Part((name,), make, permuted=turn is not None)
