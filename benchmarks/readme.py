"""Put measured numbers into README.md and benchmarks/README.md: nothing there is typed by hand.

python benchmarks/readme.py [runs/demo]    with a demo's folder, its numbers and figures are taken over first
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import compare_tables
import landmark_tables
import training_tables
from ops import table as ops_table

from trailmark.data.proportions import wilson_interval
from trailmark.demo import NAMES
from trailmark.report.console import duration, size
from trailmark.report.tables import markdown_table, needle_table

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "benchmarks"


def take_over(run: Path) -> None:
    """Keep a demo's numbers and figures."""
    record = json.loads((run / "demo.json").read_text())
    for result in record["results"]:
        result.pop("asked", None)  # single questions are for the figures; the counts stay
    (HERE / "demo.json").write_text(json.dumps(record, indent=1) + "\n")
    figures = {"needles-1-length.png": "accuracy.png", "chunks-1.png": "chunks-read.png"}
    for drawn, name in figures.items():
        shutil.copy(run / "report-figures" / drawn, ROOT / "docs" / name)


def machine(where: dict[str, Any]) -> str:
    threads = f"{where['threads']} thread{'s' * (where['threads'] > 1)}"
    return f"{where['processor']}, {threads}, torch {where['torch']}, {where['date']}"


def demo_text() -> str:
    record = json.loads((HERE / "demo.json").read_text())
    results = [r | {"model": NAMES[r["model"]]} for r in record["results"]]
    trained = ", ".join(
        f"{NAMES[name]} {duration(t['seconds'])} at {t['tokens_per_second']:,.0f} tokens/s"
        for name, t in record["training"].items()
    )
    return (
        f"{needle_table(results, record['train_length'])}\n\n"
        f"Trained: {trained}. Machine: {machine(record['environment'])}, seed {record['settings']['seed']}.\n\n"
        f"![Accuracy by length](docs/accuracy.png)"
    )


def grid_text() -> str:
    """The README's: needles by length and depth, and what the suites' time goals became."""
    record = json.loads((HERE / "evaluation.json").read_text())
    cells = record["grid"]
    depths = sorted({cell["depth"] for cell in cells})
    rows = []
    for length in sorted({cell["length"] for cell in cells}):
        found = {cell["depth"]: cell for cell in cells if cell["length"] == length}
        right, questions = (sum(cell[name] for cell in found.values()) for name in ("correct", "questions"))
        low, high = wilson_interval(right, questions)
        shown = [f"{found[depth]['accuracy']:.3f}" for depth in depths]
        factor = length // record["train_length"]
        rows.append(
            [f"{length:,}", f"{factor:,}x", *shown, f"{right} of {questions}", f"{low:.3f}-{high:.3f}"]
        )
    header = ["tokens", "x train", *(f"depth {depth:g}" for depth in depths), "all depths", "95% interval"]
    (million,), report = record["million"], record["report"]
    return (
        f"{markdown_table(header, rows)}\n\n"
        f"{cells[0]['questions']} questions in each cell. {million['length']:,} tokens with "
        f"{million['questions']} questions on branches of one reading: {million['correct']} right in "
        f"{duration(million['seconds'])} ({duration(million['seconds_reading'])} of it reading). "
        f"A report of {report['runs']} runs: {report['seconds']:.1f} s. Machine: {machine(record['environment'])}.\n\n"
        "![Needles found by length and depth](docs/needle-grid.png)"
    )


def two_hop_text() -> str:
    record = json.loads((HERE / "two_hop.json").read_text())
    cases = sorted(record["cases"], key=lambda case: (-case["groups"], -case["landmarks"], case["seed"]))
    rows = []
    for case in cases:
        cells = []
        for r in case["results"]:
            found = ", ".join(f"{share:.2f}" for share in r["recall_by_hop"])
            low, high = r["accuracy_low"], r["accuracy_high"]
            cells += [f"{r['accuracy']:.3f} ({low:.3f}-{high:.3f})", found]
        rows.append([str(case["groups"]), str(case["landmarks"]), str(case["seed"]), *cells])
    header = ["groups", "landmarks", "seed"]
    for r in cases[0]["results"]:
        header += [f"right at {r['length'] // record['train_length']}x", "hop 1, 2 found"]
    first = cases[0]
    return (
        f"{markdown_table(header, rows)}\n\n"
        f"{first['results'][0]['questions']} questions at each length ({record['train_length']:,} tokens are 1x); "
        f"right is all five digits. The same questions and steps ({first['steps']:,}). "
        f"Machine: {machine(first['environment'])}."
    )


