"""Tables that read well and say what the results say."""

from __future__ import annotations

from typing import Any

import pytest

from trailmark.evaluation.needles import NeedleResult
from trailmark.evaluation.perplexity import PerplexityResult
from trailmark.report.tables import markdown_table, needle_table, perplexity_table


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
    values: dict[str, Any] = {
        "length": 65536,
        "needles": 1,
        "questions": 300,
        "correct": 270,
        "retrieved": 291,
        "tokens_read": 10_000,
        "seconds_reading": 0.5,
        "memory_bytes": 33 << 20,
    }
    return {"model": "DRT"} | NeedleResult(**(values | changes)).summary()


def test_needles() -> None:
    table = needle_table([found(), found(retrieved=None, correct=0, length=512, needles=8)], 1024)
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


def test_perplexity() -> None:
    result = PerplexityResult(length=4096, windows=16, tokens=65520, loss=1.0)
    assert cells(perplexity_table([result.summary()])) == [
        ["tokens", "windows", "loss", "perplexity"],
        ["--------", "--------:", "-------:", "-----------:"],
        ["4,096", "16", "1.0000", "2.718"],
    ]
