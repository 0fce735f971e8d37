"""Embedders that count tokens: hashed bags of them, and BM25 as a product of vectors. They need no weights."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trailmark.data.batches import mix, mix_each
from trailmark.data.corpus import tokenizer_fingerprint, vocabulary_size
from trailmark.data.neighbours.bm25 import Distinct, Fitted, Integers, distinct_tokens

HASH_SIZE = 1024
_HASH, _BM25 = 1, 2  # mixed in: the draws of each kind are of their own


def fingerprint_of(*parts: Any) -> str:
    """The SHA-256 of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class HashEmbedder:
    """Hashed bag of tokens: each token adds a sign at one of ``size`` places, times the root of its count; length 1.

    The product of two chunks is on average the cosine of their vectors of roots of counts. Sums are made in float64
    in the order of the tokens' numbers, row by row: nothing else in a batch changes a bit.
    """

    def __init__(self, tokenizer: Any, size: int = HASH_SIZE) -> None:
        self.size, self.spec = size, f"hash:{size}"
        self.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)
        self.fingerprint = fingerprint_of("hash", 1, size, self.tokenizer_fingerprint)
        self._places = Places(size, vocabulary_size(tokenizer), _HASH)

    def __call__(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Unit vectors [n, d], the same for queries and keys; zeros for a chunk without tokens."""
        distinct = self._places.known(distinct_tokens(*as_arrays(ids, lengths)))
        sums = self._places.sums(distinct, np.sqrt(distinct.counts), len(ids))
        norms = np.sqrt((sums * sums).sum(1, keepdims=True))
        vectors = torch.from_numpy((sums / np.where(norms > 0, norms, 1)).astype(np.float32))
        return vectors, vectors


class Bm25Embedder:
    """BM25 as a product: a query holds counts times idf, a key saturated counts (:mod:`.bm25`).

    With a place for each token products are BM25 scores but for float32; with fewer places tokens share them, and
    signs make the products right on average. Row by row as :class:`HashEmbedder`.
    """

    def __init__(self, tokenizer: Any, fitted: Fitted, spec: str) -> None:
        """Raises ValueError if the statistics are of another tokenizer."""
        own = tokenizer_fingerprint(tokenizer)
        if own != fitted.tokenizer_fingerprint:
            raise ValueError(
                f"embedder: expected statistics of the tokenizer with fingerprint {own}, {spec!r} holds those of "
                f"{fitted.tokenizer_fingerprint}. Fit BM25 to a corpus of this tokenizer."
            )
        self.size, self.spec, self.tokenizer_fingerprint = fitted.size, spec, own
        self.fingerprint = fingerprint_of("bm25", 1, fitted.fingerprint)
        self._bm25 = fitted.bm25
        self._places = Places(fitted.size, fitted.vocab_size, _BM25)

    def __call__(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [n, d], float32."""
        tokens, own = as_arrays(ids, lengths)
        distinct = self._places.known(distinct_tokens(tokens, own))
        weights = distinct.counts * self._bm25.idf(distinct.tokens)
        parts = self._bm25.saturated(distinct.counts, own[distinct.rows])
        queries, keys = (
            self._places.sums(distinct, x, len(ids)).astype(np.float32) for x in (weights, parts)
        )
        return torch.from_numpy(queries), torch.from_numpy(keys)


class Places:
    """Where tokens stand in a vector of ``size`` numbers: one place each where they fit, hashed ones else."""

    def __init__(self, size: int, vocab_size: int, kind: int) -> None:
        self.size, self._vocab_size = size, vocab_size
        if kind == _BM25 and vocab_size <= size:
            self._place = np.arange(vocab_size)
            self._sign = np.ones(vocab_size)
        else:
            draws = mix_each(np.array([mix(kind)], np.uint64), vocab_size)[0]
            # the high half says where, the lowest bit with which sign
            self._place = ((draws >> np.uint64(32)) * np.uint64(size) >> np.uint64(32)).astype(np.int64)
            self._sign = 1.0 - 2.0 * (draws & np.uint64(1)).astype(np.float64)

    def known(self, distinct: Distinct) -> Distinct:
        """Without tokens past the vocabulary, which are no text: a model with a larger one may generate them."""
        mine = distinct.tokens < self._vocab_size
        return distinct if mine.all() else Distinct(*(x[mine] for x in distinct))

    def sums(self, distinct: Distinct, weights: Any, rows: int) -> Any:
        """The signed weights [m] of each row's tokens, added up by place: [rows, size] float64."""
        place = distinct.rows * self.size + self._place[distinct.tokens]
        added = np.bincount(place, self._sign[distinct.tokens] * weights, rows * self.size)
        return added.reshape(rows, self.size)


def as_arrays(ids: Tensor, lengths: Tensor) -> tuple[Integers, Integers]:
    """Raise a ValueError if they are not ids [n, S] and lengths [n] from 0 to S, on the CPU."""
    if ids.dim() != 2 or lengths.shape != ids.shape[:1] or ids.is_floating_point():
        raise ValueError(
            f"ids, lengths: expected integers of shapes [n, S] and [n], got {tuple(ids.shape)} of {ids.dtype} and "
            f"{tuple(lengths.shape)}."
        )
    if len(lengths) and not (lengths.min() >= 0 and lengths.max() <= ids.shape[1]):
        raise ValueError(
            f"lengths: expected 0 .. {ids.shape[1]}, got {int(lengths.min())} .. {int(lengths.max())}."
        )
    return ids.numpy().astype(np.int64, copy=False), lengths.numpy().astype(np.int64, copy=False)
