"""Saved memories: a folder with chunk records, tensors and a manifest, format 1, 2 of tokens, or 3 of eight bits.

``chunks-<generation>.bin`` holds the records as they are in memory, one after the other;
``state-<generation>.safetensors`` what is small; ``memory.json``, the manifest, says which two files belong
together, how long they are and their SHA-256. It is replaced last and in one step: a save that is killed
leaves the memory that was there, and files that the next save removes.

What is kept of a memory is compared with its manifest before it is signed again, and everything in the folder is a
regular file of its own: who writes there follows no link.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from trailmark import __version__, untrusted
from trailmark.files import (
    BusyError,
    HeldFolder,
    NoSpaceError,
    is_no_space,
    lock,
    remove_unfinished,
    sha256_of,
    sync_file,
)
from trailmark.memory import hashes
from trailmark.memory import manifest as manifests
from trailmark.memory.hashes import Signed, damaged, sample_of, sign
from trailmark.memory.manifest import CHUNKS, OURS, UNFINISHED, ChunkFile, Manifest, StateFile
from trailmark.memory.tiers.base import tier_named
from trailmark.memory.tiers.files import overwritten_from, overwritten_note
from trailmark.memory.tiers.records import ChunkStore
from trailmark.memory.verification import compare, expect_size, expect_state, missing
from trailmark.ops.arguments import require

MANIFEST = manifests.NAME


@dataclass(frozen=True)
class Saved:
    """A memory as it lies in a folder."""

    tensors: dict[str, Tensor]
    """Mapped: read from the file when they are touched. Writing to them does not change the file."""
    header: dict[str, Any]
    count: int
    """Records; the chunk file may hold more, which were not saved."""
    chunk_file: Path | None
    """None, as the next three, for a memory that was saved without a store."""
    record_shape: tuple[int, ...] | None
    """(2, J, S, D), or of tokens (S,)"""
    dtype: torch.dtype | None
    signed: Signed | None
    """What the manifest says of the records: a store that is made of them compares them before they are saved again."""


# --- saving ----------------------------------------------------------------------------------------------


def save(
    folder: str | Path,
    tensors: dict[str, Tensor],
    header: dict[str, Any],
    store: ChunkStore | None,
    count: int,
    held: HeldFolder | None = None,
) -> None:
    """Save a memory in ``folder``, in place of one that may be there; a kill at any time leaves that one whole.

    The file of a store on tier "disk" that lies in ``folder`` is not copied: it is synced, and only blocks that
    its last manifest does not vouch for are hashed. What that manifest says of the others, and of records that come
    from another memory, is compared as they are read. The store may be written on afterwards.

    Args:
        tensors: what belongs to the memory beside its records, by name; any shape, dtype and device.
        header: JSON, returned as it is by :func:`load`.
        store: where the records are; None: a memory without.
        count: how many of them, from the first, are saved.
        held: the folder, of a caller that keeps others from it anyway (:func:`hold`); None: it is held for this save.

    Raises:
        NoSpaceError: if they do not fit on the disk.
        ValueError: if the folder cannot be written to, something else writes there, what lies there is no file of its
            own, or records that were saved before were damaged since; nothing is saved then.
    """
    folder = Path(folder)
    header = json.loads(json.dumps(header, allow_nan=False))
    available = 0 if store is None else len(store)
    require(0 <= count <= available, "count", count, f"at most the {available} records written")
    try:
        with contextlib.nullcontext(held) if held is not None else hold(folder) as holding:
            if not holding.is_at(folder):
                raise ValueError(
                    f"folder: expected the folder {str(folder)!r} as it was opened, it was removed or replaced since. "
                    "Leave it alone while something is read into it; read the text again."
                )
            manifests.expect_own_files(folder)
            try:
                _save(folder, holding, tensors, header, store, count)
            finally:
                _remove_unused(folder, store)
    except OSError as error:
        raise _not_writable(folder, error) from error


def hold(folder: Path) -> HeldFolder:
    """Keep every other writer out of a memory's folder, which is made if there is none.

    Raises:
        BusyError: another process or cache writes there.
        ValueError: the folder cannot be written to, or what lies there is no file of its own.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = HeldFolder(
            folder,
            "folder: expected a folder that nothing else writes in, another process is writing in "
            f"{str(folder)!r}, or a Reader of this one that was not closed. Try again when it is done, or choose "
            "another one.",
        )
    except OSError as error:
        raise _not_writable(folder, error) from error
    try:
        manifests.expect_own_files(folder)
    except BaseException:  # who keeps the error keeps no folder
        held.__exit__()
        raise
    return held


