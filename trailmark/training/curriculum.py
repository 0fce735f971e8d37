"""The levels of the needle task: the next one once questions are answered well enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from trailmark.data.needles.curriculum_texts import CURRICULUM, Level

SMOOTHING = 0.95  # of the moving averages that are shown and that advance the curriculum


@dataclass
class Curriculum:
    """Which level a step trains: the next one once the first digits are answered well enough.

    A change takes effect two steps later, because a loader may work one batch ahead; thus a resumed run
    makes the same batches.
    """

    levels: tuple[Level, ...] = CURRICULUM
    threshold: float = 0.9
    starts: list[int] = field(default_factory=lambda: [0])  # the first step of each level reached
    samples: list[int] = field(default_factory=lambda: [0])  # the first sample of each level reached
    average: float = 0.0

    def level_at(self, step: int) -> int:
        return max(n for n, start in enumerate(self.starts) if start <= step)

    def rows(self, level: int, tokens_per_step: int, chunk_size: int) -> int:
        return max(1, tokens_per_step // (self.levels[level].chunks * chunk_size))

    def first_sample(self, step: int, rows: int) -> int:
        """The number of the first sample of ``step``, whose batch has ``rows``."""
        level = self.level_at(step)
        return self.samples[level] + (step - self.starts[level]) * rows

    def update(self, step: int, accuracy: float | None, rows: int) -> None:
        """Take in the accuracy of ``step``, a batch of ``rows`` samples; None: it asked nothing."""
        if step < self.starts[-1] or accuracy is None:
            return  # a level was just reached; its first batch is still to come
        self.average = SMOOTHING * self.average + (1 - SMOOTHING) * accuracy
        if self.average > self.threshold and len(self.starts) < len(self.levels):
            start = step + 2
            self.samples.append(self.samples[-1] + (start - self.starts[-1]) * rows)
            self.starts.append(start)
            self.average = 0.0

    def begin_at(self, starts: Sequence[int], tokens_per_step: int, chunk_size: int) -> None:
        """Let the levels begin at these steps, however well questions are answered: for models to compare.

        Raises:
            ValueError: not one step for each level, ascending from 0.
        """
        expected = len(self.levels)
        if len(starts) != expected or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            raise ValueError(f"starts: expected {expected} steps, ascending from 0, got {list(starts)}.")
        self.starts, self.samples = list(starts), [0]
        for level, (start, end) in enumerate(pairwise(starts)):
            rows = self.rows(level, tokens_per_step, chunk_size)
            self.samples.append(self.samples[-1] + (end - start) * rows)

    def state(self) -> dict[str, Any]:
        """What a run that goes on must know."""
        return {"starts": self.starts, "samples": self.samples, "average": self.average}

    def restore(self, state: dict[str, Any]) -> None:
        self.starts, self.samples = list(state["starts"]), list(state["samples"])
        self.average = state["average"]
