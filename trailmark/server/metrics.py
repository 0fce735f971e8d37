"""Numbers for Prometheus, in its text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import psutil


class Metrics:
    """Counts what was answered. One thread, the event loop's, adds to it."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._tokens: Counter[tuple[str, str]] = Counter()

    def answered(self, route: str, status: int) -> None:
        self._requests[route, status] += 1

    def tokens(self, model: str, prompt: int, written: int) -> None:
        """Tokens that were read for a request, those of its memory left out, and tokens that were written."""
        self._tokens[model, "prompt"] += prompt
        self._tokens[model, "completion"] += written

    def text(self, gauges: Mapping[str, float], engines: Mapping[str, Mapping[str, float]]) -> str:
        """All of it.

        Args:
            gauges: more numbers of the server. engines: of each model what its engine says of itself.
        """
        return "\n".join([*self._lines(gauges, engines), ""])

    def _lines(
        self, gauges: Mapping[str, float], engines: Mapping[str, Mapping[str, float]]
    ) -> Iterator[str]:
        yield "# TYPE trailmark_requests_total counter"
        for (route, status), count in sorted(self._requests.items()):
            yield f'trailmark_requests_total{{route="{_quoted(route)}",status="{status}"}} {count}'
        yield "# TYPE trailmark_tokens_total counter"
        for (model, kind), count in sorted(self._tokens.items()):
            yield f'trailmark_tokens_total{{model="{_quoted(model)}",kind="{kind}"}} {count}'
        gauges = {"process_resident_memory_bytes": psutil.Process().memory_info().rss} | dict(gauges)
        for name, value in gauges.items():
            yield f"# TYPE {name} gauge"
            yield f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        names = sorted({name for own in engines.values() for name in own})
        for name in names:
            yield f"# TYPE trailmark_engine_{name} gauge"
            for model, own in engines.items():
                if name in own:
                    yield f'trailmark_engine_{name}{{model="{_quoted(model)}"}} {own[name]}'


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
