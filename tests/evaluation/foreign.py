"""Models of transformers, so sharp that what they answer depends on what they read."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

Model = TypeVar("Model", bound=nn.Module)


def sharpened(model: Model, factor: float = 8) -> Model:
    """Its matrices times ``factor``: those of a fresh one predict hardly anything."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(factor)
    return model


def llama(positions: int, factor: float = 8, vocab_size: int = 259, **changes: Any) -> LlamaForCausalLM:
    """Of bytes, in float64."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=vocab_size, max_position_embeddings=positions, **sizes, **changes)
    )
    return sharpened(model.double().eval(), factor)
