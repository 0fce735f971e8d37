"""A conversation over a memory, and which chunks were read for each answer.

The memory was read as a text; the turns of the conversation follow it, as the tokenizer's chat template writes them. A
landmark closes the chunk of each question, so that the answer's first token already reads what the question selected.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trailmark.data.chat import ChatTurns, Options, with_passages
from trailmark.data.corpus import text_tokens
from trailmark.evaluation.generation import Sampling, pieces
from trailmark.evaluation.subject import Subject
from trailmark.memory import ChunkCache
from trailmark.models.reads import NOTHING, Read
from trailmark.trace.passages import Passage, Passages
from trailmark.trace.texts import sources_of


@dataclass(frozen=True)
class ReadChunk:
    """A chunk that was read for an answer.

    Attributes:
        weight: the mean over the tokens that were read while the answer was written.
        passages: where it lies in the files of the memory; none: it is of the conversation, or its file is not known.
        said: its text, where it is of the conversation.
    """

    chunk: int
    weight: float
    passages: tuple[Passage, ...] = ()
    said: str | None = None


class Conversation:
    """Questions and answers, one after the other, on a branch: a saved memory stays as it is.

    Args:
        subject: the model and its tokenizer.
        memory: a folder that ``trailmark read`` made; None: there is nothing but the conversation.
        system: what stands in the role "system"; None: what the template has.
        memory_tier: where keys and values of the memory lie.
        plain: a line for the question and one for the answer instead of the chat template.
        template: options of the chat template.
        quotes: the passages of the memory that a question looks at (``model.focus``) stand before it, as their files
            have them: within the window all layers read them as any prompt.

    Attributes:
        names: of what reads ("group" or "layer"); None: the model reads nothing of its past.
        quoted: the passages that stand before the last question.

    Raises:
        ValueError: a chat template that cannot be used, or does not read an option; no memory, a damaged one or
            another model's.
    """

    def __init__(
        self,
        subject: Subject,
        memory: Path | None = None,
        sampling: Sampling | None = None,
        *,
        system: str | None = None,
        memory_tier: str = "disk",
        plain: bool = False,
        template: Options | None = None,
        quotes: bool = True,
    ) -> None:
        self._model, self._tokenizer, self._quotes = subject.model, subject.tokenizer, quotes
        self._sampling = sampling or Sampling(max_new_tokens=256)
        self._turns = ChatTurns.plain(system) if plain else ChatTurns.of(self._tokenizer, system, template)
        self._ends = self._turns.ends(self._tokenizer, self._model)
        sources: list[dict[str, Any]] = []
        self._memory: ChunkCache | None = None
        if memory is not None:
            self._memory = self._model.load_cache(memory, memory_tier)
            sources = sources_of(self._memory.notes, memory)
        read = 0 if self._memory is None else self._memory.get_seq_length()
        self._full = sum(source["tokens"] for source in sources) == read
        size = getattr(self._model.config, "chunk_size", None) or 1
        self._passages = Passages(sources if self._full else [], self._tokenizer, size, subject.beginning)
        self._beginning: list[int] = [] if read else subject.beginning
        follow = self._model.follow_reads() if self._model.config.retrieves else None
        self._follow, self.names = follow, None if follow is None else follow.group_name
        self.begin()

    def begin(self) -> None:
        """A conversation of its own over the same memory: whatever was said before is forgotten."""
        self._cache = self._model.new_cache() if self._memory is None else self._memory.branch()
        read = self._cache.get_seq_length()
        self._before = self._turns.inside(self._tokenizer) if read or self._beginning else self._turns.first
        self._waiting = np.array(self._beginning, np.int64)  # tokens that the model has not read yet
        self._chunks = SaidChunks(read, getattr(self._model.config, "chunk_size", None))
        self._now = (NOTHING,) * (0 if self._follow is None else self._follow.num_groups)
        self._heard: list[tuple[Read, ...]] = []
        self.quoted: list[Passage] = []

    def ask(self, question: str) -> Generator[str, None, None]:
        """The answer, piece by piece as it is written. Who takes no more stops it, and may ask on.

        Raises:
            ValueError: an empty question, or one that is no UTF-8 text.
        """
        try:
            question.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"question: expected UTF-8 text, got {question!r}. Set the terminal to UTF-8, or convert what is piped "
                "in: iconv -f ENCODING -t UTF-8"
            ) from error
        if not question.strip():
            raise ValueError("question: expected at least one word, got none.")
        question = question.strip()
        # its own words alone: those of a template look at the text's beginning, whatever is asked
        words = text_tokens(question, self._tokenizer).astype(np.int64)
        self.quoted = self._passages_of(self._look(words)) if len(words) and self._model.focuses else []
        before = [passage.text for passage in self.quoted if passage.text is not None]
        asked, cue = self._turns.question(with_passages(before, question), self._tokenizer, self._before)
        ids = np.concatenate([self._waiting, asked])
        self._heard = []
        with self._followed(), torch.no_grad():
            self._model(self._tensor(ids), past_key_values=self._cache, close_chunk=True, logits_to_keep=1)
        self._before, self._waiting, self._heard = self._turns.following, cue, []
        written: list[int] = []
        known = self._chunks.num_tokens
        ends = sorted(self._ends) or None
        try:
            with self._followed():
                yield from pieces(
                    self._model,
                    self._tokenizer,
                    self._tensor(cue),
                    self._cache,
                    self._sampling,
                    written,
                    self._line_ended if self._turns.one_line else lambda tokens: False,
                    close_chunk=False,
                    eos_token_id=ends,
                    pad_token_id=None if ends is None else ends[0],
                )
        finally:
            # what ends an answer is written by the next turn
            said = [token for token in written if token not in self._ends]
            self._waiting = np.array([*cue.tolist(), *said], np.int64)[self._chunks.num_tokens - known :]

    def _look(self, words: np.ndarray[Any, Any]) -> list[int]:
        """Have the next question and its answer choose among what its words look at; the chunks of the memory there.

        They look at the memory as it was read: earlier turns would take the places of the text, and may be chosen
        anyway.
        """
        looking = self._cache if self._memory is None else self._memory.branch()
        self._model.focus(self._tensor(words), looking)
        if self._memory is None:
            return []
        assert self._cache.state is not None
        assert looking.state is not None
        self._cache.state = replace(self._cache.state, focus=looking.state.focus)
        return focused_chunks(looking)

    def _passages_of(self, chunks: list[int]) -> list[Passage]:
        """What stands before a question; chunks that follow each other are one passage."""
        return self._passages.joined(chunks) if self._quotes else []

    @property
    def num_groups(self) -> int:
        """Of groups (or layers) that read; 0: the model reads nothing of its past."""
        return len(self._now)

    def reads(self, most: int) -> list[list[ReadChunk]]:
        """For each group (or layer) the chunks that were read for the last answer, ``most`` of the largest weights."""
        return [self._best(weights, most) for weights in self._weights()]

    def reads_of_all(self, most: int) -> list[ReadChunk]:
        """As :meth:`reads`, with the mean weights of all groups (or layers)."""
        every, mean = self._weights(), dict[int, float]()
        for weights in every:
            for chunk, weight in weights.items():
                mean[chunk] = mean.get(chunk, 0.0) + weight / len(every)
        return self._best(mean, most)

    def _weights(self) -> list[dict[int, float]]:
        """Of each group (or layer), by chunk."""
        found = []
        for group in range(len(self._now)):
            weights: dict[int, float] = {}
            for heard in self._heard:
                for chunk, weight in zip(
                    heard[group].chunks.tolist(), heard[group].weights.tolist(), strict=True
                ):
                    weights[chunk] = weights.get(chunk, 0.0) + weight / len(self._heard)
            found.append(weights)
        return found

    def _best(self, weights: dict[int, float], most: int) -> list[ReadChunk]:
        best = sorted(weights, key=lambda chunk: (-weights[chunk], chunk))[:most]
        return [self._placed(chunk, weights[chunk]) for chunk in best]

    @property
    def troubles(self) -> list[str]:
        """Why no passage of some files, or of any, is shown and put before a question."""
        if self._memory is not None and not self._full:
            return ["the memory does not name all that was read into it"]
        return [f"{str(path)!r} {trouble}" for path, trouble in self._passages.troubles]

    def _placed(self, chunk: int, weight: float) -> ReadChunk:
        passages, tokens = tuple(self._passages.of(chunk)), self._chunks.tokens(chunk)
        said = self._tokenizer.decode(tokens, skip_special_tokens=True) if tokens else None
        return ReadChunk(chunk, weight, passages, said)

    def _line_ended(self, tokens: list[int]) -> bool:
        return "\n" in self._tokenizer.decode(tokens).lstrip()

    def _tensor(self, ids: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(ids)[None].to(self._model.device)

    @contextmanager
    def _followed(self) -> Iterator[None]:
        """Inside, every call of the model says what it selected, and what it read is known."""

        def before(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, kwargs | {"output_retrieval": self._follow is not None}

        def after(module: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
            ids = args[0] if args else kwargs["input_ids"]
            self._chunks.add(ids[0].tolist(), bool(kwargs.get("close_chunk", False)))
            if self._follow is not None and out.retrieval is not None:
                heard, self._now = self._follow.through(self._now, out.retrieval, ids.shape[1])
                self._heard.append(heard)

        hooks = (
            self._model.register_forward_pre_hook(before, with_kwargs=True),
            self._model.register_forward_hook(after, with_kwargs=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def focused_chunks(cache: ChunkCache) -> list[int]:
    """The chunks in the focus of a cache of one row, ascending; none where it has no focus."""
    focus = () if cache.state is None else cache.state.focus
    return [] if not focus or focus[0] is None else focus[0].chunks.tolist()


class SaidChunks:
    """The tokens of a conversation by the number of their chunk, behind a text of full chunks."""

    def __init__(self, num_tokens: int, chunk_size: int | None) -> None:
        self.num_tokens, self._size = num_tokens, chunk_size
        self._number, self._filled = divmod(num_tokens, chunk_size or 1)
        self._held: dict[int, list[int]] = {}

    def add(self, ids: Sequence[int], closed: bool) -> None:
        """Tokens that the model has read; ``closed``: a landmark follows the last of them."""
        self.num_tokens += len(ids)
        if self._size is None:
            return
        for place, token in enumerate(ids, 1):
            self._held.setdefault(self._number, []).append(token)
            self._filled += 1
            if self._filled == self._size or (closed and place == len(ids)):
                self._number, self._filled = self._number + 1, 0

    def tokens(self, chunk: int) -> list[int]:
        return self._held.get(chunk, [])
