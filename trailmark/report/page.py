"""One self-contained page of what was measured: ``trailmark report RUNS... -o report.html``.

The page asks the network for nothing; its figures lie in it, and beside it as SVG and PNG files.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trailmark import __version__
from trailmark.data.files import expect_writable, write_text
from trailmark.report import charts
from trailmark.report.collect import Collected, NotShown, collect
from trailmark.report.html import whole_page
from trailmark.report.markup import Html, element, listed, paragraph
from trailmark.report.notes import notes
from trailmark.report.overview import overview
from trailmark.report.reproduce import environments, reproduce
from trailmark.report.section_cost import cost
from trailmark.report.section_needles import needles
from trailmark.report.section_perplexity import perplexity
from trailmark.report.section_summarization import summarization
from trailmark.report.section_training import training
from trailmark.report.sections import Figures, Section

_SECTIONS = (needles, perplexity, summarization, cost, training)


@dataclass(frozen=True)
class Built:
    """What :func:`build` wrote and what it could not show."""

    page: Path
    figures: list[Path]
    notes: list[str]
    not_shown: list[NotShown]


def build(
    paths: Sequence[Path],
    output: Path,
    say: Callable[[str], None] = lambda message: None,
    progress: Callable[[str], None] = lambda message: None,
) -> Built:
    """Write the page ``output`` about all results below ``paths``, and its figures into ``<output>-figures/``.

    Args:
        paths: files and folders: records of ``trailmark evaluate``, run folders of trainings, demos.
        say: told what was written, and each file that is not shown with the reason.
        progress: told often what is being done.

    Raises:
        ValueError: a path that is not there, no results in any, or an output that cannot be written.
    """
    if output.is_dir():
        raise ValueError(
            f"output: expected a file, {str(output)!r} is a folder. Try {str(output / 'report.html')!r}."
        )
    found = collect(paths, progress)
    expect_writable("output", output.parent)
    folder = output.with_name(f"{output.stem}-figures")
    figures = Figures(folder if charts.available() else None, progress)
    told = notes(found)
    if figures.folder is None:
        told.append("No figures: matplotlib is not installed. pip install 'trailmark[figures]'")
    parts = [section for make in _SECTIONS if (section := make(found, figures)) is not None]
    parts = [overview(found), *parts, reproduce(found), environments(found)]
    if found.not_shown:
        parts.append(_not_shown(found.not_shown))
    progress(f"writing {output}")
    write_text(output, page(found, parts, told))
    for entry in found.not_shown:
        say(f"Not shown: {entry.path}: {entry.reason}")
    for note in told:
        say(f"Note: {note}")
    drawn = f", {len(figures.written) // 2} figures in {folder}/" if figures.written else ""
    say(f"Report: {output} ({_content(found)}){drawn}")
    return Built(output, figures.written, told, found.not_shown)


def page(found: Collected, parts: Sequence[Section], told: Sequence[str]) -> str:
    """The whole HTML."""
    links = [element("li", element("a", part.short or part.title, href=f"#{part.name}")) for part in parts]
    body = [
        element("a", "Skip to the results", class_="skip", href="#main"),
        element(
            "header",
            paragraph("trailmark report", class_="kicker"),
            element("h1", _headline(found)),
            paragraph(f"{_content(found)}. {_dates(found)}", class_="lead"),
            _notice(told, bool(found.not_shown)),
            class_="top",
        ),
        element(
            "nav",
            element(
                "div", element("ul", *links), Html('<button id="theme" type="button" hidden>Dark</button>')
            ),
            aria_label="Sections",
        ),
        element("main", *map(_section, parts), id="main", tabindex="-1"),
        element("footer", _footer()),
    ]
    title = f"trailmark report: {_headline(found)}"
    return whole_page(title, "page.css", "\n".join(body), ["page.js"])


def _section(part: Section) -> Html:
    heading = element("h2", part.title, id=f"{part.name}-heading")
    return element(
        "section", heading, *part.content, id=part.name, aria_labelledby=f"{part.name}-heading"
    )  # fmt: skip


def _headline(found: Collected) -> str:
    labels = [model.label for model in found.models]
    if len(labels) > 3:
        return f"{', '.join(labels[:2])} and {len(labels) - 2} more models"
    return listed(labels)


def _content(found: Collected) -> str:
    counts = (
        (len(found.models), "model"),
        (len(found.results), "result"),
        (len(found.trainings), "training"),
        (len(found.files), "file"),
    )
    return ", ".join(f"{n:,} {what}{'s' * (n != 1)}" for n, what in counts if n)


def _dates(found: Collected) -> str:
    dates = sorted(
        {str(r.environment["date"]) for r in found.results if r.environment and r.environment.get("date")}
    )
    if not dates:
        return ""
    return f"Measured {dates[0]}." if len(dates) == 1 else f"Measured {dates[0]} to {dates[-1]}."


def _notice(told: Sequence[str], some_not_shown: bool) -> Html:
    entries = [element("li", note) for note in told]
    if some_not_shown:
        link = element("a", "what is not shown and why", href="#not-shown")
        entries.append(element("li", "Some files are not in this report: ", link, "."))
    if not entries:
        return Html("")
    return element(
        "aside",
        element("h2", "Before you compare"),
        element("ul", *entries),
        class_="notice",
        aria_label="Notes",
    )


def _not_shown(entries: Sequence[NotShown]) -> Section:
    rows = [element("li", element("code", str(entry.path)), f": {entry.reason}") for entry in entries]
    return Section("not-shown", "Not shown", [element("ul", *rows)])


def _footer() -> Html:
    today = datetime.date.today().isoformat()
    return paragraph(f"Made by trailmark {__version__} on {today}. This page asks the network for nothing.")