def needles_text() -> str:
    cases = json.loads((HERE / "needles.json").read_text())
    demo = json.loads((HERE / "demo.json").read_text())
    asked = [(r["length"], r["needles"]) for r in cases[0]["results"]]
    own = {"case": "demo", "seed": demo["settings"]["seed"], "steps": demo["steps"]["drt"]}
    own["results"] = [r for r in demo["results"] if r["model"] == "drt"]
    rows = []
    for case in sorted([own, *cases], key=lambda c: (c["case"] != "demo", c["case"], c["seed"])):
        found = {(r["length"], r["needles"]): f"{r['accuracy']:.3f}" for r in case["results"]}
        cells = [found.get(task, "-") for task in asked]
        rows.append([case["case"], str(case["seed"]), f"{case['steps']:,}", *cells])
    header = ["case", "seed", "steps", *(f"{n} in {length:,}" for length, n in asked)]
    questions = min(r["questions"] for case in cases for r in case["results"])
    return (
        f"{markdown_table(header, rows)}\n\nAt least {questions} questions each; columns: needles in tokens. "
        f"Machine: {machine(cases[0]['environment'])}."
    )


def ops_text() -> str:
    record = json.loads((HERE / "ops.json").read_text())
    return f"{ops_table(record['results'])}\n\nMachine: {machine(record['environment'])}."


def speed_text() -> str:
    """The README's table: GCA and a training step on a CPU, and what a GPU showed, if one did."""
    record = json.loads((HERE / "ops.json").read_text())
    most = max(r["tokens"] for r in record["results"] if r["op"] == "gca")
    passes = [r for r in record["results"] if (r["op"], r["tokens"], r["backward"]) == ("gca", most, True)]
    names = {"torch": "trailmark", "reference": "gathers and keeps all", "sdpa": "SDPA on gathered keys"}
    allocators = {"kept": "kept", "default": "given back (glibc's default)"}
    rows = []
    for r in passes:
        if r["implementation"] not in names:
            continue
        alike = ("implementation", "dtype", "allocator")
        own = next(x for x in passes if [x[key] for key in alike] == ["torch", r["dtype"], r["allocator"]])
        rows.append(
            [
                names[r["implementation"]],
                r["dtype"],
                allocators[r["allocator"]],
                f"{r['seconds']['p50'] * 1000:,.0f} ms",
                f"{r['seconds']['p50'] / own['seconds']['p50']:.1f}x",
                f"{r['extra_bytes'] / 2**20:,.0f} MiB",
            ]
        )
    header = [f"GCA, {most:,} tokens, d = 512", "dtype", "freed memory", "time", "of ours", "extra memory"]
    text = markdown_table(header, rows)
    training = json.loads((HERE / "training_step.json").read_text())
    steps = training["results"]
    ratios = " and ".join(f"{r['ratio']:.2f}x ({r['dtype']})" for r in steps)
    text += (
        f"\n\nA training step of a DRT (d = {steps[0]['sizes']['hidden_size']}, "
        f"{steps[0]['sizes']['num_hidden_layers']} layers, {steps[0]['tokens']:,} tokens) takes {ratios} the time of "
        f"the model with a window alone; FLOPs give {steps[0]['flops_ratio']:.2f}x. Forward and backward; machine: "
        f"{machine(training['environment'])}."
    )
    if (HERE / "gpu.json").exists():
        from gpu import goals

        gpu = json.loads((HERE / "gpu.json").read_text())
        text += f"\n\n{gpu['device']}, torch {gpu['torch']}, triton {gpu['triton']}, {gpu['date']}:\n\n"
        return text + markdown_table(["what", "at", "found", "goal"], goals(gpu))
    text += (
        "\n\nThe kernels have not run on a GPU yet (checked under Triton's interpreter, compiled for sm_90): "
    )
    return text + "`python benchmarks/gpu.py` checks and times them."


def spread(of: dict[str, float], form: str = ",.0f") -> str:
    return f"{of['median']:{form}} ({of['lowest']:{form}}-{of['highest']:{form}})"


