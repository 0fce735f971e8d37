"""Tables in the documents: benchmarks/tables.py writes them, and each says what its JSON file holds."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.benchmark_scripts import BENCHMARKS, modules

tables = modules("tables")
readme = modules("readme")


def test_every_text_of_a_document_is_what_the_numbers_say(readme: ModuleType) -> None:
    """``python benchmarks/readme.py`` would change nothing."""
    assert len(readme.DOCUMENTS) == 12
    for name, texts in readme.DOCUMENTS.items():
        document = (BENCHMARKS.parent / name).read_text(encoding="utf-8")
        for mark, make in texts.items():
            _, begin, rest = document.partition(f"<!-- {mark} -->\n")
            assert begin, (name, mark)
            assert rest.split(f"\n<!-- /{mark} -->")[0] == make(), (name, mark)


@pytest.mark.parametrize(
    ("column", "row", "shown"),
    [
        ("{length:,} tokens", {"length": 4096}, "4,096 tokens"),
        ("{at[p50]:ms ,.1f} ms", {"at": {"p50": 1.25}}, "1,250.0 ms"),
        ("{bytes:mib ,.0f}", {"bytes": 3 << 30}, "3,072 MiB"),
        ("{of:spread .1f}", {"of": {"median": 2, "lowest": 1, "highest": 3}}, "2.0 (1.0-3.0)"),
        ("{length:,}", {}, "-"),
        ("{length:.2f}x", {"length": None}, "-"),
        ("{beside[length]:,}", {"beside": None}, "-"),
        (lambda row: row["a"] + "!", {"a": "b"}, "b!"),
    ],
)
def test_a_cell(tables: ModuleType, column: Any, row: dict[str, Any], shown: str) -> None:
    assert tables.cell(column, row) == shown


def test_results_are_crossed(tables: ModuleType) -> None:
    results = [{"model": m, "length": n, "loss": n / 8} for m, n in (("a", 4), ("a", 2), ("b", 2))]
    asked = (results, {"model": "{model}"}, "at {length}", "{loss:g}", {"results": lambda own: str(len(own))})
    lines = tables.crossed(*asked, order=lambda result: result["length"]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["model", "at 2", "at 4", "results"]
    assert cells[2:] == [["a", "0.25", "0.5", "2"], ["b", "0.25", "-", "1"]]


def test_a_document_without_its_marks_is_refused(tables: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("<!-- model -->\n")
    with pytest.raises(ValueError, match=r"<!-- model --> and <!-- /model --> once each"):
        tables.fill(path, {"model": lambda: "text"})
    path.write_text("before\n<!-- model -->\nold\n<!-- /model -->\nafter\n")
    tables.fill(path, {"model": lambda: "text"})
    assert path.read_text() == "before\n<!-- model -->\ntext\n<!-- /model -->\nafter\n"
