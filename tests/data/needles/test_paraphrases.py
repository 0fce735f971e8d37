"""Wordings of training and of evaluation have nothing in common, and each says what it has to."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.data.corpora import save_chat_bpe
from trailmark.data.chat import ChatTurns
from trailmark.data.corpus import load_tokenizer
from trailmark.data.draws import Draws
from trailmark.data.needles.formats import Name, Sentences
from trailmark.data.needles.paraphrases import (
    CHAINS,
    EVALUATION,
    FIRST_NAMES,
    LAST_NAMES,
    TRAINING,
    Paraphrases,
    Wordings,
)
from trailmark.data.needles.words import WORDS

BYTES = load_tokenizer()
ANY = np.array([70])  # the tokens of a name, which do not matter here


def runs(text: str) -> set[tuple[str, ...]]:
    """Four words in a row; what is filled in is none of them."""
    found = set()
    for part in re.split(r"\{\w+\}", text):
        words = re.findall(r"[\w']+", part.lower())
        found |= {tuple(words[n : n + 4]) for n in range(len(words) - 3)}
    return found


def frame(text: str) -> str:
    """All words that are not filled in."""
    return " ".join(re.findall(r"[\w']+|\{\w+\}", text.lower()))


def evaluated() -> list[str]:
    """All wordings of the evaluation, those of sentences too."""
    key, value = Name(ANY, "{key}"), Name(ANY, "{value}")
    found = [own for wordings in (EVALUATION, CHAINS) for own in (*wordings.facts, *wordings.questions)]
    for values in ("numbers", "words"):
        for chained in (False, True):
            made = Sentences(BYTES, values, chained)
            found.append(BYTES.decode(made.needle(key, value).tokens.tolist()))
            hops = 2 if chained else 1
            found.append(BYTES.decode(made.question([key], [value], hops, 1).tokens.tolist()))
            found.append(made.asked([key], 1, hops))
    return found


def test_no_training_text_has_the_words_of_an_evaluation() -> None:
    training = [*TRAINING.facts, *TRAINING.questions]
    assert {frame(own) for own in training}.isdisjoint({frame(own) for own in evaluated()})
    of_training = {four for own in training for four in runs(own)}
    of_evaluation = {four for own in evaluated() for four in runs(own)}
    assert of_training
    assert of_evaluation
    assert of_training.isdisjoint(of_evaluation)
    names = {name.lower() for name in (*FIRST_NAMES, *LAST_NAMES)}
    assert len(names) == len(FIRST_NAMES) + len(LAST_NAMES)
    assert names.isdisjoint(WORDS)


@pytest.mark.parametrize("wordings", [TRAINING, EVALUATION, CHAINS])
def test_each_wording_names_what_it_is_about_once(wordings: Wordings) -> None:
    for fact in wordings.facts:
        assert fact.count("{key}") == fact.count("{value}") == 1
        assert fact.startswith(" ")
        assert fact.endswith(".")
    for question in wordings.questions:
        assert question.count("{key}") == 1
    assert len({*wordings.facts, *wordings.questions}) == len(wordings.facts) + len(wordings.questions)


@pytest.mark.parametrize("chat", [False, True])
def test_needles_and_questions_read_as_they_are_meant(chat: bool, tmp_path: Path) -> None:
    tokenizer = save_chat_bpe(tmp_path)
    turns = ChatTurns.of(tokenizer) if chat else ChatTurns.plain()
    seen = set()
    for made in (
        Paraphrases(tokenizer, "numbers", False, turns),
        Sentences(tokenizer, "numbers", False, turns),
    ):
        for number in range(40):
            draws = Draws(number)
            key, value, other = made.draw(draws, True), made.draw(draws, False), made.draw(draws, False)
            needle = made.needle(key, value)
            text = tokenizer.decode(needle.tokens)
            seen.add(text.replace(key.text, "{key}").replace(value.text, "{value}"))
            assert key.text in text
            assert tokenizer.decode(needle.tokens[slice(*needle.value)]) == f" {value.text}"
            for values, landmarks in (([value], 1), ([value, other], 1), ([value], 2)):
                question = made.question([key], values, 1, landmarks)
                whole = tokenizer.decode([*question.tokens, *question.answer])
                answer = ", ".join(own.text for own in values)
                asked = made.asked([key], len(values), 1)
                gap = "" if chat else " "
                assert whole == turns.first + asked + turns.end + turns.cue + gap + answer
                assert question.text == answer
                assert len(question.landmarks) == landmarks
                # the last landmark stands before what the answer follows, which has a token at least
                assert tokenizer.decode(question.tokens[question.landmarks[-1] + 1 :]) == turns.cue
    assert seen >= {*EVALUATION.facts}
