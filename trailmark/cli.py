"""The commands. Each parses, calls and prints; what it does lies in the floors below."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="trailmark",
    help="Language models that read millions of tokens through a constant attention window.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1)]
# glibc's defaults give freed memory back page by page
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "67108864",
}
# the commands that go on where they stopped
_RESUMING = {"demo", "prepare", "neighbours", "targets", "train", "read"}


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for models, figures and numbers.")] = Path("runs/demo"),
    minutes: Annotated[float | None, typer.Option(help="Time for both trainings; fixes the steps.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Of weights, texts, needles and haystacks.")
    ] = 0,
    questions: Annotated[int, typer.Option(help="Asked at each length.")] = 300,
) -> None:
    """Train on this machine, then read 1000x further: the main job in about ten minutes."""
    from trailmark.demo import Demo

    Demo(output, seed, minutes, questions, typer.echo).run()


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A YAML file; see configs/.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would cost, take one step, write nothing.")
    ] = False,
) -> None:
    """Train a model. The same command goes on where it stopped; torchrun or accelerate launch start several."""
    from trailmark.evaluation.during_training import needle_accuracy
    from trailmark.report.console import Progress, duration, measured, training_line
    from trailmark.training.config import load_run_config
    from trailmark.training.forecast import forecast
    from trailmark.training.processes import is_main, part
    from trailmark.training.run import Run

    settings = load_run_config(config, overrides or [])
    progress = Progress()

    def say(message: str) -> None:
        if is_main():
            progress.clear()
            typer.echo(message)

    def show(run: Run) -> None:
        total = settings.training.steps
        progress.show(training_line(run.step, total, run.seconds, run.averages, run.tokens_per_second))

    data, asks = settings.data, None
    if data.task == "needles" and settings.training.eval_steps is not None and not dry_run:
        asks = needle_accuracy(data.chunk_size, data.tokenizer, seed=settings.training.seed)
    run = Run(settings, show, evaluate=asks, say=say)
    text = ", ".join(data.paths or ["the Python standard library"])
    amount = f"{run.num_tokens:,} tokens of {text}" if run.num_tokens else text
    steps = f"{settings.training.steps} steps of {settings.training.tokens_per_step:,} tokens"
    if dry_run:
        say(f"{amount}: {steps}. Estimating, from the sizes alone ...")
        for line in forecast(run):
            say(line)
        return
    count = sum(p.numel() for p in run.model.parameters())
    say(
        f"Training {type(run.model).__name__} ({count:,} parameters) on {amount}: {steps}, into {settings.output}/"
    )
    if run.finished:
        say(f"Trained already. The model lies in {settings.output}/.")
        return
    model = run.train()
    part()
    if model is None:
        say(f"Stopped and saved at step {run.step}. The same command goes on from here.")
        return
    speed, averages = f"{run.tokens_per_second:,.0f} tokens/s", measured(run.averages)
    say(f"Trained in {duration(run.seconds)}, {speed}: {averages}")
    say(f"The model lies in {settings.output}/. Next: trailmark evaluate {settings.output}")


@app.command()
def evaluate(
    model: Annotated[Path, typer.Argument(help="A folder with a trailmark model.")],
    task: Annotated[
        str | None, typer.Option(help="needles, perplexity or both; default: what it was trained for.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens, as 1024,16384; default: 1x, 4x, 16x the training texts. Needles take whole chunks of it."
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Files or folders; default: sources of Python's library that are for haystacks alone. "
            "Needles: repeated where it is shorter than a length."
        ),
    ] = None,
    questions: Annotated[int, typer.Option(help="Needles: asked at each length.")] = 100,
    needles: Annotated[int, typer.Option(help="Needles: hidden at once, all asked.")] = 1,
    phases: Annotated[
        str, typer.Option(help="Needles: questions stop at the end of a chunk, or at any place in it.")
    ] = "any",
    memory_tier: Annotated[str, typer.Option(help="Needles: device, host or disk.")] = "device",
    seed: Seed = 0,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A field of the model's configuration, for this evaluation: retrieve_per=token."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="JSON, kept after each length; default: MODEL/evaluation.json.")
    ] = None,
) -> None:
    """Needles and perplexity by length."""
    from trailmark.evaluation import evaluate as evaluation
    from trailmark.report.console import Progress
    from trailmark.report.tables import needle_table, perplexity_table

    progress = Progress()
    path = output or model / "evaluation.json"
    subject = evaluation.load(model, changes or ())
    evaluation.expect_output(path)
    asked = evaluation.parse_lengths(lengths) if lengths else None
    tasks = evaluation.parse_task(task) if task else subject.default_tasks()
    if seen := subject.trained_on(text):
        typer.echo(f"Mind: the model was trained on {seen}; what it says of that tells little of other text.")
    tokens = subject.tokens(text)
    wanted = asked or subject.default_lengths(tasks, len(tokens))
    if not asked and wanted != subject.default_lengths():
        typer.echo(
            f"The text has {len(tokens):,} tokens: asked up to {wanted[-1]:,}. More --text goes further."
        )
    record = evaluation.run(
        subject, tokens, tasks, wanted, questions, needles, seed, progress.show, path, phases, memory_tier
    )
    progress.clear()
    if record["needles"]:
        typer.echo(needle_table([r | {"model": model.name} for r in record["needles"]], subject.train_length))
    if record["perplexity"]:
        typer.echo(perplexity_table(record["perplexity"]))
        for found in record["perplexity"]:
            if "skipped_share" in found:
                typer.echo(
                    f"{found['length']:,} tokens: the gate skipped {found['skipped_share']:.1%} of "
                    f"{found['retrievals']:,} retrievals"
                )
    typer.echo(f"Numbers: {evaluation.save(record, path)}")


@app.command()
def read(
    model: Annotated[Path, typer.Argument(help="A folder with a trailmark model.")],
    files: Annotated[list[Path], typer.Argument(help="Text files of any length, read one after the other.")],
    memory: Annotated[Path, typer.Option(help="Folder for the memory; one that is there is read on.")],
    memory_dtype: Annotated[
        str | None,
        typer.Option(help="Of keys and values: float32, bfloat16 or float16; default: the model's."),
    ] = None,
) -> None:
    """Read texts once and keep what was read. The same command goes on where it stopped."""
    from trailmark.evaluation import evaluate as evaluation
    from trailmark.evaluation.reading import Reader, parse_dtype, resident_bytes
    from trailmark.report.console import Progress, duration, size

    progress = Progress()

    def show(reader: Reader) -> None:
        progress.show(
            f"{reader.path.name}: {reader.num_tokens:,} tokens in memory, {reader.tokens_per_second:,.0f} tokens/s, "
            f"{size(reader.cache.memory_bytes())} on disk, {size(resident_bytes())} in RAM"
        )

    reader = Reader(evaluation.load(model), memory, parse_dtype(memory_dtype), show)
    for file in files:
        before = reader.num_tokens
        fresh = reader.read(file)
        progress.clear()
        found = f"{reader.num_tokens - before:,} tokens read" if fresh else "read already"
        typer.echo(f"{file}: {found}")
    took = f" {duration(reader.seconds)}, {reader.tokens_per_second:,.0f} tokens/s." if reader.seconds else ""
    typer.echo(
        f"The memory of {reader.num_tokens:,} tokens lies in {memory}/ ({size(reader.cache.memory_bytes())}).{took}\n"
        f"Next: trailmark generate {model} --memory {memory} --prompt ..."
    )


@app.command()
def verify(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A memory, a corpus, a neighbour table, a checkpoint, or a run with checkpoints."
        ),
    ],
) -> None:
    """Compare every byte of what was saved with what was written."""
    from trailmark.report.console import Progress, size
    from trailmark.training.verification import verify as verify_folder

    progress = Progress()
    whole = verify_folder(
        folder, lambda done, total: progress.show(f"{size(done)} of {size(total)} compared")
    )
    progress.clear()
    for name in whole:
        typer.echo(f"{name}: whole, every byte is as it was written.")


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(help="A folder with a trailmark model.")],
    prompt: Annotated[
        str | None, typer.Option(help="What to go on from; default: the end of --file.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="A text file to read before the prompt, of any length.")
    ] = None,
    memory: Annotated[
        Path | None, typer.Option(help="A memory that trailmark read made, to go on from; it stays as it is.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 0.0,
    seed: Seed = 0,
) -> None:
    """Continue a prompt, after a memory or a text of any length."""
    from trailmark.evaluation import evaluate as evaluation
    from trailmark.evaluation import generation

    subject = evaluation.load(model)
    for piece in generation.stream(subject, prompt, file, memory, max_new_tokens, temperature, seed):
        typer.echo(piece, nl=False)
    typer.echo()


@app.command()
def doctor() -> None:
    """Check this installation: versions, what is used for what, exactness of the ops, speed, space."""
    from trailmark.evaluation.doctor import examine

    healthy = True
    for check in examine():
        typer.echo(f"{'ok ' if check.passed else 'NOT'}  {check.name}: {check.finding}")
        healthy = healthy and check.passed
    if not healthy:
        raise typer.Exit(1)


def main(arguments: list[str] | None = None) -> None:
    """Run a command; a user's mistake is one line, not a traceback."""
    from_shell = arguments is None
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if from_shell:  # a program that calls this is not started again
            keep_freed_memory(arguments)
        _quiet()
        if code := app(args=arguments, standalone_mode=False):  # typer turns exits into codes
            if code == 130:
                raise KeyboardInterrupt
            sys.exit(code)
    except (KeyboardInterrupt, typer.Abort):
        resumes = _RESUMING.intersection(arguments[:1])
        _fail("Stopped. The same command goes on from here." if resumes else "Stopped.", 130)
    except Exception as error:
        message = _explain(error)
        if message is None:
            raise
        if not message:  # no command: its help has been shown
            sys.exit(2)
        _fail(message, 1)


