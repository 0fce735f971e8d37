"""The scripts of benchmarks/, as modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@contextmanager
def scripts(*names: str) -> Iterator[dict[str, ModuleType]]:
    """Each by its name. They import each other as they do when they are run: until the end, also within functions."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(BENCHMARKS))


def modules(*names: str) -> Any:
    """A fixture of one test file: the script of that name, or several of them by the ends of their names."""

    @pytest.fixture(scope="module")
    def made() -> Iterator[ModuleType | dict[str, ModuleType]]:
        with scripts(*names) as found:
            yield found[names[0]] if len(names) == 1 else {n.rpartition(".")[2]: m for n, m in found.items()}

    return made
