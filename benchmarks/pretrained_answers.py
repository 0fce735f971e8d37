"""What a converted base answers about a book, untaught: facts of any kind, asked for as ``trailmark chat`` asks.

    TRAILMARK_DATA=... python benchmarks/pretrained_answers.py [--lengths 65536 262144 1048576]

Twenty sentences are hidden in held-out books, a paragraph each; ``trailmark read`` reads the file into a memory, once,
and each is asked for by itself, in its own words and in others: with the passages that the question looks at before
it, with what BM25 or MiniLM finds in their place, with those of the fact itself, and without any. The model is
SmolLM2-135M, converted with --far-layers 7 and reading=windows; nothing is trained. It writes
benchmarks/pretrained_answers.json. Stopped, the same command goes on; after a change of how chat finds or puts
passages, take another --folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import keep
from numpy.typing import NDArray
from pretrained_models import (
    convert,
    far_base,
    held_out_books,
    measure_parts,
    parser_of,
    weights_of,
)

from tests.wheels import minilm
from trailmark.data.corpus import read_text, tokenize
from trailmark.data.neighbours.bm25 import Bm25
from trailmark.data.neighbours.embedders import open_embedder
from trailmark.evaluation.chat import Conversation
from trailmark.evaluation.generation import Sampling
from trailmark.evaluation.subject import Subject, load
from trailmark.files import read_json, write_json, write_text
from trailmark.report.console import Progress
from trailmark.statistics import wilson_interval
from trailmark.trace.passages import Passage

OUTPUT = Path(__file__).with_suffix(".json")
ANSWER_TOKENS = 40
# what is told, what is asked in its words and in others, and what an answer is right with
FACTS = (
    ("Old Benedikt hides his tobacco in a blue teapot.", "Where does old Benedikt hide his tobacco?",
     "Into what does the elderly man put the things he smokes, so that nobody sees them?", "teapot"),
    ("The ferry to Sandhamn leaves at half past six.", "When does the ferry to Sandhamn leave?",
     "At what hour does the boat to the Swedish island depart?", "half past six"),
    ("Miss Arkwright teaches geometry at the school in Dunmore.", "What does Miss Arkwright teach?",
     "Which branch of mathematics do children learn from the unmarried lady?", "geometry"),
    ("The Duke of Valmora is afraid of geese.", "What is the Duke of Valmora afraid of?",
     "Which birds frighten the nobleman?", "geese"),
    ("Rosalind's parrot was called Admiral.", "What was Rosalind's parrot called?",
     "By what name did the lady's talking bird go?", "Admiral"),
    ("The key of the observatory hangs behind the clock.", "Where does the key of the observatory hang?",
     "In which place is the thing kept that unlocks the astronomers' house?", "clock"),
    ("Mr. Pemberley sold his carriage to a dentist.", "To whom did Mr. Pemberley sell his carriage?",
     "What was the profession of the person who bought the gentleman's coach?", "dentist"),
    ("The monks of Saint Ilan brew a beer from chestnuts.", "What do the monks of Saint Ilan brew a beer from?",
     "Which nuts do the friars use to make their ale?", "chestnut"),
    ("The treaty of Lorrach was signed in a barn.", "Where was the treaty of Lorrach signed?",
     "In what kind of building did the two countries make peace?", "barn"),
    ("Kasimir plays the cello in the orchestra of Odessa.", "Which instrument does Kasimir play?",
     "On what does the musician from the Black Sea perform?", "cello"),
    ("The widow Greaves pays her rent in honey.", "In what does the widow Greaves pay her rent?",
     "What does the woman whose husband died give to her landlord for the house, as she has no money?", "honey"),
    ("Sergeant Dupont was born in Marseille.", "Where was Sergeant Dupont born?",
     "Which French port does the soldier come from?", "Marseille"),
    ("The bridge at Tolnay was destroyed by lightning.", "What destroyed the bridge at Tolnay?",
     "Why can nobody cross the river any more?", "lightning"),
    ("Aunt Wilhelmina keeps a crocodile in her garden.", "Which animal does Aunt Wilhelmina keep in her garden?",
     "Which reptile lives among the flowers of my father's sister?", "crocodile"),
    ("The secret ingredient of Hobart's soup is nutmeg.", "What is the secret ingredient of Hobart's soup?",
     "Which spice does the cook put into his broth without telling anybody?", "nutmeg"),
    ("The painter Ellingsen used only three colours.", "How many colours did the painter Ellingsen use?",
     "How many pigments were enough for the artist?", "three"),
    ("Young Tobias found a silver compass under the stairs.", "What did young Tobias find under the stairs?",
     "What did the boy discover below the steps, with which sailors steer?", "compass"),
    ("The train from Ghent was late because of a strike.", "Why was the train from Ghent late?",
     "What delayed the railway passengers who came out of Belgium?", "strike"),
    ("Nurse Halloran speaks Portuguese with her patients.",
     "Which language does Nurse Halloran speak with her patients?",
     "In which tongue does she talk to the sick at the hospital?", "Portuguese"),
    ("The statue in the harbour of Kirkwall shows a whale.",
     "What does the statue in the harbour of Kirkwall show?",
     "Which sea animal is carved in stone at the Scottish port?", "whale"),
)  # fmt: skip
WORDINGS = "words of the text", "other words"


def answers(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """By length, by the question's words and by which passages stand before it: how many answers hold the word."""
    model = options.folder / "windows of far"
    if not model.exists():
        convert(far_base(options.folder), model, "hils", ["reading=windows"])
    subject, known_file = load(model), options.folder / f"answers of {model.name}.json"
    known: dict[str, dict[str, Any]] = read_json(known_file) or {}
    begun = f"{weights_of(model)[:12]} {subject.model.config.num_focus_chunks}"
    rows = list[dict[str, Any]]()
    found = {"rows": rows, "answer_tokens": ANSWER_TOKENS}
    for length in options.lengths:
        text, memory = (
            options.folder / f"facts-{length}.txt",
            options.folder / f"facts-{length} of {model.name}",
        )
        tokens = _write_book(text, length, subject.tokenizer)
        # as a user reads: what was read before is kept
        read = [sys.executable, "-m", "trailmark", "read", str(model), str(text), "--memory", str(memory)]
        subprocess.run(read, check=True)
        asked, book = Asked(subject, memory, Sampling(ANSWER_TOKENS)), Book(text, subject)
        for place, wording in enumerate(WORDINGS, 1):
            questions = [fact[place] for fact in FACTS]
            for quoted, search in QUOTED.items():
                keys = [f"{begun} | {length} | {quoted} | {question}" for question in questions]
                put = list[list[Passage] | None]([None] * len(FACTS))
                if search is not None and not known.keys() >= set(keys):
                    put[:] = [[book.around(chunk)] for chunk in search(book, questions).tolist()]
                for number, key in enumerate(keys):
                    if key not in known:
                        progress.show(
                            f"{length:,} tokens, {wording}, passages {quoted}: question {number + 1}"
                        )
                        asked.begin()
                        asked.put = [] if quoted == "none" else put[number]
                        answer = "".join(asked.ask(questions[number])).strip()
                        known[key] = {"said": answer, "passages": [own.text for own in asked.quoted]}
                        write_json(known_file, known)
                rows.append(
                    {"tokens": tokens, "wording": wording, "quoted": quoted}
                    | _row(questions, [known[key] for key in keys])
                )
                keep(options.output, "answers", found)
    return found


