"""Saved memories come back bit for bit, survive every kill, and tell what is wrong with them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.disks import held_by_another, largest_file, small_disk
from tests.memory.interrupts import interrupt, stopped_at
from trailmark import files
from trailmark.files import NoSpaceError
from trailmark.memory import hashes, manifest, saved
from trailmark.memory.saved import MANIFEST, Saved, load, next_chunk_file, save
from trailmark.memory.tiers.base import TIERS, tier_named
from trailmark.memory.tiers.disk import DiskStore
from trailmark.memory.tiers.records import ChunkStore, RecordLayout
from trailmark.memory.verification import verify

SHAPE = (2, 2, 3, 5)  # 2, J, S, D
RECORD = 2 * 2 * 3 * 5 * 4  # bytes
BLOCK = 1000  # bytes under one hash here: some records lie in two blocks
pytestmark = pytest.mark.usefixtures("one_thread")
HEADER = {"config": "ab12", "tokens": 4096, "größe": [1, 2.5, None]}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "BLOCK_BYTES", BLOCK)


@pytest.fixture
def folder() -> Iterator[Path]:
    """In RAM where there is such a disk: saving waits for the disk, and is done a thousand times here."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        yield Path(name) / "memory"


def records(n: int, seed: int = 0) -> Tensor:
    """[n, 2, J, S, D]; fewer are the first of more."""
    return torch.randn(max(n, 100), *SHAPE, generator=torch.Generator().manual_seed(seed))[:n]


def state(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"landmarks": torch.randn(9, 4, generator=generator), "lengths": torch.arange(9) + seed}


def filled(tier: str, new: Tensor, path: Path | None = None) -> ChunkStore:
    store = tier_named(tier).made(RecordLayout(SHAPE, torch.float32, "cpu"), path=path)
    store.write(0, new)
    return store


def opened(memory: Saved) -> DiskStore:
    assert memory.chunk_file is not None
    assert memory.record_shape is not None
    assert memory.dtype is not None
    store = DiskStore(memory.chunk_file, memory.record_shape, memory.dtype, "cpu", memory.count)
    store.signed = memory.signed
    return store


def assert_holds(folder: Path, new: Tensor, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    verify(folder)
    memory = load(folder)
    assert memory.header == header
    assert memory.count == len(new)
    assert list(memory.tensors) == sorted(tensors)
    for name, exact in tensors.items():
        assert memory.tensors[name].dtype == exact.dtype
        assert torch.equal(memory.tensors[name], exact)
    store = opened(memory)
    assert torch.equal(store.gather(torch.arange(len(new))), new)
    store.close()


def _flip(path: Path, place: int) -> None:
    """Damage a byte, or mend it again."""
    with open(path, "r+b") as file:
        os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, place)[0] ^ 1]), place)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- round trips -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("count", [0, 1, 20, 25])
def test_what_was_saved_is_loaded(tier: str, count: int, folder: Path) -> None:
    store = filled(tier, records(25))
    save(folder, state(), HEADER, store, count)
    assert_holds(folder, records(25)[:count], state(), HEADER)
    assert names(folder) == ["chunks-1.bin", MANIFEST, "state-1.safetensors"]
    assert (folder / "chunks-1.bin").read_bytes() == records(25)[:count].numpy().tobytes()
    assert torch.equal(store.gather(torch.arange(25)), records(25))
    save(folder, state(1), {}, store, 25)
    assert_holds(folder, records(25), state(1), {})
    assert names(folder) == ["chunks-2.bin", MANIFEST, "state-2.safetensors"]
    store.close()


