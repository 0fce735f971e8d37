"""A memory from anywhere, or one that was damaged: refused in one line, and nothing is signed or written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.models.tiny import drt, tokens, window_model
from trailmark.memory import ChunkCache, saved, verification
from trailmark.memory.hashes import sample_of
from trailmark.memory.manifest import hash_body

pytestmark = pytest.mark.usefixtures("one_thread")
Body = dict[str, Any]


@pytest.fixture(scope="module")
def model() -> Any:
    return drt()


@pytest.fixture(scope="module")
def made(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two memories of one model: "memory", and "longer" of another text."""
    folder = tmp_path_factory.mktemp("made")
    for name, length, seed in (("memory", 61, 1), ("longer", 150, 2)):
        read(model, model.new_cache("disk", memory_folder=folder / name), length, seed).save(folder / name)
    return folder


@pytest.fixture
def memory(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "memory", tmp_path / "memory")
    return tmp_path / "memory"


@torch.no_grad()
def read(model: Any, cache: ChunkCache, length: int = 30, seed: int = 3) -> ChunkCache:
    read: ChunkCache = model.read(tokens(length, seed=seed), cache)
    return read


@pytest.fixture(autouse=True)
def _nothing_outside(tmp_path: Path) -> Iterator[None]:
    """Beside the memory lies a file that no attack may change."""
    (tmp_path / "outside").write_bytes(b"mine" * 9000)
    yield
    assert (tmp_path / "outside").read_bytes() == b"mine" * 9000


def one_line(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 900


def body_of(folder: Path) -> Body:
    body: Body = json.loads((folder / "memory.json").read_text())
    return body


def sign(folder: Path, change: Callable[[Body], Any]) -> None:
    """Edit a manifest and compute its SHA-256 again, as a stranger can."""
    body = body_of(folder)
    del body["sha256"]
    change(body)
    (folder / "memory.json").write_text(json.dumps(body | {"sha256": hash_body(body)}))


def sign_state(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """The same of its tensors."""
    (path,) = folder.glob("state-*")
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file({name: x.contiguous() for name, x in tensors.items()}, path)
    content = path.read_bytes()
    entry = {"file": path.name, "bytes": len(content), "sha256": sha256(content).hexdigest()}
    sign(folder, lambda body: body.update(state=entry))


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- damage ----------------------------------------------------------------------------------------------------


def forget_sample(folder: Path) -> None:
    """As an older version wrote it: damage is not seen as it is loaded."""
    sign(folder, lambda body: body.pop("chunks_sample"))


@pytest.mark.parametrize("tier", ["disk", "host"])
def test_damage_is_not_signed_again(tier: str, model: Any, memory: Path, tmp_path: Path) -> None:
    forget_sample(memory)
    flip(memory / "chunks-1.bin", 700)
    cache = read(model, model.load_cache(memory, tier))
    target = memory if tier == "disk" else tmp_path / "copy"
    before = contents(target) if target.exists() else {}
    one_line(lambda: cache.save(target), "chunks-1.bin' is damaged: .* in block 0 ")
    assert contents(target).keys() == before.keys()
    assert contents(target).get("memory.json") == before.get("memory.json")
    one_line(lambda: verification.verify(memory), "chunks-1.bin' is damaged")


def test_damage_is_not_signed_by_a_branch(model: Any, memory: Path, tmp_path: Path) -> None:
    forget_sample(memory)
    flip(memory / "chunks-1.bin", 700)
    branch = read(model, model.load_cache(memory).branch())
    one_line(lambda: branch.save(tmp_path / "copy"), "chunks-1.bin' is damaged: .* in block 0 ")


def test_an_honest_memory_is_read_on_and_copied(model: Any, memory: Path, tmp_path: Path) -> None:
    for forgotten in (False, True):
        if forgotten:
            forget_sample(memory)
        for tier, target in (("disk", memory), ("host", tmp_path / f"copy{forgotten}")):
            read(model, model.load_cache(memory, tier)).save(target)
            verification.verify(target)
            model.load_cache(target)
        assert isinstance(body_of(memory)["chunks_sample"], str)


def test_a_damaged_state_is_not_loaded(model: Any, memory: Path) -> None:
    (state,) = memory.glob("state-*")
    for place in range(0, state.stat().st_size, 499):
        flip(state, place)
        one_line(lambda: model.load_cache(memory), f"{state.name}' is damaged: expected the SHA-256")
        flip(state, place)
    model.load_cache(memory)


def test_chunks_of_another_memory_are_not_loaded(model: Any, memory: Path, made: Path) -> None:
    shutil.copy(made / "longer" / "chunks-1.bin", memory / "chunks-1.bin")
    one_line(lambda: model.load_cache(memory), "expected the chunks of this memory, got others")


def test_the_sample_of_a_long_file_tells_it_from_others(tmp_path: Path) -> None:
    size, path = 3_000_000, tmp_path / "chunks"
    path.write_bytes(os.urandom(size))
    first = sample_of(path, size)
    with open(path, "ab") as file:
        file.write(b"more")
    assert sample_of(path, size) == first
    assert sample_of(path, size - 1) != first
    for place in (0, size - 1):
        flip(path, place)
        assert sample_of(path, size) != first
        flip(path, place)
    path.write_bytes(os.urandom(size))
    assert sample_of(path, size) != first


# --- signed again ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_bytes", 0),
        ("block_bytes", 1),
        ("count", 3),
        ("count", -1),
        ("count", 1.5),
        ("count", True),
        ("count", 10**400),
        ("bytes", 0),
        ("bytes", 2**62),
        ("record_shape", [2, 2, 4]),
        ("record_shape", [2, 0, 4, 4]),
        ("record_shape", "2222"),
        ("record_shape", [2, 2**61, 2**61, 4]),
        ("record_shape", None),
        ("dtype", "evil"),
        ("dtype", "int8"),  # then the bytes are too many
        ("dtype", "int4"),
        ("dtype", 3),
        ("sha256", []),
        ("sha256", ["x"]),
        ("sha256", "a" * 64),
        ("file", "/etc/passwd"),
        ("file", 7),
        ("else", 7),
    ],
)
def test_what_a_manifest_says_of_chunks_is_checked(name: str, value: Any, model: Any, memory: Path) -> None:
    if name == "sha256" and isinstance(value, str):
        value = [value] * 2
    sign(memory, lambda body: body["chunks"].update({name: value}))
    for call in (model.load_cache, verification.verify, saved.load):
        one_line(lambda call=call: call(memory), "memory.json' is damaged: expected a memory's manifest")


