"""Reading a text of any length, then continuing a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer, set_seed

from trailmark.data.corpus import read_text
from trailmark.evaluation.evaluate import Subject


def stream(
    subject: Subject, prompt: str, read: Path | None, max_new_tokens: int, temperature: float, seed: int
) -> Iterator[str]:
    """The continuation, piece by piece as it is generated."""
    if temperature < 0:
        raise ValueError(f"temperature: expected 0 or more, got {temperature:g}.")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"prompt: expected UTF-8 text, got {prompt!r}. Set the terminal to UTF-8."
        ) from error
    model, tokenizer = subject.model, subject.tokenizer
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    if ids.shape[1] == 0:
        raise ValueError("prompt: expected at least one character, got an empty prompt.")
    cache = model.new_cache()
    if read is not None:
        text = tokenizer(read_text(read), add_special_tokens=False, return_tensors="pt")["input_ids"]
        cache = model.new_cache(num_tokens=text.shape[1])
        model.read(text.long(), cache)
    set_seed(seed)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature}
    failure: list[BaseException] = []
    stopped = Event()

    def work() -> None:
        try:
            with torch.no_grad():
                model.generate(
                    ids.long(),
                    attention_mask=torch.ones_like(ids),
                    past_key_values=cache,
                    max_new_tokens=max_new_tokens,
                    streamer=streamer,
                    stopping_criteria=StoppingCriteriaList([_Stop(stopped)]),
                    **sampling,
                )
        except BaseException as error:  # handed to the reading thread, which raises it
            failure.append(error)
            streamer.end()

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        yield from streamer
    finally:  # also after Ctrl-C: a thread that still computes would crash the leaving interpreter
        stopped.set()
        thread.join()
    if failure:
        raise failure[0]


class _Stop(StoppingCriteria):
    """Ends a generation once nobody waits for it."""

    def __init__(self, stopped: Event) -> None:
        self.stopped = stopped

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
        return torch.full((input_ids.shape[0],), self.stopped.is_set())
