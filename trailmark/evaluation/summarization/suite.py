"""The suite "summarization": summaries that a model writes, against references.

:mod:`trailmark.evaluation.summarization.run` says how they are written and scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trailmark.evaluation.suite import (
    PLACES,
    Bars,
    Column,
    Panel,
    Place,
    Row,
    Suite,
    Task,
    Tile,
    one_row,
    read,
    register,
    seed_setting,
)
from trailmark.settings import Settings, setting
from trailmark.values import number

PROTOCOL = "paper-table-2"


@dataclass(frozen=True)
class SummarizationSettings(Settings):
    """What is summarised, and how.

    ``pairs``: files of documents and summaries, or folders of such (:class:`trailmark.data.summarization.Pairs`). A
    document that is longer than ``context_length`` leaves room for loses its end, as in training. ``stemmer``: words of
    one stem are equal (rouge-score's Porter stemmer), as in results on these corpora. ``protocol`` "paper-table-2"
    (arXiv 2410.01651, Table 2): 128 tokens sampled among the two likeliest, as its published code does. What that code
    scores are strings of tokens; here it is text, so numbers differ.

    Raises:
        ValueError: settings out of range or that do not go together.
    """

    pairs: tuple[str, ...] = setting(
        (),
        "Documents and summaries: .jsonl, .parquet, or a folder that trailmark prepare --pairs made.",
        repeated=True,
        recorded=False,
    )
    document_column: str | None = setting(
        None, "Of the documents.", default="document or article", on_command_line=False
    )
    summary_column: str | None = setting(
        None, "Of the summaries.", default="summary or highlights", on_command_line=False
    )
    limit: int | None = setting(None, "Number of documents, from the first.", default="all", least=1)
    max_new_tokens: int = setting(128, "Tokens of a summary, at most.", least=1)
    temperature: float = setting(0.0, "0: always the likeliest token.", least=0)
    top_k: int | None = setting(None, "Sample among so many of the likeliest tokens.", default="all", least=1)
    context_length: int | None = setting(
        None,
        "Tokens of a document and its summary, the rest is cut.",
        default="as in training, the most that a model of transformers takes, else no end",
        least=1,
    )
    stemmer: bool = setting(True, "Whether words of one stem are equal.", on_command_line=False)
    batch_size: int = setting(8, "Documents that are worked on at a time.", least=1, on_command_line=False)
    protocol: str | None = setting(None, f"A paper's way to measure: {PROTOCOL}.", choices=(PROTOCOL,))
    seed: int = seed_setting()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.pairs:
            raise ValueError("pairs: expected files of documents and summaries, got none.")
        if self.protocol is not None:
            if (self.max_new_tokens, self.temperature, self.top_k) not in ((128, 0.0, None), (128, 1.0, 2)):
                raise ValueError(
                    f"protocol: {PROTOCOL!r} samples 128 tokens at temperature 1 among the 2 likeliest: expected no "
                    f"max_new_tokens, temperature or top_k beside it, got {self.max_new_tokens}, "
                    f"{self.temperature:g} and {self.top_k}."
                )
            object.__setattr__(self, "temperature", 1.0)
            object.__setattr__(self, "top_k", 2)
        if self.temperature != 0:
            from trailmark.models.generation import (
                expect_temperature,  # torch, which a declaration does without
            )

            expect_temperature(self.temperature)
        if self.top_k is not None and self.temperature == 0:
            raise ValueError(
                f"top_k: expected none at temperature 0, which takes the likeliest token, got {self.top_k}. Set "
                "temperature to 1."
            )


def _run(task: Task) -> list[dict[str, Any]]:
    from trailmark.evaluation.summarization import run as summarization

    return summarization.run(task.subject, task.settings, task.record, task.progress)


# --- what results look like --------------------------------------------------------------------------------------

_TITLES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum"}


def _rows(result: Row) -> list[Row]:
    """The row of all documents: a block of them is a part of what is to come."""
    rows = one_row(result)
    return rows if rows[0]["settings"].get("block") is None else []


def _columns() -> list[Column]:
    columns = []
    for name, title in _TITLES.items():
        on: tuple[Place, ...] = ("page",) if name == "rougeLsum" else PLACES
        columns.append(Column(title, f"{name}.f", ".4f", on=on))
        columns.append(Column("95% interval", (f"{name}.low", f"{name}.high"), ".4f", on=on))
    return columns


def _tiles(rows: Sequence[Row]) -> list[Tile]:
    known = [row for row in rows if number(read(row, "rougeL.f")) is not None]
    if not known:
        return []
    best = max(known, key=lambda row: float(row["rougeL"]["f"]))
    how = str(best.get("model"))
    if (ends := read(best, ("rougeL.low", "rougeL.high"))) is not None:
        how += f"; 95% interval {ends[0]:.3f}–{ends[1]:.3f}"
    return [Tile(f"{best['rougeL']['f']:.3f}", f"ROUGE-L of {best.get('documents')} summaries", how)]


SUITE = register(
    Suite(
        name="summarization",
        title="Summarization",
        settings=SummarizationSettings,
        run=_run,
        divided=True,
        about="F-measure of ROUGE between generated and reference summaries, with 95% bootstrap intervals over the "
        "documents. Higher is better.",
        columns=(
            Column("model", "model", on=("page",), text=True),
            Column("documents", "documents", ",d"),
            Column("protocol", "protocol", on=("page",), text=True),
            *_columns(),
        ),
        charts=(
            Bars(
                "rouge",
                "ROUGE",
                "F-measure with 95% bootstrap intervals.",
                x_label="F-measure",
                panels=tuple(
                    Panel(title, "F-measure", f"{name}.f", (f"{name}.low", f"{name}.high"))
                    for name, title in _TITLES.items()
                ),
            ),
        ),
        rows=_rows,
        parts=("block", "documents"),
        written=(
            Column("number", "number", ",d"),
            Column("document", "document", text=True),
            Column("reference", "reference", text=True),
            Column("generated", "generated", text=True),
        ),
        tiles=_tiles,
    )
)
