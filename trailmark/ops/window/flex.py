"""Sliding-window attention by FlexAttention: one compiled CUDA kernel each way, nothing of size T x P."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, FlexKernelOptions, flex_attention

from trailmark.ops.arguments import arithmetic_dtype, triton_problem
from trailmark.ops.window.torch_path import Attended, Call

_BLOCK = 128  # queries and keys of a block that the kernels skip, mask, or take whole
_ABSENT = 2**62  # the position of an absent key: after every query
# What a kernel is compiled for: dtype, gradients, ALiBi, documents, a batch of one ... Lengths are no part of
# it: the second length makes them dynamic. Dynamo's limit of 8 would end a process that does a bit of all.
_MOST_VARIANTS = 64


class _Blocks(NamedTuple):
    """Of each block of queries, the blocks of keys it sees in part or wholly, and the other way round."""

    kv_num_blocks: Tensor  # [b, 1, queries / 128] int32
    kv_indices: Tensor  # [b, 1, queries / 128, keys / 128] int32
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor  # [b, 1, keys / 128]
    q_indices: Tensor  # [b, 1, keys / 128, queries / 128]
    full_q_num_blocks: Tensor
    full_q_indices: Tensor


class _Band(NamedTuple):
    """Consecutive positions: query i sees key j if 0 <= i + carried - j < window; both int32, no dimension.

    On the device, so that a kernel does not depend on their values.
    """

    carried: Tensor
    window: Tensor


class _Reach(NamedTuple):
    """Any positions: query i sees the keys at lower[i] ... upper[i]; int64 [B, T], [B, T], [B, P].

    Of the first ``sinks`` keys (int32, no dimension; None: 0) it sees those before lower[i].
    """

    lower: Tensor
    upper: Tensor
    key: Tensor
    sinks: Tensor | None = None


def flex_problem(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why FlexAttention cannot be used for q [B, T, H, D] and its keys and values; None if it can."""
    device = q.device
    if device.type == "cpu":
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return (
                "gradients are needed, and FlexAttention has none on a CPU. "
                'Use implementation=None or "torch", or torch.no_grad()'
            )
        return None
    if device.type != "cuda":
        return f"the tensors are on {device.type}, not on a CUDA device or a CPU. Use implementation=None"
    if (problem := triton_problem(device)) is not None:
        return problem
    if _capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than Ampere. Use implementation=None"
    dtype = _kernel_dtype(q, k, v)
    most = {torch.float32: 128, torch.bfloat16: 256, torch.float16: 256}.get(dtype)
    if most is None:
        return f"{dtype} has no kernel. Use implementation=None"
    if not 16 <= q.shape[-1] <= most:
        return f"heads of {q.shape[-1]} are not within 16 ... {most} for {dtype}. Use implementation=None"
    return None


def sliding_window_attention_flex(call: Call) -> Attended:
    """As :func:`sliding_window_attention`, which checks the arguments; T >= 1, B >= 1.

    The kernels multiply in the inputs' dtype and sum, weigh and normalise in float32. Which blocks of 128 x 128
    are visited follows from the least and the greatest position (and document) of each block: O(T + P) time
    beside the (T / 128) (P / 128) entries. On a CPU torch's dense form runs, in float32 or wider: for tests.
    """
    q, k, v, window, positions, document_ids, _, alibi_slopes, scale, return_lse, num_sinks, windows = call
    on_cpu, compiling = q.device.type == "cpu", torch.compiler.is_compiling()
    if windows is not None:
        windows = windows.expand(q.shape[:2])
        if positions is None:  # a band has one width
            key = torch.arange(k.shape[1], device=q.device).expand(k.shape[:2])
            positions = key[:, k.shape[1] - q.shape[1] :], key
    place, blocks = _plan(
        q.shape[1], k.shape[1], window, positions, document_ids, q.device, num_sinks, windows
    )
    dtype = arithmetic_dtype(q, k, v) if on_cpu else _kernel_dtype(q, k, v)
    if on_cpu:  # leaves that require gradients are refused there even without a graph
        q, k, v = q.detach(), k.detach(), v.detach()
    slopes = None
    if alibi_slopes is not None:
        slopes = alibi_slopes.detach().to(device=q.device, dtype=arithmetic_dtype(q, k, v))
    queries, keys, values = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    if compiling:
        out, lse = _attend(queries, keys, values, place, blocks, document_ids, slopes, scale, return_lse)
    else:
        attend = _compiled("eager" if on_cpu else "inductor")
        with torch._dynamo.config.patch(recompile_limit=_MOST_VARIANTS):
            out, lse = attend(queries, keys, values, place, blocks, document_ids, slopes, scale, return_lse)
    out = out.transpose(1, 2).to(q.dtype)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse.transpose(1, 2)


