"""The section about time and memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from trailmark.report.charts import (
    Bar,
    BarChart,
    BarPanel,
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
    short_length,
    shown,
)
from trailmark.report.sections import (
    Figures,
    Section,
    bytes_shown,
    cells,
    noted,
    published,
)


def cost(found: Collected, figures: Figures) -> Section | None:
    results = found.of("cost")
    if not results:
        return None
    content = [
        paragraph(
            "Time and memory, as ratios to the first model named (the window alone, where there is one): 1 is equal, "
            "less is better. Formula: the bytes that the sizes alone tell, to compare with "
            "the measured ones; the paper's formula: section 3.2 of arXiv 2410.01651."
        )
    ]
    reading = [r for r in results if rows_of(r) and r.get("prompt") is not None]
    training = [r for r in results if rows_of(r) and r.get("prompt") is None]
    rest = [r for r in results if not rows_of(r)]
    for name, title, ratio in (
        ("time", "Time per generated token", "time_ratio"),
        ("memory", "Memory on the device", "memory_ratio"),
    ):
        content += _ratio_chart(reading, name, title, ratio, figures)
    if reading:
        columns: list[tuple[str, Callable[[tuple[Result, dict[str, Any]]], Any]]] = [
            ("model", lambda c: c[0].named(c[1].get("model")).label),
            ("architecture", lambda c: shown(c[1].get("architecture"))),
            ("prompt", lambda c: count(c[0].get("prompt"))),
            ("tier", lambda c: shown(c[0].get("tier"))),
            ("ms per token", lambda c: shown(_part(c[1], "ms_per_token", "median"), ".3f")),
            ("quartiles", lambda c: interval(_part(c[1], "ms_per_token", "p25"), _part(c[1], "ms_per_token", "p75"))),
            ("time", lambda c: _times(c[1].get("time_ratio"))),
            ("quartiles, time", lambda c: _pair(c[1].get("time_ratio_quartiles"))),
            ("on the device", lambda c: bytes_shown(c[1].get("device_bytes"))),
            ("on the device, formula", lambda c: bytes_shown(c[1].get("formula_device_bytes"))),
            ("memory", lambda c: _times(c[1].get("memory_ratio"))),
            ("cache, measured", lambda c: bytes_shown(c[1].get("cache_bytes"))),
            ("cache, formula", lambda c: bytes_shown(c[1].get("formula_bytes"))),
            ("paper's formula", lambda c: bytes_shown(c[1].get("paper_formula_bytes"))),
            ("formula / measured", lambda c: _quotient(c[1].get("formula_bytes"), c[1].get("cache_bytes"))),
            ("reading, tokens/s", lambda c: count(c[1].get("tokens_per_second_reading"))),
            ("note", lambda c: shown(c[1].get("problem") or c[1].get("note"))),
        ]  # fmt: skip
        measured = [(r, row) for r in reading for row in rows_of(r)]
        content.append(cells("Generating: all cells", columns, measured, ("architecture", "tier", "note")))
    content += noted(reading)
    content += _training_cost(training, figures)
    content += published(results)
    if rest:
        names = ", ".join(sorted({str(r.source) for r in rest}))
        content.append(paragraph(f"{len(rest)} cells without rows are not shown: {names}.", class_="notice"))
    return Section("cost", "Cost", content)


def _ratio_chart(
    results: Sequence[Result], name: str, title: str, ratio: str, figures: Figures
) -> list[Html]:
    panels = []
    for result in results:
        bars = []
        for row in rows_of(result):
            model = result.named(row.get("model"))
            value = number(row.get(ratio))
            says = "" if value is not None else str(row.get("problem") or row.get("note") or "not measured")
            bars.append(Bar(model.label, model.look, value, says=says))
        if any(bar.value is not None for bar in bars):
            tier = f", {result.get('tier')}" if result.get("tier") else ""
            length = number(result.get("prompt"))
            prompt = short_length(length) if length is not None else shown(result.get("prompt"))
            panels.append(BarPanel(f"After {prompt} tokens{tier}", bars))
    if not panels:
        return []
    return [
        figures.show(
            BarChart(
                f"cost-{name}",
                f"{title}, as a ratio",
                "Dotted: the model that the others are compared with.",
                x_label="ratio",
                panels=panels,
                unit="×",
                base=1.0,
            )
        )
    ]


def _training_cost(results: Sequence[Result], figures: Figures) -> list[Html]:
    if not results:
        return []
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    looks = {}
    measured = []
    for result in results:
        for row in rows_of(result):
            measured.append((result, row))
            model = result.named(row.get("model"))
            looks[model.label] = model.look
            x, y = number(_context(result)), number(row.get("tokens_per_second"))
            if x is not None and y is not None:
                lines[model.label].append((x, y))
    content = [element("h3", "Cost of training")]
    drawn = [
        Line(label, looks[label], [x for x, _ in sorted(points)], [y for _, y in sorted(points)])
        for label, points in lines.items()
    ]
    if any(len(line.x) > 1 for line in drawn):
        content.append(
            figures.show(
                LineChart(
                    "cost-training",
                    "Training: tokens per second by context length",
                    "Forward and backward together. Higher is better.",
                    x_label="context length (tokens)",
                    panels=[Panel("Throughput", "tokens per second", drawn)],
                )
            )
        )
    columns: list[tuple[str, Callable[[tuple[Result, dict[str, Any]]], Any]]] = [
        ("model", lambda c: c[0].named(c[1].get("model")).label),
        ("context", lambda c: count(_context(c[0]))),
        ("tokens/s", lambda c: count(c[1].get("tokens_per_second"))),
        ("time", lambda c: _times(c[1].get("time_ratio"))),
        ("peak memory", lambda c: bytes_shown(c[1].get("peak_bytes"))),
        ("memory", lambda c: _times(c[1].get("memory_ratio"))),
        ("note", lambda c: shown(c[1].get("problem") or c[1].get("note"))),
    ]
    content.append(cells("Training: all cells", columns, measured, ("note",)))
    return content


def _context(result: Result) -> Any:
    return result.get("context_length", result.get("length"))


def rows_of(result: Result) -> list[dict[str, Any]]:
    rows = result.values.get("rows")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _part(row: dict[str, Any], name: str, part: str) -> Any:
    found = row.get(name)
    return found.get(part) if isinstance(found, dict) else (found if part == "median" else None)


def _times(value: Any) -> str:
    return MISSING if number(value) is None else f"{value:.3g}×"


def _pair(ends: Any) -> str:
    return interval(ends[0], ends[1], ".3g") if isinstance(ends, list) and len(ends) == 2 else MISSING


def _quotient(one: Any, other: Any) -> str:
    first, second = number(one), number(other)
    return MISSING if first is None or not second else f"{first / second:.4f}"
