"""The tables of learning.json, learning_gpu.json and learning_lengths.json, for benchmarks/readme.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pretrained_references import RULES
from tables import Columns, Row, between, on_machine, record, table

from trailmark.evaluation.retrieval.suite import CASES

_BEGINS = {
    "nothing": "as converted",
    "text": "set from texts",
    "slowly": "set from texts, a fifth of the rate",
    "additions": "the same, and all that is added learns",
}
_CHOICES = {
    "before": "its own, before the training",
    "learned": "its own, after it",
    "popular": "what its scores say to all that ask alike, after it",
    "random": RULES["random"].split(",")[0],
    "BM25": RULES["BM25"],
}


def _known(part: str, name: str = "learning") -> Iterator[tuple[str, Row]]:
    """How a retriever began, and what was measured of it."""
    known = record(name)
    for begin in _BEGINS:
        if f"{part}, {begin}" in known:
            yield begin, known[f"{part}, {begin}"]


def _rows(part: str, name: str) -> list[Row]:
    """The rows of a name that a part has, with how the retriever began and all that they are of."""
    return [
        row | {"begin": _BEGINS[begin], "of": known["results"]}
        for begin, known in _known(part)
        for row in known["results"][name]
    ]


def _seeds(by_seed: Row) -> str:
    return "1 seed," if len(by_seed) == 1 else f"{len(by_seed)} seeds, each"


def _of_mean(by_seed: Row) -> str:
    return "" if len(by_seed) == 1 else " are of the seeds' mean"


def losses_text() -> str:
    """What reading is worth by who chooses."""
    blocks = []
    for begin, known in _known("losses"):
        found = known["results"]
        (steps,), (fit_steps,) = set(found["steps"].values()), set(found["fit_steps"].values())
        columns: Columns = {
            "text": "{kind}",
            "texts": "{texts}",
            "choice": lambda row: _CHOICES[row["chunks"]],
            "nats": "{nats:.3f}",
            "closed": between("closed"),
            "less than by what was learned": lambda row: "" if row["chunks"] == "learned" else _more(row),
            "closed, by seed": "{by_seed}",
        }
        together = sorted(
            (row | {"by_seed": _by_seed(found["rows"], row)} for row in found["rows"] if row["seed"] is None),
            key=lambda row: (row["kind"], list(_CHOICES).index(row["chunks"])),
        )
        step = found["step_tokens"]
        of_fit = found.get("fit_step_tokens", step)
        text = (
            f"The retriever begins {_BEGINS[begin]}. {_seeds(found['weights'])} fitted on "
            f"{fit_steps * of_fit:,} tokens, its retriever then trained on {steps * step:,}. Texts of "
            f"{found['length']:,} tokens, of which the last {found['counted']:,} are counted, and a window of "
            f"{found['window']}; nats, shares and 95% "
            f"intervals over texts{_of_mean(found['weights'])}.\n\n{table(columns, together)}"
        )
        blocks.append(on_machine(text, known["environment"]))
    return "\n\n".join(blocks)


def longer_text() -> str:
    """The same in nats, of retrievers that were trained for longer, on a GPU."""
    blocks = []
    for begin, known in _known("nats", "learning_gpu"):
        found = known["results"]
        columns: Columns = {
            "text": "{kind}",
            "texts": "{texts}",
            "choice": lambda row: _CHOICES[row["chunks"]],
            "nats": "{nats:.3f}",
            "more than by what was learned": lambda row: "" if row["chunks"] == "learned" else _less(row),
            "nats, by seed": lambda row: ", ".join(f"{one:.3f}" for one in row["by_seed"]),
        }
        rows = sorted(found["rows"], key=lambda row: (row["kind"], list(_CHOICES).index(row["chunks"])))
        (steps,) = set(found["steps"].values())
        text = (
            f"The retriever begins {_BEGINS[begin]}. {_seeds(found['steps'])} trained on "
            f"{steps * found['step_tokens']:,} tokens; nats and 95% intervals over texts{_of_mean(found['steps'])}.\n\n"
            f"{table(columns, rows)}"
        )
        blocks.append(on_machine(text, known["environment"]))
    return "\n\n".join(blocks)


def _more(row: Row) -> str:
    return between("more").format(**row)


def _by_seed(rows: list[Row], row: Row) -> str:
    own = [one for one in rows if (one["kind"], one["chunks"]) == (row["kind"], row["chunks"])]
    return ", ".join(f"{one['closed']:.3f}" for one in own if one["seed"] is not None)


def labels_text() -> str:
    """Who has the chunk of the label that is about to be cited."""
    shown = ["learned", "popular", "before", "BM25", "recent", "random"]
    rows: list[Any] = []
    found: Row = {}
    for begin, known in _known("scores"):
        found = known["results"]
        for row in found["label"]:
            if row["rule"] == "learned":
                same = [
                    one
                    for one in found["label"]
                    if (one["least"], one["most"]) == (row["least"], row["most"])
                ]
                rows.append(row | {"begin": _BEGINS[begin], "by": {one["rule"]: one for one in same}})

    columns: Columns = {
        "begins": "{begin}",
        "candidates": _candidates,
        "references": "{references}",
        "chapters": "{texts}",
        **{rule: f"{{by[{rule}][share]:.3f}}" for rule in shown},
        "learned above BM25": lambda row: _above(row, "BM25"),
        "above before": lambda row: _above(row, "before"),
        "above popular": lambda row: _above(row, "popular"),
    }
    if not rows:
        return ""
    return (
        f"The share of references whose label's chunk is among the {found['chosen']} that are read, in the first "
        f"{found['length']:,} tokens at most of each held-out chapter; *learned*, *before* and *popular* are means of "
        f"the seeds, the intervals are over chapters.\n\n{table(columns, rows)}"
    )


def ways_text() -> str:
    """What each way to learn reaches of what was wanted of a retriever."""
    columns: Columns = {
        "the retriever begins": "{begin}",
        "seeds": "{seeds}",
        "labels read": "{all}",
        "of 131 to 520 candidates": "{131 to 520}",
        "times as many as BM25": "{times:.2f}",
        "popular": "{popular}",
    }
    rows = []
    for begin, known in _known("scores"):
        found = known["results"]
        shares = {(row["rule"], _candidates(row)): row["share"] for row in found["label"]}
        popular = [row["popular"] for row in found["parts"] if row["scores"].startswith("learned")]
        own = {name: f"{shares['learned', name]:.3f}" for name in ("all", "131 to 520")}
        rows.append({
            "begin": _BEGINS[begin], "seeds": len(popular), "popular": ", ".join(f"{x:.2f}" for x in popular),
            "times": shares["learned", "all"] / shares["BM25", "all"], **own,
        })  # fmt: skip
    return table(columns, rows)


def _above(row: Row, rule: str) -> str:
    return "{share:+.3f} ({low:+.3f} to {high:+.3f})".format(**row["by"][f"learned above {rule}"])


def _candidates(row: Row) -> str:
    if row["most"] is None:
        return f"{row['least']} or more" if row["least"] else "all"
    return f"{row['least']} to {row['most']}" if row["least"] else f"up to {row['most']}"


def _names() -> list[tuple[str, Row]]:
    """How a retriever began, and what was measured of names, seed by seed."""
    known = record("learning")
    return [(begin, known[key]) for begin in _BEGINS for key in known if key.startswith(f"names, {begin}, ")]


def names_text() -> str:
    """What it is worth to a label's name that its chunk is read."""
    columns: Columns = {
        "begins": "{begin}",
        "seed": "{seed}",
        "chunk with the name that is read": "{read}",
        "names": "{names:,}",
        "chapters": "{texts}",
        "nats": "{nats:.3f}",
        "less than without retrieval": between("retrieval"),
        "less with such a chunk than with none": between("name"),
    }
    measured = _names()
    rows = [
        row | {"begin": _BEGINS[begin], "seed": known["results"]["seed"]}
        for begin, known in measured
        for row in known["results"]["rows"]
    ]
    return on_machine(
        "Tokens of the names in references of the held-out chapters (their first "
        f"{measured[0][1]['results']['length']:,} tokens at most) whose label's chunk may be chosen, with 95% "
        f"intervals over chapters.\n\n{table(columns, rows)}",
        *(known["environment"] for _, known in measured),
    )


