"""States without pickle: optimizers by parameter names, random generators, any tree of tensors in a safetensors file.

Only one process writes (rank 0); see :func:`optimizer_state` and :func:`rng_state` for what the others give it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor


def save_tensors(path: Path, tree: Any) -> None:
    """Write a tree of dictionaries, lists, tuples, tensors, numbers, texts and None as one safetensors file.

    Tensors of any shape, dtype and device; those that share memory are written each for itself. What is no tensor
    is JSON in the file's header. :func:`load_tensors` gives every bit back.
    """
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_pack(tree, "", tensors, set()), separators=(",", ":"))
    safetensors.torch.save_file(tensors, path, {"tree": structure})


def load_tensors(path: Path) -> Any:
    """What :func:`save_tensors` wrote, on the CPU, in memory of its own.

    Raises:
        ValueError: if it is no such file.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            structure = json.loads((file.metadata() or {})["tree"])
            # mapped pages of the file become tensors of our own: an optimizer updates them in place
            return _unpack(structure, lambda name: file.get_tensor(name).clone())
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{str(path)!r}: expected tensors and structure as a checkpoint has them, got {error!s}."
        ) from error


def _pack(value: Any, name: str, tensors: dict[str, Tensor], storages: set[int]) -> Any:
    if isinstance(value, Tensor):
        assert not isinstance(value, DTensor), f"{name}: gather it first (optimizer_state)"
        assert name not in tensors
        tensor = value.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if place in storages else tensor  # safetensors takes no shared memory
        storages.add(place)
        return {"tensor": name}
    if isinstance(value, dict):
        items = [[key, _pack(x, f"{name}/{key}", tensors, storages)] for key, x in value.items()]
        assert all(isinstance(key, str | int) for key in value), f"{name}: keys are names or numbers"
        return {"dict": items}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_pack(x, f"{name}/{number}", tensors, storages) for number, x in enumerate(value)]}
    assert value is None or isinstance(value, bool | int | float | str), f"{name}: {type(value).__name__}"
    return value  # floats are written with all their digits


def _unpack(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensor(content)
    if kind == "dict":
        return {key: _unpack(x, tensor) for key, x in content}
    if kind not in ("list", "tuple"):
        raise ValueError(f"an unknown kind of value, {kind!r}")
    values = [_unpack(x, tensor) for x in content]
    return values if kind == "list" else tuple(values)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state by parameter names, ``{"state": {name: {key: value}}, "param_groups": [...]}``.

    Saving changes nothing: an optimizer that took no step has no state. With a sharded model (FSDP2) every rank calls
    it; rank 0 gets whole tensors on the CPU, the others an empty dictionary. Otherwise each call is its own, and gives
    the optimizer's own tensors, which its next step changes.
    """
    sharded = is_sharded(model)
    if not optimizer.state:  # torch's function would take a step with gradients of zero
        groups = [{**group, "params": _names_of(model, group["params"])} for group in optimizer.param_groups]
        return {} if sharded and torch.distributed.get_rank() else {"state": {}, "param_groups": groups}
    options = StateDictOptions(full_state_dict=sharded, cpu_offload=sharded)
    return get_optimizer_state_dict(model, optimizer, options=options)


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put what :func:`optimizer_state` gave into a fresh optimizer of the same kind; training goes on bit-equal.

    With a sharded model every rank calls it, rank 0 with the state, the others with an empty dictionary.

    Raises:
        ValueError: if the state is of other parameters.
    """
    sharded = is_sharded(model)
    assert not optimizer.state, "a fresh optimizer"
    groups = [_names_of(model, group["params"]) for group in optimizer.param_groups]
    message: list[Any] = [
        [group["params"] for group in state.get("param_groups", ())],
        list(state.get("state", ())),
    ]
    if sharded:
        torch.distributed.broadcast_object_list(message, src=0)
    saved_groups, with_state = message[0], set(message[1])
    if [sorted(group) for group in saved_groups] != [sorted(group) for group in groups]:
        raise ValueError(
            f"optimizer: expected the state of {_described(groups)} as this model's, got one of "
            f"{_described(saved_groups)}. Resume with the model and optimizer that the checkpoint was made with."
        )
    # strict: torch wants a state for every parameter, those that never had a gradient too
    options = StateDictOptions(full_state_dict=sharded, broadcast_from_rank0=sharded, strict=False)
    set_optimizer_state_dict(model, optimizer, state, options=options)
    for group in optimizer.param_groups:
        for name, parameter in zip(_names_of(model, group["params"]), group["params"], strict=True):
            if name not in with_state:  # torch gave it one, of a step that was none
                optimizer.state.pop(parameter, None)


def _described(groups: list[list[str]]) -> str:
    return (
        f"{' + '.join(str(len(group)) for group in groups)} parameters ({groups[0][0]} ... {groups[-1][-1]})"
    )


def is_sharded(model: nn.Module) -> bool:
    """Whether each process holds a part of every parameter (FSDP2)."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _names_of(model: nn.Module, parameters: list[nn.Parameter]) -> list[str]:
    names = {parameter: unwrapped_name(name) for name, parameter in model.named_parameters()}
    return [names[parameter] for parameter in parameters]


def unwrapped_name(name: str) -> str:
    """The name of a module or parameter without what DDP, torch.compile and checkpointing put into it."""
    wrappers = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
    return ".".join(part for part in name.split(".") if part not in wrappers)


def rng_state() -> dict[str, Any]:
    """This process's random generators: Python's, numpy's, torch's and its CUDA device's, for :func:`save_tensors`.

    With several processes, rank 0 gathers and saves one of each rank.
    """
    numpy_state: Any = np.random.get_state(legacy=False)
    inner = {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}
    state = {"python": random.getstate(), "numpy": {**numpy_state, "state": inner}}
    state["torch"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the random generators back as :func:`rng_state` found them; a CUDA device's where there is one."""
    random.setstate(state["python"])
    inner = {**state["numpy"]["state"], "key": np.array(state["numpy"]["state"]["key"], np.uint32)}
    np.random.set_state({**state["numpy"], "state": inner})
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
