"""The suite "retrieval": what chosen chunks are worth to a model, what the right ones would be, and what scores say.

:mod:`trailmark.evaluation.retrieval.run` says how it is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trailmark.evaluation.suite import Column, Place, Row, Suite, Task, register, seed_setting
from trailmark.settings import Settings, setting
from trailmark.values import number


@dataclass(frozen=True)
class RetrievalSettings(Settings):
    """What is read, and how many chunks are tried."""

    lengths: tuple[int, ...] | None = setting(
        None,
        "Tokens of a text, as 1024,16384.",
        default="that of the training texts",
        least=2,
        cell="length",
    )
    texts: int = setting(8, "Stretches of the text that are read, or as many as it holds.", least=1)
    sample: int = setting(8, "Past chunks that are tried one by one for each chunk that asks.", least=2)
    seed: int = seed_setting()


def _run(task: Task) -> list[dict[str, Any]]:
    from trailmark.evaluation.retrieval import run as retrieval

    return retrieval.run(task.subject, task.settings, task.documents(), task.record, task.progress)


# --- what results look like --------------------------------------------------------------------------------------

CASES = {
    "none": "none",
    "own": "its own choice",
    "random": "random",
    "recent": "the most recent",
    "BM25": "BM25 with the text of the chunk that asks",
    "BM25, told": "BM25 with the text of the chunk that reads",
    "one, own": "one: its own choice",
    "one, random": "one: random",
    "one, best": "one: the best of those tried",
    "copy, none": "a span that comes again: none",
    "copy, own": "a span that comes again: its own choice",
    "copy, given": "a span that comes again: its source given",
}


def rows_of(result: Row) -> list[Row]:
    """A row for each choice of chunks, then one for each group's scores; none for a single text."""
    settings = result.get("settings") or {}
    if settings.get("number") is not None:
        return []
    cases = [{**case, "what": CASES.get(str(case.get("chunks")))} for case in _mappings(result, "cases")]
    groups = enumerate(_mappings(result, "groups"))
    rows = [*cases, *({**own, "what": f"scores of group {group}"} for group, own in groups)]
    return [{**settings, **row, "settings": settings} for row in rows]


def _mappings(result: Row, name: str) -> list[Row]:
    """Of a file that anybody may have written."""
    found = result.get(name)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def _heading(row: Row) -> tuple[str, str]:
    length = number(row.get("length"))
    title = "" if length is None else f"Texts of {length:,.0f} tokens"
    return title, f"Text: {str(row['text'])[:8]}." if row.get("text") else ""


_GROUPS: tuple[Place, ...] = ("terminal", "page")
_SOURCES = "of the chunks that hold the first place of what is read again, those that some group chose"
_POPULAR = "share of the scores' variance that is a past chunk's own, whoever asks, above chance"
_AGREEMENT = "rank correlation of scores with what each chunk that was tried took off the loss"
_HALVES = "correlation of the gradients of every other token's loss with the others': 0 is noise"

_EVER_READ = "of the chunks that some chunk may choose"
_NOISY = "chosen with noise on the scores, as in training"

SUITE = register(
    Suite(
        name="retrieval",
        title="Retrieval",
        settings=RetrievalSettings,
        run=_run,
        divided=True,
        about="What tokens cost that read chunks out of more than are read at once: with the chunks that the model "
        "chooses, with others in their place, with one alone, and where a span of the text comes again.",
        columns=(
            Column("model", "model", on=("page",), text=True),
            Column("length", "length", ",d", on=("page", "card")),
            Column("chunks read", "what", text=True),
            Column("tokens", "tokens", ",d", on=("page",)),
            Column("nats", "nats", ".3f", about="per token"),
            Column("less than with none", "less", ".3f", about="nats per token"),
            Column("95% interval", ("less_low", "less_high"), ".3f", about="over texts drawn again"),
            Column("source read", "source_read", "share", about=_SOURCES),
            Column("popular", "popular", ".2f", on=_GROUPS, about=_POPULAR),
            Column(
                "deviation", "deviation", ".2f", on=_GROUPS, about="of the scores of one that asks, in nats"
            ),
            Column(
                "rank",
                "rank",
                ".1f",
                on=_GROUPS,
                about="effective number of directions in which scores differ",
            ),
            Column("agreement", "agreement", ".3f", on=_GROUPS, about=_AGREEMENT),
            Column(
                "of the pair",
                "agreement_of_pair",
                ".3f",
                on=_GROUPS,
                about="the same without what is popular",
            ),
            Column(
                "gradient: popular",
                "gradient_popular",
                ".2f",
                on=_GROUPS,
                about="of the loss's gradient in the scores",
            ),
            Column("two halves", "gradient_halves", ".3f", on=_GROUPS, about=_HALVES),
            Column("ever read", "ever_read", "share", on=_GROUPS, about=_EVER_READ),
            Column("two halves, with noise", "noisy_gradient_halves", ".3f", on=_GROUPS, about=_NOISY),
            Column("ever read, with noise", "noisy_ever_read", "share", on=_GROUPS, about=_NOISY),
        ),
        rows=rows_of,
        parts=("number",),
        heading=_heading,
    )
)
