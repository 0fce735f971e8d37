"""The texts that a perplexity is measured on: tokens, and how many words and bytes they stand for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trailmark.data.corpus import read_texts, standard_library_texts, tokenize
from trailmark.data.shards import MANIFEST, Corpus
from trailmark.data.texts import open_text

_SLAB = 1 << 16  # tokens whose text is put together at once


class Documents:
    """Tokens of documents, one after another, with what is counted in their texts.

    Words are separated by whitespace, as the word-level perplexity of PG19 counts them, and belong to the token that
    they begin in; so those of the parts of a text add up. Bytes are of UTF-8. Both are exact or not given.

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
            return cls(open_text(paths, tokenizer, vocab_size), tokenizer)
        corpus = open_text(paths, tokenizer, end_of_text=False)
        counts = [(len(text.split()), len(text.encode())) for text in read_texts(paths)]
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
        """Words that begin in tokens start .. stop - 1, and their bytes.

        A token before them, if there is one, says whether they begin inside a word.
        """
        table = self._bytes
        assert table is not None, "countable"
        words = size = 0
        for first in range(start, stop, _SLAB):
            last = min(stop, first + _SLAB)
            before = b"".join(table[n] for n in self.read(max(0, first - 1), first))
            own = b"".join(table[n] for n in self.read(first, last))
            words += _words(before + own) - _words(before)
            size += len(own)
        return words, size

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


def _words(text: bytes) -> int:
    return len(text.decode("utf-8", errors="replace").split())


def token_bytes(tokenizer: Any) -> list[bytes] | None:
    """The bytes that each token stands for, none for special ones; None where tokens stand for no bytes of their own.

    They do in "bytes" (ByT5's) and in byte-level BPE, as GPT-2's and Llama 3's.
    """
    from transformers import ByT5Tokenizer

    if isinstance(tokenizer, ByT5Tokenizer):
        own = [bytes([value]) for value in range(256)]
        return [b""] * tokenizer.offset + own + [b""] * (len(tokenizer) - 256 - tokenizer.offset)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    decoder = json.loads(backend.to_str())["decoder"]
    if decoder is None or decoder["type"] != "ByteLevel":
        return None
    values, added = _byte_of_character(), tokenizer.added_tokens_decoder
    table: list[bytes] = []
    for number in range(max(tokenizer.get_vocab().values()) + 1):
        if number in added:
            table.append(b"" if added[number].special else added[number].content.encode())
            continue
        text = tokenizer.convert_ids_to_tokens(number) or ""  # a number that is no token
        if any(character not in values for character in text):
            return None
        table.append(bytes(values[character] for character in text))
    return table


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes printable bytes of Latin-1 as they are, all others as characters from 256 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in set(printable)]
    return {chr(value): value for value in printable} | {
        chr(256 + number): value for number, value in enumerate(others)
    }
