"""Tables that read well and say what the results say."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trailmark.evaluation.suite import suite_named
from trailmark.report.tables import markdown_table, needle_table, result_table
from trailmark.statistics import wilson_interval

ROUGES = ("rouge1", "rouge2", "rougeL")


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_columns_are_padded_and_numbers_are_right_aligned() -> None:
    assert markdown_table(["name", "n"], [["a", "1,000"], ["longer", "2"]]).splitlines() == [
        "| name   |     n |",
        "|--------|------:|",
        "| a      | 1,000 |",
        "| longer |     2 |",
    ]


def test_a_table_without_rows_has_its_header() -> None:
    assert markdown_table(["a", "b"], []) == "| a | b |\n|---|--:|"


def test_a_row_of_another_width_is_our_mistake() -> None:
    with pytest.raises(ValueError, match="zip"):
        markdown_table(["a"], [["1", "2"]])


def found(**changes: Any) -> dict[str, Any]:
    values = {"length": 65536, "needles": 1, "correct": 270, "recall": 0.97} | changes
    low, high = wilson_interval(values["correct"], 300)
    asked = {
        "questions": 300,
        "accuracy": values["correct"] / 300,
        "accuracy_low": low,
        "accuracy_high": high,
    }
    return {"model": "DRT", "tokens_per_second": 20_000, "memory_bytes": 33 << 20} | asked | values


def test_needles() -> None:
    table = needle_table([found(), found(recall=None, correct=0, length=512, needles=8)], 1024)
    header, _, first, second = cells(table)
    assert dict(zip(header, first, strict=True)) == {
        "model": "DRT",
        "tokens": "65,536",
        "x train": "64x",
        "needles": "1",
        "questions": "300",
        "all digits right": "0.900",
        "95% interval": "0.861-0.929",
        "chunk retrieved": "0.970",
        "tokens/s": "20,000",
        "memory": "33 MiB",
    }
    shown = dict(zip(header, second, strict=True))
    assert (shown["x train"], shown["needles"], shown["all digits right"]) == ("0.5x", "8", "0.000")
    assert shown["chunk retrieved"] == "-"  # there is nothing to retrieve
    assert len({len(line) for line in table.splitlines()}) == 1


def shown(suite: str, *results: dict[str, Any]) -> list[dict[str, str]]:
    """The rows that a terminal shows, of all tables."""
    tables = result_table(suite_named(suite), results, 1024).split("\n\n")
    parsed = [cells(table) for table in tables if table.startswith("|")]
    return [dict(zip(header, row, strict=True)) for header, _, *rows in parsed for row in rows]


def test_perplexity() -> None:
    result = {"length": 4096, "windows": 16, "tokens": 65520, "loss": 1.0, "perplexity": math.e}
    more = {"length": None, "perplexity_low": 2.5, "perplexity_high": 3.0, "word_perplexity": 55.127}
    first, second = shown("perplexity", result, result | more | {"bits_per_byte": 1.25})
    assert (first["tokens"], first["windows"], first["nats per token"]) == ("4,096", "16", "1.0000")
    assert (first["perplexity"], first["95% interval"], first["bits per byte"]) == ("2.718", "-", "-")
    assert (second["tokens"], second["95% interval"]) == ("whole documents", "2.500–3.000")
    assert (second["perplexity per word"], second["bits per byte"]) == ("55.127", "1.2500")
    (wide,) = shown("perplexity", result | more | {"perplexity_low": 8136.0, "perplexity_high": 3.9e4})
    assert wide["95% interval"] == "9.00–10.57 nats"
    (overflown,) = shown("perplexity", result | {"perplexity": None})  # as records keep what is not finite
    assert "perplexity" not in overflown


def test_what_an_evaluation_measured() -> None:
    """A row for each result, for each model of a comparison; a column in which nothing stands is left out."""
    needle = {
        "length": 4096, "kind": "hops", "hops": 2, "depth": 0.5, "questions": 10, "accuracy": 0.5,
        "accuracy_low": 0.2, "accuracy_high": 0.8, "recall": None, "mean_weight": None, "tokens_per_second": None,
        "memory_bytes": None,
    }  # fmt: skip
    expected = {
        "kind": "2 hops", "tokens": "4,096", "× train": "4×", "depth": "0.5", "questions": "10", "accuracy": "0.500",
        "95% interval": "0.200–0.800",
    }  # fmt: skip
    assert shown("needles", needle) == [expected]
    assert shown("needles", needle | {"exact_accuracy": 0.25})[0]["all tokens right"] == "0.250"
    rouge = {"f": 0.25, "low": 0.2, "high": 0.3}
    (summaries,) = cells(
        result_table(suite_named("summarization"), [{"documents": 7} | dict.fromkeys(ROUGES, rouge)])
    )[2:]
    assert summaries == ["7", *["0.2500", "0.2000–0.3000"] * 3]


def test_a_comparison_has_a_table_for_each_thing_compared() -> None:
    generated = {
        "model": "base", "prompt": 64, "tier": "host", "problem": None, "ms_per_token": {"median": 1.5},
        "time_ratio": 1.0, "memory_ratio": 1.0, "tokens_per_second_reading": 1000.0,
    } | dict.fromkeys(("device_bytes", "cache_bytes", "formula_bytes"), 2048)  # fmt: skip
    full = dict.fromkeys(generated) | {"model": "full", "prompt": 64, "tier": "host", "problem": "no room"}
    trained = {"model": "base", "length": 32, "problem": None, "tokens_per_second": 10.0, "time_ratio": 1.0}
    first, second, training = shown("cost", {"rows": [generated, full]}, {"rows": [trained]})
    assert (first["model"], first["tier"], first["ms per token"]) == ("base", "host", "1.500")
    assert (first["on the device"], first["time"], first["problem"]) == ("2.0 KiB", "1×", "-")
    assert (second["model"], second["ms per token"], second["problem"]) == ("full", "-", "no room")
    assert (training["model"], training["context"], training["tokens/s"]) == ("base", "32", "10")