def test_tensors_of_every_kind_are_saved(folder: Path) -> None:
    plain = torch.randn(8, 6)
    tensors = {
        "strided": plain.T[::2],
        "expanded": plain[:1].expand(5, 6),
        "part": plain[2:4],
        "whole": plain,
        "again": plain,
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "double": torch.randn(3, dtype=torch.float64).requires_grad_(),
        "half": torch.randn(3).bfloat16(),
    }
    save(folder, tensors, {}, None, 0)
    memory = load(folder)
    verify(folder)
    for name, exact in tensors.items():
        assert memory.tensors[name].dtype == exact.dtype
        assert torch.equal(memory.tensors[name], exact)
    assert (memory.count, memory.chunk_file, memory.record_shape, memory.dtype) == (0, None, None, None)
    assert names(folder) == [MANIFEST, "state-1.safetensors"]


def test_writing_to_loaded_tensors_does_not_change_the_file(folder: Path) -> None:
    save(folder, state(), {}, None, 0)
    tensors = load(folder).tensors
    tensors["landmarks"].zero_()
    verify(folder)
    assert torch.equal(load(folder).tensors["landmarks"], state()["landmarks"])


def test_all_files_have_ordinary_permissions(folder: Path) -> None:
    save(folder, state(), {}, filled("host", records(3)), 3)
    ordinary = folder / "ordinary"
    ordinary.touch()
    assert {path.stat().st_mode for path in folder.iterdir()} == {ordinary.stat().st_mode}


def test_what_is_no_json_is_refused_before_anything_is_written(folder: Path) -> None:
    for header in ({"a": math.nan}, {"a": object()}):
        with pytest.raises((ValueError, TypeError)):
            save(folder, state(), header, None, 0)
    assert not folder.exists()


def test_no_more_is_saved_than_was_written(folder: Path) -> None:
    with pytest.raises(ValueError, match="count: expected at most the 3 records written, got 4"):
        save(folder, state(), {}, filled("host", records(3)), 4)


# --- a disk tier's own folder ----------------------------------------------------------------------------


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    what = st.sampled_from(["append", "append", "overwrite", "save", "save", "load", "save elsewhere"])
    return draw(st.lists(st.tuples(what, st.integers(0, 60), st.integers(1, 20)), min_size=2, max_size=14))


@settings(max_examples=80, deadline=None)
@given(life=lives())
def test_a_disk_memory_lives_in_its_folder(life: list[tuple[str, int, int]]) -> None:
    """Written, overwritten, saved and loaded in any order; after each save every byte is as the manifest says."""
    with contextlib.ExitStack() as stack:
        shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=shm)))
        store = DiskStore(next_chunk_file(folder), SHAPE, torch.float32, "cpu")
        plain = kept = torch.empty(0, *SHAPE)
        overwritten = False
        for step, (what, place, n) in enumerate(life):
            if what in ("append", "overwrite"):
                first = len(plain) if what == "append" else min(place, len(plain))
                store.write(first, records(n, seed=step))
                plain = torch.cat([plain[:first], records(n, seed=step), plain[first + n :]])
                overwritten = overwritten or first < len(kept)
            elif what == "save":
                save(folder, state(step), {"step": step}, store, len(plain))
                kept, overwritten = plain, False
                assert_holds(folder, plain, state(step), {"step": step})
                assert names(folder)[0] == "chunks-1.bin"
                assert len(names(folder)) == 3
            elif what == "save elsewhere":
                save(folder / "elsewhere", state(step), {}, store, len(plain))
                assert_holds(folder / "elsewhere", plain, state(step), {})
                assert store.path.parent == folder
                for path in (folder / "elsewhere").iterdir():
                    path.unlink()
                (folder / "elsewhere").rmdir()
            elif len(kept) and not overwritten:
                store.close()
                store = opened(load(folder))
                plain = kept
        assert torch.equal(store.gather(torch.arange(len(plain))), plain)
        store.close()


