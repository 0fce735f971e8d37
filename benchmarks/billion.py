"""A billion tokens in a memory that keeps tokens: reading, bytes, and asking by exact search and by faiss.

    python benchmarks/billion.py                                          up to 1,073,741,824 tokens of the demo's model
    python benchmarks/billion.py --lengths 1048576 4194304 --questions 50
    python benchmarks/billion.py --model runs/needle-drt --folder runs/billion
    python benchmarks/billion.py --costs                  seconds and bytes alone, of memories that nobody read
    python benchmarks/billion.py --batch --questions 1000 --folder runs/batch      of one memory, as a batch: minutes

One memory grows: at each length it is saved and asked, then read on, so that all lengths cost what the longest does.
The same command goes on where it was stopped: the memory is saved every 2^26 tokens, and each length stands in the
JSON once it was asked. All needles of a length are hidden at once in a copy of that memory in RAM, which is exactly
that of the text with the needles in it; each question is then asked by itself (its time) and all of them in batches
(what was found). The text is Python's own sources, over and over: a period is no number of whole chunks, so chunks are
others each time until, after 16 times, they come again.

A billion tokens take about two hours of reading on one core, and 16 GB of RAM while they are saved. ``--costs`` takes
about a quarter of an hour: it fills memories with landmark vectors and tokens drawn at random, for what a question
costs depends on how many there are alone.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import peak_memory, seconds, spread
from tables import RIGHT, Columns, Row, cell, line_figure, on_machine, record, table
from torch import Tensor

from trailmark.data.corpus import standard_library_texts, tokenize
from trailmark.data.needles.haystacks import Haystack
from trailmark.data.needles.tasks import Question, Trial
from trailmark.evaluation.needles.ask import Plan
from trailmark.evaluation.needles.askers import Answer, MemoryAsker, ReadingCost
from trailmark.evaluation.needles.judging import judge, line_of, summary
from trailmark.evaluation.needles.planting import planted
from trailmark.evaluation.needles.suite import NeedleSettings
from trailmark.evaluation.reading import resident_bytes
from trailmark.evaluation.record import environment
from trailmark.evaluation.subject import Subject, load
from trailmark.files import read_json, write_json
from trailmark.machine import start_again_set_up
from trailmark.memory import ChunkCache, ExactSearch, FaissSearch, MemoryEntries, Span
from trailmark.memory.saved import MANIFEST
from trailmark.report.console import Progress, size

OUTPUT = Path(__file__).with_suffix(".json")
LENGTHS = tuple(1 << power for power in range(20, 31, 2))  # 1M ... 1,024M
COSTS = (1 << 20, 1 << 24, 104_857_600, 1 << 28, 1 << 30)
BATCHES = (1 << 20, 1 << 24)
_PIECE = 1 << 18  # tokens that are made at a time
_SAVED = 1 << 26  # tokens between savings
# tokens whose index is built for its cost, in minutes; that of four times as many takes 8 times as long
_MOST_INDEXED = 1 << 28
_TOGETHER = 64  # questions of a batch, as the suite asks them
FASTER = 5  # times as fast as by itself, at least, as was asked of a question of a batch
_TIMED = 20  # questions that are asked by themselves, for their time
SEARCHES = {"exact": ExactSearch, "faiss": FaissSearch}


def read_on(subject: Subject, cache: ChunkCache, text: Haystack, folder: Path, progress: Progress) -> Any:
    """Read the haystack to its end, from where the cache is; returns seconds of reading and of saving."""
    model, S, total = subject.model, text.chunk_size, text.chunks * text.chunk_size
    reading = saving = 0.0
    done = saved = first = cache.get_seq_length()
    while done < total:
        stop = min(done + _PIECE, total)
        ids = text[done // S : stop // S].reshape(1, -1)
        began = time.perf_counter()
        model.read(ids, cache)
        reading += time.perf_counter() - began
        done = stop
        progress.show(f"{done:,} tokens read, {(done - first) / reading:,.0f} tokens/s")
        if done - saved >= _SAVED or done == total:
            began = time.perf_counter()
            cache.save(folder)
            saving += time.perf_counter() - began
            saved = done
    return {"tokens": done - first, "seconds_reading": reading, "seconds_saving": saving}


# --- asking ------------------------------------------------------------------------------------------------


def quartiles(values: Sequence[float]) -> dict[str, float] | None:
    """Of none: None."""
    if not len(values):
        return None
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {"low": low, "median": median, "high": high}


def line(
    subject: Subject, trial: Trial, question: Question, answer: Answer, ends: set[int]
) -> dict[str, Any]:
    """What is kept of one question, and how its right chunk stands among those that were read.

    "margin": how much its score is above the best other one's; None where it was not read, or nothing beside it.
    "needles_weight", "text_weight": of chunks with other needles, and of those without any.
    """
    verdict = judge(question, answer.tokens, subject.tokenizer, ends, given=True)
    found = line_of(trial, question, answer, verdict, subject.chunk_size, None)
    assert answer.selected is not None
    (read,) = answer.selected[-1]  # a model that chooses once
    (gold,) = found["gold_chunks"][-1]  # a needle of this format lies whole in a chunk
    others = {m: weight for m, weight in zip(read.chunks, read.weights, strict=True) if m != gold}
    planted_in = {m for chunks in found["needle_chunks"] for m in chunks}
    best = max(others.values(), default=0.0)
    margin = None
    if found["retrieved"] and best:
        # weights are a softmax of scores: their logarithms differ as the scores do
        margin = math.log(found["weight"]) - math.log(best)
    weights = {
        f"{name}_weight": math.fsum(weight for m, weight in others.items() if (m in planted_in) == there)
        for name, there in (("needles", True), ("text", False))
    }
    return found | {"margin": margin} | weights


def outcome(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What came of questions, and the weight of the right chunk among those answered right, and wrong."""
    found = summary(lines)
    found.pop("asked", None)
    sides = {"all": (True, False), "right": (True,), "wrong": (False,)}
    return found | {
        "first": sum(own["ranks"] == [1] for own in lines),
        "weights": {
            name: quartiles([own["weight"] for own in lines if own["correct"] in side])
            for name, side in sides.items()
        },
        "margin": quartiles([own["margin"] for own in lines if own["margin"] is not None]),
        "needles_weight": math.fsum(own["needles_weight"] for own in lines) / len(lines),
        "text_weight": math.fsum(own["text_weight"] for own in lines) / len(lines),
    }


