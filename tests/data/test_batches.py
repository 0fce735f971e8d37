"""Windows of one token stream: each a pure function of seed and number, each epoch once over the text."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.counts import assert_equally_likely
from trailmark.data.batches import Windows, mix, mix_each, permuted
from trailmark.data.shards import Corpus

TOKENS = np.arange(1000, dtype=np.int32)
CORPUS = Corpus.of_tokens(TOKENS)


def windows(length: int, seed: int = 0, total: int = 1000) -> Windows:
    return Windows(Corpus.of_tokens(TOKENS[:total]), length, seed)


@settings(max_examples=60)
@given(
    first=st.integers(0, 2**62),
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    seed=st.integers(0, 2**64 - 1),
    length=st.integers(1, 40),
)
def test_any_split_into_batches_gives_the_same_samples(
    first: int, counts: list[int], seed: int, length: int
) -> None:
    text = windows(length, seed)
    batch = text.batch(first, sum(counts))
    assert batch.dtype == torch.int64
    assert batch.shape == (sum(counts), length)
    assert ((batch[:, 1:] - batch[:, :-1]) % 1000 == 1).all(), "no window of the circle"
    borders = np.cumsum([first, *counts]).tolist()
    # each part by an object of its own, and the last part first: nothing but the number counts
    parts = [windows(length, seed).batch(a, b - a) for a, b in reversed(list(pairwise(borders)))]
    assert torch.equal(torch.cat(parts[::-1]), batch)


@settings(max_examples=100)
@given(
    total=st.integers(1, 200),
    length=st.integers(1, 200),
    epoch=st.one_of(st.integers(0, 3), st.integers(0, 2**50)),
    seed=st.integers(0, 2**64 - 1),
)
def test_each_epoch_covers_each_window_once(total: int, length: int, epoch: int, seed: int) -> None:
    length = min(length, total)
    text = windows(length, seed, total)
    assert text.per_epoch == total // length
    tokens = text.batch(epoch * text.per_epoch, text.per_epoch)
    assert tokens.unique().numel() == tokens.numel() == total // length * length
    starts = {text.start(epoch * text.per_epoch + n) for n in range(text.per_epoch)}
    # of one cutting: the starts lie whole windows apart, round the circle from some first one
    assert any({(s + n * length) % total for n in range(text.per_epoch)} == starts for s in starts)


@settings(max_examples=50)
@given(count=st.integers(2, 2**62), key=st.integers(0, 2**64 - 1), data=st.data())
def test_a_permutation_of_very_many(count: int, key: int, data: st.DataObject) -> None:
    some = data.draw(st.lists(st.integers(0, count - 1), unique=True, max_size=20))
    images = [permuted(n, count, key) for n in some]
    assert len(set(images)) == len(some)
    assert all(0 <= image < count for image in images)


def test_every_order_and_offset_is_as_likely() -> None:
    orders = Counter(tuple(permuted(n, 4, mix(9, key)) for n in range(4)) for key in range(4800))
    assert_equally_likely([orders[order] for order in permutations(range(4))])
    places = Counter(permuted(n, 50, mix(8, key)) for key in range(500) for n in (0, 1, 25, 49))
    assert_equally_likely([places[n] for n in range(50)])
    starts = Counter(windows(7, seed, 50).start(n) for seed in range(1000) for n in (0, 3, 7, 100))
    assert_equally_likely([starts[n] for n in range(50)])


def test_neighbours_in_the_text_do_not_come_together() -> None:
    # of 10,000 windows in random order, a step from one to the next in the text comes once on average
    text = Windows(Corpus.of_tokens(np.zeros(20_000, np.int32)), 2)
    starts = [text.start(n) for n in range(text.per_epoch)]
    assert sum((b - a) % 20_000 == 2 for a, b in pairwise(starts)) <= 8


def test_golden_values() -> None:
    """A change of these changes what every run in progress trains on."""
    hashes = [mix(), mix(0), mix(1, 2, 3), mix(2**64 - 1, -1)]
    expected = [11400714819323198485, 7960286522194355700, 15205877802699428709, 15914527057038129611]
    assert hashes == expected
    assert [permuted(n, 10, 7) for n in range(10)] == [4, 8, 2, 6, 1, 9, 3, 5, 7, 0]
    many = [permuted(n, 10**12 + 39, 2**63 + 5) for n in (0, 1, 10**12)]
    assert many == [543281868485, 523621258127, 66908577035]
    text = windows(90, 2026)
    starts = [text.start(n) for n in (*range(12), 2**62)]
    assert starts == [913, 463, 733, 3, 553, 273, 823, 643, 183, 373, 93, 953, 343]
    aligned = Windows(CORPUS, 90, 2026, aligned=True)
    assert [aligned.window(n) for n in (*range(12), 2**62)] == [6, 1, 4, 7, 2, 10, 5, 3, 9, 0, 8, 0, 6]
    close = windows(100, 5).close_chunk(0, 20, 8, 0.5)
    assert hashlib.sha256(close.numpy().tobytes()).hexdigest()[:16] == "7273635ef444d769"
    ids = torch.arange(100).expand(20, 100) // 23
    close = windows(100, 5).close_chunk(0, 20, 8, 0.5, ids)
    assert hashlib.sha256(close.numpy().tobytes()).hexdigest()[:16] == "bc94284f2fa0a8e5"


@pytest.mark.parametrize(
    ("length", "seed", "message"),
    [
        (1001, 0, r"^data: expected at least context_length = 1001 tokens, got 1000"),
        (0, 0, r"^context_length: expected at least 1"),
        (5, -1, r"^seed: expected 0 .. 2\*\*64 - 1, got -1"),
        (5, 2**64, r"^seed: "),
    ],
)
def test_windows_that_cannot_be(length: int, seed: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Windows(CORPUS, length, seed)


def test_the_loader_makes_more_than_a_million_tokens_a_second() -> None:
    tokens = np.arange(1 << 21, dtype=np.int32)
    text = Windows(Corpus.of_tokens(tokens, np.arange(0, 1 << 21, 997)), 2048)
    best = float("inf")
    for _ in range(3):
        began = time.process_time()  # not the clock: other programs may run
        text.batch(0, 64)
        text.close_chunk(0, 64, 64, 0.1, text.document_ids(0, 64))
        best = min(best, time.process_time() - began)
    assert 64 * 2048 / best > 1e6


# Documents


@settings(max_examples=100)
@given(data=st.data(), total=st.integers(1, 60), seed=st.integers(0, 99), first=st.integers(0, 10**6))
def test_documents_are_counted_within_each_window(
    data: st.DataObject, total: int, seed: int, first: int
) -> None:
    length = data.draw(st.integers(1, total))
    starts = sorted({0, *data.draw(st.lists(st.integers(0, total - 1), max_size=10))})
    text = Windows(Corpus.of_tokens(TOKENS[:total], starts), length, seed)
    ids, tokens = text.document_ids(first, 4), text.batch(first, 4)
    assert ids.dtype == torch.int64
    for row, places in zip(ids.tolist(), tokens.tolist(), strict=True):
        expected = np.cumsum([0] + [place in starts for place in places[1:]]).tolist()
        assert row == expected
    assert torch.equal(torch.cat([text.document_ids(first + n, 1) for n in range(4)]), ids)


def test_the_end_of_the_text_is_a_border_without_documents_too() -> None:
    text = windows(300)
    ids, tokens = text.document_ids(0, 30), text.batch(0, 30)
    wrapped = (tokens[:, 1:] == 0).any(1)
    assert 0 < wrapped.sum() < 30
    assert torch.equal(ids[:, -1] == 1, wrapped)


# Early landmarks


def sizes_of(close: torch.Tensor, chunk_size: int) -> list[tuple[int, bool]]:
    """Tokens of each chunk of one text and whether it is closed early, as a model divides it."""
    sizes, size = [], 0
    for mark in close.tolist():
        size += 1
        if mark or size == chunk_size:
            assert not (mark and size == chunk_size), "marked though full"
            sizes.append((size, mark))
            size = 0
    return sizes


@given(
    keys=st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=3), min_size=1, max_size=4),
    count=st.integers(0, 9),
)
def test_hashes_of_many_numbers_at_once(keys: list[list[int]], count: int) -> None:
    found = mix_each(np.array([mix(*key) for key in keys], np.uint64), count)
    assert found.tolist() == [[mix(*key, n) for n in range(count)] for key in keys]


@settings(max_examples=40)
@given(data=st.data(), share=st.floats(0.05, 1), chunk_size=st.integers(2, 12), first=st.integers(0, 10**6))
def test_early_landmarks_begin_anew_with_each_document(
    data: st.DataObject, share: float, chunk_size: int, first: int
) -> None:
    starts = sorted({0, *data.draw(st.lists(st.integers(0, 199), max_size=12))})
    text = Windows(Corpus.of_tokens(TOKENS[:200], starts), 80, 3)
    ids = text.document_ids(first, 3)
    close = text.close_chunk(first, 3, chunk_size, share, ids)
    for row, documents in zip(close, ids, strict=True):
        for number in documents.unique():
            sizes_of(row[documents == number], chunk_size)
    # the first document of a sample is as without others; one document alone is all of it
    alone = text.close_chunk(first, 3, chunk_size, share)
    assert torch.equal(close[ids == 0], alone[ids == 0])
    assert torch.equal(text.close_chunk(first, 3, chunk_size, share, torch.zeros_like(ids)), alone)
    single = [text.close_chunk(first + n, 1, chunk_size, share, ids[n : n + 1]) for n in range(3)]
    assert torch.equal(torch.cat(single), close)


def test_the_share_of_early_chunks_in_short_documents() -> None:
    """Cut by no document's end: documents of whole chunks, whose first chunk is full or early as drawn."""
    text = Windows(Corpus.of_tokens(TOKENS, np.arange(0, 1000, 8)), 1000)
    ids = text.document_ids(0, 20)
    close = text.close_chunk(0, 20, 8, 0.4, ids)
    first = [
        sizes_of(row[documents == number], 8)[:1]
        for row, documents in zip(close, ids, strict=True)
        for number in range(1, 124)
    ]
    early = [sizes[0][0] for sizes in first if sizes and sizes[0][1]]
    n = len(first)
    assert abs(len(early) - n * 0.4) <= 4 * (n * 0.4 * 0.6) ** 0.5
    assert_equally_likely([early.count(size) for size in range(1, 8)])


