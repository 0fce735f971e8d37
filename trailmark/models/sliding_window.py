"""The model with a window alone: Llama-like layers with sliding-window attention and ALiBi."""

from __future__ import annotations

from torch import Tensor, nn

from trailmark.memory import ChunkCache
from trailmark.models.causal_lm import Hidden, TrailmarkForCausalLM, mark_residual_projections
from trailmark.models.configuration import SlidingWindowConfig
from trailmark.models.layers import RMSNorm, WindowLayer


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

    def new_cache(self, memory_tier: str = "device", num_tokens: int = 0) -> ChunkCache:
        if memory_tier != "device":
            raise ValueError(f"memory_tier: expected 'device', got {memory_tier!r}: a window has no memory.")
        return ChunkCache(self.config.num_hidden_layers)

    def run(
        self,
        input_ids: Tensor,  # [B, T]
        cache: ChunkCache | None,
        close_chunk: bool,  # no chunks here
        noise_seed: Tensor | None,
        reading: bool,
        output_retrieval: bool,
    ) -> Hidden:
        x = self.embed_tokens(input_ids)
        for number, layer in enumerate(self.layers):
            x, kept = layer(x, cache.window[number] if cache is not None else None)
            if cache is not None:
                cache.window[number] = keep_window(kept, self.config.sliding_window)
        if cache is not None:
            cache.num_tokens += input_ids.shape[1]
        return Hidden(None if reading else self.norm(x))

    def reading_tail(self, chunk_size: int) -> int:
        config = self.config
        if config.sliding_window is None:
            raise ValueError(
                "sliding_window: expected a number of positions, full attention reaches everything."
            )
        return -(-config.num_hidden_layers * (config.sliding_window - 1) // chunk_size)


def keep_window(kept: tuple[Tensor, Tensor], window: int | None) -> tuple[Tensor, Tensor]:
    """The last ``window - 1`` keys and values, copied so that the rest is freed; None keeps all."""
    if window is None:
        return kept[0].detach(), kept[1].detach()
    start = max(0, kept[0].shape[1] - (window - 1))
    k, v = (x[:, start:].detach().clone() for x in kept)
    return k, v
