"""The section about needles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

from trailmark.data.proportions import wilson_interval
from trailmark.report.charts import (
    ChunkChart,
    HeatChart,
    HeatMap,
    Line,
    LineChart,
    Panel,
)
from trailmark.report.collect import MOST_GENERATIONS, Collected, Result, generations
from trailmark.report.markup import (
    MISSING,
    Html,
    count,
    details,
    element,
    fraction,
    interval,
    number,
    paragraph,
    share,
    short_length,
    shown,
    table,
)
from trailmark.report.sections import (
    Figures,
    Section,
    by_length,
    bytes_shown,
    cells,
    grouped,
    labels,
    quote,
)

_NEEDLE_KINDS = {
    "single": "One needle",
    "multi-key": "Several keys",
    "multi-value": "Several values of one key",
    "multi-query": "Several keys in one question",
}
_SHOWN = frozenset(  # by columns of their own, or of no use in a table
    {
        *("id", "settings", "environment", "seconds", "model", "length", "depth", "kind", "format", "values"),
        *("needles", "hops", "distractors", "landmarks", "phases", "protocol", "memory_tier", "memory_dtype"),
        *("questions", "correct", "retrieved", "haystacks", "tokens_read", "seconds_reading", "memory_bytes"),
        *(
            "resident_bytes",
            "asked",
            "accuracy",
            "accuracy_low",
            "accuracy_high",
            "recall",
            "tokens_per_second",
        ),
        *("mean_weight", "mean_reciprocal_rank", "seed", "train_length", "straddle", "seconds_in_all"),
        *("chunk_size", "cells_read_for", "seconds_asking"),
    }
)


# of many models more of them would be neither read nor quickly drawn
_MOST_MAPS = 8
_MOST_CHUNK_CHARTS = 4


def needles(found: Collected, figures: Figures) -> Section | None:
    results = found.of("needles")
    if not results:
        return None
    content = [
        paragraph(
            "A needle is a fact hidden in a long text and asked for later. An answer is right only if all of it is. "
            "Bands and intervals are 95% Wilson intervals, which take questions as independent. ",
            element("em", "Chunk retrieved"),
            " is the share of questions whose needle's chunk was read, ",
            element("em", "weight"),
            " the mean weight it got.",
        )
    ]
    for place, (task, group) in enumerate(grouped(results, _task).items()):
        title, fine = _task_title(task)
        content.append(element("h3", title))
        tiers = {_tier(result) for result in group}
        if len(tiers) == 1 and (tier := tiers.pop()):
            fine = f"{fine} Memory: {tier}."
        texts = sorted({str(text)[:8] for r in group if (text := r.plain("text"))})
        if len(texts) > 1:
            fine += f" Haystacks of {len(texts)} texts: {', '.join(texts)}."
        content.append(paragraph(fine, class_="fine"))
        series = grouped(group, lambda r: (r.model.label, r.plain("needles"), _tier(r)))
        content += _accuracy_chart(series, place, title, figures)
        content += _heat_chart(series, place, title, figures)
        content.append(_needle_table(title, group))
        content += _needle_generations(group)
    content += _chunk_charts(results, figures)
    return Section("needles", "Needles", content)


def _task(result: Result) -> tuple[Any, ...]:
    names = ("kind", "protocol", "format", "values", "hops", "distractors", "landmarks", "phases")
    found = {name: result.plain(name) for name in names}
    if found["kind"] != "hops":
        found["hops"] = None
    found["distractors"] = found["distractors"] or 0
    found["landmarks"] = 1 if found["landmarks"] is None else found["landmarks"]
    return tuple(found.values())


def _task_title(task: tuple[Any, ...]) -> tuple[str, str]:
    kind, protocol, form, values, hops, distractors, landmarks, phases = task
    title = f"{hops or 2} hops" if kind == "hops" else _NEEDLE_KINDS.get(str(kind), str(kind or "Needles"))
    if distractors:
        title += f", {distractors} distractors"
    if number(landmarks) is not None and landmarks != 1:
        title += f", {landmarks} landmarks before the answer"
    if protocol:
        title += f" (protocol {protocol})"
    fine = [f"format: {form}" if form else "", f"values: {values}" if values else ""]
    if phases:
        places = {"end": "at the end of a chunk", "any": "anywhere in a chunk"}
        fine.append(f"questions end {places.get(phases, phases)}")
    return title, "; ".join(part for part in fine if part).capitalize() + "."


def task_name(result: Result) -> str:
    """What was asked, in the words of the section's headings."""
    return _task_title(_task(result))[0]


