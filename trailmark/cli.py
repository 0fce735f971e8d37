"""The commands. Each parses, calls and prints; what it does lies in the floors below."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from trailmark import __version__, cli_chat, cli_convert, cli_data, cli_evaluation, cli_explore, cli_serve
from trailmark.evaluation.suite import (
    changes_setting,
    device_setting,
    dtype_setting,
    tier_setting,
    tiers_in_folders,
)
from trailmark.files import is_no_space
from trailmark.machine import start_again_set_up
from trailmark.settings import Settings, setting, takes

app = typer.Typer(
    name="trailmark",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# what libraries warn of that no user can act on: the message, its category, the module that is blamed
_NOT_FOR_USERS: tuple[tuple[str, type[Warning], str], ...] = (
    # what is passed there is transformers' choice
    (r"`broadcast_buffers` is deprecated", FutureWarning, r"accelerate\.accelerator"),
    # nothing of ours writes into what a model returns
    (
        r"FSDP2-wrapped module \(FSDP\w+ForCausalLM\) returned a view tensor",
        UserWarning,
        r"torch\.distributed\.fsdp\._fully_shard\._fsdp_state",
    ),
)
# the commands that compute for long
_HEAVY = {"demo", "targets", "train", "evaluate", "read", "explore", "generate", "chat", "serve"}
# the commands that go on where they stopped
_RESUMING = {"demo", "prepare", "neighbours", "targets", "train", "evaluate", "read"}


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"trailmark {__version__}")
        raise typer.Exit


_FIRST = """\
Language models that read millions of tokens through a constant attention window.

See it work: two models are trained and asked, in about ten minutes.

    trailmark demo

Ask a pretrained model about a long text; its weights come from the hub, which needs the network once.

    trailmark convert HuggingFaceTB/SmolLM2-135M-Instruct --to hils -o models/hils
    trailmark read models/hils book.txt --memory memories/book
    trailmark chat models/hils --memory memories/book

Train on your own files.

    trailmark train configs/text.yaml data.paths=my-folder output=runs/mine

All commands: trailmark --help"""


@app.callback()
def trailmark(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and leave.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Language models that read millions of tokens through a constant attention window."""
    if context.invoked_subcommand is None:
        typer.echo(_FIRST)


@dataclass(frozen=True)
class DemoSettings(Settings):
    """The options of ``trailmark demo``."""

    output: Path = setting(Path("runs/demo"), "Folder for models, figures and numbers.")
    minutes: float | None = setting(
        None, "About so long for both trainings, at most.", default="the whole recipe, whatever it takes"
    )
    seed: int = setting(0, "Seed of weights, texts, needles and haystacks.", least=0, most=2**32 - 1)
    questions: int = setting(300, "Questions at each length.")


@app.command()
@takes(DemoSettings)
def demo(settings: DemoSettings) -> None:
    """Train on this machine, then read 1000x further: the main job in about ten minutes."""
    from trailmark.demo import Demo
    from trailmark.report.console import Progress

    Demo(settings.output, settings.seed, settings.minutes, settings.questions, Progress().say).run()


app.command()(cli_data.prepare)
app.command()(cli_data.neighbours)
app.command()(cli_data.targets)
app.command()(cli_convert.convert)


@dataclass(frozen=True)
class TrainSettings(Settings):
    """The options of ``trailmark train``."""

    config: Path = setting(help="A YAML file; see configs/.", argument=True)
    overrides: tuple[str, ...] = setting((), "key=value ...", argument=True)
    dry_run: bool = setting(
        False, "Say what it would cost, take one step, write nothing.", option="--dry-run"
    )


