"""The Block-Recurrent Transformer."""
