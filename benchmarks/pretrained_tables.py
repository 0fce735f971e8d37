"""The tables of benchmarks/pretrained.json; benchmarks/readme.py puts them in place."""

from __future__ import annotations

from collections.abc import Callable

from pretrained_references import RULES
from tables import (
    RIGHT,
    Columns,
    Row,
    between,
    cell,
    of_parts,
    on_machine,
    one_after_another,
    record,
    spread,
    table,
)

_APART = 2e-4  # what was asked of the logits


def start_text() -> str:
    return of_parts(record("pretrained"), {"logits": _logits_text, "start": _start_text})


def _logits_text(found: Row) -> str:
    columns: Columns = {
        "tokens": "{tokens:,}",
        "largest logit": "{largest:.1f}",
        "ours and transformers'": "{difference:.1e}",
        "transformers' and its own in float64": "{theirs:.1e}",
        "ours and its own in float64": "{ours:.1e}",
        "both in float64": "{float64:.0e}",
    }
    return (
        "SmolLM2-135M-Instruct, from its GGUF file of 98 MB, written in float32. How far its logits lie, at most, from "
        "those of transformers' own model in float32, and each from itself in float64 (where transformers computes "
        "norms and angles in float64 too, which it does in float32 whatever the model's type), over the first tokens "
        f"of a chapter:\n\n{table(columns, found['rows'])}\n\n{_goal(found['rows'])} In float64 models of every "
        "family are equal within 1e-10 (`tests/models/conversion`)."
    )


def _start_text(found: Row) -> str:
    conversions: Columns = {
        "converted to": "{to}",
        "parameters": "{parameters[all]:,}",
        "of them new": "{parameters[new]:,}",
        "size": "{bytes:size}",
        "time": "{seconds:duration}",
        "peak memory": "{peak:size}",
    }
    losses: Columns = {"case": "{case}", "nats per token": "{loss:.3f}"}
    made, rows = [row | {"to": to} for to, row in found["conversion"].items()], found["loss"]
    return (
        f"{table(conversions, made)}\n\nWhat a window takes, and sinks give back: tokens 600 to 1,535 of "
        f"{found['texts']} held-out chapters of mathematics, in float32. Of what a window takes, 4 sinks give back "
        f"{_sinks(rows, 512):.2f} with 512 tokens and {_sinks(rows, 256):.2f} with 256.\n\n{table(losses, rows)}"
    )


def _goal(rows: list[Row]) -> str:
    """Where the logits are as near as was asked, and whose rounding parts them where they are not."""
    missed = [row for row in rows if row["difference"] > _APART]
    met = [row for row in rows if row not in missed]
    said = [
        f"is {verb} over {' and '.join(cell('{tokens:,}', row) for row in those)} tokens"
        for verb, those in (("met", met), ("missed", missed))
        if those
    ]
    why = ""
    if missed and all(row.get("ours", row["difference"]) < row["difference"] / 2 for row in missed):
        why = " There the most of it is what transformers rounds in float32."
    return f"That they differ by {_APART:.0e} at most, which was asked, {' and '.join(said)}.{why}"


def _sinks(rows: list[Row], window: int) -> float:
    """The share that they give back."""
    loss = {row["case"]: row["loss"] for row in rows}
    alone, full = loss[f"window {window}"], loss["full attention"]
    return float((alone - loss[f"window {window}, 4 sinks"]) / (alone - full))


def unfinished(found: Row, planned: int) -> str:
    """How many of its rows there are, where a part was stopped; ``planned``: of a record that does not say it."""
    planned = found.get("planned", planned)
    return f" So far {len(found['rows'])} of {planned} rows are measured." * (len(found["rows"]) < planned)


def nats(model: str) -> Callable[[Row], str]:
    return lambda row: f"{row['nats'][model]:.3f}"


def counted(row: Row) -> str:
    return "all" if row["tokens"] == "all" else "stood outside"


_LOSSES: Columns = {
    "window, nats": nats("window"),
    "DRT": nats("drt"),
    "full attention": nats("full"),
    "closed": between("closed", ".2f"),
}


def trained_text() -> str:
    """What was measured of the trained models; a part that was not is left out."""
    blocks: list[tuple[str, Row]] = []
    for part, make in _TRAINED.items():
        for name, found in record("pretrained").items():
            of, _, others = name.partition(",")
            text = _OTHERS.get(part) if others else make
            if of == part and text is not None:
                blocks.append((text(found["results"]), found["environment"]))
    return one_after_another(blocks)


