"""Continuing a prompt, after a text of any length or a memory of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
    set_seed,
)
from transformers.generation import BaseStreamer

from trailmark.data.corpus import tokenize
from trailmark.evaluation.subject import Subject, generating_by
from trailmark.memory import ChunkCache
from trailmark.models.generation import expect_temperature
from trailmark.trace.texts import file_tokens
from trailmark.trace.token_texts import START, silent_ids, texts_of


def stream(
    subject: Subject,
    prompt: str | None,
    file: Path | None,
    memory: Path | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> Iterator[str]:
    """The continuation, piece by piece as it is generated.

    Args:
        prompt: what to go on from; None: the end of ``file``.
        file: a text of any length, read before the prompt.
        memory: a folder that ``trailmark read`` made; it stays as it is.
    """
    sampling = Sampling(max_new_tokens, temperature, seed)
    if prompt is None and file is None:
        raise ValueError("prompt: expected --prompt TEXT, --file FILE or both, got neither.")
    model, tokenizer = subject.model, subject.tokenizer
    try:
        ids = tokenize([prompt or ""], tokenizer)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"prompt: expected UTF-8 text, got {prompt!r}. Set the terminal to UTF-8."
        ) from error
    if prompt is not None and not len(ids):
        raise ValueError("prompt: expected at least one character, got an empty prompt.")
    # a branch: what is asked leaves no trace in the memory's files
    cache = model.new_cache() if memory is None else model.load_cache(memory).branch()
    begin = [] if cache.get_seq_length() else subject.beginning
    if begin and file is None and ids[: len(begin)].tolist() != begin:
        ids = np.concatenate([np.asarray(begin, ids.dtype), ids])
    last = torch.from_numpy(ids).long()[None].to(model.device)
    if file is not None:
        # of a file that is gone on with, what the window shows is prompt, where that is predicted otherwise than read
        own = 1 if model.reads_as_it_predicts else model.config.sliding_window
        for tokens in file_tokens(file, tokenizer, begin):
            piece = torch.from_numpy(tokens).long()[None].to(model.device)
            if prompt is not None:
                model.read(piece, cache)
                continue
            last = torch.cat([last, piece], dim=1)
            if last.shape[1] > own:
                model.read(last[:, :-own], cache)
                last = last[:, -own:]
    if prompt is not None:
        model.focus(last, cache)
    yield from pieces(model, tokenizer, last, cache, sampling)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen."""

    max_new_tokens: int
    temperature: float = 0.0
    """0: always the most likely token."""
    seed: int = 0
    top_p: float | None = None
    """Of the most likely tokens, as many as have this probability together; None: all."""

    def __post_init__(self) -> None:
        if self.temperature != 0:
            expect_temperature(self.temperature)
        elif self.top_p is not None:
            raise ValueError(
                f"top_p: expected none with temperature 0, where nothing is sampled, got {self.top_p}. Set a "
                "temperature too, as --temperature 0.7, or leave it out."
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p: expected above 0 and at most 1, got {self.top_p}. Leave it out to sample from all tokens."
            )

    def options(self) -> dict[str, Any]:
        """Of transformers' ``generate``."""
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": self.temperature > 0}
        if self.temperature > 0:
            options |= {
                "temperature": self.temperature,
                "top_k": 0,
                "top_p": 1.0 if self.top_p is None else self.top_p,
            }
        return options


def pieces(
    model: Any,
    tokenizer: Any,
    ids: Tensor,
    cache: ChunkCache,
    sampling: Sampling,
    written: list[int] | None = None,
    done: Callable[[list[int]], bool] = lambda tokens: False,
    **options: Any,
) -> Iterator[str]:
    """What a model writes behind ``ids`` [1, T], piece by piece as it is generated.

    Who takes no more pieces stops it: the cache then holds what was read until then.

    Args:
        written: the tokens are added to it.
        done: is asked after each token, with all that were generated, whether that is enough.
        options: more of transformers' ``generate``.
    """
    set_seed(sampling.seed)
    tokens: list[int] = [] if written is None else written
    streamer = _Streamer(tokenizer, int(model.config.vocab_size), tokens)
    failure: list[BaseException] = []
    stopped, ended = Event(), Event()
    # what else its generation_config says (a penalty, top_k, beams) is none of what the sampling says
    own = model.generation_config
    ends = GenerationConfig(
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id,
        prefill_chunk_size=own.prefill_chunk_size,
    )
    writer = generating_by(model, ends)

    def work() -> None:
        try:
            with torch.no_grad():
                writer.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    past_key_values=cache,
                    streamer=streamer,
                    stopping_criteria=StoppingCriteriaList([_Stop(lambda: stopped.is_set() or done(tokens))]),
                    **sampling.options() | options,
                )
        except BaseException as error:  # handed to the reading thread, which raises it
            failure.append(error)
            streamer.end()
        finally:
            ended.set()

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        yield from streamer
    finally:  # also after Ctrl-C: a thread that still computes would crash the leaving interpreter
        stopped.set()
        _wait_for(ended)
        thread.join()
    if failure:
        raise failure[0]


def _wait_for(ended: Event) -> None:
    """Wait for a thread's end whatever comes: until then it computes on a cache that is the caller's afterwards.

    A ``join`` that a second Ctrl-C interrupts takes the thread for ended.
    """
    again: KeyboardInterrupt | None = None
    while not ended.is_set():
        try:
            ended.wait()
        except KeyboardInterrupt as error:
            again = error
    if again is not None:
        raise again


class _Streamer(BaseStreamer):
    """Gives the text of tokens as soon as it is known, without what no text shows, and keeps the tokens."""

    def __init__(self, tokenizer: Any, vocab_size: int, tokens: list[int]) -> None:
        self._texts, self._state, self._silent = texts_of(tokenizer), START, silent_ids(tokenizer, vocab_size)
        self._tokens, self._prompt = tokens, True
        self._known: SimpleQueue[str | None] = SimpleQueue()

    def put(self, value: Tensor) -> None:
        if not self._prompt:
            new = value.reshape(-1).tolist()
            self._tokens += new
            self._settle([token for token in new if token not in self._silent])
        self._prompt = False

    def end(self) -> None:
        self._settle([], last=True)
        self._known.put(None)

    def _settle(self, tokens: list[int], last: bool = False) -> None:
        settled = self._texts.settle(self._state, np.array(tokens, np.int64), last)
        self._state = settled.state
        if settled.text:
            self._known.put(settled.text)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known.get, None)


class _Stop(StoppingCriteria):
    """Ends a generation when it is enough, or once nobody waits for it."""

    def __init__(self, enough: Callable[[], bool]) -> None:
        self.enough = enough

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
        return torch.full((input_ids.shape[0],), self.enough(), device=input_ids.device)
