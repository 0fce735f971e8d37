"""The suite "perplexity": how well a model foretells a text, by length and by position, per token, word and byte.

:mod:`trailmark.evaluation.perplexity.run` says how it is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trailmark.evaluation.suite import (
    Column,
    Lines,
    Panel,
    Row,
    Suite,
    Task,
    Tile,
    longest,
    register,
    seed_setting,
    tier_setting,
)
from trailmark.settings import Settings, setting
from trailmark.values import MOST_PERPLEXITY, number, perplexity

TOKENS = 1 << 16  # that are read of a text where nothing else is asked


@dataclass(frozen=True)
class PerplexitySettings(Settings):
    """What is read, and how.

    ``windows`` "windows": disjoint, of all documents one after another; what is left at the end is not read.
    "sliding": each moves on by ``stride`` and the last ``stride`` tokens of each are scored, so that each scored token
    has at least ``length - stride`` before it. "documents": no window crosses a document, a document's last one may be
    shorter; without lengths each document is one window, whole. ``carry``: one memory for the text ("windows") or for
    each document ("documents", without lengths). ``max_tokens``: as many whole windows as it holds, at least one, or as
    many whole documents; None: all; "auto": 65,536, under a protocol, which asks for the whole split, all.
    ``protocol`` (:mod:`trailmark.evaluation.protocols`) sets all others but ``max_tokens``; ``lengths`` then are those
    that it leaves open.

    Raises:
        ValueError: settings that do not go together.
    """

    lengths: tuple[int, ...] | None = setting(
        None,
        "Tokens of a window, as 1024,16384.",
        default="1x, 4x and 16x the training texts, as far as the text goes",
        least=2,
        cell="length",
    )
    windows: Literal["windows", "sliding", "documents"] = setting(
        "windows", "windows (one after another), sliding or documents."
    )
    stride: int | None = setting(None, "Of sliding windows.", default="half of one", least=1)
    carry: bool = setting(False, "One memory for all windows; else each is cold.", option="--carry")
    max_tokens: int | Literal["auto"] | None = setting(
        "auto",
        "Tokens of the text that are read, at least one window or document.",
        default="65,536, under a protocol all",
        least=2,
    )
    by_position: bool = setting(
        True, "Whether the loss is told by the number of tokens before.", on_command_line=False
    )
    memory_tier: str = tier_setting()
    protocol: str | None = setting(
        None,
        "A paper's way to measure: gca-table-1, gca-figure-3b, landmark-table-1 or landmark-table-2.",
    )
    seed: int = seed_setting()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lengths == ():
            raise ValueError("lengths: expected at least one, or None, got an empty list.")
        if self.stride is not None:
            if self.windows != "sliding":
                raise ValueError(
                    f"stride: expected none with {self.windows!r}, got {self.stride}. Choose 'sliding'."
                )
            expect_stride(min(self.lengths or (self.stride,)), self.stride)
        if self.carry and self.windows == "sliding":
            raise ValueError(
                "carry: expected False with 'sliding', got True: a carried memory has read what such windows repeat. "
                "Choose 'windows', where each token then has all before it."
            )
        if self.carry and self.windows == "documents" and self.lengths is not None:
            raise ValueError(
                f"lengths: expected none with 'documents' and carry, got {self.lengths}: a document is then read on "
                "from its beginning to its end."
            )
        if self.protocol is not None:
            self._check_protocol(self.protocol)

    def _check_protocol(self, name: str) -> None:
        from trailmark.evaluation.protocols import perplexity_protocol

        perplexity_protocol(name).cells(self.lengths)
        if self.windows != "windows" or self.carry:
            raise ValueError(
                f"protocol: {name!r} reads disjoint windows cold: expected windows='windows' and no carry, got "
                f"{self.windows!r} and {self.carry}. Leave them, or leave the protocol out."
            )

    @property
    def token_limit(self) -> int | None:
        if self.max_tokens == "auto":
            return TOKENS if self.protocol is None else None
        return self.max_tokens


def expect_stride(length: int, stride: int) -> None:
    """Raise a ValueError where windows of ``length`` would leave tokens between them unscored."""
    if stride > length:
        raise ValueError(
            f"stride: expected 1 to the shortest length, {length:,}, got {stride:,}: what lies between two windows "
            "would not be scored. Choose a shorter stride, or longer windows."
        )


def _run(task: Task) -> list[dict[str, Any]]:
    from trailmark.evaluation.perplexity import run as perplexity

    return perplexity.run(task.subject, task.settings, task.documents(), task.record, task.progress)


# --- what results look like --------------------------------------------------------------------------------------

_READ_AS = {"sliding": "Sliding windows", "documents": "Whole documents"}


def heading(row: Row) -> tuple[str, str]:
    """How it was read, and which text: a curve is of one text."""
    title = _READ_AS.get(str(row["settings"].get("windows")), "Windows of the text")
    if (stride := number(row.get("stride"))) is not None:
        title += f", moved by {stride:,.0f} tokens"
    title += ", memory carried" if row.get("carry") else ""
    title += f" (protocol {row['protocol']})" if row.get("protocol") else ""
    return title, f"Text: {str(row['text'])[:8]}." if row.get("text") else ""


def _fields(row: Row) -> str | None:
    """The fields of the configuration that a protocol sets for the cell."""
    changes = row.get("set")
    known = sorted(changes.items()) if isinstance(changes, dict) else []
    return ", ".join(f"{key}={value}" for key, value in known) or None


def _length(row: Row) -> Any:
    return "whole documents" if row.get("length") is None else row["length"]


def _positions(rows: Sequence[Row]) -> list[Row]:
    """The bins of positions of the longest texts measured, each with the place where it ends."""
    told = longest([row for row in rows if isinstance(row.get("by_position"), list)])
    bins = [one for one in told[-1]["by_position"] if isinstance(one, dict)] if told else []
    return [one | {"position": end + 1} for one in bins if (end := number(one.get("last"))) is not None]


def _by_length(rows: Sequence[Row]) -> list[Row]:
    """The last result at each length."""
    last = {length: row for row in rows if (length := number(row.get("length")))}
    return [last[length] for length in sorted(last)]


def _tiles(rows: Sequence[Row]) -> list[Tile]:
    known = longest([row for row in rows if number(row.get("perplexity")) is not None])
    if not known:
        return []
    best = min(known, key=lambda row: float(row["perplexity"]))
    how = f"{best.get('model')}, the lowest at that length"
    if None not in (low := number(best.get("perplexity_low")), high := number(best.get("perplexity_high"))):
        how += f"; 95% interval {perplexity(low)}–{perplexity(high)}"
    what = f"perplexity per token at {float(best['length']):,.0f} tokens"
    figure = (
        f"{best['perplexity']:,.4g}"
        if best["perplexity"] <= MOST_PERPLEXITY
        else perplexity(best["perplexity"])
    )
    return [Tile(figure, what, how)]


SUITE = register(
    Suite(
        name="perplexity",
        title="Perplexity",
        settings=PerplexitySettings,
        run=_run,
        divided=True,
        about="How well a model foretells a text: lower is better. Loss is in nats per token; perplexities per token "
        "compare models with the same tokenizer, per word and bits per byte any models. Bands and intervals: 95%.",
        columns=(
            Column("model", "model", on=("page",), text=True),
            Column("read as", "settings.windows", on=("card",), text=True),
            Column("tokens", _length, ",d"),
            Column("settings", _fields, on=("page",), text=True),
            Column("windows", "windows", ",d", on=("terminal", "page")),
            Column("scored", "tokens", ",d", on=("page", "card")),
            Column("nats per token", "loss", ".4f", on=("terminal", "page")),
            Column("perplexity", "perplexity", "perplexity"),
            Column("95% interval", ("perplexity_low", "perplexity_high"), "perplexity"),
            Column("perplexity per word", "word_perplexity", "perplexity"),
            Column("bits per byte", "bits_per_byte", ".4f"),
            Column("retrievals skipped", "skipped_share", ".1%", on=("terminal", "page")),
        ),
        charts=(
            Lines(
                "length",
                "perplexity by length",
                "Perplexity per token by the length of what is read at once. Bands: 95% intervals.",
                x="length",
                x_label="tokens",
                panels=(
                    Panel(
                        "Perplexity",
                        "perplexity per token",
                        "perplexity",
                        ("perplexity_low", "perplexity_high"),
                    ),
                ),
                points=_by_length,
            ),
            Lines(
                "position",
                "loss by position",
                "Mean loss of the tokens up to each position, from the one before it, in the longest texts measured. "
                "Bands: 95% intervals where they were measured.",
                x="position",
                x_label="position (tokens)",
                panels=(Panel("Loss", "nats per token", "loss", ("loss_low", "loss_high")),),
                points=_positions,
            ),
        ),
        heading=heading,
        series=lambda row: (_fields(row) or "",),
        tiles=_tiles,
        asked_of=lambda task: task != "niah",
    )
)
