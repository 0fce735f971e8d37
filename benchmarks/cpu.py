"""What the ops cost on this machine's CPU: time and peak extra memory, against what one would write otherwise.

    python benchmarks/cpu.py            writes benchmarks/cpu.json (about four minutes)

Grouped cross-attention (K = 8 chunks of 64 tokens, 8 heads of 64) forward and backward, at 4K and 16K tokens:
our op, the oracle that gathers and keeps everything, and `scaled_dot_product_attention` with as many keys per
query (equal FLOPs, keys gathered beforehand). Window attention (W = 512) against a dense mask. Every case
runs in a process of its own, so that its peak memory is its own; cases are interleaved, medians are reported.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from trailmark.demo import environment
from trailmark.ops import alibi_slopes, grouped_cross_attention, sliding_window_attention
from trailmark.report.tables import markdown_table

K, S, H, D, W = 8, 64, 8, 64, 512
CASES = {
    "gca": ("torch", "reference", "sdpa"),
    "window": ("torch", "dense"),
}
TOKENS = (4096, 16384)
LEFT_OUT = {("window", "dense", 16384)}  # masks and scores of 8 heads would take tens of gigabytes
_SLOW = 5.0  # seconds: a pass that takes longer is measured once, in the first round


def gca_case(name: str, tokens: int) -> Callable[[], None]:
    """A forward and backward pass of all chunks of a text reading 8 others each."""
    N = tokens // S
    q, k, v = (torch.randn(1, N, S, H, D, requires_grad=True) for _ in range(3))
    indices = torch.stack([torch.randperm(N)[:K].sort().values for _ in range(N)])[None]
    weights = torch.rand(1, N, K).softmax(-1).requires_grad_()
    if name == "sdpa":
        keys, values = (
            x[0, indices[0]].flatten(1, 2).transpose(1, 2).detach().requires_grad_() for x in (k, v)
        )

        def run() -> None:
            queries = q[0].transpose(1, 2)  # [N, H, S, D] x [N, H, K * S, D]
            F.scaled_dot_product_attention(queries, keys, values).sum().backward()

        return run

    def run() -> None:
        grouped_cross_attention(q, k, v, indices, weights, implementation=name).sum().backward()

    return run


def window_case(name: str, tokens: int) -> Callable[[], None]:
    """A forward and backward pass of ALiBi attention over a window."""
    q, k, v = (torch.randn(1, tokens, H, D, requires_grad=True) for _ in range(3))
    slopes = alibi_slopes(H)
    if name == "torch":

        def run() -> None:
            out = sliding_window_attention(q, k, v, W, alibi_slopes=slopes)
            assert isinstance(out, torch.Tensor)
            out.sum().backward()

        return run

    def run() -> None:
        place = torch.arange(tokens)
        distance = place[:, None] - place
        seen = (distance >= 0) & (distance < W)
        mask = torch.where(seen, -slopes[:, None, None] * distance, -torch.inf)[None]
        heads = (x.transpose(1, 2) for x in (q, k, v))
        F.scaled_dot_product_attention(*heads, attn_mask=mask).sum().backward()

    return run


def measure(op: str, name: str, tokens: int) -> dict[str, float]:
    """Seconds (the best of a few passes after one) and the growth of the peak resident memory."""
    torch.manual_seed(0)
    run = (gca_case if op == "gca" else window_case)(name, tokens)
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    began = time.perf_counter()
    run()
    first = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    times = [first] if first > _SLOW else []  # of such a pass the warming up is a small part
    while not times or (times[0] <= _SLOW and (len(times) < 3 or (sum(times) < 2 and len(times) < 10))):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return {"seconds": min(times), "extra_bytes": after - before}


def collect(repeats: int) -> list[dict[str, Any]]:
    """All cases, ``repeats`` rounds of them in turn; medians over the rounds."""
    found: dict[tuple[str, str, int], list[dict[str, float]]] = {}
    for number in range(repeats):
        for op, names in CASES.items():
            for tokens in TOKENS:
                for name in names:
                    before = found.get((op, name, tokens))
                    if (op, name, tokens) in LEFT_OUT or (before and before[0]["seconds"] > _SLOW):
                        continue
                    command = [sys.executable, __file__, "--case", op, name, str(tokens)]
                    done = subprocess.run(command, capture_output=True, text=True, check=False)
                    if done.returncode:
                        print(f"{op} {name} {tokens}: {done.stderr.strip().splitlines()[-1]}")
                        continue
                    found.setdefault((op, name, tokens), []).append(json.loads(done.stdout))
                    print(
                        f"round {number + 1} of {repeats}: {op} {name} {tokens}: {done.stdout.strip()}",
                        flush=True,
                    )
    return [
        {"op": op, "implementation": name, "tokens": tokens}
        | {key: statistics.median(r[key] for r in rounds) for key in ("seconds", "extra_bytes")}
        for (op, name, tokens), rounds in found.items()
    ]


def table(results: list[dict[str, Any]]) -> str:
    rows = []
    for r in results:
        own = next(
            x
            for x in results
            if (x["op"], x["tokens"], x["implementation"]) == (r["op"], r["tokens"], "torch")
        )
        rows.append(
            [
                f"{r['op']}, {r['implementation']}",
                f"{r['tokens']:,}",
                f"{r['seconds'] * 1000:,.0f} ms",
                f"{r['seconds'] / own['seconds']:.2f}x",
                f"{r['extra_bytes'] / 2**20:,.0f} MiB",
            ]
        )
    return markdown_table(["forward + backward", "tokens", "time", "of ours", "peak extra memory"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs=3, metavar=("OP", "NAME", "TOKENS"), help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    if arguments.case:
        op, name, tokens = arguments.case
        print(json.dumps(measure(op, name, int(tokens))))
        return
    results = collect(arguments.rounds)
    arguments.output.write_text(
        json.dumps({"environment": environment(), "results": results}, indent=1) + "\n"
    )
    print(table(results))
    print(f"Numbers: {arguments.output}")


if __name__ == "__main__":
    main()
