"""A copy of the package that a test may add files to, and programs that run with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import trailmark


def copy_of_the_package(folder: Path) -> Path:
    """``folder``/trailmark, the package's files without what Python compiled of them."""
    source, target = Path(trailmark.__file__).parent, folder / "trailmark"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def run_program(program: str, folder: Path) -> str:
    """What a Python program prints that imports the package in ``folder``."""
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    program = f"import trailmark; assert trailmark.__file__.startswith({str(folder)!r})\n{program}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
