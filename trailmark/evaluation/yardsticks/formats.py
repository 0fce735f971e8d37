"""Published benchmarks of long texts, as their files have them: what is read, what is asked, what counts as right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Question:
    """One question about a text."""

    part: str
    """Of the benchmark, as its results are told apart: qa1, 4k; short, easy; 2 needles."""
    text: str
    """What is read; questions that follow each other about one text share its reading."""
    asked: str
    wanted: str
    """What the benchmark holds right, as its files have it."""


@dataclass(frozen=True)
class Format:
    """A benchmark.

    Args:
        questions: of a folder with its files, in their order.
        score: of a wanted answer and what was generated, 0 to 1.
        max_new_tokens: of an answer, at most.
        files: what the folder holds, for messages.
    """

    questions: Callable[[Path], Iterator[Question]]
    score: Callable[[str, str], float]
    max_new_tokens: int
    files: str


# --- LongBench v2 (arXiv 2412.15204): data.json, four choices ----------------------------------------------------


def _longbench(folder: Path) -> Iterator[Question]:
    for row in _rows(folder / "data.json"):
        choices = "\n".join(f"({letter}) {row[f'choice_{letter}']}" for letter in "ABCD")
        yield Question(
            f"{row['length']}, {row['difficulty']}",
            row["context"],
            f"\n\nQuestion: {row['question']}\n{choices}\nThe letter of the right choice is (",
            row["answer"],
        )


def _letter(wanted: str, generated: str) -> float:
    """The first letter of a choice."""
    found = re.search(r"[ABCD]", generated)
    return float(found is not None and found[0] == wanted)


# --- BABILong (arXiv 2406.10149): data/<task>/<length>.json -------------------------------------------------------


def _babilong(folder: Path) -> Iterator[Question]:
    places = sorted(
        folder.glob("data/*/*.json"), key=lambda path: (_number(path.parent.name), _number(path.stem))
    )
    for path in places:
        for row in _rows(path):
            part = f"{path.parent.name}, {path.stem}"
            yield Question(part, row["input"], f"\nQuestion: {row['question']}\nAnswer:", row["target"])


def _number(name: str) -> tuple[int, str]:
    digits = re.search(r"\d+", name)
    return (int(digits[0]) * (1024 if name.endswith("M") else 1) if digits else 0), name


def _holds(wanted: str, generated: str) -> float:
    """The wanted words stand in the first line, whatever else does."""
    line = generated.strip().split("\n")[0].lower()
    return float(all(word.strip() in line for word in wanted.lower().split(",")))


# --- MRCR (arXiv 2409.12640) as OpenAI published it: <n>needle/*.parquet, a conversation to be told again ---------


def _mrcr(folder: Path) -> Iterator[Question]:
    from pyarrow import parquet  # an extra

    for path in sorted(folder.glob("**/*.parquet")):
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=8):
            for row in batch.to_pylist():
                *before, last = json.loads(row["prompt"])
                text = "".join(f"{turn['role']}: {turn['content']}\n\n" for turn in before)
                asked = f"{last['role']}: {last['content']}\n\nassistant: "
                wanted = json.dumps([row["random_string_to_prepend"], row["answer"]])
                yield Question(f"{row['n_needles']} needles", text, asked, wanted)


def _told_again(wanted: str, generated: str) -> float:
    """How alike the answers are behind the mark that both must begin with; without it 0."""
    mark, answer = json.loads(wanted)
    if not generated.startswith(mark):
        return 0.0
    return SequenceMatcher(None, generated.removeprefix(mark), answer.removeprefix(mark)).ratio()


FORMATS = {
    "longbench-v2": Format(_longbench, _letter, 8, "data.json"),
    "babilong": Format(_babilong, _holds, 20, "data/qa1/4k.json and its like"),
    "mrcr": Format(_mrcr, _told_again, 2048, "2needle/*.parquet and its like"),
}


def _rows(path: Path) -> list[dict[str, Any]]:
    """A JSON list, or JSON lines."""
    try:
        content = path.read_text(encoding="utf-8")
        if content.lstrip().startswith("["):
            found: list[dict[str, Any]] = json.loads(content)
            return found
        return [json.loads(line) for line in content.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"data: cannot read {str(path)!r}: {error}. Download it again.") from error


def questions_of(name: str, folder: Path, limit: int | None) -> dict[str, list[Question]]:
    """Of each part its questions, the first ``limit``.

    Raises:
        ValueError: no such files there, or a file that is damaged or has other fields.
    """
    found: dict[str, list[Question]] = {}
    try:
        for question in FORMATS[name].questions(folder):
            part = found.setdefault(question.part, [])
            if limit is None or len(part) < limit:
                part.append(question)
    except KeyError as error:
        raise ValueError(
            f"data: expected the fields of {name} in {str(folder)!r}, got rows without {error}. Give the folder as it "
            "was published."
        ) from error
    except ImportError as error:
        raise ValueError(
            f"data: {name} lies in Parquet, which pyarrow reads. pip install 'trailmark[data]'"
        ) from error
    if not found:
        raise ValueError(f"data: expected {FORMATS[name].files} in {str(folder)!r}, got no such file.")
    return found
