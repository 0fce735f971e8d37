"""Tables in the documents: each that benchmarks/readme.py makes has its place there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_table_has_its_place() -> None:
    script = (ROOT / "benchmarks" / "readme.py").read_text()
    calls = re.findall(r'fill\((ROOT|HERE) / "README.md", "([^"]+)"', script)
    assert len(calls) == script.count("    fill(") - 1  # but the loop's over docs/landmark.md
    for folder, name in calls:
        path = (ROOT if folder == "ROOT" else ROOT / "benchmarks") / "README.md"
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        text = path.read_text()
        assert (text.count(begin), text.count(end)) == (1, 1), (path, name)
        assert text.index(begin) < text.index(end)