def _not_writable(folder: Path, error: OSError) -> ValueError:
    reason = error.strerror or str(error)
    return ValueError(
        f"folder: expected a folder to save in, {str(folder)!r} is not ({reason}). Choose another one; a "
        "memory that was saved there before is whole."
    )


def _save(
    folder: Path,
    held: HeldFolder,
    tensors: dict[str, Tensor],
    header: dict[str, Any],
    store: ChunkStore | None,
    count: int,
) -> None:
    generation = _next_generation(folder)
    in_place = store is not None and _lies_ready(store, folder)
    state_file = folder / f"state-{generation}.safetensors"
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) + (1 << 20)
    if store is not None and not in_place:
        needed += count * store.record_bytes
    _expect_space(folder, needed)
    try:
        unfinished = folder / UNFINISHED
        shutil.rmtree(unfinished, ignore_errors=True)  # what lies in it may be links
        unfinished.mkdir()
        chunks = sample = None
        if store is not None:
            path = folder / f"chunks-{generation}.bin"
            chunks = _sign_in_place(store, count) if in_place else _write_chunks(path, store, count)
            sample = sample_of(folder / chunks.file, chunks.bytes)
        _write_state(state_file, tensors)
        manifest = Manifest.of(
            trailmark=__version__,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            generation=generation,
            header=header,
            state=StateFile(state_file.name, state_file.stat().st_size, sha256_of(state_file)),
            chunks=chunks,
            chunks_sample=sample,
        )
        held.sync()  # the files' names are on the disk before a manifest names them
        manifest.write(folder)
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
        store.signed, store.vouched = chunks.signed(folder), count


def next_chunk_file(folder: str | Path) -> Path:
    """An empty new file for a disk store's records, where :func:`save` into the same folder copies nothing.

    A memory that is saved there stays as it is until then; what killed processes left is removed.

    Raises:
        ValueError: if the folder cannot be written to.
    """
    folder = Path(folder)
    with contextlib.suppress(BusyError), hold(folder):  # a save removes them itself
        _remove_unused(folder)
    try:
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


def _lies_ready(store: ChunkStore, folder: Path) -> bool:
    """Whether the store's file can be the folder's chunk file as it is."""
    if store.path is None or not CHUNKS.fullmatch(store.path.name) or not store.lies_in(folder):
        return False
    store.hold()  # nothing else may be writing it
    return True


def _next_generation(folder: Path) -> int:
    matches = [OURS.fullmatch(path.name) for path in folder.iterdir()]
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


def _write_chunks(path: Path, store: ChunkStore, count: int) -> ChunkFile:
    size = count * store.record_bytes
    with open(path, "xb") as file:
        kept = store.vouched * store.record_bytes
        digests = sign(store.pieces, size, store.signed, kept, in_place=False, copy_to=file.fileno())
        sync_file(file)
    return _chunk_file(path, store, count, digests)


def _sign_in_place(store: ChunkStore, count: int) -> ChunkFile:
    assert store.path is not None
    store.sync()
    size, kept = (n * store.record_bytes for n in (count, store.vouched))
    digests = sign(store.pieces, size, store.signed, kept, in_place=True)
    return _chunk_file(store.path, store, count, digests)


