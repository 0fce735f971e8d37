"""How needles and the questions about them are written, as tokens: three formats.

"marks": one token per character, for models of the needle task (:mod:`.needles`); ``*`` is where a landmark closes
the question's chunk, ``+`` where a second one does if it is asked for, in brackets what stands there for it alone::

    $KKKK=ddddd;   ...   ~KKKK*[=+]=ddddd           of hops: $AAAA=BBBB; $BBBB=ddddd;   ...   ~AAAA*[=+]=ddddd

"sentences": for any tokenizer and any causal language model; the answer completes a sentence. Of two landmarks the
question is asked twice::

    The secret number of copper-lantern is 481735.   ...   The secret number of copper-lantern* is 481735
                 ...   The secret number of copper-lantern is?* The secret number of copper-lantern+ is 481735

"paper": as :mod:`.niah` writes them (arXiv 2410.01651, App. D); letters that repeat stand for random tokens::

    |The passkey is:vvvvv|     ...   |What is the passkey? The passkey* is+vvvvv
    |DEF aaaaa->bbbbb|         ...   |The path from aaaaa* is+bbbbb,ccccc

An answer's first token is predicted at the token before it, so a landmark serves it only if a token of the cue comes
after the landmark. The exception is the paper's second one, as in training: it serves what comes after the first
token, such as the second hop's variable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trailmark.data.corpus import tokenize
from trailmark.data.draws import Draws
from trailmark.data.needle_words import WORDS
from trailmark.data.needles import KEY_LENGTH, VALUE_LENGTH, NeedleFormat
from trailmark.data.niah import alphabet, question_and_cue

Integers = npt.NDArray[np.int64]
FORMATS = ("marks", "sentences", "paper")
Values = Literal["numbers", "words", "tokens"]
_DIGITS = 6  # of a number in a sentence


@dataclass(frozen=True)
class Name:
    """What a needle leads from (a key) or to (a value, or the next key of a chain)."""

    tokens: Integers  # as it stands by itself
    text: str


@dataclass(frozen=True)
class NeedleText:
    tokens: Integers
    value: tuple[int, int]  # which of the tokens are what it leads to


@dataclass(frozen=True)
class QuestionText:
    tokens: Integers  # up to the answer
    landmarks: tuple[int, ...]  # after which of them a landmark closes the chunk, ascending
    answer: Integers
    parts: tuple[str, ...]  # of the answer: its values
    text: str  # of the answer


class Format:
    """One way to write needles and questions.

    Attributes:
        name: one of FORMATS.
        whole: needles lie whole in a chunk where they fit (the format's models are trained so).
        fixed: an answer has a known number of tokens. Else it ends where its last word does, and the model must end
            it there.
        replaced: tokens that text must not hold, and what stands there instead.
    """

    name: str
    whole: bool = False
    fixed: bool = True
    replaced: Mapping[int, int]

    def draw(self, draws: Draws, key: bool) -> Name:
        """A key, or a value."""
        raise NotImplementedError

    def needle(self, left: Name, right: Name) -> NeedleText:
        raise NotImplementedError

    def question(
        self, keys: Sequence[Name], found: Sequence[Name], hops: int, landmarks: int
    ) -> QuestionText:
        """Args: found: the values of the keys; for more hops than one, all names of the key's chain, the value last."""
        raise NotImplementedError

    def variants(self, value: Name) -> list[Integers]:
        """The tokens that a value may stand as in a text."""
        return [value.tokens]


class Marks(Format):
    """Raises ValueError if the tokenizer has no single token for some character."""

    name, whole = "marks", True

    def __init__(self, tokenizer: Any) -> None:
        self.form = NeedleFormat.of(tokenizer)
        self.replaced = {self.form.needle: self.form.blank, self.form.question: self.form.blank}

    def draw(self, draws: Draws, key: bool) -> Name:
        if key:
            letters = [draws.below(26) for _ in range(KEY_LENGTH)]
            text = "".join(chr(ord("A") + n) for n in letters)
            return Name(self.form.letters[letters].astype(np.int64), text)
        digits = draws.among(10, VALUE_LENGTH)  # distinct, as in training
        return Name(self.form.digits[digits].astype(np.int64), "".join(map(str, digits)))

    def needle(self, left: Name, right: Name) -> NeedleText:
        form, n = self.form, len(left.tokens)
        tokens = np.concatenate([[form.needle], left.tokens, [form.cue], right.tokens, [form.end]])
        return NeedleText(tokens, (n + 2, n + 2 + len(right.tokens)))

    def question(
        self, keys: Sequence[Name], found: Sequence[Name], hops: int, landmarks: int
    ) -> QuestionText:
        form = self.form
        values = found[-1:] if hops > 1 else found
        asked = np.concatenate([part for key in keys for part in ([form.question], key.tokens)])
        tokens = np.append(asked, [form.cue] * landmarks).astype(np.int64)
        answer = _with_separators([v.tokens for v in values], np.array([form.end]))
        marks = (len(asked) - 1, len(asked))[:landmarks]
        parts = tuple(v.text for v in values)
        return QuestionText(tokens, marks, answer, parts, ";".join(parts))


class Sentences(Format):
    """Names are two nouns, ``copper-lantern``; numbers have six digits. ``chained``: needles lead from name to name."""

    name, fixed = "sentences", False

    def __init__(self, tokenizer: Any, values: str, chained: bool) -> None:
        self.tokenizer, self.values, self.chained, self.replaced = tokenizer, values, chained, {}

    def draw(self, draws: Draws, key: bool) -> Name:
        if key or self.values == "words":
            first, second = draws.among(len(WORDS), 2)
            text = f"{WORDS[first]}-{WORDS[second]}"
        else:
            low = 10 ** (_DIGITS - 1)
            text = str(low + draws.below(9 * low))
        return Name(self._tokens(text), text)

    def _tokens(self, text: str) -> Integers:
        return tokenize([text], self.tokenizer).astype(np.int64)

    @property
    def _noun(self) -> str:
        return "number" if self.values == "numbers" else "word"

    def needle(self, left: Name, right: Name) -> NeedleText:
        lead = f" {left.text} leads to" if self.chained else f" The secret {self._noun} of {left.text} is"
        tokens, ends = self._joined([lead, f" {right.text}", "."])
        return NeedleText(tokens, (ends[0], ends[1]))

    def question(
        self, keys: Sequence[Name], found: Sequence[Name], hops: int, landmarks: int
    ) -> QuestionText:
        named = ", ".join(key.text for key in keys)
        if hops > 1:
            parts, lead, cue = [found[-1].text], f" In {hops} steps {named}", " leads to"
        else:
            parts = [value.text for value in found]
            one = len(parts) == 1
            lead = f" The secret {self._noun}{'' if one else 's'} of {named}"
            cue = " is" if one else " are"
        text = ", ".join(parts)
        pieces = [lead, cue] if landmarks == 1 else [f"{lead}{cue}?", lead, cue]
        tokens, ends = self._joined([*pieces, f" {text}"])
        marks, end = tuple(end - 1 for end in ends[:landmarks]), ends[landmarks]
        return QuestionText(tokens[:end], marks, tokens[end:], tuple(parts), text)

    def variants(self, value: Name) -> list[Integers]:
        return [value.tokens, self._tokens(f" {value.text}")]

    def _joined(self, parts: Sequence[str]) -> tuple[Integers, list[int]]:
        """Tokens of the parts in running text, and where each ends; one by one where a token would cross an end."""
        whole = self._tokens("".join(parts))
        ends = []
        for n in range(1, len(parts) + 1):
            lead = self._tokens("".join(parts[:n]))
            if not np.array_equal(whole[: len(lead)], lead):
                pieces = [self._tokens(part) for part in parts]
                return np.concatenate(pieces), np.cumsum([len(piece) for piece in pieces]).tolist()
            ends.append(len(lead))
        return whole, ends


class Paper(Format):
    """``passkey``: there is one needle, without a name. ``values``: "tokens", or "numbers", a token per digit."""

    name = "paper"

    def __init__(self, tokenizer: Any, values: str, passkey: bool, length: int) -> None:
        self.tokenizer, self.passkey, self.length, self.replaced = tokenizer, passkey, length, {}
        self.alphabet = alphabet(tokenizer, "digits" if values == "numbers" else "tokens")

        def words(text: str) -> Integers:
            return tokenize([text], tokenizer).astype(np.int64)

        self._bar, self._arrow, self._comma = words("|"), words("->"), words(",")
        if passkey:
            self._before = words("|The passkey is:")
            self._lead, self._cue = question_and_cue(tokenizer, "|What is the passkey? The passkey", " is")
        else:
            self._before = words("|DEF ")
            self._lead = words("|The path from ")
            self._cue = question_and_cue(tokenizer, "|The path from a", " is")[1]

    def draw(self, draws: Draws, key: bool) -> Name:
        tokens = self.alphabet[[draws.below(len(self.alphabet)) for _ in range(self.length)]]
        return Name(tokens, self.tokenizer.decode(tokens.tolist()))

    def needle(self, left: Name, right: Name) -> NeedleText:
        before = [self._before] if self.passkey else [self._before, left.tokens, self._arrow]
        start = sum(map(len, before))
        tokens = np.concatenate([*before, right.tokens, self._bar])
        return NeedleText(tokens, (start, start + self.length))

    def question(
        self, keys: Sequence[Name], found: Sequence[Name], hops: int, landmarks: int
    ) -> QuestionText:
        lead = self._lead
        if not self.passkey:
            lead = np.concatenate([lead, _with_separators([key.tokens for key in keys], self._comma)])
        tokens = np.concatenate([lead, self._cue])
        answer = _with_separators([name.tokens for name in found], self._comma)
        marks = (len(lead) - 1, len(tokens) - 1)[:landmarks]
        parts = tuple(name.text for name in found)
        return QuestionText(tokens, marks, answer, parts, ",".join(parts))


def _with_separators(parts: Sequence[Integers], separator: Integers) -> Integers:
    found = [parts[0]]
    for part in parts[1:]:
        found += [separator, part]
    return np.concatenate(found).astype(np.int64)
