"""Questions put to a model that has read a haystack: what it answers, and which chunks it selected for that.

Two askers have one interface: a model with trailmark's caches reads a haystack into a memory (:class:`MemoryAsker`),
any other causal language model reads each whole text from its beginning (:class:`WholeTextAsker`).
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from trailmark.data.chat import beginning
from trailmark.data.needles.haystacks import Haystack, Needle
from trailmark.data.needles.tasks import Question
from trailmark.evaluation.losses import longest_text
from trailmark.evaluation.needles.planting import planted
from trailmark.evaluation.reading import resident_bytes
from trailmark.evaluation.subject import generating_by
from trailmark.memory import ChunkCache
from trailmark.models import TrailmarkForCausalLM
from trailmark.models.reads import Selection

Progress = Callable[[int], None]  # is given the tokens of a haystack that are read
_READ_TOKENS, _PIECES = 4096, 16  # a haystack's, that are made at a time: so many of the model's own pieces
_TOGETHER = 64  # questions in a batch: memory for what they read does not grow with their number
_MORE_TOKENS = 4  # than the expected answer's that are generated: another way to write it may be longer
_FREE_TOKENS = 32  # the same, where it may stand in a sentence


@dataclass
class Answer:
    """What a model answers to one question.

    Attributes:
        tokens: the best ones, each after the true ones before it: one more than the answer's if it must end.
        logits: [n, V], whose best tokens these are.
        selected: at each of the question's landmarks what each group selected; of Landmark Attention and HiLS what
            each layer and head read at the token before it and at the one after it. None: the model retrieves nothing.
    """

    tokens: list[int]
    logits: Tensor
    selected: list[list[Selection]] | None


@dataclass
class ReadingCost:
    """What reading haystacks cost.

    Attributes:
        memory_bytes: chunk memory and window of one haystack; None: not known.
        resident_bytes: how much the process grew while it read the first haystack; None: not known.
    """

    tokens: int = 0
    seconds: float = 0.0
    memory_bytes: int | None = None
    resident_bytes: int | None = None


class Asker(Protocol):
    """Reads haystacks with needles in them, and asks.

    Attributes:
        shares: one reading of a haystack serves all its trials.
    """

    shares: bool

    def reading(
        self, haystack: Haystack, cost: ReadingCost, progress: Progress
    ) -> AbstractContextManager[Any]:
        """Read a haystack that all its trials share; where each trial has to be read anew, do nothing."""

    def holding(
        self, read: Any, haystack: Haystack, needles: Sequence[Needle], cost: ReadingCost, progress: Progress
    ) -> AbstractContextManager[Any]:
        """Give what questions can be put to: ``haystack``, of which :meth:`reading` gave ``read``, with needles."""

    def ask(self, held: Any, questions: Sequence[Question], cost: ReadingCost) -> list[Answer]:
        """Ask each question by itself.

        Greedy decoding gives an answer exactly if every token of it is the best after the true ones before it: one
        call decides.
        """

    def generate(self, held: Any, questions: Sequence[Question]) -> list[list[int]]:
        """Go on from each question, with its landmarks, token after token the likeliest."""


def wanted(question: Question) -> int:
    """How many tokens are generated for a question."""
    more = _FREE_TOKENS if question.free else _MORE_TOKENS
    return len(question.answer) + (0 if question.fixed else more)


# --- models with trailmark's caches -------------------------------------------------------------------------


class MemoryAsker:
    """Reads haystacks into a memory, and plants needles there where the model allows it.

    Args:
        model: in eval mode.
        chunk_size: of the haystacks.
        new_cache: makes an empty cache, in a folder of its own if the memory lies in one.
        memory_folder: where such folders are made; None: none is needed.
        chunks: of the haystacks; where windows see all of so few, each trial is read anew.
        shared: whether a haystack has several trials; the text of a single one is read once, with its needles.
    """

    def __init__(
        self,
        model: TrailmarkForCausalLM,
        chunk_size: int,
        new_cache: Callable[[Path | None], ChunkCache],
        memory_folder: str | Path | None = None,
        chunks: int | None = None,
        shared: bool = True,
    ) -> None:
        self.model, self.chunk_size = model, chunk_size
        self.new_cache, self.memory_folder = new_cache, memory_folder
        self.shares = (
            shared and model.can_be_planted and (chunks is None or chunks > model.chunks_in_sight(chunk_size))
        )

    def reading(
        self, haystack: Haystack, cost: ReadingCost, progress: Progress
    ) -> AbstractContextManager[ChunkCache | None]:
        return self._read(haystack, cost, progress) if self.shares else nullcontext()

    def holding(
        self,
        read: ChunkCache | None,
        haystack: Haystack,
        needles: Sequence[Needle],
        cost: ReadingCost,
        progress: Progress,
    ) -> AbstractContextManager[ChunkCache]:
        chunks, texts = haystack.changed(needles)
        # what the layers see together of the end is no memory alone
        free = 0 if read is None else haystack.chunks - self.model.chunks_in_sight(self.chunk_size)
        if read is None or bool((chunks >= free).any()):
            return self._read(haystack.holding(needles), cost, progress)
        return planted(self.model, read, haystack, chunks, texts)

    def read_on(self, cache: ChunkCache, haystack: Haystack) -> Iterator[int]:
        """Read what a memory lacks of a haystack; after each piece, how many tokens it holds."""
        N, S = haystack.shape
        # whole pieces of the model's own: a haystack is cut as if it came in one call
        step = _PIECES * self.model.reading_piece(_READ_TOKENS)
        for start in range(cache.get_seq_length(), N * S, step):
            stop, row = min(start + step, N * S), start // S
            ids = haystack[row : -(-stop // S)].reshape(1, -1)[:, start - row * S : stop - row * S]
            self.model.read(ids.to(self.model.device), cache)
            yield stop

    @contextmanager
    def _read(self, haystack: Haystack, cost: ReadingCost, progress: Progress) -> Iterator[ChunkCache]:
        with _own_folder(self.memory_folder) as folder:
            cache = self.new_cache(folder)
            first, read = not cost.tokens, cost.tokens
            before, began = resident_bytes(), time.perf_counter()
            for stop in self.read_on(cache, haystack):
                cost.tokens = read + stop
                progress(stop)
            cost.seconds += time.perf_counter() - began
            if first:
                # less than before: what came earlier was given back meanwhile
                cost.resident_bytes = max(0, resident_bytes() - before)
                cost.memory_bytes = cache.num_bytes()
            yield cache

    def ask(self, held: ChunkCache, questions: Sequence[Question], cost: ReadingCost) -> list[Answer]:
        """Ask in batches, each question on a branch of its own."""
        return [answer for some in _batches(questions) for answer in self._ask(held, some)]

    def _ask(self, cache: ChunkCache, questions: Sequence[Question]) -> list[Answer]:
        given = [np.concatenate([q.prompt, q.answer[: q.needed - 1]]) for q in questions]
        ids, mask, close = self._batch(given, questions)
        width, keep = ids.shape[1], max(q.needed for q in questions)
        out = self.model(
            ids,
            attention_mask=mask,
            past_key_values=self._branch(cache, questions),
            close_chunk=close,
            logits_to_keep=keep,
            output_retrieval=self.model.config.retrieves,
        )
        assert out.logits is not None
        answers = []
        for i, q in enumerate(questions):
            logits = out.logits[i, keep - q.needed :]
            selected = None
            if out.retrieval is not None:
                columns = [width - len(given[i]) + mark for mark in q.landmarks]
                landmarks = list(zip(q.closings(self.chunk_size), columns, strict=True))
                selected = self.model.chunks_read(out.retrieval, i, landmarks)
            answers.append(Answer(logits.argmax(-1).tolist(), logits, selected))
        return answers

    def generate(self, held: ChunkCache, questions: Sequence[Question]) -> list[list[int]]:
        return [row for some in _batches(questions) for row in self._generate(held, some)]

    def _generate(self, cache: ChunkCache, questions: Sequence[Question]) -> list[list[int]]:
        ids, mask, close = self._batch([q.prompt for q in questions], questions)
        branch, tokens = self._branch(cache, questions), []
        more: dict[str, Any] = {"attention_mask": mask, "close_chunk": close}
        for _ in range(max(map(wanted, questions))):
            out = self.model(ids, past_key_values=branch, logits_to_keep=1, **more)
            ids, more = out.logits[:, -1].argmax(-1, keepdim=True), {}
            tokens.append(ids)
        rows = torch.cat(tokens, dim=1).tolist()
        return [row[: wanted(q)] for row, q in zip(rows, questions, strict=True)]

    def _branch(self, cache: ChunkCache, questions: Sequence[Question]) -> ChunkCache:
        """A row for each question, which focuses on what that asks for, whatever of the answer is given."""
        branch = cache.branch(len(questions))
        if self.model.focuses:
            ids, mask = _side_by_side([q.asked for q in questions])
            self.model.focus(ids.to(self.model.device), branch, mask.to(self.model.device))
        return branch

    def _batch(
        self, rows: Sequence[np.ndarray[Any, Any]], questions: Sequence[Question]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, which of them exist and which a landmark follows, [B, T]: all rows end in the last column."""
        ids, mask = _side_by_side(rows)
        close = torch.zeros_like(mask)
        for i, (row, q) in enumerate(zip(rows, questions, strict=True)):
            close[i, [ids.shape[1] - len(row) + place for place in q.marks]] = True
        device = self.model.device
        return ids.to(device), mask.to(device), close.to(device)


