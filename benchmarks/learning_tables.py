"""The tables of benchmarks/learning.json; benchmarks/readme.py puts them in place."""

from __future__ import annotations

from pretrained_references import RULES
from tables import Columns, Row, machine, on_machine, record, table

from trailmark.evaluation.retrieval.suite import CASES

_CHOICES = {
    "before": "its own, before the training",
    "half of the steps": "its own, after half of it",
    "learned": "its own, after it",
    "random": RULES["random"].split(",")[0],
    "recent": RULES["recent"],
    "BM25": RULES["BM25"],
    "popular": "what all that ask score highest on average, after it",
}


def losses_text() -> str:
    """What reading is worth by who chooses."""
    known = record("learning")["learning"]
    found = known["results"]
    (steps,), (fit_steps,) = set(found["steps"].values()), set(found["fit_steps"].values())
    columns: Columns = {
        "text": "{kind}",
        "texts": "{texts}",
        "choice": lambda row: _CHOICES[row["chunks"]],
        "nats": "{nats:.3f}",
        "closed": "{closed:.3f} ({closed_low:.3f} to {closed_high:.3f})",
        "less than by what was learned": lambda row: "" if row["chunks"] == "learned" else _more(row),
        "by seed": lambda row: _by_seed(found["rows"], row),
    }
    together = sorted(
        (row for row in found["rows"] if row["seed"] is None),
        key=lambda row: (row["kind"], list(_CHOICES).index(row["chunks"])),
    )
    step = found["step_tokens"]
    return on_machine(
        f"{len(found['runs'])} seeds, each fitted on {fit_steps * step:,} tokens, its retriever then trained on "
        f"{steps * step:,}. Texts of {found['length']:,} tokens, of which the last {found['counted']:,} are counted, "
        f"and a window of {found['window']}; nats, shares and 95% intervals over texts are of the seeds' mean.\n\n"
        f"{table(columns, together)}",
        known["environment"],
    )


def _more(row: Row) -> str:
    return "{more:.3f} ({more_low:.3f} to {more_high:.3f})".format(**row)


def _by_seed(rows: list[Row], row: Row) -> str:
    own = [one for one in rows if (one["kind"], one["chunks"]) == (row["kind"], row["chunks"])]
    return ", ".join(f"{one['closed']:.3f}" for one in own if one["seed"] is not None)


def labels_text() -> str:
    """Who has the chunk of the label that is about to be cited."""
    found = record("learning")["scores"]["results"]
    shown = ["learned", "popular", "before", "BM25", "recent", "random"]
    rows = []
    for row in found["label"]:
        if row["rule"] == "learned":
            same = [
                one for one in found["label"] if (one["least"], one["most"]) == (row["least"], row["most"])
            ]
            rows.append(row | {"by": {one["rule"]: one for one in same}})
    columns: Columns = {
        "candidates": _candidates,
        "references": "{references}",
        "chapters": "{texts}",
        **{rule: f"{{by[{rule}][share]:.3f}}" for rule in shown},
        "learned above BM25": "{by[learned above BM25][share]:+.3f} ({by[learned above BM25][low]:+.3f} to "
        "{by[learned above BM25][high]:+.3f})",
        "above before": "{by[learned above before][share]:+.3f} ({by[learned above before][low]:+.3f} to "
        "{by[learned above before][high]:+.3f})",
    }
    return (
        f"The share of references whose label's chunk is among the {found['chosen']} that are read, in the first "
        f"{found['length']:,} tokens at most of each held-out chapter; *learned* is the mean of the seeds, "
        f"the intervals are over chapters.\n\n{table(columns, rows)}"
    )


def _candidates(row: Row) -> str:
    if row["most"] is None:
        return f"{row['least']} or more" if row["least"] else "all"
    return f"{row['least']} to {row['most']}" if row["least"] else f"up to {row['most']}"


def scores_text() -> str:
    """What scores are made of."""
    found = record("learning")["scores"]["results"]
    columns: Columns = {
        "scores": "{scores}",
        "popular": "{popular:.2f}",
        "effective rank": "{rank:.1f}",
        "deviation": "{deviation:.2f}",
    }
    return table(columns, found["parts"])


def diagnosis_text() -> str:
    """What the reader makes of which chunks, and what the gradient says."""
    found = record("learning")["diagnosis"]["results"]
    before, after = ({one["chunks"]: one for one in found[name]["cases"]} for name in ("before", "learned"))
    rows = [{"what": CASES[case], "before": own, "learned": after[case]} for case, own in before.items()]
    less = "{{{0}[less]:.3f} ({{{0}[less_low]:.3f} to {{{0}[less_high]:.3f})"
    columns: Columns = {
        "chunks": "{what}",
        "before, nats": "{before[nats]:.3f}",
        "less than with none": less.format("before"),
        "learned, nats": "{learned[nats]:.3f}",
        "less with them than with none": less.format("learned"),
    }
    groups = [{"scores": name} | found[name]["groups"][0] for name in ("before", "learned")]
    of_scores: Columns = {
        "scores": "{scores}",
        "agreement with use": "{agreement:.2f}",
        "of the pair": "{agreement_of_pair:.2f}",
        "gradient popular": "{gradient_popular:.2f}",
        "halves agree": "{gradient_halves:.2f}",
        "ever read": "{ever_read:.2f}",
    }
    return (
        f"{found['texts']} stretches of {found['length']:,} tokens of the held-out chapters, seed {found['seed']}.\n\n"
        f"{table(columns, rows)}\n\n{table(of_scores, groups)}"
    )


def summary_text() -> str:
    """What the README says of it."""
    known = record("learning")
    found, labels = known["learning"]["results"], known["scores"]["results"]
    (own,) = (
        row for row in found["rows"] if (row["kind"], row["seed"], row["chunks"]) == ("LaTeX", None, "before")
    )
    (rule,) = (
        row for row in found["rows"] if (row["kind"], row["seed"], row["chunks"]) == ("LaTeX", None, "BM25")
    )
    label = {row["rule"]: row for row in labels["label"] if not row["least"] and row["most"] is None}
    (steps,) = set(found["steps"].values())
    return (
        "With its reader fitted and everything else frozen, the retriever of SmolLM2-135M learned from the "
        f"language-modelling loss alone, on {steps * found['step_tokens']:,} tokens: {len(found['runs'])} seeds, "
        f"{label['learned']['references']} references of held-out LaTeX; the chunk of the label that is about to be "
        f"cited is read in {label['learned']['share']:.2f} of them, BM25 has it in {label['BM25']['share']:.2f}, "
        f"random chunks in {label['random']['share']:.2f}, the retriever before its training in "
        f"{label['before']['share']:.2f}. Of what a window loses to full attention what it chooses gives back "
        f"{_more(own)} more than what it chose before, and {_more(rule)} more than what BM25 would "
        f"({machine(known['learning']['environment'])}). "
        "[docs/learning-to-retrieve.md](docs/learning-to-retrieve.md) has all numbers, and what they do not show."
    )
