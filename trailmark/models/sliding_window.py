"""The model with a window alone: Llama-like layers with sliding-window attention and ALiBi."""

from __future__ import annotations

from torch import Tensor, nn

from trailmark.memory import ChunkCache
from trailmark.models.causal_lm import Hidden, TrailmarkForCausalLM, mark_residual_projections
from trailmark.models.configuration import SlidingWindowConfig
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

    def reach(self) -> int | None:
        """Positions before a token that can change its prediction; None: all."""
        window = self.config.sliding_window
        return None if window is None else self.config.num_hidden_layers * (window - 1)
