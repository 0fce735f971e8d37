"""How sure a share of right answers is; evaluations and reports share it."""

from __future__ import annotations

import math


def wilson_interval(successes: float, trials: float, z: float = 1.959963984540054) -> tuple[float, float]:
    """The 95% score interval of a proportion (Wilson, 1927)."""
    if trials == 0:
        return 0.0, 1.0
    p, n = successes / trials, trials
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)
