"""SmolLM2-135M that chooses chunks in every layer (``convert --to hils``): what it loses to full attention, untrained.

    TRAILMARK_DATA=... python benchmarks/pretrained_hils.py [losses forms whole far needles beyond recall layers few
        reading reader focus words shares along]

Writes benchmarks/pretrained_hils.json. Held-out text is that of pretrained.py; the base with full attention and with a
window alone stand beside it. Nothing is trained but the models of ``--trained`` (pretrained_train.py hils) and of the
parts "recall", "layers", "few", "reading" (pretrained_train.py recall further few longer), "reader"
(pretrained_train.py reader) and "shares" (pretrained_train.py reader-some reader-none). The parts "focus" and "words"
ask the one whose additions lie in models/. Stopped, the same command goes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from common import data_folder, keep
from pretrained_models import (
    FAR_LAYERS,
    FINE,
    FOLDER,
    KINDS_OF_TEXT,
    NUM_LAYERS,
    READERS,
    TAUGHT,
    UNSEEN,
    WINDOW,
    Losses,
    Text,
    books,
    converted,
    far_base,
    hils_of,
    latex,
    named,
    on_short_texts,
    opened,
    shipped_reader,
    subject,
    totals,
    trained,
)  # fmt: skip
from pretrained_needles import Needles

from tests.smollm2 import smollm2
from trailmark.data.corpus import load_tokenizer, read_text, tokenize
from trailmark.evaluation.far_layers import layer_types, measure_far_layers
from trailmark.evaluation.retrieval.run import row_of
from trailmark.evaluation.subject import Subject
from trailmark.files import read_json
from trailmark.memory import ChunkCache
from trailmark.models.conversion.convert import open_any_base
from trailmark.models.hils.config import HiLSConfig
from trailmark.report.console import Progress
from trailmark.statistics import bootstrap_mean, bootstrap_ratio
from trailmark.trace.losses import piece_losses
from trailmark.training.config import load_run_config
from trailmark.training.run import HISTORY_FILE

OUTPUT = Path(__file__).with_suffix(".json")
APART = 1024  # tokens: farther than the window is long
ASKED = 1024  # a text's last tokens, which are predicted where the others are only read
TOGETHER = 25  # needles in a text, each of which is asked for
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
            if length > options.lengths[0] and kind != "LaTeX":
                continue
            texts = texts_of(_tokenizer(options), length)
            for chunks in options.chunks:
                changes = [f"num_retrieved_chunks={chunks}"]
                row = {"kind": kind, "length": length, "chunks": chunks}
                rows.append(row | _row(options, progress, texts, changes))
    return _about(options) | {"rows": rows}


def forms(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """By what scores a chunk, on LaTeX, and with no chunk at all."""
    texts, rows = latex(_tokenizer(options), options.lengths[0])[: options.texts], []
    for form, changes in FORMS.items():
        rows.append({"form": form} | _row(options, progress, texts, changes))
    chunks = HiLSConfig.from_pretrained(_hils(options)).num_retrieved_chunks
    return _about(options) | {"length": options.lengths[0], "chunks": chunks, "rows": rows}


def whole(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """HiLS' own score and the exact one on LaTeX at the longest of the lengths, by how many chunks each token reads."""
    length, rows = options.lengths[-1], []
    texts = latex(_tokenizer(options), length)[: options.texts]
    for chunks in options.chunks:
        for form in (HILS, EXACT):
            changes = [*FORMS[form], f"num_retrieved_chunks={chunks}"]
            rows.append({"form": form, "chunks": chunks} | _row(options, progress, texts, changes))
    return _about(options) | {"length": length, "rows": rows}


