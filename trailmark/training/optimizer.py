"""Muon for matrices and AdamW for the rest, as one optimizer that the Trainer can drive, save and load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Newton-Schulz polynomial of Muon (Jordan et al., 2024): singular values go to about 1 in five steps.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5


class MuonAdamW(torch.optim.Optimizer):
    """Muon on the matrices inside layers, ``torch.optim.AdamW`` on embeddings, output and vectors.

    ``torch.optim.Muon`` walks the parameters one by one and takes a fused projection for one matrix; here
    the matrices of a fused projection (``module.block_rows``) are orthogonalised each on its own, and all of
    one shape at once, which a model of small matrices needs.

    Args:
        model: embeddings and the output projection go to AdamW, like everything that is no matrix.
        matrix_learning_rate: of Muon; an update has singular values of about this times
            ``max(1, rows / columns) ** 0.5``.
        learning_rate: of AdamW.
    """

    def __init__(
        self,
        model: nn.Module,
        matrix_learning_rate: float = 0.0035,
        learning_rate: float = 3e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        momentum: float = 0.95,
        weight_decay: float = 0.0,
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
        common = {"weight_decay": weight_decay}
        self._adamw = torch.optim.AdamW(rest, lr=learning_rate, betas=betas, weight_decay=weight_decay)
        muon = {"params": matrices, "lr": matrix_learning_rate, "momentum": momentum} | common
        super().__init__([*self._adamw.param_groups, muon], {})
        self._share()

    def _share(self) -> None:
        # AdamW works on this optimizer's group and state: schedulers, saving and loading see one optimizer
        self._adamw.param_groups = self.param_groups[:1]
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
        self._muon(self.param_groups[1])
        return loss

    def _muon(self, group: dict[str, Any]) -> None:
        stacks: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for parameter, rows in zip(group["params"], self._blocks, strict=True):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
            update = parameter.grad.lerp(state["momentum"], group["momentum"])  # Nesterov
            if group["weight_decay"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
            for target, part in zip(parameter.split(rows), update.split(rows), strict=True):
                wide = part.shape[0] < part.shape[1]
                tall = part.T if wide else part
                stacks[tuple(tall.shape)].append((target.T if wide else target, tall))
        for pairs in stacks.values():
            directions = orthogonalize(torch.stack([part for _, part in pairs]))
            for (target, part), direction in zip(pairs, directions, strict=True):
                was_wide = target.stride(0) < target.stride(1)
                growth = 1.0 if was_wide else max(1.0, part.shape[0] / part.shape[1]) ** 0.5
                target.add_(direction, alpha=-group["lr"] * growth)


def orthogonalize(x: Tensor) -> Tensor:
    """The nearest matrices with orthonormal columns, roughly, to x [n, rows, columns], rows >= columns."""
    a, b, c = _COEFFICIENTS
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        gram = x.mT @ x
        x = a * x + x @ (b * gram + c * gram @ gram)
    return x