def _side_by_side(rows: Sequence[np.ndarray[Any, Any]]) -> tuple[Tensor, Tensor]:
    """Tokens and which of them exist, [B, T]: all rows end in the last column."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for own, there, row in zip(ids, mask, rows, strict=True):
        first = len(own) - len(row)
        own[first:] = torch.from_numpy(row)
        there[first:] = True
    return ids, mask


def _batches(questions: Sequence[Question]) -> Iterator[Sequence[Question]]:
    return (questions[first : first + _TOGETHER] for first in range(0, len(questions), _TOGETHER))


@contextmanager
def _own_folder(parent: str | Path | None) -> Iterator[Path | None]:
    """An empty folder for one haystack's memory, removed at the end; None where none was named."""
    if parent is None:
        yield None
        return
    Path(parent).mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=parent, prefix="haystack-") as folder:
        yield Path(folder)


# --- any model of transformers ------------------------------------------------------------------------------


class WholeTextAsker:
    """Puts whole texts to a causal language model of transformers, which reads each from its beginning.

    Attributes:
        begin: tokens that its tokenizer puts before a text; they count as tokens of it.
    """

    shares = False

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.begin = beginning(tokenizer)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def reading(
        self, haystack: Haystack, cost: ReadingCost, progress: Progress
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def holding(
        self, read: None, haystack: Haystack, needles: Sequence[Needle], cost: ReadingCost, progress: Progress
    ) -> AbstractContextManager[Tensor]:
        """Give the text's tokens up to a question's, [t] int64."""
        rows = haystack.holding(needles)[0 : haystack.chunks].reshape(-1)
        return nullcontext(torch.cat([torch.tensor(self.begin, dtype=torch.int64), rows]))

    def ask(self, held: Tensor, questions: Sequence[Question], cost: ReadingCost) -> list[Answer]:
        return [self._ask(held, question, cost) for question in questions]

    def _ask(self, held: Tensor, question: Question, cost: ReadingCost) -> Answer:
        ids = self._text(held, question.prompt, question.answer[: question.needed - 1])
        keep: dict[str, Any] = {"logits_to_keep": question.needed} if self._keeps else {}
        began = time.perf_counter()
        logits = self.model(ids, use_cache=False, **keep).logits[0, -question.needed :]
        cost.seconds += time.perf_counter() - began
        cost.tokens += ids.shape[1]
        return Answer(logits.argmax(-1).tolist(), logits, None)

    def generate(self, held: Tensor, questions: Sequence[Question]) -> list[list[int]]:
        written = []
        for question in questions:
            text = self._text(held, question.prompt)
            count, T = wanted(question), text.shape[1]
            if (most := longest_text(self.model)) is not None:
                count = min(count, most - T + 1)  # the last one is read no more
            model = generating_by(self.model, self._greedy())
            out = model.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=count)
            written.append(out[0, T:].tolist())
        return written

    def _text(self, held: Tensor, *more: np.ndarray[Any, Any]) -> Tensor:
        """[1, T], where the model computes."""
        return torch.cat([held, *map(torch.from_numpy, more)])[None].to(self.model.device)

    def _greedy(self) -> GenerationConfig:
        """The likeliest token each time, up to an end of the model's own."""
        own, tokenizer = self.model.generation_config, self.tokenizer
        ends = tokenizer.eos_token_id if own.eos_token_id is None else own.eos_token_id
        pads = [token for token in (own.pad_token_id, tokenizer.pad_token_id) if token is not None]
        pad = pads[0] if pads else (ends[0] if isinstance(ends, list) else ends)
        return GenerationConfig(do_sample=False, num_beams=1, eos_token_id=ends, pad_token_id=pad)
