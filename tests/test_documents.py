"""What documents say of tests is true: each one that they name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"(tests/[\w/]+\.py)(?:::(\w+))?")


def test_every_test_that_a_document_names_exists() -> None:
    named = {
        match.groups()
        for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
        if page.name != "CHANGELOG.md"  # it tells of files as they were
        for match in NAMED.finditer(page.read_text(encoding="utf-8"))
    }
    assert len(named) > 25
    for path, test in sorted(named, key=str):
        assert (ROOT / path).is_file(), path
        if test:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (
                path,
                test,
            )


def test_every_guarantee_that_code_cites_exists() -> None:
    page = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8")
    numbers = set(re.findall(r"^(\d+)\. \*\*", page, re.MULTILINE))
    cited = {
        number
        for folder in ("trailmark", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        for text in re.findall(r"guarantees? (\d+(?: and \d+)*)", path.read_text(encoding="utf-8"))
        for number in re.findall(r"\d+", text)
    }
    assert cited
    assert cited <= numbers, cited - numbers
