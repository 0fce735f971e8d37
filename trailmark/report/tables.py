"""Tables made from results, as Markdown that also reads well in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trailmark.report.console import size


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to equal width; all but the first are right-aligned."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def needle_table(results: Sequence[dict[str, Any]], train_length: int) -> str:
    """One row per length and number of needles; ``results`` are NeedleResult summaries with a ``model``."""
    header = ["model", "tokens", "x train", "needles", "questions", "all digits right", "95% interval"]
    header += ["chunk retrieved", "tokens/s", "memory"]
    rows = [
        [
            str(r["model"]),
            f"{r['length']:,}",
            f"{r['length'] / train_length:g}x",
            str(r["needles"]),
            str(r["questions"]),
            f"{r['accuracy']:.3f}",
            f"{r['accuracy_low']:.3f}-{r['accuracy_high']:.3f}",
            "-" if r["recall"] is None else f"{r['recall']:.3f}",
            f"{r['tokens_per_second']:,.0f}",
            size(r["memory_bytes"]),
        ]
        for r in results
    ]
    return markdown_table(header, rows)


def result_table(suite: str, results: Sequence[dict[str, Any]], train_length: int) -> str:
    """What ``trailmark evaluate`` found in one suite: a row for each result, of cost for each model."""
    match suite:
        case "needles":
            return _needles(results, train_length)
        case "perplexity":
            return perplexity_table(results)
        case "summarization":
            return _summaries(results)
        case "cost":
            parts = [("ms_per_token", _generating), ("seconds", _training)]
            rows = [row for result in results for row in result["rows"]]
            tables = [table([row for row in rows if key in row]) for key, table in parts]
            notes = dict.fromkeys(result["note"] for result in results if result.get("note"))
            return "\n\n".join([*filter(None, tables), *notes])
    raise AssertionError(suite)


def _needles(results: Sequence[dict[str, Any]], train_length: int) -> str:
    # under the paper's protocol right is what one token says; the whole answer stands beside it
    paper = any(r.get("exact_accuracy") is not None for r in results)
    header = ["tokens", "x train", "kind", "depth", "questions", "one token right" if paper else "all right"]
    header += ["95% interval", *(["all right"] if paper else [])]
    header += ["chunk retrieved", "weight", "tokens/s", "memory"]
    return markdown_table(
        header,
        [
            [
                f"{r['length']:,}",
                f"{r['length'] / train_length:g}x",
                f"{r['hops']} hops" if r["kind"] == "hops" else r["kind"],
                "any" if r["depth"] is None else f"{r['depth']:g}",
                str(r["questions"]),
                f"{r['accuracy']:.3f}",
                interval(r["accuracy_low"], r["accuracy_high"]),
                *([_or_dash(r.get("exact_accuracy"), ".3f")] if paper else []),
                _or_dash(r["recall"], ".3f"),
                _or_dash(r["mean_weight"], ".3f"),
                _or_dash(r["tokens_per_second"], ",.0f"),
                size(r["memory_bytes"]) if r["memory_bytes"] else "-",
            ]
            for r in results
        ],
    )


def perplexity_table(results: Sequence[dict[str, Any]]) -> str:
    """A row for each length; an interval, words and bytes where they were counted."""
    header = ["tokens", "windows", "loss", "perplexity", "95% interval", "of words", "bits/byte"]
    return markdown_table(
        header,
        [
            [
                "whole documents" if r["length"] is None else f"{r['length']:,}",
                f"{r['windows']:,}",
                _or_dash(r["loss"], ".4f"),
                _or_dash(r["perplexity"], ".3f"),
                interval(r.get("perplexity_low"), r.get("perplexity_high")),
                _or_dash(r.get("word_perplexity"), ",.2f"),
                _or_dash(r.get("bits_per_byte"), ".4f"),
            ]
            for r in results
        ],
    )


def _summaries(results: Sequence[dict[str, Any]]) -> str:
    rouges = ("rouge1", "rouge2", "rougeL")
    header = ["documents", *(name for rouge in rouges for name in (rouge, "95% interval"))]
    rows = []
    for r in results:
        cells = [f"{r['documents']:,}"]
        for rouge in rouges:
            cells += [f"{r[rouge]['f']:.4f}", interval(r[rouge]["low"], r[rouge]["high"], ".4f")]
        rows.append(cells)
    return markdown_table(header, rows)


def _generating(rows: Sequence[dict[str, Any]]) -> str:
    header = [
        "model",
        "prompt",
        "tier",
        "ms/token",
        "x",
        "on the device",
        "x",
        "cache",
        "by formula",
        "reads, tokens/s",
    ]
    shown = [
        [
            r["model"],
            f"{r['prompt']:,}",
            r["tier"],
            r["problem"] or f"{r['ms_per_token']['median']:.2f}",
            _or_dash(r["time_ratio"], ".2f"),
            _bytes(r["device_bytes"]),
            _or_dash(r["memory_ratio"], ".2f"),
            _bytes(r["cache_bytes"]),
            _bytes(r["formula_bytes"]),
            _or_dash(r["tokens_per_second_reading"], ",.0f"),
        ]
        for r in rows
    ]
    return markdown_table(header, shown) if shown else ""


def _training(rows: Sequence[dict[str, Any]]) -> str:
    header = ["model", "trained at", "tokens/s", "time, x", "memory", "x"]
    shown = [
        [
            r["model"],
            f"{r['length']:,}",
            r["problem"] or f"{r['tokens_per_second']:,.0f}",
            _or_dash(r["time_ratio"], ".2f"),
            _bytes(r["peak_bytes"]),
            _or_dash(r["memory_ratio"], ".2f"),
        ]
        for r in rows
    ]
    return markdown_table(header, shown) if shown else ""


def interval(low: float | None, high: float | None, form: str = ".3f") -> str:
    return "-" if low is None or high is None else f"{low:{form}}-{high:{form}}"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _bytes(count: float | None) -> str:
    return "-" if count is None else size(count)
