"""Training texts by a curriculum: needles in real text, and questions about them (arXiv 2410.01651, Sec. 4.3, App. D).

A needle ``$KKKK=ddddd;`` lies inside a chunk. Its question is the last tokens of a later chunk, ``~KKKK``, so
that the landmark falls right after the key and before the answer's cue; ``=ddddd;`` opens the next chunk. A
chunk holds a needle or a question, never both. Needle and question marks occur nowhere in the filler.

An early question closes its chunk at any phase p = 1 .. S: after p tokens of it. If p is less than a question's
5 tokens, its first 5 - p end the chunk before.

Chains of two needles, ``$AAAA=BBBB;`` and ``$BBBB=ddddd;``, are asked for as one, ``~AAAA``. With one landmark between
question and answer that is all. With two, a chunk of the cue ``=`` alone stands between: what its landmark asks for
can depend on what the first one found. An answer is predicted from its cue, which therefore opens its chunk again.

Packed texts heed no chunk: needles stand side by side, then as many questions. A model that compares keys token by
token (Landmark Attention) can learn to there, and goes on with the chunks of the other levels (docs/landmark.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trailmark.data.corpus import Tokens
from trailmark.data.needles.formats import (
    ANSWER_LENGTH,
    IGNORED,
    KEY_LENGTH,
    NEEDLE_LENGTH,
    QUESTION_LENGTH,
    VALUE_LENGTH,
    Marks,
)

# tokens of a needle, its question and its answer
PACKED_LENGTH = NEEDLE_LENGTH + QUESTION_LENGTH + ANSWER_LENGTH


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
    hops: float | None = None  # P(a question asks along a chain of two needles); None: there are no chains
    letters: int = 4  # of a chain's second key: 1 "AAAA", 2 "AABB", 4 any
    spell: float = 0.0  # P(a question of one hop asks for a chain's second key)
    packed: int = 0  # needles side by side, then as many questions: but for ``chunks`` all else is left aside

    @property
    def least_chunk(self) -> int:
        """Tokens that a chunk has at least, so that packed needles have room."""
        return -(-self.packed * PACKED_LENGTH // self.chunks)


# Measured for the laptop demo (benchmarks/README.md): keys are told apart on blank texts full of needles; then
# needles are told from text, of which most of a haystack is made. Half of the questions are early all along.
CURRICULUM = (
    Level(8, 1.0, 1.0, 0.0, early=0.5),
    Level(16, 1.0, 1.0, 0.0, early=0.5),
    Level(32, 1.0, 1.0, 0.25, early=0.5),
    Level(32, 0.5, 0.8, 0.25, 0.4, 0.5, 0.5, early=0.5),
    Level(32, 0.05, 0.75, 0.25, 0.5, 0.5, 0.5, early=0.5),
)
# Before these, if asked for. Few first: sixteen from the start taught a small transformer nothing (seen once, by hand).
PACKED = Level(4, 1.0, 1.0, 0.0, packed=4), Level(8, 1.0, 1.0, 0.0, packed=8)


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
        format: Marks,
        filler: Tokens,
        chunk_size: int,
        seed: int = 0,
        filler_weight: float = 0.0,
        first_digit_weight: float = 3.0,
        max_chunks: int = 32,
        landmarks: int = 1,
    ) -> None:
        least = ANSWER_LENGTH + NEEDLE_LENGTH
        if chunk_size < least:
            raise ValueError(
                f"chunk_size: expected at least {least} so that a chunk holds an answer and a needle, "
                f"got {chunk_size}."
            )
        if landmarks not in (1, 2):
            raise ValueError(f"landmarks: expected 1 or 2, got {landmarks}.")
        self.filler = format.clean(filler)
        if len(self.filler) <= max_chunks * chunk_size:
            raise ValueError(
                f"data: expected more than {max_chunks * chunk_size} tokens to hide needles in, "
                f"got {len(self.filler)}. Add text or choose fewer chunks."
            )
        self.format, self.chunk_size, self.seed = format, chunk_size, seed
        self.filler_weight, self.first_digit_weight = filler_weight, first_digit_weight
        self.landmarks = landmarks

    def batch(self, first: int, count: int, level: Level) -> NeedleBatch:
        """Make samples first .. first + count - 1."""
        plain = self._text if level.hops is None else self._chained_text
        make = self._packed_text if level.packed else plain
        rows = [make(np.random.default_rng([self.seed, n]), level) for n in range(first, first + count)]
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

    def _filler(self, rng: np.random.Generator, level: Level) -> Tokens:
        """Draw what a text is made of before anything is hidden in it: [N, S]."""
        N, S = level.chunks, self.chunk_size
        if len(self.filler) <= N * S:
            raise ValueError(
                f"level: expected texts shorter than the {len(self.filler)} tokens of filler, got {N * S}."
            )
        kind = rng.random()
        if kind < level.blank:
            text = np.full(N * S, self.format.blank, np.int32)
        elif rng.random() < level.mixed:
            starts = rng.integers(len(self.filler) - S, size=(N, 1))
            text = self.filler[starts + np.arange(S)].reshape(-1)
        else:
            start = rng.integers(len(self.filler) - N * S)
            text = self.filler[start : start + N * S].copy()
        return text.reshape(N, S)

    def _text(self, rng: np.random.Generator, level: Level) -> tuple[Any, ...]:
        N, S, form = level.chunks, self.chunk_size, self.format
        rows = self._filler(rng, level)
        density = draw_density(rng, level)
        holds = rng.random(N) < density
        holds[0] = True
        count = int(holds.sum())
        keys = random_keys(rng, count, level.near)
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
        letters, digits = form.letters[keys], form.digits[values]
        write(rows, chunk, offset, form.needles(letters, digits))
        ends = asking * S + phase[asking]
        # the first tokens of an early one stand at the end of the chunk before
        write(rows.reshape(1, -1), 0, ends - QUESTION_LENGTH, form.questions(letters[asked]))
        write(rows, asking + 1, 0, form.answers(digits[asked]))

        needles = np.full(N, -1, np.int64)
        needles[asking] = chunk[asked]
        lengths = np.full(N, S)
        lengths[asking] = phase[asking]
        said, starts = (np.zeros((N, S), bool) for _ in range(2))
        said[asking + 1, 1 : 1 + VALUE_LENGTH] = True
        starts[asking + 1, 1] = True
        return self._assembled(rows, lengths, said, starts, needles)

    def _packed_text(self, rng: np.random.Generator, level: Level) -> tuple[Any, ...]:
        N, S, form, count = level.chunks, self.chunk_size, self.format, level.packed
        if level.least_chunk > S:
            raise ValueError(
                f"level: expected chunks of at least {level.least_chunk} tokens for {count} packed needles, got {S}."
            )
        keys = form.letters[random_keys(rng, count, 0.0)]
        digits = form.digits[random_values(rng, count)]
        which = rng.integers(count, size=count)  # each once could be told by leaving out what was asked
        needles = form.needles(keys, digits)
        asked = np.concatenate((form.questions(keys[which]), form.answers(digits[which])), axis=1)
        first = rng.integers(N * S - count * PACKED_LENGTH + 1)  # so that chunks end anywhere in it
        rows = np.full((N, S), form.blank, np.int32)
        said, starts = (np.zeros((N, S), bool) for _ in range(2))
        write(rows.reshape(1, -1), 0, first, np.concatenate((needles, asked), axis=None)[None])
        answers = first + needles.size + asked.shape[1] * np.arange(count) + QUESTION_LENGTH + 1
        said.reshape(-1)[answers[:, None] + np.arange(VALUE_LENGTH)] = True
        starts.reshape(-1)[answers] = True
        return self._assembled(rows, np.full(N, S), said, starts, np.full(N, -1))

    def _assembled(self, rows: Tokens, lengths: Any, said: Any, starts: Any, needles: Any) -> tuple[Any, ...]:
        """Join the first ``lengths`` [N] tokens of rows [N, S] to a text, with what is asked of it.

        Args:
            said: [N, S] bool, digits and letters of answers; starts: the first of each.
            needles: ``needle_chunks`` of the batch.
        """
        N, S = rows.shape
        weights = np.where(said, 1.0, self.filler_weight).astype(np.float32)
        weights[starts] = self.first_digit_weight
        weights[0, 0] = 0  # nothing predicts the first token
        nth, lengths = np.arange(1, S + 1), lengths[:, None]
        kept, close = nth <= lengths, (nth == lengths) & (lengths < S)  # [N, S]
        present = np.arange(N * S) < kept.sum()
        ids = moved_up(rows, kept, self.format.blank)
        return ids, present, moved_up(close, kept), moved_up(weights, kept), moved_up(starts, kept), needles

    def _chained_text(self, rng: np.random.Generator, level: Level) -> tuple[Any, ...]:
        text = _Chains(rng, level, self._filler(rng, level), self.format, self.landmarks)
        return self._assembled(*text.written())


class _Chains:
    """A text of chains of two needles, written from its start: what a question asks for stands before it."""

    def __init__(
        self, rng: np.random.Generator, level: Level, rows: Tokens, form: Marks, landmarks: int
    ) -> None:
        N, S = rows.shape
        self.rng, self.level, self.rows, self.form, self.landmarks = rng, level, rows, form, landmarks
        self.density = draw_density(rng, level)
        keys, self.most = chained_keys(rng, N, level)
        self.keys, self.digits = form.letters[keys], form.digits[random_values(rng, N)]
        self.place = np.full((N, 2), -1)  # the chunk of each chain's first and last needle
        self.begun = 0  # chains
        # each thing is asked for once: an earlier answer could be copied
        self.asked: set[tuple[int, int, int]] = set()
        self.lengths = np.full(N, S)  # of chunks
        self.lead = np.zeros(N, np.int64)  # tokens of the answers that open them
        self.said, self.starts = np.zeros((N, S), bool), np.zeros((N, S), bool)
        self.dropped = np.zeros(N, bool)
        self.needles = np.full(N, -1, np.int64)

    def written(self) -> tuple[Any, ...]:
        """Write the text; return the arguments of :meth:`NeedleTexts._assembled`."""
        rng, level, N = self.rng, self.level, len(self.rows)
        for chunk in np.flatnonzero(rng.random(N) < level.decoys):
            write_decoy(self.rows[chunk], self.keys[rng.integers(N), 0], rng)
        n = 0
        while n < N:
            # most needles stand before most questions: few of them could be found by finding them all
            if n == 0 or rng.random() < 2 * self.density * (1 - n / N):
                self._hide(n)
                n += 1
            else:
                n += 1 if rng.random() < level.quiet else self._ask(n)
        # with one landmark all else is the same: the chunks of the second ones' cues go to the end, as filler
        order = np.argsort(self.dropped, kind="stable")
        number = np.append(order.argsort(), -1)
        parts = (self.rows, self.lengths, self.said, self.starts)
        return *(part[order] for part in parts), number[self.needles[order]]

    def _hide(self, n: int) -> None:
        """Hide a needle in chunk ``n``, of a chain that was begun or of another, if there is one."""
        rng, half = self.rng, np.flatnonzero((self.place >= 0).sum(1) == 1)
        if len(half) and (rng.random() < 0.35 or self.begun == self.most):
            chain = rng.choice(half)
            which = int(self.place[chain, 0] >= 0)
        elif self.begun < self.most:
            # more last needles than first ones, more than are retrieved at once: it does not do to find them all
            chain, which = self.begun, int(rng.random() < 0.8)
            self.begun += 1
        else:
            return
        value = self.digits[chain] if which else self.keys[chain, 1]
        needle = self.form.needles(self.keys[chain, which][None], value[None])
        offset = rng.integers(self.lead[n], self.rows.shape[1] - needle.shape[1] + 1)
        write(self.rows, n, offset, needle)
        self.place[chain, which] = n

    def _ask(self, n: int) -> int:
        """Ask in chunk ``n``, if there is something to ask; return how many chunks were written."""
        rng, level = self.rng, self.level
        assert level.hops is not None
        hops = 2 if rng.random() < level.hops else 1
        spells = hops == 1 and rng.random() < level.spell
        # the needles from what is asked by to what is asked for
        first, last = (0, 0) if spells else (2 - hops, 1)
        hidden = self.place[:, first : last + 1].min(1) >= 0
        askable = [int(c) for c in np.flatnonzero(hidden) if (int(c), first, last) not in self.asked]
        end = n + hops
        if not askable or end >= len(self.rows):
            return 1
        chain = int(rng.choice(askable))
        self.asked.add((chain, first, last))
        if rng.random() < level.early:
            self.lengths[n] = rng.integers(self.lead[n] + QUESTION_LENGTH, self.rows.shape[1] + 1)
        question = self.form.questions(self.keys[chain, first][None])
        write(self.rows, n, self.lengths[n] - QUESTION_LENGTH, question)
        self.needles[n] = self.place[chain, first]
        if hops == 2 and self.landmarks == 1:
            self.dropped[n + 1] = True
        elif hops == 2:
            self.rows[n + 1, 0], self.lengths[n + 1] = self.form.cue, 1
            self.needles[n + 1] = self.place[chain, 1]
        answer = self.keys[chain, 1] if spells else self.digits[chain]
        write(self.rows, end, 0, self.form.answers(answer[None]))
        self.said[end, 1 : 1 + len(answer)] = True
        self.starts[end, 1] = True
        self.lead[end] = 1 + len(answer) + 1
        return hops


def draw_density(rng: np.random.Generator, level: Level) -> float:
    """Draw the share of a text's chunks that hold needles."""
    N = level.chunks
    return 0.5 if rng.random() < level.dense else rng.uniform(1, max(2, N / 8)) / N


