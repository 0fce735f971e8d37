"""What SmolLM2-135M as a HiLS completes and answers of long texts, as converted and taught: sentences in books.

    TRAILMARK_DATA=... python benchmarks/pretrained_hils_needles.py [needles beyond recall layers few reading reader
        focus words narrow shares]

Writes benchmarks/pretrained_hils_needles.json. Trained models are those of pretrained_train.py: of the parts "needles"
and "beyond" ``--trained`` (hils), of "recall", "layers", "few" and "reading" its recall, further, few and longer, of
"reader" its reader and of "shares" its reader-some and reader-none. The parts "focus", "words" and "narrow" ask the one
whose additions lie in models/. Stopped, the same command goes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
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
    READ,
    READER,
    READER_FIELDS,
    READERS,
    TAUGHT,
    WINDOW,
    Losses,
    Text,
    books,
    far_base,
    hils_of,
    latex,
    measure_parts,
    named,
    on_short_texts,
    opened,
    parser_of,
    shipped_reader,
    subject,
    trained,
    weights_of,
)  # fmt: skip
from pretrained_needles import Needles

from tests.smollm2 import smollm2
from trailmark.data.corpus import tokenize
from trailmark.data.needles.haystacks import Needle
from trailmark.data.needles.tasks import Trial
from trailmark.evaluation.far_layers import layer_types, measure_far_layers
from trailmark.evaluation.needles.ask import Plan, num_haystacks
from trailmark.evaluation.needles.askers import ReadingCost
from trailmark.evaluation.needles.judging import summary
from trailmark.evaluation.needles.suite import NeedleSettings
from trailmark.evaluation.retrieval.run import row_of
from trailmark.evaluation.subject import Subject
from trailmark.files import read_json, write_json
from trailmark.memory import ChunkCache
from trailmark.models.conversion.convert import open_any_base
from trailmark.report.console import Progress
from trailmark.trace.losses import piece_losses
from trailmark.training.config import load_run_config
from trailmark.training.run import HISTORY_FILE

OUTPUT = Path(__file__).with_suffix(".json")
TOGETHER = 25  # needles in a text, each of which is asked for
WORDS = ("sentences", "paraphrases")
FOCUSES, SEED, ALONE = (32, 4), 1, 20  # of the part narrow, which asks for so many facts at each length
QUESTION, WRITTEN, REPEATS = "The name of the house in which he was born is", 16, 3


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
    return about(options) | {"rows": rows} | _training(options.trained)


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
    taught, hils = _taught(options, "recall")
    taught_on = load_run_config(taught / "run.yaml").training.context_length
    asked, rows = Needles(options, progress), list[dict[str, Any]]()
    found = {"rows": rows, "trained_length": taught_on} | about(options) | _training(taught)
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
        | about(options)
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
    texts, losses = latex(tokenizer_of(options), options.length)[: options.texts], list[dict[str, Any]]()
    found |= {"losses": losses, "losses_length": options.length}
    for those in (range(NUM_LAYERS), FAR_LAYERS):
        changes = () if len(those) == NUM_LAYERS else (layer_types(those, NUM_LAYERS),)
        losses.append({"layers": list(those)} | row_of_losses(options, progress, texts, changes))
        keep(options.output, "layers", found)
    return found


def few(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """What a base that was taught with full attention in few layers knows as a HiLS, by where far keys stand."""
    trainings = {kind: x for kind in TAUGHT[:-1] if (x := _training(trained(options.folder, kind, 0, 0)))}
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
        taught, hils = _taught(options, case.taught)
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


def reader(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """A reader of long texts as docs/convert.md makes it, before and after one training on texts that hold facts."""
    taught, hils = _taught(options, "reader")
    models = {"as converted": hils_of(options.folder, far_base(options.folder)), "taught": hils}
    asked, rows, (near, *_) = Needles(options, progress), list[dict[str, Any]](), options.needles
    trained_length = load_run_config(taught / "run.yaml").training.context_length
    how = {"fields": READER, "chunks": READ, "trained_length": trained_length}
    found = {"rows": rows} | how | _training(taught)
    known, texts_of = Losses(options.folder / "losses.json", progress), KINDS_OF_TEXT | {"books": books}
    texts = {kind: of(tokenizer_of(options), near) for kind, of in texts_of.items()}
    own = named(taught, WINDOW)
    found["short"] = on_short_texts(known, base_of(options), own, texts, WINDOW // 2, "taught")
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
    hils, fields = shipped_reader(options.folder), READER_FIELDS
    asked, rows, speeds = Needles(options, progress), list[dict[str, Any]](), list[dict[str, Any]]()
    how = {"fields": READER, "chunks": READ, "focus": options.focus, "written": WRITTEN}
    found = {"rows": rows, "speeds": speeds} | how | about(options)
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


def words(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The same reader with a focus, asked in the words of each format, of one fact in a text and of many."""
    models = {
        "as converted": hils_of(options.folder, far_base(options.folder)),
        "taught": shipped_reader(options.folder),
    }
    fields = (*READER_FIELDS, f"num_focus_chunks={options.focus}")
    asked, rows, (near, *_) = Needles(options, progress), list[dict[str, Any]](), options.needles
    found = {"rows": rows, "fields": READER, "chunks": READ, "focus": options.focus} | about(options)
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


