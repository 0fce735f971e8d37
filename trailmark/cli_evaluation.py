"""The commands that measure models and show what was found."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
from pathlib import Path
from typing import Any

import typer

from trailmark.evaluation.suite import Request, Suite, suites
from trailmark.settings import (
    Settings,
    declared,
    from_options,
    help_of,
    parameter,
    parameters,
    setting,
    takes,
    with_parameters,
)


def evaluate(context: typer.Context, **given: Any) -> None:
    """Needles, perplexity, retrieval, summaries and cost, with intervals. The same command goes on where it stopped."""
    from trailmark.evaluation.evaluate import evaluate as run
    from trailmark.processes import is_main, together
    from trailmark.report.console import Progress
    from trailmark.report.tables import result_table

    progress = Progress(quiet=not is_main())
    options: dict[str, Any] = {}
    for suite in suites().values():
        options |= from_options(suite.settings, given)
    command = shlex.join(["trailmark", *context.obj])
    with together():
        written = []
        request = Request(**from_options(Request, given))
        for found in run(request, options, command, progress.say, progress.show):
            table = result_table(found.suite, found.results, found.subjects[0].train_length)
            progress.say(f"\n{found.suite.name} of {', '.join(found.names)}\n\n{table}")
            written.append(found.record.path)
        folders = dict.fromkeys(str(path.parent) for path in written)
        progress.say("\nNumbers: " + ", ".join(map(str, written)))
        progress.say(f"Next: trailmark report {shlex.join(folders)} -o report.html")


def declare_options() -> None:
    """Give ``evaluate`` an option for each setting of each suite that is registered by now.

    An option that several suites have says what each means by it.
    """
    having: dict[str, list[tuple[Suite, dataclasses.Field[Any]]]] = {}
    for suite in suites().values():
        for field in dataclasses.fields(suite.settings):
            if declared(field).on_command_line:
                having.setdefault(field.name, []).append((suite, field))
    made = []
    for several in sorted(having.values(), key=lambda several: len(several) == 1):
        suite, field = several[0]
        helps: dict[str, list[str]] = {}
        for one, own in several:
            helps.setdefault(help_of(own, optional=True), []).append(one.name)
        told = [f"{', '.join(names).capitalize()}: {help}" for help, names in helps.items()]
        help = " ".join(told) if len(told) > 1 else help_of(field, optional=True)
        panel = f"Of {suite.name}" if len(several) == 1 else "Of several suites"
        made.append(parameter(suite.settings, field, optional=True, help=help, rich_help_panel=panel))
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    with_parameters(evaluate, evaluate, [context, *parameters(Request), *made])


declare_options()


@dataclasses.dataclass(frozen=True)
class ReportSettings(Settings):
    """The options of ``trailmark report``."""

    runs: tuple[Path, ...] = setting(
        help="Folders or files with results: models, demos, evaluations.", argument=True
    )
    output: Path = setting(Path("report.html"), "File of the page.", option="--output -o")


@takes(ReportSettings)
def report(settings: ReportSettings) -> None:
    """One page of all that was measured: tables, figures, settings, how to reproduce each."""
    from trailmark.report.console import Progress
    from trailmark.report.page import build

    progress = Progress()
    build(list(settings.runs), settings.output, progress.say, progress.show)
    progress.clear()
