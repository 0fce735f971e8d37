"""Needles in haystacks: exact match of the whole answer, and whether the needle's chunk was retrieved.

A haystack is read once. Needles are then planted in its memory (the chunks they change are encoded again, so
that memory is exactly that of the text with the needles), and their questions are asked in a batch of branches
that share this memory: many questions for one reading. In Landmark Attention every layer's memory depends on
all that was read before it, and so do the states of a Block-Recurrent Transformer: there the haystack is read anew
for each trial, with its needles in it.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch
from torch import Tensor

from trailmark.data.corpus import Tokens
from trailmark.data.needles import VALUE_LENGTH, NeedleFormat
from trailmark.data.trials import NeedleTrial, needle_trials
from trailmark.memory import ChunkCache
from trailmark.models import (
    BlockRecurrentForCausalLM,
    DRTForCausalLM,
    LandmarkForCausalLM,
    RPTForCausalLM,
    TrailmarkForCausalLM,
)

# Haystacks of one length together have about this many tokens, but at least one and at most ten are read.
_TOKENS_PER_LENGTH = 1 << 20


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
    chunks, sight = length // S - asks, chunks_in_sight(model, S)
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
        retrieved=0 if isinstance(model, DRTForCausalLM | LandmarkForCausalLM | RPTForCausalLM) else None,
    )

    def fresh(folder: Path | None) -> ChunkCache:
        return model.new_cache(memory_tier, chunks * S, folder, memory_dtype)

    replants = not isinstance(model, LandmarkForCausalLM | BlockRecurrentForCausalLM)
    trials = -(-questions // needles)
    haystacks = max(1, min(10, trials, _TOKENS_PER_LENGTH // length))
    for number in range(haystacks):
        start = int(np.random.default_rng([seed, 1, number]).integers(len(text)))
        haystack = _cut(text, start, chunks * S)
        ids = torch.from_numpy(haystack).long().view(chunks, S)
        progress(f"{length:,} tokens: reading haystack {number + 1} of {haystacks}")
        here = trials * (number + 1) // haystacks - trials * number // haystacks
        source = needle_trials(format, haystack, S, last, needles, seed=seed * 1000 + number, phases=phases)
        with _own_folder(memory_folder if replants else None) as folder:
            whole = None
            if replants:
                whole = fresh(folder)
                _read(model, ids, whole, result)
            result.haystacks += 1
            for asked, trial in zip(range(here), source, strict=False):
                progress(
                    f"{length:,} tokens: haystack {number + 1} of {haystacks}, trial {asked + 1} of {here}"
                )
                if whole is not None:
                    with planted(model, whole, ids, trial.chunks, trial.texts):
                        _ask_all(model, whole, trial, result)
                    continue
                changed = ids.clone()
                changed[trial.chunks] = trial.texts
                with _own_folder(memory_folder) as folder:
                    _read(model, changed, cache := fresh(folder), result)
                    _ask_all(model, cache, trial, result)
    return result


def _cut(text: Tokens, start: int, count: int) -> Tokens:
    """``count`` tokens from ``start`` on; after the last one the first follows."""
    if start + count <= len(text):
        return text[start : start + count]
    return np.take(text, np.arange(start, start + count), mode="wrap")


@contextmanager
def _own_folder(parent: str | Path | None) -> Iterator[Path | None]:
    """An empty folder for one haystack's memory, removed at the end; None where none was named."""
    if parent is None:
        yield None
        return
    Path(parent).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix="haystack-") as folder:
        yield Path(folder)


def _read(model: TrailmarkForCausalLM, ids: Tensor, cache: ChunkCache, result: NeedleResult) -> None:
    """A haystack [N, S] into an empty cache, and what that took."""
    first = not result.tokens_read
    before, began = psutil.Process().memory_info().rss, time.perf_counter()
    model.read(ids.view(1, -1), cache)
    result.seconds_reading += time.perf_counter() - began
    result.tokens_read += ids.numel()
    if first:
        result.resident_bytes = psutil.Process().memory_info().rss - before
        result.memory_bytes = cache.memory_bytes() + cache.window_bytes()


def _ask_all(
    model: TrailmarkForCausalLM, cache: ChunkCache, trial: NeedleTrial, result: NeedleResult
) -> None:
    """All questions of a trial in one batch, each on a branch of its own."""
    n = len(trial.texts)
    # Greedy decoding gives an answer exactly if every digit is the best after the true ones before it.
    given = trial.answers[:, :-1]
    mask, close = trial.attention_mask, torch.zeros_like(trial.questions, dtype=torch.bool)
    close[:, -1] = True
    used = mask.any(0)  # padding that all of them have is left out
    prompt = torch.cat([trial.questions[:, used], given], dim=1)
    ones = torch.ones_like(given, dtype=torch.bool)
    out = model(
        prompt,
        attention_mask=torch.cat([mask[:, used], ones], dim=1),
        past_key_values=cache.branch(n),
        close_chunk=torch.cat([close[:, used], ~ones], dim=1),
        logits_to_keep=VALUE_LENGTH,
        output_retrieval=True,
    )
    assert out.logits is not None
    correct = (out.logits.argmax(-1) == trial.answers[:, 1:]).all(1).tolist()
    for i, place in enumerate(trial.chunks.tolist()):
        record: dict[str, Any] = {"needle": place, "phase": int(trial.phases[i]), "correct": correct[i]}
        if isinstance(model, LandmarkForCausalLM):
            assert out.retrieval is not None
            # the question's last token and the cue, which predicts the first digit
            asking = slice(-VALUE_LENGTH - 1, -VALUE_LENGTH + 1)
            selected = [layer.indices[i, asking] for layer in out.retrieval]
            record["selected"] = [
                sorted({m for m in layer.flatten().tolist() if m >= 0}) for layer in selected
            ]
        elif out.retrieval is not None:
            # the question's landmark is the last of those that every row closes here
            selected = [group.indices[i, -1] for group in out.retrieval]
            weights = out.retrieval[0].weights[i, -1]
            record["selected"] = [[int(m) for m in group if m >= 0] for group in selected]
            record["weights"] = [round(float(w), 4) for w in weights]
            record["first"] = int(selected[0][weights.argmax()]) == place
        if out.retrieval is not None:
            record["retrieved"] = any(place in some for some in record["selected"])
            result.retrieved = (result.retrieved or 0) + record["retrieved"]
        result.questions += 1
        result.correct += correct[i]
        result.asked.append(record)


