"""What reading costs, how far it reaches, and what a token costs after it.

    python benchmarks/reading.py [speed forward far token family memory dtypes saving search] [--model runs/demo/drt]

Each part writes its results into benchmarks/reading.json; without a name, all run. Cases that are compared are
interleaved in one process; medians of 7 rounds (of 3 for "family") are reported, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import interleaved, keep, peak_memory, seconds, spread
from torch import Tensor

from trailmark.data.corpus import Tokens, load_tokenizer, read_texts, tokenize
from trailmark.demo import MODELS
from trailmark.evaluation.needles.ask import measure
from trailmark.evaluation.needles.suite import NeedleSettings
from trailmark.evaluation.subject import Subject, load
from trailmark.machine import start_again_set_up
from trailmark.memory.search import ExactSearch, FaissSearch
from trailmark.models import (
    DRTConfig,
    DRTForCausalLM,
    HiLSConfig,
    HiLSForCausalLM,
    HSAConfig,
    HSAForCausalLM,
    LandmarkConfig,
    LandmarkForCausalLM,
    SlidingWindowConfig,
    SlidingWindowForCausalLM,
    TrailmarkForCausalLM,
)
from trailmark.trace.losses import Losses, piece_losses

OUTPUT = Path(__file__).with_suffix(".json")
ROUNDS = 7
K64, M1, M10, M100 = 65_536, 1_048_576, 10_485_760, 104_857_600
_PIECE = 4096  # tokens of one call of a full forward

# the paper's shape at a width that a CPU can bear; the defaults are its window, chunks and retrieval
_MEDIUM: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
}
SIZES = ("demo", "d512")


def models(size: str) -> dict[str, TrailmarkForCausalLM]:
    """A DRT and the window-only model of as many layers, random weights."""
    torch.manual_seed(0)
    if size == "d512":
        drt, window = DRTConfig(**_MEDIUM), SlidingWindowConfig(**_MEDIUM)
    else:
        fields, shared = (
            {k: v for k, v in MODELS[name].items() if k != "architecture"} for name in ("drt", "window")
        )
        drt = DRTConfig(**fields)
        window = SlidingWindowConfig(**(shared | {"num_hidden_layers": drt.num_hidden_layers}))
    return {"drt": DRTForCausalLM(drt).eval(), "window": SlidingWindowForCausalLM(window).eval()}


def random_text(model: TrailmarkForCausalLM, count: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (1, count), generator=generator)


def spreads(cases: Mapping[str, Callable[[], float]]) -> dict[str, dict[str, float]]:
    """Of each case, in turn."""
    return {name: spread(values) for name, values in interleaved(cases, ROUNDS).items()}


# --- speed -------------------------------------------------------------------------------------------------


def full_forward(model: TrailmarkForCausalLM, cache: Any, ids: Tensor) -> None:
    for first in range(0, ids.shape[1], _PIECE):
        model(ids[:, first : first + _PIECE], past_key_values=cache)


def read_up_to(model: TrailmarkForCausalLM, cache: Any, length: int) -> None:
    while (left := length - cache.get_seq_length()) > 0:
        model.read(random_text(model, min(left, K64), seed=cache.get_seq_length() + 2), cache)


def speed_at(length: int, block: int, both: dict[str, TrailmarkForCausalLM], cache: Any) -> Any:
    """Tokens/s of the last ``block`` tokens of a text: on branches, so that every round begins at one place."""
    drt, window = both["drt"], both["window"]
    ids, carried = random_text(drt, block), window.new_cache()
    read_up_to(drt, cache, length - block)
    return spreads(
        {
            "read": lambda: block / seconds(lambda: drt.read(ids, cache.branch())),
            "drt": lambda: block / seconds(lambda: full_forward(drt, cache.branch(), ids)),
            "window": lambda: block / seconds(lambda: full_forward(window, carried, ids)),
        }
    )


@torch.no_grad()
def speed(folder: Path | None) -> list[dict[str, Any]]:
    """Tokens/s of reading and of the full forward, at several places of one long text."""
    results = []
    for size, lengths, block in (("demo", (K64, M1, M10), K64 // 2), ("d512", (K64,), 8192)):
        both = models(size)
        cache = both["drt"].new_cache("host")
        for length in lengths:
            measured = speed_at(length, block, both, cache)
            results.append({"size": size, "length": length, "tokens_per_second": measured})
            print(size, length, {k: round(v["median"]) for k, v in measured.items()}, flush=True)
    return results


class _Watched:
    """A search, and what it chose."""

    def __init__(self, search: Any) -> None:
        self.search, self.chosen = search, list[Tensor]()

    def select(self, *call: Any, **how: Any) -> Any:
        found = self.search.select(*call, **how)
        self.chosen.append(found.indices)
        return found


def token_nats(model: TrailmarkForCausalLM, cache: Any, ids: Tensor) -> float:
    """The mean loss of tokens [1, n] that go on from what a cache has read; nothing predicts the first."""
    losses, last = list[Losses](), None
    for piece in ids.split(_PIECE, dim=1):
        found, last = piece_losses(model(piece, past_key_values=cache).logits, last, piece)
        losses.append(found)
    return float(np.nanmean(np.concatenate(losses, axis=1)))


@torch.no_grad()
def forward(folder: Path | None) -> list[dict[str, Any]]:
    """Tokens/s of the shipped demo model's full forward with losses near a text's begin and far, by how it searches."""
    subject, results = load(Path("demo")), list[dict[str, Any]]()
    model, block = subject.model, K64 // 2
    text = unseen_tokens(subject, M10)
    cache = model.new_cache("host")

    def read_on(search: Any, ids: Tensor) -> float:
        branch = cache.branch()
        branch.memory.search = search
        return token_nats(model, branch, ids)

    def speed(search: Any, ids: Tensor) -> float:
        return block / seconds(lambda: read_on(search, ids))

    for length in (K64, M10):
        while (begin := cache.get_seq_length()) < length - block:
            model.read(text[:, begin : min(begin + K64, length - block)], cache)
        ids = text[:, length - block : length]
        row: dict[str, Any] = {"length": length}
        # nearer than that faiss is not asked
        named = {"exact": ExactSearch()} | ({"faiss": FaissSearch()} if length > K64 else {})
        watched = {name: _Watched(search) for name, search in named.items()}
        nats, took = dict[str, float](), dict[str, float]()
        for name, search in watched.items():
            began = time.perf_counter()
            nats[name] = read_on(search, ids)
            took[name] = time.perf_counter() - began
        row["nats"] = nats
        row["tokens_per_second"] = spreads(
            {name: partial(speed, search, ids) for name, search in named.items()}
        )
        if "faiss" in watched:
            exact, near = (torch.cat(watched[name].chosen, 1) for name in ("exact", "faiss"))  # [1, C, K]
            found = (exact[..., None] == near[..., None, :]).any(-1)[exact >= 0]
            # the first of its calls has built the index
            row |= {"recall": float(found.float().mean()), "first_seconds": took["faiss"]}
        results.append(row)
        print(row, flush=True)
    return results


# --- how far -----------------------------------------------------------------------------------------------


def unseen_text() -> Tokens:
    return tokenize(_unseen(), load_tokenizer("bytes"))


def _unseen() -> Iterator[str]:
    """Sources of installed packages: none is the standard library's, of which the demo's texts are made."""
    root = Path(sysconfig.get_paths()["purelib"])
    for folder in sorted(p for p in root.iterdir() if p.is_dir() and any(p.rglob("*.py"))):
        yield from _python_texts(folder)


def _python_texts(folder: Path) -> list[str]:
    files = sorted(p for p in folder.rglob("*.py") if p.stat().st_size)
    texts = []
    for file in files:
        try:
            texts += read_texts([file])
        except ValueError:
            continue
    return texts


def unseen_tokens(subject: Subject, count: int) -> Tensor:
    """[1, count] the first tokens of such sources."""
    tokens, missing = list[Tokens](), count
    for text in _unseen():
        tokens.append(tokenize([text], subject.tokenizer)[:missing])
        missing -= len(tokens[-1])
        if not missing:
            break
    assert not missing, "more sources are needed"
    return torch.from_numpy(np.concatenate(tokens).astype(np.int64))[None]


def far(folder: Path | None) -> list[dict[str, Any]]:
    """The demo's model after 10M and 100M tokens: 300 questions at any phase, on branches."""
    subject = load(folder or Path("runs/demo/drt"))
    text = unseen_text()
    print(f"{len(text):,} tokens of other packages' sources", flush=True)
    results = []
    for length, tier in ((M10, "host"), (M100, "disk")):
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
            settings = NeedleSettings(
                (length,),
                format="marks",
                questions=300,
                memory_tier=tier,
                memory_folder=Path(place) if tier == "disk" else None,
                memory_dtype="bfloat16",
            )
            show = partial(print, end="\r", flush=True)
            (summary,) = measure(subject, settings, text, show)
        summary.pop("asked", None)
        results.append({"tier": tier, "text_tokens": len(text)} | summary)
        shown = (summary["correct"], summary["questions"], summary["recall"], summary["tokens_per_second"])
        print(length, tier, shown, flush=True)
    return results


