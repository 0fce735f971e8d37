"""Context parallelism: one text over several processes, each with a stretch of whole chunks, exactly.

A layer's window begins with the last keys of the process before (its halo), and chunk memory is gathered: a chunk may
select any before it, whoever has read it. In the backward pass gradients go the same ways back. All else is each
process's own, so that activations are divided by the number of processes; keys and values of all chunks lie with each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from trailmark.memory.window import Span, Window, WindowCall
from trailmark.models.arguments import Call
from trailmark.models.configuration import TrailmarkConfig
from trailmark.models.costs import kv_width
from trailmark.models.grid import Grid
from trailmark.models.layers import Place

if TYPE_CHECKING:
    from trailmark.models.causal_lm import TrailmarkForCausalLM


class ContextParallel:
    """The processes of ``group`` that share each text, in the order of their ranks.

    All of them call the model alike: as many tokens of as many texts, in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._known: set[tuple[int, int]] = set()

    def expect_alike(self, x: Tensor) -> None:
        """Raise a ValueError in all processes where x [B, P, ...] of some has another B or P.

        They ask at the first call of a shape, for an answer waits for the device: later ones are taken to be alike.
        """
        shape = x.shape[0], x.shape[1]
        if shape in self._known:
            return
        own = torch.tensor(shape, device=x.device)
        others = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(others, own, group=self.group)
        shapes = [tuple(other.tolist()) for other in others]
        if len(set(shapes)) > 1:
            raise ValueError(
                f"input_ids: expected stretches of as many texts and positions in all processes that share them, got "
                f"{shapes} by rank. Choose texts whose length is a multiple of the processes' number times the chunk's."
            )
        self._known.add(shape)

    def from_previous(self, x: Tensor) -> Tensor:
        """What the process before has in the place of x; zeros in the first. Differentiable."""
        return _FromPrevious.apply(x, self)

    def gathered(self, x: Tensor) -> Tensor:
        """x [B, n, ...] of all processes, [B, size * n, ...]. Differentiable; gradients are added in order of rank."""
        return _Gathered.apply(x, self)

    def _shifted(self, x: Tensor, by: int) -> Tensor:
        """x of the process ``by`` ranks before; zeros where there is none."""
        out = torch.zeros_like(x, memory_format=torch.contiguous_format)
        transfers = []
        if 0 <= self.rank + by < self.size:
            transfers.append(
                dist.P2POp(dist.isend, x.contiguous(), group=self.group, group_peer=self.rank + by)
            )
        if 0 <= self.rank - by < self.size:
            transfers.append(dist.P2POp(dist.irecv, out, group=self.group, group_peer=self.rank - by))
        for request in dist.batch_isend_irecv(transfers) if transfers else ():
            request.wait()
        return out


class Stretch:
    """A call on a stretch, positions x [B, P, E]: to its layers, on a cache whose windows the process before has."""

    def __init__(self, parallel: ContextParallel, config: TrailmarkConfig, grid: Grid, x: Tensor) -> None:
        self.parallel, self.config = parallel, config
        B, P, window = len(x), grid.num_counted, config.sliding_window
        assert window is not None
        parallel.expect_alike(x)
        if grid.open_tokens.any():
            raise ValueError(
                f"input_ids: expected a stretch of whole chunks of {grid.chunk_size} tokens, got {x.shape[1]} "
                "positions. Choose texts whose length is a multiple of the processes' number times that."
            )
        least = least_stretch(config, parallel.size)
        if least > P:
            raise ValueError(
                f"input_ids: expected a stretch of at least the {least} positions that a window or the sinks ask for, "
                f"got {P}. Choose longer texts, or fewer processes that share one."
            )
        first = np.full(B, parallel.rank * P)
        span = Span(np.zeros(B, np.int64), first)
        self.call = WindowCall(span, first, np.full(B, P), P, window, x.device, config.num_sinks)

    def place(self, grid: Grid, x: Tensor) -> Place:
        return Place.of(self.config, grid, x, self.call)

    def window(self, layer: int) -> Window:
        return _Halo(self.config.sliding_window, self.config.num_sinks, self.parallel)

    def commit(self) -> None:
        """Nothing stays."""


class _Halo(Window):
    """A layer's window at the beginning of a stretch.

    The first process, too, passes something on and takes something: so all of them take part in each transfer, in the
    backward pass as well.
    """

    def __init__(self, window: int | None, sinks: int, parallel: ContextParallel) -> None:
        super().__init__(window, sinks)
        self.parallel = parallel

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        call: WindowCall = args[0]
        assert self.window is not None
        kv = torch.cat([key_states, value_states], dim=1)  # [B, 2 J, P, D]
        halo = self.window - 1
        before = self.parallel.from_previous(kv[:, :, kv.shape[2] - halo :])
        joined = torch.cat([before, kv], dim=2)[:, :, halo - call.carried :]
        if self.sinks:
            first = self.parallel.gathered(kv[:, :, : self.sinks].transpose(1, 2)).transpose(1, 2)
            joined = torch.cat([first[:, :, : self.sinks], joined], dim=2)
            if call.from_the_start:  # they are among the others
                joined = joined[:, :, self.sinks :]
        k, v = joined.chunk(2, dim=1)
        return k, v


