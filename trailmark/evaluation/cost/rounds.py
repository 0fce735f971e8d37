"""Models are measured in rounds that all of them share: a machine that is slower for a while is so for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trailmark.evaluation.subject import Subject

Progress = Callable[[str], None]


class Case:
    """One model at work of which each round is timed.

    Args:
        name: of the model in the result.
        seed: of the tokens that it is given.
    """

    unit = "does its work"  # what it does in a round

    def __init__(self, name: str, subject: Subject, seed: int) -> None:
        self.name, self.subject, self.model, self.seed = name, subject, subject.model, seed
        self.device: torch.device = self.model.device
        self.problem: str | None = None  # why nothing was measured
        self.times: list[float] = []  # of each round

    def prepare(self, progress: Progress) -> None:
        """Do what comes before the first round."""

    def round(self, number: int) -> None:
        """Do the work once. In round 0 libraries set themselves up: its time does not count."""
        raise NotImplementedError

    def finish(self) -> None:
        """Do what comes after the last round."""

    def release(self) -> None:
        """Let go of what the rounds needed."""

    def row(self) -> dict[str, Any]:
        """The result of the model as JSON; what could not be measured is None."""
        parameters = list(self.model.parameters())
        return {
            "model": self.name,
            "architecture": type(self.model).__name__,
            "parameters": sum(p.numel() for p in parameters),
            "weight_bytes": sum(p.numel() * p.element_size() for p in parameters),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "problem": self.problem,
        }


def measure(cases: Sequence[Case], rounds: int, progress: Progress) -> list[dict[str, Any]]:
    """One row for each case, after ``rounds`` times in turn and one before these that does not count.

    A case that finds no memory, or came with a ``problem``, has a row that says so and no numbers; the others go on.
    """
    for case in cases:
        _attempt(case, partial(case.prepare, progress))
    for number in range(rounds + 1):
        for case in cases:
            if case.problem is None:
                progress(f"round {number} of {rounds}: {case.name} {case.unit}")
                _attempt(case, partial(case.round, number))
    rows = []
    for case in cases:
        _attempt(case, case.finish)
        rows.append(case.row())
        case.release()
    return rows


def _attempt(case: Case, work: Callable[[], None]) -> None:
    """Do the work of a case that has no problem yet."""
    if case.problem is not None:
        return
    try:
        work()
    except torch.OutOfMemoryError:  # of a GPU: a CPU without memory ends the process
        case.problem = "out of memory on the device"
        case.release()
        torch.cuda.empty_cache()


def random_tokens(subject: Subject, count: int, seed: int, rows: int = 1) -> Tensor:
    """int64 [rows, count] on the CPU: any tokens of the model's, the same for the same seed."""
    vocabulary = int(subject.model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (rows, count), generator=generator)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of rounds, and the rounds in their order."""
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    low, middle, high = torch.quantile(torch.tensor(values, dtype=torch.float64), quartiles).tolist()
    return {"median": middle, "p25": low, "p75": high, "rounds": len(values), "values": list(values)}


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
