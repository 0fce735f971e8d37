"""Files and folders that are whole or not there: how everything that trailmark saves is written, locked and verified.

What is new is written under another name, brought to the disk itself (fsync) and renamed in one step. A kill, a full
disk or Ctrl-C leaves what was there before, and at most a leftover that the next start removes. A manifest beside the
data, written last, holds the format's version and the length and SHA-256 of every file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple, TextIO, TypeVar

try:
    import fcntl
except ImportError:  # not on Windows: two writers of one file are not noticed there
    fcntl = None  # type: ignore[assignment]

from trailmark import untrusted

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""It is called with the bytes that are done and the bytes in all."""

_PIECE_BYTES = 1 << 20
_PATIENCE = 5.0  # seconds for the reader of a FIFO
_THREADS = 8  # that hash files: more than a disk keeps busy
_SPARE = 1 << 20  # bytes of a disk that are left alone
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LEFTOVER_FOLDER = re.compile(r"(.+)\.(?:tmp|removed)-\d+(?:-\d+)?")

T = TypeVar("T")
R = TypeVar("R")


# --- one file ----------------------------------------------------------------------------------------------


def write_text(path: Path, text: str, durable: bool = False) -> None:
    """Replace ``path`` in one step: the old content stays whole until the new one is on the disk.

    ``durable``: when this returns, the new content outlives a power cut too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable) as file:
        file.write(text)


def write_json(path: Path, content: Any, durable: bool = False) -> None:
    """Replace ``path`` with JSON, as :func:`write_text` does."""
    write_text(path, json.dumps(content, indent=1) + "\n", durable)


def read_json(path: Path, links: bool = False) -> Any:
    """The content of a file, or None where there is no readable JSON in a regular file; ``links`` are followed."""
    try:
        return untrusted.read_json(path, path.name, finite=False, links=links)
    except (OSError, ValueError):
        return None


@contextmanager
def replacing(path: Path, durable: bool = False) -> Iterator[TextIO]:
    """A file to write text in, which takes the place of ``path`` in one step at the end; after an error there is none.

    ``durable``: after the end, the new content outlives a power cut too.
    """
    if _is_device(path):  # written to, never replaced
        with os.fdopen(_open_for_writing(path), "w", encoding="utf-8", newline="\n") as file:
            yield file
        return
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            yield file
            if durable:
                sync_file(file)
        mask = os.umask(0)
        os.umask(mask)
        mode = 0o666 & ~mask  # as an ordinary file: mkstemp's are private
        with contextlib.suppress(OSError):  # as the file that makes way
            found = path.stat().st_mode
            mode = stat.S_IMODE(found) if stat.S_ISREG(found) else mode
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and is_no_space(error) and not error.filename:  # a write knows no name
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    if durable:
        sync_folder(path.parent)


def _is_device(path: Path) -> bool:
    """Whether it is no file of its own: a FIFO, a device, or /dev/stdout, which leads to whatever the shell opened."""
    if path.is_dir() or not path.exists():
        return False
    if not path.is_file():
        return True
    while not Path(os.path.realpath(path.parent)).is_relative_to("/proc"):
        if not path.is_symlink():
            return False
        path = path.parent / os.readlink(path)
    return True


def _open_for_writing(path: Path) -> int:
    """A FIFO, a device: one that nobody reads is waited for some seconds, not for ever."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() > end:
                raise ValueError(
                    f"output: nothing reads what is written to {str(path)!r}. Start its reader first, or name a file."
                ) from error
            time.sleep(0.01)
        else:
            if hasattr(os, "set_blocking"):  # a reader that is slow is waited for
                os.set_blocking(descriptor, True)
            return descriptor


def remove_unfinished(folder: Path, *names: str) -> None:
    """Remove what a kill left of files with these names that were being replaced; one process at a time may do this."""
    for path in folder.glob(".*"):
        if path.name.startswith(tuple(f".{name}." for name in names)):
            path.unlink(missing_ok=True)