def reading_text() -> str:
    """The tables of benchmarks/reading.json, part by part; those that were not measured are left out."""
    record = json.loads((HERE / "reading.json").read_text())
    parts = {
        "speed": ("Tokens/s: median (lowest-highest) of 7 rounds, interleaved.", speed_table),
        "far": ("The demo's DRT, 300 questions at any place of a chunk.", far_table),
        "token": ("Milliseconds per generated token: median (lowest-highest) of 7 rounds.", token_table),
        "memory": (
            "A process that reads 1,048,576 tokens, demo size; growth after the first 131,072.",
            memory_table,
        ),
        "saving": ("Seconds, a memory of 1,048,576 tokens, demo size.", saving_table),
        "search": ("The 8 best of 262,144 landmarks, one query at a time.", search_table),
    }
    texts = []
    for name, (title, table) in parts.items():
        if name in record:
            part = record[name]
            texts.append(f"{title} Machine: {machine(part['environment'])}.\n\n{table(part['results'])}")
    return "\n\n".join(texts)


def far_text() -> str:
    part = json.loads((HERE / "reading.json").read_text())["far"]
    return f"{far_table(part['results'])}\n\n300 questions each. Machine: {machine(part['environment'])}."


def speed_table(results: list[dict[str, Any]]) -> str:
    rows = []
    for r in results:
        found = r["tokens_per_second"]
        ratio = found["window"]["median"] / found["read"]["median"]
        cells = [spread(found[name]) for name in ("read", "drt", "window")]
        rows.append([r["size"], f"{r['length']:,}", *cells, f"{ratio:.2f}"])
    header = ["size", "after tokens", "DRT read", "DRT full forward", "window only, full forward"]
    return markdown_table([*header, "time of read / window only"], rows)


def far_table(results: list[dict[str, Any]]) -> str:
    header = ["tokens", "x train length", "tier", "missed", "recall", "tokens/s", "reading", "memory"]
    rows = [
        [
            f"{r['length']:,}",
            f"{r['length'] // 1024:,}",
            f"{r['memory_tier']}, {r['memory_dtype']}",
            f"{r['questions'] - r['correct']} of {r['questions']}",
            f"{r['recall']:.3f}",
            f"{r['tokens_per_second']:,.0f}",
            duration(r["seconds_reading"]),
            size(r["memory_bytes"]),
        ]
        for r in results
    ]
    return markdown_table(header, rows)


def token_table(results: list[dict[str, Any]]) -> str:
    rows = []
    for r in results:
        found = r["milliseconds"]
        for length in ("4096", "1048576"):
            drt, window = found[f"drt {length}"], found[f"window {length}"]
            ratio = drt["median"] / window["median"]
            rows.append(
                [r["size"], f"{int(length):,}", spread(drt, ".2f"), spread(window, ".2f"), f"{ratio:.2f}"]
            )
    return markdown_table(["size", "after tokens", "DRT", "window only", "ratio"], rows)


def memory_table(results: list[dict[str, Any]]) -> str:
    header = ["tier", "memory by the formula", "growth in RAM", "of it anonymous", "growth of the window"]
    rows = [
        [r["tier"], *(size(r["grown"][name]) for name in ("memory", "VmRSS", "RssAnon", "window"))]
        for r in results
    ]
    return markdown_table(header, rows)


def saving_table(results: list[dict[str, Any]]) -> str:
    rows = [[name, spread(found, ".3f")] for r in results for name, found in r["seconds"].items()]
    return markdown_table(["", f"seconds ({size(results[0]['memory_bytes'])})"], rows)


def search_table(results: list[dict[str, Any]]) -> str:
    rows = [
        [
            str(r["E"]),
            spread(r["milliseconds"]["exact"], ".2f"),
            spread(r["milliseconds"]["faiss"], ".2f"),
            f"{r['recall']:.3f}",
            f"{r['build_seconds']:.1f} s",
        ]
        for r in results
    ]
    return markdown_table(["E", "exact, ms", "faiss, ms", "recall of faiss", "index built in"], rows)


def training_text() -> str:
    """The parts of benchmarks/training.json that were measured, on CUDA besides, and the table of real text."""
    texts = []
    for name in ("training", "training-cuda"):
        found = training_tables.record(name)
        for text, where in training_tables.part_texts(found):
            texts.append(f"{text}\n\nMachine: {machine(where)}.")
        if name == "training" and found.get("length", {}).get("results"):
            training_tables.length_figure(ROOT / "docs" / "training-length.png", found["length"])
            texts.append("![Time per token by context length](../docs/training-length.png)")
    if (found := training_tables.record("training_text")).get("results"):
        texts.append(
            f"**Real text.** {training_tables.text_text(found)}\n\nMachine: {machine(found['environment'])}."
        )
    return "\n\n".join(texts)


