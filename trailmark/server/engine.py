"""One thread owns a model: it reads prompts piece by piece and decodes all answers together, as one ragged batch."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from trailmark.memory import ChunkCache
from trailmark.ops.arguments import require
from trailmark.server.drawing import Draw, Drawn, Sampling, draw
from trailmark.server.following import Follower, Retrieved
from trailmark.server.jobs import Answer, Busy, Finish, Job, Token, Wakes

__all__ = ["Answer", "Busy", "Engine", "Job", "Retrieved", "Sampling", "Token"]


class _Prompt:
    """A job that is being read."""

    def __init__(self, answer: Answer, model: Any) -> None:
        self.answer, job = answer, answer.job
        self.cache: ChunkCache = model.new_cache() if job.cache is None else job.cache
        self.done = 0
        self.landmark = len(job.prompt) if job.landmark is None else job.landmark

    def last_piece(self, size: int) -> int:
        """Where the piece begins that gives the first logits: it has the landmark, and as much else as fits."""
        prompt = len(self.answer.job.prompt)
        before = prompt - 1 if self.landmark == 0 else self.landmark - 1
        return max(0, min(before, prompt - size))

    def positions(self) -> int:
        """How many its last piece runs through all layers: its tokens, and what earlier ones left to that."""
        state = self.cache.state
        left = 0 if state is None or state.deferred is None else state.deferred.states.shape[1]
        return len(self.answer.job.prompt) - self.done + left

    def can_join(self) -> bool:
        return self.answer.job.n == 1 and self.cache.state is not None


class _Reading:
    """Tokens that are being appended to a cache, or, where it ``looks``, are a question for its focus."""

    def __init__(self, cache: ChunkCache, tokens: Sequence[int], looks: bool = False) -> None:
        self.cache, self.tokens, self.looks = cache, tokens, looks
        self.done, self.stopped = 0, False
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # who waits for it no more may not end it


@dataclass
class _Row:
    """An answer that is being decoded."""

    answer: Answer
    number: int
    draw: Draw
    follower: Follower
    token: int = -1  # the newest, which was not read yet
    made: int = 0
    retrieved: tuple[Retrieved, ...] = ()


class Engine:
    """Answers jobs with one model, in a thread of its own.

    Between two steps of decoding rows join and leave, and one piece of what is to be read is read: a long prompt
    makes the others wait for a piece, no more. What goes wrong in one row's work ends that row.

    Args:
        model: on its device, in evaluation; nobody else calls it meanwhile.
        max_rows: answers that are decoded together.
        max_waiting: jobs that may wait for a place.
        prefill_tokens: of a piece.

    Raises:
        ValueError: a number below 1.
    """

    def __init__(
        self, model: Any, *, max_rows: int = 32, max_waiting: int = 64, prefill_tokens: int = 512
    ) -> None:
        for name, number in (
            ("max_rows", max_rows), ("max_waiting", max_waiting), ("prefill_tokens", prefill_tokens)
        ):  # fmt: skip
            require(number >= 1, name, number, "at least 1")
        self._model, self.max_rows, self.max_waiting = model, max_rows, max_waiting
        self._piece = model.reading_piece(prefill_tokens)
        self._vocabulary = int(model.config.vocab_size)
        self._changed = threading.Condition()
        self._waiting: deque[Answer] = deque()
        self._readings: deque[_Reading] = deque()  # that came since the last step
        self._looking = 0  # questions that wait for their focus
        self._closed = False
        # of the engine's thread alone
        self._pending: deque[_Prompt | _Reading] = deque()
        self._rows: list[_Row] = []
        self._cache: ChunkCache | None = None  # of these rows, in their order
        self._wakes = Wakes()
        self._counts = dict.fromkeys(
            ("steps", "tokens_read", "tokens_made", "answers", "cancelled", "failed"), 0
        )
        self._thread = threading.Thread(target=self._run, name="trailmark-engine", daemon=True)
        self._thread.start()

    # --- of any thread -------------------------------------------------------------------------------------

    def submit(self, job: Job) -> Answer:
        """Have a job answered.

        Raises:
            Busy: as many wait as may.
            ValueError: an empty prompt, tokens outside the vocabulary, or more answers than are decoded together.
            RuntimeError: the engine was closed.
        """
        require(len(job.prompt) > 0, "prompt", "none", "at least one token")
        self._expect_tokens("prompt", job.prompt)
        require(1 <= job.n <= self.max_rows, "n", job.n, f"1 to {self.max_rows} answers (max_rows)")
        marked = len(job.prompt) if job.landmark is None else job.landmark
        require(
            0 <= marked <= len(job.prompt), "landmark", marked, f"0 to {len(job.prompt)} tokens of the prompt"
        )
        answer = Answer(job)
        with self._changed:
            self._expect_open()
            self._expect_room()
            self._waiting.append(answer)
            self._changed.notify()
        return answer

    async def read(self, cache: ChunkCache, tokens: Sequence[int]) -> None:
        """Append tokens to a cache of one row, piece by piece between the steps of decoding.

        Who is cancelled meanwhile goes on once the present piece is done: the cache then holds whole pieces.

        Raises:
            ValueError: as the model's ``read``; what was read so far stays.
            RuntimeError: the engine was closed, before or meanwhile.
        """
        self._expect_tokens("tokens", tokens)
        with self._changed:
            self._expect_open()
            reading = self._begun(_Reading(cache, tokens))
        await _ended(reading)

    async def focus(self, cache: ChunkCache, tokens: Sequence[int]) -> None:
        """The model's ``focus``: to be waited for before a job with this cache, of one row, is submitted.

        Raises:
            Busy, ValueError, RuntimeError: as :meth:`submit`.
        """
        require(len(tokens) > 0, "tokens", "none", "at least one token")
        self._expect_tokens("tokens", tokens)
        with self._changed:
            self._expect_open()
            self._expect_room()
            self._looking += 1
            look = self._begun(_Reading(cache, tokens, looks=True))
        try:
            await _ended(look)
        finally:
            with self._changed:
                self._looking -= 1

    def _begun(self, reading: _Reading) -> _Reading:
        self._readings.append(reading)
        self._changed.notify()
        return reading

    def stats(self) -> dict[str, int]:
        """Rows that are decoded, jobs that wait and questions that look, prompts and texts that are read.

        And since the start: steps of decoding, tokens read and made, jobs that ended, were cancelled or failed.
        """
        return {
            "rows": len(self._rows),
            "waiting": len(self._waiting) + self._looking,
            "reading": len(self._pending) + len(self._readings),
            **self._counts,
        }

    def close(self) -> None:
        """End all jobs as if they were cancelled, and the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _expect_room(self) -> None:
        if len(self._waiting) + self._looking >= self.max_waiting:
            raise Busy(f"{self.max_waiting} jobs wait (max_waiting)")

    def _expect_open(self) -> None:
        if self._closed:
            raise RuntimeError("engine: expected one that runs, this one was closed.")

    def _expect_tokens(self, name: str, tokens: Sequence[int]) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
            wrong = next(token for token in tokens if not 0 <= token < self._vocabulary)
            require(
                False, name, wrong, f"tokens from 0 to {self._vocabulary - 1}", "Use the model's tokenizer."
            )

    # --- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        with torch.inference_mode():
            while self._admit():
                self._read_piece()
                self._wakes.send()
                if self._rows:
                    try:
                        self._step()
                    except Exception as error:  # no one row's work: none can go on
                        rows, self._rows, self._cache = self._rows, [], None
                        for row in rows:
                            self._fail(row.answer, error)
                    self._wakes.send()
        self._end_all()

    def _admit(self) -> bool:
        """Take in what came, for as many rows as there is room; False: the engine was closed."""
        with self._changed:
            while not (self._closed or self._rows or self._pending or self._waiting or self._readings):
                self._changed.wait()
            if self._closed:
                return False
            self._pending.extend(self._readings)
            self._readings.clear()
            taken = len(self._rows)
            taken += sum(item.answer.job.n for item in self._pending if isinstance(item, _Prompt))
            admitted, left = [], deque[Answer]()
            for answer in self._waiting:
                if self._is_over(answer):
                    continue
                if left or taken + answer.job.n > self.max_rows:  # in their order
                    left.append(answer)
                else:
                    taken += answer.job.n
                    admitted.append(answer)
            self._waiting = left
        for answer in admitted:
            try:
                self._pending.append(_Prompt(answer, self._model))
            except Exception as error:
                self._fail(answer, error)
        return True

    def _is_over(self, answer: Answer) -> bool:
        """Whether a job that has no token yet is not wanted any more; it is ended then."""
        if answer.cancelled:
            self._counts["cancelled"] += 1
            answer.end(self._wakes)
        elif (end := answer.job.deadline) is not None and time.monotonic() > end:
            self._counts["failed"] += 1
            answer.end(self._wakes, TimeoutError("deadline: it passed before the first token."))
        else:
            return False
        return True

    def _fail(self, answer: Answer, error: BaseException) -> None:
        answer.cancelled = True  # what else is decoded for it ends too
        if not answer.over:
            self._counts["failed"] += 1
            answer.end(self._wakes, error)

    def _end_all(self) -> None:
        ended = [row.answer for row in self._rows]
        for item in (*self._pending, *self._readings):
            if isinstance(item, _Reading):
                item.future.set_exception(RuntimeError("engine: it was closed before all was read."))
            else:
                ended.append(item.answer)
        for answer in (*ended, *self._waiting):
            answer.end(self._wakes)
        self._rows, self._cache = [], None
        self._pending.clear()
        self._waiting.clear()
        self._wakes.send()

    # --- reading -------------------------------------------------------------------------------------------

    def _read_piece(self) -> None:
        """One piece of what is to be read, in turns; the last pieces of prompts together, where they are short."""
        if not self._pending:
            return
        item = self._pending.popleft()
        try:
            if isinstance(item, _Reading):
                again = self._read_on(item)
            elif self._is_over(item.answer):
                again = False
            elif again := item.done < (first := item.last_piece(self._piece)):
                item.done += self._take(item.cache, item.answer.job.prompt, item.done, first, prompt=True)
            else:
                self._begin_all(self._with_others(item))
        except Exception as error:
            again = False
            if isinstance(item, _Reading):
                item.future.set_exception(error)
            else:
                self._fail(item.answer, error)
        if again:
            self._pending.append(item)

    def _read_on(self, item: _Reading) -> bool:
        if item.looks and not item.stopped:
            self._model.focus(self._tensor(item.tokens)[None], item.cache)
            item.done = len(item.tokens)
        elif item.tokens and not item.stopped:
            item.done += self._take(item.cache, item.tokens, item.done, len(item.tokens))
        if item.done < len(item.tokens) and not item.stopped:
            return True
        item.future.set_result(None)
        return False

    def _take(
        self, cache: ChunkCache, tokens: Sequence[int], done: int, end: int, prompt: bool = False
    ) -> int:
        """Read a piece of tokens ``done ... end - 1``; returns how many."""
        count = min(self._piece, end - done)
        self._model.read(self._tensor(tokens[done : done + count])[None], cache, prompt=prompt)
        self._counts["tokens_read"] += count
        return count

    def _with_others(self, item: _Prompt) -> list[_Prompt]:
        """A prompt and others that wait for their last piece, as many as are no more than a piece together."""
        found, left = [item], self._piece - item.positions()
        for other in list(self._pending) if item.can_join() else ():
            if (
                isinstance(other, _Prompt)
                and other.can_join()
                and other.cache.model == item.cache.model  # a wrong one is told to who brought it
                and all(other.cache is not own.cache for own in found)
                and not other.answer.cancelled
                and other.done >= other.last_piece(self._piece)
                and other.positions() <= left
            ):
                found.append(other)
                left -= other.positions()
                self._pending.remove(other)
        return found

    def _begin_all(self, items: list[_Prompt]) -> None:
        """Read the last pieces of prompts; where one's keeps all from beginning, each by itself."""
        try:
            cache = items[0].cache if len(items) == 1 else ChunkCache.join([item.cache for item in items])
            self._begin(items, cache)
        except _Undone as undone:
            if len(items) == 1:
                self._fail(items[0].answer, undone.error)
                return
            for item, own in zip(items, cache.split(), strict=True):
                item.cache = own
                self._begin_all([item])
        except Exception as error:
            for item in items:
                self._fail(item.answer, error)

    def _begin(self, items: list[_Prompt], cache: ChunkCache) -> None:
        """Read the last pieces of prompts, and draw their answers' first tokens."""
        pieces = [self._tensor(item.answer.job.prompt[item.done :]) for item in items]
        counts = [len(piece) for piece in pieces]
        tokens = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        ends = torch.tensor(counts, device=tokens.device)[:, None]
        marks = torch.tensor([item.landmark - item.done for item in items], device=tokens.device)[:, None]
        close = bool((marks == ends).all()) or place == marks - 1
        present = None if len(set(counts)) == 1 else place < ends
        follower = Follower(self._model)
        out, closed = self._call(cache, tokens, follower.follows, close, present)
        rows = []
        for b, item in enumerate(items):
            item.done += counts[b]
            self._counts["tokens_read"] += counts[b]
            own, job = follower.branch(), item.answer.job
            retrieved = own.after(out.retrieval, b, int(closed[b]), counts[b], cache)
            rows += [
                _Row(item.answer, n, Draw(job.sampling, n), own.branch(), retrieved=retrieved)
                for n in range(job.n)
            ]
        if len(rows) > len(items):  # one prompt, which is read once
            cache = ChunkCache.join([cache.branch() for _ in rows])
        going = self._deliver(rows, out.logits[:, -1].expand(len(rows), -1))
        rows = self._parted(cache, rows, going)
        if rows:
            self._cache = cache if self._cache is None else ChunkCache.join([self._cache, cache])
            self._rows = self._rows + rows

    # --- decoding ------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """One token for each row; those that end leave."""
        rows, cache = self._rows, self._cache
        assert cache is not None
        self._counts["steps"] += 1
        try:
            going = self._decode(cache, rows)
        except _Undone as undone:
            self._step_apart(undone.error)
            return
        self._rows = self._parted(cache, rows, going)
        if not self._rows:
            self._cache = None

    def _parted(self, cache: ChunkCache, rows: list[_Row], going: list[bool]) -> list[_Row]:
        """Those of a cache's rows that go on; the others leave it."""
        ended = [b for b, goes_on in enumerate(going) if not goes_on]
        if not ended:
            return rows
        cache.leave(ended)
        for b in ended:
            self._end_row(rows[b])
        return [row for row, goes_on in zip(rows, going, strict=True) if goes_on]

    def _step_apart(self, error: BaseException) -> None:
        """The same, where one row's work keeps all from going on: each by itself, so that the others do."""
        rows, cache = self._rows, self._cache
        assert cache is not None
        self._rows, self._cache = [], None
        if len(rows) == 1:
            self._fail(rows[0].answer, error)
            return
        staying = []
        for row, own in zip(rows, cache.split(), strict=True):
            try:
                going = self._decode(own, [row])
            except _Undone as undone:
                self._fail(row.answer, undone.error)
                continue
            if self._parted(own, [row], going):
                staying.append((row, own))
        if staying:
            self._rows = [row for row, _ in staying]
            self._cache = ChunkCache.join([own for _, own in staying])

    def _decode(self, cache: ChunkCache, rows: list[_Row]) -> list[bool]:
        tokens = self._tensor([row.token for row in rows])[:, None]
        out, closed = self._call(cache, tokens, rows[0].follower.follows)
        for b, row in enumerate(rows):
            row.retrieved = row.follower.after(out.retrieval, b, int(closed[b]), 1, cache)
        return self._deliver(rows, out.logits[:, -1])

    def _call(
        self, cache: ChunkCache, tokens: Any, follows: bool, close_chunk: Any = False, present: Any = None
    ) -> tuple[Any, Any]:
        """The model's output for tokens [B, T], logits of the last alone; how many chunks [B] each row closed.

        Raises:
            _Undone: it failed; the cache is as it was.
        """
        before = cache.begun(len(tokens)).memory.chunks
        try:
            out = self._model(
                tokens,
                attention_mask=present,
                past_key_values=cache,
                close_chunk=close_chunk,
                logits_to_keep=1,
                output_retrieval=follows,
            )
        except Exception as error:
            raise _Undone(error) from error
        return out, cache.num_chunks - before

    def _deliver(self, rows: list[_Row], logits: torch.Tensor) -> list[bool]:
        """Draw each row's next token by logits [B, V] and hand it over; which rows go on."""
        drawn = draw(logits, [row.draw for row in rows])
        now, going = time.monotonic(), []
        for row, found in zip(rows, drawn, strict=True):
            row.token, row.made = found.token, row.made + 1
            try:
                finish = self._finish(row, found, now)
            except Exception as error:
                self._fail(row.answer, error)
                going.append(False)
                continue
            self._counts["tokens_made"] += 1
            row.answer.put(
                Token(row.number, found.token, found.logprob, found.top, finish, row.retrieved), self._wakes
            )
            going.append(finish is None)
        return going

    def _finish(self, row: _Row, drawn: Drawn, now: float) -> Finish | None:
        answer, job = row.answer, row.answer.job
        if answer.cancelled:
            return "cancelled"
        if drawn.token < 0:
            raise ValueError(
                "model: expected finite logits, got NaN or Infinity. Its weights or its memory are damaged: trailmark "
                "verify finds what was changed since it was written."
            )
        if job.ends(row.number, drawn.token):
            return "stop"
        if row.made == job.sampling.max_tokens:
            return "length"
        return "deadline" if job.deadline is not None and now > job.deadline else None

    def _end_row(self, row: _Row) -> None:
        """Its tokens are handed over already."""
        answer = row.answer
        answer.ended += 1
        if answer.ended == answer.job.n and not answer.over:  # over: it failed
            self._counts["cancelled" if answer.cancelled else "answers"] += 1
            answer.end(self._wakes)

    def _tensor(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor(tokens).to(self._model.device)


async def _ended(reading: _Reading) -> None:
    """Wait for its end; who is cancelled stops it, and waits for its present piece."""
    done = asyncio.wrap_future(reading.future)
    try:
        await asyncio.shield(done)
    except asyncio.CancelledError:
        reading.stopped = True
        with contextlib.suppress(BaseException):
            await done
        raise


class _Undone(Exception):
    """A call of the model failed, and nothing of it stays."""

    def __init__(self, error: Exception) -> None:
        self.error = error
