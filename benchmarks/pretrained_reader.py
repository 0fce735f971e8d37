"""The reader of long texts in models/smollm2-135m-reader: how it was taught, and what it answers with a focus.

    TRAILMARK_DATA=... python benchmarks/pretrained_reader.py [reader twins short focus long completed million times
                                                               shares]

Writes benchmarks/pretrained_reader.json. The parts "reader" and "shares" ask what pretrained_train.py makes (reader,
reader-some and reader-none), the others the model whose additions lie in models/; beside it "twins" asks the same model
with its windows alone and the base with full attention, "focus" and "short" the base as converted. Stopped, the same
command goes on; after a change of how a model chooses, take another --folder.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import keep
from pretrained_hils import about, base_of, tokenizer_of
from pretrained_models import (
    KINDS_OF_TEXT,
    READ,
    READER,
    READER_FIELDS,
    READERS,
    WINDOW,
    Losses,
    books,
    far_base,
    held_out_books,
    hils_of,
    measure_parts,
    named,
    on_short_texts,
    parser_of,
    shipped,
    shipped_reader,
    subject,
    taught_hils,
    trained,
    training_of,
    weights_of,
)  # fmt: skip
from pretrained_needles import TOGETHER, Needles

from trailmark.data.corpus import Tokens, tokenize
from trailmark.data.needles.haystacks import Haystack
from trailmark.data.needles.tasks import Trial
from trailmark.evaluation.needles.ask import Plan, num_haystacks
from trailmark.evaluation.needles.askers import MemoryAsker, ReadingCost
from trailmark.evaluation.needles.judging import summary
from trailmark.evaluation.needles.suite import NeedleSettings
from trailmark.evaluation.subject import Subject
from trailmark.files import read_json, remove_folder, write_json
from trailmark.memory import ChunkCache
from trailmark.memory.manifest import NAME
from trailmark.models.conversion.convert import open_any_base
from trailmark.models.conversion.targets import TARGETS
from trailmark.report.console import Progress
from trailmark.training.config import load_run_config
from trailmark.training.run import HISTORY_FILE

OUTPUT = Path(__file__).with_suffix(".json")
# by format and whether through the chat template: facts of one format are hidden once for all ways to ask
ASKED = (("sentences", False), ("paraphrases", False), ("paraphrases", True))
WORDS = tuple(dict.fromkeys(format for format, _ in ASKED))
LONG, MILLION = 65_536, 1_048_576  # tokens of texts that are read once for several facts
SEED = 1  # of its facts
SAVED = 262_144  # tokens after which a haystack's memory is saved, again and again
QUESTION, WRITTEN, REPEATS = "The name of the house in which he was born is", 16, 3


def reader(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """A reader of long texts as docs/convert.md makes it, before and after one training on texts that hold facts."""
    taught, hils = taught_hils(options.folder, "reader")
    models = {"as converted": hils_of(options.folder, far_base(options.folder)), "taught": hils}
    asked, rows, near = Needles(options, progress), list[dict[str, Any]](), options.needles
    trained_length = load_run_config(taught / "run.yaml").training.context_length
    how = {"fields": READER, "chunks": READ, "trained_length": trained_length}
    found = {"rows": rows} | how | training_of(taught)
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


def short(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """What its training took from its base on texts of books that the window holds whole: more of them."""
    known, tokenizer = Losses(options.folder / "losses.json", progress), tokenizer_of(options)
    length, of_each = WINDOW // 2, -(-options.pieces // len(held_out_books()))
    texts = {"books": books(tokenizer, 4 * length * of_each)}  # every fourth piece is read
    own = named(shipped(options.folder), WINDOW)
    return {"rows": on_short_texts(known, base_of(options), own, texts, length, "taught")}


def times(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Seconds of an answer behind a text, without a focus and with one."""
    asked, text = subject(shipped_reader(options.folder), *READER_FIELDS), Needles(options, progress).text
    rows, set_count = list[dict[str, Any]](), _focus_set(options.folder)
    cache = asked.model.new_cache(num_tokens=max(options.timed))
    for length in sorted(options.timed):
        piece = torch.from_numpy(text[cache.get_seq_length() : length].astype("int64"))
        asked.model.read(piece[None], cache, progress=lambda n, _: progress.show(f"{n:,} read"))
        for count in (None, set_count):
            rows.append({"length": length, "focus": count} | _seconds_of_an_answer(asked, cache, count))
        keep(options.output, "times", found := about(options) | {"rows": rows, "written": WRITTEN})
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


