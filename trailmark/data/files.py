"""Writing files so that a crash, a full disk or Ctrl-C never leaves a broken one behind."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` in one step: the old content stays whole until the new one is on disk."""
    if path.exists() and not path.is_file() and not path.is_dir():  # /dev/stdout: written to, never replaced
        path.write_text(text, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # as an ordinary file: mkstemp's are private
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """The content, or None where there is no readable JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def expect_writable(argument: str, folder: Path) -> None:
    """Make the folder and try to write in it; a ValueError says what is wrong before any work is done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise ValueError(
            f"{argument}: expected a folder to write in, {str(folder)!r} is not ({error.strerror}). "
            "Choose another one or free some space."
        ) from error