def sync_file(file: IO[Any]) -> None:
    """Bring what was written to an open file to the disk itself."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring the names that are new or were replaced in a folder to the disk itself."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset`` of a file."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


# --- a folder, in one step ---------------------------------------------------------------------------------


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """A new folder beside ``target`` to write into; at the end it is removed, unless it was renamed."""
    staging = _name_beside(target, "tmp")
    try:
        staging.mkdir(parents=True)
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def put_in_place(staging: Path, target: Path) -> None:
    """Give a folder its name in one step; another folder of that name makes room first, and is removed."""
    old = _name_beside(target, "removed") if target.exists() else None
    if old is not None:
        os.rename(target, old)
    os.rename(staging, target)
    sync_folder(target.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def remove_folder(folder: Path) -> bool:
    """Take a folder's name away first, then its files: a kill leaves no folder that lacks some of them.

    Returns:
        Whether its name is gone. If not, it takes space, no more: the next call tries again.
    """
    leftover, gone = _name_beside(folder, "removed"), False
    with contextlib.suppress(OSError):
        os.rename(folder, leftover)
        gone = True
        sync_folder(folder.parent)
    shutil.rmtree(leftover, ignore_errors=True)
    return gone


def remove_leftover_folders(parent: Path, name: re.Pattern[str]) -> list[str]:
    """Remove what killed processes left of folders with such names, half-written or half-removed; give their names."""
    if not parent.is_dir():
        return []
    names = []
    for path in parent.iterdir():
        if (match := _LEFTOVER_FOLDER.fullmatch(path.name)) and name.fullmatch(match[1]):
            shutil.rmtree(path, ignore_errors=True)  # it takes space, no more: the next start tries again
            names.append(path.name)
    return sorted(names)


def _name_beside(target: Path, kind: str) -> Path:
    """A name that is not taken, and that :func:`remove_leftover_folders` knows."""
    path, number = target.with_name(f"{target.name}.{kind}-{os.getpid()}"), 0
    while path.exists():  # of a process that had our number
        number += 1
        path = target.with_name(f"{target.name}.{kind}-{os.getpid()}-{number}")
    return path


# --- hashes ------------------------------------------------------------------------------------------------


class FileEntry(NamedTuple):
    """What a manifest says of a file."""

    bytes: int
    sha256: str


def sha256_of(path: Path, more: Callable[[int], None] = lambda count: None, sync: bool = False) -> str:
    """The SHA-256 of a file's content, in hexadecimal.

    Args:
        more: is called with the number of bytes of each piece that was read.
        sync: bring the file to the disk itself before.
    """
    hasher = hashlib.sha256()
    with open(path, "rb+" if sync else "rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        while piece := file.read(_PIECE_BYTES):
            hasher.update(piece)
            more(len(piece))
    return hasher.hexdigest()


def in_threads(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Do the work for each item, several at a time: reading, writing and hashing let other threads run.

    After an error, the first in the items' order, or Ctrl-C no more of it is begun.
    """
    if len(items) <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1, len(items))) as pool:
        results = [pool.submit(work, item) for item in items]
        try:
            return [result.result() for result in results]
        finally:
            for result in results:
                result.cancel()


def counting(progress: Progress | None, total: int) -> Callable[[int], None]:
    """A function that several threads tell how many bytes more are done; ``progress`` is called by one at a time."""
    done, one_by_one = 0, threading.Lock()

    def more(count: int) -> None:
        nonlocal done
        if progress is not None:
            with one_by_one:
                done += count
                progress(done, total)

    return more


def find_wrong_lengths(folder: Path, files: Mapping[str, FileEntry]) -> dict[str, str]:
    """What is wrong with each file that is missing, no regular file, or of another length than its manifest says."""
    wrong = {}
    for name, entry in files.items():
        try:
            untrusted.expect_regular(folder / name, name)
            size = (folder / name).stat().st_size
        except OSError as error:
            wrong[name] = f"is missing or unreadable ({error.strerror})"
        except ValueError as error:  # a link leads to somebody else's file
            wrong[name] = f"is none of ours ({str(error).rstrip('.')})"
        else:
            if size != entry.bytes:
                wrong[name] = f"has {size} bytes, expected {untrusted.brief(entry.bytes)}"
    return wrong


def find_damage(
    folder: Path, files: Mapping[str, FileEntry], progress: Progress | None = None
) -> dict[str, str]:
    """What is wrong with each file that is not as its manifest says; every byte is read, of several files at a time."""
    wrong = find_wrong_lengths(folder, files)
    more = counting(progress, sum(entry.bytes for entry in files.values()))

    def look_at(name: str) -> str | None:
        try:
            digest = sha256_of(folder / name, more)
        except OSError as error:
            return f"cannot be read ({error.strerror or error})"
        if digest != (expected := files[name].sha256):
            return f"was changed: its SHA-256 is {digest[:12]}..., the manifest says {expected[:12]}..."
        return None

    names = [name for name in files if name not in wrong]
    looks = dict(zip(names, in_threads(look_at, names), strict=True))
    return {name: text for name in files if (text := wrong.get(name) or looks.get(name))}