def _kernel_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """One low precision stays as it is: the kernels keep scores and softmax in float32."""
    return q.dtype if q.dtype == k.dtype == v.dtype else arithmetic_dtype(q, k, v)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _compiled(backend: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Lengths are static until a second one comes (``dynamic=None``): training compiles once."""
    return torch.compile(_attend, backend=backend, fullgraph=True)


def _attend(
    q: Tensor,  # [B, H, T, D]
    k: Tensor,  # [B, J, P, D]
    v: Tensor,
    place: _Band | _Reach,
    blocks: _Blocks,
    documents: tuple[Tensor, Tensor] | None,  # [B, T], [B, P]
    slopes: Tensor | None,  # [H]
    scale: float,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """All that is compiled: a function of tensors, so that only their shapes and dtypes are guarded."""

    def in_band(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert isinstance(place, _Band)
        distance = i + place.carried - j
        return (distance >= 0) & (distance < place.window)

    def in_reach(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert isinstance(place, _Reach)
        inside = place.key[b, j] >= place.lower[b, i]
        if place.sinks is not None:
            inside = inside ^ (j < place.sinks)
        return inside & (place.key[b, j] <= place.upper[b, i])

    seen = in_band if isinstance(place, _Band) else in_reach

    def seen_in_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert documents is not None
        return seen(b, h, i, j) & (documents[0][b, i] == documents[1][b, j])

    def with_alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert slopes is not None
        if isinstance(place, _Band):
            distance = i + place.carried - j
        else:
            distance = place.upper[b, i] - place.key[b, j]
        return score - slopes[h] * distance.to(slopes.dtype)

    block_mask = BlockMask(
        seq_lengths=(q.shape[2], k.shape[2]),
        **blocks._asdict(),
        BLOCK_SIZE=(_BLOCK, _BLOCK),
        mask_mod=seen if documents is None else seen_in_document,
    )
    options: FlexKernelOptions = {}
    if "BACKEND" in FlexKernelOptions.__annotations__:  # the kernel for few queries would be one more variant
        options["BACKEND"] = "TRITON"
    modify = None if slopes is None else with_alibi
    grouped = q.shape[1] != k.shape[1]
    if not return_lse:
        out = flex_attention(q, k, v, modify, block_mask, scale, grouped, kernel_options=options)
        return out, None
    out, aux = flex_attention(
        q, k, v, modify, block_mask, scale, grouped, kernel_options=options, return_aux=AuxRequest(lse=True)
    )
    return out, aux.lse


def _plan(
    T: int,
    P: int,
    window: int | None,
    positions: tuple[Tensor, Tensor] | None,
    documents: tuple[Tensor, Tensor] | None,
    device: torch.device,
    num_sinks: int = 0,
    windows: Tensor | None = None,
) -> tuple[_Band | _Reach, _Blocks]:
    """Who sees whom, and in which blocks; sinks only with positions."""
    if positions is None:
        # what is made under FakeTensorMode is none that a real call could take
        kept = type(torch.empty(0)) is Tensor and not torch.compiler.is_compiling()
        consecutive = _consecutive if kept else _consecutive.__wrapped__
        band, vectors, blocks = consecutive(T, P, P if window is None else min(window, P), device)
        return band, blocks if documents is None else _blocks_seen(*vectors, documents)
    query, key = positions
    reach = window if windows is None else windows
    lower = torch.zeros_like(query) if reach is None else query - (reach - 1)
    sinks = torch.full((), num_sinks, dtype=torch.int32, device=device) if num_sinks else None
    vectors = lower.masked_fill(query < 0, _ABSENT), query.clamp(min=-1), key.masked_fill(key < 0, _ABSENT)
    return _Reach(*vectors, sinks), _blocks_seen(*vectors, documents, num_sinks)


@lru_cache(maxsize=16)
def _consecutive(
    T: int, P: int, window: int, device: torch.device
) -> tuple[_Band, tuple[Tensor, Tensor, Tensor], _Blocks]:
    """Where the last T of P consecutive positions stand, the same as a reach [1, ...], and its blocks."""
    with torch.inference_mode(False):  # they are used in training too
        # filled, not copied: the device need not be waited for
        carried, reach = (torch.full((), x, dtype=torch.int32, device=device) for x in (P - T, window))
        key = torch.arange(P, device=device)[None]
        query = key[:, P - T :]
        vectors = query - (window - 1), query, key
        return _Band(carried, reach), vectors, _blocks_seen(*vectors, None)


def _blocks_seen(
    lower: Tensor,
    upper: Tensor,
    key: Tensor,
    documents: tuple[Tensor, Tensor] | None,
    num_sinks: int = 0,
) -> _Blocks:
    """From the bounds of each block: none that sees anything is left out, none is full that is not.

    Blocks in between (gaps, unordered positions) are visited for nothing: the mask decides within a block.
    """
    least_upper, greatest_upper = _bounds(upper, -1)
    least_lower, greatest_lower = _bounds(lower, _ABSENT)
    least_key, greatest_key = _bounds(key, _ABSENT)  # an absent key makes the greatest _ABSENT: never full
    greatest_there = _bounds(torch.where(key == _ABSENT, -1, key), -1)[1]
    # [b, 1, query blocks, key blocks]
    some = _pairs(least_key, greatest_upper, torch.le) & _pairs(greatest_there, least_lower, torch.ge)
    full = _pairs(greatest_key, least_upper, torch.le) & _pairs(least_key, greatest_lower, torch.ge)
    if num_sinks:  # blocks with sinks: visited where one may be seen, and never whole
        holds = torch.arange(some.shape[-1], device=key.device) * _BLOCK < num_sinks
        seen = _pairs(least_key, greatest_upper, torch.le) & _pairs(least_key, greatest_lower, torch.lt)
        some, full = some | (seen & holds), full & ~holds
    if documents is not None:
        (least_q, greatest_q), (least_k, greatest_k) = (_bounds(x, None) for x in documents)
        some = some & _pairs(least_k, greatest_q, torch.le) & _pairs(greatest_k, least_q, torch.ge)
        full = full & _pairs(greatest_k, least_q, torch.le) & _pairs(least_k, greatest_q, torch.ge)
    part = some & ~full
    return _Blocks(*_listed(part), *_listed(full), *_listed(part.mT), *_listed(full.mT))


def _bounds(x: Tensor, beyond: int | None) -> tuple[Tensor, Tensor]:
    """[b, n] -> least and greatest of each block of 128, [b, n / 128]; after the end stands ``beyond``.

    None: the last number again.
    """
    n = x.shape[1]
    place = torch.arange(-(-n // _BLOCK) * _BLOCK, device=x.device)
    padded = x.index_select(1, place.clamp(max=n - 1))
    if beyond is not None:
        padded = torch.where(place < n, padded, beyond)
    least, greatest = padded.unflatten(1, (-1, _BLOCK)).aminmax(dim=2)
    return least, greatest


def _pairs(of_keys: Tensor, of_queries: Tensor, compare: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """[b, 1, query blocks, key blocks]."""
    return compare(of_keys[:, None, None, :], of_queries[:, None, :, None])


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[..., rows, columns] -> how many of each row, and their columns in order, the rest after them."""
    order = torch.sort(blocks.to(torch.int8), dim=-1, descending=True, stable=True).indices
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()
