"""Whether the kernels are right on a GPU: the checks that benchmarks/gpu.py runs before it times anything.

Each adds rows to a list: a check by name, passed (true, false; None: not run) and its seconds.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from common import ROOT
from ops import Case, check
from torch import Tensor

from tests.budgets import values_and_gradients
from tests.ops.gca import cases as gca_cases
from tests.ops.landmark import cases as landmark_cases
from trailmark.evaluation.needles.ask import measure
from trailmark.evaluation.needles.suite import NeedleSettings
from trailmark.evaluation.subject import load
from trailmark.ops import (
    LandmarkLayout,
    alibi_slopes,
    grouped_cross_attention,
    gumbel_noise,
    landmark_attention,
    select_chunks,
    sliding_window_attention,
)
from trailmark.ops.gca import triton_path as kernels

REHEARSAL = "--rehearse" in sys.argv  # benchmarks/gpu.py --rehearse: on a CPU, interpreted, tiny
DEVICE = "cpu" if REHEARSAL else "cuda"
DTYPE = "float16" if REHEARSAL else "bfloat16"  # the interpreter has no bfloat16
LENGTHS = (512,) if REHEARSAL else (4096, 16384, 65536, 131072)
WIDTHS = ((2, 16),) if REHEARSAL else ((12, 64), (16, 128))  # (heads, head size): d = 768 and 2048
MIDDLE = LENGTHS[min(1, len(LENGTHS) - 1)]
FAR = 1 << (12 if REHEARSAL else 31)  # elements
Rows = list[dict[str, Any]]


class noted:
    """A check by name: passed, or how it failed; the next ones run all the same."""

    def __init__(self, rows: Rows, name: str) -> None:
        self.rows, self.name = rows, name

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is not None and not isinstance(error, Exception):
            return False
        more = {} if error is None else {"error": f"{type(error).__name__}: {error}"[:500]}
        self.rows.append(_row(self.name, error is None, time.perf_counter() - self.began, **more))
        return True


def _row(name: str, passed: bool | None, seconds: float = 0.0, **more: Any) -> dict[str, Any]:
    row = {"check": name, "passed": passed, "seconds": round(seconds, 2), **more}
    print(row, flush=True)
    return row


# --- budgets ---------------------------------------------------------------------------------------------------

Job = tuple[str, Any]  # a name, and the arguments of a case's inputs, of GCA with off_by_one


def budget_jobs() -> list[Job]:
    """The fixed cover of sizes, what costs most first; and sizes as models have them."""
    cases = [dict(c) for c in gca_cases.COVER if c["dtype"] != torch.bfloat16 or not REHEARSAL]
    cases.sort(key=lambda c: c["g"] * c["R"] * c["S"] * c["K"] * c["D"], reverse=True)
    if REHEARSAL:
        cases = sorted((c for c in cases if c["K"] < 8), key=lambda c: c["J"] * c["R"] * c["S"] * c["D"])[:2]
    for case in cases:
        case |= {"N": max(8, 24 // case["K"]), "M": 5}
    hot: list[dict[str, Any]] = [
        {"D": D, "g": g, "S": 64, "K": 8, "R": 64, "J": 2, "N": 320, "M": 320, "dtype": dtype,
         "lengths": g > 1, "off_by_one": D == 64}
        for D in (64, 128) for g in (1, 4) for dtype in (torch.bfloat16, torch.float16)
    ]  # fmt: skip
    # batch times chunks times heads stood on an axis of the published kernel's grid that has 65,535
    N = 8 if REHEARSAL else 70_000
    many = {"N": N, "R": 1, "J": 2, "M": 5, "S": 16, "K": 2, "D": 16, "g": 1, "off_by_one": True}
    many["dtype"] = getattr(torch, DTYPE)
    # tokens that retrieve, as in HiLS: sets of key/value heads, weights of query heads
    token = {"R": 1, "J": 2, "per_query_head": True, "lengths": True, "off_by_one": False}
    if REHEARSAL:
        hot = [token | {"D": 16, "g": 2, "S": 16, "K": 4, "N": 8, "M": 5, "dtype": torch.float16}]
        hot.append(hot[0] | {"beside": True, "off_by_one": True})
    else:
        sizes = ((64, 8, torch.bfloat16), (64, 4, torch.float16), (128, 1, torch.bfloat16))
        hot += [
            token | {"D": D, "g": g, "S": 64, "K": 32, "N": 320, "M": 64, "dtype": dtype}
            for D, g, dtype in sizes
        ]
        # in one softmax with a window, tokens and chunks
        hot += [case | {"beside": True, "off_by_one": True} for case in (hot[0], hot[-3], hot[-1])]
    named = [("-".join(str(x).split(".")[-1] for x in case.values()), case) for case in [*hot, *cases]]
    return [("many programs", many), *named]


def budget(job: Job) -> Rows:
    """Output and gradients against float64: chunks added up in registers, and in parts where that differs."""
    name, case = job[0], dict(job[1])
    off_by_one = case.pop("off_by_one")
    tensors, rest = gca_cases.inputs(B=1, **case)
    rows: Rows = []
    with noted(rows, f"budget {name}"), _filled_with_nan(), gca_cases.unsplit():
        gca_cases.assert_budget(tensors, rest, softmax_off_by_one=off_by_one)
    folded = case["R"] * case["g"]
    cut = kernels.tiles(folded, case["S"], case["D"], case["dtype"], "forward")
    if kernels._parts(case["N"] * case["J"] * -(-folded // cut.rows), case["K"]) > 1:
        with noted(rows, f"budget {name}, in parts"), _filled_with_nan():
            gca_cases.assert_budget(tensors, rest, softmax_off_by_one=off_by_one)
    return rows


@contextmanager
def _filled_with_nan() -> Iterator[None]:
    """Memory that a kernel does not write holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_budgets(rows: Rows) -> None:
    """Of GCA; on a GPU by several processes, because most of the time goes into compiling."""
    each_job(budget, budget_jobs(), rows, seconds=210)


