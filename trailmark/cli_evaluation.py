"""The commands that measure models and show what was found."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from trailmark.evaluation.suite import Suite, suites
from trailmark.settings import declared, from_options, help_of, parameter, with_parameters


def evaluate(
    context: typer.Context,
    models: Annotated[
        list[Path],
        typer.Argument(
            help="Folders with models of trailmark's or any causal language model of transformers, hub names; with "
            "--suite cost YAML files too, for random weights of those sizes."
        ),
    ],
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="needles, perplexity, summarization or cost; again for more. Default: what a model was trained for."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for the results, which are kept one by one; default: evaluation/ in a model's own folder (of "
            "the first one for cost).",
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Files, folders or a prepared corpus; default: sources of Python's library that are for haystacks "
            "alone. Needles: repeated where it is shorter than a length."
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A field of the model's configuration, for this evaluation: retrieve_per=token."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where models compute; default: cuda if there is one.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of weights: float32, bfloat16, float16; default: as saved.")
    ] = None,
    **given: Any,
) -> None:
    """Needles, perplexity, summaries and cost, with intervals. The same command goes on where it stopped."""
    from trailmark.evaluation.evaluate import evaluate as run
    from trailmark.report.console import Progress
    from trailmark.report.tables import result_table

    progress = Progress()

    def say(message: str) -> None:
        progress.clear()
        typer.echo(message)

    options: dict[str, Any] = {}
    for one in suites().values():
        options |= from_options(one.settings, given)
    command = shlex.join(["trailmark", *context.obj])
    written = []
    asked = run(
        models, suite or (), options, text, changes or (), output, device, dtype, command, say, progress.show
    )
    for found in asked:
        names = ", ".join(subject.name for subject in found.subjects)
        table = result_table(found.suite, found.results, found.subjects[0].train_length)
        say(f"\n{found.suite.name} of {names}\n\n{table}")
        written.append(found.record.path)
    say("\nNumbers: " + ", ".join(map(str, written)))
    say(
        f"Next: trailmark report {shlex.join(dict.fromkeys(str(path.parent) for path in written))} -o report.html"
    )


_PLAIN = [
    one for one in inspect.signature(evaluate, eval_str=True).parameters.values() if one.name != "given"
]


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
    with_parameters(evaluate, evaluate, [*_PLAIN, *made])


declare_options()


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders or files with results: models, demos, evaluations.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
) -> None:
    """One page of all that was measured: tables, figures, settings, how to reproduce each."""
    from trailmark.report.console import Progress
    from trailmark.report.page import build

    progress = Progress()

    def say(message: str) -> None:
        progress.clear()
        typer.echo(message)

    build(runs, output, say, progress.show)
    progress.clear()
