"""What a token costs a Landmark model after a long text, against the window-only model.

    python benchmarks/landmark_decode.py [token reading]      # CPU; benchmarks/landmark_decode.json

token: milliseconds per generated token after about 16K and 48K tokens, 128M models with random weights, all four ways
to select; and the memory beside the model. The memory is filled with copies of chunks that were read, with landmarks of
their own; that such a cache has the structure of one that read its text is checked first. reading: tokens/s of ``read``
with a smaller model, and the bytes gathered per token.

Cases that are compared alternate in one process. Runs itself anew with the allocator set up as the commands have it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import interleaved, percentiles, seconds
from tables import Columns, Row, table
from torch import Tensor

from trailmark.evaluation.record import environment
from trailmark.files import read_json, write_json
from trailmark.machine import start_again_set_up
from trailmark.memory import ChunkCache, ChunkMemory, MemoryEntries, MemorySize
from trailmark.memory.window import Window
from trailmark.models import (
    LandmarkConfig,
    LandmarkForCausalLM,
    SlidingWindowConfig,
    SlidingWindowForCausalLM,
)

RESULTS = Path(__file__).with_name("landmark_decode.json")
WAYS = ("token_and_head", "token", "head", "cell")
TIER = "host"  # on a CPU "device" lies in the same RAM
DTYPES = ("float32", "bfloat16")
CONTEXTS = (16_384, 49_152)
TOKENS, ROUNDS = 16, 2  # of each case


# --- models and what they have read -----------------------------------------------------------------------


def window_only(dtype: torch.dtype) -> SlidingWindowForCausalLM:
    torch.manual_seed(0)
    return SlidingWindowForCausalLM(SlidingWindowConfig()).eval().to(dtype)


def landmark_models(dtype: torch.dtype, **sizes: Any) -> dict[str, LandmarkForCausalLM]:
    """One for each way to select, with the same weights (the same tensors)."""
    torch.manual_seed(0)
    found: dict[str, LandmarkForCausalLM] = {}
    for way in WAYS:
        model = LandmarkForCausalLM(LandmarkConfig(retrieve_per=way, **sizes)).eval().to(dtype)
        if found:
            model.load_state_dict(found[WAYS[0]].state_dict(), assign=True)
            model.tie_weights()
        found[way] = model
    return found


def ids(count: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (1, count), generator=torch.Generator().manual_seed(1))


class Filled:
    """Caches as if a long text had been read, made of what was read of a short one.

    Keys and values of each chunk are those of one that was read, copied; its landmark is that one's and noise as large.

    Args:
        read: what a model has read, whole cells and part of one.
    """

    def __init__(self, model: LandmarkForCausalLM, read: ChunkCache, num_cells: int) -> None:
        assert read.state is not None
        self.read, self.num_cells = read, num_cells
        self.chunks = cell_chunks(model.config)
        source = read.memory
        self.memory = ChunkMemory(TIER, planes=source.planes)
        had = int(read.num_chunks[0])
        k, v, lengths = source._whole(np.arange(had)[None])  # [1, n, S + 1, planes, D]
        marks = torch.cat(source.blocks(had, 1), 1)  # [1, n, planes, D]
        noise = marks.float().std(1, keepdim=True)
        random = np.random.default_rng(2)
        generator = torch.Generator().manual_seed(2)
        size = MemorySize(np.zeros(1, np.int64), 0)
        for cell in range(num_cells):
            some = torch.from_numpy(random.permutation(had)[: self.chunks])
            fresh = torch.randn(1, self.chunks, *marks.shape[2:], generator=generator) * noise
            entries = MemoryEntries(
                k[:, some], v[:, some], (marks[:, some] + fresh).to(marks.dtype), lengths[:, some]
            )
            starts = (cell * self.chunks + np.arange(self.chunks))[None] * (model.config.chunk_size + 1)
            size = self.memory.write(size, entries, starts, np.array([self.chunks]))

    def cache(self, model: LandmarkForCausalLM, num_cells: int) -> ChunkCache:
        """As if ``model`` had read so many cells and the part of one.

        Caches share the memory, until one ends its cell.
        """
        assert num_cells <= self.num_cells
        cache, state = model.new_cache(TIER), self.read.state
        assert state is not None
        assert state.cell is not None
        cache.memory = self.memory
        more = num_cells - int(self.read.num_chunks[0]) // self.chunks
        more_tokens, more_chunks = more * cell_tokens(model.config), more * self.chunks
        nothing = (None,) * len(state.layers)
        cache.state = replace(
            state,
            num_tokens=state.num_tokens + more_tokens,
            num_positions=state.num_positions + more_tokens + more_chunks,
            memory=MemorySize(
                np.array([num_cells * self.chunks]), num_cells * self.chunks * self.memory.planes
            ),
            layers=tuple(layer.take_rows(torch.zeros(1, dtype=torch.int64)) for layer in state.layers),
            cell=replace(state.cell, running=nothing, chosen=nothing),
        )
        return cache


def cells_of(num_tokens: int, config: LandmarkConfig) -> int:
    """Whole cells before the one that is half read, of a text of about so many tokens."""
    return num_tokens // cell_tokens(config) - 1


def short_text(model: LandmarkForCausalLM) -> ChunkCache:
    """After four cells, and of a fifth the chunks of its first half."""
    config = model.config
    count = 4 * cell_tokens(config) + cell_chunks(config) // 2 * config.chunk_size
    cache = model.new_cache(TIER)
    model.read(ids(count, config.vocab_size), cache)
    return cache


def cell_tokens(config: LandmarkConfig) -> int:
    assert config.local_length is not None
    assert config.local_length % config.chunk_size == 0
    return config.local_length


def cell_chunks(config: LandmarkConfig) -> int:
    return cell_tokens(config) // config.chunk_size


def structure(x: Any) -> Any:
    """Shapes, dtypes and counts of a cache's state, without the numbers that a text gives."""
    if isinstance(x, Tensor):
        return ["tensor", list(x.shape), list(x.stride()), str(x.dtype)]
    if isinstance(x, np.ndarray):
        return [str(x.dtype), x.tolist()]
    if isinstance(x, Window):
        return [structure(x.keys), structure(x.values)]
    if is_dataclass(x):
        return {field.name: structure(getattr(x, field.name)) for field in fields(x)}
    if isinstance(x, tuple):
        return [structure(part) for part in x]
    return x


