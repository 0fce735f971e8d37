"""Checkpoints: every damage is found, no kill or full disk costs the last whole one, states come back bit-equal."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.disks import largest_file
from tests.models.tiny import drt
from tests.training.test_optimizer import give_gradients
from tests.training.tiny import TEXT, run_config
from trailmark.training import checkpoints as module
from trailmark.training.checkpoints import (
    MANIFEST,
    find_newest_whole,
    is_checkpoint,
    is_whole,
    looks_whole,
    read_about,
    remove_leftovers,
    retain,
    step_folder,
    steps,
    verify,
    writing,
)
from trailmark.training.optimizer import MuonAdamW
from trailmark.training.run import Run
from trailmark.training.tensors import (
    load_tensors,
    optimizer_state,
    restore_optimizer,
    rng_state,
    save_tensors,
    set_rng_state,
)

ABOUT = {"trailmark": "1.2", "world_size": 2, "losses": [0.1, 1e-300]}
FILES = ["config.json", "nested/notes.txt", "weights.safetensors"]


def content(name: str, step: int) -> bytes:
    """Of the same length at every step: only a hash can tell them apart."""
    return (f"{name} of step {step:05d} " * 40).encode()


def write(checkpoints: Path, step: int, **options: Any) -> Path:
    with writing(checkpoints, step, ABOUT, **options) as staging:
        (staging / "nested").mkdir()
        for name in FILES:
            (staging / name).write_bytes(content(name, step))
    return step_folder(checkpoints, step)


def holds(folder: Path, step: int) -> bool:
    return all((folder / name).read_bytes() == content(name, step) for name in FILES)


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1 << (offset % 8)
    path.write_bytes(raw)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- a whole one -----------------------------------------------------------------------------------------------


def test_what_was_written_is_whole_and_tells_about_itself(tmp_path: Path) -> None:
    folder = write(tmp_path, 1200)
    assert folder == tmp_path / "step-00001200"
    verify(folder)
    assert holds(folder, 1200)
    assert read_about(folder) == ABOUT
    assert steps(tmp_path) == [1200]
    assert names(tmp_path) == ["step-00001200"]
    listed = json.loads((folder / MANIFEST).read_text())["files"]
    assert sorted(listed) == FILES


def test_progress_reaches_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trailmark.files._PIECE_BYTES", 100)
    folder = write(tmp_path, 1)
    total = sum(len(content(name, 1)) for name in FILES)
    reports: list[tuple[int, int]] = []
    verify(folder, lambda done, total: reports.append((done, total)))
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    assert len(reports) > total / 101
    assert reports[-1] == (total, total)


def test_files_are_as_readable_as_their_folder(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with writing(tmp_path, 1, {}) as staging:
            save_tensors(staging / "state.safetensors", {"x": torch.ones(3)})
    finally:
        os.umask(before)
    for file in step_folder(tmp_path, 1).iterdir():
        assert file.stat().st_mode & 0o777 == 0o644, file


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="names of descriptors")
def test_everything_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut keeps cannot be tried here; in which order it is asked for can."""
    order: list[str] = []
    real_sync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        order.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_sync(descriptor)

    def rename(old: Path, new: Path) -> None:
        order.append(f"{old} -> {new}")
        real_rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    write(tmp_path, 7)
    staging = f"{tmp_path}/step-00000007.tmp-{os.getpid()}"
    assert sorted(order[:3]) == [f"{staging}/{name}" for name in FILES]
    assert order[3] == f"{staging}/{MANIFEST}"
    assert sorted(order[4:6]) == [staging, f"{staging}/nested"]
    assert order[6:] == [f"{staging} -> {tmp_path}/step-00000007", str(tmp_path)]


def test_a_whole_checkpoint_of_the_step_is_kept_and_a_damaged_one_replaced(tmp_path: Path) -> None:
    folder = write(tmp_path, 5)
    inode = folder.stat().st_ino
    write(tmp_path, 5)
    assert folder.stat().st_ino == inode
    flip(folder / FILES[0], 3)
    assert not is_whole(folder)
    write(tmp_path, 5)
    assert folder.stat().st_ino != inode
    verify(folder)
    assert names(tmp_path) == ["step-00000005"]