# --- manifests ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder with a manifest: where the manifest lies, and what messages say about such a folder."""

    argument: str
    """The argument by which a user names the folder."""
    manifest: str
    """The manifest's file."""
    format: int
    """The newest version that is read."""
    noun: str
    """What the folder is: "a prepared corpus"."""
    command: str
    """What makes it: "trailmark prepare"."""

    def read(self, folder: Path) -> dict[str, Any]:
        """The manifest's content.

        Raises:
            ValueError: there is none, it is broken, or a newer trailmark wrote it.
        """
        path = folder / self.manifest
        try:
            content = untrusted.read_json(path, self.argument)
        except FileNotFoundError as error:
            raise ValueError(
                f"{self.argument}: expected {self.noun}, {str(folder)!r} has no {self.manifest}. Make one with "
                f"{self.command}; the same command finishes one that was interrupted."
            ) from error
        except ValueError as error:
            raise self.broken(folder, str(error).rstrip(".")) from error
        if not isinstance(content, dict) or type(content.get("format")) is not int:
            raise self.broken(folder, f"it is no manifest of {self.noun}")
        if content["format"] > self.format:
            raise ValueError(
                f"{self.argument}: expected format {self.format} or older, {str(path)!r} has format "
                f"{untrusted.brief(content['format'])}. Update trailmark, or make {self.noun} with this version in "
                "another folder."
            )
        return content

    def read_as(self, folder: Path, parse: Callable[[dict[str, Any]], T]) -> tuple[dict[str, Any], T]:
        """The manifest's content, and what ``parse`` makes of it.

        Raises:
            ValueError: as :meth:`read`; what ``parse`` refuses.
        """
        content = self.read(folder)
        try:
            return content, parse(content)
        except ValueError as error:
            raise self.broken(folder, error) from error

    def broken(self, folder: Path, reason: object) -> ValueError:
        """The error for a manifest that cannot be relied on."""
        return ValueError(
            f"{self.argument}: {str(folder / self.manifest)!r} is broken ({reason}). {self._way_out}"
        )

    def expect_lengths(self, folder: Path, files: Mapping[str, FileEntry]) -> None:
        """Raise a ValueError where files are missing or of other lengths than the manifest says."""
        self._expect_none(folder, find_wrong_lengths(folder, files))

    def verify(self, folder: Path, files: Mapping[str, FileEntry], progress: Progress | None = None) -> None:
        """Read every byte and raise a ValueError that names each file that is not as the manifest says."""
        self._expect_none(folder, find_damage(folder, files, progress))

    def _expect_none(self, folder: Path, wrong: Mapping[str, str]) -> None:
        if wrong:
            texts = "; ".join(f"{name} {text}" for name, text in wrong.items())
            raise ValueError(f"{self.argument}: {str(folder)!r} is damaged: {texts}. {self._way_out}")

    @property
    def _way_out(self) -> str:
        return f"Remove the folder and make it again with {self.command}."


def expect_same_settings(
    folder: Path, noun: str, old: Any, new: Mapping[str, Any], ignored: Sequence[Sequence[str]] = ()
) -> None:
    """Raise a ValueError if what lies in a folder was made with other settings than a command asks for.

    Args:
        noun: what lies there, for the message.
        old: the settings in the manifest that is there, whatever it holds.
        ignored: paths of keys that do not count.
    """
    for name, was, now in _differences(old, new, [list(path) for path in ignored], []):
        raise ValueError(
            f"output: {str(folder)!r} holds {noun} with {name} {untrusted.brief(was)}, this command asks for "
            f"{untrusted.brief(now)}. "
            "Choose another folder or remove this one."
        )


def _differences(
    old: Any, new: Mapping[str, Any], ignored: list[list[str]], above: list[str]
) -> Iterator[tuple[str, Any, Any]]:
    known = old if isinstance(old, Mapping) else {}
    # what a newer version kept beside the settings of a manifest is not compared, what it kept inside one is
    for key in [*new, *(known.keys() - new.keys() if above else ())]:
        path = [*above, key]
        if path in ignored:
            continue
        was, value = known.get(key), new.get(key)
        if isinstance(value, Mapping) and isinstance(was, Mapping):
            yield from _differences(was, value, ignored, path)
        elif isinstance(value, list) and isinstance(was, list) and was != value:
            if (own := _named(was)) != (others := _named(value)):
                yield " ".join(path), own, others
                continue
            pairs = (pair for pair in zip(was, value, strict=False) if pair[0] != pair[1])
            yield " ".join(path), *next(pairs, (len(was), len(value)))
        elif was != value:
            yield " ".join(path), was, value


def _named(entries: list[Any]) -> str:
    """The first name in a list of named things, and how many there are more; empty for other lists."""
    names = [str(entry.get("name")) for entry in entries if isinstance(entry, Mapping)]
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else "".join(names)


# --- room on a disk ----------------------------------------------------------------------------------------


class NoSpaceError(ValueError):
    """A disk is full. What was written before stays valid."""

    def __init__(self, argument: str, folder: Path, needed: int, way_out: str) -> None:
        self.needed = needed
        """Bytes that were to be written, or kept free."""
        self.free = shutil.disk_usage(folder).free
        """Bytes that are free."""
        limited = "" if self.free < needed else " and a quota or limit of file size below it"
        super().__init__(
            f"{argument}: expected {in_units(needed)} free on the disk of {str(folder)!r}, "
            f"got {in_units(self.free)}{limited}. {way_out}"
        )


