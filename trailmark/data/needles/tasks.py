"""What needle evaluations ask: needles of several kinds, where they lie, and questions about them.

A text is a haystack with needles written over it, filler that goes on from there, a question and its answer: exactly
``length`` tokens together. All draws are hashes of what they are for (:mod:`trailmark.data.draws`): a trial is a
function of its numbers, its format and its haystack alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from trailmark.data.chat import ChatTurns
from trailmark.data.corpus import Integers
from trailmark.data.draws import Draws
from trailmark.data.needles.formats import Format, Marks, Name, NeedleText, Paper, QuestionText, Sentences
from trailmark.data.needles.haystacks import Haystack, Needle, occurring
from trailmark.data.needles.paraphrases import Paraphrases

Kind = Literal["single", "multi-key", "multi-value", "multi-query", "hops"]
KINDS: tuple[Kind, ...] = ("single", "multi-key", "multi-value", "multi-query", "hops")
_ATTEMPTS = 100  # to draw values that the haystack does not hold
_ATTEMPTS_OF_A_NAME = 10_000
_SHARE = 4  # needles fill at most one token of so many, so that each finds a place


@dataclass(frozen=True)
class Asked:
    """One question, by the numbers of the names and needles in it."""

    keys: list[int]
    values: list[int]  # what the keys lead to; of a chain all names behind its key, the value last
    needles: list[list[int]]  # those that each hop needs


class Facts:
    """Which name leads to which, by number: what training texts and evaluations share, whatever the names are.

    Args:
        kind, needles, hops, distractors: as of :class:`NeedleTask`.

    Attributes:
        keys: of each name, whether it is a key (or a value).
        needles: of each needle, the names that it leads from and to.
        questions: what may be asked.
    """

    def __init__(self, kind: Kind, needles: int, hops: int, distractors: int) -> None:
        self.keys: list[bool] = []
        self.needles: list[tuple[int, int]] = []
        self.questions: list[Asked] = []
        if kind == "hops":
            for _ in range(needles):
                names = self._names([True] * hops + [False])
                first = len(self.needles)
                self.needles += [(name, name + 1) for name in names[:-1]]
                gold = [[first + hop] for hop in range(hops)]
                self.questions.append(Asked(names[:1], names[1:], gold))
        else:
            keys = self._names([True] * (1 if kind == "multi-value" else needles))
            values = self._names([False] * needles)
            self.needles = list(zip(keys * needles, values, strict=False))
            if kind in ("multi-value", "multi-query"):
                self.questions = [Asked(keys, values, [list(range(needles))])]
            else:
                self.questions = [Asked([k], [v], [[n]]) for n, (k, v) in enumerate(self.needles)]
        for number in range(distractors):
            ends = number % hops == hops - 1
            left, right = self._names([True, not ends])
            self.needles.append((left, right))

    def _names(self, keys: list[bool]) -> list[int]:
        """Take names, each a key or not, and return their numbers."""
        first = len(self.keys)
        self.keys += keys
        return list(range(first, len(self.keys)))


@dataclass(frozen=True)
class Question:
    """What is asked of a haystack."""

    prompt: Integers  # [p] filler that follows the haystack, and the question
    landmarks: tuple[int, ...]  # after which tokens of the prompt the question closes a chunk, ascending
    early: int | None  # after which token of its filler a landmark brings the question to its phase
    answer: Integers  # [a]
    parts: tuple[str, ...]  # the values that make the answer
    text: str  # the answer
    gold: tuple[tuple[int, ...], ...]  # of each hop: which needles it needs
    fixed: bool = True  # the answer is as long as that; else the model has to end it
    any_order: bool = False  # the values may come in any order
    value_length: int = 0  # tokens of each value of a fixed answer
    free: bool = False  # the answer may stand anywhere in what is said
    filler: int = 0  # tokens of the prompt before what is asked

    @property
    def asked(self) -> Integers:
        """The prompt without its filler, which may look like a place of the haystack."""
        return self.prompt[self.filler :]

    @property
    def marks(self) -> list[int]:
        """After which tokens of the prompt a landmark comes, ascending: the early one too."""
        return [*([] if self.early is None else [self.early]), *self.landmarks]

    def closings(self, chunk_size: int) -> list[int]:
        """Number the chunks that close behind the haystack (whole chunks) from 0; return those of ``landmarks``."""
        marks, closed, filled, asking = set(self.marks), 0, 0, []
        for place in range(len(self.prompt)):
            filled += 1
            if filled == chunk_size or place in marks:
                if place in self.landmarks:
                    asking.append(closed)
                closed, filled = closed + 1, 0
        return asking

    @property
    def needed(self) -> int:
        """How many tokens the model has to say: where it must end the answer, the one after it too."""
        return len(self.answer) + (not self.fixed)

    def given(self, tokens: Sequence[int], text: str) -> bool:
        """Whether greedy decoding writes the answer as it stands, by the best tokens after the true ones before each.

        If these say anything else, even the right values in another order, they do not tell what would be written.
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
        if self.free:
            return self._within(text)
        said = text.lstrip()
        if said.startswith(self.text):
            return not re.match(r"[\w-]|[.,]\d", said[len(self.text) :])
        parts = [part for part in re.split(r"[,;\s]+|\band\b", said) if part][: len(self.parts)]
        if not self.any_order or len(parts) < len(self.parts):
            return False
        parts[-1] = parts[-1].rstrip(".")  # which ends the sentence
        return sorted(parts) == sorted(self.parts)

    def _within(self, text: str) -> bool:
        """Whether all values stand in a text, exactly: not as a part of a word or of another number."""
        places = []
        for part in self.parts:
            found = re.search(rf"(?<![\w-])(?<!\d[.,]){re.escape(part)}(?![\w-]|[.,]\d)", text)
            if found is None:
                return False
            places.append(found.start())
        return self.any_order or places == sorted(places)

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

    @cached_property
    def facts(self) -> Facts:
        return Facts(self.kind, self.needles, self.hops, self.distractors)

    # --- sizes ---------------------------------------------------------------------------------------------

    @property
    def num_needles(self) -> int:
        return self.needles * self.hops + self.distractors

    def questions_of(self, depth: float | None) -> int:
        """Return the questions of a trial. With a depth only the one whose needle lies there is asked."""
        return len(self.facts.questions) if depth is None else 1

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Tokens of the longest needle, and of a question with its answer: the most among some that are drawn.

        A draw that is longer still is drawn again (few tokenizers have such).
        """
        needle, question = 0, 0
        for number in range(max(4, 64 // self.num_needles)):
            names = self._draw(Draws(number))
            needle = max(needle, *(len(text.tokens) for text in self._needles(names)))
            question = max(
                question, *(_length(self._question(names, asked)) for asked in self.facts.questions)
            )
        return needle, question

    def chunks(self, length: int, chunk_size: int) -> int:
        """Of a haystack, in texts of ``length`` tokens: behind it there is room for a chunk's filler and a question."""
        return max(0, length - self.sizes[1] - chunk_size) // chunk_size

    def least_chunks(self, chunk_size: int, begin: int = 0) -> int:
        """In which the needles find places behind the ``begin`` first tokens."""
        longest = self.sizes[0]
        if self._whole(chunk_size, longest):
            return _first_whole(chunk_size, longest, begin) + self.num_needles
        tokens = self.num_needles * longest * (1 if self.num_needles == 1 else _SHARE)
        return -(-(begin + tokens) // chunk_size)

    def _whole(self, chunk_size: int, longest: int) -> bool:
        return not self.straddle and longest <= chunk_size

    # --- trials --------------------------------------------------------------------------------------------

    def lay(
        self,
        haystack: Haystack,
        length: int,
        last_chunk: int,
        depths: Sequence[float | None],
        count: int,
        *numbers: int,
    ) -> dict[float | None, list[Trial]]:
        """Lay out ``count`` trials at each depth, the same whatever other depths there are.

        Args:
            length: tokens of haystack, filler, question and answer.
            last_chunk: needles lie in chunks below it.
            depths: where the first question's first needle lies: 0 the first place, 1 the last one; None: anywhere.
            numbers: that the draws depend on (seed, haystack).

        Raises:
            ValueError: a haystack that holds all values that are drawn.
        """
        wanted = [(depth, n) for depth in depths for n in range(count)]
        drawn: dict[tuple[float | None, int], list[Name]] = {}
        missing = wanted
        for attempt in range(_ATTEMPTS):
            for depth, n in missing:
                drawn[depth, n] = self._draw(Draws(*numbers, _number(depth), n, attempt))
            missing = self._unfit(haystack, length, {key: drawn[key] for key in missing})
            if not missing:
                break
        else:
            raise ValueError(
                f"text: expected text that does not hold the values to hide, but {length} tokens of it hold each that "
                f"was drawn in {_ATTEMPTS} attempts. Use a shorter length, other text, or another format or values."
            )
        trials: dict[float | None, list[Trial]] = {depth: [] for depth in depths}
        for depth, n in wanted:
            draws = Draws(*numbers, _number(depth), n, _ATTEMPTS)
            trials[depth].append(self._trial(drawn[depth, n], haystack, length, last_chunk, depth, draws))
        return trials

    def _draw(self, draws: Draws) -> list[Name]:
        """Draw a name for each of the facts, no two alike."""
        names: list[Name] = []
        used: set[bytes] = set()
        for key in self.facts.keys:
            for _ in range(_ATTEMPTS_OF_A_NAME):
                name = self.format.draw(draws, key)
                if name.tokens.tobytes() not in used:
                    break
            else:
                raise ValueError(
                    f"tokenizer: expected one that tells names apart, but {_ATTEMPTS_OF_A_NAME} names that were drawn "
                    f"are the same tokens as {len(names)} before. Use another format or another tokenizer."
                )
            used.add(name.tokens.tobytes())
            names.append(name)
        return names

    def _needles(self, names: Sequence[Name]) -> list[NeedleText]:
        return [self.format.needle(names[left], names[right]) for left, right in self.facts.needles]

    def _question(
        self, names: Sequence[Name], asked: Asked, values: Sequence[int] | None = None
    ) -> QuestionText:
        """Write a question; ``values``: its values in another order."""
        expected = [names[value] for value in values or asked.values]
        return self.format.question([names[key] for key in asked.keys], expected, self.hops, self.landmarks)

    def _unfit(
        self, haystack: Haystack, length: int, drawn: dict[tuple[float | None, int], list[Name]]
    ) -> list[tuple[float | None, int]]:
        """Return those whose values stand in the text, or that are longer than the room that is kept for them."""
        longest, room = self.sizes[0], length - (haystack.chunks + 1) * haystack.chunk_size
        sequences, owners = [], []
        wrong = set()
        for key, names in drawn.items():
            asked = self.facts.questions
            if any(_length(self._question(names, question)) > room for question in asked) or any(
                len(text.tokens) > longest for text in self._needles(names)
            ):
                wrong.add(key)
            for value in (names[value] for question in asked for value in question.values):
                variants = self.format.variants(value)
                sequences += variants
                owners += [key] * len(variants)
        wrong |= {owners[n] for n in occurring(haystack.filler, haystack.start, length, sequences)}
        return [key for key in drawn if key in wrong]

    def _trial(
        self,
        names: Sequence[Name],
        haystack: Haystack,
        length: int,
        last_chunk: int,
        depth: float | None,
        draws: Draws,
    ) -> Trial:
        texts = self._needles(names)
        begin = len(haystack.begin)
        places = self._places(texts, haystack.chunk_size, last_chunk, depth, draws, begin)
        needles = [Needle(p, text.tokens, text.value) for p, text in zip(places, texts, strict=True)]
        S, chunks = haystack.chunk_size, haystack.chunks
        questions = []
        for asked in self.facts.questions[: self.questions_of(depth)]:
            values = asked.values
            if self.kind == "multi-value":  # named in the order of their places
                values = [values[n] for n in sorted(asked.needles[0], key=lambda n: needles[n].start)]
            text = self._question(names, asked, values)
            filler = length - chunks * S - _length(text)
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
                    tuple(map(tuple, asked.needles)),
                    self.format.fixed,
                    self.kind == "multi-value",
                    len(names[values[0]].tokens),
                    self.format.free,
                    filler,
                )
            )
        return Trial(tuple(needles), tuple(questions))

    def _places(
        self,
        texts: Sequence[NeedleText],
        S: int,
        last_chunk: int,
        depth: float | None,
        draws: Draws,
        begin: int,
    ) -> list[int]:
        """Draw where needles begin, behind the ``begin`` first tokens; the first asked one lies at its depth."""
        lengths = [len(text.tokens) for text in texts]
        if self._whole(S, max(lengths)):
            least = _first_whole(S, max(lengths), begin)
            count = last_chunk - least
            first = None if depth is None else round(depth * (count - 1))
            others = draws.among(count - (first is not None), len(texts) - (first is not None))
            chunks = others if first is None else [first, *(n + (n >= first) for n in others)]
            drawn = [
                (least + n) * S + draws.below(S - size + 1) for n, size in zip(chunks, lengths, strict=True)
            ]
            return [max(place, begin) for place in drawn]
        places: list[int] = []
        limit = last_chunk * S
        for number, size in enumerate(lengths):
            while True:
                if number == 0 and depth is not None:
                    start = begin + round(depth * (limit - begin - size))
                else:
                    start = begin + draws.below(limit - begin - size + 1)
                if all(start >= p + n or start + size <= p for p, n in zip(places, lengths, strict=False)):
                    break
            places.append(start)
        return places