def as_read(models: dict[str, LandmarkForCausalLM], read: ChunkCache) -> None:
    """A filled cache has the structure of one that read as many tokens, after a token each; else an AssertionError."""
    filled = Filled(models[WAYS[0]], read, 4)
    for way in ("head", "cell", "token_and_head"):
        model = models[way]
        real = read if way == "token_and_head" else short_text(model)
        made, state = filled.cache(model, 4), real.state
        for cache in (real, made):
            milliseconds(model, cache, 1)
        wanted, got = structure(real.state), structure(made.state)
        # what each token retrieved is counted since the text's beginning
        wanted["cell"]["retrievals"] = got["cell"]["retrievals"]
        for name in wanted:
            assert wanted[name] == got[name], (way, name, wanted[name], got[name])
        n = int(real.num_chunks[0])
        for name in ("records", "starts", "lengths"):
            ours, theirs = getattr(made.memory._tables, name), getattr(real.memory._tables, name)
            assert (ours[:, :n] == theirs[:, :n]).all(), (way, name)
        assert structure(tuple(made.memory.blocks(n, 1))) == structure(tuple(real.memory.blocks(n, 1))), way
        assert made.memory_bytes() == real.memory_bytes(), way
        assert made.window_bytes() == real.window_bytes(), way
        real.state = state


# --- a token -----------------------------------------------------------------------------------------------


def milliseconds(model: Any, cache: ChunkCache, count: int) -> list[float]:
    """Of each of ``count`` tokens that are generated one by one."""
    found = []
    token = torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(count):
        began = time.perf_counter()
        logits = model(token, past_key_values=cache, logits_to_keep=1).logits  # as generate asks
        found.append((time.perf_counter() - began) * 1000)
        token = logits[:, -1:].argmax(-1)
    return found


def window_cache(model: SlidingWindowForCausalLM) -> ChunkCache:
    """After more than a window: what it costs no longer depends on how much was read."""
    cache = model.new_cache()
    model.read(ids(1024, model.config.vocab_size), cache)
    model(ids(1, model.config.vocab_size), past_key_values=cache, logits_to_keep=1)
    return cache


def token(results: dict[str, Any]) -> None:
    found: list[dict[str, Any]] = []
    for name in DTYPES:
        dtype = getattr(torch, name)
        base, models = window_only(dtype), landmark_models(dtype)
        first = models[WAYS[0]]
        at = {context: cells_of(context, first.config) for context in CONTEXTS}
        read = short_text(first)
        if name == "float32":
            as_read(models, read)
            print("a filled cache is as one that read", flush=True)
        filled = Filled(first, read, max(at.values()))
        caches = {
            (way, context): filled.cache(model, cells)
            for way, model in models.items()
            for context, cells in at.items()
        }
        print(f"{name}: {len(caches)} caches", flush=True)
        window = window_cache(base)
        times: dict[Any, list[float]] = defaultdict(list)
        milliseconds(base, window, 3)
        for (way, _), cache in caches.items():
            milliseconds(models[way], cache, 2)
        for _ in range(ROUNDS):
            for key, cache in caches.items():
                times["window"] += milliseconds(base, window, 6)
                times[key] += milliseconds(models[key[0]], cache, TOKENS)
        least = statistics.median(times["window"])
        found.append(case("window only", name, times["window"], least, window, None))
        for (way, context), cache in caches.items():
            found.append(case(way, name, times[way, context], least, cache, context))
        del caches, filled
    results["token"] = found
    print(table(TOKEN_TABLE, found))


