"""What models carry of a text: windows, and a memory of chunks on device, host or disk."""

from trailmark.memory.cache import ChunkCache
from trailmark.memory.cell import Cell
from trailmark.memory.chunks import ChunkMemory, MemoryEntries, MemorySize
from trailmark.memory.search import ExactSearch, FaissSearch
from trailmark.memory.state import CacheState, Deferred, Retrieved
from trailmark.memory.window import Span, Window, WindowCall

__all__ = [
    "CacheState",
    "Cell",
    "ChunkCache",
    "ChunkMemory",
    "Deferred",
    "ExactSearch",
    "FaissSearch",
    "MemoryEntries",
    "MemorySize",
    "Retrieved",
    "Span",
    "Window",
    "WindowCall",
]