def test_saving_into_its_own_folder_copies_and_hashes_only_what_is_new(folder: Path) -> None:
    store = filled("disk", records(25), next_chunk_file(folder))
    assert isinstance(store, DiskStore)
    save(folder, state(), {}, store, 25)
    before = (folder / "chunks-1.bin").stat()
    store.write(25, records(10, seed=1))
    damaged = 3 * BLOCK - 1  # in a block that the manifest vouches for: not read again
    _flip(store.path, damaged)
    save(folder, state(), {}, store, 35)
    assert (folder / "chunks-1.bin").stat().st_ino == before.st_ino
    with pytest.raises(ValueError, match="another in block 2"):
        verify(folder)
    with pytest.raises(ValueError, match="another in block 2"):  # else what shares the block would be signed
        store.write(12, records(1, seed=2))  # its last record
    _flip(store.path, damaged)
    store.write(12, records(1, seed=2))
    save(folder, state(), {}, store, 35)
    verify(folder)
    store.close()


def test_appending_after_a_save_leaves_it_valid(folder: Path) -> None:
    store = filled("disk", records(25), next_chunk_file(folder))
    save(folder, state(), HEADER, store, 20)
    store.write(25, records(30, seed=1))
    assert_holds(folder, records(25)[:20], state(), HEADER)
    store.close()
    assert_holds(folder, records(25)[:20], state(), HEADER)
    store = opened(load(folder))
    store.write(20, records(3, seed=2))  # over what was not saved
    save(folder, state(1), HEADER, store, 23)
    assert_holds(folder, torch.cat([records(25)[:20], records(3, seed=2)]), state(1), HEADER)
    store.close()


def test_records_overwritten_since_a_save_are_found_by_loading(folder: Path) -> None:
    store = filled("disk", records(25), next_chunk_file(folder))
    save(folder, state(), HEADER, store, 25)
    store.write(18, records(2, seed=1))
    store.write(21, records(1, seed=1))
    store.close()  # as a kill would leave it
    with pytest.raises(ValueError, match=r"folder: expected the chunks that were saved, .* from 18 on were"):
        load(folder)
    assert load(folder, check=False).count == 25
    store = opened(load(folder, check=False))
    assert store.vouched == 18
    store.write(18, records(25)[18:22])  # as they were
    store.close()
    assert_holds(folder, records(25), state(), HEADER)
    store = opened(load(folder))
    store.write(18, records(2, seed=1))
    save(folder, state(), HEADER, store, 25)
    store.close()
    assert_holds(folder, torch.cat([records(25)[:18], records(2, seed=1), records(25)[20:]]), state(), HEADER)
    assert len(names(folder)) == 3


def test_another_memory_saved_in_a_folder_takes_nothing_from_the_store_there(folder: Path) -> None:
    store = filled("disk", records(25), next_chunk_file(folder))
    save(folder, state(), {}, store, 25)
    save(folder, state(1), {}, filled("host", records(9, seed=1)), 9)
    assert_holds(folder, records(9, seed=1), state(1), {})
    store.write(25, records(5, seed=2))
    save(folder, state(2), {}, store, 30)
    assert_holds(folder, torch.cat([records(25), records(5, seed=2)]), state(2), {})
    store.close()
    save(folder, state(1), {}, filled("host", records(9, seed=1)), 9)
    assert len(names(folder)) == 3  # now the other's file is of no use


def test_a_new_store_in_the_folder_of_a_memory_leaves_it_until_it_is_saved(folder: Path) -> None:
    save(folder, state(), {}, filled("host", records(9)), 9)
    store = filled("disk", records(25, seed=1), next_chunk_file(folder))
    assert_holds(folder, records(9), state(), {})
    save(folder, state(1), {}, store, 25)
    assert_holds(folder, records(25, seed=1), state(1), {})
    assert len(names(folder)) == 3
    store.close()


def test_chunk_files_get_new_names_and_what_was_left_is_removed(folder: Path) -> None:
    left = next_chunk_file(folder)
    filled("disk", records(20), left).close()  # of a process that was killed before it saved
    live = filled("disk", records(9), next_chunk_file(folder))
    other = next_chunk_file(folder)
    assert isinstance(live, DiskStore)
    assert sorted(path.stat().st_size for path in folder.iterdir()) == [0, 9 * RECORD]
    assert len({live.path, other}) == 2
    live.close()


