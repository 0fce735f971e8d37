"""Find a needle in a million tokens: read a book in pieces, keep the memory, and ask about it.

python examples/read_a_book.py [MODEL] [BOOK.txt]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer

import trailmark
from trailmark import DRTForCausalLM
from trailmark.data.corpus import standard_library_texts, text_pieces, tokenize

# The demo's model, which comes with the package: it knows needles of the form $NAME=12345; and asks for them by ~NAME.
folder = sys.argv[1] if len(sys.argv) > 1 else Path(trailmark.__file__).parent / "demo_model"
model = DRTForCausalLM.from_pretrained(folder).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)


def ids(text: str) -> torch.Tensor:
    return torch.from_numpy(tokenize([text], tokenizer)).long()[None]  # [1, T]


# A "book" of a million characters; without one of your own, Python's sources that the demo never trained on.
# The fact to ask for lies near its beginning.
with tempfile.TemporaryDirectory() as place:
    book = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(place) / "book.txt"
    if len(sys.argv) < 3:
        book.write_text("\n".join(standard_library_texts("haystack"))[:1_000_000])
    memory = Path(place) / "memory"

    # 1. Read it once, piece by piece: the window stays as it is, the memory grows on disk.
    cache = model.new_cache(memory_tier="disk", memory_folder=memory)
    model.read(ids("the beginning ... $BOOK=48213; ... and so on.\n"), cache)
    for piece in text_pieces(book, size=1 << 17):
        model.read(ids(piece.replace("$", "S").replace("~", "-")), cache)  # a question's marks are no text
        print(f"{cache.get_seq_length():>9,} tokens, window {cache.window_bytes():,} bytes, ", end="")
        print(f"memory {cache.memory_bytes():,} bytes")
    cache.save(memory)

    # 2. Any time later: map it, and ask on a branch. The memory itself is not changed by questions.
    cache = model.load_cache(memory)
    question = ids("~BOOK")
    answer = model.generate(
        question,
        attention_mask=torch.ones_like(question),
        past_key_values=cache.branch(),
        max_new_tokens=7,
        do_sample=False,
    )
    print("answer:", tokenizer.decode(answer[0, question.shape[1] :]))

    # 3. Which chunks did the question retrieve?
    out = model(question, past_key_values=cache.branch(), close_chunk=True, output_retrieval=True)
    asked = out.retrieval[0]
    for chunk, weight in zip(asked.indices[0, -1].tolist(), asked.weights[0, -1].tolist(), strict=True):
        print(f"chunk {chunk:>6}  weight {weight:.3f}")
