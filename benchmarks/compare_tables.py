"""The tables of benchmarks/compare.json; benchmarks/readme.py puts them in place. What was not measured is a dash."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from compare_rows import FACTORS, FULL_UP_TO, NEEDLE_FACTORS, ROWS
from tables import Column, Columns, Row, table
from training_text import mean_loss

from trailmark.demo import CHANCE
from trailmark.statistics import wilson_interval

Found = dict[str, Any]
BASE = "Base"


# --- numbers -------------------------------------------------------------------------------------------------


def by_row(part: Found | None) -> dict[str, list[Found]]:
    """What was found of each row, one a seed, in the order of ROWS."""
    results = (part or {}).get("results", [])
    found = {name: [r for r in results if r["row"] == name] for name in ROWS}
    return {name: of for name, of in found.items() if of}


def at(found: Found, factor: int) -> Found | None:
    """What one seed of a row gave at ``factor`` training lengths."""
    return next((r for r in found["results"] if r["factor"] == factor), None)


def perplexity(result: Found) -> float:
    """Over all books' tokens."""
    return math.exp(mean_loss(result))


def perplexities(of: Sequence[Found], factor: int) -> list[float]:
    """One a seed."""
    return [perplexity(r) for found in of if (r := at(found, factor)) is not None]


def less(of: Sequence[Found], other: Sequence[Found], factor: int) -> tuple[float, float] | None:
    """Nats per token that ``of`` needs more than ``other``, and the standard error over books.

    Books are paired: what makes one hard for all does not count. Where both have several seeds, each book's difference
    is the mean over the seeds that both have.
    """
    others = {found["seed"]: found for found in other}
    apart = []
    for found in of:
        one, two = at(found, factor), at(others.get(found["seed"], {"results": []}), factor)
        if one is not None and two is not None:
            assert one["tokens"] == two["tokens"]
            apart.append(np.subtract(one["losses"], two["losses"]))
    if not apart:
        return None
    books = np.mean(apart, axis=0)
    error = float(books.std(ddof=1)) / math.sqrt(len(books)) if len(books) > 1 else math.inf
    return float(books.mean()), error


def spread_of_seeds(rows: dict[str, list[Found]], factor: int) -> float | None:
    """Standard deviation, from seed to seed, of what a row needs more than Base; None: none has several with Base."""
    squares, freedom = 0.0, 0
    for name, of in rows.items():
        each = [apart[0] for one in of if (apart := less([one], rows.get(BASE, []), factor)) is not None]
        if name != BASE and len(each) > 1:
            squares += statistics.variance(each) * (len(each) - 1)
            freedom += len(each) - 1
    return math.sqrt(squares / freedom) if freedom else None


def ordering(part: Found, factor: int = 1) -> dict[str, list[tuple[str, str]]]:
    """Pairs of rows (better, worse) in the paper at 16K, by what was found here at ``factor`` training lengths.

    "alike", "reversed"; "open" where the losses differ by less than two standard errors, of books and, if some rows
    have several seeds, of seeds: those of a pair are taken to spread as theirs.
    """
    rows = by_row(part)
    spread = spread_of_seeds(rows, factor) or 0.0
    known = [name for name in rows if ROWS[name].paper.at_16k is not None]
    found: dict[str, list[tuple[str, str]]] = {"alike": [], "reversed": [], "open": []}
    for pair in itertools.combinations(known, 2):
        better, worse = sorted(pair, key=lambda name: ROWS[name].paper.at_16k or 0.0)
        apart = less(rows[better], rows[worse], factor)
        if ROWS[better].paper.at_16k == ROWS[worse].paper.at_16k or apart is None:
            continue
        mean, error = apart
        seeds = {one["seed"] for one in rows[better]} & {one["seed"] for one in rows[worse]}
        error = math.hypot(error, spread / math.sqrt(len(seeds)))
        kind = "open" if abs(mean) < 2 * error else "alike" if mean < 0 else "reversed"
        found[kind].append((better, worse))
    return found