# --- a token -----------------------------------------------------------------------------------------------


def per_token(model: TrailmarkForCausalLM, cache: Any, chunk: int) -> float:
    """Milliseconds a token over two chunks, their landmarks included, on a branch."""
    ids, branch = random_text(model, 2 * chunk + 1), cache.branch()
    model(ids[:, :1], past_key_values=branch, logits_to_keep=1)  # the upper layers' part of reading
    began = time.perf_counter()
    for n in range(1, ids.shape[1]):
        model(ids[:, n : n + 1], past_key_values=branch, logits_to_keep=1)
    return (time.perf_counter() - began) / (ids.shape[1] - 1) * 1000


@torch.no_grad()
def token(folder: Path | None) -> list[dict[str, Any]]:
    """Milliseconds per generated token after 4K and after 1M tokens, host tier."""
    results = []
    for size in SIZES:
        both = models(size)
        chunk = int(getattr(both["drt"].config, "chunk_size", 0))
        cases: dict[str, Callable[[], float]] = {}
        for name, model in both.items():
            for length in (_PIECE, M1):
                cache = model.new_cache("host" if name == "drt" else "device")
                read_up_to(model, cache, length)
                cases[f"{name} {length}"] = partial(per_token, model, cache, chunk)
                print(size, name, length, "read", flush=True)
        measured = spreads(cases)
        results.append({"size": size, "milliseconds": measured})
        print(size, {k: round(v["median"], 3) for k, v in measured.items()}, flush=True)
    return results


