"""The case study on mathematics (docs/case-study.md): does a DRT read the chunk that a reference points to?

    TRAILMARK_DATA=... python benchmarks/case_study [prepare train measure document | variants]    default: four

prepare: a vocabulary of 4,096 tokens and shards of TRAILMARK_DATA/math. train: configs/laptop-drt-math.yaml. measure:
each chapter of math/test is read from its first token, alone; what was read of it is kept as a trace. document: three
pages of ``trailmark explore``, their pictures, and the tables of docs/case-study.md. Stopped at any time, the same
command goes on: finished parts are not made again. Another model (larger, on CUDA): --config, --set and --folder.
variants: short trainings that differ in how chunks are scored or chosen.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from common import ROOT, data_folder
from pretrained_models import subject as pretrained_subject
from tables import fill
from training_text import prepared, trained_tokenizer

from case_study import cases, document, numbers
from case_study.baselines import Rules
from case_study.measure import Row, rows_of
from case_study.references import Layout, summary
from case_study.scores import SHORT, VARIANTS, score_parts
from trailmark.data.corpus import files_below, read_text, tokenize
from trailmark.data.neighbours.bm25 import Bm25, fit_bm25
from trailmark.data.shards import Corpus
from trailmark.evaluation.record import environment
from trailmark.evaluation.subject import Subject, load
from trailmark.files import read_json, write_json
from trailmark.models import DRTForCausalLM
from trailmark.report.console import Progress
from trailmark.trace.lines import TracedChunk, TraceHeader, read_trace, write_lines
from trailmark.trace.texts import trace_texts
from trailmark.training.neighbours import rule_of
from trailmark.training.run import HISTORY_FILE

OUTPUT = ROOT / "benchmarks" / "case_study.json"
FOLDER = Path("runs/case-study")  # as the configuration names it: below ROOT
CONFIG = Path("configs/laptop-drt-math.yaml")
VOCABULARY = 4096
STEPS = ("prepare", "train", "measure", "document")
_SCORED = 8192  # tokens of each chapter whose scores are looked into: a training text
Chapter = tuple[dict[str, Any], list[Row], list[TracedChunk]]  # what it is, its references, its trace


class CaseStudy:
    """All in one folder, and the JSON file."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.folder, self.output = arguments, arguments.folder, arguments.output
        self.model: Path = arguments.model or self.folder / "model"
        self.traces: Path = self.folder / (
            "traces" if arguments.model is None else f"traces-{arguments.model.name}"
        )

    def run(self, steps: Sequence[str]) -> None:
        for step in steps:
            getattr(self, step)()

    # --- the model -----------------------------------------------------------------------------------------

    def prepare(self) -> None:
        texts = data_folder("math")
        tokenizer = self.arguments.model or trained_tokenizer(
            files_below(texts / "train"), VOCABULARY, self.folder / "tokenizer"
        )
        for split in ("train", "valid"):
            prepared(texts / split, self.folder / split, tokenizer)

    def train(self) -> None:
        """As the configuration says; in a process of its own."""
        if self.arguments.model is not None or read_json(self.model / HISTORY_FILE) is not None:
            return
        own = [
            f"output={self.model}",
            f"data.paths=[{self.folder / 'train'}]",
            f"data.validation=[{self.folder / 'valid'}]",
            f"data.tokenizer={self.folder / 'tokenizer'}",
        ]
        _trailmark("train", self.arguments.config, *self.arguments.set, *own)

    def variants(self) -> None:
        """Train and measure each, and put what was found beside the numbers of the model."""
        found = []
        for name, changes in VARIANTS.items():
            arguments = argparse.Namespace(**vars(self.arguments) | {"model": None})
            arguments.set = [*self.arguments.set, *SHORT, *changes]
            own = CaseStudy(arguments)
            own.model, own.traces = (self.folder / "variants" / part for part in (name, f"{name}-traces"))
            own.train()
            found.append({"name": name, **own.summary()})
            for wanted in (SHORT[0], *changes):
                part, field, value = re.split("[.=]", wanted, maxsplit=2)
                came = found[-1]["config" if part == "model" else part][field]
                if came != yaml.safe_load(value):
                    raise SystemExit(
                        f"variants: expected a model with {wanted}, {own.model} holds one with {came}. Remove it."
                    )
        write_json(self.output, (read_json(self.output) or {}) | {"variants": found})
        print(f"Numbers: {self.output}")

    # --- what it reads -------------------------------------------------------------------------------------

    def measure(self) -> None:
        subject, header, chapters = self._chapters()
        told = [about for about, _, _ in chapters.values()]
        texts = [rows for _, rows, _ in chapters.values()]
        chosen = cases.choose({name: (rows, chunks) for name, (_, rows, chunks) in chapters.items()})
        record = {
            "model": header.model,
            "config": subject.model.config.to_diff_dict(),
            "groups": header.num_groups,
            "chunk_size": header.chunk_size,
            "retrieved": header.num_retrieved_chunks,
            "window": header.window,
            "training": self._training(),
            "bins": numbers.BINS,
            "hits": numbers.hits(texts, header.num_groups),
            "works": numbers.by_work(texts, [about["work"] for about in told]),
            "candidates": numbers.by_candidates(texts),
            "differences": numbers.differences(texts),
            "weights": numbers.label_weights(texts, header.num_groups),
            "gains": numbers.gains(texts),
            "total_gain": numbers.total_gain(told),
            "seen": numbers.seen_gains(told),
            "habits": numbers.habit(told),
            "scores": self._scores(subject),
            "chapters": [{k: v for k, v in own.items() if k not in ("habits", "seen")} for own in told],
            "rule": cases.RULE,
            "cases": [cases.told(name, row, chapters[name][2]) for name, row in chosen],
            "environment": environment(),
        }
        before = read_json(self.output) or {}
        if "variants" in before:
            known, own = (
                {k: v for k, v in part["config"].items() if k != "transformers_version"}
                for part in (before, record)
            )
            if known == own:
                record["variants"] = before["variants"]
            else:
                print("The variants were of another configuration: run `variants` again.")
        write_json(self.output, record)
        print(f"Numbers: {self.output}")

    def summary(self) -> dict[str, Any]:
        """The numbers that variants are compared by."""
        subject, _, chapters = self._chapters()
        texts = [rows for _, rows, _ in chapters.values()]
        return {
            "config": subject.model.config.to_dict(),
            "training": self._training(),
            "label": numbers.labels_found(texts),
            "total_gain": numbers.total_gain([about for about, _, _ in chapters.values()]),
            "scores": self._scores(subject),
        }

    def _chapters(self) -> tuple[Subject, TraceHeader, dict[str, Chapter]]:
        """The model, and of each chapter what it is, its references and its trace."""
        # a pretrained one is large: it computes in bfloat16 where that is multiplied, as in the other benchmarks of it
        read = load if self.arguments.model is None else pretrained_subject
        subject, header, chapters = read(self.model), None, {}
        statistics = self._statistics(subject)
        for file in files_below(data_folder("math") / "test"):
            header, chunks = self._traced(subject, file)
            chapters[file.name] = (*self._chapter(subject, file, chunks, statistics), chunks)
        assert header is not None
        return subject, header, chapters

    def _scores(self, subject: Subject) -> dict[str, Any] | None:
        """What scores say (:func:`score_parts`), of the model and of one like it that was not trained.

        None: it learns no scores, or no chapter is long enough.
        """
        if not isinstance(subject.model, DRTForCausalLM) or not subject.model.config.ranks_all_chunks:
            return None
        texts = [
            tokenize([read_text(file)], subject.tokenizer)[:_SCORED]
            for file in files_below(data_folder("math") / "test")
        ]
        torch.manual_seed(0)
        untrained = DRTForCausalLM(subject.model.config)
        untrained.embedder = subject.model.embedder
        if (trained := score_parts(subject.model, texts)) is None:
            return None
        return {"tokens": _SCORED, "trained": trained, "untrained": score_parts(untrained, texts)}

    def _statistics(self, subject: Subject) -> Bm25:
        """BM25's, of the training text in chunks of the model's size."""
        corpus = Corpus.open(self.folder / "train")
        file = self.folder / f"bm25-{subject.chunk_size}.json"
        return fit_bm25(corpus, subject.chunk_size, subject.tokenizer, file).bm25

    def _traced(self, subject: Subject, file: Path) -> tuple[TraceHeader, list[TracedChunk]]:
        """What the model read in a chapter; a trace that is there is read, if it is of this model and text."""
        path = self._trace(file.name)
        if path.exists() and (found := self._kept(path, subject, file)) is not None:
            return found
        progress = Progress()
        path.parent.mkdir(parents=True, exist_ok=True)
        header, entries = trace_texts(
            subject, [file], lambda tokens: progress.show(f"{file.name}: {tokens:,} tokens")
        )
        part = path.with_suffix(".part")
        write_lines(part, itertools.chain([header], entries))
        progress.clear()
        os.replace(part, path)
        found = self._kept(path, subject, file)  # as every later run reads it
        assert found is not None
        return found

    def _kept(self, path: Path, subject: Subject, file: Path) -> tuple[TraceHeader, list[TracedChunk]] | None:
        """A trace; None: of another model or text."""
        header, entries = read_trace(path)
        chunks = [entry for entry in entries if isinstance(entry, TracedChunk)]
        if header.model["weights_sha256"] != subject.identity()["weights_sha256"]:
            return None
        return (header, chunks) if "".join(chunk.text for chunk in chunks) == read_text(file) else None

    def _trace(self, chapter: str) -> Path:
        return self.traces / f"{Path(chapter).stem}.jsonl"

    def _chapter(
        self, subject: Subject, file: Path, chunks: list[TracedChunk], statistics: Bm25
    ) -> tuple[dict[str, Any], list[Row]]:
        config = subject.model.config
        # a chunk reads what the one before it selects
        limits = [0, *rule_of(config).num_candidates(len(chunks) - 1, config.chunk_size).tolist()]
        rules = Rules(chunks, statistics, subject.tokenizer)
        rows = rows_of(chunks, limits, rules)
        about = _index()[file.name]
        found = {
            "file": file.name,
            "work": cases.work_of(file.name),
            "title": about["title"],
            "licence": about["licence"],
            "source": f"{about['source_repo']}: {about['source_path']}",
            **numbers.losses(chunks),
            **summary(Layout.of(chunks)),
            "references": len(rows),
            "seen": numbers.seen(chunks),
            "habits": numbers.habits(chunks, rules, limits),
        }
        print(f"{file.name}: {found['tokens']:,} tokens, {len(rows)} references", flush=True)
        return found, rows

    def _training(self) -> dict[str, Any]:
        """What the run's folder tells; empty of a checkpoint, whose training goes on."""
        history = read_json(self.model / HISTORY_FILE)
        corpus = read_json(self.folder / "train" / "corpus.json")
        found = {"corpus_tokens": corpus["tokens"], "documents": corpus["documents"]}
        if history is None:
            return found
        steps = history["steps"]
        validation = [step for step in steps if "eval_loss" in step]
        return found | {
            "steps": steps[-1]["step"],
            "tokens": history["tokens"],
            "seconds": history["seconds"],
            "tokens_per_second": history["tokens_per_second"],
            "loss": steps[-1]["loss"],
            "validation": [[step["step"], step["eval_loss"]] for step in validation],
        }

    # --- the page ------------------------------------------------------------------------------------------

    def document(self) -> None:
        record = read_json(self.output)
        if record is None:
            raise SystemExit(f"document: there is no {self.output}. Measure first.")
        for number, case in enumerate(record["cases"], 1):
            page = self.folder / "pages" / f"{Path(case['file']).stem}.html"
            page.parent.mkdir(exist_ok=True)
            _trailmark("explore", "--trace", self._trace(case["file"]), "-o", page)
            cases.picture(page, case["chunk"], ROOT / "docs" / f"case-study-{number}.png")
        fill(ROOT / "docs" / "case-study.md", document.texts(record))