class _FromPrevious(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: ContextParallel) -> Tensor:
        ctx.parallel = parallel
        return parallel._shifted(x, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.parallel._shifted(grad, -1), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: ContextParallel) -> Tensor:
        ctx.parallel = parallel
        size, (B, n) = parallel.size, x.shape[:2]
        # of each process one after the other; where there is one text, that is how its chunks lie
        out = x.new_empty(size, B, n, *x.shape[2:])
        dist.all_gather(list(out.unbind()), x.contiguous(), group=parallel.group)
        return out.transpose(0, 1).reshape(B, size * n, *x.shape[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parallel = ctx.parallel
        sent = grad.unflatten(1, (parallel.size, -1)).transpose(0, 1).contiguous()  # of one text, no copy
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=parallel.group)
        # in the order of ranks, in float32 or wider: the sum repeats bit for bit (guarantee 7)
        total = received[0].to(torch.promote_types(grad.dtype, torch.float32), copy=True)
        for part in received[1:]:
            total += part
        return total.to(grad.dtype), None


def least_stretch(config: TrailmarkConfig, size: int) -> int:
    """The fewest positions that windows count of a stretch of a text that so many processes share.

    What a window shows before a stretch lies with one process; sinks may lie with several.
    """
    assert config.sliding_window is not None
    return max(2, config.sliding_window - 1, -(-config.num_sinks // size))


def gathered_bytes(config: TrailmarkConfig, length: int, itemsize: int) -> int:
    """Of all chunks of a text of ``length`` tokens, which each process that shares it has: keys, values, landmarks."""
    chunk_size = getattr(config, "chunk_size", None)
    if chunk_size is None or not config.retrieves:
        return 0
    kept = length * kv_width(config) * getattr(config, "kv_per_chunk", 1)
    return (kept + length // chunk_size * config.hidden_size) * itemsize


def share_texts(model: TrailmarkForCausalLM, group: dist.ProcessGroup) -> None:
    """Let the processes of ``group`` share each text that the model is called with, from now on.

    Each passes its own stretch, [B, T / size] tokens in the order of ranks, and gets its logits; all pass as many, of
    as many texts. A loss is then a sum over processes, and so are the gradients of weights. Chunks that were selected
    are counted through the whole text, and of retrieval scores each process gets the rows of its own chunks. The texts
    are whole: no cache, padding, documents or early landmarks; in training ``noise_seed`` is that of the texts, the
    same in all. ``model.context_parallel = None`` ends it.

    Raises:
        ValueError: an architecture or a configuration whose texts cannot be shared.
    """
    expect_shareable(type(model), model.config)
    model.context_parallel = ContextParallel(group)


def expect_whole(call: Call) -> None:
    """Raise a ValueError where what is asked of a stretch needs more than the stretch."""
    named = {
        "past_key_values": call.cache,
        "labels": call.labels,
        "attention_mask": call.present,
        "document_ids": call.document_ids,
        "close_chunk": call.close_chunk if call.close_chunk is not False else None,
        "neighbours": call.given,
        "logits_at": call.logits_at,
        "logits_to_keep": call.logits_to_keep or None,
    }
    for name, came in named.items():
        if came is not None:
            raise ValueError(
                f"{name}: expected none of a model whose texts several processes share: these are whole, and what a "
                "stretch's last token predicts lies with the next process. Set model.context_parallel = None first."
            )


def expect_shareable(architecture: type[TrailmarkForCausalLM], config: TrailmarkConfig) -> None:
    """Raise a ValueError where a model's texts cannot be shared by several processes."""
    name, retriever = architecture.__name__, getattr(config, "retriever", "causal")
    ways = "Train each text by one process (training.context_parallel=1)"
    if not architecture.shares_texts:
        raise ValueError(
            f"context_parallel: expected a drt or a sliding_window model, got {name}: its texts cannot be shared. "
            f"{ways}."
        )
    if len(set(config.windows)) > 1 or config.sliding_window is None:
        raise ValueError(
            f"context_parallel: expected a model whose layers have one window, got sliding_window "
            f"{config.sliding_window} and {len(set(config.windows))} kinds of layers. {ways}."
        )
    if retriever == "encoder":
        raise ValueError(
            "context_parallel: expected retriever 'causal' or 'random', got 'encoder': its chunks are found beside the "
            f"model. {ways}."
        )
