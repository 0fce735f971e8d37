"""Random draws that are the same on every Python, numpy and machine: hashes of what is drawn for and a counter."""

from __future__ import annotations

from trailmark.data.batches import mix


class Draws:
    """Draws one after another, a function of ``numbers`` alone: what they are for (seed, sample, ...)."""

    def __init__(self, *numbers: int) -> None:
        self._key, self._count = mix(*numbers), 0

    def below(self, stop: int) -> int:
        """One of 0 .. stop - 1, each as likely (but for 2**-64 of the draws)."""
        assert stop > 0
        self._count += 1
        return mix(self._key, self._count) * stop >> 64

    def among(self, stop: int, count: int) -> list[int]:
        """``count`` different ones of 0 .. stop - 1, in any order."""
        assert count <= stop
        # the first steps of a Fisher-Yates shuffle; places not named hold themselves
        moved: dict[int, int] = {}
        for place in range(count):
            other = place + self.below(stop - place)
            here, there = moved.get(place, place), moved.get(other, other)
            moved[place], moved[other] = there, here
        return [moved[place] for place in range(count)]