def _row(questions: list[str], answered: list[dict[str, Any]]) -> dict[str, Any]:
    words = [word.lower() for *_, word in FACTS]
    told = [fact for fact, *_ in FACTS]
    said = [one["said"] for one in answered]
    right = [word in one.lower() for word, one in zip(words, said, strict=True)]
    found = [any(fact in text for text in one["passages"]) for fact, one in zip(told, answered, strict=True)]
    low, high = wilson_interval(sum(right), len(right))
    return (
        {"questions": len(right), "correct": sum(right), "found": sum(found)}
        | {"accuracy": sum(right) / len(right), "accuracy_low": low, "accuracy_high": high}
        | {"asked": questions, "said": said, "right": right}
    )


class Asked(Conversation):
    """With passages of the caller's, in place of those that the question looks at."""

    put: list[Passage] | None = None

    def _passages_of(self, chunks: list[int]) -> list[Passage]:
        return super()._passages_of(chunks) if self.put is None else self.put


@dataclass
class Book:
    """A text in which the facts are hidden, as chunks of the model."""

    path: Path
    subject: Subject
    text: str = field(init=False)
    chunks: NDArray[np.int64] = field(init=False)  # [m, S]; what is left behind the last is no chunk

    def __post_init__(self) -> None:
        self.text, size = read_text(self.path), self.subject.chunk_size
        ids = tokenize([self.text], self.subject.tokenizer).astype(np.int64)
        self.chunks = ids[: len(ids) // size * size].reshape(-1, size)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.full(len(self.chunks), self.subject.chunk_size)

    def around(self, chunk: int) -> Passage:
        """What a chunk says, and those beside it."""
        size = self.subject.chunk_size
        first, stop = max(0, chunk - 1), min(len(self.chunks), chunk + 2)
        text = self.subject.tokenizer.decode(
            self.chunks[first:stop].ravel(), clean_up_tokenization_spaces=False
        )
        return Passage(self.path, (first * size, stop * size), None, text)


def _padded(texts: list[str], tokenizer: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Their tokens, padded on the right, and how many each has."""
    tokens = [tokenize([text], tokenizer) for text in texts]
    rows = np.zeros((len(tokens), max(map(len, tokens))), np.int64)
    for row, own in zip(rows, tokens, strict=True):
        row[: len(own)] = own
    return rows, np.array([len(own) for own in tokens])


def _by_bm25(book: Book, questions: list[str]) -> Any:
    bm25 = Bm25.of(book.chunks, book.lengths)
    asked = _padded(questions, book.subject.tokenizer)
    return bm25.scores(book.chunks, book.lengths, *asked).argmax(1)


def _by_minilm(book: Book, questions: list[str]) -> Any:
    embedder = open_embedder(f"transformers:{minilm()}", book.subject.tokenizer)
    asked, _ = embedder(*map(torch.from_numpy, _padded(questions, book.subject.tokenizer)))
    _, told = embedder(torch.from_numpy(book.chunks), torch.from_numpy(book.lengths))
    return (asked @ told.T).argmax(1)


def _of_the_facts(book: Book, questions: list[str]) -> Any:
    """The chunks in which what is asked for begins: what the model answers where nothing is to be found."""
    before = [book.text[: book.text.index(fact)] for fact, *_ in FACTS]
    return (
        np.array([len(tokenize([text], book.subject.tokenizer)) for text in before])
        // book.subject.chunk_size
    )


def _write_book(path: Path, length: int, tokenizer: Any) -> int:
    """Paragraphs of held-out books, about ``length`` tokens, with the facts between them; the tokens of all."""
    paragraphs, left = list[str](), length
    for paragraph in _paragraphs():
        left -= len(tokenize([f"{paragraph}\n\n"], tokenizer))
        if left < 0:
            break
        paragraphs.append(paragraph)
    step = len(paragraphs) / (len(FACTS) + 1)
    for number in reversed(range(len(FACTS))):
        paragraphs.insert(round(step * (number + 1)), FACTS[number][0])
    text = "\n\n".join(paragraphs)
    if not path.exists() or read_text(path) != text:
        write_text(path, text)
    return len(tokenize([text], tokenizer))


def _paragraphs() -> Iterator[str]:
    """Those of all held-out books, one after the other, from the first again at the end."""
    for book in cycle(held_out_books()):
        yield from (text for text in read_text(book).split("\n\n") if text.strip())


# the passages before a question: what it looks at, or chunks that are found otherwise and those beside them
FOCUS = "of the focus"
Search = Callable[[Book, list[str]], Any]
QUOTED: dict[str, Search | None] = {
    FOCUS: None,
    "that BM25 finds": _by_bm25,
    "that MiniLM finds": _by_minilm,
    "none": None,
    "of the fact": _of_the_facts,
}
PARTS = {"answers": answers}


def main() -> None:
    parser = parser_of(__doc__, PARTS, OUTPUT)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=(65_536,), help="tokens of the texts, about"
    )
    measure_parts(PARTS, parser.parse_args())


if __name__ == "__main__":
    main()
