"""Training texts of needles, read back token by token."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields, replace
from hashlib import sha256
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.data.counts import assert_equally_likely
from trailmark.data.corpus import load_tokenizer, tokenize
from trailmark.data.needles.curriculum_texts import CURRICULUM, PACKED, Level, NeedleBatch, NeedleTexts
from trailmark.data.needles.formats import ANSWER_LENGTH, IGNORED, NEEDLE_LENGTH, QUESTION_LENGTH, Marks

BYTES = load_tokenizer()
FORMAT = Marks(BYTES)
S = 24
# what could be taken for a needle, a question or an answer stands in the filler too
FILLER = tokenize(["Prices: $12=34; ~ABCD\n=56789; lorem ipsum, $WXYZ=12345; dolor sit amet. " * 60], BYTES)
LEVELS = [*CURRICULUM, Level(6, 0.0, 0.5, 0.9), Level(12, 0.0, 0.5, 0.3, quiet=0.6, mixed=0.5, decoys=0.8)]
EARLY = [
    Level(32, 1.0, 1.0, 0.25, early=1.0),  # half of the chunks ask
    Level(32, 0.05, 0.75, 0.25, 0.5, 0.5, 0.5, early=0.5),
    Level(32, 0.0, 0.0, 0.0, early=0.7),  # almost all ask
    Level(6, 0.0, 0.5, 0.9, decoys=0.8, early=1.0),
]


def needle_texts(seed: int = 0, chunk_size: int = S, **rest: Any) -> NeedleTexts:
    return NeedleTexts(FORMAT, FILLER, chunk_size, seed, **rest)


def text_of(tokens: Any) -> str:
    return BYTES.decode(tokens)


def chunks_of(batch: NeedleBatch, row: int, chunk_size: int = S) -> list[str]:
    """The chunks of one text, as a model divides it: closed where marked or full."""
    chunks = [""]
    for token, present, close in zip(
        text_of(batch.input_ids[row]), batch.attention_mask[row], batch.close_chunk[row], strict=True
    ):
        if not present:
            assert token == " "
            assert not close
            continue
        chunks[-1] += token
        if close or len(chunks[-1]) == chunk_size:
            assert not (close and len(chunks[-1]) == chunk_size), "marked though full"
            chunks.append("")
    assert chunks.pop() == "", "a text ends with a whole chunk"
    return chunks


def digest(tensors: list[Tensor]) -> str:
    found = sha256()
    for x in tensors:
        found.update(f"{x.dtype}{tuple(x.shape)}".encode() + x.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


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
    form = Marks(character_tokenizer(CHARACTERS))
    assert form.letters.tolist() == list(range(26))
    assert form.digits.tolist() == list(range(26, 36))
    assert (form.needle_mark, form.question_mark, form.cue, form.end, form.blank) == (36, 37, 38, 39, 40)


def test_a_tokenizer_that_splits_characters_is_refused() -> None:
    byte_level = Tokenizer(models.BPE({c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # "A" becomes " A": two tokens
    with pytest.raises(ValueError, match=r"^tokenizer: expected one token for 'A', got 2"):
        Marks(PreTrainedTokenizerFast(tokenizer_object=byte_level))


def test_a_tokenizer_without_some_character_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^tokenizer: expected one token for 'Q', got 0"):
        Marks(character_tokenizer(CHARACTERS.replace("Q", "")))


def test_a_tokenizer_that_takes_characters_for_each_other_is_refused() -> None:
    """One token each, but the same unknown one for all letters."""
    with pytest.raises(ValueError, match=r"^tokenizer: "):
        Marks(character_tokenizer("0123456789$~=; ", unknown="?"))


# Training texts


@settings(max_examples=120)
@given(
    level=st.sampled_from(LEVELS + EARLY),
    size=st.sampled_from([19, 21, S, 32]),
    number=st.integers(0, 10**9),
    seed=st.integers(0, 99),
)
def test_every_question_can_be_answered_from_its_needle(
    level: Level, size: int, number: int, seed: int
) -> None:
    batch = needle_texts(seed, size).batch(number, 1, level)
    chunks = chunks_of(batch, 0, size)
    needles = batch.needle_chunks[0].tolist()
    assert len(chunks) == len(needles) == level.chunks
    ends = list(accumulate(map(len, chunks)))
    text = "".join(chunks)
    assert chunks[0].count("$") == 1
    # needles: whole, in full chunks that do not ask, their mark nowhere else
    for chunk, needle in zip(chunks, needles, strict=True):
        assert len(chunk) == size or (needle >= 0 and level.early)
        if "$" in chunk:
            mark = chunk[chunk.index("$") :][:NEEDLE_LENGTH]
            assert re.fullmatch(r"\$[A-Z]{4}=\d{5};", mark)
            assert len(set(mark[6:11])) == 5
            assert chunk.count("$") == 1
            assert len(chunk) == size
            assert needle < 0
    # questions: a landmark follows the last letter, the answer opens the next chunk, their mark nowhere else
    asking, first_digits = [], []
    for question in re.finditer("~", text):
        end = question.start() + QUESTION_LENGTH
        assert end in ends, "no landmark after a question"
        n = ends.index(end)
        key, answer = text[end - 4 : end], text[end : end + ANSWER_LENGTH]
        assert re.fullmatch(r"[A-Z]{4}", key)
        assert answer == chunks[n + 1][:ANSWER_LENGTH]
        assert 0 <= needles[n] < n
        assert f"${key}{answer}" in chunks[needles[n]]
        assert text.count(f"${key}") == 1, "the question has two answers"
        asking.append(n)
        first_digits.append(end + 1)
    assert asking == [n for n, needle in enumerate(needles) if needle >= 0]
    assert batch.first_digits[0].nonzero().flatten().tolist() == first_digits


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


@pytest.mark.parametrize("level", [CURRICULUM[2], *EARLY])
@pytest.mark.parametrize(("filler", "first"), [(0.0, 3.0), (0.25, 2.0)])
def test_labels_and_weights_stand_on_the_answers(level: Level, filler: float, first: float) -> None:
    batch = needle_texts(filler_weight=filler, first_digit_weight=first).batch(0, 8, level)
    expected = torch.zeros(8, level.chunks * S)
    for b, needles in enumerate(batch.needle_chunks.tolist()):
        weights = [[filler] * len(chunk) for chunk in chunks_of(batch, b)]
        for n, needle in enumerate(needles):
            if needle >= 0:
                weights[n + 1][1:6] = [first, 1, 1, 1, 1]
        flat = [weight for chunk in weights for weight in chunk]
        expected[b, : len(flat)] = torch.tensor(flat)
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


@pytest.mark.parametrize("level", LEVELS + EARLY)
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
    needles = [(batch.input_ids == FORMAT.needle_mark).sum() / 50 for batch in (dense, sparse)]
    assert 6 < needles[0] < 11
    assert 1 <= needles[1] < 3
    assert all((batch.needle_chunks >= 0).any(1).float().mean() > 0.9 for batch in (dense, sparse))


def test_needles_lie_anywhere_in_a_chunk_but_in_its_answer() -> None:
    """At each phase in training, so that no phase is new in a haystack."""
    batch = needle_texts().batch(0, 100, replace(CURRICULUM[2], early=0.0))
    answered = (batch.first_digits.view(-1, S)).any(1)
    at = (batch.input_ids.view(-1, S) == FORMAT.needle_mark).nonzero()
    last = S - NEEDLE_LENGTH
    assert at[answered[at[:, 0]], 1].unique().tolist() == list(range(ANSWER_LENGTH, last + 1))
    assert at[~answered[at[:, 0]], 1].unique().tolist() == list(range(last + 1))


def test_blank_levels_hold_nothing_else() -> None:
    batch = needle_texts().batch(0, 4, Level(8, 1, 1, 0))
    marked = "$~=;ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 "
    assert all(set(text_of(row)) <= set(marked) for row in batch.input_ids)
    with_text = needle_texts().batch(0, 4, Level(8, 0, 1, 0))
    assert all(set(text_of(row)) & set("loremipsum") for row in with_text.input_ids)


@pytest.mark.parametrize("level", PACKED)
def test_packed_texts_ask_about_any_of_the_needles_that_stand_side_by_side(level: Level) -> None:
    batch = needle_texts(filler_weight=0.25, first_digit_weight=2.0, chunk_size=26).batch(0, 200, level)
    assert batch.attention_mask.all()
    assert not batch.close_chunk.any()
    assert (batch.needle_chunks == -1).all()
    assert torch.equal(batch.labels[:, 1:], batch.input_ids[:, 1:])  # all bear a loss
    begins, orders = set(), set()
    for row, weights, firsts in zip(batch.input_ids, batch.loss_weights, batch.first_digits, strict=True):
        text = text_of(row)
        begins.add(len(text) - len(text.lstrip()))
        found = re.fullmatch(r" *((?:\$[A-Z]{4}=\d{5};)+)((?:~[A-Z]{4}=\d{5};)+) *", text)
        assert found
        needles, asked = (re.findall(r"([A-Z]{4})=(\d{5})", part) for part in found.groups())
        assert len(needles) == level.packed
        assert len(asked) == level.packed
        orders.add(tuple(map(needles.index, asked)))
        digits = [
            n for at in re.finditer(r"(?<=~[A-Z]{4}=)\d", text) for n in range(at.start(), at.start() + 5)
        ]
        assert firsts.nonzero().flatten().tolist() == digits[::5]
        expected = torch.full((len(text),), 0.25)
        expected[digits] = 1.0
        expected[firsts], expected[0] = 2.0, 0.0
        assert torch.equal(weights, expected)
    assert begins == set(range(level.chunks * 26 - level.packed * 24 + 1))
    assert len(orders) > 10


def test_too_small_a_chunk() -> None:
    NeedleTexts(FORMAT, FILLER, S).batch(0, 20, PACKED[0])
    with pytest.raises(
        ValueError, match=r"^level: expected chunks of at least 24 tokens for 4 packed needles, got 23"
    ):
        NeedleTexts(FORMAT, FILLER, S - 1).batch(0, 20, PACKED[0])
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


# Early questions


def phases_of(level: Level, count: int, chunk_size: int = S) -> list[tuple[int, bool, bool]]:
    """Of each question: where it ends, whether an answer opens its chunk, whether the one before holds a needle."""
    batch = needle_texts(5, chunk_size).batch(0, count, level)
    found = []
    for b, needles in enumerate(batch.needle_chunks.tolist()):
        chunks = chunks_of(batch, b, chunk_size)
        for n, needle in enumerate(needles):
            if needle >= 0:
                found.append((len(chunks[n]), needles[n - 1] >= 0, "$" in chunks[n - 1]))
    return found


@pytest.mark.parametrize("chunk_size", [19, 21, 23, S, 32])
@pytest.mark.parametrize("level", [replace(level, early=1.0) for level in EARLY[:3]])
@pytest.mark.sampled(5)
def test_early_questions_end_at_every_phase_equally(level: Level, chunk_size: int) -> None:
    """But where a chunk is too small for an answer, a needle and the first letters of a question."""
    counts = Counter(phase for phase, _, _ in phases_of(level, 150, chunk_size))
    least = max(1, 24 - chunk_size)
    assert set(counts) == set(range(least, chunk_size + 1))
    assert_equally_likely([counts[phase] for phase in range(least, chunk_size + 1)])


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_share_of_early_questions(share: float) -> None:
    """1 of S of them ends where the others do."""
    phases = [phase for phase, _, _ in phases_of(Level(32, 1, 1, 0, early=share), 200)]
    n, p = len(phases), share * (S - 1) / S
    early = sum(phase < S for phase in phases)
    assert abs(early - n * p) <= 4 * (n * p * (1 - p)) ** 0.5


def test_early_questions_after_answers_and_needles() -> None:
    """Behind an answer from the first place that holds both; behind a needle anywhere, its own chunk's end too."""
    found = phases_of(Level(32, 1, 1, 0, early=0.9), 150)
    assert {phase for phase, answered, _ in found if answered} == set(range(12, S + 1))
    assert {phase for phase, _, needle in found if needle} == set(range(1, S + 1))
    batch = needle_texts(5).batch(0, 150, Level(32, 1, 1, 0, early=0.9))
    chunks = [chunk for b in range(150) for chunk in chunks_of(batch, b)]
    spilled = [chunk for chunk in chunks if "$" in chunk and "~" in chunk]
    gaps = {chunk.index("~") - chunk.index("$") - NEEDLE_LENGTH for chunk in spilled}
    assert {chunk.index("~") for chunk in spilled} == set(range(S - 4, S))
    assert min(gaps) == 0