# --- kills -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ctrl-C in a destructor
@pytest.mark.parametrize(
    ("how", "step", "tier"),  # lines; a kill takes a process
    [
        ("Ctrl-C", 3, "in place"),
        *(
            pytest.param(how, step, tier, marks=pytest.mark.slow)
            for how, step in (("Ctrl-C", 1), ("killed", 9))
            for tier in ("in place", "host")
        ),
    ],
)
def test_a_save_that_is_stopped_leaves_the_old_memory_or_the_new(
    how: str, step: int, tier: str, folder: Path
) -> None:
    stopped, line, seen = True, 1, {"old": 0, "new": 0}
    while stopped:
        _save_first(folder)
        stopped = _stopped(how, line, lambda: _save_over(folder, tier))
        line += step
        if load(folder).header == HEADER:
            assert stopped
            assert_holds(folder, records(9), state(), HEADER)
            seen["old"] += 1
        else:
            assert_holds(folder, records(12), state(1), {"second": True})
            seen["new"] += 1
        save(folder, {}, {}, None, 0)
        assert len(names(folder)) == 2  # nothing is left of what was stopped
    assert seen["old"] > 100 / step
    assert seen["new"] > 20 / step


def _save_first(folder: Path) -> None:
    store = filled("disk", records(9), next_chunk_file(folder))
    save(folder, state(), HEADER, store, 9)
    store.close()


def _save_over(folder: Path, tier: str) -> None:
    """The second save, of a memory that was appended to."""
    if tier == "in place":
        store: ChunkStore = opened(load(folder))
        store.write(9, records(12)[9:])
    else:
        store = filled(tier, records(12))
    save(folder, state(1), {"second": True}, store, 12)
    store.close()


def _stopped(how: str, line: int, run: Callable[[], None]) -> bool:
    """Run until a line of saving; whether that line was reached."""
    if how == "Ctrl-C":
        with (
            contextlib.suppress(KeyboardInterrupt),
            stopped_at(line, interrupt, saved, hashes, files) as lines,
        ):
            run()
        return lines.run == line
    child = os.fork()
    if child == 0:
        try:
            with stopped_at(line, lambda: os._exit(9), saved, hashes, files):
                run()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


def test_a_first_save_that_is_stopped_leaves_no_memory(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt), stopped_at(70, interrupt, saved, hashes, files):
        save(folder, state(), HEADER, filled("host", records(9)), 9)
    with pytest.raises(
        ValueError, match=f"got no '{MANIFEST}': none was saved there, or the first save did not"
    ):
        load(folder)
    assert names(folder) == []


# --- damage ----------------------------------------------------------------------------------------------


def test_any_byte_that_differs_is_found_and_named(folder: Path) -> None:
    _save_first(folder)
    sizes = {path: path.stat().st_size for path in folder.iterdir()}
    chunks = folder / "chunks-1.bin"
    places = [(path, place) for path in sizes for place in range(0, sizes[path], 97)]
    places += [(path, size - 1) for path, size in sizes.items() if path.name != MANIFEST]
    places += [(chunks, BLOCK - 1), (chunks, BLOCK)]
    for path, place in places:
        whole = path.read_bytes()
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        block = rf" in block {place // BLOCK} \(bytes {place // BLOCK * BLOCK} " if path == chunks else ""
        with pytest.raises(ValueError, match=rf"^folder: '{path}' is damaged.*{block}"):
            verify(folder)
        path.write_bytes(whole)
    verify(folder)


def test_a_differing_block_is_named_with_its_records(folder: Path) -> None:
    save(folder, state(), {}, filled("host", records(25)), 25)
    _flip(folder / "chunks-1.bin", 2500)
    with pytest.raises(ValueError, match=r"block 2 \(bytes 2000 ... 2999, records 8 ... 12\)"):
        verify(folder)


