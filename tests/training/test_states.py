"""States of optimizers and random generators come back from a file bit-equal, whole or from two processes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.models.tiny import drt
from tests.training.test_optimizer import give_gradients
from trailmark.training.optimizer import MuonAdamW
from trailmark.training.tensors import (
    load_tensors,
    optimizer_state,
    restore_optimizer,
    rng_state,
    save_tensors,
    set_rng_state,
)


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


def test_a_state_is_not_copied() -> None:
    model = drt(2).to("meta")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.empty_like(parameter)}
    found = optimizer_state(model, optimizer)["state"]
    for name, parameter in model.named_parameters():
        assert found[name]["exp_avg"] is optimizer.state[parameter]["exp_avg"]


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
@pytest.mark.sampled(4)
def test_two_processes_with_shards_save_and_go_on_bit_equal(
    tmp_path: Path, make: Callable[[nn.Module], torch.optim.Optimizer], without: str
) -> None:
    multiprocessing.start_processes(
        save_and_resume, (str(tmp_path), make, without), 2, start_method="fork"
    )  # torch is imported already
