"""Documents out of files, folders and datasets; what a user may type."""

from __future__ import annotations

import gzip
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trailmark.data.hub import HubDataset, HubFiles
from trailmark.data.recipes import parse_source
from trailmark.data.sources import LocalFiles, Source

ROWS: list[dict[str, Any]] = [
    {"text": f"text {n} – ü", "title": f"t{n}", "n": n, "meta": {"config": "arxiv" if n % 3 else "wiki"}}
    for n in range(20)
]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test waits for a network; datasets keeps its copies in the test's folder."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def write_lines(path: Path, rows: list[Any]) -> Path:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_parquet(path: Path, rows: list[Any], group: int = 7) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def texts(source: Source, first: int = 0) -> list[str]:
    return [row.texts[0] for row in source.documents(first) if row.texts is not None]


EXPECTED = [row["text"] for row in ROWS]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson", "a.jsonl.gz", "a.JSON.gz", "a.parquet"])
def test_rows_from_any_beginning(tmp_path: Path, name: str) -> None:
    write = write_parquet if name.endswith("parquet") else write_lines
    source = parse_source([str(write(tmp_path / name, ROWS)), str(write(tmp_path / f"b{name}", ROWS[:3]))])
    rows = list(source.documents())
    assert [row.texts for row in rows] == [(text,) for text in EXPECTED + EXPECTED[:3]]
    assert [row.number for row in rows] == list(range(23))
    assert [row.done for row in rows] == sorted(row.done for row in rows)
    assert rows[-1].done == source.size() == sum(file.stat().st_size for file in tmp_path.glob(f"*{name}"))
    for first in (1, 7, 8, 19, 20, 22, 23, 99):
        assert list(source.documents(first)) == rows[first:]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_condition_keeps_rows(tmp_path: Path, name: str) -> None:
    write = write_parquet if name.endswith("parquet") else write_lines
    path = str(write(tmp_path / name, ROWS))
    kept = [row["text"] for row in ROWS if row["n"] % 3]
    assert texts(parse_source([path], where="meta.config=arxiv")) == kept
    assert texts(parse_source([path], where="n=4")) == [EXPECTED[4]]
    assert texts(parse_source([path], column="title", where="meta.nothing=1")) == []
    packed = [row | {"meta": json.dumps(row["meta"])} for row in ROWS]  # an object as text
    assert texts(parse_source([str(write(tmp_path / f"b{name}", packed))], where="meta.config=arxiv")) == kept


def test_a_folder_of_all_kinds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "all"
    write_lines(folder / "b" / "rows.jsonl", [{"text": "2"}, {"text": "3"}])
    write_parquet(folder / "c.parquet", [{"text": "4"}])
    (folder / "a.txt").write_text("1")
    (folder / "d.json").write_text('{"settings": "plain text in a folder"}')
    (folder / ".hidden").write_text("no")
    (folder / "x.png").write_bytes(b"\x89PNG\0")
    (folder / "y.txt").write_bytes(b"caf\xe9")
    (folder / "z.txt").write_text(" \n")
    with caplog.at_level(logging.WARNING):
        source = parse_source([str(folder)])
        found = texts(source)
    assert found == ["1", "2", "3", "4", '{"settings": "plain text in a folder"}']
    assert "Left out 3 files" in caplog.text
    assert "x.png, y.txt, z.txt" in caplog.text
    names = [file["name"] for file in source.description()["files"]]
    assert names == ["all/a.txt", "all/b/rows.jsonl", "all/c.parquet", "all/d.json"]


