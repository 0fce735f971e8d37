"""Table 2 of arXiv 2410.01651, summaries, at laptop size: models learn to say what Python does, from its source.

    python benchmarks/summaries.py           what benchmarks/summaries.json lacks
    python benchmarks/summaries.py tables    what was found so far

A pair is the source of a function or class of Python's standard library and the first paragraph of its docstring, which
is taken out of the source: of some modules to learn from, of others to be asked. Rows of compare.py are trained on the
text of the former, then on their pairs (data.task summarization), with the same texts and steps. Stopped, the same
command goes on.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from common import ROOT, parameters, showing, to_its_end
from compare_rows import folder_name, text_config
from tables import Columns, Row, on_machine, record, table
from training_text import trained_tokenizer

from trailmark.data.corpus import standard_library_texts
from trailmark.data.summarization import Pairs
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
# The rows that are trained, and ROUGE-L of XSum in arXiv 2410.01651, Table 2: 128M, of sampled tokens and not of text
PAPER = {"DRT x1": 23.92, "Base": 23.26, "DRT x2": 23.98, "Base, more layers": 23.48, "Landmark": 21.99}
VOCABULARY, LENGTH = 2048, 384  # tokens of a source and its summary; a source that is longer loses its end
TEXT_STEPS, STEPS = 300, 800
ANSWER_WEIGHT = 10
ASKED, LEAST = 300, 600  # sources that are asked for, and their characters: their head lies beyond the window
MOST_NEW = 32
_NAME, _WORD = re.compile(r"(?:def|class)\s+(\w+)"), re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")


def pairs(split: str, folder: Path) -> Path:
    """The file of a split's pairs, made once."""
    path = folder / split / "pairs.jsonl"
    if not path.exists():
        found = [pair for text in standard_library_texts(split) for pair in documented(text)]
        if split == "haystack":
            long = [pair for pair in found if len(pair["document"]) >= LEAST]
            found = [long[len(long) * number // ASKED] for number in range(ASKED)]
        write_text(path, "".join(json.dumps(pair) + "\n" for pair in found))
    return path


def documented(text: str) -> Iterator[dict[str, str]]:
    """Every function and class of a module that says what it does."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a few of the library's are wrong on purpose
        return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if said := ast.get_docstring(node):
            doc = node.body[0]
            source = lines[node.lineno - 1 : doc.lineno - 1] + lines[doc.end_lineno : node.end_lineno]
            if source:  # else both stand in one line
                yield {"document": "".join(source), "summary": " ".join(said.split("\n\n")[0].split())}


def trained(name: str, seed: int, folder: Path, progress: Progress) -> Path:
    """The folder of a model that has learned to write summaries."""
    source = folder / "train.txt"
    if not source.exists():
        write_text(source, "\n".join(standard_library_texts("train")))
    tokenizer = trained_tokenizer([source], VOCABULARY, folder / "tokenizer")
    stages = {
        "text": (f"training.steps={TEXT_STEPS}",),
        "summaries": (
            f"training.steps={STEPS}", f"data.paths={pairs('train', folder)}", "data.task=summarization",
            f"data.answer_weight={ANSWER_WEIGHT}", f"training.context_length={LENGTH}",
        ),
    }  # fmt: skip
    made: list[Path] = []
    for stage, changes in stages.items():
        output = folder / f"{folder_name(name)}-{seed}-{stage}"
        first = [f"output={output}", f"data.tokenizer={tokenizer}", "training.constant_fraction=0.8"]
        begin = [f"init_from={made[-1]}"] if made else []
        if name == "Landmark":  # for sources, which are longer than its texts
            begin.append(f"model.max_position_embeddings={LENGTH + LENGTH // 4}")
        config = text_config(name, seed, [*first, *begin, *changes])
        to_its_end(Run(config, showing(progress, f"{name}, {stage}")))
        made.append(output)
    return made[-1]


def measure(name: str, seed: int, folder: Path) -> Row:
    progress = Progress()
    output = trained(name, seed, folder, progress)
    subject = load(output)
    settings = SummarizationSettings(
        pairs=(str(pairs("haystack", folder)),), max_new_tokens=MOST_NEW, context_length=LENGTH
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
        "pairs": len(Pairs([pairs("train", folder)])),
        "training_loss": history["steps"][-1]["loss"],
        "environment": environment(),
        **{key: found[key] for key in ("documents", *ROUGE, "tokens", "ended")},
        "different": len({line["generated"] for line in lines}),
        "each": [round(line["rougeL"], 4) for line in lines],  # ROUGE-L of every summary
    }


def named(folder: Path) -> Row:
    """What the words of a function's or class's name are worth as its summary."""
    scorer = rouge_scorer()
    texts = [json.loads(line) for line in pairs("haystack", folder).read_text(encoding="utf-8").splitlines()]
    heads = [_NAME.search(text["document"]) for text in texts]
    written = [" ".join(_WORD.findall(head[1] if head else "")) for head in heads]
    found = [scorer.score(text["summary"], own) for text, own in zip(texts, written, strict=True)]
    row: Row = {"row": "the words of its name", "documents": len(texts), "environment": environment()}
    for name in ROUGE:
        values = [score[name].fmeasure for score in found]
        low, high = bootstrap_mean(values, 0)
        row[name] = {"f": sum(values) / len(values), "low": float(low), "high": float(high)}
    each = [round(score["rougeL"].fmeasure, 4) for score in found]
    return row | {"different": len({*written}), "each": each}


def text() -> str:
    """The table of what was measured."""
    found = kept()
    if not found:
        return "Nothing was measured yet."
    base = {row["seed"]: row for row in found if row["row"] == "Base"}

    def more(row: Row) -> str:
        """ROUGE-L above Base's, of the same sources."""
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
        "asked": "{documents}",
    }
    columns |= {"ROUGE-1": shown("rouge1"), "ROUGE-2": shown("rouge2"), "ROUGE-L": shown("rougeL")}
    columns |= {
        "ROUGE-L - Base": more,
        "different": "{different}",
        "tokens": "{tokens:.1f}",
        "ended": "{ended:.2f}",
        "paper, XSum": lambda row: f"{PAPER[row['row']]:.1f}%" if row["row"] in PAPER else "-",
    }
    learned = max(row.get("pairs", 0) for row in found)
    about = (
        f"{learned:,} pairs to learn from; {found[0]['documents']} others that are asked, of at least {LEAST} "
        f"characters. {TEXT_STEPS} steps on text and {STEPS} on pairs of at most {LENGTH} tokens."
    )
    return on_machine(f"{about}\n\n{table(columns, found)}", found[0]["environment"])


def kept() -> list[Row]:
    return list(record("summaries").get("results", []))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="*", choices=[[], "tables"])
    parser.add_argument("--rows", nargs="+", choices=PAPER, default=list(PAPER))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    start_again_set_up()
    for seed in options.seeds if not options.part else ():
        for name in options.rows:
            if not any((r["row"], r.get("seed")) == (name, seed) for r in kept()):
                row = measure(name, seed, options.folder.resolve())
                models = [r for r in [*kept(), row] if "seed" in r]
                write_json(OUTPUT, {"results": [*models, named(options.folder.resolve())]})
    print(text())


if __name__ == "__main__":
    main()
