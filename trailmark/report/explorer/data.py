"""A trace as arrays of numbers that a page can hold: what ``trailmark explore`` writes and the page's script reads."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trailmark.trace.lines import Disorder, Entry, TracedChunk, TraceHeader, TraceSource, in_order
from trailmark.values import visible

Array = npt.NDArray[Any]
_ALIGNMENT = 8  # bytes: a script may look at each array where it lies
_BATCH = 1024  # chunks that are put together at once
# of 1M tokens, level 6 took up to twice the time for at most 2% less
_LEVEL = 4
_REPLACEMENT = 0xFFFD
_TYPES = {"u1": "uint8", "u2": "uint16", "u4": "uint32", "f4": "float32"}


@dataclass(frozen=True)
class Document:
    """All that was read, T tokens in C chunks, which G groups read for.

    Its arrays, little endian:

    ==================  ==================  ==================================================================
    text                uint8               the whole text, UTF-8
    token_chars         uint16 [T]          UTF-16 units of each token; uint32 where a token has over 65,535
    chunk_tokens        uint32 [C + 1]      the first token of each chunk, then T
    losses              float32 [T]         nats of each token; NaN: none
    losses_without      float32 [T]         the same with retrieval off
    read_starts         uint32 [C * G + 1]  what group g read in chunk c: entries read_starts[c * G + g] and on
    read_chunks         uint32              of each entry the chunk that was read
    read_weights        float32             and its weight
    read_rest           float32 [C * G]     weight of the chunks that are not listed; NaN: all are. The array is there
                                            only where a trace lists some chunks alone, as of Landmark Attention
    ==================  ==================  ==================================================================
    """

    sources: list[dict[str, Any]]
    arrays: dict[str, Array]

    @property
    def num_tokens(self) -> int:
        return len(self.arrays["token_chars"])

    @property
    def num_chunks(self) -> int:
        return len(self.arrays["chunk_tokens"]) - 1

    @property
    def bearing(self) -> int:
        """Tokens that bear a loss."""
        return int(np.isfinite(self.arrays["losses"]).sum())

    @property
    def loss(self) -> float:
        """The sum in nats, of the numbers that the page holds."""
        return float(np.nansum(self.arrays["losses"], dtype=np.float64))

    @property
    def loss_without(self) -> float:
        """The same with retrieval off."""
        return float(np.nansum(self.arrays["losses_without"], dtype=np.float64))

    @property
    def helped(self) -> int:
        """Tokens whose loss is lower with retrieval."""
        return int((self.arrays["losses_without"] > self.arrays["losses"]).sum())


def collect(
    header: TraceHeader, entries: Iterable[Entry], progress: Callable[[int], None] = lambda tokens: None
) -> Document:
    """The arrays of a trace, whose lines are taken once, in order.

    Args:
        progress: is told how many tokens were taken.

    Raises:
        ValueError: fewer than two chunks, none that read anything, or a trace that contradicts itself.
    """
    parts: list[dict[str, Array]] = []
    sources: list[dict[str, Any]] = []
    tokens = 0

    batch: list[TracedChunk] = []
    for entry in in_order(header, entries):
        if isinstance(entry, TraceSource):
            sources.append({"name": visible(entry.name), "first_token": entry.first_token})
            continue
        tokens += len(entry.ids)
        progress(tokens)
        batch.append(entry)
        if len(batch) == _BATCH:
            parts.append(_arrays(batch, header.num_groups))
            batch = []
    if batch:
        parts.append(_arrays(batch, header.num_groups))
    num_chunks = sum(len(part["chunk_tokens"]) for part in parts)
    if num_chunks < 2:
        raise ValueError(
            f"text: expected two chunks or more, got {num_chunks} of {tokens:,} tokens: there is no past to "
            f"read. Take a longer text; a chunk of this model has {header.chunk_size} tokens."
        )
    document = Document(sources, _joined(parts))
    if not len(document.arrays["read_chunks"]):
        raise ValueError(
            f"text: expected a chunk that reads a past one, none of the {num_chunks} does. Take a longer text, "
            "or a model that retrieves."
        )
    if not document.bearing:
        raise Disorder("tokens that bear a loss", "none")
    return document


def _arrays(chunks: list[TracedChunk], num_groups: int) -> dict[str, Array]:
    """Those of some chunks, with sizes where a document has starts. At once: numpy is slow on small arrays."""
    text = _text(chunks)
    losses = np.concatenate([chunk.losses for chunk in chunks]).astype("<f4")
    without = np.concatenate([chunk.losses_without for chunk in chunks]).astype("<f4")
    if (np.isfinite(losses) != np.isfinite(without)).any() or np.isinf([losses, without]).any():
        raise Disorder("a finite loss with and without retrieval, or neither", "another")
    reads = [read for chunk in chunks for read in chunk.reads]
    sizes = np.array([len(read.chunks) for read in reads], np.int64)
    read = np.concatenate([own.chunks for own in reads])
    weights = np.concatenate([own.weights for own in reads]).astype("<f4")
    reader = np.repeat(np.repeat([chunk.number for chunk in chunks], num_groups), sizes)
    same = np.repeat(np.arange(len(sizes)), sizes)
    if ((read < 0) | (read >= reader)).any():
        raise Disorder("chunks that read earlier ones", "one that reads itself or a later one")
    if ((np.diff(read) <= 0) & (np.diff(same) == 0)).any():
        raise Disorder("the chunks of a reading in ascending order", "another order")
    if [len(own.weights) for own in reads] != sizes.tolist() or not np.isfinite(weights).all():
        raise Disorder("a finite weight of each chunk that was read", "another")
    rest = np.array([np.nan if own.rest is None else own.rest for own in reads], "<f4")
    if np.isinf(rest).any():
        raise Disorder("a finite weight of what is not listed, or none", "another")
    return text | {
        "chunk_tokens": np.array([len(chunk.ids) for chunk in chunks]),
        "losses": losses,
        "losses_without": without,
        "read_starts": sizes,
        "read_chunks": read.astype("<u4"),
        "read_weights": weights,
        "read_rest": rest,
    }


def _text(chunks: list[TracedChunk]) -> dict[str, Array]:
    lengths = [len(chunk.text) for chunk in chunks]
    begins = np.concatenate([[0], np.cumsum(lengths)])
    for chunk, length in zip(chunks, lengths, strict=True):
        ordered = len(chunk.starts) == len(chunk.ids) > 0 and chunk.starts[0] == 0
        if not ordered or chunk.starts[-1] > length or (np.diff(chunk.starts) < 0).any():
            raise Disorder(
                "tokens that begin one after the other in their chunk's text, the first at 0",
                f"others in chunk {chunk.number}",
            )
    points = np.frombuffer(
        "".join(chunk.text for chunk in chunks).encode("utf-32-le", "surrogatepass"), "<u4"
    )
    # UTF-8 has no halves of characters
    points = np.where((points >= 0xD800) & (points < 0xE000), np.uint32(_REPLACEMENT), points)
    units = np.concatenate([[0], np.cumsum(1 + (points > 0xFFFF))])  # before each character
    starts = np.concatenate([c.starts + b for c, b in zip(chunks, begins[:-1], strict=True)])
    text = points.astype("<u4").tobytes().decode("utf-32-le").encode()
    token_chars = np.diff(units[np.append(starts, begins[-1])])
    return {"text": np.frombuffer(text, "u1"), "token_chars": token_chars}


def _joined(parts: list[dict[str, Array]]) -> dict[str, Array]:
    """The arrays of a document."""
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    kind = "<u2" if arrays["token_chars"].max() < 1 << 16 else "<u4"
    arrays["token_chars"] = arrays["token_chars"].astype(kind)
    for name in ("chunk_tokens", "read_starts"):
        arrays[name] = _starts(arrays[name])
    if np.isnan(arrays["read_rest"]).all():
        del arrays["read_rest"]  # all is listed
    return arrays


def _starts(sizes: Array) -> Array:
    ends = np.cumsum(sizes)
    if len(ends) and ends[-1] >= 1 << 32:
        raise ValueError(
            f"text: expected fewer than 2^32 tokens and readings, got {ends[-1]:,}. Explore a part of it."
        )
    return np.concatenate([[0], ends]).astype("<u4")


def pack(arrays: dict[str, Array]) -> tuple[list[dict[str, Any]], str]:
    """Where each array lies, in bytes, and all of them, one after another, as base64 of gzip."""
    places, pieces, offset = [], [], 0
    for name, values in arrays.items():
        content = values.tobytes()
        kind = _TYPES[values.dtype.newbyteorder("<").str[1:]]
        places.append({"name": name, "type": kind, "offset": offset, "length": len(values)})
        pieces += [content, b"\0" * (-len(content) % _ALIGNMENT)]
        offset += len(content) + len(pieces[-1])
    return places, base64.b64encode(gzip.compress(b"".join(pieces), _LEVEL, mtime=0)).decode()
