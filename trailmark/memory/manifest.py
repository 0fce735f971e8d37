"""The manifest of a saved memory: its schema, how it is read and written, and what else may lie in its folder."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trailmark import untrusted
from trailmark.files import write_text
from trailmark.memory import hashes
from trailmark.memory.hashes import Signed, damaged
from trailmark.settings import Settings, from_mapping, setting
from trailmark.untrusted import brief

FORMAT = 3
# formats of memories that older versions do not read: of tokens, and in eight bits; all others are of the first
KEEPS_TOKENS, QUANTIZED = 2, 3
NAME = "memory.json"
UNFINISHED = ".saving"  # a folder of files that are not yet whole
CHUNKS = re.compile(r"chunks-([0-9]{1,18})\.bin")
STATE = re.compile(r"state-([0-9]{1,18})\.safetensors")
OURS = re.compile(rf"{CHUNKS.pattern}(?:\.overwritten)?|{STATE.pattern}")

_KIND = "trailmark memory"
BYTES_OF = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "uint8": 1,
    "uint16": 2,
    "int32": 4,
    "int8": 1,
}  # not asked of torch, which verify does without
_SCALE_BYTES = 4  # in int8, of each head's keys and values
MOST = 2**62  # of a size: products of such sizes are compared, not allocated
_MOST_BYTES = 128 << 20  # of a manifest: the names of some hundred thousand texts
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ChunkFile(Settings):
    """What a manifest says of the file of records."""

    file: str = setting()
    count: int = setting(least=0, most=MOST)
    bytes: int = setting(least=0, most=MOST)
    record_shape: tuple[int, ...] = setting(least=1, most=MOST)  # (2, J, S, D), or of tokens (S,)
    dtype: str = setting(choices=tuple(BYTES_OF))
    block_bytes: int = setting(choices=lambda: (hashes.BLOCK_BYTES,))
    sha256: tuple[str, ...] = setting()  # of each block; the last block may be shorter

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect_name("chunks.file", self.file, CHUNKS)
        expect_digests("chunks.sha256", *self.sha256)
        fits = len(self.record_shape) == 4 and self.record_shape[0] == 2
        if not (len(self.record_shape) == 1 if self.keeps_tokens else fits):
            expected = "(S,) of tokens" if self.keeps_tokens else "(2, J, S, D)"
            raise ValueError(f"chunks.record_shape: expected {expected}, got {brief(self.record_shape)}")
        if self.bytes != self.count * self.record_bytes:
            raise ValueError(
                f"chunks.bytes: expected {brief(self.count * self.record_bytes)} for {self.count} records of "
                f"{brief(self.record_shape)} {self.dtype}, got {self.bytes}"
            )
        if len(self.sha256) != -(-self.bytes // self.block_bytes):
            raise ValueError(
                f"chunks.sha256: expected one for each {self.block_bytes} of {self.bytes} bytes, got {len(self.sha256)}"
            )

    @property
    def keeps_tokens(self) -> bool:
        """Whether the records are tokens; else keys and values."""
        return self.dtype != "int8" and not self.dtype.startswith(("float", "bfloat"))

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.record_shape, self.dtype)

    def signed(self, folder: Path) -> Signed:
        return Signed(folder / self.file, self.count, self.record_bytes, self.sha256)


@dataclass(frozen=True)
class StateFile(Settings):
    """What a manifest says of the file of tensors."""

    file: str = setting()
    bytes: int = setting(least=0, most=MOST)
    sha256: str = setting()

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect_name("state.file", self.file, STATE)
        expect_digests("state.sha256", self.sha256)


@dataclass(frozen=True)
class Manifest(Settings):
    """All of ``memory.json`` but its own SHA-256."""

    kind: str = setting(choices=(_KIND,))
    format: int = setting(least=1, most=FORMAT)
    trailmark: str = setting()
    date: str = setting()
    generation: int = setting(least=1, most=MOST)
    header: dict[str, Any] = setting()
    state: StateFile = setting()
    chunks: ChunkFile | None = setting()
    chunks_sample: str | None = setting(
        None
    )  # see :func:`trailmark.memory.hashes.sample_of`; older ones have none

    @classmethod
    def of(cls, **values: Any) -> Manifest:
        """A new one."""
        chunks: ChunkFile | None = values["chunks"]
        if chunks is not None and chunks.dtype == "int8":
            return cls(kind=_KIND, format=QUANTIZED, **values)
        made_of_tokens = chunks is not None and chunks.keeps_tokens
        return cls(kind=_KIND, format=KEEPS_TOKENS if made_of_tokens else 1, **values)

    def write(self, folder: Path) -> None:
        """Put it in the place of the one in the folder, on the disk itself."""
        body = asdict(self)
        text = json.dumps({**body, "sha256": hash_body(body)}, indent=1) + "\n"
        write_text(folder / NAME, text, durable=True)


def record_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a record (2, J, S, D), or of tokens (S,), as a store keeps it."""
    return math.prod(shape) * BYTES_OF[dtype] + (
        _SCALE_BYTES * math.prod(shape[:-2]) if dtype == "int8" else 0
    )


