"""A disk that fills up: what was written stays, and the store goes on where there is room again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.disks import largest_file, small_disk
from tests.memory.tiers.test_base import MIB, SHAPE, every, linux, records
from trailmark.files import NoSpaceError
from trailmark.memory.tiers.disk import DiskStore

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def disk_of_4_mib() -> Iterator[Path]:
    with small_disk(4) as folder:
        yield folder


def assert_refuses_and_goes_on(store: DiskStore, message: str) -> NoSpaceError:
    """More than fits is refused; the store is as before, and smaller writes go on."""
    shape = store.record_shape
    store.write(0, torch.ones(2, *shape))
    size = store.path.stat().st_size
    with pytest.raises(NoSpaceError, match=message) as refusal:
        store.write(1, torch.zeros(1, *shape).expand(60, *shape))
    assert len(store) == 2
    assert store.path.stat().st_size == size
    assert every(store).eq(1).all()
    store.write(2, torch.full((1, *shape), 2.0))
    assert every(store).amax((1, 2, 3, 4)).tolist() == [1, 1, 2]
    return refusal.value


@pytest.mark.parametrize("keep_free", [0, -64 * MIB])
def test_a_full_disk_leaves_what_was_written(disk_of_4_mib: Path, keep_free: int) -> None:
    """Found by asking before, or, where others take the space meanwhile, by the system's refusal."""
    shape = (2, 1, 256, 64)  # 128 KiB
    store = DiskStore(disk_of_4_mib / "chunks.bin", shape, torch.float32, "cpu", keep_free=keep_free)
    error = assert_refuses_and_goes_on(
        store, r"memory_folder: expected .* MiB free .*What was read stays valid"
    )
    assert error.free < 4 * MIB
    assert error.needed == 59 * 128 * 1024
    (disk_of_4_mib / "other").write_bytes(bytes(2 * MIB))
    with pytest.raises(NoSpaceError):
        store.write(3, torch.zeros(1, *shape).expand(20, *shape))
    (disk_of_4_mib / "other").unlink()
    store.write(3, torch.zeros(1, *shape).expand(20, *shape))  # after space was made, it goes on
    assert len(store) == 23
    store.close()


def test_some_space_is_left_for_the_rest_of_a_memory(tmp_path: Path) -> None:
    free = psutil.disk_usage(str(tmp_path)).free
    store = DiskStore(tmp_path / "chunks.bin", SHAPE, torch.float32, "cpu", keep_free=free + 100 * MIB)
    with pytest.raises(NoSpaceError, match=r"memory_folder: expected .*GiB free"):
        store.write(0, records(1))
    store.keep_free = 0
    store.write(0, records(1))
    store.close()


@linux
def test_a_limit_of_file_size_is_no_space_either(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "chunks.bin", (2, 1, 256, 64), torch.float32, "cpu", keep_free=0)
    with largest_file(4 * MIB):
        assert_refuses_and_goes_on(store, "a quota or limit of file size below it")
    store.close()


@pytest.mark.parametrize("keep_free", [0, -64 * MIB])
def test_what_others_wrote_into_the_same_file_stays(disk_of_4_mib: Path, keep_free: int) -> None:
    shape, path = (2, 1, 256, 64), disk_of_4_mib / "chunks.bin"  # 128 KiB
    own, later = (
        DiskStore(path, shape, torch.float32, "cpu", 0, keep_free, before, "Others stay.")
        for before in (0, 40)  # beyond all that there is room for
    )
    later.write(0, torch.full((2, *shape), 3.0))
    own.write(0, torch.ones(2, *shape))
    with pytest.raises(NoSpaceError, match=r" Others stay\.$"):
        own.write(2, torch.zeros(1, *shape).expand(60, *shape))
    own.write(2, torch.full((1, *shape), 2.0))
    assert every(own).amax((1, 2, 3, 4)).tolist() == [1, 1, 2]
    assert every(later).eq(3).all()
    for store in (own, later):
        store.close()
