"""Commands that get Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def interrupted(
    words: Sequence[object], ready: Callable[[], bool], log: Path = Path(os.devnull)
) -> tuple[int, str]:
    """A process of its own gets Ctrl-C once ``ready``: its exit code and its errors; what it prints goes to ``log``."""
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "trailmark", *map(str, words)],
            stdout=out, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1],
        )  # fmt: skip
        try:
            began = time.monotonic()
            while not (is_ready := ready()) and process.poll() is None and time.monotonic() - began < 180:
                time.sleep(0.02)
            assert is_ready, "it never came so far"
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=180)
        finally:
            process.kill()
    return process.returncode, err
