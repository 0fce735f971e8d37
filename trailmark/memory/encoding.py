"""Keys and values of chunks of which a memory keeps the tokens: encoded again when they are read.

A chunk is encoded by itself, after the few chunks before it that its layers see. The shapes of that depend on how long
these chunks are and on nothing else, so a chunk has the same bits whoever reads it, and whatever is read beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from trailmark.memory.tables import Integers
from trailmark.memory.tiers.recent import RecentRecords
from trailmark.memory.tiers.records import Bytes, ChunkStore, Numbers, RecordLayout


class Chunks(NamedTuple):
    """Consecutive chunks of a text."""

    tokens: Tensor  # int64 [T] on the CPU
    lengths: list[int]  # tokens of each chunk
    start: int  # number of the first position in its text, as windows count them


class Encoder(Protocol):
    """What a model makes of a chunk's tokens; see :class:`trailmark.models.encoding.TokenEncoder`."""

    @property
    def layout(self) -> RecordLayout:
        """Of a record of keys and values."""

    token_dtype: torch.dtype
    """That holds every token of the vocabulary."""
    reach: int
    """Positions before a chunk that take part in its keys and values."""
    landmarks: int
    """Positions that a chunk takes besides its tokens."""
    sinks: int
    """First positions of a text that take part wherever a chunk stands."""

    def __call__(self, chunks: Chunks, beginning: Chunks | None) -> Tensor:
        """The record [2, J, S, D] of the last of ``chunks``.

        Args:
            beginning: the text's first chunks, which hold the sinks; None: there are none.
        """


class TokenMemory(Protocol):
    """Of a memory what is asked here."""

    def tokens(self, row: int, first: int, stop: int) -> tuple[Tensor, Integers, Integers]: ...


class EncodedRecords(NamedTuple):
    """Records of chunks of one memory, encoded again where those used last are not among them."""

    memory: TokenMemory
    encoder: Encoder
    recent: RecentRecords
    rows: Integers  # [n]
    chunks: Integers  # [n]
    numbers: Integers  # [n] of their records

    def gather(self, numbers: Tensor) -> Tensor:
        """Records [m, 2, J, S, D] of ``numbers`` int64 [m], which are among these."""
        return self.recent.gather(numbers, self._encode)

    def _encode(self, numbers: Tensor) -> Tensor:
        distinct, which = np.unique(numbers.numpy(), return_inverse=True)
        order = np.argsort(self.numbers, kind="stable")
        places = order[np.searchsorted(self.numbers[order], distinct)]
        pairs = zip(self.rows[places].tolist(), self.chunks[places].tolist(), strict=True)
        with torch.inference_mode(False), torch.no_grad():
            records = torch.stack([encode_chunk(self.memory, self.encoder, *pair) for pair in pairs])
            if len(distinct) == len(which) and (np.diff(which) == 1).all():
                return records
            return records.index_select(0, torch.from_numpy(which).to(records.device))


def encode_chunk(memory: TokenMemory, encoder: Encoder, row: int, chunk: int) -> Tensor:
    """The record [2, J, S, D] of a chunk of one row."""
    before = 2  # in twos, then more: chunks that were closed early take fewer positions
    while True:
        first = max(0, chunk - before)
        tokens, lengths, starts = memory.tokens(row, first, chunk + 1)
        taken = np.cumsum((lengths[:-1] + encoder.landmarks)[::-1])  # positions of the last, the last two ...
        if first == 0 or (len(taken) and taken[-1] >= encoder.reach):
            break
        before *= 2
    needed = min(int(np.searchsorted(taken, encoder.reach)) + 1, len(taken)) if encoder.reach else 0
    at = len(lengths) - 1 - needed
    if not encoder.sinks or starts[at] == 0:
        return encoder(_joined(tokens[at:], lengths[at:], int(starts[at])), None)
    if (
        starts[at] < 2 * encoder.sinks
    ):  # some sink, a token before a landmark, may be among these: all before it, then
        return encoder(_joined(*memory.tokens(row, 0, chunk + 1)[:2], 0), None)
    return encoder(
        _joined(tokens[at:], lengths[at:], int(starts[at])), _beginning(memory, encoder, row, chunk)
    )


def _beginning(memory: TokenMemory, encoder: Encoder, row: int, chunk: int) -> Chunks:
    tokens, lengths, _ = memory.tokens(row, 0, min(encoder.sinks, chunk))  # at least a token each
    stop = int(np.searchsorted(np.cumsum(lengths), encoder.sinks)) + 1
    return _joined(tokens[:stop], lengths[:stop], 0)


def _joined(tokens: Tensor, lengths: Integers, start: int) -> Chunks:
    """Tokens [n, S] of which the first ``lengths`` [n] of each row exist."""
    there = torch.arange(tokens.shape[1]) < torch.from_numpy(lengths)[:, None]
    return Chunks(tokens[there], lengths.tolist(), start)


class EncodedStore(ChunkStore):
    """A store of tokens, seen as one of the keys and values that :class:`EncodedRecords` makes of them."""

    def __init__(self, tokens: ChunkStore, layout: RecordLayout) -> None:
        super().__init__(*layout)
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def write(self, first: int, records: Tensor) -> None:
        """Write tokens [n, S]."""
        self._tokens.write(first, records)

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        return self._tokens.pieces(start, stop)

    def _expect_numbers(self, numbers: Tensor) -> Numbers:
        return self._tokens._expect_numbers(numbers)

    def _collect(self, wanted: Numbers, out: Bytes) -> Any:
        raise AssertionError("its chunks are encoded by their place in a text, not by their number")


def smallest_dtype(vocab_size: int) -> torch.dtype:
    """The dtype of fewest bytes that holds every token of a vocabulary."""
    if vocab_size <= 1 << 8:
        return torch.uint8
    return torch.uint16 if vocab_size <= 1 << 16 else torch.int32
