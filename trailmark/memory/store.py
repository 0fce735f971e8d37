"""Where a memory's keys and values live: a store of chunk records on the device, on the host or on disk."""

from __future__ import annotations

from pathlib import Path

import torch

from trailmark.memory.disk import DiskStore
from trailmark.memory.records import ChunkStore
from trailmark.memory.resident import ResidentStore
from trailmark.ops.arguments import require

TIERS = ("device", "host", "disk")


def make_store(
    tier: str,
    record_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
    capacity: int = 0,
    path: str | Path | None = None,
) -> ChunkStore:
    """A new, empty store.

    Args:
        tier: "device", "host" or "disk".
        record_shape: (2, J, S, D).
        dtype: what records are kept in.
        device: where :meth:`ChunkStore.gather` puts them.
        capacity: records to make room for at once on device and host; 0: no guess. On the CPU a guess costs
            no memory before it is used.
        path: the file of tier "disk"; None: one in a temporary folder that goes with the store.

    Raises:
        ValueError: for another tier, or a ``path`` for a tier without files.
    """
    _expect_tier(tier)
    if tier == "disk":
        return DiskStore(path, record_shape, dtype, device)
    require(
        path is None,
        "memory_folder",
        repr(str(path)),
        f"none for memory_tier={tier!r}",
        "Only tier 'disk' keeps its chunks in files; the others are saved when they are asked to.",
    )
    return ResidentStore(tier, record_shape, dtype, device, capacity)


def open_store(
    tier: str,
    path: str | Path,
    record_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
    count: int,
) -> ChunkStore:
    """A store of any tier that begins with the first ``count`` records of a file.

    In RAM and on disk nothing is read before it is used; a device other than the CPU is filled. Only tier "disk"
    writes to the file.

    Raises:
        ValueError: for another tier, a file that is missing or too short, or no room.
    """
    _expect_tier(tier)
    if tier == "disk":
        return DiskStore(path, record_shape, dtype, device, count)
    if tier == "host" or torch.device(device).type == "cpu":
        return ResidentStore.of_file(tier, path, record_shape, dtype, device, count)
    store = ResidentStore(tier, record_shape, dtype, device, count)
    if count:
        source = DiskStore(path, record_shape, dtype, "cpu", count)
        source.copy_to(store, count)
        source.close()
    return store


def _expect_tier(tier: str) -> None:
    require(
        tier in TIERS,
        "memory_tier",
        repr(tier),
        "one of " + ", ".join(map(repr, TIERS)),
        "'device' is fastest, 'disk' holds most.",
    )
