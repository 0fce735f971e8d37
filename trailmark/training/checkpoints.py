"""Checkpoints that cannot be half-written: ``checkpoints/step-00001000/``, whole or not there.

``manifest.json`` in such a folder names every file with its length and SHA-256, and carries a SHA-256 of itself.
A checkpoint is written beside its place under another name, hashed, synced, given its manifest, and renamed in one
step: a kill leaves what was there and a leftover that the next start removes. A checkpoint is *whole* if
:func:`verify` finds nothing wrong with it; what is damaged is never loaded, and never removed by us.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError

from trailmark.data.files import sync_folder
from trailmark.memory.files import in_units

MANIFEST = "manifest.json"
FORMAT = 1

_KIND = "trailmark checkpoint"
_STEP = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"step-\d{8,}\.(?:tmp|removed)-\d+(?:-\d+)?")
_DIGEST = re.compile(r"[0-9a-f]{64}")
# how torch, whose errors are all RuntimeErrors, says that a file could not be written
_OF_FILES = re.compile(
    r"inline_container|PytorchStreamWriter|file write failed|iostream error|I/O error|os error \d|No space left"
)
_PIECE_BYTES = 4 << 20
_THREADS = 8  # of hashing: a disk is slower than so many cores

# Folders that this process wrote or verified, and what the system said of their files then: they are not hashed
# again to know that an older checkpoint may go.
_vouched: dict[Path, tuple[Any, ...]] = {}


def step_folder(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is, or would be."""
    return checkpoints / f"step-{step:08d}"


def steps(checkpoints: Path) -> list[int]:
    """The steps that have a folder, whole or not, ascending."""
    if not checkpoints.is_dir():
        return []
    matches = [_STEP.fullmatch(path.name) for path in checkpoints.iterdir() if path.is_dir()]
    found = sorted(int(match[1]) for match in matches if match)
    return [
        step for step in found if step_folder(checkpoints, step).is_dir()
    ]  # step-000000001 is none of ours


# --- writing ---------------------------------------------------------------------------------------------------


