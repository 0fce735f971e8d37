"""A tier that this file alone knows: everything that a tier is asked for is answered by one class."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.tiny import drt, landmark, tokens
from trailmark.memory import ChunkCache
from trailmark.memory.tiers.base import TIERS, register_tier
from trailmark.memory.tiers.records import Bytes, ChunkStore, Numbers, bytes_of
from trailmark.models import TrailmarkForCausalLM


class PackedStore(ChunkStore):
    """Each record by itself, compressed, in main memory."""

    tier = "packed"
    packed: list[bytes]

    def write(self, first: int, records: Tensor) -> None:
        records = self._expect_records(first, records).to("cpu", self.dtype).contiguous()
        new = [zlib.compress(row.tobytes(), 1) for row in bytes_of(records)]
        held = self.packed if self._count else []
        self.packed = held[:first] + new + held[first + len(new) :]
        self._count = len(self.packed)

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        width = self.record_bytes
        for number in range(start // width, -(-stop // width)):
            record = zlib.decompress(self.packed[number])
            yield memoryview(record)[max(0, start - number * width) : stop - number * width]

    def _collect(self, wanted: Numbers, out: Bytes) -> None:
        for row, number in zip(out, wanted.tolist(), strict=True):
            row[:] = np.frombuffer(zlib.decompress(self.packed[number]), np.uint8)

    @classmethod
    def keeps_recent(cls, device: torch.device | str) -> bool:
        return True


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trailmark.memory.tiers.base.TIERS", TIERS)  # put back as it was
    for name, kind in list(TIERS.items()):
        monkeypatch.setitem(TIERS, name, kind)
    monkeypatch.setitem(TIERS, PackedStore.tier, PackedStore)
    assert register_tier(PackedStore) is PackedStore


def answers(model: TrailmarkForCausalLM, cache: ChunkCache) -> list[Tensor]:
    """What a cache that has read something answers: logits of some pieces, and what is generated after them."""
    found = [
        model(piece, past_key_values=cache).logits for piece in tokens(14, seed=5).split([1, 9, 3, 1], 1)
    ]
    return [
        *found,
        model.generate(tokens(5, seed=6), past_key_values=cache, max_new_tokens=6, do_sample=False),
    ]


@torch.no_grad()
@pytest.mark.parametrize("make", [drt, landmark])
def test_it_reads_generates_and_saves_bit_for_bit_as_the_device(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model, caches = make(), {}
    for tier in ("device", "packed"):
        cache = caches[tier] = model.read(tokens(61), model.new_cache(memory_tier=tier))
        cache.save(tmp_path / tier)
    store = caches["packed"].memory.store
    assert isinstance(store, PackedStore)
    assert len(store) == len(caches["device"].memory.store)
    expected = answers(model, caches["device"])
    for written, tier in (("device", "packed"), ("packed", "packed"), ("packed", "disk")):
        again = model.load_cache(tmp_path / written, memory_tier=tier)
        assert all(map(torch.equal, answers(model, again), expected)), (written, tier)
    assert all(map(torch.equal, answers(model, caches["packed"]), expected))
    branches = [model.load_cache(tmp_path / tier, memory_tier=tier).branch(2) for tier in caches]
    ours, theirs = (model(tokens(4, batch=2), past_key_values=branch).logits for branch in branches)
    assert torch.equal(ours, theirs)


def test_it_is_named_where_another_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"memory_tier: expected one of .*'packed', got 'paked'"):
        drt().new_cache(memory_tier="paked")
    with pytest.raises(ValueError, match=r"memory_folder: expected none for memory_tier='packed'"):
        drt().new_cache(memory_tier="packed", memory_folder="somewhere")


def test_it_says_whose_room_it_takes() -> None:
    assert {name: kind.takes for name, kind in TIERS.items()} == {
        "device": "device", "host": "host", "disk": "disk", "tokens": "host", "packed": "host",
    }  # fmt: skip