@app.command()
@takes(TrainSettings)
def train(settings: TrainSettings) -> None:
    """Train a model. The same command goes on where it stopped; torchrun or accelerate launch start several."""
    from trailmark.evaluation.needles.ask import needle_accuracy
    from trailmark.models.conversion.additions import ADDITIONS
    from trailmark.processes import is_main, leave, part
    from trailmark.report.console import Progress, duration, losses, size, training_line
    from trailmark.training.config import load_run_config
    from trailmark.training.forecast import forecast
    from trailmark.training.run import Run

    config = load_run_config(settings.config, settings.overrides)
    progress = Progress(quiet=not is_main())

    def show(run: Run) -> None:
        total = config.training.steps
        last, speed = run.measured.get("step_loss"), run.tokens_per_second
        progress.show(training_line(run.step, total, run.seconds, last, run.averages, speed))

    data, asks = config.data, None
    if data.task == "needles" and config.training.eval_steps is not None and not settings.dry_run:
        asks = needle_accuracy(data.chunk_size, data.tokenizer, seed=config.training.seed)
    run = Run(config, show, evaluate=asks, say=progress.say)
    text = ", ".join(data.paths or ["the Python standard library"])
    amount = f"{run.num_tokens:,} tokens of {text}" if run.num_tokens else text
    steps = f"{config.training.steps} steps of {config.training.tokens_per_step:,} tokens"
    if settings.dry_run:
        progress.say(f"{amount}: {steps}. Estimating, from the sizes alone ...")
        for line in forecast(run):
            progress.say(line)
        return
    finished = run.finished
    if not finished:
        run.sharing.expect_groups()
    count = sum(p.numel() for p in run.model.parameters())
    name = type(run.model).__name__
    progress.say(f"Training {name} ({count:,} parameters) on {amount}: {steps}, into {config.output}/")
    if finished:
        progress.say(f"Trained already. The model lies in {config.output}/.")
        return
    model = run.train()
    parted = part()
    if model is None:
        progress.say(f"Stopped and saved at step {run.step}. The same command goes on from here.")
    else:
        progress.say(
            f"Trained in {duration(run.seconds)}, {run.tokens_per_second:,.0f} tokens/s. At the last step:"
        )
        progress.say(f"  {losses(run.measured.get('step_loss'), run.averages)}")
        progress.say(f"The model lies in {config.output}/. Next: trailmark evaluate {quote(config.output)}")
        if (file := Path(config.output) / ADDITIONS).exists():
            progress.say(
                f"What it learned, apart from its base: {file} ({size(file.stat().st_size)}; docs/convert.md)."
            )
    if parted:
        leave()


app.command()(cli_evaluation.evaluate)
app.command()(cli_evaluation.report)


@dataclass(frozen=True)
class ReadSettings(Settings):
    """The options of ``trailmark read``."""

    model: Path = setting(help="A folder with a trailmark model.", argument=True)
    files: tuple[Path, ...] = setting(
        help="Text files of any length, read one after the other.", argument=True
    )
    memory: Path = setting(help="Folder for the memory; one that is there is read on.")
    memory_tier: str = tier_setting("disk", tiers_in_folders, "on disk")
    memory_dtype: str | None = dtype_setting()
    device: str | None = device_setting()
    trace: Path | None = setting(
        None,
        "A file for what each chunk read of its past and what each token cost with it and without, as JSON lines "
        "(docs/trace.md). Slower: all layers run, and once more without retrieval.",
    )


