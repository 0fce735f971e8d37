"""Needles, places and questions of the suite, read back token by token."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trailmark.data.corpus import load_tokenizer, tokenize
from trailmark.data.draws import Draws
from trailmark.data.needles import tasks as needle_tasks
from trailmark.data.needles.formats import Marks, Name, Sentences
from trailmark.data.needles.haystacks import Filler, Haystack, Needle, occurring
from trailmark.data.needles.niah import occurrences
from trailmark.data.needles.tasks import KINDS, NeedleTask, Question, Trial, make_task
from trailmark.data.needles.words import WORDS
from trailmark.data.shards import Corpus

BYTES = load_tokenizer()
# lower case and digits, $ and ~: what needles are made of stands in it too
PROSE = "the old $ boat ~ sees 4 rivers, and 12 of them (or 345?) sing; a DEF is | not -> a word = 9.\n" * 40
TEXT = tokenize([PROSE], BYTES)


def task_of(**changes: Any) -> NeedleTask:
    made: dict[str, Any] = {
        "format": "marks",
        "kind": "single",
        "needles": 1,
        "hops": 2,
        "distractors": 0,
        "values": None,
        "landmarks": 1,
        "any_phase": True,
        "straddle": None,
    }
    return make_task(BYTES, **(made | changes))


def trials_of(
    task: NeedleTask,
    length: int,
    S: int,
    depths: Any = (None,),
    count: int = 2,
    seed: int = 0,
    sight: int = 1,
) -> tuple[Haystack, dict[float | None, list[Trial]]]:
    filler = Filler(TEXT, task.format.replaced)
    haystack = Haystack(filler, 17, task.chunks(length, S), S)
    return haystack, task.lay(haystack, length, haystack.chunks - sight, depths, count, seed, 0)


def whole_text(haystack: Haystack, trial: Trial, question: Question) -> np.ndarray[Any, Any]:
    rows = haystack.holding(trial.needles)[0 : haystack.chunks].numpy().reshape(-1)
    return np.concatenate([rows, question.prompt, question.answer])


def all_questions(found: dict[float | None, list[Trial]]) -> Iterator[tuple[float | None, Trial, Question]]:
    for depth, trials in found.items():
        for trial in trials:
            for question in trial.questions:
                yield depth, trial, question


@settings(max_examples=25)
@given(
    st.sampled_from(("marks", "sentences", "paper")),
    st.sampled_from(KINDS),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 5),
    st.sampled_from((1, 2)),
    st.sampled_from((9, 16, 40)),
    st.booleans(),
    st.sampled_from((None, True, False)),
    st.sampled_from((None, 0.0, 0.3, 1.0)),
    st.integers(0, 30),
)
def test_needles_and_questions_stand_where_they_should(
    format: str,
    kind: Any,
    needles: int,
    hops: int,
    distractors: int,
    landmarks: int,
    S: int,
    any_phase: bool,
    straddle: bool | None,
    depth: float | None,
    more: int,
) -> None:
    task = task_of(
        format=format,
        kind=kind,
        needles=1 if kind == "single" else needles,
        hops=hops,
        distractors=distractors,
        landmarks=landmarks,
        any_phase=any_phase,
        straddle=straddle,
    )
    sight = 2
    length = (task.least_chunks(S) + sight + 1) * S + task.sizes[1] + more
    haystack, found = trials_of(task, length, S, (depth,), 1, seed=more, sight=sight)
    for _, trial, question in all_questions(found):
        ids = whole_text(haystack, trial, question)
        assert len(ids) == length
        assert len(trial.needles) == task.num_needles
        # whole, apart from each other, out of the window's sight
        covered: Counter[int] = Counter()
        for needle in trial.needles:
            assert np.array_equal(ids[needle.start : needle.stop], needle.tokens)
            assert needle.start >= 0
            assert needle.stop <= (haystack.chunks - sight) * S
            covered.update(range(needle.start, needle.stop))
        assert set(covered.values()) == {1}
        if not task.straddle and max(len(needle.tokens) for needle in trial.needles) <= S:
            touched = [needle.chunks(S) for needle in trial.needles]
            assert all(len(chunks) == 1 for chunks in touched)
            assert len({chunks[0] for chunks in touched}) == len(touched)
        # all else is the haystack
        plain = haystack[0 : haystack.chunks].numpy().reshape(-1)
        left = np.array([place for place in range(len(plain)) if place not in covered])
        assert np.array_equal(ids[left], plain[left])
        # values stand in the needles that are asked for and in the answer, and nowhere else
        for n in question.gold[-1]:
            first, stop = trial.needles[n].value
            value = trial.needles[n].tokens[first:stop]
            assert occurrences(ids, value) == 2
            assert occurrences(question.answer, value) == 1
        for needle in trial.needles:
            assert occurrences(ids, needle.tokens) == 1
        # the question is the end of the prompt, its landmarks near it
        assert len(question.landmarks) == landmarks
        assert all(mark >= S for mark in question.marks[question.early is not None :])
        assert question.marks == sorted(set(question.marks))
        if question.early is not None:
            assert question.early < S - 1
        assert len(question.closings(S)) == landmarks
        # the answer's first token is predicted behind a landmark (the paper's second one serves later ones)
        assert question.landmarks[0 if format == "paper" else -1] < len(question.prompt) - 1
        begun = 0 if question.early is None else question.early + 1
        if not any_phase:
            assert (question.landmarks[0] + 1 - begun) % S == 0


def test_questions_in_words() -> None:
    shown = {}
    for format, kind in product(("marks", "sentences", "paper"), KINDS):
        for landmarks in (1, 2):
            task = task_of(
                format=format,
                kind=kind,
                needles=1 if kind == "single" else 2,
                landmarks=landmarks,
                values="numbers",
            )
            _, found = trials_of(task, 1200, 40, count=1)
            trial = found[None][0]
            question = trial.questions[0]
            text = BYTES.decode(question.prompt.tolist())
            needles = [BYTES.decode(needle.tokens.tolist()) for needle in trial.needles]
            shown[format, kind, landmarks] = needles, text, BYTES.decode(question.answer.tolist())
            begun = [0, *(mark + 1 for mark in question.landmarks), len(question.prompt)]
            pieces = [BYTES.decode(question.prompt[a:b].tolist()) for a, b in pairwise(begun)]
            if format == "sentences":
                assert pieces[-1] in (" is", " are", " leads to")
                assert landmarks == 1 or pieces[0].endswith(f"{pieces[1]}{pieces[2]}?")
            else:
                assert pieces[1:] == {"marks": ["=", "="], "paper": [" is", ""]}[format][:landmarks]
    needles, text, answer = shown["marks", "hops", 1]
    assert needles[0][1:5] == text[-5:-1]  # ~AAAA= asks for $AAAA=BBBB;
    assert text[-6] == "~"
    assert text[-1] == "="
    assert needles[0][6:10] == needles[1][1:5]
    assert needles[1] == f"${needles[0][6:10]}={answer};"
    assert shown["marks", "hops", 2][1].endswith(f"~{shown['marks', 'hops', 2][0][0][1:5]}==")
    needles, text, answer = shown["marks", "multi-query", 1]
    assert text.endswith(f"~{needles[0][1:5]}~{needles[1][1:5]}=")
    assert answer == f"{needles[0][6:11]};{needles[1][6:11]}"
    needles, text, answer = shown["sentences", "single", 1]
    key = needles[0].split()[4]
    assert needles == [f" The secret number of {key} is{answer}."]
    assert text.endswith(f" The secret number of {key} is")
    key = shown["sentences", "single", 2][0][0].split()[4]
    asked = f" The secret number of {key} is"
    assert shown["sentences", "single", 2][1].endswith(f"{asked}?{asked}")
    needles, text, answer = shown["sentences", "hops", 1]
    chain = [needle.removesuffix(".").split(" leads to ") for needle in needles]
    assert text.endswith(f" In 2 steps{chain[0][0]} leads to")
    assert chain[0][1] == chain[1][0].strip()
    assert answer == f" {chain[1][1]}"
    needles, text, answer = shown["sentences", "multi-value", 1]
    assert len({needle.split()[4] for needle in needles}) == 1
    assert text.endswith(f" The secret numbers of {needles[0].split()[4]} are")
    assert sorted(answer.strip().split(", ")) == sorted(needle.split()[-1][:-1] for needle in needles)
    needles, text, answer = shown["paper", "single", 1]
    assert needles == [f"|The passkey is:{answer}|"]
    assert text.endswith("|What is the passkey? The passkey is")
    needles, text, answer = shown["paper", "hops", 2]
    a, b = needles[0].removeprefix("|DEF ").removesuffix("|").split("->")
    assert text.endswith(f"|The path from {a} is")
    assert answer == f"{b},{needles[1].split('->')[1][:-1]}"


@pytest.mark.parametrize("straddle", [False, True])
def test_depths(straddle: bool) -> None:
    task = task_of(kind="multi-key", needles=3, straddle=straddle)
    depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    haystack, found = trials_of(task, 2000, 20, depths, 10, sight=3)
    last = haystack.chunks - 3
    for depth, trial, question in all_questions(found):
        assert question.gold == ((0,),)  # only what lies at the depth is asked
        needle = trial.needles[0]
        if straddle:
            assert needle.start == round(depth * (last * 20 - len(needle.tokens)))
        else:
            assert needle.chunks(20) == [round(depth * (last - 1))]
    assert all(len(trial.questions) == 1 for trials in found.values() for trial in trials)
    _, anywhere = trials_of(task, 2000, 20, (None,), 10, sight=3)
    assert all(len(trial.questions) == 3 for trial in anywhere[None])


@pytest.mark.parametrize("begin", [1, 4, 19, 20, 33])
@pytest.mark.parametrize("straddle", [False, True])
def test_needles_lie_behind_what_a_haystack_begins_with(begin: int, straddle: bool) -> None:
    """Whole in a chunk of their own where they do not straddle, in as few chunks as they need."""
    task = task_of(kind="multi-key", needles=3, straddle=straddle)
    filler = Filler(TEXT, task.format.replaced)
    longest, least = task.sizes[0], task.least_chunks(20, begin)
    haystack = Haystack(filler, 17, least + 3, 20, begin=tuple(filler.read(17, begin).tolist()))
    for last in (least, least + 3):
        found = task.lay(haystack, 2000, last, (0.0, None, 1.0), 20, 0)
        for depth, trial, _ in all_questions(found):
            needles = sorted(trial.needles, key=lambda needle: needle.start)
            assert needles[0].start >= begin
            assert needles[-1].stop <= last * 20
            assert all(one.stop <= other.start for one, other in pairwise(needles))
            first = trial.needles[0]
            if not straddle:
                assert len({*(chunk for needle in needles for chunk in needle.chunks(20))}) == 3
            elif depth == 0.0:
                assert first.start == begin
            if depth == 0.0:
                assert first.start < begin + 20 + longest
            if depth == 1.0:
                assert first.chunks(20)[-1] == last - 1


def test_a_trial_does_not_depend_on_the_depths_beside_it() -> None:
    task = task_of(format="sentences", distractors=2)
    _, several = trials_of(task, 1500, 16, (0.0, None, 0.5), 3)
    for depth, trials in several.items():
        _, alone = trials_of(task, 1500, 16, (depth,), 3)
        assert digest(alone[depth]) == digest(trials)


def test_a_question_falls_on_each_phase() -> None:
    S = 16
    _, found = trials_of(task_of(), 500, S, count=300)
    phases = Counter(
        (q.landmarks[0] - (-1 if q.early is None else q.early) - 1) % S for _, _, q in all_questions(found)
    )
    assert set(phases) == set(range(S))
    # 300 draws of 16: none of 10,000 fair ones is rarer or more frequent
    assert 4 < min(phases.values()) <= max(phases.values()) < 38


def digest(trials: list[Trial]) -> str:
    hasher = hashlib.sha256()
    for trial in trials:
        for needle in trial.needles:
            hasher.update(repr((needle.start, needle.tokens.tolist(), needle.value)).encode())
        for q in trial.questions:
            hasher.update(repr((q.prompt.tolist(), q.marks, q.answer.tolist(), q.text, q.gold)).encode())
    return hasher.hexdigest()[:16]


GOLDEN = {
    ("marks", "single"): "0a938be0cadb29ba",
    ("marks", "hops"): "bcb0dd0fd49ca437",
    ("sentences", "multi-value"): "874c4a1367b0022a",
    ("sentences", "hops"): "2da87da3e629db07",
    ("paper", "multi-query"): "93aad6815d4620d3",
    ("paper", "single"): "2ece3f4bb7b9488c",
}


@pytest.mark.parametrize(("format", "kind"), GOLDEN)
def test_the_same_seed_gives_the_same_trials_everywhere(format: str, kind: Any) -> None:
    """Hashes that were taken once: no Python or numpy version may change what is asked."""
    task = task_of(format=format, kind=kind, needles=1 if kind == "single" else 2, distractors=3)
    _, found = trials_of(task, 1500, 20, (None, 0.5), 3, seed=7)
    assert digest(found[None] + found[0.5]) == GOLDEN[format, kind]
    _, other = trials_of(task, 1500, 20, (None, 0.5), 3, seed=8)
    assert digest(other[None] + other[0.5]) != GOLDEN[format, kind]


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_distractors_are_of_the_kinds_that_a_chain_has(hops: int) -> None:
    task = task_of(kind="hops", hops=hops, distractors=4 * hops)
    _, found = trials_of(task, 3000, 20)
    for trial in found[None]:
        texts = [BYTES.decode(needle.tokens.tolist()) for needle in trial.needles]
        ends = [text[6:-1].isdigit() for text in texts]
        assert sum(ends) == 5
        keys = [text[1:5] for text in texts]
        assert len(set(keys)) == len(keys)
        others = [text[6:-1] for text, end in zip(texts[hops:], ends[hops:], strict=True) if not end]
        assert not set(others) & set(keys)  # they lead nowhere


def test_values_that_the_text_holds_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but two of the 30,240 values stand in the text."""
    digits = np.array(np.meshgrid(*[np.arange(10)] * 5, indexing="ij")).reshape(5, -1).T
    digits = digits[np.array([len(set(row)) == 5 for row in digits.tolist()])]
    kept = digits[: len(digits) - 2]
    filler = Filler(tokenize([" ".join("".join(map(str, row)) for row in kept.tolist())], BYTES))
    task = task_of()
    length = len(filler)
    haystack = Haystack(filler, 0, task.chunks(length, 32), 32)
    with monkeypatch.context() as fewer:
        fewer.setattr(needle_tasks, "_ATTEMPTS", 5)
        with pytest.raises(ValueError, match=r"text: .* in 5 attempts"):
            task.lay(haystack, length, 100, (None,), 1, 0)
    half = Filler(tokenize([" ".join("".join(map(str, row)) for row in kept[::2].tolist())], BYTES))
    haystack = Haystack(half, 0, task.chunks(len(half), 32), 32)
    for _, trial, question in all_questions(task.lay(haystack, len(half), 100, (None,), 8, 0)):
        assert occurrences(whole_text(haystack, trial, question), question.answer) == 2


