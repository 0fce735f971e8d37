"""A record that keeps nothing on a disk: for suites whose files are tested elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trailmark.evaluation.record import Part


class InMemory:
    """In place of a :class:`trailmark.evaluation.record.Record`; ``written`` is what models wrote."""

    def __init__(self) -> None:
        self.written: list[Mapping[str, Any]] = []

    def measure_all(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        results = []
        for part in parts:
            results.append({**part.work(), "settings": dict(part.settings)})
            self.written += part.generations()
        return results
