"""Muon for matrices and AdamW for the rest, as one optimizer that the Trainer can drive, save and load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from trailmark.training.parts import is_adapter

# Newton-Schulz polynomial of Muon (Jordan et al., 2024): singular values go to about 1 in five steps.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_GATHERED = 1 << 26  # elements of sharded matrices that are whole at a time, unless one alone has more


Rated = tuple[float, list[nn.Parameter]]
"""Parameters whose learning rate is so many times that of the rest."""


def by_rate(named: Iterable[tuple[str, nn.Parameter]], factor_of: Callable[[str], float]) -> list[Rated]:
    """The parameters that are trained, those of each rate together.

    Args:
        named: parameters by their names. factor_of: what the learning rate of that name is multiplied by.
    """
    rated: dict[float, list[nn.Parameter]] = {1.0: []}
    for name, parameter in named:
        if parameter.requires_grad:
            rated.setdefault(factor_of(name), []).append(parameter)
    return [(factor, parameters) for factor, parameters in rated.items() if parameters]


def vocabulary_of(model: nn.Module) -> set[nn.Parameter]:
    """The embedding and the output projection."""
    return {
        parameter
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) or name.endswith("lm_head")
        for parameter in module.parameters()
    }


def parameter_groups(
    rated: Iterable[Rated],
    rate: float,
    weight_decay: float,
    decay_vectors: bool,
    spared: Container[nn.Parameter] = (),
) -> list[dict[str, Any]]:
    """For AdamW: matrices, which decay, and vectors (norms, landmarks), which do if ``decay_vectors``.

    Those that are ``spared`` decay never.
    """
    groups = []
    for factor, every in rated:
        decaying = [p for p in every if (p.dim() > 1 or decay_vectors) and p not in spared]
        others = [p for p in every if not (p.dim() > 1 or decay_vectors) or p in spared]
        if not weight_decay:
            decaying, others = every, []
        groups.append({"params": decaying, "weight_decay": weight_decay, "lr": factor * rate})
        groups.append({"params": others, "weight_decay": 0.0, "lr": factor * rate})
    return [group for group in groups if group["params"]] or groups[:1]


Portion = list[tuple[nn.Parameter, tuple[int, ...]]]
"""Matrices, with the rows of their blocks."""


class MuonAdamW(torch.optim.Optimizer):
    """Muon on the matrices inside layers, ``torch.optim.AdamW`` on embeddings, output and vectors.

    ``torch.optim.Muon`` walks the parameters one by one and takes a fused projection for one matrix; here
    the matrices of a fused projection (``module.block_rows``) are orthogonalised each on its own, and all of
    one shape at once, which a model of small matrices needs. Sharded matrices (FSDP2) are gathered in every
    process, a few of one shape at a time (:meth:`portions`).

    Args:
        model: embeddings and the output projection go to AdamW, like everything that is no matrix.
        matrix_learning_rate: of Muon; an update has singular values of about this times
            ``max(1, rows / columns) ** 0.5``.
        learning_rate: of AdamW.
        factor_of: what both are multiplied by, for a parameter of that name.
        decay_vectors: as in :func:`parameter_groups`. decay_embeddings: whether the vocabulary's matrices decay.
    """

    def __init__(
        self,
        model: nn.Module,
        matrix_learning_rate: float = 0.0035,
        learning_rate: float = 3e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        decay_vectors: bool = False,
        eps: float = 1e-8,
        decay_embeddings: bool = True,
        factor_of: Callable[[str], float] = lambda name: 1.0,
    ) -> None:
        vocabulary = vocabulary_of(model)
        blocks: dict[int, tuple[int, ...]] = {}
        for module in model.modules():
            if hasattr(module, "block_rows") and isinstance(module, nn.Linear):
                blocks[id(module.weight)] = getattr(module, "block_rows")  # noqa: B009
        rated: list[Rated] = []
        muon: list[dict[str, Any]] = []
        self._blocks: list[list[tuple[int, ...]]] = []  # of each group of Muon's
        # an adapter's factors are no matrix that an input is multiplied by
        apart = vocabulary | {p for name, p in model.named_parameters() if is_adapter(name)}
        for factor, parameters in by_rate(model.named_parameters(), factor_of):
            matrices: list[nn.Parameter] = []
            rest: list[nn.Parameter] = []
            for parameter in parameters:
                (matrices if parameter.dim() == 2 and parameter not in apart else rest).append(parameter)
            rated.append((factor, rest))
            if not matrices:
                continue
            self._blocks.append([blocks.get(id(p), (p.shape[0],)) for p in matrices])
            muon.append(
                {
                    "params": matrices,
                    "lr": factor * matrix_learning_rate,
                    "momentum": momentum,
                    "weight_decay": weight_decay,
                }
            )
        spared = () if decay_embeddings else vocabulary
        groups = parameter_groups(rated, learning_rate, weight_decay, decay_vectors, spared)
        self._adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps)
        super().__init__([*self._adamw.param_groups, *muon], {})
        self._share()

    @property
    def _muon_groups(self) -> list[dict[str, Any]]:
        return self.param_groups[len(self.param_groups) - len(self._blocks) :]

    def _share(self) -> None:
        # AdamW works on this optimizer's groups and state: schedulers, saving and loading see one optimizer
        self._adamw.param_groups = self.param_groups[: len(self.param_groups) - len(self._blocks)]
        self._adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._adamw.step()
        for group, blocks in zip(self._muon_groups, self._blocks, strict=True):
            sharded = any(isinstance(p, DTensor) for p in group["params"])
            for portion in _portions(group["params"], blocks, sharded):
                self._muon(portion, group)
        return loss

    def portions(self, sharded: bool) -> list[Portion]:
        """Matrices with a gradient, with the rows of their blocks, as they are worked on together.

        What a portion needs goes before the next. Whole matrices are one portion of each group. The same in all
        processes.
        """
        pairs = zip(self._muon_groups, self._blocks, strict=True)
        return [portion for group, blocks in pairs for portion in _portions(group["params"], blocks, sharded)]

    def _muon(self, portion: Portion, group: dict[str, Any]) -> None:
        stacks: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        sharded: list[tuple[DTensor, Tensor]] = []  # and what is to be added to them
        for parameter, rows in portion:
            assert parameter.grad is not None
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
            update = parameter.grad.lerp(state["momentum"], group["momentum"])  # Nesterov
            if group["weight_decay"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
            changed: Tensor = parameter
            if isinstance(update, DTensor):  # a matrix is orthogonalized whole, by every process
                assert isinstance(parameter, DTensor)
                update = update.full_tensor()
                changed = torch.zeros_like(update)
                sharded.append((parameter, changed))
            for target, part in zip(changed.split(rows), update.split(rows), strict=True):
                wide = part.shape[0] < part.shape[1]
                tall = part.T if wide else part
                stacks[tuple(tall.shape)].append((target.T if wide else target, tall))
        for pairs in stacks.values():
            directions = orthogonalize(torch.stack([part for _, part in pairs]))
            for (target, part), direction in zip(pairs, directions, strict=True):
                was_wide = target.stride(0) < target.stride(1)
                growth = 1.0 if was_wide else max(1.0, part.shape[0] / part.shape[1]) ** 0.5
                target.add_(direction, alpha=-group["lr"] * growth)
        for shard, change in sharded:
            everywhere = [Replicate()] * shard.device_mesh.ndim
            whole = DTensor.from_local(change, shard.device_mesh, everywhere, run_check=False)
            shard.add_(whole.redistribute(placements=shard.placements))  # this process's rows of it


def _portions(parameters: list[nn.Parameter], blocks: list[tuple[int, ...]], sharded: bool) -> list[Portion]:
    found = [
        (parameter, rows)
        for parameter, rows in zip(parameters, blocks, strict=True)
        if parameter.grad is not None
    ]
    if not sharded:
        return [found]
    alike: dict[Any, Portion] = defaultdict(list)
    for parameter, rows in found:
        alike[parameter.shape, rows].append((parameter, rows))
    portions = []
    for (shape, _), pairs in alike.items():
        most = max(1, _GATHERED // shape.numel())
        portions += [pairs[first : first + most] for first in range(0, len(pairs), most)]
    return portions


def orthogonalize(x: Tensor) -> Tensor:
    """The nearest matrices with orthonormal columns, roughly, to x [n, rows, columns], rows >= columns."""
    a, b, c = _COEFFICIENTS
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        gram = x.mT @ x
        x = a * x + x @ (b * gram + c * gram @ gram)
    return x
