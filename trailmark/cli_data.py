"""The commands that make data: corpora, neighbour tables, target scores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Files and folders (.txt, .jsonl, .parquet, ...), hub:owner/name, or pg19, arxiv-math, xsum, "
            "cnn-dailymail."
        ),
    ],
    output: Annotated[
        Path, typer.Option(help="Folder for the shards; one that is unfinished is gone on with.")
    ],
    tokenizer: Annotated[str, typer.Option(help="bytes, a folder, or a hub name.")] = "bytes",
    column: Annotated[str | None, typer.Option(help="Of JSON lines, Parquet and hub data: the text.")] = None,
    summary_column: Annotated[str | None, typer.Option(help="With --pairs: the summaries.")] = None,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Write pairs of document and summary, to fine-tune on.")
    ] = False,
    where: Annotated[str | None, typer.Option(help="column=value: only such rows.")] = None,
    name: Annotated[str | None, typer.Option(help="Of a hub dataset: its configuration.")] = None,
    split: Annotated[str | None, typer.Option(help="Of a hub dataset or recipe.")] = None,
    revision: Annotated[str | None, typer.Option(help="Of a hub dataset: commit, branch or tag.")] = None,
    streaming: Annotated[bool, typer.Option(help="Read a hub dataset without storing it.")] = False,
    processes: Annotated[int | None, typer.Option(min=1, help="Default: one per core.")] = None,
    end_of_text: Annotated[
        bool, typer.Option(help="End documents with the tokenizer's token for that.")
    ] = True,
) -> None:
    """Tokenise text into shards to train on. The same command goes on where it stopped."""
    from trailmark.data import prepare as preparing
    from trailmark.data.recipes import parse_source
    from trailmark.report.console import Progress, preparing_line

    progress = Progress()

    def show(state: preparing.Progress) -> None:
        progress.show(preparing_line(state.documents, state.tokens, state.done, state.total, state.seconds))

    source = parse_source(
        sources,
        column=column,
        summary_column=summary_column,
        config=name,
        split=split,
        revision=revision,
        streaming=streaming,
        where=where,
    )
    if pairs:
        path = preparing.prepare_pairs(source, output, progress=show)
        progress.clear()
        typer.echo(f"The pairs lie in {path}. Next: trailmark train configs/finetune-summarization.yaml")
        return
    corpus = preparing.prepare(
        source, output, tokenizer, processes=processes, end_of_text=end_of_text, progress=show
    )
    progress.clear()
    typer.echo(
        f"{len(corpus):,} tokens of {corpus.documents:,} documents lie in {output}/.\n"
        f"Next: trailmark train configs/text.yaml data.paths={output} data.tokenizer={tokenizer}"
    )


def neighbours(
    corpus: Annotated[
        Path, typer.Argument(help="A folder that trailmark prepare made, or text as training reads it.")
    ],
    output: Annotated[
        Path, typer.Argument(help="Folder for the table; one that is unfinished is gone on with.")
    ],
    embedder: Annotated[
        str,
        typer.Option(
            help="hash, hash:DIM, bm25 (counts the corpus first), bm25:FILE, transformers:FOLDER or "
            "sentence-transformers:FOLDER."
        ),
    ],
    context_length: Annotated[int, typer.Option(min=1, help="Tokens of a training window.")],
    chunk_size: Annotated[int, typer.Option(min=1, help="Tokens of a chunk, as the model has them.")],
    count: Annotated[int, typer.Option(min=1, help="Neighbours of each chunk.")] = 8,
    architecture: Annotated[str, typer.Option(help="rpt or drt: which positions read them.")] = "rpt",
    window: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The model's sliding_window, where it excludes wholly visible chunks; default: none is excluded.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="bytes, a folder, or a hub name; default: the corpus' own.")
    ] = None,
    scores: Annotated[str | None, typer.Option(help="Keep the products too: float32 or float16.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Where an encoder computes; default: cuda if there is one.")
    ] = None,
) -> None:
    """Find each chunk's neighbours once, so that training never waits for an encoder."""
    from trailmark.data.neighbour_files import TableProgress
    from trailmark.data.neighbour_run import make_table
    from trailmark.data.neighbours import Rule
    from trailmark.report.console import Progress, bar, size, table_line

    progress = Progress()

    def show(state: TableProgress) -> None:
        progress.show(table_line(state.done, state.total, state.kept, state.chunks, state.seconds))

    table = make_table(
        [corpus],
        output,
        embedder,
        context_length=context_length,
        chunk_size=chunk_size,
        count=count,
        rule=Rule.of(architecture, chunk_size, window),
        tokenizer=tokenizer,
        scores=scores,
        device=device,
        say=typer.echo,
        progress=show,
        fitting=lambda done, total: progress.show(f"{bar(done, total)} {done:,}/{total:,} tokens"),
    )
    progress.clear()
    typer.echo(
        f"The neighbours of {table.windows * table.chunks:,} chunks lie in {output}/ ({size(table.bytes)}).\n"
        f"Next: trailmark train CONFIG model.architecture={architecture} model.retriever=encoder model.embedder=null "
        f"model.num_retrieved_chunks={count} {_as_in_table(corpus, output, context_length, chunk_size, window)}"
    )


