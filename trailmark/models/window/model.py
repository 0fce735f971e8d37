"""The model with a window alone: Llama-like layers with sliding-window attention and ALiBi."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trailmark.models.answers import CardFacts
from trailmark.models.context_parallel import Stretch
from trailmark.models.costs import CacheBytes, kv_width
from trailmark.models.grid import Grid
from trailmark.models.layered import LayeredForCausalLM
from trailmark.models.layers import Place, WindowLayer, make_norm
from trailmark.models.step import Step
from trailmark.models.window.config import SlidingWindowConfig


class SlidingWindowForCausalLM(LayeredForCausalLM):
    """``sliding_window`` positions seen per layer; None is full attention (and a cache that grows).

    With ``layer_types`` some layers have the window and the others full attention; these are two stages of a cache.
    """

    config_class = SlidingWindowConfig
    config: SlidingWindowConfig
    shares_texts = True
    upper = ()
    _upper_stage = 0  # no layer runs before a result needs it

    def __init__(self, config: SlidingWindowConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(WindowLayer(config, n) for n in range(config.num_hidden_layers))
        self._finish(make_norm(config))

    def _run_lower(self, x: Tensor, grid: Grid, place: Place, step: Step | Stretch | None) -> Tensor:
        return x

    def _upper(self) -> nn.ModuleList:
        return self.layers

    def _stages(self) -> list[int]:
        return self.config.window_stages

    # --- answers -------------------------------------------------------------------------------------------

    def cache_bytes(self, prompt: int, generated: int, memory_dtype: torch.dtype | None = None) -> CacheBytes:
        return CacheBytes(window=self._window_bytes(prompt + generated, self.config.num_sinks))

    def paper_bytes(self, length: int) -> int:
        return self._window_bytes(length)

    def _window_bytes(self, length: int, sinks: int = 0) -> int:
        seen = sum(length if window is None else sinks + window for window in self.config.windows)
        return seen * kv_width(self.config) * self.dtype.itemsize

    @classmethod
    def card_facts(cls, config: Mapping[str, Any]) -> CardFacts:
        kinds = set(config.get("layer_types") or ())
        if config.get("sliding_window") is None or kinds == {"full_attention"}:
            return CardFacts("Transformer with full attention", "It sees the whole text.")
        if len(kinds) > 1:
            return CardFacts(
                "Transformer with windows and full attention",
                "Some of its layers see a window, the others the whole text.",
            )
        return CardFacts("Transformer with a sliding window", "It sees its window and nothing else.")
