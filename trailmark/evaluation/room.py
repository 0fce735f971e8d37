"""Whether a memory will hold a text, asked before it is read."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trailmark.memory import ChunkCache
from trailmark.memory.tiers.base import TIERS, tier_named
from trailmark.memory.tiers.records import free_bytes
from trailmark.models import TrailmarkForCausalLM
from trailmark.models.costs import kv_width

_CHUNKS = 4  # that are read to see what one takes


class Short(NamedTuple):
    """A place that has not the bytes that are needed."""

    place: str  # "device", "host" or "disk"
    needed: int
    free: int


def memory_need(
    model: TrailmarkForCausalLM, ids: Tensor, num_tokens: int, tier: str, dtype: torch.dtype | None
) -> Counter[str]:
    """Bytes of the "device", the "host" and the "disk" that the memory of ``num_tokens`` tokens takes.

    From what it takes for a few chunks, read for this: ``ids`` [1, n] int64, the beginning of a text, of at least
    :func:`probe_length` tokens.
    """
    config: Any = model.config
    if model.reach() is None:  # every layer keeps it all
        return Counter(device=num_tokens * config.num_hidden_layers * kv_width(config) * model.dtype.itemsize)
    keeps_tokens = tier_named(tier).keeps_tokens
    cache: ChunkCache = model.new_cache(tier if keeps_tokens else "device", memory_dtype=dtype)
    model.read(ids[:, : probe_length(model)].to(model.device), cache)
    memory = cache.memory
    count = int(cache.num_chunks[0])
    if not count or memory.store is None:
        return Counter()
    chunks = -(-num_tokens // config.chunk_size)
    records = chunks * memory.store.record_bytes * memory.planes
    rest = chunks * cache.memory_bytes() // count - records  # landmarks and tables
    return Counter(device=rest) + Counter({tier_named(tier).takes: records})


def probe_length(model: TrailmarkForCausalLM) -> int:
    """Tokens that fill a few chunks of a model's memory."""
    config: Any = model.config
    chunk = getattr(config, "chunk_size", None) or 1
    return (getattr(config, "local_length", None) or 0) + _CHUNKS * chunk


def find_short(
    need: Mapping[str, int], device: torch.device, folder: str | Path | None = None
) -> Short | None:
    """The first place with less free than ``need`` says; None: as far as is known, there is room.

    A ``device`` that is the CPU has the host's memory. Files lie in ``folder``; None: where temporary files go.
    """
    need = Counter(need)
    if device.type == "cpu":
        need["host"] += need.pop("device", 0)
    for place in ("device", "host", "disk"):
        free = free_bytes(place, device, folder) if need[place] else None
        if free is not None and need[place] > free:
            return Short(place, need[place], free)
    return None


def expect_room(
    model: TrailmarkForCausalLM,
    need: Mapping[str, int],
    length: int,
    folder: str | Path | None,
    together: int = 1,
) -> None:
    """Raises ValueError if what is free now is less than a text of ``length`` tokens needs.

    ``together``: processes of this machine that each read one.
    """
    short = find_short({place: together * size for place, size in need.items()}, model.device, folder)
    if short is None:
        return
    where = {
        "device": "memory of the device",
        "host": "main memory",
        "disk": f"disk space at {folder or tempfile.gettempdir()}",
    }
    way_out = next(kind.no_room for kind in TIERS.values() if kind.takes == short.place)
    in_all = "" if together == 1 else f"in {together} processes "
    raise ValueError(
        f"length: expected a text whose memory fits, got {length} tokens, which need {_size(short.needed)} "
        f"{in_all}of the {_size(short.free)} that are free as {where[short.place]}. {way_out}"
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
