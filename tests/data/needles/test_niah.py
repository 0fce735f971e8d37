"""Needles to fine-tune on, read back from their tokens alone."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.data.counts import assert_equally_likely
from trailmark.data.corpus import load_tokenizer, tokenize, tokenize_parts
from trailmark.data.needles.formats import alphabet
from trailmark.data.needles.niah import NiahTexts, occurrences
from trailmark.data.shards import Corpus
from trailmark.models.grid import lay_out

BYTES = load_tokenizer()
PROSE = " ".join(f"Chapter {n}: on the {n % 7}th day, {n * n} men." for n in range(400))  # without "|"
HAYSTACK = Corpus.of_tokens(tokenize([PROSE], BYTES))

SETTINGS: list[dict[str, Any]] = [
    {"hops": 1},
    {"hops": 1, "value_tokens": 1},
    {"hops": 2, "answer_weight": 7.0},
    {"hops": 1, "values": "digits"},
    {"hops": 2},
    {"hops": 1, "chains": 6},
    {"hops": 1, "distractors": 3, "num_landmarks": 2},
    {"hops": 2, "chains": 1, "num_landmarks": 2},
    {"hops": 2, "chains": 3, "distractors": 4, "value_tokens": 2},
    {"hops": 4, "chains": 2, "distractors": 1, "values": "digits", "num_landmarks": 2},
]


def niah(length: int = 700, chunk_size: int = 32, seed: int = 0, **rest: Any) -> NiahTexts:
    return NiahTexts(BYTES, HAYSTACK, length, chunk_size, seed, **rest)


def characters(ids: Tensor) -> str:
    """One character for each token, whatever the token: its number, and so that ASCII reads as it is."""
    return "".join(chr(int(i) - BYTES.offset) for i in ids)


def read(text: str, value_tokens: int) -> tuple[list[tuple[int, str, str]], list[str], int]:
    """Needles (place, from, to), the question's values in their order, and where the question begins.

    The passkey's needle leads from "" to it.
    """
    value = f".{{{value_tokens}}}"
    if question := re.search(rf"\|What is the passkey\? The passkey is({value})\Z", text, re.DOTALL):
        found = re.finditer(rf"\|The passkey is:({value})\|", text, re.DOTALL)
        return [(m.start(), "", m[1]) for m in found], ["", question[1]], question.start()
    found = re.finditer(rf"\|DEF ({value})->({value})\|", text, re.DOTALL)
    needles = [(m.start(), m[1], m[2]) for m in found]
    question = re.search(rf"\|The path from ({value}) is({value}(?:,{value})*)\Z", text, re.DOTALL)
    assert question, "no question at the text's end"
    path = [question[2][n : n + value_tokens] for n in range(0, len(question[2]), value_tokens + 1)]
    return needles, [question[1], *path], question.start()


@settings(max_examples=100)
@given(
    how=st.sampled_from(SETTINGS),
    length=st.integers(850, 1100),
    chunk_size=st.sampled_from([1, 2, 7, 32, 63, 64]),
    any_phase=st.booleans(),
    number=st.integers(0, 2**62),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_text_says_what_its_labels_claim(
    how: dict[str, Any],
    length: int,
    chunk_size: int,
    any_phase: bool,
    number: int,
    seed: int,
) -> None:
    texts = niah(length, chunk_size, seed, any_phase=any_phase, **how)
    batch = texts.batch(number, 1)
    ids, close = batch["input_ids"][0], batch["close_chunk"][0]
    text = characters(ids)
    assert len(text) == length
    width = texts._value_tokens
    needles, asked, question = read(text, width)

    # needles: as many as asked for, whole, apart, before the last two chunks
    hops, default = how["hops"], 1 if how["hops"] == 1 else 2
    chains, distractors = how.get("chains", default), how.get("distractors", 0)
    assert len(needles) == chains * hops + distractors
    starts = [place for place, _, _ in needles]
    ends = [place + texts.needle_length for place in starts]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert ends[-1] <= min(question, length - 2 * chunk_size)
    assert text.count("|") == 2 * len(needles) + 1
    assert sorted(batch["needles"][0].tolist()) == starts

    # from the first variable, the needles lead to the answer; their places come first and in that order
    leads = {source: (place, target) for place, source, target in needles}
    assert len(leads) == len(needles)
    value, path, places = asked[0], [], []
    for _ in range(hops):
        place, value = leads[value]
        path.append(value)
        places.append(place)
    assert path == asked[1:]
    assert batch["needles"][0, :hops].tolist() == places
    # chains that are not asked for are as long; distractors lead nowhere
    sources, targets = {source for _, source, _ in needles}, {target for _, _, target in needles}
    assert len(sources - targets) == chains + distractors
    lengths = []
    for first in sources - targets:
        steps, at = 0, first
        while at in leads:
            steps, at = steps + 1, leads[at][1]
        lengths.append(steps)
    assert sorted(lengths) == sorted([hops] * chains + [1] * distractors)

    # the answer stands in needles and after the cue, nowhere else
    cue = text.rindex(" is") + 3
    for n, value in enumerate(path):
        often = sum((value in (a, b)) for _, a, b in needles)
        assert often == (2 if n < hops - 1 else 1)
        assert len(re.findall(f"(?={re.escape(value)})", text)) == often + 1
    answers = batch["answers"][0]
    assert answers.nonzero()[:, 0].tolist() == list(range(cue, length))
    assert texts.answer_length == length - cue

    # around needles and question stands one unbroken slice of the haystack
    rest = text[:question]
    for start in reversed(starts):
        rest = rest[:start] + rest[start + texts.needle_length :]
    assert rest in PROSE

    # loss on all that something predicts
    labels, weights = batch["labels"][0], batch["loss_weights"][0]
    assert labels[0] == -100
    assert weights[0] == 0
    assert torch.equal(labels[1:], ids[1:])
    assert torch.equal(weights[1:], torch.where(answers, how.get("answer_weight", 1.0), 1.0)[1:])

    # landmarks, as a model lays them out: right before the cue, and right after it if there are two
    marks = close.nonzero()[:, 0].tolist()
    expected = [cue - 4, cue - 1][: how.get("num_landmarks", 1)]
    early = [mark for mark in marks if mark not in expected]
    assert set(expected) <= set(marks)
    assert len(early) <= any_phase
    assert all(mark < chunk_size - 1 for mark in early)
    assert len(marks) <= how.get("num_landmarks", 1) + any_phase
    grid = lay_out(length, chunk_size, close_chunk=close[None].numpy())
    token = np.cumsum(~grid.is_landmark[0]) - 1
    for mark in expected:
        assert grid.is_landmark[0][np.flatnonzero(token == mark)].tolist() == [False, True]


@settings(max_examples=30)
@given(
    how=st.sampled_from(SETTINGS),
    first=st.integers(0, 2**40),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
def test_a_text_does_not_depend_on_its_batch(how: dict[str, Any], first: int, counts: list[int]) -> None:
    texts = niah(**how, any_phase=True)
    whole = texts.batch(first, sum(counts))
    parts, done = [], first
    for count in counts:
        parts.append(niah(**how, any_phase=True).batch(done, count))
        done += count
    for key, x in whole.items():
        assert torch.equal(torch.cat([part[key] for part in parts]), x), key
        assert x.shape[0] == sum(counts)


def test_kinds_of_what_a_batch_holds() -> None:
    batch = niah(hops=2, distractors=1).batch(3, 2)
    assert {key: (x.dtype, tuple(x.shape)) for key, x in batch.items()} == {
        "input_ids": (torch.int64, (2, 700)),
        "labels": (torch.int64, (2, 700)),
        "loss_weights": (torch.float32, (2, 700)),
        "close_chunk": (torch.bool, (2, 700)),
        "answers": (torch.bool, (2, 700)),
        "needles": (torch.int64, (2, 5)),
    }


def test_golden_text() -> None:
    """Never changes silently: a run that goes on sees the texts that it would have seen."""
    batch = NiahTexts(BYTES, HAYSTACK, 120, 8, 5, values="digits").batch(2, 1)
    assert characters(batch["input_ids"][0]) == GOLDEN


GOLDEN = (
    "ter 319: on|The passkey is:7405574054| the 4th day, 101761 men. Chapter 32"
    "|What is the passkey? The passkey is7405574054"
)


# What was wrong in the published generator


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint16])
def test_numpys_integers_are_seeds_and_sample_numbers(kind: Any) -> None:
    """random.Random(np.int32(3)) raises a TypeError from Python 3.11 on."""
    a, b = niah(seed=3).batch(4, 2), niah(seed=kind(3)).batch(kind(4), kind(2))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_neither_reads_nor_moves_global_generators() -> None:
    def states() -> list[Any]:
        return [random.getstate(), *map(str, np.random.get_state()), torch.get_rng_state().tolist()]

    texts = []
    for seed in (0, 1):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        before = states()
        texts.append(niah(hops=2).batch(0, 3)["input_ids"])
        assert states() == before
    assert torch.equal(*texts)


def test_nothing_of_the_haystack_is_lost() -> None:
    """Each of its slices is drawn, the first and the last too, and none of a text's filler is cut off."""
    texts = niah(length=200, chunk_size=8)
    filler = 200 - texts.needle_length - len("|What is the passkey? The passkey is") - 10
    small = Corpus.of_tokens(np.arange(3, 3 + filler + 3, dtype=np.int32))
    batch = NiahTexts(BYTES, small, 200, 8, values="digits").batch(0, 200)
    firsts = []
    for row, place in zip(batch["input_ids"], batch["needles"][:, 0], strict=True):
        text = row.tolist()
        rest = (text[:place] + text[place + texts.needle_length :])[:filler]
        assert rest == list(range(rest[0], rest[0] + filler))
        firsts.append(rest[0])
    assert_equally_likely([firsts.count(first) for first in range(3, 7)])


