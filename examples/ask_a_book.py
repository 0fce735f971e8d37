"""Ask a book three questions, with a pretrained model that was converted, and see what was read for each answer.

    python examples/ask_a_book.py models/smollm2-long book.txt --base HuggingFaceTB/SmolLM2-135M-Instruct

These are the first commands of docs/convert.md. MODEL is a folder of ``trailmark convert``; where there is none, it is
made of ``--base`` (a hub name, a folder or a .gguf file) as ``--to hils --far-layers 7 reading=windows`` makes it: the
base's own keys choose chunks, so nothing has to be trained. The book is read once: a second time its memory is there.
An untaught model finds what is asked for in the book's own words, and little else (docs/convert.md says how much).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trailmark.data.corpus import tokenizer_fingerprint
from trailmark.evaluation.chat import Conversation
from trailmark.evaluation.far_layers import expect_far_layers, layer_types, measure_far_layers
from trailmark.evaluation.generation import Sampling
from trailmark.evaluation.reading import Reader
from trailmark.evaluation.subject import load
from trailmark.models.conversion.convert import convert, open_any_base

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
    parser.add_argument("--far-layers", type=int, default=7, help="that choose chunks; others have a window")
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
        base = open_any_base(arguments.base)
        expect_far_layers(base, arguments.far_layers)
        far = measure_far_layers(base).best(arguments.far_layers)  # it completes sentences in 8 short texts
        fields = ["reading=windows", layer_types(far, len(base.windows)), *arguments.set]
        convert(arguments.base, folder, "hils", fields, fingerprint=tokenizer_fingerprint)
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

        # 3. The passages that the question looked at, which then stood before it, and what was read for the answer
        print()
        for passage in talk.quoted:
            print(f"  before the question: {passage.text!r}")
        for read in talk.reads_of_all(most=3):
            said = " ".join(passage.text or "" for passage in read.passages) or read.said or ""
            print(f"  chunk {read.chunk}, weight {read.weight:.3f}: {said!r}")


if __name__ == "__main__":
    main()
