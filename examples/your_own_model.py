"""An architecture in one file: a DRT that adds what it read through a gate, with every command and cache of the others.

python examples/your_own_model.py
"""

# Configurations check types, so this file does without ``from __future__ import annotations``.

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trailmark.models import DRTConfig, DRTForCausalLM, register
from trailmark.models.answers import CardFacts
from trailmark.models.configuration import checked
from trailmark.models.drt.model import DRTLayer


# 1. A field of one's own: it is checked, saved, and set from YAML as the others are.
@checked
class GatedConfig(DRTConfig):
    """``first_gate``: what each channel of the gate is at first."""

    model_type = "gated"

    first_gate: float | int = 0.5


# 2. What differs in a layer.
class GatedLayer(DRTLayer):
    """h = x + window(norm x); y = h + MLP(norm h) + gate * GCA(norm h): what is read goes beside the MLP."""

    def __init__(self, config: GatedConfig) -> None:
        super().__init__(config)
        self.gate = nn.Parameter(torch.full((config.hidden_size,), float(config.first_gate)))

    def forward(self, x: Tensor, place: Any, kept: Any = None, *reading: Any) -> Tensor:
        x = x + self.attention(self.attention_norm(x), place, kept)
        beside = self.gate * self.read(x, *reading) if reading else 0
        return x + self.mlp(self.mlp_norm(x)) + beside


# 3. The model: what it does not say is as with a DRT. Once registered, AutoModelForCausalLM and configurations
# (``architecture: gated``) know it, and so does every command that runs in this program.
class GatedForCausalLM(DRTForCausalLM):
    config_class = GatedConfig
    config: GatedConfig
    _no_split_modules = ["WindowLayer", "ChunkEncoderLayer", "GatedLayer"]  # whole on one device, with FSDP2

    def __init__(self, config: GatedConfig) -> None:
        super().__init__(config)
        self.upper_layers = nn.ModuleList(GatedLayer(config) for _ in range(config.num_upper_layers))
        self.post_init()

    @classmethod
    def card_facts(cls, config: Mapping[str, Any]) -> CardFacts:
        """What the model's card says of it."""
        return CardFacts("Gated Transformer", "It reads through a gate.")


register(GatedConfig, GatedForCausalLM)

if __name__ == "__main__":
    torch.manual_seed(0)
    # fmt: off
    config = GatedConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=32, chunk_size=8, num_retrieved_chunks=4,
    )
    # fmt: on
    model, text = GatedForCausalLM(config), torch.randint(256, (1, 400))

    # 4. It trains: the loss reaches the gate, and the retriever through what was read.
    model.train()
    loss = model(text, labels=text).loss
    loss.backward()
    gate = model.upper_layers[0].gate
    print(f"loss {loss:.3f}, gradient of the gate {gate.grad.norm():.4f}")

    # 5. It reads through a cache as it computes a whole text.
    model.eval()
    with torch.no_grad():
        whole = model(text).logits[:, -1]
        cache = model.read(text[:, :-1])
        carried = model(text[:, -1:], past_key_values=cache).logits[:, -1]
    print(f"{cache.num_chunks[0]} chunks in memory, largest difference {(whole - carried).abs().max():.1e}")
