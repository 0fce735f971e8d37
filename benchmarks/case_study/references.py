"""References of LaTeX: where a text names a label again that it set before, told by chunks and tokens.

Both places are the first token of the name: of the label inside ``\\label{...}``, of a reference inside ``\\ref{...}``,
``\\eqref``, ``\\cref{a,b}``, ``\\hyperref[...]`` or any other macro whose own name ends in "ref", as the works define
them. What such a macro names counts as a reference if it is a label of the same text that stands before it; comments
are no text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trailmark.trace.lines import TracedChunk

Integers = npt.NDArray[np.int64]

_COMMENT = re.compile(r"(?<!\\)((?:\\\\)*)%[^\n]*")
_LABEL = re.compile(r"\\label\s*\{([^{}]*)\}")
_REFERENCE = re.compile(
    r"\\hyperref\s*\[(?P<optional>[^\[\]]*)\]"
    r"|\\(?P<macro>[A-Za-z@]*[rR]ef)(?![A-Za-z@])\*?\s*(?:\[[^\[\]]*\]\s*)?\{(?P<names>[^{}]*)\}"
)
_MACRO = re.compile(r"\\([A-Za-z@]+)\*?\s*(?:\[([^\[\]]*)\]\s*)?(?:\{([^{}]*)\})?")


@dataclass(frozen=True)
class Named:
    """A label's name in a text, as its label or in a reference."""

    name: str
    begin: int  # characters of the text, from 0
    end: int
    macro: str


@dataclass(frozen=True)
class Reference:
    """A label that is named again. Chunks and tokens are numbered through the text."""

    name: str
    macro: str
    chunk: int  # in which the name begins here
    tokens: tuple[int, int]  # of the name here that lie in this chunk: the first, and one past the last
    label_chunk: int  # in which the name begins in \label
    label_token: int
    # chunks up to ``chunk`` in which the name began before: the label's, references'
    mentions: tuple[int, ...]

    @property
    def distance(self) -> int:
        """Tokens from the label to here."""
        return self.tokens[0] - self.label_token


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a text stand."""

    text: str
    starts: Integers  # [T] characters of ``text`` before each token
    chunk_tokens: Integers  # [C + 1] first token of each chunk, then T

    @classmethod
    def of(cls, chunks: Sequence[TracedChunk]) -> Layout:
        before = np.cumsum([0, *(len(chunk.text) for chunk in chunks)])
        starts = [begin + chunk.starts for begin, chunk in zip(before, chunks, strict=False)]
        counts = np.cumsum([0, *(len(chunk.ids) for chunk in chunks)])
        return cls("".join(chunk.text for chunk in chunks), np.concatenate(starts), counts)

    def token_at(self, character: int) -> int:
        """The token that holds a character; where one character is several tokens, the last."""
        return int(np.searchsorted(self.starts, character, side="right")) - 1

    def chunk_of(self, token: int) -> int:
        return int(np.searchsorted(self.chunk_tokens, token, side="right")) - 1


def without_comments(text: str) -> str:
    """Each character of a comment, from an unescaped % to the line's end, is a space: places stay."""
    return _COMMENT.sub(lambda m: m[1] + " " * (len(m[0]) - len(m[1])), text)


def labels(text: str) -> dict[str, Named]:
    """Of a text without comments; of several of one name the first."""
    found: dict[str, Named] = {}
    for match in _LABEL.finditer(text):
        for named in _names(match[1], match.start(1), "label", several=False):
            found.setdefault(named.name, named)
    return found


def named_again(text: str, known: dict[str, Named]) -> list[Named]:
    """What the macros of references name, of the labels ``known``, before or after them, in the text's order."""
    found = []
    for match in _REFERENCE.finditer(text):
        part = "optional" if match["optional"] is not None else "names"
        macro = "hyperref" if part == "optional" else match["macro"]
        found += [named for named in _names(match[part], match.start(part), macro) if named.name in known]
    return found


def other_macros(text: str, known: dict[str, Named]) -> dict[str, int]:
    """How often each macro that is no reference is given the name of a label: what this file may leave out."""
    counted = {named.begin for named in named_again(text, known)} | {own.begin for own in known.values()}
    given = [
        named
        for match in _MACRO.finditer(text)
        for group in (2, 3)
        for named in _names(match[group] or "", match.start(group), match[1])
    ]
    others = (named for named in given if named.name in known and named.begin not in counted)
    return dict(Counter(named.macro for named in others if named.macro != "label"))


def references(layout: Layout) -> list[Reference]:
    """All of a text whose label stands before them, in order; a label whose name is empty is none."""
    text = without_comments(layout.text)
    known = labels(text)
    seen = {name: [layout.chunk_of(layout.token_at(named.begin))] for name, named in known.items()}
    found = []
    for named in named_again(text, known):
        label = known[named.name]
        if label.begin >= named.begin:
            continue
        first = layout.token_at(named.begin)
        chunk = layout.chunk_of(first)
        # tokens that begin in the name, in the chunk that holds its first: the next chunk reads others
        stop = min(
            int(np.searchsorted(layout.starts, named.end, side="left")), int(layout.chunk_tokens[chunk + 1])
        )
        label_token = layout.token_at(label.begin)
        found.append(
            Reference(
                named.name,
                named.macro,
                chunk,
                (first, max(stop, first + 1)),
                layout.chunk_of(label_token),
                label_token,
                tuple(sorted(set(seen[named.name]))),
            )
        )
        seen[named.name].append(chunk)
    return found


def _names(content: str, begin: int, macro: str, several: bool = True) -> list[Named]:
    """Those of a list with commas, each without the white space around it."""
    found = []
    for part in content.split(",") if several else [content]:
        name = part.strip()
        if name:
            at = begin + part.index(name)
            found.append(Named(name, at, at + len(name), macro))
        begin += len(part) + 1
    return found


def summary(layout: Layout) -> dict[str, Any]:
    """Of a text: labels, what names them, and which macros besides are given a label's name."""
    text = without_comments(layout.text)
    known = labels(text)
    macros = dict(Counter(named.macro for named in named_again(text, known)))
    return {"labels": len(known), "macros": macros, "other_macros": other_macros(text, known)}
