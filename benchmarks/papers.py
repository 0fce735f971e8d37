"""The tables of the two papers, row by row: the command that makes each, what it needs, and what is recorded here.

    python benchmarks/papers.py

*Recorded* means that a JSON file beside this script holds the row's twin at laptop size. benchmarks/readme.py puts the
tables into benchmarks/README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from tables import record

_GPU = "GPUs, {}"
SIZES = ("128m", "350m")


@dataclass(frozen=True)
class Row:
    """One row, or one cell of Table 4. ``twin``: what makes the laptop's; ``part``: where in which JSON it would be."""

    table: str
    name: str
    command: str
    needs: str
    twin: str = ""
    part: tuple[str, ...] = ()

    def recorded(self) -> bool:
        """Whether the JSON has it: of compare.json the part and the row, of the others the part."""
        if not self.part:
            return False
        found = record(self.part[0]).get(self.part[1])
        if found is None or len(self.part) == 2:
            return found is not None
        return any(one["row"] == self.part[2] for one in found["results"])

    def status(self) -> str:
        if self.recorded():
            return f"recorded in {self.part[0]}.json: {self.twin}"
        return f"not recorded yet: {self.twin}" if self.twin else "not recorded"


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
    compare, needs = "python benchmarks/compare.py text", _GPU.format("PG19 or arXiv-math")
    models = {
        "Base LM, window 512": ("base-512", "Base"),
        "Base LM, window 768": ("base-768", "Base, wider window"),
        "+2 layers, window 658": ("base-plus2-658", "Base, more layers"),
        "+2 layers, window 704": ("base-plus2-704", ""),
        "RPT-Contriever": ("rpt", "RPT, hash encoder"),
        "Landmark Attention": ("landmark", "Landmark"),
        "Block-Recurrent": ("block-recurrent", "Block-Recurrent"),
        "DRT x1": ("drt-x1", "DRT x1"),
        "DRT x2": ("drt-x2", "DRT x2"),
    }
    for name, (file, own) in models.items():
        for size in SIZES:
            twin = compare if own and size == SIZES[0] else ""
            part = ("compare", "text", own) if twin else ()
            yield Row("Table 1", f"{name}, {size.upper()}", train(f"{file}-{size}"), needs, twin, part)
    encoder = (
        "model.retriever=encoder", "model.embedder=transformers:facebook/contriever",
        "data.neighbours=runs/data/pg19/neighbours", "data.validation=null", "training.eval_steps=null",
    )  # fmt: skip
    ablations: dict[str, tuple[tuple[str, ...], str, str]] = {
        "w/o Triton": (("model.gca_implementation=reference",), "cost", "DRT x1, naive GCA"),
        "w/o gumbel top-k": (("model.retrieval_noise=false",), "text", "DRT x1, without noise"),
        "w/ contriever": (encoder, "text", "DRT x1, hash encoder"),
        "w/ random retriever": (("model.retriever=random",), "text", "DRT x1, random retriever"),
    }
    for name, (changes, kind, own) in ablations.items():
        output = f"output=runs/{name.split()[-1].lower().replace('top-k', 'no-noise')}"
        twin = f"python benchmarks/compare.py {kind}"
        also = ", the network for Contriever" if changes is encoder else ""
        command = train("drt-x1-128m", *changes, output)
        yield Row("Table 1", name, command, needs + also, twin, ("compare", kind, own))


def _table_2() -> Iterator[Row]:
    models = {  # and the laptop's
        "Base LM": ("base-512-128m", "base-128"),
        "+2 layers": ("base-plus2-658-128m", "base-plus1-153"),
        "Block-Recurrent": ("block-recurrent-128m", "block-recurrent"),
        "RPT-Contriever": ("rpt-128m", "rpt"),
        "Landmark Attention": ("landmark-128m", "landmark"),
        "DRT x1": ("drt-x1-128m", "drt-x1"),
        "DRT x2": ("drt-x2-128m", "drt-x2"),
    }
    tasks = {
        "single NIAH": ("finetune-niah-1hop", "PG19"),
        "2-hop NIAH": ("finetune-niah-2hop", "PG19"),
        "XSum": ("finetune-summarization", "XSum"),
        "CNN/DailyMail": ("finetune-summarization", "CNN/DailyMail"),
    }
    for task, (file, data) in tasks.items():
        for name, (folder, small) in models.items():
            output = f"runs/{folder}-{task.lower().replace('/', '-').replace(' ', '-')}"
            changes = [f"init_from=runs/{folder}", f"output={output}"]
            if folder == "landmark-128m":
                changes.append("model.max_position_embeddings=16832")
            if task == "CNN/DailyMail":
                changes.append("data.paths=runs/data/cnn-dailymail/train/pairs.jsonl")
            twin = train(f"laptop-{file}", f"init_from=runs/laptop-{small}")
            yield Row("Table 2", f"{task}: {name}", train(file, *changes), _GPU.format(data), twin)


def _table_3() -> Iterator[Row]:
    models = {
        "Landmark Attention": "landmark-128m",
        "Block-Recurrent": "block-recurrent-128m",
        "DRT x1": "drt-x1-128m",
    }
    for name, file in models.items():
        command = (
            f"trailmark evaluate configs/base-512-128m.yaml configs/{file}.yaml --suite cost --lengths 16384,49152 "
            "--tiers device,host --output runs/cost"
        )
        yield Row("Table 3", f"{name} / Base LM", command, "a GPU for the paper's times", "the same command")


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
            command = train(f"{file}-{size}", *changes, *longer, "output=runs/throughput")
            yield Row("Table 4", f"{size.upper()}: {name}", command, _GPU.format("PG19"))


def _figure_3() -> Iterator[Row]:
    length = "python benchmarks/training.py length"
    yield Row("Figure 3", "a: training time by length", length, "a GPU for the paper's times", "the same command",
              ("training", "length"))  # fmt: skip
    for name in ("base-512-128m", "landmark-128m", "drt-x1-128m"):
        of = "--suite perplexity --protocol gca-figure-3b --text runs/data/pg19/test"
        command = f"trailmark evaluate runs/{name} {of}"
        yield Row("Figure 3", f"b: extrapolation, {name}", command, "its model, PG19",
                  "python benchmarks/compare.py text")  # fmt: skip


def _first_paper() -> Iterator[Row]:
    needs = _GPU.format("PG19")
    yield Row("arXiv 2305.16300", "Landmark Attention, PG19", train("landmark-paper"), needs,
              "python benchmarks/landmark_models.py", ("landmark_models", "models"))  # fmt: skip
    plain = (
        "output=runs/plain-paper", "model.vocab_size=50304", "model.hidden_size=1024", "model.intermediate_size=4096",
        "model.num_attention_heads=8", "model.mlp=gelu", "model.norm=layer", "model.window_position=rope",
        "training.steps=240000", "training.warmup_steps=4800", "training.max_grad_norm=0",
        "training.tokens_per_step=65536", "training.context_length=512", "training.micro_batch_size=16",
    )  # fmt: skip
    yield Row("arXiv 2305.16300", "plain Transformer, PG19", train("full-attention-128m", *plain), needs)


def text() -> str:
    blocks = []
    for name, of in groupby(rows(), key=lambda row: row.table):
        own = list(of)
        count = sum(row.recorded() for row in own)
        lines = (f"    {row.command}  # {row.name}; needs {row.needs}; {row.status()}" for row in own)
        shown = "\n".join(lines)
        blocks.append(f"**{name}**: {len(own)} rows, {count} of them recorded at laptop size.\n\n{shown}")
    return "\n\n".join(blocks)


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(text())
