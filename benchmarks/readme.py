"""Put measured numbers into the documents: no number there is typed by hand.

    python benchmarks/readme.py [runs/demo]    with a demo's folder, its numbers and figures are taken over first

``DOCUMENTS`` says which text stands where; each is made from the JSON files beside this script.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import billion
import billion_weights
import compare_tables
import context_parallel
import landmark_tables
import learning_tables
import parted_reading
import pretrained_hils_tables
import pretrained_reader_tables
import pretrained_tables
import reading_tables
import summaries
import table_2
import table_3
import training_tables
from case_study.document import texts as case_study_texts
from ops import table as ops_table
from tables import HERE, RIGHT, ROOT, Columns, Row, cell, crossed, fill, machine, on_machine, record, table

from trailmark.demo import NAMES
from trailmark.files import read_json, write_json
from trailmark.report.console import duration
from trailmark.report.tables import NEEDLE_LEGEND, legend_text, markdown_table, needle_table


def take_over(run: Path) -> None:
    """Keep a demo's numbers and figures."""
    content = read_json(run / "demo.json")
    for result in content["results"]:
        result.pop("asked", None)  # single questions are for the figures; the counts stay
    write_json(HERE / "demo.json", content)
    shutil.copy(run / "report-figures" / "needles-1-length.png", ROOT / "docs" / "accuracy.png")


# --- the demo and the suites -------------------------------------------------------------------------------


def demo_summary() -> str:
    """What the README shows of it: the figure, and three rows."""
    found = record("demo")
    farthest = max(r["length"] for r in found["results"])
    shown = [("drt", found["train_length"]), ("drt", farthest), ("window", found["train_length"])]
    rows = [
        r | {"model": NAMES[r["model"]]}
        for model, length in shown
        for r in found["results"]
        if (r["model"], r["length"], r["needles"]) == (model, length, 1)
    ]
    columns: Columns = {
        "model": "{model}",
        "tokens read": "{length:,}",
        "questions": "{questions}",
        "all digits right": RIGHT,
        "tokens/s": "{tokens_per_second:,.0f}",
        "memory": "{memory_bytes:size}",
    }
    took = sum(part["seconds"] for part in (*found["training"].values(), *found["results"]))
    size_of, window = found["training"]["drt"]["parameters"], found["models"]["window"]["sliding_window"]
    return (
        f"A DRT of {size_of:,} parameters, trained from scratch on texts of at most {found['train_length']:,} tokens, "
        f"asked for digits like those of `$QJXV=48213;` hidden in real text, beside the model with its window alone, "
        f"whose {window} tokens cannot hold them. "
        f"`make demo` makes this in {duration(took)} ({machine(found['environment'])}, seed "
        f"{found['settings']['seed']}); [all rows](benchmarks/README.md#the-laptop-demo).\n\n"
        f"{table(columns, rows)}\n\n![Accuracy by length](docs/accuracy.png)"
    )


def demo_text() -> str:
    found = record("demo")
    results = [r | {"model": NAMES[r["model"]]} for r in found["results"]]
    trained = ", ".join(
        f"{NAMES[name]} {duration(t['seconds'])} at {t['tokens_per_second']:,.0f} tokens/s"
        for name, t in found["training"].items()
    )
    took = sum(part["seconds"] for part in (*found["training"].values(), *found["results"]))
    return (
        f"{needle_table(results, found['train_length'])}\n\n{legend_text(NEEDLE_LEGEND)}\n\n"
        f"Trained: {trained}; with the questions {duration(took)} in all. Machine: {machine(found['environment'])}, "
        f"seed {found['settings']['seed']}."
    )


def needles_text() -> str:
    """One change of the demo at a time; its own row first."""
    cases, demo = read_json(HERE / "needles.json"), record("demo")
    own = {"case": "demo", "seed": demo["settings"]["seed"], "steps": demo["steps"]["drt"]}
    own["results"] = [r for r in demo["results"] if r["model"] == "drt"]
    ordered = sorted([own, *cases], key=lambda c: (c["case"] != "demo", c["case"], c["seed"]))
    shown = crossed(
        [case | result for case in ordered for result in case["results"]],
        {"case": "{case}", "seed": "{seed}", "steps": "{steps:,}"},
        "{needles} in {length:,}",
        "{accuracy:.3f}",
    )
    questions = min(r["questions"] for case in cases for r in case["results"])
    return (
        f"{shown}\n\nAt least {questions} questions each; columns: needles in tokens. "
        f"Machine: {machine(cases[0]['environment'])}."
    )


