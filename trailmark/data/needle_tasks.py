"""What needle evaluations ask: needles of several kinds, where they lie, and questions about them.

A text is a haystack with needles written over it, filler that goes on from there, a question and its answer: exactly
``length`` tokens together. All draws are hashes of what they are for (:mod:`.draws`): a trial is a function of its
numbers, its format and its haystack alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trailmark.data.draws import Draws
from trailmark.data.haystacks import Haystack, Needle, occurring
from trailmark.data.needle_formats import (
    Format,
    Marks,
    Name,
    NeedleText,
    Paper,
    QuestionText,
    Sentences,
)

Integers = npt.NDArray[np.int64]
Kind = Literal["single", "multi-key", "multi-value", "multi-query", "hops"]
KINDS: tuple[Kind, ...] = ("single", "multi-key", "multi-value", "multi-query", "hops")
_ATTEMPTS = 100  # to draw values that the haystack does not hold
_SHARE = 4  # needles fill at most one token of so many, so that each finds a place


@dataclass(frozen=True)
class Question:
    """What is asked of a haystack."""

    prompt: Integers  # [p] filler that follows the haystack, and the question
    landmarks: tuple[int, ...]  # after which tokens of the prompt the question closes a chunk, ascending
    early: (
        int | None
    )  # after which token of its filler a landmark brings the question to its phase; None: none
    answer: Integers  # [a]
    parts: tuple[str, ...]  # the values that make the answer
    text: str  # the answer
    gold: tuple[tuple[int, ...], ...]  # of each hop: which needles it needs
    fixed: bool = True  # the answer is as long as that; else the model has to end it
    any_order: bool = False
    value_length: int = 0  # tokens of each value of a fixed answer that may come in any order

    @property
    def marks(self) -> list[int]:
        """After which tokens of the prompt a landmark comes, ascending."""
        return [*([] if self.early is None else [self.early]), *self.landmarks]

    def closings(self, chunk_size: int) -> list[int]:
        """Of the chunks that close behind the haystack (whole chunks), numbered from 0: those of ``landmarks``."""
        marks, closed, filled, found = set(self.marks), 0, 0, []
        for place in range(len(self.prompt)):
            filled += 1
            if filled == chunk_size or place in marks:
                if place in self.landmarks:
                    found.append(closed)
                closed, filled = closed + 1, 0
        return found

    @property
    def needed(self) -> int:
        """Tokens that are generated: where the answer must be ended, the token after it too."""
        return len(self.answer) + (not self.fixed)

    def given(self, tokens: Sequence[int], text: str) -> bool:
        """Whether greedy decoding writes the answer as it stands: from the best tokens after the true ones before each.

        Whatever else these say, also a right answer in another order, does not tell what would be written.
        """
        return np.array_equal(tokens[: len(self.answer)], self.answer) and self.right(tokens, text)

    def right(self, tokens: Sequence[int], text: str) -> bool:
        """Whether generated tokens, which read ``text``, are the answer.

        Another way to write the same answer in tokens counts; more letters or digits behind it are another answer.
        """
        if self.fixed:
            given = np.asarray(tokens[: len(self.answer)])
            if np.array_equal(given, self.answer):
                return True
            return self.any_order and len(given) == len(self.answer) and self._same_values(given)
        said = text.lstrip()
        if said.startswith(self.text):
            return not re.match(r"[\w-]|[.,]\d", said[len(self.text) :])
        found = [part for part in re.split(r"[,;\s]+|\band\b", said) if part][: len(self.parts)]
        if not self.any_order or len(found) < len(self.parts):
            return False
        found[-1] = found[-1].rstrip(".")  # which ends the sentence
        return sorted(found) == sorted(self.parts)

    def _same_values(self, given: Integers) -> bool:
        """Whether the values of an answer stand in ``given``, of its length, with the separators where it has them."""
        n, size = len(self.parts), self.value_length
        starts = np.arange(n) * ((len(self.answer) - size) // max(1, n - 1))
        columns = starts[:, None] + np.arange(size)
        between = np.setdiff1d(np.arange(len(given)), columns)
        values = [sorted(map(tuple, tokens[columns].tolist())) for tokens in (given, self.answer)]
        return values[0] == values[1] and np.array_equal(given[between], self.answer[between])


@dataclass(frozen=True)
class Trial:
    """Needles to hide in one haystack at a time, and the questions about them, each asked by itself."""

    needles: tuple[Needle, ...]
    questions: tuple[Question, ...]


class Facts:
    """The names of one trial: needles lead from one to another."""

    def __init__(self) -> None:
        self.needles: list[tuple[Name, Name]] = []
        self.asked: list[
            tuple[list[Name], list[Name], list[list[int]]]
        ] = []  # keys, what is found, needles of hops


@dataclass(frozen=True)
class NeedleTask:
    """Needles and questions of one kind in one format.

    Args:
        format: how they are written.
        kind: "single": one needle, asked. "multi-key": ``needles`` of them with different keys, each asked by itself.
            "multi-value": ``needles`` values of one key, asked together. "multi-query": ``needles`` keys asked in one
            question. "hops": ``needles`` chains of ``hops`` needles, the end of each asked by its beginning.
        distractors: needles more, of keys that stand nowhere else. Of hops, as many of ``hops`` lead to a value as in
            a chain: what a needle leads to does not tell whether it is one of a chain.
        landmarks: that the question closes chunks with: 1 or 2.
        any_phase: the question's first landmark falls on each place of a chunk as often; else at a full chunk's end.
        straddle: needles may lie across chunks; else each lies whole in a chunk of its own.
    """

    format: Format
    kind: Kind = "single"
    needles: int = 1
    hops: int = 1
    distractors: int = 0
    landmarks: int = 1
    any_phase: bool = True
    straddle: bool = True

    # --- sizes ---------------------------------------------------------------------------------------------

    @property
    def num_needles(self) -> int:
        return self.needles * self.hops + self.distractors

    def questions_of(self, depth: float | None) -> int:
        """Of a trial. With a depth only the question whose needle lies there is asked."""
        return self.needles if depth is None and self.kind in ("multi-key", "hops") else 1

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Tokens of the longest needle, and of a question with its answer: the most among some that are drawn.

        A draw that is longer still is drawn again (few tokenizers have such).
        """
        needle, question = 0, 0
        for number in range(max(4, 64 // self.num_needles)):
            facts = self._facts(Draws(number))
            needle = max(needle, *(len(self.format.needle(*names).tokens) for names in facts.needles))
            for text in self._texts(facts):
                question = max(question, len(text.tokens) + len(text.answer))
        return needle, question

    def chunks(self, length: int, chunk_size: int) -> int:
        """Of a haystack, in texts of ``length`` tokens: behind it there is room for a chunk's filler and a question."""
        return max(0, length - self.sizes[1] - chunk_size) // chunk_size

    def least_chunks(self, chunk_size: int) -> int:
        """In which the needles find places."""
        longest = self.sizes[0]
        if self._whole(chunk_size, longest):
            return self.num_needles
        return -(-self.num_needles * longest * (1 if self.num_needles == 1 else _SHARE) // chunk_size)

    def _whole(self, chunk_size: int, longest: int) -> bool:
        return not self.straddle and longest <= chunk_size

    # --- trials --------------------------------------------------------------------------------------------

    def trials(
        self,
        haystack: Haystack,
        length: int,
        last_chunk: int,
        depths: Sequence[float | None],
        count: int,
        *numbers: int,
    ) -> dict[float | None, list[Trial]]:
        """``count`` trials at each depth, the same whatever other depths there are.

        Args:
            length: tokens of haystack, filler, question and answer.
            last_chunk: needles lie in chunks below it.
            depths: where the first question's first needle lies: 0 the first place, 1 the last one; None: anywhere.
            numbers: that the draws depend on (seed, haystack).

        Raises:
            ValueError: a haystack that holds all values that are drawn.
        """
        wanted = [(depth, n) for depth in depths for n in range(count)]
        drawn: dict[tuple[float | None, int], Facts] = {}
        missing = wanted
        room = length - haystack.chunks * haystack.chunk_size - haystack.chunk_size
        for attempt in range(_ATTEMPTS):
            for key in missing:
                drawn[key] = self._facts(Draws(*numbers, _number(key[0]), key[1], attempt))
            missing = self._unfit(haystack, length, room, {key: drawn[key] for key in missing})
            if not missing:
                break
        else:
            raise ValueError(
                f"text: expected text that does not hold the values to hide, but {length} tokens of it hold each that "
                f"was drawn in {_ATTEMPTS} attempts. Use a shorter length, other text, or another format or values."
            )
        found: dict[float | None, list[Trial]] = {depth: [] for depth in depths}
        for depth, n in wanted:
            draws = Draws(*numbers, _number(depth), n, _ATTEMPTS)
            found[depth].append(self._trial(drawn[depth, n], haystack, length, last_chunk, depth, draws))
        return found

    def _unfit(
        self, haystack: Haystack, length: int, room: int, drawn: dict[Any, Facts]
    ) -> list[tuple[float | None, int]]:
        """Those whose values stand in the text, or that are longer than the room that is kept for them."""
        sequences, owners = [], []
        wrong, longest = set(), self.sizes[0]
        for key, facts in drawn.items():
            needles = (self.format.needle(*names) for names in facts.needles)
            if any(len(text.tokens) + len(text.answer) > room for text in self._texts(facts)) or any(
                len(text.tokens) > longest for text in needles
            ):
                wrong.add(key)
            for _, values, _ in facts.asked:
                for value in values:
                    variants = self.format.variants(value)
                    sequences += variants
                    owners += [key] * len(variants)
        wrong |= {owners[n] for n in occurring(haystack.filler, haystack.start, length, sequences)}
        return [key for key in drawn if key in wrong]

    def _facts(self, draws: Draws) -> Facts:
        facts, used = Facts(), set()

        def name(key: bool) -> Name:
            while True:
                drawn = self.format.draw(draws, key)
                if drawn.tokens.tobytes() not in used:
                    used.add(drawn.tokens.tobytes())
                    return drawn

        if self.kind == "hops":
            for _ in range(self.needles):
                chain = [name(True) for _ in range(self.hops)] + [name(False)]
                first = len(facts.needles)
                facts.needles += list(pairwise(chain))
                facts.asked.append((chain[:1], chain[1:], [[first + hop] for hop in range(self.hops)]))
        else:
            keys = [name(True) for _ in range(1 if self.kind == "multi-value" else self.needles)]
            values = [name(False) for _ in range(self.needles)]
            facts.needles = list(zip(keys * self.needles, values, strict=False))
            if self.kind in ("multi-value", "multi-query"):
                facts.asked = [(keys, values, [list(range(self.needles))])]
            else:
                facts.asked = [([k], [v], [[n]]) for n, (k, v) in enumerate(facts.needles)]
        for number in range(self.distractors):
            ends = number % self.hops == self.hops - 1
            facts.needles.append((name(True), name(not ends)))
        return facts

    def _texts(self, facts: Facts) -> list[QuestionText]:
        return [
            self.format.question(keys, found, self.hops, self.landmarks) for keys, found, _ in facts.asked
        ]

    def _trial(
        self,
        facts: Facts,
        haystack: Haystack,
        length: int,
        last_chunk: int,
        depth: float | None,
        draws: Draws,
    ) -> Trial:
        texts = [self.format.needle(*names) for names in facts.needles]
        places = self._places(texts, haystack.chunk_size, last_chunk, depth, draws)
        needles = [Needle(p, text.tokens, text.value) for p, text in zip(places, texts, strict=True)]
        S, chunks = haystack.chunk_size, haystack.chunks
        questions = []
        for (keys, found, gold), _ in zip(facts.asked, range(self.questions_of(depth)), strict=False):
            if self.kind == "multi-value":  # named in the order of their places
                order = sorted(gold[0], key=lambda n: needles[n].start)
                found = [found[n] for n in order]
            text = self.format.question(keys, found, self.hops, self.landmarks)
            filler = length - chunks * S - len(text.tokens) - len(text.answer)
            assert filler >= S
            landmarks = tuple(filler + place for place in text.landmarks)
            first = 1 + draws.below(S) if self.any_phase else (landmarks[0] % S + 1)
            questions.append(
                Question(
                    np.concatenate([haystack.tail(filler), text.tokens]),
                    landmarks,
                    first - 1 if first < S else None,
                    text.answer,
                    text.parts,
                    text.text,
                    tuple(map(tuple, gold)),
                    self.format.fixed,
                    self.kind == "multi-value",
                    len(found[0].tokens),
                )
            )
        return Trial(tuple(needles), tuple(questions))

    def _places(
        self, texts: Sequence[NeedleText], S: int, last_chunk: int, depth: float | None, draws: Draws
    ) -> list[int]:
        """Where needles begin; the first asked one at its depth."""
        lengths = [len(text.tokens) for text in texts]
        if self._whole(S, max(lengths)):
            first = None if depth is None else round(depth * (last_chunk - 1))
            others = draws.among(last_chunk - (first is not None), len(texts) - (first is not None))
            chunks = others if first is None else [first, *(n + (n >= first) for n in others)]
            return [n * S + draws.below(S - size + 1) for n, size in zip(chunks, lengths, strict=True)]
        places: list[int] = []
        limit = last_chunk * S
        for number, size in enumerate(lengths):
            while True:
                if number == 0 and depth is not None:
                    start = round(depth * (limit - size))
                else:
                    start = draws.below(limit - size + 1)
                if all(start >= p + n or start + size <= p for p, n in zip(places, lengths, strict=False)):
                    break
            places.append(start)
        return places


def _number(depth: float | None) -> int:
    """A depth, for draws; None: none."""
    return -1 if depth is None else round(depth * 1e9)


def make_task(
    tokenizer: Any,
    format: str,
    kind: Kind,
    needles: int,
    hops: int,
    distractors: int,
    values: str | None,
    landmarks: int,
    any_phase: bool,
    straddle: bool | None,
    value_tokens: int | None = None,
) -> NeedleTask:
    """A task of checked settings; ``values``, ``straddle``, ``value_tokens``: None is the format's own.

    Raises:
        ValueError: a tokenizer without what the format is made of.
    """
    hops = hops if kind == "hops" else 1
    made: Format
    if format == "marks":
        made = Marks(tokenizer)
    elif format == "sentences":
        made = Sentences(tokenizer, values or "numbers", kind == "hops")
    else:
        passkey = kind == "single" and not distractors
        # tokens of the paper's published training texts
        length = (10 if passkey else 5) if value_tokens is None else value_tokens
        made = Paper(tokenizer, values or "tokens", passkey, length)
    return NeedleTask(
        made,
        kind,
        needles,
        hops,
        distractors,
        landmarks,
        any_phase,
        not made.whole if straddle is None else straddle,
    )
