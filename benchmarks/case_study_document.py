"""The tables, figures and texts of docs/case-study.md, from benchmarks/case_study.json: no number there is typed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from case_study_baselines import RULES
from case_study_scores import VARIANTS
from trailmark.report.values import listed

from trailmark.data.proportions import wilson_interval
from trailmark.report.console import duration
from trailmark.report.tables import markdown_table

Record = dict[str, Any]

WORKS = {
    "hott": "Homotopy Type Theory: Univalent Foundations of Mathematics, © 2013 The Univalent Foundations Program",
    "lebl-ra": "Basic Analysis by Jiří Lebl",
    "lebl-diffyqs": "Notes on Diffy Qs by Jiří Lebl",
    "stacks": "The Stacks Project, © 2005-2025 Johan de Jong and the Stacks Project authors",
    "symmetry": "Symmetry by M. Bezem, U. Buchholtz, P. Cagne, B. I. Dundas and D. R. Grayson",
}
LICENCES = {
    "GFDL-1.2-or-later": "GNU Free Documentation License 1.2 or later",
    "CC-BY-SA-3.0": "CC BY-SA 3.0",
    "CC-BY-SA-4.0": "CC BY-SA 4.0",
}
COLUMNS = {
    "model": "model",
    "bm25": "BM25",
    "bm25_two": "BM25, two chunks",
    "hash": "hashed bag",
    "recent": "most recent",
    "random": "random",
    "hubs": "most read before",
    "bm25_told": "BM25, told",
}
KINDS = {
    ("now", "label"): "label, by the reading chunk",
    ("early", "label"): "label, one chunk early",
    ("either", "label"): "label, by either",
    ("now", "name"): "a chunk with the name",
    ("now", "near"): "label or a neighbour",
}
VARIANT_NAMES = {
    "as-configured": "as above",
    "scale-1": "scale 1, not 4",
    "scale-1-no-noise": "scale 1, no noise in training",
    "scale-1-two-chunks": "scale 1, two chunks read, not eight",
    "not-normalized": "not normalised, scale 1 (the published scoring)",
}
assert set(COLUMNS) == {"model", *RULES}
assert set(VARIANT_NAMES) == set(VARIANTS)


def share(counted: Sequence[float], interval: bool = True) -> str:
    """[found, of how many]; an expected value has no interval."""
    found, of = counted
    if not of:
        return "-"
    low, high = wilson_interval(found, of)
    return f"{found / of:.3f}" + (f" ({low:.3f}-{high:.3f})" if interval else "")


def nats(found: dict[str, Any]) -> str:
    """A mean with its interval over chapters."""
    if found["mean"] is None:
        return "-"
    if found["low"] is None:
        return f"{found['mean']:+.3f}"
    return f"{found['mean']:+.3f} ({found['low']:+.3f} to {found['high']:+.3f})"


def _hits(record: Record, when: str, kind: str, group: int) -> dict[str, Any]:
    return next(
        own for own in record["hits"] if (own["when"], own["kind"], own["group"]) == (when, kind, group)
    )


def _cells(hits: dict[str, Any], number: int) -> list[str]:
    return [share(hits["rules"][rule][number], rule != "random") for rule in COLUMNS]


# --- texts between markers ---------------------------------------------------------------------------------


def model_text(record: Record) -> str:
    model, config, training = record["model"], record["config"], record["training"]
    layers = config["num_hidden_layers"]
    lines = [
        f"{model['architecture']} of {model['parameters']:,} parameters: {layers} layers of {config['hidden_size']}, "
        f"{config['vocab_size']:,} tokens, a window of {record['window']} positions, chunks of {record['chunk_size']} "
        f"tokens; each of {record['groups']} groups of upper layers reads {record['retrieved']} chunks "
        "([configs/laptop-drt-math.yaml](../configs/laptop-drt-math.yaml))."
    ]
    if "steps" in training:
        lines.append(
            f"Trained for {training['steps']:,} steps, {training['tokens']:,} tokens: "
            f"{training['tokens'] / training['corpus_tokens']:.1f} times the {training['corpus_tokens']:,} tokens of "
            f"{training['documents']} chapters. {duration(training['seconds'])} at "
            f"{training['tokens_per_second']:,.0f} tokens/s. Training loss at the end {training['loss']:.3f} nats per "
            "token"
            + "".join(
                f"; on validation {loss:.3f} at step {step:,}" for step, loss in training["validation"][-1:]
            )
            + "."
        )
    else:
        lines.append("Not trained to its end: these numbers are of a checkpoint.")
    lines.append(f"Weights: SHA-256 `{model['weights_sha256'][:16]}...`")
    return "\n".join(lines)


def chapters_text(record: Record) -> str:
    rows = [
        [
            chapter["file"],
            f"{chapter['tokens']:,}",
            f"{chapter['chunks']:,}",
            f"{chapter['labels']:,}",
            f"{sum(chapter['macros'].values()):,}",
            f"{chapter['references']:,}",
            f"{chapter['loss_without'] / chapter['bearing']:.3f}",
            f"{chapter['loss'] / chapter['bearing']:.3f}",
            f"{(chapter['loss_without'] - chapter['loss']) / chapter['bearing']:.3f}",
        ]
        for chapter in record["chapters"]
    ]
    header = [
        "chapter",
        "tokens",
        "chunks",
        "labels",
        "named again",
        "counted",
        "loss without",
        "loss",
        "gain",
    ]
    macros: dict[str, int] = {}
    other: dict[str, int] = {}
    for chapter in record["chapters"]:
        for sums, own in ((macros, chapter["macros"]), (other, chapter["other_macros"])):
            for name, count in own.items():
                sums[name] = sums.get(name, 0) + count

    def listed(counts: dict[str, int]) -> str:
        return ", ".join(
            f"`\\{name}` {count:,}" for name, count in sorted(counts.items(), key=lambda x: -x[1])
        )

    text = f"{markdown_table(header, rows)}\n\nMacros that name a label of their chapter: {listed(macros)}."
    if other:
        text += f" Not counted, though given a label's name: {listed(other)}."
    return text


def found_text(record: Record) -> str:
    """The main table: by distance, as many chunks as all groups read together."""
    hits = _hits(record, "now", "label", -1)
    rows = [
        [name, f"{hits['rules']['model'][number][1]:,}", *_cells(hits, number)]
        for number, name in enumerate(record["bins"])
        if hits["rules"]["model"][number][1]
    ]
    apart = record["differences"]
    shown = ", ".join(f"{nats(apart[rule])} over {COLUMNS[rule]}" for rule in RULES)
    return (
        f"{markdown_table(['tokens back', 'references', *COLUMNS.values()], rows)}\n\n"
        f"{hits['chunks']:.1f} chunks each, on average. The model's share less each rule's, with intervals over "
        f"chapters: {shown}."
    )


def sizes_text(record: Record) -> str:
    rows = []
    for group in (*range(record["groups"]), -1):
        hits = _hits(record, "now", "label", group)
        name = "all groups" if group < 0 else f"group {group}"
        weight = "-" if group < 0 else f"{record['weights'][group]['weight']:.3f}"
        rows.append([name, f"{hits['chunks']:.1f}", *_cells(hits, 0), weight])
    return markdown_table(["", "chunks", *COLUMNS.values(), "weight"], rows)


def works_text(record: Record) -> str:
    """One work has most of the references: each alone."""
    rows = [
        [
            WORKS.get(work, work).partition(",")[0].partition(" by ")[0].partition(":")[0],
            f"{rules['model'][1]:,}",
            *(share(rules[rule], rule != "random") for rule in COLUMNS),
        ]
        for work, rules in record["works"].items()
        if rules["model"][1]
    ]
    return markdown_table(["work", "references", *COLUMNS.values()], rows)


def candidates_text(record: Record) -> str:
    """By how far the chapter was read."""
    rows = []
    for own in record["candidates"]:
        rules = own["rules"]
        name = f"from {own['low']:,} on" if own["high"] is None else f"{own['low']:,}-{own['high']:,}"
        if rules["model"][1]:
            cells = [share(rules[rule], rule != "random") for rule in COLUMNS]
            rows.append([name, f"{rules['model'][1]:,}", *cells, nats(own["gain"])])
    return markdown_table(["candidates", "references", *COLUMNS.values(), "gain on names"], rows)


def kinds_text(record: Record) -> str:
    rows = []
    for (when, kind), name in KINDS.items():
        hits = _hits(record, when, kind, -1)
        rows.append([name, f"{hits['rules']['model'][0][1]:,}", *_cells(hits, 0)])
    return markdown_table(["what counts", "references", *COLUMNS.values()], rows)


def habits_text(record: Record) -> str:
    own = record["habits"]
    shared = ", ".join(f"{own['shared'][rule]:.1%} by {COLUMNS[rule]}" for rule in RULES)
    return (
        f"In {own['reading_chunks']:,} chunks the groups read {own['chunks_read']:.1f} different chunks together; the "
        f"first and the last group share {own['agree']:.1f} of them. {own['kept']:.1%} of what a chunk reads, the "
        f"chunk before it read too. {own['never_read']:.1%} of all chunks are never read, and the tenth that is read "
        f"most takes {own['most_read']:.1%} of all reads. Half of what is read stands "
        f"{own['distance']['q25']:,.0f} to {own['distance']['q75']:,.0f} tokens back (median "
        f"{own['distance']['median']:,.0f}). Of the chunks read, other rules would have chosen, among as many: "
        f"{shared}."
    )


def scores_text(record: Record) -> str:
    if (scores := record["scores"]) is None:
        return "This model learns no scores, or no chapter is long enough."

    def told(own: dict[str, Any]) -> str:
        popular, apart = ([f"{x[key]:{form}}" for x in own["groups"]] for key, form in _OF_SCORES)
        return (
            f"{listed(popular)} of the variance of scores is the past chunk's own, whoever asks; their standard "
            f"deviation is {listed(apart)}, and the landmark vectors of two chunks have a mean cosine of "
            f"{own['cosine']:.3f}"
        )

    groups = listed([str(n) for n in range(record["groups"])])
    return (
        f"In the first {scores['tokens']:,} tokens of each of {scores['trained']['texts']} chapters, groups {groups}: "
        f"{told(scores['trained'])}. Before training: {told(scores['untrained'])}."
    )


_OF_SCORES = (("popular", ".1%"), ("deviation", ".2f"))


def variants_text(record: Record) -> str:
    if not (variants := record.get("variants")):
        return "Not measured: `python benchmarks/case_study.py variants`."
    rows = []
    for own in variants:
        scores = own["scores"]["trained"] if own["scores"] else {"groups": [], "cosine": None}
        rows.append(
            [
                VARIANT_NAMES[own["name"]],
                f"{own['training']['validation'][-1][1]:.3f}",
                nats(own["total_gain"]),
                *(share(own["label"][rule], rule != "random") for rule in ("model", "bm25", "random")),
                *(listed([f"{x[key]:{form}}" for x in scores["groups"]]) or "-" for key, form in _OF_SCORES),
                "-" if scores["cosine"] is None else f"{scores['cosine']:.3f}",
            ]
        )
    header = [
        "scores",
        "validation loss",
        "gain",
        "labels found",
        "labels by BM25",
        "labels at random",
        "popular",
        "deviation",
        "cosine",
    ]
    steps, tokens = (variants[0]["training"][name] for name in ("steps", "tokens"))
    return f"After {steps:,} steps of training ({tokens:,} tokens):\n\n{markdown_table(header, rows)}"


def gains_text(record: Record) -> str:
    parts = list(dict.fromkeys(own["part"] for own in record["gains"]))
    at = {(own["part"], own["bin"]): own for own in record["gains"]}
    names = {
        "all": "all names",
        "label read": "the label's chunk is read",
        "name read, label not": "another chunk with the name is read, the label's not",
        "name not read": "no chunk with the name is read",
    }
    first = [
        [
            names[part],
            f"{own['names']:,}",
            *(f"{own[key]:.3f}" if own[key] is not None else "-" for key in ("loss_without", "loss")),
            nats(own["gain"]),
        ]
        for part in parts
        for own in [at[part, "all"]]
    ]
    chapters = record["chapters"]
    bearing = sum(chapter["bearing"] for chapter in chapters)
    sums = [sum(chapter[key] for chapter in chapters) / bearing for key in ("loss_without", "loss")]
    first.append(["all tokens", "", *(f"{value:.3f}" for value in sums), nats(record["total_gain"])])
    second = [
        [name, *(f"{nats(at[part, name]['gain'])}, {at[part, name]['names']:,}" for part in parts)]
        for name in record["bins"]
        if at["all", name]["names"]
    ]
    better = sum(chapter["better"] for chapter in chapters) / sum(chapter["reading"] for chapter in chapters)
    return (
        f"{markdown_table(['tokens of', 'names', 'loss without', 'loss', 'gain'], first)}\n\n"
        f"{better:.1%} of the tokens in chunks that read something cost less with it. By distance, gain and names:\n\n"
        f"{markdown_table(['tokens back', *(names[part] for part in parts)], second)}"
    )


def seen_text(record: Record) -> str:
    names = {
        "in sight": "in the window too (this chunk, the one before)",
        "read only": "in a chunk that is read, not in the window",
        "in neither": "in neither",
    }
    rows = [
        [
            names[name],
            f"{own['tokens']:.1%}",
            "-" if own["loss_without"] is None else f"{own['loss_without']:.3f}",
            nats(own["gain"]),
            f"{own['of_all']:.1%}",
        ]
        for name, own in record["seen"].items()
    ]
    return markdown_table(
        ["the same token stood before", "of tokens", "loss without", "gain", "of all gain"], rows
    )


def cases_text(record: Record) -> str:
    texts = [f"The rule, written before any was seen: {record['rule']}"]
    if len(record["cases"]) < 3:
        texts.append(f"Only {len(record['cases'])} works have such a reference.")
    about = {chapter["file"]: chapter for chapter in record["chapters"]}
    for number, case in enumerate(record["cases"], 1):
        texts.append(_case_text(number, case, about[case["file"]]))
    return "\n\n".join(texts)


def _case_text(number: int, case: dict[str, Any], chapter: dict[str, Any]) -> str:
    licence = LICENCES.get(chapter["licence"], chapter["licence"])
    ranks = ", ".join(
        f"{COLUMNS[rule]} {rank + 1:,}" for rule, rank in case["ranks"].items() if rank is not None
    )
    tokens = [
        [
            _code(token["text"]),
            *(f"{token[key]:.2f}" for key in ("loss_without", "loss")),
            f"{token['loss_without'] - token['loss']:+.2f}",
        ]
        for token in case["tokens"]
    ]
    lines = []
    for group, reads in enumerate(case["groups"]):
        lines.append(f"group {group}")
        for read in reads:
            mark = "LABEL" if read["label"] else "name" if read["name"] else ""
            lines.append(
                f"  {read['chunk']:>6,}  {read['weight']:.3f}  {read['distance']:>8,} back  {mark:<5}  {read['text']}"
            )
    return "\n\n".join(
        [
            f"### {number}. `{case['name']}`, {case['distance']:,} tokens back",
            f"*{chapter['title']}*, from {WORKS.get(case['work'], case['work'])} ({chapter['source']}; {licence}), "
            f"`{case['file']}`. "
            f"Chunk {case['chunk']:,} refers to a label in chunk {case['label_chunk']:,}, one of "
            f"{case['candidates']:,} candidates. Retrieval takes {case['gain']:.2f} nats from the name's "
            f"{len(case['tokens'])} tokens ({case['chunk_gain']:+.2f} in the whole chunk). The label's chunk among all "
            f"candidates, by other rules: {ranks}.",
            "The asking chunk, and the chunk that reads:",
            _block(f"{case['asking_text']}\n[...] chunk {case['chunk']:,}:\n{case['reading_text']}"),
            "The chunk with the label:",
            _block(case["label_text"]),
            "What each group read: chunk, weight, tokens back (LABEL: the label's chunk; name: it has the name too):",
            _block("\n".join(lines)),
            markdown_table(["token of the name", "loss without", "loss", "gain"], tokens),
            f"![The explorer with chunk {case['chunk']} of {case['file']} chosen](case-study-{number}.png)",
        ]
    )


def _code(text: str) -> str:
    """In a table's cell; GitHub ends a cell at a | in code too."""
    return f"`{text}`".replace("|", "\\|") if "`" not in text else f"`` {text} ``".replace("|", "\\|")