def case(
    way: str,
    dtype: str,
    times: list[float],
    least: float,
    cache: ChunkCache,
    context: int | None,
) -> dict[str, Any]:
    return {
        "retrieve_per": way,
        "dtype": dtype,
        "context": context,
        "tokens_read": int(cache.num_tokens[0]),
        "milliseconds": percentiles(times) | {"mean": statistics.fmean(times)},
        "tokens": len(times),
        "of_window_only": statistics.median(times) / least,
        "memory_bytes": cache.memory_bytes(),
        "landmark_bytes": landmark_bytes(cache),
        "window_bytes": cache.window_bytes(),
    }


def landmark_bytes(cache: ChunkCache) -> int:
    """What of the memory lies on the device: landmark vectors that count."""
    n = int(cache.num_chunks[0])
    return sum(x.numel() * x.element_size() for x in cache.memory.blocks(n, 1)) if n else 0


TOKEN_TABLE: Columns = {
    "selects": "{retrieve_per}",
    "dtype": "{dtype}",
    "context": lambda r: f"{r['context']:,}" if r["context"] else "any",
    "ms a token: p50 (p20-p80)": "{milliseconds[p50]:.1f} ({milliseconds[p20]:.1f}-{milliseconds[p80]:.1f})",
    "of window only": "{of_window_only:.2f}x",
    "memory": "{memory_bytes:mib ,.0f}",
    "of it landmarks, on the device": "{landmark_bytes:mib ,.1f}",
    "windows": "{window_bytes:mib ,.1f}",
}


# --- reading -----------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4
}  # fmt: skip
READ, READ_ROUNDS = 8192, 3


def reading(results: dict[str, Any]) -> None:
    models = landmark_models(torch.float32, **SMALL)
    torch.manual_seed(0)
    base = SlidingWindowForCausalLM(SlidingWindowConfig(**SMALL)).eval()
    text = ids(READ, SMALL["vocab_size"])
    fetched = {}

    def full(model: Any) -> None:
        cache = model.new_cache(TIER)
        for first in range(0, READ, 4096):
            model(text[:, first : first + 4096], past_key_values=cache)

    def read(way: str, model: Any) -> None:
        cache = model.new_cache(TIER, num_tokens=READ)
        model.read(text, cache)
        store = cache.memory.store
        fetched[way] = cache.memory.fetched, 0 if store is None else store.record_bytes

    cases: dict[str, Callable[[], None]] = {"window only": partial(full, base)}
    cases |= {way: partial(read, way, model) for way, model in models.items()}
    times = interleaved({name: partial(seconds, run) for name, run in cases.items()}, READ_ROUNDS)
    found = []
    for name, measured in times.items():
        records, record_bytes = fetched.get(name, (0, 0))
        found.append(
            {
                "retrieve_per": name,
                "tokens": READ,
                "tokens_per_second": [READ / x for x in sorted(measured, reverse=True)],
                "bytes_gathered_per_token": records * record_bytes / READ,
                "record_bytes": record_bytes,
            }
        )
    results["reading"] = found
    print(table(READING_TABLE, found))


def _speed(result: Row) -> str:
    speed = result["tokens_per_second"]
    return f"{statistics.median(speed):,.0f} ({speed[0]:,.0f}-{speed[-1]:,.0f})"


READING_TABLE: Columns = {
    "selects": "{retrieve_per}",
    "tokens/s: median (lowest-highest)": _speed,
    "gathered per token": lambda r: f"{r['bytes_gathered_per_token'] / 1024:,.1f} KiB",
}


# --- all ---------------------------------------------------------------------------------------------------

RUN = {"token": token, "reading": reading}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*RUN, []], help="default: all")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    start_again_set_up()  # as the commands do
    known = read_json(arguments.output) or {}
    for name in arguments.parts or RUN:
        with torch.no_grad():
            RUN[name](known)
        known["environment"] = known.get("environment", {}) | {name: environment()}
        write_json(arguments.output, known)
    print(f"Numbers: {arguments.output}")


if __name__ == "__main__":
    main()
