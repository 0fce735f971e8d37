"""Chunks of a stretch of a text, in a folder of their own: a memory is put together of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trailmark.memory import saved
from trailmark.memory.chunks import ChunkMemory, MemorySize
from trailmark.memory.schema import Expected, expect_tables, expect_tensors
from trailmark.memory.snapshot import fill


def save_part(memory: ChunkMemory, size: MemorySize, folder: Path, header: dict[str, Any]) -> None:
    """Save a memory's chunks without a state: no model goes on from them.

    Raises:
        ValueError: as :func:`trailmark.memory.saved.save`.
    """
    saved.save(folder, memory.tables(size), header, memory.store, size.records)


def load_part(
    folder: Path, memory: ChunkMemory, chunks: int, device: torch.device, expected: Expected
) -> MemorySize:
    """Fill ``memory``, which is empty and has no folder, with the ``chunks`` that were saved in ``folder``.

    Every byte is compared with what was written.

    Raises:
        ValueError: no such chunks there, or they were damaged.
    """
    there = saved.load(folder)
    counts = torch.tensor([chunks])
    try:
        expect_tensors(there.tensors, expected)
        rows = None if there.record_shape is None else memory.keys_of_shape(there.record_shape)
        sizes = expected.sizes
        expect_tables(
            there.tensors, counts, there.count, rows, sizes.get("LP"), memory.planes, sizes.get("LE")
        )
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise ValueError(
            f"folder: expected whole chunks in {str(folder)!r}, got others ({reason}). Remove it and read again."
        ) from error
    short = rows is not None and bool((there.tensors["lengths"] < rows).any())
    size = MemorySize(counts.numpy(), there.count, short)
    if there.count:
        fill(memory, there, there.tensors, device)
        memory.expect_whole()
    return size
