"""The commands that measure models and show what was found."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

_ALL, _NEEDLES, _PERPLEXITY, _SUMMARIZATION, _COST = (
    f"Of {suites}" for suites in ("several suites", "needles", "perplexity", "summarization", "cost")
)


def evaluate(
    context: typer.Context,
    models: Annotated[
        list[Path],
        typer.Argument(
            help="Folders with models of trailmark's or any causal language model of transformers, hub names; with "
            "--suite cost YAML files too, for random weights of those sizes."
        ),
    ],
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="needles, perplexity, summarization or cost; again for more. Default: what a model was trained for."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for the results, which are kept one by one; default: evaluation/ in a model's own folder (of "
            "the first one for cost).",
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Files, folders or a prepared corpus; default: sources of Python's library that are for haystacks "
            "alone. Needles: repeated where it is shorter than a length."
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A field of the model's configuration, for this evaluation: retrieve_per=token."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where models compute; default: cuda if there is one.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of weights: float32, bfloat16, float16; default: as saved.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens, as 1024,16384; default: 1x, 4x, 16x the training texts (cost: 16384,49152).",
            rich_help_panel=_ALL,
        ),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            help="A paper's way to measure: paper-table-2 (needles, summarization), gca-table-1, gca-figure-3b, "
            "landmark-table-1, landmark-table-2 (perplexity).",
            rich_help_panel=_ALL,
        ),
    ] = None,
    memory_tier: Annotated[
        str | None,
        typer.Option(help="device, host or disk; default: device.", rich_help_panel=_ALL),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, max=2**32 - 1, help="Of all that is drawn at random; default: 0.", rich_help_panel=_ALL
        ),
    ] = None,
    questions: Annotated[
        int | None,
        typer.Option(min=1, help="Asked at each length and depth; default: 100.", rich_help_panel=_NEEDLES),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            help="single, multi-key, multi-value, multi-query or hops; default: single.",
            rich_help_panel=_NEEDLES,
        ),
    ] = None,
    needles: Annotated[
        int | None,
        typer.Option(min=1, help="Asked for: keys, values or chains; default: 1.", rich_help_panel=_NEEDLES),
    ] = None,
    hops: Annotated[
        int | None, typer.Option(min=1, help="Of a chain; default: 2.", rich_help_panel=_NEEDLES)
    ] = None,
    distractors: Annotated[
        int | None,
        typer.Option(min=0, help="Needles that no question needs.", rich_help_panel=_NEEDLES),
    ] = None,
    landmarks: Annotated[
        int | None,
        typer.Option(min=1, max=2, help="Between question and answer; default: 1.", rich_help_panel=_NEEDLES),
    ] = None,
    values: Annotated[
        str | None,
        typer.Option(
            help="numbers, words (of sentences) or tokens (of paper, where they are the default); default: numbers.",
            rich_help_panel=_NEEDLES,
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="How needles are written: marks, sentences or paper; default: as in training, else sentences.",
            rich_help_panel=_NEEDLES,
        ),
    ] = None,
    depths: Annotated[
        str | None,
        typer.Option(
            help="Where needles lie, from 0 (the text's start) to 1, as 0,0.5,1; default: anywhere.",
            rich_help_panel=_NEEDLES,
        ),
    ] = None,
    phases: Annotated[
        str | None,
        typer.Option(
            help="end: the chunk that a question closes is full; any: it is as long as it happens; default: any.",
            rich_help_panel=_NEEDLES,
        ),
    ] = None,
    memory_dtype: Annotated[
        str | None,
        typer.Option(
            help="Of keys and values in memory (needles, cost): float32, bfloat16, float16; default: the model's.",
            rich_help_panel=_ALL,
        ),
    ] = None,
    memory_folder: Annotated[
        Path | None,
        typer.Option(
            help="Of --memory-tier disk: where each haystack's memory lies meanwhile; default: a temporary folder.",
            rich_help_panel=_NEEDLES,
        ),
    ] = None,
    windows: Annotated[
        str | None,
        typer.Option(help="windows, sliding or documents; default: windows.", rich_help_panel=_PERPLEXITY),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Of sliding windows; default: half of one.", rich_help_panel=_PERPLEXITY),
    ] = None,
    carry: Annotated[
        bool,
        typer.Option(
            "--carry", help="One memory for all windows; else each is cold.", rich_help_panel=_PERPLEXITY
        ),
    ] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Of the text that are read; default: 65,536, under a protocol all.",
            rich_help_panel=_PERPLEXITY,
        ),
    ] = None,
    pairs: Annotated[
        list[Path] | None,
        typer.Option(
            help="Documents and summaries: .jsonl, .parquet, or a folder that trailmark prepare --pairs made.",
            rich_help_panel=_SUMMARIZATION,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Documents; default: all.", rich_help_panel=_SUMMARIZATION),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a summary; default: 128.", rich_help_panel=_SUMMARIZATION)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, help="0: always the likeliest token; default: 0.", rich_help_panel=_SUMMARIZATION
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(min=1, help="Sample among so many; default: all.", rich_help_panel=_SUMMARIZATION),
    ] = None,
    context_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of a document and its summary, the rest is cut; default: as in training.",
            rich_help_panel=_SUMMARIZATION,
        ),
    ] = None,
    tiers: Annotated[
        str | None,
        typer.Option(help="Of memory, to compare; default: device,host.", rich_help_panel=_COST),
    ] = None,
    generate: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens after each prompt; default: 128.", rich_help_panel=_COST),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Of all models in turn; default: 7.", rich_help_panel=_COST),
    ] = None,
    training_lengths: Annotated[
        str | None,
        typer.Option(help="Context lengths at which training is measured too.", rich_help_panel=_COST),
    ] = None,
) -> None:
    """Needles, perplexity, summaries and cost, with intervals. The same command goes on where it stopped."""
    from trailmark.evaluation.evaluate import evaluate as run
    from trailmark.evaluation.evaluate import parse_numbers
    from trailmark.report.console import Progress
    from trailmark.report.tables import result_table

    progress = Progress()

    def say(message: str) -> None:
        progress.clear()
        typer.echo(message)

    options = {
        "lengths": parse_numbers("lengths", lengths),
        "protocol": protocol,
        "memory_tier": memory_tier,
        "memory_dtype": memory_dtype,
        "memory_folder": memory_folder,
        "seed": seed,
        "questions": questions,
        "kind": kind,
        "needles": needles,
        "hops": hops,
        "distractors": distractors,
        "landmarks": landmarks,
        "values": values,
        "format": form,
        "depths": parse_numbers("depths", depths, float),
        "phases": phases,
        "windows": windows,
        "stride": stride,
        "carry": carry or None,
        "max_tokens": max_tokens,
        "pairs": tuple(pairs) if pairs else None,
        "limit": limit,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "context_length": context_length,
        "tiers": tuple(tiers.split(",")) if tiers else None,
        "generate": generate,
        "rounds": rounds,
        "training_lengths": parse_numbers("training_lengths", training_lengths),
    }
    command = shlex.join(["trailmark", *context.obj])
    written = []
    asked = run(
        models, suite or (), options, text, changes or (), output, device, dtype, command, say, progress.show
    )
    for found in asked:
        names = ", ".join(subject.name for subject in found.subjects)
        say(
            f"\n{found.suite} of {names}\n\n{result_table(found.suite, found.results, found.subjects[0].train_length)}"
        )
        for result in found.results:
            if result.get("skipped_share") is not None:
                say(
                    f"{result['length']:,} tokens: the gate skipped {result['skipped_share']:.1%} of the retrievals"
                )
        written.append(found.record.path)
    say("\nNumbers: " + ", ".join(map(str, written)))
    say(
        f"Next: trailmark report {shlex.join(dict.fromkeys(str(path.parent) for path in written))} -o report.html"
    )


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders or files with results: models, demos, evaluations.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
) -> None:
    """One page of all that was measured: tables, figures, settings, how to reproduce each."""
    from trailmark.report.console import Progress
    from trailmark.report.page import build

    progress = Progress()

    def say(message: str) -> None:
        progress.clear()
        typer.echo(message)

    build(runs, output, say, progress.show)
    progress.clear()