def scores_text() -> str:
    """What scores are made of."""
    columns: Columns = {
        "begins": "{begin}",
        "scores": "{scores}",
        "popular": "{popular:.2f}",
        "effective rank": "{rank:.1f}",
        "deviation": "{deviation:.2f}",
    }
    return table(columns, _rows("scores", "parts"))


_KEYS = {
    "BM25, asking": ("its words (BM25)", "the chunk that asks"),
    "BM25, next": ("its words (BM25)", "the chunk that reads"),
    "states, next": ("the mean of what layers make of its tokens", "the chunk that reads"),
    "embeddings, next": ("the mean of its tokens' embeddings", "the chunk that reads"),
}
_ENOUGH = 100  # references: of fewer nothing can be told


def keys_text() -> str:
    """How well chunks are found by what sums them up."""
    known = record("learning")["keys"]
    found, shares = known["results"], dict[str, Row]()
    for row in found["label"]:
        share = "{share:.3f} ({low:.3f} to {high:.3f})".format(**row)
        shares.setdefault(row["rule"], {})[_candidates(row)] = share
    names = dict.fromkeys(_candidates(row) for row in found["label"] if row["references"] >= _ENOUGH)
    rows = [
        {"searched": searched, "asked": asked} | shares[rule] for rule, (searched, asked) in _KEYS.items()
    ]
    columns: Columns = {"a chunk is searched by": "{searched}", "asked with": "{asked}"}
    columns |= {f"of {name} candidates": f"{{{name}}}" for name in names}
    return on_machine(
        f"The share of {found['label'][0]['references']} references of the held-out chapters (their first "
        f"{found['length']:,} tokens at most) whose label's chunk is among the first {found['chosen']}, in groups of "
        f"{_ENOUGH} or more, with 95% intervals over chapters. Nothing is trained; vectors are whitened, as "
        "`distil.fit_retriever: text` does it, by "
        f"{found['tokens']:,} tokens of other texts.\n\n{table(columns, rows)}",
        known["environment"],
    )


