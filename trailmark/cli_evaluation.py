"""The commands that measure models and show what was found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_NEEDLES, _PERPLEXITY, _SUMMARIZATION, _COST = (
    f"--suite {name}" for name in ("needles", "perplexity", "summarization", "cost")
)


def evaluate(
    models: Annotated[
        list[Path],
        typer.Argument(
            help="Folders with trailmark models, or any causal language model of transformers by folder or hub name; "
            "cost: YAML files too, for random weights of those sizes."
        ),
    ],
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="needles, perplexity, summarization, cost; several times for several. Default: what each model was "
            "trained for."
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens, as 1024,16384; default: 1x, 4x, 16x the training texts (cost: 16384,49152). Needles take "
            "whole chunks of it."
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Files, folders or a prepared corpus; default: sources of Python's library that are for haystacks "
            "alone. Needles: repeated where it is shorter than a length."
        ),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(help="A paper's: paper-table-2, gca-table-1, gca-figure-3b, landmark-table-1."),
    ] = None,
    memory_tier: Annotated[str, typer.Option(help="device, host or disk.")] = "device",
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1)] = 0,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A field of the model's configuration, for this evaluation: retrieve_per=token."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the results, kept after each; default: evaluation/ in the model's folder (of the first "
            "one for cost). The same command goes on."
        ),
    ] = None,
    questions: Annotated[
        int, typer.Option(min=1, help="Asked for each length and depth.", rich_help_panel=_NEEDLES)
    ] = 100,
    kind: Annotated[
        str,
        typer.Option(
            help="single, multi-key, multi-value, multi-query or hops.", rich_help_panel=_NEEDLES
        ),
    ] = "single",
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="marks, sentences or paper; default: what the model was trained on, else sentences.",
            rich_help_panel=_NEEDLES,
        ),
    ] = None,
    values: Annotated[str, typer.Option(help="numbers or words.", rich_help_panel=_NEEDLES)] = "numbers",
    needles: Annotated[
        int | None,
        typer.Option(min=1, help="Hidden at once; default: 1, or 4 where a kind needs several.", rich_help_panel=_NEEDLES),
    ] = None,
    hops: Annotated[int, typer.Option(min=1, help="Needles of a chain.", rich_help_panel=_NEEDLES)] = 2,
    distractors: Annotated[
        int, typer.Option(min=0, help="Needles that nobody asks for.", rich_help_panel=_NEEDLES)
    ] = 0,
    landmarks: Annotated[
        int,
        typer.Option(min=1, max=2, help="Between question and answer.", rich_help_panel=_NEEDLES),
    ] = 1,
    depths: Annotated[
        str | None,
        typer.Option(
            help="Where needles lie, from 0 (the start) to 1, as 0,0.5,1; default: anywhere.",
            rich_help_panel=_NEEDLES,
        ),
    ] = None,
    phases: Annotated[
        str,
        typer.Option(
            help="Questions stop at the end of a chunk, or at any place in it.", rich_help_panel=_NEEDLES
        ),
    ] = "any",
    windows: Annotated[
        str, typer.Option(help="windows, sliding or documents.", rich_help_panel=_PERPLEXITY)
    ] = "windows",
    stride: Annotated[
        int | None, typer.Option(min=1, help="Of sliding windows, tokens.", rich_help_panel=_PERPLEXITY)
    ] = None,
    carry: Annotated[
        bool,
        typer.Option("--carry", help="One memory for all windows; else each is cold.", rich_help_panel=_PERPLEXITY),
    ] = False,
    max_tokens: Annotated[
        int, typer.Option(min=2, help="Of the text that are scored.", rich_help_panel=_PERPLEXITY)
    ] = 1 << 16,
    pairs: Annotated[
        list[Path] | None,
        typer.Option(help="Files of documents and summaries, .jsonl or .parquet.", rich_help_panel=_SUMMARIZATION),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Documents; default: all.", rich_help_panel=_SUMMARIZATION)
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Of a summary.", rich_help_panel=_SUMMARIZATION)
    ] = 128,
    tiers: Annotated[str, typer.Option(help="Of memory, compared.", rich_help_panel=_COST)] = "device,host",
    generated: Annotated[
        int, typer.Option(min=1, help="Tokens after each prompt.", rich_help_panel=_COST)
    ] = 128,
    training_lengths: Annotated[
        str | None,
        typer.Option(help="Context lengths at which training is measured too.", rich_help_panel=_COST),
    ] = None,
) -> None:
    """Needles, perplexity, summaries and cost, with intervals, as tables and JSON."""


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders or files with results: models, demos, evaluations.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
) -> None:
    """One page of all that was measured: tables, figures, settings, how to reproduce each."""
