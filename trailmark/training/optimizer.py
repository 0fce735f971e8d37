"""Muon for matrices and AdamW for the rest, as one optimizer that the Trainer can drive and save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class MuonAdamW(torch.optim.Optimizer):
    """``torch.optim.Muon`` on the matrices inside layers, ``torch.optim.AdamW`` on embeddings and vectors.

    Args:
        model: embeddings and the output projection go to AdamW, like everything that is no matrix.
        matrix_learning_rate: of Muon. learning_rate: of AdamW.
    """

    def __init__(
        self,
        model: nn.Module,
        matrix_learning_rate: float = 0.02,
        learning_rate: float = 3e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        vocabulary = {
            id(p)
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding) or name.endswith("lm_head")
            for p in module.parameters()
        }
        matrices, rest = [], []
        for parameter in model.parameters():
            is_matrix = parameter.dim() == 2 and id(parameter) not in vocabulary
            (matrices if is_matrix else rest).append(parameter)
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(
                torch.optim.Muon(
                    matrices, lr=matrix_learning_rate, weight_decay=weight_decay, momentum=momentum
                )
            )
        if rest:
            self._parts.append(
                torch.optim.AdamW(rest, lr=learning_rate, betas=betas, weight_decay=weight_decay, fused=True)
            )
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        # The parts work on this optimizer's groups and state: schedulers, saving and loading see one optimizer.
        start = 0
        for part in self._parts:
            count = len(part.param_groups)
            part.param_groups = self.param_groups[start : start + count]
            part.state = self.state
            start += count

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss
