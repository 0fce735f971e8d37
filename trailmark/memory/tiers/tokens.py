"""Chunk records that are tokens: what they need is computed again, so that a memory is small."""

from __future__ import annotations

from pathlib import Path

import torch

from trailmark.memory.tiers.base import register_tier
from trailmark.memory.tiers.disk import DiskStore
from trailmark.memory.tiers.records import ChunkStore, RecordLayout
from trailmark.memory.tiers.resident import HostStore


@register_tier
class TokenStore(ChunkStore):
    """Tier "tokens": the numbers of a chunk's tokens, in a file of ``memory_folder`` or, without one, in RAM.

    The store itself is one of tier "disk" or "host", whose records are tokens [S].
    :mod:`trailmark.memory.encoding` makes keys and values of them.
    """

    tier = "tokens"
    needs_folder = True
    keeps_tokens = True
    no_room = "Choose memory_dtype 'bfloat16', which is that of landmark vectors here, or a shorter one."

    @classmethod
    def made(cls, layout: RecordLayout, capacity: int = 0, path: str | Path | None = None) -> ChunkStore:
        return HostStore.made(layout, capacity) if path is None else DiskStore.made(layout, capacity, path)

    @classmethod
    def keeps_recent(cls, device: torch.device | str) -> bool:
        return True