def test_early_questions_change_nothing_else() -> None:
    """The same needles in the same chunks, the same questions but for those that leave no room for an answer."""
    for level in LEVELS:
        plain, early = (needle_texts().batch(0, 20, replace(level, early=share)) for share in (0.0, 0.8))
        for b in range(20):
            before, after = chunks_of(plain, b), chunks_of(early, b)
            assert [re.findall(r"\$.{11}", c) for c in before] == [re.findall(r"\$.{11}", c) for c in after]
            dropped = plain.needle_chunks[b] != early.needle_chunks[b]
            assert (early.needle_chunks[b][dropped] == -1).all()
            for n in dropped.nonzero().flatten().tolist():
                assert early.needle_chunks[b, n + 1] >= 0
                assert len(after[n + 1]) < 12


# digests of texts that were made before there were early questions
BEFORE = {
    Level(8, 1.0, 1.0, 0.0): "97f8a15d1745f1c7",
    Level(32, 1.0, 1.0, 0.25): "7cc1ded0730cc94d",
    Level(32, 0.5, 0.8, 0.25, 0.4, 0.5, 0.5): "e03764d68fc8b2a8",
    Level(32, 0.05, 0.75, 0.25, 0.5, 0.5, 0.5): "91a783430b6a3c18",
    Level(6, 0.0, 0.5, 0.9): "2a1bd8ea017b6b5a",
    Level(12, 0.0, 0.5, 0.3, 0.6, 0.5, 0.8): "a5f407ceccedfa3d",
}


