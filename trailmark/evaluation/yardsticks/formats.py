"""Published benchmarks of long texts, as their files have them: what is read, what is asked, what counts as right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trailmark.data.corpus import tokenize


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


class Extent(NamedTuple):
    """How much is asked, of a benchmark that makes its texts."""

    tokenizer: Any
    lengths: tuple[int, ...] = ()
    """Tokens of its texts."""
    limit: int | None = None
    """Questions of each part; None: all."""
    seed: int = 0


@dataclass(frozen=True)
class Format:
    """A benchmark.

    Args:
        questions: of a folder with its files, in their order; of one that makes its texts no more than are asked.
        score: of a wanted answer and what was generated, 0 to 1.
        max_new_tokens: of an answer, at most.
        files: what the folder holds, for messages.
    """

    questions: Callable[[Path, Extent], Iterator[Question]]
    score: Callable[[str, str], float]
    max_new_tokens: int
    files: str


# --- LongBench v2 (arXiv 2412.15204): data.json, four choices ----------------------------------------------------


def _longbench(folder: Path, extent: Extent) -> Iterator[Question]:
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


def _babilong(folder: Path, extent: Extent) -> Iterator[Question]:
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


def _mrcr(folder: Path, extent: Extent) -> Iterator[Question]:
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


# --- NoLiMa (arXiv 2502.05167): needlesets/needle_set.json, haystack/rand_shuffle/*.txt -----------------------------

_DEPTHS = 26  # of 0 to 1, as published
_ASKS = "{haystack}\n\nQuestion: {question}\nAnswer:"  # where the files have no words of their own


def _nolima(folder: Path, extent: Extent) -> Iterator[Question]:
    """A sentence that names a person is hidden in a shuffled book, and asked for in words that it does not have."""
    needles = [
        (row, hops, asked, test)
        for row in _rows(folder / "needlesets" / "needle_set.json")
        for hops, asked in row["questions"].items()
        for test in row["tests"].values()
    ]
    books = [_Book(path, extent.tokenizer) for path in sorted(folder.glob("haystack/rand_shuffle/*.txt"))]
    generator = np.random.default_rng(extent.seed)
    for length, hops in product(extent.lengths, dict.fromkeys(needle[1] for needle in needles)):
        every = list(
            product((x for x in needles if x[1] == hops), books, np.linspace(0, 1, _DEPTHS).tolist())
        )
        for number in generator.permutation(len(every))[: extent.limit]:
            (row, _, asked, test), book, depth = every[number]
            names = {"CHAR": str(generator.choice(row.get("character_set", [""])))}
            names |= {str(n): said for n, said in enumerate(test["input_args"], 1)}
            before, _, after = row.get("task_template", _ASKS).partition("{haystack}")
            yield Question(
                f"{length:,} tokens, {hops}",
                before + book.holding(_filled(row["needle"], names), length, depth),
                after.replace("{question}", _filled(asked, names)),
                json.dumps(test.get("gold_answers") or [names["CHAR"]]),
            )


def _filled(template: str, names: dict[str, str]) -> str:
    return re.sub(r"\{(CHAR|\d+)\}", lambda found: names[found[1]], template)


class _Book:
    """A text in which a sentence is hidden at the end of a line."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        self._path, self._tokenizer = path, tokenizer
        self._ids = tokenize([path.read_text(encoding="utf-8")], tokenizer)
        ends = [token for token in np.unique(self._ids) if "\n" in tokenizer.decode([int(token)])]
        lines = np.flatnonzero(np.isin(self._ids, ends)) + 1
        self._lines = np.concatenate([[0], lines])  # tokens before each line

    def holding(self, needle: str, length: int, depth: float) -> str:
        """So many tokens of the book with a sentence of its own behind a share ``depth`` of them, between two lines."""
        before = round(length * depth)
        # the window moves to where a line begins, so that the depth is met
        fitting = (self._lines >= before) & (self._lines + length - before <= len(self._ids))
        if not fitting.any():
            raise ValueError(
                f"data: expected a book of at least {length:,} tokens and a line more, got {len(self._ids):,} tokens "
                f"in {str(self._path)!r}. Ask for shorter texts with --lengths."
            )
        at = int(self._lines[fitting.argmax()])
        head = self._said(at - before, at).rpartition("\n")[0]
        return f"{head} {needle}\n{self._said(at, at + length - before)}"

    def _said(self, start: int, stop: int) -> str:
        return str(self._tokenizer.decode(self._ids[start:stop].tolist()))


def _names_it(wanted: str, generated: str) -> float:
    """Some wanted name stands in the answer, as the benchmark counts by default."""
    return float(any(name in generated for name in json.loads(wanted)))


FORMATS = {
    "longbench-v2": Format(_longbench, _letter, 8, "data.json"),
    "babilong": Format(_babilong, _holds, 20, "data/qa1/4k.json and its like"),
    "mrcr": Format(_mrcr, _told_again, 2048, "2needle/*.parquet and its like"),
    "nolima": Format(_nolima, _names_it, 192, "needlesets/needle_set.json and haystack/rand_shuffle/*.txt"),
}


def _rows(path: Path) -> list[dict[str, Any]]:
    """A JSON list, or JSON lines."""
    try:
        content = path.read_text(encoding="utf-8")
        if content.lstrip().startswith("["):
            found: list[dict[str, Any]] = json.loads(content)
            return found
        return [json.loads(line) for line in content.split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"data: cannot read {str(path)!r}: {error}. Download it again.") from error


def questions_of(name: str, folder: Path, extent: Extent) -> dict[str, list[Question]]:
    """Of each part its questions, the first ``extent.limit``; of one that makes its texts, so many drawn at random.

    Raises:
        ValueError: no such files there, or a file that is damaged or has other fields.
    """
    found: dict[str, list[Question]] = {}
    try:
        for question in FORMATS[name].questions(folder, extent):
            part = found.setdefault(question.part, [])
            if extent.limit is None or len(part) < extent.limit:
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
