"""Stores of chunk records: every tier gives back every bit, and costs what it says."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.disks import LOCK, held_by_another
from trailmark.memory import hashes
from trailmark.memory.tiers import disk, resident
from trailmark.memory.tiers import records as records_module
from trailmark.memory.tiers.base import TIERS, open_store, tier_named
from trailmark.memory.tiers.disk import DiskStore
from trailmark.memory.tiers.files import temporary_folder
from trailmark.memory.tiers.quantized import dequantize, quantize
from trailmark.memory.tiers.recent import RecentRecords
from trailmark.memory.tiers.records import ChunkStore, RecordLayout
from trailmark.memory.tiers.resident import DeviceStore, HostStore, ResidentStore

SHAPE = (2, 2, 3, 5)  # 2, J, S, D
KINDS: dict[str, type[ResidentStore]] = {"device": DeviceStore, "host": HostStore}
MIB = 1 << 20
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
pytestmark = pytest.mark.usefixtures("one_thread")


def records(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """[n, 2, J, S, D]"""
    return torch.randn(n, *SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Records as a store of this dtype gives them."""
    return dequantize(quantize(x), SHAPE) if dtype == torch.int8 else x.to(dtype)


def file_of(x: Tensor, dtype: torch.dtype) -> bytes:
    """The file of a store with these records."""
    return bytes(memoryview((quantize(x) if dtype == torch.int8 else x.to(dtype)).view(torch.uint8).numpy()))


def same_bits(ours: Tensor, exact: Tensor) -> bool:
    assert ours.dtype == exact.dtype
    assert ours.shape == exact.shape
    return torch.equal(ours.contiguous().view(torch.uint8), exact.contiguous().view(torch.uint8))


def every(store: ChunkStore) -> Tensor:
    return store.gather(torch.arange(len(store)))


def filled(tier: str, count: int, dtype: torch.dtype = torch.float32, path: Path | None = None) -> ChunkStore:
    store = tier_named(tier).made(RecordLayout(SHAPE, dtype, "cpu"), path=path)
    store.write(0, records(count))
    return store


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


@pytest.fixture(params=TIERS)
def store(request: pytest.FixtureRequest) -> Iterator[ChunkStore]:
    made = tier_named(request.param).made(RecordLayout(SHAPE, torch.float32, "cpu"))
    yield made
    made.close()


# --- bits ------------------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[str, int, int]]]:
    """Records in a file that is opened, 0: none; and (what, number, how many): writes up to the end, and reads."""
    steps, count = [], draw(st.sampled_from([0, 0, 1, 70]))
    opened = count
    for _ in range(draw(st.integers(1, 12))):
        what = draw(st.sampled_from(["append", "append", "overwrite", "gather", "gather"]))
        first = count if what == "append" else draw(st.integers(0, count))
        n = draw(st.integers(0, 40 if what == "append" else 9))
        count = max(count, first + n) if what != "gather" else count
        steps.append((what, first, n))
    return opened, steps


@settings(max_examples=40, deadline=None)
@given(
    history=histories(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8]),
    capacity=st.integers(0, 70),
    recent=st.integers(1, 30),
    seed=st.integers(0, 2**31),
)
def test_every_tier_holds_the_bits_that_were_written(
    history: tuple[int, list[tuple[str, int, int]]], dtype: torch.dtype, capacity: int, recent: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    opened, steps = history
    plain = rounded(records(opened), dtype)
    with contextlib.ExitStack() as stack:
        stores = [tier_named(tier).made(RecordLayout(SHAPE, dtype, "cpu"), capacity) for tier in TIERS]
        if opened:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for tier in TIERS:
                (folder / tier).write_bytes(file_of(records(opened), dtype) + b"more")
            stores = [
                open_store(tier, folder / tier, RecordLayout(SHAPE, dtype, "cpu"), opened) for tier in TIERS
            ]
        fronts = [RecentRecords(store, recent) for store in stores]
        for what, first, n in steps:
            if what == "gather":
                wanted = torch.randint(0, max(1, len(plain)), (n if len(plain) else 0,), generator=generator)
                for front in fronts:
                    assert same_bits(front.gather(wanted), plain[wanted])
                    assert same_bits(front.store.gather(wanted), plain[wanted])
                continue
            # strided, and of another dtype
            new = records(n, seed=first + n, dtype=torch.float64).transpose(3, 4).contiguous().transpose(3, 4)
            plain = torch.cat([plain[:first], rounded(new, dtype), plain[first + n :]])
            for front in fronts:
                front.write(first, new)
                assert len(front.store) == len(plain)
                scales = 2 * 2 * 4 if dtype == torch.int8 else 0
                assert front.store.num_bytes() == len(plain) * (2 * 2 * 3 * 5 * dtype.itemsize + scales)
        for front in fronts:
            assert same_bits(every(front.store), plain)
            front.store.close()
        if opened:  # only tier "disk" writes to its file
            kept = file_of(records(opened), dtype) + b"more"
            assert all((folder / tier).read_bytes() == kept for tier in ("device", "host"))


def test_nan_and_infinity_and_the_sign_of_zero_are_kept(store: ChunkStore) -> None:
    odd = records(3)
    odd[0, 0, 0, 0] = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45])
    odd.view(torch.int32)[1, 0, 0, 0, 0] = 0x7FC01234  # a NaN with a payload
    store.write(0, odd)
    assert same_bits(every(store), odd)