def two_hop_text() -> str:
    found = record("two_hop")
    cases = sorted(found["cases"], key=lambda case: (-case["groups"], -case["landmarks"], case["seed"]))
    header, rows = ["groups", "landmarks", "seed"], []
    for result in cases[0]["results"]:
        header += [f"right at {result['length'] // found['train_length']}x", "hop 1, 2 found"]
    for case in cases:
        cells = [str(case[name]) for name in ("groups", "landmarks", "seed")]
        for result in case["results"]:
            cells += [cell(RIGHT, result), ", ".join(f"{share:.2f}" for share in result["recall_by_hop"])]
        rows.append(cells)
    return (
        f"{markdown_table(header, rows)}\n\n"
        f"{cases[0]['results'][0]['questions']} questions at each length ({found['train_length']:,} tokens are 1x); "
        f"right is all five digits. The same questions and steps ({cases[0]['steps']:,}). "
        f"Machine: {machine(cases[0]['environment'])}."
    )


# --- ops and a training step -------------------------------------------------------------------------------


def ops_text() -> str:
    found = record("ops")
    return on_machine(ops_table(found["results"]), found["environment"])


def token_ops_text() -> str:
    found = record("ops")["tokens"]
    return on_machine(ops_table(found["results"], "tokens"), found["environment"])


def training_step_text() -> str:
    found = record("training_step")
    steps = found["results"]
    ratios = " and ".join(f"{r['ratio']:.2f}x ({r['dtype']})" for r in steps)
    return (
        f"A training step of a DRT (d = {steps[0]['sizes']['hidden_size']}, "
        f"{steps[0]['sizes']['num_hidden_layers']} layers, {steps[0]['tokens']:,} tokens) takes {ratios} the time of "
        f"the model with a window alone; FLOPs give {steps[0]['flops_ratio']:.2f}x. Machine: "
        f"{machine(found['environment'])}."
    )


# checks of gpu.json that are about kernels alone
_OF_KERNELS = ("budgets", "repeats", "many elements", "synchronisation", "others", "landmark kernels")


def gpu_summary() -> str:
    """What a GPU has shown, in a few sentences."""
    found = record("gpu")
    made = [row["passed"] for name in _OF_KERNELS for row in found[name] if row["passed"] is not None]
    text = (
        f"On one {found['device']} (torch {found['torch']}, triton {found['triton']}, {found['date']}) {sum(made)} of "
        f"{len(made)} checks of the kernels pass: error budgets against float64, the same bits 250 times, tables past "
        "2^31 elements, nothing that waits for the device."
    )
    (tests,) = found["tests"]
    if tests["passed"] is not True:
        failed = tests["tail"].count(" failed (")
        text += (
            f" Of their tests those that ran in {tests['seconds']:.0f} s passed but for {failed}; its kernel was "
            "changed for that, and has not run on a GPU again."
        )
    for row in found.get("demo", []):
        text += (
            f" The demo's DRT reads {row['length']:,} tokens at {row['tokens_per_second']:,.0f} tokens/s, and answers "
            f"{row['correct']} of {row['questions']} questions."
        )
    return text


def gpu_text() -> str:
    from gpu import goals

    rows = goals(record("gpu"))
    times = markdown_table(["what", "at", "found", "goal"], rows) if rows else _NOT_TIMED
    return f"{gpu_summary()}\n\n{times}\n\n`python benchmarks/gpu.py` checks and times them again."


_NOT_TIMED = "How fast the kernels are, alone on a GPU, has not been measured yet."


def gpu_line() -> str:
    """A line of the README."""
    return f"- **GPU**: {gpu_summary()}" + ("" if "gca" in record("gpu") else f" {_NOT_TIMED}")


def training_text() -> str:
    """The parts of benchmarks/training.json that were measured, on CUDA besides."""
    texts = []
    for name in ("training", "training-cuda"):
        found = record(name)
        texts += [on_machine(*part) for part in training_tables.part_texts(found)]
        if name == "training" and found.get("length", {}).get("results"):
            texts.append("![Time per token by context length](../docs/training-length.png)")
    return "\n\n".join(texts)


# --- the explorer ------------------------------------------------------------------------------------------


