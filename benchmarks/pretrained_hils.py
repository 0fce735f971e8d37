"""SmolLM2-135M that chooses chunks in every layer (``convert --to hils``): what it loses to full attention, untrained.

    TRAILMARK_DATA=... python benchmarks/pretrained_hils.py [losses gap forms whole far along]

Writes benchmarks/pretrained_hils.json. Held-out text is that of pretrained.py; the base with full attention and with a
window alone stand beside it. Nothing is trained here: what a training adds, pretrained_hils_needles.py asks. Stopped,
the same command goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import data_folder, keep
from pretrained_models import (
    KINDS_OF_TEXT,
    READER_FIELDS,
    UNSEEN,
    WINDOW,
    Losses,
    Text,
    beyond,
    converted,
    far_base,
    hils_of,
    interval,
    latex,
    measure_parts,
    named,
    opened,
    outside,
    parser_of,
    row_of_gap,
    totals,
)  # fmt: skip

from trailmark.data.corpus import load_tokenizer, read_text, tokenize
from trailmark.evaluation.retrieval.run import row_of
from trailmark.memory import ChunkCache
from trailmark.models.hils.config import HiLSConfig
from trailmark.report.console import Progress
from trailmark.trace.losses import piece_losses

OUTPUT = Path(__file__).with_suffix(".json")
ASKED = 1024  # a text's last tokens, which are predicted where the others are only read
LONG_CHAPTER, EVERY, ENDS = "stacks_chow.tex", 16_384, (65_536, 262_144)
HILS, EXACT = "expansion at the chunk's mean query (HiLS)", "all keys"
# what tells a token how much a chunk would get of its attention; each reads as many chunks
FORMS: dict[str, tuple[str, ...]] = {
    "means of 8 keys": (),
    "means of 4 keys": ("summary_tokens=4",),
    "mean of the chunk's keys (MoBA)": ("summary_tokens=32",),
    HILS: (
        "chunk_score=expansion",
        "summary_query=tokens",
        "summary_tokens=32",
    ),
    EXACT: ("chunk_score=mass", "summary_tokens=null"),
}


def losses(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """By kind of text, its length and how many chunks each token reads."""
    rows = []
    for length in options.lengths:
        for kind, texts_of in KINDS_OF_TEXT.items():
            texts = texts_of(tokenizer_of(options), length)
            for chunks in options.chunks:
                changes = [f"num_retrieved_chunks={chunks}"]
                row = {"kind": kind, "length": length, "chunks": chunks}
                rows.append(row | row_of_losses(options, progress, texts, changes))
    return about(options) | {"rows": rows}


def gap(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """By window too, of all tokens and of those that stood before, but only outside it."""
    known, base, rows = Losses(options.folder / "losses.json", progress), base_of(options), list[Any]()
    chunks = options.chunks[0]
    cases = [*product(options.lengths, KINDS_OF_TEXT, options.windows)]
    found = about(options) | {"chunks": chunks, "rows": rows, "planned": 2 * len(cases)}
    for length, kind, window in cases:
        texts = KINDS_OF_TEXT[kind](tokenizer_of(options), length)
        changes = [f"num_retrieved_chunks={chunks}"] + [f"sliding_window={window}"] * (window != WINDOW)
        models = {
            "full": ("base", partial(opened, base)),
            "window": named(base, window),
            "hils": named_hils(options, *changes),
        }
        of = {name: known.of(*model, texts) for name, model in models.items()}
        flags = [outside(text.ids, window) for text in texts]
        for tokens in ("all", "outside"):
            row = {"kind": kind, "length": length, "window": window, "tokens": tokens}
            rows.append(row | row_of_gap(of, flags, tokens, "hils"))
        keep(options.output, "gap", found)
    return found


def forms(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """By what scores a chunk, on LaTeX, and with no chunk at all."""
    texts, rows = latex(tokenizer_of(options), options.lengths[0])[: options.texts], []
    for form, changes in FORMS.items():
        rows.append({"form": form} | row_of_losses(options, progress, texts, changes))
    chunks = HiLSConfig.from_pretrained(hils_as_converted(options)).num_retrieved_chunks
    return about(options) | {"length": options.lengths[0], "chunks": chunks, "rows": rows}


def whole(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """HiLS' own score and the exact one on LaTeX at the longest of the lengths, by how many chunks each token reads."""
    length, rows = options.lengths[-1], []
    texts = latex(tokenizer_of(options), length)[: options.texts]
    for chunks in options.chunks:
        for form in (HILS, EXACT):
            changes = [*FORMS[form], f"num_retrieved_chunks={chunks}"]
            rows.append({"form": form, "chunks": chunks} | row_of_losses(options, progress, texts, changes))
    return about(options) | {"length": length, "rows": rows}


