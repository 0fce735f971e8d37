"""FlexAttention: on a CPU its masks, biases and block lists against the oracle; its kernels on a GPU alone.

Without a GPU torch runs FlexAttention's dense form, which looks at the masks and not at the block lists, and has
no gradients: so the lists are tested by themselves, and kernels, gradients and precision are marked ``gpu``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from tests.budgets import (
    assert_low_precision_within_budget,
    assert_same_bits,
    assert_same_in_float64,
    assert_within_budget,
    values_and_gradients,
)
from tests.ops.window.test_api import Case
from trailmark.ops import alibi_slopes, sliding_window_attention

module = importlib.import_module("trailmark.ops.window.flex")

# one and many blocks of queries and keys, rows before all keys, rows that see nothing
CASES = [
    Case(T=5, window=None),
    Case(T=5, window=1),
    Case(T=150, carried=7, window=5, alibi=True),
    Case(T=150, carried=300, window=64, g=1),
    Case(T=300, window=64, alibi=True, documents="one"),
    Case(T=150, carried=7, window=64, documents="pair", alibi=True),
    Case(T=150, carried=7, window=5, positions="gaps"),
    Case(T=300, carried=7, window=64, positions="gaps", alibi=True, documents="one"),
    Case(T=150, carried=7, window=None, positions="any", alibi=True),
    Case(T=40, carried=200, window=1, positions="any", J=1, g=3),
    Case(T=1, carried=40, window=5, positions="gaps"),
    Case(T=150, carried=7, window=5, sinks=3),
    Case(T=300, window=20, sinks=2, documents="pieces", asking=True),
    Case(T=150, carried=40, window=20, sinks=4, positions="cache", asking=True),
]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """What tests compiled counts towards no limit and no other test's graphs."""
    yield
    module._compiled.cache_clear()
    torch._dynamo.reset()


# On a CPU


@pytest.mark.slow
def test_equals_the_oracle_in_float64() -> None:
    for case in CASES:
        for with_lse in (False, True):
            case = replace(case, with_lse=with_lse)
            inputs, _ = case.make()
            fast, oracle = (case.attend(name)(*inputs) for name in ("flex", "reference"))
            pairs = zip(fast, oracle, strict=True) if with_lse else [(fast, oracle)]
            for ours, theirs in pairs:
                assert_same_in_float64(ours, theirs)


def test_error_budget() -> None:
    case = Case(T=150, carried=7, D=16, window=20, alibi=True, positions="gaps")
    inputs = [x.bfloat16() for x in case.make()[0]]
    flex, oracle = case.attend("flex"), case.attend("reference")
    assert_within_budget(flex(*inputs), oracle(*inputs), oracle(*(x.double() for x in inputs)))


def test_rows_without_a_key() -> None:
    (q, k, v), _ = Case(T=5).make()
    positions = torch.tensor([[-1, 0, 1, 7, 2], [-1] * 5]), torch.tensor([[-1, 0, 1, -5, 2], [-1] * 5])
    out, lse = sliding_window_attention(
        q, k, v, 3, positions, alibi_slopes=alibi_slopes(4), return_lse=True, implementation="flex"
    )
    empty = torch.tensor([[True, False, False, True, False], [True] * 5])
    assert not out[empty].any()
    assert (lse[empty] == -torch.inf).all()
    assert lse[~empty].isfinite().all()


@pytest.mark.parametrize("empty", ["B", "T"])
def test_empty_batches(empty: str) -> None:
    case = Case(**{empty: 0}, carried=3)
    inputs, _ = case.make()
    assert case.attend("flex")(*inputs).shape == inputs[0].shape


def test_leaves_that_require_gradients_without_a_graph() -> None:
    case = Case(T=40, window=5)
    inputs = [x.requires_grad_() for x in case.make()[0]]
    with torch.no_grad():
        assert_same_in_float64(case.attend("flex")(*inputs), case.attend("reference")(*inputs))


@pytest.mark.parametrize("leaf", [0, 1, 2])
def test_refuses_gradients_on_a_cpu(leaf: int) -> None:
    inputs, rest = Case(T=40).make()
    inputs[leaf].requires_grad_()
    with pytest.raises(ValueError, match=r"^implementation: .*'flex'.*gradients.*implementation=None"):
        sliding_window_attention(*inputs, implementation="flex", **rest)


def test_refuses_other_devices() -> None:
    inputs, _ = Case(T=40).make()
    assert module.flex_problem(*inputs) is None
    assert "on meta" in module.flex_problem(*(x.to("meta") for x in inputs))


def listed(count: Tensor, indices: Tensor) -> Tensor:
    """What lists [b, 1, rows], [b, 1, rows, columns] say, as bool [b, rows, columns]."""
    assert count.dtype == indices.dtype == torch.int32
    assert count.is_contiguous()
    assert indices.is_contiguous()
    order = torch.arange(indices.shape[-1])
    assert torch.equal(indices.sort(-1).values, order.int().expand_as(indices))  # each block once
    said = torch.zeros(indices.shape, dtype=torch.bool)
    return said.scatter(-1, indices.long(), order < count[..., None])[:, 0]