def explorer_text() -> str:
    """Of the page of a million tokens: what it weighs, how long it takes to open and to answer, and to be made."""
    record = json.loads((HERE / "explorer.json").read_text())
    made, page = record["reading"], record["page"]
    real = f"{page['results']['text']}, bytes"
    found = {real: page["results"]["real"], "made-up words": page["results"]["words"]}
    rows = [
        ["page", *(f"{r['bytes'] / 1e6:,.1f} MB" for r in found.values()), "30 MB"],
        ["first paint, ms", *(spread(r["open"]["first_paint"]) for r in found.values()), "2,000 ms"],
        ["all drawn, ms", *(spread(r["open"]["ready"]) for r in found.values()), "-"],
    ]
    for name in found[real]["interactions"]:
        rows.append([f"{name}, ms", *(spread(r["interactions"][name]) for r in found.values()), "100 ms"])
    result, both = made["results"], record["commands"]["results"]
    seconds = {name: result[name]["seconds"] for name in ("read", "forward", "trace and page")}

    def against(ratio: float) -> str:
        return f"{ratio:.2f} times ({'met' if ratio <= 3 else 'not met'})"

    forward, read = (result["ratios"][f"trace and page / {name}"]["seconds"] for name in ("forward", "read"))
    return (
        f"{markdown_table(['', *found, 'goal'], rows)}\n\n"
        f"Medians (lowest-highest) in headless Chromium, machine: {machine(page['environment'])}; load average before: "
        f"{page['results']['load_average']:.1f}.\n\n"
        f"Making the page of {result['tokens']:,} tokens of {result['text']} may take 3 times as long as reading "
        f"them. As commands, from start to end: `trailmark read` {duration(both['read']['median'])}, "
        f"`trailmark explore` {duration(both['explore']['median'])}, {against(both['explore / read']['median'])}. "
        "Without start, tokenizing and a memory on the disk: "
        f"the page {duration(seconds['trace and page'])}; a full forward with losses "
        f"{duration(seconds['forward'])}, {against(forward)}; `model.read`, the lower layers only, "
        f"{duration(seconds['read'])}, {against(read)}: one full forward alone takes "
        f"{seconds['forward'] / seconds['read']:.1f} times as long. (Of a page's two forwards, the one without "
        "retrieval is the cheaper.)"
    )


def compare_record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "compare.json").read_text())
    return found


def compare_text() -> str:
    """The README's table of all rows."""
    record = compare_record()
    return f"{compare_tables.summary(record)}\n\n{compare_tables.summary_note(record)}"


def compare_parts_text() -> str:
    """The tables of each part that was measured."""
    texts = []
    for title, part, text in compare_tables.parts(compare_record()):
        texts.append(f"**{title}.** {text}\n\nMachine: {machine(part['environment'])}.")
    return "\n\n".join(texts)


def fill(path: Path, name: str, text: str) -> None:
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, rest = path.read_text().split(begin)
    path.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("demo", type=Path, nargs="?", help="take over the numbers and figures of this demo first")
    arguments = parser.parse_args()
    if arguments.demo is not None:
        take_over(arguments.demo)
    fill(ROOT / "README.md", "demo", demo_text())
    fill(ROOT / "README.md", "grid", grid_text())
    fill(ROOT / "README.md", "far", far_text())
    fill(ROOT / "README.md", "speed", speed_text())
    fill(ROOT / "README.md", "compare", compare_text())
    fill(HERE / "README.md", "compare", compare_parts_text())
    fill(HERE / "README.md", "needles", needles_text())
    fill(HERE / "README.md", "explorer", explorer_text())
    fill(HERE / "README.md", "two hops", two_hop_text())
    fill(HERE / "README.md", "ops", ops_text())
    fill(HERE / "README.md", "reading", reading_text())
    fill(HERE / "README.md", "training", training_text())
    for name, make in (
        ("op", landmark_tables.op_text),
        ("decode", landmark_tables.decode_text),
        ("models", landmark_tables.models_text),
    ):
        text, where = make()
        fill(ROOT / "docs" / "landmark.md", f"landmark {name}", f"{text}\n\nMachine: {machine(where)}.")


if __name__ == "__main__":
    main()
