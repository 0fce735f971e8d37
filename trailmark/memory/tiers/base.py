"""The tiers: where a memory's keys and values may live. A new one is a class in one file, registered by its name."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import TypeVar

import torch

from trailmark.memory import tiers
from trailmark.memory.tiers.disk import DiskStore
from trailmark.memory.tiers.records import ChunkStore, RecordLayout
from trailmark.memory.tiers.resident import DeviceStore, HostStore
from trailmark.ops.arguments import require

Store = TypeVar("Store", bound=type[ChunkStore])

TIERS: dict[str, type[ChunkStore]] = {}
"""Of each name that ``memory_tier`` may have, what keeps the records."""


def register_tier(store: Store) -> Store:
    """Make a tier known by its name ``store.tier``, in place of one that had it; also a class decorator."""
    TIERS[store.tier] = store
    return store


for _store in (DeviceStore, HostStore, DiskStore):
    register_tier(_store)
for _module in pkgutil.iter_modules(tiers.__path__):  # what other files here register
    importlib.import_module(f"{tiers.__name__}.{_module.name}")


def open_store(tier: str, path: str | Path, layout: RecordLayout, count: int) -> ChunkStore:
    """A store of any tier that begins with the first ``count`` records of a file.

    In RAM and on disk nothing is read before it is used; a device other than the CPU is filled. Only tier "disk"
    writes to the file.

    Raises:
        ValueError: for another tier, a file that is missing or too short, or no room.
    """
    kind = tier_named(tier)
    store: ChunkStore | None = kind.of_file(path, layout, count)
    if store is not None:
        return store
    store = kind.made(layout, count)
    if count:
        source = DiskStore.of_file(path, layout._replace(device="cpu"), count)
        source.copy_to(store, count)
        source.close()
    return store


def expect_dtype(tier: str, dtype: torch.dtype | None) -> None:
    """Raise a ValueError for a ``memory_dtype`` that a tier cannot have."""
    require(
        dtype != torch.int8 or not tier_named(tier).keeps_tokens,
        "memory_dtype",
        "int8",
        f"float32, bfloat16 or float16 with memory_tier {tier!r}, where it is that of landmark vectors",
        "Pass bfloat16, or choose another tier for int8.",
    )


def tier_named(tier: str) -> type[ChunkStore]:
    """The tier that ``memory_tier`` names.

    Raises:
        ValueError: there is none of that name.
    """
    require(
        tier in TIERS,
        "memory_tier",
        repr(tier),
        "one of " + ", ".join(map(repr, TIERS)),
        "'device' is fastest, 'disk' holds most.",
    )
    return TIERS[tier]
