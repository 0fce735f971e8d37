"""Perplexity: what is scored, divided by what is counted, against one forward after another."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import prose, save_bpe
from tests.evaluation.foreign import llama
from tests.models.tiny import EXACT, block_recurrent, drt, landmark, tokens, window_model
from trailmark.data.corpus import load_tokenizer, tokenize
from trailmark.data.prepare import prepare
from trailmark.data.recipes import parse_source
from trailmark.data.shards import Corpus
from trailmark.evaluation import losses
from trailmark.evaluation.documents import Documents, token_bytes
from trailmark.evaluation.perplexity import run as perplexity
from trailmark.evaluation.perplexity.run import PerplexitySettings, evaluate_perplexity, run
from trailmark.evaluation.record import Record
from trailmark.evaluation.subject import Subject
from trailmark.memory.tiers import records
from trailmark.models import TrailmarkForCausalLM

TEXT = tokens(200)[0].numpy().astype(np.int32)
BYTES = load_tokenizer()
PROSE = [prose(1, 12), prose(2, 5), prose(3, 8)]
DOCUMENTS = Documents.of(PROSE, BYTES)
IDS = tokenize(PROSE, BYTES)
BORDERS = np.cumsum([0, *(len(text.encode()) for text in PROSE)])


MAKERS: dict[str, Callable[[], Any]] = {
    "drt": lambda: drt(2, vocab_size=259),
    "window": lambda: window_model(vocab_size=259),
    # as many chunks as a text has: cell by cell is the whole text at once
    "landmark": lambda: landmark(vocab_size=259, num_retrieved_chunks=40),
    "block recurrent": lambda: block_recurrent(vocab_size=259),
    "llama": lambda: llama(512),
}
EACH = pytest.mark.parametrize("name", MAKERS)


@torch.no_grad()
def nats(model: Any, ids: Any) -> np.ndarray:
    """Of each token but the first, from one forward without a cache."""
    row = torch.from_numpy(ids).long()
    found = model(row[None]).logits[0].double().log_softmax(-1)
    return -found[:-1].gather(1, row[1:, None])[:, 0].numpy()


def measure(folder: Path, model: Any, text: Documents = DOCUMENTS, **asked: Any) -> list[dict[str, Any]]:
    subject = Subject(folder, model, BYTES, {})
    return run(subject, PerplexitySettings(**asked), text, Record(folder, "perplexity", subject.identity()))


def one(folder: Path, model: Any, length: int | None = None, **asked: Any) -> dict[str, Any]:
    (found,) = measure(folder, model, lengths=None if length is None else (length,), **asked)
    return found


# One reading


def loss_of(model: TrailmarkForCausalLM, first: int, length: int) -> float:
    return float(nats(model, TEXT[first : first + length]).mean())


def reads_all() -> TrailmarkForCausalLM:
    return landmark(num_retrieved_chunks=12)


@pytest.mark.parametrize("make", [lambda: drt(2), window_model, reads_all], ids=["drt", "window", "landmark"])
@pytest.mark.parametrize(("length", "piece"), [(2, 1), (46, 7), (46, 45)])
def test_pieces_change_nothing(
    make: Callable[[], TrailmarkForCausalLM], piece: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_PIECE", piece)
    model = make()
    found = evaluate_perplexity(model, TEXT, length, max_tokens=length)
    assert (found.windows, found.tokens) == (1, length - 1)
    assert found.loss == pytest.approx(loss_of(model, 0, length), abs=EXACT)
    assert found.perplexity == math.exp(found.loss)


@pytest.mark.parametrize(("max_tokens", "windows"), [(1, 1), (91, 1), (92, 2), (10_000, 4)])
def test_windows_are_disjoint_and_read_cold(max_tokens: int, windows: int) -> None:
    model = drt()
    found = evaluate_perplexity(model, TEXT, 46, max_tokens)
    assert (found.windows, found.tokens) == (windows, windows * 45)
    each = [loss_of(model, 46 * number, 46) for number in range(windows)]
    assert found.loss == pytest.approx(sum(each) / windows, abs=EXACT)


def test_the_share_of_retrievals_that_the_gate_skips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = landmark(gate_probability=0.5)
    shares, found_losses = [], []
    for cutoff in (0.0, 0.2, 1.0):
        model.config.gate_cutoff = cutoff
        found = evaluate_perplexity(model, TEXT, 46, 92)
        with monkeypatch.context() as patch:
            patch.setattr(losses, "_PIECE", 16)
            text = Documents(Corpus.of_tokens(TEXT), BYTES)
            (result,) = measure(tmp_path / f"{cutoff}", model, text, lengths=(46,), max_tokens=92)
        assert result["loss"] == pytest.approx(found.loss, abs=EXACT)
        if cutoff == 0:
            assert "skipped_share" not in result
        else:
            asked, skipped = losses.token_losses(model, TEXT[:92].reshape(2, 46)).gate
            shares.append(result["skipped_share"])
            assert shares[-1] == skipped / asked
            # in 2 windows, 3 layers and 4 heads: every position of the four cells after the first
            assert asked == 2 * 3 * 4 * (46 - 11 + (46 // 4 - 11 // 4))
        found_losses.append(found.loss)
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] == 1
    assert len(set(found_losses)) > 1


def test_a_model_that_knows_nothing_has_a_perplexity_of_its_vocabulary() -> None:
    model = window_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert evaluate_perplexity(model, TEXT, 46).perplexity == pytest.approx(50)


@pytest.mark.parametrize("length", [0, 1, 201])
def test_windows_that_do_not_fit_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"length: expected .*got {length}"):
        evaluate_perplexity(drt(), TEXT, length)


# Cells


@EACH
def test_windows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_PIECE", 20)
    model = MAKERS[name]()
    found = one(tmp_path, model, 40)
    windows = len(IDS) // 40
    each = np.stack([nats(model, IDS[n * 40 : n * 40 + 40]) for n in range(windows)])
    assert found["loss"] == pytest.approx(each.mean(), abs=EXACT)
    assert (found["length"], found["windows"], found["tokens"]) == (40, windows, windows * 39)
    assert found["perplexity"] == math.exp(found["loss"])
    # a byte is a token here; words are counted where they begin, the windows' first bytes left out
    assert found["bytes"] == windows * 39
    everything = b"".join(text.encode() for text in PROSE)
    begun = [
        n for n in range(windows * 40)
        if not everything[n : n + 1].isspace() and (n in BORDERS or everything[n - 1 : n].isspace())
    ]  # fmt: skip
    words = sum(n % 40 != 0 for n in begun)
    assert found["words"] == words < len(begun)
    assert found["word_perplexity"] == pytest.approx(math.exp(each.sum() / words))
    assert found["bits_per_byte"] == pytest.approx(each.mean() / math.log(2))
    assert found["loss_low"] < found["loss"] < found["loss_high"]
    assert found["perplexity_high"] == math.exp(found["loss_high"])
    assert (found["drawn"], found["drawn_of"], found["whole_text"]) == (windows, "windows", True)


@EACH
def test_a_carried_memory_is_one_reading(name: str, tmp_path: Path) -> None:
    model = MAKERS[name]()
    if name == "llama":
        with pytest.raises(ValueError, match="carry, memory_tier: expected one of trailmark's models"):
            one(tmp_path, model, 40, carry=True)
        return
    found = one(tmp_path, model, 40, carry=True, memory_tier="host")
    windows = len(IDS) // 40
    whole = nats(model, IDS[: windows * 40])
    assert found["tokens"] == windows * 40 - 1
    assert found["loss"] == pytest.approx(whole.mean(), abs=EXACT)
    assert found["drawn"] == windows
    # the same windows read cold know less of what came before
    assert found["loss"] != one(tmp_path, model, 40)["loss"]


@pytest.mark.parametrize(("length", "stride"), [(40, 40), (40, 17), (40, None)])
def test_sliding(length: int, stride: int | None, tmp_path: Path) -> None:
    model = drt(2, vocab_size=259)
    found = one(tmp_path, model, length, windows="sliding", stride=stride)
    step = stride or length // 2
    starts = range(0, len(IDS) - length + 1, step)
    scored = min(step, length - 1)  # nothing predicts a window's first
    each = [nats(model, IDS[start : start + length])[-scored:] for start in starts]
    assert found["tokens"] == len(starts) * scored
    assert found["windows"] == len(starts)
    assert found["loss"] == pytest.approx(np.mean(each), abs=EXACT)
    if step == length:
        same = one(tmp_path, model, length)
        for key in ("loss", "tokens", "words", "bytes", "loss_low", "loss_high", "by_position"):
            assert found[key] == same[key]
    else:  # each scored token has at least length - stride before it
        assert found["by_position"][0]["first"] <= length - step
        assert sum(b["tokens"] for b in found["by_position"] if b["last"] < length - step) == 0
    assert found["drawn"] == len({start // length for start in starts})


@EACH
def test_whole_documents(name: str, tmp_path: Path) -> None:
    model = MAKERS[name]()
    found = one(tmp_path, model, windows="documents")
    each = [nats(model, IDS[a:b]) for a, b in pairwise(BORDERS)]
    total = sum(part.sum() for part in each)
    assert found["loss"] == pytest.approx(total / (len(IDS) - 3), abs=EXACT)
    assert (found["length"], found["documents"], found["drawn"]) == (None, 3, 3)
    words = sum(len(text.split()) for text in PROSE)
    assert (found["words"], found["bytes"]) == (words, len(IDS))
    assert found["word_perplexity"] == pytest.approx(math.exp(total / words))
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / len(IDS))
    if name != "llama":
        assert one(tmp_path, model, windows="documents", carry=True)["loss"] == found["loss"]


def test_windows_do_not_cross_documents(tmp_path: Path) -> None:
    model = drt(2, vocab_size=259)
    found = one(tmp_path, model, 40, windows="documents")
    each = [
        nats(model, IDS[start : min(b, start + 40)])
        for a, b in pairwise(BORDERS)
        for start in range(a, b, 40)
        if min(b, start + 40) - start > 1
    ]
    assert found["windows"] == len(each)
    assert found["loss"] == pytest.approx(np.concatenate(each).mean(), abs=EXACT)
    assert (found["documents"], found["drawn"]) == (3, 3)


def test_as_many_whole_documents_as_are_asked_for(tmp_path: Path) -> None:
    model = window_model(vocab_size=259)
    for limit, documents in ((2, 1), (BORDERS[2] - 1, 1), (BORDERS[2], 2), (BORDERS[3], 3), (None, 3)):
        limit = None if limit is None else int(limit)
        found = one(tmp_path, model, windows="documents", max_tokens=limit)
        assert found["documents"] == documents
        assert found["bytes"] == BORDERS[documents]
        assert found["whole_text"] == (documents == 3)


def test_by_position(tmp_path: Path) -> None:
    model, text = drt(2, vocab_size=259), Documents.of([prose(4, 70)], BYTES)
    ids = text.read(0, text.tokens)
    (found,) = measure(tmp_path, model, text, lengths=(150,))
    ends = [(b["first"], b["last"]) for b in found["by_position"]]
    assert ends == [(0, 63), (64, 127), (128, 149)]
    windows = len(ids) // 150
    each = np.stack([nats(model, ids[n * 150 : n * 150 + 150]) for n in range(windows)])
    for (first, last), part in zip(ends, found["by_position"], strict=True):
        own = each[:, max(0, first - 1) : last]
        assert part["tokens"] == own.size
        assert part["loss"] == pytest.approx(own.mean(), abs=EXACT)
        assert part["loss_low"] < part["loss"] < part["loss_high"]
    total = sum(part["tokens"] * part["loss"] for part in found["by_position"])
    assert total == pytest.approx(found["loss"] * found["tokens"])
    assert "by_position" not in one(tmp_path, model, 40, by_position=False)


def test_one_window_has_no_interval(tmp_path: Path) -> None:
    found = one(tmp_path, window_model(vocab_size=259), 40, max_tokens=79)
    assert found["windows"] == found["drawn"] == 1
    for key in ("loss_low", "loss_high", "perplexity_low", "perplexity_high"):
        assert found[key] is None
    assert found["by_position"][0]["loss_low"] is None


def test_a_loss_is_not_below_0() -> None:
    low, high = perplexity._bounds(np.array([1.0, 90.0]), np.array([10, 10]), 0)
    assert low == 0 < 4.55 < high


def test_what_was_found_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, said = window_model(vocab_size=259), []
    subject = Subject(tmp_path, model, BYTES, {})
    record = Record(tmp_path, "perplexity", subject.identity())
    first = run(subject, PerplexitySettings(lengths=(40, 80)), DOCUMENTS, record, said.append)
    assert [result["length"] for result in first] == [40, 80]
    assert said[-1].startswith("perplexity, 80 tokens: ")
    monkeypatch.setattr(type(model), "run", TrailmarkForCausalLM.run)  # of no architecture
    assert measure(tmp_path, model, lengths=(80, 40)) == first[::-1]
    with pytest.raises(NotImplementedError):
        measure(tmp_path, model, lengths=(40,), seed=1)
    with pytest.raises(NotImplementedError):
        measure(tmp_path, model, Documents.of(PROSE[1:], BYTES), lengths=(40,))


def test_lengths_by_the_training(tmp_path: Path) -> None:
    subject = Subject(tmp_path, window_model(vocab_size=259), BYTES, {"training": {"context_length": 20}})
    record = Record(tmp_path, "perplexity", subject.identity())
    found = run(subject, PerplexitySettings(), DOCUMENTS, record)
    assert [result["length"] for result in found] == [20, 80]  # 320 are more than the text has


def beginning_bpe(folder: Path) -> Any:
    """A tokenizer that puts <s> before a text."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(save_bpe(folder, 300))
    tokenizer.add_special_tokens({"bos_token": AddedToken("<s>", special=True)})
    start = ("<s>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[start])
    return tokenizer


def test_what_a_tokenizer_puts_before_a_text_is_read_and_not_scored(tmp_path: Path) -> None:
    tokenizer = beginning_bpe(tmp_path)
    model = llama(41)
    model.resize_token_embeddings(310, mean_resizing=False)
    text = Documents.of([prose(1, 120)], tokenizer)
    subject = Subject(tmp_path, model, tokenizer, {})

    def asked(length: int) -> Any:
        settings = PerplexitySettings(lengths=(length,), max_tokens=80)
        return run(subject, settings, text, Record(tmp_path, "perplexity", subject.identity()))[0]

    found, bos = asked(40), tokenizer.bos_token_id
    windows = [np.concatenate([[bos], text.read(n, n + 40)]) for n in (0, 40)]
    each = np.stack([nats(model, window)[1:] for window in windows])
    assert (found["tokens"], found["settings"]["begin"]) == (78, [bos])
    assert found["loss"] == pytest.approx(each.mean(), abs=EXACT)
    with pytest.raises(
        ValueError, match=r"at most the 40 tokens .* takes after 1 at the beginning, got .* 41"
    ):
        asked(41)


def test_lengths_that_a_model_of_transformers_takes(tmp_path: Path) -> None:
    assert [result["length"] for result in measure(tmp_path, llama(32))] == [32]
    assert [result["length"] for result in measure(tmp_path / "longer", llama(512))] == [len(IDS)]


# Protocols


def test_a_protocol_sets_fields(tmp_path: Path) -> None:
    model = landmark(
        vocab_size=259, chunk_size=50, local_length=250, max_position_embeddings=512, num_retrieved_chunks=4
    ).float()
    text = Documents.of([prose(4, 260)], BYTES)
    (found,) = measure(tmp_path, model, text, protocol="landmark-table-1", lengths=(512,))
    assert found["settings"]["set"]["num_retrieved_chunks"] == 2
    assert found["published"][0]["pg19"] == 16.23
    assert (found["windows"], found["whole_text"]) == (text.tokens // 512, True)
    model.config.num_retrieved_chunks = 2
    model.config.max_memory_chunks = 10
    direct = evaluate_perplexity(model, text.read(0, text.tokens), 512, text.tokens)
    assert found["loss"] == pytest.approx(direct.loss)
    with pytest.raises(ValueError, match="expected a model with these fields, such as Landmark Attention"):
        measure(tmp_path, window_model(vocab_size=259), protocol="landmark-table-1")
    short = landmark(vocab_size=259, max_position_embeddings=64)
    with pytest.raises(ValueError, match="max_position_embeddings: expected at least"):
        measure(tmp_path, short, text, protocol="landmark-table-1", lengths=(512,))


@pytest.mark.slow
def test_gca_table_1_reads_the_whole_split(tmp_path: Path) -> None:
    text = Documents.of([prose(4, 6000)], BYTES)
    assert text.tokens > 2 * 16384
    found = measure(
        tmp_path, window_model(vocab_size=259).float(), text, protocol="gca-table-1", lengths=(20000,)
    )
    assert [(r["length"], r["windows"]) for r in found] == [
        (n, text.tokens // n) for n in (2048, 16384, 20000)
    ]
    assert {row["length"] for row in found[0]["published"]} == {2048}
    assert "not given" in found[2]["note"]


# What is counted


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(save_bpe(tmp_path_factory.mktemp("bpe"), 400))


# whitespace of several bytes, which a window may cut, and words that begin and end with their documents
SPACED = ["one\u3000two \u00a0", "drei\u2003", "\u0085", "四\u3000\u3000", "\u00e9\u00a0x"]


@settings(max_examples=60)
@given(
    cuts=st.lists(st.integers(0, 300), max_size=9),
    texts=st.lists(
        st.lists(st.sampled_from(SPACED), min_size=1, max_size=4).map("".join), min_size=1, max_size=4
    ),
    byte_level=st.booleans(),
)
def test_counts_of_parts_add_up(cuts: list[int], texts: list[str], byte_level: bool, bpe: Any) -> None:
    documents = Documents.of(texts, bpe if byte_level else BYTES)
    inner = sorted(min(cut, documents.tokens) for cut in cuts)
    places = [0, *inner, documents.tokens]
    counted = [documents.counted(a, b) for a, b in pairwise(places)]
    assert sum(words for words, _ in counted) == sum(len(text.split()) for text in texts)
    assert sum(size for _, size in counted) == sum(len(text.encode()) for text in texts)


def test_counts_do_not_depend_on_what_is_put_together_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = DOCUMENTS.counted(3, 150)
    monkeypatch.setattr("trailmark.evaluation.documents._SLAB", 1)
    assert DOCUMENTS.counted(3, 150) == whole


def test_bytes_of_a_byte_level_bpe(bpe: Any) -> None:
    table = token_bytes(bpe)
    assert table is not None
    text = "häuser – 河\tmoved;\n\n the river 💧"
    ids = tokenize([text], bpe)
    assert b"".join(table[n] for n in ids) == text.encode()
    assert table[bpe.eos_token_id] == b""
    assert sorted(x for x in table if len(x) == 1) == [bytes([n]) for n in range(256)]


def test_without_bytes_windows_have_no_words(tmp_path: Path, bpe: Any) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"the": 0, "river": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    text = Documents.of(["the river " * 30, "the sea"], PreTrainedTokenizerFast(tokenizer_object=words))
    assert not text.countable
    model = window_model(vocab_size=259)
    (found,) = measure(tmp_path, model, text, lengths=(20,))
    for key in ("words", "bytes", "word_perplexity", "bits_per_byte"):
        assert found[key] is None
    assert found["loss_low"] is not None
    (found,) = measure(tmp_path, model, text, windows="documents")  # their texts are known
    assert (found["words"], found["bytes"]) == (62, 307)


def test_files_and_prepared_folders(tmp_path: Path, bpe: Any) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for n, text in enumerate(PROSE):
        (folder / f"{n}.txt").write_text(text, encoding="utf-8")
    prepared = tmp_path / "prepared"
    bpe.save_pretrained(tmp_path / "bpe")
    prepare(parse_source([str(folder)]), prepared, str(tmp_path / "bpe"), processes=1)
    files, shards = (Documents.open([path], bpe) for path in (folder, prepared))
    assert len(files) == len(shards) == 3
    assert shards.tokens == files.tokens + 3  # an end-of-text token each, which stands for nothing
    for n in (1, 2, 3):
        known = [texts.counted_in_documents(n) for texts in (files, shards)]
        words, size = sum(len(t.split()) for t in PROSE[:n]), sum(len(t.encode()) for t in PROSE[:n])
        assert known == [(words, size)] * 2
    assert files.fingerprint != shards.fingerprint == Documents.open([prepared], bpe).fingerprint
    haystacks = Documents.open(None, BYTES)
    assert len(haystacks) > 1
    with pytest.raises(ValueError, match="data: expected a vocabulary of at most 100"):
        Documents.open([prepared], bpe, 100)
    (folder / "pairs.jsonl").write_text("{}")
    with pytest.raises(ValueError, match="holds rows"):
        Documents.open([folder / "pairs.jsonl"], bpe)


# Bad input

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no lengths": ({"lengths": ()}, "lengths: expected at least one, or None"),
    "short": ({"lengths": (40, 1)}, "lengths: expected 2 or more, got 1"),
    "windows": (
        {"windows": "moving"},
        "windows: expected 'windows' or 'sliding' or 'documents', got 'moving'",
    ),
    "stride": ({"stride": 3}, "stride: expected none with 'windows', got 3"),
    "long stride": (
        {"windows": "sliding", "lengths": (8, 9), "stride": 9},
        "stride: expected 1 to the shortest length, 8, got 9",
    ),
    "sliding memory": ({"windows": "sliding", "carry": True}, "carry: expected False with 'sliding'"),
    "lengths of documents": (
        {"windows": "documents", "carry": True, "lengths": (8,)},
        "lengths: expected none with 'documents' and carry",
    ),
    "max_tokens": ({"max_tokens": 1}, "max_tokens: expected 2 or more, got 1"),
    "protocol": ({"protocol": "gca-table-9"}, "protocol: expected one of"),
    "protocol and windows": (
        {"protocol": "gca-table-1", "windows": "documents"},
        "protocol: 'gca-table-1' reads disjoint windows cold",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_do_not_go_together(case: str) -> None:
    asked, said = WRONG[case]
    with pytest.raises(ValueError, match=said.replace("(", r"\(").replace(")", r"\)")):
        PerplexitySettings(**asked)


def test_what_does_not_fit_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    model = window_model(vocab_size=259)
    with pytest.raises(
        ValueError, match=f"length: expected at most the text's {len(IDS)} tokens, got 100000"
    ):
        measure(tmp_path, model, lengths=(40, 100_000))
    with pytest.raises(
        ValueError, match=r"lengths: expected at most the 32 tokens that .* got windows of 40"
    ):
        measure(tmp_path, llama(32), lengths=(20, 40))
    with pytest.raises(ValueError, match=r"lengths: expected at most the 32 tokens .* got windows of"):
        measure(tmp_path, llama(32), windows="documents")
    # a stride is compared with the lengths by default too: nothing between two windows is left out
    with pytest.raises(ValueError, match=r"stride: expected 1 to the shortest length, \d+, got 9,999"):
        measure(tmp_path, model, windows="sliding", stride=9999)
    with pytest.raises(ValueError, match="text: expected a document of at least 2 tokens among 2"):
        measure(tmp_path, model, Documents.of(["a", "b"], BYTES), windows="documents")
    assert not (tmp_path / "perplexity.json").exists()


def test_a_memory_that_finds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = drt(2, vocab_size=259)
    known = measure(tmp_path, model, lengths=(40,))
    monkeypatch.setattr(records.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(ValueError, match="length: expected a text whose memory fits, got 80 tokens"):
        measure(tmp_path, model, lengths=(40, 80))
    assert measure(tmp_path, model, lengths=(40,)) == known


def test_tokens_that_the_model_does_not_know(tmp_path: Path) -> None:
    text = Documents(Corpus.of_tokens(np.full(50, 300, np.int32)), BYTES)
    with pytest.raises(ValueError, match="text: expected tokens below the model's 259, got 300"):
        measure(tmp_path, llama(512), text, lengths=(10,))
    with pytest.raises(ValueError, match="input_ids: expected tokens from 0 to 258"):
        measure(tmp_path, window_model(vocab_size=259), text, lengths=(10,))


def test_broken_weights(tmp_path: Path) -> None:
    model = window_model(vocab_size=259)
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match="model: expected finite losses, got nan for 39 of 39 tokens"):
        measure(tmp_path, model, lengths=(40,), max_tokens=40)
