"""Models to ask for needles, and what they should answer: whole texts, read naively."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.evaluation.foreign import llama
from tests.models.tiny import block_recurrent, draw_weights, drt, hils, hsa, landmark, rpt, window_model
from trailmark.data.corpus import load_tokenizer, tokenize
from trailmark.data.draws import Draws
from trailmark.data.needles.haystacks import Filler, Haystack
from trailmark.data.needles.tasks import NeedleTask, Question, Trial, make_task
from trailmark.evaluation.needles.ask import num_haystacks, run
from trailmark.evaluation.needles.suite import NeedleSettings
from trailmark.evaluation.record import Record
from trailmark.evaluation.subject import Subject

S = 14
BYTES = load_tokenizer()
TEXT = tokenize(["the old boat sees a river and (sings) of 3 small things, of which none = it\n" * 30], BYTES)
SIZES: dict[str, Any] = {"vocab_size": 259}
LENGTH = 300
# what a conversion asks for; the texts are longer than the base's were
CONVERTED: dict[str, Any] = {
    "sliding_window": 9,
    "window_position": "rope",
    "num_sinks": 4,
    "max_sink_distance": 60,
    "landmarks_as_keys": False,
}


@cache
def subject_of(name: str, task: str | None = None) -> Subject:
    build: dict[str, Callable[[], Any]] = {
        "drt": lambda: drt(2, chunk_size=S, sliding_window=9, **SIZES),
        "chunks": lambda: drt(chunk_size=S, sliding_window=9, **SIZES),
        "wide": lambda: drt(chunk_size=S, sliding_window=30, window_position="rope", **SIZES),
        "pretrained": lambda: drt(3, chunk_size=S, memory_kv="layer", **CONVERTED, **SIZES),
        "rpt": lambda: rpt(chunk_size=S, **SIZES),
        "window": lambda: window_model(**SIZES),
        "full": lambda: window_model(sliding_window=None, **SIZES),
        "mixed": lambda: window_model(
            layer_types=["sliding_attention", "full_attention", "full_attention"], sliding_window=30, **SIZES
        ),
        "recurrent": lambda: block_recurrent(**SIZES),
        "landmark": lambda: landmark(chunk_size=S, local_length=3 * S, num_retrieved_chunks=2, **SIZES),
        "hils": lambda: hils(chunk_size=S, sliding_window=30, num_retrieved_chunks=2, **SIZES),
        "hsa": lambda: hsa(1, chunk_size=S, num_retrieved_chunks=2, **SIZES),
        "llama": llama_of_the_hub,
    }
    data = {"chunk_size": S} | ({} if task is None else {"task": task})
    return Subject(Path(name), build[name](), BYTES, {"data": data})


def llama_of_the_hub() -> LlamaForCausalLM:
    model = llama(400, bos_token_id=None, eos_token_id=None)
    draw_weights(model, 0)
    model.generation_config.repetition_penalty = 9.0  # as models of the hub come with; it is not asked for
    return model


def record_of(folder: Path, subject: Subject) -> Record:
    return Record(folder, "needles", {"name": subject.name})


def measured(folder: Path, subject: Subject, **changes: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The one cell of an evaluation, and what was written."""
    record = record_of(folder, subject)
    settings = NeedleSettings(**({"lengths": (LENGTH,), "format": "marks", "questions": 2} | changes))
    (result,) = run(subject, settings, TEXT, record)
    return result, record.generations(result)


def task_of(settings: NeedleSettings, value_tokens: int | None = None) -> NeedleTask:
    return make_task(
        BYTES,
        settings.format or "marks",
        settings.kind,
        settings.needles,
        settings.hops,
        settings.distractors,
        settings.values,
        settings.landmarks,
        settings.phases == "any",
        settings.straddle,
        value_tokens,
    )


def asked(
    subject: Subject, settings: NeedleSettings, task: NeedleTask, sight: int
) -> list[tuple[Tensor, Trial, Question]]:
    """The whole texts [T] up to the answer of one cell, in the order that they are asked in."""
    (length,), depth = settings.lengths, None if settings.depths is None else settings.depths[0]
    found = []
    filler = Filler(TEXT, task.format.replaced)
    trials = -(-settings.questions // task.questions_of(depth))
    haystacks = num_haystacks(length, trials)
    for number in range(haystacks):
        start = Draws(settings.seed, 1, number).below(len(TEXT))
        begin = tuple(filler.read(start, subject.model.config.num_sinks if subject.ours else 0).tolist())
        haystack = Haystack(filler, start, task.chunks(length, S), S, begin=begin)
        last = haystack.chunks - sight
        here = trials * (number + 1) // haystacks - trials * number // haystacks
        for trial in task.lay(haystack, length, last, [depth], here, settings.seed, 2, number)[depth]:
            rows = haystack.holding(trial.needles)[0 : haystack.chunks].reshape(-1)
            found += [(torch.cat([rows, torch.from_numpy(q.prompt)]), trial, q) for q in trial.questions]
    return found


def marks_of(ids: Tensor, question: Question) -> Tensor:
    close = torch.zeros(1, len(ids), dtype=torch.bool)
    close[0, [len(ids) - len(question.prompt) + place for place in question.marks]] = True
    return close


@torch.no_grad()
def written(model: Any, ids: Tensor, question: Question, count: int) -> list[int]:
    """Greedy, the whole text anew for each token."""
    close = marks_of(ids, question)
    for _ in range(count):
        more: dict[str, Any] = {} if isinstance(model, LlamaForCausalLM) else {"close_chunk": close}
        best = model(ids[None], **more).logits[0, -1].argmax()
        ids, close = torch.cat([ids, best[None]]), torch.cat([close, torch.zeros(1, 1, dtype=torch.bool)], 1)
    return ids[-count:].tolist()
