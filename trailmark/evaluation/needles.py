"""The suite "needles": facts hidden in long texts, and questions about them, by kind, length and depth.

A haystack is read once. Needles are then planted in its memory (the chunks they change are encoded again, so that
memory is exactly that of the text with the needles), and their questions are asked in a batch of branches that share
this memory: many questions for one reading. In Landmark Attention every layer's memory depends on all that was read
before it, and so do the states of a Block-Recurrent Transformer and full attention: there the haystack is read anew
for each trial, with its needles in it, and so it is by models of transformers.

An answer is right if what the model writes freely, token after token the likeliest, is the answer. The second
paper's own measure (arXiv 2410.01651, Table 2 and App. D) is kept as the protocol "paper-table-2": the text in the
paper's words with a landmark right before " is", the likeliest token at one place with everything before it given: a
passkey's first token, or of two hops (two chains, four needles) the last token of the second value. That is easier
three times over: one token instead of all; the first hop's value is given, so that the second can be looked up by it;
and four needles fit at once into the 8 chunks that are retrieved, so that none has to be told from others.
``exact_accuracy`` beside it says how often all tokens of the answer are right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trailmark.data.corpus import Tokens
from trailmark.data.haystacks import Filler, Stream
from trailmark.data.needle_tasks import make_task
from trailmark.data.proportions import wilson_interval
from trailmark.evaluation.marked_needles import NeedleResult, evaluate_needles
from trailmark.evaluation.needle_cells import Suite
from trailmark.evaluation.planting import planted
from trailmark.evaluation.record import Record
from trailmark.evaluation.subject import Subject
from trailmark.evaluation.suite_needles import PROTOCOLS, NeedleSettings

__all__ = [
    "PROTOCOLS",
    "NeedleResult",
    "NeedleSettings",
    "evaluate_needles",
    "planted",
    "run",
    "wilson_interval",
]

_PAPER_VALUE_TOKENS = 5  # of the protocol's passkeys and variables


@torch.no_grad()
def run(
    subject: Subject,
    settings: NeedleSettings,
    text: Tokens | Stream,
    record: Record,
    progress: Callable[[str], None] = lambda message: None,
) -> list[dict[str, Any]]:
    """The results of all cells, lengths first; those that ``record`` holds are not measured again.

    Args:
        text: haystacks are cut out of it: tokens, or a stream that is longer than memory (``len``, ``read(start,
            stop)``), such as a prepared corpus. A shorter one is repeated.
        progress: told a line about what is under way, often.

    Raises:
        ValueError: settings that do not fit the model, its tokenizer or each other; a length too short for the needles
            or too long for the memory, before anything is read; a text that holds all values that are drawn.
    """
    format = settings.format or _format_for(subject, settings)
    _check_values(format, settings)
    own = getattr(subject.model.config, "chunk_size", None)
    needles, value_tokens = settings.needles, None
    if settings.protocol is not None:
        value_tokens = _PAPER_VALUE_TOKENS
        needles = 2 if settings.kind == "hops" else 1  # four needles in two chains
    task = make_task(
        subject.tokenizer,
        format,
        settings.kind,
        needles,
        settings.hops,
        settings.distractors,
        settings.values,
        settings.landmarks,
        settings.phases == "any",
        settings.straddle,
        value_tokens,
    )
    assert own in (None, subject.chunk_size)
    filler = Filler(text, task.format.replaced)
    suite = Suite(subject, settings, filler, task, format, progress)
    lengths = settings.lengths or tuple(subject.default_lengths())
    suite.expect_room([length for length in lengths if suite.missing(length, record)])
    return [result for length in lengths for result in suite.measure(length, record)]


def _format_for(subject: Subject, settings: NeedleSettings) -> str:
    if settings.protocol is not None:
        return "paper"
    return {"needles": "marks", "niah": "paper"}.get(subject.task or "", "sentences")


def _check_values(format: str, settings: NeedleSettings) -> None:
    allowed = {"marks": ("numbers",), "sentences": ("numbers", "words"), "paper": ("tokens", "numbers")}[
        format
    ]
    if settings.values not in (None, *allowed):
        shown = " or ".join(map(repr, allowed))
        raise ValueError(
            f"values: expected {shown} in the format {format!r}, got {settings.values!r}. Choose another format."
        )