_MODELS = {
    "full attention": "the base, full attention",
    "window": "the base, its window alone",
    "window and layers": "the same with three layers more",
    "retriever": "DRT, its retriever learned",
    "additions": "DRT, all it adds learned",
}


def lengths_text() -> str:
    """The same tokens after more and more text."""
    known = record("learning_lengths").get("lengths")
    if known is None:
        return ""
    found = known["results"]
    columns: Columns = {
        "text": "{kind}", "texts": "{texts}", "tokens": "{length:,}",
        "model": lambda row: _MODELS[row["case"]],
        "nats": "{nats:.3f}",
        "below the window": between("below window"),
        "below window and layers": between("below window and layers"),
        "below itself with random chunks": between("below random"),
        "with BM25's": between("below BM25"),
    }  # fmt: skip
    rows = [row for row in found["rows"] if row["case"] in _MODELS and "length" in row]
    grown: Columns = {
        "text": "{kind}",
        "model": lambda row: _MODELS[row["case"]],
        "more below the window after the longest text than after the shortest": between("grown"),
    }
    more = [row for row in found["rows"] if "grown" in row and row["case"] != "window"]
    sizes: Columns = {
        "model": lambda row: _MODELS[row["case"]],
        "parameters": "{parameters:,}",
        "fitted to tokens": "{fitted:,}",
        "learned from tokens": "{tokens:,}",
        "at a rate of": "{rate}",
        "seeds": lambda row: "-" if row["case"] == "window" else ", ".join(map(str, row["seeds"])),
    }
    models = [
        {"case": name} | own | ({} if name.startswith("window") else {"fitted": found["fitted"]})
        for name, own in found["models"].items()
    ]
    return on_machine(
        f"The last {found['counted']:,} tokens of a text after more and more of it, in nats, with 95% intervals over "
        f"texts; of each model the mean of its seeds, a window of {found['window']}.\n\n{table(columns, rows)}\n\n"
        f"{table(grown, more)}\n\n{table(sizes, models)}{_rates_text()}",
        known["environment"],
    )


def _rates() -> list[Row]:
    """What was found at other learning rates, of each seed."""
    return [
        known["results"] for name, known in record("learning_lengths").items() if name.startswith("rates")
    ]


def _layer_rates(found: Row) -> list[float]:
    """At which the layers learned."""
    return [*dict.fromkeys(row["rate"] for row in found["rows"] if row["case"] == "window and layers")]