@pytest.mark.parametrize("window", [None, 1, 5, 9])
@pytest.mark.parametrize("documents", ["none", "one", "pair", "consecutive"])
@pytest.mark.parametrize("positions", ["none", "gaps", "any"])
def test_block_lists(
    monkeypatch: pytest.MonkeyPatch, positions: str, documents: str, window: int | None
) -> None:
    """What a kernel visits and masks, and what it takes whole, is what the oracle's mask shows."""
    monkeypatch.setattr(module, "_BLOCK", 4)
    for seed, (T, carried) in enumerate([(3, 0), (8, 8), (21, 0), (21, 10), (4, 33)]):
        kind = "one" if documents == "consecutive" else documents
        case = Case(T=T, carried=carried, window=window, positions=positions, documents=kind, seed=seed)
        _, rest = case.make()
        P = T + carried
        ids = rest.get("document_ids")
        if documents == "consecutive":
            ids = (torch.arange(P) // 13).expand(2, P)
        if isinstance(ids, Tensor):
            ids = ids[:, carried:], ids
        last = torch.arange(P).expand(2, P)
        query, key = rest.get("positions") or (last[:, carried:], last)
        visible = (key >= 0)[:, None] & (query >= 0)[..., None] & (key[:, None] <= query[..., None])
        if window is not None:
            visible &= key[:, None] > query[..., None] - window
        if ids is not None:
            visible &= ids[0][..., None] == ids[1][:, None]
        blocks = module._plan(T, P, window, rest.get("positions"), ids, torch.device("cpu"))[1]
        part, full = (
            listed(getattr(blocks, f"{which}kv_num_blocks"), getattr(blocks, f"{which}kv_indices"))
            for which in ("", "full_")
        )
        for which, said in (("", part), ("full_", full)):
            transposed = listed(getattr(blocks, f"{which}q_num_blocks"), getattr(blocks, f"{which}q_indices"))
            assert torch.equal(transposed, said.mT)
        assert not (part & full).any()
        spread = [x.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, :T, :P] for x in (part, full)]
        assert torch.equal((spread[0] & visible) | spread[1], visible)
        if positions == "none" and documents in (
            "none",
            "consecutive",
        ):  # then no block is visited for nothing
            of_blocks = torch.nn.functional.pad(visible, (0, -P % 4, 0, -T % 4))
            of_blocks = of_blocks.unflatten(2, (-1, 4)).unflatten(
                1, (-1, 4)
            )  # [2, query blocks, 4, key blocks, 4]
            assert torch.equal((part | full).expand(2, -1, -1), of_blocks.any(4).any(2))
            assert torch.equal(full.expand(2, -1, -1), of_blocks.all(4).all(2))


def test_consecutive_positions_are_laid_out_once() -> None:
    case = Case(T=40, carried=11, window=5)  # lengths of no other test
    inputs, _ = case.make()
    module._consecutive.cache_clear()
    with torch.inference_mode():
        first = case.attend("flex")(*inputs)
    assert torch.equal(case.attend("flex")(*inputs), first)
    case.attend("flex")(*(x[:1] for x in inputs))
    info = module._consecutive.cache_info()
    assert (info.misses, info.hits) == (1, 2)
    assert not any(x.is_inference() for x in module._consecutive(40, 51, 5, torch.device("cpu"))[2])


def test_compiles_once_for_one_length_and_once_for_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounter()
    compiled = torch.compile(module._attend, backend=counter, fullgraph=True)
    monkeypatch.setattr(module, "_compiled", cache(lambda backend: compiled))
    module._consecutive.cache_clear()

    def run(T: int, P: int, window: int | None) -> int:
        case = Case(T=T, carried=P - T, window=window)
        case.attend("flex")(*case.make()[0])
        return counter.frame_count

    # the same length, whatever the window; then any
    assert [run(300, 300, window) for window in (33, 33, 12, 999, None)] == [1] * 5
    assert [run(*lengths, 33) for lengths in ((400, 400), (200, 333), (200, 334), (150, 900))] == [2] * 4


# On a GPU: gradients, precision, what is compiled, nothing waited for


