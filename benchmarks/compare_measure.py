"""One row of benchmarks/compare.py, in a process of its own: trained, and asked; its peak memory is then its own.

python benchmarks/compare_measure.py JOB    a job of compare.py, as JSON
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compare_tables
from common import Timers, data_folder, peak_memory
from compare_rows import (
    CHUNK_SIZE,
    FACTORS,
    FULL_UP_TO,
    LEVELS,
    NEEDLE_FACTORS,
    NEEDLE_LENGTH,
    QUESTIONS,
    fix_levels,
    folder_name,
    needle_config,
    text_config,
)
from training import BareLoop
from training_text import losses, stretches, train, trained, trained_tokenizer

from trailmark.data.corpus import Tokens, files_below, load_tokenizer, standard_library_texts, tokenize
from trailmark.data.needles.curriculum_texts import Level
from trailmark.evaluation.needles.ask import measure
from trailmark.evaluation.needles.suite import NeedleSettings
from trailmark.evaluation.record import environment
from trailmark.evaluation.subject import Subject, load
from trailmark.files import read_json, write_json
from trailmark.models import TrailmarkForCausalLM
from trailmark.training.config import RunConfig
from trailmark.training.run import Run

MEASURED_FILE = "measured.json"  # of a row: what the benchmark keeps of it
Found = dict[str, Any]


def measure_row(job: Found) -> None:
    """Train and ask; ``measured.json`` in the model's folder grows by what was asked."""
    part = job["part"]
    config = row_config(job)
    output = Path(config.output)
    path, kept = output / MEASURED_FILE, read_json(output / MEASURED_FILE)
    if kept is not None and kept["job"] != job:
        raise SystemExit(
            f"{path}: measured with other settings. Remove that folder, or choose another --folder."
        )
    train(config, fix_levels if part == "needles" else lambda run: None)
    subject = load(output)
    model = subject.model.eval()
    found: Found = kept or {
        "job": job,
        "row": job["row"],
        "seed": job["seed"],
        "steps": config.training.steps,
        "context_length": config.training.context_length,
        **trained(output, model),
        "environment": environment(),
        "results": [],
    }
    if part == "needles":
        ask_needles(model, found, path)
    else:
        length = text_config("Base", 0, job["changes"]).training.context_length
        measure_text(model, found, path, test_stretches(subject.tokenizer, FACTORS[-1] * length), length)
    found["measured"] = True
    write_json(path, found)


def row_config(job: Found) -> RunConfig:
    folder, steps = Path(job["folder"]) / job["part"], job["steps"]
    changes = [
        *job["changes"],
        f"output={folder / folder_name(job['row'])}-{job['seed']}",
        f"training.steps={steps}",
        "training.save_steps=50",
        "training.keep_checkpoints=1",
        "training.eval_steps=null",
        "data.validation=null",
        "training.precision=float32",  # rows of several machines stand beside each other
    ]
    if job["part"] == "needles":
        return needle_config(job["row"], job["seed"], changes)
    data = [
        f"data.paths=[{folder / 'train'}]",
        f"data.tokenizer={text_tokenizer(folder, job['vocabulary'])}",
    ]
    return text_config(job["row"], job["seed"], [*data, *changes])


def text_tokenizer(folder: Path, vocabulary: int) -> Path:
    return trained_tokenizer(files_below(data_folder("books") / "train"), vocabulary, folder / "tokenizer")


def test_stretches(tokenizer: Any, length: int) -> list[Tokens]:
    """Of each test book the middle one of its stretches of ``length`` tokens."""
    found = [stretches([file], tokenizer, length) for file in files_below(data_folder("books") / "test")]
    return [pieces[len(pieces) // 2] for pieces in found if pieces]


def measure_text(
    model: TrailmarkForCausalLM, found: Found, path: Path, pieces: Sequence[Tokens], length: int
) -> None:
    for factor in FACTORS:
        if any(r["factor"] == factor for r in found["results"]):
            continue
        result = losses(model, pieces, factor, length)
        found["results"].append(result)
        write_json(path, found)
        print(f"  {factor * length:,} tokens: {compare_tables.perplexity(result):.3f}", flush=True)


def ask_needles(model: TrailmarkForCausalLM, found: Found, path: Path) -> None:
    """A single needle at a chunk's end."""
    tokenizer = load_tokenizer("bytes")
    text = tokenize(standard_library_texts("haystack"), tokenizer)
    subject = Subject.of(model, tokenizer, CHUNK_SIZE)
    full = model.reach() is None
    anew = not model.can_be_planted  # what follows the needle changes all that they carry
    for factor in NEEDLE_FACTORS:
        done = {r["factor"]: r["correct"] for r in found["results"]}
        if factor in done or (full and factor > FULL_UP_TO):
            continue
        if anew and done and done[max(done)] == 0:
            break  # none right of a shorter text: to read longer ones for each question says no more
        length, began = factor * NEEDLE_LENGTH, time.perf_counter()
        settings = NeedleSettings((length,), format="marks", questions=QUESTIONS[anew], phases="end")
        (result,) = measure(subject, settings, text)
        keep = ("length", "questions", "correct", "accuracy", "accuracy_low", "accuracy_high", "recall")
        found["results"].append(
            {"factor": factor, **{key: result[key] for key in keep}, "seconds": time.perf_counter() - began}
        )
        write_json(path, found)
        print(f"  {length:,} tokens: {result['correct']} of {result['questions']}", flush=True)


def asked() -> Found:
    """What a run's configuration does not say of the needles."""
    return {
        "levels": [[share, vars(level)] for share, level in LEVELS],
        "questions": list(QUESTIONS),
    }


def recorded_levels(levels: Sequence[tuple[float, Found]]) -> list[list[Any]]:
    """Levels of a record with the fields that came later: their defaults make the texts that there were before."""
    return [[share, vars(Level(**level))] for share, level in levels]


def measure_memory(job: Found) -> None:
    """Bytes that two steps take above what process and model had: printed as JSON."""
    run = Run(row_config(job | {"part": job["of"]}))
    loop = BareLoop(run, Timers())
    before = peak_memory()
    for number in range(2):
        loop.step(number)
    print(json.dumps({"step_bytes": peak_memory() - before}))


if __name__ == "__main__":
    work = json.loads(sys.argv[1])
    measure_memory(work) if work["part"] == "memory" else measure_row(work)