def _index() -> dict[str, dict[str, str]]:
    """Title, licence and source of each chapter, as the data's index has them."""
    with open(data_folder("math") / "index.csv", encoding="utf-8", newline="") as file:
        return {row["file"]: row for row in csv.DictReader(file)}


def _trailmark(*arguments: Any) -> None:
    """One command of trailmark, said before it runs. SystemExit if it ends early."""
    command = [sys.executable, "-m", "trailmark", *map(str, arguments)]
    print("$ trailmark", *map(str, arguments), flush=True)
    if subprocess.run(command, cwd=ROOT).returncode:
        raise SystemExit(f"case study: trailmark {arguments[0]} ended early. The same command goes on.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    steps = (*STEPS, "variants")
    parser.add_argument("steps", nargs="*", metavar="|".join(steps), help="default: the first four")
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="of the shards, the model, traces and pages"
    )
    parser.add_argument("--config", type=Path, default=CONFIG, help="of the training")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes of the configuration"
    )
    parser.add_argument("--model", type=Path, help="measure this one; in bfloat16 where it is multiplied")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the JSON file")
    arguments = parser.parse_args()
    if unknown := set(arguments.steps) - set(steps):
        parser.error(f"expected {', '.join(steps)}, got {', '.join(sorted(unknown))}")
    os.chdir(ROOT)  # the configuration's paths stand below it
    CaseStudy(arguments).run(arguments.steps or STEPS)


if __name__ == "__main__":
    main()
