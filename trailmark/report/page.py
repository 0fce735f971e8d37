"""One self-contained page of what was measured: ``trailmark report RUNS... -o report.html``.

The page asks the network for nothing; its figures lie in it, and beside it as SVG and PNG files.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trailmark.evaluation.suite import suites
from trailmark.files import write_text
from trailmark.report.collect import Collected, NotShown, collect
from trailmark.report.figures import available
from trailmark.report.notes import notes
from trailmark.report.overview import environments, overview, reproduce
from trailmark.report.rendering import expect_page, render
from trailmark.report.sections import sections_of_suites
from trailmark.report.training import training
from trailmark.values import listed


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
    expect_page(output)
    collected = collect(paths, progress)
    known = suites()
    sections, tiles = sections_of_suites(collected, known)
    if (trainings := training(collected.trainings)) is not None:
        sections.append(trainings)
    told = notes(collected)
    folder = output.with_name(f"{output.stem}-figures")
    figures = [figure for section in sections for part in section.parts for figure in part.figures]
    if not available():
        told.append("No figures: matplotlib is not installed. pip install 'trailmark[figures]'")
        figures = []
    for figure in figures:
        progress(f"drawing {figure.title}")
        figure.write(folder)
    sections = [overview(collected, tiles), *sections, reproduce(collected, known), environments(collected)]
    progress(f"writing {output}")
    headline = _headline(collected)
    page = render(
        "report.html",
        "page.css",
        ["page.js"],
        title=f"trailmark report: {headline}",
        headline=headline,
        content=_content(collected),
        dates=_dates(collected),
        notes=told,
        sections=sections,
        not_shown=collected.not_shown,
        today=datetime.date.today().isoformat(),
    )
    write_text(output, page)
    for entry in collected.not_shown:
        say(f"Not shown: {entry.path}: {entry.reason}")
    for note in told:
        say(f"Note: {note}")
    drawn = f", {len(figures)} figures in {folder}/" if figures else ""
    say(f"Report: {output} ({_content(collected)}){drawn}")
    return Built(output, [file for figure in figures for file in figure.files], told, collected.not_shown)


def _headline(collected: Collected) -> str:
    labels = [model.label for model in collected.models]
    if len(labels) > 3:
        return f"{', '.join(labels[:2])} and {len(labels) - 2} more models"
    return listed(labels)


def _content(collected: Collected) -> str:
    counts = (
        (len(collected.models), "model"),
        (len(collected.results), "result"),
        (len(collected.trainings), "training"),
        (len(collected.files), "file"),
    )
    return ", ".join(f"{n:,} {what}{'s' * (n != 1)}" for n, what in counts if n)


def _dates(collected: Collected) -> str:
    environments = [result.environment or {} for result in collected.results]
    dates = sorted({str(here["date"]) for here in environments if here.get("date")})
    return " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else ""