def explorer_text() -> str:
    """Of the page of a million tokens: what it weighs, how long it takes to open and to answer, and to be made."""
    found = record("explorer")
    page, commands, result = (found[name]["results"] for name in ("page", "commands", "reading"))
    what = ["page", "first paint, ms", "all drawn, ms"]
    what += [f"{name}, ms" for name in page["real"]["interactions"]]
    goals = ["30 MB", "2,000 ms", "-", *["100 ms"] * len(page["real"]["interactions"])]

    def numbers(of: Row) -> list[str]:
        opened = ("{open[first_paint]:spread}", "{open[ready]:spread}")
        inputs = [cell("{of:spread}", {"of": spread}) for spread in of["interactions"].values()]
        return [f"{of['bytes'] / 1e6:,.1f} MB", *(cell(own, of) for own in opened), *inputs]

    header = ["", f"{page['text']}, bytes", "made-up words", "goal"]
    rows = list(zip(what, numbers(page["real"]), numbers(page["words"]), goals, strict=True))
    seconds = {name: result[name]["seconds"] for name in ("read", "forward", "trace and page")}

    def against(ratio: float) -> str:
        return f"{ratio:.2f} times ({'met' if ratio <= 3 else 'not met'})"

    forward, read = (result["ratios"][f"trace and page / {name}"]["seconds"] for name in ("forward", "read"))
    return (
        f"{markdown_table(header, rows)}\n\n"
        "Medians (lowest-highest) in headless Chromium, machine: "
        f"{machine(found['page']['environment'])}; load average before: {page['load_average']:.1f}.\n\n"
        f"Making the page of {result['tokens']:,} tokens of {result['text']} may take 3 times as long as reading "
        f"them. As commands, from start to end: `trailmark read` {duration(commands['read']['median'])}, "
        f"`trailmark explore` {duration(commands['explore']['median'])}, "
        f"{against(commands['explore / read']['median'])}. "
        "Without start, tokenizing and a memory on the disk: "
        f"the page {duration(seconds['trace and page'])}; a full forward with losses "
        f"{duration(seconds['forward'])}, {against(forward)}; `model.read`, the lower layers only, "
        f"{duration(seconds['read'])}, {against(read)}: one full forward alone takes "
        f"{seconds['forward'] / seconds['read']:.1f} times as long. (Of a page's two forwards, the one without "
        "retrieval is the cheaper.)"
    )


# --- the comparison of models ------------------------------------------------------------------------------


def compare_parts_text() -> str:
    parts = compare_tables.parts(record("compare"))
    return "\n\n".join(on_machine(f"**{title}.** {text}", part["environment"]) for title, part, text in parts)


# --- beside other work ------------------------------------------------------------------------------------------


def waiting_text() -> str:
    """What it costs how threads wait, as ratios to OpenMP's default."""
    part = record("waiting")["waiting"]
    found = part["results"]
    defaults = {
        (r["busy"], r["work"]): r["seconds"]["median"] for r in found["rows"] if r["way"] == "default"
    }
    shown = crossed(
        [
            row | {"default": defaults[row["busy"], row["work"]]}
            for row in found["rows"]
            if row["way"] != "default"
        ],
        {
            "work": "{work}",
            "beside": lambda row: "a busy process" if row["busy"] else "nothing",
            "OpenMP's default, s": "{default:.2f}",
        },
        "{way}",
        "{ratio[median]:.2f} ({ratio[lowest]:.2f}-{ratio[highest]:.2f})",
    )
    own = {
        busy: [
            r["ratio"]["median"] for r in found["rows"] if (r["way"], r["busy"]) == (found["commands"], busy)
        ]
        for busy in (False, True)
    }
    alone = [seconds / defaults[True, work] for (busy, work), seconds in defaults.items() if not busy]
    reached = (
        f"The aim was at most 1.05 alone and 0.25 beside one busy process. What the commands start with gives "
        f"{min(own[False]):.2f} to {max(own[False]):.2f} and {min(own[True]):.2f} to {max(own[True]):.2f}. "
        f"Alone the default takes {min(alone):.2f} to {max(alone):.2f} of its time beside a busy process: no way of "
        f"waiting can be expected to take less."
    )
    return (
        f"A training step of the demo's model, {found['read']:,} tokens read, {found['generated']} tokens generated; "
        f"times as a multiple of the default's in the same situation, medians of {found['rounds']} rounds "
        f"(lowest-highest). The commands start with *{found['commands']}*.\n\n{shown}\n\n{reached}\n\n"
        f"Machine: {machine(part['environment'])}."
    )


# --- RULER ---------------------------------------------------------------------------------------------------------


def ruler_text() -> str:
    rows: Any = read_json(HERE / "ruler.json")
    columns: Columns = {
        "model": "{model}",
        "task": "{task}",
        "tokens": "{length:,}",
        "texts": "{texts}",
        "score": "{score:.2f}",
        "95% interval": lambda r: f"{r['low']:.2f}-{r['high']:.2f}",
        "seconds": "{seconds:,.0f}",
    }
    return on_machine(table(columns, rows), *(row["environment"] for row in rows))


# --- the server ------------------------------------------------------------------------------------------------


