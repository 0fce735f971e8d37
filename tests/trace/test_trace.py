"""Traces against the equations written naively, whole texts, and the readings that they are made beside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoTokenizer

from tests.data.corpora import prose, save_bpe
from tests.data.neighbours.encoders import save_bert
from tests.models.hils.naive import NaiveHiLS
from tests.models.hsa.naive import NaiveHSA
from tests.models.landmark.naive import NaiveReading
from tests.models.naive import NaiveDRT
from tests.models.rpt.naive import NaiveRPT
from tests.models.tiny import EXACT, block_recurrent, drt, hils, hsa, landmark, rpt, split, window_model
from tests.trace.whole import totals
from trailmark.data.corpus import load_tokenizer, tokenize
from trailmark.evaluation.reading import Reader
from trailmark.evaluation.subject import Subject
from trailmark.trace import tracer
from trailmark.trace.lines import Entry, Read, TracedChunk, TraceHeader, TraceSource, encode
from trailmark.trace.texts import trace_memory, trace_texts
from trailmark.trace.token_texts import START, DecodedTexts, texts_of
from trailmark.trace.tracer import Tracer

BYTES = load_tokenizer()
V = 259
S = 4  # of the tiny models


def subject_of(model: Any, tokenizer: Any = BYTES) -> Subject:
    return Subject(Path("tiny"), model, tokenizer, {})


def some_bytes(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, V, (length,), generator=torch.Generator().manual_seed(seed))


def traced(model: Any, ids: Tensor, pieces: Sequence[int] = (4096,)) -> list[TracedChunk]:
    own = Tracer(subject_of(model), model.new_cache())
    chunks: list[Entry] = []
    for piece in split(ids[None], pieces):
        own.feed(piece[0].numpy().astype(np.int32))
        chunks += own.take()
    chunks += own.rest()
    return [chunk for chunk in chunks if isinstance(chunk, TracedChunk)]


def losses_of(logits: Tensor, ids: Tensor) -> np.ndarray[Any, Any]:
    """Of whole texts: logits [T, V], tokens [T]."""
    found = F.cross_entropy(logits[:-1], ids[1:], reduction="none")
    return np.concatenate([[np.nan], found.numpy()])


def assert_losses(chunks: list[TracedChunk], ids: Tensor, logits: Tensor, without: Tensor) -> None:
    for name, whole in (("losses", logits), ("losses_without", without)):
        ours = np.concatenate([getattr(chunk, name) for chunk in chunks])
        assert ours.dtype == np.float64
        np.testing.assert_allclose(ours, losses_of(whole, ids), rtol=0, atol=EXACT)
        assert np.isnan(ours[0])
        assert np.isfinite(ours[1:]).all()


def assert_reads(read: Read, chunks: Sequence[int], weights: Sequence[float]) -> None:
    assert read.chunks.tolist() == list(chunks)
    np.testing.assert_allclose(read.weights, weights, rtol=0, atol=EXACT)


def laid_out(chunks: list[TracedChunk], ids: Tensor) -> None:
    """That the chunks are the text's."""
    assert [chunk.number for chunk in chunks] == list(range(-(-len(ids) // S)))
    assert [chunk.first_token for chunk in chunks] == list(range(0, len(ids), S))
    assert [chunk.closed for chunk in chunks] == [n * S + S <= len(ids) for n in range(len(chunks))]
    assert np.concatenate([chunk.ids for chunk in chunks]).tolist() == ids.tolist()


@torch.no_grad()
def whole(model: Any, ids: Tensor) -> Tensor:
    """Logits [T, V] of a forward over the whole text, without a cache."""
    logits: Tensor = model(ids[None]).logits[0]
    return logits


@pytest.mark.parametrize(("exclude", "pieces"), [(False, (4096,)), (True, (1, 5, 2, 9))])
def test_a_drt_is_traced_as_the_equations_say(exclude: bool, pieces: Sequence[int]) -> None:
    model = drt(
        2,
        vocab_size=V,
        exclude_visible_chunks=exclude,
        sliding_window=15 if exclude else 7,
        residual_gca=True,
    )
    ids = some_bytes(45)
    naive, chunks = NaiveDRT(model, ids), traced(model, ids, pieces)
    laid_out(chunks, ids)
    assert any(len(read.chunks) == 3 for chunk in chunks for read in chunk.reads)
    for chunk in chunks:
        assert len(chunk.reads) == 2
        for g, read in enumerate(chunk.reads):
            asked = naive.retrieval[g][chunk.number - 1] if chunk.number else ([], [])
            assert_reads(read, *asked)
            scores = [naive.scores[g][chunk.number - 1][m] for m in asked[0]]
            assert read.scores is not None
            np.testing.assert_allclose(read.scores, scores, rtol=0, atol=EXACT)
            assert read.rest is None
    assert_losses(chunks, ids, naive.logits, whole(model.without_retrieval(), ids))
    # what is read changes what is predicted: else the two losses would tell nothing
    count, loss, without = totals(chunks)
    assert count == len(ids) - 1
    assert abs(loss - without) > 0.1


def test_an_rpt_is_traced_as_the_equations_say() -> None:
    model = rpt(vocab_size=V, continuation=True, neighbour_gate=True)
    ids = some_bytes(26)
    naive, chunks = NaiveRPT(model, ids), traced(model, ids, (1, 5, 2, 9))
    laid_out(chunks, ids)
    for chunk in chunks:
        (read,) = chunk.reads
        asked = naive.retrieval[chunk.number - 1] if chunk.number else []
        scores = torch.tensor([naive.scores[chunk.number - 1][m] for m in asked], dtype=torch.float64)
        assert_reads(read, asked, scores.softmax(0).tolist())
    assert_losses(chunks, ids, naive.logits, whole(model.without_retrieval(), ids))


class NaiveGates(NaiveReading):
    """With the scores of the landmarks that each head of each position reads, layer by layer."""

    def read_from(
        self, i: int, query: Any, j: int, local: Any, n: int, chosen: list[int]
    ) -> tuple[Any, bool]:
        gates = [float(self.chunk_at(m, m)[-1, j] @ query) * len(query) ** -0.5 for m in chosen]
        layer = len(self.retrieval)
        self.gates = getattr(self, "gates", [])
        self.gates.append((layer, self.spots[i], dict(zip(chosen, gates, strict=True))))
        return super().read_from(i, query, j, local, n, chosen)


def test_landmark_attention_is_traced_as_the_equations_say() -> None:
    """Means over tokens and heads, of which a line has the K largest; cells of 11 tokens, chunks of 4."""
    model = landmark(vocab_size=V, memory_position="true")
    ids, H, K = some_bytes(37), 4, 3
    naive, chunks = NaiveGates(model, ids), traced(model, ids, (7, 1, 16))
    laid_out(chunks, ids)
    longer = 0
    for chunk in chunks:
        assert len(chunk.reads) == model.config.num_hidden_layers
        for layer, read in enumerate(chunk.reads):
            means: dict[int, float] = {}
            for own, spot, gates in naive.gates:
                if own != layer or spot.is_landmark or spot.chunk != chunk.number:
                    continue
                among = torch.tensor(list(gates.values()), dtype=torch.float64).softmax(0).tolist()
                for m, weight in zip(gates, among, strict=True):
                    means[m] = means.get(m, 0) + weight / (H * len(chunk.ids))
            kept = sorted(sorted(means, key=lambda m: (-means[m], m))[:K])
            assert_reads(read, kept, [means[m] for m in kept])
            assert read.scores is None
            assert read.rest == pytest.approx(sum(means.values()) - sum(means[m] for m in kept), abs=EXACT)
            longer += len(means) > K
    assert longer
    off = model.without_retrieval()
    with torch.no_grad():
        without = off(ids[None], past_key_values=off.new_cache()).logits[0]
    assert_losses(chunks, ids, naive.logits, without)


@pytest.mark.parametrize("chunk_score", ["expansion", "mean"])
def test_a_hils_is_traced_as_the_equations_say(chunk_score: str) -> None:
    """Means over tokens and key/value heads, of which a line has the K largest."""
    model = hils(vocab_size=V, chunk_score=chunk_score, num_sinks=2)
    ids, J, K = some_bytes(37), 2, 3
    naive, chunks = NaiveHiLS(model, ids), traced(model, ids, (7, 1, 16))
    laid_out(chunks, ids)
    assert_means(chunks, naive.weights, J, K)
    assert_losses(chunks, ids, naive.logits, whole(model.without_retrieval(), ids))


def test_an_hsa_is_traced_as_the_equations_say() -> None:
    model = hsa(vocab_size=V, num_memory_heads=2, num_retrieval_heads=2)
    ids, J, K = some_bytes(37), 2, 3
    naive, chunks = NaiveHSA(model, ids), traced(model, ids, (7, 1, 16))
    laid_out(chunks, ids)
    weights = [
        [
            [dict(zip(*pair, strict=True)) for pair in zip(chosen, weighed, strict=True)]
            for chosen, weighed in zip(*of, strict=True)
        ]
        for of in zip(naive.retrieval, naive.weights, strict=True)
    ]
    assert_means(chunks, weights, J, K)
    assert_losses(chunks, ids, naive.logits, whole(model.without_retrieval(), ids))


def assert_means(chunks: Any, weights: list[Any], J: int, K: int) -> None:
    """Each chunk's reads are means over its tokens and J heads of weights (group, token, head: by chunk)."""
    longer = 0
    for chunk in chunks:
        assert len(chunk.reads) == len(weights)
        for group, read in enumerate(chunk.reads):
            means: dict[int, float] = {}
            for t in range(chunk.first_token, chunk.first_token + len(chunk.ids)):
                for among in weights[group][t]:
                    for m, weight in among.items():
                        means[m] = means.get(m, 0) + weight / (J * len(chunk.ids))
            kept = sorted(sorted(means, key=lambda m: (-means[m], m))[:K])
            assert_reads(read, kept, [means[m] for m in kept])
            assert read.scores is None
            assert read.rest == pytest.approx(sum(means.values()) - sum(means[m] for m in kept), abs=EXACT)
            longer += len(means) > K
    assert longer


# --- the text ------------------------------------------------------------------------------------------------

TEXTS = ["aé😀\r\nz\0e\u0301x", "\u200d👩\u200d👩\u200d👧\u00a0\ud7ff", "\ufeff\u2028"]
Parts = list[tuple[list[int], str, list[int]]]


def in_parts(texts: Any, ids: list[int], lengths: list[int]) -> tuple[str, list[int]]:
    """The text of tokens that come in parts, and the characters of each."""
    text, widths, state, at = "", [], START, 0
    for length in [*lengths, len(ids)]:
        part = np.array(ids[at : at + length], np.int64)
        found = texts.settle(state, part, last=False)
        text, state = text + found.text, found.state
        widths += found.widths.tolist()
        assert sum(widths) == len(text)
        at += length
    found = texts.settle(state, START.ids, last=True)
    return text + found.text, widths + found.widths.tolist()


@given(
    st.lists(st.one_of(st.sampled_from(TEXTS).map(str.encode), st.binary(max_size=4)), max_size=8).map(
        b"".join
    ),
    st.lists(st.integers(0, 5), max_size=8),
)
@settings(max_examples=60)
def test_bytes_in_parts_are_the_text(data: bytes, lengths: list[int]) -> None:
    """Of any bytes, as the whole decodes; each character is that of the token that it begins in."""
    text, widths = in_parts(texts_of(BYTES), [byte + 3 for byte in data], lengths)
    assert text == data.decode(errors="replace")
    assert len(widths) == len(data)
    assert set(widths) <= {0, 1}
    try:
        exact = data.decode()
    except UnicodeDecodeError:
        # those that begin in the first n bytes are those of a text cut there, of which none goes on
        for n in range(len(data) + 1):
            cut = data[:n].decode(errors="replace")
            assert len(cut) - 1 <= sum(widths[:n]) <= len(cut)
    else:
        begins = [len(x.encode()) for x in exact]
        assert [n for n, width in enumerate(widths) if width] == np.cumsum([0, *begins])[:-1].tolist()


@given(
    st.lists(st.sampled_from([*TEXTS, "the river ", "<|endoftext|>", "häuser"]), max_size=6).map("".join),
    st.lists(st.integers(0, 5), max_size=8),
)
@settings(max_examples=20)
def test_byte_level_bpe_in_parts_is_the_text(bpe: Any, text: str, lengths: list[int]) -> None:
    ids = tokenize([text], bpe).tolist()
    found, widths = in_parts(texts_of(bpe), ids, lengths)
    assert (found, len(widths)) == (text, len(ids))


def test_a_word_piece_text_is_what_decoding_gives(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_bert(tmp_path))
    ids = tokenize(["the river of stones unread , x-ray"], tokenizer).tolist()
    texts = texts_of(tokenizer)
    assert isinstance(texts, DecodedTexts)
    for lengths in ([], [1, 3, 2], [1] * len(ids)):
        found, widths = in_parts(texts, ids, lengths)
        assert found == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert len(widths) == len(ids)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(save_bpe(tmp_path_factory.mktemp("bpe")))


def test_a_character_belongs_to_the_chunk_that_it_begins_in() -> None:
    model, text = drt(vocab_size=V), "ab😀cdé\r\n\0x😀"  # 😀 begins in the first chunk and ends in the second
    ids = torch.from_numpy(tokenize([text], BYTES)).long()
    for pieces in ((4096,), (1,), (4,)):
        chunks = traced(model, ids, pieces)
        assert [chunk.text for chunk in chunks] == ["ab😀", "cd", "é\r\n", "\0x😀", ""]
        assert chunks[0].starts.tolist() == [0, 1, 2, 3]
        assert chunks[1].starts.tolist() == [0, 0, 0, 1]


# --- texts and memories ----------------------------------------------------------------------------------------


@pytest.fixture
def model() -> Any:
    return drt(2, vocab_size=V).float()


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = []
    for number, words in enumerate((18, 7)):
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_bytes((prose(number, words) + "😀\r\nend").encode())
    return paths


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "_PIECE", 32)


def assert_same_choice(ours: Read, theirs: Read) -> None:
    """The same chunks; or others that score as high, where a text repeats itself and rounding decides."""
    if ours.chunks.tolist() != theirs.chunks.tolist():
        assert ours.scores is not None
        assert theirs.scores is not None
        np.testing.assert_allclose(np.sort(ours.scores), np.sort(theirs.scores), rtol=0, atol=EXACT)


@pytest.mark.usefixtures("short_pieces")
def test_files_are_one_text_and_each_is_named_before_its_first_chunk(model: Any, files: list[Path]) -> None:
    model, seen = model.double(), list[int]()
    header, found = trace_texts(subject_of(model), files, seen.append)
    entries = list(found)
    chunks = [entry for entry in entries if isinstance(entry, TracedChunk)]
    assert (header.num_groups, header.group_name, header.chunk_size, header.num_retrieved_chunks) == (
        2,
        "group",
        4,
        3,
    )
    assert header.settings == {"memory_dtype": "float64"}
    text = "".join(file.read_bytes().decode() for file in files)
    assert "".join(chunk.text for chunk in chunks) == text
    lengths = [file.stat().st_size for file in files]
    second = lengths[0] // S + 1  # sources and the chunk before
    assert lengths[0] % S  # the second file begins inside a chunk
    assert [e for e in entries if isinstance(e, TraceSource)] == [entries[0], entries[second]]
    assert entries[second] == TraceSource("1.txt", lengths[0], str(files[1].resolve()))
    assert seen[-1] == sum(lengths)
    assert seen == sorted(set(seen))
    assert len(seen) > 4
    same = traced(model, torch.from_numpy(tokenize([text], BYTES)).long())
    for chunk, other in zip(chunks, same, strict=True):
        for ours, theirs in zip(chunk.reads, other.reads, strict=True):
            assert_same_choice(ours, theirs)


def lines(found: tuple[TraceHeader, Any]) -> list[str]:
    header, entries = found
    return [encode(header), *map(encode, entries)]


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("dtype", [pytest.param(None, marks=pytest.mark.slow), torch.bfloat16])
def test_a_memory_is_traced_as_its_texts_are(
    model: Any, files: list[Path], tmp_path: Path, dtype: torch.dtype | None
) -> None:
    subject = subject_of(model)
    reader = Reader(subject, tmp_path / "memory", dtype)
    for file in files:
        reader.read(file)
    del reader
    found = lines(trace_memory(subject, tmp_path / "memory"))
    assert found == lines(trace_texts(subject, files, memory_dtype=dtype))
    assert ('"memory_dtype":"bfloat16"' in found[0]) == (dtype is not None)


def test_a_memory_without_its_text_is_refused(model: Any, files: list[Path], tmp_path: Path) -> None:
    subject, memory = subject_of(model), tmp_path / "memory"
    with pytest.raises(ValueError, match="expected a folder with a saved memory"):
        trace_memory(subject, memory)
    cache = model.new_cache()
    model.read(some_bytes(40)[None], cache)
    cache.save(tmp_path / "other")
    with pytest.raises(
        ValueError, match=r"^memory: expected one that trailmark read made, .*Name the text's files"
    ):
        trace_memory(subject, tmp_path / "other")
    Reader(subject, memory).read(files[0])
    content = files[0].read_bytes()
    for changed in (content.replace(b"e", b"i", 1), content[:-1]):
        files[0].write_bytes(changed)
        with pytest.raises(
            ValueError, match=r"^memory: expected '.*0.txt' as it was .* it has changed since"
        ):
            trace_memory(subject, memory)
    files[0].write_bytes(content + b"more")  # which the memory does not hold
    assert "more" not in "".join(lines(trace_memory(subject, memory)))
    files[0].unlink()
    with pytest.raises(ValueError, match=r"^memory: expected the file '.*0.txt', .* it is gone"):
        trace_memory(subject, memory)
    with pytest.raises(ValueError, match="expected a memory written by this model"):
        trace_memory(subject_of(drt(2, 1, vocab_size=V).float()), memory)


@pytest.mark.parametrize("make", [window_model, block_recurrent])
def test_a_model_that_retrieves_nothing_is_refused(make: Any, files: list[Path], tmp_path: Path) -> None:
    subject = subject_of(make(vocab_size=V))
    for call in (
        lambda: trace_texts(subject, files),
        lambda: trace_memory(subject, tmp_path),
        lambda: Reader(subject, tmp_path / "memory", trace=tmp_path / "trace"),
    ):
        with pytest.raises(
            ValueError,
            match=r"^model: expected one that retrieves chunks \(drt, hils, hsa, landmark, rpt.*\), .* nothing",
        ):
            call()


@pytest.mark.parametrize(
    ("make", "least", "words"),
    [
        (drt, 8, "two chunks of 4 tokens"),
        (
            lambda **more: drt(exclude_visible_chunks=True, sliding_window=15, **more),
            12,
            "3 chunks of 4 tokens",
        ),
        (landmark, 11, "a cell of 11 tokens"),
        (hils, 10, "a window of 7 tokens, on to a chunk's beginning"),
        (hsa, 4, "a chunk of 4 tokens"),
        (lambda **more: rpt(exclude_visible_chunks=False, **more), 8, "two chunks of 4 tokens"),
        (
            lambda **more: rpt(exclude_visible_chunks=True, sliding_window=19, **more),
            20,
            "5 chunks of 4 tokens",
        ),
    ],
)
def test_a_text_in_which_nothing_can_be_read_is_refused(
    make: Any, least: int, words: str, tmp_path: Path
) -> None:
    """Of the shortest that is not, the last token reads: a chunk of the past, before which there was none to read."""
    subject, path = subject_of(make(vocab_size=V)), tmp_path / "text"
    path.write_text("a" * least)
    with pytest.raises(ValueError, match=f"^text: expected more than {least} tokens, got {least} .*{words}"):
        trace_texts(subject, [path])
    Reader(subject, tmp_path / "memory").read(path)
    with pytest.raises(
        ValueError, match=f"^memory: expected more than {least} tokens, .* holds {least}: .*{words}"
    ):
        trace_memory(subject, tmp_path / "memory")
    path.write_text("a" * (least + 1))
    *before, last = (entry for entry in trace_texts(subject, [path])[1] if isinstance(entry, TracedChunk))
    assert all(len(read.chunks) for read in last.reads)
    assert not any(len(read.chunks) for chunk in before for read in chunk.reads)


def test_files_that_are_no_text_are_refused(model: Any, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"a\0b")
    for files, words in (
        ([], "^files: expected at least one"),
        ([tmp_path / "none"], "cannot read"),
        ([tmp_path / "binary"], "is binary"),
    ):
        with pytest.raises(ValueError, match=words):
            trace_texts(subject_of(model), files)


def test_losses_that_are_not_finite_are_refused(model: Any) -> None:
    own = Tracer(subject_of(model), model.new_cache())
    own.feed(np.full(5, 70, np.int32))
    before = own.moment
    with torch.no_grad():
        model.lm_head.weight.fill_(float("inf"))
    with pytest.raises(ValueError, match=r"^model: expected finite losses"):
        own.feed(np.full(5, 70, np.int32))
    # and nothing was read
    assert own.moment is before
    assert own.cache.get_seq_length() == own.cache_without.get_seq_length() == 5


def test_a_piece_that_is_stopped_changes_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = some_bytes(40)
    expected = [encode(chunk) for chunk in traced(model, ids, (20,))]
    own = Tracer(subject_of(model), model.new_cache())
    first, second = (part.numpy().astype(np.int32) for part in ids.split(20))
    own.feed(first)
    with monkeypatch.context() as patch:
        forward = type(model).forward

        def stopped(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = forward(self, *args, **kwargs)
            if self is own.without:  # after both
                raise KeyboardInterrupt
            return out

        patch.setattr(type(model), "forward", stopped)
        with pytest.raises(KeyboardInterrupt):
            own.feed(second)
    own.feed(second)
    found = [*own.take(), *own.rest()]
    assert list(map(encode, found)) == expected


@pytest.mark.slow
def test_pieces_are_those_of_a_reading(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Of any text, from any place: as ``model.read`` takes it, piece for piece."""
    from trailmark.models import causal_lm

    monkeypatch.setattr(causal_lm, "_READ_TOKENS", 10)
    monkeypatch.setattr(tracer, "_PIECE", 10)
    for other in (model, landmark(vocab_size=V).float()):
        taken: list[int] = []
        run = type(other).run
        monkeypatch.setattr(
            type(other),
            "run",
            lambda self, ids, *rest, run=run, taken=taken: (
                taken.append(ids.shape[1]) or run(self, ids, *rest)
            ),
        )
        cache, own = other.new_cache(), Tracer(subject_of(other), other.new_cache())
        expected = []
        for length in (3, 25, 21):
            ids = some_bytes(length)
            other.read(ids[None], cache)
            parts = list(own.pieces(ids.numpy().astype(np.int32)))
            assert np.concatenate(parts).tolist() == ids.tolist()
            expected += [len(part) for part in parts]
            for part in parts:
                own.feed(part)
        # one call of read's for each piece, and two forwards of the tracer's
        assert sorted(taken) == sorted(expected * 3)
