"""``trailmark read`` in small pieces and stretches, slowly, and with a limit of file size for one of its processes.

python -m torch.distributed.run --nproc-per-node 2 -m tests.evaluation.reading_together SECONDS BYTES read MODEL ...

SECONDS a piece takes at least; BYTES that a file of process 1 may have, 0: any number.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.torchrun import launched
from trailmark import cli
from trailmark.evaluation import parted_reading
from trailmark.memory import hashes
from trailmark.models import causal_lm
from trailmark.processes import rank

PIECE, STRETCH, BLOCK = 16, 64, 5000


def start(seconds: float, limit: int, *words: str | Path) -> subprocess.Popen[str]:
    """The command in two processes, which may be killed with :func:`kill`."""
    command = launched(2, "tests.evaluation.reading_together", seconds, limit, "read", *words)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def kill(launcher: subprocess.Popen[str], alone: bool = False) -> str | None:
    """Kill the launcher and all that it started: what they said; None: it had ended. They are in no group of their own.

    ``alone``: what it started must find out.
    """
    if launcher.poll() is not None:
        return None
    parent = psutil.Process(launcher.pid)
    parent.suspend()  # it sees none of the others die
    for process in [*([] if alone else parent.children(recursive=True)), parent]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return launcher.communicate(timeout=60)[0]  # ends once nobody can write any more


def main(seconds: float, limit: int, words: list[str]) -> None:
    torch.set_num_threads(1)
    causal_lm._READ_TOKENS, hashes.BLOCK_BYTES = PIECE, BLOCK
    take = parted_reading.PartedReader._take

    def slowly(*arguments: Any) -> None:
        take(*arguments)
        time.sleep(seconds)

    reader: Any = parted_reading.PartedReader
    reader._take = slowly
    parted_reading.PartedReader = partial(reader, stretch=STRETCH)  # type: ignore[misc,assignment]
    if limit and rank() == 1:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY)
        )  # Python ignores its signal
    cli.main(words)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
