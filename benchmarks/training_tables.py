"""The tables of benchmarks/training.json and training_text.json, and the figure of time by length; benchmarks/readme.py
puts them in place. A part that was not measured is left out."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from training import deviations, time_per_token
from training_text import FACTORS, difference, perplexity, word_perplexity

from trailmark.data.files import read_json
from trailmark.report.console import duration, size
from trailmark.report.tables import markdown_table

HERE = Path(__file__).resolve().parent
COLOURS = {"window only": "#777777", "full attention": "#c2571a", "DRT x1": "#1f5fa8", "DRT x2": "#3d7f3f"}


def record(name: str) -> dict[str, Any]:
    return read_json(HERE / f"{name}.json") or {}


def spread(of: dict[str, float]) -> str:
    return f"{of['median']:,.0f} ({of['lowest']:,.0f}-{of['highest']:,.0f})"


def part_texts(found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Text and environment of each part of training.json."""
    makers = {"overhead": overhead_text, "loader": loader_text, "length": length_text, "table4": table4_text}
    return [
        (make(found[name]), found[name]["environment"])
        for name, make in makers.items()
        if found.get(name, {}).get("results")
    ]


def overhead_text(part: dict[str, Any]) -> str:
    rows, parts = [], []
    for r in part["results"]:
        rates, ratios = r["tokens_per_second"], r["ratios"]
        rows.append(
            [
                r["config"],
                spread(rates["bare"]),
                spread(rates["trailmark"]),
                f"{statistics.median(ratios):.1%} ({min(ratios):.1%}-{max(ratios):.1%})",
                f"{r['median_step_ratio']:.1%}",
                "bit-equal" if r["same_weights"] else "differ",
            ]
        )
        parts.append(f"{r['config']}: {_lost(r['milliseconds_of_a_step'])}")
    header = [
        "configuration",
        "bare loop",
        "trailmark train",
        "of the bare loop",
        "a median step",
        "weights after it",
    ]
    settings = part["settings"]
    return (
        "**Overhead of `trailmark train`** (tokens/s; a step of each in turn on the same batches, "
        f"{settings['blocks']} blocks of {settings['steps']} steps, each with a checkpoint: median, lowest and "
        "highest).\n\n"
        f"{markdown_table(header, rows)}\n\n"
        f"Milliseconds of a step, ours less the bare loop's: {'; '.join(parts)}."
    )