def _tier(result: Result) -> str:
    return " ".join(str(result.get(name)) for name in ("memory_tier", "memory_dtype") if result.get(name))


def pooled(results: Sequence[Result]) -> dict[str, float | None]:
    """One length: where needles lie anywhere, that; else its depths as one. Accuracy, Wilson interval, recall.

    Of a depth that was measured twice that with the most questions counts, else the last.
    """
    results = [result for result in results if result.get("depth") is None] or results
    last = list(
        {
            str(r.get("depth")): r for r in sorted(results, key=lambda r: number(r.get("questions")) or 0.0)
        }.values()
    )
    if len(last) == 1:
        names = ("accuracy", "accuracy_low", "accuracy_high", "recall")
        return {name: number(last[0].get(name)) for name in names}
    asked = [max(0.0, number(result.get("questions")) or 0.0) for result in last]
    right = [
        min(max(0.0, number(result.get("correct")) or 0.0), n) for result, n in zip(last, asked, strict=True)
    ]
    recalls = [number(result.get("recall")) for result in last]
    total = sum(asked)
    if not total:
        return dict.fromkeys(("accuracy", "accuracy_low", "accuracy_high", "recall"))
    low, high = wilson_interval(sum(right), total)
    recall = (
        sum(r * n for r, n in zip(recalls, asked, strict=True) if r is not None) / total
        if None not in recalls
        else None
    )
    return {"accuracy": sum(right) / total, "accuracy_low": low, "accuracy_high": high, "recall": recall}


def _accuracy_chart(
    series: dict[tuple[Any, ...], list[Result]], place: int, title: str, figures: Figures
) -> list[Html]:
    several = {key: by_length(group) for key, group in series.items()}
    drawn = {key: lengths for key, lengths in several.items() if len(lengths) > 1}
    if not drawn:
        return []
    names = labels(drawn, {key: series[key][0].model.look for key in drawn})
    right, recall = [], []
    for key, lengths in drawn.items():
        label, look = names[key]
        points = [(x, pooled(group)) for x, group in lengths.items()]
        whole = [(x, p) for x, p in points if p["accuracy"] is not None]
        xs, ys = [x for x, _ in whole], [p["accuracy"] or 0.0 for _, p in whole]
        low, high = ([p[f"accuracy_{end}"] for _, p in whole] for end in ("low", "high"))
        right.append(Line(label, look, xs, ys, low, high))
        if kept := [(x, p["recall"]) for x, p in points if p["recall"] is not None]:
            recall.append(Line(label, look, [x for x, _ in kept], [y for _, y in kept]))
    trained = {number(r.train_length) for key in drawn for r in series[key]} - {None}
    rule = (min(trained), "longest training text") if len(trained) == 1 else None  # type: ignore[type-var]
    panels = [Panel("Answers right", "share of questions", right, True, rule)]  # type: ignore[arg-type]
    if recall:
        panels.append(Panel("Needle's chunk retrieved", "share of questions", recall, True))
    best = max(right, key=lambda line: (line.x[-1] if line.x else 0, line.y[-1] if line.y else 0))
    told = f"{best.label}: {best.y[-1]:.3f} right at {best.x[-1]:,.0f} tokens." if best.x else ""
    left = len(series) - len(drawn)
    told += f" {left} series of one length stand in the table alone." if left else ""
    bands = "Bands: 95% Wilson intervals; a length of which depths alone were measured pools them."
    return [
        figures.show(
            LineChart(
                f"needles-{place + 1}-length",
                f"{title}: answers by length",
                f"{told} {bands}".strip(),
                x_label="tokens",
                panels=panels,
            )
        )
    ]