def each_job(work: Callable[[Job], Rows], jobs: list[Job], rows: Rows, seconds: float) -> None:
    """Adds the rows of all jobs; on a GPU by several processes."""
    if not REHEARSAL:
        in_processes(work, jobs, rows, min(12, os.cpu_count() or 1), seconds)
        return
    for job in jobs:
        rows += work(job)


def in_processes(
    work: Callable[[Job], Rows], jobs: list[Job], rows: Rows, workers: int, seconds: float
) -> None:
    """Adds the rows of all jobs, each of ``work(job)`` in one of ``workers`` processes.

    The job of a process that died has failed; so have, after ``seconds``, those that are not done.
    """
    spawn, deadline = multiprocessing.get_context("spawn"), time.monotonic() + seconds
    waiting = jobs[::-1]
    at_work: dict[Connection, tuple[Any, Job]] = {}  # -> process, job

    def give(connection: Connection, process: Any) -> None:
        at_work[connection] = process, waiting.pop()
        with suppress(OSError):  # it is dead: the answer will say so
            connection.send(at_work[connection][1])

    def start() -> None:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_serve, args=(work, theirs), daemon=True)
        process.start()
        theirs.close()  # or its end would not be seen
        give(ours, process)

    try:
        for _ in range(min(workers, len(jobs))):
            start()
        while at_work and (ready := wait(list(at_work), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                process, (name, _) = at_work.pop(connection)
                try:
                    found = connection.recv()
                except (EOFError, OSError):
                    process.join(5)
                    found = [_row(name, False, error=f"its process ended with {process.exitcode}")]
                rows += found
                # only an AssertionError leaves a device for certain as it was
                sound = all(row["passed"] or row["error"].startswith("AssertionError") for row in found)
                if not sound:
                    process.kill()
                if waiting:
                    give(connection, process) if sound else start()
                elif sound:
                    process.kill()
        names = [*(name for _, (name, _) in at_work.values()), *(name for name, _ in reversed(waiting))]
        rows += [_row(name, False, error=f"not done after {seconds:.0f} s") for name in names]
    finally:
        for process, _ in at_work.values():
            process.kill()


def _serve(work: Callable[[Job], Rows], connection: Connection) -> None:
    while True:
        job = connection.recv()
        try:
            rows = work(job)
        except Exception as error:
            rows = [_row(job[0], False, error=f"{type(error).__name__}: {error}"[:500])]
        connection.send(rows)


# --- the rest of GCA -------------------------------------------------------------------------------------------


def check_repeats(rows: Rows) -> None:
    """Forward and backward, the same bits 250 times, with one chunk that everybody reads."""
    N, dtype = (2, torch.float16) if REHEARSAL else (256, torch.bfloat16)
    with noted(rows, "250 repeats bit-equal"):
        tensors, rest = gca_cases.inputs(B=1, N=N, R=64, J=2, D=64, M=N, S=64, K=8, dtype=dtype)
        rest["indices"][:, :, 0] = 1
        _repeated(gca_cases.op(rest, "triton"), tensors, 250)
    with noted(rows, "250 repeats bit-equal, tokens"):
        sizes: dict[str, Any] = {"R": 1, "J": 2, "g": 8, "D": 64, "S": 64, "K": 8, "per_query_head": True}
        tensors, rest = gca_cases.inputs(B=1, N=4 * N, M=N, dtype=dtype, **sizes)
        rest["indices"][..., 0] = 1
        _repeated(gca_cases.op(rest, "triton"), tensors, 250)


def _repeated(op: Callable[..., Any], tensors: list[Tensor], times: int) -> None:
    """The same bits again and again; else an AssertionError."""
    before = values_and_gradients(op, *tensors)
    for _ in range(1 if REHEARSAL else times):
        again = values_and_gradients(op, *tensors)
        assert all(torch.equal(x, y) for x, y in zip(before, again, strict=True))


def check_many_elements(rows: Rows) -> None:
    """Chunks that lie past 2^31 elements of the memory, and of the queries: as at the beginning, bit for bit."""
    J, S, D, K, N = (1, 16, 16, 2, 2) if REHEARSAL else (2, 64, 64, 4, 8)
    dtype = getattr(torch, DTYPE)
    random = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=DEVICE, dtype=dtype)

    near = [normal(1, 9, S, J, D) for _ in range(2)]
    M = FAR // (S * J * D) + 9
    with noted(rows, f"memory of {M * S * J * D:,} elements"):
        q = normal(1, N, 16, J, D)
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

    N = FAR // (64 * J * D) + 5
    with noted(rows, f"queries of {N * 64 * J * D:,} elements"), gca_cases.unsplit():
        q = torch.zeros(1, N, 64, J, D, device=DEVICE, dtype=dtype)
        q[:, -5:] = normal(1, 5, 64, J, D)
        cotangent = torch.ones_like(q)
        cotangent[:, -5:] = normal(1, 5, 64, J, D)
        indices = torch.full((1, N, K), -1, device=DEVICE)
        indices[:, -5:] = torch.arange(K, device=DEVICE)
        weights = torch.rand(1, N, K, generator=random, device=DEVICE)

        def results(first: int) -> list[Tensor]:
            leaves = [x.detach().requires_grad_() for x in (q[:, first:], *near, weights[:, first:])]
            out = _reads(indices[:, first:])(*leaves)
            return [out.detach(), *torch.autograd.grad(out, leaves, cotangent[:, first:])]

        few, many = results(N - 5), results(0)
        for which in (0, 1, 4):  # out, dq, dw
            assert torch.equal(many[which][:, -5:], few[which])
            assert not bool(many[which][:, :-5].any())  # they read nothing
        for which in (2, 3):
            assert bool(few[which].any())
            assert torch.equal(many[which], few[which])


def _reads(indices: Tensor) -> Callable[..., Tensor]:
    def read(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Tensor:
        return grouped_cross_attention(q, k, v, indices, weights, implementation="triton")

    return read


# --- waiting for the device ------------------------------------------------------------------------------------


def check_no_synchronisation(rows: Rows) -> None:
    """Nothing waits for the device between the call and the end of the backward."""
    size = 16 if REHEARSAL else 64
    dtype = getattr(torch, DTYPE)
    shape: dict[str, Any] = {"B": 1, "S": size, "D": size, "K": 2, "dtype": dtype}
    for name, changes in (
        ("lengths", {"R": size, "lengths": True}),
        ("selection per head", {"R": size, "per_head": True}),
        ("tokens", {"R": 1, "g": 2, "per_query_head": True, "lengths": True}),
        ("beside a window", {"R": 1, "g": 2, "per_query_head": True, "lengths": True, "beside": True}),
        ("decoding", {"R": 1, "N": 1}),
    ):
        tensors, rest = gca_cases.inputs(**shape | changes)
        _waits_for_nothing(rows, f"GCA, {name}", gca_cases.op(rest, "triton"), tensors)
        if name == "decoding":
            _waits_for_nothing(rows, "GCA, decoding", gca_cases.op(rest, "triton"), tensors, backward=False)

    heads, size = WIDTHS[0]
    N, M = (8, 70) if REHEARSAL else (64, 5000)
    query, landmarks = (torch.randn(1, n, heads * size, device=DEVICE).to(dtype) for n in (N, M))
    ends, seed = torch.full((N,), M, device=DEVICE), torch.tensor([7], device=DEVICE)

    def choose(query: Tensor, landmarks: Tensor) -> Tensor:
        chosen = select_chunks(
            query, landmarks, 8, ends[: query.shape[1]], noise_seed=seed, implementation="triton"
        )
        return chosen.weights

    _waits_for_nothing(rows, f"selection, {N} queries", choose, [query, landmarks])
    _waits_for_nothing(rows, "selection, one query", choose, [query[:, :1], landmarks])
    if REHEARSAL:  # FlexAttention has no backward on a CPU
        return
    leaves = [torch.randn(1, 1024, heads, size, device=DEVICE, dtype=dtype) for _ in range(3)]
    slopes = alibi_slopes(heads).to(DEVICE)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = sliding_window_attention(q, k, v, 512, alibi_slopes=slopes, implementation="flex")
        assert isinstance(out, Tensor)
        return out

    _waits_for_nothing(rows, "window attention", attend, leaves)


def _waits_for_nothing(
    rows: Rows, name: str, op: Callable[..., Tensor], inputs: list[Tensor], backward: bool = True
) -> None:
    passes = "forward and backward" if backward else "forward"

    def run() -> None:
        with torch.set_grad_enabled(backward):
            out = op(*leaves)
        if backward:
            out.backward(ones)

    with noted(rows, f"no synchronisation: {name}, {passes}"):
        leaves = [x.detach().requires_grad_(backward) for x in inputs]
        ones = torch.ones_like(op(*leaves).detach())
        run()  # compiled
        with _errors_for_waiting():
            run()


@contextmanager
def _errors_for_waiting() -> Iterator[None]:
    if REHEARSAL:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- landmark attention ----------------------------------------------------------------------------------------


def has_enough_numbers(case: dict[str, Any]) -> bool:
    """Whether a case of landmark_cases.COVER says something on a GPU; its tests there take the same.

    Delta = rowsum(dO * O) rounds otherwise than the oracle's rowsum(P * dP). In float32 that is most of the error of
    dq, and the budget compares largest errors: with 1 or 37 queries chance decides whose is larger.
    """
    return case["dtype"] != torch.float32 or case["P"] is None


def landmark_jobs() -> list[Job]:
    """Sizes as models have them; then the fixed cover, of whose slowest to compile, float32, only a few."""
    half = [c for c in landmark_cases.COVER if c["dtype"] != torch.float32]
    single = [c for c in landmark_cases.COVER if c["dtype"] == torch.float32 and has_enough_numbers(c)]
    cases = [*half, *single[:8]]
    if REHEARSAL:
        cases = [c for c in half if c["dtype"] == torch.float16 and c["T"] == 64 and c["S"] > 2][:2]
    hot = [
        {"T": 2048, "S": S, "D": D, "g": g, "J": 2, "marks_kind": kind, "dtype": dtype}
        for D in (64, 128) for g, S, kind in ((1, 63, "regular"), (1, 50, "phase"), (4, 63, "phase"))
        for dtype in (torch.bfloat16, torch.float16)
    ]  # fmt: skip
    named = [("-".join(str(x).split(".")[-1] for x in case.values()), case) for case in [*hot, *cases]]
    return named[len(hot) :] if REHEARSAL else named


def landmark_budget(job: Job) -> Rows:
    """Output, log-sum-exp and gradients against float64."""
    rows: Rows = []
    with noted(rows, f"landmark budget {job[0]}"), _filled_with_nan():
        landmark_cases.assert_budget(*landmark_cases.inputs(B=1, **job[1]))
    return rows


def check_landmark(rows: Rows) -> None:
    """Budgets, the same bits again, places past 2^31 elements, nothing that waits for the device."""
    each_job(landmark_budget, landmark_jobs(), rows, seconds=150)
    dtype, T, size = getattr(torch, DTYPE), 130 if REHEARSAL else 4096, 16 if REHEARSAL else 64
    tensors, rest = landmark_cases.inputs(B=1, T=T, S=63, D=size, marks_kind="phase", dtype=dtype)
    with noted(rows, "landmark, 100 repeats bit-equal"):
        _repeated(landmark_cases.op(rest, "triton"), tensors, 100)

    layout = LandmarkLayout.of(rest["is_landmark"])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # its tables are made anew too
        out = landmark_attention(q, k, v, layout.seeing(layout.far), implementation="triton")
        assert isinstance(out, Tensor)
        return out

    _waits_for_nothing(rows, "landmark attention", attend, tensors)
    _landmark_many_elements(rows)


def _landmark_many_elements(rows: Rows) -> None:
    """A document past 2^31 elements of q, k and v: as alone, bit for bit."""
    J, D, few = (1, 16, 130) if REHEARSAL else (2, 64, 600)
    T = FAR // (J * D) + few
    with noted(rows, f"landmark attention over {T * J * D:,} elements"):
        near, _ = landmark_cases.inputs(B=1, T=few, J=J, D=D, dtype=getattr(torch, DTYPE))
        here = torch.arange(few, device=DEVICE)[None] % 16 == 15
        there = torch.nn.functional.pad(here, (T - few, 0))
        document_ids = (torch.arange(T, device=DEVICE) >= T - few).long()[None] - 1
        cotangent = torch.randn(near[0].shape, device=DEVICE).to(near[0].dtype)

        def results(
            tensors: list[Tensor], cotangent: Tensor, is_landmark: Tensor, document_ids: Tensor | None = None
        ) -> list[Tensor]:
            q, k, v = leaves = [x.requires_grad_() for x in tensors]
            out = landmark_attention(q, k, v, is_landmark, document_ids, implementation="triton")
            assert isinstance(out, Tensor)
            return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]

        def far(x: Tensor) -> Tensor:
            wide = torch.zeros(1, T, J, D, device=DEVICE, dtype=x.dtype)
            wide[:, -few:] = x
            return wide

        alone = results([x.clone() for x in near], cotangent, here)
        many = results([far(x) for x in near], far(cotangent), there, document_ids)
        for x, y in zip(alone, many, strict=True):
            assert torch.equal(x, y[:, -few:])
            assert not bool(y[:, :-few].any())


# --- selection and window --------------------------------------------------------------------------------------


def check_others(rows: Rows) -> None:
    """Selection and window attention, as benchmarks/ops.py checks them; selection among many landmarks."""
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
        with noted(rows, f"budget {case.op} {case.implementation} {case.dtype}"):
            check(case, DEVICE)
    # a table is divided among programs, 1 to 4 tiles each, that are merged; 1,024 queries walk over it whole
    sizes = [(1, 4096), (8, 4096), (1, 131_072), (8, 131_072), (1024, 1024)]
    for N, M in [(1, 4096), (70, 70)] if REHEARSAL else sizes:
        for K, dtype, noisy in ((8, DTYPE, True), (8, "float32", False), (32, DTYPE, False)):
            if REHEARSAL and (K, N) == (32, 1):
                continue
            name = f"selection of {K} by {N:,} queries of {M:,} landmarks, {dtype}, {'' if noisy else 'no '}noise"
            with noted(rows, name):
                select_well(N, M, K, heads * size, getattr(torch, dtype), noisy)


def select_well(N: int, M: int, K: int, E: int, dtype: torch.dtype, noisy: bool) -> None:
    """The kernel's chunks are the torch path's in float64, or the scores of those swapped lie within the budget.

    The budget of a score is that of ``assert_within_budget``; two scores are compared. N = M: each query selects
    before itself.
    """
    random = torch.Generator(DEVICE).manual_seed(N + M)
    query, table = (torch.randn(1, n, E, generator=random, device=DEVICE).to(dtype) for n in (N, M))
    ends = torch.arange(N, device=DEVICE) if N == M else torch.full((N,), M, device=DEVICE)
    seed = torch.tensor([N * M], device=DEVICE) if noisy else None
    ours = select_chunks(query, table, K, ends, noise_seed=seed, implementation="triton").indices
    theirs = select_chunks(
        query.double(), table.double(), K, ends, noise_seed=seed, implementation="torch"
    ).indices
    assert torch.equal(ours < 0, theirs < 0)
    assert bool((ours < ends[:, None]).all())
    assert bool(((ours[..., 1:] > ours[..., :-1]) | (ours[..., 1:] < 0)).all()), "not ascending"
    exact, rounded = (
        (query.to(wide) @ table.to(wide).transpose(1, 2) * E**-0.5) for wide in (torch.float64, torch.float32)
    )
    if seed is not None:
        noise = gumbel_noise(seed, 0, N, 1, M)[:, :, 0]
        exact, rounded = exact + noise, rounded + noise
    unit = torch.finfo(torch.float32).eps * exact.abs().max()
    allowed = 2 * (2 * (rounded - exact).abs().max() + unit)
    extra, missing = (
        (x >= 0) & ~(x[..., :, None] == y[..., None, :]).any(-1) for x, y in ((ours, theirs), (theirs, ours))
    )
    worst = exact.gather(-1, ours.clamp(min=0)).masked_fill(~extra, torch.inf).amin(-1)
    best = exact.gather(-1, theirs.clamp(min=0)).masked_fill(~missing, -torch.inf).amax(-1)
    assert bool((best - worst <= allowed).all()), f"{(best - worst).max()} apart, allowed {allowed}"


# --- a whole model ---------------------------------------------------------------------------------------------


def check_demo(rows: Rows) -> None:
    """The demo's model, which comes with the package, reads long texts and is asked for what they hide."""
    subject = load(Path("demo"), device=torch.device(DEVICE))
    lengths, questions = ((4096,), 2) if REHEARSAL else ((4096, 1 << 20), 20)
    for found in measure(subject, NeedleSettings(lengths, questions=questions), subject.tokens(None)):
        told = {key: found[key] for key in ("length", "questions", "correct", "tokens_per_second")}
        passed = found["correct"] == found["questions"]
        rows.append(_row(f"the demo's model, {found['length']:,} tokens", passed, found["seconds"], **told))


# --- tests -----------------------------------------------------------------------------------------------------


class KernelTests:
    """The kernels' own tests, in a process beside the other checks; its output goes to a file."""

    seconds = 120.0
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        if any(importlib.util.find_spec(name) is None for name in ("pytest", "hypothesis")):
            return
        folders = ("gca", "landmark", "selection")
        files = [
            *(f"tests/ops/{name}/test_triton_path.py" for name in folders),
            "tests/ops/window/test_flex.py",
        ]
        # the budgets are checked here over the whole cover; ahead of time is for where there is no GPU
        which = "empty_sizes or nothing_to_select or empty_batches" if REHEARSAL else _NOT_HERE
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", "-k", which]
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*command, *files],
            cwd=ROOT, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True, text=True,
        )  # fmt: skip

    def check(self, rows: Rows) -> None:
        name = "tests of the kernels"
        if self.process is None:
            rows.append(_row(name, None, note="not run: pytest and hypothesis are not both installed"))
            return
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, self.began + self.seconds - time.monotonic()))
        late = self.process.poll() is None
        self.stop()
        code, more = self.process.returncode, {}
        if late:  # which tests passed by then is in the tail, as dots
            more = {"note": f"not done after {self.seconds:.0f} s"}
        elif code:
            more = {"error": f"pytest ended with {code}"}
        self.output.seek(0)
        tail = self.output.read()[-2000:]
        passed = None if late else code == 0
        rows.append(_row(name, passed, time.monotonic() - self.began, tail=tail, **more))

    def stop(self) -> None:
        """Ends what is still running, with what it started."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


_NOT_HERE = "not error_budget and not ahead_of_time and not hopper"

TESTS = KernelTests()
CHECKS: dict[str, Callable[[Rows], None]] = {
    "budgets": check_budgets,
    "repeats": check_repeats,
    "many elements": check_many_elements,
    "synchronisation": check_no_synchronisation,
    "others": check_others,
    "landmark kernels": check_landmark,
    "demo": check_demo,
    "tests": TESTS.check,
}