def test_the_first_block_that_differs_ends_the_comparison(folder: Path) -> None:
    save(folder, state(), {}, filled("host", records(400)), 400)
    with open(folder / "chunks-1.bin", "r+b") as file:
        for place in (3500, 2500, 90_000):
            file.seek(place)
            file.write(b"x")
    reports: list[int] = []

    def progress(done: int, total: int) -> None:
        reports.append(done)
        time.sleep(0.02)  # all 96 blocks would take two seconds

    with pytest.raises(ValueError, match=r"block 2 \(bytes 2000 "):
        verify(folder, progress)
    assert len(reports) < 48


@pytest.mark.parametrize("check", [load, verify])
def test_files_that_were_cut_off_or_are_missing_are_named(check: Any, folder: Path) -> None:
    save(folder, state(), {}, filled("host", records(25)), 25)
    for name, expected in (("chunks-1.bin", "at least 6000 bytes"), ("state-1.safetensors", r"\d+ bytes")):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-1])
        with pytest.raises(ValueError, match=f"{name}' is damaged: expected {expected} .* It was cut off"):
            check(folder)
        (folder / name).unlink()
        with pytest.raises(ValueError, match=f"expected the file '{name}', which the manifest in .* names"):
            check(folder)
        (folder / name).write_bytes(whole + b"x")
        if name.startswith("chunks"):
            check(folder)  # records that were not saved
        else:
            with pytest.raises(ValueError, match=f"{name}' is damaged"):
                check(folder)
        (folder / name).write_bytes(whole)
    check(folder)


@pytest.mark.parametrize("check", [load, verify])
def test_what_is_no_memory_is_named(check: Any, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"^folder: expected a folder with a saved memory, .* is no folder"):
        check(folder)
    folder.mkdir()
    with pytest.raises(ValueError, match=f"^folder: expected a saved memory in .*got no '{MANIFEST}'"):
        check(folder)
    for broken in (b"", b"{", b"[]", b"3", b'"x"', b"null", b"\xff\xfe", b"{}", b'{"kind": "else"}'):
        (folder / MANIFEST).write_bytes(broken)
        with pytest.raises(ValueError, match=f"{MANIFEST}' is damaged: expected a memory's manifest"):
            check(folder)


@pytest.mark.parametrize("check", [load, verify])
def test_a_newer_format_asks_for_an_update(check: Any, folder: Path) -> None:
    save(folder, state(), HEADER, None, 0)
    body = json.loads((folder / MANIFEST).read_text())
    assert body["format"] == 1
    newer = {"kind": body["kind"], "format": manifest.FORMAT + 1, "trailmark": "9.1", "else": 0}
    (folder / MANIFEST).write_text(json.dumps(newer))
    told = rf"memory of format {manifest.FORMAT} .* got {manifest.FORMAT + 1}, written by a newer trailmark \(9\.1\)"
    with pytest.raises(ValueError, match=told):
        check(folder)
    next_chunk_file(folder)  # and nothing is removed from it
    assert "state-1.safetensors" in names(folder)


@pytest.mark.parametrize("name", ["../chunks-1.bin", "/etc/passwd", "chunks-1.bin/..", "other.bin"])
def test_a_manifest_names_no_other_files(name: str, folder: Path) -> None:
    save(folder, state(), HEADER, filled("host", records(3)), 3)
    body = json.loads((folder / MANIFEST).read_text())
    body["chunks"]["file"] = name
    del body["sha256"]
    (folder / MANIFEST).write_text(json.dumps({**body, "sha256": manifest.hash_body(body)}))
    with pytest.raises(ValueError, match="is damaged"):
        load(folder)


# --- others at work --------------------------------------------------------------------------------------


def test_two_saves_at_once_are_refused(folder: Path) -> None:
    save(folder, state(), HEADER, None, 0)
    with held_by_another(folder):
        with pytest.raises(ValueError, match="another process is writing in"):
            save(folder, state(1), {}, None, 0)
        assert load(folder).header == HEADER
        assert next_chunk_file(folder).exists()
    save(folder, state(1), {}, None, 0)
    assert load(folder).header == {}