def _rates_text() -> str:
    """What the layers and the DRT give at other learning rates."""
    blocks = []
    for found in _rates():
        columns: Columns = {
            "text": "{kind}", "texts": "{texts}", "model": lambda row: _MODELS[row["case"]], "rate": "{rate}",
            "nats": "{nats:.3f}", "below its first rate": between("below its first rate"),
        }  # fmt: skip
        columns |= {
            f"below layers at {x}": between(f"below window and layers at {x:.0e}")
            for x in _layer_rates(found)
        }
        apart = found.get("retriever_rate")  # what scores chunks learns at it, whatever the rate of the rest
        who = (
            f"The DRT whose retriever learns at {apart}, the rest of its additions"
            if apart
            else "The layers and the DRT"
        )
        said = f"{who} at other learning rates, seed {found['seed']}, after"
        blocks.append(f"\n\n{said} {found['length']:,} tokens:\n\n{table(columns, found['rows'])}")
    return "".join(blocks)


_OF_SCORES: Columns = {
    "agreement with use": "{agreement}",
    "of the pair": "{agreement_of_pair}",
    "gradient popular": "{gradient_popular}",
    "halves agree": "{gradient_halves}",
    "ever read": "{ever_read}",
}


def _of_groups(found: Row) -> Row:
    """What the suite says of scores and gradients, each group's number after the other."""
    groups = found["groups"]
    return {name: ", ".join(f"{group[name]:.2f}" for group in groups) for name in groups[0]}


def diagnosis_text() -> str:
    """What the reader makes of which chunks, and what the gradient says."""
    blocks = []
    for begin, known in _known("diagnosis"):
        found = known["results"]
        before, after = (
            {one["chunks"]: one for one in found[name]["cases"]} for name in ("before", "learned")
        )
        rows = [{"what": CASES[case], "before": own, "learned": after[case]} for case, own in before.items()]
        columns: Columns = {
            "chunks": "{what}",
            "before, nats": "{before[nats]:.3f}",
            "less than with none": lambda row: _less(row["before"]),
            "learned, nats": "{learned[nats]:.3f}",
            "less with them than with none": lambda row: _less(row["learned"]),
        }
        groups = [
            {"scores": name, "source_read": own["copy, own"]["source_read"]} | _of_groups(found[name])
            for name, own in (("before", before), ("learned", after))
        ]
        of_scores: Columns = {
            "scores": "{scores}",
            **_OF_SCORES,
            "a repeated span's source read": "{source_read:.2f}",
        }
        blocks.append(
            f"{found['texts']} stretches of {found['length']:,} tokens of the held-out chapters, seed {found['seed']}; "
            f"the retriever begins {_BEGINS[begin]}.\n\n{table(columns, rows)}\n\n{table(of_scores, groups)}"
        )
    return "\n\n".join(blocks)


_READER = {  # what says whether a model makes anything of chunks
    "its own choice": "own",
    "random chunks": "random",
    "the most recent": "recent",
    "BM25's": "BM25",
    "the best one of those tried": "one, best",
    "a repeated span's source": "copy, given",
}


_SMALL = {  # the rows of learning_small.py
    "DRT": "DRT, as published",
    "DRT, residual": "the same, what is read into the residual stream",
    "lookup": "DRT that begins as a lookup",
    "lookup, near": "the same, near chunks first",
    "lookup, no noise": "the same, trained without noise",
    "lookup, random": "the same, always random chunks",
    "window": "window alone",
    "window, layers": "window, more layers",
    "full attention": "full attention",
}


_BELOW = {
    "window": "window alone",
    "window, layers": "window, more layers",
    "DRT": "the DRT as published",
    "lookup, random": "always random",
    "told random": "itself, told random",
    "told BM25": "itself, told BM25's",
    "told recent": "itself, told the most recent",
}


def from_nothing_text() -> str:
    """What small models that learn from nothing make of chunks, as their training goes on."""
    columns: Columns = {"model": "{model}", "steps": "{step:,}", "nats": "{nats:.3f}"}
    columns |= {f"less with {name}": f"{{{name}}}" for name in _READER}
    columns |= {"that span, nats": "{span:.3f}", "its source read": "{source_read:.2f}"}
    of_scores: Columns = {
        "model": "{model}",
        "steps": "{step:,}",
        "popular": "{popular}",
        **_OF_SCORES,
        "halves agree, with noise": "{noisy_gradient_halves}",
        "ever read, with noise": "{noisy_ever_read}",
    }
    rows, known = [], record("learning_small")
    parts = {name: known[f"diagnosis, {name}"] for name in _SMALL if f"diagnosis, {name}" in known}
    if not parts:
        return ""
    for name, part in parts.items():
        for row in part["results"]["rows"]:
            cases = {case["chunks"]: case for case in row["cases"]}
            less = {case: _less(cases[of]) for case, of in _READER.items()}
            own = {
                "model": _SMALL[name],
                "nats": cases["own"]["nats"],
                "span": cases["copy, none"]["nats"],
                "source_read": cases["copy, own"]["source_read"],
            }
            rows.append(row | _of_groups(row) | less | own)
    found = next(iter(parts.values()))["results"]
    return on_machine(
        f"{found['texts']} stretches of {found['length']:,} tokens of the held-out chapters, models of "
        f"{found['parameters']:,} parameters, seed {found['seed']}, steps of "
        f"{found['rows'][0]['tokens'] // found['rows'][0]['step']:,} tokens; less than without chunks, in nats, with "
        f"95% intervals over stretches; of scores and gradients each group's.\n\n{table(columns, rows)}\n\n"
        f"{table(of_scores, rows)}",
        *(part["environment"] for part in parts.values()),
    )


