"""What a configuration's paths become, and what is refused before anything is allocated."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.corpora import save_bpe, write_folder
from tests.disks import flip
from trailmark.data.corpus import load_tokenizer, tokenizer_fingerprint
from trailmark.data.pairs import prepare_pairs
from trailmark.data.prepare import prepare
from trailmark.data.recipes import parse_source
from trailmark.data.shards import Corpus, Shard, corpus_fingerprint
from trailmark.data.texts import open_text
from trailmark.files import read_json, write_json

BYTES = load_tokenizer()


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    source = parse_source([str(write_folder(tmp_path / "text", 6, 40))])
    prepare(source, tmp_path / "corpus", processes=1, shard_tokens=500)
    return tmp_path / "corpus"


def test_text_as_it_is_and_prepared_is_the_same_stream(prepared: Path) -> None:
    whole, read = open_text([prepared], BYTES), open_text([prepared.parent / "text"], BYTES)
    assert whole.read(0, len(whole)).tolist() == read.read(0, len(read)).tolist()
    assert whole.document_starts.tolist() == read.document_starts.tolist()


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.NDJSON", "a.json.gz", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"]
)
@pytest.mark.parametrize("named", [True, False])
def test_rows_are_no_text(tmp_path: Path, name: str, named: bool) -> None:
    (tmp_path / "good.txt").write_text("some text")
    (tmp_path / name).write_text('{"text": "some"}\n')
    path = tmp_path / name if named else tmp_path
    with pytest.raises(
        ValueError, match=rf"^data: expected plain text, .*{name}'.* trailmark prepare {path} "
    ):
        open_text([path], BYTES)


def test_json_is_rows_where_it_is_named_and_a_text_in_a_folder(tmp_path: Path) -> None:
    """As trailmark prepare takes it."""
    (tmp_path / "a.json").write_text("{}")
    assert len(open_text([tmp_path], BYTES, end_of_text=False)) == 2
    with pytest.raises(ValueError, match=r"^data: expected plain text, .*a\.json'"):
        open_text([tmp_path / "a.json"], BYTES)


def test_pairs_and_prepared_folders_inside_are_no_text(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data: .*corpus' lies in .*Name the prepared folder itself"):
        open_text([tmp_path], BYTES)
    (tmp_path / "pairs").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "summary": "b"}')
    rows = parse_source([str(tmp_path / "rows.jsonl")], summary_column="summary")
    prepare_pairs(rows, tmp_path / "pairs")
    with pytest.raises(ValueError, match=r"^data: .*pairs' holds pairs for summarization\. Set data\.task"):
        open_text([tmp_path / "pairs"], BYTES)


@pytest.mark.parametrize("name", ["corpus.json", "progress.json", "pairs.json"])
@pytest.mark.parametrize("content", ['{"title": "Mine"}', "{mine", "[1]", "NaN"])
def test_a_file_of_ones_own_that_has_such_a_name_is_text(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "text.txt").write_text("Some text.")
    (tmp_path / "mine" / name).write_text(content)
    assert len(open_text([tmp_path], BYTES)) > len("Some text.")


def test_damaged_shards_are_refused_unless_another_process_looks(prepared: Path) -> None:
    name = sorted(prepared.glob("tokens-*"))[-1]
    flip(name, -1)
    with pytest.raises(ValueError, match=rf"^data: .* is damaged: {name.name} was changed"):
        open_text([prepared], BYTES)
    open_text([prepared], BYTES, verify=False)


def test_document_ends_that_were_written_wrong_are_refused(prepared: Path) -> None:
    """The hashes are right, what was hashed is not."""
    manifest = read_json(prepared / "corpus.json")
    shard = manifest["shards"][0]
    path = prepared / shard["documents_file"]
    path.write_bytes(bytes(path.stat().st_size))
    shard["documents_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    shards = Corpus.open(prepared)._shards
    again = [Shard(**shard), *shards[1:]]
    manifest["fingerprint"] = corpus_fingerprint(again, manifest["dtype"], tokenizer_fingerprint(BYTES))
    write_json(prepared / "corpus.json", manifest)
    Corpus.open(prepared).verify()
    with pytest.raises(ValueError, match=r"^data: .*does not hold the ends of"):
        open_text([prepared], BYTES)


def test_another_revision_is_refused(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data: expected revision abc, .* from a source without revisions"):
        open_text([prepared], BYTES, revision="abc")
    path = prepared / "corpus.json"
    manifest: dict[str, Any] = json.loads(path.read_text())
    manifest["source"]["revision"] = "def"
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"^data: expected revision abc, .* from revision def\. "):
        open_text([prepared], BYTES, revision="abc")
    open_text([prepared], BYTES, revision="def")
    for paths in (None, [tmp_path / "text"]):
        with pytest.raises(ValueError, match=r"^data\.revision: expected none for text .* got 'abc'"):
            open_text(paths, BYTES, revision="abc")


def test_another_tokenizer_is_refused_with_both_fingerprints(prepared: Path, tmp_path: Path) -> None:
    bpe = load_tokenizer(save_bpe(tmp_path / "bpe"))
    ours, theirs = tokenizer_fingerprint(BYTES), tokenizer_fingerprint(bpe)
    with pytest.raises(ValueError, match=rf"^data: .*{theirs}.*{ours}"):
        open_text([prepared], bpe)
