"""The tables and texts of docs/case-study.md, from benchmarks/case_study.json: no number there is typed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tables import Columns, Row, machine, record, table

from case_study.baselines import RULES
from case_study.scores import VARIANTS
from trailmark.report.console import duration
from trailmark.statistics import wilson_interval
from trailmark.values import listed

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
RIVALS = {"model": "model", **RULES}  # the columns of every table of what was found
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
assert set(VARIANT_NAMES) == set(VARIANTS)


def share(counted: Sequence[float], interval: bool = True) -> str:
    """[found, of how many]; an expected value has no interval."""
    found, of = counted
    if not of:
        return "-"
    low, high = wilson_interval(found, of)
    return f"{found / of:.3f}" + (f" ({low:.3f}-{high:.3f})" if interval else "")


def nats(found: Row) -> str:
    """A mean with its interval over chapters."""
    if found["mean"] is None:
        return "-"
    if found["low"] is None:
        return f"{found['mean']:+.3f}"
    return f"{found['mean']:+.3f} ({found['low']:+.3f} to {found['high']:+.3f})"


def _gain(own: Row) -> str:
    return nats(own["gain"])


def _hits(found: Record, when: str, kind: str, group: int, number: int = 0) -> Row:
    """What was found in one place of BINS: ``rules`` by rule, ``chunks`` that each read."""
    own = next(
        own for own in found["hits"] if (own["when"], own["kind"], own["group"]) == (when, kind, group)
    )
    return own | {"rules": {rule: counted[number] for rule, counted in own["rules"].items()}}


def _shares(rules: Sequence[str]) -> Columns:
    """A column for each rule: the share of references that it finds."""

    def column(rule: str) -> Callable[[Row], str]:
        return lambda row: share(row["rules"][rule], rule != "random")

    return {RIVALS[rule]: column(rule) for rule in rules}


REFERENCES: Columns = {"references": lambda row: f"{row['rules']['model'][1]:,}"}
BY_RULE = _shares(list(RIVALS))


def _any(rows: Sequence[Row]) -> list[Row]:
    """Those with a reference."""
    return [row for row in rows if row["rules"]["model"][1]]


# --- texts between marks -----------------------------------------------------------------------------------


def model_text(found: Record) -> str:
    model, config, training = found["model"], found["config"], found["training"]
    layers = config["num_hidden_layers"]
    lines = [
        f"{model['architecture']} of {model['parameters']:,} parameters: {layers} layers of {config['hidden_size']}, "
        f"{config['vocab_size']:,} tokens, a window of {found['window']} positions, chunks of {found['chunk_size']} "
        f"tokens; each of {found['groups']} groups of upper layers reads {found['retrieved']} chunks "
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


CHAPTERS: Columns = {
    "chapter": "{file}",
    "tokens": "{tokens:,}",
    "chunks": "{chunks:,}",
    "labels": "{labels:,}",
    "named again": lambda chapter: f"{sum(chapter['macros'].values()):,}",
    "counted": "{references:,}",
    "loss without": lambda chapter: f"{chapter['loss_without'] / chapter['bearing']:.3f}",
    "loss": lambda chapter: f"{chapter['loss'] / chapter['bearing']:.3f}",
    "gain": lambda chapter: f"{(chapter['loss_without'] - chapter['loss']) / chapter['bearing']:.3f}",
}


def chapters_text(found: Record) -> str:
    def counted(name: str) -> str:
        sums = sum((Counter(chapter[name]) for chapter in found["chapters"]), Counter())
        return ", ".join(f"`\\{macro}` {count:,}" for macro, count in sums.most_common())

    text = f"{table(CHAPTERS, found['chapters'])}\n\nMacros that name a label of their chapter: {counted('macros')}."
    if other := counted("other_macros"):
        text += f" Not counted, though given a label's name: {other}."
    return text


def found_text(found: Record) -> str:
    """The main table: by distance, as many chunks as all groups read together."""
    rows = [
        _hits(found, "now", "label", -1, number) | {"bin": name} for number, name in enumerate(found["bins"])
    ]
    apart = found["differences"]
    shown = ", ".join(f"{nats(apart[rule])} over {name}" for rule, name in RULES.items())
    return (
        f"{table({'tokens back': '{bin}', **REFERENCES, **BY_RULE}, _any(rows))}\n\n"
        f"{rows[0]['chunks']:.1f} chunks each, on average. The model's share less each rule's, with intervals over "
        f"chapters: {shown}."
    )


def sizes_text(found: Record) -> str:
    groups = [
        _hits(found, "now", "label", group) | {"name": f"group {group}"} | found["weights"][group]
        for group in range(found["groups"])
    ]
    rows = [*groups, _hits(found, "now", "label", -1) | {"name": "all groups"}]
    return table({"": "{name}", "chunks": "{chunks:.1f}", **BY_RULE, "weight": "{weight:.3f}"}, rows)


def works_text(found: Record) -> str:
    """One work has most of the references: each alone."""

    def name(row: Row) -> str:
        work: str = row["work"]
        return WORKS.get(work, work).partition(",")[0].partition(" by ")[0].partition(":")[0]

    rows = [{"work": work, "rules": rules} for work, rules in found["works"].items()]
    return table({"work": name, **REFERENCES, **BY_RULE}, _any(rows))


def candidates_text(found: Record) -> str:
    """By how far the chapter was read."""

    def name(row: Row) -> str:
        return f"from {row['low']:,} on" if row["high"] is None else f"{row['low']:,}-{row['high']:,}"

    columns = {"candidates": name, **REFERENCES, **BY_RULE, "gain on names": _gain}
    return table(columns, _any(found["candidates"]))


def kinds_text(found: Record) -> str:
    rows = [_hits(found, *asked, -1) | {"name": name} for asked, name in KINDS.items()]
    return table({"what counts": "{name}", **REFERENCES, **BY_RULE}, rows)


def habits_text(found: Record) -> str:
    own = found["habits"]
    shared = ", ".join(f"{own['shared'][rule]:.1%} by {name}" for rule, name in RULES.items())
    return (
        f"In {own['reading_chunks']:,} chunks the groups read {own['chunks_read']:.1f} different chunks together; the "
        f"first and the last group share {own['agree']:.1f} of them. {own['kept']:.1%} of what a chunk reads, the "
        f"chunk before it read too. {own['never_read']:.1%} of all chunks are never read, and the tenth that is read "
        f"most takes {own['most_read']:.1%} of all reads. Half of what is read stands "
        f"{own['distance']['q25']:,.0f} to {own['distance']['q75']:,.0f} tokens back (median "
        f"{own['distance']['median']:,.0f}). Of the chunks read, other rules would have chosen, among as many: "
        f"{shared}."
    )


def scores_text(found: Record) -> str:
    if (scores := found["scores"]) is None:
        return "This model learns no scores, or no chapter is long enough."

    def told(own: Row) -> str:
        popular, apart = (
            _of_groups({"trained": own}, name, form)
            for name, form in (("popular", ".1%"), ("deviation", ".2f"))
        )
        return (
            f"{popular} of the variance of scores is the past chunk's own, whoever asks; their standard deviation is "
            f"{apart}, and the landmark vectors of two chunks have a mean cosine of {own['cosine']:.3f}"
        )

    groups = listed([str(n) for n in range(found["groups"])])
    return (
        f"In the first {scores['tokens']:,} tokens of each of {scores['trained']['texts']} chapters, groups {groups}: "
        f"{told(scores['trained'])}. Before training: {told(scores['untrained'])}."
    )


VARIANT_COLUMNS: Columns = {
    "scores": lambda own: VARIANT_NAMES[own["name"]],
    "validation loss": lambda own: f"{own['training']['validation'][-1][1]:.3f}",
    "gain": lambda own: nats(own["total_gain"]),
    "labels found": lambda own: share(own["label"]["model"]),
    "labels by BM25": lambda own: share(own["label"]["bm25"]),
    "labels at random": lambda own: share(own["label"]["random"], interval=False),
    "popular": lambda own: _of_groups(own["scores"], "popular", ".1%"),
    "deviation": lambda own: _of_groups(own["scores"], "deviation", ".2f"),
    "cosine": "{scores[trained][cosine]:.3f}",
}


def _of_groups(scores: Row | None, name: str, form: str) -> str:
    return listed([f"{own[name]:{form}}" for own in scores["trained"]["groups"]]) if scores else "-"


def variants_text(found: Record) -> str:
    if not (variants := found.get("variants")):
        return "Not measured: `python benchmarks/case_study variants`."
    steps, tokens = (variants[0]["training"][name] for name in ("steps", "tokens"))
    return f"After {steps:,} steps of training ({tokens:,} tokens):\n\n{table(VARIANT_COLUMNS, variants)}"


PARTS = {
    "all": "all names",
    "label read": "the label's chunk is read",
    "name read, label not": "another chunk with the name is read, the label's not",
    "name not read": "no chunk with the name is read",
}
GAINS: Columns = {
    "tokens of": "{of}",
    "names": lambda own: f"{own['names']:,}" if "names" in own else "",
    "loss without": "{loss_without:.3f}",
    "loss": "{loss:.3f}",
    "gain": _gain,
}


def gains_text(found: Record) -> str:
    at = {(own["part"], own["bin"]): own for own in found["gains"]}
    chapters = found["chapters"]
    bearing = sum(chapter["bearing"] for chapter in chapters)
    all_tokens = {"of": "all tokens", "gain": found["total_gain"]} | {
        key: sum(chapter[key] for chapter in chapters) / bearing for key in ("loss_without", "loss")
    }

    def by_distance(part: str) -> Callable[[Row], str]:
        return lambda row: f"{_gain(at[part, row['bin']])}, {at[part, row['bin']]['names']:,}"

    distances: Columns = {"tokens back": "{bin}"} | {PARTS[part]: by_distance(part) for part in PARTS}
    better = sum(chapter["better"] for chapter in chapters) / sum(chapter["reading"] for chapter in chapters)
    return (
        f"{table(GAINS, [*(at[part, 'all'] | {'of': name} for part, name in PARTS.items()), all_tokens])}\n\n"
        f"{better:.1%} of the tokens in chunks that read something cost less with it. By distance, gain and names:\n\n"
        f"{table(distances, [{'bin': name} for name in found['bins'] if at['all', name]['names']])}"
    )


PLACES = {
    "in sight": "in the window too (this chunk, the one before)",
    "read only": "in a chunk that is read, not in the window",
    "in neither": "in neither",
}
SEEN: Columns = {
    "the same token stood before": "{place}",
    "of tokens": "{tokens:.1%}",
    "loss without": "{loss_without:.3f}",
    "gain": _gain,
    "of all gain": "{of_all:.1%}",
}


def seen_text(found: Record) -> str:
    return table(SEEN, [own | {"place": PLACES[name]} for name, own in found["seen"].items()])


TOKENS: Columns = {
    "token of the name": lambda token: _code(token["text"]),
    "loss without": "{loss_without:.2f}",
    "loss": "{loss:.2f}",
    "gain": lambda token: f"{token['loss_without'] - token['loss']:+.2f}",
}


def cases_text(found: Record, pictures: bool = True) -> str:
    texts = [f"The rule, written before any was seen: {found['rule']}"]
    if len(found["cases"]) < 3:
        texts.append(f"Only {len(found['cases'])} works have such a reference.")
    about = {chapter["file"]: chapter for chapter in found["chapters"]}
    for number, case in enumerate(found["cases"], 1):
        texts.append(_case_text(number, case, about[case["file"]]))
        if pictures:
            shown = f"The explorer with chunk {case['chunk']} of {case['file']} chosen"
            texts.append(f"![{shown}](case-study-{number}.png)")
    return "\n\n".join(texts)


def _case_text(number: int, case: dict[str, Any], chapter: dict[str, Any]) -> str:
    licence = LICENCES.get(chapter["licence"], chapter["licence"])
    ranks = ", ".join(
        f"{RULES[rule]} {rank + 1:,}" for rule, rank in case["ranks"].items() if rank is not None
    )
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
            table(TOKENS, case["tokens"]),
        ]
    )


def _code(text: str) -> str:
    """In a table's cell; GitHub ends a cell at a | in code too."""
    return f"`{text}`".replace("|", "\\|") if "`" not in text else f"`` {text} ``".replace("|", "\\|")


