"""Checkpoints that cannot be half-written: ``checkpoints/step-00001000/``, whole or not there.

``manifest.json`` in such a folder names every file with its length and SHA-256, and carries a SHA-256 of itself.
A checkpoint is written beside its place under another name, hashed, synced, given its manifest, and renamed in one
step: a kill leaves what was there and a leftover that the next start removes. A checkpoint is *whole* if
:func:`verify` finds nothing wrong with it; what is damaged is never loaded, and never removed by us.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from trailmark import untrusted
from trailmark.files import (
    FileEntry,
    Progress,
    in_units,
    put_in_place,
    remove_folder,
    remove_leftover_folders,
    staging_folder,
    sync_file,
    sync_folder,
)
from trailmark.settings import setting
from trailmark.training import manifests
from trailmark.untrusted import first_line

CHECKPOINTS = "checkpoints"
"""The folder of a run in which they lie."""
MANIFEST = "manifest.json"
FORMAT = 1

_KIND = "trailmark checkpoint"
_STEP = re.compile(r"step-(\d{8,})")
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
        raise ValueError(
            f"output: cannot save in {str(folder)!r} ({first_line(error)}). Free some space and start the same "
            f"command again; {left()}."
        ) from error


def _finish(staging: Path, step: int, about: dict[str, Any]) -> None:
    """Bring every file to the disk, and after them the manifest."""
    mode = staging.stat().st_mode & 0o666  # safetensors makes files that only their owner may read
    names = _names(staging)
    for name in names:
        os.chmod(staging / name, mode)
    files = manifests.entries_of(staging, names, sync=True)
    body = {"kind": _KIND, "format": FORMAT, "step": step, "about": about, "files": files}
    with open(staging / MANIFEST, "xb") as file:
        file.write(manifests.signed(body))
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
    files = _manifest(folder).entries()
    try:
        _expect_files(folder, files)
        before = _signature(folder)
    except OSError as error:
        raise ValueError(
            f"{error.filename or folder}: cannot be read ({error.strerror or error})."
        ) from error
    manifests.expect_same(folder, files, progress)
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
        _expect_files(folder, _manifest(folder).entries())
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
        body = untrusted.read_json(folder / MANIFEST, MANIFEST)
    except (OSError, ValueError):
        return False
    return isinstance(body, dict) and body.get("kind") == _KIND


def read_about(folder: Path) -> dict[str, Any]:
    """What :func:`writing` was told about the checkpoint.

    Raises:
        ValueError: if the manifest is missing or damaged.
    """
    return _manifest(folder).about


# --- the manifest ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Manifest(manifests.Manifest):
    """What the manifest of a checkpoint says."""

    step: int = setting(least=0)
    about: dict[str, Any] = setting()

    def __post_init__(self) -> None:
        super().__post_init__()
        if MANIFEST in self.files:
            raise ValueError(f"files: expected all files but the manifest, got {MANIFEST!r}.")


def _manifest(folder: Path) -> _Manifest:
    try:
        manifest = manifests.read(folder, MANIFEST, _Manifest, _KIND, FORMAT, "a checkpoint")
    except FileNotFoundError as error:
        raise ValueError(f"{MANIFEST}: is missing: {str(folder)!r} is no whole checkpoint.") from error
    name = folder.resolve().name
    # a copy may bear any other name
    if _STEP.fullmatch(name) and name != step_folder(folder, manifest.step).name:
        raise ValueError(
            f"{MANIFEST}: expected the folder step-{manifest.step:08d}, which it was written for, got {name!r}."
        )
    return manifest


def _expect_files(folder: Path, files: dict[str, FileEntry]) -> None:
    """Expect all files of the manifest at their lengths, and no others."""
    manifests.expect_whole(folder, files)
    if extra := [name for name in _names(folder) if name != MANIFEST and name not in files]:
        raise ValueError(f"{extra[0]}: is not in the manifest: expected nothing that was not saved.")


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
