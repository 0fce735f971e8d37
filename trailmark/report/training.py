"""The report's section about trainings."""

from __future__ import annotations

from typing import Any

from trailmark.evaluation import suite as declared
from trailmark.evaluation.suite import Column, Row
from trailmark.evaluation.tables import table_of
from trailmark.report.charts import Line, LineChart, Panel
from trailmark.report.collect import Collected, Training
from trailmark.report.figures import Figures, points_of
from trailmark.report.sections import Part, Section
from trailmark.values import duration, number

_POINTS = 40  # of a curve that stand in its table
_CURVES = {
    "loss": ("Training loss", "nats per token", False),
    "accuracy": ("First token of an answer right, on training texts", "share", True),
    "recall": ("Needle's chunk retrieved, on training texts", "share", True),
    "eval_perplexity": ("Perplexity on validation text", "perplexity per token", False),
}
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


def training(collected: Collected, figures: Figures) -> Section | None:
    """The curves of all trainings, and how they ended; None where there are none."""
    if not collected.trainings:
        return None
    logged = {id(run): _logged(run) for run in collected.trainings}
    panels = []
    for key, (title, label, share) in _CURVES.items():
        value = declared.Panel(title, label, key)
        curves = [
            (run.model, points_of(logged[id(run)], "million tokens", value)) for run in collected.trainings
        ]
        lines = [Line(model.label, model.look, points, False) for model, points in curves if len(points) > 1]
        if lines:
            panels.append(Panel(title, label, lines, share))
    part = Part(tables=[table_of("All trainings", _COLUMNS, [*map(_row, collected.trainings)], "page")])
    if panels:
        most = max(len(line.points) for panel in panels for line in panel.lines)
        every = max(1, most // _POINTS)
        told = f" The table holds each {every}th logged step and the last; history.json all."
        chart = LineChart(
            name="training",
            title="Training curves",
            description="As logged while training, by the number of tokens trained on." + told * (every > 1),
            x_label="million tokens",
            panels=panels,
            lengths=False,
            every=every,
        )
        part.figures.append(figures.show(chart))
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