def test_what_is_gathered_is_a_copy(store: ChunkStore) -> None:
    store.write(0, records(3))
    front = RecentRecords(store, 3)
    front.gather(torch.arange(3)).zero_()
    store.gather(torch.arange(3)).zero_()
    assert same_bits(front.gather(torch.arange(3)), records(3))
    assert same_bits(every(store), records(3))


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_may_come_and_go(store: ChunkStore, first: bool) -> None:
    front = RecentRecords(store, 2)
    for inference in (first, not first):
        with torch.inference_mode(inference):
            store.write(0, records(70))
            found = [front.gather(torch.tensor([1, 69])), store.gather(torch.tensor([1, 69]))]
    for x in found:
        weight = torch.ones((), requires_grad=True)
        (x * weight).sum().backward()  # refused for a tensor of inference mode
        assert weight.grad == x.sum()


def test_no_gradient_is_kept(store: ChunkStore) -> None:
    store.write(0, records(3).requires_grad_())
    assert not every(store).requires_grad


# --- bad arguments ---------------------------------------------------------------------------------------


def test_other_tiers_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"memory_tier: expected one of 'device', 'host', 'disk', 'tokens', got 'gpu'"
    ):
        tier_named("gpu")
    with pytest.raises(ValueError, match="memory_tier: expected one of"):
        open_store("gpu", "chunks.bin", RecordLayout(SHAPE, torch.float32, "cpu"), 3)


@pytest.mark.parametrize("shape", [(2, 2, 3), (1, 2, 3, 5), (2, 0, 3, 5)])
def test_records_have_keys_and_values(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="record_shape: expected"):
        tier_named("host").made(RecordLayout(shape, torch.float32, "cpu"))


@pytest.mark.parametrize("numbers", [[3], [-1], [0, 1, -3, 2], [1 << 40]])
def test_records_that_were_not_written_are_not_gathered(store: ChunkStore, numbers: list[int]) -> None:
    store.write(0, records(3))
    for reader in (store, RecentRecords(store, 9)):
        with pytest.raises(ValueError, match="numbers: expected numbers of the 3 records written"):
            reader.gather(torch.tensor(numbers))


def test_numbers_are_int64(store: ChunkStore) -> None:
    store.write(0, records(3))
    for numbers in (torch.tensor([0], dtype=torch.int32), torch.tensor([[0]]), torch.tensor([0.0])):
        with pytest.raises(ValueError, match="numbers: expected int64"):
            store.gather(numbers)


@pytest.mark.parametrize("first", [-1, 4])
def test_no_gap_is_written(store: ChunkStore, first: int) -> None:
    store.write(0, records(3))
    with pytest.raises(
        ValueError, match=f"first: expected a number up to the 3 records written, got {first}"
    ):
        store.write(first, records(1))
    assert same_bits(every(store), records(3))


def test_records_of_another_shape_are_refused(store: ChunkStore) -> None:
    with pytest.raises(ValueError, match=r"records: expected shape \[n, 2, J, S, D\]"):
        store.write(0, records(3)[:, :, :1])


