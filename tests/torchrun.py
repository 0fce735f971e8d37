"""Commands of ``trailmark`` by several processes, as a shell starts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def launched(count: int, module: str, *words: object) -> list[str]:
    """The command that has so many processes run a module."""
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={count}"] if count > 1 else []
    return [sys.executable, *launch, "-m", module, *map(str, words)]


def by_processes(count: int, *words: str | Path) -> str:
    """What a command says that so many processes carry out, which ends well."""
    command = launched(count, "trailmark", *words)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said
