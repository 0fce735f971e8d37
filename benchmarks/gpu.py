"""The kernels on a GPU: first whether they are right, then how fast. One command, under ten minutes.

    python benchmarks/gpu.py                              writes benchmarks/gpu.json
    python benchmarks/gpu.py --official PATH/ltriton/gca.py   also times the published kernel, with its gather
    python benchmarks/gpu.py --rehearse                   on a CPU, interpreted, tiny: does every part run?

What was found is written after every kind of check and every time, so a run that is cut short keeps it. An operation is
timed only if its checks (benchmarks/gpu_checks.py) have passed, those of half precision. Times are of CUDA events with
a cold L2 cache between passes; p20, p50 and p80.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT

# both are read when torch and the kernels are imported
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if "--rehearse" in sys.argv:
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from gpu_checks import CHECKS, DEVICE, DTYPE, LENGTHS, MIDDLE, REHEARSAL, TESTS, WIDTHS, Rows
from ops import MAKE as OPS
from ops import Case, Made, run_pass, sdpa_backend
from torch import Tensor
from training_step import compare

from trailmark.files import read_json, write_json
from trailmark.ops import (
    LandmarkLayout,
    grouped_cross_attention,
    landmark_attention,
    select_chunks,
)
from trailmark.report.tables import markdown_table

# --- how fast? -------------------------------------------------------------------------------------------------


def seconds_of(run: Callable[[], Any]) -> dict[str, float]:
    """Percentiles of the seconds of one pass, which is repeated for 60 milliseconds."""
    if REHEARSAL:
        began = time.perf_counter()
        run()
        passed = time.perf_counter() - began
        return {"p20": passed, "p50": passed, "p80": passed}
    from triton.testing import do_bench

    times = do_bench(run, warmup=20, rep=60, quantiles=[0.2, 0.5, 0.8])
    return {name: second / 1000 for name, second in zip(("p20", "p50", "p80"), times, strict=True)}


class Timing(NamedTuple):
    """A row before it is measured."""

    what: dict[str, Any]
    measure: Callable[[], dict[str, Any]]  # what is added


def timing(case: Case) -> Timing:
    what = {**asdict(case), "flops": case.flops(), "sdpa_backend": sdpa_backend(case, DEVICE)}
    return Timing(what, partial(timed, case))


def timed(case: Case) -> dict[str, Any]:
    """Seconds, and the peak of memory beyond inputs, output and all gradients, as a share of these."""
    torch.manual_seed(0)
    function, leaves = (MAKE.get(case.implementation) or MAKE[case.op])(case, DEVICE)
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


def published_kernel(path: Path, case: Case, device: str) -> Made:
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


def decode(case: Case, device: str) -> Made:
    """One position that reads 8 chunks."""
    as_told: dict[str, Any] = {"device": device, "dtype": getattr(torch, case.dtype)}
    q = torch.randn(1, 1, 1, case.heads, case.head_size, **as_told)
    k, v = (torch.randn(1, 8, 64, case.heads, case.head_size, **as_told) for _ in range(2))
    indices, weights = torch.arange(8, device=device)[None, None], torch.rand(1, 1, 8, device=device)

    def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return grouped_cross_attention(q, k, v, indices, weights, implementation=case.implementation)

    return read, [q, k, v]


def select_once(case: Case, device: str) -> Made:
    """One query among all chunks of a text."""
    query, landmarks = MAKE["select"](case, device)[1]
    before = torch.tensor([landmarks.shape[1]], device=device)

    def choose(query: Tensor, landmarks: Tensor) -> Tensor:
        return select_chunks(
            query, landmarks, case.retrieved, before, implementation=case.implementation
        ).scores

    return choose, [query[:, :1].contiguous(), landmarks]


def landmark(case: Case, device: str) -> Made:
    """Landmark attention over a whole text, or causal attention."""
    if case.implementation == "causal":
        return MAKE["gca"](replace(case, op="gca"), device)
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


MAKE: dict[str, Callable[[Case, str], Made]] = {  # by op; --official adds an implementation
    **OPS,
    "decode": decode,
    "select for one query": select_once,
    "landmark": landmark,
}


def cases(
    op: str,
    names: Sequence[str],
    lengths: Sequence[int] = (MIDDLE,),
    widths: Sequence[tuple[int, int]] = WIDTHS,
    passes: Sequence[bool] = (False, True),
) -> list[Case]:
    """Of each length and width the implementations ``names``, forward, and forward and backward."""
    return [
        Case(op, name, T, DTYPE, backward, heads, heads, size)
        for T in lengths for heads, size in widths for name in names for backward in passes
    ]  # fmt: skip


def gca_against_sdpa() -> list[Case]:
    """On equal FLOPs; also with fewer key/value heads, and chunks without a landmark."""
    shapes = cases("gca", ("triton", "sdpa"), LENGTHS)
    middle = [case for case in shapes if case.tokens == MIDDLE]
    fewer = [replace(case, key_value_heads=max(1, case.heads // 4)) for case in middle]
    return [*shapes, *(replace(case, chunk=63) for case in middle), *fewer]


def gca_against_others() -> list[Case]:
    """cuDNN's SDPA once, causal SDPA over the whole text, the torch path, the oracle."""
    found = [] if REHEARSAL else cases("gca", ("sdpa cudnn",))
    for name in ("causal", "torch"):
        found += cases("gca", (name,), LENGTHS)
    # it holds K times the memory in float32, several times
    return found + cases("gca", ("reference",), [T for T in LENGTHS if T <= 32768])