def test_what_fails_in_the_block_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path, 5)
    for error in (KeyError("ours"), KeyboardInterrupt()):
        with pytest.raises(type(error)), writing(tmp_path, 6, {}) as staging:  # noqa: PT012
            (staging / "file").write_bytes(b"half")
            raise error
        assert names(tmp_path) == ["step-00000005"]


def test_errors_that_are_not_of_files_pass_as_they_are(tmp_path: Path) -> None:
    """torch's are RuntimeErrors all: a bug or a full GPU is no full disk."""

    def mismatch() -> None:
        torch.zeros(2) @ torch.zeros(3)

    def other() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    for fail in (mismatch, other):
        with pytest.raises(RuntimeError) as caught, writing(tmp_path, 6, {}) as staging:  # noqa: PT012
            (staging / "file").write_bytes(b"half")
            fail()
        assert caught.traceback[-1].name == fail.__name__
        assert names(tmp_path) == []


def test_hidden_files_are_nobodys(tmp_path: Path) -> None:
    folder = write(tmp_path, 5)
    (folder / ".DS_Store").write_bytes(b"of a file manager")
    verify(folder)
    retain(tmp_path, 1)
    assert steps(tmp_path) == [5]


# --- damage ----------------------------------------------------------------------------------------------------


def damages(other: Path) -> dict[str, Callable[[Path], None]]:
    """``other``: the same file of another step."""

    def swap(path: Path) -> None:
        path.write_bytes(other.read_bytes())

    def flip_at(share: float) -> Callable[[Path], None]:
        return lambda path: flip(path, int(share * (path.stat().st_size - 1)))

    return {
        "first byte": flip_at(0),
        "a byte inside": flip_at(0.37),
        "last byte": flip_at(1),
        "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
        "half": lambda path: os.truncate(path, path.stat().st_size // 2),
        "one byte longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        "empty": lambda path: os.truncate(path, 0),
        "deleted": lambda path: path.unlink(),
        "of another step": swap,
    }


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("damage", damages(Path()))
def test_every_damage_to_every_file_is_found(tmp_path: Path, name: str, damage: str) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    newest = step_folder(tmp_path, 3)
    damages(step_folder(tmp_path, 2) / name)[damage](newest / name)
    with pytest.raises(ValueError, match=f"^{name}: "):
        verify(newest)
    assert not is_whole(newest)  # though this process wrote it
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    found, notes = find_newest_whole(tmp_path)
    assert found == step_folder(tmp_path, 2)
    (note,) = notes
    assert note.startswith(f"step 3 is damaged: {name}: ")
    assert "\n" not in note
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


REAL_FILES = [
    "config.json", "generation_config.json", "manifest.json", "model.safetensors", "optimizer.safetensors",
    "random.safetensors", "run.json", "trainer_state.json",
]  # fmt: skip
SAVED = {"steps": 5, "save_steps": 2, "keep_checkpoints": 3}  # at 2, 4 and, when it ends, 5


def die(run: Run) -> None:
    if run.step == 5:
        raise KeyError("killed")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed after its checkpoints of steps 2 and 4."""
    output = tmp_path_factory.mktemp("real") / "run"
    with pytest.raises(KeyError, match="killed"):
        Run(run_config(output, **SAVED), die, TEXT).train()
    return output


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    run = Run(run_config(tmp_path_factory.mktemp("whole"), **SAVED), text=TEXT)
    run.train()
    return run.model.state_dict()


@pytest.mark.parametrize("damage", damages(Path()))
def test_every_damage_to_every_file_of_a_real_run_is_found(killed: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(killed / "checkpoints", tmp_path / "checkpoints")
    older, newest = (step_folder(tmp_path / "checkpoints", step) for step in (2, 4))
    assert names(newest) == names(older) == REAL_FILES
    unchanged = []
    for name in REAL_FILES:
        whole = (newest / name).read_bytes()
        damages(older / name)[damage](newest / name)
        found, notes = find_newest_whole(tmp_path / "checkpoints")
        if (newest / name).exists() and (newest / name).read_bytes() == whole:
            assert (found, notes) == (newest, [])
            unchanged.append(name)
        else:
            assert found == older
            (note,) = notes
            assert note.startswith(f"step 4 is damaged: {name}: ")
        (newest / name).write_bytes(whole)
    # what no step changes is the same in both
    may_be_alike = {"config.json", "generation_config.json", "random.safetensors"}
    assert set(unchanged) <= (may_be_alike if damage == "of another step" else set())
    assert find_newest_whole(tmp_path / "checkpoints") == (newest, [])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", "a byte inside"),
        ("optimizer.safetensors", "of another step"),
        ("run.json", "deleted"),
        ("manifest.json", "half"),
    ],
)
def test_a_run_goes_on_from_the_older_checkpoint_to_the_same_weights(
    killed: Path, uninterrupted: dict[str, torch.Tensor], tmp_path: Path, name: str, damage: str
) -> None:
    shutil.copytree(killed, tmp_path / "run")
    older, newest = (step_folder(tmp_path / "run" / "checkpoints", step) for step in (2, 4))
    damages(older / name)[damage](newest / name)
    done: list[int] = []
    said: list[str] = []
    run = Run(run_config(tmp_path / "run", **SAVED), lambda run: done.append(run.step), TEXT, say=said.append)
    run.train()
    assert done == [3, 4, 5]
    assert said[0].startswith(f"step 4 is damaged: {name}: ")
    assert said[1].startswith("Going on from step 2: ")
    for key, weight in run.model.state_dict().items():
        assert torch.equal(weight, uninterrupted[key]), key
    verify(newest)  # written anew


WRONG_FIELDS: list[tuple[str, dict[str, Any]]] = [
    *((field, {field: value}) for field in ("step", "format") for value in (..., None, "3", 3.0, True, -1)),
    *((field, {field: value}) for field in ("about", "files") for value in (..., None, "x", [], 3)),
    *(("files", {"files": {name: {"bytes": 1, "sha256": "0" * 64}}}) for name in (
        "../step-00000002/config.json", "nested/../../x", "/etc/hostname", "..", ".", "", "a//b", "./a", "a/", "a\0b",
        "manifest.json",
    )),
    *(("files: config.json", {"files": {"config.json": entry}}) for entry in (None, [], "x", 3)),
    *((f"files: config.json: {field}", {"files": {"config.json": {"bytes": 1, "sha256": "0" * 64} | {field: value}}})
      for field, value in (
          ("bytes", "1"), ("bytes", True), ("bytes", -1), ("bytes", 1.0), ("bytes", None),
          ("sha256", None), ("sha256", 3), ("sha256", "0" * 63), ("sha256", "Z" * 64), ("sha256", "0" * 64 + "\n"),
      )),
]  # fmt: skip


@pytest.mark.parametrize(("field", "change"), WRONG_FIELDS, ids=range(len(WRONG_FIELDS)))
def test_a_manifest_of_wrong_fields_is_refused_though_its_checksum_is_right(
    tmp_path: Path, field: str, change: dict[str, Any]
) -> None:
    for step in (1, 3):
        write(tmp_path, step)
    folder = step_folder(tmp_path, 3)
    body = json.loads((folder / MANIFEST).read_text())
    del body["sha256"]
    body = {key: value for key, value in (body | change).items() if value is not ...}  # ...: is missing
    (folder / MANIFEST).write_bytes(module._canonical({**body, "sha256": module._hash_body(body)}))
    for use in (verify, read_about):
        with pytest.raises(ValueError, match=f"^manifest.json: {field}: expected ") as caught:
            use(folder)
        assert "\n" not in str(caught.value)
    assert not looks_whole(folder)
    assert find_newest_whole(tmp_path)[0] == step_folder(tmp_path, 1)
    assert retain(tmp_path, 1) == []


def test_every_byte_of_a_manifest_counts(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    whole = (folder / MANIFEST).read_bytes()
    for offset in range(len(whole)):
        for bit in (5, offset % 5):  # 5: the other case of a letter, which JSON and hexadecimal may not mind
            raw = bytearray(whole)
            raw[offset] ^= 1 << bit
            (folder / MANIFEST).write_bytes(raw)
            assert not looks_whole(folder), (offset, bit)
    (folder / MANIFEST).write_bytes(whole)
    verify(folder)


def test_a_folder_under_another_steps_name_is_found(tmp_path: Path) -> None:
    one, two = write(tmp_path, 1), write(tmp_path, 2)
    write(tmp_path, 0)
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    found, notes = find_newest_whole(tmp_path)
    assert found == step_folder(tmp_path, 0)
    assert [note[:17] for note in notes] == ["step 2 is damaged", "step 1 is damaged"]
    assert "expected the folder step-00000001" in notes[0]
    assert retain(tmp_path, 1) == []


def test_checkpoints_are_told_from_other_folders(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    copy = tmp_path / "best"
    shutil.copytree(folder, copy)
    assert is_checkpoint(folder)
    assert is_checkpoint(copy)
    verify(copy)
    for text in ("{}", '{"kind": "trailmark corpus"}', "[]", "{"):
        (copy / MANIFEST).write_text(text)
        assert not is_checkpoint(copy)
    (folder / MANIFEST).unlink()
    assert is_checkpoint(folder)
    assert not is_checkpoint(tmp_path)
    assert not is_checkpoint(tmp_path / "step-00000009")


def test_what_is_no_part_of_the_checkpoint_is_found(tmp_path: Path) -> None:
    """transformers would load a pytorch_model.bin that lies there."""
    folder = write(tmp_path, 1)
    (folder / "nested" / "other.bin").touch()
    with pytest.raises(ValueError, match=r"^nested/other.bin: is not in the manifest"):
        verify(folder)
    (folder / "nested" / "other.bin").unlink()
    (folder / "linked").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r"^linked: is not in the manifest"):
        verify(folder)


def test_a_newer_format_asks_for_an_update(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    (folder / MANIFEST).write_text(json.dumps({"kind": "trailmark checkpoint", "format": 2, "else": 0}))
    with pytest.raises(ValueError, match=r"expected format 1 or lower, got 2: .*Update trailmark"):
        verify(folder)


@pytest.mark.parametrize("raw", [b"", b"[]", b"3", b"{", b"\xff\xfe", b"{}", b"[" * 100_000])
def test_what_is_no_manifest_is_said(tmp_path: Path, raw: bytes) -> None:
    folder = write(tmp_path, 1)
    (folder / MANIFEST).write_bytes(raw)
    with pytest.raises(ValueError, match=r"^manifest.json: expected the manifest of a checkpoint"):
        verify(folder)


def test_no_checkpoints_are_none(tmp_path: Path) -> None:
    assert find_newest_whole(tmp_path) == (None, [])
    assert find_newest_whole(tmp_path / "none") == (None, [])
    assert remove_leftovers(tmp_path / "none") == []
    assert retain(tmp_path / "none", 1) == []
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-000000003").mkdir()
    (tmp_path / "step-00000003").touch()
    assert find_newest_whole(tmp_path) == (None, [])
    with pytest.raises(ValueError, match=r"^manifest.json: is missing"):
        verify(tmp_path / "step-3")


# --- kills -----------------------------------------------------------------------------------------------------


def forked(work: Callable[[], None]) -> int:
    """A child that does ``work`` and dies of it: the number of its process."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    return child


def assert_only_whole(checkpoints: Path, at_least: int) -> int:
    """What a kill left: the newest step."""
    newest, notes = find_newest_whole(checkpoints)
    assert notes == []
    assert newest is not None
    step = int(newest.name[5:])
    assert at_least <= step <= at_least + 1
    for each in steps(checkpoints):
        verify(step_folder(checkpoints, each))
        assert holds(step_folder(checkpoints, each), each)
    return step


@pytest.mark.parametrize("replaces", [False, True])
def test_a_kill_before_any_change_of_a_file_leaves_whole_checkpoints(tmp_path: Path, replaces: bool) -> None:
    """A child saves once more and kills itself at its n-th change of the disk, for all n.

    ``replaces``: the step's folder is there and damaged.
    """
    changes = ("open", "os.mkdir", "os.rename", "os.chmod", "os.remove", "os.rmdir")
    before, folder = tmp_path / "before", tmp_path / "checkpoints"
    for step in (2, 3, 4)[: 2 + replaces]:
        write(before, step)
    if replaces:
        flip(step_folder(before, 4) / FILES[0], 0)

    def save(kill_at: int) -> None:
        count = 0

        def look(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            # what is removed is named without its folder
            if event in changes and (event[:5] in ("os.re", "os.rm") or str(folder) in str(arguments[0])):
                count += 1
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(look)
        write(folder, 4)
        retain(folder, 2)
        os._exit(0)

    at, reached, leftovers, ended = 0, set(), 0, int(signal.SIGKILL)
    while ended == signal.SIGKILL:
        at += 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder)
        ended = os.waitpid(forked(lambda at=at: save(at)), 0)[1]
        if replaces and (found := find_newest_whole(folder))[1]:  # as damaged as it was
            assert found[0] == step_folder(folder, 3)
            assert [note[:18] for note in found[1]] == ["step 4 is damaged:"]
            shutil.rmtree(step_folder(folder, 4))
        reached.add(assert_only_whole(folder, 3))
        leftovers += bool(remove_leftovers(folder))
        assert names(folder) == [f"step-{step:08d}" for step in steps(folder)]
    assert ended == 0
    assert steps(folder) == [3, 4]
    assert reached == {3, 4}
    assert at > 15
    assert leftovers > 10


def save_on(checkpoints: Path, told: int) -> None:
    """Save step after step until killed; each step is told when its checkpoint is done."""
    step = max(steps(checkpoints), default=0)
    while True:
        os.write(told, f"{step}\n".encode())
        step += 1
        write(checkpoints, step)
        retain(checkpoints, 2)


def test_kills_at_random_moments_leave_whole_checkpoints(tmp_path: Path) -> None:
    rng = random.Random(0)
    began = time.perf_counter()
    write(tmp_path, 1)
    duration, last = time.perf_counter() - began, 1
    for _ in range(10):
        reading, telling = os.pipe()
        child = forked(lambda: save_on(tmp_path, telling))  # noqa: B023
        os.close(telling)
        os.read(reading, 1)  # it begins to save
        time.sleep(3 * duration * rng.random())
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        with os.fdopen(reading) as pipe:
            told = [int(line) for line in pipe.read().split()]
        last = assert_only_whole(tmp_path, max([last, *told]))
        remove_leftovers(tmp_path)
        retain(tmp_path, 2)
        assert last in steps(tmp_path)
        assert len(steps(tmp_path)) <= 2
        assert names(tmp_path) == [f"step-{step:08d}" for step in steps(tmp_path)]


# --- full disks ------------------------------------------------------------------------------------------------


def plain(path: Path) -> None:
    path.write_bytes(bytes(100_000))


def by_torch(path: Path) -> None:
    torch.save({"x": torch.zeros(100_000)}, path)


def by_safetensors(path: Path) -> None:
    save_tensors(path, {"x": torch.zeros(100_000)})


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems' limits")
@pytest.mark.parametrize("how", [plain, by_torch, by_safetensors])
def test_a_full_disk_leaves_earlier_checkpoints_and_says_which(
    tmp_path: Path, how: Callable[[Path], None]
) -> None:
    for expected in ("no checkpoint was saved before", "the last whole checkpoint is step 4"):
        with (
            largest_file(20_000),
            pytest.raises(ValueError, match=rf"^output: cannot save in .* Free some space .*; {expected}\.$"),
            writing(tmp_path, 9, ABOUT) as staging,
        ):
            how(staging / "file")
        assert steps(tmp_path) == [4] * (expected[0] == "t")
        assert remove_leftovers(tmp_path) == []
        write(tmp_path, 4)
    verify(step_folder(tmp_path, 4))


def test_a_disk_that_cannot_hold_it_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"it needs about 1073741824\.0 GiB, .* are free"),
        writing(tmp_path, 9, ABOUT, needed_bytes=1 << 60),
    ):
        raise AssertionError("not reached")
    assert names(tmp_path) == []
    write(tmp_path, 9, needed_bytes=1000)