def _block(text: str) -> str:
    """As it stands, whatever it holds."""
    fence = "~" * max(3, *(len(run) + 1 for run in re.findall("~+", text)), 3)
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def machine_text(found: Record) -> str:
    computed = found["model"]["dtype"]
    return f"Measured in {computed} on {machine(found['environment'], ('trailmark', 'torch'))}."


TEXTS: dict[str, Callable[[Record], str]] = {
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


OF_OTHERS: dict[str, Callable[[Record], str]] = {
    "found": found_text,
    "candidates": candidates_text,
    "gains": gains_text,
    "seen": seen_text,
    "cases": partial(cases_text, pictures=False),
    "machine": machine_text,
}
"""What is told of other models in the same chapters."""
OTHERS = {"pretrained": "case_study_pretrained", "lookup": "case_study_lookup"}
"""How their marks begin, and which file has their numbers."""


def texts(found: Record | None = None) -> Mapping[str, Callable[[], str]]:
    """Of each mark of docs/case-study.md what makes its text; ``found``: of the first model (None: the kept one)."""
    own = {
        name: partial(make, record("case_study") if found is None else found) for name, make in TEXTS.items()
    }
    for other, file in OTHERS.items():
        if known := record(file):
            own |= {f"{other} {name}": partial(make, known) for name, make in OF_OTHERS.items()}
    return own
