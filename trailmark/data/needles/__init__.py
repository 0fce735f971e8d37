"""Needles: facts hidden in haystacks, and the questions about them."""
