"""What a converted base answers about a book, untaught: facts of any kind, asked for as ``trailmark chat`` asks.

    TRAILMARK_DATA=... python benchmarks/pretrained_answers.py [--lengths 65536 262144]

Twenty sentences are hidden in held-out books, a paragraph each; ``trailmark read`` reads the file into a memory, once,
and each question is put to it by itself: with the passages that it looks at before it, with what BM25 finds in their
place, and without any. The model is SmolLM2-135M, converted with --far-layers 7 and reading=windows; nothing is
trained. It writes benchmarks/pretrained_answers.json. Stopped, the same command goes on; after a change of
how chat finds or puts passages, take another --folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from common import keep
from pretrained_models import convert, far_base, held_out_books, measure_parts, parser_of, weights_of

from trailmark.data.corpus import Tokens, read_text, tokenize
from trailmark.data.neighbours.bm25 import Bm25
from trailmark.evaluation.chat import Conversation
from trailmark.evaluation.generation import Sampling
from trailmark.evaluation.subject import Subject, load
from trailmark.files import read_json, write_json, write_text
from trailmark.report.console import Progress
from trailmark.statistics import wilson_interval
from trailmark.trace.passages import Passage

OUTPUT = Path(__file__).with_suffix(".json")
ANSWER_TOKENS = 40
QUOTED = ("of the focus", "none", "of BM25")  # passages before the question
# what is told, what is asked, and what an answer is right with
FACTS = (
    ("Old Benedikt hides his tobacco in a blue teapot.", "Where does old Benedikt hide his tobacco?", "teapot"),
    ("The ferry to Sandhamn leaves at half past six.", "When does the ferry to Sandhamn leave?", "half past six"),
    ("Miss Arkwright teaches geometry at the school in Dunmore.", "What does Miss Arkwright teach?", "geometry"),
    ("The Duke of Valmora is afraid of geese.", "What is the Duke of Valmora afraid of?", "geese"),
    ("Rosalind's parrot was called Admiral.", "What was Rosalind's parrot called?", "Admiral"),
    ("The key of the observatory hangs behind the clock.", "Where does the key of the observatory hang?", "clock"),
    ("Mr. Pemberley sold his carriage to a dentist.", "To whom did Mr. Pemberley sell his carriage?", "dentist"),
    ("The monks of Saint Ilan brew a beer from chestnuts.", "What do the monks of Saint Ilan brew a beer from?",
     "chestnut"),
    ("The treaty of Lorrach was signed in a barn.", "Where was the treaty of Lorrach signed?", "barn"),
    ("Kasimir plays the cello in the orchestra of Odessa.", "Which instrument does Kasimir play?", "cello"),
    ("The widow Greaves pays her rent in honey.", "In what does the widow Greaves pay her rent?", "honey"),
    ("Sergeant Dupont was born in Marseille.", "Where was Sergeant Dupont born?", "Marseille"),
    ("The bridge at Tolnay was destroyed by lightning.", "What destroyed the bridge at Tolnay?", "lightning"),
    ("Aunt Wilhelmina keeps a crocodile in her garden.", "Which animal does Aunt Wilhelmina keep in her garden?",
     "crocodile"),
    ("The secret ingredient of Hobart's soup is nutmeg.", "What is the secret ingredient of Hobart's soup?",
     "nutmeg"),
    ("The painter Ellingsen used only three colours.", "How many colours did the painter Ellingsen use?", "three"),
    ("Young Tobias found a silver compass under the stairs.", "What did young Tobias find under the stairs?",
     "compass"),
    ("The train from Ghent was late because of a strike.", "Why was the train from Ghent late?", "strike"),
    ("Nurse Halloran speaks Portuguese with her patients.",
     "Which language does Nurse Halloran speak with her patients?", "Portuguese"),
    ("The statue in the harbour of Kirkwall shows a whale.",
     "What does the statue in the harbour of Kirkwall show?", "whale"),
)  # fmt: skip


def answers(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """By length and by which passages stand before a question: how many answers hold the word."""
    model = options.folder / "windows of far"
    if not model.exists():
        convert(far_base(options.folder), model, "hils", ["reading=windows"])
    subject, known_file = load(model), options.folder / "answers.json"
    known: dict[str, str] = read_json(known_file) or {}
    begun = f"{weights_of(model)[:12]} {subject.model.config.num_focus_chunks}"
    rows = list[dict[str, Any]]()
    found = {"rows": rows, "answer_tokens": ANSWER_TOKENS}
    for length in options.lengths:
        text, memory = options.folder / f"facts-{length}.txt", options.folder / f"facts-{length}"
        tokens = _write_book(text, length, subject.tokenizer)
        # as a user reads: what was read before is kept
        read = [sys.executable, "-m", "trailmark", "read", str(model), str(text), "--memory", str(memory)]
        subprocess.run(read, check=True)
        by_words = _by_bm25(text, subject)
        for quoted in QUOTED:
            said = []
            for number, ((_, question, _), told) in enumerate(zip(FACTS, by_words, strict=True), 1):
                key = f"{begun} | {length} | {quoted} | {question}"
                if key not in known:
                    progress.show(f"{length:,} tokens, passages {quoted}: question {number}")
                    asked = Asked(subject, memory, Sampling(ANSWER_TOKENS), quotes=quoted != "none")
                    asked.told = told if quoted == "of BM25" else None
                    known[key] = "".join(asked.ask(question)).strip()
                    write_json(known_file, known)
                said.append(known[key])
            right = [word.lower() in one.lower() for (*_, word), one in zip(FACTS, said, strict=True)]
            low, high = wilson_interval(sum(right), len(right))
            rows.append(
                {"tokens": tokens, "quoted": quoted, "questions": len(right), "correct": sum(right)}
                | {"accuracy": sum(right) / len(right), "accuracy_low": low, "accuracy_high": high}
                | {"asked": [question for _, question, _ in FACTS], "said": said, "right": right}
            )
            keep(options.output, "answers", found)
    return found


class Asked(Conversation):
    """With a passage that is ``told``, in place of those that the question looks at."""

    told: Passage | None = None

    def _looked_at(self, words: Tokens) -> list[Passage]:
        return super()._looked_at(words) if self.told is None else [self.told]


def _by_bm25(path: Path, subject: Subject) -> list[Passage]:
    """For each question the chunk of a text that BM25 finds by its words, and those beside it."""
    ids, size = tokenize([read_text(path)], subject.tokenizer).astype(np.int64), subject.chunk_size
    chunks = ids[: len(ids) // size * size].reshape(-1, size)
    lengths, passages = np.full(len(chunks), size), []
    bm25 = Bm25.of(chunks, lengths)
    asked = [tokenize([question], subject.tokenizer) for _, question, _ in FACTS]
    words = np.zeros((len(asked), max(map(len, asked))), np.int64)
    for row, own in zip(words, asked, strict=True):
        row[: len(own)] = own
    for best in bm25.scores(chunks, lengths, words, np.array([len(own) for own in asked])).argmax(1).tolist():
        tokens = max(0, best - 1) * size, (best + 2) * size
        text = subject.tokenizer.decode(ids[slice(*tokens)], clean_up_tokenization_spaces=False)
        passages.append(Passage(path, tokens, None, text))
    return passages


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


PARTS = {"answers": answers}


def main() -> None:
    parser = parser_of(__doc__, PARTS, OUTPUT)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=(65_536,), help="tokens of the texts, about"
    )
    measure_parts(PARTS, parser.parse_args())


if __name__ == "__main__":
    main()