def _heat_chart(
    series: dict[tuple[Any, ...], list[Result]], place: int, title: str, figures: Figures
) -> list[Html]:
    names = labels(series, {key: group[0].model.look for key, group in series.items()})
    maps: list[HeatMap] = []
    left_out: list[str] = []
    for key, group in series.items():
        cells = {
            (depth, length): value
            for r in group
            if (depth := number(r.get("depth"))) is not None
            and (length := number(r.get("length"))) is not None
            and (value := number(r.get("accuracy"))) is not None
        }
        depths, lengths = (sorted({cell[axis] for cell in cells}) for axis in (0, 1))
        if len(depths) > 1 and len(maps) == _MOST_MAPS:
            left_out.append(names[key][0])
        elif len(depths) > 1:
            values = [[cells.get((depth, length)) for length in lengths] for depth in depths]
            maps.append(
                HeatMap(names[key][0], [short_length(x) for x in lengths], [f"{d:g}" for d in depths], values)
            )
    if not maps:
        return []
    return [
        figures.show(
            HeatChart(
                f"needles-{place + 1}-depth",
                f"{title}: answers by length and depth",
                "Share of answers that are right; depth 0 is the start of the text, 1 its end. Empty fields "
                "were not measured.",
                x_label="tokens",
                y_label="depth",
                maps=maps,
                what="Share of answers of which all is right, by length and depth",
            )
        ),
        *_left_out(left_out, "Heat maps", "their numbers stand in the table below"),
    ]


def _left_out(names: Sequence[str], what: str, where: str) -> list[Html]:
    """What is not drawn, so that a page of many models stays one that can be read."""
    if not names:
        return []
    return [
        paragraph(f"{what} of {len(names)} more are not drawn; {where}: {', '.join(names)}.", class_="fine")
    ]


def _needle_table(title: str, results: Sequence[Result]) -> Html:
    extras = sorted(
        {
            name
            for r in results
            for name, value in r.values.items()
            if name not in _SHOWN and number(value) is not None
        }
    )
    tiers = {_tier(r) for r in results}
    columns: list[tuple[str, Callable[[Result], Any]]] = [
        ("model", lambda r: r.model.label),
        ("tokens", lambda r: count(r.get("length"))),
        ("× train", _times_train),
        ("depth", lambda r: shown(r.get("depth"), "g")),
        ("needles", lambda r: shown(r.get("needles"))),
        ("questions", lambda r: count(r.get("questions"))),
        ("right", lambda r: count(r.get("correct"))),
        ("accuracy", lambda r: share(r.get("accuracy"))),
        ("95% interval", lambda r: interval(r.get("accuracy_low"), r.get("accuracy_high"))),
        ("chunk retrieved", lambda r: share(r.get("recall"))),
        ("by hop", _by_hop),
        ("weight", lambda r: shown(r.get("mean_weight"), ".3f")),
        ("1 / rank", lambda r: shown(r.get("mean_reciprocal_rank"), ".3f")),
        *((name.replace("_", " "), partial(_extra, name)) for name in extras),
        ("tokens/s", lambda r: count(r.get("tokens_per_second"))),
        ("memory", lambda r: bytes_shown(r.get("memory_bytes"))),
        ("tier", lambda r: _tier(r) if len(tiers) > 1 and _tier(r) else MISSING),
    ]
    return cells(f"{title}: all cells", columns, results)


def _by_hop(result: Result) -> str:
    """Of each hop how often its chunk was retrieved; of one hop that is said already."""
    hops = result.values.get("recall_by_hop")
    return ", ".join(map(fraction, hops)) if isinstance(hops, list) and len(hops) > 1 else MISSING


def _extra(name: str, result: Result) -> str:
    return shown(result.values.get(name), ".4g")


def _times_train(result: Result) -> str:
    length, trained = number(result.get("length")), number(result.train_length)
    return MISSING if length is None or not trained else f"{length / trained:,.4g}×"


