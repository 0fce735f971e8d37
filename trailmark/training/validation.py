"""What is measured beside the training: the loss on held-out text, and what the caller of a run asks for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from trailmark.models import TrailmarkForCausalLM
from trailmark.training import states, tensors
from trailmark.training.loss import total_weight, weighted_loss
from trailmark.training.processes import added_up, by_main, rank, world_size
from trailmark.training.tasks import Task

Evaluate = Callable[[TrailmarkForCausalLM], dict[str, float]]


def validation_loss(
    wrapped: Any, model: TrailmarkForCausalLM, task: Task, windows: int, rows: int
) -> dict[str, float]:
    """Loss in nats and perplexity on the first ``windows`` windows of ``task``.

    The processes share the windows out, ``rows`` at a time; each takes as many, as FSDP2 needs.

    Args:
        wrapped: ``model``, as the Trainer has it.
    """
    device = next(model.parameters()).device
    total = torch.zeros(2, dtype=torch.float64, device=device)
    together = rows * world_size()
    for first in range(0, windows, together):
        start = first + rank() * rows
        batch = {key: x.to(device) for key, x in task.batch(0, start, rows).items()}
        counted = (torch.arange(start, start + rows) < windows).to(device)
        batch["loss_weights"] = batch["loss_weights"] * counted[:, None]
        one = torch.ones((), dtype=torch.float64, device=device)
        loss = weighted_loss(wrapped, batch, one, text_alone=True).loss
        total += torch.stack([loss.double(), total_weight(model, [batch])])
    loss_sum, weight = added_up(total)
    mean = loss_sum / max(weight, 1e-9)
    return {"loss": mean, "perplexity": math.exp(min(mean, 700.0))}


def measured_whole(model: TrailmarkForCausalLM, evaluate: Evaluate) -> dict[str, float]:
    """By the main process, of a whole model: what reads a text piece by piece knows nothing of shards."""
    if not tensors.is_sharded(model):
        return by_main(lambda: evaluate(model))
    weights = states.whole_weights(model)  # in all processes, whole in the main one
    device = next(model.parameters()).device

    def measure() -> dict[str, float]:
        with torch.random.fork_rng(devices=[]):  # a new model draws weights, which go
            whole = type(model)(model.config)
        whole.embedder = model.embedder
        whole.load_state_dict(weights, strict=False, assign=True)  # tied ones are there once
        whole.tie_weights()
        return evaluate(whole.to(device).eval())

    return by_main(measure)
