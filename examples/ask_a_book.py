"""Ask a book three questions, with a pretrained model that was converted, and see what was read for each answer.

    python examples/ask_a_book.py models/smollm2-drt book.txt --base HuggingFaceTB/SmolLM2-135M-Instruct

MODEL is a folder of ``trailmark convert``; where there is none, it is made of ``--base`` (a hub name, a folder or a
.gguf file). The book is read once: a second time its memory is there. Before what is new in it is trained
(docs/training.md) a DRT writes what its base writes with the window alone, and its retriever has learned nothing yet.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trailmark.data.corpus import tokenizer_fingerprint
from trailmark.evaluation.chat import Conversation
from trailmark.evaluation.generation import Sampling
from trailmark.evaluation.reading import Reader
from trailmark.evaluation.subject import load
from trailmark.models.conversion.convert import convert

QUESTIONS = (
    "Who tells this story?",
    "Where does it take place?",
    "What happens at the beginning?",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a folder with a converted model")
    parser.add_argument("book", type=Path, help="a UTF-8 text of any length")
    parser.add_argument("--base", help="a pretrained model; of it MODEL is made where there is none")
    parser.add_argument("--set", nargs="*", default=[], help="fields of that, as sliding_window=256")
    parser.add_argument("--memory", type=Path, help="default: MODEL-BOOK beside the model")
    parser.add_argument(
        "--question", action="append", help="instead of the three; may be given several times"
    )
    parser.add_argument("--tokens", type=int, default=64, help="of an answer at most")
    arguments = parser.parse_args()
    folder, book = arguments.model, arguments.book
    memory = arguments.memory or folder.with_name(f"{folder.name}-{book.stem}")

    if arguments.base is not None and not folder.exists():
        convert(arguments.base, folder, "drt", arguments.set, fingerprint=tokenizer_fingerprint)
    subject = load(folder)

    # 1. Read the book once, piece by piece. Ctrl-C stops and saves; the same command goes on.
    def show(reader: Reader) -> None:
        print(f"{reader.num_tokens:>9,} tokens, {reader.tokens_per_second:,.0f} tokens/s")

    with Reader(subject, memory, progress=show) as reader:
        reader.read(book)

    # 2. Ask each question on a branch of its own: none changes the memory, and none knows of the others.
    for question in arguments.question or QUESTIONS:
        plain = not subject.tokenizer.chat_template
        talk = Conversation(subject, memory, Sampling(arguments.tokens), plain=plain)
        print(f"\n{question}")
        for piece in talk.ask(question):
            print(piece, end="", flush=True)

        # 3. Which chunks were read for it, and what they say
        print()
        for group, chunks in enumerate(talk.reads(most=2), 1):
            for read in chunks:
                said = " ".join(passage.text or "" for passage in read.passages) or read.said or ""
                print(f"  {talk.names} {group}: chunk {read.chunk}, weight {read.weight:.3f}: {said[:60]!r}")


if __name__ == "__main__":
    main()
