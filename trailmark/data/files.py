"""Writing files so that a crash, a full disk or Ctrl-C never leaves a broken one behind."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

logger = logging.getLogger(__name__)


def write_text(path: Path, text: str, durable: bool = False) -> None:
    """Replace ``path`` in one step: the old content stays whole until the new one is on disk.

    ``durable``: when this returns, the new content outlives a power cut too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable) as file:
        file.write(text)


@contextmanager
def replacing(path: Path, durable: bool = False) -> Iterator[TextIO]:
    """A file to write text in, which takes the place of ``path`` in one step at the end; after an error there is none.

    ``durable``: after the end, the new content outlives a power cut too.
    """
    if path.exists() and not path.is_file() and not path.is_dir():  # /dev/stdout: written to, never replaced
        with open(path, "w", encoding="utf-8") as file:
            yield file
        return
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yield file
            if durable:
                sync_file(file)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # as an ordinary file: mkstemp's are private
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def write_json(path: Path, content: Any, durable: bool = False) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n", durable)


def sync_file(file: IO[Any]) -> None:
    """What was written to an open file is on the disk itself when this returns."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """New and replaced names in a folder are on the disk itself when this returns."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path, progress: Callable[[int], None] = lambda count: None) -> str:
    """The SHA-256 of a file's content, in hexadecimal; ``progress`` is given the number of bytes of each piece."""
    hasher = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            hasher.update(block)
            progress(len(block))
    return hasher.hexdigest()


def read_json(path: Path) -> Any:
    """The content, or None where there is no readable JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


@contextmanager
def locked(folder: Path, command: str) -> Iterator[None]:
    """Nobody else who asks writes in the folder; a killed process' lock goes with it.

    Raises:
        ValueError: ``command`` is at work there.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"output: another {command} is writing in {str(folder)!r}. Wait for it or choose another folder."
            ) from error
        except OSError as error:  # some network file systems have no locks
            logger.warning(
                "%s cannot be locked (%s): start no second %s there.", folder, error.strerror, command
            )
        yield
    finally:
        os.close(handle)


def expect_place(argument: str, folder: Path) -> None:
    """A ValueError where ``folder`` is none and cannot be made one; nothing is made."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(
            f"{argument}: expected a folder to write in, {str(folder)!r} is not: {str(place)!r} is no folder or not "
            "writable. Choose another one."
        )


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
