"""Tensors of a pretrained model, one at a time, and the file that those of ours are written to, one at a time."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import reduce
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trailmark import pretrained, untrusted
from trailmark.files import sync_file
from trailmark.models.conversion.base import ARGUMENT, Base
from trailmark.untrusted import brief, first_line

WEIGHTS = "model.safetensors"
_INDEX = f"{WEIGHTS}.index.json"
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_BUFFER = "rotary_emb.inv_freq"  # that older files hold beside the weights
_SHOWN = 3


class Tensors(Protocol):
    """The tensors of a pretrained model under the names of transformers."""

    shapes: dict[str, tuple[int, ...]]
    files: list[Path]
    dtype: torch.dtype
    """What they are in, or become without loss."""

    def read(self, name: str) -> Tensor: ...


class SafetensorFiles:
    """Of a folder with one file, or with several and an index."""

    def __init__(self, folder: Path, name: str) -> None:
        self.files = _files_of(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, Path] = {}
        kinds = set()
        for path in self.files:
            with self._opened(path) as file:
                for key in file.keys():  # noqa: SIM118 - it is no mapping
                    if key.endswith(_BUFFER):
                        continue
                    part = file.get_slice(key)
                    self.shapes[key], self._places[key] = tuple(part.get_shape()), path
                    kinds.add(part.get_dtype())
        known = {kind: dtype for dtype, kind in DTYPES.items()}
        if unknown := kinds - known.keys():
            raise ValueError(
                f"{ARGUMENT}: expected weights in {', '.join(sorted(known))}, {name} has some in "
                f"{', '.join(sorted(unknown))}: they are quantized. Convert the model that they were made of."
            )
        self.dtype = reduce(torch.promote_types, [known[kind] for kind in kinds] or [torch.bfloat16])
        self._names: dict[str, str] = {}

    def read(self, name: str) -> Tensor:
        own = self._names.get(name, name)
        with self._opened(self._places[own]) as file:
            return file.get_tensor(own)

    def rename(self, name: str, known: str) -> None:
        """What lies in the files as ``name`` is ``known``."""
        self.shapes[known], self._names[known] = self.shapes.pop(name), name

    def _opened(self, path: Path) -> AbstractContextManager[Any]:
        try:
            untrusted.expect_regular(path, ARGUMENT, links=True)
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{ARGUMENT}: cannot load {str(path)!r} ({first_line(error)}). Save or download the model again."
            ) from error


def _files_of(folder: Path) -> list[Path]:
    """As transformers chooses: other safetensors may lie beside them under names of another program."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    try:
        index = untrusted.read_json(folder / _INDEX, ARGUMENT, links=True)
    except FileNotFoundError as error:
        raise ValueError(
            f"{ARGUMENT}: expected weights in {WEIGHTS}, or several files and {_INDEX}, {str(folder)!r} has neither."
        ) from error
    places = index.get("weight_map") if isinstance(index, dict) else None
    names = sorted(set(places.values())) if isinstance(places, dict) and all(
        isinstance(name, str) for name in places.values()
    ) else []  # fmt: skip
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{ARGUMENT}: expected names of files in {_INDEX}, got {brief(name)}.")
        if not (folder / name).is_file():
            raise ValueError(f"{ARGUMENT}: {name} is missing in {str(folder)!r}. Download the model again.")
    if not names:
        raise ValueError(
            f"{ARGUMENT}: expected the names of files in {str(folder / _INDEX)!r}, there are none."
        )
    return [folder / name for name in names]


class GGUFFile:
    """Of a .gguf file: each is dequantized as transformers does it, to float32, when it is asked for."""

    dtype = torch.float32

    def __init__(self, base: Base, names: Iterable[str]) -> None:
        from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map
        from transformers import modeling_gguf_pytorch_utils as theirs

        assert base.gguf is not None
        self.files, config = [base.gguf], base.config
        with pretrained.loading(ARGUMENT, f"cannot load {str(base.gguf)!r}", pretrained.AGAIN):
            reader = GGUFReader(str(base.gguf))
            (kind,) = theirs.read_field(reader, "general.architecture")
            heads = {name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads")}
            self._processor = theirs.TENSOR_PROCESSORS.get(kind, theirs.TensorProcessor)(config=heads)
            arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == kind)
            known = get_tensor_name_map(arch, config.num_hidden_layers)
            stems = {known.get_name(name.rpartition(".")[0]): name.rpartition(".")[0] for name in names}
            found = {}
            for tensor in reader.tensors:
                stem, dot, ending = tensor.name.rpartition(".")
                found[f"{stems.get(stem, stem)}{dot}{ending}"] = tensor
        _expect_plain_positions(base, [*found, *reader.fields])
        self._found: dict[str, Any] = found
        self.shapes = {name: tuple(map(int, tensor.shape[::-1])) for name, tensor in found.items()}

    def read(self, name: str) -> Tensor:
        from gguf import dequantize

        tensor = self._found[name]
        with pretrained.loading(ARGUMENT, f"cannot load {name} of {str(self.files[0])!r}"):
            made = self._processor.process(
                weights=dequantize(tensor.data, tensor.tensor_type),
                name=tensor.name,
                tensor_key_mapping={},
                parsed_parameters={},
            )
            return torch.from_numpy(np.require(made.weights, np.float32, ["C", "W"]))


