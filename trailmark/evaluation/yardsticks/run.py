"""Questions about long texts: each text is read once, in a constant window, and asked on branches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from trailmark.data.corpus import padding_id, tokenize, tokenizer_fingerprint
from trailmark.evaluation.record import Part, Record
from trailmark.evaluation.subject import Subject, generating_by
from trailmark.evaluation.yardsticks.formats import FORMATS, Extent, Question, questions_of
from trailmark.evaluation.yardsticks.suite import LENGTHS, YardstickSettings
from trailmark.statistics import score_interval


def run(
    subject: Subject,
    settings: YardstickSettings,
    record: Record,
    progress: Callable[[str], None] = lambda message: None,
) -> list[dict[str, Any]]:
    """The scores of all parts of a benchmark, measured or found in the record.

    Each result has ``questions``, ``score`` (0 to 1, the mean) with its 95% interval ``low`` to ``high``, ``tokens``
    (of a text, the mean) and ``readings``, how many texts were read for them.

    Raises:
        ValueError: as :func:`questions_of`, or a model that is not one of ours: others cannot read what is this long.
    """
    assert settings.benchmark is not None
    assert settings.data is not None
    if not subject.ours:
        raise ValueError(
            f"model: expected one of trailmark's, which read a text of any length once, got {subject.name!r}. "
            "trailmark convert makes one of a pretrained Llama, Mistral, Qwen2 or Qwen3."
        )
    extent = Extent(subject.tokenizer, settings.lengths or LENGTHS, settings.limit, settings.seed)
    parts = questions_of(settings.benchmark, settings.data, extent)
    cells = []
    for part, questions in parts.items():
        asked: dict[str, Any] = {
            "suite": "yardstick",
            "benchmark": settings.benchmark,
            "part": part,
            "asked": _fingerprint(questions),
            "limit": settings.limit,
            "max_new_tokens": settings.max_new_tokens or FORMATS[settings.benchmark].max_new_tokens,
            "tokenizer": tokenizer_fingerprint(subject.tokenizer),
            "seed": settings.seed,
        }
        cell = _Cell(subject, settings.benchmark, asked, questions, progress)
        cells.append(Part(asked, cell.measure, lambda cell=cell: cell.lines))  # type: ignore[misc]
    return record.measure_all(cells)


def _fingerprint(questions: Sequence[Question]) -> str:
    found = hashlib.sha256()
    for question in questions:
        for said in (question.text, question.asked, question.wanted):
            found.update(f"{len(said)}:{said}".encode())
    return found.hexdigest()


class _Cell:
    """Questions of one part."""

    def __init__(
        self,
        subject: Subject,
        benchmark: str,
        asked: dict[str, Any],
        questions: Sequence[Question],
        progress: Callable[[str], None],
    ) -> None:
        self.subject, self.format, self.asked = subject, FORMATS[benchmark], asked
        self.questions, self.progress = questions, progress
        self.lines: list[dict[str, Any]] = []

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        model, scores, lengths = self.subject.model, list[float](), list[int]()
        for text, alike in groupby(self.questions, key=lambda question: question.text):
            self.progress(f"{self.asked['part']}: question {len(scores) + 1:,} of {len(self.questions):,}")
            ids = self._tokens(text)
            lengths.append(len(ids))
            cache = model.new_cache()
            model.read(torch.from_numpy(ids).long()[None].to(model.device), cache)
            for question in alike:
                generated = self._answer(question.asked, cache.branch())
                scores.append(self.format.score(question.wanted, generated))
                self.lines.append(
                    {
                        "number": len(scores),
                        "wanted": question.wanted,
                        "generated": generated,
                        "score": scores[-1],
                    }
                )
        low, high = score_interval(scores, self.asked["seed"])
        return {
            "questions": len(scores),
            "score": float(np.mean(scores)),
            "low": low,
            "high": high,
            "tokens": float(np.mean(lengths)),
            "readings": len(lengths),
        }

    def _tokens(self, text: str) -> Any:
        ids = tokenize([text], self.subject.tokenizer)
        return np.concatenate([np.asarray(self.subject.beginning, ids.dtype), ids])

    def _answer(self, asked: str, cache: Any) -> str:
        model, tokenizer = self.subject.model, self.subject.tokenizer
        ids = torch.from_numpy(tokenize([asked], tokenizer)).long()[None].to(model.device)
        absent = padding_id(tokenizer)
        model.focus(ids, cache)
        out = generating_by(model, GenerationConfig()).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=self.asked["max_new_tokens"],
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=absent,
        )
        return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