def in_units(num_bytes: int) -> str:
    """A number of bytes for people: "2.5 MiB"."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.1f} {unit}"
    return f"{num_bytes} bytes"


def is_no_space(error: OSError) -> bool:
    """Whether the disk, a quota or a limit of file size is what stopped a write."""
    return error.errno in _NO_SPACE


def expect_room(folder: Path, needed: int, kept: str) -> None:
    """Raise a ValueError if the disk has no room for so many bytes; ``kept`` says what an earlier run left there."""
    free = shutil.disk_usage(folder).free
    if needed + _SPARE > free:
        raise ValueError(
            f"output: expected about {needed + _SPARE:,} bytes free on the disk of {str(folder)!r}, there are "
            f"{free:,}. Free some space or choose another folder; {kept}."
        )


@contextmanager
def telling_of_a_full_disk(folder: Path, kept: Callable[[], str]) -> Iterator[None]:
    """Turn the system's error for a full disk into a ValueError; ``kept`` says what is left, and how to go on."""
    try:
        yield
    except OSError as error:
        if not is_no_space(error):
            raise
        raise ValueError(
            f"output: the disk of {str(folder)!r} is full ({error.strerror}). {kept()}"
        ) from error


# --- places and locks --------------------------------------------------------------------------------------


def expect_place(argument: str, folder: Path) -> None:
    """Raise a ValueError where ``folder`` is none and cannot be made one; nothing is made."""
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


def expect_outside(output: Path, paths: Sequence[str | Path], what: str) -> None:
    """Raise a ValueError where ``output`` lies in one of ``paths``: what is written there would be read as ``what``."""
    for path in map(Path, paths):
        if path.is_dir() and Path(os.path.realpath(output)).is_relative_to(os.path.realpath(path)):
            raise ValueError(
                f"output: expected a folder outside of the {what}, {str(output)!r} lies in {str(path)!r}. "
                "Name another output."
            )


def expect_replaceable(argument: str, path: Path, beginning: bytes) -> None:
    """Raise a ValueError where a file at ``path`` does not begin as what is to be written there: it is another's."""
    if not path.is_file():
        return
    with untrusted.open_regular(path, argument, links=True) as file:
        found = file.read(len(beginning))
    if found and found != beginning:
        raise ValueError(
            f"{argument}: expected a new file or one to write anew, {str(path)!r} holds something else, which would be "
            "lost. Choose another name, or remove it."
        )


def lock(descriptor: int, shared: bool = False) -> bool:
    """Keep others from this file or folder until the descriptor is closed; False: another process has it.

    Args:
        shared: those that ask so too are not kept from it.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems have no locks
        _warn_once(error.strerror)
    return True


@cache
def _warn_once(reason: str) -> None:
    logger.warning(
        "Files here cannot be locked (%s): start nothing else that writes in the same folder.", reason
    )


class BusyError(ValueError):
    """Another process holds a folder."""


class HeldFolder:
    """A folder that others are kept from writing in until this is left, or collected: Ctrl-C may come at any line.

    A killed process' hold goes with it.

    Args:
        busy: the message where another process holds it.

    Raises:
        BusyError: another process holds it.
    """

    _open: list[int] = []  # the folder's descriptor, taken out as it is closed

    def __init__(self, folder: Path, busy: str) -> None:
        self._open = [os.open(folder, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))]
        if not lock(self._open[0]):
            raise BusyError(busy)

    def is_at(self, folder: Path) -> bool:
        """Whether ``folder`` is still the one that is held, neither removed nor replaced."""
        try:
            return os.path.samestat(os.fstat(self._open[0]), os.stat(folder))
        except OSError:
            return False

    def sync(self) -> None:
        """Bring the names of its files to the disk itself."""
        os.fsync(self._open[0])

    def __enter__(self) -> HeldFolder:
        return self

    def __exit__(self, *_: object, close: Callable[[int], None] = os.close) -> None:
        while self._open:  # bound above: as Python ends, modules are emptied before the last objects go
            close(self._open.pop())

    __del__ = __exit__


def locked(folder: Path, command: str) -> HeldFolder:
    """Keep everyone else who asks from writing in the folder; a ValueError where ``command`` is at work there."""
    return HeldFolder(
        folder,
        f"output: another {command} is writing in {str(folder)!r}. Wait for it or choose another folder.",
    )


@contextmanager
def made_and_locked(folder: Path, command: str) -> Iterator[None]:
    """As :func:`locked`, of an output that is made where there is none; after an error, if empty, it is removed."""
    is_new = not folder.exists()
    expect_writable("output", folder)
    with locked(folder, command):
        try:
            yield
        except BaseException:
            if is_new:
                with contextlib.suppress(OSError):  # something lies in it
                    folder.rmdir()
            raise
