"""How needles and the questions about them are written, in training texts and in evaluations: four formats.

"marks": one token per character, for models of the needle task (:mod:`.curriculum_texts`). ``*`` is where a landmark
closes the question's chunk, ``+`` where a second one does if it is asked for; what stands in brackets comes with it
alone::

    $KKKK=ddddd;   ...   ~KKKK*[=+]=ddddd           of hops: $AAAA=BBBB; $BBBB=ddddd;   ...   ~AAAA*[=+]=ddddd

"sentences": for any tokenizer and any causal language model; the answer completes a sentence. With two landmarks the
question is asked twice::

    The secret number of copper-lantern is 481735.   ...   The secret number of copper-lantern* is 481735
                 ...   The secret number of copper-lantern is?* The secret number of copper-lantern+ is 481735

With a chat template the question is a user's turn, and the answer is right if it is in what the model then writes. So
is that of "paraphrases", whose needles and questions have other words each time (:mod:`.paraphrases`); without a chat
template a line asks and another one answers::

    <|im_start|>user What is the secret number of copper-lantern?<|im_end|>*<|im_start|>assistant 481735
    It takes 481735 to open the door of copper-lantern.
                 ...   Question: Which number belongs to copper-lantern?*Answer: 481735

"paper": as arXiv 2410.01651 hides them (Sec. 4.3 and App. D; training texts are those of :mod:`.niah`). Letters that
repeat stand for random tokens::

    |The passkey is:vvvvv|     ...   |What is the passkey? The passkey* is+vvvvv
    |DEF aaaaa->bbbbb|         ...   |The path from aaaaa* is+bbbbb,ccccc

An answer's first token is predicted at the token before it, so a landmark serves it only if a token of the cue comes
after the landmark. The exception is the paper's second one, as in training: it serves what comes after the first
token, such as the second hop's variable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trailmark.data.chat import ChatTurns, control_ids
from trailmark.data.corpus import Integers, Tokens, tokenize, tokenize_parts
from trailmark.data.draws import Draws
from trailmark.data.needles.words import WORDS

FORMATS = ("marks", "sentences", "paraphrases", "paper")
VALUES = {
    "marks": ("numbers",),
    "sentences": ("numbers", "words"),
    "paraphrases": ("numbers", "words"),
    "paper": ("tokens", "numbers"),
}  # own one first
CHAT_FORMATS = ("sentences", "paraphrases")  # that may be asked through a chat template
IGNORED = -100  # the label of a token that bears no loss

KEY_LENGTH = 4
VALUE_LENGTH = 5
NEEDLE_LENGTH = 1 + KEY_LENGTH + 1 + VALUE_LENGTH + 1  # $KKKK=ddddd;
QUESTION_LENGTH = 1 + KEY_LENGTH  # ~KKKK
ANSWER_LENGTH = 1 + VALUE_LENGTH + 1  # =ddddd;
_CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789$~=; "
_DIGITS = 6  # of a number in a sentence


@dataclass(frozen=True)
class Name:
    """What a needle leads from (a key) or to (a value, or the next key of a chain)."""

    tokens: Integers  # as it stands by itself
    text: str = ""


@dataclass(frozen=True)
class NeedleText:
    tokens: Integers
    value: tuple[int, int]  # the first of the tokens that the needle leads to, and the one after the last


@dataclass(frozen=True)
class QuestionText:
    tokens: Integers  # up to the answer
    landmarks: tuple[int, ...]  # after which of them a landmark closes the chunk, ascending
    answer: Integers
    parts: tuple[str, ...]  # the values that make the answer
    text: str  # the answer


class Format:
    """One way to write needles and questions.

    Attributes:
        name: one of FORMATS.
        whole: needles lie whole in a chunk where they fit (the format's models are trained so).
        fixed: an answer has a known number of tokens. Else it ends where its last word does, and the model must end
            it there.
        free: an answer is right if what the model writes holds it.
        replaced: tokens that a text must not hold, and what stands there instead.
    """

    name: str
    whole: bool = False
    fixed: bool = True
    free: bool = False
    replaced: Mapping[int, int]

    def draw(self, draws: Draws, key: bool) -> Name:
        """Draw a key, or a value."""
        raise NotImplementedError

    def needle(self, left: Name, right: Name) -> NeedleText:
        """Write the needle that leads from one name to another."""
        raise NotImplementedError

    def question(
        self, keys: Sequence[Name], values: Sequence[Name], hops: int, landmarks: int
    ) -> QuestionText:
        """Write one question about ``keys``.

        Args:
            values: what the keys lead to; for more hops than one, all names behind the chain's key, the value last.
            landmarks: that the question closes chunks with: 1 or 2.
        """
        raise NotImplementedError

    def variants(self, value: Name) -> list[Integers]:
        """Return the tokens that a value may stand as in a text."""
        return [value.tokens]


class Marks(Format):
    """Needles of single characters.

    Attributes:
        letters: [26] int32. digits: [10] int32.
        needle_mark, question_mark, cue, end, blank: the tokens of ``$``, ``~``, ``=``, ``;`` and a space.

    Raises:
        ValueError: the tokenizer has no single token for some character, or one token for several.
    """

    name, whole = "marks", True

    def __init__(self, tokenizer: Any) -> None:
        tokens = [_token(character, tokenizer) for character in _CHARACTERS]
        if len(set(tokens)) < len(tokens):
            raise ValueError(
                "tokenizer: expected different tokens for the characters of needles, got equal ones."
            )
        self.letters, self.digits = np.array(tokens[:26], np.int32), np.array(tokens[26:36], np.int32)
        self.needle_mark, self.question_mark, self.cue, self.end, self.blank = tokens[36:]
        self.replaced = {self.needle_mark: self.blank, self.question_mark: self.blank}

    def clean(self, tokens: Tokens) -> Tokens:
        """Leave out the marks of needles and questions, for filler of training texts."""
        return tokens[(tokens != self.needle_mark) & (tokens != self.question_mark)]

    def needles(self, keys: Tokens, values: Tokens) -> Tokens:
        """Write ``$KKKK=value;`` of keys [n, 4] and values [n, v], digits or the letters of a next key: [n, 7 + v]."""
        return self._columns(len(keys), self.needle_mark, keys, self.cue, values, self.end)

    def questions(self, keys: Tokens) -> Tokens:
        """Write ``~KKKK`` of keys [n, 4]: [n, 5]."""
        return self._columns(len(keys), self.question_mark, keys)

    def answers(self, values: Tokens) -> Tokens:
        """Write ``=value;`` of values [n, v]: [n, v + 2]."""
        return self._columns(len(values), self.cue, values, self.end)

    @staticmethod
    def _columns(count: int, *parts: int | Tokens) -> Tokens:
        """Set parts side by side: tokens that all rows share, and [count, n] of each row's own."""
        wide = [np.full((count, 1), part, np.int32) if isinstance(part, int) else part for part in parts]
        return np.concatenate(wide, axis=1)

    def draw(self, draws: Draws, key: bool) -> Name:
        if key:
            letters = [draws.below(26) for _ in range(KEY_LENGTH)]
            text = "".join(chr(ord("A") + n) for n in letters)
            return Name(self.letters[letters].astype(np.int64), text)
        digits = draws.among(10, VALUE_LENGTH)  # distinct, as in training
        return Name(self.digits[digits].astype(np.int64), "".join(map(str, digits)))

    def needle(self, left: Name, right: Name) -> NeedleText:
        (tokens,) = self.needles(_rows([left]), _rows([right]))
        start = 1 + len(left.tokens) + 1
        return NeedleText(tokens.astype(np.int64), (start, start + len(right.tokens)))

    def question(
        self, keys: Sequence[Name], values: Sequence[Name], hops: int, landmarks: int
    ) -> QuestionText:
        asked_for = values[-1:] if hops > 1 else values
        asked = self.questions(_rows(keys)).reshape(-1)
        tokens = np.append(asked, [self.cue] * landmarks).astype(np.int64)
        answer = _separated([value.tokens for value in asked_for], np.array([self.end]))
        marks = (len(asked) - 1, len(asked))[:landmarks]
        parts = tuple(value.text for value in asked_for)
        return QuestionText(tokens, marks, answer, parts, ";".join(parts))


class Sentences(Format):
    """Names are two nouns, ``copper-lantern``; numbers have six digits.

    Args:
        values: "numbers" or "words".
        chained: needles lead from name to name.
        turns: what a question is asked in; None: the answer completes a sentence.

    Raises:
        ValueError: two landmarks where nothing stands between the question and what the answer follows.
    """

    name, fixed = "sentences", False

    def __init__(self, tokenizer: Any, values: str, chained: bool, turns: ChatTurns | None = None) -> None:
        self.tokenizer, self.values, self.chained, self.replaced = tokenizer, values, chained, {}
        self.turns, self.free = turns, turns is not None

    def draw(self, draws: Draws, key: bool) -> Name:
        if key or self.values == "words":
            first, second = draws.among(len(WORDS), 2)
            text = f"{WORDS[first]}-{WORDS[second]}"
        else:
            low = 10 ** (_DIGITS - 1)
            text = str(low + draws.below(9 * low))
        return Name(_tokens(text, self.tokenizer), text)

    @property
    def _noun(self) -> str:
        return "number" if self.values == "numbers" else "word"

    def needle(self, left: Name, right: Name) -> NeedleText:
        lead = f" {left.text} leads to" if self.chained else f" The secret {self._noun} of {left.text} is"
        tokens, ends = self._joined([lead, f" {right.text}", "."])
        return NeedleText(tokens, (ends[0], ends[1]))

    def question(
        self, keys: Sequence[Name], values: Sequence[Name], hops: int, landmarks: int
    ) -> QuestionText:
        if self.turns is not None:
            return self._turn(self.turns, keys, values[-1:] if hops > 1 else values, hops, landmarks)
        named = asked_together(keys)
        if hops > 1:
            parts, lead, cue = [values[-1].text], f" In {hops} steps {named}", " leads to"
        else:
            parts = [value.text for value in values]
            one = len(parts) == 1
            lead = f" The secret {self._noun}{'' if one else 's'} of {named}"
            cue = " is" if one else " are"
        text = ", ".join(parts)
        pieces = [lead, cue] if landmarks == 1 else [f"{lead}{cue}?", lead, cue]
        tokens, ends = self._joined([*pieces, f" {text}"])
        marks, end = tuple(end - 1 for end in ends[:landmarks]), ends[landmarks]
        return QuestionText(tokens[:end], marks, tokens[end:], tuple(parts), text)

    def asked(self, keys: Sequence[Name], values: int, hops: int) -> str:
        """The question for so many values, as a user puts it."""
        named = asked_together(keys)
        if hops > 1:
            return f"What does {named} lead to in {hops} steps?"
        return f"What {'is' if values == 1 else 'are'} the secret {self._noun}{'' if values == 1 else 's'} of {named}?"

    def _turn(
        self, turns: ChatTurns, keys: Sequence[Name], values: Sequence[Name], hops: int, landmarks: int
    ) -> QuestionText:
        """The second landmark stands between what ends the question and what the answer follows."""
        parts = tuple(value.text for value in values)
        text = ", ".join(parts)
        question = f"{turns.inside(self.tokenizer)}{self.asked(keys, len(values), hops)}"
        if landmarks == 2 and not turns.end:
            raise ValueError(
                "landmarks: expected 1 with a chat template that writes nothing but one thing between a question and "
                "its answer, got 2."
            )
        lead = [question + turns.end] if landmarks == 1 else [question, turns.end]
        answer = text if turns.cue[-1].isspace() else f" {text}"
        tokens, ends = self._joined([*lead, turns.cue, answer])
        return QuestionText(
            tokens[: ends[-2]], tuple(end - 1 for end in ends[:-2]), tokens[ends[-2] :], parts, text
        )

    def variants(self, value: Name) -> list[Integers]:
        return [value.tokens, _tokens(f" {value.text}", self.tokenizer)]

    def _joined(self, parts: Sequence[str]) -> tuple[Integers, list[int]]:
        """Return the tokens of the parts in running text, and where each part ends."""
        pieces = tokenize_parts(parts, self.tokenizer)
        return np.concatenate(pieces), np.cumsum([len(piece) for piece in pieces]).tolist()


def asked_together(keys: Sequence[Name]) -> str:
    """The names of keys in one question."""
    return ", ".join(key.text for key in keys)


class Paper(Format):
    """Needles in the paper's words; names are random tokens.

    Args:
        values: "tokens": any of the vocabulary but special ones and separators. "digits": one token per digit.
        passkey: there is one needle, without a name.
        length: tokens of a name.
    """

    name = "paper"

    def __init__(self, tokenizer: Any, values: str, passkey: bool, length: int) -> None:
        self.tokenizer, self.passkey, self.length, self.replaced = tokenizer, passkey, length, {}
        self.alphabet = alphabet(tokenizer, values)
        self._bar, self._arrow, self._comma = (_tokens(text, tokenizer) for text in ("|", "->", ","))
        self._before = _tokens("|The passkey is:" if passkey else "|DEF ", tokenizer)
        if passkey:
            self._lead, self._cue = tokenize_parts(["|What is the passkey? The passkey", " is"], tokenizer)
        else:
            self._lead = _tokens("|The path from ", tokenizer)
            self._cue = tokenize_parts(["|The path from a", " is"], tokenizer)[1]

    def draw(self, draws: Draws, key: bool) -> Name:
        tokens = self.alphabet[[draws.below(len(self.alphabet)) for _ in range(self.length)]]
        return Name(tokens, self.tokenizer.decode(tokens.tolist()))

    def needle(self, left: Name, right: Name) -> NeedleText:
        before = [self._before] if self.passkey else [self._before, left.tokens, self._arrow]
        start = sum(map(len, before))
        tokens = np.concatenate([*before, right.tokens, self._bar])
        return NeedleText(tokens, (start, start + self.length))

    def question(
        self, keys: Sequence[Name], values: Sequence[Name], hops: int, landmarks: int
    ) -> QuestionText:
        lead = self._lead
        if not self.passkey:
            lead = np.concatenate([lead, _separated([key.tokens for key in keys], self._comma)])
        tokens = np.concatenate([lead, self._cue])
        answer = _separated([name.tokens for name in values], self._comma)
        marks = (len(lead) - 1, len(tokens) - 1)[:landmarks]
        parts = tuple(name.text for name in values)
        return QuestionText(tokens, marks, answer, parts, ",".join(parts))


def alphabet(tokenizer: Any, values: str) -> Integers:
    """Return the tokens that the paper's names are made of, ascending; see :class:`Paper`.

    Raises:
        ValueError: a tokenizer without such tokens.
    """
    if values == "digits":
        pieces = [_tokens(digit, tokenizer).tolist() for digit in "0123456789"]
        ids = {piece[0] for piece in pieces if len(piece) == 1}
        if len(ids) < 10:
            raise ValueError(
                f"values: expected a tokenizer with one token for each digit, got {len(ids)} of 10. Use 'tokens'."
            )
        return np.array(sorted(ids))
    if values != "tokens":
        raise ValueError(f"values: expected 'tokens' or 'digits', got {values!r}.")
    separators = {token for text in ("|", "->", ",") for token in _tokens(text, tokenizer).tolist()}
    ids = {*tokenizer.get_vocab().values()} - control_ids(tokenizer) - separators
    if not ids:
        raise ValueError("tokenizer: expected tokens to make values of, got none but special ones.")
    return np.array(sorted(ids))


def _token(character: str, tokenizer: Any) -> int:
    ids = tokenizer(character, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(
            f"tokenizer: expected one token for {character!r}, got {len(ids)}. Needles are made of single characters; "
            "use 'bytes' or a byte-level BPE tokenizer such as GPT-2's."
        )
    return int(ids[0])


def _tokens(text: str, tokenizer: Any) -> Integers:
    return tokenize([text], tokenizer).astype(np.int64)


def _rows(names: Sequence[Name]) -> Tokens:
    """Stack names of one length: [n, length]."""
    return np.stack([name.tokens for name in names]).astype(np.int32)


def _separated(parts: Sequence[Integers], separator: Integers) -> Integers:
    """Join parts, with the separator between each two."""
    pieces = [parts[0]]
    for part in parts[1:]:
        pieces += [separator, part]
    return np.concatenate(pieces).astype(np.int64)