def chunks_in_sight(model: TrailmarkForCausalLM, chunk_size: int) -> int:
    """Last chunks of a text that what follows may see other than through the memory: no needle can be planted there.

    Raises:
        ValueError: a model without a window, which sees everything.
    """
    reach = model.reach()
    if reach is None:
        raise ValueError(
            "sliding_window: expected a number, got None: full attention sees every needle directly, and none can "
            "be planted in what it has read."
        )
    if isinstance(model, LandmarkForCausalLM):
        return -(-reach // (chunk_size + 1))  # what a cell shows
    if isinstance(model, BlockRecurrentForCausalLM):
        assert model.config.sliding_window is not None
        # its own reach is that of the upper layers: what is below has to be read
        return -(-model.config.num_hidden_layers * (model.config.sliding_window - 1) // chunk_size)
    if not isinstance(model, DRTForCausalLM | RPTForCausalLM):
        return -(-reach // chunk_size)
    # the states that wait for the upper layers, and what the lower layers put into them
    return -(-reach // (chunk_size + model.config.has_landmarks)) + model.encoding_reach()


@contextmanager
def planted(
    model: TrailmarkForCausalLM, cache: ChunkCache, ids: Tensor, chunks: Tensor, texts: Tensor
) -> Iterator[None]:
    """Inside, ``cache`` (one row that has read ``ids`` [N, S]) holds ``texts`` [n, S] at chunks ``chunks`` [n].

    The entries of these chunks, and of those after them that the lower layers reach, are encoded again from
    the changed text. Nothing else that the cache carries depends on them: the upper layers have not run yet
    (:meth:`read` leaves them to the first question, so ask on branches). A model without memory carries nothing
    of text outside its window: nothing to do.

    Raises:
        ValueError: a chunk that was not read, or that the window still sees; a cache of several rows, with early
            landmarks, or whose last positions the upper layers have seen; Landmark Attention and Block-Recurrent.
    """
    if isinstance(model, LandmarkForCausalLM | BlockRecurrentForCausalLM):
        raise ValueError(
            "model: expected one whose memory of a chunk depends on that chunk and the few before it, got "
            f"{type(model).__name__}: all that it reads later depends on it. Read the text with the needles in it."
        )
    if not isinstance(model, DRTForCausalLM | RPTForCausalLM):
        yield
        return
    S, reach = ids.shape[1], model.encoding_reach()
    read = _chunks_read(model, cache, S)
    count = read - chunks_in_sight(model, S)
    wrong = [place for place in chunks.tolist() if not 0 <= place < count]
    if wrong:
        raise ValueError(
            f"chunks: expected numbers from 0 to {count - 1}, got {wrong[0]}: of the {read} chunks that were read, "
            f"the window still sees the last {read - count}. Read on before planting there."
        )
    replaced = []
    try:
        for place in chunks.tolist():
            first, stop = max(0, place - reach), place + 1 + reach
            changed = ids[first:stop].clone()
            inside = (chunks >= first) & (chunks < stop)
            changed[chunks[inside] - first] = texts[inside].to(ids.dtype)
            before, here = changed[: place - first].view(1, -1), changed[place - first :].reshape(1, -1)
            entries = model.encode(here, before if before.shape[1] else None)
            replaced.append((place, cache.memory.replace(place, entries)))
        yield
    finally:
        for place, entries in reversed(replaced):
            cache.memory.replace(place, entries)


def _chunks_read(model: DRTForCausalLM | RPTForCausalLM, cache: ChunkCache, chunk_size: int) -> int:
    """Chunks of a cache in which needles can be planted."""
    state = cache.state
    if state is None or len(state.num_tokens) != 1:
        raise ValueError(
            f"cache: expected one row that has read a text, got {0 if state is None else len(state.num_tokens)}. "
            "Read one text, plant there, and ask on its branches."
        )
    read = int(cache.num_chunks[0])
    if int(state.num_tokens[0] - state.phases[0]) != read * chunk_size:
        raise ValueError(
            "cache: expected full chunks, got early landmarks: needles are planted in whole chunks."
        )
    waiting = 0 if state.deferred is None else int((state.deferred.chunk >= 0).sum())
    if waiting < min(model.reach(), int(state.num_positions[0])):
        raise ValueError(
            "cache: expected a text whose end was only read, got one whose last positions went through the upper "
            "layers, which found what was there. Use model.read(ids, cache), and ask on cache.branch()."
        )
    return read
