"""What Landmark Attention costs on a CPU, against causal attention over the same text: time and memory kept.

    python benchmarks/landmark.py               writes the section "op" of landmark.json

Forward and backward of `landmark_attention` (8 heads of 64) in chunks of 63 + 1 positions; in the same chunks
where the window begins inside one; and in the paper's chunks of 50 + 1; against causal
`scaled_dot_product_attention`. Cases are interleaved in rounds in one process; what is ours is timed only after
its results have kept the error budget of the design. Bytes kept for the backward are counted beside the inputs, for
the equations as written (the oracle) too.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import interleaved, keep, seconds
from ops import run_pass
from tables import Columns, table
from torch import Tensor

from tests.ops.landmark.cases import assert_budget
from trailmark.evaluation.record import environment
from trailmark.machine import start_again_set_up
from trailmark.ops import LandmarkLayout, landmark_attention


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    implementation: str  # "torch", "reference" or "causal"
    tokens: int
    dtype: str = "float32"
    chunk: int = 63
    begins_at: int = 0  # place in its chunk of the first position
    heads: int = 8
    head_size: int = 64

    def is_landmark(self) -> Tensor:
        place = torch.arange(self.tokens) + self.begins_at
        return (place % (self.chunk + 1) == self.chunk)[None]

    def leaves(self) -> list[Tensor]:
        torch.manual_seed(0)
        shape = (1, self.tokens, self.heads, self.head_size)
        return [torch.randn(shape).to(getattr(torch, self.dtype)).requires_grad_() for _ in range(3)]

    def function(self) -> Callable[..., Tensor]:
        if self.implementation == "causal":

            def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                q, k, v = (x.transpose(1, 2) for x in (q, k, v))
                return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

            return causal
        layout = LandmarkLayout.of(self.is_landmark())

        def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = landmark_attention(q, k, v, layout, implementation=self.implementation)
            assert isinstance(out, Tensor)
            return out

        return ours

    def name(self) -> str:
        if self.implementation == "causal":
            return "causal SDPA"
        begins = f", the window begins at {self.begins_at}" if self.begins_at else ""
        oracle = "the equations as written, " if self.implementation == "reference" else ""
        return f"{oracle}chunks of {self.chunk} + 1{begins}"


def cases() -> list[Case]:
    """Those of a length and dtype follow each other, the one they are compared with first."""
    found = []
    for dtype in ("float32", "bfloat16"):
        for T in (512, 4096, 16384):
            causal = Case("causal", T, dtype)
            found += [causal, replace(causal, implementation="torch")]
            if T < 16384:
                ours = replace(causal, implementation="torch")
                found += [replace(ours, begins_at=23), replace(ours, chunk=50)]
    return found


def check(case: Case) -> None:
    """Output, log-sum-exp and gradients keep the budget against float64 on at most 512 positions."""
    short = replace(case, tokens=min(case.tokens, 512))
    tensors = [x.detach() for x in short.leaves()]
    rest = {"is_landmark": short.is_landmark(), "document_ids": None, "query_places": None}
    assert_budget(tensors, rest, case.implementation)


def kept(function: Callable[..., Tensor], leaves: list[Tensor]) -> int:
    """Bytes saved for the backward that are not the inputs' own."""
    known = {x.untyped_storage().data_ptr() for x in leaves}
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in known:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function(*leaves)
    return sum(found.values())


def collect(chosen: list[Case], rounds: int) -> list[dict[str, Any]]:
    """Medians over rounds; in each, every case of a length and dtype runs once (below 4096 positions 5 times)."""
    results: list[dict[str, Any]] = []
    for (tokens, _), group in itertools.groupby(chosen, lambda case: (case.tokens, case.dtype)):
        made = {case: (case.function(), case.leaves()) for case in group}
        passes: dict[tuple[Case, bool], Callable[[], float]] = {}
        for case, (function, leaves) in made.items():
            if case.implementation != "causal":
                check(case)
            for backward in (True, False):
                work = partial(run_pass, function, leaves, backward)
                passes[case, backward] = partial(seconds, work)
        times = interleaved(passes, rounds * (5 if tokens < 4096 else 1))
        medians = {key: statistics.median(found) for key, found in times.items()}
        causal = next(iter(made))
        for case in made:
            both, forward = medians[case, True], medians[case, False]
            row = asdict(case) | {"name": case.name(), "seconds": both, "forward_seconds": forward}
            row |= {"of_causal": both / medians[causal, True]}
            row |= {"forward_of_causal": forward / medians[causal, False]}
            results.append(row | {"passes": len(times[case, True]), "kept_bytes": kept(*made[case])})
            print(f"{case.dtype}, {case.tokens}: {case.name()}: {both * 1000:.1f} ms", flush=True)
        if tokens <= 512:
            oracle = replace(causal, implementation="reference")
            counted = {"name": oracle.name(), "kept_bytes": kept(oracle.function(), oracle.leaves())}
            results.append(asdict(oracle) | counted)
    return results


COLUMNS: Columns = {
    "attention": "{name}",
    "dtype": "{dtype}",
    "positions": "{tokens:,}",
    "ms, both passes": "{seconds:ms ,.1f}",
    "of causal": "{of_causal:.2f}x",
    "forward": "{forward_of_causal:.2f}x",
    "kept beside the inputs": "{kept_bytes:mib ,.2f}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=16384, help="leave longer cases out")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("landmark.json"))
    arguments = parser.parse_args()
    start_again_set_up()  # as `trailmark train` does
    results = collect([case for case in cases() if case.tokens <= arguments.longest], arguments.rounds)
    keep(arguments.output, "op", results, environment() | {"device": "cpu"})
    print(table(COLUMNS, results))
    print(f"Numbers: {arguments.output}")


if __name__ == "__main__":
    main()
