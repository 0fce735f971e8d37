"""Grouped Cross-Attention: the op, its path in PyTorch, its kernels."""