def _expect_plain_positions(base: Base, names: list[str]) -> None:
    """Scaled positions of a .gguf file are a tensor and keys that transformers does not read."""
    scaled = [name for name in names if name.startswith("rope_") or ".rope.scaling." in name]
    if scaled:
        raise ValueError(
            f"{ARGUMENT}: {base.name} scales its positions ({scaled[0]}), which cannot be read from a .gguf file. "
            "Convert the model's safetensors."
        )


def pretrained_without_weights(config: Any, name: str) -> Any:
    """A model of transformers on the meta device: what tensors it has, and of which shapes."""
    from transformers import AutoModelForCausalLM

    with pretrained.loading(ARGUMENT, f"cannot make {name}"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **pretrained.NO_CODE)


def open_tensors(base: Base) -> Tensors:
    """The tensors of a pretrained model, of the names and shapes that its configuration says.

    Raises:
        ValueError: some are missing, left over or of other shapes.
    """
    model = pretrained_without_weights(base.config, base.name)
    if base.gguf is not None:
        tensors: Tensors = GGUFFile(base, model.state_dict())
    else:
        tensors = SafetensorFiles(base.folder, base.name)
    expect_tensors(tensors, model, base.name)
    return tensors


def expect_tensors(tensors: Tensors, model: Any, name: str) -> None:
    """Raise a ValueError unless a model on the meta device has these tensors.

    Of tied ones a copy is dropped, or is the tensor itself where a file holds it alone.
    """
    tied = model.all_tied_weights_keys
    for copy, of in tied.items():
        if copy not in tensors.shapes:
            continue
        if of not in tensors.shapes and isinstance(tensors, SafetensorFiles):
            tensors.rename(copy, of)
        elif of not in tensors.shapes or not torch.equal(tensors.read(copy), tensors.read(of)):
            raise ValueError(
                f"{ARGUMENT}: config.json of {name} says that {copy} is {of} (tie_word_embeddings), and its file "
                "holds another. Mend config.json."
            )
        else:
            del tensors.shapes[copy]
    expected = {key: tuple(x.shape) for key, x in model.state_dict().items() if key not in tied}
    expect_shapes(tensors.shapes, expected, name)


def expect_shapes(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], name: str
) -> None:
    """Raise a ValueError that names tensors that are missing, left over, or of other shapes than config.json says."""
    missing, left = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    for names, what in ((missing, "are missing"), (left, "are left over")):
        if names:
            shown = ", ".join(names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")
            raise ValueError(
                f"{ARGUMENT}: expected the tensors that config.json describes, of {name} {len(names)} {what}: {shown}."
            )
    for key, shape in expected.items():
        if found[key] != shape:
            raise ValueError(
                f"{ARGUMENT}: expected {key} of shape {list(shape)} by the sizes and head counts of config.json, "
                f"{name} has {list(found[key])}. Its config.json belongs to other weights."
            )


# --- writing -----------------------------------------------------------------------------------------------------


def write_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, made: Iterator[tuple[str, Tensor]]
) -> None:
    """Write a safetensors file whose tensors are made one after the other, in the order of ``shapes``.

    The library's own function takes all tensors at once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, x in made:
            assert tuple(x.shape) == shapes[name], (name, x.shape, shapes[name])
            _write(file, x.to(dtype))
        assert file.tell() == 8 + len(text) + end
        sync_file(file)


def _write(file: BinaryIO, x: Tensor) -> None:
    file.write(x.contiguous().view(-1).view(torch.uint8).numpy().data)


def num_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
    """What they take in a file."""
    return sum(map(math.prod, shapes.values())) * dtype.itemsize