# --- cells ---------------------------------------------------------------------------------------------------


def _perplexity(factor: int) -> Column:
    """Mean, and from three seeds on the standard deviation."""

    def shown(row: Row) -> str:
        values = perplexities(row["of"], factor)
        if not values:
            return "-"
        mean = f"{statistics.fmean(values):.2f}"
        return mean if len(values) < 3 else f"{mean} ± {statistics.stdev(values):.2f}"

    return shown


def _less(base: Sequence[Found], factor: int) -> Column:
    """Of a row that is not Base, what it needs more."""

    def shown(row: Row) -> str:
        if row["name"] == BASE:
            return ""
        apart = less(row["of"], base, factor)
        return "-" if apart is None else "{:+.4f} ± {:.4f}".format(*apart)

    return shown


def _less_by_seed(base: Sequence[Found], factor: int) -> Column:
    """The same of each seed alone, where there are several."""

    def shown(row: Row) -> str:
        apart = [less([one], base, factor) for one in row["of"]]
        if row["name"] == BASE or len(apart) < 2:
            return ""
        return ", ".join("-" if one is None else f"{one[0]:+.3f}" for one in apart)

    return shown


def _share(factor: int) -> Column:
    """Right answers of the questions, over all seeds, with their interval."""

    def shown(row: Row) -> str:
        results = [r for found in row["needles"] if (r := at(found, factor)) is not None]
        right, questions = (sum(r[name] for r in results) for name in ("correct", "questions"))
        if not questions:
            return "-"
        return "{:.2f} ({:.2f}-{:.2f})".format(right / questions, *wilson_interval(right, questions))

    return shown


def _paper_needles(row: Row) -> str:
    shares = (row["paper"]["needles_16k"], row["paper"]["needles_64k"])
    return "-" if None in shares else ", ".join(f"{percent / 100:.2f}" for percent in shares)


def _rows(part: Found | None, field: str = "of") -> list[Row]:
    """Of each row that was measured what was found, under ``field``, and what the paper has."""
    return [
        {"name": name, "seeds": len(of), "paper": asdict(ROWS[name].paper), "first": of[0], field: of}
        for name, of in by_row(part).items()
    ]


# --- tables --------------------------------------------------------------------------------------------------


def text_table(part: Found) -> str:
    settings, found = part["settings"], by_row(part)
    shown = {factor: f"{factor * settings['context_length']:,}" for factor in FACTORS}
    columns: Columns = {
        "model": "{name}",
        "parameters": "{first[parameters]:,}",
        "seeds": "{seeds}",
        **{length: _perplexity(factor) for factor, length in shown.items()},
        **{f"- Base, {length}": _less(found.get(BASE, []), factor) for factor, length in shown.items()},
        "by seed": _less_by_seed(found.get(BASE, []), FACTORS[-1]),
        "paper, 2K": "{paper[at_2k]:.2f}",
        "paper, 16K": "{paper[at_16k]:.2f}",
    }
    landmark = found.get("Landmark")
    own = f" (Landmark: {landmark[0]['context_length']:,})" if landmark else ""
    counted = next(r for of in found.values() for one in of for r in one["results"] if r["factor"] == 1)
    return (
        f"Trained {settings['steps']:,} steps of {settings['tokens_per_step']:,} tokens, "
        f"{settings['context_length']:,} at a time{own}, of books of "
        f"{settings['corpus_tokens']:,} tokens (vocabulary {settings['vocabulary']:,}). Perplexity of "
        f"{len(counted['losses'])} books, {shown[FACTORS[-1]]} tokens of each, by tokens read at a time: mean ± "
        "standard deviation of seeds. *- Base*: nats per token more than Base, ± standard error over books, paired "
        f"(below 0: better), of seed 0 where a row has no other; *by seed*: each alone, {shown[FACTORS[-1]]}. "
        "*paper*: Table 1 of arXiv 2410.01651, PG19 test, 128M, trained at 16K.\n\n"
        + table(columns, _rows(part))
    )


