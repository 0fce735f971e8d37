"""What the ops cost: time and peak extra memory, against what one would write otherwise. CPU or CUDA.

    python benchmarks/ops.py                    the fastest device here; writes ops.json or ops-cuda.json
    python benchmarks/ops.py --only tokens      one part; what the file has of the others stays

Grouped cross-attention (8 chunks of 64 tokens for each chunk, 8 heads of 64): our op, the oracle that gathers
and keeps everything ("reference"), `scaled_dot_product_attention` with as many keys per query, gathered
beforehand ("sdpa": equal FLOPs, no weights), and causal attention over the whole text ("causal"); on CUDA both
by flash attention, but for float32. Selection
against the oracle that holds all scores; window attention (W = 512) against a dense mask; and the rate of
GEMMs of the same inner sizes, many at once ("bmm") and one large ("mm").

The part "tokens" has tokens that retrieve, as in HiLS: each reads 32 chunks of 64 tokens for each of 2 key/value heads,
its 16 query heads of 64 weigh them for themselves. The chunks are drawn from the whole text, the worst case for caches.
The oracle keeps megabytes for each token and SDPA is given them: so the last 128 tokens of a text read.
Selection by every token is set against one whose queries are the text's chunks ("per chunk").

What is ours is timed only after its results have kept the error budget of the design against float64. Cases are
interleaved in rounds; on a CPU each runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tables
import torch
import torch.nn.functional as F
from common import keep, peak_memory, percentiles
from tables import Row
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.budgets import assert_within_budget
from trailmark.files import read_json, write_json
from trailmark.machine import KEEP_FREED_MEMORY
from trailmark.ops import (
    alibi_slopes,
    grouped_cross_attention,
    select_chunks,
    select_for_tokens,
    sliding_window_attention,
)

SLOW = 4.0  # seconds: a pass that takes longer is timed once, in the first round
OURS = ("torch", "triton")
Made = tuple[Callable[..., Any], list[Tensor]]  # a function, and the tensors it is called with


@dataclass(frozen=True)
class Case:
    """One row of the table. ``implementation`` is ours ("torch", "triton") or what we compare with."""

    op: str  # of MAKE
    implementation: str
    tokens: int
    dtype: str = "float32"
    backward: bool = True
    heads: int = 8
    key_value_heads: int = 8
    head_size: int = 64
    chunk: int = 64
    retrieved: int = 8
    window: int = 512
    reading: int | None = None  # tokens that read, the last of the text; None: all
    allocator: str = "kept"  # on a CPU: freed memory is kept, as the commands have it, or glibc's "default"

    def flops(self) -> int | None:
        """Of the GEMMs: two forward, five more backward (the scores once again)."""
        if self.op not in ("gca", "gemm", "tokens") or self.implementation == "causal":
            return None
        one = 2 * (self.reading or self.tokens) * self.retrieved * self.chunk * self.heads * self.head_size
        return one * (7 if self.backward else 2)


def sdpa_backend(case: Case, device: str) -> str | None:
    """The kernel that SDPA is held to, so that a ratio says the same everywhere. None: PyTorch's choice, on a CPU
    and in float32, which flash attention does not take."""
    if device != "cuda" or case.op not in ("gca", "landmark", "tokens") or case.dtype == "float32":
        return None
    return {
        "sdpa": "FLASH_ATTENTION",
        "causal": "FLASH_ATTENTION",
        "sdpa cudnn": "CUDNN_ATTENTION",
    }.get(case.implementation)


def sdpa(case: Case, device: str) -> Callable[..., Tensor]:
    """``scaled_dot_product_attention`` by the kernel of :func:`sdpa_backend`."""
    name = sdpa_backend(case, device)
    if name is None:
        return F.scaled_dot_product_attention

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, name)):
            return F.scaled_dot_product_attention(q, k, v, **options)

    return attention


def gca(case: Case, device: str) -> Made:
    """All chunks of a text read K others each."""
    N, S, K, H, J, D = (
        case.tokens // case.chunk, case.chunk, case.retrieved, case.heads, case.key_value_heads, case.head_size
    )  # fmt: skip
    as_told: dict[str, Any] = {"dtype": getattr(torch, case.dtype), "device": device}
    q, k, v = (torch.randn(1, N, S, heads, D, **as_told) for heads in (H, J, J))
    indices = torch.stack([torch.randperm(N)[:K].sort().values for _ in range(N)])[None].to(device)
    weights = torch.rand(1, N, K).softmax(-1).to(device)
    attention = sdpa(case, device)
    if case.implementation.startswith("sdpa"):  # [N, H, S, D] x [N, J, K * S, D]
        queries = q[0].transpose(1, 2).contiguous()
        keys, values = (x[0, indices[0]].flatten(1, 2).transpose(1, 2).contiguous() for x in (k, v))
        return partial(attention, enable_gqa=H > J), [queries, keys, values]
    if case.implementation == "causal":  # [1, H, T, D]
        whole = [x.flatten(1, 2).transpose(1, 2).contiguous() for x in (q, k, v)]
        return partial(attention, is_causal=True, enable_gqa=H > J), whole

    def read(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Tensor:
        return grouped_cross_attention(q, k, v, indices, weights, implementation=case.implementation)

    return read, [q, k, v, weights]


def tokens(case: Case, device: str) -> Made:
    """Tokens of a text read K chunks each for each key/value head; query heads weigh them for themselves."""
    N, M, S, K = case.reading or case.tokens, case.tokens // case.chunk, case.chunk, case.retrieved
    H, J, D = case.heads, case.key_value_heads, case.head_size
    as_told: dict[str, Any] = {"dtype": getattr(torch, case.dtype), "device": device}
    q = torch.randn(1, N, 1, H, D, **as_told)
    k, v = (torch.randn(1, M, S, J, D, **as_told) for _ in range(2))
    chosen = torch.rand(1, N, J, M).topk(min(K, M)).indices.sort(-1).values
    indices = F.pad(chosen, (0, K - chosen.shape[-1]), value=-1).to(device)
    weights = torch.rand(1, N, H, K).softmax(-1).to(device)
    if case.implementation == "sdpa":  # [N, J, g, D] x [N, J, K * S, D]
        head = torch.arange(J, device=device)[:, None]
        keys, values = (x[0].transpose(1, 2)[indices[0], head].flatten(2, 3) for x in (k, v))
        return sdpa(case, device), [q.view(N, J, H // J, D), keys, values]

    def read(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Tensor:
        return grouped_cross_attention(
            q, k, v, indices, weights, softmax_off_by_one=False, implementation=case.implementation
        )

    return read, [q, k, v, weights]


def select_tokens(case: Case, device: str) -> Made:
    """All tokens of a text select K of the chunks before them for each key/value head; or its chunks do, once each."""
    if case.implementation == "per chunk":
        return select(replace(case, implementation="torch"), device)
    T, M, H, J, D = case.tokens, case.tokens // case.chunk, case.heads, case.key_value_heads, case.head_size
    as_told: dict[str, Any] = {"dtype": getattr(torch, case.dtype), "device": device}
    query, beside = torch.randn(1, T, H, D, **as_told), torch.randn(1, T, H, **as_told)
    landmarks = torch.randn(1, M, 1, H, D + 1, **as_told)
    before = torch.arange(T, device=device)[None] // case.chunk

    def choose(query: Tensor, beside: Tensor, landmarks: Tensor) -> Tensor:
        found = select_for_tokens(query, beside, case.retrieved, before, J, [landmarks])[0].scores
        return found.masked_fill(found == -torch.inf, 0).sort(-1, descending=True).values

    def dense(query: Tensor, beside: Tensor, landmarks: Tensor) -> Tensor:
        table = landmarks[:, :, 0]  # [1, M, H, D + 1]
        scores = torch.einsum("bthd,bmhd->bthm", query, table[..., :D]) * D**-0.5
        scores = scores + table[..., D].transpose(1, 2)[:, None]
        there = (torch.arange(M, device=device) < before[..., None])[:, :, None]  # [1, T, 1, M]
        scores = scores.masked_fill(~there, -torch.inf)
        shares = scores - torch.logaddexp(scores.logsumexp(-1), beside)[..., None]
        best = shares.unflatten(2, (J, H // J)).amax(3).topk(min(case.retrieved, M)).values
        best = F.pad(best, (0, case.retrieved - best.shape[-1]), value=-torch.inf)
        return best.masked_fill(best == -torch.inf, 0).sort(-1, descending=True).values

    return dense if case.implementation == "reference" else choose, [query, beside, landmarks]


def select(case: Case, device: str) -> Made:
    """All chunks of a text select K of those before them; the scores in descending order."""
    N, E = case.tokens // case.chunk, case.heads * case.head_size
    query, landmarks = (torch.randn(1, N, E, device=device).to(getattr(torch, case.dtype)) for _ in range(2))
    before = torch.arange(N, device=device)

    def choose(query: Tensor, landmarks: Tensor) -> Tensor:
        found = select_chunks(query, landmarks, case.retrieved, before, implementation=case.implementation)
        return found.scores.masked_fill(found.indices < 0, 0).sort(-1, descending=True).values

    return choose, [query, landmarks]


def window(case: Case, device: str) -> Made:
    """ALiBi attention over a window."""
    T, H, D, W = case.tokens, case.heads, case.head_size, case.window
    q, k, v = (torch.randn(1, T, H, D, device=device).to(getattr(torch, case.dtype)) for _ in range(3))
    slopes = alibi_slopes(H).to(device)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        name = case.implementation
        out = sliding_window_attention(q, k, v, W, alibi_slopes=slopes, implementation=name)
        assert isinstance(out, Tensor)
        return out

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(T, device=device)
        distance = place[:, None] - place
        seen = (distance >= 0) & (distance < W)
        mask = torch.where(seen, -slopes[:, None, None] * distance, -torch.inf)[None].to(q.dtype)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    return dense if case.implementation == "dense" else ours, [q, k, v]


def gemm(case: Case, device: str) -> Made:
    """The GEMMs of gca alone: inner sizes D or R (5 of 7, forward alone 1 of 2) and K * S, on the same numbers."""
    D, S, many = case.head_size, case.chunk, case.retrieved * case.chunk
    count = case.tokens * case.heads // S  # chunks times heads
    batch = case.heads if case.implementation == "bmm" else 1
    rows = S if case.implementation == "bmm" else S * case.heads
    as_told: dict[str, Any] = {"dtype": getattr(torch, case.dtype), "device": device}
    few, keys = torch.randn(batch, rows, D, **as_told), torch.randn(batch, many, D, **as_told)
    scores = torch.randn(batch, rows, many, **as_told)
    short, long = (5, 2) if case.backward else (1, 1)

    def run() -> None:
        for _ in range(count // case.heads):
            for _ in range(short):
                torch.bmm(few, keys.transpose(1, 2), out=scores)
            for _ in range(long):
                torch.bmm(scores, keys, out=few)

    return run, []


MAKE = {
    "gca": gca, "select": select, "window": window, "gemm": gemm, "tokens": tokens, "select for tokens": select_tokens,
}  # fmt: skip


def run_pass(function: Callable[..., Any], leaves: list[Tensor], backward: bool) -> list[Tensor]:
    """One pass: the output, and with ``backward`` the gradients, of a cotangent of ones."""
    if not leaves:
        function()
        return []
    with torch.set_grad_enabled(backward):
        out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))] if backward else [out]


def check(case: Case, device: str) -> None:
    """Output and gradients keep the budget against float64 on a shorter text; else an AssertionError."""
    short = replace(case, tokens=min(case.tokens, 16 * case.chunk))
    if case.op == "tokens":
        short = replace(short, reading=64)
    results = []
    for name, dtype in ((case.implementation, None), ("reference", None), ("reference", torch.float64)):
        torch.manual_seed(0)
        function, leaves = MAKE[case.op](replace(short, implementation=name), device)
        leaves = [(x if dtype is None else x.to(dtype)).requires_grad_(case.backward) for x in leaves]
        results.append(run_pass(function, leaves, case.backward))
    for fast, oracle, exact in zip(*results, strict=True):
        assert_within_budget(fast.detach(), oracle.detach(), exact.detach())


def measure(case: Case, device: str, enough: float = 1.0) -> dict[str, Any]:
    """Seconds of each pass after one, at least three and ``enough`` seconds of them; extra peak memory.

    Those of the processor say more than the clock's where other work runs beside.
    """
    torch.manual_seed(0)
    function, leaves = MAKE[case.op](case, device)
    for leaf in leaves:
        leaf.requires_grad_(case.backward)
    cuda = device == "cuda"

    busy: list[float] = []  # seconds of the processor

    def timed() -> float:
        if cuda:
            torch.cuda.synchronize()
        began, began_busy = time.perf_counter(), time.process_time()
        run_pass(function, leaves, case.backward)
        if cuda:
            torch.cuda.synchronize()
        busy.append(time.process_time() - began_busy)
        return time.perf_counter() - began

    if cuda:
        run_pass(function, leaves, case.backward)  # compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = _peak(cuda)
    first = timed()
    extra = _peak(cuda) - before
    seconds = [first] if first > SLOW else []  # of such a pass the warming up is a small part
    while not seconds or (
        first <= SLOW and (len(seconds) < 3 or (sum(seconds) < enough and len(seconds) < 50))
    ):
        seconds.append(timed())
    return {"seconds": seconds, "processor_seconds": busy[-len(seconds) :], "extra_bytes": extra}


def _peak(cuda: bool) -> int:
    if cuda:
        return torch.cuda.max_memory_allocated()
    return peak_memory()


def cases(device: str) -> list[Case]:
    found = []
    for dtype in ("float32", "bfloat16"):
        tokens = (4096, 16384) if device == "cpu" else (16384, 65536)
        ours = ("torch",) if device == "cpu" else ("triton", "torch")
        for T in tokens:
            for name in (*ours, "reference", "sdpa", "causal"):
                found.append(Case("gca", name, T, dtype))
        found += [
            Case("gca", name, tokens[-1], dtype, backward=False) for name in (*ours, "reference", "sdpa")
        ]
        if device == "cpu":  # what a program of one's own meets unless it sets the allocator up
            pair = ("torch", "reference")
            found += [Case("gca", name, tokens[-1], dtype, allocator="default") for name in pair]
        found += [Case("gemm", name, tokens[-1], dtype) for name in ("bmm", "mm")]
        found += [Case("select", name, 4 * tokens[-1], dtype) for name in (*ours, "reference")]
        found += [Case("window", name, tokens[0], dtype) for name in ("torch", "dense")]
    # the dense mask and its scores would take tens of gigabytes
    return [*found, Case("window", "torch", tokens[-1])]


def token_cases(device: str) -> list[Case]:
    """In the sizes of HiLS' 345M model."""
    sizes: dict[str, Any] = {"heads": 16, "key_value_heads": 2, "retrieved": 32}
    names = ("torch",) if device == "cpu" else ("triton", "torch")
    found = []
    for T in (4096, 16384):
        some = Case("tokens", "", T, reading=128, **sizes)
        found += [replace(some, implementation=name) for name in (*names, "reference", "sdpa")]
        found += [replace(some, implementation=name, reading=None) for name in names]
        every = Case("select for tokens", "", T, backward=False, **sizes)
        found += [replace(every, implementation=name) for name in ("torch", "reference", "per chunk")]
    return found