def _explain(error: Exception) -> str | None:
    """One line for what a user can mend; None for what is our own mistake."""
    if isinstance(error, ValueError):
        return str(error)
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way_out = ". Free some space and start the same command again; what was saved before is whole."
        return f"{error.strerror or error}{where}{way_out if full else ''}"
    if type(error).__module__.startswith(("typer", "click")):
        return getattr(error, "format_message", lambda: str(error))()
    return None


def _fail(message: str, code: int) -> None:
    sys.stderr.write(f"\ntrailmark: {' '.join(message.split())}\n")
    sys.exit(code)


def _quiet() -> None:
    """No progress bars and advice of libraries between our own lines."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def keep_freed_memory(arguments: list[str]) -> None:
    """Start again with glibc told to keep freed memory: training in eager mode is 1.3 to 4 times faster.

    glibc reads these settings once, when a process starts. Elsewhere (macOS, musl) they mean nothing.
    """
    heavy = {"demo", "targets", "train", "evaluate", "read", "generate"}
    if not sys.platform.startswith("linux") or not heavy.intersection(arguments[:1]):
        return
    if any(name in os.environ for name in KEEP_FREED_MEMORY) or "GLIBC_TUNABLES" in os.environ:
        return
    os.environ.update(KEEP_FREED_MEMORY)
    # as it was started: "-m" instead of the installed script would put the user's folder on the import path
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    main()
