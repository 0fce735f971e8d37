"""The suite "cost": time and memory of a generated token after long prompts, and of training by context length.

Tables 3 and 4 and Figure 3a of arXiv 2410.01651 for any set of models, as ratios to one of them.
:mod:`trailmark.evaluation.cost.run` says how it is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trailmark.evaluation.suite import (
    Bars,
    Column,
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
    tiers,
)
from trailmark.settings import Settings, setting
from trailmark.values import number, short_length


@dataclass(frozen=True)
class CostSettings(Settings):
    """What is measured of each model.

    With the tier "device" among ``tiers``, models without a memory of chunks are measured there alone; the base always.
    Without a GPU "device" and "host" are one memory: times differ by chance only, and bytes say what would lie on a
    device. ``rounds``: that count, of generating and of training.

    Raises:
        ValueError: nothing to measure, a number that is too small, an unknown tier or dtype, a batch of no whole texts.
    """

    lengths: tuple[int, ...] = setting(
        (16_384, 49_152), "Tokens of a prompt, as 1024,16384.", least=2, cell="prompt"
    )
    # the first token belongs to the prompt's time
    generate: int = setting(128, "Tokens after each prompt.", least=2)
    tiers: tuple[str, ...] = setting(
        ("device", "host"), "Of memory, to compare: device, host, disk or tokens.", choices=tiers, cell="tier"
    )
    rounds: int = setting(7, "Rounds of all models in turn.", least=1)
    training_lengths: tuple[int, ...] = setting(
        (), "Context lengths at which training is measured too.", least=2, cell="length"
    )
    training_batch_tokens: int | None = setting(
        None, "Of a training step, whole texts of each length.", default="one text", on_command_line=False
    )
    seed: int = seed_setting()
    memory_dtype: str | None = dtype_setting()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lengths and not self.training_lengths:
            raise ValueError(
                "lengths, training_lengths: expected some, got none of both. Name prompts as lengths=16384,49152."
            )
        if self.lengths and not self.tiers:
            raise ValueError(
                "tiers: expected at least one, got none. 'device' is where every memory may lie."
            )
        expect_dtype_of(self.memory_dtype, *self.tiers)
        for length in self.training_lengths:
            tokens = self.training_batch_tokens
            if tokens is not None and (tokens < length or tokens % length):
                texts = max(1, tokens // length)
                raise ValueError(
                    f"training_batch_tokens: expected whole texts of {length} tokens, got {tokens}. {texts * length} "
                    f"would be {texts}."
                )


def _run(task: Task) -> list[dict[str, Any]]:
    from trailmark.evaluation.cost import run as cost

    return cost.run(task.subjects, task.settings, task.record, task.progress)


# --- what results look like --------------------------------------------------------------------------------------


def _rows(result: Row) -> list[Row]:
    """A row for each model of a cell."""
    settings, rows = result.get("settings") or {}, result.get("rows")
    shared = {**settings, "settings": settings} | {name: result.get(name) for name in ("base", "note")}
    return [shared | row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def heading(row: Row) -> tuple[str, str]:
    """A row after a prompt is of generating, another one of training."""
    return ("Training", "") if row.get("prompt") is None else ("Generating", "")


def _case(row: Row) -> str:
    """After which prompt, and on which tier."""
    tier = f", {row['tier']}" if row.get("tier") else ""
    length = number(row.get("prompt"))
    return "" if length is None else f"After {short_length(length)} tokens{tier}"


def _context(row: Row) -> Any:
    return None if row.get("prompt") is not None else row.get("context_length", row.get("length"))


def _throughput(rows: Sequence[Row]) -> list[Row]:
    """Of training, by the context's length."""
    known = [row | {"context": at} for row in map(dict, rows) if (at := number(_context(row))) is not None]
    return sorted(known, key=lambda row: float(row["context"]))


