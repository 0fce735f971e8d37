"""What is public: names, and parameters of functions. ``python -m tests.test_public_names`` takes a change as meant."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path

LIST = Path(__file__).parent / "fixtures" / "public_names.json"
PACKAGES = ("trailmark", "trailmark.ops", "trailmark.models", "trailmark.memory")


def public() -> dict[str, dict[str, list[str]]]:
    """Of each package its names, and of functions their parameters; those of configurations are their own tests'."""
    found: dict[str, dict[str, list[str]]] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        names = [name for name in getattr(module, "__all__", None) or dir(module) if name[:1] != "_"]
        members = {name: getattr(module, name) for name in sorted(names)}
        found[package] = {
            name: [
                str(parameter).split(":")[0] for parameter in inspect.signature(member).parameters.values()
            ]
            if inspect.isfunction(member)
            else []
            for name, member in members.items()
            if not inspect.ismodule(member)
        }
    return found


def test_public_names_are_those_that_were_promised() -> None:
    assert public() == json.loads(LIST.read_text())


if __name__ == "__main__":
    LIST.write_text(json.dumps(public(), indent=1) + "\n")