# --- the family --------------------------------------------------------------------------------------------

# of each model, 8 chunks of 64 positions are read: of tokens, or of 63 and a landmark
_FAMILY: dict[str, Any] = _MEDIUM | {"num_key_value_heads": 2, "window_position": "rope"}
_FAMILY_LENGTHS, _FAMILY_BLOCK, _FAMILY_ROUNDS = (4096, 16_384), 512, 3


def family_models() -> dict[str, TrailmarkForCausalLM]:
    """Models of one size that read as many positions beside a window of 512, random weights."""
    torch.manual_seed(0)
    hils = _FAMILY | {"num_retrieved_chunks": 8}
    landmark = {k: v for k, v in _FAMILY.items() if k != "window_position"}
    made: dict[str, TrailmarkForCausalLM] = {
        "window": SlidingWindowForCausalLM(SlidingWindowConfig(**_FAMILY)),
        "DRT x1": DRTForCausalLM(DRTConfig(**_FAMILY, num_retrieval_groups=1)),
        "DRT x2": DRTForCausalLM(DRTConfig(**_FAMILY, num_retrieval_groups=2)),
        "HSA": HSAForCausalLM(HSAConfig(**_FAMILY, num_memory_heads=1, num_retrieved_chunks=8)),
        "HiLS": HiLSForCausalLM(HiLSConfig(**hils)),
        "MoBA": HiLSForCausalLM(HiLSConfig(**hils, chunk_score="mean", chunk_weights="keys")),
        "Landmark": LandmarkForCausalLM(
            LandmarkConfig(
                **landmark,
                sliding_window=None,
                num_retrieved_chunks=8,
                local_length=512,
                max_position_embeddings=2048,
            )
        ),
    }
    return {name: model.eval() for name, model in made.items()}


