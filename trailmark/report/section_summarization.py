"""The section about summaries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from trailmark.report.charts import (
    Bar,
    BarChart,
    BarPanel,
)
from trailmark.report.collect import Collected, Result, generations
from trailmark.report.markup import (
    Html,
    count,
    details,
    element,
    interval,
    number,
    paragraph,
    shown,
)
from trailmark.report.sections import (
    Figures,
    Section,
    cells,
    published,
    quote,
)

_ROUGE = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum"}


def summarization(found: Collected, figures: Figures) -> Section | None:
    measured = found.of("summarization")
    if not measured:
        return None
    results = [r for r in measured if any(isinstance(r.values.get(name), dict) for name in _ROUGE)]
    unfinished = {r.source for r in measured} - {r.source for r in results}
    notes = [
        paragraph(f"{path}: not all documents are summarized yet; the same command goes on.", class_="notice")
        for path in sorted(unfinished)
    ]
    if not results:
        return Section("summarization", "Summarization", [*notes, *_summaries(measured)])
    panels = []
    for name, title in _ROUGE.items():
        bars = []
        for result in results:
            score = result.values.get(name)
            if isinstance(score, dict) and (f := number(score.get("f"))) is not None:
                low, high = number(score.get("low")), number(score.get("high"))
                bars.append(Bar(_summary_label(result, results), result.model.look, f, low, high))
        if bars:
            panels.append(BarPanel(title, bars))
    content = [
        paragraph(
            "F-measure of ROUGE between generated and reference summaries, with 95% bootstrap intervals over the "
            "documents. Higher is better."
        ),
        *notes,
    ]
    if panels:
        chart = BarChart(
            "summarization",
            "Summaries: ROUGE",
            "F-measure with 95% bootstrap intervals.",
            x_label="F-measure",
            panels=panels,
            form=".3f",
            dots=True,
        )
        content.append(figures.show(chart))
    columns: list[tuple[str, Callable[[Result], Any]]] = [
        ("model", lambda r: r.model.label),
        ("documents", lambda r: count(r.get("documents"))),
        ("protocol", lambda r: shown(r.get("protocol"))),
    ]
    for name, title in _ROUGE.items():
        columns += [
            (title, partial(_score_shown, name)),
            ("95% interval", partial(_score_interval, name)),
        ]
    content.append(cells("Summaries: all cells", columns, results, words=("protocol",)))
    content += published(results)
    content += _summaries(found.of("summarization"))
    return Section("summarization", "Summarization", content)


def _summary_label(result: Result, results: Sequence[Result]) -> str:
    same = [other for other in results if other.model.label == result.model.label]
    return result.model.label if len(same) == 1 else f"{result.model.label}, {same.index(result) + 1}"


def _score_shown(name: str, result: Result) -> str:
    return shown(_score(result, name, "f"), ".4f")


def _score_interval(name: str, result: Result) -> str:
    return interval(_score(result, name, "low"), _score(result, name, "high"))


def _score(result: Result, name: str, part: str) -> Any:
    found = result.values.get(name)
    return found.get(part) if isinstance(found, dict) else None


def _summaries(results: Sequence[Result], most: int = 3) -> list[Html]:
    content: list[Html] = []
    shown_for: dict[str, int] = defaultdict(int)
    for result, lines in generations(results):
        for line in islice(lines, most - shown_for[result.model.label]):
            shown_for[result.model.label] += 1
            parts = [("reference", line.get("reference", line.get("summary")))]
            parts += [("generated", line.get("generated", line.get("text")))]
            if line.get("document") is not None:
                parts.insert(0, ("document", line["document"]))
            content.append(
                element(
                    "article",
                    element("h3", f"{result.model.label}, summary {shown_for[result.model.label]}"),
                    element(
                        "dl",
                        *(
                            cell
                            for name, text in parts
                            for cell in (element("dt", name), element("dd", quote(text, 1200)))
                        ),
                    ),
                    class_="generation",
                )
            )
    return [details(f"Some summaries ({len(content)})", *content)] if content else []
