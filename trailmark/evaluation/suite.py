"""What a suite is: one object that says what can be set, how it is measured, and what its results look like.

``trailmark evaluate``, the record, the terminal, the page, the model card and the command that repeats a result know
suites by this object alone, so a new suite is one file with one :func:`register`. A file that declares a suite imports
neither torch nor what measures: ``trailmark evaluate --help`` reads all of them.

Columns and charts are data. They are read from *rows*, flat mappings that :attr:`Suite.rows` makes of a result: the
settings of the cell under the values that were measured, "settings" for the cell's settings where a value has the same
name, "model" for the name of the model that the row is about, and "train_length" for its longest training text.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import trailmark.evaluation
from trailmark.settings import Settings, as_text, gathered, nearest, setting, words
from trailmark.values import number

if TYPE_CHECKING:
    from trailmark.evaluation.documents import Documents
    from trailmark.evaluation.record import Record
    from trailmark.evaluation.subject import Subject

Row = Mapping[str, Any]
Place = Literal["terminal", "page", "card"]
PLACES: tuple[Place, ...] = ("terminal", "page", "card")
DTYPES = ("float32", "bfloat16", "float16")
MEMORY_DTYPES = (*DTYPES, "int8")

Value = str | tuple[str, ...] | Callable[[Row], Any]
"""What is read from a row: a name in it ("ms_per_token.median": a part of what stands there), several names for the
ends of an interval, or a function."""


def read(row: Row, value: Value) -> Any:
    """What ``value`` names in a row; None where it is missing, or an end of an interval is."""
    if callable(value):
        return value(row)
    if isinstance(value, tuple):
        ends = [read(row, name) for name in value]
        return None if None in ends else tuple(ends)
    found: Any = row
    for name in value.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


# --- what results look like --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One column of a table. A table leaves out the columns in which no row has a value.

    Args:
        title: its heading.
        value: what is read from each row.
        form: how a number (or each end of an interval) is written: a format of Python's, "bytes", "share" (between 0
            and 1; a page draws a bar), "times" (a ratio), "perplexity" (beyond 10,000 in nats). "": as it is.
        on: where the column is shown.
        text: whether its cells are words, which are aligned on the left.
        about: what the heading means, where it does not say so itself; told below the table.
    """

    title: str
    value: Value
    form: str = ""
    on: tuple[Place, ...] = PLACES
    text: bool = False
    about: str = ""


@dataclass(frozen=True)
class Panel:
    """One measure of a chart, with the ends of its interval where there is one.

    Args:
        label: of the axis. share: whether the axis goes from 0 to 1.
    """

    title: str
    label: str
    value: Value
    interval: tuple[str, str] | None = None
    share: bool = False


@dataclass(frozen=True)
class Lines:
    """Measures by a number: a line for each series of rows, beside each other where there are several panels.

    Args:
        name: of the chart's files. caption: what it shows and how.
        x, x_label: what the lines run along.
        points: gives the points of a line from the rows of its series.
        rule, rule_label: a number of all rows, where it is the same for all, drawn as a vertical line.
    """

    name: str
    title: str
    caption: str
    x: Value
    x_label: str
    panels: tuple[Panel, ...]
    points: Callable[[Sequence[Row]], Sequence[Row]] = lambda rows: rows
    rule: Value | None = None
    rule_label: str = ""


@dataclass(frozen=True)
class Bars:
    """Measures of models: a bar for each row, in a panel for each measure and each ``by``.

    Args:
        by: names what rows of one panel share.
        form: as a column's. base: the value that the others are compared with, drawn as a line.
        instead: said where a row has no value.
    """

    name: str
    title: str
    caption: str
    x_label: str
    panels: tuple[Panel, ...]
    by: Callable[[Row], str] = lambda row: ""
    form: str = ".3f"
    base: float | None = None
    instead: Value = "problem"


@dataclass(frozen=True)
class HeatMap:
    """A share by two numbers: a map for each series of rows."""

    name: str
    title: str
    caption: str
    x: Value
    x_label: str
    y: Value
    y_label: str
    value: Value


