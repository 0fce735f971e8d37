"""The kernels on a GPU: first whether they are right, then how fast. One command, under ten minutes.

    python benchmarks/gpu.py                              writes benchmarks/gpu.json
    python benchmarks/gpu.py --official PATH/ltriton/gca.py   also times the published kernel, with its gather
    python benchmarks/gpu.py --rehearse                   on a CPU, interpreted, tiny: does every part run?

What was found is written after every kind of check and every time, so a run that is cut short keeps it. An operation is
timed only if its checks (benchmarks/gpu_checks.py) have passed. Times are of CUDA events with a cold L2 cache
between passes; p20, p50 and p80.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# both are read when torch and the kernels are imported
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if "--rehearse" in sys.argv:
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
for folder in (ROOT, ROOT / "benchmarks"):
    sys.path.insert(0, str(folder))

import torch  # noqa: E402
from gpu_checks import CHECKS, DEVICE, DTYPE, LENGTHS, MIDDLE, REHEARSAL, TESTS, WIDTHS, Rows  # noqa: E402
from ops import MAKE, Case, run_pass, sdpa_backend  # noqa: E402
from torch import Tensor  # noqa: E402

from trailmark.files import write_json  # noqa: E402
from trailmark.ops import (  # noqa: E402
    LandmarkLayout,
    grouped_cross_attention,
    landmark_attention,
    select_chunks,
)
from trailmark.report.tables import markdown_table  # noqa: E402

# --- how fast? -------------------------------------------------------------------------------------------------


def seconds_of(run: Callable[[], Any], milliseconds: int = 60) -> dict[str, float]:
    """Percentiles of the seconds of one pass."""
    if REHEARSAL:
        began = time.perf_counter()
        run()
        passed = time.perf_counter() - began
        return {"p20": passed, "p50": passed, "p80": passed}
    from triton.testing import do_bench

    times = do_bench(run, warmup=20, rep=milliseconds, quantiles=[0.2, 0.5, 0.8])
    return {name: second / 1000 for name, second in zip(("p20", "p50", "p80"), times, strict=True)}


class Timing(NamedTuple):
    """A row before it is measured."""

    what: dict[str, Any]
    measure: Callable[[], dict[str, Any]]  # what is added


def timing(case: Case, make: Callable[..., Any] | None = None, **more: Any) -> Timing:
    what = {**asdict(case), "flops": case.flops(), "sdpa_backend": sdpa_backend(case, DEVICE), **more}
    return Timing(what, partial(timed, case, make))


def timed(case: Case, make: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Seconds, and the peak of memory beyond inputs, output and all gradients, as a share of these."""
    torch.manual_seed(0)
    function, leaves = (make or MAKE[case.op])(case, DEVICE)
    for leaf in leaves:
        leaf.requires_grad_(case.backward)
    found: dict[str, Any] = {"seconds": seconds_of(partial(run_pass, function, leaves, case.backward))}
    if not REHEARSAL:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = run_pass(function, leaves, case.backward)
        if case.backward:
            results.append(results[0])  # the cotangent, of the output's size: its gradient
        kept, given = (sum(x.numel() * x.element_size() for x in tensors) for tensors in (results, leaves))
        extra = torch.cuda.max_memory_allocated() - before - kept
        found |= {"extra_bytes": extra, "extra_of_own": extra / (kept + given)}
    if flops := case.flops():
        found["tflops"] = flops / found["seconds"]["p50"] / 1e12
    return found


