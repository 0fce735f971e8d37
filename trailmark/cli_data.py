"""The commands that make data: corpora, neighbour tables, target scores."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from trailmark.processes import by_first, is_main, together
from trailmark.settings import Settings, override, setting, takes


@dataclass(frozen=True)
class PrepareSettings(Settings):
    """The options of ``trailmark prepare``."""

    sources: tuple[str, ...] = setting(
        help="Files and folders (.txt, .jsonl, .parquet, ...), hub:owner/name, or pg19, arxiv-math, xsum, "
        "cnn-dailymail.",
        argument=True,
    )
    output: Path = setting(help="Folder for the shards; one that is unfinished is gone on with.")
    tokenizer: str = setting("bytes", "bytes, a folder, or a hub name.")
    column: str | None = setting(None, "Field that holds the text, in JSON lines, Parquet and hub data.")
    summary_column: str | None = setting(None, "With --pairs: the summaries.")
    pairs: bool = setting(False, "Write pairs of document and summary, to fine-tune on.", option="--pairs")
    where: str | None = setting(None, "column=value: only such rows.")
    name: str | None = setting(None, "Configuration of a hub dataset.")
    split: str | None = setting(None, "Split of a hub dataset or recipe.")
    revision: str | None = setting(None, "Commit, branch or tag of a hub dataset.")
    streaming: bool = setting(False, "Read a hub dataset without storing it.")
    processes: int | None = setting(None, "Processes that work at once.", default="one per core", least=1)
    end_of_text: bool = setting(True, "End documents with the tokenizer's token for that.")


@takes(PrepareSettings)
@together()
def prepare(settings: PrepareSettings) -> None:
    """Tokenise text into shards to train on. The same command goes on where it stopped."""
    from trailmark.data import prepare as preparing
    from trailmark.data.recipes import parse_source
    from trailmark.report.console import Progress, counted, preparing_line

    progress = Progress(quiet=not is_main())

    def show(state: preparing.Progress) -> None:
        progress.show(preparing_line(*astuple(state)))

    output, tokenizer = settings.output, settings.tokenizer
    _expect_used(settings)
    source = parse_source(
        list(settings.sources),
        column=settings.column,
        summary_column=settings.summary_column,
        config=settings.name,
        split=settings.split,
        revision=settings.revision,
        streaming=settings.streaming,
        where=settings.where,
    )
    if settings.pairs:
        from trailmark.data.pairs import prepare_pairs

        path = by_first(lambda: prepare_pairs(source, output, progress=show))
        progress.say(
            f"The pairs lie in {path}.\n"
            f"Next: trailmark train configs/finetune-summarization.yaml {override('data.paths', str(path))}"
        )
        return
    corpus = preparing.prepare(
        source,
        output,
        tokenizer,
        processes=settings.processes,
        end_of_text=settings.end_of_text,
        progress=show,
    )
    left_out = corpus.manifest.get("left_out", 0)
    without = (
        f" {counted(left_out, 'row')} without text, or that --where leaves out, are not in it."
        if left_out
        else ""
    )
    progress.say(
        f"{len(corpus):,} tokens of {counted(corpus.documents, 'document')} lie in {output}/.{without}\n"
        f"Next: trailmark train configs/text.yaml {override('data.paths', str(output))} "
        f"{override('data.tokenizer', tokenizer)}"
    )


def _expect_used(settings: PrepareSettings) -> None:
    """Raise a ValueError for an option that would be passed over."""
    unused = ("tokenizer", "processes", "end_of_text") if settings.pairs else ("summary_column",)
    for name in unused:
        own, default = getattr(settings, name), PrepareSettings.__dataclass_fields__[name].default
        if own != default:
            raise ValueError(
                f"{name}: expected none {'with' if settings.pairs else 'without'} --pairs, got {own!r}. Leave one of "
                "them out."
            )


@dataclass(frozen=True)
class _TableSettings(Settings):
    """What the tables of neighbours and of target scores share."""

    corpus: Path = setting(
        help="A folder that trailmark prepare made, or text as training reads it.", argument=True
    )
    output: Path = setting(
        help="Folder for the table; one that is unfinished is gone on with.", argument=True
    )
    context_length: int = setting(help="Tokens of a training window.", least=1)
    chunk_size: int = setting(help="Tokens of a chunk, as the model has them.", least=1)
    window: int | None = setting(
        None,
        "The model's sliding_window, where it excludes wholly visible chunks.",
        default="none is excluded",
        least=1,
    )
    tokenizer: str | None = setting(None, "bytes, a folder, or a hub name.", default="the corpus' own")
    device: str | None = setting(
        None, "Where an encoder or a reference computes.", default="cuda if there is one"
    )

    def shared(self) -> dict[str, Any]:
        """The arguments of both tables."""
        from trailmark.evaluation.subject import own_device

        names = ("context_length", "chunk_size", "count", "tokenizer")
        made_with = {name: getattr(self, name) for name in names} | {"device": str(own_device(self.device))}
        return {"paths": [self.corpus], "output": self.output} | made_with

    def training(self) -> str:
        """The settings of a training that the table decides."""
        from trailmark.data.neighbours.build import tokenizer_of

        tokenizer = self.tokenizer or tokenizer_of([self.corpus])
        seen = "false" if self.window is None else f"true model.sliding_window={self.window}"
        return (
            f"model.chunk_size={self.chunk_size} model.exclude_visible_chunks={seen} "
            f"training.context_length={self.context_length} {override('data.paths', str(self.corpus))} "
            f"{override('data.tokenizer', tokenizer)} {override('data.neighbours', str(self.output))} "
            "data.early_landmarks=0"
        )


def _readers() -> list[str]:
    from trailmark.models import architectures_with

    return architectures_with("encoder")


@dataclass(frozen=True, kw_only=True)
class NeighbourSettings(_TableSettings):
    """The options of ``trailmark neighbours``."""

    embedder: str = setting(
        help="hash, hash:DIM, bm25 (counts the corpus first), bm25:FILE, transformers:FOLDER or "
        "sentence-transformers:FOLDER."
    )
    count: int = setting(8, "Neighbours of each chunk.", least=1)
    architecture: str = setting(
        "rpt",
        "Of the model to train, one that needs neighbours: which positions read them.",
        choices=_readers,
    )
    scores: str | None = setting(None, "Keep the products too: float32 or float16.")


@takes(NeighbourSettings)
@together()
def neighbours(settings: NeighbourSettings) -> None:
    """Find each chunk's neighbours once, so that training never waits for an encoder."""
    from trailmark.data.neighbours.build import make_table
    from trailmark.report.console import Progress, bar, size, table_line
    from trailmark.training.neighbours import rule_for

    progress = Progress(quiet=not is_main())
    table = make_table(
        **settings.shared(),
        embedder=settings.embedder,
        rule=rule_for(settings.architecture, settings.chunk_size, settings.window),
        scores=settings.scores,
        say=progress.say,
        progress=lambda state: progress.show(table_line(*astuple(state))),
        fitting=lambda done, total: progress.show(f"{bar(done, total)} {done:,}/{total:,} tokens"),
    )
    progress.say(
        f"The neighbours of {table.windows * table.chunks:,} chunks lie in {settings.output}/ ({size(table.bytes)}).\n"
        f"Next: trailmark train CONFIG model.architecture={settings.architecture} model.retriever=encoder "
        f"model.embedder=null model.num_retrieved_chunks={settings.count} {settings.training()}"
    )


@dataclass(frozen=True, kw_only=True)
class TargetSettings(_TableSettings):
    """The options of ``trailmark targets``."""

    model: str = setting(help="The reference that scores: a causal language model's folder or hub name.")
    count: int = setting(20, "Candidates of each chunk that BM25 finds.", least=1)
    batch_size: int = setting(16, "Texts that the reference scores at a time.", least=1)


@takes(TargetSettings)
@together()
def targets(settings: TargetSettings) -> None:
    """Say how much each chunk helps to predict the next one: what an RPT's retriever learns from."""
    from trailmark.evaluation.targets import make_targets
    from trailmark.report.console import Progress, table_line
    from trailmark.training.neighbours import rule_for

    progress = Progress(quiet=not is_main())
    table = make_targets(
        **settings.shared(),
        model=settings.model,
        rule=rule_for("rpt", settings.chunk_size, settings.window),
        batch_size=settings.batch_size,
        say=progress.say,
        progress=lambda state: progress.show(table_line(*astuple(state))),
    )
    progress.say(
        f"The target scores of {table.windows * table.chunks:,} chunks lie in {settings.output}/.\n"
        f"Next: trailmark train CONFIG model.architecture=rpt model.retriever=learned {settings.training()}"
    )