def test_a_file_in_the_folders_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(ValueError, match=r"^output: cannot save in .*checkpoints.*exists"):
        write(tmp_path / "checkpoints", 1)


# --- retention -------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    saved=st.lists(st.integers(1, 30), min_size=1, max_size=8, unique=True),
    broken=st.sets(st.integers(1, 30)),
    keep=st.integers(1, 4),
    fresh=st.booleans(),
)
def test_the_newest_whole_ones_stay(saved: list[int], broken: set[int], keep: int, fresh: bool) -> None:
    """Damage of the worst kind, that only a hash finds; ``fresh``: in a process that wrote none of them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for step in saved:
            write(folder, step)
        for step in broken & set(saved):
            flip(step_folder(folder, step) / FILES[-1], 50)
        if fresh:
            module._vouched.clear()
        whole = sorted(set(saved) - broken)
        removed = retain(folder, keep)
        left = steps(folder)
        assert set(whole[-keep:]) <= set(left)
        assert removed == sorted(set(saved) - set(left))
        assert [step for step in left if is_whole(step_folder(folder, step))] == whole[-keep:]
        assert {step for step in saved if step > max(whole, default=0)} <= set(left)
        assert find_newest_whole(folder)[0] == (step_folder(folder, whole[-1]) if whole else None)
        assert retain(folder, keep) == []


def test_what_this_process_wrote_is_not_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    hashed: list[Path] = []
    real = module.verify
    monkeypatch.setattr(module, "verify", lambda folder: [hashed.append(folder), real(folder)])
    assert retain(tmp_path, 1) == [1]
    assert hashed == []
    module._vouched.clear()
    assert retain(tmp_path, 1) == []
    assert hashed == [step_folder(tmp_path, 2)]


def test_a_removal_that_is_stopped_leaves_no_checkpoint_with_a_part_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # killed before the first file
    assert retain(tmp_path, 1) == [1]
    monkeypatch.undo()
    assert steps(tmp_path) == [2]
    assert remove_leftovers(tmp_path) == [f"step-00000001.removed-{os.getpid()}"]
    assert names(tmp_path) == ["step-00000002"]


# --- states without pickle -------------------------------------------------------------------------------------


def assert_same(ours: Any, theirs: Any) -> None:
    """Bit-equal, of the same types."""
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert (
            ours.contiguous().view(-1).view(torch.uint8).equal(theirs.contiguous().view(-1).view(torch.uint8))
        )
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            assert_same(ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert repr(ours) == repr(theirs)


def test_trees_of_tensors_come_back_bit_equal(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    odd = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45])
    tree = {
        "state": {
            "a/b.weight": {"step": torch.tensor(3.0), "exp_avg": base, "again": base, "part": base[1:3].T},
            7: {"bf16": base.bfloat16(), "f64": odd.double(), "odd": odd, "empty": torch.empty(0, 3)},
            "7": {
                "whole": torch.tensor(2**62),
                "yes": torch.tensor([True, False]),
                "bytes": torch.arange(9).byte(),
            },
        },
        "param_groups": [{"lr": 0.1 + 0.2, "betas": (0.9, 0.95), "params": ["a/b.weight"], "foreach": None}],
        "numbers": [1, -(2**80), 1e-320, float("inf"), True, "ä\n", (), [], {}],
    }
    save_tensors(tmp_path / "tree.safetensors", tree)
    assert_same(load_tensors(tmp_path / "tree.safetensors"), tree)


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tree.safetensors"
    save_tensors(path, [torch.arange(100_000)])
    (loaded,) = load_tensors(path)
    os.truncate(path, 0)  # a mapped page that is gone kills the process
    assert loaded.equal(torch.arange(100_000))


@pytest.mark.parametrize("raw", [b"", b"x" * 100, (2).to_bytes(8, "little") + b"{}"])
def test_a_file_without_a_tree_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "file").write_bytes(raw)
    with pytest.raises(ValueError, match=r"file': expected tensors and structure"):
        load_tensors(tmp_path / "file")
    with pytest.raises(ValueError, match=r"none': expected tensors and structure"):
        load_tensors(tmp_path / "none")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return MuonAdamW(model, weight_decay=0.1)


def drawn(step: int) -> list[Any]:
    return [
        random.random(),
        np.random.rand(),
        np.random.standard_normal(),
        torch.randn(3),
        random.gauss(0, step),
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, without: str = "") -> None:
    for step in steps:
        give_gradients(list(model.parameters()), step)
        if without and step < 4:
            model.get_parameter(without).grad = None
        optimizer.step()


@pytest.mark.parametrize("make", [adamw, muon])
@pytest.mark.parametrize("without", ["", "landmark"])
@pytest.mark.parametrize("saved_at", [0, 3])
def test_an_optimizer_goes_on_bit_equal_from_a_file(
    tmp_path: Path, make: Callable[[nn.Module], torch.optim.Optimizer], without: str, saved_at: int
) -> None:
    """``without``: a parameter that has no gradient in the first steps; a save changes nothing."""
    model, undisturbed = drt(2).float(), drt(2).float()
    optimizer, other = make(model), make(undisturbed)
    optimizer.param_groups[0]["lr"] = other.param_groups[0]["lr"] = 0.003  # as a scheduler does
    train(model, optimizer, range(saved_at), without)
    save_tensors(tmp_path / "optimizer.safetensors", optimizer_state(model, optimizer))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizer, range(saved_at, 6), without)
    train(undisturbed, other, range(6), without)

    resumed = drt(2, seed=1).float()
    resumed.load_state_dict(weights, strict=False)
    resumed_optimizer = make(resumed)
    restore_optimizer(resumed, resumed_optimizer, load_tensors(tmp_path / "optimizer.safetensors"))
    assert all(p.grad is None for p in resumed.parameters())
    assert len(resumed_optimizer.state) == (len(weights) - bool(without) if saved_at else 0)
    train(resumed, resumed_optimizer, range(saved_at, 6), without)
    for name, parameter in resumed.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
        assert torch.equal(parameter, undisturbed.get_parameter(name)), name
    assert_same(optimizer_state(resumed, resumed_optimizer), optimizer_state(model, optimizer))


def test_a_state_is_copied_where_it_is_asked_for() -> None:
    """On the meta device, as on a GPU: what is on the CPU already is not copied."""
    model = drt(2).to("meta")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.empty_like(parameter)}
    found = optimizer_state(model, optimizer)["state"]
    for name, parameter in model.named_parameters():
        assert found[name]["exp_avg"] is optimizer.state[parameter]["exp_avg"]
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        optimizer_state(model, optimizer, offload=True)


def test_another_optimizers_state_is_refused() -> None:
    """One of another model, and one of the same that treats its parameters otherwise."""
    model, smaller = drt(2), nn.Linear(3, 3)
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    state = optimizer_state(model, optimizer)
    with pytest.raises(
        ValueError, match=r"^optimizer: expected the state of 2 parameters \(weight ... bias\) as"
    ):
        restore_optimizer(smaller, adamw(smaller), state)
    with pytest.raises(
        ValueError, match=r"^optimizer: expected the state of \d+ \+ \d+ .*got one of \d+ param"
    ):
        restore_optimizer(model, muon(model), state)


def test_random_generators_go_on_from_a_file(tmp_path: Path) -> None:
    drawn(0)
    save_tensors(tmp_path / "rng.safetensors", rng_state())
    expected = [drawn(step) for step in range(3)]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    drawn(0)
    set_rng_state(load_tensors(tmp_path / "rng.safetensors"))
    assert_same([drawn(step) for step in range(3)], expected)


# --- two processes ---------------------------------------------------------------------------------------------


def sharded_layers(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def save_and_resume(
    rank: int, folder: str, make: Callable[[nn.Module], torch.optim.Optimizer], without: str
) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)

    def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            x = torch.randn(
                4, 6, generator=torch.Generator().manual_seed(2 * step + rank), dtype=torch.float64
            )
            model(x).square().mean().backward()
            if without and step < 4:
                model.get_parameter(without).grad = None
            optimizer.step()
            optimizer.zero_grad()

    model = sharded_layers(0)
    optimizer = make(model)
    assert (optimizer_state(model, optimizer) == {}) == (rank == 1)
    go_on(model, optimizer, range(3))
    state = optimizer_state(model, optimizer)
    path = Path(folder) / "optimizer.safetensors"
    if rank == 0:
        assert state["state"]["1.weight"]["exp_avg"].shape == (5,)
        assert len(state["state"]) == 6 - bool(without)
        save_tensors(path, state)
    else:
        assert state == {}
    dist.barrier()
    resumed = sharded_layers(0)
    with torch.no_grad():
        for ours, theirs in zip(resumed.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)
    resumed_optimizer = make(resumed)
    restore_optimizer(resumed, resumed_optimizer, load_tensors(path) if rank == 0 else {})
    for each, with_ in ((model, optimizer), (resumed, resumed_optimizer)):
        go_on(each, with_, range(3, 6))
    for (name, ours), theirs in zip(resumed.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local()), name
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("make", "without"), [(adamw, ""), (adamw, "2.bias"), (muon, ""), (muon, "2.weight")]
)
def test_two_processes_with_shards_save_and_go_on_bit_equal(
    tmp_path: Path, make: Callable[[nn.Module], torch.optim.Optimizer], without: str
) -> None:
    multiprocessing.start_processes(
        save_and_resume, (str(tmp_path), make, without), 2, start_method="fork"
    )  # torch is imported already
