"""Checkpoints that cannot be half-written: ``checkpoints/step-00001000/``, whole or not there.

``manifest.json`` in such a folder names every file with its length and SHA-256, and carries a SHA-256 of itself.
A checkpoint is written beside its place under another name, hashed, synced, given its manifest, and renamed in one
step: a kill leaves what was there and a leftover that the next start removes. A checkpoint is *whole* if
:func:`verify` finds nothing wrong with it; what is damaged is never loaded, and never removed by us.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError

from trailmark.files import (
    FileEntry,
    Progress,
    find_damage,
    find_wrong_lengths,
    in_threads,
    in_units,
    put_in_place,
    remove_folder,
    remove_leftover_folders,
    sha256_of,
    staging_folder,
    sync_file,
    sync_folder,
)

CHECKPOINTS = "checkpoints"
"""The folder of a run in which they lie."""
MANIFEST = "manifest.json"
FORMAT = 1

_KIND = "trailmark checkpoint"
_STEP = re.compile(r"step-(\d{8,})")
_DIGEST = re.compile(r"[0-9a-f]{64}")
# how torch, whose errors are all RuntimeErrors, says that a file could not be written
_OF_FILES = re.compile(
    r"inline_container|PytorchStreamWriter|file write failed|iostream error|I/O error|os error \d|No space left"
)

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
    matches = [_STEP.fullmatch(path.name) for path in checkpoints.iterdir()]
    numbers = sorted({int(match[1]) for match in matches if match})
    # another spelling of a number, such as step-000000001, is none of ours
    return [step for step in numbers if step_folder(checkpoints, step).is_dir()]


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
    about = json.loads(json.dumps(about, allow_nan=False))

    def left() -> str:
        whole = (n for n in reversed(steps(checkpoints)) if looks_whole(step_folder(checkpoints, n)))
        last = next(whole, None)
        return (
            "no checkpoint was saved before" if last is None else f"the last whole checkpoint is step {last}"
        )

    with telling_of_files(checkpoints, left):
        checkpoints.mkdir(parents=True, exist_ok=True)
        if needed_bytes is not None and (free := shutil.disk_usage(checkpoints).free) < needed_bytes:
            raise OSError(f"it needs about {in_units(needed_bytes)}, {in_units(free)} are free")
        with staging_folder(target) as staging:
            yield staging
            _finish(staging, step, about)
            if not is_whole(target):
                put_in_place(staging, target)
                _vouched[target.resolve()] = _signature(target)


@contextmanager
def telling_of_files(folder: Path, left: Callable[[], str]) -> Iterator[None]:
    """Turn what a library raises where a file cannot be written into a ValueError; ``left`` says what is whole."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk is any of them
        if isinstance(error, RuntimeError) and not _OF_FILES.search(str(error)):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ValueError(
            f"output: cannot save in {str(folder)!r} ({reason}). Free some space and start the same command again; "
            f"{left()}."
        ) from error


def _finish(staging: Path, step: int, about: dict[str, Any]) -> None:
    """Bring every file to the disk, and after them the manifest."""
    mode = staging.stat().st_mode & 0o666  # safetensors makes files that only their owner may read
    names = _names(staging)
    for name in names:
        os.chmod(staging / name, mode)
    digests = in_threads(lambda name: sha256_of(staging / name, sync=True), names)
    body = {"kind": _KIND, "format": FORMAT, "step": step, "about": about}
    body["files"] = {
        name: {"bytes": (staging / name).stat().st_size, "sha256": digest}
        for name, digest in zip(names, digests, strict=True)
    }
    with open(staging / MANIFEST, "xb") as file:
        file.write(_canonical({**body, "sha256": _hash_body(body)}))
        sync_file(file)
    for folder, _, _ in os.walk(staging, topdown=False):
        sync_folder(Path(folder))


def remove_leftovers(checkpoints: Path) -> list[str]:
    """Remove what killed processes left half-written or half-removed, at a start, by one process; give their names."""
    return remove_leftover_folders(checkpoints, _STEP)


def retain(checkpoints: Path, keep: int) -> list[int]:
    """Remove all but the newest ``keep`` whole checkpoints, after :func:`writing`; give the steps that were removed.

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
            _vouched.pop(folder.resolve(), None)
            remove_folder(folder)
            removed.append(step)
    return removed[::-1]


# --- verifying -------------------------------------------------------------------------------------------------


def verify(folder: Path, progress: Progress | None = None) -> None:
    """Compare every byte of a checkpoint with its manifest, and the manifest with itself.

    Args:
        progress: called with the bytes compared and the bytes in all, every few MiB.

    Raises:
        ValueError: what is wrong, in one line that names the file.
    """
    files = _files(_manifest(folder))
    try:
        _expect_files(folder, files)
        before = _signature(folder)
    except OSError as error:
        raise ValueError(
            f"{error.filename or folder}: cannot be read ({error.strerror or error})."
        ) from error
    _expect_none(find_damage(folder, files, progress))
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
        _expect_files(folder, _files(_manifest(folder)))
    except (OSError, ValueError):
        return False
    return True


def find_newest_whole(checkpoints: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that :func:`verify` finds whole; and a line for each newer one. Nothing is changed.

    Returns:
        None where there is none; lines like "step 1200 is damaged: optimizer.safetensors: ...", newest first.
    """
    notes = []
    for step in reversed(steps(checkpoints)):
        folder = step_folder(checkpoints, step)
        try:
            verify(folder)
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


# --- the manifest ----------------------------------------------------------------------------------------------


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
    """Check the types that all else relies on: anyone can compute a SHA-256."""

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


def _files(manifest: dict[str, Any]) -> dict[str, FileEntry]:
    return {name: FileEntry(entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}


def _expect_files(folder: Path, files: dict[str, FileEntry]) -> None:
    """Expect all files of the manifest at their lengths, and no others."""
    _expect_none(find_wrong_lengths(folder, files))
    if extra := [name for name in _names(folder) if name != MANIFEST and name not in files]:
        raise ValueError(f"{extra[0]}: is not in the manifest: expected nothing that was not saved.")


def _expect_none(wrong: dict[str, str]) -> None:
    for name, text in wrong.items():
        raise ValueError(f"{name}: {text}.")


def _names(folder: Path) -> list[str]:
    """Name all files, as POSIX paths; hidden ones, which file managers leave and nobody loads, are not ours."""
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
    """What changes when a file of the folder is replaced or written to."""
    stats = [(name, (folder / name).stat()) for name in _names(folder)]
    return tuple((name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in stats)


def _canonical(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _hash_body(body: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()
