"""Windows of a token stream as training samples, each a pure function of the corpus, the seed and its number.

The stream is taken as a circle. In each epoch it is cut into windows from a place of its own (``aligned``: from its
first token), and the windows come in an order of their own: a keyed permutation that is computed, not stored, so that
any sample costs the same and resuming costs nothing. Only integers of our own decide, early landmarks too: no generator
object, no library whose draws may change. (Needles and trials are drawn by numpy's generators: see docs/data.md.)
"""

from __future__ import annotations

from itertools import pairwise
from math import isqrt

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trailmark.data.shards import Corpus

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # the golden ratio's digits: any odd constant would do
_ROUNDS = 8
_HALF = 1 << 32
_EARLY = 1  # mixed in: the draws of early landmarks are of their own


def mix(*numbers: int) -> int:
    """A 64-bit hash of integers (taken modulo 2**64): their order matters, any change changes every bit's odds."""
    state = _GOLDEN
    for number in numbers:
        # the finaliser of splitmix64, a bijection, of the state and the next number
        state = (state + _GOLDEN + number) & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def mix_each(keys: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.uint64]:
    """``mix(..., n)`` for n = 0 .. count - 1, where each of keys [B] is ``mix(...)``: [B, count]."""
    with np.errstate(over="ignore"):  # modulo 2**64, as meant
        state = keys[:, None] + (np.uint64(_GOLDEN) + np.arange(count, dtype=np.uint64))
        state ^= state >> np.uint64(30)
        state *= np.uint64(0xBF58476D1CE4E5B9)
        state ^= state >> np.uint64(27)
        state *= np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return state


