"""The kernels on a GPU: first whether they are right, then how fast. One command, under ten minutes.

    python benchmarks/gpu.py                              writes benchmarks/gpu.json
    python benchmarks/gpu.py --official PATH/ltriton/gca.py   also times the published kernel, with its gather
    python benchmarks/gpu.py --rehearse                   on a CPU, interpreted, tiny: does every part run?

Parts run in turn; what they found is written after each, so a run that is cut short leaves the rest whole. An
operation is timed only if its checks have passed. Times are of CUDA events with a cold L2 cache between passes;
p20, p50 and p80.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REHEARSAL = "--rehearse" in sys.argv
if REHEARSAL:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
for folder in (ROOT, ROOT / "benchmarks"):
    sys.path.insert(0, str(folder))

import torch  # noqa: E402
from ops import MAKE, Case, check, run_pass  # noqa: E402
from torch import Tensor  # noqa: E402

from tests.budgets import values_and_gradients  # noqa: E402
from tests.ops import gca_cases  # noqa: E402
from trailmark.ops import grouped_cross_attention  # noqa: E402
from trailmark.report.tables import markdown_table  # noqa: E402

DEVICE = "cpu" if REHEARSAL else "cuda"
DTYPE = "float16" if REHEARSAL else "bfloat16"
LENGTHS = (512,) if REHEARSAL else (4096, 16384, 65536, 131072)
WIDTHS = ((2, 16),) if REHEARSAL else ((12, 64), (16, 128))  # (heads, head size): d = 768 and 2048
MIDDLE = LENGTHS[min(1, len(LENGTHS) - 1)]
FAR = 1 << (12 if REHEARSAL else 31)  # elements
Rows = list[dict[str, Any]]


# --- right? ----------------------------------------------------------------------------------------------------


def check_budgets() -> Rows:
    """Outputs and gradients of GCA over the fixed cover of sizes, against float64."""
    cases = [c for c in gca_cases.COVER if c["dtype"] != torch.bfloat16 or not REHEARSAL]
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is not written with NaN
    rows = []
    try:
        cheap = sorted(cases, key=lambda c: c["g"] * c["R"] * c["S"] * c["K"] * c["D"])
        for case in cheap[:3] if REHEARSAL else cases:
            case = dict(case)
            name = "-".join(str(value).split(".")[-1] for value in case.values())
            off_by_one = case.pop("off_by_one")
            tensors, rest = gca_cases.inputs(B=1, N=max(8, 24 // case["K"]), M=5, **case)
            with _noted(rows, f"budget {name}"):
                gca_cases.assert_budget(tensors, rest, softmax_off_by_one=off_by_one)
    finally:
        torch.use_deterministic_algorithms(False)
    return rows


def check_repeats() -> Rows:
    """Forward and backward, the same bits 250 times, with one chunk that everybody reads."""
    N, dtype = (2, torch.float16) if REHEARSAL else (256, torch.bfloat16)
    tensors, rest = gca_cases.inputs(B=1, N=N, R=64, J=2, D=64, M=N, S=64, K=8, dtype=dtype)
    rest["indices"][:, :, 0] = 1
    run = partial(values_and_gradients, gca_cases.op(rest, "triton"), *tensors)
    rows: Rows = []
    with _noted(rows, "250 repeats bit-equal"):
        before = run()
        for _ in range(1 if REHEARSAL else 250):
            assert all(torch.equal(x, y) for x, y in zip(before, run(), strict=True))
    return rows


def check_many_elements() -> Rows:
    """Chunks that lie past 2^31 elements of the memory, and of the queries: as at the beginning, bit for bit."""
    rows: Rows = []
    J, S, D, K, N = (1, 16, 16, 2, 2) if REHEARSAL else (2, 64, 64, 4, 8)
    dtype = torch.float16 if REHEARSAL else torch.bfloat16
    M = FAR // (S * J * D) + 9
    random = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=DEVICE, dtype=dtype)

    with _noted(rows, f"memory of {M * S * J * D:,} elements"):
        q, near = normal(1, N, 16, J, D), [normal(1, 9, S, J, D) for _ in range(2)]
        far = [torch.zeros(1, M, S, J, D, device=DEVICE, dtype=dtype) for _ in near]
        for table, chunks in zip(far, near, strict=True):
            table[:, -9:] = chunks
        indices = torch.stack([torch.randperm(9)[:K].sort().values for _ in range(N)])[None].to(DEVICE)
        weights = torch.rand(1, N, K, generator=random, device=DEVICE)
        here = values_and_gradients(_reads(indices), q, *near, weights)
        there = values_and_gradients(_reads(indices + M - 9), q, *far, weights)
        del far
        for which in (0, 1, 4):
            assert torch.equal(here[which], there[which])
        for which in (2, 3):
            assert torch.equal(here[which], there[which][:, -9:])
            assert not bool(there[which][:, :-9].any())
        del there
    with _noted(rows, f"queries of {FAR:,} elements and more"):
        N = FAR // (64 * J * D) + 5
        q = torch.zeros(1, N, 64, J, D, device=DEVICE, dtype=dtype)
        q[:, -5:] = normal(1, 5, 64, J, D)
        indices = torch.full((1, N, K), -1, device=DEVICE)
        indices[:, -5:] = torch.arange(K, device=DEVICE)
        weights = torch.rand(1, N, K, generator=random, device=DEVICE)
        few = values_and_gradients(_reads(indices[:, -5:]), q[:, -5:], *near, weights[:, -5:])
        many = [x.detach() for x in (q, *near, weights)]
        out = _reads(indices)(*(x.requires_grad_() for x in many))
        assert torch.equal(out[:, -5:], few[0])
        assert not bool(out[:, :-5].any())
    return rows


def check_no_synchronisation() -> Rows:
    """Nothing waits for the device between the call and the end of the backward."""
    rows: Rows = []
    size = 16 if REHEARSAL else 64
    tensors, rest = gca_cases.inputs(B=1, R=size, S=size, D=size, K=4, lengths=True)
    values_and_gradients(gca_cases.op(rest, "triton"), *tensors)  # compiled
    leaves = [x.detach().requires_grad_() for x in tensors]
    with _noted(rows, "no synchronisation"):
        if not REHEARSAL:
            torch.cuda.set_sync_debug_mode("error")
        try:
            gca_cases.op(rest, "triton")(*leaves).sum().backward()
        finally:
            if not REHEARSAL:
                torch.cuda.set_sync_debug_mode("default")
    return rows


def check_others() -> Rows:
    """Selection and window attention, as benchmarks/ops.py checks them."""
    rows: Rows = []
    heads, size = WIDTHS[0]
    wanted = [
        Case("select", "triton", 4 * MIDDLE, dtype, heads=heads, head_size=size)
        for dtype in ("float32", DTYPE)
    ]
    if not REHEARSAL:  # FlexAttention has no backward on a CPU
        wanted += [
            Case("window", name, MIDDLE, DTYPE, heads=heads, head_size=size) for name in ("flex", "torch")
        ]
    for case in wanted:
        with _noted(rows, f"budget {case.op} {case.implementation} {case.dtype}"):
            check(case, DEVICE)
    return rows


def _reads(indices: Tensor) -> Callable[..., Tensor]:
    def read(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Tensor:
        return grouped_cross_attention(q, k, v, indices, weights, implementation="triton")

    return read


class _noted:
    """A check by name: passed, or how it failed; the next ones run all the same."""

    def __init__(self, rows: Rows, name: str) -> None:
        self.rows, self.name = rows, name

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        row = {
            "check": self.name,
            "passed": error is None,
            "seconds": round(time.perf_counter() - self.began, 2),
        }
        if error is not None:
            row["error"] = f"{type(error).__name__}: {error}"[:500]
        self.rows.append(row)
        print(row, flush=True)
        return isinstance(error, Exception)


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


def timed(case: Case, make: Callable[..., Any] | None = None) -> dict[str, Any]:
    """A row: seconds, and the peak of memory beyond inputs, output and gradients, as a share of all of these."""
    torch.manual_seed(0)
    function, leaves = (make or MAKE[case.op])(case, DEVICE)
    for leaf in leaves:
        leaf.requires_grad_(case.backward)
    row: dict[str, Any] = {**asdict(case), "flops": case.flops()}
    try:
        row["seconds"] = seconds_of(partial(run_pass, function, leaves, case.backward))
        if not REHEARSAL:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            results = run_pass(function, leaves, case.backward)
            kept = sum(x.numel() * x.element_size() for x in results)
            extra = torch.cuda.max_memory_allocated() - before - kept
            own = kept + sum(x.numel() * x.element_size() for x in leaves)
            row |= {"extra_bytes": extra, "extra_of_own": extra / own}
            del results
        if row["flops"]:
            row["tflops"] = row["flops"] / row["seconds"]["p50"] / 1e12
    except torch.OutOfMemoryError:
        row["left_out"] = "out of memory"
    shown = row.get("seconds", {}).get("p50")
    print(f"{case.op} {case.implementation} d={case.heads * case.head_size} J={case.key_value_heads} S={case.chunk} "
          f"T={case.tokens} backward={case.backward}: {shown and shown * 1000} ms", flush=True)  # fmt: skip
    function = leaves = None  # type: ignore[assignment]
    if not REHEARSAL:
        torch.cuda.empty_cache()
    return row


def time_gca(official: Path | None) -> Rows:
    """Against the torch path, the oracle, SDPA on equal FLOPs and over the whole text, and the published kernel."""
    rows = []
    for heads, size in WIDTHS:
        for T in LENGTHS:
            base = Case("gca", "triton", T, DTYPE, heads=heads, key_value_heads=heads, head_size=size)
            rows += list(_against(base, official))
        middle = Case("gca", "triton", MIDDLE, DTYPE, heads=heads, key_value_heads=heads, head_size=size)
        if REHEARSAL:
            continue
        for changed in (replace(middle, chunk=63), replace(middle, key_value_heads=max(1, heads // 4))):
            rows += [timed(replace(changed, implementation=name, backward=backward))
                     for name in ("triton", "sdpa") for backward in (False, True)]  # fmt: skip
    return rows


def _against(base: Case, official: Path | None) -> Iterator[dict[str, Any]]:
    for name in ("triton", "sdpa", "causal", "torch", "reference"):
        if name == "reference" and base.tokens > 32768:  # holds K times the memory in float32, several times
            continue
        for backward in (False, True):
            yield timed(replace(base, implementation=name, backward=backward))
    if official is not None:
        for backward in (False, True):
            case = replace(base, implementation="official", backward=backward)
            try:
                yield timed(case, partial(published_kernel, official))
            except Exception as error:  # another's code, made for another Triton
                print(f"official: {type(error).__name__}: {error}"[:300], flush=True)
                yield {**asdict(case), "left_out": f"{type(error).__name__}: {error}"[:300]}


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


def time_decoding() -> Rows:
    """One position that reads 8 chunks."""
    rows = []
    for heads, size in WIDTHS:

        def make(case: Case, device: str, heads: int = heads, size: int = size) -> Any:
            dtype = getattr(torch, case.dtype)
            q = torch.randn(1, 1, 1, heads, size, device=device, dtype=dtype)
            k, v = (torch.randn(1, 8, 64, heads, size, device=device, dtype=dtype) for _ in range(2))
            indices, weights = torch.arange(8, device=device)[None, None], torch.rand(1, 1, 8, device=device)

            def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return grouped_cross_attention(q, k, v, indices, weights, implementation=case.implementation)

            return read, [q, k, v]

        for name in ("triton", "torch"):
            case = Case("decode", name, 1, DTYPE, False, heads, heads, size)
            rows.append(timed(case, make))
    return rows


def time_selection() -> Rows:
    heads, size = WIDTHS[0]
    rows = [
        timed(Case("select", name, T, dtype, False, heads, heads, size))
        for T in LENGTHS[-2:] for dtype in ("float32", DTYPE) for name in ("triton", "torch")
    ]  # fmt: skip

    def one_query(case: Case, device: str) -> Any:
        query, landmarks = MAKE["select"](case, device)[1]
        M = landmarks.shape[1]
        before = torch.tensor([M], device=device)

        def choose(query: Tensor, landmarks: Tensor) -> Tensor:
            from trailmark.ops import select_chunks

            return select_chunks(
                query, landmarks, case.retrieved, before, implementation=case.implementation
            ).scores

        return choose, [query[:, :1].contiguous(), landmarks]

    far = 4096 if REHEARSAL else 262_144 * 64  # tokens: 16M
    for name in ("triton", "torch"):
        case = Case("select", name, far, DTYPE, False, heads, heads, size)
        rows.append(timed(case, one_query) | {"op": "select for one query"})
    return rows


def time_window() -> Rows:
    heads, size = WIDTHS[0]
    names = ("torch",) if REHEARSAL else ("flex", "torch")
    return [
        timed(Case("window", name, MIDDLE, DTYPE, backward, heads, heads, size))
        for name in names for backward in (False, True)
    ]  # fmt: skip


def time_training_step() -> Rows:
    """A DRT against the model with a window alone; time per token at 64K against 4K."""
    from training_step import compare

    if REHEARSAL:
        small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
        return [
            compare(
                "cpu", "float32", rounds=1, tokens=256, num_hidden_layers=2, num_encoder_layers=1, **small
            )
        ]
    rows = [compare("cuda", "bfloat16", rounds=5, warm_up=2)]
    rows += [compare("cuda", "bfloat16", rounds=3, warm_up=2, tokens=T) for T in (4096, 65536)]
    return rows


# --- all of it -------------------------------------------------------------------------------------------------

CHECKS = {
    "budgets": check_budgets,
    "repeats": check_repeats,
    "many elements": check_many_elements,
    "synchronisation": check_no_synchronisation,
    "others": check_others,
}


def goals(found: dict[str, Any]) -> list[list[str]]:
    """What the project wants of an H200, and what came out."""
    rows = []

    def row(**wanted: Any) -> dict[str, Any] | None:
        return next(
            (r for r in found.get("gca", []) if "seconds" in r and all(r[k] == v for k, v in wanted.items())),
            None,
        )

    for heads, size in WIDTHS:
        for T in LENGTHS:
            own = {"heads": heads, "head_size": size, "key_value_heads": heads, "tokens": T, "chunk": 64}
            for backward, most in ((True, 1.5), (False, 1.2)):
                ours, sdpa = (row(implementation=n, backward=backward, **own) for n in ("triton", "sdpa"))
                if ours and sdpa:
                    ratio = ours["seconds"]["p50"] / sdpa["seconds"]["p50"]
                    passes = "forward + backward" if backward else "forward"
                    rows.append(
                        [
                            f"{passes} / SDPA, equal FLOPs",
                            f"d={heads * size}, T={T:,}",
                            f"{ratio:.2f}x",
                            f"<= {most}x",
                        ]
                    )
            ours, theirs = (row(implementation=n, backward=True, **own) for n in ("triton", "official"))
            if ours and theirs:
                ratio = theirs["seconds"]["p50"] / ours["seconds"]["p50"]
                rows.append(
                    [
                        "published kernel with its gather / ours",
                        f"d={heads * size}, T={T:,}",
                        f"{ratio:.1f}x",
                        ">= 3x",
                    ]
                )
            if ours and "extra_of_own" in ours:
                rows.append(["peak memory / inputs, output, gradients", f"d={heads * size}, T={T:,}",
                             f"{1 + ours['extra_of_own']:.2f}x", "<= 1.2x"])  # fmt: skip
    steps = found.get("training step", [])
    if steps:
        rows.append(
            [
                "training step, DRT / window only",
                f"T={steps[0]['tokens']:,}",
                f"{steps[0]['ratio']:.2f}x",
                "<= 1.22x",
            ]
        )
    if len(steps) == 3:
        each = [r["seconds"]["drt"]["step"] / r["tokens"] for r in steps[1:]]
        rows.append(["time per token, 64K / 4K", "DRT step", f"{each[1] / each[0]:.2f}x", "<= 1.05x"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--official", type=Path, help="ltriton/gca.py of the authors' repository")
    parser.add_argument("--minutes", type=float, default=9.0, help="no part begins after these")
    parser.add_argument("--only", nargs="*", help="parts by name")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not REHEARSAL and not torch.cuda.is_available():
        sys.exit("No CUDA device here. --rehearse runs every part on a CPU, interpreted and tiny.")
    import triton

    output = arguments.output or Path(tempfile.gettempdir() if REHEARSAL else ROOT / "benchmarks", "gpu.json")
    found: dict[str, Any] = {
        "device": "cpu, interpreted" if REHEARSAL else torch.cuda.get_device_name(),
        "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda,
        "date": date.today().isoformat(), "rehearsal": REHEARSAL,
    }  # fmt: skip
    timings: dict[str, tuple[Callable[[], Rows], tuple[str, ...]]] = {
        "gca": (partial(time_gca, arguments.official), ("budgets", "repeats", "many elements")),
        "decoding": (time_decoding, ("budgets",)),
        "selection": (time_selection, ("others",)),
        "window": (time_window, ("others",)),
        "training step": (time_training_step, ("budgets", "others")),
    }
    began = time.monotonic()
    for name, part in [*CHECKS.items(), *timings.items()]:
        if arguments.only and name not in arguments.only:
            continue
        run, needs = (part, ()) if callable(part) else part
        failed = [
            r["check"]
            for n in needs
            for r in found.get(n, [{"check": n, "passed": False}])
            if not r["passed"]
        ]
        spent = time.monotonic() - began
        print(f"\n== {name} ({spent:.0f} s so far)", flush=True)
        if failed:
            found[f"{name}: left out"] = f"did not pass: {failed}"
        elif spent > arguments.minutes * 60:
            found[f"{name}: left out"] = f"{spent:.0f} s were spent already"
        else:
            try:
                found[name] = run()
            except Exception as error:
                traceback.print_exc()
                found[f"{name}: left out"] = f"{type(error).__name__}: {error}"[:500]
        found["seconds"] = time.monotonic() - began
        output.write_text(json.dumps(found, indent=1) + "\n")
    print("\n" + markdown_table(["goal", "at", "found", "wanted"], goals(found)))
    missing = [f"{key}: {value}" for key, value in found.items() if key.endswith(": left out")]
    print("\n".join([*missing, f"Numbers: {output}"]))
    wrong = [r["check"] for name in CHECKS for r in found.get(name, []) if not r["passed"]]
    if wrong or (missing and not arguments.only):
        sys.exit(f"{len(wrong)} checks failed: {wrong}" if wrong else "Some parts were left out.")


if __name__ == "__main__":
    main()
