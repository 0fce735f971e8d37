"""The suite "needles": facts hidden in long texts, and questions about them, by kind, length and depth.

A haystack is read once. Needles are then planted in its memory (the chunks they change are encoded again, so that
memory is exactly that of the text with the needles), and their questions are asked in a batch of branches that share
this memory: many questions for one reading. Where each trial has a haystack of its own, or a memory depends on all that
was read before (Landmark Attention, a HiLS of which more than the last layer chooses while it reads, Block-Recurrent
Transformers, full attention, models of transformers), each trial's text is read with its needles in it.

An answer is right if what the model writes freely, token after token the likeliest, is the answer. The second
paper's own measure (arXiv 2410.01651, Table 2 and App. D) is kept as the protocol "paper-table-2": the text in the
paper's words with a landmark right before " is", the likeliest token at one place with everything before it given: a
passkey's first token, or of two hops (two chains, four needles) the last token of the second value. That is easier
three times over: one token instead of all; the first hop's value is given, so that the second can be looked up by it;
and four needles fit at once into the 8 chunks that are retrieved, so that none has to be told from others.
A second landmark, behind " is", may be asked for; the paper has none there.
``exact_accuracy`` beside it says how often all tokens of the answer are right.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from trailmark.data.chat import answer_ends
from trailmark.data.corpus import Tokens, load_tokenizer, standard_library_texts, tokenize
from trailmark.data.draws import Draws
from trailmark.data.needles.curriculum_texts import CURRICULUM
from trailmark.data.needles.formats import CHAT_FORMATS, VALUES
from trailmark.data.needles.haystacks import Filler, Haystack, Stream
from trailmark.data.needles.tasks import NeedleTask, Trial, make_task
from trailmark.evaluation.needles.askers import Asker, MemoryAsker, ReadingCost, WholeTextAsker
from trailmark.evaluation.needles.judging import costs, judge, line_of, summary
from trailmark.evaluation.needles.suite import NeedleSettings
from trailmark.evaluation.reading import parse_dtype
from trailmark.evaluation.record import Record
from trailmark.evaluation.room import expect_room, memory_need, probe_length
from trailmark.evaluation.subject import Subject
from trailmark.models import TrailmarkForCausalLM
from trailmark.processes import beside_each_other, dealt, gathered

Say = Callable[[str], None]
_PAPER_VALUE_TOKENS = 5  # of the protocol's passkeys and variables
# Haystacks of one length together have about this many tokens, but at least one and at most ten are read.
_TOKENS_PER_LENGTH, _MOST_HAYSTACKS = 1 << 20, 10
_FACTORS = (1, 4)  # of the longest training text: while a model trains


@torch.no_grad()
def run(
    subject: Subject,
    settings: NeedleSettings,
    text: Tokens | Stream,
    record: Record,
    progress: Say = lambda message: None,
) -> list[dict[str, Any]]:
    """Measure all cells, lengths first; those that ``record`` holds are not measured again.

    Args:
        text: haystacks are cut out of it: tokens, or a stream that is longer than memory (``len``, ``read(start,
            stop)``), such as a prepared corpus. A shorter one is repeated.
        progress: told a line about what is under way, often.

    Returns:
        The results, as ``record`` holds them.

    Raises:
        ValueError: settings that do not fit the model, its tokenizer or each other; a length too short for the needles
            or too long for the memory, before anything is read; a text that holds all values that are drawn.
    """
    plan = Plan.of(subject, settings, text, divided=True)

    def missing(length: int) -> list[float | None]:
        return [depth for depth in plan.depths if record.find(plan.cell(length, depth)) is None]

    plan.expect_possible([length for length in plan.lengths if missing(length)])
    for length in plan.lengths:
        for depth, result, lines in plan.measure(length, missing(length), progress):
            record.measure(plan.cell(length, depth), partial(dict, result), partial(list, lines))
    cells = (plan.cell(length, depth) for length in plan.lengths for depth in plan.depths)
    return [kept for cell in cells if (kept := record.find(cell)) is not None]


@torch.no_grad()
def measure(
    subject: Subject, settings: NeedleSettings, text: Tokens | Stream, progress: Say = lambda message: None
) -> list[dict[str, Any]]:
    """Measure all cells as :func:`run` does, and keep nothing: for a model that is still in training, or a script."""
    plan = Plan.of(subject, settings, text)
    plan.expect_possible(plan.lengths)
    return [result for n in plan.lengths for _, result, _ in plan.measure(n, list(plan.depths), progress)]


def needle_accuracy(
    chunk_size: int, tokenizer: str, questions: int = 50, seed: int = 0
) -> Callable[[TrailmarkForCausalLM], dict[str, float]]:
    """Make a function that asks a model for single needles, and gives the shares of right answers.

    Texts have 1x and 4x the length of the longest training text. The haystacks are sources of Python's library that
    training leaves out.
    """
    loaded = load_tokenizer(tokenizer)
    haystack = tokenize(standard_library_texts("haystack"), loaded)
    longest = CURRICULUM[-1].chunks * chunk_size
    lengths = tuple(factor * longest for factor in _FACTORS)
    settings = NeedleSettings(lengths, format="marks", questions=questions, seed=seed)

    def ask(model: TrailmarkForCausalLM) -> dict[str, float]:
        subject = Subject.of(model, loaded, chunk_size)
        results = measure(subject, settings, haystack)
        return {
            f"needles_{factor}x": result["accuracy"] for factor, result in zip(_FACTORS, results, strict=True)
        }

    return ask


def num_haystacks(length: int, trials: int) -> int:
    """How many haystacks so many trials of one length are shared out to."""
    return max(1, min(_MOST_HAYSTACKS, trials, _TOKENS_PER_LENGTH // length))


@dataclass(frozen=True)
class Plan:
    """What one subject is asked: settings that were checked, with what they leave to the model filled in."""

    subject: Subject
    settings: NeedleSettings
    task: NeedleTask
    filler: Filler
    divided: bool = False
    """Whether the processes that know each other share the work out: all of them follow the plan then."""

    @classmethod
    def of(
        cls, subject: Subject, settings: NeedleSettings, text: Tokens | Stream, divided: bool = False
    ) -> Plan:
        """Raises ValueError for settings that do not fit the model's tokenizer or each other."""
        format = settings.format or _format_for(subject, settings)
        if settings.chat and format not in CHAT_FORMATS:
            raise ValueError(
                f"chat: expected the format {' or '.join(map(repr, CHAT_FORMATS))} for questions through a chat "
                f"template, got {format!r}. Choose one of these, or leave --chat out."
            )
        if settings.values not in (None, *VALUES[format]):
            shown = " or ".join(map(repr, VALUES[format]))
            raise ValueError(
                f"values: expected {shown} in the format {format!r}, got {settings.values!r}. Choose another format."
            )
        assert getattr(subject.model.config, "chunk_size", None) in (None, subject.chunk_size)
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
            settings.chat,
        )
        return cls(subject, settings, task, Filler(text, task.format.replaced), divided)

    @property
    def lengths(self) -> Sequence[int]:
        return self.settings.lengths or tuple(self.subject.default_lengths())

    @property
    def depths(self) -> Sequence[float | None]:
        return (None,) if self.settings.depths is None else tuple(dict.fromkeys(self.settings.depths))

    @cached_property
    def sight(self) -> int:
        """Last chunks of a haystack that are seen other than through the memory; with full attention all are."""
        if not self.subject.ours:
            return 0
        window, S = self.subject.model.config.sliding_window, self.subject.chunk_size
        if self.settings.sight == "window" and window is not None:  # of some layers others may have none
            return -(-window // S)
        return 0 if self.subject.model.reach() is None else self.subject.model.chunks_in_sight(S)

    @property
    def _seen(self) -> str:
        return "It sees" if self.settings.sight == "window" else "All layers together see"

    @cached_property
    def ends(self) -> set[int]:
        """Tokens behind which nothing is said."""
        tokenizer, model = self.subject.tokenizer, self.subject.model
        turns = getattr(self.task.format, "turns", None)
        return answer_ends(tokenizer, model) if turns is None else turns.ends(tokenizer, model)

    @cached_property
    def begins(self) -> int:
        """Tokens that the tokenizer of a foreign model puts before a text; of ours the haystack begins with them."""
        return 0 if self.subject.ours else len(self.subject.beginning)

    @cached_property
    def _text(self) -> str:
        return self.filler.fingerprint()

    @cached_property
    def sinks(self) -> int:
        """First tokens of a haystack that always stay in sight."""
        return self.subject.model.config.num_sinks if self.subject.ours else 0

    def _begin(self, start: int) -> tuple[int, ...]:
        """What a haystack from ``start`` on begins with, where no needle lies."""
        begin = list(self.subject.beginning) if self.subject.ours else []
        begin += self.filler.read(start, self.sinks)[len(begin) :].tolist()
        return tuple(begin)

    def chunks(self, length: int) -> int:
        """Chunks of a haystack in texts of ``length`` tokens."""
        return self.task.chunks(length - self.begins, self.subject.chunk_size)

    def cell(self, length: int, depth: float | None) -> dict[str, Any]:
        """All that decides the numbers of one cell."""
        format, task = self.task.format.name, self.task
        kept = asdict(self.settings)
        later = [name for name, before in (("chat", False), ("sight", "layers")) if kept[name] == before]
        for name in ("lengths", "depths", "memory_folder", *later):
            del kept[name]  # records from before there were such settings are those without
        return (
            {"suite": "needles", "length": length, "depth": depth}
            | kept
            | {
                "format": format,
                "values": self.settings.values or VALUES[format][0],
                "needles": task.needles,
                "hops": task.hops,
                "straddle": task.straddle,
                "chunk_size": self.subject.chunk_size,
                "text": self._text,
            }
        )

    def expect_possible(self, lengths: Sequence[int]) -> None:
        """Raises ValueError, before anything is read, for a length that cannot be asked."""
        if not lengths:
            return
        S, subject, settings = self.subject.chunk_size, self.subject, self.settings
        for length in lengths:  # before names are drawn for all of them
            if length < self.task.num_needles:
                raise ValueError(
                    f"length: expected at least a token for each of {self.task.num_needles} needles, got {length}."
                )
        least = self.task.least_chunks(S, len(self._begin(0))) + self.sight
        for length in lengths:
            if self.chunks(length) < least:
                raise ValueError(
                    f"length: expected at least {(least + 1) * S + self.task.sizes[1] + self.begins} tokens for "
                    f"{self.task.num_needles} needles out of the window's sight and a question, got {length}. "
                    f"{self._seen} {self.sight * S} tokens back: choose longer ones, or a smaller window"
                    f"{'' if self.settings.sight == 'window' else ', or sight window, which needles must be out of'}."
                )
        longest = max(lengths)
        if (most := subject.longest_text) is not None and longest > most:
            raise ValueError(
                f"length: expected at most the {most} tokens that {subject.name!r} takes "
                f"(max_position_embeddings), got {longest}. Choose shorter ones."
            )
        if not subject.ours:
            return
        ids = torch.from_numpy(self.filler.read(0, probe_length(subject.model))).long()[None]
        dtype = parse_dtype(settings.memory_dtype)
        need = memory_need(subject.model, ids, self.chunks(longest) * S, settings.memory_tier, dtype)
        shares = self.asker(longest).shares
        pieces = num_haystacks(longest, settings.questions) if shares else settings.questions
        together = beside_each_other(pieces) if self.divided else 1
        expect_room(subject.model, need, longest, settings.memory_folder, together)

    # --- measuring -----------------------------------------------------------------------------------------

    def measure(
        self, length: int, depths: Sequence[float | None], progress: Say
    ) -> Iterator[tuple[float | None, dict[str, Any], list[dict[str, Any]]]]:
        """Ask at each depth; haystacks are shared, and read once where the model allows it.

        Several processes share out haystacks, or trials where each has to be read anew.

        Yields:
            Each depth, its result and a line for each of its questions, once its last haystack was asked.
        """
        if not depths:
            return
        S = self.subject.chunk_size
        trials = -(-self.settings.questions // self.task.questions_of(depths[0]))
        haystacks, turns = num_haystacks(length, trials), itertools.count()
        asker = self.asker(length, shared=trials * len(self.depths) > haystacks)
        shared = ReadingCost()
        cost = {depth: shared if asker.shares else ReadingCost() for depth in depths}
        lines: dict[float | None, list[dict[str, Any]]] = {depth: [] for depth in depths}
        seconds = dict.fromkeys(depths, 0.0)
        for number in range(haystacks):
            haystack = self.haystack(length, number)
            here = trials * (number + 1) // haystacks - trials * number // haystacks
            name = f"{length:,} tokens: haystack {number + 1} of {haystacks}"
            progress(name)
            laid = self.lay(length, number, depths, here)

            def told(tokens: int, name: str = name, total: int = haystack.chunks * S) -> None:
                progress(f"{name}: {tokens / total:.0%} read")

            with asker.reading(haystack, shared, told) if self._is_mine(number) else nullcontext() as read:
                for depth in depths:
                    for n, trial in enumerate(laid[depth]):
                        if not self._is_mine(number if asker.shares else next(turns)):
                            continue
                        progress(f"{name}: trial {n + 1} of {here}")
                        began, before = time.perf_counter(), cost[depth].seconds
                        with asker.holding(read, haystack, trial.needles, cost[depth], told) as held:
                            answered = self.ask(asker, held, trial, cost[depth])
                        reading = cost[depth].seconds - before
                        seconds[depth] += time.perf_counter() - began - reading
                        places = (
                            {"haystack": number, "trial": n, "question": i} for i in range(len(answered))
                        )
                        lines[depth] += [place | line for place, line in zip(places, answered, strict=True)]
                    if number == haystacks - 1:
                        cells = len(depths) if asker.shares else 1
                        found = lines[depth], cost[depth], seconds[depth]
                        asked, spent, took = _of_all(*found) if self.divided else found
                        result = summary(asked) | costs(spent, haystacks, took, cells)
                        yield depth, self._about(length, depth) | result, asked

    def haystack(self, length: int, number: int) -> Haystack:
        """The haystack of a number in texts of ``length`` tokens, without needles."""
        start = Draws(self.settings.seed, 1, number).below(len(self.filler))
        begin = self._begin(start)
        return Haystack(self.filler, start, self.chunks(length), self.subject.chunk_size, begin=begin)

    def lay(
        self, length: int, number: int, depths: Sequence[float | None], trials: int
    ) -> dict[float | None, list[Trial]]:
        """So many trials at each depth in the haystack of a number."""
        haystack = self.haystack(length, number)
        last = haystack.chunks - self.sight
        return self.task.lay(
            haystack, length - self.begins, last, depths, trials, self.settings.seed, 2, number
        )

    def _is_mine(self, number: int) -> bool:
        return not self.divided or dealt(number)

    def asker(self, length: int, shared: bool = True) -> Asker:
        """What reads haystacks of texts of ``length`` tokens; ``shared``: of each for several trials, where it can."""
        model, settings = self.subject.model, self.settings
        if not self.subject.ours:
            return WholeTextAsker(model, self.subject.tokenizer)
        S, chunks, dtype = self.subject.chunk_size, self.chunks(length), parse_dtype(settings.memory_dtype)

        def new_cache(folder: Path | None) -> Any:
            return model.new_cache(settings.memory_tier, chunks * S, folder, dtype)

        return MemoryAsker(model, S, new_cache, settings.memory_folder, chunks, shared)

    def ask(self, asker: Asker, held: Any, trial: Trial, cost: ReadingCost) -> list[dict[str, Any]]:
        """Put a trial's questions to what ``asker`` holds, and judge the answers: for each its line of generations."""
        tokenizer, questions = self.subject.tokenizer, trial.questions
        answers = asker.ask(held, questions, cost)
        verdicts = [
            judge(q, answer.tokens, tokenizer, self.ends, given=True)
            for q, answer in zip(questions, answers, strict=True)
        ]
        wrong = [i for i, verdict in enumerate(verdicts) if not verdict.right]
        if wrong and self.settings.protocol is None:  # written freely, some may be right after all
            for i, tokens in zip(wrong, asker.generate(held, [questions[i] for i in wrong]), strict=True):
                verdicts[i] = judge(questions[i], tokens, tokenizer, self.ends)
        return [
            line_of(trial, q, answer, verdict, self.subject.chunk_size, self._counted(len(q.answer)))
            for q, answer, verdict in zip(questions, answers, verdicts, strict=True)
        ]

    def _counted(self, length: int) -> int | None:
        """The token of an answer of ``length`` that a protocol counts; None: all must be right."""
        if self.settings.protocol is None:
            return None
        return 0 if self.settings.kind == "single" else length - 1

    def _about(self, length: int, depth: float | None) -> dict[str, Any]:
        """What says which cell it is, beside the numbers."""
        cell = self.cell(length, depth)
        names = ["length", "depth", "kind", "format", "needles", "hops", "distractors", "landmarks"]
        names += ["chat"] if self.settings.chat else []
        about = {name: cell[name] for name in (*names, "protocol", "memory_tier", "memory_dtype")}
        return about | {"train_length": self.subject.train_length if self.subject.run else None}


def _of_all(
    lines: list[dict[str, Any]], cost: ReadingCost, seconds: float
) -> tuple[list[dict[str, Any]], ReadingCost, float]:
    """What all processes found and spent together, as one would have found it."""
    found = gathered((lines, cost, seconds))
    asked = sorted(
        itertools.chain.from_iterable(those for those, _, _ in found),
        key=lambda line: (line["haystack"], line["trial"], line["question"]),
    )
    spent = [each for _, each, _ in found]
    first = next((each for each in spent if each.tokens), cost)
    tokens, reading = sum(each.tokens for each in spent), sum(each.seconds for each in spent)
    return asked, replace(first, tokens=tokens, seconds=reading), sum(took for _, _, took in found)


def _format_for(subject: Subject, settings: NeedleSettings) -> str:
    if settings.protocol is not None:
        return "paper"
    if settings.chat:
        return "sentences"
    return {"needles": "marks", "niah": "paper"}.get(subject.task or "", "sentences")