# --- streaming -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("other", TIERS)
@pytest.mark.parametrize("count", [0, 1, 150, 200])
def test_a_log_is_streamed_to_a_file_and_to_other_tiers(
    tier: str, other: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (records_module, resident, disk, hashes):
        monkeypatch.setattr(module, "PIECE_BYTES", 1000)  # several pieces, not at the ends of records
    store, copy = filled(tier, 200), tier_named(other).made(RecordLayout(SHAPE, torch.float32, "cpu"))
    exact = records(200)[:count]
    assert b"".join(store.pieces(0, count * store.record_bytes)) == exact.numpy().tobytes()
    assert max((len(piece) for piece in store.pieces(0, store.num_bytes())), default=0) <= 1000
    start, stop = min(77, count), min(5000, count)
    assert b"".join(store.pieces(start, stop)) == exact.numpy().tobytes()[start:stop]
    store.copy_to(copy, count)
    assert same_bits(every(copy), exact)
    with pytest.raises(ValueError, match="count: expected at most the 200 records"):
        store.copy_to(copy, 201)
    for made in (store, copy):
        made.close()


# --- device and host -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("capacity", [0, 1, 100])
def test_growing_moves_nothing(tier: str, capacity: int) -> None:
    store = KINDS[tier](SHAPE, torch.float32, "cpu", capacity)
    places: list[int] = []
    for number in range(1000):
        store.write(number, records(1, seed=number))
        now = [segment.data_ptr() for segment in store._segments.tensors]
        assert now[: len(places)] == places
        places = now
    assert len(places) < 12
    assert len(store._segments.tensors[0]) == (capacity or 64)


def test_segments_are_of_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HostStore(SHAPE, torch.float32, "cpu", capacity=1)
    monkeypatch.setattr(resident, "_SEGMENT_BYTES", 5 * store.record_bytes + 1)
    store.write(0, records(40))
    assert [len(x) for x in store._segments.tensors] == [1, 1, 2, 4, 5, 5, 5, 5, 5, 5, 5]
    monkeypatch.setattr(resident, "_SEGMENT_BYTES", store.record_bytes - 1)
    store.write(40, records(5))
    assert [len(x) for x in store._segments.tensors][11:] == [1, 1]


@linux
def test_room_that_is_not_used_takes_no_memory() -> None:
    store = HostStore(SHAPE, torch.float32, "cpu", capacity=2**30 // (60 * 4))
    before = anonymous_bytes()
    store.write(0, records(10))
    assert anonymous_bytes() - before < 20 * MIB


def test_memory_that_cannot_be_had_is_named_with_the_way_out() -> None:
    for tier, way_out in (("device", "memory_tier='host' or 'disk'"), ("host", "memory_tier='disk'")):
        store = KINDS[tier](SHAPE, torch.float32, "cpu", capacity=1 << 50)
        with pytest.raises(ValueError, match=f"memory_tier: .* on tier '{tier}' .*{way_out}"):
            store.write(0, records(1))
        assert len(store) == 0


@linux
def test_a_store_that_cannot_grow_stays_as_it_is() -> None:
    shape = (2, 1, 1024, 512)  # 4 MiB
    store = HostStore(shape, torch.float32, "cpu", capacity=2)
    store.write(0, torch.ones(2, *shape))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 20 * MIB, limits[1]))
    try:
        with pytest.raises(ValueError, match=r"memory_tier: expected room for another .* on tier 'host'"):
            store.write(2, torch.zeros(1, *shape).expand(1000, *shape))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert len(store) == 2
    store.write(2, torch.zeros(1, *shape).expand(9, *shape))
    assert every(store).amax((1, 2, 3, 4)).tolist() == [1.0] * 2 + [0.0] * 9


@linux
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_file_is_opened_without_being_read(tier: str, tmp_path: Path) -> None:
    shape = (2, 4, 64, 128)  # 128 KiB in bf16
    path = tmp_path / "chunks.bin"
    with open(path, "wb") as file:
        file.truncate(64 * MIB)
    before = anonymous_bytes()
    store = open_store(tier, path, RecordLayout(shape, torch.bfloat16, "cpu"), count=512)
    store.gather(torch.arange(0, 512, 7))
    path.unlink()  # as saving again does
    store.write(510, torch.ones(1, *shape).expand(3, *shape))
    assert store.gather(torch.arange(509, 513)).amax((1, 2, 3, 4)).tolist() == [0, 1, 1, 1]
    assert anonymous_bytes() - before < 20 * MIB


@linux
def test_a_file_that_host_memory_cannot_hold_goes_to_disk(tmp_path: Path) -> None:
    shape = (2, 8, 1024, 1024)  # 32 MiB in bf16
    count = (psutil.virtual_memory().total + psutil.swap_memory().total) // (32 * MIB) + 99
    path = tmp_path / "chunks.bin"
    with open(path, "wb") as file:
        file.truncate(count * 32 * MIB)
    if Path("/proc/sys/vm/overcommit_memory").read_text() != "1\n":
        with pytest.raises(
            ValueError, match=r"memory_tier: .* on tier 'host' .*memory_tier='disk' holds more"
        ):
            open_store("host", path, RecordLayout(shape, torch.bfloat16, "cpu"), count)
    store = open_store("disk", path, RecordLayout(shape, torch.bfloat16, "cpu"), count)
    assert not store.gather(torch.tensor([count - 1])).any()
    store.close()


