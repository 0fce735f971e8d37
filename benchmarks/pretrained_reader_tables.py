"""The tables of pretrained_reader.json and pretrained_answers.json; benchmarks/readme.py puts them in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pretrained_tables import ASKED, short_texts, unfinished
from tables import RIGHT, Columns, Row, between, of_parts, on_machine, record, table


def text() -> str:
    """What was measured, but for what its card says (:func:`reader_text`); a part that was not is left out."""
    return of_parts(record("pretrained_reader"), _PARTS)


def summary() -> str:
    """What it gives back untrained, and what the reader completes: for those who have read nothing else yet."""
    parts = {name: part["results"] for name, part in record("pretrained_reader").items()}
    reader, focus = parts["reader"], parts["focus"]
    asked = record("pretrained_answers")["answers"]["results"]["rows"]
    in_words = [row for row in asked if (row["wording"], row["quoted"]) == (_WORDINGS[0], _FOCUS)]
    *first, last = (f"{_right(x)} in {x['tokens']:,}" for x in in_words)
    answered = f"{', '.join(first)} and {last} tokens" if first else f"{last} tokens"
    shortest = min(row["tokens"] for row in asked)
    right = {(x["wording"], x["quoted"]): x["correct"] for x in asked if x["tokens"] == shortest}
    found = {(x["wording"], x["quoted"]): x["found"] for x in asked if x["tokens"] == shortest}
    count, (own, others) = asked[0]["questions"], _WORDINGS
    untrained = record("pretrained_hils")["losses"]["results"]
    rows = untrained["rows"]
    (row,) = (x for x in rows if (x["kind"], x["length"], x["chunks"]) == ("LaTeX", 4096, rows[0]["chunks"]))
    chat = {x["model"]: _right(x) for x in reader["rows"] if x["chat"]}
    (asked_in,) = {x["length"] for x in reader["rows"] if x["chat"]}
    focused = [row for name in _FOCUSED_PARTS if name in parts for row in parts[name]["rows"]]
    by_length = _by_length(reader, focused)
    return (
        "What to expect of SmolLM2-135M ([how it is done](docs/convert.md), [all numbers](docs/pretrained.md)):\n\n"
        "- **Untrained**, converted by `--to hils` alone, it gives back "
        f"{between('closed', '.2f').format(**row)} of what a window of {untrained['window']} loses to full attention "
        f"({row['texts']} held-out texts of LaTeX, {row['length']:,} tokens). Every layer and token chooses "
        f"{row['chunks']} chunks of {untrained['chunk_size']} tokens there.\n"
        "- **Questions in the book's own words** need no training either. With `--far-layers 7 reading=windows` it "
        "reads a long text at one speed, and `trailmark chat` puts the passages that a question looks at before it. "
        f"Facts of any kind are answered so: {answered} (in {shortest:,} tokens {right[own, _BM25]} with the passages "
        f"that BM25 finds, and {right[own, 'none']} without any).\n"
        f"- **Questions in other words** fail. Of the same {count} facts, in {shortest:,} tokens, the model itself "
        f"finds {found[others, _FOCUS]}, BM25 {found[others, _BM25]} and an encoder of sentences "
        f"{found[others, _MINILM]}; {right[others, _FOCUS]} are answered, {right[others, 'none']} without passages, "
        f"and {right[others, _OWN]} where the right passage is put there "
        "([how](docs/convert.md#passages-before-a-question)).\n"
        "- **A number that one sentence of a book tells** is found, without such passages, by a base that was taught "
        f"for {reader['trained_seconds'] / 60:.0f} minutes of a core, on texts of {reader['trained_length']:,} tokens "
        "([its additions](models/smollm2-135m-reader/README.md)). The sentence begins again and is to be completed; in "
        "the last two columns it uses other words than the training's, and a question asks for the number. The last "
        "three columns have a *focus*, which `reading=windows` sets: question and answer keep to at most "
        f"{focus['set']} chunks that the question looks at with the sharpest attention, and those beside them. They "
        "have other questions than the columns without. Right answers, by the book's length:\n\n"
        f"{by_length}\n\n"
        f"Through the chat template, in {asked_in:,} tokens and without a focus, the untaught model answers "
        f"{chat['as converted']}, the taught one {chat['taught']}."
    )


def answers_text() -> str:
    """Facts of any kind, and what an untaught conversion says when it is asked for them."""
    found = record("pretrained_answers")["answers"]
    rows = found["results"]["rows"]
    columns: Columns = {
        "tokens": "{tokens:,}",
        "asked in": "{wording}",
        "passages before the question": "{quoted}",
        "found": "{found} of {questions}",
        "right": RIGHT,
    }
    others = [row for row in rows if (row["wording"], row["quoted"]) == (_WORDINGS[1], _FOCUS)]
    longest = max(others, key=lambda row: row["tokens"])
    said: Columns = {
        "asked": "{asked}",
        "answered": lambda row: " ".join(row["said"].split()),
        "right": "{right}",
    }
    each = [
        {"asked": asked, "said": one, "right": "yes" if right else "no"}
        for asked, one, right in zip(longest["asked"], longest["said"], longest["right"], strict=True)
    ]
    text = (
        f"{table(columns, rows)}\n\n*Found*: the passages hold the sentence. What it said of the book of "
        f"{longest['tokens']:,} tokens, asked in other words, of at most {found['results']['answer_tokens']} tokens an "
        f"answer:\n\n{table(said, each)}"
    )
    return on_machine(text, found["environment"])


def _right(row: Row) -> str:
    return f"{row['correct']} of {row['questions']}"


_FOCUSED_PARTS = ("long", "completed", "million")
_FOCUSED = {
    ("sentences", False): "taught, with a focus",
    ("paraphrases", False): "asked for",
    ("paraphrases", True): "asked for in a chat",
}


def _by_length(reader: Row, focused: list[Row]) -> str:
    """Single facts by the length of the text: to be completed, and with a focus in other words too."""
    names = "as converted", "taught", *_FOCUSED.values()
    asked = [
        x for x in reader["rows"] if (x["together"], x["chat"], x["chunks"]) == (1, False, reader["chunks"])
    ]
    asked += [row | {"model": _FOCUSED[row["format"], row["chat"]]} for row in focused]
    rows: dict[int, Row] = {}
    for row in asked:
        own = rows.setdefault(row["length"], {"length": row["length"]} | dict.fromkeys(names, "-"))
        own[row["model"]] = _right(row)
    columns: Columns = {"tokens": "{length:,}"}
    columns |= {name: f"{{{name}}}" for name in names}
    return table(columns, [rows[length] for length in sorted(rows)])


def reader_text() -> str:
    """Of it the reader, for the card of what was trained."""
    found = record("pretrained_reader")["reader"]
    return on_machine(_reader_text(found["results"]), found["environment"])


def _reader_text(found: Row) -> str:
    columns: Columns = {"model": "{model}", "needles": "{together}", "chunks": "{chunks}"}
    columns |= ASKED | _RIGHT
    minutes = found["trained_seconds"] / 60
    return (
        f"**A reader** (`--far-layers 7`, `{' '.join(found['fields'])}`, and `num_retrieved_chunks` as *chunks* says): "
        "sentences in a book, each of which is to be completed, or asked for through the chat template, as half of "
        f"the training's questions are. *Taught*: adapters (rank 8) on {found['trained_tokens']:,} tokens in texts of "
        f"{found['trained_length']:,}, all of which hold facts and questions in other words than these, in "
        f"{minutes:.0f} minutes of a core, one seed:\n\n"
        f"{table(columns, found['rows'])}\n\n{short_texts(found['short'], 'taught', 'taught')}"
    )


def _focus_text(found: Row) -> str:
    columns: Columns = {"model": "{model}"} | _TOLD | {"needles": "{together}"} | ASKED | _RIGHT
    return (
        f"**With a focus** (`num_focus_chunks={found['set']}`, as `reading=windows` sets it): the reader and its base "
        "as converted, asked for facts that are all told by one sentence, or each in one of eight ways; the training "
        f"showed none of these, nor of the six questions{_computed(found['rows'])}:\n\n{table(columns, found['rows'])}"
    )


def _short_text(found: Row) -> str:
    (row,) = found["rows"]
    each, mean = row["each"].values(), row["worse"]
    (card,) = (
        one for one in record("pretrained_reader")["reader"]["results"]["short"] if one["kind"] == "books"
    )
    ends = row["worse_high"], row["by_text_high"]
    shown = "is shown" if max(ends) <= _ASKED else "is not shown"
    return (
        f"Its losses on short texts of books, {row['texts']} pieces of {row['of']} held-out books, the {card['texts']} "
        f"of its card among them, which lie from {min(each):.3f} to {max(each):.3f} nats above the base's in the mean "
        f"of a book. That they cost at most {_ASKED} more, which was asked, {shown}: the mean is {mean:.3f}, and the "
        f"intervals reach {ends[0]:.3f} over pieces and {ends[1]:.3f} over books.\n\n"
        f"{short_texts(found['rows'], 'taught', 'taught')}"
    )


def _long_text(found: Row) -> str:
    return (
        f"The reader with a focus in texts of {found['rows'][0]['length']:,} tokens, each of which is read once for "
        f"several single facts and kept in bfloat16{_computed(found['rows'])}:\n\n"
        f"{table(_TOLD | ASKED | _RIGHT, found['rows'])}"
    )


def _twins_text(found: Row) -> str:
    columns: Columns = {"model": "{model}"}
    columns |= _RIGHT
    those = " and ".join(_BESIDE[model] for model in dict.fromkeys(row["model"] for row in found["rows"]))
    return (
        f"What stands beside the reader, where one sentence is to be completed: {those}"
        f"{_computed(found['rows'])}.{unfinished(found, 3)}\n\n{table(columns, found['rows'])}"
    )


def _computed(rows: Iterable[Row]) -> str:
    """In which precision, where a record says it."""
    kinds = sorted({row["dtype"] for row in rows if "dtype" in row})
    return f"; computed in {' and '.join(kinds)}" if kinds else ""


def _times_text(found: Row) -> str:
    columns: Columns = {
        "tokens": "{length:,}",
        "num_focus_chunks": lambda row: "-" if row["focus"] is None else str(row["focus"]),
        "first token": "{first:.2f} s",
        "each further": "{each:.2f} s",
    }
    return (
        "Seconds from a question to its answer's first token, and for each of "
        f"{found['written']} further ones, the median of three:\n\n{table(columns, found['rows'])}"
    )


def _shares_text(found: Row) -> str:
    columns: Columns = {"texts with facts": "{share:.0%}", "needles": "{together}"}
    columns |= _RIGHT
    tokens = found["rows"][0]["trained_tokens"]
    return (
        f"Trained as the reader on as many tokens ({tokens:,}), but with facts in fewer of the texts; the same "
        f"questions, to be completed, with {found['chunks']} chunks:\n\n{table(columns, found['rows'])}"
    )


_ASKED = 0.01  # nats that short texts were to cost more at most
_FOCUS, _BM25, _MINILM, _OWN = "of the focus", "that BM25 finds", "that MiniLM finds", "of the fact"
_WORDINGS = "words of the text", "other words"
_BESIDE = {
    "taught, windows alone": "the same model with its windows alone (`num_retrieved_chunks=0`)",
    "base, full attention": "its base with full attention in all layers, at the length that it was trained on",
}
_WORDS = {"sentences": "by one sentence", "paraphrases": "in one of eight ways"}
_RIGHT: Columns = {
    "tokens": "{length:,}",
    "questions": "{questions}",
    "right": RIGHT,
    "chunk read": "{recall:.2f}",
}
_TOLD: Columns = {"a fact is told": lambda row: _WORDS[row["format"]]}
_PARTS: dict[str, Callable[[Row], str]] = {
    "twins": _twins_text,
    "short": _short_text,
    "focus": _focus_text,
    "long": _long_text,
    "completed": _long_text,
    "million": _long_text,
    "times": _times_text,
    "shares": _shares_text,
}
