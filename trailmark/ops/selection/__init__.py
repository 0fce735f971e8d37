"""Selection of chunks by score, noisy or at random."""
