"""What an engine is asked for and what it gives: jobs, their answers, and who waits for these."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal

from trailmark.memory import ChunkCache
from trailmark.server.drawing import Sampling
from trailmark.server.following import Retrieved

Finish = Literal["stop", "length", "cancelled", "deadline"]


class Busy(Exception):
    """As many jobs wait as may: try again later."""


@dataclass(frozen=True)
class Job:
    """A prompt to be answered."""

    prompt: tuple[int, ...]
    """Token numbers, at least one."""
    cache: ChunkCache | None
    """Of one row, a branch of its own, which the engine goes on from; None: nothing was read before."""
    sampling: Sampling
    n: int = 1
    """Answers to the prompt, which is read once."""
    deadline: float | None = None
    """``time.monotonic()`` after which it ends; None: none."""
    ends: Callable[[int, int], bool] = lambda answer, token: False
    """Asked in the engine's thread with the number of an answer and its newest token: whether that is the last."""
    landmark: int | None = None
    """How many of the prompt's tokens stand before the early landmark; None: all. 0: there is none."""


@dataclass(frozen=True)
class Token:
    """A token of an answer."""

    answer: int
    token: int
    logprob: float
    """Natural logarithm, of what the model predicts: without temperature and ``top_p``."""
    top: tuple[tuple[int, float], ...]
    """The most likely tokens, with theirs."""
    finish: Finish | None
    """Why it is the answer's last; None: it is not."""
    retrieved: tuple[Retrieved, ...]
    """What was read while it was predicted."""


class Answer:
    """What a job gives: its tokens as they come, those of all its answers in turn.

    Iterating raises what went wrong with this job: TimeoutError where its deadline passed before the first token. A job
    that is cancelled before its first token gives none.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.cancelled = False
        self._lock = threading.Lock()
        self._tokens: deque[Token] = deque()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self.over = False
        self._error: BaseException | None = None
        self.ended = 0  # how many of its answers have

    def cancel(self) -> None:
        """End it with the next token; what waits is not begun. May be called from any thread."""
        self.cancelled = True

    def __aiter__(self) -> AsyncIterator[Token]:
        return self

    async def __anext__(self) -> Token:
        while True:
            with self._lock:
                if self._tokens:
                    return self._tokens.popleft()
                if self.over:
                    if self._error is not None:
                        raise self._error
                    raise StopAsyncIteration
                loop = asyncio.get_running_loop()
                self._waiter = loop, loop.create_future()
                future = self._waiter[1]
            await future

    # --- of the engine's thread ----------------------------------------------------------------------------

    def put(self, token: Token, wakes: Wakes) -> None:
        with self._lock:
            if not self.over:
                self._tokens.append(token)
            wakes.add(self._taken_waiter())

    def end(self, wakes: Wakes, error: BaseException | None = None) -> None:
        with self._lock:
            if not self.over:
                self.over, self._error = True, error
            wakes.add(self._taken_waiter())

    def _taken_waiter(self) -> tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None:
        waiter, self._waiter = self._waiter, None
        return waiter


class Wakes:
    """Who waits for what a step gave: each event loop is called once."""

    def __init__(self) -> None:
        self._futures: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}

    def add(self, waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None) -> None:
        if waiter is not None:
            self._futures.setdefault(waiter[0], []).append(waiter[1])

    def send(self) -> None:
        for loop, futures in self._futures.items():
            with contextlib.suppress(RuntimeError):  # a loop that was closed
                loop.call_soon_threadsafe(_wake, futures)
        self._futures = {}


def _wake(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