def narrow(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The same reader asked for facts in other words, by how few chunks a question keeps to: of one, and of many.

    32 was chosen before; 4 by twenty questions of "words" in 65,536 tokens, of which 15 were right with 32. The single
    ones here are of another seed, the many the questions of "words".
    """
    asked = subject(shipped_reader(options.folder), *READER_FIELDS)
    needles, rows, folder = Needles(options, progress), list[dict[str, Any]](), shipped_reader(options.folder)
    many = [
        {"focus": count, "chat": False, "format": format}
        | needles.ask(
            folder,
            (*READER_FIELDS, f"num_focus_chunks={count}"),
            options.needles[0],
            together=TOGETHER,
            format=format,
        )
        for format in WORDS
        for count in FOCUSES
    ]
    found = {"rows": rows, "many": many, "fields": READER, "chunks": READ, "seed": SEED} | about(options)
    file, hils = options.folder / "narrow.json", weights_of(folder)
    known: dict[str, list[dict[str, Any]]] = read_json(file) or {}
    plan_of = partial(NeedleSettings, format="paraphrases", needles=1, sight="window", seed=SEED)
    for length in options.narrow:
        plans = [Plan.of(asked, plan_of((length,), chat=chat), needles.text) for chat in (False, True)]
        haystacks, lines = num_haystacks(length, ALONE), list[dict[str, Any]]()
        for number in range(haystacks):
            facts = ALONE * (number + 1) // haystacks - ALONE * number // haystacks
            progress.show(f"{length:,} tokens, haystack {number + 1} of {haystacks}")
            key = f"{hils[:12]} {READER_FIELDS} | {length} | {number} of {haystacks}, {facts} facts | {SEED} {FOCUSES}"
            if key not in known:
                known[key] = _in_each_focus(asked, plans, length, number, facts)
                write_json(file, known)
            lines += known[key]
        for chat, focus in product((False, True), FOCUSES):
            own = [line for line in lines if (line["chat"], line["focus"]) == (chat, focus)]
            first = [line["correct"] for line in own if line["number_first"]]
            row = {"length": length, "format": "paraphrases", "chat": chat, "focus": focus}
            row |= {"number_first": len(first), "number_first_correct": sum(first)}
            rows.append(row | {name: x for name, x in summary(own).items() if name != "asked"})
        keep(options.output, "narrow", found)
    return found


@torch.no_grad()
def _in_each_focus(
    asked: Subject, plans: Sequence[Plan], length: int, number: int, trials: int
) -> list[dict[str, Any]]:
    """Lines of each fact in a haystack, asked for by each plan with each focus, on which no memory depends."""
    haystack, asker = plans[0].haystack(length, number), plans[0].asker(length)
    laid = [plan.lay(length, number, [None], trials)[None] for plan in plans]
    lines: list[dict[str, Any]] = []
    with asker.reading(haystack, ReadingCost(), lambda tokens: None) as read:
        for trial, *others in zip(*laid, strict=True):
            (needle,) = trial.needles
            assert all(_place(other.needles[0]) == _place(needle) for other in others)
            with asker.holding(read, haystack, trial.needles, ReadingCost(), lambda tokens: None) as held:
                for (plan, own), count in product(zip(plans, (trial, *others), strict=True), FOCUSES):
                    asked.model.config.num_focus_chunks = count
                    (line,) = plan.ask(asker, held, own, ReadingCost())
                    way = {"chat": plan.settings.chat, "focus": count}
                    lines.append(line | way | {"number_first": _number_first(trial, asked.tokenizer)})
    return lines


def _number_first(trial: Trial, tokenizer: Any) -> bool:
    """Whether the fact names the number before whose it is, a name of two words with a hyphen."""
    told, number = tokenizer.decode(trial.needles[0].tokens), trial.questions[0].text
    assert number in told
    return "-" in told.partition(number)[2]


def _place(needle: Needle) -> tuple[int, list[int]]:
    return needle.start, needle.tokens.tolist()


def shares(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """What the reader's training gives with facts in fewer of its texts; the questions are of "reader"."""
    asked, rows, (near, *_) = Needles(options, progress), list[dict[str, Any]](), options.needles
    found = {"rows": rows, "chunks": READ} | about(options)
    kinds = [
        kind
        for kind in READERS
        if kind != "reader" and (trained(options.folder, kind, 0, 0) / HISTORY_FILE).exists()
    ]
    for kind in kinds or ("reader-some",):  # which is then named, as not there
        taught, hils = _taught(options, kind)
        for together in (TOGETHER, 1):
            row = asked.ask(hils, READER_FIELDS, near, together=together, questions=options.questions)
            rows.append({"share": READERS[kind], "together": together} | _training(taught) | row)
            keep(options.output, "shares", found)
    return found


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


PARTS = {
    "needles": needles, "beyond": beyond, "recall": recall, "layers": layers, "few": few, "reading": reading,
    "reader": reader, "focus": focus, "words": words, "narrow": narrow, "shares": shares,
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
        "--narrow", type=int, nargs="*", default=(65_536,), help="lengths of texts in the part narrow"
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
    measure_parts(PARTS, parser.parse_args())


if __name__ == "__main__":
    main()
