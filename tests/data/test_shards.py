"""Shards on disk and tokens in memory: one interface, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import InPython, prose, save_bpe
from tests.disks import flip
from trailmark.data.batches import Windows
from trailmark.data.corpus import load_tokenizer, tokenizer_fingerprint
from trailmark.data.shards import Corpus, ShardWriter, make_manifest, token_dtype
from trailmark.files import write_json

TOKENIZER = {"name": "some", "fingerprint": "f" * 64, "vocab_size": 1000, "end_of_text": None}


def write_corpus(
    folder: Path, shards: list[list[list[int]]], dtype: str = "uint16", **tokenizer: Any
) -> Corpus:
    folder.mkdir(exist_ok=True)
    written = []
    for number, documents in enumerate(shards):
        writer = ShardWriter(folder, number, dtype)
        for document in documents:
            writer.write(np.array(document, np.uint32))
            writer.end_document()
        written.append(writer.close())
    manifest = make_manifest(written, dtype, {"revision": "abc"}, TOKENIZER | tokenizer)
    (folder / "corpus.json").write_text(json.dumps(manifest))
    return Corpus.open(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards of equal size, so that only contents tell them apart."""
    write_corpus(tmp_path / "corpus", [[[1, 2, 3], [4]], [[5], [6, 7, 8]]])
    return tmp_path / "corpus"


@settings(max_examples=15)
@given(
    shards=st.lists(
        st.lists(st.lists(st.integers(0, 65535), min_size=1, max_size=5), min_size=1, max_size=3),
        min_size=1,
        max_size=4,
    ),
    large=st.booleans(),
    data=st.data(),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[list[int]]], large: bool, data: st.DataObject
) -> None:
    if large:
        shards[0][0][0] += 1 << 17
    dtype = "uint32" if large else "uint16"
    corpus = write_corpus(tmp_path_factory.mktemp("c"), shards, dtype, vocab_size=1 << 18)
    documents = [document for shard in shards for document in shard]
    tokens = [token for document in documents for token in document]
    start = data.draw(st.integers(0, len(tokens)))
    stop = data.draw(st.integers(start, len(tokens)))
    assert corpus.read(start, stop).tolist() == tokens[start:stop]
    assert corpus.read(start, stop).dtype == np.int32
    assert len(corpus) == len(tokens)
    assert corpus.documents == len(documents)
    assert corpus.document_starts.tolist() == np.cumsum([0, *map(len, documents)])[:-1].tolist()
    corpus.verify()
    # in memory the same
    memory = Corpus.of_tokens(np.array(tokens, np.int32), corpus.document_starts)
    assert memory.read(start, stop).tolist() == tokens[start:stop]
    a, b = Windows(corpus, len(tokens), 3), Windows(memory, len(tokens), 3)
    assert torch.equal(a.batch(5, 2), b.batch(5, 2))
    assert torch.equal(a.document_ids(5, 2), b.document_ids(5, 2))


def test_the_bytes_of_a_shard(folder: Path) -> None:
    assert (folder / "tokens-00001.bin").read_bytes() == bytes([5, 0, 6, 0, 7, 0, 8, 0])
    assert (folder / "documents-00001.bin").read_bytes() == bytes([1, *[0] * 7, 4, *[0] * 7])
    assert sorted(path.name for path in folder.iterdir()) == [
        "corpus.json",
        "documents-00000.bin",
        "documents-00001.bin",
        "tokens-00000.bin",
        "tokens-00001.bin",
    ]


def test_the_type_follows_the_vocabulary() -> None:
    assert (token_dtype(1 << 16), token_dtype((1 << 16) + 1)) == ("uint16", "uint32")


def test_what_is_read_is_ones_own(folder: Path) -> None:
    corpus = Corpus.open(folder)
    corpus.read(0, 4)[:] = 0
    assert corpus.read(0, 4).tolist() == [1, 2, 3, 4]


def test_another_process_maps_the_shards_itself(folder: Path) -> None:
    corpus = Corpus.open(folder)
    corpus.read(0, 8)
    size = len(pickle.dumps(corpus))
    assert len(corpus.document_starts) == 4
    assert size == len(pickle.dumps(corpus)), "contents are sent"
    assert pickle.loads(pickle.dumps(corpus)).read(2, 6).tolist() == [3, 4, 5, 6]


# Fingerprints


def test_fingerprints_name_the_text(tmp_path: Path) -> None:
    corpora = [
        write_corpus(tmp_path / "a", [[[1, 2], [3]]]),
        write_corpus(tmp_path / "b", [[[1], [2, 3]]]),  # the same tokens in other documents
        write_corpus(tmp_path / "c", [[[1, 2], [4]]]),
        write_corpus(tmp_path / "d", [[[1, 2], [3]]], "uint32"),
        write_corpus(tmp_path / "e", [[[1, 2], [3]]], fingerprint="0" * 64),
    ]
    assert len({corpus.fingerprint for corpus in corpora}) == 5
    again = write_corpus(tmp_path / "again", [[[1, 2], [3]]], name="by another road")
    assert again.fingerprint == corpora[0].fingerprint