@torch.no_grad()
def family(folder: Path | None) -> list[dict[str, Any]]:
    """Of each model: tokens/s of reading and milliseconds a token after a text, and bytes that it keeps of a token."""
    results = []
    made = family_models()
    caches = {name: model.new_cache() for name, model in made.items()}
    for length in _FAMILY_LENGTHS:
        read: dict[str, Callable[[], float]] = {}
        each: dict[str, Callable[[], float]] = {}
        for name, model in made.items():
            read_up_to(model, caches[name], length)
            print(name, length, "read", flush=True)
            ids = random_text(model, _FAMILY_BLOCK)

            def reading(model: Any = model, cache: Any = caches[name], ids: Tensor = ids) -> float:
                branch = cache.branch()
                return _FAMILY_BLOCK / seconds(lambda: model.read(ids, branch))

            read[name], each[name] = reading, partial(per_token, model, caches[name], 8)
        tokens_per_second = interleaved(read, _FAMILY_ROUNDS)
        milliseconds = interleaved(each, _FAMILY_ROUNDS)
        for name, model in made.items():
            kept = model.cache_bytes(length, 0)
            assert kept is not None
            results.append(
                {
                    "model": name,
                    "parameters": model.num_parameters(),
                    "length": length,
                    "tokens_per_second": spread(tokens_per_second[name]),
                    "milliseconds": spread(milliseconds[name]),
                    "window_bytes": kept.window_bytes,
                    "bytes_per_token": kept.memory_bytes / length,
                    "device_bytes_per_token": kept.landmarks / length,
                }
            )
            print(results[-1], flush=True)
    return results


# --- memory ------------------------------------------------------------------------------------------------


def status() -> dict[str, int]:
    """Bytes of this process: all in RAM, and the part that is no file's."""
    ctypes.CDLL(None).malloc_trim(0)  # what glibc keeps after it was freed would count as grown
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon")}


