"""A checkpoint holds a model, its optimizer and its processes' generators as whole tensors, whoever holds parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from trailmark import pretrained
from trailmark.models import TrailmarkConfig, TrailmarkForCausalLM
from trailmark.processes import gathered, rank
from trailmark.training.parts import base_name, has_adapters, merged
from trailmark.training.tensors import (
    is_sharded,
    load_tensors,
    optimizer_state,
    restore_optimizer,
    rng_state,
    save_tensors,
    set_rng_state,
)

_OPTIMIZER, _RANDOM = "optimizer.safetensors", "random.safetensors"
_ADAPTERS = "adapters.safetensors"  # and the matrices that they are merged into in the model beside it


@dataclass(frozen=True)
class TrainingState:
    """The state of a training: it is gathered from all processes, and the main one writes it."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    random: list[Any]  # of each process

    def write(self, folder: Path, model: TrailmarkForCausalLM) -> None:
        plain, kept = merged(model, self.weights)
        model.save_pretrained(folder, state_dict=plain)
        if kept:
            save_tensors(folder / _ADAPTERS, kept)
        save_tensors(folder / _OPTIMIZER, {"optimizer": self.optimizer, "scheduler": self.scheduler})
        save_tensors(folder / _RANDOM, self.random)

    def bytes(self) -> int:
        """Estimate how many bytes ``write`` writes."""
        values = [*self.weights.values()]
        values += [x for name, x in self.weights.items() if ".base_layer." in name]  # merged and as they were
        for state in self.optimizer.get("state", {}).values():
            values += [x for x in state.values() if isinstance(x, Tensor)]
        return sum(x.numel() * x.element_size() for x in values)


def gather(model: TrailmarkForCausalLM, optimizer: Any, scheduler: Any) -> TrainingState:
    """Gather the state, in all processes; it is whole in the main one."""
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    if rank() and not is_sharded(model):  # every process has all of it: one writes
        return TrainingState({}, {}, {}, gathered(rng_state()))
    weights, moments = whole_weights(model), optimizer_state(model, inner)
    return TrainingState(weights, moments, scheduler.state_dict(), gathered(rng_state()))


def whole_weights(model: TrailmarkForCausalLM) -> dict[str, Tensor]:
    """Gather the weights by name, in all processes; they are whole in the main one."""
    if not is_sharded(model):
        return model.state_dict()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(model, options=options)
    return weights


def plain_weights(model: torch.nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of a model without adapters that computes the same, of the whole ``weights`` of one with some."""
    return merged(model, weights)[0]


def load_weights(folder: str | Path, model: torch.nn.Module) -> None:
    """Load weights into a model, plain or sharded, in all processes."""
    state: dict[str, Any] = {}
    if not is_sharded(model) or rank() == 0:
        for file in sorted(Path(folder).glob("model*.safetensors")):
            state |= safetensors.torch.load_file(file)
        if has_adapters(model):
            kept = load_tensors(Path(folder) / _ADAPTERS)
            names = {name: base_name(name) for name in model.state_dict()}
            state = {
                own: kept[own] if own in kept else state[plain]
                for own, plain in names.items()
                if own in kept or plain in state
            }
        pretrained.expect_finite(iter(state.items()), "output", folder)
    if is_sharded(model):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(model, state, options=options)
        return
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = getattr(model, "_tied_weights_keys", None) or {}
    if wrong := [*unexpected, *(set(missing) - set(tied))]:
        raise ValueError(
            f"expected the weights of the run's own model, {wrong[0]} is missing or one too many"
        )


def load_optimizer(folder: str | Path, model: torch.nn.Module, optimizer: Any) -> None:
    inner = getattr(optimizer, "optimizer", optimizer)
    whole = not is_sharded(model) or rank() == 0
    restore_optimizer(model, inner, load_tensors(Path(folder) / _OPTIMIZER)["optimizer"] if whole else {})


def read_scheduler(folder: str | Path) -> dict[str, Any]:
    state: dict[str, Any] = load_tensors(Path(folder) / _OPTIMIZER)["scheduler"]
    return state


def load_random_state(folder: str | Path) -> None:
    """Set this process's generators, where the checkpoint's run had a process of its number."""
    saved = load_tensors(Path(folder) / _RANDOM)
    if rank() < len(saved):
        set_rng_state(saved[rank()])


def expect_model(folder: str) -> None:
    """Raise a ValueError where ``init_from`` names no model; nothing is loaded."""
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(
            f"init_from: expected a folder with a trained model, {folder!r} has no config.json. Name the output of a "
            "finished training, or one of its checkpoints."
        )


def initial_model(
    cls: type[TrailmarkForCausalLM], config: TrailmarkConfig, folder: str
) -> TrailmarkForCausalLM:
    """Make a model of ``config`` with the weights of another run, and nothing else of that run.

    Raises:
        ValueError: no model there, or one whose weights do not fit.
    """
    expect_model(folder)
    with pretrained.loading("init_from", f"cannot load the weights in {folder!r}"):
        model, found = cls.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    for kind in ("missing", "unexpected", "mismatched"):  # transformers would draw these at random
        if names := found[f"{kind}_keys"]:
            raise ValueError(
                f"init_from: expected the weights of the model that the configuration describes, {folder!r} has "
                f"{len(names)} {kind} ones: {min(map(str, names))} ... Set the model's fields as they were there."
            )
    return model
