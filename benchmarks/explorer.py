"""What the explorer costs: building its page, and using it in a browser.

    python benchmarks/explorer.py [reading commands page] [--model runs/demo/drt] [--tokens 1048576]

Each part writes its results into benchmarks/explorer.json; without a name, all run. "reading": seconds of reading a
text, of a full forward over it, of its trace and of its page; the first three go over the text side by side, 32,768
tokens each in turn, so that what else the machine does falls on all alike. "commands": ``trailmark read`` and
``trailmark explore`` from start to end, in processes of their own. "page": bytes, first paint and
interactions in headless Chromium, for a real text read by the model and for a made-up one of words (as of a BPE
vocabulary). The text is of the Python standard library's sources, or with TRAILMARK_DATA of its books.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from common import keep, spread
from explorer_browser import in_a_browser

from tests.report.traces import made_up
from trailmark.data.corpus import Tokens, read_texts, standard_library_texts, tokenize
from trailmark.evaluation.record import environment
from trailmark.evaluation.subject import Subject, load
from trailmark.machine import start_again_set_up
from trailmark.report.explorer.page import build
from trailmark.trace.lines import Entry, TraceHeader, read_trace, write_lines
from trailmark.trace.losses import nats
from trailmark.trace.texts import trace_header
from trailmark.trace.tracer import Tracer

OUTPUT = Path(__file__).with_suffix(".json")
_TURN = 32_768  # tokens that each way of reading takes in turn
_PARTS = ("reading", "commands", "page")


def text_of(subject: Subject, count: int) -> tuple[str, Tokens]:
    """What it is, and ``count`` tokens of prose, or of Python where there is no TRAILMARK_DATA."""
    if data := os.environ.get("TRAILMARK_DATA"):
        name, texts = "books", read_texts([Path(data) / "books" / "test"])
    else:
        name, texts = "Python's standard library", standard_library_texts("haystack")
    tokens = tokenize(texts, subject.tokenizer)[:count]
    if len(tokens) < count:
        raise ValueError(
            f"tokens: expected at most the {len(tokens):,} of the text, got {count:,}. Ask for fewer."
        )
    return name, tokens


class Clock:
    """Seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return work(*arguments)
        finally:
            self.seconds += time.perf_counter() - began

    def shown(self, tokens: int) -> dict[str, float]:
        return {"seconds": self.seconds, "tokens_per_second": tokens / self.seconds}


@torch.no_grad()
def reading(subject: Subject, tokens: Tokens, trace: Path) -> dict[str, Any]:
    """Each way of reading the text, and the page of what was traced; the trace is kept."""
    model = subject.model
    clocks = {name: Clock() for name in ("read", "forward", "trace", "page")}
    read_cache, forward_cache = model.new_cache("host"), model.new_cache("host")
    tracer, entries = Tracer(subject, model.new_cache("host")), []
    last: list[torch.Tensor] = []

    def read(pieces: list[torch.Tensor]) -> None:
        for ids in pieces:
            model.read(ids, read_cache)

    def forward(pieces: list[torch.Tensor]) -> None:
        """As evaluation.losses reads: logits and losses of every token."""
        for ids in pieces:
            logits = model(ids, past_key_values=forward_cache).logits
            if last:
                nats(last.pop(), ids[:, :1])
            nats(logits[:, :-1], ids[:, 1:])
            last.append(logits[:, -1:].clone())

    def follow(pieces: list[Tokens]) -> None:
        for piece in pieces:
            tracer.feed(piece)
            entries.extend(tracer.take())

    def turns() -> Iterable[list[Tokens]]:
        turn: list[Tokens] = []
        for piece in tracer.pieces(tokens):
            turn.append(piece)
            if sum(map(len, turn)) >= _TURN:
                yield turn
                turn = []
        if turn:
            yield turn

    done = 0
    for group in turns():
        ids = [torch.from_numpy(piece.astype("int64"))[None] for piece in group]
        clocks["read"].run(read, ids)
        clocks["forward"].run(forward, ids)
        clocks["trace"].run(follow, group)
        done += sum(map(len, group))
        print(
            f"{done:,} tokens:",
            *(f"{name} {clock.seconds:.0f} s" for name, clock in clocks.items()),
            flush=True,
        )
    entries.extend(tracer.rest())
    header = trace_header(subject, None)
    built = clocks["page"].run(build, header, entries, trace.with_suffix(".html"))
    write_lines(trace, [header, *entries])
    found: dict[str, Any] = {name: clock.shown(len(tokens)) for name, clock in clocks.items()}
    whole = Clock()
    whole.seconds = clocks["trace"].seconds + clocks["page"].seconds
    found["trace and page"] = whole.shown(len(tokens))
    found["ratios"] = {
        f"trace and page / {name}": {"seconds": whole.seconds / clocks[name].seconds}
        for name in ("read", "forward")
    }
    about = {"tokens": len(tokens), "bytes": built.bytes, "model": subject.identity()}
    return about | found


