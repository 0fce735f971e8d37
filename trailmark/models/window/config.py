"""The configuration of the model with a window alone."""

# No ``from __future__ import annotations`` here: ``strict`` does not check types that are written as strings.

from typing import Literal, Self

from trailmark.models.configuration import TrailmarkConfig, checked, with_fields


@checked
class SlidingWindowConfig(TrailmarkConfig):
    """The model with a window alone: Llama-like layers, sliding window, ALiBi.

    With ``layer_types`` some layers have the window and others see everything, as in Gemma or Qwen2.

    Args:
        mlp: "swiglu" or "gelu". norm: "rms", or "layer" (no biases). "gelu" and "layer" make the plain baseline of
            Landmark Attention (arXiv 2305.16300, Sec. 4.1).
    """

    model_type = "trailmark_sliding_window"
    newer = TrailmarkConfig.newer | {"mlp", "norm"}

    mlp: Literal["swiglu", "gelu"] = "swiglu"
    norm: Literal["rms", "layer"] = "rms"

    @property
    def mixes_windows(self) -> bool:
        return True

    def with_fewer_layers(self, count: int) -> Self:
        if len(set(self.windows)) > 1:
            return self  # layers of both kinds stand between each other
        layers, kinds = min(self.num_hidden_layers, count), self.layer_types
        return with_fields(
            self, num_hidden_layers=layers, layer_types=None if kinds is None else kinds[:layers]
        )
