"""What the suite "needles" is asked to do, checked before anything is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trailmark.data.needle_formats import FORMATS
from trailmark.data.needle_tasks import KINDS
from trailmark.evaluation.reading import parse_dtype

PROTOCOLS = ("paper-table-2",)


@dataclass(frozen=True)
class NeedleSettings:
    """What is asked. Each (length, depth) is a cell, with a result of its own.

    Args:
        lengths: tokens of haystack, question and answer together. Empty: 1x, 4x and 16x the model's training texts.
        kind: "single", "multi-key", "multi-value", "multi-query" or "hops"; see :class:`.needle_tasks.NeedleTask`.
        format: "marks", "sentences" or "paper" (:mod:`trailmark.data.needle_formats`). None: "marks" or "paper" if
            the model was trained on the task "needles" or "niah", else "sentences".
        needles: that are asked for: keys, values or chains. distractors: others. hops: of a chain, for kind "hops".
        values: "numbers", "words" (sentences), "tokens" (paper: random ones). None: the format's first: numbers, for
            "paper" tokens.
        landmarks: that the question closes chunks with: 1, or 2, so that a later group of layers can search with
            what an earlier one found.
        depths: where the needle lies that is asked for (first): 0 the first place, 1 the last one that the window
            does not show when the question comes; other needles lie anywhere. None: all lie anywhere.
        questions: of each cell, at least.
        phases: "any": the question's landmark falls on each place of a chunk as often. "end": its chunk is full; so
            that a text has its length exactly, the first chunk behind the haystack is as short as need be. None: "any",
            under the protocol "end".
        protocol: None, or "paper-table-2" (kinds single, and hops with hops=2): see :mod:`.needles`.
        memory_tier: "device", "host" or "disk". memory_dtype: "bfloat16" and the like; None: the model's.
        memory_folder: of "disk": where each haystack's memory lies in a folder of its own while it is asked; None: a
            temporary one.
        seed: of haystacks, places, names, phases.
        straddle: needles may lie across chunks. None: as the format's models are trained: not in "marks".

    Raises:
        ValueError: a setting out of its range, or settings that contradict each other.
    """

    lengths: tuple[int, ...] = ()
    kind: Any = "single"
    format: str | None = None
    needles: int = 1
    hops: int = 2
    distractors: int = 0
    values: str | None = None
    landmarks: int = 1
    depths: tuple[float, ...] | None = None
    questions: int = 100
    phases: str | None = None
    protocol: str | None = None
    memory_tier: str = "device"
    memory_dtype: str | None = None
    memory_folder: Path | None = None
    seed: int = 0
    straddle: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths))
        if self.phases is None:
            object.__setattr__(self, "phases", "any" if self.protocol is None else "end")
        if self.depths is not None:
            object.__setattr__(self, "depths", tuple(map(float, self.depths)))
        choices: list[tuple[str, Any, Sequence[Any]]] = [
            ("kind", self.kind, KINDS),
            ("format", self.format, (None, *FORMATS)),
            ("values", self.values, (None, "numbers", "words", "tokens")),
            ("landmarks", self.landmarks, (1, 2)),
            ("phases", self.phases, ("any", "end")),
            ("protocol", self.protocol, (None, *PROTOCOLS)),
            ("memory_tier", self.memory_tier, ("device", "host", "disk")),
        ]
        for name, value, allowed in choices:
            if value not in allowed:
                shown = ", ".join(repr(x) for x in allowed if x is not None)
                raise ValueError(f"{name}: expected one of {shown}, got {value!r}.")
        parse_dtype(self.memory_dtype)
        least = [("needles", 1), ("hops", 1), ("distractors", 0), ("questions", 1), ("seed", 0)]
        for name, lowest in least:
            value = getattr(self, name)
            if not isinstance(value, int) or value < lowest:
                raise ValueError(f"{name}: expected {lowest} or more, got {value!r}.")
        for length in self.lengths:
            if not isinstance(length, int) or length < 1:
                raise ValueError(f"lengths: expected positive whole numbers of tokens, got {length!r}.")
        for depth in self.depths or ():
            if not 0 <= depth <= 1:
                raise ValueError(
                    f"depths: expected numbers from 0 (the beginning) to 1 (the end), got {depth}."
                )
        if self.depths is not None and not self.depths:
            raise ValueError("depths: expected at least one, got none. None is for places anywhere.")
        if self.kind == "single" and self.needles != 1:
            raise ValueError(
                f"needles: expected 1 for kind 'single', got {self.needles}. Choose kind 'multi-key', 'multi-value' or "
                "'multi-query'."
            )
        if self.memory_folder is not None and self.memory_tier != "disk":
            raise ValueError(
                f"memory_folder: expected none for memory_tier {self.memory_tier!r}, got "
                f"{str(self.memory_folder)!r}. Set memory_tier to 'disk'."
            )
        self._check_protocol()

    def _check_protocol(self) -> None:
        if self.protocol is None:
            return
        expected: dict[str, Any] = {"format": (None, "paper"), "distractors": (0,), "landmarks": (1,)}
        expected |= {"values": (None, "tokens"), "kind": ("single", "hops")}
        expected |= {"phases": ("end",), "straddle": (None, True)}
        if self.kind == "hops":
            expected |= {"hops": (2,), "needles": (1, 2)}  # 1, the default, becomes the protocol's 2 chains
        for name, allowed in expected.items():
            if (value := getattr(self, name)) not in allowed:
                shown = " or ".join(repr(x) for x in allowed if x is not None)
                raise ValueError(
                    f"{name}: expected {shown} for protocol {self.protocol!r}, got {value!r}. Leave it out, or ask "
                    "without a protocol."
                )
