"""Models of transformers in float64, with their weights in the layout that ours have.

They cast to float32 in norms and rotary tables: there, float32 means float64 here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def rope(theta: float, scaling: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": theta, **(scaling or {"rope_type": "default"})}}


@contextmanager
def in_float64() -> Iterator[None]:
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
    ):
        yield


def build(kind: type[nn.Module], config: PreTrainedConfig, *arguments: Any) -> Any:
    """A model or a layer with weights of a trained scale."""
    config._attn_implementation = "sdpa"
    with in_float64():
        model = kind(config, *arguments).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            if "norm" in name:
                drawn = 1 + 0.2 * drawn
            elif weight.dim() == 2 and "embed" not in name:
                drawn = drawn * 1.5 * weight.shape[1] ** -0.5
            weight.copy_(drawn)
    return model


def scaled_rope(head_dim: int, theta: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Frequencies [D / 2] and the factor of queries and keys, as transformers computes them."""
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, rope_parameters={**scaling, "rope_theta": theta}
    )
    with in_float64():
        frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    assert frequencies.dtype == torch.float64
    return frequencies, factor


def paired(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of queries or keys [heads * D, ...]: transformers turns i with i + D / 2, we turn neighbours."""
    heads = rows.unflatten(0, (-1, 2, head_dim // 2))
    return heads.transpose(1, 2).reshape(rows.shape)


def attention_weights(theirs: Any, head_dim: int) -> dict[str, Tensor]:
    """The state dict of our ``SelfAttention``."""
    q, k, v = theirs.q_proj, theirs.k_proj, theirs.v_proj
    parts = [paired(q.weight, head_dim), paired(k.weight, head_dim), v.weight]
    found = {"qkv_proj.weight": torch.cat(parts), "o_proj.weight": theirs.o_proj.weight}
    if q.bias is not None:
        found["qkv_proj.bias"] = torch.cat([paired(q.bias, head_dim), paired(k.bias, head_dim), v.bias])
    for name in ("q_norm", "k_norm"):
        if hasattr(theirs, name):
            found[f"{name}.weight"] = paired(getattr(theirs, name).weight, head_dim)
    return found


def weights_of(theirs: Any, head_dim: int) -> dict[str, Tensor]:
    """The state dict of our window model."""
    model = theirs.model
    found = {
        "embed_tokens.weight": model.embed_tokens.weight,
        "norm.weight": model.norm.weight,
        "lm_head.weight": theirs.lm_head.weight,
    }
    for n, layer in enumerate(model.layers):
        mlp = layer.mlp
        parts = {
            "attention_norm.weight": layer.input_layernorm.weight,
            "mlp_norm.weight": layer.post_attention_layernorm.weight,
            "mlp.gate_up_proj.weight": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            "mlp.down_proj.weight": mlp.down_proj.weight,
        }
        parts |= {f"attention.{key}": x for key, x in attention_weights(layer.self_attn, head_dim).items()}
        found |= {f"layers.{n}.{key}": x for key, x in parts.items()}
    return {name: weight.detach() for name, weight in found.items()}