# Chance


def test_needles_lie_anywhere_and_the_phase_is_any() -> None:
    texts = niah(length=330, chunk_size=8, any_phase=True)
    batch = texts.batch(0, 1000)
    bins = 330 - 8 * 2 - texts.needle_length + 1
    stop = 330 - len("|What is the passkey? The passkey is") - 10 - texts.needle_length + 1
    assert stop < bins
    places = batch["needles"][:, 0]
    assert int(places.max()) < stop
    assert_equally_likely(np.histogram(places, bins=20, range=(0, stop))[0].tolist())
    cue = 330 - texts.answer_length - 3
    phases = []
    for row in batch["close_chunk"]:
        grid = lay_out(330, 8, close_chunk=row[None].numpy())
        chunk = grid.chunk[0][~grid.is_landmark[0]]
        phases.append(int((chunk == chunk[cue - 1]).sum()))
    assert_equally_likely([phases.count(phase) for phase in range(1, 9)])


def test_which_chain_is_asked_for_says_nothing_about_its_place() -> None:
    order = niah(length=400, chunk_size=8, hops=2).batch(0, 600)["needles"].argsort(1)
    assert order.shape == (600, 4)
    assert_equally_likely([int((order[:, n] == 0).sum()) for n in range(4)])
    assert_equally_likely([int((order[:, n] == 1).sum()) for n in range(4)])


