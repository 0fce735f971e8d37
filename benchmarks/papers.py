"""The tables of the two papers, row by row: the command that makes each, what it needs, and what is recorded here.

    python benchmarks/papers.py

*Recorded* means that a JSON file beside this script holds the row's twin, at laptop size if nothing else is said.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from tables import record

SIZES = ("128m", "350m")
_TABLE = "a table of neighbours (configs/README.md), the network for Contriever"
_LANDMARK_POSITIONS = "model.max_position_embeddings=16832"  # for texts of 16,384 tokens

_NEEDLES = "--protocol paper-table-2 --lengths 16384,65536 --text runs/data/pg19/test"
_SUMMARIES = "--suite summarization --protocol paper-table-2 --pairs"
_PERPLEXITY = "--suite perplexity --text runs/data/pg19/test --protocol"
_COMPARED = "python benchmarks/compare.py text"
ASKED = {  # by the table: what makes its numbers of the folder that a training made
    "Table 1": {"": f"{_PERPLEXITY} gca-table-1"},
    "Table 2": {
        "single NIAH": f"--suite needles {_NEEDLES}",
        "2-hop NIAH": f"--suite needles --kind hops {_NEEDLES}",
        "XSum": f"{_SUMMARIES} runs/data/xsum/test/pairs.jsonl",
        "CNN/DailyMail": f"{_SUMMARIES} runs/data/cnn-dailymail/test/pairs.jsonl",
    },
    "arXiv 2305.16300": {"": f"{_PERPLEXITY} landmark-table-1"},
}


@dataclass(frozen=True)
class Row:
    """One row, or one cell of Table 4.

    ``twin``: the command of the laptop's. ``part``: where a JSON would have what came out: the file, its part and,
    where that has several, the row and the task; none has it without.
    """

    table: str
    name: str
    command: str
    needs: str
    twin: str = ""
    part: tuple[str, ...] = ()

    def recorded(self) -> bool:
        if not self.part:
            return False
        found = record(self.part[0]).get(self.part[1])
        if found is None or len(self.part) == 2:
            return found is not None
        rows, wanted = found["results"] if isinstance(found, dict) else found, self.part[2:]
        told = ((one["row"], one.get("task")) for one in rows)
        return any(own[: len(wanted)] == wanted for own in told)

    def status(self) -> str:
        if self.recorded():
            return f"{self.part[0]}.json has its twin ({self.twin})"
        return f"No JSON here has it{f' (laptop: {self.twin})' if self.twin else ''}"


def train(name: str, *changes: str) -> str:
    return " ".join(["trailmark train", f"configs/{name}.yaml", *changes])


def rows() -> Iterator[Row]:
    yield from _table_1()
    yield from _table_2()
    yield from _table_3()
    yield from _table_4()
    yield from _figure_3()
    yield from _first_paper()


def _table_1() -> Iterator[Row]:
    needs = "GPUs, PG19 or arXiv-math"
    models = {  # its configurations, their sizes, and the row of compare.json
        "Base LM, window 512": ("base-512", SIZES, "Base"),
        "Base LM, window 768": ("base-768", SIZES, "Base, wider window"),
        "+2 layers, window 658": ("base-plus2-658", SIZES, "Base, more layers"),
        "+2 layers, window 704": ("base-plus2-704", SIZES, ""),
        "RPT-Contriever": ("rpt", SIZES[:1], "RPT, MiniLM"),
        "Landmark Attention": ("landmark", SIZES, "Landmark"),
        "Block-Recurrent": ("block-recurrent", SIZES[:1], "Block-Recurrent"),
        "DRT x1": ("drt-x1", SIZES, "DRT x1"),
        "DRT x2": ("drt-x2", SIZES, "DRT x2"),
    }
    for name, (file, sizes, own) in models.items():
        table_needs = f"{needs}, {_TABLE}" if file == "rpt" else needs
        for size in sizes:
            command = train(f"{file}-{size}")
            yield Row("Table 1", f"{name}, {size.upper()}", command, table_needs, *_of_table_1(size, own))
    encoder = (
        "model.retriever=encoder", "model.embedder=transformers:facebook/contriever", "model.encoder_weights=encoder",
        "model.retrieval_scale=10", "data.neighbours=runs/data/pg19/neighbours", "data.validation=null",
        "training.eval_steps=null",
    )  # fmt: skip
    ablations: dict[str, tuple[tuple[str, ...], str, tuple[str, ...], dict[str, str]]] = {
        "w/o Triton": (
            ("model.gca_implementation=reference",), "naive-gca", SIZES[:1],
            {"own": "DRT x1, naive GCA", "kind": "cost"},
        ),
        "w/o gumbel top-k": (
            ("model.retrieval_noise=false",), "no-noise", SIZES[:1], {"own": "DRT x1, without noise"}
        ),
        "w/ contriever": (
            encoder, "contriever", SIZES,
            {"own": "DRT x1, MiniLM", "note": ", where the model's own scores weigh"},
        ),
        "w/ random retriever": (
            ("model.retriever=random",), "random", SIZES, {"own": "DRT x1, random retriever"}
        ),
    }  # fmt: skip
    for name, (changes, folder, sizes, recorded) in ablations.items():
        for size in sizes:
            command = train(f"drt-x1-{size}", *changes, f"output=runs/drt-x1-{size}-{folder}")
            also = f"{needs}, {_TABLE}" if changes is encoder else needs
            yield Row("Table 1", f"{name}, {size.upper()}", command, also, *_of_table_1(size, **recorded))


def _of_table_1(size: str, own: str, kind: str = "text", note: str = "") -> tuple[str, tuple[str, ...]]:
    """The twin and the part of a row of that size, whose own name here is ``own``."""
    if not own or size != SIZES[0]:
        return "", ()
    return f"python benchmarks/compare.py {kind}{note}", ("compare", kind, own)


def _table_2() -> Iterator[Row]:
    models = {  # and the row of table_2.json and summaries.json
        "Base LM": ("base-512-128m", "Base"),
        "+2 layers": ("base-plus2-658-128m", "Base, more layers"),
        "Block-Recurrent": ("block-recurrent-128m", "Block-Recurrent"),
        "RPT-Contriever": ("rpt-128m", "RPT, MiniLM"),
        "Landmark Attention": ("landmark-128m", "Landmark"),
        "DRT x1": ("drt-x1-128m", "DRT x1"),
        "DRT x2": ("drt-x2-128m", "DRT x2"),
    }
    tasks = {  # and what table_2.json calls it
        "single NIAH": ("finetune-niah-1hop", "niah-1hop", "PG19", "single"),
        "2-hop NIAH": ("finetune-niah-2hop", "niah-2hop", "PG19", "2-hop"),
        "XSum": ("finetune-summarization", "xsum", "XSum", ""),
        "CNN/DailyMail": ("finetune-summarization", "cnn-dailymail", "CNN/DailyMail", ""),
    }
    for task, (file, short, data, asked) in tasks.items():
        pairs = [f"data.paths=runs/data/{short}/train/pairs.jsonl"] if "summarization" in file else []
        for name, (folder, own) in models.items():
            if not asked and own in ("Block-Recurrent", "RPT, MiniLM"):
                continue  # of these the paper has no summaries
            needs = f"GPUs, {data}" + (", the network for Contriever" if folder.startswith("rpt") else "")
            changes = [f"init_from=runs/{folder}", f"output=runs/{folder}-{short}", *pairs]
            if "landmark" in folder:
                changes.append(_LANDMARK_POSITIONS)
            twin = (
                f"python benchmarks/table_2.py --tasks {asked}" if asked else "python benchmarks/summaries.py"
            )
            part = ("table_2", "results", own, asked) if asked else ("summaries", "results", own)
            yield Row("Table 2", f"{task}: {name}", train(file, *changes), needs, twin, part)


def _table_3() -> Iterator[Row]:
    models = {  # and the row of table_3.json
        "Landmark Attention": ("landmark-128m", "Landmark"),
        "Block-Recurrent": ("block-recurrent-128m", "Block-Recurrent"),
        "DRT x1": ("drt-x1-128m", "DRT x1"),
    }
    twin = "of the same sizes, on a CPU: python benchmarks/table_3.py"
    for name, (file, own) in models.items():
        command = (
            f"trailmark evaluate configs/base-512-128m.yaml configs/{file}.yaml --suite cost --lengths 16384,49152 "
            f"--tiers device,host --output runs/cost-{file}"
        )
        part = ("table_3", "cost", own)
        yield Row("Table 3", f"{name} / Base LM", command, "a GPU for times as the paper's", twin, part)


def _table_4() -> Iterator[Row]:
    models: dict[str, tuple[str, ...]] = {
        "window": ("base-512",),
        "full attention": ("base-512", "model.sliding_window=null"),
        "Block-Recurrent": ("block-recurrent",),
        "RPT": ("rpt",),
        "DRT x1": ("drt-x1",),
        "DRT x2": ("drt-x1", "model.num_retrieval_groups=2"),
    }
    for size in ("350m", "760m", "1.5b", "3b"):
        for name, (file, *changes) in models.items():
            longer = ["training.context_length=32768"] if size == "350m" else []
            if longer and file == "rpt":
                longer.append("data.neighbours=runs/data/pg19/neighbours-32768")
            short = name.lower().replace(" ", "-")
            # so many steps are timed, not trained on
            command = train(
                f"{file}-{size}", *changes, *longer, "training.steps=100", "training.warmup_steps=2",
                f"output=runs/throughput-{size}-{short}",
            )  # fmt: skip
            needs = f"GPUs, PG19, {_TABLE}" if file == "rpt" else "GPUs, PG19"
            yield Row("Table 4", f"{size.upper()}: {name}", command, needs)


def _figure_3() -> Iterator[Row]:
    length = "python benchmarks/training.py length"
    twin = "the same command"
    needs = "a GPU for times as the paper's"
    yield Row("Figure 3", "a: training time by length", length, needs, twin, ("training", "length"))
    for name, own in (("base-512-128m", "Base"), ("landmark-128m", "Landmark"), ("drt-x1-128m", "DRT x1")):
        of = "--suite perplexity --protocol gca-figure-3b --text runs/data/pg19/test"
        command = f"trailmark evaluate runs/{name} {of}"
        part = ("compare", "text", own)
        yield Row(
            "Figure 3", f"b: {own}", command, "its model, PG19", f"{_COMPARED}, to 16 times its length", part
        )


def _first_paper() -> Iterator[Row]:
    title, needs = "arXiv 2305.16300", "GPUs, PG19"
    twin = "of bytes: python benchmarks/landmark_models.py"
    yield Row(title, "Landmark Attention", train("landmark-paper"), needs, twin, ("landmark_models", "modes"))
    yield Row(title, "plain Transformer", train("plain-paper"), needs)


def text() -> str:
    blocks = []
    for name, of in groupby(rows(), key=lambda row: row.table):
        own = list(of)
        count = sum(row.recorded() for row in own)
        lines = [line for row in own for line in _lines(row)]
        shown = "\n".join(f"    {line}" for line in lines)
        asks = "".join(
            f"    trailmark evaluate FOLDER {words}{f'  # {task}' if task else ''}\n"
            for task, words in ASKED.get(name, {}).items()
        )
        made = f" FOLDER, which a training made, is evaluated by:\n\n{asks}" if asks else "\n"
        blocks.append(
            f"**{name}**: {len(own)} rows, {count} of them with a twin that is recorded here.{made}\n{shown}"
        )
    return "\n\n".join(blocks)


def _lines(row: Row) -> list[str]:
    return [f"# {row.name}. Needs {row.needs}. {row.status()}.", row.command]


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(text())
