"""Reading a text of any length, then continuing a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from transformers import TextIteratorStreamer, set_seed

from trailmark.data.corpus import read_text
from trailmark.evaluation.evaluate import Subject


def stream(
    subject: Subject, prompt: str, read: Path | None, max_new_tokens: int, temperature: float, seed: int
) -> Iterator[str]:
    """The continuation, piece by piece as it is generated."""
    if temperature < 0:
        raise ValueError(f"temperature: expected 0 or more, got {temperature:g}.")
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

    def work() -> None:
        try:
            with torch.no_grad():
                model.generate(
                    ids.long(),
                    attention_mask=torch.ones_like(ids),
                    past_key_values=cache,
                    max_new_tokens=max_new_tokens,
                    streamer=streamer,
                    **sampling,
                )
        except BaseException as error:  # handed to the reading thread, which raises it
            failure.append(error)
            streamer.end()

    thread = Thread(target=work, daemon=True)
    thread.start()
    yield from streamer
    thread.join()
    if failure:
        raise failure[0]
