"""The Differentiable Retrieval Transformer."""
