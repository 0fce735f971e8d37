"""Saved memories: a folder with chunk records, tensors and a manifest, format version 1.

``chunks-<generation>.bin`` holds the records as they are in memory, one after the other;
``state-<generation>.safetensors`` what is small; ``memory.json``, the manifest, says which two files belong
together, how long they are and their SHA-256. It is replaced last and in one step: a save that is killed
leaves the memory that was there, and files that the next save removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from trailmark import __version__
from trailmark.files import (
    BusyError,
    HeldFolder,
    NoSpaceError,
    Progress,
    counting,
    in_threads,
    is_no_space,
    lock,
    remove_unfinished,
    sha256_of,
    sync_file,
    write_at,
    write_text,
)
from trailmark.memory.tiers.files import overwritten_from, overwritten_note
from trailmark.memory.tiers.records import ChunkStore
from trailmark.ops.arguments import require

FORMAT = 1
MANIFEST = "memory.json"

_KIND = "trailmark memory"
_UNFINISHED = ".saving"  # files that are not yet whole
_BLOCK_BYTES = 64 << 20  # of a chunk file, under one SHA-256
_PIECE_BYTES = 4 << 20
_CHUNKS = re.compile(r"chunks-([0-9]+)\.bin")
_STATE = re.compile(r"state-([0-9]+)\.safetensors")
_OURS = re.compile(rf"{_CHUNKS.pattern}(?:\.overwritten)?|{_STATE.pattern}")


@dataclass(frozen=True)
class Saved:
    """A memory as it lies in a folder."""

    tensors: dict[str, Tensor]
    """Mapped: read from the file when they are touched. Writing to them does not change the file."""
    header: dict[str, Any]
    count: int
    """Records; the chunk file may hold more, which were not saved."""
    chunk_file: Path | None
    """None, as the next two, for a memory that was saved without a store."""
    record_shape: tuple[int, ...] | None
    """(2, J, S, D)"""
    dtype: torch.dtype | None


@dataclass(frozen=True)
class _ChunkFile:
    file: str
    count: int
    bytes: int
    record_shape: list[int]
    dtype: str
    block_bytes: int
    sha256: list[str]  # one per block; the last block may be shorter


@dataclass(frozen=True)
class _Manifest:
    header: dict[str, Any]
    state_file: str
    state_bytes: int
    state_sha256: str
    chunks: _ChunkFile | None


# --- saving ----------------------------------------------------------------------------------------------


def save(
    folder: str | Path,
    tensors: dict[str, Tensor],
    header: dict[str, Any],
    store: ChunkStore | None,
    count: int,
) -> None:
    """Save a memory in ``folder``, in place of one that may be there; a kill at any time leaves that one whole.

    The file of a store on tier "disk" that lies in ``folder`` is not copied: it is synced, and only blocks that
    the manifest there does not vouch for are hashed. The store may be written on afterwards.

    Args:
        tensors: what belongs to the memory beside its records, by name; any shape, dtype and device.
        header: JSON, returned as it is by :func:`load`.
        store: where the records are; None: a memory without.
        count: how many of them, from the first, are saved.

    Raises:
        NoSpaceError: if they do not fit on the disk.
        ValueError: if the folder cannot be written to or something else is saving there.
    """
    folder = Path(folder)
    header = json.loads(json.dumps(header, allow_nan=False))
    available = 0 if store is None else len(store)
    require(0 <= count <= available, "count", count, f"at most the {available} records written")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _hold(folder) as held:
            try:
                _save(folder, held, tensors, header, store, count)
            finally:
                _remove_unused(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(
            f"folder: expected a folder to save in, {str(folder)!r} is not ({reason}). Choose another one; a "
            "memory that was saved there before is whole."
        ) from error


def _save(
    folder: Path,
    held: HeldFolder,
    tensors: dict[str, Tensor],
    header: dict[str, Any],
    store: ChunkStore | None,
    count: int,
) -> None:
    before = _readable_manifest(folder)
    generation = _next_generation(folder)
    in_place = store is not None and _lies_ready(store, folder)
    state_file = folder / f"state-{generation}.safetensors"
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) + (1 << 20)
    if store is not None and not in_place:
        needed += count * store.record_bytes
    _expect_space(folder, needed)
    try:
        (folder / _UNFINISHED).mkdir(exist_ok=True)
        chunks = None
        if store is not None and in_place:
            chunks = _vouch_in_place(store, count, None if before is None else before.chunks)
        elif store is not None:
            chunks = _write_chunks(folder / f"chunks-{generation}.bin", store, count)
        _write_state(state_file, tensors)
        manifest = _Manifest(
            header, state_file.name, state_file.stat().st_size, sha256_of(state_file), chunks
        )
        held.sync()  # the files' names are on the disk before a manifest names them
        _write_manifest(folder, manifest, generation)
    except OSError as error:
        if is_no_space(error):
            raise _no_space(folder, needed) from error
        raise
    except safetensors.SafetensorError as error:  # also wraps what the system says
        if re.search(r"os error (28|122|27)\b", str(error)):
            raise _no_space(folder, needed) from error
        raise
    if in_place:
        assert store is not None
        assert chunks is not None
        overwritten_note(folder / chunks.file).unlink(missing_ok=True)
        store.vouched = count


def next_chunk_file(folder: str | Path) -> Path:
    """An empty new file for a disk store's records, where :func:`save` into the same folder copies nothing.

    A memory that is saved there stays as it is until then; what killed processes left is removed.

    Raises:
        ValueError: if the folder cannot be written to.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(BusyError), _hold(folder):  # a save removes them itself
            _remove_unused(folder)
        while True:
            path = folder / f"chunks-{_next_generation(folder)}.bin"
            with contextlib.suppress(FileExistsError):  # another process was quicker
                path.touch(exist_ok=False)
                return path
    except OSError as error:
        raise ValueError(
            f"memory_folder: expected a folder to write in, {str(folder)!r} is not "
            f"({error.strerror or error}). Choose another one."
        ) from error


