"""The first section of the report: the models, and the numbers that sum them up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trailmark.report.collect import Collected, Model, Result
from trailmark.report.markup import MISSING, Html, count, element, interval, number, shown, table
from trailmark.report.section_cost import rows_of
from trailmark.report.section_needles import pooled, task_name
from trailmark.report.sections import Section


def overview(found: Collected) -> Section:
    content = [element("ul", *map(_tile, tiles), class_="tiles")] if (tiles := _tiles(found)) else []
    return Section("overview", "Overview", [*content, _models(found)])


def _tile(facts: tuple[str, str, str]) -> Html:
    return element(
        "li",
        *(
            element("span", text, class_=kind)
            for kind, text in zip(("figure", "what", "how"), facts, strict=True)
        ),
    )


def _tiles(found: Collected) -> list[tuple[str, str, str]]:
    """For each suite one number, with whose it is and how it was measured."""
    tiles = []
    if reads := _farthest(found.of("needles")):
        result, pool = reads
        tiles.append(
            (
                percent(pool["accuracy"]),
                f"of answers right at {count(result.get('length'))} tokens",
                f"{result.model.label}, {task_name(result).lower()}; 95% interval "
                f"{interval(pool['accuracy_low'], pool['accuracy_high'])}",
            )
        )
        trained, length = number(result.train_length), number(result.get("length"))
        if trained and length and length > trained:
            tiles.append(
                (
                    f"{length / trained:,.4g}×",
                    "longer than the longest training text",
                    f"{result.model.label}; {count(trained)} tokens while training",
                )
            )
    if best := _best(found.of("perplexity"), "perplexity"):
        tiles.append(
            (
                f"{number(best.get('perplexity')):,.4g}",
                f"perplexity per token at {count(best.get('length'))} tokens",
                f"{best.model.label}, the lowest at that length; "
                f"95% interval {interval(best.get('perplexity_low'), best.get('perplexity_high'))}",
            )
        )
    if rouge := _best_rouge(found.of("summarization")):
        result, score = rouge
        tiles.append(
            (
                f"{score['f']:.3f}",
                f"ROUGE-L of {count(result.get('documents'))} summaries",
                f"{result.model.label}; 95% interval {interval(score.get('low'), score.get('high'))}",
            )
        )
    if cheap := _cheapest(found.of("cost")):
        result, row = cheap
        tiles.append(
            (
                f"{row['time_ratio']:.3g}×",
                f"the time per token after {count(result.get('prompt'))} tokens",
                f"{result.named(row.get('model')).label}, tier {shown(result.get('tier'))}; memory "
                f"{shown(row.get('memory_ratio'), '.3g')}×, against {_base(result)}",
            )
        )
    return tiles


def percent(share: Any) -> str:
    """``99.7%``; all and nothing only where it is."""
    text = f"{share:.1%}"
    return {"100.0%": "> 99.9%", "0.0%": "< 0.1%"}.get(text, text) if 0 < share < 1 else text


def _farthest(results: list[Result]) -> tuple[Result, dict[str, float | None]] | None:
    """The most accurate model at the longest length at which one was asked."""
    lengths = [length for r in results if (length := number(r.get("length")))]
    if not lengths:
        return None
    best: tuple[Result, dict[str, float | None]] | None = None
    same: dict[tuple[Any, ...], list[Result]] = {}
    for r in results:
        if number(r.get("length")) == max(lengths):
            key = (
                r.model.label,
                *(str(r.get(n)) for n in ("needles", "kind", "protocol", "format", "landmarks")),
            )
            same.setdefault(key, []).append(r)
    for group in same.values():
        pool = pooled(group)
        if pool["accuracy"] is not None and (best is None or pool["accuracy"] > (best[1]["accuracy"] or 0.0)):
            best = group[0], pool
    return best


def _best(results: list[Result], key: str) -> Result | None:
    known = [r for r in results if number(r.get(key)) is not None and number(r.get("length"))]
    longest = max((r.get("length") for r in known), default=None)
    return min((r for r in known if r.get("length") == longest), key=lambda r: r.get(key), default=None)


def _best_rouge(results: list[Result]) -> tuple[Result, dict[str, Any]] | None:
    known = [
        (r, score)
        for r in results
        if isinstance(score := r.values.get("rougeL"), dict) and number(score.get("f")) is not None
    ]
    return max(known, key=lambda pair: pair[1]["f"], default=None)


def _cheapest(results: list[Result]) -> tuple[Result, dict[str, Any]] | None:
    """After the longest prompt, the model nearest to the window-only one among those that look further."""
    known = [
        (number(r.get("prompt")) or 0.0, r, row)
        for r in results
        for row in rows_of(r)
        if number(row.get("time_ratio")) is not None
        and "SlidingWindow" not in str(row.get("architecture"))
        and number(r.get("prompt"))
    ]
    longest = max((entry[0] for entry in known), default=None)
    rows = [entry for entry in known if entry[0] == longest]
    best = min(rows, key=lambda entry: entry[2]["time_ratio"], default=None)
    return None if best is None else best[1:]


def _base(result: Result) -> str:
    base = result.get("base")
    return str(base) if base else (result.models[0].label if result.models else "the first model")


def _models(found: Collected) -> Html:
    trained = {id(run.model) for run in found.trainings}
    suites: dict[int, dict[str, int]] = {}
    for result in found.results:
        for model in result.models:
            seen = suites.setdefault(id(model), {})
            seen[result.suite] = seen.get(result.suite, 0) + 1

    def measured(model: Model) -> str:
        parts = [f"{suite} {n}" for suite, n in suites.get(id(model), {}).items()]
        return ", ".join([*parts, *(["training"] if id(model) in trained else [])]) or MISSING

    columns: list[tuple[str, Callable[[Model], str]]] = [
        ("model", lambda m: m.label),
        ("architecture", lambda m: shown(m.architecture)),
        ("parameters", lambda m: count(m.parameters)),
        ("results", measured),
        ("precision", lambda m: shown(m.dtype)),
        ("set", lambda m: ", ".join(f"{key}={value}" for key, value in m.changes.items()) or MISSING),
        ("weights", lambda m: (m.weights or MISSING)[:8]),
    ]
    rows = [[of(model) for _, of in columns] for model in found.models]
    kept = [n for n in range(len(columns)) if n == 0 or any(row[n] != MISSING for row in rows)]
    names = [columns[n][0] for n in kept]
    words = [place for place, name in enumerate(names) if name not in ("parameters",)]
    return table("Models", names, [[row[n] for n in kept] for row in rows], words)
