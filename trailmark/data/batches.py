"""Batches of training samples, each a pure function of the seed and the sample's number."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trailmark.data.corpus import Tokens


class TextSlices:
    """Random slices of one token stream: sample n is the same whatever the batch size or the number of ranks."""

    def __init__(self, tokens: Tokens, length: int, seed: int = 0) -> None:
        if len(tokens) < length:
            raise ValueError(
                f"data: expected at least sequence_length = {length} tokens, got {len(tokens)}. "
                "Add text or train on shorter sequences."
            )
        self.tokens, self.length, self.seed = tokens, length, seed

    def batch(self, first: int, count: int) -> Tensor:
        """Samples first .. first + count - 1, [count, length] int64."""
        starts = [
            int(np.random.default_rng([self.seed, n]).integers(len(self.tokens) - self.length + 1))
            for n in range(first, first + count)
        ]
        return torch.from_numpy(np.stack([self.tokens[s : s + self.length] for s in starts])).long()
