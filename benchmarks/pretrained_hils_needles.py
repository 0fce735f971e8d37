"""What SmolLM2-135M as a HiLS completes and answers of long texts, as converted and taught: sentences in books.

    TRAILMARK_DATA=... python benchmarks/pretrained_hils_needles.py [needles beyond recall layers few reading]

Writes benchmarks/pretrained_hils_needles.json. Trained models are those of pretrained_train.py: of the parts "needles"
and "beyond" ``--trained`` (hils), of "recall", "layers", "few" and "reading" its recall, further, few and longer.
Stopped, the same command goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import keep
from pretrained_hils import (
    ASKED,
    about,
    base_of,
    closed,
    hils_as_converted,
    named_hils,
    row_of_losses,
    tokenizer_of,
)
from pretrained_models import (
    APART,
    FAR_LAYERS,
    FINE,
    FOLDER,
    KINDS_OF_TEXT,
    NUM_LAYERS,
    TAUGHT,
    WINDOW,
    Losses,
    Text,
    latex,
    measure_parts,
    named,
    opened,
    parser_of,
    taught_hils,
    trained,
    training_of,
)  # fmt: skip
from pretrained_needles import TOGETHER, Needles

from tests.smollm2 import smollm2
from trailmark.evaluation.far_layers import layer_types, measure_far_layers
from trailmark.evaluation.retrieval.run import row_of
from trailmark.models.conversion.convert import open_any_base
from trailmark.report.console import Progress
from trailmark.trace.losses import piece_losses
from trailmark.training.config import load_run_config

OUTPUT = Path(__file__).with_suffix(".json")


def needles(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """A sentence in a book that is to be completed: the base, this model, and the one that was trained."""
    asked, rows = Needles(options, progress), []
    models = [
        ("base", base_of(options)),
        ("as converted", hils_as_converted(options)),
        ("trained", options.trained),
    ]
    for model, folder in models:
        for length in options.needles:
            if folder.exists() and (model == "trained" or length <= 4096):
                rows.append({"model": model} | asked.ask(folder, (), length))
    return about(options) | {"rows": rows} | training_of(options.trained)


def beyond(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The same beyond the base's own length, as converted and trained."""
    asked = Needles(options, progress)
    models = [("as converted", hils_as_converted(options)), ("trained", options.trained)]
    rows = [
        {"model": model} | asked.ask(folder, (), length)
        for model, folder in models
        if folder.exists()
        for length in options.far
    ]
    return about(options) | {"rows": rows}


