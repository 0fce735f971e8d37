"""Figures of results, with matplotlib (the ``figures`` extra)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

COLOURS = ("#1f5fa8", "#c2571a", "#3d7f3f", "#7a4a9e")


def accuracy_by_length(
    path: Path, results: Mapping[str, Sequence[dict[str, Any]]], train_length: int, chance: float
) -> None:
    """One line per series of NeedleResult summaries, with its 95% interval."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7, 4))
    for colour, (name, series) in zip(cycle(COLOURS), results.items(), strict=False):
        x = [r["length"] for r in series]
        axes.plot(x, [r["accuracy"] for r in series], "o-", color=colour, label=name)
        low, high = ([r[key] for r in series] for key in ("accuracy_low", "accuracy_high"))
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.axvline(train_length, color="grey", linestyle=":", linewidth=1)
    axes.text(
        train_length,
        0.5,
        " longest training text",
        rotation=90,
        va="center",
        ha="right",
        fontsize=8,
        color="grey",
    )
    axes.set_xscale("log", base=2)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("length of the text (tokens)")
    axes.set_ylabel("all digits right")
    axes.set_title(f"A needle in real text (chance: {chance:.0e})")
    axes.legend()
    _save(figure, path)


def loss_curves(path: Path, histories: Mapping[str, dict[str, Any]], tokens_per_step: int) -> None:
    """Training loss, and the accuracy and recall on training texts where they were measured."""
    plt = _pyplot()
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 6), sharex=True)
    for colour, (name, history) in zip(cycle(COLOURS), histories.items(), strict=False):
        steps = history["steps"]
        tokens = [s["step"] * tokens_per_step / 1e6 for s in steps]
        top.plot(tokens, [s["loss"] for s in steps], color=colour, label=name)
        if steps and "accuracy" in steps[-1]:
            bottom.plot(
                tokens, [s["accuracy"] for s in steps], color=colour, label=f"{name}: first digit right"
            )
        if steps and "recall" in steps[-1]:
            recall = [s.get("recall", float("nan")) for s in steps]
            bottom.plot(tokens, recall, color=colour, linestyle="--", label=f"{name}: chunk retrieved")
        for start in history.get("level_starts", [])[1:]:
            bottom.axvline(start * tokens_per_step / 1e6, color=colour, linewidth=0.5, alpha=0.4)
    top.set_ylabel("training loss")
    bottom.set_ylabel("on training texts")
    bottom.set_xlabel("million tokens (thin lines: the next level of the curriculum)")
    bottom.set_ylim(-0.03, 1.03)
    for axes in (top, bottom):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    _save(figure, path)


def chunks_read(path: Path, asked: Sequence[dict[str, Any]], chunks: int, shown: int = 40) -> None:
    """For some questions, which chunks of the text were read and with what weight, and where the needle lies."""
    plt = _pyplot()
    asked = sorted(asked[:shown], key=lambda record: record["needle"])
    figure, axes = plt.subplots(figsize=(7, 5))
    for row, record in enumerate(asked):
        axes.axhline(row, color="lightgrey", linewidth=0.3, zorder=0)
        selected = record["selected"][0]
        weights = record["weights"][: len(selected)]
        axes.scatter(
            selected, [row] * len(selected), s=[4 + 60 * w for w in weights], color=COLOURS[0], alpha=0.6
        )
        axes.scatter([record["needle"]], [row], marker="|", s=90, color=COLOURS[1], linewidth=1.2)
    axes.set_xlim(-0.01 * chunks, 1.01 * chunks)
    axes.set_xlabel("chunk of the text")
    axes.set_ylabel("question")
    axes.set_title("Chunks read (area: weight) and where the needle lies (orange)")
    _save(figure, path)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("figures: matplotlib is not installed. pip install matplotlib.") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    _pyplot().close(figure)