_GAP: Columns = {
    "text": "{kind}",
    "tokens": "{length:,}",
    "window": "{window}",
    "counted": counted,
    "texts": "{texts}",
    **_LOSSES,
}


def _how(found: Row) -> str:
    """What the models were trained with; the first were measured before it was kept."""
    return f"a window of {found.get('trained_window', 256)} and {found.get('trained_chunks', 16)} chunks"


def _other_gap_text(found: Row) -> str:
    minutes = {kind: f"{seconds / 60:.0f}" for kind, seconds in found["trained_seconds"].items()}
    return (
        f"The same trained with {_how(found)} (`{found['trained']}`; {minutes['drt']} minutes of one core beside the "
        f"fit, the others {minutes['window']} and {minutes['full']}):\n\n{table(_GAP, found['rows'])}"
    )


def _gap_text(found: Row) -> str:
    return (
        "SmolLM2-135M as a DRT, with a window alone and with full attention, each trained on the same "
        f"{found['trained_tokens']['drt']:,} tokens of LaTeX and Python with the same adapters (rank 8) and the same "
        f"teacher, one seed, with {_how(found)}; the DRT's memory was first fitted to the teacher on "
        f"{found['fitted_tokens']:,} tokens. "
        f"Its training took {found['trained_seconds']['drt'] / 60:.0f} minutes of one core beside the fit, the others' "
        f"{found['trained_seconds']['window'] / 60:.0f} and {found['trained_seconds']['full'] / 60:.0f}. "
        "Losses on held-out texts in nats, of tokens after the first 1,024; *closed* is what the "
        "DRT gives back of what the window loses to full attention, with a 95% interval over texts; *stood outside*: "
        "tokens that the text had before, but not in the window.\n\n"
        f"{table(_GAP, found['rows'])}"
    )


def _curve_text(found: Row) -> str:
    columns: Columns = {
        "trained on": lambda row: f"{row['step'] * found['step_tokens']:,} tokens",
        "counted": counted,
    }
    return f"On LaTeX while they were trained (`{found['trained']}`):\n\n{table(columns | _LOSSES, found['rows'])}"


def _number_text(found: Row) -> str:
    columns: Columns = {
        "text": "{kind}",
        "chunks read": "{chunks}",
        "DRT, nats": nats("drt"),
        "closed": between("closed", ".2f"),
    }
    how = f"at {found['length']:,} tokens and a window of {found['window']}"
    return (
        f"By how many chunks of {found['chunk_size']} tokens are read, {how}, of the model that was trained with "
        f"{found['trained_with']} of them:\n\n{table(columns, found['rows'])}"
    )


CHOICES = {
    "recent": RULES["recent"],
    "BM25": RULES["BM25"],
    "attention, asking": "what the base's upper layers look at under full attention, from the asking chunk",
    "attention, reading": "the same from the chunk that reads, which no choice can know before",
}


def _controls_text(found: Row) -> str:
    columns: Columns = {
        "chunks": lambda row: CHOICES.get(row["chunks"], row["chunks"]),
        "DRT, nats": nats("drt"),
        "closed": between("closed", ".2f"),
        "less than by its own choice": lambda row: (
            between("worse", ".2f").format(**row) if row["worse"] else ""
        ),
    }
    return f"With others in the place of the chunks it chooses, on LaTeX:\n\n{table(columns, found['rows'])}"


def _share(row: Row) -> str:
    return f"{row['share']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


def _references_text(found: Row) -> str:
    columns: Columns = {"who ranks": lambda row: RULES[row["rule"]], "share": _share}
    return (
        f"Who finds the label that a chapter is about to cite: the share of {found['references']} references in "
        f"{found['texts']} chapters of {found['length']:,} tokens whose label's chunk is among the first "
        f"{found['chosen']} of the chunks that may be selected.\n\n{table(columns, found['rows'])}"
    )


def _learnable_text(found: Row) -> str:
    parts = {"in chapters' beginnings": found["first"], "in all that was read": found["all"]}
    columns: Columns = {"who ranks": lambda row: RULES[row["rule"]]}
    for name, own in parts.items():
        title = f"{name}: {own['references']} references, {own['texts']} chapters"
        columns[title] = f"{{{name}}}"
    rows = [
        {"rule": one["rule"]} | dict(zip(parts, (_share(one), _share(other)), strict=True))
        for one, other in zip(*(own["rows"] for own in parts.values()), strict=True)
    ]
    read = found["all"]["references"]
    of = f"all {read:,}" if found["of"] == read else f"{read:,} of {found['of']:,}"
    first = found.get("stretches")  # the first were measured before it was kept
    those = "" if first is None else f", those of the first {first} stretches of each chapter that have any"
    return (
        f"The same of the base as converted, in another setting: stretches of {found['length']:,} tokens, each a text "
        f"of its own, with chunks of {found['chunk_size']} tokens, of which the best {found['chosen']} of "
        f"{found['candidates']:.0f} (the median) count, those outside a window of {found['window']}, and upper layers "
        f"from {found['lower_layers']} on; {of} references whose label stands in the same stretch and may be "
        f"selected{those}.\n\n{table(columns, rows)}"
    )


