"""The tables of pretrained_hils.json and pretrained_hils_needles.json; benchmarks/readme.py puts them in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pretrained_tables import counted, nats, unfinished
from tables import RIGHT, Columns, Row, between, of_parts, record, table


def text() -> str:
    """What was measured; a part that was not is left out."""
    return of_parts(record("pretrained_hils") | record("pretrained_hils_needles"), _PARTS)


_OF_HILS: Columns = {
    "texts": "{texts}",
    "window, nats": nats("window"),
    "HiLS": nats("hils"),
    "full attention": nats("full"),
    "above full": between("above"),
    "closed": between("closed", ".2f"),
}


def _losses_text(found: Row) -> str:
    columns: Columns = {"text": "{kind}", "tokens": "{length:,}", "chunks read": "{chunks}"}
    return (
        f"SmolLM2-135M with a window of {found['window']} and chunks of {found['chunk_size']} tokens, each scored by "
        f"the means of every {found['summary_tokens']} of its keys, **without any training**: losses on held-out texts "
        "in nats, of tokens after the first 1,024, beside the base with that window alone and with full attention; "
        "*closed* is what reading chunks gives back of what the window loses, with 95% intervals over texts.\n\n"
        f"{table(columns | _OF_HILS, found['rows'])}"
    )


def _gap_text(found: Row) -> str:
    columns: Columns = {"text": "{kind}", "tokens": "{length:,}", "window": "{window}", "counted": counted}
    columns |= {name: column for name, column in _OF_HILS.items() if name != "above full"}
    return (
        f"By the window too, with {found['chunks']} chunks; *stood outside*: tokens that the text had before, but not "
        f"in the window.{unfinished(found, 0)}\n\n{table(columns, found['rows'])}"
    )


def _forms_text(found: Row) -> str:
    columns: Columns = {"a chunk is scored by": "{form}"}
    return (
        f"By what scores a chunk, {found['chunks']} of which are read, on LaTeX at {found['length']:,} tokens; all "
        f"else is the same:\n\n{table(columns | _OF_HILS, found['rows'])}"
    )


def _whole_text(found: Row) -> str:
    columns: Columns = {"a chunk is scored by": "{form}", "chunks read": "{chunks}"}
    return (
        f"By HiLS' own score and by the exact one at {found['length']:,} tokens of LaTeX, the length that the base was "
        f"trained for:\n\n{table(columns | _OF_HILS, found['rows'])}"
    )


def _far_text(found: Row) -> str:
    columns: Columns = {"tokens": "{length:,}", "texts": "{texts}"}
    return (
        "Beyond the 8,192 tokens of the base's training, on chapters one after another, untrained:\n\n"
        f"{table(columns | _BELOW_THE_WINDOW, found['rows'])}"
    )


_BELOW_THE_WINDOW: Columns = {
    "window, nats": "{window:.3f}",
    "HiLS": "{hils:.3f}",
    "below the window": between("gain"),
}


def _needles_text(found: Row) -> str:
    how = ""
    if "trained_tokens" in found:
        how = (
            f" *Trained*: adapters (rank 8) on {found['trained_tokens']:,} tokens in texts of 2,048, all of which hold "
            f"facts and questions in other words than these, in {found['trained_seconds'] / 60:.0f} minutes of a core."
        )
    return (
        "A sentence in a book that is to be completed (`--format sentences`), beyond the window."
        f"{how}\n\n{table(_NEEDLES, found['rows'])}"
    )


def _beyond_text(found: Row) -> str:
    return (
        "The same in texts longer than the base was trained on, which it cannot read itself:\n\n"
        f"{table(_NEEDLES, found['rows'])}"
    )


def _recall_text(found: Row) -> str:
    columns = {"model": "{model}", "needles": "{together}"} | _NEEDLES
    return (
        "Taught before it became a HiLS: the base with **full attention** learned with adapters (rank 8) on "
        f"{found['trained_tokens']:,} tokens in texts of {found['trained_length']:,}, all of which hold facts and "
        f"questions in other words than these, in {found['trained_seconds'] / 60:.0f} minutes of a core. Then it was "
        f"converted, and nothing was trained any more. *Needles*: such sentences in a text, of as many names, each of "
        f"which is asked for:\n\n{table(columns, found['rows'])}"
    )


def _layers_text(found: Row) -> str:
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


def _few_text(found: Row) -> str:
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


def _reading_text(found: Row) -> str:
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


def _along_text(found: Row) -> str:
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


_NEEDLES: Columns = {
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
_CASES |= {name: column for name, column in _NEEDLES.items() if name != "model"}
_PARTS: dict[str, Callable[[Row], str]] = {
    "losses": _losses_text,
    "gap": _gap_text,
    "forms": _forms_text,
    "whole": _whole_text,
    "far": _far_text,
    "needles": _needles_text,
    "beyond": _beyond_text,
    "recall": _recall_text,
    "layers": _layers_text,
    "few": _few_text,
    "reading": _reading_text,
    "along": _along_text,
}
