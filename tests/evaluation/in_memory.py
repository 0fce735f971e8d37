"""A record that keeps nothing on a disk: for suites whose files are tested elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


class InMemory:
    """In place of a :class:`trailmark.evaluation.record.Record`; ``written`` is what models wrote."""

    def __init__(self) -> None:
        self.written: list[Mapping[str, Any]] = []

    def measure(
        self,
        asked: Mapping[str, Any],
        work: Callable[[], Mapping[str, Any]],
        lines: Callable[[], Sequence[Mapping[str, Any]]],
    ) -> dict[str, Any]:
        found = {**work(), "settings": dict(asked)}
        self.written += lines()
        return found