@pytest.fixture(scope="module")
def merging() -> Any:
    """A tokenizer whose tokens are parts of words with the space before them, and groups of digits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    numbers = [
        f"the secret numbers of {a}-{b} are {n * 7919 % 1000000}." for n, (a, b) in enumerate(pairwise(WORDS))
    ]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(numbers, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    ("kind", "values"),
    [("single", "numbers"), ("multi-value", "numbers"), ("multi-query", "words"), ("hops", "words")],
)
def test_sentences_in_other_tokens(merging: Any, kind: Any, values: str) -> None:
    """What stands there reads as it should, exactly as long as it should, whatever the tokens."""
    needles = 1 if kind == "single" else 3
    task = make_task(merging, "sentences", kind, needles, 2, 2, values, 2, True, None)
    assert task.sizes[1] < 150
    filler = Filler(tokenize([PROSE], merging))
    haystack = Haystack(filler, 3, task.chunks(900, 16), 16)
    for _, trial, question in all_questions(task.lay(haystack, 900, haystack.chunks - 2, (None,), 2, 1)):
        ids = whole_text(haystack, trial, question)
        assert len(ids) == 900
        text = merging.decode(ids.tolist())
        verb = (
            " leads to "
            if kind == "hops"
            else (" are " if kind in ("multi-value", "multi-query") else " is ")
        )
        assert text.endswith(f"{verb}{question.text}")
        assert question.right([], merging.decode(question.answer.tolist()))
        for needle in trial.needles:
            shown = merging.decode(needle.tokens.tolist())
            first, stop = needle.value
            value = merging.decode(needle.tokens[first:stop].tolist())
            assert shown.endswith(f"{value}.")
            assert shown in text
        first, second = question.landmarks
        asked = merging.decode(question.prompt[first + 1 : second + 1].tolist())
        assert merging.decode(question.prompt[second + 1 :].tolist()) == verb.rstrip()
        assert merging.decode(question.prompt[: first + 1].tolist()).endswith(f"{asked}{verb.rstrip()}?")


# --- streams --------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data())
def test_occurring(data: st.DataObject) -> None:
    ids = np.array(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=60)), np.int32)
    sequences = data.draw(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), max_size=8))
    arrays = [np.array(sequence) for sequence in sequences]
    start, count = data.draw(st.integers(0, 99)), data.draw(st.integers(0, 150))
    text = np.take(ids, np.arange(start, start + count), mode="wrap")
    expected = {n for n, x in enumerate(arrays) if len(x) <= count and occurrences(text, x)}
    assert occurring(Filler(ids), start, count, arrays) == expected


def test_occurring_across_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trailmark.data.needles.haystacks._PIECE", 5)
    ids = np.arange(30, dtype=np.int32)
    sequences = [np.arange(n, n + 4) for n in range(27)] + [np.array([4, 6])]
    assert occurring(Filler(ids), 0, 30, sequences) == set(range(27))


def test_filler_begins_again_and_replaces() -> None:
    corpus = Corpus.of_tokens(np.arange(7, dtype=np.int32))
    for text in (np.arange(7, dtype=np.int32), corpus):
        filler = Filler(text, {2: 50, 3: 51})
        assert filler.read(5, 12).tolist() == [5, 6, 0, 1, 50, 51, 4, 5, 6, 0, 1, 50]
        assert filler.fingerprint() == corpus.fingerprint
    with pytest.raises(ValueError, match="text: expected tokens to hide needles in, got none"):
        Filler(np.zeros(0, np.int32))


def test_a_haystack_reads_only_what_is_asked_for() -> None:
    class Stream:
        most = 0

        def __len__(self) -> int:
            return 1 << 40

        def read(self, start: int, stop: int) -> Any:
            self.most = max(self.most, stop - start)
            return np.arange(start, stop) % 251

    stream = Stream()
    haystack = Haystack(Filler(stream), (1 << 40) - 40, 1 << 30, 32)
    needle = Needle(60, np.full(10, 300), (2, 4))
    chunks, texts = haystack.changed([needle])
    assert (chunks.tolist(), needle.value_chunks(32)) == ([1, 2], [1])
    assert (texts == 300).sum() == 10
    assert texts[0, -4:].tolist() == [300] * 4
    assert haystack[5:7].tolist() == haystack.holding([needle])[5:7].tolist()
    assert stream.most <= 64


# --- answers --------------------------------------------------------------------------------------------------


def question_of(text: str, parts: tuple[str, ...], fixed: bool, any_order: bool) -> Question:
    answer = tokenize([text], BYTES).astype(np.int64)
    size = len(parts[0])
    return Question(answer[:1], (0,), None, answer, parts, text, ((0,),), fixed, any_order, size)


@pytest.mark.parametrize(
    ("text", "fixed", "any_order", "written", "right"),
    [
        ("12345", True, False, "12345", True),
        ("12345", True, False, "1234567", True),  # what comes behind is not asked
        ("12345", True, False, "1234", False),
        ("12345", True, False, "12346", False),
        ("12;34;56", True, True, "34;56;12", True),
        ("12;34;56", True, True, "34;56;34", False),
        ("12;34;56", True, True, "34,56;12", False),
        ("12;34;56", True, False, "34;56;12", False),
        ("481735", False, False, " 481735.", True),
        ("481735", False, False, "481735", True),
        ("481735", False, False, " 4817356", False),
        ("481735", False, False, " 481735x", False),
        ("481735", False, False, " 481735.5", False),
        ("481735", False, False, " 481735,200", False),
        ("481735", False, False, " 48173", False),
        ("copper-lantern", False, False, " copper-lantern\n", True),
        ("copper-lantern", False, False, " copper-lantern-fox", False),
        ("12, 34, 56", False, True, " 34, 56 and 12.", True),
        ("12, 34, 56", False, True, " 34, 56, 12", True),
        ("12, 34, 56", False, True, " 34, 56, 123", False),
        ("12, 34, 56", False, True, " 34, 56", False),
        ("12, 34, 56", False, False, " 34, 12, 56", False),
        ("12, 34, 56", False, False, " 12, 34, 56.", True),
    ],
)
def test_what_counts_as_the_answer(
    text: str, fixed: bool, any_order: bool, written: str, right: bool
) -> None:
    parts = tuple(text.replace(" ", "").replace(",", ";").split(";"))
    question = question_of(text, parts, fixed, any_order)
    assert question.right(tokenize([written], BYTES).tolist(), written) == right


@pytest.mark.parametrize("format", ["marks", "sentences"])
def test_true_tokens_do_not_make_another_order_right(format: str) -> None:
    """After the true tokens before each, the best ones spell the values in the other order: nobody wrote that."""
    text, best = ("12;13", "13;12") if format == "marks" else ("12, 13", "13, 12")
    question = question_of(text, ("12", "13"), format == "marks", True)
    tokens = tokenize([best], BYTES).tolist()
    assert question.right(tokens, best)
    assert not question.given(tokens, best)
    assert question.given(question.answer.tolist(), text)
    assert question.given(question.answer.tolist(), f"{text}1") == question.fixed


def test_longer_needles_than_there_is_room_for_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest text, of names whose lengths differ much; the first ones drawn do not fit."""
    task = task_of(format="sentences", values="words")
    monkeypatch.setitem(task.__dict__, "sizes", (most := (50, 100)))
    length = (task.least_chunks(10) + 1) * 10 + most[1]
    haystack = Haystack(Filler(TEXT), 0, task.chunks(length, 10), 10)
    found = task.lay(haystack, length, haystack.chunks, (None,), 20, 0)[None]
    assert max(len(trial.needles[0].tokens) for trial in found) == most[0]
    assert min(trial.needles[0].start for trial in found) >= 0


