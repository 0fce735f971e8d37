"""An op's arguments are typed once, as a NamedTuple in its folder; ``torch.library`` is told of its fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar, get_type_hints

R = TypeVar("R")


def spelled_out(function: Callable[..., R]) -> Callable[..., R]:
    """``function`` with the fields of its NamedTuples as arguments of their own.

    ``torch.library`` reads an op's schema off a signature and knows tensors and numbers alone: in the place of a
    parameter that is a NamedTuple stand its fields, in order. What is registered so is called with ``*call`` there.
    """
    kinds = get_type_hints(function)
    returned = kinds.pop("return")
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
        for given, whole in kinds.items()
        for name, kind in (get_type_hints(whole) if hasattr(whole, "_fields") else {given: whole}).items()
    ]

    def run(*arguments: Any) -> R:
        left = iter(arguments)
        return function(
            *(
                kind(*islice(left, len(kind._fields))) if hasattr(kind, "_fields") else next(left)
                for kind in kinds.values()
            )
        )

    run.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
    return run
