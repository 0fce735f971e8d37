"""Texts that needles are hidden in: any length out of a shorter or longer stream, read where it is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trailmark.data.corpus import Integers, Tokens
from trailmark.data.shards import Corpus

_PIECE = 1 << 20  # tokens that are looked at at a time


class Stream(Protocol):
    """One stream of tokens, such as a corpus."""

    @property
    def fingerprint(self) -> str:
        """The SHA-256 that names it."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens start .. stop - 1."""


class Filler:
    """An endless text: a stream over and over, some of its tokens replaced by others.

    Args:
        text: tokens in memory [n], or a stream that need not fit into it.
        replaced: tokens that are not to be there, and those that take their places.

    Raises:
        ValueError: an empty text.
    """

    def __init__(self, text: Tokens | Stream, replaced: Mapping[int, int] | None = None) -> None:
        if not len(text):
            raise ValueError("text: expected tokens to hide needles in, got none.")
        self.stream: Stream = Corpus.of_tokens(text) if isinstance(text, np.ndarray) else text
        self.replaced = dict(replaced or {})

    def __len__(self) -> int:
        """Tokens until it begins again."""
        return len(self.stream)

    def read(self, start: int, count: int) -> Tokens:
        """Read ``count`` tokens from ``start`` on, [count] int32."""
        parts, total = [], len(self.stream)
        while count:
            start %= total
            stop = min(total, start + count)
            parts.append(np.asarray(self.stream.read(start, stop), np.int32))
            start, count = stop, count - len(parts[-1])
        out = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        for token, other in self.replaced.items():
            out = np.where(out == token, np.int32(other), out)
        return out

    def fingerprint(self) -> str:
        """Return the SHA-256 that names the stream."""
        return self.stream.fingerprint


@dataclass(frozen=True)
class Needle:
    """A needle in its place."""

    start: int  # its first token's place in the haystack
    tokens: Integers
    value: tuple[int, int]  # which of its tokens are what it leads to

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def chunks(self, chunk_size: int) -> list[int]:
        """Return the chunks that it touches."""
        return list(range(self.start // chunk_size, (self.stop - 1) // chunk_size + 1))

    def value_chunks(self, chunk_size: int) -> list[int]:
        """Return the chunks that hold its value."""
        first, stop = (self.start + place for place in self.value)
        return list(range(first // chunk_size, (stop - 1) // chunk_size + 1))


@dataclass(frozen=True)
class Haystack:
    """``chunks`` chunks of ``chunk_size`` tokens of a filler, from ``start`` on, with needles written over it.

    ``begin``: the tokens that stand at its beginning, where no needle lies.

    ``haystack[first:stop]`` are its chunks [n, S] int64, made when they are asked for.
    """

    filler: Filler
    start: int
    chunks: int
    chunk_size: int
    needles: tuple[Needle, ...] = ()
    begin: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        return self.chunks, self.chunk_size

    def holding(self, needles: Sequence[Needle]) -> Haystack:
        return replace(self, needles=tuple(needles))

    def __getitem__(self, rows: slice) -> Tensor:
        first, stop, step = rows.indices(self.chunks)
        assert step == 1
        S = self.chunk_size
        begin, count = first * S, max(0, stop - first) * S
        ids = self.filler.read(self.start + begin, count).astype(np.int64)
        if begin < len(self.begin):
            own = self.begin[begin : begin + count]
            ids[: len(own)] = own
        for needle in self.needles:
            low, high = max(needle.start, begin), min(needle.stop, begin + count)
            if low < high:
                ids[low - begin : high - begin] = needle.tokens[low - needle.start : high - needle.start]
        return torch.from_numpy(ids).view(-1, S)

    def changed(self, needles: Sequence[Needle]) -> tuple[Tensor, Tensor]:
        """Return the chunks that needles touch: numbers [n] ascending, and their tokens with the needles [n, S]."""
        numbers = sorted({n for needle in needles for n in needle.chunks(self.chunk_size)})
        whole = self.holding(needles)
        return torch.tensor(numbers), torch.cat([whole[n : n + 1] for n in numbers])

    def tail(self, count: int) -> Integers:
        """Read the filler that follows, [count]."""
        return self.filler.read(self.start + self.chunks * self.chunk_size, count).astype(np.int64)


def occurring(filler: Filler, start: int, count: int, sequences: Sequence[Integers]) -> set[int]:
    """Return which of ``sequences`` stand in ``count`` tokens of a filler from ``start`` on."""
    standing: set[int] = set()
    for length in {len(sequence) for sequence in sequences}:
        of_length: dict[tuple[int, ...], list[int]] = {}
        for number, sequence in enumerate(sequences):
            if len(sequence) == length:
                of_length.setdefault(tuple(sequence.tolist()), []).append(number)
        known = np.array(list(of_length))
        allowed = np.zeros((length, max(int(known.max()), 0) + 1), bool)
        allowed[np.arange(length), known] = True
        for begin in range(0, count - length + 1, _PIECE):
            ids = filler.read(start + begin, min(_PIECE + length - 1, count - begin))
            places = np.arange(len(ids) - length + 1)
            for place in range(length):  # token by token, of what is left
                here = ids[places + place]
                inside = here < allowed.shape[1]
                places = places[inside][allowed[place, here[inside]]]
            windows = ids[places[:, None] + np.arange(length)]
            for window in np.unique(windows, axis=0).tolist():
                standing.update(of_length.get(tuple(window), ()))
    return standing
