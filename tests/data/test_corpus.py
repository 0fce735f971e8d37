"""Text from files and folders, and its tokens."""

from __future__ import annotations

import codecs
import errno
import logging
import os
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trailmark.data.corpus import (
    decoded,
    load_tokenizer,
    read_texts,
    standard_library_texts,
    text_pieces,
    tokenize,
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        (b"text\0text", "is binary"),
        (b"caf\xe9", r"is not \(byte 3\).*Convert"),
        (codecs.BOM_UTF8 + b"caf\xe9", r"is not \(byte 6\).*Convert"),
        ("ü".encode("utf-16"), r"is UTF-16\. Convert.*iconv -f utf-16"),
        (codecs.BOM_UTF8, "is empty"),
    ],
)
def test_a_named_file_must_be_text(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "named.txt").write_bytes(content)
    with pytest.raises(ValueError, match=rf"^data: .*named\.txt' {message}|^data: .*{message}.*named\.txt"):
        read_texts([tmp_path / "named.txt"])


@pytest.mark.parametrize("block", [2, 1 << 20])
def test_a_mark_of_the_encoding_is_no_text(tmp_path: Path, block: int) -> None:
    (tmp_path / "marked.txt").write_text("née", encoding="utf-8-sig")
    assert read_texts([tmp_path / "marked.txt"]) == ["née"]
    assert "".join(decoded(tmp_path / "marked.txt", block_bytes=max(block, 3))) == "née"


def test_a_path_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data: .*absent.* does not exist"):
        read_texts([tmp_path / "absent"])


def test_something_must_be_named() -> None:
    with pytest.raises(ValueError, match=r"^data: .*the list.*none"):
        read_texts([])


def test_folders_are_read_in_order_of_name(tmp_path: Path) -> None:
    for name, text in (
        ("b/z.txt", "3"),
        ("a.txt", "1"),
        ("b/a.md", "2"),
        (".git/config", "no"),
        (".x", "no"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_texts([tmp_path]) == ["1", "2", "3"]
    assert read_texts([str(tmp_path / "b"), tmp_path / "a.txt"]) == ["2", "3", "1"]


def test_a_folder_below_a_hidden_one_is_read(tmp_path: Path) -> None:
    (tmp_path / ".cache" / "text").mkdir(parents=True)
    (tmp_path / ".cache" / "text" / "a.txt").write_text("seen")
    assert read_texts([tmp_path / ".cache" / "text"]) == ["seen"]


def test_a_folder_with_other_files_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "c.txt").write_bytes(b"caf\xe9")
    with caplog.at_level(logging.WARNING):
        assert read_texts([tmp_path]) == ["text"]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "Left out 2 files" in message
    assert "b.png, c.txt" in message


def test_links_below_a_folder_are_followed_and_no_folder_is_read_twice(tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "c.txt").write_text("3")
    (texts := tmp_path / "texts").mkdir()
    (texts / "a.txt").write_text("1")
    (tmp_path / "b.txt").write_text("2")
    (texts / "b.txt").symlink_to(tmp_path / "b.txt")
    (texts / "linked").symlink_to(elsewhere)
    (texts / "twice").symlink_to(elsewhere)
    (texts / "itself").symlink_to(texts)
    (texts / "up").symlink_to(tmp_path)
    assert read_texts([texts]) == ["1", "2", "3"]


def test_a_file_that_is_named_or_reached_again_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(f"{name}.txt").write_text(name)
    Path("c.txt").symlink_to("a.txt")
    Path("d.txt").write_text("a")  # another file with the same words
    with caplog.at_level(logging.WARNING):
        assert read_texts(["b.txt", tmp_path, "./b.txt"], "data.paths") == ["b", "a", "a"]
    (record,) = caplog.records
    assert (
        record.getMessage()
        == f"data.paths: left out, for they were taken already: {tmp_path / 'b.txt'}, {tmp_path / 'c.txt'}, b.txt"
    )


@pytest.mark.parametrize("kind", ["unreadable", "locked", "dangling", "fifo"])
def test_what_cannot_be_read_below_a_folder_is_no_missing_text(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text")
    hurt = tmp_path / "hurt"
    if kind in ("unreadable", "locked"):  # root may read all: the system's answer to others stands in for it
        name = "open" if kind == "unreadable" else "scandir"
        plain = getattr(os, name)

        def refuse(path: Any, *others: Any) -> Any:
            if str(path) == str(hurt):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return plain(path, *others)

        hurt.mkdir() if kind == "locked" else hurt.write_text("secret")
        monkeypatch.setattr(os, name, refuse)
    elif kind == "dangling":
        hurt.symlink_to(tmp_path / "gone")
    else:
        os.mkfifo(hurt)
    with pytest.raises(ValueError, match=r"^data: .*hurt"):
        read_texts([tmp_path])


def test_a_folder_without_text(tmp_path: Path) -> None:
    (tmp_path / "b.png").write_bytes(b"\x89PNG\0")
    with pytest.raises(ValueError, match=r"^data: expected at least one UTF-8 text file in .*found none"):
        read_texts([tmp_path])


def test_standard_library_splits() -> None:
    train, haystack = (standard_library_texts(split) for split in ("train", "haystack"))
    assert len(train) > len(haystack) > 50
    # a few short files are copies of each other
    assert not {x for x in train if len(x) > 500} & {x for x in haystack if len(x) > 500}
    root = Path(sysconfig.get_paths()["stdlib"])
    for name in ("argparse.py", "json/decoder.py"):
        assert ((root / name).read_text("utf-8") in train) != ((root / name).read_text("utf-8") in haystack)
    with pytest.raises(ValueError, match=r"^split: .*'test'"):
        standard_library_texts("test")


# Tokens

BYTES = load_tokenizer()


@settings(max_examples=100)
@given(st.text(max_size=30))
def test_bytes_round_trip(text: str) -> None:
    tokens = tokenize([text], BYTES)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == BYTES(text, add_special_tokens=False)["input_ids"]
    assert BYTES.decode(tokens) == text


def test_texts_are_joined_without_special_tokens() -> None:
    texts = ["Ein Text, ", "noch\n\n", "", " einer: äöü €"]
    assert tokenize(texts, BYTES).tolist() == [x + 3 for x in "".join(texts).encode()]
    assert tokenize([], BYTES).tolist() == []
    assert tokenize([""], BYTES).dtype == np.int32


def test_any_other_tokenizer(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    tokens = tokenize(["a b c", "b"], load_tokenizer(str(tmp_path)))
    assert tokens.tolist() == [1, 2, 0, 2]
    assert tokens.dtype == np.int32


def test_no_such_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^tokenizer: expected 'bytes', a folder"):
        load_tokenizer(str(tmp_path))


def test_a_text_is_cut_at_its_line_ends_whatever_they_are(tmp_path: Path) -> None:
    lines = "".join(f"the line of number {n}\n" for n in range(200))
    (tmp_path / "unix.txt").write_text(lines)
    (tmp_path / "dos.txt").write_text(lines.replace("\n", "\r\n"), newline="")
    unix, dos = (list(text_pieces(tmp_path / name, size=300)) for name in ("unix.txt", "dos.txt"))
    assert "".join(unix) == "".join(dos).replace("\r\n", "\n") == lines
    assert all(piece.endswith("\r\n") for piece in dos)
    assert len(unix) > 10
