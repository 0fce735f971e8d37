"""The model with a window alone: Llama-like layers with sliding-window attention and ALiBi."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trailmark.memory import ChunkCache
from trailmark.models.answers import CardFacts
from trailmark.models.causal_lm import Hidden, TrailmarkForCausalLM, mark_residual_projections
from trailmark.models.configuration import SlidingWindowConfig
from trailmark.models.costs import CacheBytes, kv_width
from trailmark.models.embedding import Given
from trailmark.models.grid import Grid
from trailmark.models.layers import RMSNorm, WindowLayer
from trailmark.models.step import Step, place_of


class SlidingWindowForCausalLM(TrailmarkForCausalLM):
    """``sliding_window`` positions seen per layer; None is full attention (and a cache that grows)."""

    config_class = SlidingWindowConfig
    config: SlidingWindowConfig

    def __init__(self, config: SlidingWindowConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(WindowLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        mark_residual_projections(self)
        self.post_init()

    def _stages(self) -> list[int]:
        return [0] * len(self.layers)

    def run(
        self,
        tokens: Tensor,  # [B, T]
        grid: Grid,
        cache: ChunkCache | None = None,
        keep: int | None = None,
        noise_seed: Tensor | None = None,
        given: Given | None = None,
    ) -> Hidden:
        x = grid.insert_landmarks(self.embed_tokens(tokens), None)
        step = None if cache is None else Step(cache, grid, self.config, x.shape[0])
        if step is not None:
            reach = self.reach()
            if keep == 0 and reach is not None:  # reading: later text sees the last positions only
                step.defer(x, reach)
                step.commit()
                return Hidden(None)
            x, grid, _ = step.tail(x, reach, keep)
        place = place_of(self.config, grid, x, step)
        for number, layer in enumerate(self.layers):
            x = layer(x, place, step and step.window(number))
        if step is not None:
            step.commit()
        return Hidden(self.norm(grid.last_tokens(keep)(x)))

    # --- answers -------------------------------------------------------------------------------------------

    def cache_bytes(self, prompt: int, generated: int, memory_dtype: torch.dtype | None = None) -> CacheBytes:
        return CacheBytes(window=self._window_bytes(prompt + generated))

    def paper_bytes(self, length: int) -> int:
        return self._window_bytes(length)

    def _window_bytes(self, length: int) -> int:
        seen = self.config.sliding_window or length
        return self.config.num_hidden_layers * seen * kv_width(self.config) * self.dtype.itemsize

    @classmethod
    def card_facts(cls, config: Mapping[str, Any]) -> CardFacts:
        if config.get("sliding_window") is None:
            return CardFacts("Transformer with full attention", "It sees the whole text.")
        return CardFacts("Transformer with a sliding window", "It sees its window and nothing else.")
