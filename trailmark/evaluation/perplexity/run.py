"""Perplexity of texts: by length and by position, per token, word and byte, read cold or with the memory carried on.

What is scored is the text's own tokens, each but the first of a reading; landmarks bear no loss (arXiv 2410.01651,
Sec. 4.1). Windows of any length are read in pieces, with constant memory for the window.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from trailmark.data.corpus import Tokens
from trailmark.evaluation.documents import Documents
from trailmark.evaluation.losses import is_gated, rows_at_once, token_losses
from trailmark.evaluation.perplexity.suite import TOKENS, PerplexitySettings, expect_stride
from trailmark.evaluation.protocols import Cell, perplexity_protocol, with_fields
from trailmark.evaluation.record import Record
from trailmark.evaluation.room import expect_room, memory_need, probe_length
from trailmark.evaluation.subject import Subject
from trailmark.models import TrailmarkForCausalLM
from trailmark.processes import beside_each_other, dealt, gathered
from trailmark.statistics import Floats, bootstrap_ratio

_FIRST_BIN = 64  # positions; each further bin is as long as all before it


@dataclass
class PerplexityResult:
    """Over all tokens of the windows but the first of each (arXiv 2410.01651, Sec. 4.1)."""

    length: int
    windows: int
    tokens: int
    loss: float  # mean negative log-likelihood, nats per token

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def evaluate_perplexity(
    model: TrailmarkForCausalLM, text: Tokens, length: int, max_tokens: int = TOKENS
) -> PerplexityResult:
    """Mean loss over disjoint windows of ``length`` tokens, as many as ``max_tokens`` hold (at least one).

    Raises:
        ValueError: a text shorter than one window, or windows of fewer than 2 tokens.
    """
    _expect_length(length, len(text))
    windows = max(1, min(len(text), max_tokens) // length)
    total = 0.0
    for first in range(0, windows, rows := rows_at_once(length)):
        count = min(rows, windows - first)
        ids = text[first * length : (first + count) * length].reshape(count, length)
        total += float(token_losses(model, ids).losses.sum())
    count = windows * (length - 1)
    return PerplexityResult(length, windows, count, total / count)


def run(
    subject: Subject,
    settings: PerplexitySettings,
    text: Documents,
    record: Record,
    progress: Callable[[str], None] = lambda message: None,
) -> list[dict[str, Any]]:
    """Every length (or cell of the protocol), measured or found in the record.

    A result has, beside what :meth:`Record.measure` adds: ``length`` (null: whole documents), ``windows`` and
    ``documents`` read, ``tokens``, ``words`` and ``bytes`` scored, ``loss`` (nats per token), ``perplexity``,
    ``word_perplexity`` (exp of all nats per whitespace-separated word, as for PG19), ``bits_per_byte``, ``loss_low``,
    ``loss_high``, ``perplexity_low`` and ``perplexity_high`` (95%, drawn again: ``drawn`` times ``drawn_of``),
    ``whole_text``, ``by_position`` (``first`` to ``last`` token before: ``tokens``, ``loss``, ``loss_low``,
    ``loss_high``), ``skipped_share`` of a retrieval gate, and ``published``: rows of the protocol's paper. null: not
    defined, as words and bytes are where the tokenizer's tokens are no bytes and windows are cut out of documents, or
    an interval of one window.

    Raises:
        ValueError: a length that the text or the model does not hold, a carried memory or a protocol's fields with a
            model that has none, losses that are not finite.
    """
    if not subject.ours and (settings.carry or settings.memory_tier != "device"):
        raise ValueError(
            f"carry, memory_tier: expected one of trailmark's models, {subject.name!r} is another one and has no "
            "memory. Choose cold or sliding windows, and leave the tier."
        )
    limit = settings.token_limit
    cells = _cells(subject, settings, text)
    plans = [_Plan.of(settings, cell.length, text, limit) for cell in cells]
    begin = subject.beginning
    if (longest := _longest(subject)) is not None:
        for plan in plans:
            if plan.longest > longest:
                raise ValueError(
                    f"lengths: expected at most the {longest:,} tokens that {subject.name!r} takes"
                    f"{f' after {len(begin)} at the beginning' if begin else ''}, got windows of {plan.longest:,}. "
                    "Choose shorter ones."
                )
    models = [with_fields(subject.model, cell.set) if cell.set else subject.model for cell in cells]
    more = {"begin": begin} if begin else {}
    asked = [_asked(settings, cell, plan, text) | more for cell, plan in zip(cells, plans, strict=True)]
    if subject.ours:
        for model, plan, cell_settings in zip(models, plans, asked, strict=True):
            if record.find(cell_settings) is None:
                together = beside_each_other(sum(1 for _ in plan.batches()))
                _expect_room(model, plan.longest, text, settings.memory_tier, together)
    results = []
    for cell, plan, model, cell_settings in zip(cells, plans, models, asked, strict=True):
        name = f"perplexity, {'whole documents' if cell.length is None else f'{cell.length:,} tokens'}"
        if cell.set:
            name += f", {', '.join(f'{key}={value}' for key, value in cell.set.items())}"

        def tell(line: str, name: str = name) -> None:
            progress(f"{name}: {line}")

        work = partial(_measure, model, plan, cell, text, settings, begin, tell)
        results.append(record.measure(cell_settings, work))
    return results


def _asked(settings: PerplexitySettings, cell: Cell, plan: _Plan, text: Documents) -> dict[str, Any]:
    """All that decides a cell's numbers."""
    return {
        "suite": "perplexity",
        "protocol": settings.protocol,
        "windows": settings.windows,
        "length": cell.length,
        "stride": plan.stride,
        "carry": settings.carry,
        "max_tokens": settings.token_limit,
        "by_position": settings.by_position,
        "set": dict(cell.set),
        "text": text.fingerprint,
        "seed": settings.seed,
    }


