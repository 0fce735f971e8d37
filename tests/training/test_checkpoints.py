"""Checkpoints: every damage is found, no kill or full disk costs the last whole one, states come back bit-equal."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.disks import flip, largest_file
from tests.training.tiny import TEXT, run_config
from trailmark.training import manifests
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
from trailmark.training.run import Run
from trailmark.training.tensors import save_tensors

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


def test_what_fails_in_the_block_passes_as_it_is_and_leaves_nothing(tmp_path: Path) -> None:
    """torch's errors are RuntimeErrors all: a bug or a full GPU is no full disk."""

    def mismatch() -> None:
        torch.zeros(2) @ torch.zeros(3)

    def full_gpu() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def ours() -> None:
        raise KeyError("ours")

    def ctrl_c() -> None:
        raise KeyboardInterrupt

    write(tmp_path, 5)
    for fail in (mismatch, full_gpu, ours, ctrl_c):
        with pytest.raises(BaseException) as caught, writing(tmp_path, 6, {}) as staging:  # noqa: PT011, PT012
            (staging / "file").write_bytes(b"half")
            fail()
        assert caught.traceback[-1].name == fail.__name__
        assert names(tmp_path) == ["step-00000005"]


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
            assert "\n" not in note
            assert not is_whole(newest)
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
@pytest.mark.sampled(4)
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
    (folder / MANIFEST).write_bytes(manifests.signed(body))
    for use in (verify, read_about):
        with pytest.raises(ValueError, match=r"^manifest.json: .*expected ") as caught:
            use(folder)
        said = str(caught.value)
        assert "\n" not in said
        assert field.split(": ")[-1] in said or "some with a point" in said
    assert not looks_whole(folder)
    assert find_newest_whole(tmp_path)[0] == step_folder(tmp_path, 1)
    assert retain(tmp_path, 1) == []


def test_every_byte_of_a_manifest_counts(tmp_path: Path) -> None:
    """Each of its own SHA-256, every seventh of the rest."""
    folder = write(tmp_path, 1)
    whole = (folder / MANIFEST).read_bytes()
    own = whole.index(json.loads(whole)["sha256"].encode())
    for offset in (*range(0, len(whole), 7), *range(own - 10, own + 66)):
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


def test_what_is_no_file_of_the_folder_is_refused(tmp_path: Path) -> None:
    """A link to the right bytes too: what lies elsewhere is nobody's promise. A FIFO does not hang."""
    folder = write(tmp_path, 1)
    path = folder / FILES[0]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=rf"^{FILES[0]}: expected a regular file, .* is a link"):
        verify(folder)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=rf"^{FILES[0]}: expected a regular file, .* is a FIFO"):
        verify(folder)
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)
    with pytest.raises(ValueError, match=rf"^{MANIFEST}: expected a regular file, .* is a FIFO"):
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
@pytest.mark.sampled(2)
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
