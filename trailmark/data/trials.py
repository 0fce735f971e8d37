"""Needles to hide in haystacks and the questions about them: what evaluations ask (data/needles.py says how)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from trailmark.data.corpus import Tokens
from trailmark.data.needles import (
    KEY_LENGTH,
    NEEDLE_LENGTH,
    NeedleFormat,
    random_values,
    write_needles,
    write_questions,
)


@dataclass(frozen=True)
class NeedleTrial:
    """Needles to hide in one haystack, all asked."""

    chunks: Tensor  # [n] ascending: where each needle lies
    texts: Tensor  # [n, S]: those chunks with their needle
    questions: Tensor  # [n, S], or [n, 2S] if asked at any phase: filler that ends with the question
    phases: Tensor  # [n]: tokens of the chunk that a question closes
    answers: Tensor  # [n, 1 + 5]: the cue and the digits

    @property
    def attention_mask(self) -> Tensor:
        """[n, S or 2S] bool: the last S + phase tokens of each question (S if asked at the end); padding before.

        ``question[mask]`` is one question alone. In a batch all end in the last column, so that one landmark after
        that column (``close_chunk``) closes every chunk and answers are appended on the right.
        """
        first = (self.texts.shape[1] - self.phases)[:, None]
        return torch.arange(self.questions.shape[1]) >= first


def needle_trials(
    format: NeedleFormat,
    haystack: Tokens,
    chunk_size: int,
    last_chunk: int,
    needles: int,
    seed: int,
    phases: Literal["end", "any"] = "end",
) -> Iterator[NeedleTrial]:
    """Endless trials with ``needles`` needles of different keys in chunks below ``last_chunk``.

    Args:
        phases: "end": a question fills its chunk. "any": it closes one after 1 .. S tokens, each as likely, behind
            a full chunk of filler. Needles, keys and values are the same for both.
    """
    S = chunk_size
    if phases not in ("end", "any"):
        raise ValueError(f"phases: expected 'end' or 'any', got {phases!r}.")
    if chunk_size < NEEDLE_LENGTH:
        raise ValueError(f"chunk_size: expected at least {NEEDLE_LENGTH} to hold a needle, got {chunk_size}.")
    if last_chunk > len(haystack) // S:
        raise ValueError(f"length: expected {last_chunk} chunks of text, got {len(haystack) // S}.")
    rows = haystack[: len(haystack) // S * S].reshape(-1, S)
    if last_chunk < needles:
        raise ValueError(
            f"length: expected room for {needles} needles, got {last_chunk} chunks before the question."
        )
    number = 0
    while True:
        rng = np.random.default_rng([seed, number])
        number += 1
        chunk = np.sort(rng.choice(last_chunk, needles, replace=False))
        key = np.stack(
            np.unravel_index(rng.choice(26**KEY_LENGTH, needles, replace=False), (26,) * KEY_LENGTH), 1
        )
        value = random_values(rng, needles)
        texts = rows[chunk].copy()
        offset = rng.integers(0, S - NEEDLE_LENGTH + 1, size=needles)
        place = np.arange(needles)
        write_needles(texts, place, offset, format.letters[key], format.digits[value], format)
        filler = rng.integers(len(rows), size=needles)
        if phases == "end":
            questions, phase = rows[filler], np.full(needles, S)
        else:
            pairs = np.stack([filler, (filler + 1) % len(rows)], axis=1)
            questions, phase = rows[pairs].reshape(needles, 2 * S), rng.integers(1, S + 1, size=needles)
        ends = (place + 1) * questions.shape[1]
        write_questions(questions.reshape(-1), ends, format.letters[key], format)
        answers = np.concatenate([np.full((needles, 1), format.cue, np.int32), format.digits[value]], axis=1)
        yield NeedleTrial(
            torch.from_numpy(chunk),
            torch.from_numpy(texts).long(),
            torch.from_numpy(questions).long(),
            torch.from_numpy(phase),
            torch.from_numpy(answers).long(),
        )
