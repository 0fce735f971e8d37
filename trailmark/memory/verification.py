"""Whether a saved memory's bytes are those that its manifest is about. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trailmark import untrusted
from trailmark.files import Progress, counting, sha256_of
from trailmark.memory import manifest as manifests
from trailmark.memory.hashes import damaged, pieces_of
from trailmark.memory.manifest import ChunkFile, StateFile


def verify(folder: str | Path, progress: Progress | None = None) -> None:
    """Compare every byte of a saved memory with the SHA-256 in its manifest.

    Args:
        progress: called with the bytes compared and the bytes in all, at the end of each block of 64 MiB.

    Raises:
        ValueError: as :func:`trailmark.memory.saved.load`; and for the first byte that differs, naming the file and
            the block.
    """
    folder = Path(folder)
    manifest = manifests.read(folder)
    chunks = manifest.chunks
    more = counting(progress, manifest.state.bytes + (0 if chunks is None else chunks.bytes))
    try:
        if chunks is not None:
            expect_size(folder / chunks.file, chunks.bytes, exact=False)
        expect_state(folder, manifest.state)
        more(manifest.state.bytes)
        if chunks is not None:
            compare(folder, chunks, 0, more)
    except FileNotFoundError as error:
        raise ValueError(missing(folder, error)) from error


def expect_state(folder: Path, state: StateFile) -> None:
    """Raise a ValueError where a byte of the state's file is another."""
    path = folder / state.file
    expect_size(path, state.bytes, exact=True)
    if sha256_of(path) != state.sha256:
        raise damaged(path, "the SHA-256 in the manifest, got another")


def compare(
    folder: Path, chunks: ChunkFile, start: int, more: Callable[[int], None] = lambda count: None
) -> None:
    """Compare a chunk file from byte ``start`` on with the manifest."""
    path = folder / chunks.file
    with untrusted.open_regular(path, "folder") as file:
        chunks.signed(folder).compare(pieces_of(file.fileno(), path), start, chunks.bytes, more)


def expect_size(path: Path, size: int, exact: bool) -> None:
    """Raise a ValueError where a file is shorter than ``size``, or of another length at all where it must be exact."""
    untrusted.expect_regular(path, "folder")
    length = path.stat().st_size
    if length < size or (exact and length > size):
        expected = f"{'' if exact else 'at least '}{size} bytes"
        cut_off = " It was cut off." if length < size else ""
        raise ValueError(f"{damaged(path, f'{expected} as in the manifest, got {length}')}{cut_off}")


def missing(folder: Path, error: OSError) -> str:
    """The message for a file that a manifest names and that is not there."""
    name = Path(str(error.filename)).name
    return (
        f"folder: expected the file {name!r}, which the manifest in {str(folder)!r} names, got none. Copy all "
        "files of a memory together."
    )