def _short_text(found: Row) -> str:
    return short_texts(found["rows"], "drt", "DRT")


def short_texts(rows: list[Row], name: str, shown: str) -> str:
    columns: Columns = {"text": "{kind}", "texts": "{texts}", "base, nats": "{base:.3f}", shown: f"{{{name}:.3f}}",
                        f"{shown} above it": between("worse")}  # fmt: skip
    if all("by_text" in row for row in rows):  # the first were measured before it was kept
        columns["the same, with an interval over the texts that hold the pieces"] = between("by_text")
    return f"Texts of {rows[0]['length']} tokens, which the window holds whole:\n\n{table(columns, rows)}"


def _beyond_text(found: Row) -> str:
    columns: Columns = {"tokens": "{length:,}", "texts": "{texts}", "window, nats": "{window:.3f}", "DRT": "{drt:.3f}",
                        "DRT below it": between("gain")}  # fmt: skip
    return (
        f"Chapters one after another, beyond what the base itself reads (`{found.get('trained', 'drt-256-0')}`):\n\n"
        f"{table(columns, found['rows'])}"
    )


def put(row: Row) -> str:
    """How a question is put."""
    if row["chat"]:
        return "by the chat template"
    return "in a line, which another one answers" if row.get("format") == "paraphrases" else "to complete it"


ASKED: Columns = {"asked": put}


def _needles_text(found: Row) -> str:
    columns: Columns = {"model": "{model}", "tokens": "{length:,}"}
    chat = any(row["chat"] for row in found["rows"])
    if chat:
        columns |= ASKED
    columns |= {
        "questions": "{questions}",
        "right (95%)": RIGHT,
        "chunk read": lambda row: "" if row["recall"] is None else f"{row['recall']:.2f}",
    }
    taught = ""
    if "taught_tokens" in found:
        taught = (
            f" *Taught*: the DRT after {found['taught_tokens']:,} tokens more, of texts of 1,024 tokens that hold "
            "facts and questions about them in other words and with other names (`data.needle_share: 1`); these are "
            "so short that every chunk is read that may be."
        )
    return (
        "A number in a sentence of a book (*The secret number of copper-lantern is 481735.*), behind the window: the "
        f"sentence begins again, and is to be completed{', or a user asks through the chat template' * chat}. *Chunk "
        f"read*: the sentence's chunk was among the {found['trained_chunks']} that a DRT reads. The window is "
        f"{found['trained_window']}; for the base, which sees all, needles lie anywhere. Each model's texts are laid "
        f"out by its own chunks, so questions are not the same.{taught}\n\n{table(columns, found['rows'])}"
    )


def _landmark_text(found: Row) -> str:
    columns: Columns = {
        "trained on": "{tokens:,} tokens",
        "nats per token": "{loss:.3f}",
        "above the base with a window": between("above"),
    }
    asked: Columns = {
        "model": "{model}",
        "tokens": "{length:,}",
        "questions": "{questions}",
        "right (95%)": RIGHT,
    }
    base = found["base"]
    return (
        f"A Landmark Attention model of the same base, all weights trained on texts of {found['length']:,} tokens in "
        f"{found['seconds'] / 60:.0f} minutes beside other work. Losses on {found['texts']} chapters of as many, where "
        "the "
        f"base has {base['full']:.3f} nats with full attention and {base['window']:.3f} with a window of "
        f"{found['window']}:\n\n{table(columns, found['rows'])}\n\nNumbers in sentences of books, as above, at its "
        f"training length and beyond; a token sees its cell of at most {found['cell']} tokens and what it retrieves, "
        f"{found['chunks']} chunks of {found['chunk_size']} tokens in each head:\n\n{table(asked, found['needles'])}"
    )


_READ: Columns = {"model": "{model}", "tokens": "{tokens:,}", "tokens/s": "{tokens_per_second:,.0f}",
                  "peak memory": "{peak:size}", "of it kept of the text": "{memory:size}"}  # fmt: skip