def tokens_that_retrieve() -> list[Case]:
    """HiLS of 345M and of 1.4B. SDPA is given gathered chunks, a megabyte a token and more: for the shortest text."""
    if REHEARSAL:
        small = Case("tokens", "", LENGTHS[0], DTYPE, True, 4, 2, 16, retrieved=4, reading=16)
        return [replace(small, implementation=name) for name in ("triton", "torch", "sdpa")]
    return [
        Case("tokens", name, T, DTYPE, backward, heads, heads // 8, 64, retrieved=32)
        for T, names in ((4096, ("triton", "torch", "sdpa")), (16384, ("triton", "torch")))
        for heads in (16, 32) for name in names for backward in (False, True)
    ]  # fmt: skip


def selection() -> list[Case]:
    """All chunks of a text, and one query of 262,144."""
    names = ("triton", "torch")
    far = 4096 if REHEARSAL else 262_144 * 64  # tokens: 16M
    many = cases("select", names, LENGTHS[-2:], WIDTHS[:1], (False,))
    return [
        *(replace(case, dtype=dtype) for dtype in ("float32", DTYPE) for case in many),
        *cases("select for one query", names, (far,), WIDTHS[:1], (False,)),
    ]


def landmark_against_causal() -> list[Case]:
    """Chunks of 63 and of 50 tokens."""
    lengths, widths = (LENGTHS, WIDTHS) if REHEARSAL else ((4096, 8192, 16384), ((8, 128), (12, 64)))
    return [
        case
        for causal in cases("landmark", ("causal",), lengths, widths)
        for case in (causal, *(replace(causal, implementation="triton", chunk=S) for S in (63, 50)))
    ]


def training_steps() -> list[Timing]:
    """A DRT against the model with a window alone; time per token at 64K against 4K."""
    lengths: tuple[int, ...] = (16384, 4096, 65536)
    settings: dict[str, Any] = {"rounds": 3, "warm_up": 2}
    if REHEARSAL:
        lengths = (256,)
        settings = {"rounds": 1, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
        settings |= {"num_hidden_layers": 2, "num_encoder_layers": 1, "num_attention_heads": 2}
    run = partial(compare, DEVICE, "float32" if REHEARSAL else "bfloat16", **settings)
    return [Timing({"op": "training step", "tokens": T}, partial(run, tokens=T)) for T in lengths]


# --- all of it -------------------------------------------------------------------------------------------------

# the checks that each part needs
NEEDS = {
    "gca": ("budgets", "repeats", "many elements"),
    "tokens": ("budgets", "repeats", "many elements"),
    "landmark": ("landmark kernels",),
    "decoding": ("budgets",),
    "selection": ("others",),
    "window": ("others",),
    "training step": ("budgets", "others"),
}


def timings(official: bool) -> list[tuple[str, list[Timing]]]:
    """Part and rows, in the order in which they are measured."""
    windows = ("torch",) if REHEARSAL else ("flex", "torch")
    parts = [
        ("gca", gca_against_sdpa()),
        ("gca", cases("gca", ("official",), LENGTHS) if official else []),
        ("tokens", tokens_that_retrieve()),
        ("landmark", landmark_against_causal()),
        ("decoding", cases("decode", ("triton", "torch"), (1,), passes=(False,))),
        ("selection", selection()),
        ("window", cases("window", windows, widths=WIDTHS[:1])),
    ]
    return [
        *((name, list(map(timing, own))) for name, own in parts),
        ("training step", training_steps()),
        ("gca", list(map(timing, gca_against_others()))),
    ]


# checks of attention in several dtypes; it is timed in half precision
_BY_DTYPE = ("budgets", "landmark kernels")
# what others wrote, and may not run here
FOREIGN = ("official", "sdpa cudnn")


class Record:
    """What was found, in a file after everything that is added."""

    def __init__(self, output: Path, minutes: float, names: set[str]) -> None:
        """``names``: of the parts that are made; of a file of the same machine the others are kept."""
        import triton

        self.output, self.minutes, self.began = output, minutes, time.monotonic()
        self.found: dict[str, Any] = {
            "device": "cpu, interpreted" if REHEARSAL else torch.cuda.get_device_name(),
            "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda,
            "date": date.today().isoformat(), "rehearsal": REHEARSAL,
        }  # fmt: skip
        before = (read_json(output) or {}) if names else {}
        if all(before.get(key) == value for key, value in self.found.items() if key != "date"):
            self.found |= {name: rows for name, rows in before.items() if name.split(":")[0] not in names}

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

    def failed(self, needs: tuple[str, ...], timed: bool = False) -> list[str]:
        """A check that was not made counts as one that failed.

        ``timed``: of what is needed for times, which are those of half precision where attention is concerned.
        """
        return [
            row["check"]
            for name in needs
            for row in self.found.get(name) or [{"check": name, "passed": False}]
            if row["passed"] is False and not (timed and name in _BY_DTYPE and "float32" in row["check"])
        ]

    def time(self, name: str, needs: tuple[str, ...], part: list[Timing]) -> None:
        if failed := self.failed(needs, timed=True):
            self.found[f"{name}: left out"] = f"did not pass: {failed}"
            self.save()
            return
        for what, measure in part:
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
        rows = [row for name in NEEDS for row in self.found.get(name, [])]
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
    rows += token_goals(found)
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


def token_goals(found: dict[str, Any]) -> list[list[str]]:
    timed = {
        (r["heads"], r["tokens"], r["backward"], r["implementation"]): r["seconds"]["p50"]
        for r in found.get("tokens", []) if "seconds" in r
    }  # fmt: skip
    return [
        [
            f"tokens that retrieve, {'forward + backward' if backward else 'forward'} / {name}",
            f"H={heads}, T={T:,}",
            f"{timed[heads, T, backward, 'triton'] / seconds:.2f}x",
            "-",
        ]
        for (heads, T, backward, name), seconds in timed.items()
        if name != "triton" and (heads, T, backward, "triton") in timed
    ]


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
    parser.add_argument("--only", nargs="*", help="parts by name; others stay in the file")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not REHEARSAL and not torch.cuda.is_available():
        sys.exit("No CUDA device here. --rehearse runs every part on a CPU, interpreted and tiny.")
    if not REHEARSAL and os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET=1 is set: kernels would be interpreted. Unset it.")
    names = {*CHECKS, *NEEDS}
    if unknown := set(arguments.only or ()) - names:
        parser.error(f"--only: expected parts out of {sorted(names)}, got {sorted(unknown)}.")
    wanted = set(arguments.only or names)
    output = arguments.output or Path(tempfile.gettempdir() if REHEARSAL else ROOT / "benchmarks", "gpu.json")
    record = Record(output, arguments.minutes, set(arguments.only or ()))
    try:
        if "tests" in wanted:
            TESTS.start()
        for name, check in CHECKS.items():
            if name in wanted:
                print(f"\n== {name} ({time.monotonic() - record.began:.0f} s so far)", flush=True)
                record.check(name, check)
    finally:
        TESTS.stop()
    if arguments.official:
        MAKE["official"] = partial(published_kernel, arguments.official)
    for name, part in timings(arguments.official is not None):
        if name in wanted:
            print(f"\n== {name} ({time.monotonic() - record.began:.0f} s so far)", flush=True)
            record.time(name, NEEDS[name], part)
    print("\n" + markdown_table(["goal", "at", "found", "wanted"], goals(record.found)))
    missing, wrong = record.left_out(), record.failed(tuple(name for name in CHECKS if name in record.found))
    print("\n".join([*missing, f"Numbers: {output}"]))
    if wrong:
        sys.exit(f"{len(wrong)} checks failed: {wrong}")
    if missing:
        sys.exit("Something was left out.")


if __name__ == "__main__":
    main()