def test_samples_and_seeds_differ() -> None:
    a, b = niah().batch(0, 20)["input_ids"], niah(seed=1).batch(0, 20)["input_ids"]
    assert len(torch.cat([a, b]).unique(dim=0)) == 40


# Tokens


def test_values_hold_no_special_tokens_and_no_separators() -> None:
    ids = alphabet(BYTES, "tokens")
    assert set(ids.tolist()) == {3 + byte for byte in range(256) if chr(byte) not in "|->,"}
    table = {"[EOS]": 0, "[UNK]": 1, "[MY]": 2, "|": 3, "->": 4, ",": 5, "word": 6, "is": 9}
    model = Tokenizer(models.WordLevel(table, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="[EOS]", unk_token="[UNK]")
    tokenizer.add_special_tokens({"additional_special_tokens": ["[MY]"]})
    assert alphabet(tokenizer, "tokens").tolist() == [6, 9]  # 7 and 8 are no tokens
    assert alphabet(BYTES, "digits").tolist() == [ord(c) + 3 for c in "0123456789"]


def test_the_cue_is_tokenized_as_it_stands_in_text() -> None:
    """A tokenizer that begins a text with a mark of its own would give the cue two tokens that no text holds."""
    table = {c: i for i, c in enumerate("▁abs:")} | {"▁b": 6, "▁:": 7, "s:": 8}
    model = Tokenizer(models.BPE(table, [("▁", "b"), ("▁", ":"), ("s", ":")]))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model)
    lead, cue = tokenize_parts(["a", " b"], tokenizer)
    assert tokenizer.convert_ids_to_tokens(lead) == ["▁", "a"]
    assert tokenizer.convert_ids_to_tokens(cue) == ["▁b"]  # alone it is ▁, ▁b
    assert tokenize([" b"], tokenizer).tolist() != cue.tolist()
    # where the cue's first character is part of the token before, both are tokenized alone
    lead, cue = tokenize_parts(["s", ":"], tokenizer)
    assert tokenizer.convert_ids_to_tokens(lead) == ["▁", "s"]
    assert tokenizer.convert_ids_to_tokens(cue) == ["▁:"]


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=12), st.lists(st.integers(0, 2), min_size=1, max_size=4)
)
def test_occurrences_are_counted_one_by_one(ids: list[int], value: list[int]) -> None:
    assume(len(value) <= len(ids))
    expected = sum(ids[n : n + len(value)] == value for n in range(len(ids)))
    assert occurrences(np.array(ids), np.array(value)) == expected


