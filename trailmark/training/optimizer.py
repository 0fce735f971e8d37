"""Muon for matrices and AdamW for the rest, as one optimizer that the Trainer can drive, save and load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

# Newton-Schulz polynomial of Muon (Jordan et al., 2024): singular values go to about 1 in five steps.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_GATHERED = 1 << 26  # elements of sharded matrices that are whole at a time, unless one alone has more


def parameter_groups(
    parameters: Iterable[nn.Parameter], weight_decay: float, decay_vectors: bool
) -> list[dict[str, Any]]:
    """For AdamW: matrices, which decay, and vectors (norms, landmarks), which do if ``decay_vectors``."""
    every = list(parameters)
    if decay_vectors or not weight_decay:
        return [{"params": every, "weight_decay": weight_decay}]
    matrices, vectors = [p for p in every if p.dim() > 1], [p for p in every if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


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
        decay_vectors: as in :func:`parameter_groups`.
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
    ) -> None:
        vocabulary: set[int] = set()
        blocks: dict[int, tuple[int, ...]] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding) or name.endswith("lm_head"):
                vocabulary.update(id(p) for p in module.parameters())
            if hasattr(module, "block_rows") and isinstance(module, nn.Linear):
                blocks[id(module.weight)] = getattr(module, "block_rows")  # noqa: B009
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for parameter in model.parameters():
            is_matrix = parameter.dim() == 2 and id(parameter) not in vocabulary
            (matrices if is_matrix else rest).append(parameter)
        self._blocks = [blocks.get(id(p), (p.shape[0],)) for p in matrices]
        groups = parameter_groups(rest, weight_decay, decay_vectors)
        self._adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps)
        muon = {
            "params": matrices,
            "lr": matrix_learning_rate,
            "momentum": momentum,
            "weight_decay": weight_decay,
        }
        super().__init__([*self._adamw.param_groups, muon], {})
        self._share()

    def _share(self) -> None:
        # AdamW works on this optimizer's groups and state: schedulers, saving and loading see one optimizer
        self._adamw.param_groups = self.param_groups[:-1]
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
        for portion in self.portions(any(isinstance(p, DTensor) for p in self.param_groups[-1]["params"])):
            self._muon(portion, self.param_groups[-1])
        return loss

    def portions(self, sharded: bool) -> list[list[tuple[nn.Parameter, tuple[int, ...]]]]:
        """Matrices with a gradient, with the rows of their blocks, as they are worked on together.

        What a portion needs goes before the next. Whole matrices are one portion. The same in all processes.
        """
        found = [
            (parameter, rows)
            for parameter, rows in zip(self.param_groups[-1]["params"], self._blocks, strict=True)
            if parameter.grad is not None
        ]
        if not sharded:
            return [found]
        alike: dict[Any, list[tuple[nn.Parameter, tuple[int, ...]]]] = defaultdict(list)
        for parameter, rows in found:
            alike[parameter.shape, rows].append((parameter, rows))
        portions = []
        for (shape, _), pairs in alike.items():
            most = max(1, _GATHERED // shape.numel())
            portions += [pairs[first : first + most] for first in range(0, len(pairs), most)]
        return portions

    def _muon(self, portion: list[tuple[nn.Parameter, tuple[int, ...]]], group: dict[str, Any]) -> None:
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


def orthogonalize(x: Tensor) -> Tensor:
    """The nearest matrices with orthonormal columns, roughly, to x [n, rows, columns], rows >= columns."""
    a, b, c = _COEFFICIENTS
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        gram = x.mT @ x
        x = a * x + x @ (b * gram + c * gram @ gram)
    return x
