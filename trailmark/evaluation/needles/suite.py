"""The suite "needles": facts hidden in long texts, and questions about them, by kind, length and depth.

:mod:`trailmark.evaluation.needles.ask` says how it is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trailmark.evaluation.suite import (
    ChunkMap,
    Column,
    HeatMap,
    Lines,
    Panel,
    Row,
    Suite,
    Task,
    Tile,
    dtype_setting,
    expect_dtype_of,
    longest,
    register,
    seed_setting,
    tier_setting,
)
from trailmark.settings import Settings, setting
from trailmark.values import number, percent

PROTOCOLS = ("paper-table-2",)
_VALUES = ("numbers", "words", "tokens")


def _kinds() -> tuple[str, ...]:
    from trailmark.data.needles.tasks import KINDS

    return KINDS


def _formats() -> tuple[str, ...]:
    from trailmark.data.needles.formats import FORMATS

    return FORMATS


def _needs_folder(tier: str) -> bool:
    from trailmark.memory.tiers.base import tier_named

    return tier_named(tier).needs_folder


@dataclass(frozen=True)
class NeedleSettings(Settings):
    """What is asked. Each (length, depth) is a cell, with a result of its own.

    ``format`` None: "marks" or "paper" if the model was trained on the task "needles" or "niah", else "sentences".
    ``phases`` "any": the question's landmark falls on each place of a chunk as often. "end": its chunk is full; so that
    a text has its length exactly, the first chunk behind the haystack is as short as need be. ``landmarks`` 2: a later
    group of layers can search with what an earlier one found. ``protocol``: see :mod:`.ask`.

    Raises:
        ValueError: a setting out of its range, or settings that contradict each other.
    """

    lengths: tuple[int, ...] = setting(
        (),
        "Tokens of haystack, question and answer together, as 1024,16384.",
        default="1x, 4x and 16x the training texts",
        least=1,
        cell="length",
    )
    kind: Any = setting("single", "single, multi-key, multi-value, multi-query or hops.", choices=_kinds)
    format: str | None = setting(
        None,
        "How needles are written: marks, sentences, paraphrases (other words each time) or paper.",
        default="as in training, else sentences",
        choices=_formats,
    )
    needles: int = setting(1, "Needles that are asked for: keys, values or chains.", least=1)
    hops: int = setting(2, "Of a chain, for the kind hops.", least=1)
    distractors: int = setting(0, "Needles that no question needs.", least=0)
    values: str | None = setting(
        None,
        "numbers, words (of sentences and paraphrases) or tokens (of paper, where they are the default).",
        default="numbers",
        choices=_VALUES,
    )
    landmarks: int = setting(1, "Landmarks between question and answer.", least=1, most=2)
    depths: tuple[float, ...] | None = setting(
        None,
        "Where the needle that is asked for lies, from 0 (the text's start) to 1 (the last place that the window does "
        "not show), as 0,0.5,1; other needles lie anywhere.",
        default="all lie anywhere",
        least=0,
        most=1,
        cell="depth",
    )
    questions: int = setting(100, "Questions at each length and depth, at least.", least=1)
    phases: str | None = setting(
        None,
        "end: the chunk that a question closes is full; any: it is as long as it happens.",
        default="any, under a protocol end",
        choices=("any", "end"),
    )
    protocol: str | None = setting(
        None,
        "A paper's way to measure: paper-table-2 (kinds single, and hops of 2).",
        choices=PROTOCOLS,
    )
    memory_tier: str = tier_setting()
    memory_dtype: str | None = dtype_setting()
    memory_folder: Path | None = setting(
        None,
        "Of --memory-tier disk: where each haystack's memory lies meanwhile.",
        default="a temporary folder",
    )
    seed: int = seed_setting()
    straddle: bool | None = setting(
        None,
        "Whether needles may lie across chunks.",
        default="as the format's models are trained: not in marks",
        on_command_line=False,
    )
    sight: str = setting(
        "layers",
        "What needles lie out of: layers, all that the windows of all layers see together; window, what a single one "
        "sees (a short text has no other place for a deep model; a twin with a window alone says what that gives "
        "away).",
        choices=("layers", "window"),
    )
    chat: bool = setting(
        False,
        "Ask through the tokenizer's chat template, of sentences and paraphrases: the answer is right if it is in what "
        "the model then writes.",
        option="--chat",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.phases is None:
            object.__setattr__(self, "phases", "any" if self.protocol is None else "end")
        if self.depths is not None and not self.depths:
            raise ValueError("depths: expected at least one, got none. None is for places anywhere.")
        if self.kind == "single" and self.needles != 1:
            raise ValueError(
                f"needles: expected 1 for kind 'single', got {self.needles}. Choose kind 'multi-key', 'multi-value' or "
                "'multi-query'."
            )
        if self.memory_folder is not None and not _needs_folder(self.memory_tier):
            raise ValueError(
                f"memory_folder: expected none for memory_tier {self.memory_tier!r}, got "
                f"{str(self.memory_folder)!r}. Set memory_tier to 'disk'."
            )
        expect_dtype_of(self.memory_dtype, self.memory_tier)
        if self.protocol is not None:
            self._check_protocol()

    def _check_protocol(self) -> None:
        expected: dict[str, Any] = {"format": (None, "paper"), "distractors": (0,), "landmarks": (1,)}
        expected |= {"values": (None, "tokens"), "kind": ("single", "hops")}
        expected |= {"phases": ("end",), "straddle": (None, True), "chat": (False,)}
        if self.kind == "hops":
            # 1 needle, the default, becomes the protocol's 2 chains; the paper's texts have one landmark
            expected |= {"hops": (2,), "needles": (1, 2), "landmarks": (1, 2)}
        for name, allowed in expected.items():
            if (value := getattr(self, name)) not in allowed:
                shown = " or ".join(repr(x) for x in allowed if x is not None)
                raise ValueError(
                    f"{name}: expected {shown} for protocol {self.protocol!r}, got {value!r}. Leave it out, or ask "
                    "without a protocol."
                )


def _run(task: Task) -> list[dict[str, Any]]:
    from trailmark.evaluation.needles import ask as needles

    text = task.documents()
    if max(task.settings.lengths or task.subject.default_lengths()) > text.tokens:
        task.say(f"Mind: the text has {text.tokens:,} tokens; haystacks that are longer repeat it.")
    return needles.run(task.subject, task.settings, text.corpus, task.record, task.progress)


# --- what results look like --------------------------------------------------------------------------------------

_TITLES = {
    "single": "One needle",
    "multi-key": "Several keys",
    "multi-value": "Several values of one key",
    "multi-query": "Several keys in one question",
}
_PLACES = {"end": "at the end of a chunk", "any": "anywhere in a chunk"}


def heading(row: Row) -> tuple[str, str]:
    """What was asked, and how."""
    kind, distractors, landmarks = row.get("kind"), row.get("distractors"), number(row.get("landmarks"))
    title = (
        f"{row.get('hops') or 2} hops" if kind == "hops" else _TITLES.get(str(kind), str(kind or "Needles"))
    )
    if distractors:
        title += f", {distractors} distractors"
    if landmarks is not None and landmarks != 1:
        title += f", {landmarks:g} landmarks before the answer"
    if row.get("chat"):
        title += ", asked through the chat template"
    if row.get("protocol"):
        title += f" (protocol {row['protocol']})"
    fine = [f"{name}: {row[name]}" for name in ("format", "values") if row.get(name)]
    if phases := row.get("phases"):
        fine.append(f"questions end {_PLACES.get(phases, phases)}")
    return title, f"{'; '.join(fine).capitalize()}." if fine else ""


def tier(row: Row) -> str | None:
    """Where the memory lay, and in which precision."""
    return " ".join(str(row[name]) for name in ("memory_tier", "memory_dtype") if row.get(name)) or None


def _series(row: Row) -> tuple[str, ...]:
    needles = row.get("needles")
    return ("" if needles is None else f"{needles} needle{'s' * (needles != 1)}", tier(row) or "")


def pooled(rows: Sequence[Row]) -> dict[str, Any]:
    """One length as one row: where needles lie anywhere that, else its depths together.

    Of a depth that was measured twice the result with the most questions counts, else the last.
    """
    from trailmark.statistics import wilson_interval

    names = ("accuracy", "accuracy_low", "accuracy_high", "recall")
    rows = [row for row in rows if row.get("depth") is None] or list(rows)
    by_questions = sorted(rows, key=lambda row: number(row.get("questions")) or 0.0)
    kept = list({str(row.get("depth")): row for row in by_questions}.values())
    if len(kept) == 1:
        return {**kept[0], **{name: number(kept[0].get(name)) for name in names}}
    asked = [max(0.0, number(row.get("questions")) or 0.0) for row in kept]
    right = [min(max(0.0, number(row.get("correct")) or 0.0), n) for row, n in zip(kept, asked, strict=True)]
    recalls = [number(row.get("recall")) for row in kept]
    total, found = sum(asked), dict.fromkeys(names)
    if total:
        low, high = wilson_interval(sum(right), total)
        found |= {"accuracy": sum(right) / total, "accuracy_low": low, "accuracy_high": high}
        known = [r * n for r, n in zip(recalls, asked, strict=True) if r is not None]
        found["recall"] = sum(known) / total if len(known) == len(recalls) else None
    return {**kept[0], "depth": None, **found}


def _by_length(rows: Sequence[Row]) -> list[Row]:
    lengths = sorted({length for row in rows if (length := number(row.get("length")))})
    return [pooled([row for row in rows if number(row.get("length")) == length]) for length in lengths]


def _times_trained(row: Row) -> float | None:
    length, trained = number(row.get("length")), number(row.get("train_length"))
    return None if length is None or not trained else length / trained


def _by_hop(row: Row) -> str | None:
    """Of each hop how often its chunk was retrieved; of one hop that is said already."""
    hops = row.get("recall_by_hop")
    return ", ".join(f"{hop:.3f}" for hop in hops) if isinstance(hops, list) and len(hops) > 1 else None


def _kind(row: Row) -> Any:
    return f"{row.get('hops')} hops" if row.get("kind") == "hops" else row.get("kind")


def _depth(row: Row) -> Any:
    return "anywhere" if row.get("depth") is None else row["depth"]


def _asked(row: Row) -> list[Row]:
    """The questions of one needle of which it is known what was read for them."""
    asked = row.get("asked")
    single = row.get("needles") == 1 and row.get("kind") in (None, "single")
    return [one for one in asked if isinstance(one, dict)] if single and isinstance(asked, list) else []


def _tiles(rows: Sequence[Row]) -> list[Tile]:
    """The most accurate model at the longest length at which one was asked."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in longest(rows):
        groups.setdefault((row.get("model"), *heading(row), *_series(row)), []).append(row)
    known = [pool for group in groups.values() if (pool := pooled(group))["accuracy"] is not None]
    if not known:
        return []
    best = max(known, key=lambda pool: float(pool["accuracy"]))
    length, trained = float(best["length"]), number(best.get("train_length"))
    tiles = [
        Tile(
            percent(best["accuracy"]),
            f"of answers right at {length:,.0f} tokens",
            f"{best.get('model')}, {heading(best)[0].lower()}; 95% interval {best['accuracy_low']:.3f}–"
            f"{best['accuracy_high']:.3f}",
        )
    ]
    if trained and length > trained:
        how = f"{best.get('model')}; {trained:,.0f} tokens while training"
        tiles.append(Tile(f"{length / trained:,.4g}×", "longer than the longest training text", how))
    return tiles