def _needle_generations(results: Sequence[Result], most: int = 3, in_all: int = 24) -> list[Html]:
    """Some answers, those that are wrong first."""
    told = [(result, line) for result, lines in generations(results) for line in _wrong_first(lines)[:most]]
    told = _wrong_first(told, lambda pair: pair[1])[:in_all]
    if not told:
        return []
    rows = [
        [
            result.model.label,
            count(result.get("length")),
            quote(line.get("expected", line.get("answer"))),
            quote(line.get("generated", line.get("text"))),
            {True: "yes", False: "no"}.get(line.get("correct"), MISSING),
        ]
        for result, line in told
    ]
    said = f"{len(rows)} answers, wrong ones first, of the first {MOST_GENERATIONS:,} in each file"
    return [
        details(said, table(said, ["model", "tokens", "expected", "generated", "right"], rows, (2, 3, 4)))
    ]


def _wrong_first(lines: Sequence[Any], of: Callable[[Any], Any] = lambda line: line) -> list[Any]:
    return sorted(lines, key=lambda line: of(line).get("correct") is not False)


def _chunk_charts(results: Sequence[Result], figures: Figures, questions: int = 40) -> list[Html]:
    """For some models, of the longest text of each: which chunks were read."""
    content: list[Html] = []
    left_out: dict[str, list[Result]] = {}
    for label, group in grouped(results, lambda r: r.model.label).items():
        single = [r for r in group if r.get("needles") == 1 and r.get("kind") in (None, "single")]
        if len(content) == _MOST_CHUNK_CHARTS:
            left_out |= {label: single} if single else {}
            continue
        asked, result = _longest_asked(single, questions)
        if result is not None:
            last = max(max([q["needle"], *q["selected"]]) for q in asked)
            content.append(
                figures.show(
                    ChunkChart(
                        f"chunks-{result.model.look + 1}",
                        f"{label}: chunks read at {count(result.get('length'))} tokens",
                        f"{len(asked)} questions, by where their needle lies. Blue: the chunks that were "
                        "retrieved, larger with more weight; orange: the needle's chunk.",
                        asked=asked,
                        chunks=last + 1,
                    )
                )
            )
    where = "what was read for each question stands in needles.generations.jsonl beside their records"
    return content + _left_out(list(left_out), "The chunks read", where)


def _longest_asked(results: Sequence[Result], most: int) -> tuple[list[dict[str, Any]], Result | None]:
    """Questions of one task at the longest length of which it is known what was read, of each depth alike."""
    told = [
        (r, asked)
        for r, lines in generations(results)
        if (asked := _all_asked(r.values.get("asked")) or _all_asked(lines))
    ]
    if not told:
        return [], None
    farthest = max(told, key=lambda entry: number(entry[0].get("length")) or 0.0)[0]
    same = [a for r, a in told if (r.get("length"), _task(r)) == (farthest.get("length"), _task(farthest))]
    turns = [question for turn in zip_longest(*same) for question in turn if question is not None]
    return sorted(turns[:most], key=lambda question: question["needle"]), farthest


def _all_asked(entries: Any) -> list[dict[str, Any]]:
    entries = entries if isinstance(entries, list) else []
    return [question for entry in entries if (question := _asked(entry)) is not None]


def _asked(entry: Any) -> dict[str, Any] | None:
    """A question of which it is known what was read for it, by its first group."""
    if not isinstance(entry, dict):
        return None
    needle = number(_first(entry.get("needle", entry.get("gold_chunks"))))
    groups, weights = (_innermost(entry.get(name)) for name in ("selected", "weights"))
    chosen = [int(chunk) for chunk in groups if number(chunk) is not None and chunk >= 0]
    if needle is None or not chosen:
        return None
    known = [min(1.0, max(0.0, number(w) or 0.0)) for w in weights]
    known = (known + [0.0] * len(chosen))[: len(chosen)]
    return {"needle": int(needle), "selected": chosen, "weights": known}


def _innermost(lists: Any) -> list[Any]:
    while isinstance(lists, list) and lists and isinstance(lists[0], list):
        lists = lists[0]
    return lists if isinstance(lists, list) else []


def _first(lists: Any) -> Any:
    return next(iter(_innermost(lists)), None) if isinstance(lists, list) else lists
