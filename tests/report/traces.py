"""Made-up traces of any size: plausible, the same for the same arguments, quick to make at a million tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trailmark.trace.lines import Entry, Read, TracedChunk, TraceHeader, TraceSource

_SYLLABLES = (
    *("ka", "lo", "mi", "ren", "sta", "vor", "thi", "na", "bel", "qui"),
    *("des", "om", "pra", "tu", "ir", "esh", "gan", "do", "wel", "fri"),
)  # fmt: skip
_COMMON = (
    *("the", "of", "and", "to", "in", "a", "is", "that", "we", "for", "it", "as"),
    *("by", "with", "this", "be", "on", "are", "let", "then", "so", "not", "from", "which"),
)  # fmt: skip
CHUNK_SIZE = 63  # of the trace that the tests of the page look at in a browser
_GREEK = ("alpha", "beta", "gamma", "lambda", "mu", "pi", "sigma", "phi")
_FORMATS = (
    "\\label{{eq:{n}}}", "\\ref{{eq:{n}}}", "$x_{{{n}}}^2$", "\\frac{{{n}}}{{2}}", "\\section{{Part {n}}}\n",
    "\\begin{{equation}}", "\\end{{equation}}", "é{n}", "𝔸_{n}", "日本{n}", "{n}",
)  # fmt: skip


def chunks_of(entries: list[Entry]) -> list[TracedChunk]:
    return [entry for entry in entries if isinstance(entry, TracedChunk)]


def made_up(
    num_tokens: int = 4096,
    chunk_size: int = 32,
    num_groups: int = 2,
    num_retrieved: int = 8,
    *,
    words: bool = False,
    num_sources: int = 3,
    seed: int = 0,
    name: str = "made-up",
) -> tuple[TraceHeader, list[Entry]]:
    """A trace of ``num_tokens`` tokens.

    Args:
        words: a token is a word or a sign, about four characters, as of a BPE vocabulary; else a byte of UTF-8.
    """
    rng = np.random.default_rng(seed)
    text, starts = _text(rng, num_tokens, words)
    num_chunks = -(-num_tokens // chunk_size)
    reads, helps = _reads(rng, num_chunks, num_groups, num_retrieved)
    without = rng.gamma(1.2, 1.4, num_tokens).astype(np.float32)
    # what was read helps some tokens much, most a little, and a few it harms
    luck = rng.gamma(0.3, 1.5, num_tokens) - 0.2
    gain = np.repeat(helps, chunk_size)[:num_tokens] * luck
    losses = np.maximum(without - gain, 0.001).astype(np.float32)
    losses[0] = without[0] = np.nan
    idle = np.repeat(helps == 0, chunk_size)[:num_tokens]
    losses[idle] = without[idle]
    header = TraceHeader(
        model={
            "name": name,
            "folder": f"runs/{name}",
            "architecture": "DRTForCausalLM",
            "parameters": 1_234_567,
            "weights_sha256": f"{seed:064x}",
        },
        num_groups=num_groups,
        chunk_size=chunk_size,
        num_retrieved_chunks=num_retrieved,
        window=4 * chunk_size,
    )
    borders = sorted({num_tokens * n // num_sources for n in range(num_sources)})
    entries: list[Entry] = []
    for number in range(num_chunks):
        first, last = number * chunk_size, min(num_tokens, (number + 1) * chunk_size)
        while borders and borders[0] < last:
            part = num_sources - len(borders)
            entries.append(TraceSource(f"part-{part}.tex", borders.pop(0), f"/texts/part-{part}.tex"))
        begin, end = int(starts[first]), int(starts[last])
        entries.append(
            TracedChunk(
                number,
                first,
                last - first == chunk_size,
                np.arange(first, last) % 257,
                text[begin:end],
                starts[first:last] - begin,
                reads[number],
                losses[first:last],
                without[first:last],
            )
        )
    return header, entries


def _text(rng: np.random.Generator, num_tokens: int, words: bool) -> tuple[str, np.ndarray]:
    """A text, and in it the character before each token, and its end."""
    made = ["".join(rng.choice(_SYLLABLES, n)) for n in rng.integers(1, 4, 2000)]
    vocabulary = np.array([*_COMMON, *(f"\\{name}" for name in _GREEK), *made])
    count = num_tokens if words else num_tokens // 4 + 16
    chosen = vocabulary[np.minimum(rng.zipf(1.3, count) - 1, len(vocabulary) - 1)].tolist()
    for n, where in enumerate(np.flatnonzero(rng.random(count) < 0.08).tolist()):
        chosen[where] = _FORMATS[n * 7 % len(_FORMATS)].format(n=n % 400)
    ends = rng.choice([" ", " ", " ", " ", " ", " ", ", ", ". ", "\n", ".\n\n"], count).tolist()
    pieces = [word + end for word, end in zip(chosen, ends, strict=True)]
    if words:
        return "".join(pieces), np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
    whole = "".join(pieces)
    points = np.frombuffer(whole.encode("utf-32-le"), "<u4")
    sizes = 1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF)
    kept = int(np.searchsorted(np.cumsum(sizes), num_tokens, "right"))
    missing = num_tokens - int(sizes[:kept].sum())  # the last character would need more bytes
    text = whole[:kept] + "." * missing
    sizes = np.concatenate([sizes[:kept], np.ones(missing, np.int64)])
    # a character belongs to the token of its first byte; its other bytes are tokens without text
    begins = np.repeat(np.arange(len(sizes)), sizes)
    first = np.concatenate([[True], begins[1:] != begins[:-1]])
    return text, np.append(begins + ~first, len(text))


def _reads(
    rng: np.random.Generator, num_chunks: int, num_groups: int, num_retrieved: int
) -> tuple[list[tuple[Read, ...]], np.ndarray]:
    """Of each chunk what it reads, and how much that helps: 0 where there is nothing."""
    shape = (num_chunks, num_groups, num_retrieved)
    past = np.maximum(0, np.arange(num_chunks) - 1)[:, None, None]  # of c, the chunks up to c - 2
    near = past - 1 - np.minimum(past - 1, rng.geometric(0.02, shape))
    far = np.floor(rng.random(shape) ** 2 * past)  # the beginning is read more often
    drawn = np.where(rng.random(shape) < 0.4, near, far).astype(np.int64)
    scores = np.exp(rng.normal(0, 1.5, shape))
    reads = []
    helps = np.zeros(num_chunks)
    nothing = Read(np.empty(0, np.int64), np.empty(0, np.float32))
    for number in range(num_chunks):
        own = []
        for group in range(num_groups):
            if number < 2:
                own.append(nothing)
                continue
            if number - 1 <= num_retrieved:
                chunks = np.arange(number - 1)
            else:
                chunks = np.unique(drawn[number, group])
            weights = scores[number, group, : len(chunks)]
            weights = weights / weights.sum()
            helps[number] += 3 * weights.max() ** 2 / num_groups
            own.append(Read(chunks, weights.astype(np.float32)))
        reads.append(tuple(own))
    return reads, helps


def of_tokens(chunks: list[list[str]], chunk_size: int) -> tuple[TraceHeader, list[Entry]]:
    """A trace of chunks of tokens with these texts. From the third on they read the first."""
    entries: list[Entry] = []
    first = 0
    for number, tokens in enumerate(chunks):
        num = len(tokens)
        starts = np.cumsum([0, *map(len, tokens[:-1])])
        read = Read(np.arange(int(number > 1)), np.ones(int(number > 1), np.float32))
        ids, losses = np.zeros(num, np.int64), np.ones(num, np.float32)
        entries.append(
            TracedChunk(number, first, True, ids, "".join(tokens), starts, (read,), losses, losses)
        )
        first += num
    return TraceHeader({"name": "tokens"}, 1, chunk_size, 1), entries


def of_bytes(text: str, chunk_size: int) -> tuple[TraceHeader, list[Entry]]:
    """A trace of ``text``, a token for each byte: a character belongs to its last one."""
    tokens = [part for letter in text for part in [""] * (len(letter.encode()) - 1) + [letter]]
    return of_tokens([tokens[n : n + chunk_size] for n in range(0, len(tokens), chunk_size)], chunk_size)


HOSTILE = (
    "</script><script>document.title = 'taken'</script>",
    "<!-- <script> -->",
    "<img src=x onerror=\"document.title='taken'\">",
    "&lt;b&gt; &amp; &#0; ]]>",
    "\x00\x01\x1b[31m\x7f\x85",
    "\u202eright to left\u202c \u2066isolated\u2069 \u200b\ufeff",
    "\u2028\u2029\r\n\t\v\f",
    "e\u0301\u0301\u0301 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "\ud800 half \udc00",
    "{{constructor.constructor('return 1')()}} ${title} %s %00",
    "javascript:void(0) https://example.org/a.png url(https://example.org/b.png)",
    "W" * 300,
)


def hostile(long_token: int = 70_000) -> tuple[TraceHeader, list[Entry]]:
    """Text that would do harm as HTML, as a script or as CSS, and a token of ``long_token`` characters."""
    header, entries = made_up(1024, 32, num_sources=1, name="<b>bold</b></title><script>1</script>")
    changed: list[Entry] = [TraceSource("</script><b>\ud800\x00.tex", 0)]
    for chunk in chunks_of(entries):
        text = HOSTILE[chunk.number % len(HOSTILE)]
        starts = np.minimum(np.arange(len(chunk.ids)) * -(-len(text) // len(chunk.ids)), len(text))
        if chunk.number == 20:
            text += "x" * long_token  # its last token holds all of it
        changed.append(replace(chunk, text=text, starts=starts))
    return header, changed