def far(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Beyond the base's own length: chapters one after another, beside the window alone."""
    known = Losses(options.folder / "losses.json", progress)
    pair = named(base_of(options), WINDOW), named_hils(options)
    return about(options) | {"rows": beyond(known, tokenizer_of(options), options.far, *pair, "hils")}


def along(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """A chapter as long as a book, read with windows alone: what its next tokens cost, untaught, on the way."""
    file = data_folder("math") / "test" / LONG_CHAPTER
    known = Losses(options.folder / "losses.json", progress)
    whole = tokenize([read_text(file)], tokenizer_of(options))
    texts = [
        Text(f"{file.name}, next {ASKED}", whole[: place + ASKED + 1])
        for place in range(EVERY, min(options.along, len(whole) - ASKED - 1) + 1, EVERY)
    ]
    few = hils_of(options.folder, far_base(options.folder))
    models: dict[str, tuple[str, Callable[[], Any]]] = {
        "window": named(base_of(options), WINDOW),
        "hils": (" ".join([few.name, *READER_FIELDS]), partial(opened, few, *READER_FIELDS)),
    }
    nats = {
        name: np.array([own.mean() for own in known.of(called, open_model, texts, _reading_on(texts))])
        for name, (called, open_model) in models.items()
    }
    places, rows = np.array([len(text.ids) - ASKED - 1 for text in texts]), []
    for low, high in pairwise((0, *(end for end in ENDS if end <= places[-1]))):
        those = (places > low) & (places <= high)
        gain = (nats["window"] - nats["hils"])[those]
        row = {name: float(own[those].mean()) for name, own in nats.items()}
        row |= interval("gain", gain) | {"least": float(gain.min())}
        rows.append({"first": int(places[those][0]), "last": int(high), "stretches": len(gain)} | row)
    return about(options) | {
        "fields": READER_FIELDS,
        "file": file.name,
        "asked": ASKED,
        "every": EVERY,
        "rows": rows,
    }


def _reading_on(texts: Sequence[Text]) -> Callable[[Any, int], Any]:
    """[ASKED] what the last tokens of each text cost, of which each is the beginning of the next."""
    cache: ChunkCache | None = None

    @torch.no_grad()
    def read(model: Any, number: int) -> Any:
        nonlocal cache
        ids = row_of(model, texts[number].ids.astype(np.int64))
        done = 0 if cache is None else cache.get_seq_length()
        cache = model.read(ids[:, done : -ASKED - 1], cache)
        asked = ids[:, -ASKED - 1 :]
        return piece_losses(model(asked, past_key_values=cache.branch()).logits, None, asked)[0][0, 1:]

    return read


def row_of_losses(
    options: argparse.Namespace, progress: Progress, texts: Sequence[Text], changes: Sequence[str]
) -> dict[str, Any]:
    known, base = Losses(options.folder / "losses.json", progress), base_of(options)
    full = totals(known.of("base", partial(opened, base), texts))
    pair = named(base, WINDOW), named_hils(options, *changes)
    window, hils = (totals(known.of(name, open_model, texts)) for name, open_model in pair)
    sums = {"full": full, "window": window, "hils": hils}
    return {"texts": len(texts)} | closed(sums, len(texts[0].ids) - UNSEEN)


def closed(sums: dict[str, Any], each: int) -> dict[str, Any]:
    """What a HiLS gives back of what the window loses; ``sums``: nats of each text, of ``each`` tokens."""
    full, window, hils = (sums[name] for name in ("full", "window", "hils"))
    counted = each * len(full)
    nats = {name: float(x.sum() / counted) for name, x in sums.items()}
    return (
        {"nats": nats}
        | interval("closed", window - hils, window - full)
        | interval("above", (hils - full) / each)
    )


def about(options: argparse.Namespace) -> dict[str, Any]:
    config = HiLSConfig.from_pretrained(hils_as_converted(options))
    return {"window": WINDOW, "chunk_size": config.chunk_size, "summary_tokens": config.summary_tokens}


def base_of(options: argparse.Namespace) -> Path:
    return converted(options.folder, "sliding_window")


def hils_as_converted(options: argparse.Namespace) -> Path:
    return converted(options.folder, "hils")


def named_hils(options: argparse.Namespace, *changes: str) -> tuple[str, Any]:
    """What losses are known by, and how the model is opened."""
    folder = hils_as_converted(options)
    return " ".join([folder.name, *changes]), partial(opened, folder, *changes)


def tokenizer_of(options: argparse.Namespace) -> Any:
    return load_tokenizer(str(base_of(options)))


PARTS = {"losses": losses, "gap": gap, "forms": forms, "whole": whole, "far": far, "along": along}


def main() -> None:
    parser = parser_of(__doc__, PARTS, OUTPUT)
    parser.add_argument("--lengths", type=int, nargs="+", default=(4096, 8192))
    parser.add_argument(
        "--chunks", type=int, nargs="+", default=(16, 64), help="that a token reads in a layer"
    )
    parser.add_argument("--windows", type=int, nargs="+", default=(256, WINDOW), help="in the part gap")
    parser.add_argument("--texts", type=int, default=9, help="that forms are compared on, at most")
    parser.add_argument(
        "--far", type=int, nargs="*", default=(16_384, 65_536), help="lengths beyond the base's"
    )
    parser.add_argument(
        "--along", type=int, default=262_144, help="tokens of a chapter that are read, in the part along"
    )
    measure_parts(PARTS, parser.parse_args())


if __name__ == "__main__":
    main()
