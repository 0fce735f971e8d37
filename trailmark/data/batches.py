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

    def close_chunk(self, first: int, count: int, chunk_size: int, share: float) -> Tensor:
        """Early landmarks for ``batch(first, count)``: [count, length] bool, True where one follows the token.

        A chunk is closed after 1 .. chunk_size - 1 tokens with probability ``share`` (each number as likely), else
        it is full and not marked. A sample's landmarks depend on its number, the seed, the length, the chunk size
        and the share alone.

        Raises:
            ValueError: a share out of [0, 1]; chunks of one token, which are always full.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"early_landmarks: expected a share from 0 to 1, got {share}.")
        if chunk_size < 2 and share > 0:
            raise ValueError(
                f"chunk_size: expected at least 2 tokens to close chunks early, got {chunk_size}. "
                "Set early_landmarks to 0."
            )
        close = np.zeros((count, self.length), bool)
        if share == 0:
            return torch.from_numpy(close)
        for row, n in zip(close, range(first, first + count), strict=True):
            # a stream beside that of the slice's place; no text has more chunks than tokens
            rng = np.random.default_rng(np.random.SeedSequence([self.seed, n], spawn_key=(1,)))
            early = rng.random(self.length) < share
            sizes = np.where(early, rng.integers(1, chunk_size, size=self.length), chunk_size)
            ends = np.cumsum(sizes)
            row[ends[early & (ends <= self.length)] - 1] = True
        return torch.from_numpy(close)
