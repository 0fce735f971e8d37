"""Needles as models of the needle task are trained on them: exact match of all digits, and whether the needle's chunk
was retrieved.

Needles, keys and values are numpy's draws (data/trials.py), as in the results that benchmarks keep; the suite
(needles.py) asks more kinds of questions, with the same engine (asking.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trailmark.data.corpus import Tokens
from trailmark.data.haystacks import Filler
from trailmark.data.needle_tasks import Question
from trailmark.data.needles import NeedleFormat
from trailmark.data.proportions import wilson_interval
from trailmark.data.trials import NeedleTrial, needle_trials
from trailmark.evaluation.asking import Answer, Asker
from trailmark.memory import ChunkCache
from trailmark.models import TrailmarkForCausalLM

# Haystacks of one length together have about this many tokens, but at least one and at most ten are read.
_TOKENS_PER_LENGTH, _MOST_HAYSTACKS = 1 << 20, 10


@dataclass
class NeedleResult:
    """What came out at one length."""

    length: int  # tokens, the question included
    needles: int  # hidden at once, all asked
    phases: str = "end"  # of the chunk that a question closes: its end, or any
    memory_tier: str = "device"
    memory_dtype: str | None = None  # of keys and values in memory; None: the model's
    questions: int = 0
    correct: int = 0  # all digits right
    retrieved: int | None = (
        None  # questions whose needle's chunk was among those selected, in any group (Landmark
        # Attention: in any layer and head, at the question's last token or the cue); None: no retrieval
    )
    haystacks: int = 0
    tokens_read: int = 0
    seconds_reading: float = 0.0
    memory_bytes: int = 0  # chunk memory and window of one haystack
    resident_bytes: int = 0  # growth of the process while it read the first haystack
    asked: list[dict[str, Any]] = field(default_factory=list, repr=False)

    @property
    def accuracy(self) -> float:
        return self.correct / self.questions

    @property
    def recall(self) -> float | None:
        return None if self.retrieved is None else self.retrieved / self.questions

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_read / self.seconds_reading if self.seconds_reading else math.nan

    def summary(self) -> dict[str, Any]:
        """Every number, for JSON."""
        low, high = wilson_interval(self.correct, self.questions)
        return asdict(self) | {
            "accuracy": self.accuracy,
            "accuracy_low": low,
            "accuracy_high": high,
            "recall": self.recall,
            "tokens_per_second": self.tokens_per_second,
        }


def num_haystacks(length: int, trials: int) -> int:
    """That so many trials of one length are shared out to."""
    return max(1, min(_MOST_HAYSTACKS, trials, _TOKENS_PER_LENGTH // length))


@torch.no_grad()
def evaluate_needles(
    model: TrailmarkForCausalLM,
    format: NeedleFormat,
    text: Tokens,
    length: int,
    questions: int,
    needles: int = 1,
    chunk_size: int | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda message: None,
    phases: Literal["end", "any"] = "end",
    memory_tier: str = "device",
    memory_folder: str | Path | None = None,
    memory_dtype: torch.dtype | None = None,
) -> NeedleResult:
    """Ask at least ``questions`` questions of haystacks of ``length`` tokens cut from ``text``.

    Args:
        model: in eval mode.
        format: the tokens of needles. text: filler; repeated where it is shorter than a haystack.
        length: tokens, a multiple of the chunk size; the question ends the text.
        needles: hidden at once in each trial, at different places with different keys; all are asked.
        chunk_size: of the task; None: the model's.
        seed: of haystacks, places, keys and values; the same for every model of one ``chunks_in_sight``.
        phases: "end": a question fills its chunk. "any": it closes its chunk early, after 1 .. chunk_size tokens,
            each as likely; the text is up to chunk_size - 1 tokens shorter then.
        memory_tier: "device", "host" or "disk". memory_dtype: of keys and values there; None: the model's.
        memory_folder: of "disk": where each haystack's files lie in a folder of their own while it is asked.

    Raises:
        ValueError: a text or a length too short to hold the needles, a chunk size that is not the model's, a window
            without an end, a memory that cannot be.
    """
    own = getattr(model.config, "chunk_size", None)
    S: Any = chunk_size or own or 0
    if own not in (None, S):
        raise ValueError(
            f"chunk_size: expected the model's own {own}, got {S}: needles are planted in whole chunks of its "
            "memory. Leave it out."
        )
    if S < 1:
        raise ValueError(
            "chunk_size: expected the chunk size of the task for a model without chunks, got None."
        )
    if length % S:
        raise ValueError(f"length: expected a multiple of the chunk size {S}, got {length}.")
    text = format.clean(text)
    if len(text) < S * 4:
        raise ValueError(f"text: expected at least {4 * S} tokens to hide needles in, got {len(text)}.")
    asks = 1 if phases == "end" else 2  # chunks that a question takes
    chunks, sight = length // S - asks, model.chunks_in_sight(S)
    last = chunks - sight
    if last < needles:
        raise ValueError(
            f"length: expected at least {(needles + sight + asks) * S} tokens for {needles} needles "
            f"out of the window's sight, got {length}."
        )
    result = NeedleResult(
        length,
        needles,
        phases,
        memory_tier,
        None if memory_dtype is None else str(memory_dtype).removeprefix("torch."),
        retrieved=0 if model.config.keeps_chunks else None,
    )

    def fresh(folder: Path | None) -> ChunkCache:
        return model.new_cache(memory_tier, chunks * S, folder, memory_dtype)

    fresh(
        None if memory_folder is None else Path(memory_folder)
    )  # refused, if at all, before a folder is made
    asker, filler = Asker(model, fresh, memory_folder), Filler(text)
    trials = -(-questions // needles)
    haystacks = num_haystacks(length, trials)
    for number in range(haystacks):
        start = int(np.random.default_rng([seed, 1, number]).integers(len(text)))
        haystack = filler.read(start, chunks * S)
        ids = torch.from_numpy(haystack).long().view(chunks, S)
        progress(f"{length:,} tokens: reading haystack {number + 1} of {haystacks}")
        here = trials * (number + 1) // haystacks - trials * number // haystacks
        source = needle_trials(format, haystack, S, last, needles, seed=seed * 1000 + number, phases=phases)
        result.haystacks += 1
        with asker.haystack(ids) as whole:
            for asked, trial in zip(range(here), source, strict=False):
                progress(
                    f"{length:,} tokens: haystack {number + 1} of {haystacks}, trial {asked + 1} of {here}"
                )
                changed = ids
                if whole is None:
                    changed = ids.clone()
                    changed[trial.chunks] = trial.texts
                with asker.holding(whole, ids, trial.chunks, trial.texts, changed) as cache:
                    answers = asker.ask(cache, _questions(trial), S)
                for i, answer in enumerate(answers):
                    _count(model, trial, i, answer, result)
    reading = asker.reading
    result.tokens_read, result.seconds_reading = reading.tokens, reading.seconds
    result.memory_bytes, result.resident_bytes = reading.memory_bytes or 0, reading.resident_bytes or 0
    return result


def _questions(trial: NeedleTrial) -> list[Question]:
    found = []
    for i, (question, mask, answer) in enumerate(
        zip(trial.questions, trial.attention_mask, trial.answers, strict=True)
    ):
        asked: Tensor = question[mask]
        prompt = torch.cat([asked, answer[:1]]).numpy()
        found.append(Question(prompt, (len(asked) - 1,), None, answer[1:].numpy(), (), "", ((i,),)))
    return found


def _count(
    model: TrailmarkForCausalLM, trial: NeedleTrial, i: int, answer: Answer, result: NeedleResult
) -> None:
    place = int(trial.chunks[i])
    correct = answer.tokens == trial.answers[i, 1:].tolist()
    record: dict[str, Any] = {"needle": place, "phase": int(trial.phases[i]), "correct": correct}
    if answer.selected is not None:
        (selected,) = answer.selected
        groups = range(selected[-1].group + 1)
        if not model.selects_by_chunk:
            record["selected"] = [
                sorted({m for some in selected if some.group == layer for m in some.chunks})
                for layer in groups
            ]
        else:
            first = selected[0]
            record["selected"] = [some.chunks for some in selected]
            record["weights"] = [round(w, 4) for w in first.weights]
            record["first"] = _best(first.chunks, first.weights) == place
        record["retrieved"] = any(place in some for some in record["selected"])
        result.retrieved = (result.retrieved or 0) + record["retrieved"]
    result.questions += 1
    result.correct += correct
    result.asked.append(record)


def _best(chunks: list[int], weights: list[float]) -> int:
    return chunks[max(range(len(chunks)), key=weights.__getitem__)] if chunks else -1