# --- disk ------------------------------------------------------------------------------------------------


@linux
def test_a_disk_store_keeps_nothing_in_anonymous_memory() -> None:
    shape = (2, 4, 64, 128)  # 128 KiB in bf16
    store = tier_named("disk").made(RecordLayout(shape, torch.bfloat16, "cpu"))
    block = torch.randn(64, *shape).bfloat16()
    numbers = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(0))
    store.write(0, block)
    store.gather(numbers)  # what torch and malloc keep for themselves is there now
    before = anonymous_bytes()
    for first in range(64, 2048, 64):
        store.write(first, block)
        assert same_bits(store.gather(numbers + first), block[numbers])
    for number in torch.randperm(2048).split(8):
        store.gather(number)
    assert store.num_bytes() == 256 * MIB
    assert anonymous_bytes() - before < 0.1 * store.num_bytes()
    store.close()


def test_a_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "a" / "chunks.bin"
    store = DiskStore(path, SHAPE, torch.float32, "cpu")
    store.write(0, records(9))
    store.close()
    store = DiskStore(path, SHAPE, torch.float32, "cpu", count=7)
    assert same_bits(every(store), records(9)[:7])
    store.write(7, records(5, seed=1))
    store.sync()
    assert same_bits(every(store), torch.cat([records(9)[:7], records(5, seed=1)]))
    store.close()
    assert path.stat().st_size == 12 * store.record_bytes


def test_a_new_memory_overwrites_no_file(tmp_path: Path) -> None:
    filled("disk", 3, path=tmp_path / "chunks.bin").close()
    with pytest.raises(ValueError, match=r"path: expected no file, .*is in the way"):
        DiskStore(tmp_path / "chunks.bin", SHAPE, torch.float32, "cpu")


@pytest.mark.parametrize("tier", TIERS)
def test_missing_and_short_files_are_refused(tier: str, tmp_path: Path) -> None:
    path = tmp_path / "chunks.bin"
    with pytest.raises(ValueError, match=r"path: expected a chunk file to read, .*No such file"):
        open_store(tier, path, RecordLayout(SHAPE, torch.float32, "cpu"), 1)
    filled("disk", 3, path=path).close()
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match=r"path: expected at least 720 bytes \(3 chunks\) .*got 719"):
        open_store(tier, path, RecordLayout(SHAPE, torch.float32, "cpu"), 3)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = DiskStore(tmp_path / "file" / "chunks.bin", SHAPE, torch.float32, "cpu")
    with pytest.raises(ValueError, match="memory_folder: expected a chunk file to write to"):
        store.write(0, records(1))


def test_a_second_writer_is_refused_and_the_first_undisturbed(tmp_path: Path) -> None:
    path = tmp_path / "chunks.bin"
    first = filled("disk", 3, path=path)
    second = DiskStore(path, SHAPE, torch.float32, "cpu", count=3)
    with pytest.raises(ValueError, match=r"memory_folder: .*is being written by another process or cache"):
        second.write(3, records(1))
    assert same_bits(every(second), records(3))  # it may read
    first.write(3, records(2, seed=1))
    first.close()
    with pytest.raises(ValueError, match="something else has written to it since"):
        second.write(3, records(1))
    second.close()
    third = DiskStore(path, SHAPE, torch.float32, "cpu", count=5)
    third.write(5, records(1))
    assert same_bits(every(third)[3:5], records(2, seed=1))
    third.close()


def test_other_processes_are_kept_out_until_they_are_killed(tmp_path: Path) -> None:
    path = tmp_path / "chunks.bin"
    filled("disk", 3, path=path).close()
    with held_by_another(path):
        store = DiskStore(path, SHAPE, torch.float32, "cpu", count=3)
        with pytest.raises(ValueError, match="is being written by another process"):
            store.write(3, records(1))
    store.write(3, records(1))
    refused = subprocess.run([sys.executable, "-c", LOCK, str(path)], capture_output=True, check=False)
    assert b"BlockingIOError" in refused.stderr
    store.close()