PARTS = {"chunks": cases, "tokens": token_cases}


def collect(device: str, rounds: int, part: str = "chunks") -> list[dict[str, Any]]:
    """All cases of a part in turn, ``rounds`` times; percentiles over all passes."""
    found: dict[Case, list[dict[str, Any]]] = {}
    for number in range(rounds):
        for case in PARTS[part](device):
            before = found.get(case)
            if before is not None and (not before or before[0]["seconds"][0] > SLOW):
                continue
            if before is None and case.implementation in OURS:
                check(case, device) if device == "cuda" else _apart("--check", case)
            done = measure(case, device) if device == "cuda" else json.loads(_apart("--case", case))
            found.setdefault(case, []).append(done)
            print(f"round {number + 1} of {rounds}: {_name(case)}: {min(done['seconds']):.3f} s", flush=True)
    results = []
    for case, runs in found.items():
        seconds = [second for run in runs for second in run["seconds"]]
        extra = statistics.median(run["extra_bytes"] for run in runs)
        results.append(
            {**asdict(case), "flops": case.flops(), "seconds": percentiles(seconds), "passes": len(seconds)}
        )
        busy = percentiles([second for run in runs for second in run["processor_seconds"]])
        results[-1] |= {
            "processor_seconds": busy,
            "extra_bytes": extra,
            "sdpa_backend": sdpa_backend(case, device),
        }
    return results


