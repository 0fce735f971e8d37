"""Continuing a prompt, after a text of any length or a memory of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer, set_seed

from trailmark.data.corpus import text_pieces, tokenize
from trailmark.evaluation.subject import Subject
from trailmark.models.generation import expect_temperature


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
    if temperature != 0:
        expect_temperature(temperature)
    if prompt is None and file is None:
        raise ValueError("prompt: expected --prompt TEXT, --file FILE or both, got neither.")
    model, tokenizer = subject.model, subject.tokenizer
    if (beams := model.generation_config.num_beams or 1) > 1:
        raise ValueError(
            f"model: {str(subject.folder / 'generation_config.json')!r}: num_beams: expected 1 for text that is shown "
            f"as it is generated, got {beams}. Remove that line, or call the model's generate in Python."
        )
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
    last = torch.from_numpy(ids).long()[None]
    if file is not None:
        for text in text_pieces(file):
            piece = torch.from_numpy(tokenize([text], tokenizer)).long()[None]
            if prompt is not None:
                model.read(piece, cache)
                continue
            if last.shape[1]:
                model.read(last, cache)
            last = piece
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
                    last,
                    attention_mask=torch.ones_like(last),
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