def _expect_name(name: str, value: str, pattern: re.Pattern[str]) -> None:
    if not pattern.fullmatch(value):  # nothing outside the folder
        raise ValueError(f"{name}: expected the name of a file that a save made, got {brief(value)}")


def expect_digests(name: str, *values: str) -> None:
    for value in values:
        if not _SHA256.fullmatch(value):
            raise ValueError(f"{name}: expected a SHA-256, got {brief(value)}")


def read(folder: Path) -> Manifest:
    """The manifest of the memory in ``folder``.

    Raises:
        ValueError: there is no memory, its manifest is broken or another format's, or no regular file.
    """
    path = folder / NAME
    if not folder.is_dir():
        raise ValueError(
            f"folder: expected a folder with a saved memory, got {str(folder)!r}, which is no folder. "
            "trailmark read makes one, and cache.save(folder)."
        )
    try:
        content = untrusted.read_bytes(path, "folder", _MOST_BYTES)
    except FileNotFoundError:
        raise ValueError(
            f"folder: expected a saved memory in {str(folder)!r}, got no {NAME!r}: none was saved there, or "
            "the first save did not end. trailmark read makes one, and cache.save(folder)."
        ) from None
    try:
        body = untrusted.parse_json(content, NAME)
        _expect_known(folder, body)
        if body.pop("sha256", None) != hash_body(body):
            raise ValueError("its SHA-256 is another")
        return from_mapping(Manifest, body)
    except _NewerFormat as error:
        raise ValueError(str(error)) from None
    except (ValueError, RecursionError) as error:
        reason = str(error).rstrip(".") or "it is nested too deep"
        raise damaged(path, f"a memory's manifest, got one that is broken ({reason})") from error


class _NewerFormat(Exception):
    pass


def _expect_known(folder: Path, body: Any) -> None:
    if not isinstance(body, dict) or body.get("kind") != _KIND:
        raise ValueError(f"it is none of a memory: {brief(body)}")
    written = body.get("format")
    if isinstance(written, int) and written > FORMAT:
        raise _NewerFormat(
            f"folder: expected a memory of format {FORMAT} in {str(folder)!r}, got {brief(written)}, written by a "
            f"newer trailmark ({str(body.get('trailmark'))[:40]}). Update trailmark: pip install --upgrade trailmark."
        )


def find(folder: Path) -> Manifest | None:
    """The manifest of a folder; None where :func:`read` would raise."""
    try:
        return read(folder)
    except ValueError:
        return None


def hash_body(body: dict[str, Any]) -> str:
    """The SHA-256 of a manifest's content, without its own."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def expect_own_files(folder: Path) -> None:
    """Raise a ValueError where something in a memory's folder has a name of ours and is no regular file of its own.

    Who writes there asks this: through a link, a file outside of the folder would be changed; a FIFO would hang.
    """
    for entry in os.scandir(folder):
        if entry.name == UNFINISHED:
            if not stat.S_ISDIR(entry.stat(follow_symlinks=False).st_mode):
                raise ValueError(
                    f"folder: expected nothing or a folder that a save left, {entry.path!r} is neither. Remove it."
                )
        elif entry.name == NAME or OURS.fullmatch(entry.name):
            untrusted.expect_regular(entry.path, "folder")