def ordering_text(part: Found) -> str:
    """How the order of the rows at the greatest length compares with the paper's."""
    measured = [factor for factor in FACTORS if any(ordering(part, factor).values())]
    if not measured:
        return ""
    factor = measured[-1]
    found, spread = ordering(part, factor), spread_of_seeds(by_row(part), factor)
    total = sum(map(len, found.values()))
    over = "books alone: no seeds to compare" if spread is None else f"books and of seeds, {spread:.4f} each"
    line = (
        f"At {factor * part['settings']['context_length']:,} tokens {len(found['alike'])} of {total} pairs are "
        f"ordered as in the paper at 16K, {len(found['open'])} are not told apart (two standard errors, of "
        f"{over}), {len(found['reversed'])} are reversed"
    )
    before: dict[str, list[str]] = {}
    for better, worse in found["reversed"]:
        before.setdefault(worse, []).append(f"*{better}*")
    pairs = "; ".join(f"*{name}* before {', '.join(others)}" for name, others in before.items())
    return f"{line}{f': {pairs}' if pairs else ''}."


def needle_table(part: Found) -> str:
    settings = part["settings"]
    columns: Columns = {
        "model": "{name}",
        "parameters": "{first[parameters]:,}",
        "seeds": "{seeds}",
        **{f"{factor * settings['length']:,}": _share(factor) for factor in NEEDLE_FACTORS},
        "paper": _paper_needles,
    }
    texts = ", ".join(f"{level['chunks'] * 32} for {share:.0%}" for share, level in settings["levels"])
    return (
        f"Byte models, trained {settings['steps']:,} steps of {settings['tokens_per_step']:,} tokens (tokens of a "
        f"text: {texts} of the steps). Share of single needles answered with all five digits right, by tokens of the "
        f"haystack, with 95% Wilson intervals; chance is {CHANCE:.5f}. Needles lie where no window reaches; "
        f"full attention was asked of ones anywhere, up to {FULL_UP_TO * settings['length']:,} tokens. "
        f"{settings['questions'][0]} questions of each seed in a cell; {settings['questions'][1]} where a model reads "
        "a haystack anew for each, and none of greater length once it had none right. "
        f"*paper*: single NIAH at 16K and 64K (Table 2; trained at 16K).\n\n{table(columns, _rows(part, 'needles'))}"
    )


COST: Columns = {
    "model": "{name}",
    "parameters": "{first[parameters]:,}",
    "µs per token": "{first[microseconds_per_token]:,.1f}",
    "of Base": "{first[ratio]:.2f}x ({first[ratio_lowest]:.2f}-{first[ratio_highest]:.2f})",
    "memory of a step": "{first[step_bytes]:size}",
    "paper": "{paper[time]:g}x",
}


def cost_table(part: Found) -> str:
    return (
        f"A training step of each row in turn, medians of {part['settings']['rounds']} rounds (lowest-highest), "
        "per token; memory: what two steps take above process and weights. Encoders are asked anew at every step. "
        f"*paper*: the Time column of Table 1, on 8 A100.\n\n{table(COST, _rows(part))}"
    )


def parts(record: Found) -> list[tuple[str, Found, str]]:
    """Title, part and table of what was measured."""
    makers = {
        "text": ("Perplexity", _text),
        "needles": ("Needles", needle_table),
        "cost": ("Cost", cost_table),
    }
    return [
        (title, record[name], make(record[name]))
        for name, (title, make) in makers.items()
        if record.get(name, {}).get("results")
    ]


def _text(part: Found) -> str:
    return "\n\n".join(filter(None, [text_table(part), ordering_text(part)]))


def text(record: Found) -> str:
    """Every table of the parts that were measured."""
    return "\n\n".join(f"**{title}.** {shown}" for title, _, shown in parts(record))
