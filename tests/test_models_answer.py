"""No floor above the models asks which class a model is: models answer for themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import trailmark.models
from trailmark.models import MODELS

PACKAGE = Path(trailmark.models.__file__).parents[1]
ABOVE = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] not in ("models", "memory", "ops", "__init__.py")
]
CLASSES = {cls for model in MODELS.values() for cls in (model.__name__, model.config_class.__name__)}
# each architecture's folder
FOLDERS = {model.__module__.rpartition(".")[0] for model in MODELS.values()}


def lies_in_one(module: str) -> bool:
    """Whether a module is an architecture's, or such a folder itself."""
    return any(module == folder or module.startswith(f"{folder}.") for folder in FOLDERS)


def architectures_named(source: str) -> Iterator[str]:
    """The architectures that a module names: imported, as an attribute, or by the module that defines them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name in CLASSES or lies_in_one(f"{node.module}.{alias.name}"):
                    yield f"from {node.module} import {alias.name}"
        elif isinstance(node, ast.Import):
            yield from (f"import {alias.name}" for alias in node.names if lies_in_one(alias.name))
        elif isinstance(node, ast.Attribute) and node.attr in CLASSES:
            yield f".{node.attr}"


def test_no_floor_above_models_names_an_architecture() -> None:
    named = {path: list(architectures_named(path.read_text())) for path in ABOVE}
    assert {path: names for path, names in named.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from trailmark.models import DRTForCausalLM\nisinstance(model, DRTForCausalLM)",
        "from trailmark.models import landmark",
        "import trailmark.models.drt.model",
        "import trailmark\nisinstance(model, trailmark.LandmarkForCausalLM)",
    ],
)
def test_one_that_does_is_seen(source: str) -> None:
    assert list(architectures_named(source))
