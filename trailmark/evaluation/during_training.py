"""What a training run measures beside its loss: needles, by reading texts longer than it trains on."""

from __future__ import annotations

from collections.abc import Callable

from trailmark.data.corpus import load_tokenizer, standard_library_texts, tokenize
from trailmark.data.needles.curriculum_texts import CURRICULUM
from trailmark.evaluation.needles.ask import measure
from trailmark.evaluation.needles.suite import NeedleSettings
from trailmark.evaluation.subject import Subject
from trailmark.models import TrailmarkForCausalLM

_FACTORS = (1, 4)  # of the longest training text


def needle_accuracy(
    chunk_size: int, tokenizer: str, questions: int = 50, seed: int = 0
) -> Callable[[TrailmarkForCausalLM], dict[str, float]]:
    """Make a function that asks a model for single needles, and gives the shares of right answers.

    Texts have 1x and 4x the length of the longest training text. The haystacks are sources of Python's library that
    training leaves out.
    """
    loaded = load_tokenizer(tokenizer)
    haystack = tokenize(standard_library_texts("haystack"), loaded)
    longest = CURRICULUM[-1].chunks * chunk_size
    lengths = tuple(factor * longest for factor in _FACTORS)
    settings = NeedleSettings(lengths, format="marks", questions=questions, seed=seed)

    def ask(model: TrailmarkForCausalLM) -> dict[str, float]:
        subject = Subject.of(model, loaded, chunk_size)
        results = measure(subject, settings, haystack)
        return {
            f"needles_{factor}x": result["accuracy"] for factor, result in zip(_FACTORS, results, strict=True)
        }

    return ask