def _first_whole(S: int, longest: int, begin: int) -> int:
    """Return the first chunk of S tokens in which so long a needle finds a place behind the ``begin`` first tokens."""
    chunk, taken = divmod(begin, S)
    return chunk + (taken + longest > S)


def _number(depth: float | None) -> int:
    """Return a depth as a whole number, for draws; None: none."""
    return -1 if depth is None else round(depth * 1e9)


def _length(question: QuestionText) -> int:
    return len(question.tokens) + len(question.answer)


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
    chat: bool = False,
) -> NeedleTask:
    """Make a task of checked settings; ``values``, ``straddle``, ``value_tokens``: None is the format's own.

    Args:
        chat: questions are asked through the tokenizer's chat template.

    Raises:
        ValueError: a tokenizer without what the format is made of.
    """
    made: Format
    if format == "marks":
        made = Marks(tokenizer)
    elif format == "sentences":
        turns = ChatTurns.of(tokenizer) if chat else None
        made = Sentences(tokenizer, values or "numbers", kind == "hops", turns)
    elif format == "paraphrases":
        turns = ChatTurns.of(tokenizer) if chat else ChatTurns.plain()
        made = Paraphrases(tokenizer, values or "numbers", kind == "hops", turns)
    else:
        passkey = kind == "single" and not distractors
        # tokens of the paper's published training texts
        length = (10 if passkey else 5) if value_tokens is None else value_tokens
        made = Paper(tokenizer, "digits" if values == "numbers" else "tokens", passkey, length)
    own = not made.whole if straddle is None else straddle
    hops = hops if kind == "hops" else 1
    return NeedleTask(made, kind, needles, hops, distractors, landmarks, any_phase, own)
