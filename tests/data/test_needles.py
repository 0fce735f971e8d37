"""Needle texts and trials, read back token by token."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from trailmark.data.corpus import load_tokenizer, tokenize
from trailmark.data.needles import (
    ANSWER_LENGTH,
    CURRICULUM,
    IGNORED,
    NEEDLE_LENGTH,
    Level,
    NeedleBatch,
    NeedleFormat,
    NeedleTexts,
    needle_trials,
)

BYTES = load_tokenizer()
FORMAT = NeedleFormat.of(BYTES)
S = 24
# what could be taken for a needle, a question or an answer stands in the filler too
FILLER = tokenize(["Prices: $12=34; ~ABCD\n=56789; lorem ipsum, $WXYZ=12345; dolor sit amet. " * 60], BYTES)
LEVELS = [*CURRICULUM, Level(6, 0.0, 0.5, 0.9), Level(12, 0.0, 0.5, 0.3, quiet=0.6, mixed=0.5, decoys=0.8)]


def needle_texts(seed: int = 0, **rest: Any) -> NeedleTexts:
    return NeedleTexts(FORMAT, FILLER, S, seed, **rest)


def text_of(tokens: Tensor) -> str:
    return BYTES.decode(tokens)


def character_tokenizer(vocabulary: str, pieces: str = ".", unknown: str | None = None) -> Any:
    """One token for every character of ``vocabulary``; text is cut into the matches of ``pieces``."""
    table = {c: i for i, c in enumerate(vocabulary)}
    if unknown is not None:
        table[unknown] = len(table)
    model = models.WordLevel(table, unk_token=unknown) if unknown else models.BPE(table, [])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown)


CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789$~=; "


# The tokens of needles


def test_format_of_a_tokenizer_with_every_character() -> None:
    form = NeedleFormat.of(character_tokenizer(CHARACTERS))
    assert form.letters.tolist() == list(range(26))
    assert form.digits.tolist() == list(range(26, 36))
    assert (form.needle, form.question, form.cue, form.end, form.blank) == (36, 37, 38, 39, 40)


def test_a_tokenizer_that_splits_characters_is_refused() -> None:
    byte_level = Tokenizer(models.BPE({c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # "A" becomes " A": two tokens
    with pytest.raises(ValueError, match=r"^tokenizer: expected one token for 'A', got 2"):
        NeedleFormat.of(PreTrainedTokenizerFast(tokenizer_object=byte_level))


def test_a_tokenizer_without_some_character_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^tokenizer: expected one token for 'Q', got 0"):
        NeedleFormat.of(character_tokenizer(CHARACTERS.replace("Q", "")))


def test_a_tokenizer_that_takes_characters_for_each_other_is_refused() -> None:
    """One token each, but the same unknown one for all letters."""
    with pytest.raises(ValueError, match=r"^tokenizer: "):
        NeedleFormat.of(character_tokenizer("0123456789$~=; ", unknown="?"))


# Training texts


@settings(derandomize=True, deadline=None, max_examples=60)
@given(level=st.sampled_from(LEVELS), number=st.integers(0, 10**9), seed=st.integers(0, 99))
def test_every_question_can_be_answered_from_its_needle(level: Level, number: int, seed: int) -> None:
    batch = needle_texts(seed).batch(number, 1, level)
    chunks = [text_of(chunk) for chunk in batch.input_ids.view(level.chunks, S)]
    starts = batch.first_digits.view(level.chunks, S)
    needles = batch.needle_chunks[0].tolist()
    assert chunks[0].count("$") == 1
    for n, (chunk, needle) in enumerate(zip(chunks, needles, strict=True)):
        # a needle or a question, never both; their marks nowhere else
        assert chunk.count("$") + chunk.count("~") <= 1
        if "$" in chunk:
            at = chunk.index("$")
            mark = chunk[at : at + NEEDLE_LENGTH]
            assert mark[1:5].isalpha()
            assert mark[5] == "="
            assert len(set(mark[6:11])) == 5
            assert mark[6:11].isdigit()
            assert mark[11] == ";"
        assert ("~" in chunk) == (needle >= 0)
        if needle >= 0:
            assert chunk.index("~") == S - 5
            key, answer = chunk[-4:], chunks[n + 1][:ANSWER_LENGTH]
            assert 0 <= needle < n
            assert f"${key}{answer}" in chunks[needle]
            assert sum(f"${key}" in other for other in chunks) == 1, "the question has two answers"
            assert starts[n + 1].nonzero().flatten().tolist() == [1]
    assert starts.sum() == sum(needle >= 0 for needle in needles)


def test_a_key_that_two_needles_have_is_never_asked() -> None:
    level, repeated = Level(32, 1, 1, 1), 0
    for row in needle_texts().batch(0, 40, level).input_ids:
        pieces = text_of(row).split("$")[1:]
        keys = [piece[:4] for piece in pieces]
        asked = {piece[:4] for piece in text_of(row).split("~")[1:]}
        twice = {key for key in keys if keys.count(key) > 1}
        repeated += len(twice)
        assert not twice & asked
    assert repeated > 10


@pytest.mark.parametrize(("filler", "first"), [(0.0, 3.0), (0.25, 2.0)])
def test_labels_and_weights_stand_on_the_answers(filler: float, first: float) -> None:
    level = CURRICULUM[2]
    batch = needle_texts(filler_weight=filler, first_digit_weight=first).batch(0, 8, level)
    expected = torch.full((8, level.chunks, S), filler)
    for b, n in (batch.needle_chunks >= 0).nonzero().tolist():
        expected[b, n + 1, 1:6] = torch.tensor([first, 1, 1, 1, 1])
    expected = expected.view(8, -1)
    expected[:, 0] = 0  # nothing predicts it
    assert torch.equal(batch.loss_weights, expected)
    assert torch.equal(batch.labels, batch.input_ids.masked_fill(expected == 0, IGNORED))
    assert (batch.labels[batch.first_digits] >= 0).all()


def test_quiet_chunks_ask_nothing_and_decoys_are_letters_of_a_key() -> None:
    """On blank filler, what stands in a chunk without marks, behind where an answer would end, is a decoy."""
    plain, quiet = Level(32, 1, 0, 0), Level(32, 1, 0, 0, quiet=0.5)
    level = replace(quiet, decoys=0.5)
    share, letters = [], 0
    for number in range(40):
        batches = [needle_texts().batch(number, 1, x) for x in (plain, quiet, level)]
        asking = [int((batch.needle_chunks >= 0).sum()) for batch in batches]
        share.append(asking[1] / asking[0])
        for batch, expected in zip(batches, (False, False, True), strict=True):
            text = text_of(batch.input_ids[0])
            keys = set("".join(piece[:4] for piece in text.split("$")[1:]))
            for n in range(32):
                chunk = text[n * S : (n + 1) * S]
                if "$" not in chunk and "~" not in chunk:
                    found = chunk[ANSWER_LENGTH:].replace(" ", "")
                    assert len(found) <= 4
                    assert set(found) <= keys
                    assert expected or not found
                    letters += len(found)
    assert 0.4 < sum(share) / len(share) < 0.6
    assert letters > 200


@pytest.mark.parametrize("level", LEVELS)
def test_a_sample_depends_on_seed_number_and_level_alone(level: Level) -> None:
    whole = needle_texts(7).batch(100, 6, level)
    texts = needle_texts(7)
    parts = [texts.batch(105, 1, level), texts.batch(100, 2, level), texts.batch(102, 3, level)]
    for field in fields(NeedleBatch):
        last, *first = (getattr(part, field.name) for part in parts)
        assert torch.equal(torch.cat([*first, last]), getattr(whole, field.name)), field.name
    assert whole.sample_numbers.tolist() == [100, 101, 102, 103, 104, 105]
    assert not torch.equal(needle_texts(8).batch(100, 6, level).input_ids, whole.input_ids)
    assert whole.input_ids.unique(dim=0).shape[0] == 6


def test_dense_levels_ask_and_sparse_levels_ask_of_far_needles() -> None:
    dense = needle_texts().batch(0, 50, Level(16, 0, 1, 0))
    sparse = needle_texts().batch(0, 50, Level(16, 0, 0, 0))
    needles = [(batch.input_ids == FORMAT.needle).sum() / 50 for batch in (dense, sparse)]
    assert 6 < needles[0] < 11
    assert 1 <= needles[1] < 3
    assert all((batch.needle_chunks >= 0).any(1).float().mean() > 0.9 for batch in (dense, sparse))


def test_needles_lie_anywhere_in_a_chunk_but_in_its_answer() -> None:
    """At each phase in training, so that no phase is new in a haystack."""
    batch = needle_texts().batch(0, 100, CURRICULUM[2])
    answered = (batch.first_digits.view(-1, S)).any(1)
    at = (batch.input_ids.view(-1, S) == FORMAT.needle).nonzero()
    last = S - NEEDLE_LENGTH
    assert at[answered[at[:, 0]], 1].unique().tolist() == list(range(ANSWER_LENGTH, last + 1))
    assert at[~answered[at[:, 0]], 1].unique().tolist() == list(range(last + 1))


def test_blank_levels_hold_nothing_else() -> None:
    batch = needle_texts().batch(0, 4, Level(8, 1, 1, 0))
    marked = "$~=;ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 "
    assert all(set(text_of(row)) <= set(marked) for row in batch.input_ids)
    with_text = needle_texts().batch(0, 4, Level(8, 0, 1, 0))
    assert all(set(text_of(row)) & set("loremipsum") for row in with_text.input_ids)


def test_too_small_a_chunk() -> None:
    NeedleTexts(FORMAT, FILLER, 19).batch(0, 20, CURRICULUM[0])
    with pytest.raises(ValueError, match=r"^chunk_size: expected at least 19 .*got 18"):
        NeedleTexts(FORMAT, FILLER, 18)


def test_too_short_a_text() -> None:
    clean = len(FORMAT.clean(FILLER))
    with pytest.raises(ValueError, match=r"^data: expected more than 768 tokens .*got 700"):
        NeedleTexts(FORMAT, FORMAT.clean(FILLER)[:700], S)
    with pytest.raises(ValueError, match=f"got {clean}"):  # counted without the marks
        NeedleTexts(FORMAT, FILLER, S, max_chunks=clean // S + 1)
    texts = NeedleTexts(FORMAT, FORMAT.clean(FILLER)[: 6 * S + 1], S, max_chunks=6)
    texts.batch(0, 5, replace(LEVELS[-1], chunks=6))


# Trials in haystacks

HAYSTACK = FORMAT.clean(FILLER)[: 40 * S + 5]


@pytest.mark.parametrize("needles", [1, 5, 30])
def test_trials(needles: int) -> None:
    rows = torch.from_numpy(HAYSTACK[: 40 * S]).view(40, S)
    for trial in islice(needle_trials(FORMAT, HAYSTACK, S, 30, needles, seed=3), 10):
        places = trial.chunks.tolist()
        assert places == sorted(set(places))
        assert 0 <= places[0] <= places[-1] < 30
        keys = set()
        for place, text, question, answer in zip(
            places, trial.texts, trial.questions, trial.answers, strict=True
        ):
            key, value = text_of(question)[-4:], text_of(answer)
            keys.add(key)
            assert text_of(question)[-5] == "~"
            assert value[0] == "="
            assert len(set(value[1:])) == 5
            assert f"${key}{value};" in text_of(text)
            # all else is the haystack's
            assert (text != rows[place]).sum() <= NEEDLE_LENGTH
            assert (question[:-5] == rows[:, :-5]).all(1).any()
        assert len(keys) == needles


def test_trials_are_repeatable_and_different() -> None:
    def first(seed: int) -> list[Tensor]:
        return [trial.texts for trial in islice(needle_trials(FORMAT, HAYSTACK, S, 30, 4, seed), 5)]

    assert all(map(torch.equal, first(1), first(1)))
    assert not any(map(torch.equal, first(1), first(2)))
    assert not torch.equal(first(1)[0], first(1)[1])


def test_needles_reach_both_ends_of_a_chunk() -> None:
    trials = islice(needle_trials(FORMAT, HAYSTACK, S, 30, 30, seed=0), 10)
    at = {int((text == FORMAT.needle).nonzero()) for trial in trials for text in trial.texts}
    assert at == set(range(S - NEEDLE_LENGTH + 1))


def test_the_haystack_is_left_alone() -> None:
    before = HAYSTACK.copy()
    next(needle_trials(FORMAT, HAYSTACK, S, 30, 9, seed=0))
    assert np.array_equal(HAYSTACK, before)


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ({"chunk_size": S, "last_chunk": 3, "needles": 4}, "^length: expected room for 4 needles, got 3"),
        ({"chunk_size": S, "last_chunk": 41, "needles": 1}, "^length: "),  # the haystack has 40
        ({"chunk_size": NEEDLE_LENGTH - 1, "last_chunk": 9, "needles": 1}, "^chunk_size: "),
    ],
)
def test_what_does_not_fit(rest: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        for _ in islice(needle_trials(FORMAT, HAYSTACK, **rest, seed=0), 200):
            pass