@contextmanager
def writing(
    checkpoints: Path, step: int, about: dict[str, Any], needed_bytes: int | None = None
) -> Iterator[Path]:
    """A folder to write a checkpoint's files into; it becomes ``checkpoints/step-N`` when the block ends well.

    If that step has a whole checkpoint already, it is kept and what was written goes; a damaged one is replaced.

    Args:
        about: JSON, for people and for :func:`read_about`: versions, hashes of configuration and data, world size.
        needed_bytes: the checkpoint's size, roughly: refused at once if the disk has less.

    Raises:
        ValueError: it could not be written, by the block or by us (a full disk, no access); checkpoints that were
            there are as they were. What else the block raises goes on as it is.
    """
    target = step_folder(checkpoints, step)
    staging = _beside(target, "tmp")
    about = json.loads(json.dumps(about, allow_nan=False))
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        if needed_bytes is not None and (free := shutil.disk_usage(checkpoints).free) < needed_bytes:
            raise OSError(f"it needs about {in_units(needed_bytes)}, {in_units(free)} are free")
        staging.mkdir()
        yield staging
        _finish(staging, step, about)
        _put_in_place(staging, target)
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk is any of them
        if not is_of_files(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        last = next(
            (n for n in reversed(steps(checkpoints)) if looks_whole(step_folder(checkpoints, n))), None
        )
        left = (
            "no checkpoint was saved before" if last is None else f"the last whole checkpoint is step {last}"
        )
        raise ValueError(
            f"output: cannot save in {str(checkpoints)!r} ({reason}). Free some space and start the same command "
            f"again; {left}."
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def is_of_files(error: Exception) -> bool:
    """Whether it says that a file could not be written, as far as torch's and safetensors' errors tell it."""
    if isinstance(error, RuntimeError):
        return _OF_FILES.search(str(error)) is not None
    return isinstance(error, OSError | SafetensorError)


def _beside(target: Path, kind: str) -> Path:
    """A name that is not taken, and that :func:`remove_leftovers` knows."""
    path, number = target.with_name(f"{target.name}.{kind}-{os.getpid()}"), 0
    while path.exists():  # of a process that had our number
        number += 1
        path = target.with_name(f"{target.name}.{kind}-{os.getpid()}-{number}")
    return path


def _finish(staging: Path, step: int, about: dict[str, Any]) -> None:
    """Have every file on the disk, and after them the manifest."""
    mode = staging.stat().st_mode & 0o666  # safetensors makes files that only their owner may read
    for name in _names(staging):
        os.chmod(staging / name, mode)
    files = _hash_files(staging, _names(staging), sync=True)
    body = {"kind": _KIND, "format": FORMAT, "step": step, "about": about}
    body["files"] = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in files.items()}
    with open(staging / MANIFEST, "xb") as file:
        file.write(_canonical({**body, "sha256": _hash_body(body)}))
        file.flush()
        os.fsync(file.fileno())
    for folder, _, _ in os.walk(staging, topdown=False):
        sync_folder(Path(folder))


def _put_in_place(staging: Path, target: Path) -> None:
    if target.exists():
        if is_whole(target):
            return
        damaged = _beside(target, "removed")
        os.rename(target, damaged)
        os.rename(staging, target)
        sync_folder(target.parent)
        shutil.rmtree(damaged, ignore_errors=True)
    else:
        os.rename(staging, target)
        sync_folder(target.parent)
    _vouched[target.resolve()] = _signature(target)


def remove_leftovers(checkpoints: Path) -> list[str]:
    """Remove what killed processes left half-written or half-removed; their names. At a start, by one process."""
    if not checkpoints.is_dir():
        return []
    names = sorted(path.name for path in checkpoints.iterdir() if _LEFTOVER.fullmatch(path.name))
    for name in names:
        shutil.rmtree(
            checkpoints / name, ignore_errors=True
        )  # it takes space, no more: the next start tries again
    return names


def retain(checkpoints: Path, keep: int) -> list[int]:
    """Remove all but the newest ``keep`` whole checkpoints; the steps removed. Call it after :func:`writing`.

    Only what :func:`verify` found whole (by hashing, once in a process) counts as kept, so that a newer one that is
    damaged never costs the last whole one. Older ones that are damaged stay: they may be mended.
    """
    assert keep >= 1
    kept, removed = 0, []
    for step in reversed(steps(checkpoints)):
        folder = step_folder(checkpoints, step)
        if kept < keep:
            kept += is_whole(folder)
        elif looks_whole(folder):
            _remove(folder)
            removed.append(step)
    return removed[::-1]


def _remove(folder: Path) -> None:
    """First its name, then its files: a kill leaves no checkpoint that lacks some."""
    leftover = _beside(folder, "removed")
    with contextlib.suppress(OSError):  # it takes space, no more: the next save tries again
        os.rename(folder, leftover)
        sync_folder(folder.parent)
        _vouched.pop(folder.resolve(), None)
    shutil.rmtree(leftover, ignore_errors=True)


# --- verifying -------------------------------------------------------------------------------------------------


def verify(folder: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Compare every byte of a checkpoint with its manifest, and the manifest with itself.

    Args:
        progress: called with the bytes compared and the bytes in all, every few MiB.

    Raises:
        ValueError: what is wrong, in one line that names the file.
    """
    manifest = _manifest(folder)
    try:
        sizes = _expect_files(folder, manifest)
        before = _signature(folder)
        found = _hash_files(folder, list(sizes), progress)
    except OSError as error:
        raise ValueError(
            f"{error.filename or folder}: cannot be read ({error.strerror or error})."
        ) from error
    for name, (_, digest) in found.items():
        if digest != manifest["files"][name]["sha256"]:
            raise ValueError(
                f"{name}: expected the SHA-256 {manifest['files'][name]['sha256'][:12]}... of the manifest, got "
                f"{digest[:12]}...: its content was changed."
            )
    _vouched[folder.resolve()] = before


def is_whole(folder: Path) -> bool:
    """Whether :func:`verify` finds nothing wrong; what this process wrote or verified is not hashed again."""
    try:
        if _vouched.get(folder.resolve()) != _signature(folder):
            verify(folder)
    except (OSError, ValueError):
        return False
    return True


def looks_whole(folder: Path) -> bool:
    """Whether there is a good manifest and files of the right lengths. Enough for a message, not for loading."""
    try:
        _expect_files(folder, _manifest(folder))
    except (OSError, ValueError):
        return False
    return True


def find_newest_whole(
    checkpoints: Path, progress: Callable[[int, int], None] | None = None
) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that :func:`verify` finds whole; and a line for each newer one. Nothing is changed.

    Returns:
        None where there is none; lines like "step 1200 is damaged: optimizer.safetensors: ...", newest first.
    """
    notes = []
    for step in reversed(steps(checkpoints)):
        folder = step_folder(checkpoints, step)
        try:
            verify(folder, progress)
        except ValueError as error:
            notes.append(f"step {step} is damaged: {error}")
        else:
            return folder, notes
    return None, notes


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder is a checkpoint, whole or not, by its name or by its manifest."""
    if _STEP.fullmatch(folder.resolve().name):
        return folder.is_dir()
    try:
        body = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(body, dict) and body.get("kind") == _KIND


def read_about(folder: Path) -> dict[str, Any]:
    """What :func:`writing` was told about the checkpoint.

    Raises:
        ValueError: if the manifest is missing or damaged.
    """
    return _manifest(folder)["about"]


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"{MANIFEST}: is missing: {str(folder)!r} is no whole checkpoint.") from error
    except OSError as error:
        raise ValueError(f"{MANIFEST}: cannot be read ({error.strerror}).") from error
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict) or body.get("kind") != _KIND:
        raise ValueError(
            f"{MANIFEST}: expected the manifest of a checkpoint, got another file or a damaged one."
        )
    if type(body.get("format")) is int and body["format"] > FORMAT:
        raise ValueError(
            f"{MANIFEST}: expected format {FORMAT} or lower, got {body['format']}: written by a newer trailmark, or "
            "damaged. Update trailmark."
        )
    digest = body.pop("sha256", None)
    # byte for byte: a space that became a tab means the same, but the file is not what was written
    if digest != _hash_body(body) or raw != _canonical({**body, "sha256": digest}):
        raise ValueError(f"{MANIFEST}: does not fit its own SHA-256: it was changed.")
    _expect_fields(body)
    name = folder.resolve().name
    if (
        _STEP.fullmatch(name) and name != step_folder(folder, body["step"]).name
    ):  # a copy may bear any other name
        raise ValueError(
            f"{MANIFEST}: expected the folder step-{body['step']:08d}, which it was written for, got {name!r}."
        )
    return body


def _expect_fields(body: dict[str, Any]) -> None:
    """The types that all else relies on: anyone can compute a SHA-256."""

    def expect(right: bool, field: str, expected: str, got: Any) -> None:
        if not right:
            raise ValueError(
                f"{MANIFEST}: {field}: expected {expected}, got {str(got)[:40]!r}. Use another checkpoint."
            )

    def is_count(x: Any) -> bool:
        return type(x) is int and x >= 0  # True is no number

    format_, step, about, files = (body.get(name) for name in ("format", "step", "about", "files"))
    expect(is_count(format_) and format_ != 0, "format", "a number from 1", format_)
    expect(is_count(step), "step", "a number from 0", step)
    expect(isinstance(about, dict), "about", "a mapping", about)
    expect(isinstance(files, dict), "files", "a mapping", files)
    assert isinstance(files, dict)
    for name, entry in files.items():
        inside = "\0" not in name and name != MANIFEST and PurePosixPath(name).as_posix() == name
        parts = PurePosixPath(name).parts
        inside &= bool(parts) and not PurePosixPath(name).is_absolute() and ".." not in parts
        expect(inside, "files", "names of files in the folder", name)
        expect(isinstance(entry, dict), f"files: {name}", "a mapping", entry)
        size, digest = entry.get("bytes"), entry.get("sha256")
        expect(is_count(size), f"files: {name}: bytes", "a number from 0", size)
        is_digest = isinstance(digest, str) and _DIGEST.fullmatch(digest) is not None
        expect(is_digest, f"files: {name}: sha256", "64 hexadecimal digits", digest)


def _expect_files(folder: Path, manifest: dict[str, Any]) -> dict[str, int]:
    """The files and their lengths, as they should be."""
    sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
    found = set(_names(folder)) - {MANIFEST}
    for name, size in sizes.items():
        if name not in found:
            raise ValueError(f"{name}: is missing.")
        if (got := (folder / name).stat().st_size) != size:
            raise ValueError(f"{name}: expected {size} bytes, got {got}.")
    if extra := sorted(found - set(sizes)):
        raise ValueError(f"{extra[0]}: is not in the manifest: expected nothing that was not saved.")
    return sizes


def _names(folder: Path) -> list[str]:
    """Of all files, as POSIX paths; hidden ones, which file managers leave and nobody loads, are not ours."""
    names = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if (Path(root) / name).is_symlink()]  # not walked into
        names += [
            (Path(root) / name).relative_to(folder).as_posix()
            for name in files + links
            if not name.startswith(".")
        ]
    return sorted(names)


def _signature(folder: Path) -> tuple[Any, ...]:
    stats = [(name, (folder / name).stat()) for name in _names(folder)]
    return tuple((name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in stats)


def _hash_files(
    folder: Path, names: list[str], progress: Callable[[int, int], None] | None = None, sync: bool = False
) -> dict[str, tuple[int, str]]:
    """Length and SHA-256 of each file, several at a time; ``sync``: and have it on the disk."""
    total = sum((folder / name).stat().st_size for name in names)
    done, guard = 0, threading.Lock()

    def hash_one(name: str) -> tuple[int, str]:
        nonlocal done
        size, digest = 0, hashlib.sha256()
        with open(folder / name, "rb+" if sync else "rb", buffering=0) as file:
            if sync:
                os.fsync(file.fileno())
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
                size += len(piece)
                if progress is not None:
                    with guard:
                        done += len(piece)
                        progress(done, total)
        return size, digest.hexdigest()

    with ThreadPoolExecutor(min(_THREADS, max(1, len(names)))) as pool:
        return dict(zip(names, pool.map(hash_one, names), strict=True))


def _canonical(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _hash_body(body: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()