def recall(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The same of a base that learned with full attention on short texts, and then became a HiLS as it is."""
    taught, hils = taught_hils(options.folder, "recall")
    taught_on = load_run_config(taught / "run.yaml").training.context_length
    asked, rows = Needles(options, progress), list[dict[str, Any]]()
    found = {"rows": rows, "trained_length": taught_on} | about(options) | training_of(taught)
    wide = ("num_retrieved_chunks=64",)
    models = (
        ("full attention, taught", taught, ()),
        ("HiLS as converted", hils_as_converted(options), ()),
        ("HiLS of the taught", hils, ()),
        ("HiLS of the taught, 64 chunks", hils, wide),
    )
    few = options.singles
    cases = [(model, TOGETHER, options.questions, options.needles) for model in models]
    taught_ones = (models[0], *models[2:])  # the untaught one is in "needles"
    cases += [(model, 1, few, options.needles) for model in taught_ones]
    cases += [(models[2], 1, options.few, options.far)]
    for (model, folder, changes), together, questions, lengths in cases:
        for length in lengths:
            row = asked.ask(folder, changes, length, together=together, questions=questions)
            rows.append({"model": model, "together": together} | row)
            keep(options.output, "recall", found)
    return found


def layers(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Which layers look far, before and after the base was taught; and what it completes where those alone do."""
    taught, _ = taught_hils(options.folder, "recall")
    bases = {"base": smollm2(), "taught": taught}
    seen = {name: measure_far_layers(open_any_base(folder)) for name, folder in bases.items()}
    asked, rows, length = Needles(options, progress), list[dict[str, Any]](), options.layers_at
    found = (
        {"rows": rows, "length": length, "seen": {name: x._asdict() for name, x in seen.items()}}
        | about(options)
        | training_of(taught)
    )
    assert tuple(seen["taught"].best(len(FAR_LAYERS))) == FAR_LAYERS
    sets: list[Sequence[int]] = [
        range(NUM_LAYERS),
        range(5, 24),
        FAR_LAYERS,
        seen["base"].best(len(FAR_LAYERS)),
    ]
    sets += [seen["taught"].best(4), FAR_LAYERS[1:], range(14, 24), range(5, 9)]
    for those in sets:
        fields = (
            ()
            if len(those) == NUM_LAYERS
            else (f"sliding_window={WINDOW}", "num_sinks=4", layer_types(those, NUM_LAYERS))
        )
        row = asked.ask(taught, fields, length, questions=options.singles)
        rows.append({"layers": list(those)} | row)
        keep(options.output, "layers", found)
    texts, losses = latex(tokenizer_of(options), options.length)[: options.texts], list[dict[str, Any]]()
    found |= {"losses": losses, "losses_length": options.length}
    for those in (range(NUM_LAYERS), FAR_LAYERS):
        changes = () if len(those) == NUM_LAYERS else (layer_types(those, NUM_LAYERS),)
        losses.append({"layers": list(those)} | row_of_losses(options, progress, texts, changes))
        keep(options.output, "layers", found)
    return found


def few(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """What a base that was taught with full attention in few layers knows as a HiLS, by where far keys stand."""
    trainings = {kind: x for kind in TAUGHT[:-1] if (x := training_of(trained(options.folder, kind, 0, 0)))}
    asked, rows, (near, *_) = Needles(options, progress), list[dict[str, Any]](), options.needles
    found = {"rows": rows, "layers": FAR_LAYERS, "trainings": trainings} | about(options)
    apart = Case("few", 16, FINE, f"{APART}")
    together = [
        Case("few", None), Case("few", 16, 8), Case("few", 64, 8), Case("few", 16, FINE), Case("few", 16, FINE, "true"),
        apart, apart._replace(taught="recall"),
    ]  # fmt: skip
    cases = [(case, near, TOGETHER, options.questions) for case in together]
    cases += [(apart, near, 1, options.singles)]
    cases += [(apart, length, TOGETHER, options.few) for length in options.far]
    for case, length, count, questions in cases:
        taught, hils = taught_hils(options.folder, case.taught)
        folder = taught if case.chunks is None else hils
        row = asked.ask(folder, case.changes, length, together=count, questions=questions)
        rows.append(case._asdict() | {"together": count} | row)
        keep(options.output, "few", found)
    return found


def reading(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Texts read with windows alone, of which what is predicted chooses: losses, untaught, and needles."""
    known, length = Losses(options.folder / "losses-reading.json", progress), options.length
    base, losses, rows = base_of(options), list[dict[str, Any]](), list[dict[str, Any]]()
    found = {"losses": losses, "rows": rows, "asked": ASKED, "length": length, "apart": APART} | about(
        options
    )
    for kind, texts_of in KINDS_OF_TEXT.items():
        texts = texts_of(tokenizer_of(options), length)[: options.texts]
        last = {"full": _last(known.of("base", partial(opened, base), texts))}
        last["window"] = _last(known.of(*named(base, WINDOW), texts))
        for those in (range(NUM_LAYERS), FAR_LAYERS):
            own = [] if len(those) == NUM_LAYERS else [layer_types(those, NUM_LAYERS)]
            for way in ("chooses", "windows"):
                named_so, open_model = named_hils(options, *own, f"reading={way}")
                last["hils"] = _last(known.of(named_so, open_model, texts, partial(_read_and_ask, texts)))
                row = {"kind": kind, "layers": list(those), "reading": way, "texts": len(texts)}
                losses.append(row | closed(last, ASKED))
                keep(options.output, "reading", found)
    found |= training_of(trained(options.folder, TAUGHT[-1], 0, 0))
    asked, (near, *_) = Needles(options, progress), options.needles
    fine, exact = (Case("few", 16, summary, f"{APART}") for summary in (FINE, 1))
    farthest = exact._replace(taught=TAUGHT[-1])
    choosy = farthest._replace(chunks=4)  # 4 was chosen by 12 questions at 262,144 tokens, beside 16 and 64
    together = [fine, exact, farthest, choosy, Case(TAUGHT[-1], None)]
    cases: list[tuple[Case, int, int, int]]
    cases = [(case, near, TOGETHER, options.questions) for case in together]
    cases += [(exact, near, 1, options.questions)]
    cases += [(exact, length, 1, options.few) for length in options.far]
    cases += [(fine, options.far[-1], 1, options.singles)]
    cases += [(farthest, options.far[0], 1, options.singles)]
    cases += [(choosy, length, 1, options.singles) for length in options.farther]
    cases += [(farthest, length, 1, options.few) for length in options.longest]
    for case, length, count, questions in cases:
        taught, hils = taught_hils(options.folder, case.taught)
        folder, changes = taught, case.changes
        if case.chunks is not None:
            folder, changes = hils, (*changes, "reading=windows")
        row = asked.ask(folder, changes, length, together=count, questions=questions)
        rows.append(case._asdict() | {"together": count} | row)
        keep(options.output, "reading", found)
    return found


def _read_and_ask(texts: Sequence[Text], model: Any, number: int) -> Any:
    """[ASKED] what a text's last tokens cost a model that has read the others."""
    ids = row_of(model, texts[number].ids.astype(np.int64))
    with torch.inference_mode():
        cache = model.read(ids[:, : -ASKED - 1])
        asked = ids[:, -ASKED - 1 :]
        return piece_losses(model(asked, past_key_values=cache).logits, None, asked)[0][0, 1:]


def _last(losses: Sequence[Any]) -> Any:
    """Nats of each text's last tokens."""
    return np.array([own[-ASKED:].sum() for own in losses])


class Case(NamedTuple):
    """A model of the part few."""

    taught: str
    chunks: int | None
    """That a token reads in a layer; None: full attention."""
    summary: int | None = None
    position: str = "window"
    """Where far keys stand; a number: so far back."""

    @property
    def changes(self) -> tuple[str, ...]:
        if self.chunks is None:
            return ()
        far = "far_distance" if self.position.isdecimal() else "far_position"
        own = f"summary_tokens={self.summary}", f"{far}={self.position}"
        return f"num_retrieved_chunks={self.chunks}", *own


PARTS = {
    "needles": needles, "beyond": beyond, "recall": recall, "layers": layers, "few": few, "reading": reading,
}  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__, PARTS, OUTPUT)
    parser.add_argument("--length", type=int, default=4096, help="of texts whose losses are counted")
    parser.add_argument("--texts", type=int, default=9, help="that losses are of, at most")
    parser.add_argument(
        "--far", type=int, nargs="*", default=(16_384, 65_536), help="lengths beyond the base's"
    )
    parser.add_argument(
        "--farther",
        type=int,
        nargs="*",
        default=(65_536, 262_144),
        help="at which that model is asked as it reads few chunks, in the part reading",
    )
    parser.add_argument(
        "--longest",
        type=int,
        nargs="*",
        default=(),
        help="at which one model alone is asked, in the part reading",
    )
    parser.add_argument("--needles", type=int, nargs="+", default=(4096, 65_536), help="lengths of texts")
    parser.add_argument("--questions", type=int, default=100, help="about needles, at each length")
    parser.add_argument(
        "--singles", type=int, default=20, help="about a text's only needle, in the part recall"
    )
    parser.add_argument(
        "--few", type=int, default=8, help="questions at the lengths of --far, of taught models"
    )
    parser.add_argument("--layers-at", type=int, default=2048, help="length of texts in the part layers")
    parser.add_argument("--trained", type=Path, default=FOLDER / "hils-0", help="by pretrained_train.py hils")
    measure_parts(PARTS, parser.parse_args())


if __name__ == "__main__":
    main()
