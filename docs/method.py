"""Draw the picture of the method: docs/method-light.svg and docs/method-dark.svg.

python docs/method.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from trailmark.report.theme import DARK, LIGHT

HERE = Path(__file__).parent
WIDTH, HEIGHT = 1000, 400
CHUNKS = 9  # of the text; the last one reads, the one before it has just closed
CHOSEN = {1: ".7", 4: ".3"}  # past chunks that its landmark chooses, and what they weigh
SEEN = 2  # chunks that a window reaches back
LEFT, STEP, SIDE = 30, 74, 62
MEMORY, LOWER, TEXT = 150, 262, 330  # tops of the rows


class Drawing:
    """An SVG in the colours of one theme."""

    def __init__(self, colours: dict[str, str]) -> None:
        self.colours, self.parts = colours, list[str]()

    def box(
        self, x: float, y: float, wide: float, high: float, fill: str, line: str, thick: float = 1.2
    ) -> None:
        fill, line = (self.colours.get(name, name) for name in (fill, line))
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="5" fill="{fill}" stroke="{line}" '
            f'stroke-width="{thick}"/>'
        )

    def path(self, way: str, line: str, thick: float = 1.2, head: bool = False, dashes: str = "") -> None:
        more = f' marker-end="url(#{line})"' if head else ""
        more += f' stroke-dasharray="{dashes}"' if dashes else ""
        self.parts.append(
            f'<path d="{way}" fill="none" stroke="{self.colours[line]}" stroke-width="{thick}"{more}/>'
        )

    def dot(self, x: float, y: float, fill: str) -> None:
        self.parts.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{self.colours[fill]}"/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        ink: str = "ink",
        size: int = 14,
        anchor: str = "middle",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{self.colours[ink]}"{weight}>'
            f"{escape(words)}</text>"
        )

    def svg(self) -> str:
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="6.5" refY="4" markerWidth="6.5" markerHeight="6.5" '
            f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{self.colours[name]}"/></marker>'
            for name in ("muted", "series-1", "series-2")
        )
        says = (
            "A text is cut into chunks. Lower layers with a window write keys, values and a landmark vector of each "
            "chunk into a memory. The landmark of the chunk that has just closed scores all past chunks and chooses "
            "two. Upper layers read them in the next chunk, weighed by the scores, so the loss trains the choice."
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"><title>{says}</title>'
            f'<defs>{heads}</defs><rect width="{WIDTH}" height="{HEIGHT}" fill="{self.colours["paper"]}"/>'
            + "\n".join(["", *self.parts, "</svg>", ""])
        )


def left_of(chunk: int) -> float:
    return LEFT + chunk * STEP


def draw(colours: dict[str, str]) -> str:
    d = Drawing(colours)
    closed, reading = CHUNKS - 2, CHUNKS - 1
    asking = left_of(closed) + SIDE / 2
    for chunk in range(CHUNKS):
        x, middle = left_of(chunk), left_of(chunk) + SIDE / 2
        is_now = chunk == reading
        d.box(x, TEXT, SIDE, 30, "bar" if is_now else "raised", "series-1" if is_now else "rule")
        d.text(middle, TEXT + 20, {closed: "t", reading: "t + 1"}.get(chunk, ""), "ink", 13)
        d.box(x, LOWER, SIDE, 30, "raised", "rule")
        d.path(f"M{middle} {TEXT - 2}V{LOWER + 33}", "muted", head=True)
        if is_now:
            continue
        chosen = chunk in CHOSEN
        d.box(
            x,
            MEMORY,
            SIDE,
            56,
            "notice" if chosen else "raised",
            "series-2" if chosen else "rule",
            2 if chosen else 1.2,
        )
        d.dot(middle, MEMORY + 14, "series-2" if chosen else "muted")
        d.text(middle, MEMORY + 35, "keys", "muted", 11)
        d.text(middle, MEMORY + 48, "values", "muted", 11)
        d.path(f"M{middle} {LOWER - 2}V{MEMORY + 59}", "muted", head=True)
    # what the landmark of chunk t scores, and what it chooses
    for chunk in range(closed):
        to = left_of(chunk) + SIDE / 2
        chosen, top = chunk in CHOSEN, MEMORY - 18 - 6 * (closed - chunk)
        way = f"M{asking} {MEMORY + 7}C{asking} {top - 24} {to} {top - 24} {to} {MEMORY + 6}"
        d.path(way, "series-2" if chosen else "rule", 2.4 if chosen else 1, head=chosen)
        if chosen:
            d.text(to - 14, MEMORY - 10, CHOSEN[chunk], "series-2", 14, "end", True)
    d.dot(asking, MEMORY + 14, "series-1")
    # what chunk t + 1 reads
    x, top = left_of(reading), 84
    d.box(x - 4, top, SIDE + 8, 122, "bar", "series-1", 2)
    d.text(x + SIDE / 2, top + 56, "upper", "ink", 13, bold=True)
    d.text(x + SIDE / 2, top + 73, "layers", "ink", 13, bold=True)
    d.path(f"M{x + SIDE / 2} {LOWER - 2}V{top + 126}", "muted", head=True)
    d.path(f"M{x + SIDE / 2} {top - 2}V{top - 26}", "series-1", 1.6, head=True)
    d.text(x + SIDE / 2, top - 33, "next token", "ink", 13)
    for number, chunk in enumerate(CHOSEN):
        start, down = left_of(chunk) + SIDE * 0.72, MEMORY + 82 - 10 * number
        d.path(
            f"M{start} {MEMORY + 58}V{down}H{x + 16 - 10 * number}V{top + 126}", "series-2", 1.8, head=True
        )
    # the window
    first = left_of(reading - SEEN)
    d.path(f"M{first} {TEXT + 38}v6H{x + SIDE}v-6", "muted")
    d.text((first + x + SIDE) / 2, TEXT + 60, "the window: as long at every length", "muted", 13)
    # words
    d.text(LEFT, TEXT + 60, "the text, in chunks", "muted", 13, "start")
    words = left_of(CHUNKS) + 6
    for y, title, *lines in (
        (44, "4  read", "attend to the chosen chunks beside", "the window, weighed by the scores:",
         "so the loss trains the choice"),
        (140, "3  choose", "the landmark of chunk t scores", "all past chunks, and picks K"),
        (212, "2  remember", "keys, values and a landmark vector", "of each chunk, on GPU, host or disk"),
        (284, "1  lower layers", "attention inside the window alone"),
    ):  # fmt: skip
        d.text(words, y, title, "ink", 15, "start", True)
        for number, line in enumerate(lines):
            d.text(words, y + 19 + 17 * number, line, "muted", 13, "start")
    return d.svg()


def main() -> None:
    for name, colours in (("light", LIGHT), ("dark", DARK)):
        (HERE / f"method-{name}.svg").write_text(draw(dict(colours)), encoding="utf-8")


if __name__ == "__main__":
    main()
