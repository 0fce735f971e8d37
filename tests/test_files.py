"""Files are replaced whole or not at all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trailmark.files import (
    FileEntry,
    expect_writable,
    find_damage,
    in_threads,
    read_json,
    replacing,
    sha256_of,
    write_json,
    write_text,
)

UMASK = os.umask(0)
os.umask(UMASK)


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


def test_what_is_written_anew_keeps_its_permissions(tmp_path: Path) -> None:
    write_text(tmp_path / "mine", "a")
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o666 & ~UMASK
    (tmp_path / "mine").chmod(0o600)
    write_text(tmp_path / "mine", "b")
    assert (tmp_path / "mine").read_text() == "b"
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o600


def test_a_failing_replacement_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_text(tmp_path / "folder", "text")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_a_failing_write_names_its_file(tmp_path: Path) -> None:
    """As the system says it of a disk that is full: of a write, without a name."""
    with (
        pytest.raises(OSError, match=r"No space left on device: .*page\.html'") as failed,
        replacing(tmp_path / "page.html"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert failed.value.errno == errno.ENOSPC
    assert not any(tmp_path.iterdir())


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


def test_every_damaged_file_is_told_and_every_byte_counted(tmp_path: Path) -> None:
    contents = {name: name.encode() * 1000 for name in ("same", "flipped", "shorter", "gone")}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    files = {name: FileEntry(len(content), sha256_of(tmp_path / name)) for name, content in contents.items()}
    reports: list[tuple[int, int]] = []
    assert find_damage(tmp_path, files, lambda done, total: reports.append((done, total))) == {}
    assert reports[-1] == (sum(map(len, contents.values())),) * 2
    (tmp_path / "flipped").write_bytes(b"F" + contents["flipped"][1:])
    (tmp_path / "shorter").write_bytes(contents["shorter"][1:])
    (tmp_path / "gone").unlink()
    wrong = find_damage(tmp_path, files)
    assert list(wrong) == ["flipped", "shorter", "gone"]
    assert "was changed" in wrong["flipped"]
    assert wrong["shorter"] == "has 6999 bytes, expected 7000"
    assert "is missing" in wrong["gone"]


def test_work_in_threads_keeps_its_order_and_stops_at_an_error() -> None:
    assert in_threads(lambda n: n * n, range(50)) == [n * n for n in range(50)]
    begun = []

    def fail_first(n: int) -> None:
        begun.append(n)
        if n == 0:
            raise KeyError(n)
        time.sleep(0.002)

    with pytest.raises(KeyError, match="0"):
        in_threads(fail_first, range(1000))
    assert len(begun) < 1000


@pytest.mark.skipif(not Path("/proc/self/fd/1").exists(), reason="Linux has these")
@pytest.mark.parametrize("name", ["fd/1", "a link"])
def test_standard_output_stays_what_the_shell_opened(name: str, tmp_path: Path) -> None:
    if name == "a link":  # as /dev/stdout is one
        place = tmp_path / "stdout"
        place.symlink_to("/proc/self/fd/1")
    else:
        place = Path("/proc/self", name)
    program = (
        "from pathlib import Path; from trailmark.files import write_text; "
        f"write_text(Path({str(place)!r}), 'content')"
    )
    with open(tmp_path / "out", "wb") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
    assert (tmp_path / "out").read_bytes() == b"content"


def test_a_fifo_that_nobody_reads_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trailmark.files._PATIENCE", 0.05)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="output: nothing reads what is written"):
        write_text(tmp_path / "fifo", "content")


def test_a_folder_that_is_held_as_python_ends_is_let_go_of_without_a_word(tmp_path: Path) -> None:
    """Modules are emptied by then, and what they held goes in any order."""
    code = """
import sys
from pathlib import Path
from trailmark import files
class Late:
    held = files.HeldFolder(Path(sys.argv[1]), "busy")
sys.late = Late()
del files.os.close
files.os = None
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