def _small_losses() -> dict[str, Row]:
    """By kind of text, what small models from nothing lose, where they were measured."""
    known = record("learning_small")
    names = {"LaTeX": "losses", "Python": "losses, Python", "books": "losses, books"}
    return {kind: known[name] for kind, name in names.items() if name in known}


def small_text() -> str:
    """What small models that learned from nothing lose, beside each other."""
    return "\n\n".join(_small_of(kind, known) for kind, known in _small_losses().items())


def _small_of(kind: str, known: Row) -> str:
    found, blocks = known["results"], []
    for most in sorted({row["of"] for row in found["rows"]}):
        rows = [
            row | {"model": _SMALL[row["case"]]}
            for row in found["rows"]
            if row["of"] == most and row["case"] in _SMALL  # what others' choices give stands in columns
        ]
        columns: Columns = {
            "tokens": lambda row: f"{row['factor'] * found['length']:,}",
            "model": "{model}",
            "nats": "{nats:.3f}",
        }
        columns |= {
            f"below {name}": between(f"below {other}")
            for other, name in _BELOW.items()
            if any(f"below {other}" in row for row in rows)
        }
        blocks.append(
            f"{rows[0]['texts']} stretches of {most * found['length']:,} tokens:\n\n{table(columns, rows)}"
        )
    sizes: Columns = {"model": "{model}", "parameters": "{parameters:,}", "seeds": "{seeds}"}
    models = [
        {"model": _SMALL[name], "parameters": own["parameters"], "seeds": ", ".join(map(str, own["seeds"]))}
        for name, own in found["models"].items()
    ]
    return on_machine(
        f"{kind}: the last {found['counted']:,} tokens of held-out stretches, after more and more of their text, in "
        f"nats, with 95% intervals over stretches; trained for {found['steps']:,} steps, {found['tokens']:,} tokens."
        "\n\n" + "\n\n".join([*blocks, table(sizes, models)]),
        known["environment"],
    )


def _less(case: Row) -> str:
    return between("less").format(**case) if "less" in case else ""


def summary_text() -> str:
    """What the README says of it."""
    columns: Columns = {
        "what learns from the loss": "{learns}",
        "gain, in": "{gain}",
        "over": "{than}",
        **{f"on {kind}": f"{{{kind}}}" for kind in ("LaTeX", "Python", "books")},
        "seeds": "{seeds}",
    }
    return (
        "**Real text**: trained from nothing on LaTeX, a small DRT that begins as a lookup and reads near chunks first "
        "costs less at its training length than as many parameters in layers; its own chunks serve it better than "
        "random ones and than BM25's, at 16 times that length too, where the texts are too few to tell it from layers. "
        "In SmolLM2-135M, its memory fitted to its own layers first, that loss alone teaches which chunks to read on "
        "LaTeX; on Python its choice is no better than before, and whether its "
        "memory gives more than layers in its place is open. On held-out texts, with 95% intervals over them; two "
        "numbers are one for each seed, others the mean of all "
        "([docs/learning-to-retrieve.md](docs/learning-to-retrieve.md)):\n\n"
        f"{table(columns, [*_from_nothing(), *_of_choices(), *_beside_layers(), _of_names()])}"
    )


_RETRIEVER, _ADDITIONS = "its retriever", "all that a DRT adds"