def on_gpu(case: Case, implementation: str | None = None, compiled: bool = False) -> Callable[..., Any]:
    """``case.attend`` on a CUDA device, from CPU tensors to CPU tensors."""
    _, rest = case.make()
    rest = {name: to_gpu(x) for name, x in rest.items()}
    attend = partial(
        torch.compile(sliding_window_attention, fullgraph=True) if compiled else sliding_window_attention,
        return_lse=case.with_lse,
        implementation=implementation,
        **rest,
    )

    def op(q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        out = attend(q.cuda(), k.cuda(), v.cuda())
        if not case.with_lse:
            return out.cpu()
        return out[0].cpu(), out[1].cpu().masked_fill(out[1].cpu() == -torch.inf, 0)

    return op


def to_gpu(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(to_gpu, x))
    return x.cuda() if isinstance(x, Tensor) else x


gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU_CASES = [
    Case(T=300, D=64, window=64, alibi=True),
    Case(T=300, carried=77, D=64, window=64, g=4, alibi=True, with_lse=True),
    Case(T=256, D=128, window=None),
    Case(T=300, D=16, window=5, positions="gaps", alibi=True),
    Case(T=140, carried=140, D=80, window=64, positions="any", with_lse=True, alibi=True),
    Case(T=300, carried=5, D=96, window=100, documents="one", positions="gaps"),
    Case(T=300, D=64, window=100, documents="pair", with_lse=True),
    Case(T=2, carried=500, D=64, window=512),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", GPU_CASES)
@pytest.mark.parametrize("implementation", ["flex", "torch"])
class TestOnGpu:
    pytestmark = gpu

    def test_error_budget(self, case: Case, dtype: torch.dtype, implementation: str) -> None:
        inputs = [x.to(dtype) for x in case.make()[0]]
        assert_low_precision_within_budget(on_gpu(case, implementation), case.attend("reference"), *inputs)

    def test_the_same_bits_again(self, case: Case, dtype: torch.dtype, implementation: str) -> None:
        inputs = [x.to(dtype) for x in case.make()[0]]
        op = on_gpu(case, implementation)
        first = values_and_gradients(op, *inputs)
        for _ in range(5):
            assert_same_bits(values_and_gradients(op, *inputs), first)


@pytest.mark.parametrize("case", [GPU_CASES[0], GPU_CASES[3], Case(T=1, carried=70, D=64, positions="gaps")])
class TestCompiledOnGpu:
    pytestmark = gpu

    def test_inside_a_compiled_module(self, case: Case) -> None:
        inputs = [x.bfloat16() for x in case.make()[0]]
        op = on_gpu(case, compiled=True)
        assert_low_precision_within_budget(op, case.attend("reference"), *inputs)

    def test_waits_for_nothing(self, case: Case) -> None:
        """Neither the first call of a length nor a later one, forward or backward."""
        inputs, rest = case.make()
        rest = {name: to_gpu(x) for name, x in rest.items()}
        leaves = [x.bfloat16().cuda().requires_grad_() for x in inputs]
        sliding_window_attention(*leaves, **rest).sum().backward()  # compiled
        module._consecutive.cache_clear()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for implementation in (None, "torch"):
                out = sliding_window_attention(*leaves, implementation=implementation, **rest)
                out.backward(torch.ones_like(out))
        finally:
            torch.cuda.set_sync_debug_mode("default")


class TestKernelsOnGpu:
    pytestmark = gpu

    def test_none_is_flex_where_it_can_be(self) -> None:
        case = GPU_CASES[0]
        inputs = [x.bfloat16() for x in case.make()[0]]
        assert torch.equal(on_gpu(case)(*inputs), on_gpu(case, "flex")(*inputs))
        double = replace(case, T=40)  # no kernel: the blocked path
        assert_same_in_float64(
            on_gpu(double)(*double.make()[0]), double.attend("reference")(*double.make()[0])
        )
        with pytest.raises(ValueError, match=r"^implementation: .*float64"):
            on_gpu(double, "flex")(*double.make()[0])
        small = replace(case, D=8)
        with pytest.raises(ValueError, match=r"^implementation: .*heads of 8"):
            on_gpu(small, "flex")(*(x.float() for x in small.make()[0]))

    def test_rows_without_a_key(self) -> None:
        q, k, v = (torch.randn(2, 140, h, 32, device="cuda", requires_grad=True) for h in (4, 2, 2))
        at = torch.arange(140, device="cuda").repeat(2, 1)
        at[0, 20:30], at[1] = -1, -1
        out, lse = sliding_window_attention(q, k, v, 5, (at, at), return_lse=True, implementation="flex")
        assert not out[at < 0].any()
        assert (lse[at < 0] == -torch.inf).all()
        (out.sum() + lse[at >= 0].sum()).backward()
        for leaf in (q, k, v):
            assert leaf.grad is not None
            assert leaf.grad.isfinite().all()
            assert not leaf.grad[at < 0].any()
            assert leaf.grad[at >= 0].any()

    def test_compiles_once_for_one_length(self) -> None:
        def run(T: int, P: int) -> int:
            case = Case(T=T, carried=P - T, D=32, window=33, alibi=True)
            values_and_gradients(on_gpu(case), *(x.float() for x in case.make()[0]))
            return counters["stats"]["unique_graphs"]

        counters.clear()
        assert [run(300, 300) for _ in range(3)] == [1] * 3
        assert [run(*lengths) for lengths in ((400, 400), (200, 333), (200, 334))] == [2] * 3

    def test_nothing_of_the_size_of_all_pairs(self) -> None:
        T, leaves = 2**15, []
        for heads in (4, 2, 2):
            leaves.append(
                torch.randn(1, T, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            )
        attend = partial(sliding_window_attention, window=512, alibi_slopes=alibi_slopes(4).cuda())
        attend(*leaves).sum().backward()
        torch.cuda.synchronize()
        module._consecutive.cache_clear()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend(*leaves).sum().backward()
        assert torch.cuda.max_memory_allocated() - before < T * T / 8  # a byte per pair would be 1 GiB
