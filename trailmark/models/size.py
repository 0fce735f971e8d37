"""How large a model is, before anything of it is allocated."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from trailmark.files import in_units
from trailmark.models.configuration import TrailmarkConfig
from trailmark.models.registry import MODELS
from trailmark.untrusted import first_line

_WAY_OUT = (
    "Choose smaller sizes (model.hidden_size, model.intermediate_size, model.num_hidden_layers, vocab_size)."
)


def without_weights(config: TrailmarkConfig) -> Any:
    """The model on the meta device: its parameters have shapes and no memory.

    Raises:
        ValueError: sizes of which no tensor can be made.
    """
    try:
        with torch.device("meta"):
            return MODELS[config.model_type](config)
    except (RuntimeError, OverflowError, MemoryError, TypeError) as error:
        raise ValueError(
            f"model: expected sizes of which tensors can be made, got others ({first_line(error)}). {_WAY_OUT}"
        ) from error


def expect_memory(config: TrailmarkConfig, bytes_of_each: int) -> None:
    """Raise a ValueError where a model would take more than all memory of this machine, used or not, and its swap.

    Args:
        bytes_of_each: of each parameter: its weight and what belongs to it from the beginning to the end.
    """
    count = sum(parameter.numel() for parameter in without_weights(config).parameters())
    needed, there = count * bytes_of_each, psutil.virtual_memory().total + psutil.swap_memory().total
    if needed > there:
        raise ValueError(
            f"model: expected one that fits into the {in_units(there)} of memory of this machine, {count:,} parameters "
            f"take {in_units(needed)} at least. {_WAY_OUT}"
        )
