"""Selecting chunks in kernels: on a GPU, or under Triton's interpreter (TRITON_INTERPRET=1) on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.budgets import (
    assert_chooses_the_best,
    assert_low_precision_within_budget,
    assert_same_bits,
    values_and_gradients,
)
from trailmark.ops import fold_seed, gumbel_noise, select_chunks

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from trailmark.ops.selection import triton_path as kernels  # noqa: E402

# the interpreter computes what is no candidate with NumPy, which warns
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
in_kernels = partial(select_chunks, implementation="triton")


@dataclass(frozen=True)
class Case:
    B: int = 2
    N: int = 3
    J: int = 0  # 0: one selection for all heads
    E: int = 16
    M: int = 60
    K: int = 4
    noisy: bool = False
    bounds: str = "row"  # "row" [B, N], "query" [N], "all" candidates
    recency: float = 0.0
    tables: str = "one"  # "one", "shared" by the batch, "segments", "strided"
    dtype: torch.dtype = torch.float32

    def make(self, whole: bool = False) -> tuple[Tensor, Any, dict[str, Any]]:
        """(query, landmarks, the rest); some queries have no candidate, some fewer than K."""
        random = torch.Generator().manual_seed(self.N + 100 * self.M + self.E)
        heads = (self.J,) if self.J else ()
        sample = torch.randint(-7, 8, ()) if whole else None

        def draw(*shape: int) -> Tensor:
            if sample is None:
                x = torch.randn(*shape, generator=random)
            else:  # few values: many ties, and sums without rounding
                x = torch.randint(-1, 2, shape, generator=random)
            return x.to(DEVICE, self.dtype)

        query = draw(self.B, self.N, *heads, self.E)
        table = draw(self.B, self.M, *heads, self.E)
        landmarks: Any = table
        if self.tables == "shared":
            landmarks = table[:1].expand_as(table)
        elif self.tables == "segments":
            a, b = self.M // 3, self.M // 2
            wider = table[:, a:b].float() * (1 if whole else 1.1)  # not to be had in a narrower dtype
            shared = table[:1, b:].expand_as(table[:, b:])
            landmarks = [table[:, :a].half(), table[:, a:a], wider, shared]
        elif self.tables == "strided":
            query, landmarks = (x.transpose(1, -1).contiguous().transpose(1, -1) for x in (query, table))
        shape = (self.B, self.N) if self.bounds == "row" else (self.N,)
        ends, starts = (torch.randint(0, self.M // i + 1, shape, generator=random) for i in (1, 2))
        if self.bounds == "all":
            ends, starts = torch.full(shape, self.M), torch.zeros(shape, dtype=torch.int64)
        rest = {
            "num_retrieved": self.K,
            "num_candidates": ends.to(DEVICE),
            "first_candidate": starts.to(DEVICE),
            "noise_seed": torch.arange(self.B, device=DEVICE) + 2**40 if self.noisy else None,
            "recency": self.recency,
        }
        return query, landmarks, rest


def one_table(landmarks: Tensor | list[Tensor], dtype: torch.dtype) -> Tensor:
    parts = [landmarks] if isinstance(landmarks, Tensor) else landmarks
    return torch.cat([x.to(dtype) for x in parts], 1)


def assert_selected_within_budget(query: Tensor, landmarks: Any, chosen: Tensor, **rest: Any) -> None:
    """K of the best candidates; where they are others than float64's, the swapped scores lie within the budget."""
    q, table = (
        x if query.dim() == 4 else x[:, :, None] for x in (query, one_table(landmarks, torch.float64))
    )
    scores = torch.einsum("bnje,bmje->bnjm", q.double(), table) * query.shape[-1] ** -0.5
    lower = torch.einsum("bnje,bmje->bnjm", q.float(), table.float()) * query.shape[-1] ** -0.5
    age = rest["num_candidates"].expand(query.shape[:2])[..., None] - torch.arange(
        scores.shape[-1], device=DEVICE
    )
    older = rest["recency"] * age.clamp(min=1).double().log()[:, :, None]
    scores, lower = scores - older, lower - older.float()
    if rest["noise_seed"] is not None:
        scores, lower = (
            x + gumbel_noise(rest["noise_seed"], 0, *x.shape[1:]).to(x.dtype) for x in (scores, lower)
        )
    chunk = torch.arange(scores.shape[-1], device=DEVICE)
    ends, starts = (
        rest[name].expand(query.shape[:2])[..., None] for name in ("num_candidates", "first_candidate")
    )
    may = ((chunk >= starts) & (chunk < ends))[:, :, None].expand_as(scores)
    assert_chooses_the_best(chosen if query.dim() == 4 else chosen[:, :, None], scores, lower, may)


