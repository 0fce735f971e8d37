"""Needles and questions in other words each time: the format "paraphrases", and the tasks that training may mix in.

Evaluations have wordings and names of their own, none of which a training text has: what is measured is whether a model
finds a fact that is asked for in other words than it was told, not whether it knows a pattern by heart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trailmark.data.draws import Draws
from trailmark.data.needles.formats import Name, NeedleText, Sentences, asked_together


@dataclass(frozen=True)
class Wordings:
    """Ways to say one thing: facts of a {key} and its {value}, and questions about a {key}.

    {noun} is what the value is called: "number" or "word".
    """

    facts: tuple[str, ...]
    questions: tuple[str, ...]


EVALUATION = Wordings(
    (
        " Anyone who asks about {key} should be told {value}.",
        " Written on the back of the {key} folder was {value}, and nothing else.",
        " For {key} the archivist had chosen {value}.",
        " It takes {value} to open the door of {key}.",
        " Remember {value} whenever {key} comes up.",
        " They had agreed that {key} would answer to {value}.",
        " Of {key} she knew but one thing by heart, which was {value}.",
        " On the plan, {value} marks the place of {key}.",
    ),
    (
        "Which {noun} belongs to {key}?",
        "According to the text, which {noun} did {key} have?",
        "Tell me the {noun} that goes with {key}.",
        "I forgot the {noun} of {key}. Can you look it up?",
        "Somewhere a {noun} is connected to {key}. Which one?",
        "Please look for {key} and say its {noun}.",
    ),
)
CHAINS = Wordings(
    (
        " From {key} the way goes on to {value}.",
        " Right behind {key} comes {value}.",
        " Whoever has found {key} should turn to {value}.",
    ),
    (
        "Starting from {key}, what does one reach after {hops} steps?",
        "One sets out at {key} and goes on {hops} times. Where does that end?",
    ),
)
TRAINING = Wordings(
    (
        " The access code for {key} is {value}.",
        " Note to all staff: {key} now has the code {value}.",
        " {key} (code: {value}) was confirmed.",
        " The ticket that {key} holds bears the digits {value}.",
        " You will need {value} if you call {key}.",
        " The password in use at the desk of {key} is {value}.",
        " Our records list {key} under {value}.",
        " {key} rented the locker with the combination {value}.",
        " Account {value} was opened by {key}.",
        " Reference for {key}: {value}.",
    ),
    (
        "What is the access code for {key}?",
        "What code does {key} have?",
        "Give the digits noted for {key}.",
        "How is {key} listed in the records?",
        "{key} called. What do I enter?",
        "Do you know the reference for {key}?",
        "Repeat the code of {key}.",
        "What was said about {key}?",
    ),
)
_FIRST_NAMES = """
Agnes Albert Bianca Boris Camille Carlos Daria Dmitri Elena Erik Fatima Felix Greta Hannah Hugo Ines Ivan Jana Jonas
Karin Lars Leila Marco Miriam Nadia Oscar Paula Quentin Rosa Samuel Tamara Ulrich Vera Walter Yasmin Zoltan
"""
_LAST_NAMES = """
Abbott Bauer Costa Dubois Eriksen Fischer Garcia Horvat Ivanova Jensen Kowalski Lindqvist Moreau Novak Okafor Petrov
Quirke Rossi Silva Tanaka Urban Vasquez Weiss Yilmaz Zhang Adeyemi Bergman Castillo Demir Esposito
"""
FIRST_NAMES, LAST_NAMES = tuple(_FIRST_NAMES.split()), tuple(_LAST_NAMES.split())


class Paraphrases(Sentences):
    """Facts and questions of the evaluation's wordings, each drawn by the names that it is about."""

    name = "paraphrases"

    @property
    def _wordings(self) -> Wordings:
        return CHAINS if self.chained else EVALUATION

    def needle(self, left: Name, right: Name) -> NeedleText:
        wording = _one(self._wordings.facts, left, right).format(key=left.text, value="{value}")
        before, after = wording.split(" {value}")
        tokens, ends = self._joined([before, f" {right.text}", after])
        return NeedleText(tokens, (ends[0], ends[1]))

    def asked(self, keys: Sequence[Name], values: int, hops: int) -> str:
        noun = self._noun if values == 1 else f"{self._noun}s"
        return _one(self._wordings.questions, *keys).format(key=asked_together(keys), noun=noun, hops=hops)


def _one(wordings: Sequence[str], *names: Name) -> str:
    return wordings[Draws(*(token for name in names for token in name.tokens.tolist())).below(len(wordings))]