def _lost(parts: dict[str, dict[str, float]]) -> str:
    """What is lost by part, the largest first; parts below a hundredth of a millisecond are not named."""
    own, bare = parts["trailmark"], parts["bare"]
    lost = {name: own.get(name, 0.0) - bare.get(name, 0.0) for name in {*own, *bare}}
    named = sorted(lost.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {ms:+.2f}" for name, ms in named if abs(ms) >= 0.01)


def loader_text(part: dict[str, Any]) -> str:
    rows = [
        [r["what"], spread(r["tokens_per_second"]), f"{r['times_the_model']:,.0f}x"] for r in part["results"]
    ]
    corpus = part["corpus"]
    return (
        f"**Batches alone** (tokens/s, one process; shards of {corpus['tokens']:,} tokens in {corpus['documents']:,} "
        "documents, in the page cache; the demo's model trains in a bare loop).\n\n"
        + markdown_table(["batches of", "tokens/s", "of the demo's model"], rows)
    )


def length_text(part: dict[str, Any]) -> str:
    times, apart = time_per_token(part), deviations(part)
    lengths = part["settings"]["lengths"]
    rows = [
        [name, *(f"{of[n] * 1e6:,.1f}" for n in lengths), f"{apart[name]:.1%}"] for name, of in times.items()
    ]
    header = ["model", *(f"{n:,} tokens" for n in lengths), "most from the median"]
    return (
        f"**Time per token by context length** (microseconds; forward, backward and optimizer, "
        f"{part['settings']['tokens_per_step']:,} tokens a step, medians of {part['settings']['rounds']} rounds).\n\n"
        + markdown_table(header, rows)
    )


def table4_text(part: dict[str, Any]) -> str:
    fits: dict[tuple[str, int], dict[str, str]] = {}
    for r in part["results"]:
        cell = "out of memory"
        if not r["out_of_memory"]:
            peak = "" if r["peak_bytes"] is None else f", {size(r['peak_bytes'])}"
            again = ", checkpointed" if r["activation_checkpointing"] else ""
            cell = f"{r['tokens_per_second']['median']:,.0f}{peak}{again}"
        fits.setdefault((r["size"], r["context"]), {})[r["model"]] = cell
    names = list(dict.fromkeys(r["model"] for r in part["results"]))
    header = ["model", *(f"{label}, {context:,} tokens" for label, context in fits)]
    rows = [[name, *(of.get(name, "-") for of in fits.values())] for name in names]
    return f"**Table 4 of arXiv 2410.01651** (tokens/s, peak memory).\n\n{markdown_table(header, rows)}"


def text_text(found: dict[str, Any]) -> str:
    """Perplexity by length with intervals of the differences, and what each model cost."""
    results = {(r["model"], r["seed"], r["factor"]): r for r in found["results"]}
    models = {(m["model"], m["seed"]): m for m in found["models"]}
    settings = found["settings"]
    lengths = [factor * settings["context_length"] for factor in FACTORS]
    rows, apart, costs = [], [], []
    for (name, seed), model in models.items():
        own = [results.get((name, seed, factor)) for factor in FACTORS]
        label = f"{name}, seed {seed}" if len({m["seed"] for m in found["models"]}) > 1 else name
        rows.append(
            [
                label,
                *("-" if r is None else f"{perplexity(r):.3f}" for r in own),
                *("-" if r is None else f"{word_perplexity(r):.2f}" for r in own),
            ]
        )
        if name.startswith("DRT"):
            for other in (n for n, s in models if s == seed and not n.startswith("DRT")):
                others = [results.get((other, seed, factor)) for factor in FACTORS]
                cells = [
                    "-"
                    if a is None or b is None
                    else "{:+.4f} ({:+.4f} to {:+.4f})".format(*difference(a, b))
                    for a, b in zip(own, others, strict=True)
                ]
                apart.append([f"{label} - {other}", *cells])
        costs.append(
            [
                label,
                str(model["layers"]),
                str(model["sliding_window"]),
                f"{model['parameters']:,}",
                duration(model["seconds"]),
                f"{model['tokens_per_second']:,.0f}",
                "-" if model["peak_bytes"] is None else size(model["peak_bytes"]),
                f"{model['training_loss']:.3f}",
            ]
        )
    shown = [f"{n:,}" for n in lengths]
    measured = next(iter(results.values()), None)
    counted = ""
    if measured is not None:
        number, words = len(measured["losses"]), sum(measured["words"])
        counted = f" on {number} stretches of {lengths[-1]:,} tokens ({words:,} words)"
    texts = [
        f"Trained {settings['steps']:,} steps of {settings['tokens_per_step']:,} tokens, "
        f"{settings['context_length']:,} at a time, of books of {settings['corpus_tokens']:,} tokens "
        f"(vocabulary {settings['vocabulary']:,}).\n\n"
        + markdown_table(
            ["model", "layers", "window", "parameters", "training", "tokens/s", "memory", "last loss"], costs
        ),
        f"Perplexity{counted}, per token and per word, by tokens read at a time.\n\n"
        + markdown_table(["model", *shown, *(f"{n} per word" for n in shown)], rows),
    ]
    if apart:
        texts.append(
            "Difference of the losses, nats per token (95% by drawing stretches anew; below 0 the DRT is better).\n\n"
            + markdown_table(["models", *shown], apart)
        )
    return "\n\n".join(texts)


def length_figure(path: Path, part: dict[str, Any]) -> None:
    """Like Figure 3a of arXiv 2410.01651: what a token's training step costs by context length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, times in time_per_token(part).items():
        lengths = sorted(times)
        axes.plot(lengths, [times[n] * 1e6 for n in lengths], "o-", label=name, color=COLOURS[name])
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xticks(part["settings"]["lengths"], [f"{n // 1024}K" for n in part["settings"]["lengths"]])
    axes.set_xlabel("context length (tokens)")
    axes.set_ylabel("microseconds per token")
    axes.set_title("A training step: time per token by context length")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)