def _expect_room(model: TrailmarkForCausalLM, length: int, text: Documents, tier: str, together: int) -> None:
    """Raises ValueError where the memory of a text of ``length`` tokens, or of several at once, would find no room."""
    probe = probe_length(model)
    if length > probe:
        ids = torch.from_numpy(text.read(0, probe)).long()[None]
        expect_room(model, memory_need(model, ids, length, tier, None), length, None, together)


def _cells(subject: Subject, settings: PerplexitySettings, text: Documents) -> list[Cell]:
    if settings.protocol is not None:
        protocol = perplexity_protocol(settings.protocol)
        protocol.expect(subject.model)
        return protocol.cells(settings.lengths)
    if settings.windows == "documents" and settings.lengths is None:
        return [Cell(None)]
    return [Cell(length) for length in settings.lengths or _default_lengths(subject, text.tokens)]


def _default_lengths(subject: Subject, tokens: int) -> list[int]:
    lengths = subject.default_lengths(tokens)
    if (longest := _longest(subject)) is None:
        return lengths
    return [length for length in lengths if length <= longest] or [min(tokens, longest)]


def _longest(subject: Subject) -> int | None:
    """Tokens of a window at most; None: any."""
    longest = subject.longest_text
    return None if longest is None else longest - len(subject.beginning)