@dataclass(frozen=True)
class ChunkMap:
    """Which chunks were read for each question, in a map for each model.

    Args:
        asked: gives the questions of a row: "needle" (the chunk that holds it), "selected" (the chunks that were read),
            "weights" (theirs).
    """

    name: str
    title: str
    caption: str
    asked: Callable[[Row], Sequence[Row]]


Chart = Lines | Bars | HeatMap | ChunkMap


@dataclass(frozen=True)
class Tile:
    """One number that sums a suite up, what it is, and how it was measured."""

    figure: str
    what: str
    how: str


def one_row(result: Row) -> list[Row]:
    """A result as one row."""
    settings = result.get("settings") or {}
    return [{**settings, **result, "settings": settings}]


# --- the suite -----------------------------------------------------------------------------------------------------


def device_setting() -> Any:
    return setting(None, "Where models compute, as cpu, cuda or cuda:1.", default="cuda if there is one")


def changes_setting() -> Any:
    return setting(
        (),
        "A field of the model's configuration, for this time: num_retrieved_chunks=2.",
        option="--set",
        repeated=True,
    )


@dataclass(frozen=True)
class Request(Settings):
    """Which models are asked what: the options of ``trailmark evaluate`` that are no suite's own."""

    models: tuple[Path, ...] = setting(
        help="Folders with models of trailmark's or any causal language model of transformers, hub names; with --suite "
        "cost YAML files too, for random weights of those sizes.",
        argument=True,
    )
    suite: tuple[str, ...] = setting(
        (),
        "needles, perplexity, retrieval, summarization, cost, lm-eval or yardstick; again for more.",
        default="what a model was trained for",
        repeated=True,
    )
    output: Path | None = setting(
        None,
        "Folder for the results, which are kept one by one.",
        default="evaluation/ in a model's own folder (of the first one for cost)",
        option="--output -o",
    )
    text: tuple[Path, ...] = setting(
        (),
        "Files, folders or a prepared corpus; needles repeat it where it is shorter than a length.",
        default="sources of Python's library that are for haystacks alone",
        repeated=True,
    )
    changes: tuple[str, ...] = changes_setting()
    device: str | None = device_setting()
    dtype: str | None = setting(
        None, f"Type of the weights: {', '.join(DTYPES)}.", default="as saved", choices=DTYPES
    )


@dataclass
class Task:
    """What a suite is asked to measure, with all that it needs for that.

    Args:
        subjects: the models: one, unless the suite compares them.
        documents: opens the text that was named, once.
        say: is told what stays on the screen. progress: is told a line about what is under way, often.
    """

    subjects: list[Subject]
    settings: Any
    record: Record
    documents: Callable[[], Documents]
    say: Callable[[str], None] = lambda message: None
    progress: Callable[[str], None] = lambda message: None

    @property
    def subject(self) -> Subject:
        (only,) = self.subjects
        return only


@dataclass(frozen=True)
class Suite:
    """A suite.

    Args:
        name: of the option ``--suite`` and of the record's file. title: of its section in a page.
        settings: the dataclass of what can be set; its fields are options of ``trailmark evaluate``.
        run: measures what the record does not hold yet, and returns all results that were asked for. Of a record's
            results, those whose ``settings`` are equal are one.
        columns, charts: what is shown of its rows.
        about: what a page says of the whole suite.
        rows: makes rows of one result; none for a part of what is to come.
        parts: settings in which the results of parts differ from that of the whole, which comes after them and with
            which a page shows what was written for them.
        heading: what rows of one table and of one chart share: a title, and what else is said below it. Each has its
            section in a page.
        series: what tells the lines of a chart apart beside the model, in words.
        written: columns of what the model wrote, as ``<suite>.generations.jsonl`` has it.
        tiles: the numbers that sum the suite up.
        compares: whether all models are measured together, in one record.
        random_weights: whether models that were never trained can be measured.
        divided: whether several processes (``torchrun``) share the work out, as ``Record.measure_all`` does; else one
            alone can measure it.
        asked_of: whether a model that was trained for this task is measured where no suite is named; None: nothing says
            what the model was trained for.
    """

    name: str
    title: str
    settings: type[Settings]
    run: Callable[[Task], list[dict[str, Any]]]
    columns: tuple[Column, ...]
    charts: tuple[Chart, ...] = ()
    about: str = ""
    rows: Callable[[Row], list[Row]] = one_row
    parts: tuple[str, ...] = ()
    heading: Callable[[Row], tuple[str, str]] = lambda row: ("", "")
    series: Callable[[Row], tuple[str, ...]] = lambda row: ()
    written: tuple[Column, ...] = ()
    tiles: Callable[[Sequence[Row]], Sequence[Tile]] = lambda rows: ()
    compares: bool = False
    random_weights: bool = False
    divided: bool = False
    asked_of: Callable[[str | None], bool] = field(default=lambda task: False)

    def commands(
        self, models: Sequence[str | Path], cells: Sequence[Row], changes: Mapping[str, Any] | None = None
    ) -> list[str]:
        """The commands that measure cells again, from the settings that the record keeps with its results.

        Args:
            models: folders or names of the models that were measured.
            cells: ``settings`` of the results.
            changes: fields of the model's configuration that were set.
        """
        fields = [f"{name}={as_text(value)}" for name, value in (changes or {}).items()]
        asked = words(Request, {"models": models, "suite": (self.name,), "changes": fields})
        every = gathered(self.settings, cells)
        return [shlex.join(["trailmark", "evaluate", *asked, *words(self.settings, one)]) for one in every]