def _quotient(row: Row) -> float | None:
    formula, measured = number(row.get("formula_bytes")), number(row.get("cache_bytes"))
    return None if formula is None or not measured else formula / measured


def _tiles(rows: Sequence[Row]) -> list[Tile]:
    """After the longest prompt, the model nearest to the window-only one among those that look further."""
    further = [row for row in rows if "SlidingWindow" not in str(row.get("architecture"))]
    known = longest([row for row in further if number(row.get("time_ratio")) is not None], "prompt")
    if not known:
        return []
    best = min(known, key=lambda row: float(row["time_ratio"]))
    memory = number(best.get("memory_ratio"))
    return [
        Tile(
            f"{best['time_ratio']:.3g}×",
            f"the time per token after {float(best['prompt']):,.0f} tokens",
            f"{best.get('model')}, tier {best.get('tier')}; memory "
            f"{'-' if memory is None else f'{memory:.3g}'}×, against {best.get('base') or 'the first model'}",
        )
    ]


_MULTIPLE = "as a multiple of that of the model with a window alone, or of the first that is named"
_GENERATING = (
    Column("prompt", "prompt", ",d"),
    Column("tier", "tier", text=True),
    Column("ms per token", "ms_per_token.median", ".3f"),
    Column("quartiles", ("ms_per_token.p25", "ms_per_token.p75"), ".3f", on=("page",)),
)
_TRAINING = (
    Column("context", _context, ",d"),
    Column("tokens/s", "tokens_per_second", ",.0f"),
)
_BYTES = (
    Column("on the device", "device_bytes", "bytes"),
    Column("on the device, formula", "formula_device_bytes", "bytes", on=("page",)),
    Column("peak memory", "peak_bytes", "bytes"),
    Column("memory", "memory_ratio", "times", about=_MULTIPLE),
    Column("cache, measured", "cache_bytes", "bytes"),
    Column("cache, formula", "formula_bytes", "bytes"),
    Column("paper's formula", "paper_formula_bytes", "bytes", on=("page",)),
    Column("formula / measured", _quotient, ".4f", on=("page",)),
)


def _ratios(name: str, title: str, value: str) -> Bars:
    def of_generating(row: Row) -> Any:
        return None if row.get("prompt") is None else row.get(value)

    return Bars(
        name,
        title,
        "Dotted: the model that the others are compared with.",
        x_label="ratio",
        panels=(Panel("", "ratio", of_generating),),
        by=_case,
        form="times",
        base=1.0,
    )


SUITE = register(
    Suite(
        name="cost",
        title="Cost",
        settings=CostSettings,
        run=_run,
        about="Time and memory, as ratios to the first model named (the window alone, where there is one): 1 is equal, "
        "less is better. Formula: the bytes that the sizes alone tell, to compare with the measured ones; the paper's "
        "formula: section 3.2 of arXiv 2410.01651.",
        columns=(
            Column("model", "model", text=True),
            Column("architecture", "architecture", on=("page",), text=True),
            *_GENERATING,
            *_TRAINING,
            Column("time", "time_ratio", "times", about=_MULTIPLE),
            Column("quartiles, time", lambda row: row.get("time_ratio_quartiles"), ".3g", on=("page",)),
            *_BYTES,
            Column("reading, tokens/s", "tokens_per_second_reading", ",.0f"),
            Column("problem", "problem", text=True),
        ),
        charts=(
            _ratios("time", "Time per generated token, as a ratio", "time_ratio"),
            _ratios("memory", "Memory on the device, as a ratio", "memory_ratio"),
            Lines(
                "training",
                "tokens per second by context length",
                "Forward and backward together. Higher is better.",
                x="context",
                x_label="context length (tokens)",
                panels=(Panel("Throughput", "tokens per second", "tokens_per_second"),),
                points=_throughput,
            ),
        ),
        rows=_rows,
        heading=heading,
        tiles=_tiles,
        compares=True,
        random_weights=True,
    )
)
