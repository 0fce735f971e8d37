"""Needles in haystacks: exact match of the whole answer, and whether the needle's chunk was retrieved.

A haystack is read once. Needles are then planted in its memory (the chunks they change are encoded again, so
that memory is exactly that of the text with the needles), the last chunks and a question are read on, and
the cache goes back to where it was: many questions for one reading.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from trailmark.data.corpus import Tokens
from trailmark.data.needles import VALUE_LENGTH, NeedleFormat, NeedleTrial, needle_trials
from trailmark.memory import ChunkCache
from trailmark.models import DRTForCausalLM, TrailmarkForCausalLM

# Haystacks of one length together have about this many tokens, but at least one and at most ten are read.
_TOKENS_PER_LENGTH = 1 << 20


@dataclass
class NeedleResult:
    """What came out at one length."""

    length: int  # tokens, the question included
    needles: int  # hidden at once, all asked
    questions: int = 0
    correct: int = 0  # all digits right
    retrieved: int | None = (
        None  # questions whose needle's chunk was among those selected; None: no retrieval
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


def wilson_interval(successes: int, trials: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """The 95% score interval of a proportion (Wilson, 1927)."""
    if trials == 0:
        return 0.0, 1.0
    p, n = successes / trials, trials
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


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
) -> NeedleResult:
    """Ask at least ``questions`` questions of haystacks of ``length`` tokens cut from ``text``.

    Args:
        model: in eval mode.
        format: the tokens of needles. text: filler; repeated where it is shorter than a haystack.
        length: tokens, a multiple of the chunk size; the question ends the text.
        needles: hidden at once in each trial, at different places with different keys; all are asked.
        chunk_size: of the task; None: the model's.
        seed: of haystacks, places, keys and values.

    Raises:
        ValueError: a text or a length too short to hold the needles, a chunk size that is not the model's.
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
    chunks = length // S - 1  # the last one asks
    reach = model.encoding_reach() if isinstance(model, DRTForCausalLM) else 0
    tail = model.reading_tail(S)
    last = chunks - tail - reach
    if last < needles:
        raise ValueError(
            f"length: expected at least {(needles + tail + reach + 1) * S} tokens for {needles} needles "
            f"out of the window's sight, got {length}."
        )
    result = NeedleResult(length, needles, retrieved=0 if isinstance(model, DRTForCausalLM) else None)
    trials = -(-questions // needles)
    haystacks = max(1, min(10, trials, _TOKENS_PER_LENGTH // length))
    for number in range(haystacks):
        start = int(np.random.default_rng([seed, 1, number]).integers(len(text)))
        haystack = np.take(text, np.arange(start, start + chunks * S), mode="wrap")
        ids = torch.from_numpy(haystack).long().view(chunks, S)
        progress(f"{length:,} tokens: reading haystack {number + 1} of {haystacks}")
        cache = model.new_cache(num_tokens=length + 2 * S)
        before, began = psutil.Process().memory_info().rss, time.perf_counter()
        model.read(ids[: chunks - tail].view(1, -1), cache)
        result.seconds_reading += time.perf_counter() - began
        result.tokens_read += (chunks - tail) * S
        result.haystacks += 1
        if number == 0:
            result.resident_bytes = psutil.Process().memory_info().rss - before
            result.memory_bytes = cache.memory.num_bytes() + cache.window_bytes()
        here = trials * (number + 1) // haystacks - trials * number // haystacks
        source = needle_trials(format, haystack, S, last, needles, seed=seed * 1000 + number)
        for asked, trial in zip(range(here), source, strict=False):
            progress(f"{length:,} tokens: haystack {number + 1} of {haystacks}, trial {asked + 1} of {here}")
            with planted(model, cache, ids, trial.chunks, trial.texts):
                _ask_all(model, cache, ids, tail, trial, result)
    return result


def _ask_all(
    model: TrailmarkForCausalLM,
    cache: ChunkCache,
    ids: Tensor,
    tail: int,
    trial: NeedleTrial,
    result: NeedleResult,
) -> None:
    chunks = ids.shape[0]
    start = cache.mark()
    if tail:
        model.read(ids[chunks - tail :].view(1, -1), cache)
    here = cache.mark()
    for place, question, answer in zip(trial.chunks.tolist(), trial.questions, trial.answers, strict=True):
        # Greedy decoding gives this answer exactly if every digit is the best after the true ones before it.
        prompt = torch.cat([question, answer[:-1]])[None]
        out = model(prompt, past_key_values=cache, logits_to_keep=VALUE_LENGTH, output_retrieval=True)
        cache.rewind(here)
        assert out.logits is not None
        correct = bool((out.logits[0].argmax(-1) == answer[1:]).all())
        record: dict[str, Any] = {"needle": place, "correct": correct}
        if out.retrieval is not None:
            # the question's landmark is the first that this call closes
            selected = [group.indices[0, 0] for group in out.retrieval]
            best = out.retrieval[0].weights[0, 0].argmax()
            record["selected"] = [[int(i) for i in group if i >= 0] for group in selected]
            record["weights"] = [round(float(w), 4) for w in out.retrieval[0].weights[0, 0]]
            record["first"] = int(selected[0][best]) == place
            record["retrieved"] = any(place in group for group in record["selected"])
            result.retrieved = (result.retrieved or 0) + record["retrieved"]
        result.questions += 1
        result.correct += correct
        result.asked.append(record)
    cache.rewind(start)


@contextmanager
def planted(
    model: TrailmarkForCausalLM, cache: ChunkCache, ids: Tensor, chunks: Tensor, texts: Tensor
) -> Iterator[None]:
    """Inside, ``cache`` (one row that has read ``ids`` [N, S]) holds ``texts`` [n, S] at chunks ``chunks`` [n].

    The entries of these chunks, and of those after them that the lower layers reach, are encoded again from
    the changed text. A model without memory carries nothing of text outside its window: nothing to do. What the
    upper layers carry is still that of ``ids``: read ``reading_tail`` chunks on before anything is asked.

    Raises:
        ValueError: a chunk that the window still sees, or that was not read.
    """
    if not isinstance(model, DRTForCausalLM):
        yield
        return
    reach, read = model.encoding_reach(), len(cache.memory)
    wrong = [place for place in chunks.tolist() if not 0 <= place < read - reach]
    if wrong:
        raise ValueError(
            f"chunks: expected numbers from 0 to {read - reach - 1}, got {wrong[0]}: of the {read} chunks that were "
            f"read, the window still sees what it took from the last {reach}. Read on before planting there."
        )
    changed = ids.clone()
    changed[chunks] = texts
    replaced = []
    try:
        for place in chunks.tolist():
            before = changed[max(0, place - reach) : place].view(1, -1) if place and reach else None
            entries = model.encode(changed[place : place + 1 + reach].reshape(1, -1), before)
            replaced.append((place, cache.memory.replace(place, entries)))
        yield
    finally:
        for place, entries in reversed(replaced):
            cache.memory.replace(place, entries)
