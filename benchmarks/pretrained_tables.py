"""The tables of benchmarks/pretrained.json; benchmarks/readme.py puts them in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from pretrained_references import RULES
from tables import RIGHT, Columns, Row, machine, on_machine, record, table


def start_text() -> str:
    found = record("pretrained")["start"]
    results = found["results"]
    made = results["conversion"]
    apart = ", ".join(
        f"{r['difference']:.1e} of {r['largest']:.1f} over {r['tokens']:,} tokens" for r in results["logits"]
    )
    conversions: Columns = {
        "converted to": "{to}",
        "parameters": "{parameters[all]:,}",
        "of them new": "{parameters[new]:,}",
        "size": "{bytes:size}",
        "time": "{seconds:duration}",
        "peak memory": "{peak:size}",
    }
    losses: Columns = {"case": "{case}", "nats per token": "{loss:.3f}"}
    return on_machine(
        "SmolLM2-135M-Instruct, from its GGUF file of 98 MB, written in float32. Its logits differ from those of "
        f"transformers' own model by at most {apart}: in float32, in which transformers computes norms and angles "
        "whatever the model's type. In float64, with these patched, models of every family are equal within 1e-10 "
        "(`tests/models/conversion`).\n\n"
        f"{table(conversions, [row | {'to': to} for to, row in made.items()])}\n\n"
        f"What a window takes, and sinks give back: tokens 600 to 1,535 of {results['texts']} held-out chapters of "
        f"mathematics, in float32.\n\n{table(losses, results['loss'])}",
        found["environment"],
    )


def _share(name: str) -> str:
    return f"{{{name}:.2f}} ({{{name}_low:.2f}} to {{{name}_high:.2f}})"


def _nats(model: str) -> Callable[[Row], str]:
    return lambda row: f"{row['nats'][model]:.3f}"


def _counted(row: Row) -> str:
    return "all" if row["tokens"] == "all" else "stood outside"


_LOSSES: Columns = {
    "window, nats": _nats("window"),
    "DRT": _nats("drt"),
    "full attention": _nats("full"),
    "closed": _share("closed"),
}


def trained_text() -> str:
    """What was measured of the trained models; a part that was not is left out."""
    blocks: list[tuple[Row, str]] = []  # where, and what was measured there
    for part, make in _TRAINED.items():
        for name, found in record("pretrained").items():
            of, _, others = name.partition(",")
            text = _OTHERS.get(part) if others else make
            if of == part and text is not None:
                blocks.append((found["environment"], text(found["results"])))
    there = [[*same] for _, same in groupby(blocks, key=lambda block: machine(block[0]))]
    return "\n\n".join(on_machine("\n\n".join(text for _, text in same), same[0][0]) for same in there)


_GAP: Columns = {
    "text": "{kind}",
    "tokens": "{length:,}",
    "window": "{window}",
    "counted": _counted,
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
        "counted": _counted,
    }
    return f"On LaTeX while they were trained (`{found['trained']}`):\n\n{table(columns | _LOSSES, found['rows'])}"


def _number_text(found: Row) -> str:
    columns: Columns = {
        "text": "{kind}",
        "chunks read": "{chunks}",
        "DRT, nats": _nats("drt"),
        "closed": _share("closed"),
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
        "DRT, nats": _nats("drt"),
        "closed": _share("closed"),
        "less than by its own choice": lambda row: _share("worse").format(**row) if row["worse"] else "",
    }
    return f"With others in the place of the chunks it chooses, on LaTeX:\n\n{table(columns, found['rows'])}"


def _references_text(found: Row) -> str:
    columns: Columns = {
        "who ranks": lambda row: RULES[row["rule"]],
        "share": "{share:.2f} ({low:.2f} to {high:.2f})",
    }
    return (
        f"Who finds the label that a chapter is about to cite: the share of {found['references']} references in "
        f"{found['texts']} chapters of {found['length']:,} tokens whose label's chunk is among the first "
        f"{found['chosen']} of the chunks that may be selected.\n\n{table(columns, found['rows'])}"
    )


def _short_text(found: Row) -> str:
    return _short_texts(found["rows"], "drt", "DRT")


def _short_texts(rows: list[Row], name: str, shown: str) -> str:
    columns: Columns = {"text": "{kind}", "texts": "{texts}", "base, nats": "{base:.3f}", shown: f"{{{name}:.3f}}",
                        f"{shown} above it": "{worse:.3f} ({worse_low:.3f} to {worse_high:.3f})"}  # fmt: skip
    return f"Texts of {rows[0]['length']} tokens, which the window holds whole:\n\n{table(columns, rows)}"


def _beyond_text(found: Row) -> str:
    columns: Columns = {"tokens": "{length:,}", "texts": "{texts}", "window, nats": "{window:.3f}", "DRT": "{drt:.3f}",
                        "DRT below it": "{gain:.3f} ({gain_low:.3f} to {gain_high:.3f})"}  # fmt: skip
    return (
        f"Chapters one after another, beyond what the base itself reads (`{found.get('trained', 'drt-256-0')}`):\n\n"
        f"{table(columns, found['rows'])}"
    )


def _put(row: Row) -> str:
    """How a question is put."""
    if row["chat"]:
        return "by the chat template"
    return "in a line, which another one answers" if row.get("format") == "paraphrases" else "to complete it"


_ASKED: Columns = {"asked": _put}


def _needles_text(found: Row) -> str:
    columns: Columns = {"model": "{model}", "tokens": "{length:,}"}
    chat = any(row["chat"] for row in found["rows"])
    if chat:
        columns |= _ASKED
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
        "above the base with a window": "{above:.3f} ({above_low:.3f} to {above_high:.3f})",
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


def _reading_text(found: Row) -> str:
    columns: Columns = {"model": "{model}", "tokens": "{tokens:,}", "tokens/s": "{tokens_per_second:,.0f}",
                        "peak memory": "{peak:size}", "of it kept of the text": "{memory:size}"}  # fmt: skip
    return (
        "Reading books, no logits, memory on the host. The DRT (as converted, with a window of "
        f"{found['window']}) runs its {found['num_lower_layers']} lower layers, which write the memory, in "
        f"{found['dtype']}; the window model runs nothing until it is asked, and then over the last positions that all "
        f"its layers' windows reach together.\n\n{table(columns, found['rows'])}"
    )


_TRAINED: dict[str, Callable[[Row], str]] = {
    "gap": _gap_text,
    "curve": _curve_text,
    "number": _number_text,
    "controls": _controls_text,
    "references": _references_text,
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
}


# --- HiLS --------------------------------------------------------------------------------------------------------


def hils_text() -> str:
    """What pretrained_hils.json holds; a part that was not measured is left out."""
    known = record("pretrained_hils")
    blocks = [
        on_machine(make(known[part]["results"]), known[part]["environment"])
        for part, make in _HILS.items()
        if part in known
    ]
    return "\n\n".join(blocks)


def hils_summary() -> str:
    """What it gives back untrained, and what the reader completes: for those who have read nothing else yet."""
    parts = {name: part["results"] for name, part in record("pretrained_hils").items()}
    rows, reader, kept = parts["losses"]["rows"], parts["reader"], parts["focus"]
    (row,) = (x for x in rows if (x["kind"], x["length"], x["chunks"]) == ("LaTeX", 4096, rows[0]["chunks"]))
    closed, about = _share("closed").format(**row), parts["losses"]
    chat = {x["model"]: _right(x) for x in reader["rows"] if x["chat"]}
    return (
        f"By `--to hils` alone, where every layer and token chooses {row['chunks']} chunks of {about['chunk_size']} "
        f"tokens, untrained SmolLM2-135M gives back {closed} of what a window of {about['window']} loses to full "
        f"attention on LaTeX at {row['length']:,} tokens ({row['texts']} held-out texts). With `--far-layers 7 "
        "reading=windows` it reads a long text at one speed. A sentence with a number hides in a book and is to be "
        "completed; right answers, by the book's length:\n\n"
        f"{_single_sentences(reader, kept['rows'])}\n\n"
        f"*Taught*: its base, for {reader['trained_seconds'] / 60:.0f} minutes of a core on texts of "
        f"{reader['trained_length']:,} tokens ([its additions](models/smollm2-135m-reader/README.md)). *With a focus*, "
        f"as it is converted by default: question and answer keep to the {kept['focus']} chunks that the question "
        "looks at most and those beside them; some of the longest text's questions had a part in choosing the number. "
        "Asked through the chat template, in 4,096 tokens and without a focus, the untaught one answers "
        f"{chat['as converted']}, the taught one {chat['taught']}. How it is done: [docs/convert.md](docs/convert.md); "
        "all numbers: [docs/pretrained.md](docs/pretrained.md)."
    )


def _right(row: Row) -> str:
    return f"{row['correct']} of {row['questions']}"


def _single_sentences(reader: Row, focused: list[Row]) -> str:
    """By the length of the text: one sentence, which is to be completed."""
    names = "as converted", "taught", "taught, with a focus"
    asked = [row | {"model": names[-1]} for row in focused]
    asked += [
        x for x in reader["rows"] if (x["together"], x["chat"], x["chunks"]) == (1, False, reader["chunks"])
    ]
    rows: dict[int, Row] = {}
    for row in asked:
        own = rows.setdefault(row["length"], {"length": row["length"]} | dict.fromkeys(names, "-"))
        own[row["model"]] = _right(row)
    columns: Columns = {"tokens": "{length:,}"}
    columns |= {name: f"{{{name}}}" for name in names}
    return table(columns, [rows[length] for length in sorted(rows)])


_OF_HILS: Columns = {
    "texts": "{texts}",
    "window, nats": _nats("window"),
    "HiLS": _nats("hils"),
    "full attention": _nats("full"),
    "above full": lambda row: f"{row['above']:.3f} ({row['above_low']:.3f} to {row['above_high']:.3f})",
    "closed": _share("closed"),
}


def _hils_losses_text(found: Row) -> str:
    columns: Columns = {"text": "{kind}", "tokens": "{length:,}", "chunks read": "{chunks}"}
    return (
        f"SmolLM2-135M with a window of {found['window']} and chunks of {found['chunk_size']} tokens, each scored by "
        f"the means of every {found['summary_tokens']} of its keys, **without any training**: losses on held-out texts "
        "in nats, of tokens after the first 1,024, beside the base with that window alone and with full attention; "
        "*closed* is what reading chunks gives back of what the window loses, with 95% intervals over texts.\n\n"
        f"{table(columns | _OF_HILS, found['rows'])}"
    )


def _hils_forms_text(found: Row) -> str:
    columns: Columns = {"a chunk is scored by": "{form}"}
    return (
        f"By what scores a chunk, {found['chunks']} of which are read, on LaTeX at {found['length']:,} tokens; all "
        f"else is the same:\n\n{table(columns | _OF_HILS, found['rows'])}"
    )


def _hils_whole_text(found: Row) -> str:
    columns: Columns = {"a chunk is scored by": "{form}", "chunks read": "{chunks}"}
    return (
        f"By HiLS' own score and by the exact one at {found['length']:,} tokens of LaTeX, the length that the base was "
        f"trained for:\n\n{table(columns | _OF_HILS, found['rows'])}"
    )


def _hils_far_text(found: Row) -> str:
    columns: Columns = {"tokens": "{length:,}", "texts": "{texts}"}
    return (
        "Beyond the 8,192 tokens of the base's training, on chapters one after another, untrained:\n\n"
        f"{table(columns | _BELOW_THE_WINDOW, found['rows'])}"
    )


_BELOW_THE_WINDOW: Columns = {
    "window, nats": "{window:.3f}",
    "HiLS": "{hils:.3f}",
    "below the window": lambda row: f"{row['gain']:.3f} ({row['gain_low']:.3f} to {row['gain_high']:.3f})",
}


def _hils_needles_text(found: Row) -> str:
    how = ""
    if "trained_tokens" in found:
        how = (
            f" *Trained*: adapters (rank 8) on {found['trained_tokens']:,} tokens in texts of 2,048, all of which hold "
            f"facts and questions in other words than these, in {found['trained_seconds'] / 60:.0f} minutes of a core."
        )
    return (
        "A sentence in a book that is to be completed (`--format sentences`), beyond the window."
        f"{how}\n\n{table(_NEEDLES_OF_HILS, found['rows'])}"
    )


def _hils_beyond_text(found: Row) -> str:
    return (
        "The same in texts longer than the base was trained on, which it cannot read itself:\n\n"
        f"{table(_NEEDLES_OF_HILS, found['rows'])}"
    )


def _hils_recall_text(found: Row) -> str:
    columns = {"model": "{model}", "needles": "{together}"} | _NEEDLES_OF_HILS
    return (
        "Taught before it became a HiLS: the base with **full attention** learned with adapters (rank 8) on "
        f"{found['trained_tokens']:,} tokens in texts of {found['trained_length']:,}, all of which hold facts and "
        f"questions in other words than these, in {found['trained_seconds'] / 60:.0f} minutes of a core. Then it was "
        f"converted, and nothing was trained any more. *Needles*: such sentences in a text, of as many names, each of "
        f"which is asked for:\n\n{table(columns, found['rows'])}"
    )


def _hils_layers_text(found: Row) -> str:
    seen = found["seen"]
    by_layer = [
        {"layer": number, "base": base, "taught": taught}
        for number, (base, taught) in enumerate(
            zip(seen["base"]["mass"], seen["taught"]["mass"], strict=True)
        )
        if max(base, taught) >= _LOOKS
    ]
    looks: Columns = {"layer": "{layer}", "base": "{base:.2f}", "taught": "{taught:.2f}"}
    columns: Columns = {
        "layers with full attention": lambda row: _layers(row["layers"]),
        "questions": "{questions}",
        "right": RIGHT,
        "tokens/s": "{tokens_per_second:,.0f}",
    }
    losses: Columns = {"layers that choose": lambda row: _layers(row["layers"])}
    return (
        f"Who looks far. While it completes sentences that stood at least {found['window']} tokens before, the share "
        "of its attention that the farthest-looking head of a layer has on the sentence (`trailmark convert "
        f"--far-layers`); layers with at least {_LOOKS:.2f}. *Taught*: with full attention on "
        f"{found['trained_tokens']:,} tokens, as above.\n\n{table(looks, by_layer)}\n\nWhat the taught one "
        f"completes of one sentence in {found['length']:,} tokens where the layers that are not named see a window of "
        f"{found['window']} and 4 sinks:\n\n{table(columns, found['rows'])}\n\nAn untaught HiLS that chooses chunks in "
        f"all or some layers, on LaTeX at {found['losses_length']:,} tokens:\n\n"
        f"{table(losses | _OF_HILS, found['losses'])}"
    )


_LOOKS = 0.1  # the least share that is shown


def _layers(numbers: Sequence[int]) -> str:
    """Ranges of consecutive ones."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    shown = (part if len(part) < 3 else [f"{part[0]} to {part[-1]}"] for part in parts)
    return ", ".join(str(one) for part in shown for one in part)


