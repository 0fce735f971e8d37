"""The colours of the report page and of its figures, in light and in dark, and how well they can be told apart."""

from __future__ import annotations

from collections.abc import Mapping

LEVELS = 11  # of a heat map: 0.0, 0.1, ... 1.0
_LIGHT_ON_LEVEL = 6  # from this level on, a heat map's numbers have the other colour

# "paper" must be no other colour's value: in a figure each value stands for its name, see svg.py
_LIGHT = {
    "paper": "#fdfcfa",
    "raised": "#f5f3ee",
    "ink": "#1d2126",
    "muted": "#565d66",
    "rule": "#d9d5cc",
    "grid": "#e4e1d9",
    "link": "#175a9c",
    "notice": "#fbf1d9",
    "notice-rule": "#a86a00",
    "bar": "#d6e4f3",
    "shade": "#dfdbd2",
    "series-1": "#1f5fa8",
    "series-2": "#b94a0c",
    "series-3": "#2c7a4b",
    "series-4": "#7a4a9e",
    "series-5": "#0b7783",
    "series-6": "#b0356f",
    "series-7": "#7d5b1c",
    "series-8": "#59636f",
}
_DARK = {
    "paper": "#14171b",
    "raised": "#1c2026",
    "ink": "#e9e7e2",
    "muted": "#a3aab3",
    "rule": "#363c45",
    "grid": "#2b3038",
    "link": "#85bbf2",
    "notice": "#2f2817",
    "notice-rule": "#e0a63d",
    "bar": "#213c58",
    "shade": "#3a414b",
    "series-1": "#7db4f0",
    "series-2": "#f29a62",
    "series-3": "#78c894",
    "series-4": "#c4a2e8",
    "series-5": "#5ec6d2",
    "series-6": "#f190bd",
    "series-7": "#d8b56e",
    "series-8": "#aeb7c2",
}
# the two ends of the heat map's lower and upper levels
_LIGHT_HEAT = (("#f7eee3", "#8db4d8"), ("#3f78b3", "#0f3d73"))
_DARK_HEAT = (("#2a2521", "#33587f"), ("#6fa3d6", "#cfe6ff"))
_LIGHT_HEAT_INK = {"heat-ink-low": "#0b1016", "heat-ink-high": "#ffffff"}
_DARK_HEAT_INK = {"heat-ink-low": "#fffffe", "heat-ink-high": "#070b10"}


def _between(low: str, high: str, count: int) -> list[str]:
    first, last = channels(low), channels(high)
    steps = [n / max(1, count - 1) for n in range(count)]
    return [
        "#" + "".join(f"{round(a + (b - a) * step):02x}" for a, b in zip(first, last, strict=True))
        for step in steps
    ]


def _heat(ends: tuple[tuple[str, str], tuple[str, str]]) -> dict[str, str]:
    low, high = ends
    ramp = _between(*low, _LIGHT_ON_LEVEL) + _between(*high, LEVELS - _LIGHT_ON_LEVEL)
    return {f"heat-{level}": colour for level, colour in enumerate(ramp)}


def channels(colour: str) -> tuple[int, int, int]:
    """Red, green and blue, 0 to 255, of ``#rrggbb``."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


LIGHT: Mapping[str, str] = _LIGHT | _heat(_LIGHT_HEAT) | _LIGHT_HEAT_INK
DARK: Mapping[str, str] = _DARK | _heat(_DARK_HEAT) | _DARK_HEAT_INK
SERIES = tuple(name for name in LIGHT if name.startswith("series-"))


def heat_level(share: float) -> int:
    """The level of a share of 0 to 1. Only all is 1.0 and only nothing is 0.0: neither is reached by rounding."""
    if share <= 0 or share >= 1:
        return 0 if share <= 0 else LEVELS - 1
    return min(LEVELS - 2, max(1, round(share * (LEVELS - 1))))


def heat_ink(level: int) -> str:
    """The name of the colour of a number that stands on this level."""
    return "heat-ink-high" if level >= _LIGHT_ON_LEVEL else "heat-ink-low"


def style() -> str:
    """The colours as custom properties: light, dark where the system or the reader asks for it, light in print."""

    def block(colours: Mapping[str, str], scheme: str) -> str:
        return f"color-scheme:{scheme};" + "".join(f"--{name}:{value};" for name, value in colours.items())

    light, dark = block(LIGHT, "light"), block(DARK, "dark")
    return (
        f":root{{{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
        f"@media screen{{:root[data-theme=dark]{{{dark}}}}}\n"
    )
