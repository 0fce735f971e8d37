"""One writer for all tables: columns are declared, rows are read by them, and documents hold each text between marks.

A column is a title and how a row's cell is written: a format of the row's fields, ``"{length:,}"``, or a function of
the row. Besides Python's own formats there are those of ``KINDS``: ``"{seconds[p50]:ms ,.1f}"``.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from trailmark.files import read_json
from trailmark.report.console import duration, size
from trailmark.report.tables import markdown_table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
Row = dict[str, Any]
Column = str | Callable[[Any], str]
Columns = dict[str, Column]
RIGHT = "{accuracy:.3f} ({accuracy_low:.3f}-{accuracy_high:.3f})"  # a share, and its interval


def between(name: str, form: str = ".3f") -> str:
    """How a number is written with the ends of its interval, which lie under ``name_low`` and ``name_high``."""
    return f"{{{name}:{form}}} ({{{name}_low:{form}}} to {{{name}_high:{form}}})"


def spread(of: Mapping[str, float], form: str = ",.0f") -> str:
    """Median, lowest and highest."""
    return f"{of['median']:{form}} ({of['lowest']:{form}}-{of['highest']:{form}})"


# formats of our own: each is given the value and, after a space, another format
KINDS: dict[str, Callable[[Any, str], str]] = {
    "size": lambda value, form: size(value),
    "duration": lambda value, form: duration(value),
    "spread": lambda value, form: spread(value, form or ",.0f"),
    "ms": lambda value, form: format(value * 1000, form),
    "us": lambda value, form: format(value * 1e6, form),
    "mib": lambda value, form: f"{format(value / 2**20, form)} MiB",
}


class _Cells(string.Formatter):
    def format_field(self, value: Any, form: str) -> str:
        if value is None:
            raise KeyError
        kind, _, rest = form.partition(" ")
        return KINDS[kind](value, rest) if kind in KINDS else format(value, form)


def cell(column: Column, row: Row) -> str:
    """What a column shows of a row; a dash where it was not measured."""
    if callable(column):
        return column(row)
    try:
        return _Cells().vformat(column, (), row)
    except (KeyError, TypeError):  # the field, or what it should be within, is missing or None
        return "-"


def table(columns: Columns, rows: Sequence[Row]) -> str:
    return markdown_table(list(columns), [[cell(of, row) for of in columns.values()] for row in rows])


def crossed(
    results: Sequence[Row],
    down: Columns,
    across: str,
    value: Column,
    last: Mapping[str, Callable[[list[Row]], str]] | None = None,
    order: Callable[[Row], Any] | None = None,
) -> str:
    """A row for all results with the same cells ``down``, and in it a column for each ``across``, which is its title.

    Args:
        value: of the last result of a row and column.
        last: columns more, of all results of a row.
        order: of the columns, by their results; None: as the results come.
    """
    ordered = results if order is None else sorted(results, key=order)
    titles = dict.fromkeys(cell(across, result) for result in ordered)
    rows: dict[tuple[str, ...], list[Row]] = {}
    for result in results:
        rows.setdefault(tuple(cell(of, result) for of in down.values()), []).append(result)
    shown = []
    for names, own in rows.items():
        found = {cell(across, result): cell(value, result) for result in own}
        more = [of(own) for of in (last or {}).values()]
        shown.append([*names, *(found.get(title, "-") for title in titles), *more])
    return markdown_table([*down, *titles, *(last or {})], shown)


def line_figure(
    path: Path,
    lines: Mapping[str, Mapping[int, float]],
    ticks: Mapping[int, str],
    titles: tuple[str, str, str],
    colours: Mapping[str, str] | None = None,
    log: bool = False,
) -> None:
    """Draw lines by length into a file.

    Args:
        lines: by their labels, their values by length. ticks: of lengths, what is written there.
        titles: of the figure, its lengths and its values. log: the values' axis; else it begins at 0.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for label, values in lines.items():
        axes.plot(
            *zip(*sorted(values.items()), strict=True), "o-", label=label, color=(colours or {}).get(label)
        )
    axes.set_xscale("log", base=2)
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xticks([*ticks], [*ticks.values()])
    axes.set_title(titles[0])
    axes.set_xlabel(titles[1])
    axes.set_ylabel(titles[2])
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def machine(where: Row, libraries: Sequence[str] = ("torch",)) -> str:
    threads = f"{where['threads']} thread{'s' * (where['threads'] > 1)}"
    versions = ", ".join(f"{name} {where[name]}" for name in libraries)
    computed = where.get("gpu") or f"{where['processor']}, {threads}"
    return f"{computed}, {versions}, {where['date']}"


def on_machine(text: str, *where: Row) -> str:
    """A text, and under it what it was measured on: one machine, or all that its numbers are of."""
    machines = sorted({machine(own) for own in where})
    return f"{text}\n\nMachine{'s' * (len(machines) > 1)}: {'; '.join(machines)}."


def one_after_another(blocks: Iterable[tuple[str, Row]]) -> str:
    """Texts, each with where it was measured, which is said once where several that follow each other are of one."""
    there = [[*same] for _, same in groupby(blocks, key=lambda block: machine(block[1]))]
    return "\n\n".join(on_machine("\n\n".join(text for text, _ in same), same[0][1]) for same in there)


def of_parts(known: Mapping[str, Row], parts: Mapping[str, Callable[[Row], str]]) -> str:
    """The texts of what was measured, in the order of ``parts``; one that was not is left out."""
    measured = ((make, known[part]) for part, make in parts.items() if part in known)
    return one_after_another((make(found["results"]), found["environment"]) for make, found in measured)


def record(name: str) -> dict[str, Any]:
    """What benchmarks/<name>.json holds; empty where it was not measured."""
    return read_json(HERE / f"{name}.json") or {}


def filled(document: str, texts: Mapping[str, Callable[[], str]], name: str) -> str:
    """A document with every text between its marks.

    Raises:
        ValueError: marks of the document ``name`` are missing or there twice.
    """
    for mark, make in texts.items():
        begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
        if document.count(begin) != 1 or document.count(end) != 1:
            raise ValueError(
                f"{name}: expected {begin} and {end} once each. Write them where the text belongs."
            )
        before, rest = document.split(begin)
        document = f"{before}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
    return document


def fill(path: Path, texts: Mapping[str, Callable[[], str]]) -> None:
    """Write :func:`filled` into the file."""
    path.write_text(filled(path.read_text(encoding="utf-8"), texts, str(path)), encoding="utf-8")