def _hils_few_text(found: Row) -> str:
    said = {
        "recall": "*recall*: with full attention in all layers, on texts of 1,024 tokens",
        "further": "on from there, on texts of 2,048",
        "few": "*few*: on from that, with full attention in those layers alone (its first samples are those of the one "
        "before)",
    }
    went = "; ".join(
        f"{said[kind]} ({x['trained_tokens']:,} tokens in {x['trained_seconds'] / 60:.0f} minutes of a core)"
        for kind, x in found["trainings"].items()
    )
    return (
        f"Taught further, with **full attention in {len(found['layers'])} of 30 layers** ({_layers(found['layers'])}) "
        f"and a window of {found['window']} in the others; as a HiLS it chooses chunks in those layers alone. Each "
        f"training, of adapters, goes on from the one before. {went}.\n\n{table(_CASES, found['rows'])}"
    )


def _summary(row: Row) -> str:
    if row["summary"] is None:
        return ""
    return "each key" if row["summary"] == 1 else f"means of {row['summary']} keys"


def _stand(row: Row) -> str:
    if row["chunks"] is None or row["position"] == "true":
        return "where they are"
    return "a window away" if row["position"] == "window" else f"{int(row['position']):,} tokens away"


def _hils_reading_text(found: Row) -> str:
    columns: Columns = {
        "text": "{kind}",
        "layers that choose": lambda row: _layers(row["layers"]),
        "the text before": lambda row: "chooses" if row["reading"] == "chooses" else "windows alone",
    }
    minutes = found["trained_seconds"] / 60
    before = found["length"] - found["asked"]
    return (
        f"**Read with windows alone** (`reading=windows`): losses of the last {found['asked']:,} tokens of texts of "
        f"{found['length']:,}, untrained, which choose of the {before:,} before them, read so or with every token "
        f"choosing:\n\n{table(columns | _OF_HILS, found['losses'])}\n\nSentences in a book that was read with windows "
        f"alone, of *few* and of one that learned on from it with texts of 4,096 tokens (*longer*, answers weighing 8 "
        f"times: {found['trained_tokens']:,} tokens in {minutes:.0f} minutes of a core):\n\n"
        f"{table(_CASES, found['rows'])}"
    )


