"""Any model of ours from its folder: what it was trained for, on which text to ask it, and what came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trailmark.data.corpus import Tokens
from trailmark.data.files import expect_writable, write_json
from trailmark.data.needles import NeedleFormat
from trailmark.evaluation.needles import evaluate_needles
from trailmark.evaluation.perplexity import evaluate_perplexity
from trailmark.evaluation.subject import Subject

TASKS = ("needles", "perplexity")


def parse_lengths(text: str) -> list[int]:
    try:
        lengths = [int(part.replace("_", "")) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"lengths: expected numbers as 1024,16384, got {text!r}.") from error
    if min(lengths) < 1:
        raise ValueError(f"lengths: expected positive numbers of tokens, got {min(lengths)}.")
    return lengths


def parse_task(text: str) -> tuple[str, ...]:
    if text == "both":
        return TASKS
    if text not in TASKS:
        raise ValueError(f"task: expected 'needles', 'perplexity' or 'both', got {text!r}.")
    return (text,)


def run(
    subject: Subject,
    tokens: Tokens,
    tasks: Sequence[str],
    lengths: Sequence[int],
    questions: int,
    needles: int,
    seed: int,
    progress: Callable[[str], None],
    output: Path | None = None,
    phases: str = "any",
    memory_tier: str = "device",
) -> dict[str, Any]:
    """Every task at every length, as a record for JSON.

    ``phases``: where a needle's question ends: "end" of a chunk, or "any" place. ``memory_tier``: "device",
    "host" or "disk" (of temporary files), of what is read.
    ``output``: a file that is written after each length, so that what was found stays if a later one fails.
    """
    if questions < 1 or needles < 1:
        raise ValueError(f"questions, needles: expected at least 1, got {questions} and {needles}.")
    if phases not in ("end", "any"):
        raise ValueError(f"phases: expected 'end' or 'any', got {phases!r}.")
    record: dict[str, Any] = {"model": str(subject.folder), "seed": seed, "set": subject.changed}
    record |= {"needles": [], "perplexity": []}

    def keep(task: str, result: dict[str, Any]) -> None:
        record[task].append(result)
        if output is not None and _replaceable(output):
            save(record, output)

    if "needles" in tasks:
        format = NeedleFormat.of(subject.tokenizer)
        for length in lengths:
            whole = max(1, length // subject.chunk_size) * subject.chunk_size
            found = evaluate_needles(
                subject.model,
                format,
                tokens,
                whole,
                questions,
                needles,
                subject.chunk_size,
                seed,
                progress,
                "any" if phases == "any" else "end",
                memory_tier,
            )
            keep("needles", found.summary())
    if "perplexity" in tasks:
        for length in lengths:
            progress(f"{length:,} tokens: perplexity")
            keep("perplexity", evaluate_perplexity(subject.model, tokens, length).summary())
    return record


def expect_output(path: Path) -> None:
    """A ValueError, before any work is done, if no file can be written there."""
    if path.is_dir():
        raise ValueError(f"output: expected a file, {str(path)!r} is a folder.")
    if _replaceable(path):
        expect_writable("output", path.parent)


def _replaceable(path: Path) -> bool:
    """A device is not: it needs no folder to write in, and what was written stays."""
    return path.is_file() or not path.exists()


def save(record: dict[str, Any], path: Path) -> Path:
    write_json(path, record)
    return path
