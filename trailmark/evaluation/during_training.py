"""What a training run measures beside its loss: needles, by reading texts longer than it trains on."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trailmark.data.corpus import load_tokenizer, standard_library_texts, tokenize
from trailmark.data.needles import CURRICULUM, NeedleFormat
from trailmark.evaluation.needles import evaluate_needles
from trailmark.models import TrailmarkForCausalLM

_FACTORS = (1, 4)  # of the longest training text


def needle_accuracy(
    chunk_size: int, tokenizer: str, questions: int = 50, seed: int = 0
) -> Callable[[TrailmarkForCausalLM], dict[str, float]]:
    """Asks a model for single needles at 1x and 4x the longest training text: the share of right answers.

    The haystacks are sources of Python's library that training leaves out.
    """
    loaded = load_tokenizer(tokenizer)
    form = NeedleFormat.of(loaded)
    haystack = tokenize(standard_library_texts("haystack"), loaded)
    longest = CURRICULUM[-1].chunks * chunk_size

    @torch.no_grad()
    def ask(model: TrailmarkForCausalLM) -> dict[str, float]:
        found = {}
        for factor in _FACTORS:
            result = evaluate_needles(
                model,
                form,
                haystack,
                factor * longest,
                questions,
                chunk_size=chunk_size,
                seed=seed,
                phases="any",
            )
            found[f"needles_{factor}x"] = result.accuracy
        return found

    return ask
