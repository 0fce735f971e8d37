"""Looking at what a model attends with, call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from trailmark.models.layers import WindowAttention


class Seen(NamedTuple):
    """What one layer attends with in a call on whole texts."""

    layer: int
    q: Tensor  # [B, T, H, D], rotated
    k: Tensor  # [B, T, J, D]
    window: int | None


@contextmanager
def watching_attention(model: nn.Module, see: Callable[[Seen], None]) -> Iterator[None]:
    """Show ``see`` what each layer of a model attends with in the calls of the block.

    Layers are counted in the order in which they stand in the model.
    """

    def show(layer: int, window: int | None, q: Tensor, k: Tensor) -> None:
        see(Seen(layer, q, k, window))

    watched = attention_layers(model)
    for number, layer in enumerate(watched):
        layer.watch = partial(show, number, layer.window)
    try:
        yield
    finally:
        for layer in watched:
            layer.watch = None


def attention_layers(model: nn.Module) -> list[WindowAttention]:
    """Those that can be watched."""
    return [module for module in model.modules() if isinstance(module, WindowAttention)]