def ask(subject: Subject, cache: ChunkCache, trial: Trial, ends: set[int]) -> dict[str, Any]:
    """What came of a trial's questions, and the time of one."""
    model, S, cost = subject.model, subject.chunk_size, ReadingCost()
    asker = MemoryAsker(model, S, lambda folder: model.new_cache())
    began = time.perf_counter()
    asker.ask(cache, trial.questions[:1], cost)  # builds an index, where there is one
    first, times = time.perf_counter() - began, []
    for question in trial.questions[1 : 1 + _TIMED]:
        began = time.perf_counter()
        asker.ask(cache, [question], cost)
        times.append(time.perf_counter() - began)
    began = time.perf_counter()
    answers = asker.ask(cache, trial.questions, cost)
    together = time.perf_counter() - began
    lines = [line(subject, trial, *own, ends) for own in zip(trial.questions, answers, strict=True)]
    return outcome(lines) | {
        "seconds_first": first,
        "seconds_a_question": spread(times),
        "seconds_a_question_in_batches": together / len(answers),
    }


def add_options(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Those of a memory that grows."""
    parser.add_argument("--model", type=Path, default=Path("demo"), help="folder of a DRT trained on needles")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens, whole chunks")
    parser.add_argument("--landmarks", default="bfloat16", help="dtype of landmark vectors")
    parser.add_argument("--folder", type=Path, default=folder, help="of the memory, which is kept")


class Grown:
    """A memory in a folder that is read on from length to length, and questions about needles in copies of it."""

    def __init__(
        self, subject: Subject, text: Any, arguments: argparse.Namespace, progress: Progress
    ) -> None:
        self.subject, self.text, self.progress = subject, text, progress
        self.folder, self.dtype = arguments.folder, getattr(torch, arguments.landmarks)

    def plan(self, length: int, needles: int) -> tuple[Plan, Haystack]:
        settings = NeedleSettings((length,), "multi-key", "marks", needles, questions=needles, phases="end")
        plan, S = Plan.of(self.subject, settings, self.text), self.subject.chunk_size
        return plan, Haystack(plan.filler, 0, length // S, S)

    def trials(self, length: int, needles: int, count: int = 1) -> list[Trial]:
        """So many times so many needles, each asked for; a memory of this length holds one trial's at a time."""
        plan, haystack = self.plan(length, needles)
        chunks, S = haystack.shape
        whole = (chunks + 1) * S + plan.task.sizes[1]
        return plan.task.lay(haystack, whole, chunks - plan.sight, (None,), count, 0, 2, 0)[None]

    def read(self, length: int) -> dict[str, Any]:
        """Read on to this length; what it cost, and bytes."""
        model, folder = self.subject.model, self.folder
        if (folder / MANIFEST).exists():
            cache = model.load_cache(folder, "tokens")
        else:
            cache = model.new_cache("tokens", memory_folder=folder, memory_dtype=self.dtype)
        if (read := cache.get_seq_length()) > length:
            raise SystemExit(
                f"{folder}: expected at most {length:,} tokens, it holds {read:,}. Take a new --folder."
            )
        _, haystack = self.plan(length, 1)
        reading = read_on(self.subject, cache, haystack, folder, self.progress)
        return {
            "length": length,
            "reading": reading,
            "memory_bytes": cache.memory_bytes(),
            "bytes_a_token": cache.memory_bytes() / length,
            "window_bytes": cache.window_bytes(),
            "folder_bytes": sum(path.stat().st_size for path in folder.iterdir()),
            "peak_bytes": peak_memory(),
        }

    def copy(self) -> ChunkCache:
        """Needles are planted in RAM, and the folder stays as it is."""
        return self.subject.model.load_cache(self.folder, "host")


def measure(grown: Grown, length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Read to one length and ask there."""
    subject, Q, progress = grown.subject, arguments.questions, grown.progress
    plan, haystack = grown.plan(length, Q)
    result = grown.read(length)
    progress.show(f"{length:,} tokens: {Q} needles")
    (trial,) = grown.trials(length, Q)
    began = time.perf_counter()
    copy = grown.copy()
    result["seconds_loading"], places = time.perf_counter() - began, haystack.changed(trial.needles)
    with planted(subject.model, copy, haystack, *places):
        for name in arguments.searches:
            progress.show(f"{length:,} tokens: {Q} questions by search {name}")
            copy.memory.search = SEARCHES[name]()
            result[name] = ask(subject, copy, trial, plan.ends)
            shown = result[name]
            progress.say(
                f"{length:>13,} tokens, {name}: {shown['correct']} of {Q} right, "
                f"{shown['seconds_a_question']['median']:.3f} s a question; {result['memory_bytes']:,} bytes"
            )
    return result | {"resident_bytes": resident_bytes()}


def measure_batch(grown: Grown, length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """All questions as a batch, one after the other, and as a batch again: each of a copy that nobody has asked."""
    subject, Q = grown.subject, arguments.questions
    _, haystack = grown.plan(length, Q)
    grown.read(length)
    (trial,) = grown.trials(length, Q)
    cost, places = ReadingCost(), haystack.changed(trial.needles)
    asker = MemoryAsker(subject.model, subject.chunk_size, lambda folder: subject.model.new_cache())

    def took(name: str, batches: Sequence[Sequence[Question]]) -> list[float]:
        grown.progress.show(f"{length:,} tokens: {Q} questions, {len(batches)} calls, by search {name}")
        copy = grown.copy()
        copy.memory.search = SEARCHES[name]()
        with planted(subject.model, copy, haystack, *places):
            asker.ask(copy, trial.questions[:1], cost)  # builds an index, where there is one
            return [seconds(partial(asker.ask, copy, asked, cost)) for asked in batches]

    found: dict[str, Any] = {"length": length, "questions": Q}
    for name in arguments.searches:
        before = took(name, [trial.questions])
        alone = took(name, [[question] for question in trial.questions])
        batch = spread(before + took(name, [trial.questions]))
        found[name] = {
            "seconds_a_question": spread(alone),
            "seconds_one_after_the_other": sum(alone),
            "seconds_batch": batch,
            "times_as_fast": sum(alone) / batch["median"],
        }
    return found


def measure_cost(subject: Subject, length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a question costs after so many tokens, of which none was read but the last."""
    model, S = subject.model, subject.chunk_size
    generator = torch.Generator().manual_seed(0)
    before = resident_bytes()
    dtype = getattr(torch, arguments.landmarks)
    cache = model.new_cache("tokens", length, memory_dtype=dtype)
    size, total, step = cache.begun(1).memory, length // S, 1 << 16
    positions = S + model.config.counts_landmarks
    for first in range(0, total, step):
        n = min(step, total - first)
        landmarks = torch.randn(1, n, model.config.hidden_size, generator=generator)
        ids = torch.randint(3, 256, (1, n, S), generator=generator)
        entries = MemoryEntries(ids[..., :0], ids[..., :0], landmarks, torch.full((1, n), S), ids)
        starts = (first + np.arange(n))[None] * positions
        size = cache.memory.write(size, entries, starts, np.array([n]))
    place = np.array([total * positions])
    begun = cache.begun(1)
    cache.state = replace(
        begun,
        num_tokens=np.array([total * S]),
        num_positions=place,
        memory=size,
        spans=(Span(place, place),) * len(begun.spans),
    )
    model.read(torch.randint(3, 256, (1, 8 * S), generator=generator), cache)
    questions = torch.randint(3, 256, (1 + _TIMED, 38), generator=generator).split(1)
    together = torch.randint(3, 256, (_TOGETHER, 38), generator=generator)
    found: dict[str, Any] = {"length": length, "memory_bytes": cache.memory_bytes()}

    def took(ids: Tensor) -> float:
        branch = cache.branch(len(ids))
        return seconds(lambda: model(ids, past_key_values=branch, close_chunk=True, logits_to_keep=1))

    for name in arguments.searches:
        if name == "faiss" and length > _MOST_INDEXED:
            continue
        cache.memory.search = SEARCHES[name]()
        times = [took(question) for question in questions]
        found[name] = {
            "seconds_first": times[0],
            "seconds_a_question": spread(times[1:]),
            "seconds_a_question_in_batches": took(together) / _TOGETHER,
        }
    return found | {"resident_bytes": resident_bytes() - before}


def costs_text() -> str:
    """The table of costs in docs/scale.md."""
    rows = record("billion")["costs"]
    columns: Columns = {
        "tokens": "{length:,}",
        "memory": "{memory_bytes:size}",
        "s a question, exact": "{exact[seconds_a_question]:spread .3f}",
        "s a question, faiss": "{faiss[seconds_a_question]:spread .3f}",
        "s a question of a batch, exact": "{exact[seconds_a_question_in_batches]:.3f}",
        "times as fast": _times_as_fast,
        "s for faiss' index and its first question": "{faiss[seconds_first]:.1f}",
    }
    # rows of before batches were timed have none
    measured = {title: of for title, of in columns.items() if any(cell(of, row) != "-" for row in rows)}
    return on_machine(table(measured, rows), *(row["environment"] for row in rows))


def _faster(row: Row) -> float | None:
    """How many times as fast a question of a batch is as one that is asked by itself; None where none was timed."""
    found = row["exact"]
    each = found.get("seconds_a_question_in_batches")
    return None if each is None else float(found["seconds_a_question"]["median"] / each)


def _times_as_fast(row: Row) -> str:
    return "-" if (times := _faster(row)) is None else f"{times:.1f}"


def batches_text() -> str:
    """What docs/scale.md says of batches, with their table; nothing where none was timed."""
    rows = record("billion").get("batches", [])
    if not rows:
        return ""
    columns: Columns = {"tokens": "{length:,}", "questions": "{questions:,}"}
    for name in SEARCHES:
        columns |= {
            f"one after the other, {name}, s": f"{{{name}[seconds_one_after_the_other]:.1f}}",
            f"as a batch, {name}, s": f"{{{name}[seconds_batch]:spread .2f}}",
            f"times as fast, {name}": f"{{{name}[times_as_fast]:.1f}}",
        }
    shown = on_machine(table(columns, rows), *(row["environment"] for row in rows))
    return (
        "As many needles as questions in one memory, and each way of asking in a copy that nobody has asked yet:\n\n"
        f"    python benchmarks/billion.py --batch --questions {rows[0]['questions']} --folder runs/batch\n\n{shown}"
    )


def answers_text() -> str:
    """The table of answers in docs/scale.md."""
    rows = record("billion")["results"]
    columns: Columns = {
        "tokens": "{length:,}",
        "bytes": "{memory_bytes:size}",
        "read, tokens/s": lambda row: f"{row['reading']['tokens'] / row['reading']['seconds_reading']:,.0f}",
        "right, exact search": lambda row: RIGHT.format(**row["exact"]),
        "right, faiss": lambda row: RIGHT.format(**row["faiss"]) if "faiss" in row else "-",
        "recall, exact": "{exact[recall]:.3f}",
        "recall, faiss": "{faiss[recall]:.3f}",
        "s a question, exact": "{exact[seconds_a_question]:spread .3f}",
        "s a question, faiss": "{faiss[seconds_a_question]:spread .3f}",
        "s a question of a batch, exact": "{exact[seconds_a_question_in_batches]:.3f}",
        "times as fast": _times_as_fast,
        "s for faiss' index and its first question": "{faiss[seconds_first]:.1f}",
    }
    shown = on_machine(table(columns, rows), rows[-1]["environment"])
    return "\n\n".join(filter(None, (shown, goal_text(rows))))


def goal_text(rows: Sequence[Row]) -> str:
    """At which lengths asking as a batch is as much faster as was asked."""
    timed = {row["length"]: times for row in rows if (times := _faster(row)) is not None}
    missed = {length: times for length, times in timed.items() if times < FASTER}
    if not missed:
        return (
            f"A question of a batch is at least {FASTER} times as fast at each length, which was asked."
            * bool(timed)
        )
    those = " and ".join(f"{length:,} tokens ({times:.1f})" for length, times in missed.items())
    return f"That a question of a batch is at least {FASTER} times as fast, which was asked, is missed at {those}."


def readme_line() -> str:
    """What a README says of the longest memory."""
    found = record("billion")["results"][-1]
    exact, times = found["exact"], found["length"] // record("demo")["train_length"]
    return (
        f"- **Facts planted in text** are found far beyond the training length, as above. After {found['length']:,} "
        f"tokens ({times:,} times that length; Python's sources, over and over) a memory that keeps tokens takes "
        f"{size(found['memory_bytes'])}, and {RIGHT.format(**exact)} of {exact['questions']} questions are answered "
        f"right, in {exact['seconds_a_question']['median']:.1f} s each on one core ([scale.md](docs/scale.md)).\n\n"
        '  <img alt="Seconds a question, by tokens read" src="docs/billion.png" width="480">\n'
    )


def figure(path: Path) -> None:
    """What a question costs, by how much was read."""
    rows = record("billion")["results"]
    alone = {
        f"{label}, one question": {
            row["length"]: row[name]["seconds_a_question"]["median"] for row in rows if name in row
        }
        for name, label in (("exact", "exact search"), ("faiss", "faiss"))
    }
    batch = {row["length"]: row["exact"]["seconds_a_question_in_batches"] for row in rows}
    ticks = {row["length"]: f"{row['length'] >> 20:,}M" for row in rows}
    titles = "A question to a memory that keeps tokens, one core", "tokens read", "seconds"
    line_figure(path, alone | {"exact search, one of a batch of 64": batch}, ticks, titles, log=True)


@torch.no_grad()
def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, Path("runs/billion"))
    parser.add_argument("--questions", type=int, default=300, help="at each length")
    parser.add_argument("--searches", nargs="+", default=[*SEARCHES], choices=[*SEARCHES])
    parser.add_argument("--costs", action="store_true", help="measure seconds and bytes alone")
    parser.add_argument(
        "--batch", action="store_true", help="time questions as a batch, and one after the other"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args(words)
    start_again_set_up()  # as the commands do
    subject, progress = load(arguments.model), Progress()
    text = tokenize(standard_library_texts("haystack"), subject.tokenizer)
    grown = Grown(subject, text, arguments, progress)
    about = {name: str(getattr(arguments, name)) for name in ("model", "questions", "landmarks")}
    if arguments.costs or arguments.batch:  # these are measured again
        name = "costs" if arguments.costs else "batches"
        for length in sorted(arguments.lengths or (COSTS if arguments.costs else BATCHES)):
            if arguments.costs:
                row = measure_cost(subject, length, arguments)
            else:
                row = measure_batch(grown, length, arguments)
            kept = read_json(arguments.output) or {"settings": about, "results": []}
            rows = [known for known in kept.get(name, []) if known["length"] != length]
            rows.append(row | {"environment": environment()})
            write_json(arguments.output, kept | {name: sorted(rows, key=lambda known: known["length"])})
            progress.say(f"{length:,} tokens: {row}")
        return
    for length in sorted(arguments.lengths or LENGTHS):
        kept = read_json(arguments.output) or {"settings": about, "results": []}
        if kept["settings"] != about:
            raise SystemExit(
                f"{arguments.output} holds numbers with other settings. Choose another --output."
            )
        if any(result["length"] == length for result in kept["results"]):
            continue
        result = measure(grown, length, arguments)
        kept["results"] += [result | {"environment": environment()}]
        write_json(arguments.output, kept)
    print(f"Numbers: {arguments.output}")


if __name__ == "__main__":
    main()