def _reading_text(found: Row) -> str:
    return (
        "Reading books, no logits, memory on the host. The DRT (as converted, with a window of "
        f"{found['window']}) runs its {found['num_lower_layers']} lower layers, which write the memory, in "
        f"{found['dtype']}; the window model runs nothing until it is asked, and then over the last positions that all "
        f"its layers' windows reach together.\n\n{table(_READ, found['rows'])}"
    )


def _other_reading_text(found: Row) -> str:
    return (
        f"The same with more threads, in {found['dtype']}, and beside our full attention transformers' own class with "
        f"the same weights, which reads a text at once:\n\n{table(_READ, found['rows'])}"
    )


_LEARNERS = {
    "drt": "additions and adapters of a DRT, with a teacher, texts of 4,096",
    "window": "adapters of a window, with a teacher, texts of 4,096",
    "full": "adapters of full attention, with a teacher, texts of 4,096",
}
# by the record and its part
_OTHER_LEARNERS = {
    ("pretrained_hils_needles", "needles"): "adapters of a HiLS, texts of 2,048",
    ("pretrained_hils_needles", "recall"): "adapters of full attention, texts of 1,024",
    ("pretrained_hils_needles", "reading"): "adapters with full attention in seven layers, texts of 4,096",
    ("pretrained_reader", "reader"): "adapters of the reader, texts of 4,096",
}


def _learned(what: str, tokens: int, seconds: float, part: Row) -> Row:
    found = part["environment"]
    return {
        "what": what, "tokens": tokens, "minutes": seconds / 60, "hour": tokens * 3600 / seconds,
        "processor": found["processor"], "date": found["date"],
    }  # fmt: skip


def hours_text() -> str:
    """What a core learned in how long, by the records of all trainings."""
    known, rows = record("pretrained"), list[Row]()
    for name in ("gap", "gap, window 512, seed 0"):
        own = known[name]["results"]
        for kind, what in _LEARNERS.items():
            if kind != "full":
                what += f", window of {own.get('trained_window', 256)}"  # the first were measured before it was kept
            tokens, seconds = (own[f"trained_{of}"][kind] for of in ("tokens", "seconds"))
            rows.append(_learned(what, tokens, seconds, known[name]))
    own, what = known["landmark"]["results"], "all weights of a Landmark model, texts of 2,048"
    rows.append(_learned(what, own["rows"][-1]["tokens"], own["seconds"], known["landmark"]))
    for (name, of), what in _OTHER_LEARNERS.items():
        part = record(name)[of]
        own = part["results"]
        rows.append(_learned(what, own["trained_tokens"], own["trained_seconds"], part))
    columns: Columns = {
        "what learned": "{what}",
        "tokens": "{tokens:,}",
        "minutes of a core": "{minutes:.0f}",
        "tokens an hour": "{hour:,.0f}",
        "processor": "{processor}, {date}",
    }
    hours: dict[str, list[float]] = {}
    for row in rows:
        hours.setdefault(row["processor"], []).append(row["hour"])
    ranges = " and ".join(
        f"{min(own):,.0f} to {max(own):,.0f} tokens on {processor}" for processor, own in hours.items()
    )
    text = (
        f"{table(columns, rows)}\n\nSo an hour of a core taught {ranges}. These are other trainings on each "
        "processor, with other lengths of text and other layers that see all of it, so that the ranges do not compare "
        "the processors."
    )
    if "steps" not in known:
        return text
    found = known["steps"]["results"]
    by = {row["precision"]: row["seconds"] for row in found["rows"]}
    slow, fast = (spread(by[name], ".2f") for name in ("float32", "bfloat16"))
    return on_machine(
        f"{text}\n\nA step of {found['tokens']:,} tokens that teaches adapters of the base took {fast} s in bfloat16, "
        f"for {found['fast']}, and {slow} s in float32, which `precision: auto` takes where nothing multiplies it.",
        known["steps"]["environment"],
    )


_TRAINED: dict[str, Callable[[Row], str]] = {
    "gap": _gap_text,
    "curve": _curve_text,
    "number": _number_text,
    "controls": _controls_text,
    "references": _references_text,
    "learnable": _learnable_text,
    "short": _short_text,
    "far": _beyond_text,
    "needles": _needles_text,
    "landmark": _landmark_text,
    "reading": _reading_text,
}
# of other trainings than the first: what says of which it is
_OTHERS: dict[str, Callable[[Row], str]] = {
    "gap": _other_gap_text,
    "curve": _curve_text,
    "needles": _needles_text,
    "far": _beyond_text,
    "reading": _other_reading_text,
}
