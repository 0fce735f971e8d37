"""Documents and summaries: what is kept of them, and how files of them are read."""

from __future__ import annotations

import codecs
import json
import logging
import os
import random
import re
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trailmark.data.corpus import load_tokenizer, tokenize
from trailmark.data.pairs import prepare_pairs
from trailmark.data.sources import LocalFiles
from trailmark.data.summarization import Pair, Pairs, SummarizationTexts
from trailmark.models.grid import lay_out

BYTES = load_tokenizer()
EOS = BYTES.eos_token_id
CUE = "|Summary:"


def words(count: int, number: int) -> str:
    return " ".join(f"{number}.{n}" for n in range(count))


STORIES = [Pair(words(3 * n + 1, n), f"Été {n}: " + words(n % 5, n)) for n in range(30)]


def write_lines(path: Path, pairs: Sequence[Pair], names: tuple[str, str] = ("document", "summary")) -> Path:
    lines = [json.dumps({"id": n, **dict(zip(names, pair, strict=True))}) for n, pair in enumerate(pairs)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs([write_lines(tmp_path_factory.mktemp("stories") / "pairs.jsonl", STORIES)])


def ids_of(text: str) -> list[int]:
    return tokenize([text], BYTES).tolist()


# Rows


@settings(max_examples=100)
@given(
    length=st.integers(60, 700),
    sample=st.integers(0, 2**40),
    seed=st.integers(0, 2**32),
    answer_weight=st.sampled_from([0.0, 1.0, 7.0]),
)
def test_every_token_is_where_it_belongs(
    stories: Pairs, length: int, sample: int, seed: int, answer_weight: float
) -> None:
    """Nothing of cue and summary is lost at any length: only the document's end gives way."""
    texts = SummarizationTexts(BYTES, stories, length, seed, answer_weight=answer_weight)
    batch = texts.batch(sample, 1)
    pair = STORIES[texts.number_of(sample)]
    document, summary = ids_of(pair.document), ids_of(pair.summary)
    room = length - len(CUE) - len(summary) - 1
    head = document[: max(room, 0)]
    assert head == document or len(head) == room > 0
    text = [*head, *ids_of(CUE), *summary, EOS]
    absent = length - len(text)
    assert batch["input_ids"].tolist() == [text + [BYTES.pad_token_id] * absent]
    assert batch["attention_mask"].tolist() == [[True] * len(text) + [False] * absent]
    answer = len(summary) + 1
    answers = [False] * (len(text) - answer) + [True] * answer + [False] * absent
    assert batch["answers"].tolist() == [answers]
    weights = [answer_weight if answers[n] else float(0 < n < len(text)) for n in range(length)]
    labels = [token if weight else -100 for token, weight in zip(text + [0] * absent, weights, strict=True)]
    assert batch["labels"].tolist() == [labels]
    assert batch["loss_weights"].tolist() == [weights]

    # one landmark more, as a model lays it out: between "|Summary" and ":"
    mark = len(head) + len("|Summary") - 1
    assert batch["close_chunk"][0].nonzero().tolist() == [[mark]]
    grid = lay_out(length, 8, counts=np.array([len(text)]), close_chunk=batch["close_chunk"].numpy())
    positions = grid.is_landmark[0].tolist()
    at = [place for place, landmark in enumerate(positions) if not landmark][mark]
    assert positions[at : at + 3] == [False, True, False]


def test_kinds_of_what_a_batch_holds(stories: Pairs) -> None:
    batch = SummarizationTexts(BYTES, stories, 100).batch(np.int32(3), 2)
    assert {key: (x.dtype, tuple(x.shape)) for key, x in batch.items()} == {
        "input_ids": (torch.int64, (2, 100)),
        "attention_mask": (torch.bool, (2, 100)),
        "labels": (torch.int64, (2, 100)),
        "loss_weights": (torch.float32, (2, 100)),
        "close_chunk": (torch.bool, (2, 100)),
        "answers": (torch.bool, (2, 100)),
    }


@settings(max_examples=25)
@given(first=st.integers(0, 2**40), counts=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_a_text_does_not_depend_on_its_batch(stories: Pairs, first: int, counts: list[int]) -> None:
    texts = SummarizationTexts(BYTES, stories, 120, 7)
    whole = texts.batch(first, sum(counts))
    parts, done = [], first
    for count in counts:
        parts.append(SummarizationTexts(BYTES, stories, 120, 7).batch(done, count))
        done += count
    for key, x in whole.items():
        assert torch.equal(torch.cat([part[key] for part in parts]), x), key


def test_an_epoch_has_every_pair_once_in_an_order_of_its_own(stories: Pairs) -> None:
    orders = set()
    for seed in range(3):
        texts = SummarizationTexts(BYTES, stories, 300, seed)
        for epoch in (0, 1, 10**12):
            order = [texts.number_of(epoch * len(texts) + n) for n in range(len(texts))]
            assert sorted(order) == list(range(len(STORIES)))
            orders.add(tuple(order))
    assert len(orders) == 9


def test_pairs_that_do_not_fit_are_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Exactly those that leave no room for one token of the document."""
    pairs = [Pair("document", "x" * n) for n in (5, 39, 40, 41, 90)]
    path = write_lines(tmp_path / "a.jsonl", pairs)
    with caplog.at_level(logging.WARNING):
        texts = SummarizationTexts(BYTES, [path], 40 + len(CUE) + 1)
    assert caplog.messages == [
        f"Left out 3 of 5 pairs, whose summaries do not fit into 50 tokens: {path}, line 3, {path}, line 4, "
        f"{path}, line 5"
    ]
    assert {texts.number_of(n) for n in range(2)} == {0, 1}
    row = texts.batch([texts.number_of(n) for n in range(2)].index(1), 1)["input_ids"][0]
    assert row.tolist() == [*ids_of("d" + CUE + "x" * 39), EOS]
    with pytest.raises(
        ValueError, match=r"^context_length: expected rows that hold a summary, got 15 tokens, too short"
    ):
        SummarizationTexts(BYTES, [path], 15)


def byte_level(**special: str) -> Any:
    """A tokenizer of byte pairs, of which "|Summary:" makes two tokens: the colon is apart only where it is asked."""
    table = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges, made = [], "S"
    for letter in "ummary:":
        merges.append((made, letter))
        made += letter
        table[made] = len(table)
    model = Tokenizer(models.BPE(table, merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return PreTrainedTokenizerFast(tokenizer_object=model, **special)


def test_a_tokenizer_that_joins_the_cue(stories: Pairs) -> None:
    """The landmark still stands before ":"; and where nothing pads, the end of the text does."""
    tokenizer = byte_level(eos_token="<end>")
    assert tokenizer.pad_token_id is None
    assert tokenizer.convert_ids_to_tokens(tokenize([CUE], tokenizer)) == ["|", "Summary:"]
    batch = SummarizationTexts(tokenizer, stories, 700).batch(0, 1)
    tokens = tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
    mark = int(batch["close_chunk"][0].nonzero())
    assert tokens[mark - 1 : mark + 2] == ["|", "Summary", ":"]
    absent = ~batch["attention_mask"][0]
    assert absent.any()
    assert set(batch["input_ids"][0, absent].tolist()) == {tokenizer.eos_token_id}
    assert set(batch["labels"][0, absent].tolist()) == {-100}


def test_a_tokenizer_that_cannot_end_a_text_is_refused(stories: Pairs) -> None:
    with pytest.raises(ValueError, match=r"^tokenizer: expected one with an end-of-text token"):
        SummarizationTexts(byte_level(), stories, 700)


@pytest.mark.skipif("TRAILMARK_DATA" not in os.environ, reason="needs GPT-2's tokenizer")
def test_gpt2(stories: Pairs) -> None:
    tokenizer = load_tokenizer(str(Path(os.environ["TRAILMARK_DATA"]) / "tokenizer" / "gpt2"))
    texts = SummarizationTexts(tokenizer, stories, 80)
    for sample in range(30):
        batch = texts.batch(sample, 1)
        text = tokenizer.decode(batch["input_ids"][0][batch["attention_mask"][0]])
        pair = STORIES[texts.number_of(sample)]
        document, rest = text.split("|", 1)
        assert pair.document.startswith(document)
        assert rest == f"Summary:{pair.summary}<|endoftext|>"


# Files


def read_all(pairs: Pairs) -> list[Pair]:
    return [pairs[n] for n in range(len(pairs))]


@settings(max_examples=40)
@given(
    pairs=st.lists(
        st.tuples(*2 * [st.text(min_size=1, max_size=20).filter(str.strip)]).map(lambda x: Pair(*x)),
        min_size=1,
    ),
    ends=st.sampled_from(["\n", "\r\n", "\n\n", "\n \t\n"]),
    ascii=st.booleans(),
    last=st.booleans(),
)
def test_lines_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[Pair], ends: str, ascii: bool, last: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "pairs.jsonl"
    lines = [json.dumps(pair._asdict(), ensure_ascii=ascii) for pair in pairs]
    path.write_bytes((ends.join(lines) + (ends if last else "")).encode())
    found = Pairs([path])
    assert read_all(found) == pairs
    assert found.summary_bytes.tolist() == [len(pair.summary.encode()) for pair in pairs]
    wanted = [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]
    for n in range(len(pairs)):
        line = int(found.where(n).rsplit(" ", 1)[1])
        assert json.loads(path.read_bytes().split(b"\n")[line - 1]) == wanted[n]


def test_several_files_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_lines(folder / "b.jsonl", STORIES[5:8])
    write_lines(folder / "a.jsonl", STORIES[3:5], ("article", "highlights"))
    (folder / "README.md").write_text("no pairs")
    one = write_lines(tmp_path / "one.jsonl", STORIES[:3])
    pairs = Pairs([one, str(folder)])
    assert read_all(pairs) == STORIES[:8]
    assert pairs.where(3) == f"{folder / 'a.jsonl'}, line 1"
    assert Pairs(one).fingerprint == Pairs([one]).fingerprint != pairs.fingerprint
    assert read_all(Pairs([folder / "a.jsonl", one, one, folder])) == [
        *STORIES[3:5],
        *STORIES[:3],
        *STORIES[5:8],
    ]
    Path(one).write_bytes(codecs.BOM_UTF8 + Path(one).read_bytes())
    assert read_all(Pairs([one])) == STORIES[:3]
    text = SummarizationTexts(BYTES, pairs, 700)
    other = load_tokenizer()
    other.eos_token = "<unk>"
    assert text.fingerprint == SummarizationTexts(load_tokenizer(), pairs, 300).fingerprint
    assert text.fingerprint != SummarizationTexts(other, pairs, 700).fingerprint
    with pytest.raises(IndexError, match="expected 0 to 7, got 8"):
        pairs[8]
    before = pairs.fingerprint
    write_lines(folder / "b.jsonl", STORIES[6:9])
    assert Pairs([one, folder]).fingerprint != before


def test_prepared_pairs_that_were_changed(tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", STORIES[:3])
    path = prepare_pairs(LocalFiles([rows], "document", "summary"), tmp_path / "out")
    assert read_all(Pairs(tmp_path / "out")) == STORIES[:3]
    content = path.read_text(encoding="utf-8")
    path.write_text(content.replace("a", "b", 1), encoding="utf-8")
    for place in (path, tmp_path / "out"):
        with pytest.raises(ValueError, match=r"^data: expected the SHA-256 \w{64} .*pairs.jsonl' has \w{64}"):
            Pairs(place)


def test_columns_by_name(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", STORIES[:3], ("text", "title"))
    assert read_all(Pairs([path], "text", "title")) == STORIES[:3]
    with pytest.raises(
        ValueError,
        match=r"^data: expected a column 'document' or 'article' in .*a.jsonl, line 1, got 'id', 'text', 'title'",
    ):
        Pairs([path])
    with pytest.raises(
        ValueError, match=r"^data: expected a column 'gist' in .*line 1, got 'id', 'text', 'title'"
    ):
        Pairs([path], "text", "gist")


GOOD = json.dumps({"document": "d", "summary": "s"}).encode()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"document": "d", "summary": ', r"^data: expected one JSON object in FILE, line 3 \(.+\)"),
        (b"[" * 100_000, r"^data: expected one JSON object in FILE, line 3"),
        (b'["d", "s"]', r'^data: expected a JSON object .* in FILE, line 3, got \["d", "s"\]'),
        (
            b'{"document": "d\xff", "summary": "s"}',
            r"^data: expected UTF-8 text in FILE, line 3, byte 15 is none",
        ),
        (
            b'{"document": "d"}',
            r"^data: expected a column 'summary' or 'highlights' in FILE, line 3, got 'document'",
        ),
        (b"{}", r"^data: expected a column 'document' or 'article' in FILE, line 3, got none"),
        (
            b'{"document": "d", "summary": null}',
            r"^data: expected the text of a summary in FILE, line 3, got null",
        ),
        (
            b'{"document": ["d"], "summary": "s"}',
            r'^data: expected the text of a document in FILE, line 3, got \["d"',
        ),
        (
            b'{"document": "d", "summary": "\\ud800"}',
            r"^data: the summary in FILE, line 3 is no Unicode text",
        ),
    ],
)
def test_a_bad_line_is_named_at_once(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([GOOD, b"", line, GOOD]))
    with pytest.raises(ValueError, match=message.replace("FILE", re.escape(str(path)))):
        Pairs([path])


def test_a_file_that_changed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", STORIES)
    texts = SummarizationTexts(BYTES, [path], 700)
    path.write_bytes(b"\n" * 3000)
    with pytest.raises(ValueError, match=r"^data: expected one JSON object in .*a.jsonl, line \d+"):
        texts.batch(0, 1)
    path.unlink()
    with pytest.raises(ValueError, match=r"^data: cannot read .*a.jsonl': No such file or directory"):
        texts.batch(0, 1)


def test_a_summary_that_grew(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD)
    texts = SummarizationTexts(BYTES, [path], 50)
    write_lines(path, [Pair("d", "s" * 41)])
    with pytest.raises(
        ValueError, match=r"^data: expected a summary of fewer than 40 tokens, got 41 in .*line 1"
    ):
        texts.batch(0, 1)


def test_pairs_without_text_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """XSum has some."""
    path = write_lines(tmp_path / "a.jsonl", [STORIES[0], Pair("", "s"), Pair("d", " \n"), STORIES[1]])
    with caplog.at_level(logging.WARNING):
        pairs = Pairs([path])
    assert read_all(pairs) == STORIES[:2]
    assert pairs.where(1) == f"{path}, line 4"
    assert caplog.messages == [
        f"Left out 2 pairs without a document or a summary: {path}, line 2, {path}, line 3"
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.jsonl", r"^data: expected a file or folder of pairs, '.*none.jsonl' does not exist"),
        (
            "a.jsonl.gz",
            r"^data: expected a .jsonl or .parquet file .*, got '.*a.jsonl.gz'. Convert or unpack it",
        ),
        ("folder", r"^data: expected .jsonl or .parquet files in '.*folder', found none"),
        ("empty.jsonl", r"^data: expected pairs of a document and a summary in .*empty.jsonl, found none"),
        ("bad.parquet", r"^data: cannot read '.*bad.parquet': "),
    ],
)
def test_paths_without_pairs(tmp_path: Path, name: str, message: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    for file in ("a.jsonl.gz", "empty.jsonl", "bad.parquet"):
        (tmp_path / file).write_text("\n")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=message):
        Pairs([tmp_path / name])


def test_memory_does_not_grow_with_the_texts(tmp_path: Path) -> None:
    """12 bytes of each pair, however long it is."""
    pairs = [Pair("d" * 20_000, "s" * 100)] * 400  # 8 MB
    path = write_lines(tmp_path / "a.jsonl", pairs)
    tracemalloc.start()
    try:
        found = Pairs([path])
        held = tracemalloc.get_traced_memory()[0]
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found) == 400
    assert held < 2**16
    assert most < 2**22  # a megabyte is read at a time for the hash


# Parquet


def write_parquet(path: Path, pairs: Sequence[Pair], rows: int = 4, **columns: list[Any]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = {"id": list(range(len(pairs))), "document": [p.document for p in pairs]}
    table |= {"summary": [p.summary for p in pairs]} | columns
    parquet.write_table(pyarrow.table(table), path, row_group_size=rows)
    return path


def test_parquet_gives_what_lines_give(tmp_path: Path, stories: Pairs) -> None:
    pairs = Pairs([write_parquet(tmp_path / "a.parquet", STORIES)])
    order = list(range(len(STORIES)))
    random.Random(0).shuffle(order)
    for number in order:
        assert pairs[number] == STORIES[number]
    a = SummarizationTexts(BYTES, stories, 300, 5).batch(0, 40)
    b = SummarizationTexts(BYTES, pairs, 300, 5).batch(0, 40)
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_bad_rows_of_parquet_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_parquet(tmp_path / "a.parquet", STORIES, summary=["s"] * 9 + [None] * 21)
    with pytest.raises(
        ValueError, match=r"^data: expected the text of a summary in .*a.parquet, row 9, got null"
    ):
        Pairs([path])
    with pytest.raises(
        ValueError, match=r"^data: expected a column 'gist' in .*a.parquet, got 'id', 'document', 's"
    ):
        Pairs([path], "document", "gist")
    write_parquet(path, STORIES, summary=["s"] * 5 + [" "] + ["t"] * 24)
    with caplog.at_level(logging.WARNING):
        pairs = Pairs([path])
    assert caplog.messages == [f"Left out 1 pairs without a document or a summary: {path}, row 5"]
    assert [pairs.where(n).rsplit(" ", 1)[1] for n in range(29)] == [str(n) for n in range(30) if n != 5]
    assert [pairs[n].summary for n in range(29)] == ["s"] * 5 + ["t"] * 24


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    path.touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ValueError, match=r"^data: reading '.*a.parquet' needs pyarrow. pip install 'trailmark\[data\]'"
    ):
        Pairs([path])
