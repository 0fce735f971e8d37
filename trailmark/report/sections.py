"""What the sections of the report share: figures with their numbers, tables, names of series."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from trailmark.report.charts import (
    BarChart,
    Chart,
)
from trailmark.report.collect import Result
from trailmark.report.console import size
from trailmark.report.markup import (
    MISSING,
    Html,
    details,
    element,
    number,
    paragraph,
    shown,
    table,
)
from trailmark.report.svg import inline

_MOST_OPEN = 60  # rows
_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


@dataclass
class Figures:
    """Draws charts, or gives their numbers alone where nothing can draw."""

    folder: Path | None  # for the files; None: no drawing
    progress: Callable[[str], None] = lambda message: None
    written: list[Path] = field(default_factory=list)

    def show(self, chart: Chart) -> Html:
        header, rows = chart.table()
        words = range(len(header) - 1) if isinstance(chart, BarChart) else ()
        numbers = table(f"Numbers: {chart.title}", header, rows, words)
        if self.folder is None:
            return element(
                "section", details(f"{chart.title}: numbers", paragraph(chart.description), numbers)
            )
        self.progress(f"drawing {chart.title}")
        drawing = inline(chart.write(self.folder), chart.name, chart.title, chart.description)
        files = [self.folder / f"{chart.name}.{kind}" for kind in ("svg", "png")]
        self.written += files
        links = [
            element("a", file.suffix[1:].upper(), href=f"{self.folder.name}/{file.name}") for file in files
        ]
        return element(
            "figure",
            element("div", drawing, class_="scroll", role="region", tabindex="0", aria_label=chart.title),
            element("figcaption", element("strong", f"{chart.title}. "), chart.description),
            element("div", details("Numbers of this figure", numbers), element("p", "Files: ", *_joined(links)),
                    class_="under"),
            class_="wide" if chart.wide else "plain",
        )  # fmt: skip


@dataclass(frozen=True)
class Section:
    name: str  # its address on the page
    title: str
    content: Sequence[Html]
    short: str = ""  # where there is little room; else the title


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    groups: dict[_Key, list[_Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)


def by_length(results: Sequence[Result]) -> dict[float, list[Result]]:
    """Ascending; results without a length are left to the table."""
    groups = grouped((r for r in results if number(r.get("length"))), lambda r: float(r.get("length")))
    return dict(sorted(groups.items()))


def labels(series: dict[_Key, Any], looks: dict[_Key, int]) -> dict[_Key, tuple[str, int]]:
    """For each series (model, more ...) a label that says as much as tells it apart, and a look of its own."""
    keys: list[Any] = list(series)
    width = len(keys[0]) if keys else 0
    differing = [n for n in range(1, width) if len({key[n : n + 1] for key in keys}) > 1]
    alone = len({looks[key] for key in keys}) == len(keys)
    found = {}
    for place, key in enumerate(keys):
        more = [_differing_part(n, key[n]) for n in differing if n < len(key)]
        more += [str(part) for part in key[len(keys[0]) :]]
        found[key] = (", ".join([str(key[0]), *filter(None, more)]), looks[key] if alone else place)
    return found


def _differing_part(position: int, value: Any) -> str:
    if value is None or value == "":
        return ""
    return f"{value} needle{'s' * (value != 1)}" if isinstance(value, int) else str(value)


def cells(
    caption: str,
    columns: Sequence[tuple[str, Callable[[Any], Any]]],
    items: Sequence[Any],
    words: Sequence[str] = (),
) -> Html:
    """A table without the columns in which nothing stands; a long one opens when asked."""
    filled = [(name, [of(item) for item in items]) for name, of in columns]
    kept = [column for n, column in enumerate(filled) if n == 0 or any(c != MISSING for c in column[1])]
    text = [n for n, (name, _) in enumerate(kept) if name in words]
    rows = list(zip(*(values for _, values in kept), strict=True))
    made = table(caption, [name for name, _ in kept], rows, text)
    # a long one would hide what stands below it
    return made if len(rows) <= _MOST_OPEN else details(f"{caption} ({len(rows):,})", made)


def published(results: Iterable[Result]) -> list[Html]:
    """What papers printed, as the results' protocols noted it: a table for each of their tables."""
    tables: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for result in results:
        given = result.values.get("published")
        for row in [given] if isinstance(given, dict) else given if isinstance(given, list) else []:
            if isinstance(row, dict):
                about = [f"arXiv {row['arxiv']}"] if "arxiv" in row else []
                about += [str(row["table"])] if "table" in row else []
                tables[", ".join(about) or "the paper"][json.dumps(row, sort_keys=True, default=str)] = row
    content = []
    for source, rows in tables.items():
        names = list(
            dict.fromkeys(name for row in rows.values() for name in row if name not in ("arxiv", "table"))
        )
        names.sort(key=lambda name: name != "model")
        values = [[value_shown(row.get(name)) for name in names] for row in rows.values()]
        header = [name.replace("_", " ") for name in names]
        content.append(details(f"Published: {source}", table(f"As printed in {source}", header, values)))
    return content


def noted(results: Iterable[Result]) -> list[Html]:
    """What a protocol says of its cells."""
    said = dict.fromkeys(str(note) for result in results if (note := result.values.get("note")))
    return [paragraph(note, class_="fine") for note in said]


def bytes_shown(value: Any) -> str:
    exact = number(value)
    return shown(value) if exact is None else size(exact)


def value_shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {value_shown(part)}" for key, part in value.items()) or MISSING
    return shown(value, ".5g") if isinstance(value, float) else shown(value)


def quote(text: Any, most: int = 160) -> str:
    """Text that a model wrote; what is left out is said."""
    if text is None:
        return MISSING
    whole = str(text)
    return whole if len(whole) <= most else f"{whole[:most]} … ({len(whole) - most:,} more characters)"


def _joined(links: Sequence[Html]) -> list[Any]:
    return [part for link in links for part in (", ", link)][1:]
