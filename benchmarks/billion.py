"""A billion tokens in a memory that keeps tokens: reading, bytes, and asking by exact search and by faiss.

    python benchmarks/billion.py                                          up to 1,073,741,824 tokens of the demo's model
    python benchmarks/billion.py --lengths 1048576 4194304 --questions 50
    python benchmarks/billion.py --model runs/needle-drt --folder runs/billion
    python benchmarks/billion.py --costs                  seconds and bytes alone, of memories that nobody read: minutes

One memory grows: at each length it is saved and asked, then read on, so that all lengths cost what the longest does.
The same command goes on where it was stopped: the memory is saved every 2^26 tokens, and each length stands in the
JSON once it was asked. All needles of a length are hidden at once in a copy of that memory in RAM, which is exactly
that of the text with the needles in it; each question is then asked by itself (its time) and all of them in batches
(what was found). The text is Python's own sources, over and over: a period is no number of whole chunks, so chunks are
others each time.

A billion tokens take about two hours of reading on one core, and 16 GB of RAM while they are saved. ``--costs`` fills
memories with landmark vectors and tokens drawn at random: what a question costs depends on how many there are alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import peak_memory, spread
from tables import RIGHT, Columns, line_figure, on_machine, record, table

from trailmark.data.corpus import standard_library_texts, tokenize
from trailmark.data.needles.haystacks import Haystack
from trailmark.data.needles.tasks import Trial
from trailmark.evaluation.needles.ask import Plan
from trailmark.evaluation.needles.askers import MemoryAsker, ReadingCost
from trailmark.evaluation.needles.judging import judge, line_of, summary
from trailmark.evaluation.needles.planting import planted
from trailmark.evaluation.needles.suite import NeedleSettings
from trailmark.evaluation.reading import resident_bytes
from trailmark.evaluation.record import environment
from trailmark.evaluation.subject import Subject, load
from trailmark.files import read_json, write_json
from trailmark.memory import ChunkCache, ExactSearch, FaissSearch, MemoryEntries, Span
from trailmark.memory.saved import MANIFEST
from trailmark.report.console import Progress, size

OUTPUT = Path(__file__).with_suffix(".json")
LENGTHS = tuple(1 << power for power in range(20, 31, 2))  # 1M ... 1,024M
COSTS = (1 << 20, 1 << 24, 104_857_600, 1 << 28, 1 << 30)
_PIECE = 1 << 18  # tokens that are made at a time
_SAVED = 1 << 26  # tokens between savings
_MOST_INDEXED = 1 << 24  # tokens whose index is built for its cost
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
    lines = []
    for question, answer in zip(trial.questions, answers, strict=True):
        verdict = judge(question, answer.tokens, subject.tokenizer, ends, given=True)
        lines.append(line_of(trial, question, answer, verdict, S, None))
    found = summary(lines)
    found.pop("asked", None)
    return found | {
        "seconds_first": first,
        "seconds_a_question": spread(times),
        "seconds_a_question_in_batches": together / len(answers),
    }


def measure(
    subject: Subject, length: int, arguments: argparse.Namespace, text: Any, progress: Progress
) -> dict[str, Any]:
    """Read to one length and ask there."""
    model, S, Q, folder = subject.model, subject.chunk_size, arguments.questions, arguments.folder
    chunks = length // S
    settings = NeedleSettings((length,), "multi-key", "marks", Q, questions=Q, phases="end")
    plan = Plan.of(subject, settings, text)
    haystack = Haystack(plan.filler, 0, chunks, S)
    dtype = getattr(torch, arguments.landmarks)
    if (folder / MANIFEST).exists():
        cache = model.load_cache(folder, "tokens")
    else:
        cache = model.new_cache("tokens", memory_folder=folder, memory_dtype=dtype)
    if (read := cache.get_seq_length()) > length:
        raise SystemExit(
            f"{folder}: expected at most {length:,} tokens, it holds {read:,}. Take a new --folder."
        )
    reading = read_on(subject, cache, haystack, folder, progress)
    result: dict[str, Any] = {
        "length": length,
        "reading": reading,
        "memory_bytes": cache.memory_bytes(),
        "bytes_a_token": cache.memory_bytes() / length,
        "window_bytes": cache.window_bytes(),
        "folder_bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "peak_bytes": peak_memory(),
    }
    del cache
    progress.show(f"{length:,} tokens: {Q} needles")
    whole = (chunks + 1) * S + plan.task.sizes[1]
    (trial,) = plan.task.lay(haystack, whole, chunks - plan.sight, (None,), 1, 0, 2, 0)[None]
    began = time.perf_counter()
    copy = model.load_cache(folder, "host")  # needles are planted in RAM, and the folder stays as it is
    result["seconds_loading"], places = time.perf_counter() - began, haystack.changed(trial.needles)
    with planted(model, copy, haystack, *places):
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
    found: dict[str, Any] = {"length": length, "memory_bytes": cache.memory_bytes()}
    for name in arguments.searches:
        if name == "faiss" and length > _MOST_INDEXED:
            continue
        cache.memory.search, times = SEARCHES[name](), []
        for question in questions:
            branch = cache.branch()
            began = time.perf_counter()
            model(question, past_key_values=branch, close_chunk=True, logits_to_keep=1)
            times.append(time.perf_counter() - began)
        found[name] = {"seconds_first": times[0], "seconds_a_question": spread(times[1:])}
    return found | {"resident_bytes": resident_bytes() - before}


def costs_text() -> str:
    """The table of costs in docs/scale.md."""
    rows = record("billion")["costs"]
    columns: Columns = {
        "tokens": "{length:,}",
        "memory": "{memory_bytes:size}",
        "s a question, exact": "{exact[seconds_a_question]:spread .3f}",
        "s a question, faiss": "{faiss[seconds_a_question]:spread .3f}",
    }
    return on_machine(table(columns, rows), rows[-1]["environment"])


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
        "s for faiss' index and its first question": "{faiss[seconds_first]:.1f}",
    }
    return on_machine(table(columns, rows), rows[-1]["environment"])


def readme_line() -> str:
    """What a README says of the longest memory."""
    found = record("billion")["results"][-1]
    exact, times = found["exact"], found["length"] // record("demo")["train_length"]
    return (
        f"- **Facts planted in text** are found far beyond the training length, as above. After {found['length']:,} "
        f"tokens ({times:,} times that length) a memory that keeps tokens takes {size(found['memory_bytes'])}, and "
        f"{RIGHT.format(**exact)} of {exact['questions']} questions are answered right, in "
        f"{exact['seconds_a_question']['median']:.1f} s each on one core ([scale.md](docs/scale.md))."
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
    parser.add_argument("--model", type=Path, default=Path("demo"), help="folder of a DRT trained on needles")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens, whole chunks")
    parser.add_argument("--questions", type=int, default=300, help="at each length")
    parser.add_argument("--searches", nargs="+", default=[*SEARCHES], choices=[*SEARCHES])
    parser.add_argument("--landmarks", default="bfloat16", help="dtype of landmark vectors")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/billion"), help="of the memory, which is kept"
    )
    parser.add_argument("--costs", action="store_true", help="measure seconds and bytes alone")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args(words)
    subject, progress = load(arguments.model), Progress()
    text = tokenize(standard_library_texts("haystack"), subject.tokenizer)
    about = {name: str(getattr(arguments, name)) for name in ("model", "questions", "landmarks")}
    for length in COSTS if arguments.costs else ():
        kept = read_json(arguments.output) or {"settings": about, "results": []}
        costs = [cost for cost in kept.get("costs", []) if cost["length"] != length]
        costs.append(measure_cost(subject, length, arguments) | {"environment": environment()})
        write_json(arguments.output, kept | {"costs": sorted(costs, key=lambda cost: cost["length"])})
        print(f"{length:,} tokens: {costs[-1]}", flush=True)
    for length in () if arguments.costs else sorted(arguments.lengths):
        kept = read_json(arguments.output) or {"settings": about, "results": []}
        if kept["settings"] != about:
            raise SystemExit(
                f"{arguments.output} holds numbers with other settings. Choose another --output."
            )
        if any(result["length"] == length for result in kept["results"]):
            continue
        result = measure(subject, length, arguments, text, progress)
        kept["results"] += [result | {"environment": environment()}]
        write_json(arguments.output, kept)
    print(f"Numbers: {arguments.output}")


if __name__ == "__main__":
    main()
