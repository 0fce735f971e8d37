"""The suite "lm-eval": tasks of EleutherAI's lm-evaluation-harness, read in a constant window.

:mod:`trailmark.evaluation.harness.run` says how they are asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trailmark.evaluation.suite import Column, Lines, Panel, Row, Suite, Task, register, seed_setting
from trailmark.settings import Settings, setting


@dataclass(frozen=True)
class HarnessSettings(Settings):
    """Which tasks are asked, of how many texts, and how long those of RULER are.

    Tasks that make their own texts (RULER's) have as many tokens as ``lengths`` says; all others come from the hub or
    from its cache and are as long as they are.

    Raises:
        ValueError: settings out of range, or no task.
    """

    tasks: tuple[str, ...] = setting(
        (), "Of lm-eval, by name: niah_single_1,ruler_vt. 'lm-eval ls tasks' lists them.", cell="task"
    )
    lengths: tuple[int, ...] = setting(
        (),
        "Tokens of a prompt and its answer, for RULER's tasks.",
        default="1x, 4x and 16x the training texts",
        least=1,
        cell="length",
    )
    limit: int | None = setting(None, "Texts of each task, from the first.", default="all", least=1)
    num_fewshot: int | None = setting(None, "Examples before each question.", default="the task's", least=0)
    batch_size: int = setting(1, "Texts that are continued at a time.", least=1, on_command_line=False)
    seed: int = seed_setting()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tasks:
            raise ValueError("tasks: expected names of lm-eval's tasks, as niah_single_1,ruler_vt, got none.")


def _run(task: Task) -> list[dict[str, Any]]:
    from trailmark.evaluation.harness import run as harness

    return harness.run(task.subject, task.settings, task.record, task.progress)


# --- what results look like --------------------------------------------------------------------------------------


def _rows(result: Row) -> list[Row]:
    """A row for each metric."""
    settings, metrics = result.get("settings") or {}, result.get("metrics")
    if not isinstance(metrics, Mapping):
        return []
    shared = {**settings, **{k: v for k, v in result.items() if k != "metrics"}, "settings": settings}
    return [{**shared, "metric": name, **found} for name, found in metrics.items()]


SUITE = register(
    Suite(
        name="lm-eval",
        title="lm-eval",
        settings=HarnessSettings,
        run=_run,
        divided=True,
        about="Tasks of EleutherAI's lm-evaluation-harness, prompts and scores as there, read in a constant window. "
        "Intervals (95%) are over texts drawn again.",
        columns=(
            Column("task", "task", text=True),
            Column(
                "tokens",
                "length",
                ",d",
                about="of a prompt and its answer, of tasks that make their own texts",
            ),
            Column("metric", "metric", text=True),
            Column("texts", "texts", ",d"),
            Column("score", "score", ".3f"),
            Column("95% interval", ("low", "high"), ".3f"),
            Column("seconds", "seconds", ",.0f", on=("page",)),
        ),
        charts=(
            Lines(
                name="lm-eval",
                title="Score by length",
                caption="RULER's tasks by the tokens of a prompt and its answer, with 95% intervals.",
                x="length",
                x_label="tokens",
                panels=(Panel("Score", "score", "score", ("low", "high"), share=True),),
                points=lambda rows: [row for row in rows if row.get("length")],
            ),
        ),
        rows=_rows,
        series=lambda row: (str(row.get("task")),),
        written=(
            Column("text", "number", ",d"),
            Column("wanted", "wanted", text=True),
            Column("generated", "generated", text=True),
        ),
    )
)
