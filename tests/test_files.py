"""Files are replaced whole or not at all."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from trailmark.files import expect_writable, read_json, write_json, write_text


def test_json_round_trip_makes_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    write_json(path, {"größe": [1, 2.5, None]})
    assert read_json(path) == {"größe": [1, 2.5, None]}
    write_json(path, 3)
    assert read_json(path) == 3
    assert [file.name for file in path.parent.iterdir()] == ["b.json"]


@pytest.mark.parametrize("content", [{"a": object()}, {"a": {1, 2}}])
def test_a_failing_dump_leaves_the_old_file(tmp_path: Path, content: object) -> None:
    path = tmp_path / "a.json"
    write_json(path, "old")
    with pytest.raises(TypeError):
        write_json(path, content)
    assert read_json(path) == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):  # after the temporary file was made
        write_text(path, "half" * 10_000 + "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_replacement_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_text(tmp_path / "folder", "text")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_a_reader_never_sees_half(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, [0] * 20_000)
    seen = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.append(read_json(path))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, 15):
        write_json(path, [number] * 20_000)
    done.set()
    reader.join()
    assert seen
    assert all(content is not None and len(content) == 20_000 for content in seen)


def test_what_is_not_json_reads_as_none(tmp_path: Path) -> None:
    assert read_json(tmp_path / "absent.json") is None
    for content in (b"", b"{", b"\xff\xfe", b'{"a": 1'):
        (tmp_path / "bad.json").write_bytes(content)
        assert read_json(tmp_path / "bad.json") is None


def test_expect_writable(tmp_path: Path) -> None:
    expect_writable("output", tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("in the way")
    for taken in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"^output: expected a folder to write in, .*file"):
            expect_writable("output", taken)
