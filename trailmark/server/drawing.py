"""How the next token of a row is drawn: by its own temperature, nucleus and seed, whoever is decoded beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from trailmark.models.generation import expect_temperature
from trailmark.ops.arguments import require


@dataclass(frozen=True)
class Sampling:
    """How the tokens of an answer are chosen.

    Raises:
        ValueError: a number outside of what is said below.
    """

    max_tokens: int
    """At least 1."""
    temperature: float = 1.0
    """0: always the most likely token."""
    top_p: float = 1.0
    """Of the most likely tokens, as many as have this probability together; above 0, at most 1."""
    seed: int | None = None
    """Of the first answer; the next one's is one more. None: another in every run."""
    top_logprobs: int = 0
    """How many of the most likely tokens are reported with each token."""

    def __post_init__(self) -> None:
        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        if self.temperature != 0:
            expect_temperature(self.temperature)
        require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        require(self.top_logprobs >= 0, "top_logprobs", self.top_logprobs, "at least 0")


class Draw:
    """One answer's own sequence of draws."""

    def __init__(self, sampling: Sampling, answer: int) -> None:
        self.sampling = sampling
        # on the CPU wherever the model is: a seed then means the same everywhere
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed((sampling.seed + answer) % 2**64)

    def fill(self, row: Tensor) -> None:
        """Exponentially distributed numbers [V], the next of the sequence."""
        row.exponential_(generator=self._generator)


class Drawn(NamedTuple):
    """What came out for one row."""

    token: int  # -1: its logits are no numbers
    logprob: float  # natural logarithm, of the model's own distribution: no temperature, all tokens
    top: tuple[tuple[int, float], ...]  # the most likely tokens, with the same


def draw(logits: Tensor, draws: list[Draw]) -> list[Drawn]:
    """The next token of each row, by logits [B, V]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).cpu()
    finite = torch.isfinite(logits.amax(-1)).tolist()
    tokens = [token if fine else -1 for token, fine in zip(_tokens(logits, draws), finite, strict=True)]
    logs = logits.log_softmax(-1)
    chosen = logs.gather(1, torch.tensor(tokens).clamp(min=0)[:, None])[:, 0].tolist()
    count = min(max(own.sampling.top_logprobs for own in draws), logs.shape[1])
    if not count:
        return [Drawn(token, log, ()) for token, log in zip(tokens, chosen, strict=True)]
    values, places = (x.tolist() for x in logs.topk(count, -1))
    return [
        Drawn(token, log, tuple(zip(place, value, strict=True))[: own.sampling.top_logprobs])
        for own, token, log, place, value in zip(draws, tokens, chosen, places, values, strict=True)
    ]


def _tokens(logits: Tensor, draws: list[Draw]) -> list[int]:
    temperatures = [own.sampling.temperature for own in draws]
    if not any(temperatures):
        return logits.argmax(-1).tolist()
    scores = logits / torch.tensor([t or 1.0 for t in temperatures], dtype=logits.dtype)[:, None]
    for share in {own.sampling.top_p for own in draws if own.sampling.temperature} - {1.0}:
        rows = [b for b, own in enumerate(draws) if own.sampling.top_p == share]
        scores[rows] = TopPLogitsWarper(share)(None, scores[rows])
    # of numbers so distributed, each divided by its token's probability, the least is that token's so often as it says
    waits = torch.ones_like(scores)
    for own, row in zip(draws, waits, strict=True):
        if own.sampling.temperature:
            own.fill(row)
    drawn = (scores.softmax(-1) / waits).argmax(-1).tolist()
    return [
        token if t else best
        for t, token, best in zip(temperatures, drawn, logits.argmax(-1).tolist(), strict=True)
    ]