@settings(max_examples=30)
@given(
    first=st.integers(0, 10**12),
    count=st.integers(1, 6),
    seed=st.integers(0, 2**63 - 1),
    share=st.floats(0, 1),
    chunk_size=st.integers(2, 40),
)
def test_early_landmarks_depend_on_seed_and_number_alone(
    first: int, count: int, seed: int, share: float, chunk_size: int
) -> None:
    close = windows(100, seed).close_chunk(first, count, chunk_size, share)
    assert close.dtype == torch.bool
    assert close.shape == (count, 100)
    single = [windows(100, seed).close_chunk(n, 1, chunk_size, share) for n in range(first, first + count)]
    assert torch.equal(torch.cat(single), close)
    for row in close:
        sizes_of(row, chunk_size)


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_the_share_and_the_sizes_of_early_chunks(share: float) -> None:
    rows = windows(1000).close_chunk(0, 200, 8, share)
    # chunks that begin in the last 8 tokens may be cut by the text's end: those before are a fair sample
    chunks = []
    for row in rows:
        end = 0
        for size, early in sizes_of(row, 8):
            if end <= 1000 - 8:
                chunks.append((size, early))
            end += size
    n, sizes = len(chunks), [size for size, mark in chunks if mark]
    assert abs(len(sizes) - n * share) <= 4 * (n * share * (1 - share)) ** 0.5
    assert_equally_likely([sizes.count(size) for size in range(1, 8)])


