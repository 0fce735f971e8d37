"""What training costs by context length: time, throughput and memory of forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trailmark.evaluation.cost_inference import Progress, now, random_tokens, spread
from trailmark.evaluation.cost_peak import peak_kind, with_peak
from trailmark.evaluation.subject import Subject


class Step:
    """Forward and backward of the mean loss over random tokens, in the model's own precision; no weight changes.

    Args:
        length: tokens of a text; rows: texts at once.
    """

    def __init__(self, name: str, subject: Subject, length: int, rows: int) -> None:
        self.name, self.subject, self.model = name, subject, subject.model
        self.length, self.rows = length, rows
        self.device: torch.device = self.model.device
        self.problem: str | None = None
        self.times: list[float] = []  # seconds of each round
        self.peak: int | None = None

    def run(self, seed: int) -> float:
        """Seconds of one step; the gradients are let go of."""
        ids = random_tokens(self.subject, self.length, seed, self.rows).to(self.device)
        more: dict[str, Any] = {}
        if self.subject.ours:
            more["noise_seed"] = torch.arange(self.rows, device=self.device)
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            self.model.train()
            with torch.random.fork_rng(devices), torch.enable_grad():
                torch.manual_seed(seed)
                began = now(self.device)
                self.model(ids, labels=ids, **more).loss.backward()
                return now(self.device) - began
        finally:
            self.model.eval()
            self.model.zero_grad(set_to_none=True)

    def measure_peak(self, seed: int) -> None:
        """What a step takes at most beside the weights, after one in which libraries set themselves up."""
        self.run(seed)
        _, self.peak = with_peak(self.device, lambda: self.run(seed))

    def row(self) -> dict[str, Any]:
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        tokens = self.length * self.rows
        row: dict[str, Any] = {
            "model": self.name,
            "architecture": type(self.model).__name__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "weight_bytes": weights,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "length": self.length,
            "texts": self.rows,
            "problem": self.problem,
            "seconds": None,
            "tokens_per_second": None,
            "peak_bytes": None,
            "peak_kind": peak_kind(self.device),
            "attention_multiply_adds": None,
        }
        if self.subject.ours:
            row["attention_multiply_adds"] = self.model.attention_multiply_adds(self.length)
        if self.problem is not None:
            return row
        seconds = spread(self.times)
        row |= {"seconds": seconds, "tokens_per_second": tokens / seconds["median"]}
        if self.peak is not None:  # weights, gradients and activations; an optimizer's states come on top
            row["peak_bytes"] = weights + self.peak
        return row


def measure_training(
    steps: Sequence[Step], rounds: int, seed: int, progress: Progress
) -> list[dict[str, Any]]:
    """One row for each model: its peak, then ``rounds`` times in turn a step. Out of memory on a GPU is a row too."""
    for number in range(rounds + 1):
        for step in (step for step in steps if step.problem is None):
            turn = "memory" if not number else f"round {number} of {rounds}"
            progress(f"training, {step.length:,} tokens, {turn}: {step.name}")
            try:
                if number:
                    step.times.append(step.run(seed))
                else:
                    step.measure_peak(seed)
            except torch.OutOfMemoryError:
                step.problem = "out of memory on the device"
                torch.cuda.empty_cache()
    return [step.row() for step in steps]