def leave_room(asking: Any, phase: Any) -> Any:
    """Say which questions of chunks ``asking`` [n] ascending, that end at ``phase`` [n], are asked: [n] bool.

    An early question may leave no room for the answer that would open its chunk. Then the chunk before asks
    nothing: if the question moved to a later phase instead, the first phases would be rare.
    """
    stays = np.ones(len(asking), bool)
    for n in range(len(asking) - 1, 0, -1):
        if stays[n] and phase[n] < ANSWER_LENGTH + QUESTION_LENGTH:
            stays[n - 1] = asking[n - 1] < asking[n] - 1
    return stays


def moved_up(x: Any, kept: Any, rest: Any = 0) -> Any:
    """Return what is kept of x [N, S], in its order, then ``rest``: [N * S]."""
    out = np.full(x.size, rest, x.dtype)
    out[: kept.sum()] = x[kept]
    return out


def random_keys(rng: np.random.Generator, count: int, near: float) -> np.ndarray[Any, Any]:
    """Draw [count, 4] numbers of letters; with probability ``near`` a key is an earlier one but for one letter."""
    keys = rng.integers(26, size=(count, KEY_LENGTH))
    for n in np.flatnonzero(rng.random(count) < near):
        if n:
            keys[n] = keys[rng.integers(n)]
            keys[n, rng.integers(KEY_LENGTH)] = rng.integers(26)
    return keys


