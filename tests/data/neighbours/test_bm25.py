"""BM25: the inverted index against a plain loop, ties, limits, and the statistics of a corpus in a file."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.budgets import assert_same_in_float64
from tests.data.corpora import prose, save_bpe
from trailmark.data.corpus import load_tokenizer, tokenize
from trailmark.data.neighbours import bm25
from trailmark.data.neighbours.bm25 import Bm25, best_chunks, candidates, distinct_tokens, fit_bm25, load_bm25
from trailmark.data.shards import Corpus

Chunks = list[list[int]]


def padded(chunks: Chunks, width: int = 9, filler: int = 0) -> tuple[Any, Any]:
    """ids [n, width] and lengths [n]."""
    ids = np.full((len(chunks), width), filler)
    for row, chunk in zip(ids, chunks, strict=True):
        row[: len(chunk)] = chunk
    return ids, np.array([len(chunk) for chunk in chunks], np.int64)


def plain_score(query: list[int], chunk: list[int], chunks: Chunks, k1: float, b: float) -> float:
    """The formula, token by token."""
    mean = sum(map(len, chunks)) / len(chunks)
    total = 0.0
    for token in query:
        tf, df = chunk.count(token), sum(token in other for other in chunks)
        idf = float(np.log(1 + (len(chunks) - df + 0.5) / (df + 0.5)))
        norm = 1 - b + b * len(chunk) / mean if mean else 1.0
        if tf:
            total += idf * tf * (k1 + 1) / (tf + k1 * norm)
    return total


texts = st.lists(st.lists(st.integers(0, 6), max_size=9), min_size=1, max_size=7)


@settings(max_examples=60)
@given(
    chunks=texts,
    queries=texts,
    k1=st.floats(0, 3),
    b=st.floats(0, 1),
    filler=st.integers(0, 6),
    at_a_time=st.sampled_from([1, 5, 1 << 20]),
)
def test_scores_are_the_formulas(
    chunks: Chunks, queries: Chunks, k1: float, b: float, filler: int, at_a_time: int
) -> None:
    ids, lengths = padded(chunks, filler=filler)
    asked = padded(queries, filler=6 - filler)
    statistics = Bm25.of(ids, lengths, k1, b)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bm25, "_AT_A_TIME", at_a_time)
        found = statistics.scores(ids, lengths, *asked)
    expected = [[plain_score(q, chunk, chunks, k1, b) for chunk in chunks] for q in queries]
    assert_same_in_float64(torch.from_numpy(found), torch.tensor(expected, dtype=torch.float64))
    whole = statistics.scores(ids, lengths, *asked)
    assert (found == whole).all(), "how much is done at a time changed bits"


def test_a_score_by_hand() -> None:
    """Two of three chunks of mean length 2 hold token 1; k1 = 1, b = 0.5."""
    ids, lengths = padded([[1], [1, 1, 2], [3, 4]])
    found = Bm25.of(ids, lengths, 1.0, 0.5).scores(ids, lengths, *padded([[1, 5, 1]]))
    idf = np.log(1 + 1.5 / 2.5)
    # 1 of 1 token: 1 * 2 / (1 + 0.75); 2 of 3 tokens: 2 * 2 / (2 + 1.25); the query asks twice
    assert found[0].tolist() == pytest.approx([2 * idf * 2 / 1.75, 2 * idf * 4 / 3.25, 0.0], rel=1e-14)


@settings(max_examples=60)
@given(data=st.data(), queries=st.integers(1, 5), n=st.integers(1, 8), count=st.integers(1, 10))
def test_the_best_and_of_equals_the_earlier(data: st.DataObject, queries: int, n: int, count: int) -> None:
    row = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=n, max_size=n)
    scores = np.array(data.draw(st.lists(row, min_size=queries, max_size=queries)))
    limits = np.array(data.draw(st.lists(st.integers(0, n), min_size=queries, max_size=queries)))
    found = best_chunks(scores, limits, count)
    assert found.shape == (queries, count)
    for own, limit, indices in zip(scores.tolist(), limits.tolist(), found.tolist(), strict=True):
        best = sorted(sorted(range(limit), key=lambda j: (-own[j], j))[:count])
        assert indices == best + [-1] * (count - len(best))


@settings(max_examples=50)
@given(chunks=texts, count=st.integers(1, 8), S=st.integers(1, 6))
def test_candidates_of_a_text(chunks: Chunks, count: int, S: int) -> None:
    queries, lengths = padded(chunks)
    tokens = np.concatenate([np.array(chunk, int) for chunk in chunks])
    ids = tokens[: len(tokens) // S * S].reshape(-1, S)
    limits = np.minimum(np.arange(len(queries)), len(ids))
    found = candidates(ids, count, limits, queries, lengths)
    whole = np.full(len(ids), S)
    scores = Bm25.of(ids, whole).scores(ids, whole, queries, lengths)
    for query, limit, indices in zip(scores, limits.tolist(), found.tolist(), strict=True):
        best = sorted(sorted(range(limit), key=lambda j: (-query[j], j))[:count])
        assert indices == best + [-1] * (count - len(best))
    with pytest.MonkeyPatch.context() as patch:  # a query at a time
        patch.setattr(bm25, "_SCORES", 1)
        assert (candidates(ids, count, limits, queries, lengths) == found).all()


@pytest.mark.parametrize(
    ("count", "limits", "message"),
    [
        (0, [0, 1, 2], r"^count: expected at least 1 candidate, got 0"),
        (2, [0, 1], r"^limits: expected one of 0 .. 3 for each of 3 queries, got 2"),
        (2, [0, 1, 4], r"^limits: expected one of 0 .. 3 .* up to 4"),
    ],
)
def test_candidates_that_cannot_be(count: int, limits: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        candidates(np.ones((3, 4), int), count, np.array(limits), np.ones((3, 2), int), np.full(3, 2))


def test_tokens_and_parameters_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"^ids: expected tokens from 0 on, got -1"):
        distinct_tokens(np.array([[3, -1]]), np.array([2]))
    assert distinct_tokens(np.array([[3, -1]]), np.array([1])).tokens.tolist() == [3]
    for k1, b in ((-0.1, 0.5), (1.0, 1.5), (float("nan"), 0.5), (1.0, float("nan"))):
        with pytest.raises(ValueError, match=r"^k1, b: expected k1 from 0 on and b from 0 to 1"):
            Bm25(np.zeros(3, np.int64), 1, 1.0, k1, b)


# --- the statistics of a corpus ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(save_bpe(tmp_path_factory.mktemp("bpe")))


@pytest.mark.parametrize("at_a_time", [1, 1 << 14])
def test_a_corpus_is_counted(
    bpe: Any, tmp_path: Path, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bm25, "_READ", at_a_time)
    tokens = tokenize([prose(1, 300)], bpe)
    seen: list[tuple[int, int]] = []
    fitted = fit_bm25(
        Corpus.of_tokens(tokens), 16, bpe, tmp_path / "a.json", progress=lambda *n: seen.append(n)
    )
    chunks = [tokens[n : n + 16].tolist() for n in range(0, len(tokens), 16)]
    assert len(chunks[-1]) < 16
    expected = [sum(token in chunk for chunk in chunks) for token in range(len(bpe))]
    assert fitted.bm25.frequencies.tolist() == expected
    assert (fitted.bm25.chunks, fitted.bm25.mean_length) == (len(chunks), len(tokens) / len(chunks))
    assert seen[-1] == (len(tokens), len(tokens))
    assert all(a < b for (a, _), (b, _) in pairwise(seen))


def test_a_fingerprint_is_of_all_that_counts(bpe: Any, tmp_path: Path) -> None:
    tokens = tokenize([prose(1, 300)], bpe)
    corpus, byte = Corpus.of_tokens(tokens), load_tokenizer()
    prints = [
        fit_bm25(corpus, 16, bpe, tmp_path / "a").fingerprint,
        fit_bm25(corpus, 16, bpe, tmp_path / "b", k1=0.9).fingerprint,
        fit_bm25(corpus, 16, bpe, tmp_path / "c", b=0.4).fingerprint,
        fit_bm25(corpus, 16, bpe, tmp_path / "d", size=7).fingerprint,
        fit_bm25(corpus, 8, bpe, tmp_path / "e").fingerprint,
        fit_bm25(Corpus.of_tokens(tokens[::-1]), 16, bpe, tmp_path / "f").fingerprint,
        fit_bm25(Corpus.of_tokens(tokens % 259), 16, byte, tmp_path / "g").fingerprint,
    ]
    assert len(set(prints)) == len(prints)
    assert load_bm25(tmp_path / "a").fingerprint == prints[0]
    assert fit_bm25(corpus, 16, bpe, tmp_path / "again").fingerprint == prints[0]


def broken(content: dict[str, Any], **changes: Any) -> str:
    return json.dumps(content | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "x"}, "is no file of BM25 statistics"),
        ({"format": 2}, "expected format 1, .* has format 2. Update trailmark"),
        ({"frequencies": "abc"}, "is broken"),
        ({"frequencies": [-1, 0]}, "is broken"),
        ({"frequencies": [10**6] * 300}, "is broken"),
        ({"size": 0}, "is broken"),
        ({"mean_length": 0}, "is broken"),
        ({"k1": -1}, "is broken"),
        ({"chunks": None}, "is broken"),
    ],
)
def test_files_that_are_refused(bpe: Any, tmp_path: Path, changes: Any, message: str) -> None:
    path = tmp_path / "bm25.json"
    fit_bm25(Corpus.of_tokens(tokenize([prose(1, 50)], bpe)), 16, bpe, path)
    path.write_text(broken(json.loads(path.read_text()), **changes))
    with pytest.raises(ValueError, match=rf"^embedder: .*{message}"):
        load_bm25(path)


def test_what_cannot_be_counted(bpe: Any, tmp_path: Path) -> None:
    corpus = Corpus.of_tokens(np.full(40, 290, np.int32))
    with pytest.raises(ValueError, match=r"^chunk_size: expected at least 1, got 0"):
        fit_bm25(corpus, 0, bpe, tmp_path / "a")
    with pytest.raises(ValueError, match=r"^data: expected a corpus with tokens"):
        fit_bm25(Corpus.of_tokens(np.zeros(0, np.int32)), 8, bpe, tmp_path / "a")
    with pytest.raises(
        ValueError, match=r"^tokenizer: expected tokens below .* size 259, the corpus has 290"
    ):
        fit_bm25(corpus, 8, load_tokenizer(), tmp_path / "a")
    assert not list(tmp_path.iterdir())
    with pytest.raises(
        ValueError, match=r"^embedder: .*does not exist. trailmark neighbours --embedder bm25"
    ):
        load_bm25(tmp_path / "a")
