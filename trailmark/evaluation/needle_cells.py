"""The cells of the suite "needles": one for each length and depth, those of a length measured together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trailmark.data.draws import Draws
from trailmark.data.haystacks import Filler, Haystack
from trailmark.data.needle_tasks import NeedleTask, Question, Trial
from trailmark.data.proportions import wilson_interval
from trailmark.evaluation.asking import Answer, Asker, Reading, Selection, WholeTextAsker
from trailmark.evaluation.losses import longest_text
from trailmark.evaluation.marked_needles import num_haystacks
from trailmark.evaluation.reading import parse_dtype
from trailmark.evaluation.record import Record
from trailmark.evaluation.room import expect_room, memory_need, probe_length
from trailmark.evaluation.subject import Subject
from trailmark.evaluation.suite_needles import NeedleSettings
from trailmark.memory import ChunkCache

_PROGRESS_SECONDS = 0.5
_SHOWN = 40  # questions whose selected chunks stand with a result, for figures; all stand in the generations


class Tally:
    """What came out in one cell."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.seconds, self.haystacks = 0.0, 0

    def summary(self, reading: Reading, together: int) -> dict[str, Any]:
        lines = self.lines
        count, correct = len(lines), sum(line["correct"] for line in lines)
        low, high = wilson_interval(correct, count)
        found: dict[str, Any] = {
            "questions": count,
            "correct": correct,
            "accuracy": correct / count,
            "accuracy_low": low,
            "accuracy_high": high,
        }
        if "exact" in lines[0]:
            found["exact_accuracy"] = sum(line["exact"] for line in lines) / count
        found |= dict.fromkeys(
            ("retrieved", "recall", "recall_by_hop", "mean_weight", "mean_reciprocal_rank")
        )
        if "retrieved" in lines[0]:
            retrieved = sum(line["retrieved"] for line in lines)
            found |= {"retrieved": retrieved, "recall": retrieved / count}
            by_hop = zip(*(line["retrieved_by_hop"] for line in lines), strict=True)
            found["recall_by_hop"] = [sum(hop) / count for hop in by_hop]
            found["mean_weight"] = math.fsum(line["weight"] for line in lines) / count
            found["mean_reciprocal_rank"] = math.fsum(line["reciprocal_rank"] for line in lines) / count
            found["asked"] = [self._shown(line) for line in lines[:_SHOWN]]
        per_second = reading.tokens / reading.seconds if reading.seconds else None
        return found | {
            "haystacks": self.haystacks,
            "tokens_read": reading.tokens,
            "seconds_reading": reading.seconds,
            "cells_read_for": together,  # how many cells shared what was read
            "tokens_per_second": per_second,
            "memory_bytes": reading.memory_bytes,
            "resident_bytes": reading.resident_bytes,
            "seconds_asking": self.seconds,
            "seconds": self.seconds + reading.seconds / together,
        }

    @staticmethod
    def _shown(line: dict[str, Any]) -> dict[str, Any]:
        """What the last landmark's groups selected, and where the (first) value lies."""
        shown = {"needle": line["gold_chunks"][-1][0], "selected": line["selected"][-1]}
        return shown | ({"weights": line["weights"][-1][0]} if "weights" in line else {})