def _chunk_file(path: Path, store: ChunkStore, count: int, digests: tuple[str, ...]) -> ChunkFile:
    return ChunkFile(
        path.name,
        count,
        count * store.record_bytes,
        store.record_shape,
        str(store.dtype).removeprefix("torch."),
        hashes.BLOCK_BYTES,
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
    unfinished = path.parent / UNFINISHED / path.name
    unfinished.touch()
    mode = unfinished.stat().st_mode
    safetensors.torch.save_file(kept, unfinished)  # by a temporary file beside it, private to the user
    with open(unfinished, "rb+") as file:
        os.chmod(unfinished, mode & 0o777)
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _remove_unused(folder: Path, store: ChunkStore | None = None) -> None:
    """Remove what the manifest does not name: other generations' files, unless a store is writing them.

    Args:
        store: that was to be saved: its file may hold all there is of it, and some file systems have no locks.
    """
    own = store.path.name if store is not None and store.path is not None and store.lies_in(folder) else None
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    manifest = manifests.find(folder)
    used = set() if manifest is None else {manifest.state.file}
    if manifest is not None and manifest.chunks is not None:
        used |= {manifest.chunks.file, overwritten_note(folder / manifest.chunks.file).name}
    with contextlib.suppress(OSError):  # it takes space, no more; the next save tries again
        remove_unfinished(folder, MANIFEST)
        if manifest is None and (folder / MANIFEST).exists():
            return  # it may be mended, or another version's: what it names is not known
        for path in list(folder.iterdir()):
            unused = OURS.fullmatch(path.name) and path.name not in {*used, own}
            if unused and not _is_written(path):
                path.unlink(missing_ok=True)


def _is_written(path: Path) -> bool:
    if not CHUNKS.fullmatch(path.name):
        return False
    with untrusted.open_regular(path, "folder") as file:
        return not lock(file.fileno())


# --- loading ---------------------------------------------------------------------------------------------


def tier_to_load(folder: str | Path, memory_tier: str) -> str:
    """The tier of a cache that opens the memory in ``folder`` where ``memory_tier`` is asked for: "tokens", of tokens.

    Raises:
        ValueError: no memory there; keys and values where tokens are asked for.
    """
    chunks = manifests.read(Path(folder)).chunks
    if chunks is None or chunks.keeps_tokens == tier_named(memory_tier).keeps_tokens:
        return memory_tier
    require(
        chunks.keeps_tokens,
        "memory_tier",
        repr(memory_tier),
        f"'disk', 'host' or 'device' for the memory in {str(folder)!r}, which keeps keys and values",
        "To keep tokens alone, read the text again: trailmark read --memory-tier tokens.",
    )
    return "tokens"


def load(folder: str | Path, check: bool = True) -> Saved:
    """Open a saved memory. Of what grows with it, only landmarks and tables are read; tensors are mapped.

    Args:
        check: compare the files' sizes and every byte of the tensors with the manifest; of the chunk file the pieces
            that tell it from another memory's, and what was overwritten after the memory was saved. Every byte is
            compared by :func:`trailmark.memory.verification.verify`.

    Raises:
        ValueError: if there is no folder, no memory in it, a broken manifest, one of a newer format, or files
            that are missing, cut off, changed, or no regular files.
    """
    folder = Path(folder)
    manifest = manifests.read(folder)
    for _ in range(3):
        try:
            return _open(folder, manifest, check)
        except FileNotFoundError as error:
            again = manifests.read(folder)
            if again == manifest:
                raise ValueError(missing(folder, error)) from error
            manifest = again  # saved again meanwhile: its files are others
    raise ValueError(
        f"folder: expected a memory at rest, {str(folder)!r} is saved again and again. Try later."
    )


def _open(folder: Path, manifest: Manifest, check: bool) -> Saved:
    chunks = manifest.chunks
    untrusted.expect_regular(folder / manifest.state.file, "folder")
    if check:
        expect_state(folder, manifest.state)
    if check and chunks is not None:
        path = folder / chunks.file
        expect_size(path, chunks.bytes, exact=False)
        _expect_not_overwritten(path, chunks)
        # manifests that older versions wrote have no sample
        if manifest.chunks_sample not in (None, sample_of(path, chunks.bytes)):
            raise damaged(
                path, "the chunks of this memory, got others: those of another memory, or changed ones"
            )
    tensors = _tensors(folder / manifest.state.file)
    if chunks is None:
        return Saved(tensors, manifest.header, 0, None, None, None, None)
    return Saved(
        tensors,
        manifest.header,
        chunks.count,
        folder / chunks.file,
        chunks.record_shape,
        getattr(torch, chunks.dtype),
        chunks.signed(folder),
    )


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise damaged(path, f"a safetensors file, got {error}") from error


def _expect_not_overwritten(path: Path, chunks: ChunkFile) -> None:
    first = overwritten_from(path)
    if first >= chunks.count:
        return
    try:
        compare(path.parent, chunks, first * chunks.record_bytes)
    except ValueError as error:
        raise ValueError(
            f"folder: expected the chunks that were saved, those of {str(path)!r} from {first} on were overwritten "
            "since, by a cache on tier 'disk' that was not saved again. Save it, if it still lives; else read the "
            "text again."
        ) from error