@pytest.mark.parametrize(("level", "expected"), BEFORE.items())
def test_texts_without_early_questions_are_those_of_earlier_versions(level: Level, expected: str) -> None:
    batch = needle_texts(7, filler_weight=0.25).batch(100, 20, level)
    new = {"attention_mask", "close_chunk"}
    assert digest([getattr(batch, f.name) for f in fields(batch) if f.name not in new]) == expected
    assert batch.attention_mask.all()
    assert not batch.close_chunk.any()


# Chains of two needles

CHAINED = [
    Level(16, 1.0, 1.0, 0.0, hops=0.7),
    Level(32, 0.05, 0.75, 0.25, 0.4, 0.5, 0.5, early=0.4, hops=0.6),
    Level(12, 0.0, 0.5, 0.9, decoys=0.8, early=1.0, hops=1.0),
    Level(8, 0.5, 1.0, 0.3, hops=0.0),
    Level(24, 1.0, 1.0, 0.1, hops=0.5, spell=0.5),
    Level(64, 1.0, 1.0, 0.0, hops=0.65, letters=1, spell=0.4),
    Level(40, 1.0, 1.0, 0.0, hops=0.65, letters=2),
]


@settings(max_examples=60)
@given(
    level=st.sampled_from(CHAINED),
    size=st.sampled_from([19, S, 32]),
    landmarks=st.sampled_from([1, 2]),
    number=st.integers(0, 10**9),
)
def test_every_chain_can_be_followed(level: Level, size: int, landmarks: int, number: int) -> None:
    """From the question over the needle that its landmark needs to the one that the next landmark needs."""
    batch = needle_texts(3, size, landmarks=landmarks).batch(number, 1, level)
    chunks = chunks_of(batch, 0, size)
    assert len(chunks) == level.chunks
    needles = batch.needle_chunks[0].tolist()
    starts = iter(batch.first_digits[0].nonzero().flatten().tolist())
    facts = facts_of(chunks)
    assert len(facts) == text_of(batch.input_ids[0]).count("$")
    asked = Counter[tuple[str, int, bool]]()
    for n, chunk in enumerate(chunks):
        if chunk[-5:-4] != "~":
            assert "~" not in chunk
            assert needles[n] == -1 or chunk == "="
            continue
        assert "$" not in chunk
        place, value = facts[chunk[-4:]]
        assert needles[n] == place < n
        start = next(starts)
        follows = value.isalpha() and not chunks[n + 1].startswith(f"={value}")
        asked[chunk[-4:], 1 + follows, value.isalpha()] += 1
        if follows:
            place, value = facts[value]
            assert place < n
            if landmarks == 2:
                n += 1
                assert (chunks[n], needles[n]) == ("=", place)
        assert chunks[n + 1].startswith(f"={value};")
        assert start == sum(map(len, chunks[: n + 1])) + 1
        weights = batch.loss_weights[0, start - 1 : start + len(value) + 1].tolist()
        assert weights == [0, 3, *[1] * (len(value) - 1), 0]
    assert next(starts, None) is None
    assert max(asked.values(), default=1) == 1
    assert level.spell or not any(spelled and hops == 1 for _, hops, spelled in asked)
    assert level.hops or not any(hops == 2 for _, hops, _ in asked)


