"""What a command shows while it works: a line that renews itself, or in a log file a line now and then."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from trailmark.values import duration, size

__all__ = [
    "Progress",
    "bar",
    "duration",
    "losses",
    "measured",
    "preparing_line",
    "size",
    "table_line",
    "training_line",
]


class Progress:
    """One status line. On a terminal it is rewritten in place; elsewhere one is printed every 15 seconds.

    Whoever reads may leave, as ``| head`` does: the work goes on.

    ``quiet``: nothing is shown or said, as by all but one of several processes.
    """

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self.stream: TextIO | None = stream or sys.stderr  # None: it was closed before Python began
        self.quiet, self.live = quiet, self.stream is not None and self.stream.isatty()
        self._shown = 0.0
        self._width = 0

    def show(self, message: str) -> None:
        now = time.monotonic()
        if self.quiet or now - self._shown < (0.1 if self.live else 15.0):
            return
        self._shown = now
        if self.live:
            # a line that wraps would leave its first half behind
            message = message[: shutil.get_terminal_size().columns - 1]
            _write(self.stream, "\r" + message.ljust(self._width))
            self._width = len(message)
        else:
            _write(self.stream, message + "\n")

    def clear(self) -> None:
        """Remove the line, before something that stays is printed."""
        if self.live and self._width:
            _write(self.stream, "\r" + " " * self._width + "\r")
        self._width = 0
        self._shown = 0.0

    def say(self, message: str) -> None:
        """Print a line that stays."""
        if self.quiet:
            return
        self.clear()
        _write(sys.stdout, message + "\n")


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # it was closed before Python began
        return
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:  # Python flushes once more at its end, and would fail there too
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def bar(done: int, total: int, width: int = 24) -> str:
    """``[#####.....]``"""
    filled = width * done // max(1, total)
    return "[" + "#" * filled + "." * (width - filled) + "]"


def measured(values: Mapping[str, float]) -> str:
    """``loss 1.228, accuracy 0.988``"""
    return ", ".join(f"{key} {value:.3f}" for key, value in values.items())


def training_line(
    step: int,
    total: int,
    seconds: float,
    step_loss: float | None,
    averages: Mapping[str, float],
    tokens_per_second: float,
) -> str:
    """How far a training is, how long it still takes, how fast it is and how well it goes.

    What matters most comes first: a narrow terminal shows no more.
    """
    left = duration(seconds / max(1, step) * (total - step))
    speed = f"{tokens_per_second:,.0f} tokens/s"
    return f"{bar(step, total, 12)} {step}/{total}  {left} left  {speed}  {losses(step_loss, averages)}"


def losses(step_loss: float | None, averages: Mapping[str, float]) -> str:
    """``loss 1.228 nats per token; moving averages: loss 1.240, accuracy 0.988``

    Args:
        step_loss: of the last step, in nats per token, as ``trailmark evaluate`` prints it of a text; None: it was left
            out.
        averages: over some 20 steps.
    """
    last = "" if step_loss is None else f"loss {step_loss:.3f} nats per token; "
    return f"{last}moving averages: {measured(averages)}"


def counted(number: int, noun: str) -> str:
    """``1 document``, ``2 documents``"""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def preparing_line(
    documents: int, tokens: int, done: int, total: int | None, seconds: float, kept: int = 0
) -> str:
    """How far a corpus is, how large, and how long it still takes; ``kept`` of what is done was done before."""
    found = f"{counted(documents, 'document')}  {tokens:,} tokens"
    if not total:
        return found
    fresh = done - kept
    left = f"  {duration(seconds / fresh * (total - done))} left" if fresh > 0 and seconds else ""
    return f"{bar(done, total)} {done / total:.0%}  {found}{left}"


def table_line(done: int, total: int, kept: int, chunks: int, seconds: float) -> str:
    """How far a neighbour table is, in windows of ``chunks``; ``kept`` of those done were made before."""
    shown = f"{bar(done, total)} {done:,}/{total:,} windows"
    if (fresh := done - kept) <= 0:
        return shown
    left = duration(seconds / fresh * (total - done))
    return f"{shown}  {fresh * chunks / max(seconds, 1e-3):,.0f} chunks/s  {left} left"