def test_a_file_that_was_replaced_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "chunks.bin"
    filled("disk", 3, path=path).close()
    store = DiskStore(path, SHAPE, torch.float32, "cpu", count=3)
    path.rename(tmp_path / "old")
    with pytest.raises(ValueError, match="No such file"):
        store.write(3, records(1))
    filled("disk", 3, path=path).close()
    with pytest.raises(ValueError, match="something else has written"):
        store.write(3, records(1))
    assert same_bits(every(store), records(3))
    store.close()


@linux
def test_a_closed_or_collected_store_leaves_no_descriptor(tmp_path: Path) -> None:
    def descriptors() -> list[str]:
        links = []
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                links.append(os.readlink(descriptor))
        return [link for link in links if str(tmp_path) in link]

    path = tmp_path / "chunks.bin"
    store = filled("disk", 3, path=path)
    every(store)
    assert descriptors()
    store.close()
    assert not descriptors()
    store = DiskStore(path, SHAPE, torch.float32, "cpu", count=3)
    store.write(3, every(store))
    assert descriptors()
    del store
    assert not descriptors()


def test_temporary_files_go_with_their_store() -> None:
    closed, collected = filled("disk", 3), filled("disk", 3)
    assert isinstance(closed, DiskStore)
    assert isinstance(collected, DiskStore)
    paths = [closed.path, collected.path]
    assert all(path.stat().st_size == 720 for path in paths)
    closed.close()
    del collected
    assert not any(path.parent.exists() for path in paths)


def test_a_fork_does_not_remove_its_parents_folder(tmp_path: Path) -> None:
    class Owner:
        pass

    owner = Owner()
    folder = temporary_folder(owner, tmp_path)
    child = os.fork()
    if child == 0:
        del owner
        os._exit(0)
    os.waitpid(child, 0)
    assert folder.exists()
    del owner
    assert not folder.exists()


# --- CUDA ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("tier", TIERS)
def test_records_reach_the_device_while_it_computes(tier: str, dtype: torch.dtype, tmp_path: Path) -> None:
    shape = (2, 4, 64, 64)
    exact = torch.randn(500, *shape)
    if dtype == torch.int8:  # quantized again they stay the same
        exact = dequantize(quantize(exact), shape)
    store = tier_named(tier).made(RecordLayout(shape, dtype, "cuda"), capacity=40)
    for first in range(0, 500, 50):
        store.write(first, exact[first : first + 50].cuda())
    busy = torch.randn(2000, 2000, device="cuda")
    pending = []
    for seed in range(50):
        wanted = torch.randint(0, 500, (20,), generator=torch.Generator().manual_seed(seed))
        for _ in range(3):
            busy = (busy @ busy).clamp(-1, 1)
        pending.append((store.gather(wanted), wanted))
        if len(pending) == 3:
            gathered, numbers = pending.pop(0)
            found = gathered + 0
            del gathered  # its memory may be given to the next copy
            assert found.device.type == "cuda"
            assert same_bits(found.cpu(), exact[numbers])
    recent = RecentRecords(store, 30)
    for numbers in (torch.tensor([3, 4, 400]), torch.tensor([400, 499, 3])):
        assert same_bits(recent.gather(numbers).cpu(), exact[numbers])
    assert b"".join(store.pieces(0, store.num_bytes())) == exact.numpy().tobytes()
    store.close()
    (tmp_path / "chunks.bin").write_bytes(exact.numpy().tobytes())
    store = open_store(tier, tmp_path / "chunks.bin", RecordLayout(shape, torch.float32, "cuda"), 500)
    store.write(500, exact[:30].cuda())
    assert same_bits(every(store).cpu(), torch.cat([exact, exact[:30]]))
    store.close()


def test_several_stores_write_one_file_each_its_own_records(tmp_path: Path) -> None:
    whole = records(7)
    layout = (SHAPE, torch.float32, "cpu")
    stores = [DiskStore(tmp_path / "chunks.bin", *layout, before=first) for first in (4, 0)]
    for store, own in zip(stores, (whole[4:], whole[:4]), strict=True):
        for n in range(len(own)):  # in turns: a map made before is too short then
            store.write(n, own[n : n + 1])
            assert torch.equal(every(store), own[: n + 1])
        assert b"".join(store.pieces(0, store.num_bytes())) == own.numpy().tobytes()
    assert (tmp_path / "chunks.bin").read_bytes() == whole.numpy().tobytes()
    for store in stores:
        store.close()
    joined = DiskStore(tmp_path / "chunks.bin", *layout, count=7)
    assert torch.equal(every(joined), whole)
    joined.close()
