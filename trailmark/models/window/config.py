"""The configuration of the model with a window alone."""

# No ``from __future__ import annotations`` here: ``strict`` does not check types that are written as strings.

from typing import Self

from trailmark.models.configuration import TrailmarkConfig, checked, with_fields


@checked
class SlidingWindowConfig(TrailmarkConfig):
    """The model with a window alone: Llama-like layers, sliding window, ALiBi."""

    model_type = "trailmark_sliding_window"

    def with_fewer_layers(self, count: int) -> Self:
        return with_fields(self, num_hidden_layers=min(self.num_hidden_layers, count))
