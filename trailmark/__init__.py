"""Language models that read millions of tokens through a constant attention window."""

from __future__ import annotations

import importlib
from typing import Any

from trailmark.auto_classes import register_when_asked

__version__ = "0.1.0"

# name -> module, imported on first use: ``import trailmark.ops`` needs torch alone
_PUBLIC = {
    "BlockRecurrentConfig": "trailmark.models",
    "BlockRecurrentForCausalLM": "trailmark.models",
    "DRTConfig": "trailmark.models",
    "DRTForCausalLM": "trailmark.models",
    "HSAConfig": "trailmark.models",
    "HSAForCausalLM": "trailmark.models",
    "HiLSConfig": "trailmark.models",
    "HiLSForCausalLM": "trailmark.models",
    "LandmarkConfig": "trailmark.models",
    "LandmarkForCausalLM": "trailmark.models",
    "RPTConfig": "trailmark.models",
    "RPTForCausalLM": "trailmark.models",
    "SlidingWindowConfig": "trailmark.models",
    "SlidingWindowForCausalLM": "trailmark.models",
    "ChunkCache": "trailmark.memory",
    "ChunkSelection": "trailmark.ops",
    "grouped_cross_attention": "trailmark.ops",
    "landmark_attention": "trailmark.ops",
    "select_by_landmarks": "trailmark.ops",
    "select_chunks": "trailmark.ops",
    "sliding_window_attention": "trailmark.ops",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


register_when_asked()