@pytest.mark.skipif("TRAILMARK_DATA" not in os.environ, reason="needs GPT-2's tokenizer")
def test_the_papers_settings() -> None:
    tokenizer = load_tokenizer(str(Path(os.environ["TRAILMARK_DATA"]) / "tokenizer" / "gpt2"))
    essay = (Path(os.environ["TRAILMARK_DATA"]) / "essays" / "pg575_bacon_essays.txt").read_text()
    corpus = Corpus.of_tokens(tokenize([essay], tokenizer))
    single = NiahTexts(tokenizer, corpus, 16384, 64)
    text = single.batch(0, 1)
    value = text["input_ids"][0, -10:]
    place = int(text["needles"])
    needle = text["input_ids"][0, place : place + single.needle_length]
    assert torch.equal(needle[-11:-1], value)
    assert tokenizer.decode(needle[:-11]) == "|The passkey is:"
    assert tokenizer.decode(text["input_ids"][0, -21:-10]) == "|What is the passkey? The passkey is"
    assert text["close_chunk"].nonzero().tolist() == [[0, 16384 - 12]]
    assert single.answer_length == 10
    two = NiahTexts(tokenizer, corpus, 16384, 64, hops=2)
    assert two.batch(0, 1)["needles"].shape == (1, 4)
    assert two.answer_length == 11


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hops": 0}, r"^hops: expected 1 or more, got 0"),
        ({"chains": 0}, r"^chains: expected 1 or more"),
        ({"distractors": -1}, r"^distractors: expected 0 or more"),
        ({"value_tokens": 0}, r"^value_tokens: expected 1 or more"),
        ({"chunk_size": 0}, r"^chunk_size: expected 1 or more"),
        ({"seed": -1}, r"^seed: expected 0 or more"),
        ({"num_landmarks": 0}, r"^num_landmarks: expected 1 or 2, got 0"),
        ({"num_landmarks": 3}, r"^num_landmarks: "),
        ({"values": "words"}, r"^values: expected 'tokens' or 'digits', got 'words'"),
        (
            {"length": 90},
            r"^training\.context_length: expected at least 91 tokens for 1 needles of 27 tokens and 64 tokens after",
        ),
        (
            {"length": 100, "hops": 4},
            r"^training\.context_length: expected at least \d+ tokens for 8 needles",
        ),
        ({"length": 20000}, r"^data: expected a haystack of at least 19927 tokens for texts of 20000"),
        (
            {"value_tokens": 1, "chains": 4, "values": "digits"},
            r"^chains: expected at most 10 different values in a text, of 1 tokens each, got 12",
        ),
        (
            {"value_tokens": 1, "values": "digits"},
            r"^data: expected text that does not hold the values",
        ),
    ],
)
def test_what_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        niah(**({"hops": 2} if "chains" in options else {}) | options)


@pytest.mark.parametrize("any_phase", [False, True])
def test_the_least_length_does(any_phase: bool) -> None:
    with pytest.raises(ValueError, match=r"^training\.context_length: ") as error:
        niah(64, any_phase=any_phase, hops=2)
    found = re.search(r"at least (\d+) tokens", str(error.value))
    assert found
    niah(int(found[1]), any_phase=any_phase, hops=2).batch(0, 50)
    with pytest.raises(ValueError, match=r"^training\.context_length: "):
        niah(int(found[1]) - 1, any_phase=any_phase, hops=2)


def test_a_tokenizer_without_digits_has_no_digits() -> None:
    model = Tokenizer(models.WordLevel({"a": 0, "?": 1, "0": 2}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="?")
    with pytest.raises(
        ValueError, match=r"^values: expected a tokenizer with one token for each digit, got 2 of 10"
    ):
        alphabet(tokenizer, "digits")
