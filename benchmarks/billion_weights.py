"""At which step of a long memory an answer is lost: what the right chunk weighs, and whether a larger scale mends it.

    python benchmarks/billion_weights.py                        up to 16,777,216 tokens of the demo's model
    python benchmarks/billion_weights.py --lengths 262144 1048576

Writes benchmarks/billion_weights.json. A question reads 8 chunks by a softmax over their scores. At each length so many
needles are hidden at once, and each is asked for; the more there are, the more chunks resemble the right one. With many
of them the same questions are asked of the same memory with other values of ``retrieval_scale``, the factor on all
scores: which answers that makes right, and which wrong. Half an hour on one core; the same command goes on where it was
stopped, with the next length.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from billion import Grown, add_options, line, outcome
from common import expect_settings
from tables import RIGHT, Column, Columns, cell, crossed, on_machine, record, table

from trailmark.data.corpus import standard_library_texts, tokenize
from trailmark.evaluation.needles.askers import MemoryAsker, ReadingCost
from trailmark.evaluation.needles.planting import planted
from trailmark.evaluation.record import environment
from trailmark.evaluation.subject import load
from trailmark.files import read_json, write_json
from trailmark.machine import start_again_set_up
from trailmark.memory import ChunkCache
from trailmark.report.console import Progress

OUTPUT = Path(__file__).with_suffix(".json")
LENGTHS = tuple(1 << power for power in range(16, 25, 2))  # 65,536 ... 16,777,216
NEEDLES = (1, 8, 32, 100, 300, 1000)  # hidden at once
QUESTIONS = 300  # at least, by trials with other needles where one has fewer
FACTORS = (1.0, 1.5, 2.5, 4.0)  # on the model's own scale
SCALED = 300  # needles from which other scales are asked
BINS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0)  # of weights


@contextmanager
def scaled(model: Any, cache: ChunkCache, factor: float) -> Iterator[None]:
    """The model with another scale, and the cache as one of that model's: nothing that was read depends on it."""
    own, key = model.config.retrieval_scale, cache.model
    try:
        model.config.retrieval_scale = own * factor
        cache.model = model.new_cache().model
        yield
    finally:
        model.config.retrieval_scale, cache.model = own, key


def sign_test(one: int, other: int) -> float:
    """Two-sided, exact (McNemar's): how likely so unequal counts are if both ways are as likely."""
    total = one + other
    return min(1.0, 2 * sum(math.comb(total, n) for n in range(min(one, other) + 1)) / 2**total)