def _from_nothing() -> Iterator[Row]:
    """The small model that begins as a lookup and reads near chunks first, as long as in training and longer."""
    known, own = _small_losses(), "lookup, near"
    found = {kind: part["results"] for kind, part in known.items() if own in part["results"]["models"]}
    for factor, where in ((1, "at its training length"), (16, "at 16 times that")):
        rows = {
            kind: next(row for row in of["rows"] if row["case"] == own and row["factor"] == factor)
            for kind, of in found.items()
        }
        for other, than in {
            "window, layers": "as many parameters in layers",
            "lookup, random": "one trained and read with random chunks",
            "told random": "random chunks in the place of its own",
            "told BM25": "BM25's chunks in the place of its own",
        }.items():
            yield {
                "learns": f"all of a small DRT, from nothing, in {found['LaTeX']['tokens'] / 1e6:.1f} million tokens",
                "gain": f"loss {where} (nats a token)",
                "seeds": len(found["LaTeX"]["models"][own]["seeds"]),
                "than": than,
            } | {
                kind: between(f"below {other}").format(**row)
                for kind, row in rows.items()
                if f"below {other}" in row
            }


def _of_choices() -> Iterator[Row]:
    """What a retriever learned, beside random chunks, its choice before and BM25: of the first way that has scores."""
    scores = dict(_known("scores"))
    begin, known = next((begin, known) for begin, known in _known("losses") if begin in scores)
    found, seeds = known["results"], len(known["results"]["weights"])
    for chunks, than in (("random", "random chunks"), ("before", "its choice before training")):
        together = [row for row in found["rows"] if row["seed"] is None and row["chunks"] == chunks]
        told = {
            "learns": _RETRIEVER,
            "gain": "share, given back, of what a window loses to full attention",
            "than": than,
        }
        yield told | {"seeds": seeds} | {row["kind"]: _more(row) for row in together}
    chosen = scores[begin]["results"]
    (label,) = (x for x in chosen["label"] if x["rule"] == "learned above BM25" and _candidates(x) == "all")
    yield {
        "learns": _RETRIEVER,
        "gain": f"share of {label['references']} cited labels whose chunk is read",
        "than": "BM25",
        "seeds": sum(one["scores"].startswith("learned, seed") for one in chosen["parts"]),
        "LaTeX": "{share:.3f} ({low:.3f} to {high:.3f})".format(**label),
    }


def _beside_layers() -> Iterator[Row]:
    """A memory beside as many parameters in layers, at the length of the training."""
    known = record("learning_lengths")
    found = known["lengths"]["results"]
    by_hand = [row for row in found["rows"] if row["case"] == "additions" and "length" in row]
    shortest = min(row["length"] for row in by_hand)
    seeds = {*found["models"]["additions"]["seeds"]} & {*found["models"]["window and layers"]["seeds"]}
    told = {"learns": _ADDITIONS, "gain": "loss (nats a token)"}
    than = "its base with as many parameters in layers"
    yield (
        told
        | {"than": f"{than}, rates set by hand", "seeds": len(seeds)}
        | {
            row["kind"]: between("below window and layers").format(**row)
            for row in by_hand
            if row["length"] == shortest
        }
    )
    at_best = [_at_best_rates(searched["rows"]) for searched in _rates() if len(_layer_rates(searched)) > 1]
    yield told | {
        "than": f"{than}, each at its best rate of those tried, picked on these texts",
        "seeds": len(at_best),
        **{kind: ", ".join(of_seed[kind] for of_seed in at_best) for kind in at_best[0]},
    }


def _at_best_rates(rows: Sequence[Row]) -> dict[str, str]:
    """By kind of text, how far a seed's DRT lies below the layers, each at its rate of the lowest loss."""
    best = {(row["kind"], row["case"]): row for row in sorted(rows, key=lambda row: -row["nats"])}
    return {
        kind: between(f"below window and layers at {row['rate']:.0e}").format(**best[kind, "additions"])
        for (kind, case), row in best.items()
        if case == "window and layers"
    }


def _of_names() -> Row:
    """A label's name, where a chapter cites it and its chunk is read, of each seed by itself."""
    by_seed = [known["results"]["rows"] for begin, known in _names() if begin == "additions"]
    read = [next(row for row in rows if row["read"] == "the label's") for rows in by_seed]
    names = [sum(row["names"] for row in rows) for rows in by_seed]
    counts = " and ".join(f"{own['names']} of {number}" for own, number in zip(read, names, strict=True))
    return {
        "learns": _ADDITIONS,
        "gain": f"loss (nats a token) on a cited label's name, where a chunk with it is read ({counts} names)",
        "than": "the next best chunks in their place",
        "seeds": len(read),
        "LaTeX": ", ".join(between("name").format(**row) for row in read),
    }
