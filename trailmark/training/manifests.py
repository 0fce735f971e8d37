"""The manifests of what a training saves: which files there are, each with its length and SHA-256, and their own.

A checkpoint has one, and so has the final model beside its run. Anyone can compute a SHA-256: what else stands in a
manifest is declared here and checked whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from trailmark import untrusted
from trailmark.files import FileEntry, find_damage, find_wrong_lengths, in_threads, sha256_of
from trailmark.settings import Settings, from_mapping, setting

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_BYTES = 64 << 20
_M = TypeVar("_M", bound="Manifest")


@dataclass(frozen=True)
class ManifestFile(Settings):
    """What a manifest says of a file."""

    bytes: int = setting(least=0)
    sha256: str = setting()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _DIGEST.fullmatch(self.sha256):
            raise ValueError(f"sha256: expected 64 hexadecimal digits, got {untrusted.brief(self.sha256)}.")


@dataclass(frozen=True)
class Manifest(Settings):
    """What every manifest says."""

    kind: str = setting()
    format: int = setting(least=1)
    files: dict[str, ManifestFile] = setting()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.files:
            path = PurePosixPath(name)
            inside = "\0" not in name and path.as_posix() == name and bool(path.parts)
            if not inside or path.is_absolute() or ".." in path.parts:
                raise ValueError(
                    f"files: expected names of files in the folder, got {untrusted.brief(name)}."
                )

    def entries(self) -> dict[str, FileEntry]:
        """The files as :func:`trailmark.files.find_damage` wants them."""
        return {name: FileEntry(entry.bytes, entry.sha256) for name, entry in self.files.items()}


def signed(body: dict[str, Any]) -> bytes:
    """The bytes of a manifest, with a SHA-256 of itself."""
    return _canonical({**body, "sha256": hashlib.sha256(_canonical(body)).hexdigest()})


def entries_of(folder: Path, names: list[str], sync: bool = False) -> dict[str, dict[str, Any]]:
    """What a manifest will say of files; ``sync``: they are brought to the disk itself before."""
    digests = in_threads(lambda name: sha256_of(folder / name, sync=sync), names)
    return {
        name: {"bytes": (folder / name).stat().st_size, "sha256": digest}
        for name, digest in zip(names, digests, strict=True)
    }


def read(folder: Path, name: str, schema: type[_M], kind: str, newest: int, noun: str) -> _M:
    """Read a manifest, and compare it with itself.

    Args:
        name: its file. kind: what it says of itself. newest: format that is read. noun: "a checkpoint".

    Raises:
        FileNotFoundError: there is none.
        ValueError: another file, one that was changed, or fields that cannot be.
    """
    raw = untrusted.read_bytes(folder / name, name, _MOST_BYTES)
    try:
        body = untrusted.parse_json(raw, name)
    except ValueError:
        body = None
    if not isinstance(body, dict) or body.get("kind") != kind:
        raise ValueError(f"{name}: expected the manifest of {noun}, got another file or a damaged one.")
    if type(body.get("format")) is int and body["format"] > newest:
        raise ValueError(
            f"{name}: expected format {newest} or lower, got {untrusted.brief(body['format'])}: written by a newer "
            "trailmark, or damaged. Update trailmark."
        )
    body.pop("sha256", None)
    # byte for byte: a space that became a tab means the same, but the file is not what was written
    if raw != signed(body):
        raise ValueError(f"{name}: does not fit its own SHA-256: it was changed.")
    try:
        manifest = from_mapping(schema, body)
        if _canonical(dataclasses.asdict(manifest)) != _canonical(body):
            raise ValueError("expected whole numbers, got some with a point.")
    except ValueError as error:
        raise ValueError(f"{name}: {error} It was not written by trailmark: use another copy.") from error
    return manifest


def expect_whole(folder: Path, files: dict[str, FileEntry]) -> None:
    """Raise a ValueError that names a file which is missing, no regular one, or has another length than it had."""
    for name in files:
        try:
            untrusted.expect_regular(folder / name, name)
        except FileNotFoundError:
            break
    expect_none(find_wrong_lengths(folder, files))


def expect_same(folder: Path, files: dict[str, FileEntry], progress: Any = None) -> None:
    """Read every byte, and raise a ValueError that names the first file that is not as it was written."""
    expect_whole(folder, files)
    expect_none(find_damage(folder, files, progress))


def expect_none(wrong: dict[str, str]) -> None:
    """Raise a ValueError for the first file of which something is wrong."""
    for name, text in wrong.items():
        raise ValueError(f"{name}: {text}.")


def _canonical(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