def test_a_fingerprint_tells_what_stands_outside_of_the_backend(tmp_path: Path) -> None:
    bpe = load_tokenizer(save_bpe(tmp_path / "a"))

    class Renamed(type(bpe)):  # type: ignore[misc]
        pass

    own, same = (kind.from_pretrained(tmp_path / "a") for kind in (InPython, Renamed))
    marked = load_tokenizer(str(tmp_path / "a"))
    marked.split_special_tokens = True
    text = "a <|endoftext|> b"
    assert len({tuple(x(text)["input_ids"]) for x in (bpe, own, marked)}) == 3
    assert len({tokenizer_fingerprint(x) for x in (bpe, own, marked)}) == 3
    assert tokenizer_fingerprint(same) == tokenizer_fingerprint(bpe)


def test_fingerprints_of_tokens_in_memory() -> None:
    tokens = np.arange(10, dtype=np.int32)
    assert Corpus.of_tokens(tokens).fingerprint == hashlib.sha256(tokens.data).hexdigest()
    assert Corpus.of_tokens(tokens, [0, 5]).fingerprint != Corpus.of_tokens(tokens).fingerprint
    assert Corpus.of_tokens(tokens[::2]).read(1, 3).tolist() == [2, 4]


@pytest.mark.parametrize("starts", [[], [1], [0, 0], [0, 5, 3], [0, 10], [-1, 3]])
def test_document_starts_that_cannot_be(starts: list[int]) -> None:
    with pytest.raises(ValueError, match=r"^document_starts: expected ascending places from 0 to below 10"):
        Corpus.of_tokens(np.arange(10, dtype=np.int32), starts)


def test_a_tokenizers_fingerprint(tmp_path: Path) -> None:
    name = save_bpe(tmp_path / "a")
    bpe = load_tokenizer(name)
    known = tokenizer_fingerprint(bpe)
    # only shapes batches, does not change a text's tokens
    bpe.pad_token = bpe.eos_token
    bpe([prose(1, 5), prose(2, 50)], padding=True, truncation=True, max_length=7)
    assert tokenizer_fingerprint(bpe) == known == tokenizer_fingerprint(load_tokenizer(name))
    bpe.save_pretrained(tmp_path / "saved")
    assert tokenizer_fingerprint(load_tokenizer(str(tmp_path / "saved"))) == known
    others = [
        load_tokenizer(),
        load_tokenizer(save_bpe(tmp_path / "b", vocab_size=290)),
        load_tokenizer(save_bpe(tmp_path / "c", end_of_text=False)),
    ]
    assert len({known, *map(tokenizer_fingerprint, others)}) == 4
    # golden: corpora of bytes are recognised by every version
    assert (
        tokenizer_fingerprint(others[0]) == "99f16eeeadb915fb47991ac3c629c24bc56381b542df7de812202123b27b7e13"
    )


# Refusals


def test_no_corpus(tmp_path: Path) -> None:
    for absent in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match=r"^data: expected a prepared corpus, .* has no corpus.json"):
            Corpus.open(absent)


def test_shards_of_another_tokenizer_vocabulary_or_revision(folder: Path) -> None:
    Corpus.open(folder, "f" * 64, 1000, "abc")
    Corpus.open(folder, vocab_size=1024)  # a model's vocabulary may be rounded up
    with pytest.raises(ValueError, match=rf"^data: expected .*{'0' * 64}.*'some'.*{'f' * 64}"):
        Corpus.open(folder, tokenizer_fingerprint="0" * 64)
    with pytest.raises(ValueError, match=rf"^data: expected .* at most 999 .* has 1000 .*{'f' * 64}"):
        Corpus.open(folder, vocab_size=999)
    with pytest.raises(ValueError, match=r"^data: expected revision def, .* from revision abc\. "):
        Corpus.open(folder, revision="def")


