"""Texts to tokens in several processes, in order: what ``trailmark prepare`` spends its time on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from trailmark.data.corpus import rust_alone, tokenize

Ids = npt.NDArray[np.uint32]
T = TypeVar("T")
_AHEAD = 2  # jobs per process that are read ahead: enough to keep all busy, little to hold in memory


class Encoder:
    """A tokenizer's tokens without special tokens; can be sent to another process.

    A Rust backend is sent as its own description: the process needs no transformers, and starts at once.
    """

    def __init__(self, tokenizer: Any) -> None:
        from transformers import ByT5Tokenizer

        self.bytes_alone = isinstance(tokenizer, ByT5Tokenizer)
        self._description: str | None = None
        self._tokenizer: Any = tokenizer
        if rust_alone(tokenizer):
            self._description = tokenizer.backend_tokenizer.to_str()
            self._whole_special_tokens = not tokenizer.split_special_tokens
            self._tokenizer = None

    def __call__(self, texts: Sequence[str]) -> list[Ids]:
        """The tokens of each text, [n] uint32."""
        if self._description is not None:
            backend = self._backend()
            return [np.asarray(backend.encode(t, add_special_tokens=False).ids, np.uint32) for t in texts]
        return [tokenize([text], self._tokenizer).astype(np.uint32) for text in texts]

    def _backend(self) -> Any:
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            assert self._description is not None
            self._tokenizer = Tokenizer.from_str(self._description)
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            self._tokenizer.encode_special_tokens = not self._whole_special_tokens
        return self._tokenizer

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if self._description is not None:
            state["_tokenizer"] = None
        return state


def encode_in_order(
    jobs: Iterable[tuple[T, list[str]]], encoder: Encoder, processes: int
) -> Generator[tuple[T, list[Ids]], None, None]:
    """The tokens of each job's texts, with what came along, in the order of the jobs.

    Bytes are made in this process: that is faster than sending them to another.

    Raises:
        ValueError: a process was killed.
    """
    if processes == 1 or encoder.bytes_alone:
        for given, texts in jobs:
            yield given, encoder(texts)
        return
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=_start, initargs=(encoder,)
    )
    pending: deque[tuple[T, Future[Any]]] = deque()
    try:
        for given, texts in jobs:
            pending.append((given, pool.submit(_encode, texts)))
            if len(pending) > _AHEAD * processes:
                given, future = pending.popleft()
                yield given, _split(*future.result())
        while pending:
            given, future = pending.popleft()
            yield given, _split(*future.result())
    except BrokenProcessPool as error:
        raise ValueError(
            f"processes: one of {processes} tokenising processes was killed; is memory short? "
            "The same command goes on where it stopped; use fewer --processes."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# --- in another process ------------------------------------------------------------------------------------

_encoder: Callable[[Sequence[str]], list[Ids]]


def _start(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed parent cannot end us, and we would wait for its next job for ever."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _encode(texts: list[str]) -> tuple[Ids, list[int]]:
    parts = _encoder(texts)  # sent back as one array: less to pack
    return np.concatenate(parts), [len(part) for part in parts]


def _split(tokens: Ids, lengths: list[int]) -> list[Ids]:
    return np.split(tokens, np.cumsum(lengths)[:-1])
