"""The status line, and numbers for people."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from trailmark.report import console
from trailmark.report.console import Progress, bar, duration, losses, measured, size, training_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """What is seen: a carriage return goes back to the start of its line."""
        seen = []
        for line in self.getvalue().split("\n"):
            shown = ""
            for part in line.split("\r"):
                shown = part + shown[len(part) :]
            seen.append(shown.rstrip())
        return seen


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_a_terminal_shows_one_line_that_renews_itself(clock: list[float]) -> None:
    terminal = Terminal()
    progress = Progress(terminal)
    for message in ("reading a long text", "short", "middle one"):
        progress.show(message)
        assert terminal.lines == [message]
        clock[0] += 1
    progress.clear()
    terminal.write("done\n")
    assert terminal.lines == ["done", ""]


def test_a_terminal_is_not_flooded(clock: list[float]) -> None:
    terminal = Terminal()
    progress = Progress(terminal)
    for number in range(100):
        progress.show(f"step {number}")
        clock[0] += 0.01
    assert 9 <= terminal.getvalue().count("\r") <= 11


def test_what_is_cleared_may_be_shown_again_at_once(clock: list[float]) -> None:
    terminal = Terminal()
    progress = Progress(terminal)
    progress.show("one")
    progress.clear()
    progress.show("two")
    assert terminal.lines == ["two"]


def test_a_line_stays_one_line_in_a_narrow_terminal(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")  # a longer line would wrap, and its first half stay
    terminal = Terminal()
    progress = Progress(terminal)
    progress.show("x" * 50)
    assert 10 < len(terminal.lines[0]) < 20


def test_a_log_gets_a_line_now_and_then(clock: list[float]) -> None:
    log = io.StringIO()
    progress = Progress(log)
    for number in range(31):
        progress.show(f"second {number} " + "x" * 200)
        clock[0] += 1
    progress.clear()
    shown = log.getvalue().splitlines()
    assert [line.split(" x")[0] for line in shown] == ["second 0", "second 15", "second 30"]
    assert all(line.endswith("x" * 200) for line in shown)
    assert "\r" not in log.getvalue()


def test_what_was_closed_before_the_start_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    Progress(io.StringIO()).say("said")
    monkeypatch.setattr(sys, "stderr", None)
    progress = Progress()
    progress.show("shown")
    progress.say("said")


def test_work_goes_on_where_whoever_reads_has_left(tmp_path: Path) -> None:
    code = """
import sys
from trailmark.report.console import Progress
progress = Progress()
sys.stdin.readline()  # by now nobody reads
for number in range(3):
    progress.say("said")
    progress._shown = -99.0
    progress.show("shown")
open(sys.argv[1], "w").write("done")
"""
    made, pipe = tmp_path / "made", subprocess.PIPE
    command = [sys.executable, "-c", code, str(made)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        process.stderr.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(60) == 0
    assert made.read_text() == "done"


@pytest.mark.parametrize(
    ("done", "total", "shown"),
    [
        (0, 8, "[....]"),
        (1, 8, "[....]"),
        (2, 8, "[#...]"),
        (7, 8, "[###.]"),
        (8, 8, "[####]"),
        (0, 0, "[....]"),
    ],
)
def test_bar(done: int, total: int, shown: str) -> None:
    assert bar(done, total, 4) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0:00"),
        (0.6, "0:01"),
        (59.4, "0:59"),
        (59.6, "1:00"),
        (65, "1:05"),
        (3599.7, "1:00:00"),
        (7265, "2:01:05"),
    ],
)
def test_duration(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (9.5 * 1024, "9.5 KiB"),
        (500 * 1024, "500 KiB"),
        (520 << 20, "520 MiB"),
        (3 << 29, "1.5 GiB"),
        (2000 << 30, "2000.0 GiB"),
    ],
)
def test_size(count: float, shown: str) -> None:
    assert size(count) == shown


def test_training_line() -> None:
    averages = {"loss": 1.25, "accuracy": 0.5}
    assert training_line(5, 20, 10.0, 1.5, averages, 40_960.4) == (
        "[###.........] 5/20  0:30 left  40,960 tokens/s  "
        "loss 1.500 nats per token; moving averages: loss 1.250, accuracy 0.500"
    )
    assert losses(None, averages) == "moving averages: loss 1.250, accuracy 0.500"  # a step that was left out
    assert measured({"loss": 1.25, "accuracy": 0.5}) == "loss 1.250, accuracy 0.500"