_RIGHT = Panel("Answers right", "share of questions", "accuracy", ("accuracy_low", "accuracy_high"), True)

SUITE = register(
    Suite(
        name="needles",
        title="Needles",
        settings=NeedleSettings,
        run=_run,
        divided=True,
        about="A needle is a fact hidden in a long text and asked for later. An answer is right only if all of it is; "
        "under the paper's protocol, if one token is. Bands and intervals are 95% Wilson intervals, which take "
        'questions as independent. "Chunk retrieved" is the share of questions whose needle\'s chunk was read, '
        '"weight" the mean weight it got.',
        columns=(
            Column("model", "model", on=("page",), text=True),
            Column("tokens", "length", ",d"),
            Column(
                "× train",
                _times_trained,
                "times",
                about="tokens, as a multiple of the longest text trained on",
            ),
            Column("kind", _kind, on=("terminal", "card"), text=True),
            Column("depth", _depth, "g", about="where the needle lies: 0 at the beginning, 1 at the end"),
            Column("needles", "needles"),
            Column("questions", "questions", ",d"),
            Column("right", "correct", ",d", on=("page",)),
            Column("accuracy", "accuracy", "share"),
            Column("95% interval", ("accuracy_low", "accuracy_high"), ".3f"),
            Column("all tokens right", "exact_accuracy", "share"),
            Column(
                "first token right",
                "first_token_accuracy",
                "share",
                about="share of answers that begin with the value at once; any other counts if it is in them",
            ),
            Column(
                "chunk retrieved",
                "recall",
                "share",
                about="share of questions at which the needle's chunk was read",
            ),
            Column("by hop", _by_hop, on=("page",)),
            Column(
                "weight",
                "mean_weight",
                ".3f",
                on=("terminal", "page"),
                about="of the needle's chunk among those read, on average",
            ),
            Column(
                "1 / rank",
                "mean_reciprocal_rank",
                ".3f",
                on=("page",),
                about="of the needle's chunk among all, on average; 1: the best",
            ),
            Column("tokens/s", "tokens_per_second", ",.0f", on=("terminal", "page")),
            Column(
                "memory",
                lambda row: row.get("memory_bytes") or None,
                "bytes",
                on=("terminal", "page"),
                about="of past chunks' keys, values and landmarks",
            ),
            Column("tier", tier, on=("page",), text=True),
            Column("text", lambda row: str(row.get("text") or "")[:8] or None, on=("page",), text=True),
        ),
        charts=(
            Lines(
                "length",
                "answers by length",
                "Bands: 95% Wilson intervals; a length of which depths alone were measured pools them.",
                x="length",
                x_label="tokens",
                panels=(
                    _RIGHT,
                    Panel("Needle's chunk retrieved", "share of questions", "recall", share=True),
                ),
                points=_by_length,
                rule="train_length",
                rule_label="longest training text",
            ),
            HeatMap(
                "depth",
                "answers by length and depth",
                "Share of answers that are right; depth 0 is the start of the text, 1 its end. Empty fields were not "
                "measured.",
                x="length",
                x_label="tokens",
                y="depth",
                y_label="depth",
                value="accuracy",
            ),
            ChunkMap(
                "chunks",
                "chunks read",
                "Questions by where their needle lies. Blue: the chunks that were retrieved, larger with more weight; "
                "orange: the needle's chunk.",
                asked=_asked,
            ),
        ),
        heading=heading,
        series=_series,
        written=(
            Column("expected", "expected", text=True),
            Column("generated", "generated", text=True),
            Column("right", "correct"),
        ),
        tiles=_tiles,
        asked_of=lambda task: task in ("needles", "niah"),
    )
)
