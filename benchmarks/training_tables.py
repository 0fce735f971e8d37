"""The tables of benchmarks/training.json and training_text.json, and the figure of time by length; benchmarks/readme.py
puts them in place. A part that was not measured is left out."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tables import Column, Columns, Row, crossed, line_figure, table
from training import deviations, time_per_token
from training_text import FACTORS, difference, perplexity, word_perplexity

COLOURS = {"window only": "#777777", "full attention": "#c2571a", "DRT x1": "#1f5fa8", "DRT x2": "#3d7f3f"}


def part_texts(found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Text and environment of each part of training.json."""
    makers = {"overhead": overhead_text, "loader": loader_text, "length": length_text}
    return [
        (make(found[name]), found[name]["environment"])
        for name, make in makers.items()
        if found.get(name, {}).get("results")
    ]


def _ratios(result: Row) -> str:
    ratios = result["ratios"]
    return f"{statistics.median(ratios):.1%} ({min(ratios):.1%}-{max(ratios):.1%})"


OVERHEAD: Columns = {
    "configuration": "{config}",
    "bare loop": "{tokens_per_second[bare]:spread}",
    "trailmark train": "{tokens_per_second[trailmark]:spread}",
    "of the bare loop": _ratios,
    "a median step": "{median_step_ratio:.1%}",
    "weights after it": lambda r: "bit-equal" if r["same_weights"] else "differ",
}


def overhead_text(part: dict[str, Any]) -> str:
    parts = [f"{r['config']}: {_lost(r['milliseconds_of_a_step'])}" for r in part["results"]]
    settings = part["settings"]
    return (
        "**Overhead of `trailmark train`** (tokens/s; a step of each in turn on the same batches, "
        f"{settings['blocks']} blocks of {settings['steps']} steps, each with a checkpoint: median, lowest and "
        "highest).\n\n"
        f"{table(OVERHEAD, part['results'])}\n\n"
        f"Milliseconds of a step, ours less the bare loop's: {'; '.join(parts)}."
    )


def _lost(parts: dict[str, dict[str, float]]) -> str:
    """What is lost by part, the largest first; parts below a hundredth of a millisecond are not named."""
    own, bare = parts["trailmark"], parts["bare"]
    lost = {name: own.get(name, 0.0) - bare.get(name, 0.0) for name in {*own, *bare}}
    named = sorted(lost.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {ms:+.2f}" for name, ms in named if abs(ms) >= 0.01)


LOADER: Columns = {
    "batches of": "{what}",
    "tokens/s": "{tokens_per_second:spread}",
    "of the demo's model": "{times_the_model:,.0f}x",
}


def loader_text(part: dict[str, Any]) -> str:
    corpus = part["corpus"]
    return (
        f"**Batches alone** (tokens/s, one process; shards of {corpus['tokens']:,} tokens in {corpus['documents']:,} "
        "documents, in the page cache; the demo's model trains in a bare loop).\n\n"
        + table(LOADER, part["results"])
    )


def length_text(part: dict[str, Any]) -> str:
    apart, settings = deviations(part), part["settings"]
    rows = [
        {"model": name, "length": length, "seconds": seconds}
        for name, times in time_per_token(part).items()
        for length, seconds in times.items()
        if length in settings["lengths"]
    ]
    shown = crossed(
        rows,
        {"model": "{model}"},
        "{length:,} tokens",
        "{seconds:us ,.1f}",
        {"most from the median": lambda own: f"{apart[own[0]['model']]:.1%}"},
    )
    return (
        f"**Time per token by context length** (microseconds; forward, backward and optimizer, "
        f"{settings['tokens_per_step']:,} tokens a step, medians of {settings['rounds']} rounds).\n\n{shown}"
    )


COSTS: Columns = {
    "model": "{label}",
    "layers": "{layers}",
    "window": "{sliding_window}",
    "parameters": "{parameters:,}",
    "training": "{seconds:duration}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "memory": "{peak_bytes:size}",
    "last loss": "{training_loss:.3f}",
}


def text_text(found: dict[str, Any]) -> str:
    """Perplexity by length with intervals of the differences, and what each model cost."""
    settings, several = found["settings"], len({m["seed"] for m in found["models"]}) > 1
    lengths = {factor: f"{factor * settings['context_length']:,}" for factor in FACTORS}
    models = [
        model
        | {"label": f"{model['model']}, seed {model['seed']}" if several else model["model"]}
        | {"at": {r["factor"]: r for r in found["results"] if _same(r, model)}}
        for model in found["models"]
    ]
    pairs = [
        {"label": f"{one['label']} - {other['model']}", "one": one["at"], "other": other["at"]}
        for one in models
        for other in models
        if one["model"].startswith("DRT")
        and not other["model"].startswith("DRT")
        and one["seed"] == other["seed"]
    ]

    def at(factor: int, form: str, number: Callable[[Any], float]) -> Column:
        return lambda row: format(number(row["at"][factor]), form) if factor in row["at"] else "-"

    def apart(factor: int) -> Column:
        def shown(row: Row) -> str:
            if factor not in row["one"] or factor not in row["other"]:
                return "-"
            return "{:+.4f} ({:+.4f} to {:+.4f})".format(
                *difference(row["one"][factor], row["other"][factor])
            )

        return shown

    perplexities: Columns = {
        "model": "{label}",
        **{shown: at(factor, ".3f", perplexity) for factor, shown in lengths.items()},
        **{f"{shown} per word": at(factor, ".2f", word_perplexity) for factor, shown in lengths.items()},
    }
    differences: Columns = {
        "models": "{label}",
        **{shown: apart(factor) for factor, shown in lengths.items()},
    }
    counted = ""
    if found["results"]:
        measured = found["results"][0]
        counted = f" on {len(measured['losses'])} stretches of {lengths[FACTORS[-1]]} tokens "
        counted += f"({sum(measured['words']):,} words)"
    texts = [
        f"Trained {settings['steps']:,} steps of {settings['tokens_per_step']:,} tokens, "
        f"{settings['context_length']:,} at a time, of books of {settings['corpus_tokens']:,} tokens "
        f"(vocabulary {settings['vocabulary']:,}).\n\n{table(COSTS, models)}",
        f"Perplexity{counted}, per token and per word, by tokens read at a time.\n\n{table(perplexities, models)}",
    ]
    if pairs:
        texts.append(
            "Difference of the losses, nats per token (95% by drawing stretches anew; below 0 the DRT is better).\n\n"
            + table(differences, pairs)
        )
    return "\n\n".join(texts)


def _same(result: Row, model: Row) -> bool:
    return (result["model"], result["seed"]) == (model["model"], model["seed"])


def length_figure(path: Path, part: dict[str, Any]) -> None:
    """Like Figure 3a of arXiv 2410.01651: what a token's training step costs by context length."""
    lines = {
        name: {length: seconds * 1e6 for length, seconds in times.items()}
        for name, times in time_per_token(part).items()
    }
    ticks = {length: f"{length // 1024}K" for length in part["settings"]["lengths"]}
    titles = (
        "A training step: time per token by context length",
        "context length (tokens)",
        "microseconds per token",
    )
    line_figure(path, lines, ticks, titles, COLOURS)
