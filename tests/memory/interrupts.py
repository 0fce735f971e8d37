"""Stopping the code at a line of choice, as Ctrl-C or a kill does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import torch


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

    before, grad = sys.gettrace(), torch.is_grad_enabled()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)
        # stopped on the line of a "with torch.no_grad()" that is ending, its __exit__ has not run; a signal
        # does not come there
        torch.set_grad_enabled(grad)


def interrupt() -> None:
    """Ctrl-C."""
    raise KeyboardInterrupt