def permuted(index: int, count: int, key: int) -> int:
    """Where ``index`` of 0 .. count - 1 goes in the permutation that ``key`` names; O(1), nothing is stored.

    A Feistel network over pairs (left, right) of a grid just larger than ``count``: each round adds a hash of one
    half to the other, which can be undone, so the network permutes the grid. Places of the grid at or past ``count``
    are walked on from until one inside is reached, which leaves a permutation of the rest.
    """
    assert 0 <= index < count
    rows = isqrt(count - 1) + 1
    columns = -(-count // rows)
    while True:
        right, left = divmod(index, rows)  # left < rows, right < columns
        for turn in range(0, _ROUNDS, 2):
            left = (left + mix(key, turn, right)) % rows
            right = (right + mix(key, turn + 1, left)) % columns
        index = left + rows * right
        if index < count:
            return index


def expect_window(corpus: Corpus, length: int, argument: str = "data") -> None:
    """Raise a ValueError where a corpus, which ``argument`` names, holds no window of ``length`` tokens."""
    if len(corpus) < length:
        raise ValueError(
            f"{argument}: expected at least context_length = {length} tokens, got {len(corpus)}. Add text or train on "
            "shorter sequences."
        )


class Windows:
    """Windows of ``length`` tokens of a corpus: sample n is the same for any batch size, process or resuming.

    Epoch e holds samples e * per_epoch .. (e + 1) * per_epoch - 1 and visits each of its windows once. The fewer
    than ``length`` tokens that an epoch leaves out lie elsewhere in each epoch, for its first window starts anywhere.

    Args:
        corpus: shards, or tokens in memory by :meth:`Corpus.of_tokens`.
        length: tokens of a window.
        seed: 0 .. 2**64 - 1.
        aligned: each epoch's first window starts at the stream's first token, so that windows are those of a neighbour
            table (:mod:`.neighbours`); epochs differ in their order alone, and what the stream's end leaves over is in
            none of them.

    Raises:
        ValueError: a corpus shorter than one window; a length below 1; a seed out of range.
    """

    def __init__(self, corpus: Corpus, length: int, seed: int = 0, *, aligned: bool = False) -> None:
        if length < 1:
            raise ValueError(f"context_length: expected at least 1 token, got {length}.")
        if not 0 <= seed <= _MASK:
            raise ValueError(f"seed: expected 0 .. 2**64 - 1, got {seed}.")
        expect_window(corpus, length)
        self.corpus, self.length, self.seed, self.aligned = corpus, length, seed, aligned
        self.per_epoch = len(corpus) // length

    def start(self, sample: int) -> int:
        """The first token of sample 0, 1, ...; the window may run over the stream's end to its beginning."""
        assert sample >= 0
        epoch, index = divmod(sample, self.per_epoch)
        key = mix(self.seed, epoch)
        if self.aligned:
            return permuted(index, self.per_epoch, key) * self.length
        offset = mix(key, 1 << 32) * len(self.corpus) >> 64  # beside the rounds' numbers: a draw of its own
        return (offset + permuted(index, self.per_epoch, key) * self.length) % len(self.corpus)

    def window(self, sample: int) -> int:
        """Which of the stream's aligned windows 0 .. per_epoch - 1 a sample is."""
        assert self.aligned
        return self.start(sample) // self.length

    def batch(self, first: int, count: int) -> Tensor:
        """Samples first .. first + count - 1, [count, length] int64."""
        batch = np.empty((count, self.length), np.int64)
        for row, sample in zip(batch, range(first, first + count), strict=True):
            begin = self.start(sample)
            head = min(self.length, len(self.corpus) - begin)
            row[:head] = self.corpus.read(begin, begin + head)
            if head < self.length:
                row[head:] = self.corpus.read(0, self.length - head)
        return torch.from_numpy(batch)

    def document_ids(self, first: int, count: int) -> Tensor:
        """Which document of its window each token of ``batch(first, count)`` is of: [count, length] int64.

        Documents are counted 0, 1, ... within a window; the stream's end is a border too.
        """
        starts, total = self.corpus.document_starts, len(self.corpus)
        ids = np.zeros((count, self.length), np.int64)
        for row, sample in zip(ids, range(first, first + count), strict=True):
            begin = self.start(sample)
            end = begin + self.length
            # borders are the starts of documents after the window's first token
            low, high = np.searchsorted(starts, begin, side="right"), np.searchsorted(starts, end)
            row[starts[low:high] - begin] = 1
            if end > total:  # and those of the stream's beginning, its first token's too
                row[starts[: np.searchsorted(starts, end - total)] + (total - begin)] = 1
        return torch.from_numpy(ids.cumsum(1, out=ids))

    def close_chunk(
        self,
        first: int,
        count: int,
        chunk_size: int,
        share: float,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Early landmarks for ``batch(first, count)``: [count, length] bool, True where one follows the token.

        A chunk is closed after 1 .. chunk_size - 1 tokens with probability ``share`` (each number as likely), else
        it is full and not marked. A sample's landmarks depend on its number, the seed, the length, the chunk size,
        the share and its documents alone.

        Args:
            document_ids: int64 [count, length], those of :meth:`document_ids`: a chunk begins with each document, as
                in a model that is given them. None: a sample is one document.

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
        # a draw for each token, taken where a chunk begins with it: the low half says whether it ends early, the high
        # half after how many tokens
        keys = np.array([mix(self.seed, n, _EARLY) for n in range(first, first + count)], np.uint64)
        draws = mix_each(keys, self.length)
        early = (draws & np.uint64(_HALF - 1)) < np.uint64(int(share * _HALF))
        sizes = 1 + ((draws >> np.uint64(32)) * np.uint64(chunk_size - 1) >> np.uint64(32)).astype(np.int64)
        steps = np.where(early, sizes, -chunk_size).tolist()  # below 0: a full chunk's
        for row, marks in enumerate(close):
            for start, stop in self._documents(None if document_ids is None else document_ids[row]):
                ends = []
                while start < stop:
                    step = steps[row][start]
                    start += abs(step)
                    if step > 0 and start <= stop:
                        ends.append(start - 1)
                marks[ends] = True
        return torch.from_numpy(close)

    def _documents(self, ids: Tensor | None) -> list[tuple[int, int]]:
        """First token and end of each document of a sample, ids [length]."""
        if ids is None:
            return [(0, self.length)]
        borders = [0, *(np.flatnonzero(np.diff(ids.numpy())) + 1).tolist(), self.length]
        return list(pairwise(borders))