@dataclass(frozen=True)
class _Plan:
    """What is read for one cell: places in the text."""

    readings: list[_Reading]
    windows: int
    documents: int | None  # where none is crossed
    stride: int | None
    drawn_of: str  # what an interval draws again
    whole_text: bool
    whole_documents: bool

    @property
    def longest(self) -> int:
        return max(reading.stop - reading.start for reading in self.readings)

    @classmethod
    def of(
        cls, settings: PerplexitySettings, length: int | None, text: Documents, limit: int | None
    ) -> _Plan:
        if settings.windows == "documents":
            return cls._of_documents(length, text, limit)
        assert length is not None
        _expect_length(length, text.tokens)
        room = max(length, min(text.tokens, limit or text.tokens))
        whole = room == text.tokens
        if settings.windows == "sliding":
            stride = settings.stride or max(1, length // 2)
            expect_stride(length, stride)  # of lengths by default, which the settings do not know
            starts = range(0, room - length + 1, stride)
            readings = [
                _Reading(s, s + length, max(s + 1, s + length - stride), (s // length,)) for s in starts
            ]
            drawn = "stretches of the length"
            return cls(readings, len(starts), None, stride, drawn, whole, False)
        windows = room // length
        if settings.carry:
            readings = [_Reading(0, windows * length, 1, tuple(range(windows)))]
        else:
            readings = [_Reading(n * length, (n + 1) * length, n * length + 1, (n,)) for n in range(windows)]
        return cls(readings, windows, None, None, "windows", whole, False)

    @classmethod
    def _of_documents(cls, length: int | None, text: Documents, limit: int | None) -> _Plan:
        borders = text.borders
        inside = int(np.searchsorted(borders, limit, side="right")) - 1 if limit is not None else len(text)
        documents = max(1, min(inside, len(text)))
        readings = []
        for number in range(documents):
            first, stop = int(borders[number]), int(borders[number + 1])
            for start in range(first, stop, length or stop - first):
                end = min(stop, start + (length or stop - first))
                if end - start > 1:  # one token alone has nothing before it
                    readings.append(_Reading(start, end, start + 1, (number,)))
        if not readings:
            raise ValueError(
                f"text: expected a document of at least 2 tokens among {documents:,}, found none. Name a longer text."
            )
        whole = documents == len(text)
        return cls(readings, len(readings), documents, None, "documents", whole, length is None)

    def batches(self) -> Iterator[list[_Reading]]:
        """Readings of one length together, as many as a piece holds."""
        batch: list[_Reading] = []
        for reading in self.readings:
            size = reading.stop - reading.start
            if batch and (size != batch[0].stop - batch[0].start or len(batch) == rows_at_once(size)):
                yield batch
                batch = []
            batch.append(reading)
        yield batch


class _Reading(NamedTuple):
    """One cold reading of tokens ``start`` to ``stop``, scored from ``scored`` on."""

    start: int
    stop: int
    scored: int
    units: tuple[int, ...]  # what is drawn again, in equal parts of the reading


class _Found(NamedTuple):
    """What one batch adds: over the units that its readings lie in, and bins of positions."""

    units: Any  # [u]
    sums: Floats  # [u, bins], nats
    counts: Any  # [u, bins]
    gate: Any
    words: int
    size: int

    @classmethod
    def of(cls, batch: list[_Reading], found: Any, edges: Any, text: Documents | None) -> _Found:
        """``text``: where words and bytes are counted."""
        units = np.unique([unit for reading in batch for unit in reading.units])
        sums, counts = (
            np.zeros((len(units), len(edges) - 1)),
            np.zeros((len(units), len(edges) - 1), np.int64),
        )
        words, size = 0, 0
        for reading, losses in zip(batch, found.losses, strict=True):
            places = np.arange(reading.scored - reading.start, reading.stop - reading.start)
            part = places * len(reading.units) // (reading.stop - reading.start)
            rows = np.searchsorted(units, np.array(reading.units))[part]
            at = rows, np.searchsorted(edges, places, side="right") - 1
            np.add.at(sums, at, losses[places - 1])
            np.add.at(counts, at, 1)
            if text is not None:
                more = text.counted(reading.scored, reading.stop)
                words, size = words + more[0], size + more[1]
        return cls(units, sums, counts, found.gate, words, size)


def _measure(
    model: Any,
    plan: _Plan,
    cell: Cell,
    text: Documents,
    settings: PerplexitySettings,
    begin: list[int],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    edges = _edges(plan.longest)
    units = 1 + max(reading.units[-1] for reading in plan.readings)
    sums, counts = np.zeros((units, len(edges) - 1)), np.zeros((units, len(edges) - 1), np.int64)
    gate, done, words, size = np.zeros(2, np.int64), 0, 0, 0
    total = sum(reading.stop - reading.start for reading in plan.readings)
    countable = text.countable and not plan.whole_documents
    own: list[tuple[int, _Found]] = []  # of this process's batches
    for number, batch in enumerate(plan.batches()):
        length = batch[0].stop - batch[0].start
        if dealt(number):

            def tell(tokens: int, done: int = done, rows: int = len(batch)) -> None:
                progress(f"{done + rows * tokens:,} of {total:,} tokens")

            ids = np.stack([text.read(reading.start, reading.stop) for reading in batch])
            found = token_losses(model, ids, settings.memory_tier, tell, begin)
            own.append((number, _Found.of(batch, found, edges, text if countable else None)))
        done += len(batch) * length
    for _, part in sorted(itertools.chain(*gathered(own)), key=itemgetter(0)):
        sums[part.units] += part.sums
        counts[part.units] += part.counts
        gate += part.gate
        words, size = words + part.words, size + part.size
    known: tuple[int | None, int | None] = (words, size) if countable else (None, None)
    if plan.whole_documents:
        assert plan.documents is not None
        known = text.counted_in_documents(plan.documents)
    summary = _summary(plan, cell.length, sums, counts, known, edges, settings) | _gate_share(model, gate)
    return summary | {"published": [dict(row) for row in cell.published], "note": cell.note}


def _summary(
    plan: _Plan,
    length: int | None,
    sums: Floats,
    counts: Any,
    known: tuple[int | None, int | None],
    edges: Any,
    settings: PerplexitySettings,
) -> dict[str, Any]:
    nats, tokens, (words, size) = float(sums.sum()), int(counts.sum()), known
    loss = nats / tokens
    used = counts.sum(1) > 0
    sums, counts = sums[used], counts[used]
    low, high = map(_or_none, _bounds(sums.sum(1), counts.sum(1), settings.seed))
    found: dict[str, Any] = {
        "length": length,
        "windows": plan.windows,
        "documents": plan.documents,
        "tokens": tokens,
        "words": words,
        "bytes": size,
        "loss": loss,
        "loss_low": low,
        "loss_high": high,
        "drawn": len(sums),
        "drawn_of": plan.drawn_of,
        "perplexity": _exp(loss),
        "perplexity_low": _exp(low),
        "perplexity_high": _exp(high),
        "word_perplexity": _exp(nats / words) if words else None,
        "bits_per_byte": nats / math.log(2) / size if size else None,
        "whole_text": plan.whole_text,
    }
    if settings.by_position:
        lows, highs = _bounds(sums, counts, settings.seed)
        found["by_position"] = [
            {
                "first": int(edges[n]),
                "last": int(edges[n + 1]) - 1,
                "tokens": int(counts[:, n].sum()),
                "loss": float(sums[:, n].sum() / counts[:, n].sum()),
                "loss_low": _or_none(lows[n]),
                "loss_high": _or_none(highs[n]),
            }
            for n in np.flatnonzero(counts.sum(0))
        ]
    return found


def _gate_share(model: Any, gate: Any) -> dict[str, Any]:
    return {"skipped_share": float(gate[1] / gate[0])} if is_gated(model) and gate[0] else {}


def _edges(longest: int) -> Any:
    """Of bins of positions: 0, 64, 128, 256, ... and the longest."""
    edges = [0]
    while edges[-1] < longest:
        edges.append(min(longest, 2 * edges[-1] or _FIRST_BIN))
    return np.array(edges)


def _expect_length(length: int, tokens: int) -> None:
    if length < 2:
        raise ValueError(f"length: expected at least 2 tokens, got {length}.")
    if tokens < length:
        raise ValueError(
            f"length: expected at most the text's {tokens} tokens, got {length}. Choose shorter windows "
            "or a longer text."
        )


def _bounds(sums: Any, counts: Any, seed: int) -> tuple[Any, Any]:
    """The 95% interval of a mean loss, which is never below 0."""
    low, high = bootstrap_ratio(sums, counts, seed)
    return np.maximum(low, 0.0), high


def _or_none(value: Any) -> float | None:
    return None if math.isnan(value) else float(value)


def _exp(value: float | None) -> float | None:
    """None past what a float holds, too: 700 nats a word are nobody's perplexity."""
    return None if value is None or value > 700 else math.exp(value)
