"""A drawn attacker: damage of a file or folder that a command reads, the same for the same seed.

A draw damages one file in one way; :func:`damaged` says in words what it did. What it leaves behind must be answered by
the right result or by one line, never by a traceback, a hang, a wrong result or a change outside (test_attacks.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trailmark.memory.manifest import hash_body
from trailmark.training import manifests

Resign = Callable[[Path], None]

_DEPTHS = (3_000, 100_000, 1_000_000)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "../../x", "\0", [], {}, [[]], {"a": 1}, ["a", None], "\ud800", "<script>"),
    *(0, -1, 1, 1.5, -1e300, 1e300, 1e-320, 10**9, 10**12, 2**31, 2**63, 2**64, 10**400, "1e999", "nan"),
)  # fmt: skip
_BOMB = "b0: &b0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"b{n + 1}: &b{n + 1} [{', '.join([f'*b{n}'] * 9)}]\n" for n in range(9)
)


def damaged(rng: random.Random, target: Path, outside: Path, resign: Resign | None = None) -> str:
    """Damage one file at or below ``target``, and say how.

    Args:
        outside: a folder of somebody else's, to which links lead.
        resign: makes the hashes of a changed folder right again, as a stranger can who knows how.
    """
    files = sorted(path for path in target.rglob("*") if path.is_file()) if target.is_dir() else [target]
    file = rng.choice(files)
    kinds = [
        _flip,
        _truncate,
        _lengthen,
        _empty,
        _delete,
        _swap,
        _link,
        _link_to_itself,
        _fifo,
        _folder,
        _noise,
    ]
    if file.suffix in (".json", ".yaml", ".jsonl"):
        kinds = [
            *kinds[rng.randrange(len(kinds)) :][:1],
            _value,
            _value,
            _value,
            _version,
            _key,
            _nested,
            _whole,
        ]
    if file.suffix == ".yaml":
        kinds.append(_bomb)
    if file.suffix == ".safetensors":
        kinds += [_header, _numbers, *[_tensor] * 6]
    damage = rng.choice(kinds)
    said = f"{file.relative_to(target.parent)}: {damage.__name__[1:]} {damage(rng, file, outside)}"
    if resign is not None and rng.random() < 0.3 and file.is_file() and not file.is_symlink():
        resign(target)
        said += ", signed again"
    return said


# --- bytes and files -------------------------------------------------------------------------------------------


def _flip(rng: random.Random, file: Path, outside: Path) -> str:
    content = bytearray(file.read_bytes())
    place, bit = rng.randrange(len(content)), rng.randrange(8)
    content[place] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {place}"


def _truncate(rng: random.Random, file: Path, outside: Path) -> str:
    length = rng.randrange(file.stat().st_size)
    os.truncate(file, length)
    return f"to {length} bytes"


def _lengthen(rng: random.Random, file: Path, outside: Path) -> str:
    content = rng.choice([b"\0", b"x" * 1000, file.read_bytes()])
    with open(file, "ab") as opened:
        opened.write(content)
    return f"by {len(content)} bytes"


def _empty(rng: random.Random, file: Path, outside: Path) -> str:
    file.write_bytes(b"")
    return ""


def _delete(rng: random.Random, file: Path, outside: Path) -> str:
    file.unlink()
    return ""


def _swap(rng: random.Random, file: Path, outside: Path) -> str:
    other = rng.choice(sorted(path for path in file.parent.iterdir() if path.is_file()))
    content = other.read_bytes()
    other.write_bytes(file.read_bytes())
    file.write_bytes(content)
    return f"with {other.name}"


def _link(rng: random.Random, file: Path, outside: Path) -> str:
    """To the same content elsewhere, to more of it, or to nothing."""
    place = outside / "linked"
    content, kind = file.read_bytes(), rng.choice(["same", "more", "nothing"])
    if kind != "nothing":
        place.write_bytes(content if kind == "same" else content * 2 + b"more")
    file.unlink()
    file.symlink_to(place)
    return f"to {kind}"


def _link_to_itself(rng: random.Random, file: Path, outside: Path) -> str:
    file.unlink()
    file.symlink_to(file.name)
    return ""


def _fifo(rng: random.Random, file: Path, outside: Path) -> str:
    file.unlink()
    os.mkfifo(file)
    return ""


def _folder(rng: random.Random, file: Path, outside: Path) -> str:
    file.unlink()
    file.mkdir()
    return ""


def _noise(rng: random.Random, file: Path, outside: Path) -> str:
    file.write_bytes(rng.randbytes(file.stat().st_size))
    return "of the same length"


# --- JSON and YAML ---------------------------------------------------------------------------------------------


def _edited(rng: random.Random, file: Path, edit: Callable[[Any], str]) -> str:
    """Change what a file of JSON, of JSON lines or of YAML holds, and write it as it was written."""
    import yaml

    text = file.read_text()
    if file.suffix == ".yaml":
        content = yaml.safe_load(text)
        said = edit(content)
        file.write_text(yaml.safe_dump(content, sort_keys=False))
        return said
    lines = text.splitlines() if file.suffix == ".jsonl" else [text]
    number = rng.randrange(len(lines))
    try:
        content = json.loads(lines[number])
    except ValueError:
        return "nothing: it is no JSON"
    said = edit(content)
    lines[number] = json.dumps(content)
    file.write_text("\n".join(lines) + "\n")
    return said if len(lines) == 1 else f"{said} (line {number + 1})"


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in a value, with each key or index of it."""
    keys = (
        content.keys()
        if isinstance(content, dict)
        else range(len(content) if isinstance(content, list) else 0)
    )
    for key in list(keys):
        yield content, key
        yield from _places(content[key])