def hils_reader_text() -> str:
    """Of it the reader, for the card of what was trained."""
    found = record("pretrained_hils")["reader"]
    return on_machine(_hils_reader_text(found["results"]), found["environment"])


def _hils_reader_text(found: Row) -> str:
    columns: Columns = {"model": "{model}", "needles": "{together}", "chunks": "{chunks}"}
    # speeds were measured beside other work
    columns |= _ASKED | {
        name: of for name, of in _NEEDLES_OF_HILS.items() if name not in ("model", "tokens/s")
    }
    minutes = found["trained_seconds"] / 60
    return (
        f"**A reader** (`--far-layers 7`, `{' '.join(found['fields'])}`, and `num_retrieved_chunks` as *chunks* says): "
        "sentences in a book, each of which is to be completed, or asked for through the chat template, as half of "
        f"the training's questions are. *Taught*: adapters (rank 8) on {found['trained_tokens']:,} tokens in texts of "
        f"{found['trained_length']:,}, all of which hold facts and questions in other words than these, in "
        f"{minutes:.0f} minutes of a core, one seed:\n\n"
        f"{table(columns, found['rows'])}\n\n{_short_texts(found['short'], 'taught', 'taught')}"
    )


def _hils_focus_text(found: Row) -> str:
    asked = {name: _NEEDLES_OF_HILS[name] for name in ("tokens", "questions", "right", "chunk read")}
    speeds: Columns = {
        "tokens": "{length:,}",
        "num_focus_chunks": lambda row: "-" if row["focus"] is None else str(row["focus"]),
        "first token": "{first:.2f} s",
        "each further": "{each:.2f} s",
    }
    return (
        f"**A focus** (`num_focus_chunks={found['focus']}`): the same questions, to be completed, put to the same "
        f"reader, taught and with {found['chunks']} chunks:\n\n{table(asked, found['rows'])}\n\n"
        f"Seconds from a question to its answer's first token, and for each of {found['written']} further ones, the "
        f"median of three:\n\n{table(speeds, found['speeds'])}"
    )