def chained_keys(rng: np.random.Generator, count: int, level: Level) -> tuple[np.ndarray[Any, Any], int]:
    """Draw first and second keys [count, 2, 4] of chains; also return of how many chains all are different."""
    while True:
        drawn = random_keys(rng, 2 * count, level.near)
        if len(np.unique(drawn, axis=0)) < 2 * count:
            continue
        keys = drawn.reshape(count, 2, KEY_LENGTH)
        if level.letters == KEY_LENGTH:
            return keys, count
        most = min(count, 26)
        letters = rng.permutation(26)[:most], *rng.integers(26, size=(level.letters - 1, most))
        keys[:most, 1] = np.stack(letters, axis=1).repeat(KEY_LENGTH // level.letters, axis=1)
        if len(np.unique(keys[:most].reshape(-1, KEY_LENGTH), axis=0)) == 2 * most:
            return keys, most


def random_values(rng: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
    """Draw [count, 5] distinct digits."""
    return rng.random((count, 10)).argsort(axis=1)[:, :VALUE_LENGTH]


def write(rows: Tokens, chunk: Any, offset: Any, what: Tokens) -> None:
    """Write ``what`` [n, L] into chunks ``chunk`` [n] of rows [N, S], from places ``offset`` [n] on; one: of all."""
    rows[np.atleast_1d(chunk)[:, None], np.atleast_1d(offset)[:, None] + np.arange(what.shape[1])] = what


def write_decoy(row: Tokens, key: Tokens, rng: np.random.Generator) -> None:
    """Write some letters of a key into a chunk [S], anywhere behind an answer, side by side or scattered."""
    letters = key[np.sort(rng.choice(KEY_LENGTH, rng.integers(1, KEY_LENGTH + 1), replace=False))]
    if rng.random() < 0.5:
        first = rng.integers(ANSWER_LENGTH, len(row) - len(letters) + 1)
        row[first : first + len(letters)] = letters
    else:
        row[ANSWER_LENGTH + rng.choice(len(row) - ANSWER_LENGTH, len(letters), replace=False)] = letters