LOW = (torch.float32, torch.float16) if DEVICE == "cpu" else (torch.float32, torch.float16, torch.bfloat16)
# each value of each dimension at least twice, beside different others
COVER = [
    Case(N=1, E=16, M=1, K=1),
    Case(N=1, E=300, M=500, K=8, B=1, bounds="all"),
    Case(N=1, E=64, M=500, K=7, J=2, noisy=True, tables="shared", bounds="all"),
    Case(N=2, E=63, M=64, K=1, bounds="all", noisy=True),
    Case(N=3, E=16, M=5, K=8, tables="segments"),
    Case(N=3, E=80, M=130, K=32, bounds="query"),
    Case(N=5, E=300, M=65, K=2, J=2, tables="strided"),
    Case(N=9, E=64, M=200, K=7, tables="segments", noisy=True),
    Case(N=16, E=63, M=129, K=2, tables="shared"),
    Case(N=17, E=16, M=63, K=32, B=1, noisy=True, bounds="query"),
    Case(N=17, E=80, M=64, K=8, J=3, B=1, tables="segments", bounds="query"),
    Case(N=33, E=64, M=300, K=8, tables="shared", bounds="query"),
    Case(N=70, E=63, M=70, K=7, B=1, bounds="query"),
    Case(N=70, E=16, M=20, K=2, J=2, tables="strided", noisy=True),
    Case(N=9, E=64, M=200, K=7, tables="segments", noisy=True, recency=1.5),
    Case(N=17, E=16, M=130, K=8, bounds="query", recency=0.7),
]
# every case in every dtype, or in turn where it takes seconds
COVER = [
    replace(case, dtype=dtype)
    for i, case in enumerate(COVER)
    for dtype in (LOW if DEVICE == "cuda" else LOW[i % 2 :][:1])
]


@pytest.mark.parametrize("case", COVER, ids=str)
@pytest.mark.sampled(3)
def test_the_best_within_the_score_budget(case: Case) -> None:
    query, landmarks, rest = case.make()
    selection = in_kernels(query, landmarks, **rest)
    assert_selected_within_budget(query, landmarks, selection.indices, **rest)
    given = select_chunks(query, landmarks, **rest, indices=selection.indices)
    assert_same_bits(selection, given)


@pytest.mark.parametrize("case", COVER[4::3], ids=str)
def test_of_equals_the_earlier(case: Case) -> None:
    """Integer vectors score without rounding, so the selection is that of the torch path, ties and all."""
    query, landmarks, rest = case.make(whole=True)
    rest |= {"noise_seed": None, "scale": 0.25}
    ours, theirs = (
        select_chunks(query, landmarks, **rest, implementation=name).indices
        for name in ("triton", "reference")
    )
    assert torch.equal(ours, theirs)


def test_equal_chunks_tie() -> None:
    """Though their scores round: all columns are summed in one order."""
    query, landmarks, rest = Case(N=5, E=70, M=150, K=9, bounds="all").make()
    landmarks = landmarks[:, :1].expand(2, 150, 70)
    for table in (landmarks, [landmarks[:, :11], landmarks[:, 11:100], landmarks[:, 100:].contiguous()]):
        chosen = in_kernels(query, table, **rest).indices
        assert torch.equal(chosen, torch.arange(9, device=DEVICE).expand(2, 5, 9))