def serving_text() -> str:
    found = record("serving")
    first, together, many, kills, hostile = (
        found[name]["results"] for name in ("first", "together", "many", "kills", "hostile")
    )
    speeds, at = together["tokens_per_second"], first["milliseconds"]
    after = "lived on" if hostile["alive"] else "did not live on"
    return (
        "On loopback, the demo's model over a memory of 1M tokens "
        f"({machine(found['first']['environment'])}): the first token of a short question came after "
        f"{at['p50']:.0f} ms in the median of {first['questions']} and {at['p95']:.0f} ms in the 95th "
        f"percentile; {together['clients']} clients together got {speeds['together']:,.0f} tokens/s, "
        f"{together['ratio']:.1f} times as many as one after the other. Of {many['asked'] + many['left']:,} requests "
        f"by {many['clients']} clients {many['left']} left after their first token; of the other {many['asked']:,} "
        f"answers {many['wrong']} differed from what the question gets alone, where {many['needles_found_alone']} of "
        f"{many['needles']} needles are found, and RAM grew by {many['ram']['grown']['VmRSS']:.1%}. "
        f"After {kills['kills']} SIGKILLs "
        f"while texts were appended every memory was whole and held all {kills['acknowledged']} texts that were "
        f"acknowledged. Of {hostile['requests']} drawn requests that mean harm {hostile['failed']} got a 5xx, "
        f"{hostile['leaks']} were told of a path or of another client's text, and the server {after}. "
        "`python benchmarks/serving.py first together many kills hostile` measures it again."
    )


# --- which text stands where -------------------------------------------------------------------------------

DOCUMENTS: dict[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {
        "demo": demo_summary,
        "planted": billion.readme_line,
        "learning": learning_tables.summary_text,
        "reader": pretrained_reader_tables.summary,
        "gpu": gpu_line,
    },
    "docs/kernels.md": {"gpu": gpu_text},
    "benchmarks/README.md": {
        "demo": demo_text,
        "compare": compare_parts_text,
        "needles": needles_text,
        "explorer": explorer_text,
        "two hops": two_hop_text,
        "ops": ops_text,
        "ops of tokens": token_ops_text,
        "reading": reading_tables.text,
        "table 2": table_2.text,
        "summaries": summaries.text,
        "table 3": table_3.text,
        "training": training_text,
        "training step": training_step_text,
        "waiting": waiting_text,
    },
    "docs/landmark.md": {
        "landmark op": landmark_tables.op_text,
        "landmark decode": landmark_tables.decode_text,
        "landmark models": landmark_tables.models_text,
    },
    "docs/case-study.md": case_study_texts(),
    "docs/serving.md": {"serving": serving_text},
    "docs/scale.md": {
        "billion answers": billion.answers_text,
        "billion batches": billion.batches_text,
        "billion needles": billion_weights.needles_text,
        "billion law": billion_weights.law_text,
        "billion weights": billion_weights.bins_text,
        "billion scales": billion_weights.scales_text,
        "billion costs": billion.costs_text,
        "processes": parted_reading.commands_text,
        "processes on paper": parted_reading.paper_text,
    },
    "docs/evaluation.md": {"ruler": ruler_text},
    "docs/training.md": {
        "shared texts": context_parallel.measured_text,
        "shared texts on paper": context_parallel.paper_text,
    },
    "docs/learning-to-retrieve.md": {
        "losses": learning_tables.losses_text,
        "longer": learning_tables.longer_text,
        "labels": learning_tables.labels_text,
        "names": learning_tables.names_text,
        "scores": learning_tables.scores_text,
        "keys": learning_tables.keys_text,
        "lengths": learning_tables.lengths_text,
        "diagnosis": learning_tables.diagnosis_text,
        "ways": learning_tables.ways_text,
        "from nothing": learning_tables.from_nothing_text,
        "small": learning_tables.small_text,
    },
    "docs/pretrained.md": {
        "start": pretrained_tables.start_text,
        "hils": pretrained_hils_tables.text,
        "reader": pretrained_reader_tables.text,
        "answers": pretrained_reader_tables.answers_text,
        "trained": pretrained_tables.trained_text,
        "hours": pretrained_tables.hours_text,
    },
    "models/smollm2-135m-reader/README.md": {"reader": pretrained_reader_tables.reader_text},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "demo", type=Path, nargs="?", help="take over the numbers and figures of this demo first"
    )
    arguments = parser.parse_args()
    if arguments.demo is not None:
        take_over(arguments.demo)
    for name, texts in DOCUMENTS.items():
        fill(ROOT / name, texts)
    if (length := record("training").get("length", {})).get("results"):
        training_tables.length_figure(ROOT / "docs" / "training-length.png", length)
    billion.figure(ROOT / "docs" / "billion.png")


if __name__ == "__main__":
    main()
