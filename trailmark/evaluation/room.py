"""Whether a memory will hold a text, asked before it is read."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from trailmark.memory import ChunkCache
from trailmark.models import TrailmarkForCausalLM
from trailmark.models.costs import kv_width

_CHUNKS = 4  # that are read to see what one takes


class Need(NamedTuple):
    """Bytes for a text."""

    device: int  # where the model lies
    host: int
    disk: int


def memory_need(
    model: TrailmarkForCausalLM, ids: Tensor, num_tokens: int, tier: str, dtype: torch.dtype | None
) -> Need:
    """Bytes that the memory of ``num_tokens`` tokens takes, from what it takes for a few chunks, read for this.

    ``ids`` [1, n] int64: the beginning of a text, of at least :func:`probe_length` tokens.
    """
    config: Any = model.config
    if model.reach() is None:  # every layer keeps it all
        return Need(num_tokens * config.num_hidden_layers * kv_width(config) * model.dtype.itemsize, 0, 0)
    cache: ChunkCache = model.new_cache(memory_dtype=dtype)
    model.read(ids[:, : probe_length(model)].to(model.device), cache)
    memory = cache.memory
    count = int(cache.num_chunks[0])
    if not count or memory.store is None:
        return Need(0, 0, 0)
    chunks = -(-num_tokens // config.chunk_size)
    records = chunks * memory.store.record_bytes * memory.planes
    rest = chunks * cache.memory_bytes() // count - records  # landmarks and tables
    places = {"device": (records + rest, 0, 0), "host": (rest, records, 0), "disk": (rest, 0, records)}
    return Need(*places[tier])


def probe_length(model: TrailmarkForCausalLM) -> int:
    """Tokens that fill a few chunks of a model's memory."""
    config: Any = model.config
    chunk = getattr(config, "chunk_size", None) or 1
    return (getattr(config, "local_length", None) or 0) + _CHUNKS * chunk


def expect_room(model: TrailmarkForCausalLM, need: Need, length: int, folder: str | Path | None) -> None:
    """Raises ValueError if what is free now is less than a text of ``length`` tokens needs."""
    device, host = need.device, need.host
    if model.device.type == "cpu":
        device, host = 0, device + host
    free = {"host": int(psutil.virtual_memory().available)}
    if model.device.type == "cuda":
        free["device"] = torch.cuda.mem_get_info(model.device)[0]
    place = Path(tempfile.gettempdir() if folder is None else folder)
    while not place.exists():
        place = place.parent
    free["disk"] = shutil.disk_usage(place).free
    ways = {
        "device": "memory of the device. Choose memory_tier 'host', memory_dtype 'bfloat16', or a shorter one.",
        "host": "main memory. Choose memory_tier 'disk', memory_dtype 'bfloat16', or a shorter one.",
        "disk": f"disk space at {place}. Choose another memory_folder (or TMPDIR), memory_dtype 'bfloat16', or a "
        "shorter one.",
    }
    for name, needed in (("device", device), ("host", host), ("disk", need.disk)):
        if needed > free.get(name, needed):
            raise ValueError(
                f"length: expected a text whose memory fits, got {length} tokens, which need {_size(needed)} of the "
                f"{_size(free[name])} that are free as {ways[name]}"
            )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