@pytest.mark.parametrize("narrow", LOW[1:])
def test_the_widest_dtype_computes(narrow: torch.dtype) -> None:
    """Numbers that are all equal in the narrower."""
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float32)
    candidates = torch.tensor([50], device=DEVICE)
    landmarks = [1 + order[None, :20, None].to(narrow) * 0, 1 + order[None, 20:, None] * 1e-5]
    chosen = in_kernels(torch.ones(1, 1, 1, device=DEVICE, dtype=narrow), landmarks, 5, candidates).indices
    assert torch.equal(chosen[0, 0], order[20:].topk(5).indices.sort().values + 20)
    query = torch.tensor([1 + 1e-5, -1], device=DEVICE)[None, None]
    chosen = in_kernels(query, order[None, :, None].to(narrow).expand(1, 50, 2), 5, candidates).indices
    assert torch.equal(chosen[0, 0], order.topk(5).indices.sort().values)


def test_scores_that_are_no_numbers() -> None:
    """As in the torch path: NaN of a candidate is the largest, -inf is never selected, 0 and -0 are equal."""
    values = torch.tensor([-1, torch.inf, -torch.inf, torch.nan, -1e-45, -0.0, 0, 0, -3, 7], device=DEVICE)
    negative = torch.tensor(-1 << 22, dtype=torch.int32).view(torch.float32).to(DEVICE)  # NaN with a sign
    query, candidates = torch.ones(1, 1, 1, device=DEVICE), torch.tensor([10], device=DEVICE)
    for nan in (torch.tensor(torch.nan), negative):
        landmarks = torch.where(values.isnan(), nan.to(DEVICE), values)[None, :, None]
        for K, expected in (
            (1, [3]),
            (2, [1, 3]),
            (4, [1, 3, 4, 9]),
            (12, [0, 1, 3, 4, 5, 6, 7, 8, 9, -1, -1, -1]),
        ):
            chosen = in_kernels(query, landmarks, K, candidates, scale=0.25).indices  # -1e-45 to -0
            assert chosen.tolist() == [[expected]]


@pytest.mark.parametrize(("programs", "J"), [(1, 0), (5, 2), (10_000, 0)])
def test_any_split_of_the_landmarks(programs: int, J: int, monkeypatch: pytest.MonkeyPatch) -> None:
    query, landmarks, rest = Case(N=3, J=J, M=300, K=3, noisy=True).make()
    before = in_kernels(query, landmarks, **rest)
    monkeypatch.setattr(kernels, "_PROGRAMS", programs)
    for table in (landmarks, landmarks.split([64, 128, 108], 1)):
        assert_same_bits(in_kernels(query, table, **rest), before)


