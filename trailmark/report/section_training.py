"""The section about trainings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trailmark.report.charts import (
    Line,
    LineChart,
    Panel,
)
from trailmark.report.collect import Collected, Training
from trailmark.report.console import duration
from trailmark.report.markup import (
    MISSING,
    count,
    number,
    share,
    shown,
)
from trailmark.report.sections import (
    Figures,
    Section,
    cells,
)


def training(found: Collected, figures: Figures, points: int = 40) -> Section | None:
    if not found.trainings:
        return None
    content = []
    curves = {
        "loss": ("Training loss", "nats per token", False),
        "accuracy": ("First token of an answer right, on training texts", "share", True),
        "recall": ("Needle's chunk retrieved, on training texts", "share", True),
        "eval_perplexity": ("Perplexity on validation text", "perplexity per token", False),
    }
    panels, most = [], 1
    for key, (title, label, is_share) in curves.items():
        lines = []
        for run in found.trainings:
            logged = [
                (x * _step_tokens(run) / 1e6, y)
                for step in run.history["steps"]
                if isinstance(step, dict)
                and (x := number(step.get("step"))) is not None
                and (y := number(step.get(key))) is not None
            ]
            most = max(most, len(logged))
            if len(logged) > 1:
                lines.append(
                    Line(run.model.label, run.model.look, [x for x, _ in logged], [y for _, y in logged], marked=False)
                )  # fmt: skip
        if lines:
            panels.append(Panel(title, label, lines, is_share))
    every = max(1, most // points)
    if panels:
        told = (
            f" The table holds each {every}th logged step and the last; history.json all."
            if every > 1
            else ""
        )
        content.append(
            figures.show(
                LineChart(
                    "training",
                    "Training curves",
                    f"As logged while training, by the number of tokens trained on.{told}",
                    x_label="million tokens",
                    panels=panels,
                    lengths=False,
                    every=every,
                )
            )
        )
    columns: list[tuple[str, Callable[[Training], Any]]] = [
        ("model", lambda t: t.model.label),
        ("task", lambda t: shown(_setting(t, "data", "task"))),
        ("context", lambda t: count(_setting(t, "training", "context_length"))),
        ("steps", lambda t: count(_last(t, "step"))),
        ("tokens", lambda t: count(t.history.get("tokens"))),
        ("time", lambda t: MISSING if (s := number(t.history.get("seconds"))) is None else duration(s)),
        ("tokens/s", lambda t: count(t.history.get("tokens_per_second"))),
        ("last loss", lambda t: shown(_last(t, "loss"), ".4f")),
        ("first token right", lambda t: share(_last(t, "accuracy"))),
        ("chunk retrieved", lambda t: share(_last(t, "recall"))),
        ("validation perplexity", lambda t: shown(_last(t, "eval_perplexity"), ".3f")),
    ]
    content.append(cells("All trainings", columns, found.trainings, words=("task",)))
    return Section("training", "Training", content)


def _step_tokens(run: Training) -> float:
    """Tokens of a step: as the settings say, else as many as were trained on in all."""
    given = number(_setting(run, "training", "tokens_per_step"))
    if given is not None:
        return given
    steps, tokens = number(_last(run, "step")), number(run.history.get("tokens"))
    return tokens / steps if steps and tokens else 1e6  # then the axis counts steps


def _setting(run: Training, part: str, name: str) -> Any:
    found = run.run.get(part)
    return found.get(name) if isinstance(found, dict) else None


def _last(run: Training, key: str) -> Any:
    """The last value that was logged."""
    steps = [step for step in run.history["steps"] if isinstance(step, dict)]
    return next((step[key] for step in reversed(steps) if step.get(key) is not None), None)
