"""What a model carries from one piece of text to the next."""

from trailmark.memory.cache import ChunkCache, ChunkMemory, MemoryEntries

__all__ = ["ChunkCache", "ChunkMemory", "MemoryEntries"]
