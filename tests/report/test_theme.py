"""Every colour can be read on what it stands on, in light and in dark (WCAG 2.2 AA)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from trailmark.report.theme import DARK, LEVELS, LIGHT, SERIES, channels, heat_ink, heat_level, style

THEMES = {"light": LIGHT, "dark": DARK}


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, 1 to 21 (WCAG 2.2, relative luminance)."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (channel / 255 for channel in channels(colour))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.fixture(params=THEMES)
def colours(request: pytest.FixtureRequest) -> Mapping[str, str]:
    return THEMES[request.param]


@pytest.mark.parametrize(
    ("one", "other", "ratio"),
    [("#000000", "#ffffff", 21.0), ("#ffffff", "#ffffff", 1.0), ("#777777", "#ffffff", 4.48)],
)
def test_contrast(one: str, other: str, ratio: float) -> None:
    """The last is the example of the standard's commentary: just below 4.5."""
    assert contrast(one, other) == contrast(other, one) == pytest.approx(ratio, abs=0.005)


def test_text_is_readable(colours: Mapping[str, str]) -> None:
    for ground in ("paper", "raised"):
        for text in ("ink", "muted", "link"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for ground in ("notice", "bar"):
        for text in ("ink", *(["link"] if ground == "notice" else [])):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)


def test_lines_and_controls_can_be_seen(colours: Mapping[str, str]) -> None:
    for name in (*SERIES, "muted", "notice-rule"):
        assert contrast(colours[name], colours["paper"]) >= 3, name


def test_numbers_on_a_heat_map_are_readable(colours: Mapping[str, str]) -> None:
    for level in range(LEVELS):
        assert contrast(colours[f"heat-{level}"], colours[heat_ink(level)]) >= 4.5, level


def test_a_heat_map_rises_evenly(colours: Mapping[str, str]) -> None:
    """One direction, from the page's own lightness away: readable without seeing colours."""
    away = [contrast(colours[f"heat-{level}"], colours["paper"]) for level in range(LEVELS)]
    assert away == sorted(away)
    assert away[-1] > 3 * away[0]


def test_both_themes_name_the_same_colours_and_a_value_names_one() -> None:
    assert list(LIGHT) == list(DARK)
    assert len(set(LIGHT.values())) == len(LIGHT)  # svg.py finds the name by the value


@pytest.mark.parametrize(
    ("share", "level"), [(0, 0), (0.001, 1), (0.05, 1), (0.5, 5), (0.949, 9), (0.999, 9), (1, 10), (-1, 0)]
)
def test_only_all_and_nothing_have_the_last_levels(share: float, level: int) -> None:
    assert heat_level(share) == level


def test_print_is_light() -> None:
    assert style().count("@media screen") == 2
    assert style().index(LIGHT["paper"]) < style().index("@media")
    assert DARK["paper"] not in style()[: style().index("@media")]