def _value(rng: random.Random, file: Path, outside: Path) -> str:
    def edit(content: Any) -> str:
        places = list(_places(content))
        if not places:
            return "nothing"
        where, key = rng.choice(places)
        value = rng.choice([*_VALUES, float("nan"), float("inf")])
        was, where[key] = where[key], value
        return f"{key!r} from {str(was)[:40]!r} to {str(value)[:40]!r}"

    return _edited(rng, file, edit)


def _version(rng: random.Random, file: Path, outside: Path) -> str:
    def edit(content: Any) -> str:
        if not isinstance(content, dict):
            return "nothing"
        value = rng.choice([0, 2, 99, -1, "1", None, 1.5, 10**400, [1]])
        key = next(
            (name for name in ("format", "version", "transformers_version") if name in content), "format"
        )
        content[key] = value
        return f"{key} {str(value)[:40]}"

    return _edited(rng, file, edit)


def _key(rng: random.Random, file: Path, outside: Path) -> str:
    def edit(content: Any) -> str:
        places = [(where, key) for where, key in _places(content) if isinstance(where, dict)]
        if not places:
            return "nothing"
        where, key = rng.choice(places)
        if rng.random() < 0.5:
            del where[key]
            return f"without {key!r}"
        where["unheard of"] = rng.choice(_VALUES)
        return f"one more beside {key!r}"

    return _edited(rng, file, edit)


def _nested(rng: random.Random, file: Path, outside: Path) -> str:
    depth, opening = rng.choice(_DEPTHS), rng.choice(["[", '{"a":'])
    whole = rng.random() < 0.5
    text = opening * depth + ("" if rng.random() < 0.3 else "1" + {"[": "]"}.get(opening, "}") * depth)
    before = file.read_text()
    if whole or ": " not in before:
        file.write_text(text)
    else:  # as the value of a key
        head, _, _ = before.partition(": ")
        file.write_text(f"{head}: {text}" + ("}" if file.suffix == ".json" else ""))
    return f"{depth} deep in {opening}"


def _whole(rng: random.Random, file: Path, outside: Path) -> str:
    empty = "[]" if file.suffix == ".yaml" else "{}"  # settings that say nothing are those of a large model
    text = rng.choice(
        ["null", "[]", empty, "3", '"text"', "NaN", "[1, 2", "1" * 5000, "a: 1\na: 2", f"\ufeff{empty}"]
    )
    file.write_text(text)
    return repr(text[:20])


def _bomb(rng: random.Random, file: Path, outside: Path) -> str:
    before = file.read_text()
    file.write_text(rng.choice([_BOMB + before, before + _BOMB, _BOMB]))
    return ""


# --- safetensors -----------------------------------------------------------------------------------------------


def _header(rng: random.Random, file: Path, outside: Path) -> str:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    kind = rng.choice(["length", "nested", "no JSON", "offset"])
    if kind == "length":
        file.write_bytes(rng.choice([0, 1, length + 1, 2**40, 2**64 - 1]).to_bytes(8, "little") + content[8:])
        return kind
    header = content[8 : 8 + length]
    if kind == "offset":
        header = header.replace(b'"data_offsets":[0', b'"data_offsets":[7', 1)
    else:
        header = b"[" * 100_000 if kind == "nested" else b"x" * length
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    return kind


def _numbers(rng: random.Random, file: Path, outside: Path) -> str:
    """All bits of some data set: NaN in every type of floating point numbers, -1 in integers."""
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    place = begin + rng.randrange(max(1, len(content) - begin)) // 8 * 8
    file.write_bytes(content[:place] + b"\xff" * min(8, len(content) - place) + content[place + 8 :])
    return f"at byte {place}"


