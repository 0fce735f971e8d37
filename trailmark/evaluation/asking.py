"""Questions put to a model that has read a haystack: what it answers, and which chunks it selected for that."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from transformers import GenerationConfig

from trailmark.data.haystacks import Haystack, Needle
from trailmark.data.needle_tasks import Question
from trailmark.evaluation.losses import beginning, longest_text
from trailmark.evaluation.planting import Rows, planted
from trailmark.memory import ChunkCache
from trailmark.models import TrailmarkForCausalLM
from trailmark.models.reads import Selection

_READ_TOKENS, _PIECES = 4096, 16  # a haystack's, that are made at a time: so many of the model's own pieces
_TOGETHER = 64  # questions in a batch: memory for what they read does not grow with their number
_MORE_TOKENS = 4  # than the expected answer's that are generated: another way to write it may be longer


@dataclass
class Answer:
    """What a model answers to one question."""

    tokens: list[
        int
    ]  # the best ones, each after the true ones before it: one more than the answer's if it must end
    logits: Tensor  # [n, V] that they are the best of
    selected: list[list[Selection]] | None
    """At each of the question's landmarks what each group selected; Landmark Attention: what each layer and head did at
    the token before and the token after. None: the model retrieves nothing."""


@dataclass
class Reading:
    """What reading haystacks cost."""

    tokens: int = 0
    seconds: float = 0.0
    memory_bytes: int | None = 0  # chunk memory and window of one haystack; None: not known
    resident_bytes: int | None = 0  # growth of the process while it read the first haystack

    def read(
        self,
        model: TrailmarkForCausalLM,
        rows: Rows,
        cache: ChunkCache,
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """A haystack [N, S] into an empty cache; ``progress`` is given the tokens read so far."""
        first, (N, S) = not self.tokens, rows.shape
        # whole pieces of the model's own: a haystack is cut as if it came in one call
        step = _PIECES * model.reading_piece(_READ_TOKENS)
        before, began = psutil.Process().memory_info().rss, time.perf_counter()
        for start in range(0, N * S, step):
            stop, row = min(start + step, N * S), start // S
            ids = rows[row : -(-stop // S)].reshape(1, -1)[:, start - row * S : stop - row * S]
            model.read(ids.to(model.device), cache)
            self.tokens += ids.shape[1]
            progress(stop)
        self.seconds += time.perf_counter() - began
        if first:
            # less than before: what came earlier was given back meanwhile
            self.resident_bytes = max(0, psutil.Process().memory_info().rss - before)
            self.memory_bytes = cache.memory_bytes() + cache.window_bytes()


# --- models with trailmark's caches -------------------------------------------------------------------------


@dataclass
class Asker:
    """Reads haystacks, hides needles in them and asks, as the model allows it.

    Args:
        model: in eval mode.
        fresh: an empty cache, in a folder of its own if the memory lies in one.
        memory_folder: where such folders are made; None: none is needed.
    """

    model: TrailmarkForCausalLM
    fresh: Callable[[Path | None], ChunkCache]
    memory_folder: str | Path | None = None
    reading: Reading = field(default_factory=Reading)

    @contextmanager
    def haystack(
        self, rows: Rows, progress: Callable[[int], None] = lambda tokens: None
    ) -> Iterator[ChunkCache | None]:
        """A memory of the haystack to plant in; None where each trial reads it anew."""
        if not self.model.can_be_planted:
            yield None
            return
        with own_folder(self.memory_folder) as folder:
            self.reading.read(self.model, rows, cache := self.fresh(folder), progress)
            yield cache

    @contextmanager
    def holding(
        self,
        cache: ChunkCache | None,
        rows: Rows,
        chunks: Tensor,
        texts: Tensor,
        whole: Rows,
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> Iterator[ChunkCache]:
        """A memory of the haystack in which ``chunks`` [n] are ``texts`` [n, S]; ``whole`` are all rows so changed."""
        if cache is not None:
            with planted(self.model, cache, rows, chunks, texts):
                yield cache
            return
        with own_folder(self.memory_folder) as folder:
            self.reading.read(self.model, whole, cache := self.fresh(folder), progress)
            yield cache

    def ask(self, cache: ChunkCache, questions: Sequence[Question], chunk_size: int) -> list[Answer]:
        """Questions in batches, each on a branch of its own behind whole chunks of ``chunk_size``.

        Greedy decoding gives an answer exactly if every token of it is the best after the true ones before it: one
        call decides.
        """
        return [a for some in _batches(questions) for a in self._ask(cache, some, chunk_size)]

    def _ask(self, cache: ChunkCache, questions: Sequence[Question], chunk_size: int) -> list[Answer]:
        given = [np.concatenate([q.prompt, q.answer[: q.needed - 1]]) for q in questions]
        ids, mask, close = self._batch(given, questions)
        width, keep = ids.shape[1], max(q.needed for q in questions)
        out = self.model(
            ids,
            attention_mask=mask,
            past_key_values=cache.branch(len(questions)),
            close_chunk=close,
            logits_to_keep=keep,
            output_retrieval=True,
        )
        assert out.logits is not None
        answers = []
        for i, q in enumerate(questions):
            logits = out.logits[i, keep - q.needed :]
            selected = None
            if out.retrieval is not None:
                columns = [width - len(given[i]) + mark for mark in q.landmarks]
                landmarks = list(zip(q.closings(chunk_size), columns, strict=True))
                selected = self.model.chunks_read(out.retrieval, i, landmarks)
            answers.append(Answer(logits.argmax(-1).tolist(), logits, selected))
        return answers

    def generate(self, cache: ChunkCache, questions: Sequence[Question]) -> list[list[int]]:
        """Greedy continuations of the questions, with the same landmarks, each on a branch of its own."""
        return [row for some in _batches(questions) for row in self._generate(cache, some)]

    def _generate(self, cache: ChunkCache, questions: Sequence[Question]) -> list[list[int]]:
        ids, mask, close = self._batch([q.prompt for q in questions], questions)
        branch = cache.branch(len(questions))
        count = max(_wanted(q) for q in questions)
        tokens = []
        more: dict[str, Any] = {"attention_mask": mask, "close_chunk": close}
        for _ in range(count):
            out = self.model(ids, past_key_values=branch, logits_to_keep=1, **more)
            ids, more = out.logits[:, -1].argmax(-1, keepdim=True), {}
            tokens.append(ids)
        rows = torch.cat(tokens, dim=1).tolist()
        return [row[: _wanted(q)] for row, q in zip(rows, questions, strict=True)]

    def _batch(
        self, rows: Sequence[np.ndarray[Any, Any]], questions: Sequence[Question]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, which of them exist and which a landmark follows, [B, T]: all rows end in the last column."""
        width = max(map(len, rows))
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask, close = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
        for i, (row, q) in enumerate(zip(rows, questions, strict=True)):
            first = width - len(row)
            ids[i, first:] = torch.from_numpy(row)
            mask[i, first:] = True
            close[i, [first + place for place in q.marks]] = True
        device = self.model.device
        return ids.to(device), mask.to(device), close.to(device)