def _hold(folder: Path) -> HeldFolder:
    return HeldFolder(
        folder,
        "folder: expected a folder that nothing else saves in, another process is saving in "
        f"{str(folder)!r}. Try again when it is done, or choose another one.",
    )


def _lies_ready(store: ChunkStore, folder: Path) -> bool:
    """Whether the store's file can be the folder's chunk file as it is."""
    if store.path is None or not _CHUNKS.fullmatch(store.path.name) or not store.lies_in(folder):
        return False
    store.hold()  # nothing else may be writing it
    return True


def _next_generation(folder: Path) -> int:
    matches = [_OURS.fullmatch(path.name) for path in folder.iterdir()]
    numbers = [int(match[1] or match[2] or 0) for match in matches if match]
    return max(numbers, default=0) + 1


def _expect_space(folder: Path, needed: int) -> None:
    if shutil.disk_usage(folder).free < needed:
        raise _no_space(folder, needed)


def _no_space(folder: Path, needed: int) -> NoSpaceError:
    return NoSpaceError(
        "folder",
        folder,
        needed,
        "Nothing was saved; a memory that was saved there before is whole. Free some space or choose a folder "
        "on another disk, and save again.",
    )


def _write_chunks(path: Path, store: ChunkStore, count: int) -> _ChunkFile:
    size = count * store.record_bytes
    with open(path, "xb") as file:
        digests = _hash_blocks(store.pieces, size, 0, _BLOCK_BYTES, copy_to=file.fileno())
        sync_file(file)
    return _chunk_file(path, store, count, digests)