def _hils_words_text(found: Row) -> str:
    columns: Columns = {"model": "{model}", "a fact is told": lambda row: _WORDS[row["format"]]}
    columns |= {"needles": "{together}"} | _ASKED
    columns |= {name: _NEEDLES_OF_HILS[name] for name in ("tokens", "questions", "right", "chunk read")}
    return (
        f"**In other words**: the same reader with a focus of {found['focus']} chunks, asked for facts that "
        "are all told by one sentence, or each in one of eight ways; the training showed none of these, nor of the six "
        "questions:\n\n"
        f"{table(columns, found['rows'])}"
    )


def _hils_shares_text(found: Row) -> str:
    columns: Columns = {"texts with facts": "{share:.0%}", "needles": "{together}"}
    columns |= {name: _NEEDLES_OF_HILS[name] for name in ("tokens", "questions", "right", "chunk read")}
    tokens = found["rows"][0]["trained_tokens"]
    return (
        f"Trained as the reader on as many tokens ({tokens:,}), but with facts in fewer of the texts; the same "
        f"questions, to be completed, with {found['chunks']} chunks:\n\n{table(columns, found['rows'])}"
    )


def _hils_along_text(found: Row) -> str:
    columns: Columns = {
        "after tokens": lambda row: (
            f"{row['first']:,} to {row['last']:,}" if row["stretches"] > 1 else f"{row['last']:,}"
        ),
        "stretches": "{stretches}",
    }
    return (
        f"A text as long as a book, `{found['file']}`, read with windows alone by the reader as converted, untrained: "
        f"after every {found['every']:,} tokens what the next {found['asked']:,} cost, in nats a token, with intervals "
        "over such stretches of this one text:\n\n"
        f"{table(columns | _BELOW_THE_WINDOW | {'in the stretch with the least': '{least:.3f}'}, found['rows'])}"
    )


