"""Where the chunks of a saved memory stand in the files that were read, and what they say there."""

from __future__ import annotations

import codecs
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trailmark.data.corpus import Tokens, of_texts, text_pieces, text_tokens
from trailmark.trace.token_texts import Integers
from trailmark.untrusted import open_regular

_Place = tuple[
    tuple[int, int], tuple[int, int] | None
]  # tokens of a file, and its bytes where they are known


@dataclass(frozen=True)
class Passage:
    """A part of a file that one chunk holds."""

    path: Path
    tokens: tuple[int, int]  # of the file: the first, and the one after the last
    # of the file; None: the file is gone or changed, or nothing says where
    bytes: tuple[int, int] | None = None
    text: str | None = None


class _File:
    """A file of a memory, and where its chunks begin.

    Attributes:
        first, count: its first token in the memory, and its tokens there.
        trouble: why its text cannot be shown; None: it can.
    """

    def __init__(self, source: Mapping[str, Any], first: int, begin: Sequence[int]) -> None:
        self.path, self.first, self.count = Path(source["path"]), first, int(source["tokens"])
        self._source, self._begin = source, begin
        self.trouble: str | None = None
        # bytes before its text, and before each chunk that begins in it, then before what follows
        self._begins, self._starts = 0, np.zeros(0, np.int64)
        self._looked = False

    def is_of(self, source: Mapping[str, Any], first: int) -> bool:
        """Whether it is the file of such a note, at such a place, and can be shown."""
        same = all(self._source[name] == source[name] for name in ("path", "tokens", "sha256"))
        return same and self.first == first and self.trouble is None

    def look(self, tokenizer: Any, chunk_size: int) -> None:
        """Find where its chunks begin, which takes reading it once."""
        if self._looked:
            return
        digest, known = hashlib.sha256(), 0
        starts, parts, begin = -self.first % chunk_size, [], self._begin
        end: int | None = None
        try:
            with open_regular(self.path, "memory", links=True) as file:
                mark = file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8  # which is no text
            size = self._begins = len(codecs.BOM_UTF8) if mark else 0
            for text in text_pieces(self.path):
                tokens, places = _placed(text, tokenizer)
                tokens = np.concatenate([np.asarray(begin, np.int32), tokens])
                places = np.concatenate([np.zeros(len(begin), np.int64), places])
                begin = ()
                left = self.count - known
                digest.update(tokens[:left].tobytes())
                parts.append(size + places[:left][starts::chunk_size])
                starts = (starts - len(tokens[:left])) % chunk_size
                if len(tokens) > left:
                    end = size + int(places[left])
                known, size = known + len(tokens[:left]), size + len(text.encode())
                if end is not None:
                    break
        except _Nowhere:
            self.trouble = "was read with a tokenizer that does not say where tokens stand"
        except (ValueError, OSError):
            self.trouble = "is gone or no text any more"
        else:
            if known != self.count or digest.hexdigest() != self._source["sha256"]:
                self.trouble = "has changed since it was read"
            none = np.zeros(0, np.int64)
            self._starts = np.append(np.concatenate(parts or [none]), size if end is None else end)
        self._looked = True  # at last: Ctrl-C may come before, and another thread look meanwhile

    def place(self, begin: int, stop: int, chunk_size: int) -> _Place:
        """That of tokens ``begin`` to ``stop`` of the memory, of one chunk, some of which are of this file."""
        low, high = max(begin - self.first, 0), min(stop - self.first, self.count)
        if self.trouble is not None or not self._looked:
            return (low, high), None
        # chunks that begin in this file before this one
        number = (begin - (self.first + -self.first % chunk_size)) // chunk_size
        return (low, high), (
            int(self._starts[number]) if begin >= self.first else self._begins,
            int(self._starts[number + 1]),
        )

    def read(self, tokens: tuple[int, int], places: tuple[int, int] | None) -> Passage:
        """What stands at a place."""
        if places is None:
            return Passage(self.path, tokens)
        try:
            with open_regular(self.path, "memory", links=True) as file:
                file.seek(places[0])
                text = file.read(places[1] - places[0]).decode(errors="ignore")
        except (ValueError, OSError):
            return Passage(self.path, tokens)
        return Passage(self.path, tokens, places, text)


class Passages:
    """The passages of a memory's chunks, all of which are full.

    Args:
        sources: its notes on the files that were read (:func:`trailmark.trace.texts.sources_of`).
        begin: tokens that stand before its first file.
        before: the same of an earlier state of the memory, in whose files places need not be looked for again.
    """

    def __init__(
        self,
        sources: Sequence[Mapping[str, Any]],
        tokenizer: Any,
        chunk_size: int,
        begin: Sequence[int] = (),
        before: Passages | None = None,
    ) -> None:
        self._tokenizer, self._chunk_size = tokenizer, chunk_size
        self._files: list[_File] = []
        first = 0
        known = iter(() if before is None else before._files)
        for source in sources:
            file, earlier = _File(source, first, () if first else begin), next(known, None)
            self._files.append(earlier if earlier is not None and earlier.is_of(source, first) else file)
            first += int(source["tokens"])

    def of(self, chunk: int) -> list[Passage]:
        """Those of one chunk, one for each file that it holds something of; none behind the last file."""
        return [file.read(*place) for file, place in self._places(chunk)]

    def joined(self, chunks: Sequence[int]) -> list[Passage]:
        """Those of chunks, ascending, that have a text; where one follows the other in a file they are one."""
        spans: list[tuple[_File, tuple[int, int], tuple[int, int]]] = []
        for file, (tokens, places) in itertools.chain.from_iterable(map(self._places, chunks)):
            if places is None:
                continue
            if spans and spans[-1][0] is file and spans[-1][1][1] == tokens[0]:
                _, before, began = spans.pop()
                tokens, places = (before[0], tokens[1]), (began[0], places[1])
            spans.append((file, tokens, places))
        found = [file.read(tokens, places) for file, tokens, places in spans]
        return [passage for passage in found if passage.text is not None and passage.text.strip()]

    def _places(self, chunk: int) -> list[tuple[_File, _Place]]:
        begin, stop = chunk * self._chunk_size, (chunk + 1) * self._chunk_size
        held = [file for file in self._files if file.first < stop and begin < file.first + file.count]
        for file in held:
            file.look(self._tokenizer, self._chunk_size)
        return [(file, file.place(begin, stop, self._chunk_size)) for file in held]

    @property
    def troubles(self) -> list[tuple[Path, str]]:
        """The files whose text was asked for and cannot be shown, each with what is wrong with it, a verb first."""
        return [(file.path, file.trouble) for file in self._files if file.trouble is not None]


class _Nowhere(Exception):
    """A tokenizer written in Python, which keeps no places."""


def _placed(text: str, tokenizer: Any) -> tuple[Tokens, Integers]:
    """The tokens of a text, and how many of its bytes stand before each."""
    from transformers import ByT5Tokenizer

    if isinstance(tokenizer, ByT5Tokenizer):
        tokens = text_tokens(text, tokenizer)
        return tokens, np.arange(len(tokens))
    if not getattr(tokenizer, "is_fast", False):
        raise _Nowhere
    found = of_texts(tokenizer)(text, add_special_tokens=False, return_offsets_mapping=True)
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    before = np.concatenate([[0], np.cumsum(widths)])  # bytes before each character
    starts = np.array([first for first, _ in found["offset_mapping"]], np.int64)
    return np.asarray(found["input_ids"], np.int32), before[starts]