def smaller(body: Body) -> None:
    """A smaller count in all that it is told by, but the SHA-256 of the records."""
    chunks = body["chunks"]
    chunks["bytes"] -= chunks["bytes"] // chunks["count"]
    chunks["count"] -= 1
    del body["chunks_sample"]


def turned(body: Body) -> None:
    shape = body["chunks"]["record_shape"]
    shape[2], shape[3] = shape[3] * shape[2], 1
    del body["chunks_sample"]


CHANGES: dict[str, Callable[[Body], Any]] = {
    "no chunks": lambda body: body.update(chunks=None),
    "a smaller count": smaller,
    "another shape": turned,
    "chunks as a list": lambda body: body.update(chunks=[]),
    "no state": lambda body: body.update(state=None),
    "state elsewhere": lambda body: body["state"].update(file="../state-1.safetensors"),
    "state of another size": lambda body: body["state"].update(bytes=2**61),
    "state of no size": lambda body: body["state"].update(bytes="x"),
    "a header of text": lambda body: body.update(header="x"),
    "a header of numbers": lambda body: body.update(header=dict.fromkeys(body["header"], 1)),
    "notes of text": lambda body: body["header"].update(notes="x"),
    "no generation": lambda body: body.pop("generation"),
    "generation of text": lambda body: body.update(generation="x"),
    "format of text": lambda body: body.update(format="x"),
    "format 0": lambda body: body.update(format=0),
    "something else": lambda body: body.update({"else": 1}),
    "a sample of numbers": lambda body: body.update(chunks_sample=[1]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_that_was_signed_again_is_checked_whole(name: str, model: Any, memory: Path) -> None:
    sign(memory, CHANGES[name])
    one_line(lambda: model.load_cache(memory), "^folder: ")


@pytest.mark.parametrize("depth", [400, 900, 3000, 100_000])
def test_a_nested_manifest_is_one_line(depth: int, model: Any, memory: Path) -> None:
    text = (memory / "memory.json").read_text()
    (memory / "memory.json").write_text(
        text.replace('"header": {', f'"header": {{"a": {"[" * depth}{"]" * depth},')
    )
    one_line(lambda: model.load_cache(memory), "memory.json' is damaged")


STATES: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "NaN landmarks": lambda state: state["landmarks"].view(-1)[3:4].fill_(float("nan")),
    "infinite landmarks": lambda state: state["landmarks"].view(-1)[-1:].fill_(float("inf")),
    "fewer landmarks": lambda state: state.update(landmarks=state["landmarks"][:, 1:]),
    "landmarks of whole numbers": lambda state: state.update(landmarks=state["landmarks"].long()),
    "no landmarks": lambda state: state.pop("landmarks"),
    "no tokens": lambda state: state.pop("num_tokens"),
    "records beyond the end": lambda state: state["records"].add_(1),
    "records before the first": lambda state: state["records"].sub_(1),
    "lengths beyond a chunk": lambda state: state["lengths"].add_(1000),
    "more chunks": lambda state: state["num_chunks"].add_(1),
    "other rows": lambda state: state.update(num_tokens=torch.zeros(3, dtype=torch.int64)),
    "tables of floats": lambda state: state.update(records=state["records"].float()),
    "a window without rows": lambda state: state.update({"layers.0.keys": state["layers.0.keys"][:0]}),
    "a window of text": lambda state: state.update({"layers.0.keys": torch.zeros(3, dtype=torch.uint8)}),
    "half a window": lambda state: state.pop("layers.0.values"),
}


@pytest.mark.parametrize("slots", [1, 60])
def test_keys_that_lack_positions_of_a_layer_without_a_window_are_refused(slots: int, tmp_path: Path) -> None:
    model = window_model(sliding_window=None)
    model.read(tokens(100)).save(tmp_path / "memory")

    def cut(state: dict[str, torch.Tensor]) -> None:
        state.update({name: x[:, :, :slots] for name, x in state.items() if name.startswith("layers.")})

    assert model.load_cache(tmp_path / "memory").get_seq_length() == 100
    sign_state(tmp_path / "memory", cut)
    one_line(lambda: model.load_cache(tmp_path / "memory"), "expected keys of 100 positions")


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_was_signed_again_is_checked(name: str, model: Any, memory: Path) -> None:
    sign_state(memory, STATES[name])
    one_line(lambda: model.load_cache(memory), "^folder: expected a whole memory in .* its state is none")


# --- links and special files ---------------------------------------------------------------------------------------


def put(kind: str, path: Path, outside: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        os.link(outside, path)


@pytest.mark.parametrize("kind", ["link", "FIFO", "folder"])
@pytest.mark.parametrize(
    "name", ["chunks-1.bin", "memory.json", "state-2.safetensors", "chunks-1.bin.overwritten"]
)
def test_what_is_no_file_of_its_own_is_refused(
    name: str, kind: str, model: Any, memory: Path, tmp_path: Path
) -> None:
    cache = read(model, model.load_cache(memory, "host"))
    put(kind, memory / name, tmp_path / "outside")
    for call in (
        lambda: model.load_cache(memory),
        lambda: cache.save(memory),
        lambda: saved.next_chunk_file(memory),
    ):
        one_line(call, "^folder: expected a regular file")
    if name != "chunks-1.bin.overwritten":
        one_line(lambda: verification.verify(memory), "^folder: expected a regular file")


@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_nothing_of_ours_that_is_planted_is_followed(
    kind: str, model: Any, memory: Path, tmp_path: Path
) -> None:
    cache = read(model, model.load_cache(memory))
    (tmp_path / "folder").mkdir()
    put(kind, memory / ".saving", tmp_path / "folder")
    one_line(lambda: cache.save(memory), "^folder: expected nothing or a folder that a save left")
    assert not list((tmp_path / "folder").iterdir())
    put("folder", memory / ".saving", tmp_path)
    put("link", memory / ".saving" / "state-3.safetensors", tmp_path / "outside")
    cache.save(memory)
    verification.verify(memory)


@pytest.mark.parametrize("kind", ["link", "FIFO", "folder", "hard link"])
@pytest.mark.parametrize("name", ["chunks-1.bin", "chunks-1.bin.overwritten"])
def test_nothing_is_written_through_a_link_put_there_later(
    name: str, kind: str, model: Any, memory: Path, tmp_path: Path
) -> None:
    cache = model.load_cache(memory)
    store = cache.memory.store
    if name == "chunks-1.bin" and kind == "hard link":
        shutil.copy(memory / name, tmp_path / "outside2")
        put(kind, memory / name, tmp_path / "outside2")
    else:
        put(kind, memory / name, tmp_path / "outside")
    one_line(lambda: store.write(0, store.gather(torch.arange(1))), "^(memory_)?folder: expected a ")
