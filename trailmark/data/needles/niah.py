"""Needles in a haystack to fine-tune on, as the paper hides them (arXiv 2410.01651, Sec. 4.3 and App. D).

One hop, one chain::

    ... |The passkey is:vvvvv| ... |What is the passkey? The passkey* isvvvvv

More::

    ... |DEF bbbbb->ccccc| ... |DEF aaaaa->bbbbb| ... |The path from aaaaa* isbbbbb,ccccc

Letters that repeat stand for random tokens, ``*`` for an early landmark: what it retrieves serves the cue `` is``
and the answer. A text is a slice of the haystack with needles put in between and the question at its end: nothing
of the slice is lost, whatever the chunk size, and no phase has to be padded for. Needles and questions are those that
evaluations ask (:class:`.formats.Paper`, :class:`.tasks.Facts`).

(:mod:`trailmark.data.needles.curriculum_texts` is another task: many needles and questions per text, learnt on a
laptop.)
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trailmark.data.corpus import Integers
from trailmark.data.needles.formats import IGNORED, Name, Paper, QuestionText
from trailmark.data.needles.haystacks import Stream
from trailmark.data.needles.tasks import Facts

_ATTEMPTS = 100  # to draw values that the haystack does not hold


class NiahTexts:
    """Training texts with one question each: a pure function of (seed, sample number).

    ``chains`` chains of ``hops`` needles are hidden, and ``distractors`` needles that belong to no chain, all
    shuffled; the question asks for what the first variable of one chain leads to. The paper's settings: hops=1
    (10 tokens per value), and hops=2, chains=2 (5 tokens per value). With 8 chunks retrieved, 4 needles can all be
    retrieved at once; more chains or distractors make the model choose.

    Args:
        tokenizer: of transformers.
        haystack: what needles are hidden in; slices cross documents.
        length: T, tokens of every text.
        chunk_size: S. The last 2 S tokens, or the question if it is longer, hold no needle.
        hops: needles of a chain.
        chains: None: 1 for one hop, else 2.
        distractors: needles ``|DEF y->z|`` whose variables stand nowhere else. With one hop, more than one
            needle of any kind makes all of them definitions: a passkey has no name to ask for.
        value_tokens: tokens of a value. None: 10 for the passkey, 5 for variables.
        values: "tokens": random ids of the vocabulary, never special ones or those of ``|``, ``->`` and ``,``.
            "digits": one token per digit.
        num_landmarks: 1: before the cue. 2: after it too, so that the second landmark sees what the first one
            found: a group sees an earlier group's finds one chunk later.
        answer_weight: of the loss on an answer's tokens, where all others weigh 1.
        any_phase: an early landmark closes the first chunk after 1 .. S tokens, each as likely, so that the
            question's landmark falls at any phase. False: it always falls at the same one, given by the lengths.

    Attributes:
        needle_length: tokens of a needle.
        answer_length: tokens of an answer, commas included.

    Raises:
        ValueError: an option out of its range, a haystack or a text that is too short, a tokenizer without what
            values are made of, values that cannot be told from the haystack.
    """

    def __init__(
        self,
        tokenizer: Any,
        haystack: Stream,
        length: int,
        chunk_size: int,
        seed: int = 0,
        hops: int = 1,
        chains: int | None = None,
        distractors: int = 0,
        value_tokens: int | None = None,
        *,
        values: Literal["tokens", "digits"] = "tokens",
        num_landmarks: int = 1,
        answer_weight: float = 1.0,
        any_phase: bool = False,
    ) -> None:
        chains = (1 if hops == 1 else 2) if chains is None else chains
        passkey = hops == chains == 1 and not distractors
        value_tokens = (10 if passkey else 5) if value_tokens is None else value_tokens
        at_least = [("chunk_size", chunk_size, 1), ("hops", hops, 1), ("chains", chains, 1)]
        at_least += [("value_tokens", value_tokens, 1), ("distractors", distractors, 0), ("seed", seed, 0)]
        for name, number, least in at_least:
            if number < least:
                raise ValueError(f"{name}: expected {least} or more, got {number}.")
        if num_landmarks not in (1, 2):
            raise ValueError(f"num_landmarks: expected 1 or 2, got {num_landmarks}.")
        self.haystack, self.length, self.chunk_size, self.seed = haystack, length, chunk_size, int(seed)
        self.any_phase, self.answer_weight = any_phase, answer_weight
        self._value_tokens, self._landmarks = value_tokens, num_landmarks
        self._format = Paper(tokenizer, values, passkey, value_tokens)
        self._facts = Facts("hops", chains, hops, distractors)
        # a passkey has no name to ask for: its value alone is drawn
        self._nameless = [Name(np.zeros(0, np.int64))] if passkey else []
        num_values = len(self._facts.keys) - len(self._nameless)
        needles, question = self._write(np.zeros((num_values, value_tokens), np.int64))
        self.needle_length, self.answer_length = needles.shape[1], len(question.answer)
        self._question_length = len(question.tokens) + self.answer_length
        self._marks = np.array(question.landmarks)
        self._check_room()
        if num_values > len(self._format.alphabet) ** value_tokens:
            raise ValueError(
                f"chains: expected at most {len(self._format.alphabet) ** value_tokens} different values in a text, of "
                f"{value_tokens} tokens each, got {num_values}. Use fewer chains, hops or distractors, or in "
                "Python more value_tokens."
            )
        self._text(0)  # values that cannot be told from this haystack are an error now, not at some step

    def _write(self, values: Integers) -> tuple[Integers, QuestionText]:
        """Write needles [n, needle_length] and question with values [n, value_tokens]."""
        names = [*self._nameless, *map(Name, values)]
        asked = self._facts.questions[0]
        keys, path = ([names[n] for n in numbers] for numbers in (asked.keys, asked.values))
        question = self._format.question(keys, path, len(path), self._landmarks)
        needles = [self._format.needle(names[a], names[b]).tokens for a, b in self._facts.needles]
        return np.stack(needles), question

    @property
    def _stop(self) -> int:
        """Where needles must have ended."""
        return self.length - max(2 * self.chunk_size, self._question_length)

    def _check_room(self) -> None:
        n, after = len(self._facts.needles), self.length - self._stop
        least = n * self.needle_length + after
        if self.length < least:
            raise ValueError(
                f"training.context_length: expected at least {least} tokens for {n} needles of {self.needle_length} "
                f"tokens and {after} tokens after them, got {self.length}. Choose longer texts or fewer needles."
            )
        if len(self.haystack) < (filler := self._filler_length):
            raise ValueError(
                f"data: expected a haystack of at least {filler} tokens for texts of {self.length}, got "
                f"{len(self.haystack)}. Add text or choose shorter texts."
            )

    @property
    def _filler_length(self) -> int:
        return self.length - self._question_length - len(self._facts.needles) * self.needle_length

    def batch(self, first: int, count: int) -> dict[str, Tensor]:
        """Make samples first .. first + count - 1, the same in any batch.

        Returns:
            ``input_ids`` int64 [B, T]; ``labels`` int64 [B, T], the same but for the first token, which nothing
            predicts (-100); ``loss_weights`` float32 [B, T]; ``close_chunk`` bool [B, T], a landmark follows;
            ``answers`` bool [B, T], the tokens of the answer; ``needles`` int64 [B, n], the first token of each
            needle: those of the chain that is asked for, in its order, then all others.

        Raises:
            ValueError: the haystack holds each value that is drawn.
        """
        rows = [self._text(n) for n in range(int(first), int(first) + count)]
        ids, close, places = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
        answers = torch.zeros(ids.shape, dtype=torch.bool)
        answers[:, self.length - self.answer_length :] = True
        weights = torch.where(answers, self.answer_weight, 1.0)
        weights[:, 0] = 0
        return {
            "input_ids": ids,
            "labels": ids.masked_fill(weights == 0, IGNORED),
            "loss_weights": weights,
            "close_chunk": close,
            "answers": answers,
            "needles": places,
        }

    def _text(self, number: int) -> tuple[Integers, npt.NDArray[np.bool_], Integers]:
        """Make one text: tokens [T], where landmarks follow [T], where needles begin [n]."""
        # never a generator that others draw from: a text would depend on them
        rng = np.random.default_rng([self.seed, number])
        n = len(self._facts.needles)
        start = int(rng.integers(len(self.haystack) - self._filler_length + 1))
        phase = int(rng.integers(1, self.chunk_size + 1)) if self.any_phase else self.chunk_size
        gaps = np.sort(rng.integers(self._stop - n * self.needle_length + 1, size=n))
        places = rng.permutation(gaps + np.arange(n) * self.needle_length)

        ids = np.empty(self.length, np.int64)
        columns = places[:, None] + np.arange(self.needle_length)
        filler = np.ones(self.length, bool)
        filler[columns] = False
        question_start = self.length - self._question_length
        filler[question_start:] = False
        ids[filler] = self.haystack.read(start, start + self._filler_length)
        self._hide(ids, rng, columns, number)

        close = np.zeros(self.length, bool)
        close[question_start + self._marks] = True
        close[phase - 1] |= phase < self.chunk_size
        return ids, close, places

    def _hide(self, ids: Integers, rng: np.random.Generator, columns: Integers, number: int) -> None:
        """Write needles into ``columns`` [n, needle_length] and the question into the end of ids [T].

        Each value stands in them and nowhere else.
        """
        facts, first = self._facts, len(self._nameless)
        asked = facts.questions[0]
        uses = [name for pair in facts.needles for name in pair] + asked.keys + asked.values
        expected = np.bincount(uses, minlength=len(facts.keys))[first:]
        values = np.empty((len(expected), self._value_tokens), np.int64)
        wrong = np.ones(len(expected), bool)
        for _ in range(_ATTEMPTS):
            drawn = rng.integers(len(self._format.alphabet), size=values[wrong].shape)
            values[wrong] = self._format.alphabet[drawn]
            ids[columns], question = self._write(values)
            ids[self.length - self._question_length :] = np.append(question.tokens, question.answer)
            wrong = np.array([occurrences(ids, value) for value in values]) != expected
            if not wrong.any():
                return
        raise ValueError(
            f"data: expected text that does not hold the values to hide, but text {number} of {self.length} tokens "
            f"holds each value of {self._value_tokens} tokens that was drawn {_ATTEMPTS} times. Use a shorter "
            "context_length, other text, a tokenizer with more tokens, or in Python more value_tokens."
        )


def occurrences(ids: Integers, value: Integers) -> int:
    """Count how often value [k] stands in ids [T]; overlaps count."""
    places = np.flatnonzero(ids[: len(ids) - len(value) + 1] == value[0])
    for offset in range(1, len(value)):
        places = places[ids[places + offset] == value[offset]]
    return len(places)
