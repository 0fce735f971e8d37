"""The texts that a perplexity is measured on: tokens, and how many words and bytes they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trailmark.data.corpus import read_texts, standard_library_texts, tokenize
from trailmark.data.shards import MANIFEST, Corpus
from trailmark.data.texts import open_text
from trailmark.trace.token_texts import token_bytes

_SLAB = 1 << 16  # tokens whose text is put together at once
_CHARACTER = 4  # bytes at most, of UTF-8


class Documents:
    """Tokens of documents, one after another, with what is counted in their texts.

    Words are separated by whitespace, as the word-level perplexity of PG19 counts them, end with their document, and
    belong to the token that they begin in; so those of the parts of a text add up. Bytes are of UTF-8. Both are exact
    or not given.

    Args:
        corpus: the tokens.
        tokenizer: theirs.
        counts: words and bytes of each document's text; None: they are counted in the tokens, where these stand for
            bytes.
    """

    def __init__(
        self, corpus: Corpus, tokenizer: Any, counts: Sequence[tuple[int, int]] | None = None
    ) -> None:
        if counts is not None and len(counts) != corpus.documents:
            raise ValueError(
                f"counts: expected one for each of {corpus.documents} documents, got {len(counts)}."
            )
        self.corpus, self._tokenizer, self._counts = corpus, tokenizer, counts

    @classmethod
    def of(cls, texts: Sequence[str], tokenizer: Any) -> Documents:
        """Texts as they are, without special tokens.

        Raises:
            ValueError: no text that becomes a token.
        """
        parts = [tokenize([text], tokenizer) for text in texts]
        known = [(len(text.split()), len(text.encode())) for text in texts]
        kept = [number for number, part in enumerate(parts) if len(part)]
        if not kept:
            raise ValueError(f"text: expected at least one token in {len(texts)} texts, found none.")
        starts = np.cumsum([0, *(len(parts[number]) for number in kept[:-1])])
        corpus = Corpus.of_tokens(np.concatenate([parts[number] for number in kept]), starts)
        return cls(corpus, tokenizer, [known[number] for number in kept])

    @classmethod
    def open(
        cls, paths: Sequence[str | Path] | None, tokenizer: Any, vocab_size: int | None = None
    ) -> Documents:
        """Files and folders of text, each file a document; or a folder that ``trailmark prepare`` made.

        Args:
            paths: None: sources of Python's library that the demo's training leaves out.
            vocab_size: the model's; prepared tokens of a larger vocabulary are refused.

        Raises:
            ValueError: as :func:`trailmark.data.texts.open_text`.
        """
        if not paths:
            return cls.of(standard_library_texts("haystack"), tokenizer)
        if any(
            (Path(path) / MANIFEST).exists() for path in paths
        ):  # its documents end with an end-of-text token
            return cls(open_text(paths, tokenizer, vocab_size, argument="text"), tokenizer)
        corpus = open_text(paths, tokenizer, end_of_text=False, argument="text")
        counts = [(len(text.split()), len(text.encode())) for text in read_texts(paths, "text")]
        # a text of which no token is made is no document of the corpus
        return cls(corpus, tokenizer, counts if len(counts) == corpus.documents else None)

    def __len__(self) -> int:
        """Documents."""
        return self.corpus.documents

    @property
    def tokens(self) -> int:
        return len(self.corpus)

    @property
    def fingerprint(self) -> str:
        return self.corpus.fingerprint

    @cached_property
    def borders(self) -> npt.NDArray[np.int64]:
        """[documents + 1]: where each begins and the last ends."""
        return np.append(self.corpus.document_starts, len(self.corpus))

    def read(self, start: int, stop: int) -> Any:
        """Tokens [stop - start] int32."""
        return self.corpus.read(start, stop)

    @cached_property
    def _bytes(self) -> list[bytes] | None:
        return token_bytes(self._tokenizer)

    @property
    def countable(self) -> bool:
        """Whether words and bytes can be counted in any stretch of tokens."""
        return self._bytes is not None

    def counted(self, start: int, stop: int) -> tuple[int, int]:
        """Words that begin in tokens start .. stop - 1, and the bytes of these tokens.

        A word ends with its document, and a character belongs to the token in which it begins.
        """
        words = size = 0
        for first, last, begin, end in self._stretches(start, stop):
            own = self._text(first, last)
            size += len(own)
            # enough before it to tell whether it begins in a word or in a character, and its last character's rest
            before = self._text(max(begin, first - _CHARACTER), first)
            cut = _continued(own) if before else 0
            before, own = before + own[:cut], own[cut:]
            if own:
                after = self._text(last, min(end, last + _CHARACTER - 1))
                own += after[: _continued(after)]
            words += _words(before + own) - _words(before)
        return words, size

    def _stretches(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Tokens start .. stop - 1 in parts of one document, each with where that begins and ends."""
        number = int(np.searchsorted(self.borders, start, side="right")) - 1
        while start < stop:
            begin, end = int(self.borders[number]), int(self.borders[number + 1])
            for first in range(start, min(stop, end), _SLAB):
                yield first, min(stop, end, first + _SLAB), begin, end
            start, number = end, number + 1

    def _text(self, start: int, stop: int) -> bytes:
        table = self._bytes
        assert table is not None, "countable"
        return b"".join(table[n] for n in self.read(start, stop))

    def counted_in_documents(self, documents: int) -> tuple[int | None, int | None]:
        """Words and bytes of the first documents."""
        if self._counts is not None:
            known = self._counts[:documents]
            return sum(words for words, _ in known), sum(size for _, size in known)
        if not self.countable:
            return None, None
        words, size = 0, 0
        for first, stop in zip(self.borders[:documents], self.borders[1:], strict=False):
            more = self.counted(int(first), int(stop))
            words, size = words + more[0], size + more[1]
        return words, size


def _continued(text: bytes) -> int:
    """Bytes at its start that go on with a character of UTF-8 from before."""
    for count, byte in enumerate(text[: _CHARACTER - 1]):
        if byte & 0xC0 != 0x80:
            return count
    return min(len(text), _CHARACTER - 1)


def _words(text: bytes) -> int:
    return len(text.decode("utf-8", errors="replace").split())