def _vouch_in_place(store: ChunkStore, count: int, before: _ChunkFile | None) -> _ChunkFile:
    assert store.path is not None
    store.sync()
    known: list[str] = []
    if before is not None and before.file == store.path.name and before.block_bytes == _BLOCK_BYTES:
        valid = min(store.vouched, before.count, count) * store.record_bytes
        known = before.sha256[: valid // _BLOCK_BYTES]
    digests = _hash_blocks(store.pieces, count * store.record_bytes, len(known), _BLOCK_BYTES)
    return _chunk_file(store.path, store, count, [*known, *digests])


def _chunk_file(path: Path, store: ChunkStore, count: int, digests: list[str]) -> _ChunkFile:
    return _ChunkFile(
        path.name,
        count,
        count * store.record_bytes,
        list(store.record_shape),
        str(store.dtype).removeprefix("torch."),
        _BLOCK_BYTES,
        digests,
    )


def _write_state(path: Path, tensors: dict[str, Tensor]) -> None:
    # safetensors takes no two tensors of one memory
    kept: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        kept[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    unfinished = path.parent / _UNFINISHED / path.name
    unfinished.touch()
    mode = unfinished.stat().st_mode
    safetensors.torch.save_file(kept, unfinished)  # by a temporary file beside it, private to the user
    with open(unfinished, "rb+") as file:
        os.chmod(unfinished, mode & 0o777)
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _write_manifest(folder: Path, manifest: _Manifest, generation: int) -> None:
    body = {
        "kind": _KIND,
        "format": FORMAT,
        "trailmark": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "generation": generation,
        "header": manifest.header,
        "state": {
            "file": manifest.state_file,
            "bytes": manifest.state_bytes,
            "sha256": manifest.state_sha256,
        },
        "chunks": None if manifest.chunks is None else asdict(manifest.chunks),
    }
    text = json.dumps({**body, "sha256": _hash_body(body)}, indent=1) + "\n"
    write_text(folder / MANIFEST, text, durable=True)


def _remove_unused(folder: Path) -> None:
    """Remove what the manifest does not name: other generations' files, unless a store is writing them."""
    shutil.rmtree(folder / _UNFINISHED, ignore_errors=True)
    remove_unfinished(folder, MANIFEST)
    manifest = _readable_manifest(folder)
    if manifest is None and (folder / MANIFEST).exists():
        return  # it may be mended, or another version's: what it names is not known
    used = set() if manifest is None else {manifest.state_file}
    if manifest is not None and manifest.chunks is not None:
        used |= {manifest.chunks.file, overwritten_note(folder / manifest.chunks.file).name}
    with contextlib.suppress(OSError):  # it takes space, no more; the next save tries again
        for path in list(folder.iterdir()):
            if _OURS.fullmatch(path.name) and path.name not in used and not _is_written(path):
                path.unlink(missing_ok=True)


def _is_written(path: Path) -> bool:
    if not _CHUNKS.fullmatch(path.name):
        return False
    with open(path, "rb") as file:
        return not lock(file.fileno())


# --- loading ---------------------------------------------------------------------------------------------


def load(folder: str | Path, check: bool = True) -> Saved:
    """Open a saved memory. Nothing is read that grows with it; tensors are mapped.

    Args:
        check: compare the files' sizes with the manifest, and the content of chunks that were overwritten after
            the memory was saved. Every byte is compared by :func:`verify`.

    Raises:
        ValueError: if there is no folder, no memory in it, a broken manifest, one of a newer format, or files
            that are missing, cut off or changed.
    """
    folder = Path(folder)
    manifest = _manifest(folder)
    for _ in range(3):
        try:
            return _open(folder, manifest, check)
        except FileNotFoundError as error:
            again = _manifest(folder)
            if again == manifest:
                raise ValueError(_missing(folder, error)) from error
            manifest = again  # saved again meanwhile: its files are others
    raise ValueError(
        f"folder: expected a memory at rest, {str(folder)!r} is saved again and again. Try later."
    )


def _open(folder: Path, manifest: _Manifest, check: bool) -> Saved:
    state = folder / manifest.state_file
    chunks = manifest.chunks
    if check:
        _expect_size(state, manifest.state_bytes, exact=True)
        if chunks is not None:
            _expect_size(folder / chunks.file, chunks.bytes, exact=False)
            _expect_not_overwritten(folder / chunks.file, chunks)
    try:
        with safetensors.safe_open(state, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(_damaged(state, f"a safetensors file, got {error}")) from error
    if chunks is None:
        return Saved(tensors, manifest.header, 0, None, None, None)
    return Saved(
        tensors,
        manifest.header,
        chunks.count,
        folder / chunks.file,
        tuple(chunks.record_shape),
        getattr(torch, chunks.dtype),
    )


def verify(folder: str | Path, progress: Progress | None = None) -> None:
    """Compare every byte of a saved memory with the SHA-256 in its manifest.

    Args:
        progress: called with the bytes compared and the bytes in all, at the end of each block of 64 MiB.

    Raises:
        ValueError: as :func:`load`; and for the first byte that differs, naming the file and the block.
    """
    folder = Path(folder)
    manifest = _manifest(folder)
    chunks = manifest.chunks
    more = counting(progress, manifest.state_bytes + (0 if chunks is None else chunks.bytes))
    try:
        state = folder / manifest.state_file
        _expect_size(state, manifest.state_bytes, exact=True)
        if chunks is not None:
            _expect_size(folder / chunks.file, chunks.bytes, exact=False)
        if sha256_of(state) != manifest.state_sha256:
            raise ValueError(_damaged(state, "the SHA-256 in the manifest, got another"))
        more(manifest.state_bytes)
        if chunks is not None:
            _expect_blocks(folder / chunks.file, chunks, 0, more)
    except FileNotFoundError as error:
        raise ValueError(_missing(folder, error)) from error


def _expect_blocks(
    path: Path, chunks: _ChunkFile, first_block: int, more: Callable[[int], None] = lambda count: None
) -> None:
    """Compare the blocks of a chunk file from ``first_block`` on with the manifest."""
    with open(path, "rb", buffering=0) as file:

        def pieces(start: int, stop: int) -> Iterator[memoryview]:
            while start < stop:
                read = os.pread(file.fileno(), min(_PIECE_BYTES, stop - start), start)
                if not read:
                    raise ValueError(_damaged(path, f"{stop} bytes, got {start}"))
                yield memoryview(read)
                start += len(read)

        def expect_whole(block: int, digest: str) -> None:
            if digest == chunks.sha256[block]:
                return
            start, stop = block * chunks.block_bytes, min((block + 1) * chunks.block_bytes, chunks.bytes)
            record = chunks.bytes // chunks.count
            raise ValueError(
                _damaged(
                    path,
                    f"the SHA-256 in the manifest, got another in block {block} (bytes {start} ... {stop - 1}, "
                    f"chunks {start // record} ... {(stop - 1) // record})",
                )
            )

        _hash_blocks(pieces, chunks.bytes, first_block, chunks.block_bytes, more, expect_whole)


def _expect_not_overwritten(path: Path, chunks: _ChunkFile) -> None:
    first = overwritten_from(path)
    if first >= chunks.count:
        return
    try:
        _expect_blocks(path, chunks, first * chunks.bytes // chunks.count // chunks.block_bytes)
    except ValueError as error:
        raise ValueError(
            f"folder: expected the chunks that were saved, those of {str(path)!r} from {first} on were overwritten "
            "since, by a cache on tier 'disk' that was not saved again. Save it, if it still lives; else read the "
            "text again."
        ) from error


def _expect_size(path: Path, size: int, exact: bool) -> None:
    length = path.stat().st_size
    if length < size or (exact and length > size):
        expected = f"{'' if exact else 'at least '}{size} bytes"
        cut_off = " It was cut off." if length < size else ""
        raise ValueError(_damaged(path, f"{expected} as in the manifest, got {length}") + cut_off)


def _damaged(path: Path, difference: str) -> str:
    return (
        f"folder: {str(path)!r} is damaged: expected {difference}. Take the memory from a copy, or read the "
        "text again."
    )


def _missing(folder: Path, error: OSError) -> str:
    name = Path(str(error.filename)).name
    return (
        f"folder: expected the file {name!r}, which the manifest in {str(folder)!r} names, got none. Copy all "
        "files of a memory together."
    )


# --- the manifest ----------------------------------------------------------------------------------------


def _manifest(folder: Path) -> _Manifest:
    path = folder / MANIFEST
    if not folder.is_dir():
        raise ValueError(
            f"folder: expected a folder with a saved memory, got {str(folder)!r}, which is no folder. "
            "cache.save(folder) makes one."
        )
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"folder: expected a saved memory in {str(folder)!r}, got no {MANIFEST!r}: none was saved there, or "
            "the first save did not end. cache.save(folder) makes one."
        ) from None
    except OSError as error:
        raise ValueError(f"folder: expected to read {str(path)!r}, got {error.strerror}.") from error
    try:
        return _parse(json.loads(content))
    except _NewerFormat as error:
        raise ValueError(
            f"folder: expected a memory of format {FORMAT} in {str(folder)!r}, got {error.args[0]}, written by a "
            f"newer trailmark ({error.args[1]}). Update trailmark: pip install --upgrade trailmark."
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(
            _damaged(path, f"a memory's manifest, got one that is broken ({error!r})")
        ) from error


def _readable_manifest(folder: Path) -> _Manifest | None:
    try:
        return _manifest(folder)
    except ValueError:
        return None


class _NewerFormat(Exception):
    pass


def _parse(body: dict[str, Any]) -> _Manifest:
    if body["kind"] != _KIND:
        raise ValueError(f"kind {body['kind']!r}")
    if body["format"] > FORMAT:
        raise _NewerFormat(body["format"], body.get("trailmark"))
    if body["format"] != FORMAT or body.pop("sha256") != _hash_body(body):
        raise ValueError("its SHA-256 is another")
    state, chunks = body["state"], body["chunks"]
    if chunks is not None:
        chunks = _ChunkFile(**chunks)
        record_bytes = math.prod(chunks.record_shape) * getattr(torch, chunks.dtype).itemsize
        named = _CHUNKS.fullmatch(chunks.file)  # and nothing outside the folder
        blocks = -(-chunks.bytes // chunks.block_bytes)
        if not named or chunks.bytes != chunks.count * record_bytes or len(chunks.sha256) != blocks:
            raise ValueError("its numbers contradict each other")
    if not _STATE.fullmatch(state["file"]):
        raise ValueError(f"state file {state['file']!r}")
    return _Manifest(dict(body["header"]), state["file"], int(state["bytes"]), str(state["sha256"]), chunks)


# --- hashes ----------------------------------------------------------------------------------------------


def _hash_blocks(
    pieces: Callable[[int, int], Iterator[memoryview]],
    size: int,
    first_block: int,
    block_bytes: int,
    more: Callable[[int], None] = lambda count: None,
    expect: Callable[[int, str], None] = lambda block, digest: None,
    copy_to: int | None = None,
) -> list[str]:
    """The SHA-256 of each block from ``first_block`` on, several at once.

    Args:
        pieces: ``pieces(start, stop)`` gives the bytes of a range.
        more: is called with the bytes of each block that is done.
        expect: is called with each block and its SHA-256; what it raises ends the hashing.
        copy_to: the descriptor of a file that the bytes are written to.
    """

    def hash_block(block: int) -> str:
        begin, end, result = block * block_bytes, min((block + 1) * block_bytes, size), hashlib.sha256()
        offset = begin
        for piece in pieces(begin, end):
            if copy_to is not None:
                write_at(copy_to, piece, offset)
            result.update(piece)
            offset += len(piece)
        digest = result.hexdigest()
        expect(block, digest)
        more(end - begin)
        return digest

    return in_threads(hash_block, range(first_block, -(-size // block_bytes)))


def _hash_body(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
