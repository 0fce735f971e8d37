"""BM25 over chunks: exact scores by an inverted index, and the statistics of a corpus in a file.

score(q, c) = sum over the tokens t of q, as often as they come: idf(t) tf (k1 + 1) / (tf + k1 (1 - b + b |c| / mean))
with tf = how often t comes in c and idf(t) = log(1 + (N - df + 1/2) / (df + 1/2)), of Robertson and Zaragoza (2009),
"The Probabilistic Relevance Framework", with the 1 that keeps idf above 0 (Lucene). Chunks are rows of token numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trailmark.data.corpus import Integers, tokenizer_fingerprint, vocabulary_size
from trailmark.data.shards import Corpus
from trailmark.files import read_json, write_text

FORMAT = 1
K1, B = 1.2, 0.75
SIZE = 4096  # numbers of a vector: a larger vocabulary's tokens share them
_AT_A_TIME = 1 << 22  # numbers of a temporary array
_SCORES = 1 << 25  # scores of chunks that are in memory at a time
_READ = 1 << 18  # tokens that are counted at a time

Floats = npt.NDArray[np.float64]


class Distinct(NamedTuple):
    """The tokens of each row, each once, sorted by row and then by token."""

    rows: Integers  # [m]
    tokens: Integers  # [m]
    counts: Integers  # [m] how often


def distinct_tokens(ids: Integers, lengths: Integers) -> Distinct:
    """Count the tokens of rows ids [n, S] with ``lengths`` [n] tokens; what stands past a length is not looked at."""
    present = np.arange(ids.shape[1]) < lengths[:, None]
    tokens = ids[present]
    if len(tokens) and tokens.min() < 0:
        raise ValueError(f"ids: expected tokens from 0 on, got {tokens.min()}.")
    width = int(tokens.max(initial=0)) + 1
    keys, counts = np.unique(np.nonzero(present)[0] * width + tokens, return_counts=True)
    rows, tokens = np.divmod(keys, width)
    return Distinct(rows, tokens, counts)


def best_chunks(scores: npt.NDArray[Any], limits: Integers, count: int) -> Integers:
    """The ``count`` best of each row's first ``limits`` [Q] chunks, scores [Q, n]: [Q, count] ascending, -1 last.

    Of chunks with equal scores the earlier ones are taken.
    """
    n = scores.shape[1]
    allowed = np.arange(n) < limits[:, None]
    order = np.argsort(np.where(allowed, -scores, np.inf), axis=1, kind="stable")[:, :count]
    chosen = np.where(np.take_along_axis(allowed, order, 1), order, n)  # n: none, and last when sorted
    chosen = np.pad(np.sort(chosen, axis=1), ((0, 0), (0, count - chosen.shape[1])), constant_values=n)
    return np.where(chosen < n, chosen, -1)


@dataclass(frozen=True)
class Bm25:
    """What BM25 weighs tokens with: how many of N chunks hold each, and how long chunks are."""

    frequencies: Integers  # [vocabulary]; a token past its end comes in no chunk
    chunks: int
    mean_length: float
    k1: float = K1
    b: float = B

    def __post_init__(self) -> None:
        if not (np.isfinite(self.k1) and self.k1 >= 0 and 0 <= self.b <= 1):
            raise ValueError(f"k1, b: expected k1 from 0 on and b from 0 to 1, got {self.k1} and {self.b}.")

    @classmethod
    def of(cls, ids: Integers, lengths: Integers, k1: float = K1, b: float = B) -> Bm25:
        """The statistics of chunks ids [n, S] themselves."""
        frequencies = np.bincount(distinct_tokens(ids, lengths).tokens)
        return cls(frequencies, len(ids), float(lengths.mean()) if len(ids) else 0.0, k1, b)

    def idf(self, tokens: Integers) -> Floats:
        """What a token in a query weighs, above 0, [m] for [m]."""
        if not len(self.frequencies):
            return np.full(tokens.shape, np.log(2.0 * self.chunks + 2))
        known = tokens < len(self.frequencies)
        df = np.where(known, self.frequencies[np.where(known, tokens, 0)], 0)
        return np.log(1 + (self.chunks - df + 0.5) / (df + 0.5))

    def saturated(self, counts: Integers, lengths: Integers) -> Floats:
        """What a token that comes ``counts`` [m] times in a chunk of ``lengths`` [m] tokens adds, from 0 to k1 + 1."""
        relative = lengths / self.mean_length if self.mean_length else np.ones(len(lengths))
        return counts * (self.k1 + 1) / (counts + self.k1 * (1 - self.b + self.b * relative))

    def scores(self, ids: Integers, lengths: Integers, queries: Integers, query_lengths: Integers) -> Floats:
        """Each query's score for each chunk: queries [Q, U], chunks ids [n, S] -> [Q, n].

        The parts of a score are added in the order of the tokens' numbers.
        """
        Q, n = len(queries), len(ids)
        out = np.zeros((Q, n))
        chunk = distinct_tokens(ids, lengths)
        by_token = np.argsort(chunk.tokens, kind="stable")  # the inverted index: chunks ascend within a token
        holders, tokens = chunk.rows[by_token], chunk.tokens[by_token]
        parts = self.saturated(chunk.counts[by_token], lengths[holders])
        asked = distinct_tokens(queries, query_lengths)
        weights = asked.counts * self.idf(asked.tokens)
        begin = np.searchsorted(tokens, asked.tokens)
        many = np.searchsorted(tokens, asked.tokens, side="right") - begin
        borders = np.concatenate([[0], np.cumsum(many)])
        first = 0
        while first < len(many):  # asked tokens whose postings fit into memory together, at least one
            stop = max(
                first + 1, int(np.searchsorted(borders, borders[first] + _AT_A_TIME, side="right")) - 1
            )
            own = many[first:stop]
            posting = np.arange(own.sum()) + np.repeat(
                begin[first:stop] - (borders[first:stop] - borders[first]), own
            )
            place = np.repeat(asked.rows[first:stop], own) * n + holders[posting]
            np.add.at(out.reshape(-1), place, np.repeat(weights[first:stop], own) * parts[posting])
            first = stop
        return out


def candidates(
    ids: Integers, count: int, limits: Integers, queries: Integers, query_lengths: Integers
) -> Integers:
    """The ``count`` chunks [Q, count] of a text that BM25 ranks best for each query, ascending, -1 last.

    The statistics are the text's own. Of equals the earlier chunk; chunks that share no token with a query (score 0)
    fill what is left.

    Args:
        ids: [n, S] tokens of the chunks, all whole.
        count: how many, at least 1.
        limits: [Q] query c may have chunks below ``limits[c]``.
        queries: [Q, U] tokens. query_lengths: [Q] of them.

    Raises:
        ValueError: a count below 1; limits past the chunks.
    """
    if count < 1:
        raise ValueError(f"count: expected at least 1 candidate, got {count}.")
    n, S = ids.shape
    if len(limits) != len(queries) or limits.max(initial=0) > n:
        raise ValueError(
            f"limits: expected one of 0 .. {n} for each of {len(queries)} queries, got {len(limits)} up to "
            f"{limits.max(initial=0)}."
        )
    lengths, indices = np.full(n, S), np.full((len(queries), count), -1)
    statistics = Bm25.of(ids, lengths)
    step = max(1, _SCORES // max(1, n))
    for first in range(0, len(queries) if n else 0, step):  # memory does not grow with the window's square
        rows = slice(first, first + step)
        scores = statistics.scores(ids, lengths, queries[rows], query_lengths[rows])
        indices[rows] = best_chunks(scores, limits[rows], count)
    return indices


# --- a corpus' statistics in a file ------------------------------------------------------------------------


@dataclass(frozen=True)
class Fitted:
    """A file of :func:`fit_bm25`."""

    bm25: Bm25
    size: int
    vocab_size: int
    tokenizer_fingerprint: str
    fingerprint: str  # SHA-256 of all that a score depends on


def fit_bm25(
    corpus: Corpus,
    chunk_size: int,
    tokenizer: Any,
    file: str | Path,
    *,
    k1: float = K1,
    b: float = B,
    size: int = SIZE,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Fitted:
    """Count in how many of a corpus' chunks each token comes, and write it as JSON.

    Args:
        chunk_size: the stream is cut into chunks of so many tokens from its first; the last may be shorter.
        tokenizer: of the corpus.
        file: written in one step; one that is there is replaced.
        size: numbers of an embedder's vector. A vocabulary of at most so many tokens gets one each, and products are
            BM25 scores but for rounding; a larger one's tokens share them, with signs: scores are right on average.
        progress: called with tokens done and tokens in all.

    Raises:
        ValueError: an empty corpus; one of another tokenizer; a chunk size or a size below 1; k1 or b out of range.
    """
    for name, number in (("chunk_size", chunk_size), ("size", size)):
        if number < 1:
            raise ValueError(f"{name}: expected at least 1, got {number}.")
    if not len(corpus):
        raise ValueError("data: expected a corpus with tokens, got an empty one.")
    fingerprint, vocab_size = tokenizer_fingerprint(tokenizer), vocabulary_size(tokenizer)
    expect_tokenizer(corpus, fingerprint)
    frequencies = np.zeros(vocab_size, np.int64)
    step = chunk_size * max(1, _READ // chunk_size)
    for begin in range(0, len(corpus), step):
        tokens = corpus.read(begin, min(begin + step, len(corpus)))
        chunks = -(-len(tokens) // chunk_size)
        # a short chunk is filled with its last token: each is counted once in any case
        ids = np.pad(tokens, (0, chunks * chunk_size - len(tokens)), "edge").reshape(chunks, chunk_size)
        ids.sort(axis=1)
        first = np.ones(ids.shape, bool)
        first[:, 1:] = ids[:, 1:] != ids[:, :-1]
        counts = np.bincount(ids[first], minlength=vocab_size)
        if len(counts) > vocab_size:
            raise ValueError(
                f"tokenizer: expected tokens below its vocabulary's size {vocab_size}, the corpus has "
                f"{len(counts) - 1}. Name the tokenizer that the corpus was made with."
            )
        frequencies += counts
        progress(begin + len(tokens), len(corpus))
    count = -(-len(corpus) // chunk_size)
    bm25 = Bm25(frequencies, count, len(corpus) / count, k1, b)
    content = {
        "format": FORMAT,
        "kind": "bm25",
        "chunk_size": chunk_size,
        "k1": k1,
        "b": b,
        "size": min(size, vocab_size),
        "chunks": bm25.chunks,
        "mean_length": bm25.mean_length,
        "tokenizer_fingerprint": fingerprint,
        "corpus_fingerprint": corpus.fingerprint,
        "frequencies": frequencies.tolist(),
    }
    write_text(Path(file), json.dumps(content) + "\n", durable=True)
    return load_bm25(file)


def load_bm25(file: str | Path) -> Fitted:
    """The statistics that :func:`fit_bm25` wrote.

    Raises:
        ValueError: no such file, one of something else, a newer format.
    """
    path = Path(file)
    content = read_json(path)
    if not isinstance(content, dict) or content.get("kind") != "bm25":
        what = "is no file of BM25 statistics" if path.exists() else "does not exist"
        raise ValueError(
            f"embedder: expected a file of BM25 statistics, {str(path)!r} {what}. trailmark neighbours --embedder bm25 "
            "makes one."
        )
    if content.get("format") != FORMAT:
        raise ValueError(
            f"embedder: expected format {FORMAT}, {str(path)!r} has format {content.get('format')}. "
            "Update trailmark, or make the statistics again."
        )
    try:
        frequencies = np.array(content["frequencies"], np.int64)
        bm25 = Bm25(
            frequencies,
            int(content["chunks"]),
            float(content["mean_length"]),
            float(content["k1"]),
            float(content["b"]),
        )
        size, tokenizer = int(content["size"]), str(content["tokenizer_fingerprint"])
        if frequencies.ndim != 1 or not 1 <= size <= len(frequencies) or bm25.mean_length <= 0:
            raise ValueError("its numbers contradict each other")
        if frequencies.min() < 0 or frequencies.max() > bm25.chunks:
            raise ValueError("a token comes in more chunks than there are, or in fewer than none")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"embedder: {str(path)!r} is broken ({error}). Make the statistics again."
        ) from error
    hasher = hashlib.sha256(frequencies.astype("<i8").tobytes())
    parts = [bm25.chunks, bm25.mean_length, bm25.k1, bm25.b, size, tokenizer]
    hasher.update(json.dumps(parts).encode())
    return Fitted(bm25, size, len(frequencies), tokenizer, hasher.hexdigest())


def expect_tokenizer(corpus: Corpus, fingerprint: str) -> None:
    """Raise a ValueError if a prepared corpus was made with another tokenizer; one in memory does not tell."""
    tokenizer = corpus.manifest.get("tokenizer") or {"fingerprint": fingerprint}
    if tokenizer["fingerprint"] != fingerprint:
        raise ValueError(
            f"tokenizer: expected that of the corpus, {tokenizer.get('name')!r} with fingerprint "
            f"{tokenizer['fingerprint']}, got one with fingerprint {fingerprint}. Name the corpus' tokenizer."
        )