def _batches(questions: Sequence[Question]) -> Iterator[Sequence[Question]]:
    return (questions[first : first + _TOGETHER] for first in range(0, len(questions), _TOGETHER))


def _wanted(question: Question) -> int:
    return len(question.answer) + (0 if question.fixed else _MORE_TOKENS)


@contextmanager
def own_folder(parent: str | Path | None) -> Iterator[Path | None]:
    """An empty folder for one haystack's memory, removed at the end; None where none was named."""
    if parent is None:
        yield None
        return
    Path(parent).mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=parent, prefix="haystack-") as folder:
        yield Path(folder)


# --- any model of transformers ------------------------------------------------------------------------------


class WholeTextAsker:
    """Puts whole texts to a causal language model of transformers: it reads each from its beginning.

    ``begin``: tokens that its tokenizer puts before a text; they count as tokens of it.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.begin = beginning(tokenizer)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.reading = Reading(memory_bytes=None, resident_bytes=None)

    def text(self, haystack: Haystack, needles: Sequence[Needle], question: Question) -> Tensor:
        """[1, T] up to the answer."""
        rows = haystack.holding(needles)[0 : haystack.chunks].reshape(-1)
        parts = [torch.tensor(self.begin, dtype=torch.int64), rows, torch.from_numpy(question.prompt)]
        return torch.cat(parts)[None].to(self.model.device)

    def ask(self, text: Tensor, question: Question) -> Answer:
        given = torch.from_numpy(question.answer[: question.needed - 1])[None].to(text.device)
        ids = torch.cat([text, given], dim=1)
        keep: dict[str, Any] = {"logits_to_keep": question.needed} if self._keeps else {}
        began = time.perf_counter()
        logits = self.model(ids, use_cache=False, **keep).logits[0, -question.needed :]
        self.reading.seconds += time.perf_counter() - began
        self.reading.tokens += ids.shape[1]
        return Answer(logits.argmax(-1).tolist(), logits, None)

    def generate(self, text: Tensor, question: Question) -> list[int]:
        count, T = _wanted(question), text.shape[1]
        if (most := longest_text(self.model)) is not None:
            count = min(count, most - T + 1)  # the last one is read no more
        with self._greedy():
            out = self.model.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=count)
        return out[0, T:].tolist()

    @contextmanager
    def _greedy(self) -> Iterator[None]:
        """Inside, ``generate`` takes the likeliest token each time, whatever penalties the model came with."""
        own, tokenizer = self.model.generation_config, self.tokenizer
        ends = tokenizer.eos_token_id if own.eos_token_id is None else own.eos_token_id
        pads = [token for token in (own.pad_token_id, tokenizer.pad_token_id) if token is not None]
        pad = pads[0] if pads else (ends[0] if isinstance(ends, list) else ends)
        self.model.generation_config = GenerationConfig(
            do_sample=False, num_beams=1, eos_token_id=ends, pad_token_id=pad
        )
        try:
            yield
        finally:
            self.model.generation_config = own
