"""Muon against its definition by singular values, and AdamW against torch's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.models.tiny import drt, window_model
from trailmark.training import optimizer as module
from trailmark.training.optimizer import MuonAdamW, orthogonalize

ROUNDING = 1e-12  # float64, values of about 1, a few hundred operations
SHAPES = [(8, 8), (12, 5), (5, 12), (1, 6), (6, 1)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def polynomial(x: Tensor) -> Tensor:
    """What five steps of Newton-Schulz do to each singular value; the vectors stay."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / (s.square().sum().sqrt() + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


class Matrices(nn.Module):
    """Linear layers that bear no names of the library's."""

    def __init__(self, shapes: Sequence[tuple[int, int]], seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(columns, rows, bias=False) for rows, columns in shapes)
        for number, layer in enumerate(self.layers):
            weight = random(*shapes[number], seed=seed + number)
            layer.weight = nn.Parameter(weight)
        self.vector = nn.Parameter(random(3))  # AdamW wants something, too

    @property
    def weights(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.dim() == 2]


def give_gradients(parameters: Sequence[Tensor], step: int) -> None:
    for number, parameter in enumerate(parameters):
        parameter.grad = random(*parameter.shape, seed=1000 * (step + 1) + number).to(parameter.dtype)


@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (6, 1)])
def test_orthogonalize_changes_singular_values_alone(shape: tuple[int, int]) -> None:
    x = torch.stack([random(*shape, seed=seed) for seed in range(3)])
    found = orthogonalize(x)
    for ours, one in zip(found, x, strict=True):
        assert (ours - polynomial(one)).abs().max() < ROUNDING


