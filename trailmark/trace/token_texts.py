"""The text of tokens that come one after another: each character belongs to the token in which it begins.

A character may be spread over tokens, so the last few tokens of a text that goes on may have to wait for theirs.
"""

from __future__ import annotations

import codecs
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trailmark.data.chat import control_ids

Integers = npt.NDArray[np.int64]
_HELD = (
    4  # tokens that wait for the rest of a character, of a tokenizer whose tokens have no bytes: UTF-8 has 4
)


class TextState(NamedTuple):
    """Between two calls of ``settle``: tokens [m] that it needs again, and what of them is done with."""

    ids: Integers  # [m]
    skip: int = 0


START = TextState(np.zeros(0, np.int64))


class Settled(NamedTuple):
    """Tokens whose text is known: those that waited, and of those that came the ones that do not wait."""

    text: str
    widths: Integers  # [n] characters that begin in each token; their sum is the text's length
    state: TextState


class ByteTexts:
    """Of tokens that stand for bytes, as ByT5's and those of byte-level BPE: exact.

    The text of all tokens together is their bytes decoded as UTF-8; what is none becomes U+FFFD, as
    ``errors="replace"`` has it. Special tokens, which a tokenizer may find written out in a text, are what they are
    written as.

    Args:
        table: bytes of each token.
    """

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._lengths = np.array([len(own) for own in table], np.int64)

    def settle(self, state: TextState, ids: Integers, last: bool = False) -> Settled:
        """The text of tokens ``ids`` [n] after those of ``state``; ``last``: nothing comes after them."""
        ids = np.concatenate([state.ids, ids])
        if len(ids) and int(ids.max()) >= len(self._table):
            raise ValueError(
                f"ids: expected tokens below the tokenizer's {len(self._table)}, got {int(ids.max())}. Use the "
                "tokenizer that the model was trained with."
            )
        data = b"".join(map(self._table.__getitem__, ids.tolist()))[state.skip :]
        text, begins = _characters(data, last)
        ends = np.maximum(np.cumsum(self._lengths[ids]) - state.skip, 0)  # bytes up to each token's end
        before = np.concatenate([[0], np.cumsum(begins)])  # characters that begin before each byte
        count = int(np.searchsorted(ends, len(begins), side="right"))
        cut = int(ends[count - 1]) if count else 0
        widths = np.diff(before[ends[:count]], prepend=0)
        # bytes of the first token that waits which end a character of before
        own = begins[cut:]
        skip = int(own.argmax()) if own.any() else len(own)
        left = TextState(ids[count:], skip if count else state.skip) if count < len(ids) else START
        return Settled(text[: int(before[cut])], widths, left)


def _characters(data: bytes, last: bool) -> tuple[str, npt.NDArray[np.bool_]]:
    """The text of bytes, and for each byte whether a character begins there; without what may be part of one."""
    parts: list[str] = []
    begins = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80
    done = 0
    while True:
        try:
            text, count = codecs.utf_8_decode(data[done:], "strict", last)
        except UnicodeDecodeError as error:  # the bytes that one U+FFFD stands for
            wrong = slice(done + error.start, done + error.end)
            parts += [data[done : wrong.start].decode(), "\ufffd"]
            begins[wrong] = np.arange(error.end - error.start) == 0
            done = wrong.stop
        else:
            return "".join([*parts, text]), begins[: done + count]


class DecodedTexts:
    """Of other tokens: what decoding gives more with each of them than without it, after the tokens before it.

    Exact where the text of a token depends on the one before it alone (WordPiece, SentencePiece). It takes two
    calls of the tokenizer's ``decode`` a token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def settle(self, state: TextState, ids: Integers, last: bool = False) -> Settled:
        """As :meth:`ByteTexts.settle`. A token of half a character waits; so do at most 4."""
        row = [*state.ids.tolist(), *ids.tolist()]
        first, done = 0, state.skip  # the tokens before, which the text of a token depends on; those settled
        known = self._decode(row[first:done])
        parts: list[str] = []
        widths: list[int] = []
        for end in range(done + 1, len(row) + 1):
            text = self._decode(row[first:end])
            if text.endswith("\ufffd") and end - done < _HELD and not (last and end == len(row)):
                continue
            parts.append(text[len(known) :])
            widths += [len(parts[-1])] + [0] * (end - done - 1)
            first, done = done, end
            known = self._decode(row[first:done])
        left = TextState(np.array(row[first:], np.int64), done - first)
        return Settled("".join(parts), np.array(widths, np.int64), left)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False) if ids else ""
        return text


def texts_of(tokenizer: Any) -> ByteTexts | DecodedTexts:
    """How the tokens of a tokenizer become text."""
    return _texts_of(tokenizer, len(tokenizer))


@lru_cache(maxsize=4)  # a table of 150,000 tokens takes a third of a second
def _texts_of(tokenizer: Any, size: int) -> ByteTexts | DecodedTexts:
    """``size``: tokens that it has now."""
    table = token_bytes(tokenizer)
    if table is None:
        return DecodedTexts(tokenizer)
    for number, added in getattr(tokenizer, "added_tokens_decoder", {}).items():
        if number < len(table) and not table[number]:
            table[number] = added.content.encode()
    return ByteTexts(table)


def silent_ids(tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """Tokens that no text shows: control tokens, and rows of a model's vocabulary that its tokenizer lacks."""
    return _silent_ids(tokenizer, len(tokenizer), vocab_size)


@lru_cache(maxsize=4)
def _silent_ids(tokenizer: Any, size: int, vocab_size: int) -> frozenset[int]:
    known = max(tokenizer.get_vocab().values()) + 1
    return frozenset(control_ids(tokenizer)) | frozenset(range(known, vocab_size))


def token_bytes(tokenizer: Any) -> list[bytes] | None:
    """The bytes that each token stands for, none for special ones; None where tokens stand for no bytes of their own.

    They do in "bytes" (ByT5's) and in byte-level BPE, as GPT-2's and Llama 3's.
    """
    from tokenizers.decoders import ByteLevel
    from transformers import ByT5Tokenizer

    if isinstance(tokenizer, ByT5Tokenizer):
        own = [bytes([value]) for value in range(256)]
        return [b""] * tokenizer.offset + own + [b""] * (len(tokenizer) - 256 - tokenizer.offset)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.decoder, ByteLevel):
        return None
    added, vocabulary = tokenizer.added_tokens_decoder, tokenizer.get_vocab()
    texts = [""] * (max(vocabulary.values()) + 1)  # a number that is no token has none
    for text, number in vocabulary.items():
        if number not in added:
            texts[number] = text
    values = {chr(value): "\uffff" for value in range(256)} | {
        character: chr(value) for character, value in _byte_of_character().items()
    }
    places = str.maketrans(values)
    try:
        table = [text.translate(places).encode("latin-1") for text in texts]
    except UnicodeEncodeError:
        return None
    for number, token in added.items():
        if number < len(table) and not token.special:
            table[number] = token.content.encode()
    return table


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes printable bytes of Latin-1 as they are, all others as characters from 256 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in set(printable)]
    return {chr(value): value for value in printable} | {
        chr(256 + number): value for number, value in enumerate(others)
    }