def _tensor(rng: random.Random, file: Path, outside: Path) -> str:
    """Another shape of a tensor, other integers, NaN, or no such tensor, in a file that is whole."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(file, "pt") as opened:
        notes = opened.metadata()
    tensors = load_file(file)
    name = rng.choice(sorted(tensors))
    tensor, dim = tensors[name], rng.randrange(max(1, tensors[name].dim()))
    kind = rng.choice(["dropped", "more", "none", "less", "flat", "other", "other"])
    if kind == "dropped":
        del tensors[name]
    elif kind == "other":
        if tensor.is_floating_point():
            number: Any = rng.choice([float("nan"), float("inf"), -float("inf"), 1e30])
        elif tensor.dtype == torch.bool:
            number = rng.random() < 0.5
        else:
            number = rng.choice([-1, -2, 0, 1, 7, 2**31, 2**62, 2**63 - 1, -(2**63)])
        kind = f"all {number}"
        if rng.random() < 0.5 or not tensor.dim():
            tensors[name] = torch.full_like(tensor, number)
        elif tensor.numel():
            tensor.view(-1)[rng.randrange(tensor.numel())] = number
    elif tensor.dim():
        other = {
            "more": lambda: torch.cat([tensor, tensor], dim),
            "none": lambda: tensor.narrow(dim, 0, 0),
            "less": lambda: tensor.narrow(dim, 0, max(0, tensor.shape[dim] - 1)),
            "flat": lambda: tensor.flatten(),
        }
        tensors[name] = other[kind]().contiguous()
    save_file(tensors, file, notes)
    return f"{name} {kind} (dimension {dim})"


# --- signing again ---------------------------------------------------------------------------------------------


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _parsed(file: Path) -> dict[str, Any] | None:
    """A manifest whose hashes can be made again; None: it is too damaged for that."""
    try:
        content = json.loads(file.read_text())
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def resign_corpus(folder: Path) -> None:
    if (content := _parsed(folder / "corpus.json")) is None:
        return
    try:
        hashes = []
        for shard in content["shards"]:
            shard["bytes"] = (folder / shard["file"]).stat().st_size
            shard["sha256"] = sha256(folder / shard["file"])
            shard["documents_sha256"] = sha256(folder / shard["documents_file"])
            hashes += [shard["sha256"], shard["documents_sha256"]]
        parts = [content["dtype"], content["tokenizer"]["fingerprint"], *hashes]
        content["fingerprint"] = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    except (KeyError, TypeError, OSError, ValueError):
        return
    (folder / "corpus.json").write_text(json.dumps(content))


def resign_files(manifest: str) -> Resign:
    """Of a manifest that holds the length and SHA-256 of each of its ``files``."""

    def resign(folder: Path) -> None:
        if (content := _parsed(folder / manifest)) is None:
            return
        try:
            for name, entry in content["files"].items():
                entry |= {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
        except (KeyError, TypeError, OSError, ValueError, AttributeError):
            return
        (folder / manifest).write_text(json.dumps(content))

    return resign


def resign_memory(folder: Path) -> None:
    if (body := _parsed(folder / "memory.json")) is None:
        return
    try:
        body.pop("sha256", None)
        for entry in filter(None, (body.get("state"), body.get("chunks"))):
            content = (folder / entry["file"]).read_bytes()
            if "block_bytes" in entry:
                step = max(1 << 20, int(entry["block_bytes"]))
                blocks = [content[at : at + step] for at in range(0, len(content), step)]
                entry["sha256"] = [hashlib.sha256(block).hexdigest() for block in blocks]
                body.pop("chunks_sample", None)  # as an older version wrote it
            else:
                entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (folder / "memory.json").write_text(json.dumps(body | {"sha256": hash_body(body)}))
    except (KeyError, TypeError, OSError, ValueError, AttributeError, OverflowError):
        return


def resign_run(folder: Path) -> None:
    """The manifests of a run's checkpoints and of its final model, each with a SHA-256 of itself."""
    for manifest in (folder / "model.json", *sorted(folder.glob("checkpoints/*/manifest.json"))):
        if not manifest.is_file():
            continue
        resign_files(manifest.name)(manifest.parent)
        if (content := _parsed(manifest)) is not None:
            content.pop("sha256", None)
            with contextlib.suppress(ValueError):  # a number that is none
                manifest.write_bytes(manifests.signed(content))


def contents(folder: Path, but: tuple[Path, ...]) -> dict[str, bytes]:
    """Every file below a folder, but those at or below some paths."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and not any(path.is_relative_to(own) for own in but):
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def copied(world: Path, place: Path) -> Path:
    shutil.copytree(world, place, symlinks=True)
    return place
