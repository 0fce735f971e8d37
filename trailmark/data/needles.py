"""Needles hidden in real text, and questions about them (arXiv 2410.01651, Sec. 4.3 and App. D).

A needle ``$KKKK=ddddd;`` lies inside a chunk. Its question is the last tokens of a later chunk, ``~KKKK``, so
that the landmark falls right after the key and before the answer's cue; ``=ddddd;`` opens the next chunk. A
chunk holds a needle or a question, never both. Needle and question marks occur nowhere in the filler.

An early question closes its chunk at any phase p = 1 .. S: after p tokens of it. If p is less than a question's
5 tokens, its first 5 - p end the chunk before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trailmark.data.corpus import Tokens

KEY_LENGTH = 4
VALUE_LENGTH = 5
NEEDLE_LENGTH = 1 + KEY_LENGTH + 1 + VALUE_LENGTH + 1  # $KKKK=ddddd;
QUESTION_LENGTH = 1 + KEY_LENGTH  # ~KKKK
ANSWER_LENGTH = 1 + VALUE_LENGTH + 1  # =ddddd;
IGNORED = -100


@dataclass(frozen=True)
class NeedleFormat:
    """The tokens of needles, one per character."""

    letters: Tokens  # [26]
    digits: Tokens  # [10]
    needle: int  # $
    question: int  # ~
    cue: int  # =
    end: int  # ;
    blank: int

    @classmethod
    def of(cls, tokenizer: Any) -> NeedleFormat:
        """Raises ValueError if the tokenizer has no single token for some character."""

        def token(character: str) -> int:
            ids = tokenizer(character, add_special_tokens=False)["input_ids"]
            if len(ids) != 1:
                raise ValueError(
                    f"tokenizer: expected one token for {character!r}, got {len(ids)}. Needles are made of "
                    "single characters; use 'bytes' or a byte-level BPE tokenizer such as GPT-2's."
                )
            return int(ids[0])

        characters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789$~=; "
        if len({token(c) for c in characters}) < len(characters):
            raise ValueError(
                "tokenizer: expected different tokens for the characters of needles, got equal ones."
            )
        letters = np.array([token(c) for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"], np.int32)
        digits = np.array([token(c) for c in "0123456789"], np.int32)
        return cls(letters, digits, token("$"), token("~"), token("="), token(";"), token(" "))

    def clean(self, tokens: Tokens) -> Tokens:
        """Filler without the marks of needles and questions."""
        return tokens[(tokens != self.needle) & (tokens != self.question)]


@dataclass(frozen=True)
class Level:
    """One stage of the curriculum."""

    chunks: int
    blank: float  # P(the filler of a text is blank)
    dense: float  # P(half of a text's chunks hold needles); otherwise few do
    near: float  # P(a key differs from an earlier one in a single letter)
    quiet: float = 0.0  # P(a chunk without a needle asks nothing): the filler that haystacks are made of
    mixed: float = 0.0  # P(each chunk's filler comes from a place of its own)
    decoys: float = 0.0  # P(the filler of a chunk holds letters of a key that are no needle)
    early: float = 0.0  # P(a question closes its chunk at any phase); otherwise at the last


# Measured for the laptop demo (benchmarks/README.md): keys are told apart on blank texts full of needles; then
# needles are told from text, of which most of a haystack is made. Half of the questions are early all along.
CURRICULUM = (
    Level(8, 1.0, 1.0, 0.0, early=0.5),
    Level(16, 1.0, 1.0, 0.0, early=0.5),
    Level(32, 1.0, 1.0, 0.25, early=0.5),
    Level(32, 0.5, 0.8, 0.25, 0.4, 0.5, 0.5, early=0.5),
    Level(32, 0.05, 0.75, 0.25, 0.5, 0.5, 0.5, early=0.5),
)


@dataclass
class NeedleBatch:
    """Texts of one training step, T = N * S wide; early questions leave tokens out, blanks stand at the end."""

    input_ids: Tensor  # [B, T] int64
    attention_mask: Tensor  # [B, T] bool; False: beyond the text's end
    close_chunk: Tensor  # [B, T] bool: last tokens of the chunks that are not full; a landmark follows
    labels: Tensor  # [B, T] int64; -100: no loss
    loss_weights: Tensor  # [B, T] float32
    first_digits: Tensor  # [B, T] bool: labels that only retrieval can predict
    needle_chunks: Tensor  # [B, N] int64: where the needle that chunk n asks for lies; -1: asks nothing
    sample_numbers: Tensor  # [B] int64


class NeedleTexts:
    """Training texts: a pure function of (seed, sample number, level)."""

    def __init__(
        self,
        format: NeedleFormat,
        filler: Tokens,
        chunk_size: int,
        seed: int = 0,
        filler_weight: float = 0.0,
        first_digit_weight: float = 3.0,
        max_chunks: int = 32,
    ) -> None:
        least = ANSWER_LENGTH + NEEDLE_LENGTH
        if chunk_size < least:
            raise ValueError(
                f"chunk_size: expected at least {least} so that a chunk holds an answer and a needle, "
                f"got {chunk_size}."
            )
        self.filler = format.clean(filler)
        if len(self.filler) <= max_chunks * chunk_size:
            raise ValueError(
                f"data: expected more than {max_chunks * chunk_size} tokens to hide needles in, "
                f"got {len(self.filler)}. Add text or choose fewer chunks."
            )
        self.format, self.chunk_size, self.seed = format, chunk_size, seed
        self.filler_weight, self.first_digit_weight = filler_weight, first_digit_weight

    def batch(self, first: int, count: int, level: Level) -> NeedleBatch:
        """Samples first .. first + count - 1."""
        rows = [self._text(np.random.default_rng([self.seed, n]), level) for n in range(first, first + count)]
        ids, present, close, weights, starts, needles = (np.stack(part) for part in zip(*rows, strict=True))
        labels = np.where(weights > 0, ids, IGNORED)
        return NeedleBatch(
            torch.from_numpy(ids).long(),
            torch.from_numpy(present),
            torch.from_numpy(close),
            torch.from_numpy(labels).long(),
            torch.from_numpy(weights),
            torch.from_numpy(starts),
            torch.from_numpy(needles),
            torch.arange(first, first + count),
        )

    def _text(self, rng: np.random.Generator, level: Level) -> tuple[Any, ...]:
        N, S, form = level.chunks, self.chunk_size, self.format
        if len(self.filler) <= N * S:
            raise ValueError(
                f"level: expected texts shorter than the {len(self.filler)} tokens of filler, got {N * S}."
            )
        kind = rng.random()
        if kind < level.blank:
            text = np.full(N * S, form.blank, np.int32)
        elif rng.random() < level.mixed:
            starts = rng.integers(len(self.filler) - S, size=(N, 1))
            text = self.filler[starts + np.arange(S)].reshape(-1)
        else:
            start = rng.integers(len(self.filler) - N * S)
            text = self.filler[start : start + N * S].copy()
        rows = text.reshape(N, S)
        density = 0.5 if rng.random() < level.dense else rng.uniform(1, max(2, N / 8)) / N
        holds = rng.random(N) < density
        holds[0] = True
        count = int(holds.sum())
        keys = rng.integers(26, size=(count, KEY_LENGTH))
        for n in np.flatnonzero(rng.random(count) < level.near):
            if n:
                keys[n] = keys[rng.integers(n)]
                keys[n, rng.integers(KEY_LENGTH)] = rng.integers(26)
        values = random_values(rng, count)
        chunk = np.flatnonzero(holds)

        quiet = ~holds & (rng.random(N) < level.quiet)
        for n in np.flatnonzero(rng.random(N) < level.decoys):
            write_decoy(rows[n], form.letters[keys[rng.integers(count)]], rng)
        asking = np.flatnonzero(~holds & ~quiet)
        asking = asking[asking < N - 1]  # the answer needs a next chunk
        earlier = np.cumsum(holds)[asking]  # needles so far
        asked = (rng.random(len(asking)) * earlier).astype(np.int64)
        # of two equal keys the question means neither: ask only for what is unique
        repeated = (keys[:, None] == keys[None]).all(-1).sum(1)[asked] > 1
        asking, asked = asking[~repeated], asked[~repeated]

        place = rng.random(count)
        # Drawn last: levels with and without early questions have all else in common. Chunks below 23 tokens
        # hold no answer, needle and four letters of the next question.
        least = max(1, QUESTION_LENGTH + ANSWER_LENGTH + NEEDLE_LENGTH - S)
        phase = np.where(rng.random(N) < level.early, rng.integers(least, S + 1, size=N), S)
        stays = leave_room(asking, phase[asking])
        asking, asked = asking[stays], asked[stays]

        answered, spilled = np.zeros(N + 1, bool), np.zeros(N, np.int64)
        answered[asking + 1] = True
        spilled[asking - 1] = np.maximum(QUESTION_LENGTH - phase[asking], 0)
        lowest = np.where(answered[chunk], ANSWER_LENGTH, 0)
        highest = S - NEEDLE_LENGTH - spilled[chunk]
        offset = lowest + (place * (highest + 1 - lowest)).astype(np.int64)
        write_needles(rows, chunk, offset, form.letters[keys], form.digits[values], form)
        write_questions(text, asking * S + phase[asking], form.letters[keys[asked]], form)
        write_answers(rows, asking + 1, form.digits[values[asked]], form)

        weights = np.full((N, S), self.filler_weight, np.float32)
        weights[asking + 1, 1 : 1 + VALUE_LENGTH] = 1.0
        weights[asking + 1, 1] = self.first_digit_weight
        weights[0, 0] = 0  # nothing predicts the first token
        starts = np.zeros((N, S), bool)
        starts[asking + 1, 1] = True
        needles = np.full(N, -1, np.int64)
        needles[asking] = chunk[asked]

        lengths = np.full((N, 1), S)
        lengths[asking, 0] = phase[asking]
        nth = np.arange(1, S + 1)
        kept, close = nth <= lengths, (nth == lengths) & (lengths < S)  # [N, S]
        present = np.arange(N * S) < kept.sum()
        ids = moved_up(rows, kept, form.blank)
        return ids, present, moved_up(close, kept), moved_up(weights, kept), moved_up(starts, kept), needles


def leave_room(asking: Any, phase: Any) -> Any:
    """Which questions of chunks ``asking`` [n] ascending, that end at ``phase`` [n], are asked: [n] bool.

    An early question may leave no room for the answer that would open its chunk. Then the chunk before asks
    nothing: if the question moved to a later phase instead, the first phases would be rare.
    """
    stays = np.ones(len(asking), bool)
    for n in range(len(asking) - 1, 0, -1):
        if stays[n] and phase[n] < ANSWER_LENGTH + QUESTION_LENGTH:
            stays[n - 1] = asking[n - 1] < asking[n] - 1
    return stays


def moved_up(x: Any, kept: Any, rest: Any = 0) -> Any:
    """What is kept of x [N, S], in its order, then ``rest``: [N * S]."""
    out = np.full(x.size, rest, x.dtype)
    out[: kept.sum()] = x[kept]
    return out


def random_values(rng: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
    """[count, 5] distinct digits."""
    return rng.random((count, 10)).argsort(axis=1)[:, :VALUE_LENGTH]


def write_needles(
    rows: Tokens, chunk: Any, offset: Any, key: Tokens, value: Tokens, form: NeedleFormat
) -> None:
    """``$KKKK=ddddd;`` into chunks ``chunk`` [n] of rows [N, S], from ``offset`` [n]."""
    n = len(chunk)
    mark, cue, end = (np.full((n, 1), token, np.int32) for token in (form.needle, form.cue, form.end))
    columns = np.asarray(offset)[:, None] + np.arange(NEEDLE_LENGTH)
    rows[np.asarray(chunk)[:, None], columns] = np.concatenate([mark, key, cue, value, end], axis=1)


def write_questions(text: Tokens, ends: Any, key: Tokens, form: NeedleFormat) -> None:
    """``~KKKK`` as the tokens of text [T] before places ``ends`` [n]."""
    start = np.asarray(ends)[:, None] - QUESTION_LENGTH
    text[start[:, 0]] = form.question
    text[start + np.arange(1, QUESTION_LENGTH)] = key


def write_answers(rows: Tokens, chunk: Any, value: Tokens, form: NeedleFormat) -> None:
    """``=ddddd;`` as the first tokens of chunks ``chunk`` [n] of rows [N, S]."""
    rows[chunk, 0] = form.cue
    rows[chunk, 1 : 1 + VALUE_LENGTH] = value
    rows[chunk, 1 + VALUE_LENGTH] = form.end


def write_decoy(row: Tokens, key: Tokens, rng: np.random.Generator) -> None:
    """Some letters of a key somewhere in a chunk [S] behind an answer, side by side or scattered."""
    letters = key[np.sort(rng.choice(KEY_LENGTH, rng.integers(1, KEY_LENGTH + 1), replace=False))]
    if rng.random() < 0.5:
        first = rng.integers(ANSWER_LENGTH, len(row) - len(letters) + 1)
        row[first : first + len(letters)] = letters
    else:
        row[ANSWER_LENGTH + rng.choice(len(row) - ANSWER_LENGTH, len(letters), replace=False)] = letters
