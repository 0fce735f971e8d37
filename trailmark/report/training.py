"""The report's section about trainings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trailmark.evaluation.suite import Column, Lines, Panel, Row
from trailmark.evaluation.tables import table_of
from trailmark.report.charts import Series, curves_of, line_figure
from trailmark.report.collect import Training
from trailmark.report.sections import Part, Section
from trailmark.values import duration, number

_POINTS = 40  # of a curve that stand in its table
_COLUMNS = (
    Column("model", "model"),
    Column("task", "data.task", text=True),
    Column("context", "training.context_length", ",d"),
    Column("steps", "last.step", ",d"),
    Column("tokens", "tokens", ",d"),
    Column("time", "time"),
    Column("tokens/s", "tokens_per_second", ",d"),
    Column("average loss, nats", "last.loss", ".4f"),
    Column("first token right", "last.accuracy", "share"),
    Column("chunk retrieved", "last.recall", "share"),
    Column("validation perplexity", "last.eval_perplexity", "perplexity"),
)
_CURVES = Lines(
    name="training",
    title="Training curves",
    caption="As logged while training, by the number of tokens trained on.",
    x="million tokens",
    x_label="million tokens",
    panels=(
        Panel("Training loss", "nats per token", "loss"),
        Panel("First token of an answer right, on training texts", "share", "accuracy", share=True),
        Panel("Needle's chunk retrieved, on training texts", "share", "recall", share=True),
        Panel("Perplexity on validation text", "perplexity per token", "eval_perplexity"),
    ),
)


def training(trainings: Sequence[Training]) -> Section | None:
    """The curves of all trainings, and how they ended; None where there are none."""
    if not trainings:
        return None
    part = Part(tables=[table_of("All trainings", _COLUMNS, [_row(run) for run in trainings], "page")])
    curves = curves_of(_CURVES, [Series(run.model.label, run.model.look, _logged(run)) for run in trainings])
    if curves:
        every = max(1, max(len(line.rows) for _, lines in curves for line in lines) // _POINTS)
        told = f" The table holds each {every}th logged step and the last; history.json all." * (every > 1)
        chart = replace(_CURVES, caption=_CURVES.caption + told)
        part.figures.append(line_figure(chart, curves, lengths=False, every=every))
    return Section("training", "Training", [part])


def _logged(run: Training) -> list[Row]:
    """What was logged, with the number of tokens that were trained on until then."""
    tokens = _step_tokens(run)
    return [
        {**step, "million tokens": at * tokens / 1e6}
        for step in run.steps
        if (at := number(step.get("step"))) is not None
    ]


def _step_tokens(run: Training) -> float:
    """Tokens of a step: as the settings say, else as many as were trained on in all."""
    given = number(run.part("training").get("tokens_per_step"))
    if given is not None:
        return given
    steps, tokens = number(_last(run).get("step")), number(run.history.get("tokens"))
    return tokens / steps if steps and tokens else 1e6  # then the axis counts steps


def _row(run: Training) -> Row:
    seconds = number(run.history.get("seconds"))
    return {
        **run.history,
        "model": run.model.label,
        "data": run.part("data"),
        "training": run.part("training"),
        "last": _last(run),
        "time": None if seconds is None else duration(seconds),
    }


def _last(run: Training) -> dict[str, Any]:
    """The last value of each kind that was logged."""
    return {name: value for step in run.steps for name, value in step.items() if value is not None}
