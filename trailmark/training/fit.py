"""Before the first step: the memory's keys and values, fitted to those of a teacher's layers by least squares.

A memory keeps what a projection makes of the lower layers' states; a teacher with full attention has keys and values
of its own in each layer. The best linear projection from one to the other is found at once, where steps of a gradient
would need a great many.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from trailmark.models.watching import attention_layers
from trailmark.training.distil import Teacher
from trailmark.training.loss import LAYOUT
from trailmark.training.processes import all_reduced

# of the mean of the states' squares: states of few texts do not span the width
_RIDGE = 1e-3


class MemoryFit:
    """Sums over training texts that the projection is solved from; each process reads its own.

    Args:
        model: answers ``fitted_memory``, in evaluation. teacher: ours, with full attention and the same heads.

    Raises:
        ValueError: the model reads already.
    """

    def __init__(self, model: Any, teacher: Teacher) -> None:
        self.model, self.teacher = model, teacher.model.to(model.device)
        self.memory = model.fitted_memory()
        if any(bool(layer.weight.any()) for layer in self.memory.closing):
            raise ValueError(
                "distil.fit_steps: expected 0 for a model whose layers read already, which a fit would set anew, got "
                "more. Leave it out, or begin with what trailmark convert made."
            )
        low = teacher.dtype.itemsize < 4
        self.autocast = torch.autocast(model.device.type, dtype=teacher.dtype if low else None, enabled=low)
        layers = attention_layers(self.teacher)
        self.layers = [layers[number] for number in self.memory.layers]
        E, F = self.memory.projection.in_features, self.memory.projection.out_features
        # x^T x and x^T y of states x [n, E] and wanted keys and values y [n, F]; of y the squares; n
        self.states, self.both, self.squares, self.rows = (
            torch.zeros(size, dtype=torch.float64, device=model.device) for size in ((E, E), (E, F), (F,), ())
        )

    @torch.no_grad()
    def add(self, batch: dict[str, Tensor]) -> None:
        """Read one batch with both."""
        inputs = {key: x.to(self.model.device) for key, x in batch.items()}
        wanted: list[Tensor] = []  # of each layer keys and values side by side, [B, T, 2 * J * D]
        known: dict[str, Any] = {}

        def see_teacher(layer: Any, arguments: tuple[Any, ...]) -> None:
            _, k, v = layer.heads(arguments[0])
            wanted.append(torch.cat([k.flatten(2), v.flatten(2)], dim=2))

        def see_states(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            known["states"] = arguments[0]  # [B, C, S, E]

        def see_chunks(_: nn.Module, arguments: tuple[Any, ...], entries: Any) -> None:
            known["grid"], known["lengths"] = arguments[1], entries.lengths

        # nobody asks for logits
        call = {"use_cache": False, "logits_at": inputs["input_ids"].new_zeros(len(inputs["input_ids"]), 1)}
        with ExitStack() as hooks:
            for layer in self.layers:
                hooks.enter_context(layer.register_forward_pre_hook(see_teacher))
            documents = {key: inputs[key] for key in ("document_ids",) if key in inputs}
            self.teacher(input_ids=inputs["input_ids"], **documents, **call)
        with ExitStack() as hooks, self.autocast:
            hooks.enter_context(self.memory.projection.register_forward_pre_hook(see_states))
            hooks.enter_context(self.memory.encoder.register_forward_hook(see_chunks))
            layout = {key: inputs[key] for key in LAYOUT if key in inputs}
            self.model(input_ids=inputs["input_ids"], **layout, **call)
        self._take(known["states"], wanted, known["grid"], known["lengths"])

    def _take(self, states: Tensor, wanted: list[Tensor], grid: Any, lengths: Tensor) -> None:
        """States [B, C, S, E] of the chunks' tokens, and what each layer has of the text's tokens."""
        B, C, S, _ = states.shape
        there = torch.arange(S, device=states.device) < lengths[..., None]
        x = _wide(states)[there]  # [n, E]
        self.states += (x.mT @ x).double()
        self.rows += len(x)
        keys_and_values = self.both.unflatten(
            1, (2, len(wanted), -1)
        )  # in the projection all keys come first
        squares = self.squares.view(keys_and_values.shape[1:])
        for number, of_tokens in enumerate(wanted):
            rows = grid.encoder_rows(grid.insert_landmarks(_wide(of_tokens), None)).view(B, C, S + 1, -1)
            y = rows[:, :, :-1][there]
            keys_and_values[:, :, number] += (x.mT @ y).double().unflatten(1, (2, -1))
            squares[:, number] += y.square().sum(0).double().view(2, -1)

    @torch.no_grad()
    def solve(self) -> tuple[float, int]:
        """Set the projection, and let each layer read.

        Returns:
            The share of the keys' and values' squares that is found in the states, and of how many tokens.

        Raises:
            ValueError: the texts have no whole chunk.
        """
        for sums in (self.states, self.both, self.squares, self.rows):
            all_reduced(sums)
        if not self.rows:
            raise ValueError(
                "distil.fit_steps: expected texts with whole chunks to fit the memory to, got none. Set "
                "training.context_length higher."
            )
        ridge = _RIDGE * self.states.diagonal().mean() * torch.eye(len(self.states)).to(self.states)
        found = torch.linalg.solve(self.states + ridge, self.both)  # [E, F]
        self.memory.projection.weight.copy_(found.mT)
        self.model.read_as_attended()
        left = self.squares - 2 * (found * self.both).sum(0) + (found * (self.states @ found)).sum(0)
        return float(1 - left.sum() / self.squares.sum()), int(self.rows)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