def _edit(**new: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest.update(new)


def _edit_shard(**new: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["shards"][1].update(new)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_edit(format=2), r"expected format 1 or older, .*corpus.json' has format 2\. Update"),
        (_edit(format=None), r"corpus.json' is broken"),
        (_edit(dtype="float32"), r"corpus.json' is broken"),
        (_edit(tokens=9), r"contradict each other"),
        (_edit(documents=5), r"contradict each other"),
        (_edit(fingerprint="0" * 64), r"contradict each other"),
        (_edit(tokenizer=TOKENIZER | {"fingerprint": "0" * 64}), r"contradict each other"),
        (_edit(shards=[]), r"contradict each other"),
        (_edit_shard(sha256="0" * 64), r"contradict each other"),
        (_edit_shard(bytes=7), r"contradict each other"),
        (_edit_shard(tokens="4"), r"corpus.json' is broken \(shards.tokens: expected a whole number"),
        (_edit_shard(extra=1), r"corpus.json' is broken"),
        (_edit_shard(file="../tokens-00000.bin"), r"corpus.json' is broken \(file: expected names"),
        (lambda manifest: manifest.pop("tokenizer"), r"corpus.json' is broken"),
        (lambda manifest: manifest.clear(), r"corpus.json' is broken"),
    ],
)
def test_broken_manifests(folder: Path, edit: Callable[[dict[str, Any]], None], message: str) -> None:
    manifest = json.loads((folder / "corpus.json").read_text())
    edit(manifest)
    (folder / "corpus.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=rf"^data: .*{message}"):
        Corpus.open(folder)


def _swap(path: Path) -> None:
    other = path.with_name(path.name.replace("00000", "x").replace("00001", "00000").replace("x", "00001"))
    content = other.read_bytes()
    other.write_bytes(path.read_bytes())
    path.write_bytes(content)


CORRUPTIONS: dict[
    str, tuple[Callable[[Path], Any], bool]
] = {  # and whether opening, which is quick, finds it
    "flip": (lambda path: flip(path, 3), False),
    "swap": (_swap, False),
    "truncate": (lambda path: path.write_bytes(path.read_bytes()[:-1]), True),
    "extend": (lambda path: path.write_bytes(path.read_bytes() + b"\0\0"), True),
    "empty": (lambda path: path.write_bytes(b""), True),
    "delete": (Path.unlink, True),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize(
    "name", ["tokens-00000.bin", "tokens-00001.bin", "documents-00000.bin", "documents-00001.bin"]
)
def test_each_corruption_is_found(folder: Path, kind: str, name: str) -> None:
    corrupt, quick = CORRUPTIONS[kind]
    corpus = Corpus.open(folder)
    corrupt(folder / name)
    with pytest.raises(
        ValueError,
        match=rf"^data: .* is damaged: .*{name}.*Remove the folder and make it again with trailmark prepare",
    ):
        corpus.verify()
    if quick:
        with pytest.raises(ValueError, match=rf"^data: .*{name}"):
            Corpus.open(folder)
    else:
        Corpus.open(folder)


def test_every_damaged_file_is_named(folder: Path) -> None:
    corpus = Corpus.open(folder)
    flip(folder / "tokens-00000.bin", 3)
    (folder / "documents-00001.bin").unlink()
    with pytest.raises(
        ValueError, match=r"tokens-00000\.bin was changed: .*; documents-00001\.bin is missing"
    ):
        corpus.verify()


def test_what_progress_raises_ends_verify(folder: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Corpus.open(folder).verify(stop)


def test_verify_counts_every_byte(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    Corpus.open(folder).verify(lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    files = [path for path in folder.iterdir() if path.suffix == ".bin"]
    assert seen[-1] == (sum(path.stat().st_size for path in files),) * 2
    Corpus.of_tokens(np.arange(3, dtype=np.int32)).verify()


def test_a_shard_that_vanishes_later_is_named(folder: Path) -> None:
    corpus = Corpus.open(folder)
    (folder / "tokens-00001.bin").unlink()
    assert corpus.read(0, 4).tolist() == [1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"^data: .*tokens-00001.bin is missing"):
        corpus.read(3, 5)
    (folder / "documents-00000.bin").write_bytes(bytes(16))
    with pytest.raises(
        ValueError, match=r"^data: .*documents-00000.bin' does not hold the ends of 2 documents"
    ):
        _ = corpus.document_starts


def test_a_shard_is_not_in_place_before_it_is_whole(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, 0, "uint16")
    writer.write(np.array([1, 2], np.uint32))
    writer.end_document()
    assert not list(tmp_path.glob("tokens*"))
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the names of open files")
def test_contents_are_on_the_disk_before_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut after a rename must not find an empty file under the new name."""
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(handle: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        fsync(handle)

    def record_replace(old: Path, new: Path) -> None:
        events.append(f"name {Path(new).name}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    writer = ShardWriter(tmp_path, 0, "uint16")
    writer.write(np.array([1], np.uint32))
    writer.end_document()
    writer.close()
    write_json(tmp_path / "progress.json", {}, durable=True)
    temporary = events[5].removeprefix("sync ")
    assert events == [
        *("sync .tokens-00000.bin.part", "sync .documents-00000.bin.part"),
        *("name tokens-00000.bin", "name documents-00000.bin", f"sync {tmp_path.name}"),
        *(f"sync {temporary}", "name progress.json", f"sync {tmp_path.name}"),
    ]
    assert temporary.startswith(".progress.json.")