# --- words and draws ------------------------------------------------------------------------------------------


def test_no_word_begins_or_ends_another() -> None:
    """So that no name of two holds another name."""
    assert len(set(WORDS)) == len(WORDS) >= 200
    for word in WORDS:
        others = [other for other in WORDS if other != word]
        assert not [other for other in others if other.startswith(word) or other.endswith(word)]


DRAWN = [685, 185, 707, 915, 83]


def test_draws() -> None:
    draws = Draws(1, 2)
    assert [draws.below(1000) for _ in range(5)] == DRAWN
    assert [Draws(3).below(10)] * 2 == [Draws(3).below(10), Draws(3).below(10)]
    seen = Counter(tuple(Draws(n).among(4, 2)) for n in range(2400))
    assert len(seen) == 12
    assert 140 < min(seen.values()) <= max(seen.values()) < 260  # 200 each: four standard deviations
    for n in range(20):
        assert sorted(Draws(n).among(6, 6)) == list(range(6))
        assert len(set(Draws(n).among(10**12, 50))) == 50


def test_names() -> None:
    marks, words = Marks(BYTES), Sentences(BYTES, "words", False)
    for n in range(50):
        key, value = marks.draw(Draws(n), True), marks.draw(Draws(n), False)
        assert key.text.isupper()
        assert len(key.text) == 4
        assert len(set(value.text)) == 5
        name = words.draw(Draws(n), False)
        assert len(name.text.split("-")) == 2
        assert set(name.text.split("-")) <= set(WORDS)
    text = words.needle(Name(np.zeros(0, np.int64), "fox-egg"), Name(np.zeros(0, np.int64), "sun-hat"))
    assert BYTES.decode(text.tokens.tolist()) == " The secret word of fox-egg is sun-hat."
    assert BYTES.decode(text.tokens[slice(*text.value)].tolist()) == " sun-hat"