def test_an_orthogonalized_matrix_has_singular_values_of_about_one() -> None:
    values = torch.linalg.svdvals(orthogonalize(random(20, 64, 16)))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_nothing_to_orthogonalize_gives_nothing() -> None:
    assert orthogonalize(torch.zeros(2, 5, 3)).abs().max() == 0


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_muon_is_its_definition(weight_decay: float) -> None:
    rate, momentum = 0.02, 0.9
    model = Matrices(SHAPES)
    expected = [w.detach().clone() for w in model.weights]
    averages = [torch.zeros_like(w) for w in expected]
    optimizer = MuonAdamW(model, matrix_learning_rate=rate, momentum=momentum, weight_decay=weight_decay)
    for step in range(4):
        give_gradients(model.weights, step)
        for weight, average, parameter in zip(expected, averages, model.weights, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            average.copy_(momentum * average + (1 - momentum) * gradient)
            update = polynomial(momentum * average + (1 - momentum) * gradient)  # Nesterov
            rows, columns = weight.shape
            weight *= 1 - rate * weight_decay
            weight -= rate * max(1, rows / columns) ** 0.5 * update
        optimizer.step()
        for ours, weight in zip(model.weights, expected, strict=True):
            assert (ours - weight).abs().max() < ROUNDING


def test_a_fused_projection_is_its_matrices_one_by_one() -> None:
    parts = [(8, 12), (4, 12), (4, 12), (20, 12)]
    separate, fused = Matrices(parts), Matrices([(36, 12)])
    rows = [shape[0] for shape in parts]
    fused.layers[0].block_rows = tuple(rows)
    whole = fused.weights[0]
    with torch.no_grad():
        whole.copy_(torch.cat(separate.weights))
    one, other = MuonAdamW(separate), MuonAdamW(fused)
    for step in range(3):
        give_gradients(separate.weights, step)
        gradients = [p.grad for p in separate.weights if p.grad is not None]
        whole.grad = torch.cat(gradients)
        one.step()
        other.step()
        assert torch.equal(whole, torch.cat(separate.weights))
    taken_for_one = Matrices([(36, 12)])
    with torch.no_grad():
        taken_for_one.weights[0].copy_(torch.cat([random(*s, seed=n) for n, s in enumerate(parts)]))
    third = MuonAdamW(taken_for_one)
    for step in range(3):
        give_gradients(separate.weights, step)
        taken_for_one.weights[0].grad = torch.cat([p.grad for p in separate.weights if p.grad is not None])
        third.step()
    assert not torch.allclose(whole, taken_for_one.weights[0], atol=1e-3)


def test_models_name_their_fused_projections() -> None:
    model = drt(2)
    optimizer = MuonAdamW(model)
    blocks = dict(zip(map(id, optimizer.param_groups[1]["params"]), optimizer._blocks[0], strict=True))
    seen = {name: blocks[id(p)] for name, p in model.named_parameters() if id(p) in blocks}
    fused = {name: rows for name, rows in seen.items() if len(rows) > 1}
    assert any(name.endswith("qkv_proj.weight") and rows == (16, 8, 8) for name, rows in fused.items())
    assert any(name.endswith("gate_up_proj.weight") and rows == (24, 24) for name, rows in fused.items())
    assert fused["encoder.kv_proj.weight"] == (8, 8)
    assert all(sum(rows) == model.get_parameter(name).shape[0] for name, rows in seen.items())


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_has_one_optimizer(tied: bool) -> None:
    model = drt(2, tie_word_embeddings=tied)
    names = {id(p): name for name, p in model.named_parameters()}
    adamw, muon = ([names[id(p)] for p in group["params"]] for group in MuonAdamW(model).param_groups)
    assert sorted(adamw + muon) == sorted(names.values())
    assert "embed_tokens.weight" in adamw
    assert tied or "lm_head.weight" in adamw
    assert "landmark" in adamw
    assert all(model.get_parameter(name).dim() == 2 for name in muon)
    assert all(
        "norm" in name or name in ("embed_tokens.weight", "lm_head.weight", "landmark") for name in adamw
    )


def test_the_rest_is_torchs_adamw() -> None:
    model, twin = window_model(), window_model()
    optimizer = MuonAdamW(model, learning_rate=0.01, betas=(0.8, 0.9), weight_decay=0.1, decay_vectors=True)
    names = {id(p): name for name, p in model.named_parameters()}
    rest = [names[id(p)] for p in optimizer.param_groups[0]["params"]]
    assert len(rest) > 5
    exact = torch.optim.AdamW(
        [twin.get_parameter(n) for n in rest], lr=0.01, betas=(0.8, 0.9), weight_decay=0.1
    )
    for step in range(4):
        give_gradients(list(model.parameters()), step)
        give_gradients(list(twin.parameters()), step)
        for each in (optimizer, exact):
            each.param_groups[0]["lr"] *= 0.7  # as a scheduler does
            each.step()
        for name in rest:
            assert torch.equal(model.get_parameter(name), twin.get_parameter(name)), name


def test_a_parameter_without_gradient_is_left_alone() -> None:
    model = drt(2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    give_gradients(list(model.parameters()), 0)
    still = {"landmark", "lower_layers.0.mlp.down_proj.weight", "encoder.kv_proj.weight"}
    for name in still:
        model.get_parameter(name).grad = None
    MuonAdamW(model, weight_decay=0.1).step()
    unchanged = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert unchanged == still


def test_a_closure_is_evaluated_with_gradients() -> None:
    model = Matrices([(4, 3)])
    optimizer = MuonAdamW(model)

    def closure() -> float:
        loss = model.weights[0].square().sum()
        loss.backward()
        return float(loss.detach())

    before = model.weights[0].detach().clone()
    assert optimizer.step(closure) == float(before.square().sum())
    assert not torch.equal(before, model.weights[0])


def test_sharded_matrices_are_gathered_a_few_of_one_shape_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix with a gradient once; no portion of more elements than allowed, but for one that alone has more."""
    monkeypatch.setattr(module, "_GATHERED", 150)
    shapes = [(8, 8), (12, 5), (5, 12), (20, 10), *[(8, 8)] * 4, (12, 5), (12, 5)]
    model = Matrices(shapes)
    model.layers[4].block_rows = (4, 4)  # type: ignore[assignment]
    optimizer = MuonAdamW(model)
    give_gradients(model.weights, 0)
    model.weights[5].grad = None
    portions = optimizer.portions(sharded=True)
    found = [parameter for portion in portions for parameter, _ in portion]
    assert sorted(map(id, found)) == sorted(id(p) for p in model.weights if p.grad is not None)
    for portion in portions:
        assert len({(p.shape, rows) for p, rows in portion}) == 1
        assert len(portion) == 1 or sum(p.numel() for p, _ in portion) <= 150
    assert [len(portion) for portion in portions] == [2, 1, 2, 1, 1, 1, 1]
    assert [len(portion) for portion in optimizer.portions(sharded=False)] == [9]


def step_on_shards(rank: int, folder: str, weight_decay: float) -> None:
    """Every process has its rows of each parameter and of each gradient."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    model, plain = Matrices([*SHAPES, (36, 12)]), Matrices([*SHAPES, (36, 12)])
    for each in (model, plain):
        each.layers[-1].block_rows = (20, 10, 6)  # type: ignore[assignment]
    fully_shard(model)
    one, other = MuonAdamW(model, weight_decay=weight_decay), MuonAdamW(plain, weight_decay=weight_decay)
    before = [p.detach().clone() for p in plain.parameters()]
    for step in range(3):
        give_gradients(list(plain.parameters()), step)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(ours, DTensor)
            assert theirs.grad is not None
            ours.grad = distribute_tensor(theirs.grad, ours.device_mesh, ours.placements)
        one.step()
        other.step()
    for ours, theirs, start in zip(model.parameters(), plain.parameters(), before, strict=True):
        assert isinstance(ours, DTensor)
        assert (ours.full_tensor() - theirs).abs().max() < ROUNDING
        assert (theirs - start).abs().max() > 1e-3
    dist.destroy_process_group()


@pytest.mark.parametrize(("weight_decay", "gathered"), [(0.0, 1 << 26), (0.1, 100)])
def test_sharded_matrices_are_those_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight_decay: float, gathered: int
) -> None:
    """``gathered``: of these, one matrix or two at a time."""
    monkeypatch.setattr(module, "_GATHERED", gathered)
    multiprocessing.start_processes(
        step_on_shards, (str(tmp_path), weight_decay), 2, start_method="fork"
    )  # torch is imported already
