"""The one door for files from strangers: what it lets in, and that everything else is one line."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import one_line
from trailmark.untrusted import (
    brief,
    expect_regular,
    files_like,
    open_regular,
    parse_json,
    parse_yaml,
    read_bytes,
    read_json,
    read_yaml,
)

BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 20)
)


# --- files -----------------------------------------------------------------------------------------------------


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    with open_regular(tmp_path / "file", "text") as file:
        assert file.read() == b"content"
    assert read_bytes(tmp_path / "file", "text", most=7) == b"content"
    expect_regular(tmp_path / "file", "text")


def test_what_is_missing_is_missing(tmp_path: Path) -> None:
    for call in (open_regular, expect_regular, read_bytes):
        with pytest.raises(FileNotFoundError):
            call(tmp_path / "none", "text")


@pytest.mark.parametrize("kind", ["a folder", "a FIFO", "a socket", "a device", "a link"])
def test_what_is_no_regular_file_is_refused_at_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    if kind == "a folder":
        path.mkdir()
    elif kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as bound:
            monkeypatch.chdir(tmp_path)  # a socket's path is short
            bound.bind("x")
    elif kind == "a device":
        path = Path("/dev/zero")
    else:
        (tmp_path / "file").write_text("content")
        path.symlink_to("file")
        assert read_bytes(path, "text", links=True) == b"content"
    for call in (open_regular, expect_regular, read_bytes):
        assert one_line(lambda call=call: call(path, "text")).startswith("text: expected a regular file")
        assert kind in one_line(lambda call=call: call(path, "text"))


def test_a_link_is_followed_to_a_regular_file_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    (tmp_path / "loop").symlink_to("loop")
    assert "a FIFO" in one_line(lambda: open_regular(tmp_path / "link", "text", links=True))
    assert "cannot read" in one_line(lambda: open_regular(tmp_path / "loop", "text", links=True))
    assert "cannot read" in one_line(lambda: open_regular("zero\0byte", "text"))


def test_a_file_is_no_larger_than_what_it_is_read_as(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        file.truncate(1 << 40)  # of zeros, which take no room
    assert "at most" in one_line(lambda: read_json(tmp_path / "file", "record"))
    assert "at most" in one_line(lambda: read_yaml(tmp_path / "file", "config"))


def test_hidden_files_are_none_of_a_folder(tmp_path: Path) -> None:
    for name in ("b.json", "a.json", "._a.json", ".#a.json", "c.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in files_like(tmp_path, "*.json", "a.*")] == ["a.json", "b.json"]


# --- JSON ------------------------------------------------------------------------------------------------------


def test_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"a": [1, 2.5, null, true, "\\u00e9"]}')
    assert read_json(tmp_path / "file", "record") == {"a": [1, 2.5, None, True, "é"]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 3000, "too deep"),
        ("[" * 1_000_000, "too deep"),
        ('{"a":' * 3000, "too deep"),
        ('{"a": NaN}', "finite"),
        ('{"a": -Infinity}', "finite"),
        ('{"a": 1e999}', "finite"),
        ("1" * 5000, "no JSON"),
        (b'{"a": "\xff"}', "byte at 7"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "'c' twice"),
        ("{" + "".join(f'"{n}": 0, ' for n in range(100_000)) + '"99999": 0}', "'99999' twice"),
        ("{", "no JSON"),
        ("", "no JSON"),
    ],
)
def test_other_json_is_one_line(content: bytes | str, said: str) -> None:
    message = one_line(lambda: parse_json(content, "record: 'x'"))
    assert message.startswith("record: 'x'")
    assert said in message


def test_json_of_losses_may_hold_what_is_not_finite() -> None:
    assert parse_json("[Infinity]", "record", finite=False) == [float("inf")]


# --- YAML ------------------------------------------------------------------------------------------------------


def test_yaml_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("base: &base {x: 1, y: [1, 2]}\nown:\n  <<: *base\n  x: 3e-4\n")
    assert read_yaml(tmp_path / "file", "config") == {
        "base": {"x": 1, "y": [1, 2]},
        "own": {"x": "3e-4", "y": [1, 2]},
    }
    assert parse_yaml("", "config") is None
    merged = "base: &base {x: 2}\nouter:\n  a: &a {<<: *base, x: 1}\n  b: {<<: *a}\n"
    assert parse_yaml(merged, "config")["outer"] == {"a": {"x": 1}, "b": {"x": 1}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 3000, "too deep"),
        (BOMB, "aliases"),
        ("a: &x [*x]", "holds itself"),
        ("a: &x {y: *x}", "holds itself"),
        ("a: 1\nb: {c: 1, c: 2}", "'c' stands twice"),
        ("a: 1" + ":1" * 100_000, "a number has 200,001 characters"),
        ("!!python/object/apply:os.system [ls]", "no YAML"),
        ("a: " + "9" * 5000, "no YAML"),
        ("2020-99-99", "no YAML"),
        ("? [1, 2]\n: 3", "no YAML"),
        ("a: b: c", "no YAML"),
        ("!!bool x", "no YAML"),
        ("a: !!int ''", "no YAML"),
        ("!!float ''", "no YAML"),
        ("!!timestamp foo", "no YAML"),
        ("!!binary é", "no YAML"),
        (b"a: \xff", "byte at 3"),
    ],
)
def test_other_yaml_is_one_line(content: bytes | str, said: str) -> None:
    message = one_line(lambda: parse_yaml(content, "config: 'x'"))
    assert message.startswith("config: 'x'")
    assert said in message


# --- messages --------------------------------------------------------------------------------------------------


def test_a_message_quotes_briefly() -> None:
    itself: list[Any] = []
    itself.append(itself)
    shared: list[Any] = [1]
    for _ in range(60):
        shared = [shared] * 9
    for value in (
        "x" * 10_000,
        [1] * 10_000,
        itself,
        shared,
        10**6000,
        [10**6000],
        {n: n for n in range(999)},
    ):
        assert len(brief(value)) <= 160
    assert brief("x" * 100) == repr("x" * 100)
    assert brief("short") == "'short'"
    assert brief([1, "a"]) == "[1, 'a']"
