"""Stopping the code at a line of choice, as Ctrl-C or a kill does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any


class Lines:
    """Lines run so far in the modules watched."""

    def __init__(self) -> None:
        self.run = 0


@contextlib.contextmanager
def stopped_at(number: int, stop: Callable[[], None], *modules: ModuleType) -> Iterator[Lines]:
    """Call ``stop``, which raises or ends the process, before line ``number`` (from 1) that runs in ``modules``.

    Only lines of this thread count.
    """
    lines, files = Lines(), {module.__file__ for module in modules}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            lines.run += 1
            if lines.run == number:
                stop()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def interrupt() -> None:
    """Ctrl-C."""
    raise KeyboardInterrupt