def facts_of(chunks: list[str]) -> dict[str, tuple[int, str]]:
    """Of each key the needle's chunk and its value."""
    return {key: (n, value) for n, c in enumerate(chunks) for key, value in re.findall(r"\$(.{4})=(\w+);", c)}


def test_one_landmark_changes_nothing_else() -> None:
    """The same chunks but for those of the second landmarks' cues, in place of which filler ends the text."""
    for level in CHAINED[:5]:
        one, two = (needle_texts(landmarks=n).batch(0, 20, level) for n in (1, 2))
        assert level.hops == 0 or (two.close_chunk.sum(1) > one.close_chunk.sum(1)).any()
        for b in range(20):
            kept = [chunk for chunk in chunks_of(two, b) if chunk != "="]
            chunks = chunks_of(one, b)
            assert chunks[: len(kept)] == kept
            assert not any(set(chunk) & set("$~") for chunk in chunks[len(kept) :])


def test_needles_of_a_chain_stand_in_any_order() -> None:
    """Its first one stands before or after its last one, some needles have no partner, and last ones are more."""
    batch = needle_texts().batch(0, 200, CHAINED[0])
    before, after, firsts, lasts = 0, 0, 0, 0
    for b in range(200):
        facts = facts_of(chunks_of(batch, b))
        for place, value in facts.values():
            firsts += value.isalpha()
            lasts += value.isdigit()
            if value in facts:
                before += place < facts[value][0]
                after += place > facts[value][0]
    assert min(before, after) > 40
    assert firsts - before - after > 50
    assert lasts > 1.2 * firsts