@dataclass
class Suite:
    """One task put to one subject."""

    subject: Subject
    settings: NeedleSettings
    filler: Filler
    task: NeedleTask
    format: str
    progress: Callable[[str], None]
    last_said: float = field(default=0.0)

    @property
    def ours(self) -> bool:
        return self.subject.ours

    @property
    def shares(self) -> bool:
        """Whether one reading of a haystack serves all its trials, those of other depths too."""
        return self.ours and self.subject.model.can_be_planted

    @property
    def chunk_size(self) -> int:
        return self.subject.chunk_size

    def say(self, message: str, now: bool = False) -> None:
        if now or time.monotonic() - self.last_said > _PROGRESS_SECONDS:
            self.progress(message)
            self.last_said = time.monotonic()

    def _say_read(self, name: str, total: int, done: int) -> None:
        self.say(f"{name}: {done / total:.0%} read")

    # --- sizes ---------------------------------------------------------------------------------------------

    @property
    def sight(self) -> int:
        """Last chunks of a haystack that are seen other than through the memory; with full attention all are."""
        if not self.ours or self.subject.model.reach() is None:
            return 0
        return self.subject.model.chunks_in_sight(self.chunk_size)

    @property
    def begins(self) -> int:
        """Tokens that a foreign model's tokenizer puts before a text."""
        return 0 if self.ours else len(WholeTextAsker(self.subject.model, self.subject.tokenizer).begin)

    def chunks(self, length: int) -> int:
        return self.task.chunks(length - self.begins, self.chunk_size)

    def expect_room(self, lengths: Sequence[int]) -> None:
        """Raises ValueError, before anything is read, for a length that cannot be asked."""
        if not lengths:
            return
        S, settings = self.chunk_size, self.settings
        for length in lengths:  # before names are drawn for all of them
            if length < self.task.num_needles:
                raise ValueError(
                    f"length: expected at least a token for each of {self.task.num_needles} needles, got {length}."
                )
        least = self.task.least_chunks(S) + self.sight
        for length in lengths:
            if self.chunks(length) < least:
                raise ValueError(
                    f"length: expected at least {(least + 1) * S + self.task.sizes[1] + self.begins} tokens for "
                    f"{self.task.num_needles} needles out of the window's sight and a question, got {length}."
                )
        if not self.ours:
            most = longest_text(self.subject.model)
            if most is not None and max(lengths) > most:
                raise ValueError(
                    f"length: expected at most the {most} tokens that {self.subject.name!r} takes "
                    f"(max_position_embeddings), got {max(lengths)}. Choose shorter ones."
                )
            return
        model = self.subject.model
        ids = torch.from_numpy(self.filler.read(0, probe_length(model))).long()[None]
        dtype = parse_dtype(settings.memory_dtype)
        longest = max(lengths)
        need = memory_need(model, ids, self.chunks(longest) * S, settings.memory_tier, dtype)
        expect_room(model, need, longest, settings.memory_folder)

    def cell(self, length: int, depth: float | None) -> dict[str, Any]:
        """All that decides the numbers of one cell."""
        kept = asdict(self.settings)
        for name in ("lengths", "depths", "memory_folder"):
            del kept[name]
        return (
            {"suite": "needles", "length": length, "depth": depth}
            | kept
            | {
                "format": self.format,
                "values": getattr(self.task.format, "values", None) or self._values(),
                "needles": self.task.needles,
                "hops": self.task.hops,
                "straddle": self.task.straddle,
                "chunk_size": self.chunk_size,
                "text": self.text_fingerprint,
            }
        )

    def _values(self) -> str:
        return self.settings.values or ("tokens" if self.format == "paper" else "numbers")

    def __post_init__(self) -> None:
        self.text_fingerprint = self.filler.fingerprint()

    # --- measuring -----------------------------------------------------------------------------------------

    @property
    def depths(self) -> Sequence[float | None]:
        return (None,) if self.settings.depths is None else self.settings.depths

    def missing(self, length: int, record: Record) -> list[float | None]:
        """The depths of the cells that were not measured yet."""
        depths = dict.fromkeys(self.depths)
        return [depth for depth in depths if record.find(self.cell(length, depth)) is None]

    def measure(self, length: int, record: Record) -> list[dict[str, Any]]:
        """The cells of one length; those that are missing share each haystack's reading."""
        cells = {depth: self.cell(length, depth) for depth in self.depths}
        if missing := self.missing(length, record):
            tallies = {depth: Tally() for depth in missing}
            for depth, reading in self._ask_length(length, missing, tallies):
                tally = tallies[depth]
                found = self._about(cells[depth]) | tally.summary(reading, len(missing) if self.shares else 1)
                record.measure(cells[depth], partial(dict, found), partial(list, tally.lines))
        results = [record.find(cells[depth]) for depth in self.depths]
        return [result for result in results if result is not None]

    def _about(self, cell: dict[str, Any]) -> dict[str, Any]:
        """What says which cell it is, beside the numbers."""
        names = ("length", "depth", "kind", "format", "needles", "hops", "distractors", "landmarks")
        found = {name: cell[name] for name in (*names, "protocol", "memory_tier", "memory_dtype")}
        return found | {"train_length": self.subject.train_length if self.subject.run else None}

    def _ask_length(
        self, length: int, depths: Sequence[float | None], tallies: dict[float | None, Tally]
    ) -> Iterator[tuple[float | None, Reading]]:
        """Fills the tallies; yields each depth, and what was read for it, once its last haystack was asked."""
        settings, S, task = self.settings, self.chunk_size, self.task
        per_trial = task.questions_of(depths[0])
        trials = -(-settings.questions // per_trial)
        haystacks = num_haystacks(length, trials)
        asker = (
            self._asker(length) if self.ours else WholeTextAsker(self.subject.model, self.subject.tokenizer)
        )
        readings = {depth: asker.reading if self.shares else replace(asker.reading) for depth in depths}
        for number in range(haystacks):
            start = Draws(settings.seed, 1, number).below(len(self.filler))
            haystack = Haystack(self.filler, start, self.chunks(length), S)
            here = trials * (number + 1) // haystacks - trials * number // haystacks
            last = haystack.chunks - self.sight
            name = f"{length:,} tokens: haystack {number + 1} of {haystacks}"
            self.say(name, now=True)
            asked = task.trials(haystack, length - self.begins, last, depths, here, settings.seed, 2, number)
            with self._read(asker, haystack, name) as cache:
                for depth in depths:
                    asker.reading = readings[depth]
                    tallies[depth].haystacks += 1
                    if isinstance(asker, Asker):
                        self._ask_memory(asker, cache, haystack, asked[depth], number, tallies[depth], name)
                    else:
                        self._ask_whole(asker, haystack, asked[depth], number, tallies[depth], name)
                    if number == haystacks - 1:
                        yield depth, asker.reading

    def _read(
        self, asker: Asker | WholeTextAsker, haystack: Haystack, name: str
    ) -> AbstractContextManager[ChunkCache | None]:
        if isinstance(asker, WholeTextAsker):
            return nullcontext()
        return asker.haystack(haystack, partial(self._say_read, name, haystack.chunks * self.chunk_size))

    def _asker(self, length: int) -> Asker:
        settings, model, count = self.settings, self.subject.model, self.chunks(length) * self.chunk_size
        dtype = parse_dtype(settings.memory_dtype)

        def fresh(folder: Path | None) -> ChunkCache:
            return model.new_cache(settings.memory_tier, count, folder, dtype)

        return Asker(model, fresh, settings.memory_folder)

    def _ask_memory(
        self,
        asker: Asker,
        cache: ChunkCache | None,
        haystack: Haystack,
        trials: Sequence[Trial],
        number: int,
        tally: Tally,
        name: str,
    ) -> None:
        for n, trial in enumerate(trials):
            self.say(f"{name}: trial {n + 1} of {len(trials)}")
            began, read = time.perf_counter(), asker.reading.seconds
            chunks, texts = haystack.changed(trial.needles)
            whole = haystack.holding(trial.needles)
            show = partial(self._say_read, name, haystack.chunks * self.chunk_size)
            with asker.holding(cache, haystack, chunks, texts, whole, show) as holding:
                answers = asker.ask(holding, trial.questions, self.chunk_size)
                judged = [
                    self._judge(q, a.tokens, given=True)
                    for q, a in zip(trial.questions, answers, strict=True)
                ]
                wrong = [i for i, (right, _) in enumerate(judged) if not right]
                if wrong and self.settings.protocol is None:
                    asked = [trial.questions[i] for i in wrong]
                    written = asker.generate(holding, asked)
                    for i, q, tokens in zip(wrong, asked, written, strict=True):
                        judged[i] = self._judge(q, tokens)
            tally.seconds += time.perf_counter() - began - (asker.reading.seconds - read)
            for i, (q, a) in enumerate(zip(trial.questions, answers, strict=True)):
                line = {"haystack": number, "trial": n, "question": i} | self._line(trial, q, a, judged[i])
                tally.lines.append(line)

    def _ask_whole(
        self,
        asker: WholeTextAsker,
        haystack: Haystack,
        trials: Sequence[Trial],
        number: int,
        tally: Tally,
        name: str,
    ) -> None:
        for n, trial in enumerate(trials):
            self.say(f"{name}: trial {n + 1} of {len(trials)}")
            for i, q in enumerate(trial.questions):
                began, read = time.perf_counter(), asker.reading.seconds
                text = asker.text(haystack, trial.needles, q)
                answer = asker.ask(text, q)
                judged = self._judge(q, answer.tokens, given=True)
                if not judged[0] and self.settings.protocol is None:
                    judged = self._judge(q, asker.generate(text, q))
                tally.seconds += time.perf_counter() - began - (asker.reading.seconds - read)
                line = {"haystack": number, "trial": n, "question": i} | self._line(trial, q, answer, judged)
                tally.lines.append(line)

    # --- judging -------------------------------------------------------------------------------------------

    def _judge(self, question: Question, tokens: list[int], given: bool = False) -> tuple[bool, str]:
        """Whether the answer is right, and how it reads. ``given``: each token comes after the true ones before it."""
        tokenizer = self.subject.tokenizer
        if not question.fixed and tokenizer.eos_token_id in tokens:  # behind it nothing is said
            tokens = tokens[: tokens.index(tokenizer.eos_token_id) + 1]
        text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return (question.given if given else question.right)(tokens, text), text

    def _line(
        self, trial: Trial, question: Question, answer: Answer, judged: tuple[bool, str]
    ) -> dict[str, Any]:
        """What is kept of one question."""
        S = self.chunk_size
        gold = [
            sorted({chunk for n in hop for chunk in trial.needles[n].value_chunks(S)})
            for hop in question.gold
        ]
        line: dict[str, Any] = {
            "correct": judged[0],
            "expected": question.text,
            "generated": judged[1],
            "gold_chunks": gold,
            "needle_chunks": [needle.chunks(S) for needle in trial.needles],
            "phase": self._phase(question),
        }
        if self.settings.protocol is not None:
            place = 0 if self.settings.kind == "single" else len(question.answer) - 1
            right = answer.tokens[place] == int(question.answer[place])
            line |= {"correct": right, "exact": judged[0]}
        if answer.selected is not None:
            line |= self._retrieval(answer.selected, gold)
        return line

    def _phase(self, question: Question) -> int:
        """Tokens of the chunk that the question's first landmark closes."""
        begun = 0 if question.early is None else question.early + 1
        return (question.landmarks[0] - begun) % self.chunk_size + 1

    def _retrieval(self, selected: list[list[Selection]], gold: list[list[int]]) -> dict[str, Any]:
        """Which gold chunks were found, with which rank and weight: in the group that gives them most.

        The last hop's chunks must be found at the last landmark, whose finds serve the answer; those of the hops
        before at any.
        """
        last, anywhere = selected[-1], [some for landmark in selected for some in landmark]
        at_last = {m for some in last for m in some.chunks}
        at_any = {m for some in anywhere for m in some.chunks}
        by_hop = [set(chunks) <= at_any for chunks in gold[:-1]] + [set(gold[-1]) <= at_last]
        weights, ranks = [], []
        for chunk in gold[-1]:
            found = [(some.weights[some.chunks.index(chunk)], some) for some in last if chunk in some.chunks]
            weights.append(max((w for w, _ in found), default=0.0))
            best = min((1 + sum(other > w for other in some.weights) for w, some in found), default=None)
            ranks.append(best)
        shown: dict[str, Any] = {
            "retrieved": by_hop[-1],
            "retrieved_by_hop": by_hop,
            "weight": sum(weights) / len(weights),
            "ranks": ranks,
            "reciprocal_rank": sum(0 if rank is None else 1 / rank for rank in ranks) / len(ranks),
        }
        if not self.subject.model.selects_by_chunk:  # many heads: what each layer read
            layers = range(self.subject.model.config.num_hidden_layers)
            shown["selected"] = [
                [sorted({m for some in at if some.group == n for m in some.chunks}) for n in layers]
                for at in selected
            ]
        else:
            shown["selected"] = [[some.chunks for some in at] for at in selected]
            shown["weights"] = [[[round(w, 4) for w in some.weights] for some in at] for at in selected]
        return shown
