"""What the documents say of reading, of reading.json."""

from __future__ import annotations

from tables import Columns, Row, machine, record, table

from trailmark.report.console import size

_FAR: Columns = {
    "tokens": "{length:,}",
    "x train": lambda r: f"{r['length'] // 1024:,}",
    "tier": "{memory_tier}, {memory_dtype}",
    "missed": lambda r: f"{r['questions'] - r['correct']} of {r['questions']}",
    "recall": "{recall:.3f}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "reading": "{seconds_reading:duration}",
    "memory": "{memory_bytes:size}",
}
# title, columns; a part that was not measured is left out
_PARTS: dict[str, tuple[str, Columns]] = {
    "speed": (
        "Tokens/s: median (lowest-highest) of 7 rounds, interleaved.",
        {
            "size": "{size}",
            "after tokens": "{length:,}",
            "DRT read": "{tokens_per_second[read]:spread}",
            "DRT full forward": "{tokens_per_second[drt]:spread}",
            "window only, full forward": "{tokens_per_second[window]:spread}",
            "time of read / window only": lambda r: _ratio(r["tokens_per_second"], "window", "read"),
        },
    ),
    "forward": (
        "Tokens/s of the full forward of the shipped demo model, over the last 32,768 of so many tokens of other "
        "packages' sources, by how it searches: median (lowest-highest) of 7 rounds, interleaved. Where nats are "
        "shown, each token's loss is in the time. Recall: of what the exact search chooses. The first of faiss' "
        "rounds, which is not counted, builds its index.",
        {
            "after tokens": "{length:,}",
            "exact search": "{tokens_per_second[exact]:spread}",
            "faiss": "{tokens_per_second[faiss]:spread}",
            "nats, exact": "{nats[exact]:.3f}",
            "nats, faiss": "{nats[faiss]:.3f}",
            "recall of faiss": "{recall:.4f}",
            "first round": "{first_seconds:.1f} s",
        },
    ),
    "far": ("The demo's DRT, 300 questions at any place of a chunk.", _FAR),
    "token": (
        "Milliseconds per generated token: median (lowest-highest) of 7 rounds.",
        {
            "size": "{size}",
            "after tokens": "{after:,}",
            "DRT": "{drt:spread .2f}",
            "window only": "{window:spread .2f}",
            "ratio": lambda r: _ratio(r, "drt", "window"),
        },
    ),
    "family": (
        "Models of one size (width 512, 12 layers, 8 heads with 2 of keys and values, windows of 512 positions), "
        "random weights, that read 8 chunks of 64 positions (of 63 tokens and a landmark, or of 64 tokens); float32, "
        "after so many tokens. Tokens/s and milliseconds a token: median (lowest-highest) of 3 rounds, interleaved. "
        "Layers that wait until logits are wanted are not in what reading takes: all of a window's. "
        "Bytes are those of the formula: what a token adds to the memory, and of that what is searched and lies on "
        "the device.",
        {
            "model": "{model}",
            "parameters": "{parameters:,}",
            "after tokens": "{length:,}",
            "read, tokens/s": "{tokens_per_second:spread}",
            "a token, ms": "{milliseconds:spread .1f}",
            "window": "{window_bytes:size}",
            "memory a token": "{bytes_per_token:,.0f} bytes",
            "of it searched": "{device_bytes_per_token:,.0f} bytes",
        },
    ),
    "memory": (
        "A process that reads 1,048,576 tokens, demo size; growth after the first 131,072.",
        {
            "tier": "{tier}",
            "memory by the formula": "{grown[memory]:size}",
            "growth in RAM": "{grown[VmRSS]:size}",
            "of it anonymous": "{grown[RssAnon]:size}",
            "growth of the window": "{grown[window]:size}",
        },
    ),
    "dtypes": (
        "Keys and values kept in fewer bits, after 16,384 tokens of other packages' sources: the next 1,024 tokens' "
        "nats, how far what is predicted is from float32 (Kullback-Leibler, nats a token), and single needles of the "
        "demo's model in 65,536 tokens. With int8, landmark vectors are in bfloat16.",
        {
            "model": "{model}",
            "kept in": "{dtype}",
            "keys and values of a token": "{bytes_per_token:,.0f} bytes",
            "nats": "{nats:.4f}",
            "from float32, mean": lambda r: f"{r['kl']:.1e}" if r["kl"] else "",
            "most": lambda r: f"{r['kl_most']:.1e}" if r["kl"] else "",
            "needles right": lambda r: f"{r['correct']} of {r['questions']}" if "correct" in r else "",
        },
    ),
    "saving": ("Seconds, a memory of 1,048,576 tokens, demo size.", {"": "{name}"}),
    "search": (
        "The 8 best of 262,144 landmarks, one query at a time.",
        {
            "E": "{E}",
            "exact, ms": "{milliseconds[exact]:spread .2f}",
            "faiss, ms": "{milliseconds[faiss]:spread .2f}",
            "recall of faiss": "{recall:.3f}",
            "index built in": "{build_seconds:.1f} s",
        },
    ),
}


def _ratio(of: Row, one: str, other: str) -> str:
    """Of two medians."""
    return f"{of[one]['median'] / of[other]['median']:.2f}"


def text() -> str:
    found, texts = record("reading"), []
    for name, (title, columns) in _PARTS.items():
        if name not in found:
            continue
        part, rows = found[name], found[name]["results"]
        if name == "token":  # a row for each length
            rows = [
                {"size": r["size"], "after": int(n)}
                | {model: r["milliseconds"][f"{model} {n}"] for model in ("drt", "window")}
                for r in rows
                for n in ("4096", "1048576")
            ]
        if name == "saving":  # a row for each way, all of one memory
            columns = columns | {f"seconds ({size(rows[0]['memory_bytes'])})": "{seconds:spread .3f}"}
            rows = [{"name": way, "seconds": s} for r in rows for way, s in r["seconds"].items()]
        texts.append(f"{title} Machine: {machine(part['environment'])}.\n\n{table(columns, rows)}")
    return "\n\n".join(texts)