def test_no_chunk_or_every_chunk_is_closed_early() -> None:
    text = windows(300)
    assert not text.close_chunk(0, 5, 8, 0.0).any()
    assert not text.close_chunk(0, 5, 1, 0.0).any()
    for row in text.close_chunk(0, 50, 8, 1.0):
        assert all(early for _, early in sizes_of(row, 8))
    assert text.close_chunk(0, 2, 2, 1.0).all()  # after each token


@pytest.mark.parametrize(
    ("chunk_size", "share", "message"),
    [
        (8, 1.5, r"^early_landmarks: expected a share from 0 to 1, got 1.5"),
        (8, -0.1, r"^early_landmarks: "),
        (8, float("nan"), r"^early_landmarks: "),
        (1, 0.5, r"^chunk_size: expected at least 2 tokens to close chunks early, got 1"),
    ],
)
def test_early_landmarks_that_cannot_be(chunk_size: int, share: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        windows(10).close_chunk(0, 1, chunk_size, share)


# From the stream's first token


@settings(max_examples=60)
@given(
    total=st.integers(1, 200),
    length=st.integers(1, 200),
    epoch=st.integers(0, 2**40),
    seed=st.integers(0, 99),
)
def test_aligned_windows_are_always_the_same(total: int, length: int, epoch: int, seed: int) -> None:
    length = min(length, total)
    text = Windows(Corpus.of_tokens(TOKENS[:total], range(0, total, 7)), length, seed, aligned=True)
    samples = range(epoch * text.per_epoch, (epoch + 1) * text.per_epoch)
    assert sorted(text.window(n) for n in samples) == list(range(total // length))
    batch, documents = text.batch(samples[0], len(samples)), text.document_ids(samples[0], len(samples))
    for n, row, own in zip(samples, batch, documents, strict=True):
        begin = text.window(n) * length
        assert text.start(n) == begin
        assert row.tolist() == list(range(begin, begin + length))
        assert own.tolist() == [place // 7 - begin // 7 for place in row.tolist()]