def memory_case(tier: str) -> dict[str, Any]:
    """One process that reads 1M tokens: its growth, and the memory's size by the formula."""
    model = models("demo")["drt"]
    ids = random_text(model, K64)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
        cache = model.new_cache(tier, memory_folder=place if tier == "disk" else None)
        marks = []
        for _ in range(M1 // K64):
            model.read(ids, cache)
            marks.append(status() | {"memory": cache.memory_bytes(), "window": cache.window_bytes()})
        first, last = marks[1], marks[-1]
        grown = {name: last[name] - first[name] for name in first}
        peak = peak_memory()
    return {"tier": tier, "grown": grown, "last": last, "peak": peak}


def memory(folder: Path | None) -> list[dict[str, Any]]:
    results = []
    for tier in ("device", "host", "disk"):
        command = [sys.executable, __file__, "--memory-case", tier]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        results.append(json.loads(done.stdout.strip().splitlines()[-1]))
        print(results[-1], flush=True)
    return results


# --- what keys and values are kept in ------------------------------------------------------------------------------

_DTYPES, _ASKED_AFTER, _ASKED = ("float32", "bfloat16", "int8"), 16_384, 1024


@torch.no_grad()
def dtypes(folder: Path | None) -> list[dict[str, Any]]:
    """What keys and values in fewer bits change: the next tokens of a text that was read, and needles found.

    Of the shipped demo's model, and of that in ``folder`` without needles.
    """
    results, text = [], unseen_text()
    for name in ["demo", *([str(folder)] if folder else [])]:
        subject = load(Path(name))
        model, S = subject.model.float(), subject.chunk_size
        ids, exact = unseen_tokens(subject, _ASKED_AFTER + _ASKED + 1), None
        for dtype in _DTYPES:
            cache = model.new_cache("host", memory_dtype=getattr(torch, dtype))
            model.read(ids[:, :_ASKED_AFTER], cache)
            logits = model(ids[:, _ASKED_AFTER:-1], past_key_values=cache).logits[0]
            of_tokens = logits.double().log_softmax(-1)
            exact = of_tokens if exact is None else exact
            nats = -of_tokens.gather(1, ids[0, _ASKED_AFTER + 1 :, None]).mean()
            off = (exact.exp() * (exact - of_tokens)).sum(1)  # Kullback-Leibler
            memory = cache.memory
            assert memory.store is not None
            row: dict[str, Any] = {
                "model": "demo" if name == "demo" else type(model).__name__,
                "dtype": dtype,
            }
            row |= {"after": _ASKED_AFTER, "tokens": _ASKED, "nats": float(nats)}
            row |= {"kl": float(off.mean()), "kl_most": float(off.max())}
            row |= {"bytes_per_token": memory.store.record_bytes * memory.planes / S}
            if name == "demo":
                settings = NeedleSettings((K64,), format="marks", questions=300, memory_dtype=dtype)
                (found,) = measure(subject, settings, text, partial(print, end="\r", flush=True))
                row |= {"length": K64} | {key: found[key] for key in ("questions", "correct", "recall")}
            results.append(row)
            print(row, flush=True)
    return results


# --- saving ------------------------------------------------------------------------------------------------


def saving(folder: Path | None) -> list[dict[str, Any]]:
    """Seconds to save and to load a memory of 1M tokens."""
    model = models("demo")["drt"]
    ids = random_text(model, M1)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
        host = model.new_cache("host")
        model.read(ids, host)
        own = model.new_cache("disk", memory_folder=f"{place}/own")
        model.read(ids, own)
        host.save(f"{place}/host")
        cases = {
            "save, host tier": lambda: seconds(lambda: host.save(f"{place}/host")),
            "save, disk tier in its own folder": lambda: seconds(lambda: own.save(f"{place}/own")),
            "load": lambda: seconds(lambda: model.load_cache(f"{place}/host")),
        }
        measured = spreads(cases)
        size = host.memory_bytes()
    print({k: round(v["median"], 4) for k, v in measured.items()}, flush=True)
    return [{"length": M1, "memory_bytes": size, "seconds": measured}]


# --- search ------------------------------------------------------------------------------------------------


def clustered(count: int, queries: int, E: int) -> tuple[Tensor, Tensor]:
    """Landmarks [1, M, E] around 4,096 centres, and queries [1, n, E] near some of them."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(4096, E, generator=generator)
    landmarks = centres[torch.randint(4096, (count,), generator=generator)]
    landmarks = (landmarks + 0.5 * torch.randn(count, E, generator=generator))[None]
    asked = landmarks[:, torch.randint(count, (queries,), generator=generator)]
    return landmarks, asked + 0.5 * torch.randn(asked.shape, generator=generator)


def ask(index: Any, landmarks: Tensor, queries: Tensor) -> list[Any]:
    """One query at a time, as in decoding."""
    ends = torch.full((1, 1), landmarks.shape[1])
    return [
        index.select(queries[:, n : n + 1], [landmarks], 8, ends).indices[0, 0].numpy()
        for n in range(queries.shape[1])
    ]


def search(folder: Path | None) -> list[dict[str, Any]]:
    """Exact search against faiss at 262,144 landmarks: milliseconds a query, and recall of the 8 best."""
    results = []
    for E in (64, 512):
        landmarks, queries = clustered(262_144, 64, E)
        exact, faiss = ExactSearch(), FaissSearch()
        built = seconds(partial(ask, faiss, landmarks, queries[:, :1]))
        found = zip(ask(exact, landmarks, queries), ask(faiss, landmarks, queries), strict=True)
        recall = float(np.mean([np.isin(true, near).mean() for true, near in found]))

        def each(index: Any, landmarks: Tensor = landmarks, queries: Tensor = queries) -> float:
            return seconds(partial(ask, index, landmarks, queries)) / 64 * 1000

        measured = spreads({"exact": partial(each, exact), "faiss": partial(each, faiss)})
        results.append(
            {"landmarks": 262_144, "E": E, "recall": recall, "build_seconds": built, "milliseconds": measured}
        )
        print(results[-1], flush=True)
    return results


PARTS: dict[str, Callable[[Path | None], list[dict[str, Any]]]] = {
    "speed": speed,
    "forward": forward,
    "far": far,
    "token": token,
    "family": family,
    "memory": memory,
    "dtypes": dtypes,
    "saving": saving,
    "search": search,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="default: all")
    parser.add_argument("--model", type=Path, help="far: the demo's DRT")
    parser.add_argument("--other", type=Path, help="dtypes: a model beside the demo's")
    parser.add_argument("--memory-case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    start_again_set_up()  # as the commands do
    if arguments.memory_case:
        print(json.dumps(memory_case(arguments.memory_case)))
        return
    for part in arguments.parts or PARTS:
        print(f"== {part}", flush=True)
        keep(OUTPUT, part, PARTS[part](arguments.other if part == "dtypes" else arguments.model))
    print(f"Numbers: {OUTPUT}")


if __name__ == "__main__":
    main()