def test_empty_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": t} for t in ("a", "", None, " \n", "b")])
    path.write_bytes(
        b"\xef\xbb\xbf\n" + path.read_bytes() + b"\n"
    )  # blank lines are no rows; a mark is no text
    rows = list(parse_source([str(path)]).documents())
    assert [row.texts for row in rows] == [("a",), None, None, None, ("b",)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": ', r"^source: .*a\.jsonl, line 2: it is no JSON"),
        (
            b'{"text": "a"}\n\n["text"]',
            r"^source: .*a\.jsonl, line 3: expected an object with columns, got list",
        ),
        (b'{"text": "caf\xe9"}', r"^source: .*line 1: it is no JSON: the byte at 13"),
        (
            b'{"text": "a"}\n{"body": "b", "id": 3}',
            r"^column: expected 'text', .*line 2 has 'body', 'id'\. Name",
        ),
        (b'{"text": 3}', r"^source: .*line 1: expected text in column 'text', got int"),
        (b'{"text": "\\ud800"}', r"^source: .*line 1: holds half a surrogate pair"),
        (b"", r"^source: .*a\.jsonl' is empty"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(parse_source([str(tmp_path / "a.jsonl")]).documents())


def test_broken_packed_and_parquet_files(tmp_path: Path) -> None:
    whole = write_lines(tmp_path / "a.jsonl.gz", ROWS * 99)
    whole.write_bytes(whole.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"^source: cannot read .*a\.jsonl\.gz after line"):
        list(parse_source([str(whole)]).documents())
    (tmp_path / "b.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match=r"^source: cannot read .*b\.jsonl\.gz after line 0"):
        list(parse_source([str(tmp_path / "b.jsonl.gz")]).documents())
    table = write_parquet(tmp_path / "c.parquet", ROWS)
    with pytest.raises(
        ValueError, match=r"^column: expected 'body', .*c\.parquet has 'text', 'title', 'n', 'meta'"
    ):
        list(parse_source([str(table)], column="body").documents())
    with pytest.raises(ValueError, match=r"expected text in column 'n', got int"):
        list(parse_source([str(table)], column="n").documents())
    table.write_bytes(b"no table")
    with pytest.raises(ValueError, match=r"^source: cannot read .*c\.parquet as Parquet"):
        list(parse_source([str(table)]).documents())


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python unpacks it")
def test_zst_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(ValueError, match=r"needs Python 3\.14 .*zstd -d a\.jsonl\.zst"):
        list(parse_source([str(tmp_path / "a.jsonl.zst")]).documents())


def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = write_parquet(tmp_path / "c.parquet", ROWS)
    for name in ("datasets", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"'pyarrow' is missing.*pip install 'trailmark\[data\]'"):
        list(parse_source([str(table)]).documents())
    with pytest.raises(ValueError, match=r"'datasets' is missing.*pip install 'trailmark\[data\]'"):
        parse_source([f"hub:{tmp_path}"])


def test_a_file_that_changes_in_between_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    source = parse_source([str(tmp_path / "a.txt")])
    assert source.size() == 3
    (tmp_path / "a.txt").write_text("two")
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    with pytest.raises(ValueError, match=r"^source: .*a\.txt' was changed or removed"):
        list(source.documents())


def test_named_files_must_be_text(tmp_path: Path) -> None:
    for name, content in (("a", b"a\0"), ("b", b"caf\xe9"), ("c", b" "), ("d", "ü".encode()[:1])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"^source: .*/{name}'"):
            parse_source([str(tmp_path / name)]).size()
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"^source: expected at least one file with text in .*none"):
        parse_source([str(tmp_path / "none")]).size()


# Pairs


def test_pairs(tmp_path: Path) -> None:
    rows = [
        {"article": "A", "highlights": "a"},
        {"article": "B", "highlights": ""},
        {"article": "C", "highlights": "c"},
    ]
    path = write_lines(tmp_path / "a.jsonl", rows)
    source = parse_source([str(path)], column="article", summary_column="highlights")
    assert [row.texts for row in source.pairs()] == [("A", "a"), None, ("C", "c")]
    assert texts(source) == ["A", "B", "C"]
    with pytest.raises(ValueError, match=r"^summary_column: expected the column"):
        parse_source([str(path)]).pairs()
    (tmp_path / "a.txt").write_text("plain")
    with pytest.raises(ValueError, match=r"is plain text"):
        list(parse_source([str(tmp_path / "a.txt")], summary_column="summary").pairs())
    with pytest.raises(ValueError, match=r"^column: expected none for plain text, .* got 'article'"):
        parse_source([str(tmp_path / "a.txt")], column="article").description()


# The hub's formats, from a folder laid out as a dataset


def dataset_folder(folder: Path) -> str:
    write_parquet(folder / "data" / "train-00000-of-00002.parquet", ROWS[:12])
    write_parquet(folder / "data" / "train-00001-of-00002.parquet", ROWS[12:])
    write_parquet(folder / "data" / "test-00000-of-00001.parquet", ROWS[5:6])
    return str(folder)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_by_name(tmp_path: Path, streaming: bool) -> None:
    name = dataset_folder(tmp_path / "set")
    source = parse_source([f"hub:{name}"], streaming=streaming)
    rows = list(source.documents())
    assert [row.texts for row in rows] == [(text,) for text in EXPECTED]
    assert [(row.number, row.done) for row in rows] == [(n, n + 1) for n in range(20)]
    assert source.size() == (None if streaming else 20)
    for first in (1, 13, 20):
        assert list(source.documents(first)) == rows[first:]
    assert texts(parse_source([f"hub:{name}"], split="test", streaming=streaming)) == [EXPECTED[5]]
    some = parse_source([f"hub:{name}"], column="title", where="meta.config=wiki", streaming=streaming)
    assert texts(some) == [row["title"] for row in ROWS if row["n"] % 3 == 0]
    with pytest.raises(
        ValueError, match=r"^column: expected 'body', .*set split train has 'text', 'title', 'n', 'meta'"
    ):
        list(parse_source([f"hub:{name}"], column="body", streaming=streaming).documents())
    again, other = parse_source([f"hub:{name}"]), parse_source([f"hub:{name}"], split="test")
    assert again.description() == parse_source([f"hub:{name}"]).description() != other.description()


def test_datasets_that_cannot_be_loaded(tmp_path: Path) -> None:
    name = dataset_folder(tmp_path / "set")
    with pytest.raises(
        ValueError, match=r"^source: cannot load .*set split dev from the hub \(.*dev.*\)\. Check"
    ):
        parse_source([f"hub:{name}"], split="dev").size()
    with pytest.raises(ValueError, match=r"^source: cannot load .*set other .*from the hub"):
        parse_source([f"hub:{name}"], config="other").size()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"^source: cannot load .*empty"):
        parse_source([f"hub:{tmp_path / 'empty'}"]).size()


def test_no_network(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        source = parse_source(["hub:owner/name"], revision="v1")
    assert "owner/name" in caplog.text
    assert "revision v1" in caplog.text
    with pytest.raises(ValueError, match=r"^source: cannot load owner/name split train v1 from the hub"):
        source.size()


# Recipes


def test_the_papers_recipes_name_the_right_columns() -> None:
    """What the hub's pages say; loading itself is the same as of any other dataset."""
    names = ("pg19", "xsum", "cnn-dailymail")
    sources = {name: parse_source([name], split="test", revision="a" * 40) for name in names}
    asked = {
        name: (s.name, s.config, s.split, s.revision, s.column, s.summary_column)
        for name, s in sources.items()
        if isinstance(s, HubDataset)
    }
    assert asked == {
        "pg19": ("emozilla/pg19", None, "test", "a" * 40, "text", None),
        "xsum": ("EdinburghNLP/xsum", None, "test", "a" * 40, "document", "summary"),
        "cnn-dailymail": ("abisee/cnn_dailymail", "3.0.0", "test", "a" * 40, "article", "highlights"),
    }


def test_arxiv_math_from_downloaded_files(tmp_path: Path) -> None:
    """The hub's cache as a download leaves it, without the network: the same call finds it."""
    commit = "b" * 40
    snapshot = tmp_path / "hub" / "datasets--hoskinson-center--proof-pile" / "snapshots" / commit
    write_lines(snapshot / "train" / "proofpile_train_0.jsonl.gz", ROWS[:9])
    write_lines(snapshot / "train" / "proofpile_train_1.jsonl.gz", ROWS[9:])
    write_lines(snapshot / "dev" / "proofpile_dev.jsonl.gz", ROWS[:3])
    source = parse_source(["arxiv-math"], revision=commit)
    assert isinstance(source, HubFiles)
    assert texts(source) == [row["text"] for row in ROWS if row["n"] % 3]
    assert texts(parse_source(["arxiv-math"], revision=commit, split="validation")) == EXPECTED[1:3]
    about = source.description()
    assert (about["name"], about["revision"], about["where"]) == (
        "hoskinson-center/proof-pile",
        commit,
        "meta.config=arxiv",
    )
    assert str(tmp_path) not in json.dumps(about)
    with pytest.raises(
        ValueError, match=r"^source: expected files test/proofpile_test\.jsonl\.gz .* found none"
    ):
        parse_source(["arxiv-math"], revision=commit, split="test")
    with pytest.raises(ValueError, match=r"^source: cannot download hoskinson-center/proof-pile"):
        parse_source(["arxiv-math"], revision="c" * 40)


# What a user types


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ([], {}, r"^source: expected at least one file or folder"),
        (
            ["absent"],
            {},
            r"^source: expected a file, a folder, hub:owner/name or one of pg19, .*got 'absent'",
        ),
        (["hub:"], {}, r"^source: expected hub:owner/name"),
        (["pg19", "xsum"], {}, r"^source: expected 'pg19' alone, got 2"),
        (["hub:a/b", "."], {}, r"^source: expected 'hub:a/b' alone"),
        (
            ["."],
            {"split": "train"},
            r"^split: expected none for files and folders, got 'train'.*hub:owner/name",
        ),
        (["."], {"streaming": True}, r"^streaming: "),
        (["."], {"revision": "main"}, r"^revision: "),
        (["."], {"where": "config"}, r"^where: expected column=value"),
        (["pg19"], {"column": "body"}, r"^column: expected none for pg19"),
        (["arxiv-math"], {"split": "dev"}, r"^split: expected one of train, validation, test, got 'dev'"),
        (["arxiv-math"], {"streaming": True}, r"^streaming: expected False for arxiv-math"),
    ],
)
def test_words_that_name_no_source(names: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_source(names, **options)


def test_a_file_may_bear_a_recipes_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pg19").write_text("mine")
    monkeypatch.chdir(tmp_path)
    source = parse_source(["pg19"])
    assert isinstance(source, LocalFiles)
    assert texts(source) == ["mine"]