def far(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Beyond the base's own length: chapters one after another, beside the window alone."""
    files = sorted((data_folder("math") / "test").glob("*.tex"))
    whole = tokenize([read_text(file) for file in files], _tokenizer(options))
    known, rows = Losses(options.folder / "losses.json", progress), []
    for length in options.far:
        count = min(4, max(1, (1 << 17) // length), len(whole) // length)
        texts = [
            Text(f"chapters from {n * length}", whole[n * length : (n + 1) * length]) for n in range(count)
        ]
        pair = named(_base(options), WINDOW), _named(options)
        found_losses = [known.of(name, open_model, texts) for name, open_model in pair]
        window, hils = (np.array([x[UNSEEN - 1 :].mean() for x in own]) for own in found_losses)
        low, high = bootstrap_mean(window - hils)
        found = {"window": float(window.mean()), "hils": float(hils.mean())}
        gained = {"gain": float((window - hils).mean()), "gain_low": low, "gain_high": high}
        rows.append({"length": length, "texts": count} | found | gained)
    return _about(options) | {"rows": rows}


def needles(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """A sentence in a book that is to be completed: the base, this model, and the one that was trained."""
    asked, rows = Needles(options, progress), []
    models = [("base", _base(options)), ("as converted", _hils(options)), ("trained", options.trained)]
    for model, folder in models:
        for length in options.needles:
            if folder.exists() and (model == "trained" or length <= 4096):
                rows.append({"model": model} | asked.ask(folder, (), length))
    return _about(options) | {"rows": rows} | _training(options.trained)


def recall(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The same of a base that learned with full attention on short texts, and then became a HiLS as it is."""
    taught, hils = _taught(options, "recall")
    taught_on = load_run_config(taught / "run.yaml").training.context_length
    asked, rows = Needles(options, progress), list[dict[str, Any]]()
    found = {"rows": rows, "trained_length": taught_on} | _about(options) | _training(taught)
    wide = ("num_retrieved_chunks=64",)
    models = (
        ("full attention, taught", taught, ()),
        ("HiLS as converted", _hils(options), ()),
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


def _taught(options: argparse.Namespace, kind: str) -> tuple[Path, Path]:
    """What pretrained_train.py has made of the base, and a HiLS of it."""
    taught = trained(options.folder, kind, 0, 0)
    if not (taught / HISTORY_FILE).exists():
        sys.exit(f"{taught} is not there. Train it: python benchmarks/pretrained_train.py {kind}")
    return taught, hils_of(options.folder, taught)


def layers(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Which layers look far, before and after the base was taught; and what it completes where those alone do."""
    taught, _ = _taught(options, "recall")
    bases = {"base": smollm2(), "taught": taught}
    seen = {name: measure_far_layers(open_any_base(folder)) for name, folder in bases.items()}
    asked, rows, length = Needles(options, progress), list[dict[str, Any]](), options.layers_at
    found = (
        {"rows": rows, "length": length, "seen": {name: x._asdict() for name, x in seen.items()}}
        | _about(options)
        | _training(taught)
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
    texts, losses = latex(_tokenizer(options), options.lengths[0])[: options.texts], list[dict[str, Any]]()
    found |= {"losses": losses, "losses_length": options.lengths[0]}
    for those in (range(NUM_LAYERS), FAR_LAYERS):
        changes = () if len(those) == NUM_LAYERS else (layer_types(those, NUM_LAYERS),)
        losses.append({"layers": list(those)} | _row(options, progress, texts, changes))
        keep(options.output, "layers", found)
    return found


def few(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """What a base that was taught with full attention in few layers knows as a HiLS, by where far keys stand."""
    trainings = {kind: x for kind in TAUGHT[:-1] if (x := _training(trained(options.folder, kind, 0, 0)))}
    asked, rows, (near, *_) = Needles(options, progress), list[dict[str, Any]](), options.needles
    found = {"rows": rows, "layers": FAR_LAYERS, "trainings": trainings} | _about(options)
    apart = Case("few", 16, FINE, f"{APART}")
    together = [
        Case("few", None), Case("few", 16, 8), Case("few", 64, 8), Case("few", 16, FINE), Case("few", 16, FINE, "true"),
        apart, apart._replace(taught="recall"),
    ]  # fmt: skip
    cases = [(case, near, TOGETHER, options.questions) for case in together]
    cases += [(apart, near, 1, options.singles)]
    cases += [(apart, length, TOGETHER, options.few) for length in options.far]
    for case, length, count, questions in cases:
        taught, hils = _taught(options, case.taught)
        folder = taught if case.chunks is None else hils
        row = asked.ask(folder, case.changes, length, together=count, questions=questions)
        rows.append(case._asdict() | {"together": count} | row)
        keep(options.output, "few", found)
    return found


def reading(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Texts read with windows alone, of which what is predicted chooses: losses, untaught, and needles."""
    known, length = Losses(options.folder / "losses-reading.json", progress), options.lengths[0]
    base, losses, rows = _base(options), list[dict[str, Any]](), list[dict[str, Any]]()
    found = {"losses": losses, "rows": rows, "asked": ASKED, "length": length, "apart": APART} | _about(
        options
    )
    for kind, texts_of in KINDS_OF_TEXT.items():
        texts = texts_of(_tokenizer(options), length)[: options.texts]
        last = {"full": _last(known.of("base", partial(opened, base), texts))}
        last["window"] = _last(known.of(*named(base, WINDOW), texts))
        for those in (range(NUM_LAYERS), FAR_LAYERS):
            own = [] if len(those) == NUM_LAYERS else [layer_types(those, NUM_LAYERS)]
            for way in ("chooses", "windows"):
                named_so, open_model = _named(options, *own, f"reading={way}")
                last["hils"] = _last(known.of(named_so, open_model, texts, partial(_read_and_ask, texts)))
                row = {"kind": kind, "layers": list(those), "reading": way, "texts": len(texts)}
                losses.append(row | _closed(last, ASKED))
                keep(options.output, "reading", found)
    found |= _training(trained(options.folder, TAUGHT[-1], 0, 0))
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
        taught, hils = _taught(options, case.taught)
        folder, changes = taught, case.changes
        if case.chunks is not None:
            folder, changes = hils, (*changes, "reading=windows")
        row = asked.ask(folder, changes, length, together=count, questions=questions)
        rows.append(case._asdict() | {"together": count} | row)
        keep(options.output, "reading", found)
    return found


READER = ("reading=windows", "summary_tokens=1", f"far_distance={APART}")
READ = 4  # chunks that a token reads in a layer
ASKED_SO = (*READER, f"num_retrieved_chunks={READ}")
WORDS = ("sentences", "paraphrases")
LONG_CHAPTER, EVERY, ENDS = "stacks_chow.tex", 16_384, (65_536, 262_144)
QUESTION, WRITTEN, REPEATS = "The name of the house in which he was born is", 16, 3


def reader(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """A reader of long texts as docs/convert.md makes it, before and after one training on texts that hold facts."""
    taught, hils = _taught(options, "reader")
    models = {"as converted": hils_of(options.folder, far_base(options.folder)), "taught": hils}
    asked, rows, (near, *_) = Needles(options, progress), list[dict[str, Any]](), options.needles
    trained_length = load_run_config(taught / "run.yaml").training.context_length
    about = {"fields": READER, "chunks": READ, "trained_length": trained_length}
    found = {"rows": rows} | about | _training(taught)
    known, texts_of = Losses(options.folder / "losses.json", progress), KINDS_OF_TEXT | {"books": books}
    texts = {kind: of(_tokenizer(options), near) for kind, of in texts_of.items()}
    own = named(taught, WINDOW)
    found["short"] = on_short_texts(known, _base(options), own, texts, WINDOW // 2, "taught")
    alone = {"taught": hils}
    cases = [(near, together, options.questions, models, False, READ) for together in (TOGETHER, 1)]
    cases += [(near, 1, options.singles, models, True, READ)]
    cases += [(length, 1, options.few, models, False, READ) for length in options.far]
    cases += [(length, 1, options.few, alone, False, READ) for length in options.longest]
    cases += [
        (length, 1, options.few, alone, False, fewer)
        for fewer in options.fewer
        for length in (*options.far, *options.longest)
    ]
    for length, together, questions, asked_ones, chat, chunks in cases:
        for model, folder in asked_ones.items():
            fields = (*READER, f"num_retrieved_chunks={chunks}")
            row = asked.ask(folder, fields, length, chat, together, questions)
            rows.append({"model": model, "together": together, "chat": chat, "chunks": chunks} | row)
            keep(options.output, "reader", found)
    return found


def focus(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The reader in models/smollm2-135m-reader, whose questions focus on a few chunks; those asked are of "reader"."""
    hils, fields = shipped_reader(options.folder), ASKED_SO
    asked, rows, speeds = Needles(options, progress), list[dict[str, Any]](), list[dict[str, Any]]()
    about = {"fields": READER, "chunks": READ, "focus": options.focus, "written": WRITTEN}
    found = {"rows": rows, "speeds": speeds} | about | _about(options)
    shipped = subject(hils, *fields)
    cache = shipped.model.new_cache(num_tokens=max(options.timed, default=0))
    for length in sorted(options.timed):
        piece = torch.from_numpy(asked.text[cache.get_seq_length() : length].astype(np.int64))
        shipped.model.read(piece[None], cache, progress=lambda n, _: progress.show(f"{n:,} read"))
        for count in (None, options.focus):
            speeds.append({"length": length, "focus": count} | _seconds_of_an_answer(shipped, cache, count))
        keep(options.output, "focus", found)
    for length in (*options.far, *options.longest):
        own = (*fields, f"num_focus_chunks={options.focus}")
        rows.append(asked.ask(hils, own, length, questions=options.few))
        keep(options.output, "focus", found)
    return found


def words(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The same reader with a focus, asked in the words of each format, of one fact in a text and of many."""
    models = {
        "as converted": hils_of(options.folder, far_base(options.folder)),
        "taught": shipped_reader(options.folder),
    }
    fields = (*ASKED_SO, f"num_focus_chunks={options.focus}")
    asked, rows, (near, *_) = Needles(options, progress), list[dict[str, Any]](), options.needles
    found = {"rows": rows, "fields": READER, "chunks": READ, "focus": options.focus} | _about(options)
    cases = [(near, together, format, False) for together in (1, TOGETHER) for format in WORDS]
    cases += [(near, 1, "paraphrases", True)]
    cases += [(length, TOGETHER, format, False) for length in options.far for format in WORDS]
    cases += [(length, 1, "paraphrases", chat) for length in options.far for chat in (False, True)]
    for length, together, format, chat in cases:
        alone = options.singles if length == near else options.few
        many = options.questions if length == near else TOGETHER
        for model, folder in models.items():
            if model == "taught" or (length, together) == (near, 1):
                count = alone if together == 1 else many
                row = asked.ask(folder, fields, length, chat, together, count, format)
                rows.append({"model": model, "together": together, "format": format, "chat": chat} | row)
                keep(options.output, "words", found)
    return found


def shares(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """What the reader's training gives with facts in fewer of its texts; the questions are of "reader"."""
    asked, rows, (near, *_) = Needles(options, progress), list[dict[str, Any]](), options.needles
    found = {"rows": rows, "chunks": READ} | _about(options)
    kinds = [
        kind
        for kind in READERS
        if kind != "reader" and (trained(options.folder, kind, 0, 0) / HISTORY_FILE).exists()
    ]
    for kind in kinds or ("reader-some",):  # which is then named, as not there
        taught, hils = _taught(options, kind)
        for together in (TOGETHER, 1):
            row = asked.ask(hils, ASKED_SO, near, together=together, questions=options.questions)
            rows.append({"share": READERS[kind], "together": together} | _training(taught) | row)
            keep(options.output, "shares", found)
    return found


def along(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """A chapter as long as a book, read with windows alone: what its next tokens cost, untaught, on the way."""
    file = data_folder("math") / "test" / LONG_CHAPTER
    known = Losses(options.folder / "losses.json", progress)
    whole = tokenize([read_text(file)], _tokenizer(options))
    texts = [
        Text(f"{file.name}, next {ASKED}", whole[: place + ASKED + 1])
        for place in range(EVERY, min(options.along, len(whole) - ASKED - 1) + 1, EVERY)
    ]
    few = hils_of(options.folder, far_base(options.folder))
    models: dict[str, tuple[str, Callable[[], Any]]] = {
        "window": named(_base(options), WINDOW),
        "hils": (" ".join([few.name, *ASKED_SO]), partial(opened, few, *ASKED_SO)),
    }
    nats = {
        name: np.array([own.mean() for own in known.of(called, open_model, texts, _reading_on(texts))])
        for name, (called, open_model) in models.items()
    }
    places, rows = np.array([len(text.ids) - ASKED - 1 for text in texts]), []
    for low, high in pairwise((0, *(end for end in ENDS if end <= places[-1]))):
        those = (places > low) & (places <= high)
        gain = (nats["window"] - nats["hils"])[those]
        gain_low, gain_high = bootstrap_mean(gain)
        row = {name: float(own[those].mean()) for name, own in nats.items()}
        row |= {
            "gain": float(gain.mean()),
            "gain_low": gain_low,
            "gain_high": gain_high,
            "least": float(gain.min()),
        }
        rows.append({"first": int(places[those][0]), "last": int(high), "stretches": len(gain)} | row)
    return _about(options) | {
        "fields": ASKED_SO,
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


@torch.no_grad()
def _seconds_of_an_answer(asked: Subject, cache: ChunkCache, count: int | None) -> dict[str, float]:
    """Of a question to a memory, until its first token and for each of WRITTEN more."""
    model = asked.model
    model.config.num_focus_chunks = count  # a memory depends on nothing of it
    ids = torch.tensor([tokenize([QUESTION], asked.tokenizer)])
    firsts, others = [], []
    for _ in range(REPEATS):
        branch, began = cache.branch(), time.perf_counter()
        model.focus(ids, branch)
        token = (
            model(ids, past_key_values=branch, close_chunk=True, logits_to_keep=1).logits[:, -1].argmax(-1)
        )
        first = time.perf_counter()
        for _ in range(WRITTEN):
            token = model(token[:, None], past_key_values=branch, logits_to_keep=1).logits[:, -1].argmax(-1)
        firsts.append(first - began)
        others.append((time.perf_counter() - first) / WRITTEN)
    return {"first": median(firsts), "each": median(others)}


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


def _training(folder: Path) -> dict[str, Any]:
    history = read_json(folder / HISTORY_FILE)
    return {} if history is None else {f"trained_{name}": history[name] for name in ("tokens", "seconds")}


def beyond(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The same beyond the base's own length, as converted and trained."""
    asked = Needles(options, progress)
    models = [("as converted", _hils(options)), ("trained", options.trained)]
    rows = [
        {"model": model} | asked.ask(folder, (), length)
        for model, folder in models
        if folder.exists()
        for length in options.far
    ]
    return _about(options) | {"rows": rows}


def _row(
    options: argparse.Namespace, progress: Progress, texts: Sequence[Text], changes: Sequence[str]
) -> dict[str, Any]:
    known, base = Losses(options.folder / "losses.json", progress), _base(options)
    full = totals(known.of("base", partial(opened, base), texts))
    pair = named(base, WINDOW), _named(options, *changes)
    window, hils = (totals(known.of(name, open_model, texts)) for name, open_model in pair)
    sums = {"full": full, "window": window, "hils": hils}
    return {"texts": len(texts)} | _closed(sums, len(texts[0].ids) - UNSEEN)


def _closed(sums: dict[str, Any], each: int) -> dict[str, Any]:
    """What a HiLS gives back of what the window loses; ``sums``: nats of each text, of ``each`` tokens."""
    full, window, hils = (sums[name] for name in ("full", "window", "hils"))
    counted = each * len(full)
    low, high = bootstrap_ratio(window - hils, window - full)
    above_low, above_high = bootstrap_mean((hils - full) / each)
    return {
        "nats": {name: float(x.sum() / counted) for name, x in sums.items()},
        "closed": float((window - hils).sum() / (window - full).sum()), "closed_low": low, "closed_high": high,
        "above": float((hils - full).sum() / counted), "above_low": above_low, "above_high": above_high,
    }  # fmt: skip


def _about(options: argparse.Namespace) -> dict[str, Any]:
    config = HiLSConfig.from_pretrained(_hils(options))
    return {"window": WINDOW, "chunk_size": config.chunk_size, "summary_tokens": config.summary_tokens}


def _base(options: argparse.Namespace) -> Path:
    return converted(options.folder, "sliding_window")


def _hils(options: argparse.Namespace) -> Path:
    return converted(options.folder, "hils")


def _named(options: argparse.Namespace, *changes: str) -> tuple[str, Any]:
    """What losses are known by, and how the model is opened."""
    folder = _hils(options)
    return " ".join([folder.name, *changes]), partial(opened, folder, *changes)


def _tokenizer(options: argparse.Namespace) -> Any:
    return load_tokenizer(str(_base(options)))


PARTS = {
    "losses": losses, "forms": forms, "whole": whole, "far": far, "needles": needles, "beyond": beyond,
    "recall": recall, "layers": layers, "few": few, "reading": reading, "reader": reader, "focus": focus,
    "words": words, "shares": shares, "along": along,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all of them by default")
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="models that are made, and losses that are known"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=(4096, 8192), help="the longer on LaTeX alone"
    )
    parser.add_argument(
        "--chunks", type=int, nargs="+", default=(16, 64), help="that a token reads in a layer"
    )
    parser.add_argument("--texts", type=int, default=9, help="that forms are compared on, at most")
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
        help="at which one model alone is asked, in the parts reading and reader",
    )
    parser.add_argument(
        "--fewer",
        type=int,
        nargs="*",
        default=(),
        help=f"chunks that a token reads in place of {READ} at the lengths of --far and --longest, in the part reader",
    )
    parser.add_argument("--focus", type=int, default=32, help="num_focus_chunks, in the part focus")
    parser.add_argument(
        "--timed",
        type=int,
        nargs="*",
        default=(16_384, 65_536, 262_144),
        help="tokens behind which an answer is timed",
    )
    parser.add_argument(
        "--along", type=int, default=262_144, help="tokens of a chapter that are read, in the part along"
    )
    parser.add_argument("--needles", type=int, nargs="+", default=(4096, 65_536), help="lengths of texts")
    parser.add_argument("--questions", type=int, default=100, help="about needles, at each length")
    parser.add_argument(
        "--singles",
        type=int,
        default=20,
        help="about a text's only needle, in the part recall; through the chat template, in the part reader",
    )
    parser.add_argument(
        "--few", type=int, default=8, help="questions at the lengths of --far, of taught models"
    )
    parser.add_argument("--layers-at", type=int, default=2048, help="length of texts in the part layers")
    parser.add_argument("--trained", type=Path, default=FOLDER / "hils-0", help="by pretrained_train.py hils")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    progress = Progress()
    for part in options.parts or PARTS:
        keep(options.output, part, PARTS[part](options, progress))
        progress.say(f"{part}: measured, in {options.output}")


if __name__ == "__main__":
    main()
