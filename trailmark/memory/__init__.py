"""What models carry of a text: windows, and a memory of chunks on device, host or disk."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trailmark.memory.cache import ChunkCache as ChunkCache
    from trailmark.memory.cell import Cell as Cell
    from trailmark.memory.chunks import ChunkMemory as ChunkMemory
    from trailmark.memory.chunks import MemoryEntries as MemoryEntries
    from trailmark.memory.chunks import MemorySize as MemorySize
    from trailmark.memory.search import ExactSearch as ExactSearch
    from trailmark.memory.search import FaissSearch as FaissSearch
    from trailmark.memory.state import CacheState as CacheState
    from trailmark.memory.state import Deferred as Deferred
    from trailmark.memory.state import Focus as Focus
    from trailmark.memory.state import Retrieved as Retrieved
    from trailmark.memory.window import Span as Span
    from trailmark.memory.window import Window as Window
    from trailmark.memory.window import WindowCall as WindowCall

# name -> module, imported on first use: a memory is verified without torch
_PUBLIC = {
    "CacheState": "state",
    "Cell": "cell",
    "ChunkCache": "cache",
    "ChunkMemory": "chunks",
    "Deferred": "state",
    "ExactSearch": "search",
    "Focus": "state",
    "FaissSearch": "search",
    "MemoryEntries": "chunks",
    "MemorySize": "chunks",
    "Retrieved": "state",
    "Span": "window",
    "Window": "window",
    "WindowCall": "window",
}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_PUBLIC)