_WORDS = {"sentences": "by one sentence", "paraphrases": "in one of eight ways"}
_NEEDLES_OF_HILS: Columns = {
    "model": "{model}",
    "tokens": "{length:,}",
    "questions": "{questions}",
    "right": RIGHT,
    "chunk read": "{recall:.2f}",
    "tokens/s": "{tokens_per_second:,.0f}",
}
_CASES: Columns = {
    "taught": "{taught}",
    "chunks read": lambda row: "all that is before" if row["chunks"] is None else str(row["chunks"]),
    "scored by": _summary,
    "far keys stand": _stand,
    "needles": "{together}",
}
_CASES |= {name: column for name, column in _NEEDLES_OF_HILS.items() if name != "model"}
_HILS: dict[str, Callable[[Row], str]] = {
    "losses": _hils_losses_text,
    "forms": _hils_forms_text,
    "whole": _hils_whole_text,
    "far": _hils_far_text,
    "needles": _hils_needles_text,
    "beyond": _hils_beyond_text,
    "recall": _hils_recall_text,
    "layers": _hils_layers_text,
    "few": _hils_few_text,
    "reading": _hils_reading_text,
    "reader": _hils_reader_text,
    "focus": _hils_focus_text,
    "words": _hils_words_text,
    "shares": _hils_shares_text,
    "along": _hils_along_text,
}