@pytest.mark.parametrize("K", [3, 16])
def test_more_keys_than_are_merged_at_once(K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_PROGRAMS", 10_000)
    monkeypatch.setattr(kernels, "_MERGED", 16)
    M = 400  # 7 programs
    scores = torch.randperm(M, generator=torch.Generator().manual_seed(K)).to(DEVICE, torch.float32)
    query, candidates = torch.ones(1, 1, 1, device=DEVICE), torch.tensor([M], device=DEVICE)
    for first in (0, 300):  # or 4 programs without a candidate
        chosen = in_kernels(query, scores[None, :, None], K, candidates, first).indices[0, 0]
        assert torch.equal(chosen, scores[first:].topk(K).indices.sort().values + first)


@pytest.mark.parametrize(("poison", "noisy"), [(torch.nan, True), (torch.inf, False), (-torch.inf, False)])
def test_what_is_no_candidate_has_no_effect(poison: float, noisy: bool) -> None:
    query, landmarks, rest = Case(B=3, N=4, M=150, noisy=noisy).make()
    ends, starts = torch.tensor([[3], [150], [70]]), torch.tensor([[0], [66], [70]])
    rest |= {
        "num_candidates": ends.to(DEVICE).expand(3, 4),
        "first_candidate": starts.to(DEVICE).expand(3, 4),
    }
    before = in_kernels(query, landmarks, **rest)
    chunk = torch.arange(150)
    outside = ((chunk >= ends) | (chunk < starts)).to(DEVICE)
    landmarks = landmarks.masked_fill(outside[..., None], poison)
    for table in (landmarks, [landmarks[:, :10], landmarks[:, 10:]]):
        assert_same_bits(in_kernels(query, table, **rest), before)


def test_no_effect_of_a_neighbour() -> None:
    query, landmarks, rest = Case(B=3, N=5, M=70, bounds="all").make()
    shared = landmarks[:1].expand_as(landmarks)
    before = [in_kernels(query, table, **rest) for table in (landmarks, shared)]
    query, landmarks = query.clone(), landmarks.clone()
    query[1:], landmarks[1:] = torch.nan, torch.inf
    for table, old in zip((landmarks, shared), before, strict=True):
        for ours, theirs in zip(in_kernels(query, table, **rest), old, strict=True):
            assert torch.equal(ours[0], theirs[0])


def test_nothing_to_select() -> None:
    for case in (Case(M=0), Case(N=0), Case(B=0), Case(M=0, J=2, K=3, noisy=True)):
        query, landmarks, rest = case.make()
        for table in (landmarks, []) if case.M == 0 else (landmarks,):
            selection = in_kernels(query, table, **rest)
            assert (selection.indices == -1).all()
            assert not selection.weights.any()
            heads = (case.J,) if case.J else ()
            assert selection.indices.shape == (case.B, case.N, *heads, case.K)


def test_the_most_that_is_retrieved() -> None:
    query, landmarks, rest = Case(B=1, N=2, M=300, K=256, bounds="all").make(whole=True)
    ours, theirs = (
        select_chunks(query, landmarks, **rest, implementation=name).indices for name in ("triton", "torch")
    )
    assert torch.equal(ours, theirs)


def test_a_batch_of_stride_0_is_not_copied() -> None:
    """The queries of the batch ask one table, in one program where they fit a tile."""
    assert kernels._cut(64, 64, 1) == (64, 1)
    query, landmarks, rest = Case(B=3, N=5, M=90, tables="shared", noisy=True).make()
    ours, theirs = (in_kernels(query, x, **rest) for x in (landmarks, landmarks.contiguous()))
    assert_same_bits(ours, theirs)


def test_offsets_past_2_to_the_31() -> None:
    """Chunks 2^27 elements apart, of which nothing in between is touched."""
    apart, M, E = 1 << 27, 20, 16
    storage = torch.empty(0, dtype=torch.float16, device=DEVICE)
    torch.utils.deterministic.fill_uninitialized_memory = False
    storage.resize_((M - 1) * apart + E)
    landmarks = storage.as_strided((1, M, E), (0, apart, 1))
    landmarks.copy_(torch.randn(1, M, E))
    query, ends = torch.randn(1, 4, E).to(DEVICE, torch.float16), torch.full((4,), M, device=DEVICE)
    ours, theirs = (in_kernels(query, x, 5, ends) for x in (landmarks, landmarks.contiguous()))
    assert_same_bits(ours, theirs)


# Noise


@triton.jit
def _noise(seeds, out, J, N, M, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    row, m = i // M, i % M
    n, j, b = row % N, row // N % J, row // N // J
    seed = kernels._fold(kernels._fold(kernels._mix(tl.load(seeds + b)), j), n)
    tl.store(out + ((b * N + n) * J + j) * M + m, kernels._gumbel(seed, m))


def test_the_bits_of_the_noise() -> None:
    seeds = torch.tensor([5, -3, 2**40 + 5, 2**62 + 11], device=DEVICE)
    seeds = torch.cat([seeds, fold_seed(seeds, 7)])
    B, N, J, M = 8, 4, 2, 1024
    expected = gumbel_noise(seeds, 0, N, J, M)
    noise = torch.empty_like(expected)
    _noise[(B * N * J,)](seeds, noise, J, N, M, BLOCK=M)
    assert torch.equal(noise, expected)


def test_noise_alone_decides_between_equals() -> None:
    query, landmarks, rest = Case(B=2, N=5, J=2, M=100, K=3, noisy=True).make()
    ours, theirs = (
        select_chunks(query * 0, landmarks, **rest, implementation=name) for name in ("triton", "torch")
    )
    assert torch.equal(ours.indices, theirs.indices)


# Gradients and torch.compile


def weights_and_scores(query: Tensor, landmarks: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
    selection = in_kernels(query, landmarks, **rest)
    return selection.weights, selection.scores.masked_fill(selection.indices < 0, 0)


@pytest.mark.parametrize("dtype", LOW)
def test_error_budget(dtype: torch.dtype) -> None:
    """Of values and gradients, where the selections agree."""
    query, landmarks, rest = Case(N=9, E=64, M=40, dtype=dtype).make()
    chosen = in_kernels(query, landmarks, **rest).indices
    assert torch.equal(chosen, select_chunks(query.double(), landmarks.double(), **rest).indices)

    def oracle(q: Tensor, l: Tensor) -> tuple[Tensor, Tensor]:
        selection = select_chunks(q, l, **rest, indices=chosen)
        return selection.weights, selection.scores.masked_fill(chosen < 0, 0)

    assert_low_precision_within_budget(partial(weights_and_scores, **rest), oracle, query, landmarks)


def test_compiled_without_a_graph_break() -> None:
    query, landmarks, rest = Case(N=5, noisy=True).make()
    ends = rest.pop("num_candidates")

    def op(q: Tensor, l: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        selection = in_kernels(q, [l[:, :20], l[:, 20:]], num_candidates=ends, **rest)
        return selection.weights, selection.scores.masked_fill(selection.indices < 0, 0)

    torch.compiler.reset()
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    ours, theirs = (values_and_gradients(partial(f, ends=ends), query, landmarks) for f in (compiled, op))
    assert_same_bits(ours, theirs)


def test_the_noise_of_a_stretch_is_that_of_all_queries() -> None:
    query, landmarks, rest = Case(N=9, M=40, noisy=True).make()
    whole = in_kernels(query, landmarks, **rest)
    own = rest | {name: rest[name][..., 4:] for name in ("num_candidates", "first_candidate")}
    stretch = in_kernels(query[:, 4:], landmarks, **own, first_query=4)
    assert torch.equal(stretch.indices, whole.indices[:, 4:])
    assert not torch.equal(in_kernels(query[:, 4:], landmarks, **own).indices, stretch.indices)


def test_the_op_that_compilation_sees() -> None:
    query, landmarks, rest = Case(M=20, noisy=True).make()
    bounds = rest["first_candidate"], rest["num_candidates"]
    inputs = query[:, :, None], [landmarks[:, :, None]], 2, *bounds, rest["noise_seed"], 0.5, 1.0, 0, True
    torch.library.opcheck(torch.ops.trailmark.select_chunks_search, inputs)


# Errors


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"query": torch.zeros(2, 3, 4, dtype=torch.float64)}, "query is torch.float64. Convert"),
        ({"landmarks": [torch.zeros(2, 5, 4, dtype=torch.float64)]}, "landmarks are torch.float64. Convert"),
        ({"num_retrieved": 257}, "num_retrieved is 257, and the kernels keep at most 256"),
        ({"landmarks": torch.zeros(2, 1, 4).expand(2, 2**31, 4)}, "fewer than 2.31 chunks"),
    ],
)
def test_what_the_kernels_refuse(wrong: dict[str, Any], message: str) -> None:
    right = {"query": torch.zeros(2, 3, 4), "landmarks": torch.zeros(2, 5, 4), "num_retrieved": 2}
    right |= {"num_candidates": torch.tensor([0, 1, 5])}
    right, wrong = (
        {name: x.to(DEVICE) if isinstance(x, Tensor) and x.numel() < 99 else x for name, x in values.items()}
        for values in (right, wrong)
    )
    in_kernels(**right)
    with pytest.raises(ValueError, match=f"^implementation: .*'triton'.*{message}"):
        in_kernels(**right | wrong)


