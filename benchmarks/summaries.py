"""Table 2 of arXiv 2410.01651, summaries, at laptop size: models learn to write the title of a section of LaTeX.

    TRAILMARK_DATA=... python benchmarks/summaries.py           what benchmarks/summaries.json lacks
    TRAILMARK_DATA=... python benchmarks/summaries.py tables    what was found so far

A pair is a section's text and its title, of TRAILMARK_DATA/math: train to learn from, test to be asked. Titles that
stand in several chapters say nothing of their section and are left out. Rows of compare.py are trained on the text of
all chapters, then on pairs (data.task summarization), with the same texts and steps. Stopped, the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from common import ROOT, data_folder, parameters, showing
from compare_rows import SIZES, folder_name, text_config
from tables import Columns, Row, on_machine, record, table
from training_text import prepared, trained_tokenizer

from trailmark.data.corpus import files_below, read_text
from trailmark.evaluation.record import Record, environment
from trailmark.evaluation.subject import load
from trailmark.evaluation.summarization.run import ROUGE, rouge_scorer, run
from trailmark.evaluation.summarization.suite import SummarizationSettings
from trailmark.files import read_json, write_json, write_text
from trailmark.machine import start_again_set_up
from trailmark.report.console import Progress
from trailmark.statistics import bootstrap_mean
from trailmark.training.run import HISTORY_FILE, Run

OUTPUT = Path(__file__).with_suffix(".json")
FOLDER = ROOT / "runs" / "benchmark-summaries"
NAMES = ("DRT x1", "Base", "DRT x2", "Base, more layers", "Landmark", "RPT, hash encoder", "Block-Recurrent")
VOCABULARY, LENGTH = 2048, 512  # tokens of a section and its title; a section that is longer loses its end
LEAST = 1500  # characters of a section, which is then longer than a window
TEXT_STEPS, STEPS = 300, 700
ANSWER_WEIGHT = 30  # a title's tokens are one in 60
MOST_NEW = 24
_LABEL = re.compile(r"\\label\{[^}]*\}")  # a section's says its title again
_SECTION = re.compile(r"\\(?:sub)?section\*?\{((?:[^{}]|\{[^{}]*\})*)\}")


def pairs(part: str, folder: Path) -> Path:
    """The file of a split's pairs, made once."""
    path = folder / part / "pairs.jsonl"
    if not path.exists():
        found = [
            pair for file in files_below(data_folder("math") / part) for pair in sections(read_text(file))
        ]
        often = {title for title, count in Counter(title for _, title in found).items() if count > 2}
        kept = [{"document": body, "summary": title} for body, title in found if title not in often]
        write_text(path, "".join(json.dumps(pair) + "\n" for pair in kept))
    return path


def sections(text: str) -> list[tuple[str, str]]:
    """The text and the title of each section that is long enough."""
    parts = _SECTION.split(_LABEL.sub("", text))
    found = zip(parts[2::2], (" ".join(title.split()) for title in parts[1::2]), strict=True)
    return [(body.strip(), title) for body, title in found if title and len(body.strip()) >= LEAST]


def trained(name: str, seed: int, folder: Path, progress: Progress) -> Path:
    """The folder of a model that has learned to write titles."""
    chapters = files_below(data_folder("math") / "train")
    tokenizer = trained_tokenizer(chapters, VOCABULARY, folder / "tokenizer")
    prepared(data_folder("math") / "train", folder / "text", tokenizer)
    stages = {
        "text": (f"training.steps={TEXT_STEPS}", f"data.paths={folder / 'text'}"),
        "titles": (
            f"training.steps={STEPS}", f"data.paths={pairs('train', folder)}", "data.task=summarization",
            f"data.answer_weight={ANSWER_WEIGHT}", f"training.context_length={LENGTH}",
        ),
    }  # fmt: skip
    made: list[Path] = []
    for stage, changes in stages.items():
        output = folder / f"{folder_name(name)}-{seed}-{stage}"
        first = [f"output={output}", f"data.tokenizer={tokenizer}", "training.constant_fraction=0.8"]
        begin = [f"init_from={made[-1]}"] if made else []
        if name == "Landmark":  # for sections, which are longer than its texts
            begin.append(f"model.max_position_embeddings={LENGTH + LENGTH // 4}")
        training = Run(
            text_config(name, seed, SIZES["cpu"], [*first, *begin, *changes]),
            showing(progress, f"{name}, {stage}"),
        )
        if not training.finished and training.train() is None:
            raise SystemExit("Stopped. The same command goes on from here.")
        made.append(output)
    return made[-1]