@app.command()
@takes(ReadSettings)
def read(settings: ReadSettings) -> None:
    """Read texts once and keep what was read. The same command goes on where it stopped; torchrun starts several."""
    from trailmark.evaluation.parted_reading import parts_of, remove_parts
    from trailmark.evaluation.reading import Reader, expect_dtype, parse_dtype, resident_bytes
    from trailmark.evaluation.subject import load, own_device
    from trailmark.memory.saved import MANIFEST
    from trailmark.processes import is_main, together, world_size
    from trailmark.report.console import Progress, duration, size

    several, parts = world_size() > 1, parts_of(settings.memory)
    if several or parts.exists():
        if not os.path.lexists(settings.memory / MANIFEST):  # also one goes on with what several began
            if settings.trace is not None:
                begun = "" if several else f" (remove {str(parts)!r}, which several have left)"
                raise ValueError(
                    "trace: expected none with several processes, each of which reads parts of the text. "
                    f"Trace with one{begun}."
                )
            with together():
                _read_with_all(settings)
            return
        if not is_main():  # what is there already is read on by one
            return
        remove_parts(settings.memory)  # left by processes that were killed at the very end
    progress, memory, trace = Progress(), settings.memory, settings.trace
    and_traced = "" if trace is None else " and traced"

    def show(reader: Reader) -> None:
        left, speed = max(0, reader.tokens_left), reader.tokens_per_second
        progress.show(
            f"{reader.path.name}: {reader.num_tokens:,} of about {reader.num_tokens + left:,} tokens in memory"
            f"{and_traced}, {speed:,.0f}/s, {duration(left / max(speed, 1e-9))} left, "
            f"{size(reader.cache.memory_bytes())} on disk, {size(resident_bytes())} in RAM"
        )

    dtype, tier = parse_dtype(settings.memory_dtype), settings.memory_tier
    typer.echo(f"Reading with {settings.model}", err=True)  # the first tokens may take a minute
    subject = load(settings.model, device=own_device(settings.device))
    with Reader(subject, memory, dtype, show, trace, memory_tier=tier) as reader:
        expect_dtype(reader.cache, dtype, memory)
        for file in settings.files:
            before = reader.num_tokens
            try:
                fresh = reader.read(file)
            except KeyboardInterrupt:
                if reader.tokens_saved:
                    progress.say(f"{reader.tokens_saved:,} tokens are saved in {memory}/.")
                raise
            read_now = f"{reader.num_tokens - before:,} tokens read" if fresh else "read already"
            progress.say(f"{file}: {read_now}")
    took = f" {duration(reader.seconds)}, {reader.tokens_per_second:,.0f} tokens/s." if reader.seconds else ""
    held = size(reader.cache.num_bytes())
    progress.say(f"The memory of {reader.num_tokens:,} tokens lies in {memory}/ ({held}).{took}")
    if trace is not None:
        progress.say(
            f"Its trace lies in {trace}; what a reading that goes on needs of it, in {trace}.state/."
        )
    progress.say(_asking_of(settings))


def _read_with_all(settings: ReadSettings) -> None:
    """The same in one of several processes."""
    from trailmark.evaluation.parted_reading import PartedReader, read_with_all
    from trailmark.evaluation.reading import parse_dtype
    from trailmark.evaluation.subject import load, own_device
    from trailmark.processes import is_main, rank, world_size
    from trailmark.report.console import Progress, duration, size

    progress, began, world = Progress(quiet=not is_main()), time.monotonic(), world_size()
    by = f" by {world} processes together" if world > 1 else ""
    by_one = f" by one of {world} processes" if world > 1 else ""

    def show(tokens: int, seconds: float) -> None:
        total, speed = reader.missing_tokens, tokens / max(seconds, 1e-9)
        left = f", {speed:,.0f}/s, {duration((total - tokens) / speed)} left" if tokens else ""
        progress.show(f"{tokens:,} of {total:,} tokens read{by}{left}")

    reader = PartedReader(
        load(settings.model, device=own_device(settings.device)),
        settings.files,
        settings.memory,
        rank(),
        world,
        memory_tier=settings.memory_tier,
        memory_dtype=parse_dtype(settings.memory_dtype),
        counted=lambda tokens: progress.show(f"{tokens:,} tokens counted{by_one}"),
    )
    cache = read_with_all(reader, show)
    if cache is not None:
        seconds, tokens = time.monotonic() - began, cache.get_seq_length()
        progress.say(
            f"The memory of {tokens:,} tokens lies in {settings.memory}/ ({size(cache.num_bytes())}). "
            f"{duration(seconds)}, {reader.missing_tokens / seconds:,.0f} tokens/s{by}."
        )
        progress.say(_asking_of(settings))


def _asking_of(settings: ReadSettings) -> str:
    model, memory = quote(str(settings.model)), quote(str(settings.memory))
    return f"Next: trailmark generate {model} --memory {memory} --prompt ..."


app.command()(cli_explore.explore)


@dataclass(frozen=True)
class VerifySettings(Settings):
    """The options of ``trailmark verify``."""

    folder: Path = setting(
        help="A memory, a corpus, a neighbour table, a checkpoint, a run with checkpoints, or what convert made.",
        argument=True,
    )


@app.command()
@takes(VerifySettings)
def verify(settings: VerifySettings) -> None:
    """Compare every byte of what was saved with what was written."""
    from trailmark.report.console import Progress, size
    from trailmark.training.verification import verify as verify_folder

    progress = Progress()

    def show(done: int, total: int) -> None:
        progress.show(f"{size(done)} of {size(total)} compared")

    for name in verify_folder(settings.folder, show, progress.say):
        progress.say(f"{name}: whole, every byte is as it was written.")


