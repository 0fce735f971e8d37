"""The model with a window alone: Llama-like layers with sliding-window attention and ALiBi."""

from __future__ import annotations

from torch import Tensor, nn

from trailmark.models.causal_lm import mark_residual_projections
from trailmark.models.configuration import SlidingWindowConfig
from trailmark.models.grid import Grid
from trailmark.models.layered import LayeredForCausalLM
from trailmark.models.layers import Place, RMSNorm, WindowLayer
from trailmark.models.step import Step


class SlidingWindowForCausalLM(LayeredForCausalLM):
    """``sliding_window`` positions seen per layer; None is full attention (and a cache that grows)."""

    config_class = SlidingWindowConfig
    config: SlidingWindowConfig
    _upper_stage = 0  # no layer runs before a result needs it

    def __init__(self, config: SlidingWindowConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(WindowLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        mark_residual_projections(self)
        self.post_init()

    def _run_lower(self, x: Tensor, grid: Grid, place: Place, step: Step | None) -> Tensor:
        return x

    def _upper(self) -> nn.ModuleList:
        return self.layers

    def reach(self) -> int | None:
        """Positions before a token that can change its prediction; None: all."""
        window = self.config.sliding_window
        return None if window is None else self.config.num_hidden_layers * (window - 1)
