"""Needles mixed into training on text: a share of the samples holds facts, and questions about some of them.

A sample of text is overwritten at places of its own: facts stand anywhere, a question anywhere after its fact. Some
facts are never asked for. Questions are sentences to complete, lines that ask and answer, and turns of the tokenizer's
chat template where it has one; each is closed by an early landmark, as in use, so that the answer's first token can
read what the question finds. Wordings and names are of training alone (:mod:`.paraphrases`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, from_numpy

from trailmark.data.chat import ChatTurns
from trailmark.data.corpus import tokenize, tokenize_parts
from trailmark.data.draws import Draws
from trailmark.data.needles.formats import Integers
from trailmark.data.needles.paraphrases import FIRST_NAMES, LAST_NAMES, TRAINING

_MIXED = 2  # among the draws of a sample: those of this module
_TOKENS_PER_FACT, _MOST_FACTS = 256, 16
_DIGITS = (4, 7)  # of a number, both included


class _Written(NamedTuple):
    """A fact, or a question with its answer."""

    tokens: Integers
    landmark: int | None = None  # the token that one follows
    answer: tuple[int, int] | None = None  # its first token, and the one after its last


class MixedNeedles:
    """Facts and questions for samples of text: a pure function of (seed, sample number).

    Args:
        tokenizer: any; numbers may take any tokens.
        length: tokens of a sample.
        seed: of the training.
        share: of the samples that hold them.

    Raises:
        ValueError: samples that are too short for a fact and its question.
    """

    def __init__(self, tokenizer: Any, length: int, seed: int, share: float) -> None:
        self._tokenizer, self._length, self._seed, self._share = tokenizer, length, seed, share
        self._turns = [None, ChatTurns.plain()]
        if getattr(tokenizer, "chat_template", None):
            self._turns += [ChatTurns.of(tokenizer)] * 2  # half of the questions
        self._most = most_questions(length)
        need = max(sum(len(own.tokens) for own in self._fact(Draws(seed, n))) for n in range(64))
        if 2 * need > length:
            raise ValueError(
                f"data.needle_share: expected samples of at least {2 * need} tokens for a fact and its question, got "
                f"{length}. Train with a longer training.context_length, or set data.needle_share=0."
            )

    def holds(self, sample: int) -> bool:
        """Whether a sample holds needles."""
        return Draws(self._seed, sample, _MIXED).below(1 << 32) < int(self._share * (1 << 32))

    def write(self, ids: Tensor, sample: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Write needles over ids [T] int64 of a sample that holds some.

        Returns:
            The tokens that a landmark follows, and the first and the end of each answer, ascending.
        """
        draws = Draws(self._seed, sample, _MIXED, 1)
        placed: list[tuple[int, _Written]] = []  # in an order of their own
        room, names = self._length // 2, set[str]()
        for number in range(1 + draws.below(self._most)):
            fact, question = self._fact(draws, names)
            asked = number == 0 or draws.below(2) == 0
            first, later = sorted(draws.below(1 << 62) for _ in range(2))
            own = [(first, fact), (later, question)] if asked else [(first, fact)]
            room -= sum(len(written.tokens) for _, written in own)
            if room < 0 and placed:
                break
            placed += own
        order = [written for _, written in sorted(placed, key=lambda one: one[0])]
        free = self._length - sum(len(written.tokens) for written in order)
        gaps = sorted(draws.below(free + 1) for _ in order)
        marks, answers, before = [], [], 0
        for gap, written in zip(gaps, order, strict=True):
            start = gap + before
            ids[start : start + len(written.tokens)] = from_numpy(written.tokens)
            before += len(written.tokens)
            if written.landmark is not None and written.answer is not None:
                marks.append(start + written.landmark)
                answers.append((start + written.answer[0], start + written.answer[1]))
        return marks, answers

    def _fact(self, draws: Draws, used: set[str] | None = None) -> tuple[_Written, _Written]:
        """A fact and a question about it, of a name that is not among the ``used``, which it joins."""
        used = set() if used is None else used
        while (key := f"{_one(draws, FIRST_NAMES)} {_one(draws, LAST_NAMES)}") in used:
            pass
        used.add(key)
        digits = _DIGITS[0] + draws.below(_DIGITS[1] - _DIGITS[0] + 1)
        value = str(10 ** (digits - 1) + draws.below(9 * 10 ** (digits - 1)))
        fact = _one(draws, TRAINING.facts).format(key=key, value=value)
        turns = _one(draws, self._turns)
        if turns is None:
            sentence = _one(
                draws, [own for own in TRAINING.facts if own.index("{key}") < own.index("{value}")]
            )
            lead, cue, end = sentence.replace("{key}", "{key}{value}", 1).split("{value}")
            parts = [lead.format(key=key), *_spaced(cue, value), end]
        else:
            question = _one(draws, TRAINING.questions).format(key=key)
            following = turns.following.partition("\n")[0] or "\n"
            parts = [
                turns.inside(self._tokenizer) + question + turns.end,
                *_spaced(turns.cue, value),
                following,
            ]
        pieces = tokenize_parts(parts, self._tokenizer)
        ends = np.cumsum([len(piece) for piece in pieces]).tolist()
        asked = _Written(np.concatenate(pieces), ends[0] - 1, (ends[1], ends[2]))
        return _Written(tokenize([fact], self._tokenizer).astype(np.int64)), asked


def most_questions(length: int) -> int:
    """Facts in a sample of ``length`` tokens at most, each of which may be asked for."""
    return min(_MOST_FACTS, max(1, length // _TOKENS_PER_FACT))


def _one(draws: Draws, among: Any) -> Any:
    return among[draws.below(len(among))]


def _spaced(cue: str, value: str) -> tuple[str, str]:
    """What an answer follows, and the answer: a space between them is the answer's, as tokenizers have it."""
    if cue.endswith(" "):
        return cue[:-1], f" {value}"
    return (cue, value) if cue[-1].isspace() or cue[-1] in "(:" else (cue, f" {value}")