@dataclass(frozen=True)
class GenerateSettings(Settings):
    """The options of ``trailmark generate``."""

    model: Path = setting(help="A folder with a trailmark model.", argument=True)
    prompt: str | None = setting(None, "What to go on from.", default="the end of --file")
    file: Path | None = setting(None, "A text file to read before the prompt, of any length.")
    memory: Path | None = setting(
        None, "A memory that trailmark read made, to go on from; it stays as it is."
    )
    max_new_tokens: int = setting(
        64, "Tokens that are generated at most; of bytes, a letter takes one to four.", least=1
    )
    temperature: float = setting(0.0, "0: always the most likely token.")
    seed: int = setting(0, "Seed of what is sampled.", least=0, most=2**32 - 1)
    changes: tuple[str, ...] = changes_setting()
    device: str | None = device_setting()


@app.command()
@takes(GenerateSettings)
def generate(settings: GenerateSettings) -> None:
    """Continue a prompt, after a memory or a text of any length."""
    from trailmark.evaluation import generation
    from trailmark.evaluation.subject import load, own_device

    pieces = generation.stream(
        load(settings.model, settings.changes, device=own_device(settings.device)),
        settings.prompt,
        settings.file,
        settings.memory,
        settings.max_new_tokens,
        settings.temperature,
        settings.seed,
    )
    for piece in pieces:
        typer.echo(piece, nl=False)
    typer.echo()


app.command()(cli_chat.chat)
app.command()(cli_serve.serve)


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
    """Run a command; a user's mistake is one line, and a traceback where ``TRAILMARK_TRACEBACK`` is set."""
    from_shell = arguments is None
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        # a program that calls this is not started again
        if from_shell and _HEAVY.intersection(arguments[:1]):
            start_again_set_up()
        cli_evaluation.declare_options()  # of suites that a program registered since
        _quiet()
        _escape_what_a_terminal_lacks()
        if code := app(args=arguments, obj=arguments, standalone_mode=False):  # typer turns exits into codes
            if code == 130:
                raise KeyboardInterrupt
            sys.exit(code)
    except (KeyboardInterrupt, typer.Abort):
        resumes = _RESUMING.intersection(arguments[:1])
        _fail("Stopped. The same command goes on from here." if resumes else "Stopped.", 130)
    except Exception as error:
        message = _explain(error, bool(_RESUMING.intersection(arguments[:1])))
        if message is None or os.environ.get("TRAILMARK_TRACEBACK"):
            raise
        if not message:  # no command: its help has been shown
            sys.exit(2)
        _fail(message, 1)


_NO_MEMORY = re.compile("can't allocate memory|out of memory")  # torch's words, on a CPU and on a GPU


def _explain(error: Exception, resumes: bool) -> str | None:
    """One line for what a user can mend; None for what is our own mistake.

    ``resumes``: the command goes on where it stopped.
    """
    if isinstance(error, ValueError):
        return str(error)
    if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
        return f"memory: this machine has too little for that ({error}). Choose smaller sizes, or fewer at a time."
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        if not is_no_space(error):
            return f"{error.strerror or error}{where}"
        limit = (
            "Raise the limit of file size (ulimit -f)" if error.errno == errno.EFBIG else "Free some space"
        )
        kept = "; what was saved before is whole" if resumes else ""
        return f"{error.strerror or error}{where}. {limit} and start the same command again{kept}."
    if type(error).__module__.startswith(("typer", "click")):
        said = getattr(error, "format_message", lambda: str(error))()
        context = getattr(error, "ctx", None)
        if not said or context is None:
            return said
        return f"{said}{'' if said[-1] in '.?!' else '.'} See {context.command_path} --help."
    return None


def _fail(message: str, code: int) -> None:
    typer.echo(f"\ntrailmark: {' '.join(message.split())}", err=True)
    sys.exit(code)


def _escape_what_a_terminal_lacks() -> None:
    """Show what it has no character for by number. Not in files, which are not changed without a word."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict" and stream.isatty():
            stream.reconfigure(errors="backslashreplace")


def _quiet() -> None:
    """No progress bars and advice of libraries between our own lines; nothing is imported for that."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "transformers" in sys.modules:  # it has read these already
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
    for message, category, module in _NOT_FOR_USERS:
        warnings.filterwarnings("ignore", message, category, module)


if __name__ == "__main__":
    main()