def focus(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The reader and its base asked for each of many facts in a short text, with the focus that a conversion sets."""
    models = {
        "as converted": hils_of(options.folder, far_base(options.folder)),
        "taught": shipped_reader(options.folder),
    }
    count = _focus_set(options.folder)
    asked, rows, length = Needles(options, progress), list[dict[str, Any]](), options.needles
    found = {"rows": rows, "fields": READER_FIELDS, "set": count}
    fields = (*READER_FIELDS, f"num_focus_chunks={count}")
    for (format, chat), (model, folder) in product(ASKED, models.items()):
        row = asked.ask(folder, fields, length, chat, TOGETHER, format=format)
        rows.append({"model": model, "together": TOGETHER, "format": format, "chat": chat} | row)
        keep(options.output, "focus", found)
    return found


def twins(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The reader's windows alone, which choose no chunk, and the base with full attention at its own length."""
    asked, rows, near = Needles(options, progress), list[dict[str, Any]](), options.needles
    windows = "taught, windows alone", shipped_reader(options.folder), (*READER, "num_retrieved_chunks=0")
    full = "base, full attention", base_of(options), ()
    cases: list[tuple[tuple[str, Path, tuple[str, ...]], int, int]]
    cases = [
        (windows, near, options.singles),
        (full, 2 * near, options.singles),
        (windows, LONG, options.few),
    ]
    found = {"rows": rows, "fields": READER, "planned": len(cases)}
    for (model, folder, fields), length, questions in cases:
        row = asked.ask(folder, fields, length, questions=questions)
        rows.append({"model": model, "together": 1, "chat": False} | row)
        keep(options.output, "twins", found)
    return found


def long(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Facts in other words; a part for each way to tell them, for each is hours of reading."""
    return _alone(options, progress, LONG, options.long, WORDS[1:])


def completed(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Sentences in the texts of "long"."""
    return _alone(options, progress, LONG, options.long, WORDS[:1])


def million(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Both in a text that is longer still."""
    return _alone(options, progress, MILLION, options.facts, WORDS)


def _alone(
    options: argparse.Namespace, progress: Progress, length: int, count: int, formats: Sequence[str]
) -> dict[str, Any]:
    """The reader with that focus in long texts, which it reads once for several single facts."""
    alone = Alone(options.folder, Needles(options, progress).text, progress)
    return {"fields": alone.fields, "seed": SEED, "rows": alone.ask(length, count, formats)}


def _focus_set(folder: Path) -> int:
    """What ``trailmark convert --to hils reading=windows`` sets."""
    # what is set is the same for every base
    fields = TARGETS["hils"].defaults(open_any_base(shipped(folder)), {"reading": "windows"})
    assert isinstance(fields["num_focus_chunks"], int)
    return fields["num_focus_chunks"]


class Alone:
    """Single facts in haystacks that are read once for all of them; a file keeps what is known of each fact."""

    def __init__(self, folder: Path, text: Tokens, progress: Progress) -> None:
        self.folder, self.file, self.text, self.progress = folder, folder / "alone.json", text, progress
        self.known: dict[str, list[dict[str, Any]]] = read_json(self.file) or {}
        self.fields = (*READER_FIELDS, f"num_focus_chunks={_focus_set(folder)}")
        self.asked = subject(shipped_reader(folder), *self.fields)
        self.dtype = str(self.asked.model.dtype).removeprefix("torch.")  # in which it is computed
        self.name = f"{weights_of(shipped_reader(folder))[:12]} {self.dtype} {self.fields}"

    @torch.no_grad()
    def ask(self, length: int, count: int, formats: Sequence[str]) -> list[dict[str, Any]]:
        """A row for each way to ask, of ``count`` facts of each format."""
        haystacks, lines = num_haystacks(length, count), list[dict[str, Any]]()
        for number in range(haystacks):
            facts = count * (number + 1) // haystacks - count * number // haystacks
            name = f"{length:,} tokens, haystack {number + 1} of {haystacks}"
            # of these formats alone: another part may read the same haystack meanwhile
            kept = (
                self.folder / "alone" / f"{self.name[:12]}-{length}-{number}-{self.dtype}-{'-'.join(formats)}"
            )
            key = f"{self.name} | {length} | {number} of {haystacks} | {SEED}"
            keys = {(format, fact): f"{key} | {format} {fact}" for fact in range(facts) for format in formats}
            if missing := [asked for asked, key in keys.items() if key not in self.known]:
                for asked, found in self._in_haystack(length, number, missing, name, kept):
                    told = [line | {"dtype": self.dtype} for line in found]
                    # another process may have written meanwhile
                    self.known = (read_json(self.file) or {}) | self.known | {keys[asked]: told}
                    write_json(self.file, self.known)
            lines += [line for key in keys.values() for line in self.known[key]]
        rows = []
        for format, chat in ASKED:
            if own := [line for line in lines if (line["format"], line["chat"]) == (format, chat)]:
                row = {"length": length, "format": format, "chat": chat, "dtype": own[0]["dtype"]}
                rows.append(row | {name: x for name, x in summary(own).items() if name != "asked"})
        return rows

    def _in_haystack(
        self, length: int, number: int, facts: Sequence[tuple[str, int]], name: str, kept: Path
    ) -> Iterator[tuple[tuple[str, int], list[dict[str, Any]]]]:
        """Lines of each of ``facts``, of a format and a number; ``kept``: where its memory is saved meanwhile."""
        plans = self._plans(length)
        first, own_length = next(iter(plans.values()))
        haystack, asker = first.haystack(own_length, number), first.asker(own_length)
        laid = {way: plan.lay(n, number, [None], facts[-1][1] + 1)[None] for way, (plan, n) in plans.items()}
        assert isinstance(asker, MemoryAsker)
        read = self._read(asker, haystack, kept, name)
        for format, fact in facts:
            self.progress.show(f"{name}: {format} {fact + 1} of {facts[-1][1] + 1}")
            trials = {way: laid[way][fact] for way in ASKED if way[0] == format}
            needles = _needles_of(list(trials.values()))
            with asker.holding(read, haystack, needles, ReadingCost(), lambda tokens: None) as held:
                lines = []
                for way, trial in trials.items():
                    (line,) = plans[way][0].ask(asker, held, trial, ReadingCost())
                    lines.append(line | {"format": format, "chat": way[1]})
            yield (format, fact), lines
        remove_folder(kept)  # all is asked

    def _read(self, asker: MemoryAsker, haystack: Haystack, kept: Path, name: str) -> ChunkCache:
        """A haystack's memory; a long one is saved now and then, and a stopped command goes on from there."""
        cache = asker.model.load_cache(kept, "host") if (kept / NAME).exists() else asker.new_cache(None)
        end = haystack.shape[0] * haystack.shape[1]
        for stop in asker.read_on(cache, haystack):
            self.progress.show(f"{name}: {stop:,} read")
            if stop >= SAVED and (stop % SAVED == 0 or stop == end):
                cache.save(kept)
        return cache

    def _plans(self, length: int) -> dict[tuple[str, bool], tuple[Plan, int]]:
        """By format and whether through the chat template: with texts of at most ``length``, the haystack is one."""
        plans = {}
        for format, chat in ASKED:
            settings = NeedleSettings(
                (length,),
                format=format,
                chat=chat,
                needles=1,
                sight="window",
                seed=SEED,
                memory_dtype="bfloat16",
            )
            plans[format, chat] = Plan.of(self.asked, settings, self.text)
        chunks = min(plan.chunks(length) for plan in plans.values())
        size = self.asked.chunk_size
        return {way: (plan, length - (plan.chunks(length) - chunks) * size) for way, plan in plans.items()}


def _needles_of(trials: Sequence[Trial]) -> Sequence[Any]:
    """Of trials that hide the same."""
    first, *others = ([(x.start, x.tokens.tolist()) for x in trial.needles] for trial in trials)
    assert all(other == first for other in others)
    return trials[0].needles


def shares(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """What the reader's training gives with facts in fewer of its texts; the questions are of "reader"."""
    asked, rows, near = Needles(options, progress), list[dict[str, Any]](), options.needles
    found = {"rows": rows, "chunks": READ} | about(options)
    kinds = [
        kind
        for kind in READERS
        if kind != "reader" and (trained(options.folder, kind, 0, 0) / HISTORY_FILE).exists()
    ]
    for kind in kinds or ("reader-some",):  # which is then named, as not there
        taught, hils = taught_hils(options.folder, kind)
        for together in (TOGETHER, 1):
            row = asked.ask(hils, READER_FIELDS, near, together=together, questions=options.questions)
            rows.append({"share": READERS[kind], "together": together} | training_of(taught) | row)
            keep(options.output, "shares", found)
    return found


PARTS = {
    "reader": reader,
    "twins": twins,
    "short": short,
    "focus": focus,
    "long": long,
    "completed": completed,
    "million": million,
    "times": times,
    "shares": shares,
}


def main() -> None:
    parser = parser_of(__doc__, PARTS, OUTPUT)
    parser.add_argument("--needles", type=int, default=4096, help="tokens of short texts")
    parser.add_argument(
        "--far", type=int, nargs="*", default=(16_384,), help="lengths of texts in the part reader"
    )
    parser.add_argument(
        "--longest",
        type=int,
        nargs="*",
        default=(65_536, 1_048_576),
        help="lengths of texts of which the taught one alone is asked, in the part reader",
    )
    parser.add_argument(
        "--fewer",
        type=int,
        nargs="*",
        default=(),
        help=f"chunks that a token reads in place of {READ} at the lengths of --far and --longest, in the part reader",
    )
    parser.add_argument(
        "--timed",
        type=int,
        nargs="+",
        default=(16_384, 65_536, 262_144),
        help="tokens behind which an answer is timed",
    )
    parser.add_argument("--questions", type=int, default=100, help="about needles, in short texts")
    parser.add_argument("--singles", type=int, default=20, help="about the only needle of a short text")
    parser.add_argument("--long", type=int, default=20, help=f"facts of each format in {LONG:,} tokens")
    parser.add_argument("--facts", type=int, default=6, help=f"of each format in {MILLION:,} tokens")
    parser.add_argument("--pieces", type=int, default=200, help="of books at least, in the part short")
    parser.add_argument("--few", type=int, default=10, help="questions in long texts, in the part reader")
    measure_parts(PARTS, parser.parse_args())


if __name__ == "__main__":
    main()
