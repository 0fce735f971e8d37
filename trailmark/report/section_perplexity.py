"""The section about perplexity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trailmark.report.charts import (
    Line,
    LineChart,
    Panel,
)
from trailmark.report.collect import Collected, Result
from trailmark.report.markup import (
    MISSING,
    Html,
    count,
    element,
    interval,
    number,
    paragraph,
    shown,
)
from trailmark.report.sections import (
    Figures,
    Section,
    by_length,
    cells,
    grouped,
    labels,
    noted,
    published,
)


def perplexity(found: Collected, figures: Figures) -> Section | None:
    results = found.of("perplexity")
    if not results:
        return None
    content = [
        paragraph(
            "How well a model foretells a text: lower is better. Loss is in nats per token; perplexities per token "
            "compare models with the same tokenizer, per word and bits per byte any models. Bands and intervals: 95%."
        )
    ]
    texts = {r.plain("text") for r in results}
    for place, (mode, group) in enumerate(grouped(results, lambda r: _reading(r, len(texts) > 1)).items()):
        content.append(element("h3", mode))
        series = grouped(group, lambda r: (r.model.label, *_perplexity_case(r)))
        looks = {key: same[0].model.look for key, same in series.items()}
        drawn = _perplexity_chart(series, looks, place, mode, figures)
        drawn += _position_chart(series, looks, place, mode, figures)
        content.append(element("div", *drawn, class_="pair"))
        content.append(_perplexity_table(mode, group))
        content += noted(group)
        content += published(group)
    return Section("perplexity", "Perplexity", content)


def _reading(result: Result, several_texts: bool) -> str:
    """How and what was read: a curve is of one text."""
    kind = {
        "windows": "Windows of the text",
        "sliding": "Sliding windows",
        "documents": "Whole documents",
    }.get(str(result.settings.get("windows")), "Windows of the text")
    if number(result.get("stride")) is not None:
        kind += f", moved by {count(result.get('stride'))} tokens"
    kind += ", memory carried" if result.get("carry") else ""
    if several_texts:
        kind += f", text {str(result.plain('text'))[:8]}"
    return kind + (f" (protocol {result.get('protocol')})" if result.get("protocol") else "")


def _perplexity_case(result: Result) -> tuple[str, ...]:
    """What else tells cells of one length apart: fields that a protocol sets."""
    changes = result.settings.get("set")
    if not isinstance(changes, dict):
        return ()
    return tuple(f"{key}={value}" for key, value in sorted(changes.items()))


def _perplexity_chart(
    series: dict[tuple[Any, ...], list[Result]],
    looks: dict[tuple[Any, ...], int],
    place: int,
    mode: str,
    figures: Figures,
) -> list[Html]:
    names = labels(series, looks)
    lines = []
    for key, group in series.items():
        last = {x: same[-1] for x, same in by_length(group).items()}
        points = [(x, y, r) for x, r in last.items() if (y := number(r.get("perplexity"))) is not None]
        if len(points) < 2:
            continue
        label, look = names[key]
        low, high = ([number(r.get(f"perplexity_{end}")) for *_, r in points] for end in ("low", "high"))
        lines.append(Line(label, look, [x for x, *_ in points], [y for _, y, _ in points], low, high))
    if not lines:
        return []
    return [
        figures.show(
            LineChart(
                f"perplexity-{place + 1}-length",
                f"{mode}: perplexity by length",
                "Perplexity per token by the length of what is read at once. Bands: 95% intervals.",
                x_label="tokens",
                panels=[Panel("Perplexity", "perplexity per token", lines)],
            )
        )
    ]


def _position_chart(
    series: dict[tuple[Any, ...], list[Result]],
    looks: dict[tuple[Any, ...], int],
    place: int,
    mode: str,
    figures: Figures,
) -> list[Html]:
    names = labels(series, looks)
    lines = []
    for key, group in series.items():
        measured = [r for r in group if isinstance(r.values.get("by_position"), list)]
        longest = max(measured, key=lambda r: number(r.get("length")) or 0.0, default=None)
        if longest is None:
            continue
        bins = [b for b in longest.values["by_position"] if isinstance(b, dict)]
        points = [
            (x + 1, y, b)
            for b in bins
            if (x := number(b.get("last"))) is not None and (y := number(b.get("loss"))) is not None
        ]
        if len(points) > 1:
            label, look = names[key]
            low, high = ([number(b.get(f"loss_{end}")) for *_, b in points] for end in ("low", "high"))
            lines.append(Line(label, look, [x for x, *_ in points], [y for _, y, _ in points], low, high))
    if not lines:
        return []
    return [
        figures.show(
            LineChart(
                f"perplexity-{place + 1}-position",
                f"{mode}: loss by position",
                "Mean loss of the tokens up to each position, from the one before it, in the longest texts measured. "
                "Bands: 95% intervals where they were measured.",
                x_label="position (tokens)",
                panels=[Panel("Loss", "nats per token", lines)],
            )
        )
    ]


def _perplexity_table(mode: str, results: Sequence[Result]) -> Html:
    columns: list[tuple[str, Callable[[Result], Any]]] = [
        ("model", lambda r: r.model.label),
        ("tokens", lambda r: count(r.get("length")) if r.get("length") is not None else "whole documents"),
        ("settings", lambda r: ", ".join(_perplexity_case(r)) or MISSING),
        ("windows", lambda r: count(r.values.get("windows"))),
        ("scored", lambda r: count(r.get("tokens"))),
        ("loss", lambda r: shown(r.get("loss"), ".4f")),
        ("perplexity", lambda r: shown(r.get("perplexity"), ".3f")),
        ("95% interval", lambda r: interval(r.get("perplexity_low"), r.get("perplexity_high"))),
        ("per word", lambda r: shown(r.get("word_perplexity"), ",.1f")),
        ("bits per byte", lambda r: shown(r.get("bits_per_byte"), ".4f")),
        ("retrievals skipped", lambda r: shown(r.get("skipped_share"), ".1%")),
    ]
    return cells(f"{mode}: all cells", columns, results, words=("settings",))
