"""The Retrieval-Pretrained Transformer."""