def measure(name: str, seed: int, folder: Path) -> Row:
    progress = Progress()
    output = trained(name, seed, folder, progress)
    subject = load(output)
    settings = SummarizationSettings(
        pairs=(str(pairs("test", folder)),), max_new_tokens=MOST_NEW, context_length=LENGTH
    )
    kept = Record(output / "evaluation", "summarization", subject.identity())
    (found,) = run(subject, settings, kept, progress.show)
    progress.clear()
    lines = [line for result in kept.results for line in kept.generations(result)]
    history = read_json(output / HISTORY_FILE)
    return {
        "row": name,
        "seed": seed,
        "parameters": parameters(subject.model),
        "training_loss": history["steps"][-1]["loss"],
        "environment": environment(),
        **{key: found[key] for key in ("documents", *ROUGE, "tokens", "ended")},
        "different": len({line["generated"] for line in lines}),
        "each": [round(line["rougeL"], 4) for line in lines],  # ROUGE-L of every title
    }


def lead(folder: Path, words: int = 4) -> Row:
    """What the first words of a section are worth as its title."""
    scorer = rouge_scorer()
    texts = [json.loads(line) for line in pairs("test", folder).read_text(encoding="utf-8").splitlines()]
    written = [" ".join(text["document"].split()[:words]) for text in texts]
    found = [scorer.score(text["summary"], own) for text, own in zip(texts, written, strict=True)]
    row: Row = {
        "row": f"the section's first {words} words",
        "documents": len(texts),
        "environment": environment(),
    }
    for name in ROUGE:
        values = [score[name].fmeasure for score in found]
        low, high = bootstrap_mean(values, 0)
        row[name] = {"f": sum(values) / len(values), "low": float(low), "high": float(high)}
    return row | {
        "different": len({*written}),
        "each": [round(score["rougeL"].fmeasure, 4) for score in found],
    }


def text() -> str:
    """The table of what was measured."""
    found = kept()
    if not found:
        return "Nothing was measured yet."
    base = {row["seed"]: row for row in found if row["row"] == "Base"}

    def more(row: Row) -> str:
        """ROUGE-L above Base's, of the same titles."""
        of = base.get(row.get("seed", 0))
        if of is None or of is row:
            return "-"
        apart = [100 * (own - other) for own, other in zip(row["each"], of["each"], strict=True)]
        low, high = bootstrap_mean(apart, 0)
        return f"{sum(apart) / len(apart):+.1f} ({low:+.1f} to {high:+.1f})"

    def shown(name: str) -> str:
        return f"{{{name}[f]:.1%}} ({{{name}[low]:.1%}}-{{{name}[high]:.1%}})"

    columns: Columns = {
        "row": "{row}",
        "seed": "{seed}",
        "parameters": "{parameters:,}",
        "titles": "{documents}",
    }
    columns |= {"ROUGE-1": shown("rouge1"), "ROUGE-2": shown("rouge2"), "ROUGE-L": shown("rougeL")}
    columns |= {
        "ROUGE-L - Base": more,
        "different": "{different}",
        "tokens": "{tokens:.1f}",
        "ended": "{ended:.2f}",
    }
    return on_machine(table(columns, found), found[0]["environment"])


def kept() -> list[Row]:
    return list(record("summaries").get("results", []))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="*", choices=[[], "tables"])
    parser.add_argument("--rows", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    start_again_set_up()
    for seed in options.seeds if not options.part else ():
        for name in options.rows:
            if not any((r["row"], r.get("seed")) == (name, seed) for r in kept()):
                row = measure(name, seed, options.folder.resolve())
                models = [r for r in [*kept(), row] if "seed" in r]
                write_json(OUTPUT, {"results": [*models, lead(options.folder.resolve())]})
    print(text())


if __name__ == "__main__":
    main()
