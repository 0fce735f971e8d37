"""The server: an OpenAI-compatible address over saved memories, which cites what it read (docs/serving.md)."""