def test_simple_second_keys() -> None:
    """Of one letter no two alike, of two letters in pairs; first keys stay as they are."""
    for letters, pattern in ((1, r"(.)\1\1\1"), (2, r"(.)\1(.)\2")):
        batch = needle_texts().batch(0, 20, Level(64, 1.0, 1.0, 0.0, hops=0.7, letters=letters))
        for b in range(20):
            facts = facts_of(chunks_of(batch, b))
            second = [key for key, (_, value) in facts.items() if value.isdigit()]
            second += [value for _, value in facts.values() if value.isalpha()]
            assert all(re.fullmatch(pattern, key) for key in second)
            first = [key for key, (_, value) in facts.items() if value.isalpha()]
            assert any(len(set(key)) > 2 for key in first)


def test_the_shares_of_questions() -> None:
    """Where all is there to be asked, chunks ask along chains as often as the level says."""
    found = Counter[str]()
    batch = needle_texts(landmarks=2).batch(0, 100, Level(64, 1.0, 1.0, 0.0, hops=0.3, spell=0.5))
    for b in range(100):
        chunks = chunks_of(batch, b)
        for n, chunk in enumerate(chunks[:40]):
            if chunk[-5:-4] == "~":
                after = chunks[n + 1]
                found["two" if after == "=" else "spelled" if after[1].isalpha() else "one"] += 1
    total = sum(found.values())
    assert 0.2 < found["two"] / total < 0.4
    assert 0.25 < found["spelled"] / total < 0.45


@pytest.mark.parametrize(
    ("level", "landmarks", "expected"),
    [
        (CHAINED[1], 1, "39586bf0530f99a3"),
        (CHAINED[1], 2, "63edc306656ab1fe"),
        (CHAINED[5], 1, "cf830a5287568013"),
        (CHAINED[5], 2, "54ca9610145c8ebf"),
    ],
)
def test_chained_texts_are_those_of_earlier_versions(level: Level, landmarks: int, expected: str) -> None:
    """benchmarks/two_hop.json was measured on such."""
    batch = needle_texts(7, filler_weight=0.25, landmarks=landmarks).batch(100, 20, level)
    assert digest([getattr(batch, f.name) for f in fields(batch)]) == expected


@pytest.mark.parametrize("landmarks", [0, 3])
def test_landmarks_of_a_question(landmarks: int) -> None:
    with pytest.raises(ValueError, match=f"^landmarks: expected 1 or 2, got {landmarks}"):
        needle_texts(landmarks=landmarks)