def test_a_file_that_another_writes_is_not_saved_in_place(folder: Path) -> None:
    _save_first(folder)
    reader, writer = opened(load(folder)), opened(load(folder))
    writer.write(9, records(1))
    with pytest.raises(ValueError, match="is being written by another"):
        save(folder, state(1), {}, reader, 9)
    assert_holds(folder, records(9), state(), HEADER)
    for store in (reader, writer):
        store.close()


def test_a_memory_is_loaded_while_it_is_saved_again_and_again(folder: Path) -> None:
    store = filled("host", records(25))
    save(folder, state(), {"count": 25}, store, 25)
    done = threading.Event()

    def save_on() -> None:
        while not done.is_set():
            for count in (24, 25):
                save(folder, state(count), {"count": count}, store, count)

    saver = threading.Thread(target=save_on)
    saver.start()
    try:
        for _ in range(150):
            memory = load(folder)
            assert memory.header == {"count": memory.count}
            assert int(memory.tensors["lengths"][0]) in (0, memory.count)
    finally:
        done.set()
        saver.join()


# --- full disks and size ---------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_memory_that_was_there() -> None:
    with small_disk(8) as mounted:
        disk = mounted / "memory"
        save(disk, state(), HEADER, filled("host", records(9)), 9)
        large = filled("host", records(40_000))  # 9.6 MB
        with pytest.raises(NoSpaceError, match=r"folder: expected .* MiB free .*saved there before is whole"):
            save(disk, state(1), {}, large, 40_000)
        with pytest.raises(NoSpaceError):
            save(disk, {"landmarks": torch.zeros(3 << 20)}, {}, None, 0)
        assert_holds(disk, records(9), state(), HEADER)
        assert len(names(disk)) == 3


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems' limits")
def test_a_write_that_the_system_refuses_leaves_the_memory_that_was_there(folder: Path) -> None:
    """There was space when it was looked at; a limit of file size stands for others who took it."""
    save(folder, state(), HEADER, filled("host", records(9)), 9)
    large = filled("host", records(9000))  # 2.2 MB
    with largest_file(1 << 20):
        for tensors, count in (({}, 9000), ({"landmarks": torch.zeros(1 << 19)}, 9)):
            with pytest.raises(NoSpaceError, match=r"a quota or limit of file size .*Nothing was saved"):
                save(folder, tensors, {}, large, count)
            assert len(names(folder)) == 3
    assert_holds(folder, records(9), state(), HEADER)


def test_a_folder_that_cannot_be_saved_in_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for use in (lambda path: save(path, state(), {}, None, 0), next_chunk_file):
        with pytest.raises(ValueError, match=r"folder: expected a folder to .* in, .*file.* is not"):
            use(tmp_path / "file")


def test_a_memory_of_a_million_tokens_loads_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """65,536 chunks of 4 KiB: their file has no block on the disk, but its whole length."""
    monkeypatch.setattr(hashes, "BLOCK_BYTES", 32 << 20)
    shape, count = (2, 1, 16, 64), 65_536
    path = next_chunk_file(tmp_path)
    os.truncate(path, 256 << 20)
    store = DiskStore(path, shape, torch.bfloat16, "cpu", count)
    save(tmp_path, {"landmarks": torch.ones(count, 256, dtype=torch.bfloat16)}, {}, store, count)
    store.close()
    memory = load(tmp_path)
    assert memory.tensors["landmarks"].eq(1).all()
    times: dict[Any, list[float]] = {load: [], verify: []}
    for work in (load, verify) * 5:  # others may be working here too
        start = time.perf_counter()
        work(tmp_path)
        times[work].append(time.perf_counter() - start)
    assert min(times[load]) < min(times[verify]) / 2  # which reads every byte
    reports = []
    verify(tmp_path, progress=lambda done, total: reports.append((done, total)))
    total = (256 << 20) + (tmp_path / "state-2.safetensors").stat().st_size
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    assert reports[-1] == (total, total)
    assert len(reports) == 1 + 8