def _block(text: str) -> str:
    """As it stands, whatever it holds."""
    fence = "~" * max(3, *(len(run) + 1 for run in re.findall("~+", text)), 3)
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def machine_text(record: Record) -> str:
    where = record["environment"]
    threads = f"{where['threads']} thread{'s' * (where['threads'] > 1)}"
    return (
        f"Measured on {where['processor']}, {threads}, "
        f"trailmark {where['trailmark']}, torch {where['torch']}, {where['date']}."
    )


TEXTS = {
    "model": model_text,
    "chapters": chapters_text,
    "found": found_text,
    "works": works_text,
    "candidates": candidates_text,
    "sizes": sizes_text,
    "kinds": kinds_text,
    "habits": habits_text,
    "scores": scores_text,
    "variants": variants_text,
    "gains": gains_text,
    "seen": seen_text,
    "cases": cases_text,
    "machine": machine_text,
}


def fill(path: Path, record: Record) -> None:
    """Put every text between its markers.

    Raises:
        ValueError: a marker is missing or there twice.
    """
    text = path.read_text(encoding="utf-8")
    for name, make in TEXTS.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(
                f"{path}: expected {begin} and {end} once each. Write them where the text belongs."
            )
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{make(record)}\n{end}{rest.split(end)[1]}"
    path.write_text(text, encoding="utf-8")