def targets(
    corpus: Annotated[
        Path, typer.Argument(help="A folder that trailmark prepare made, or text as training reads it.")
    ],
    output: Annotated[
        Path, typer.Argument(help="Folder for the table; one that is unfinished is gone on with.")
    ],
    model: Annotated[
        str, typer.Option(help="The reference that scores: a causal language model's folder or hub name.")
    ],
    context_length: Annotated[int, typer.Option(min=1, help="Tokens of a training window.")],
    chunk_size: Annotated[int, typer.Option(min=1, help="Tokens of a chunk, as the RPT has them.")],
    count: Annotated[int, typer.Option(min=1, help="Candidates of each chunk that BM25 finds.")] = 20,
    window: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The RPT's sliding_window, if it excludes chunks that are wholly visible; default: none is excluded.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="bytes, a folder, or a hub name; default: the corpus' own.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts that the reference scores at a time.")] = 16,
    device: Annotated[
        str | None, typer.Option(help="Where it computes; default: cuda if there is one.")
    ] = None,
) -> None:
    """Say how much each chunk helps to predict the next one: what an RPT's retriever learns from."""
    from trailmark.data.neighbour_files import TableProgress
    from trailmark.data.neighbours import Rule
    from trailmark.evaluation.targets import make_targets
    from trailmark.report.console import Progress, table_line

    progress = Progress()

    def show(state: TableProgress) -> None:
        progress.show(table_line(state.done, state.total, state.kept, state.chunks, state.seconds))

    table = make_targets(
        [corpus],
        output,
        model,
        context_length=context_length,
        chunk_size=chunk_size,
        count=count,
        rule=Rule.of("rpt", chunk_size, window),
        tokenizer=tokenizer,
        device=device,
        batch_size=batch_size,
        say=typer.echo,
        progress=show,
    )
    progress.clear()
    typer.echo(
        f"The target scores of {table.windows * table.chunks:,} chunks lie in {output}/.\n"
        f"Next: trailmark train CONFIG model.architecture=rpt model.retriever=learned "
        f"{_as_in_table(corpus, output, context_length, chunk_size, window)}"
    )


def _as_in_table(corpus: Path, table: Path, context_length: int, chunk_size: int, window: int | None) -> str:
    """The settings of a training that a neighbour table decides."""
    seen = "false" if window is None else f"true model.sliding_window={window}"
    return (
        f"model.chunk_size={chunk_size} model.exclude_visible_chunks={seen} training.context_length={context_length} "
        f"data.paths={corpus} data.neighbours={table} data.early_landmarks=0"
    )
