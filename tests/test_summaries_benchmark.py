"""What benchmarks/summaries.py teaches and asks: sources that hold nothing of their summary."""

from __future__ import annotations

from types import ModuleType

from tests.benchmark_scripts import modules

summaries = modules("summaries")

MODULE = '''"""A module says nothing of its own."""

@decorated
def first(x):
    """Say what
    it is.

    At length.
    """
    return x

class Second:
    "In one line."

    async def third(self): """Here."""

def fourth(): return "no docstring"
'''


def test_a_docstring_is_taken_out_of_its_source(summaries: ModuleType) -> None:
    found = {pair["summary"]: pair["document"] for pair in summaries.documented(MODULE)}
    assert found["Say what it is."] == "def first(x):\n    return x\n"
    assert found["In one line."] == 'class Second:\n\n    async def third(self): """Here."""\n'
    assert len(found) == 2  # of the third nothing but its docstring would be left
    assert list(summaries.documented("def broken(:")) == []