# as they are shown, before all others
_FIRST = ("needles", "perplexity", "retrieval", "summarization", "cost")
_registered: dict[str, Suite] = {}


def register(suite: Suite) -> Suite:
    """Make a suite known to ``trailmark evaluate`` and to reports."""
    _registered[suite.name] = suite
    return suite


def suites() -> dict[str, Suite]:
    """All suites by their names: those of ``trailmark/evaluation/*/suite.py``, and what else was registered."""
    for place in trailmark.evaluation.__path__:
        for file in sorted(Path(place).glob("*/suite.py")):
            importlib.import_module(f"trailmark.evaluation.{file.parent.name}.suite")  # registers itself
    order = [*_FIRST, *(name for name in _registered if name not in _FIRST)]
    return {name: _registered[name] for name in order}


def suite_named(name: str) -> Suite:
    """The suite of that name; a ValueError names those that there are."""
    known = suites()
    if name not in known:
        expected = ", ".join(map(repr, known))
        raise ValueError(f"suite: expected {expected}, got {name!r}.{nearest(name, known, '')}")
    return known[name]


# --- what several suites declare -------------------------------------------------------------------------------------


def tiers() -> tuple[str, ...]:
    """Where the memory of past chunks can lie."""
    from trailmark.memory.tiers.base import TIERS

    return tuple(TIERS)


def longest(rows: Sequence[Row], name: str = "length") -> list[Row]:
    """The rows at the greatest length of all rows."""
    most = max((length for row in rows if (length := number(row.get(name)))), default=None)
    return [row for row in rows if most is not None and number(row.get(name)) == most]


def seed_setting() -> Any:
    return setting(0, "Seed of all that is drawn at random.", least=0, most=2**32 - 1)


def tier_setting(
    default: str = "device",
    among: Callable[[], tuple[str, ...]] = tiers,
    places: str = "on the device, the host or disk",
) -> Any:
    about = (
        f"Where keys and values of past chunks lie: {places}; or tokens alone, of which the chunks that are "
    )
    return setting(default, f"{about}selected are encoded again.", choices=among)


def tiers_in_folders() -> tuple[str, ...]:
    """Where a memory that is kept can lie."""
    from trailmark.memory.tiers.base import TIERS

    return tuple(name for name, kind in TIERS.items() if kind.needs_folder)


def expect_dtype_of(dtype: str | None, *tiers: str) -> None:
    """Raise a ValueError where a tier of a suite's settings cannot keep its ``memory_dtype``."""
    import torch

    from trailmark.memory.tiers.base import expect_dtype

    for tier in tiers:
        expect_dtype(tier, None if dtype is None else getattr(torch, dtype))


def dtype_setting() -> Any:
    return setting(
        None,
        f"Of keys and values in memory: {', '.join(DTYPES)}, or int8, with which landmark vectors are in bfloat16. "
        "With memory tier tokens, which does not take int8, of landmark vectors.",
        default="the model's",
        choices=MEMORY_DTYPES,
    )