def _apart(what: str, case: Case) -> str:
    """In a process of its own. This one stays small: a process starts with the peak memory of its parent."""
    command = [sys.executable, __file__, what, json.dumps(asdict(case))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    if case.allocator == "kept":
        environment |= KEEP_FREED_MEMORY
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout


def _name(case: Case) -> str:
    passes = " forward + backward" if case.backward else " forward"
    allocator = ", glibc's default allocator" if case.allocator == "default" else ""
    which = f"{case.tokens} tokens" if case.reading is None else f"{case.reading} of {case.tokens} tokens"
    return f"{case.op}{passes}, {case.implementation}, {case.dtype}, {which}{allocator}"


def table(results: list[dict[str, Any]], part: str = "chunks") -> str:
    def like(r: Row, names: Sequence[str]) -> Row | None:
        """The row of one of these implementations that a row is compared with."""
        same = ("op", "tokens", "dtype", "backward", "allocator", "reading")
        found = (
            x for x in results if x["implementation"] in names and all(x.get(y) == r.get(y) for y in same)
        )
        return next(found, None)

    rows = []
    for r in results:
        own, oracle = like(r, OURS), like(r, ("reference",))
        rows.append(r | {"of_ours": own and r["seconds"]["p50"] / own["seconds"]["p50"]})
        if own and "processor_seconds" in r:
            rows[-1]["busy_of_ours"] = r["processor_seconds"]["p50"] / own["processor_seconds"]["p50"]
        if oracle and r["extra_bytes"] and r["implementation"] in OURS:
            rows[-1]["of_oracle"] = r["extra_bytes"] / oracle["extra_bytes"]
    return tables.table(COLUMNS if part == "chunks" else TOKEN_COLUMNS, rows)


COLUMNS: tables.Columns = {
    "op": lambda r: (
        f"{r['op']}, {r['implementation']}" + ", glibc's defaults" * (r["allocator"] == "default")
    ),
    "passes": lambda r: "forward + backward" if r["backward"] else "forward",
    "dtype": "{dtype}",
    "tokens": "{tokens:,}",
    "ms: p50 (p20-p80)": "{seconds[p50]:ms ,.1f} ({seconds[p20]:ms ,.1f}-{seconds[p80]:ms ,.1f})",
    "time / ours": "{of_ours:.2f}x",
    "GFLOP/s": lambda r: f"{r['flops'] / r['seconds']['p50'] / 1e9:,.0f}" if r["flops"] else "-",
    "peak extra memory": lambda r: "-" if r["op"] == "gemm" else tables.cell("{extra_bytes:mib ,.0f}", r),
}
TOKEN_COLUMNS: tables.Columns = {
    **{title: COLUMNS[title] for title in ("op", "passes", "tokens")},
    "that read": lambda r: f"{r['reading'] or r['tokens']:,}",
    **{title: COLUMNS[title] for title in ("ms: p50 (p20-p80)", "time / ours")},
    "processor's ms": "{processor_seconds[p50]:ms ,.1f}",
    "processor's / ours": "{busy_of_ours:.2f}x",
    "peak extra memory": COLUMNS["peak extra memory"],
    "of reference's": "{of_oracle:.3f}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--only", choices=tuple(PARTS), help="a part; the file keeps the others")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(Case(**json.loads(arguments.case)), "cpu")))
        return
    if arguments.check:
        check(Case(**json.loads(arguments.check)), "cpu")
        return
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    output = arguments.output or Path(__file__).with_name("ops.json" if device == "cpu" else "ops-cuda.json")
    from trailmark.demo import environment  # here: measuring does not import transformers

    for part in [arguments.only] if arguments.only else PARTS:
        results = collect(device, arguments.rounds, part)
        where = environment() | {"device": torch.cuda.get_device_name() if device == "cuda" else device}
        if part == "chunks":
            write_json(output, (read_json(output) or {}) | {"environment": where, "results": results})
        else:
            keep(output, part, results, where)
        print(table(results, part))
    print(f"Numbers: {output}")


if __name__ == "__main__":
    main()