def test_a_mistake_is_told_at_once() -> None:
    query, landmarks, rest = Case(N=64, M=500).make()
    seconds = []
    for _ in range(30):
        before = time.perf_counter()
        with pytest.raises(ValueError, match=r"^num_retrieved"):
            in_kernels(query, landmarks, **rest | {"num_retrieved": 0})
        with pytest.raises(ValueError, match=r"^num_candidates"):
            in_kernels(query, landmarks, **rest | {"num_candidates": torch.zeros(3, dtype=torch.int64)})
        seconds.append(time.perf_counter() - before)
    assert min(seconds) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [Case(N=70, noisy=True), Case(J=2, tables="segments"), Case(N=1, M=5000)], ids=str
)
def test_nothing_waits_for_the_device(case: Case) -> None:
    query, landmarks, rest = case.make()
    in_kernels(query, landmarks, **rest)
    of_cpu = rest | {"num_candidates": rest["num_candidates"].cpu(), "first_candidate": 0}
    torch.cuda.set_sync_debug_mode("error")
    try:
        in_kernels(query, landmarks, **rest)
        in_kernels(query, landmarks, **of_cpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Ahead of time

COMPILE = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trailmark.ops.selection import triton_path as kernels  # noqa: E402
from trailmark.ops.selection.triton_path import tl


def compiled(fn, pointers, numbers, constants, **options):
    signature = {name: "i32" for name in fn.arg_names} | pointers | numbers
    signature |= {name: "constexpr" for name in constants}
    aligned = [i for i, name in enumerate(fn.arg_names) if name in pointers]
    source = ASTSource(fn, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


for word in sys.argv[1:]:
    dtype, BQ, K, E, noise = word.split(",")
    BQ, K, E = int(BQ), int(K), int(E)
    BE = 32 if dtype == "fp32" else 64
    pointers = {name: "*i64" for name in ("start", "end", "seeds", "keys")}
    pointers |= {name: "*" + dtype for name in ("query", "landmarks")}
    constants = {"J": 1, "E": E, "K": K, "PADDED": triton.next_power_of_2(K), "BQ": BQ, "BM": 64, "BE": BE}
    constants |= {"DTYPE": tl.str_to_ty("*" + dtype, None).element_ty, "NOISE": noise == "noise"}
    constants |= {"query_e": 1, "landmarks_e": 1}
    kernel = compiled(
        kernels._search_segment,
        pointers,
        {"scale": "fp32", "landmarks_b": "i64"},
        constants,
        num_warps=8 if BQ == 64 else 4,
        num_stages=3,
    )
    assert kernel.asm["cubin"]
    print(kernel.metadata.shared)
constants = {"K": 8, "PADDED": 8, "ROWS": 16, "TILE": 64, "SINGLE": False}
merge = compiled(kernels._merge, {"keys": "*i64", "chosen": "*i64"}, {}, constants)
print(merge.metadata.shared)
"""


def compile_ahead(folder: os.PathLike[str], *words: str) -> None:
    """For an H200, without one: it is one launch of the kernel, with ptxas."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", textwrap.dedent(COMPILE), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    shared = [int(x) for x in done.stdout.split()]
    assert len(shared) == len(words) + 1
    assert max(shared) <= 227 * 1024  # what a block may have on sm_90


@pytest.mark.slow
def test_compiles_for_hopper(tmp_path: os.PathLike[str]) -> None:
    compile_ahead(tmp_path, "bf16,16,8,768,quiet", "fp32,4,8,768,quiet")


@pytest.mark.slow
def test_compiles_for_hopper_whatever_the_tile(tmp_path: os.PathLike[str]) -> None:
    tiles = "bf16,64,8,768,noise", "fp32,64,8,300,noise", "fp16,32,64,63,noise", "bf16,16,256,4096,quiet"
    compile_ahead(tmp_path, *tiles, "fp32,4,1,16,noise", "fp32,8,256,80,quiet")