def commands(model: Path, text: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds of the two commands on one file, in turn."""
    memory, page = folder / "memory", folder / "page.html"
    seconds: dict[str, list[float]] = {"read": [], "explore": []}
    for _ in range(rounds):
        shutil.rmtree(memory, ignore_errors=True)
        for name, rest in (("read", ["--memory", memory]), ("explore", ["-o", page])):
            began = time.perf_counter()
            command = [sys.executable, "-m", "trailmark", name, model, text, *rest]
            subprocess.run(list(map(str, command)), check=True, capture_output=True)
            seconds[name].append(time.perf_counter() - began)
        print(", ".join(f"trailmark {name} {own[-1]:.1f} s" for name, own in seconds.items()), flush=True)
    ratios = [explore / read for read, explore in zip(*seconds.values(), strict=True)]
    return {name: spread(own) for name, own in (*seconds.items(), ("explore / read", ratios))}


def page_of(header: TraceHeader, entries: list[Entry], path: Path, rounds: int) -> dict[str, Any]:
    """What a page takes to be made, to be kept and to be used."""
    clock = Clock()
    built = clock.run(build, header, entries, path)
    print(f"== {path.stem}: {built.bytes / 1e6:.1f} MB", flush=True)
    return {"bytes": built.bytes, "seconds": clock.seconds} | in_a_browser(path, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *_PARTS], help="default: all")
    parser.add_argument("--model", type=Path, default=Path("runs/demo/drt"), help="the demo's DRT")
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=5, help="of commands, opening and interactions")
    parser.add_argument(
        "--pages", type=Path, help="keep trace and pages in this folder, and take the trace there"
    )
    arguments = parser.parse_args()
    start_again_set_up()  # as the commands do
    parts = arguments.parts or _PARTS
    busy = os.getloadavg()[0]  # what else goes on
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.pages or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        subject = load(arguments.model)
        name, tokens = text_of(subject, arguments.tokens)

        def found(part: str, results: dict[str, Any]) -> None:
            keep(OUTPUT, part, {"text": name, "load_average": busy} | results, environment("cpu"))

        trace = folder / "real.jsonl"
        if "reading" in parts or ("page" in parts and not trace.exists()):
            found("reading", reading(subject, tokens, trace))
        if "commands" in parts:
            text = Path(temporary) / "text.txt"
            text.write_text(subject.tokenizer.decode(tokens.tolist()))
            about = {"tokens": len(tokens), "model": subject.identity()}
            found("commands", about | commands(arguments.model, text, Path(temporary), arguments.rounds))
        if "page" in parts:
            header, lines = read_trace(trace)
            results = {"real": page_of(header, list(lines), folder / "real.html", arguments.rounds)}
            # the most text: tokens are words, and two groups read 8 chunks each
            header, made = made_up(arguments.tokens, 64, 2, 8, words=True, name="made-up")
            results["words"] = page_of(header, made, folder / "words.html", arguments.rounds)
            found("page", results)
    print(f"Numbers: {OUTPUT}")


if __name__ == "__main__":
    main()
