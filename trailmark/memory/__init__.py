"""What a model carries from one piece of text to the next."""

from trailmark.memory.cache import CacheMark, ChunkCache, ChunkMemory, MemoryEntries, MemoryMark

__all__ = ["CacheMark", "ChunkCache", "ChunkMemory", "MemoryEntries", "MemoryMark"]