def gca_first() -> list[Timing]:
    """The kernel against SDPA on equal FLOPs; also with fewer key/value heads, and chunks without a landmark."""
    shapes = [
        Case("gca", "triton", T, DTYPE, heads=heads, key_value_heads=heads, head_size=size)
        for T in LENGTHS for heads, size in WIDTHS
    ]  # fmt: skip
    for middle in [case for case in shapes if case.tokens == MIDDLE]:
        shapes += [replace(middle, chunk=63), replace(middle, key_value_heads=max(1, middle.heads // 4))]
    return [
        timing(replace(shape, implementation=name, backward=backward))
        for shape in shapes for name in ("triton", "sdpa") for backward in (False, True)
    ]  # fmt: skip


def gca_official(path: Path | None) -> list[Timing]:
    """The published kernel."""
    if path is None:
        return []
    return [
        timing(_at(T, heads, size, "official", backward), partial(published_kernel, path))
        for T in LENGTHS for heads, size in WIDTHS for backward in (False, True)
    ]  # fmt: skip


def gca_last() -> list[Timing]:
    """Causal SDPA over the whole text, the torch path, the oracle; cuDNN's SDPA once."""
    cases = [
        _at(T, heads, size, name, backward)
        for name in ("sdpa cudnn", "causal", "torch", "reference")
        for T in LENGTHS for heads, size in WIDTHS for backward in (False, True)
    ]  # fmt: skip
    # the oracle holds K times the memory in float32, several times
    most = {"reference": 32768}
    return [
        timing(case)
        for case in cases
        if (case.tokens == MIDDLE and not REHEARSAL)
        or (case.implementation != "sdpa cudnn" and case.tokens <= most.get(case.implementation, case.tokens))
    ]


def _at(T: int, heads: int, size: int, name: str, backward: bool) -> Case:
    return Case("gca", name, T, DTYPE, backward, heads, heads, size)


def published_kernel(path: Path, case: Case, device: str) -> Any:
    """As its model calls it: chunks gathered by index, laid out head by head, then the kernel."""
    spec = importlib.util.spec_from_file_location("official_gca", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _, leaves = MAKE["gca"](replace(case, implementation="torch"), device)
    N, K = case.tokens // case.chunk, case.retrieved
    indices = torch.stack([torch.randperm(N)[:K].sort().values for _ in range(N)]).to(device)

    def run(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Tensor:
        keys, values = (x[0][indices].permute(0, 3, 1, 2, 4).contiguous() for x in (k, v))  # [N, H, K, S, D]
        queries = q[0].transpose(1, 2).contiguous()  # [N, H, R, D]
        out: Tensor = module.attention(queries, keys, values, weights[0], case.head_size**-0.5, 0.0)
        return out

    return run, leaves


def decoding() -> list[Timing]:
    """One position that reads 8 chunks."""

    def make(case: Case, device: str) -> Any:
        dtype = getattr(torch, case.dtype)
        q = torch.randn(1, 1, 1, case.heads, case.head_size, device=device, dtype=dtype)
        k, v = (
            torch.randn(1, 8, 64, case.heads, case.head_size, device=device, dtype=dtype) for _ in range(2)
        )
        indices, weights = torch.arange(8, device=device)[None, None], torch.rand(1, 1, 8, device=device)

        def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return grouped_cross_attention(q, k, v, indices, weights, implementation=case.implementation)

        return read, [q, k, v]

    return [
        timing(Case("decode", name, 1, DTYPE, False, heads, heads, size), make)
        for heads, size in WIDTHS for name in ("triton", "torch")
    ]  # fmt: skip


def selection() -> list[Timing]:
    """All chunks of a text, and one query of 262,144."""
    heads, size = WIDTHS[0]

    def one_query(case: Case, device: str) -> Any:
        query, landmarks = MAKE["select"](case, device)[1]
        before = torch.tensor([landmarks.shape[1]], device=device)

        def choose(query: Tensor, landmarks: Tensor) -> Tensor:
            return select_chunks(
                query, landmarks, case.retrieved, before, implementation=case.implementation
            ).scores

        return choose, [query[:, :1].contiguous(), landmarks]

    far = 4096 if REHEARSAL else 262_144 * 64  # tokens: 16M
    names = ("triton", "torch")
    return [
        timing(Case("select", name, T, dtype, False, heads, heads, size))
        for T in LENGTHS[-2:] for dtype in ("float32", DTYPE) for name in names
    ] + [
        timing(Case("select", name, far, DTYPE, False, heads, heads, size), one_query, op="select for one query")
        for name in names
    ]  # fmt: skip


def window() -> list[Timing]:
    heads, size = WIDTHS[0]
    names = ("torch",) if REHEARSAL else ("flex", "torch")
    return [
        timing(Case("window", name, MIDDLE, DTYPE, backward, heads, heads, size))
        for name in names for backward in (False, True)
    ]  # fmt: skip


def landmark() -> list[Timing]:
    """Landmark attention over a whole text against causal SDPA, chunks of 63 and of 50 tokens."""

    def make(case: Case, device: str) -> Any:
        T, S, dtype = case.tokens, case.chunk, getattr(torch, case.dtype)
        leaves = [
            torch.randn(1, T, heads, case.head_size, device=device, dtype=dtype)
            for heads in (case.heads, case.key_value_heads, case.key_value_heads)
        ]
        # once for all layers of a model
        layout = LandmarkLayout.of(torch.arange(T, device=device)[None] % (S + 1) == S)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = landmark_attention(q, k, v, layout, implementation=case.implementation)
            assert isinstance(out, Tensor)
            return out

        return attend, leaves

    lengths = LENGTHS if REHEARSAL else (4096, 8192, 16384)
    shapes = [
        Case("gca", "causal", T, DTYPE, backward, heads, heads, size)
        for T in lengths for heads, size in (WIDTHS if REHEARSAL else ((8, 128), (12, 64)))
        for backward in (False, True)
    ]  # fmt: skip
    return [
        row
        for shape in shapes
        for row in (
            timing(shape, op="landmark"),
            *(
                timing(replace(shape, op="landmark", implementation="triton", chunk=S), make)
                for S in (63, 50)
            ),
        )
    ]


def training_step() -> list[Timing]:
    """A DRT against the model with a window alone; time per token at 64K against 4K."""
    from training_step import compare

    if REHEARSAL:
        small: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "vocab_size": 64,
        }
        small |= {"num_hidden_layers": 2, "num_encoder_layers": 1}
        return [_step(256, partial(compare, "cpu", "float32", rounds=1, **small))]
    return [_step(T, partial(compare, "cuda", "bfloat16", rounds=3, warm_up=2)) for T in (16384, 4096, 65536)]


def _step(T: int, run: Callable[..., dict[str, Any]]) -> Timing:
    return Timing({"op": "training step", "tokens": T}, partial(run, tokens=T))


# --- all of it -------------------------------------------------------------------------------------------------

GCA = ("budgets", "repeats", "many elements")
# in this order: (part, the checks that it needs, its rows)
PARTS: list[tuple[str, tuple[str, ...], Callable[[Path | None], list[Timing]]]] = [
    ("gca", GCA, lambda official: gca_first()),
    ("gca", GCA, gca_official),
    ("landmark", ("landmark kernels",), lambda official: landmark()),
    ("decoding", ("budgets",), lambda official: decoding()),
    ("selection", ("others",), lambda official: selection()),
    ("window", ("others",), lambda official: window()),
    ("training step", ("budgets", "others"), lambda official: training_step()),
    ("gca", GCA, lambda official: gca_last()),
]
# what others wrote, and may not run here
FOREIGN = ("official", "sdpa cudnn")


class Record:
    """What was found, in a file after everything that is added."""

    def __init__(self, output: Path, minutes: float) -> None:
        import triton

        self.output, self.minutes, self.began = output, minutes, time.monotonic()
        self.found: dict[str, Any] = {
            "device": "cpu, interpreted" if REHEARSAL else torch.cuda.get_device_name(),
            "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda,
            "date": date.today().isoformat(), "rehearsal": REHEARSAL,
        }  # fmt: skip

    def late(self) -> bool:
        return time.monotonic() - self.began > self.minutes * 60

    def save(self) -> None:
        self.found["seconds"] = time.monotonic() - self.began
        write_json(self.output, self.found)

    def check(self, name: str, part: Callable[[Rows], None]) -> None:
        rows: Rows = self.found.setdefault(name, [])
        if self.late():
            self.found[f"{name}: left out"] = "no time"
        else:
            try:
                part(rows)
            except Exception as error:
                traceback.print_exc()
                rows.append(
                    {"check": name, "passed": False, "error": f"{type(error).__name__}: {error}"[:500]}
                )
        self.save()

    def failed(self, needs: tuple[str, ...]) -> list[str]:
        """A check that was not made counts as one that failed."""
        return [
            row["check"]
            for name in needs
            for row in self.found.get(name) or [{"check": name, "passed": False}]
            if row["passed"] is False
        ]

    def time(self, name: str, needs: tuple[str, ...], part: Callable[[], list[Timing]]) -> None:
        if failed := self.failed(needs):
            self.found[f"{name}: left out"] = f"did not pass: {failed}"
            self.save()
            return
        for what, measure in part():
            row = dict(what)
            if self.late():
                row["left_out"] = "no time"
            else:
                try:
                    row |= measure()
                except Exception as error:
                    row["left_out"] = f"{type(error).__name__}: {error}"[:500]
            if not REHEARSAL:
                torch.cuda.empty_cache()
            shown = row.get("left_out") or row.get("seconds", {}).get("p50") or row.get("ratio")
            print(" ".join(f"{key}={row[key]}" for key in _SHOWN if key in row), shown, flush=True)
            self.found.setdefault(name, []).append(row)
            self.save()

    def left_out(self) -> list[str]:
        parts = [f"{key}: {value}" for key, value in self.found.items() if key.endswith(": left out")]
        rows = [row for name in dict.fromkeys(part[0] for part in PARTS) for row in self.found.get(name, [])]
        return parts + [
            " ".join(f"{key}={row[key]}" for key in (*_SHOWN, "left_out") if key in row)
            for row in rows
            if "left_out" in row and row.get("implementation") not in FOREIGN
        ]


_SHOWN = (
    "op",
    "implementation",
    "heads",
    "head_size",
    "key_value_heads",
    "chunk",
    "tokens",
    "dtype",
    "backward",
)


def goals(found: dict[str, Any]) -> list[list[str]]:
    """What the project wants of an H200, and what came out."""
    rows = []
    shape = ("heads", "head_size", "key_value_heads", "tokens", "chunk")
    timed = {
        (*(r[key] for key in shape), r["implementation"], r["backward"]): r
        for r in found.get("gca", []) if "seconds" in r
    }  # fmt: skip
    for own in dict.fromkeys(key[:5] for key in timed):
        heads, size, J, T, S = own
        at = f"d={heads * size}, J={J}, S={S}, T={T:,}"
        for passes, backward, most in (("forward + backward", True, 1.5), ("forward", False, 1.2)):
            ours, sdpa = (timed.get((*own, name, backward)) for name in ("triton", "sdpa"))
            if ours and sdpa:
                ratio = ours["seconds"]["p50"] / sdpa["seconds"]["p50"]
                rows.append([f"{passes} / SDPA, equal FLOPs", at, f"{ratio:.2f}x", f"<= {most}x"])
        ours, theirs = (timed.get((*own, name, True)) for name in ("triton", "official"))
        if ours and theirs:
            ratio = theirs["seconds"]["p50"] / ours["seconds"]["p50"]
            rows.append(["published kernel with its gather / ours", at, f"{ratio:.1f}x", ">= 3x"])
        if ours and "extra_of_own" in ours:
            peak = 1 + ours["extra_of_own"]
            rows.append(["peak memory / inputs, output, gradients", at, f"{peak:.2f}x", "<= 1.2x"])
    rows += landmark_goals(found)
    steps = {r["tokens"]: r for r in found.get("training step", []) if "ratio" in r}
    for T in (256, 16384):
        if T in steps:
            ratio = steps[T]["ratio"]
            rows.append(["training step, DRT / window only", f"T={T:,}", f"{ratio:.2f}x", "<= 1.22x"])
    if 4096 in steps and 65536 in steps:
        few, many = (steps[T]["seconds"]["drt"]["step"] / T for T in (4096, 65536))
        rows.append(["time per token, 64K / 4K", "DRT step", f"{many / few:.2f}x", "<= 1.05x"])
    return rows


def landmark_goals(found: dict[str, Any]) -> list[list[str]]:
    timed = {
        (r["heads"], r["head_size"], r["tokens"], r["backward"], r["implementation"], r["chunk"]): r["seconds"]["p50"]
        for r in found.get("landmark", []) if "seconds" in r
    }  # fmt: skip
    rows = []
    for (heads, size, T, backward, name, S), seconds in timed.items():
        causal = timed.get((heads, size, T, backward, "causal", 64))
        if name == "triton" and causal:
            passes = "forward + backward" if backward else "forward"
            at = f"H={heads}, D={size}, S={S}, T={T:,}"
            wanted = "<= 1.4x" if backward else "-"
            rows.append(
                [f"landmark attention, {passes} / SDPA causal", at, f"{seconds / causal:.2f}x", wanted]
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--official", type=Path, help="ltriton/gca.py of the authors' repository")
    parser.add_argument("--minutes", type=float, default=9.0, help="nothing begins after these")
    parser.add_argument("--only", nargs="*", help="parts by name")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not REHEARSAL and not torch.cuda.is_available():
        sys.exit("No CUDA device here. --rehearse runs every part on a CPU, interpreted and tiny.")
    if not REHEARSAL and os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET=1 is set: kernels would be interpreted. Unset it.")
    names = {*CHECKS, *(part[0] for part in PARTS)}
    if unknown := set(arguments.only or ()) - names:
        parser.error(f"--only: expected parts out of {sorted(names)}, got {sorted(unknown)}.")
    wanted = set(arguments.only or names)
    output = arguments.output or Path(tempfile.gettempdir() if REHEARSAL else ROOT / "benchmarks", "gpu.json")
    record = Record(output, arguments.minutes)
    try:
        if "tests" in wanted:
            TESTS.start()
        for name, check in CHECKS.items():
            if name in wanted:
                print(f"\n== {name} ({time.monotonic() - record.began:.0f} s so far)", flush=True)
                record.check(name, check)
    finally:
        TESTS.stop()
    for name, needs, part in PARTS:
        if name in wanted:
            print(f"\n== {name} ({time.monotonic() - record.began:.0f} s so far)", flush=True)
            record.time(name, needs, partial(part, arguments.official))
    print("\n" + markdown_table(["goal", "at", "found", "wanted"], goals(record.found)))
    missing, wrong = record.left_out(), record.failed(tuple(name for name in CHECKS if name in record.found))
    print("\n".join([*missing, f"Numbers: {output}"]))
    if wrong:
        sys.exit(f"{len(wrong)} checks failed: {wrong}")
    if missing:
        sys.exit("Something was left out.")


if __name__ == "__main__":
    main()
