"""The SHA-256 of a memory's records, block by block: compared as they are read, before they are signed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from trailmark import untrusted
from trailmark.files import in_threads, write_at

BLOCK_BYTES = 64 << 20
"""Of records under one SHA-256. Every version so far wrote this; another size needs another format."""

PIECE_BYTES = 4 << 20  # working memory of streaming and converting
_SAMPLES, _SAMPLE_BYTES = 16, 4096

Pieces = Callable[[int, int], Iterator[memoryview]]
"""The bytes of a range ``start ... stop - 1`` in order; threads may ask together."""


@dataclass(frozen=True)
class Signed:
    """What a manifest says of the records at the beginning of a chunk file."""

    path: Path
    count: int
    """Records."""
    record_bytes: int
    sha256: tuple[str, ...]
    """Of each block of ``BLOCK_BYTES``; the last may be shorter."""

    @property
    def bytes(self) -> int:
        return self.count * self.record_bytes

    def end(self, block: int) -> int:
        """Where a block ends."""
        return min((block + 1) * BLOCK_BYTES, self.bytes)

    def compare(
        self, pieces: Pieces, start: int, stop: int, more: Callable[[int], None] = lambda count: None
    ) -> None:
        """Compare the blocks that hold a byte of ``start ... stop - 1``, those that do not end by ``stop`` left out.

        Raises:
            ValueError: the first that differs, with its place.
        """
        blocks = [block for block in range(start // BLOCK_BYTES, len(self.sha256)) if self.end(block) <= stop]

        def compare(block: int) -> None:
            begin, end = block * BLOCK_BYTES, self.end(block)
            if digest(pieces, begin, end) != self.sha256[block]:
                raise self.differs(block)
            more(end - begin)

        in_threads(compare, blocks)

    def differs(self, block: int) -> ValueError:
        """The error for a block that is not as it was signed."""
        start, stop = block * BLOCK_BYTES, self.end(block) - 1
        return damaged(
            self.path,
            f"the SHA-256 in the manifest, got another in block {block} (bytes {start} ... {stop}, records "
            f"{start // self.record_bytes} ... {stop // self.record_bytes})",
        )


def damaged(path: Path, difference: str) -> ValueError:
    """The error for a file of a memory that is not as it was written."""
    return ValueError(
        f"folder: {str(path)!r} is damaged: expected {difference}. Take the memory from a copy, or read the "
        "text again."
    )


def sign(
    pieces: Pieces,
    size: int,
    known: Signed | None,
    kept: int,
    in_place: bool,
    copy_to: int | None = None,
) -> tuple[str, ...]:
    """The SHA-256 of each block of the first ``size`` bytes of records, several at once.

    What an earlier manifest says of them is compared on the way: damage is not signed again. No byte is read twice.

    Args:
        known: that manifest's word; None: there is none.
        kept: bytes, from the first, that were not overwritten since.
        in_place: the records stay in the file that ``known`` is about: whole blocks that it vouches for are not read.
            Damage in them keeps their old SHA-256, so that :func:`trailmark.memory.verification.verify` finds it.
        copy_to: the descriptor of a file that the bytes are written to.

    Raises:
        ValueError: a block differs from what was signed before.
    """

    def sign_block(block: int) -> str:
        begin, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, size)
        before = None
        if known is not None and block < len(known.sha256) and known.end(block) <= kept:
            before = known.end(block)
            if in_place and before == end:
                return known.sha256[block]
        ends = (end,) if before is None else tuple(sorted((before, end)))
        digests = _digests(pieces, begin, ends, None if copy_to is None else (copy_to, end))
        if before is not None and known is not None and digests[ends.index(before)] != known.sha256[block]:
            raise known.differs(block)
        return digests[ends.index(end)]

    return tuple(in_threads(sign_block, range(-(-size // BLOCK_BYTES))))


def digest(pieces: Pieces, begin: int, end: int) -> str:
    """The SHA-256 of the bytes ``begin ... end - 1``."""
    return _digests(pieces, begin, (end,))[0]


def digests_of_parts(pieces: Pieces, begin: int, ends: Sequence[int]) -> tuple[str, list[str]]:
    """The SHA-256 of the bytes from ``begin`` to the last of ``ends``, which ascend, and of each part between them."""
    whole, found = hashlib.sha256(), []
    for start, end in pairwise([begin, *ends]):
        part = hashlib.sha256()
        for piece in pieces(start, end):
            part.update(piece)
            if len(ends) > 1:
                whole.update(piece)
        found.append(part.hexdigest())
    return (whole.hexdigest() if len(ends) > 1 else found[0]), found


def _digests(
    pieces: Pieces, begin: int, ends: tuple[int, ...], copy: tuple[int, int] | None = None
) -> list[str]:
    """The SHA-256 of the bytes from ``begin`` to each of ``ends``, which ascend, all read once.

    Args:
        copy: a file's descriptor, and where what is written to it ends.
    """
    hasher, found, at = hashlib.sha256(), [], begin
    for end in ends:
        for piece in pieces(at, end):
            if copy is not None and at < copy[1]:
                write_at(copy[0], piece[: copy[1] - at], at)
            hasher.update(piece)
            at += len(piece)
        found.append(hasher.hexdigest())
    return found


def pieces_of(file: int, path: Path) -> Pieces:
    """The bytes of an open file; a ValueError where it ends too early."""

    def pieces(start: int, stop: int) -> Iterator[memoryview]:
        while start < stop:
            read = os.pread(file, min(PIECE_BYTES, stop - start), start)
            if not read:
                raise damaged(path, f"{stop} bytes, got {start}")
            yield memoryview(read)
            start += len(read)

    return pieces


def sample_of(path: Path, size: int) -> str:
    """The SHA-256 of pieces of a chunk file's first ``size`` bytes, from the first to the last.

    It tells the file from another memory's at once, and is no proof that every byte is as it was.
    """
    width, last = min(_SAMPLE_BYTES, size), max(0, size - _SAMPLE_BYTES)
    result = hashlib.sha256(str(size).encode())
    with untrusted.open_regular(path, "folder") as file:
        pieces = pieces_of(file.fileno(), path)
        for start in sorted({n * last // (_SAMPLES - 1) for n in range(_SAMPLES)}):
            for piece in pieces(start, start + width):
                result.update(piece)
    return result.hexdigest()
