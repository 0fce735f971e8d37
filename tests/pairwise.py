"""A small set of cases in which every pair of values of two parameters occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(parameters: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Greedy: each case is the best of some drawn around an uncovered pair. The same list in every run."""
    names, draw = list(parameters), random.Random(seed)
    left = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in parameters[a]
        for y in parameters[b]
    }
    cases: list[dict[str, Any]] = []
    while left:
        must = min(left, key=repr)
        best: dict[str, Any] = {}
        best_covers: set[Any] = set()
        for _ in range(30):
            case = {name: draw.choice(parameters[name]) for name in names} | dict(must)
            for name in draw.sample(names, len(names)):
                if name not in dict(must):
                    gains = [len(_covered(case | {name: value}) & left) for value in parameters[name]]
                    best_values = [
                        x for x, gain in zip(parameters[name], gains, strict=True) if gain == max(gains)
                    ]
                    case[name] = draw.choice(best_values)  # not the first: each value should occur as often
            covers = _covered(case) & left
            if len(covers) > len(best_covers):
                best, best_covers = case, covers
        cases.append(best)
        left -= best_covers
    return cases


def _covered(case: Mapping[str, Any]) -> set[Any]:
    return set(itertools.combinations(case.items(), 2))
