"""Landmark Attention: the op, its layout, its selection, attention over a memory, its kernels."""
