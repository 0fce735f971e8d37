"""The suite "yardstick": published benchmarks of long texts, asked from files that were downloaded before.

:mod:`trailmark.evaluation.yardsticks.formats` has their files and rules, :mod:`trailmark.evaluation.yardsticks.run`
how they are asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trailmark.evaluation.suite import Column, Suite, Task, register, seed_setting
from trailmark.settings import Settings, setting

BENCHMARKS = ("longbench-v2", "babilong", "mrcr", "nolima")
LENGTHS = (1000, 4000, 16_000, 32_000)


@dataclass(frozen=True)
class YardstickSettings(Settings):
    """Which benchmark is asked, from which files.

    Raises:
        ValueError: settings out of range, or no files.
    """

    benchmark: str | None = setting(None, "Which one.", choices=BENCHMARKS)
    data: Path | None = setting(None, "The folder with its files, as published.", recorded=False)
    limit: int | None = setting(
        None, "Questions of each part, from the first; of nolima drawn at random.", default="all", least=1
    )
    lengths: tuple[int, ...] | None = setting(
        None,
        "Tokens of the texts that nolima makes.",
        default=", ".join(map(str, LENGTHS)),
        least=64,
    )
    max_new_tokens: int | None = setting(None, "Of an answer, at most.", default="the benchmark's", least=1)
    seed: int = seed_setting()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.benchmark is None:
            raise ValueError(f"benchmark: expected one of {', '.join(BENCHMARKS)}, got none.")
        if self.data is None:
            raise ValueError("data: expected the folder with the benchmark's files, got none.")
        if self.lengths is not None and self.benchmark != "nolima":
            raise ValueError(
                f"lengths: expected none for {self.benchmark}, whose texts are as long as they are."
            )


def _run(task: Task) -> list[dict[str, Any]]:
    from trailmark.evaluation.yardsticks import run as yardsticks

    return yardsticks.run(task.subject, task.settings, task.record, task.progress)


SUITE = register(
    Suite(
        name="yardstick",
        title="Yardsticks",
        settings=YardstickSettings,
        run=_run,
        divided=True,
        about="Published benchmarks of long texts, by their own rules of what is right; the words that ask are ours. "
        "Intervals (95%) are over questions drawn again.",
        columns=(
            Column("benchmark", "benchmark", text=True),
            Column("part", "part", text=True),
            Column("questions", "questions", ",d"),
            Column("score", "score", ".3f"),
            Column("95% interval", ("low", "high"), ".3f"),
            Column("tokens", "tokens", ",.0f", about="of a text, the mean"),
            Column("texts read", "readings", ",d", on=("page",)),
        ),
        written=(
            Column("question", "number", ",d"),
            Column("wanted", "wanted", text=True),
            Column("generated", "generated", text=True),
        ),
    )
)