def asked(grown: Grown, cache: ChunkCache, length: int, needles: int) -> dict[float, list[dict[str, Any]]]:
    """A line for each question, by the factor on the scale; the same questions for each."""
    subject = grown.subject
    plan, haystack = grown.plan(length, needles)
    factors = FACTORS if needles >= SCALED else FACTORS[:1]
    lines: dict[float, list[dict[str, Any]]] = {factor: [] for factor in factors}
    asker = MemoryAsker(subject.model, subject.chunk_size, lambda folder: subject.model.new_cache())
    trials = grown.trials(length, needles, -(-QUESTIONS // needles))
    for number, trial in enumerate(trials, 1):
        with planted(subject.model, cache, haystack, *haystack.changed(trial.needles)):
            for factor, own in lines.items():
                grown.progress.show(
                    f"{length:,} tokens, {needles} needles, scale x{factor:g}: {number} of {len(trials)}"
                )
                with scaled(subject.model, cache, factor):
                    answers = asker.ask(cache, trial.questions, ReadingCost())
                pairs = zip(trial.questions, answers, strict=True)
                own += [line(subject, trial, *pair, plan.ends) for pair in pairs]
    return lines


def rows_of(length: int, needles: int, lines: dict[float, list[dict[str, Any]]], scale: float) -> list[Any]:
    """What came of each scale, and beside the model's own."""
    rows, before = [], [own["correct"] for own in lines[1.0]]
    for factor, own in lines.items():
        right = [of["correct"] for of in own]
        won, lost = (
            sum(one > other for one, other in zip(*of, strict=True))
            for of in ((right, before), (before, right))
        )
        row = {"length": length, "needles": needles, "scale": scale * factor} | outcome(own)
        row["bins"] = [
            [sum(of["correct"] for of in inside), len(inside)]
            for low, high in pairwise(BINS)
            for inside in [[of for of in own if low < of["weight"] <= high]]
        ]
        rows.append(row | {"won": won, "lost": lost, "p": sign_test(won, lost)})
    return rows


def measure(grown: Grown, length: int) -> list[Any]:
    grown.read(length)
    cache, rows = grown.copy(), list[Any]()
    for needles in NEEDLES:
        lines = asked(grown, cache, length, needles)
        rows += rows_of(length, needles, lines, grown.subject.model.config.retrieval_scale)
        for row in rows[-len(lines) :]:
            grown.progress.say(
                f"{length:>12,} tokens, {needles:>5,} needles, scale {row['scale']:g}: {row['correct']} of "
                f"{row['questions']} right ({row['won']} won, {row['lost']} lost), weight {row['mean_weight']:.3f}"
            )
    return rows


# --- tables ------------------------------------------------------------------------------------------------


def _rows(own_scale: bool) -> list[dict[str, Any]]:
    """Of the model's own scale, or of all where several were asked."""
    found = record("billion_weights")
    own = found["settings"]["scale"]
    return [
        row for row in found["results"] if (row["scale"] == own if own_scale else row["needles"] >= SCALED)
    ]


def needles_text() -> str:
    """What the right chunk weighs, by needles and tokens, and its margin, in docs/scale.md."""
    rows = _rows(own_scale=True)
    cell = "{accuracy:.3f}; {weights[all][median]:.2f}; {margin[median]:.1f}"
    shown = crossed(rows, {"needles": "{needles:,}"}, "{length:,} tokens", cell)
    return on_machine(shown, *(row["environment"] for row in rows))


def falling(margins: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """The line a - b sqrt(2 ln n) through margins over the best of n others: a, b and how far it is off at most.

    The best of n draws of a normal variable of deviation b lies about b sqrt(2 ln n) above their mean.
    """
    counts, values = (np.array(of, np.float64) for of in zip(*margins, strict=True))
    grown = np.sqrt(2 * np.log(counts))
    slope, begin = np.polyfit(grown, values, 1)
    return begin, -slope, float(np.abs(begin + slope * grown - values).max())


def law_text() -> str:
    """How the margin falls by needles and by text, and how many answers of many needles are right at each length."""
    rows = [row | {"percent": 100 * row["text_weight"]} for row in _rows(own_scale=True)]
    said = list[str]()
    by_needles: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_needles.setdefault(row["needles"], []).append(row)

    def each(form: str, needles: int) -> str:
        return ", ".join(cell(form, row) for row in by_needles[needles])

    many = [needles for needles in by_needles if needles > 1]
    if len(many) > 2:  # through two a line always goes
        begin, slope, off = falling(
            [(row["needles"] - 1, row["margin"]["median"]) for row in rows if row["needles"] > 1]
        )
        said.append(
            "- **By needles**: the best of n alike scores grows with √(2 ln n), and takes that from the margin "
            "([math.md](math.md#4-retrieval)). Over the best other chunk the median margin of N needles, from "
            f"{min(many)} on, is {begin:.1f} - {slope:.1f} √(2 ln (N - 1)), at most {off:.2f} off, over all "
            "these lengths."
        )

    def ends(form: str) -> str:
        """From the shortest text to the longest."""
        return ", ".join(
            f"{' to '.join(dict.fromkeys(cell(form, own[at]) for at in (0, -1)))} with {needles:,}"
            for needles, own in by_needles.items()
        )

    said.append(
        "- **By text**: a question reads as many chunks however long the text is, but the best of more chunks score "
        f"higher. From the shortest to the longest text here the median margin goes, by needles, from "
        f"{ends('{margin[median]:.2f}')}; and the weight that text takes from {ends('{percent:.2g}%')} (means)."
    )
    if most := [needles for needles in many if needles >= SCALED]:
        right = "; ".join(
            f"of {by_needles[needles][0]['questions']:,} questions about {needles:,} needles "
            f"{each('{correct:,}', needles)} are answered right"
            for needles in most
        )
        said.append(
            f"- **By length, of many needles**: at these lengths, {right}. They are the same questions, but which "
            "of them were lost at which length was not kept, so that a fall is not tested."
        )
    return "\n".join(said)


def bins_text() -> str:
    """Right answers by the weight of the right chunk, of all lengths and needles together."""
    rows, shown = _rows(own_scale=True), []
    for number, (low, high) in enumerate(pairwise(BINS)):
        right, asked = (sum(row["bins"][number][of] for row in rows) for of in (0, 1))
        shown.append(
            {"name": f"{low:g} to {high:g}", "asked": asked, "share": right / asked if asked else None}
        )
    return table(
        {"weight of the right chunk": "{name}", "questions": "{asked:,}", "right": "{share:.3f}"}, shown
    )


def scales_text() -> str:
    """The same questions by other scales."""

    def weight(of: str) -> Column:
        found = f"{{weights[{of}]"
        return f"{found}[median]:.2f}} ({found}[low]:.2f}}-{found}[high]:.2f}})"

    columns: Columns = {
        "tokens": "{length:,}",
        "needles": "{needles:,}",
        "`retrieval_scale`": "{scale:g}",
        "right": RIGHT,
        "right chunk first": lambda row: f"{row['first'] / row['questions']:.3f}",
        "its weight, answers right": weight("right"),
        "its weight, answers wrong": weight("wrong"),
        "made right": lambda row: f"{row['won']}" if row["scale"] != own else "",
        "made wrong": lambda row: f"{row['lost']}" if row["scale"] != own else "",
        "p": lambda row: f"{row['p']:.1g}" if row["scale"] != own else "",
    }
    own, rows = record("billion_weights")["settings"]["scale"], _rows(own_scale=False)
    most = max(row["needles"] for row in rows)
    right: dict[float, int] = {}
    for row in rows:
        if row["needles"] == most:
            right[row["scale"]] = right.get(row["scale"], 0) + row["correct"]
    asked = sum(row["questions"] for row in rows if (row["needles"], row["scale"]) == (most, own))
    sums = ", ".join(f"{correct:,} with {scale:g}" for scale, correct in right.items())
    return f"{table(columns, rows)}\n\nWith {most:,} needles, right of the {asked:,} questions of all lengths: {sums}."


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser, Path("runs/billion-weights"))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    start_again_set_up()  # as the commands do
    subject = load(arguments.model)
    text = tokenize(standard_library_texts("haystack"), subject.tokenizer)
    grown = Grown(subject, text, arguments, Progress())
    about: dict[str, Any] = {name: str(getattr(arguments, name)) for name in ("model", "landmarks")}
    # the text begins again, and from so many tokens on it is cut into the same chunks
    about |= {
        "scale": subject.model.config.retrieval_scale,
        "other_tokens": math.lcm(len(text), subject.chunk_size),
    }
    for length in sorted(arguments.lengths or LENGTHS):
        kept = read_json(arguments.output) or {"settings": about, "results": []}
        expect_settings("settings", arguments.output, kept["settings"], about)
        if any(row["length"] == length for row in kept["results"]):
            continue
        kept["results"] += [row | {"environment": environment()} for row in measure(grown, length)]
        write_json(arguments.output, kept)
    print(f"Numbers: {arguments.output}")


if __name__ == "__main__":
    main()
