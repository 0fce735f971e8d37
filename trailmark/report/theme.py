"""The colours of the report page and of its figures, in light and in dark, and how well they can be told apart."""

from __future__ import annotations

from collections.abc import Mapping

LEVELS = 11  # of a heat map: 0.0, 0.1, ... 1.0
_LIGHT_ON_LEVEL = 6  # from this level on, a heat map's numbers have the other colour

# of each its value in light and in dark; "paper" must be no other colour's value: in a figure each value stands for its
# name, see svg.py
_COLOURS = {
    "paper": ("#fdfcfa", "#14171b"),
    "raised": ("#f5f3ee", "#1c2026"),
    "ink": ("#1d2126", "#e9e7e2"),
    "muted": ("#565d66", "#a3aab3"),
    "rule": ("#d9d5cc", "#363c45"),
    "grid": ("#e4e1d9", "#2b3038"),
    "link": ("#175a9c", "#85bbf2"),
    "notice": ("#fbf1d9", "#2f2817"),
    "notice-rule": ("#a86a00", "#e0a63d"),
    "bar": ("#d6e4f3", "#213c58"),
    "shade": ("#dfdbd2", "#3a414b"),
    "series-1": ("#1f5fa8", "#7db4f0"),
    "series-2": ("#b94a0c", "#f29a62"),
    "series-3": ("#2c7a4b", "#78c894"),
    "series-4": ("#7a4a9e", "#c4a2e8"),
    "series-5": ("#0b7783", "#5ec6d2"),
    "series-6": ("#b0356f", "#f190bd"),
    "series-7": ("#7d5b1c", "#d8b56e"),
    "series-8": ("#59636f", "#aeb7c2"),
}
_HEAT_INKS = {"heat-ink-low": ("#0b1016", "#fffffe"), "heat-ink-high": ("#ffffff", "#070b10")}
# the two ends of the heat map's lower and upper levels, in light and in dark
_HEAT_ENDS = (
    (("#f7eee3", "#8db4d8"), ("#3f78b3", "#0f3d73")),
    (("#2a2521", "#33587f"), ("#6fa3d6", "#cfe6ff")),
)


def _between(low: str, high: str, count: int) -> list[str]:
    first, last = channels(low), channels(high)
    steps = [n / max(1, count - 1) for n in range(count)]
    return [
        "#" + "".join(f"{round(a + (b - a) * step):02x}" for a, b in zip(first, last, strict=True))
        for step in steps
    ]


def _theme(number: int) -> dict[str, str]:
    """All colours by their names: 0 is light, 1 is dark."""
    low, high = _HEAT_ENDS[number]
    ramp = _between(*low, _LIGHT_ON_LEVEL) + _between(*high, LEVELS - _LIGHT_ON_LEVEL)
    heat = {f"heat-{level}": colour for level, colour in enumerate(ramp)}
    own, inks = ({name: both[number] for name, both in part.items()} for part in (_COLOURS, _HEAT_INKS))
    return own | heat | inks


def channels(colour: str) -> tuple[int, int, int]:
    """Red, green and blue, 0 to 255, of ``#rrggbb``."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


LIGHT: Mapping[str, str] = _theme(0)
DARK: Mapping[str, str] = _theme(1)
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
