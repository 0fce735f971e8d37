"""What training costs by context length: time, throughput and memory of forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from trailmark.evaluation.cost.peak import peak_kind, with_peak
from trailmark.evaluation.cost.rounds import Case, Progress, now, random_tokens, spread
from trailmark.evaluation.subject import Subject


class Step(Case):
    """Forward and backward of the mean loss over random tokens, in the model's own precision; no weight changes.

    Args:
        length: tokens of a text. rows: texts at once.
    """

    unit = "takes a training step"

    def __init__(self, name: str, subject: Subject, length: int, rows: int, seed: int = 0) -> None:
        super().__init__(name, subject, seed)
        self.length, self.rows = length, rows
        self.peak: int | None = None

    def prepare(self, progress: Progress) -> None:
        """Measure what a step takes at most beside the weights, after one in which libraries set themselves up."""
        progress(f"memory: {self.name} {self.unit} of {self.length:,} tokens")
        self.run()
        _, self.peak = with_peak(self.device, self.run)

    def round(self, number: int) -> None:
        """Time one step."""
        if number:  # steps were taken before the first round
            self.times.append(self.run())

    def run(self) -> float:
        """Take one step, let go of its gradients, and return its seconds."""
        ids = random_tokens(self.subject, self.length, self.seed, self.rows).to(self.device)
        more: dict[str, Any] = {}
        if self.subject.ours:
            more["noise_seed"] = torch.arange(self.rows, device=self.device)
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            self.model.train()
            with torch.random.fork_rng(devices), torch.enable_grad():
                torch.manual_seed(self.seed)
                began = now(self.device)
                self.model(ids, labels=ids, **more).loss.backward()
                return now(self.device) - began
        finally:
            self.model.eval()
            self.model.zero_grad(set_to_none=True)

    def row(self) -> dict[str, Any]:
        """What was measured of one model, with the multiply-adds of its attention by formula."""
        row = super().row() | {"length": self.length, "texts": self.rows, "peak_kind": peak_kind(self.device)}
        row |= dict.fromkeys(("seconds", "tokens_per_second", "peak_bytes", "attention_multiply_adds"))
        if self.subject.ours:
            row["attention_multiply_adds"] = self.model.attention_multiply_adds(self.length)
        if self.problem is not None:
            return row
        seconds = spread(self.times)
        row |= {"seconds": seconds, "tokens_per_second": self.length * self.rows / seconds["median"]}
        if self.peak is not None:  # weights, gradients and activations; an optimizer's states come on top
            row["peak_bytes"] = row["weight_bytes"] + self.peak
        return row
