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

    def from_previous(self, x: Tensor) -> Tensor:
        """What the process before has in the place of x; zeros in the first. Differentiable."""
        return _FromPrevious.apply(x, self)

    def gathered(self, x: Tensor) -> Tensor:
        """x [B, n, ...] of all processes, [B, size * n, ...]. Differentiable; gradients are added in order of rank."""
        return _Gathered.apply(x, self)

    def stretch(self, config: TrailmarkConfig, grid: Grid, x: Tensor) -> Stretch:
        """Where positions x [B, P, E] of a call stand in their texts."""
        return Stretch(self, config, grid, x)

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
    """A call on a stretch: to its layers, one on a cache whose windows lie with the process before."""

    def __init__(self, parallel: ContextParallel, config: TrailmarkConfig, grid: Grid, x: Tensor) -> None:
        self.parallel, self.config = parallel, config
        B, P, window = len(x), grid.num_counted, config.sliding_window
        assert window is not None
        if grid.open_tokens.any():
            raise ValueError(
                f"input_ids: expected a stretch of whole chunks of {grid.chunk_size} tokens, got {x.shape[1]} "
                "positions. Choose texts whose length is a multiple of the processes' number times that."
            )
        if parallel.size > 1 and window - 1 > P:
            raise ValueError(
                f"input_ids: expected a stretch of at least the {window - 1} positions before a token that its window "
                f"shows (sliding_window), got {P}. Choose longer texts, or fewer processes that share one."
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
        call: WindowCall = kwargs["call"] if "call" in kwargs else args[0]
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
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(parallel.size)]
        dist.all_gather(parts, x.contiguous(), group=parallel.group)
        return torch.cat(parts, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parallel = ctx.parallel
        sent = torch.stack(grad.chunk(parallel.size, dim=1))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=parallel.group)
        # in the order of ranks, in float32 or wider: the sum repeats bit for bit (guarantee 7)
        return received.to(torch.promote_types(grad.dtype, torch.float32)).sum(0).to(grad.dtype), None


def share_texts(model: TrailmarkForCausalLM, group: dist.ProcessGroup) -> None:
    """Let the processes of ``group`` share each text that the model is called with, from now on.

    Each passes its own stretch, [B, T / size] tokens in the order of ranks, and gets its logits. A loss is then a sum
    over processes, and so are the gradients of weights. The texts are whole: no cache, padding, documents or early
    landmarks. ``model.context_parallel = None`` ends it.

    Raises:
        ValueError: an architecture or a configuration whose texts cannot be shared.
    """
    expect_shareable(type(model), model.config)
    model.context_parallel = ContextParallel(group)


def expect_whole(call: Call) -> None:
    """Raise a ValueError where what is asked of a stretch needs more than the stretch."""
    beside = (call.present, call.cache, call.labels, call.document_ids, call.given, call.logits_at)
    if any(x is not None for x in beside) or call.close_chunk is not False or call.logits_to_keep:
        raise ValueError(
            "context_parallel: expected a call with input_ids and noise_seed alone, for the logits of all tokens: "
            "texts that are shared are whole, and what a stretch's last token predicts lies with the next process. "
            "Set context_parallel to None for other calls."
        )


def expect_shareable(architecture: type[TrailmarkForCausalLM], config: TrailmarkConfig) -> None:
    """Raise a ValueError where a model's texts cannot be shared by several processes."""
    name, retriever = architecture.__name__, getattr(config, "retriever", "causal")
    if not architecture.shares_texts:
        raise ValueError(
            f"context_parallel: expected 1 for {name}, whose layers look further back than a window. A drt and a "
            "sliding_window model share texts."
        )
    if len(set(config.windows)) > 1 or config.sliding_window is None:
        raise ValueError(
            f"context_parallel: expected 1 for a model whose layers have no window, or several, got {config.windows}."
        )
    if retriever == "encoder":
        raise ValueError(
            "context_parallel: expected 1 with model.retriever 'encoder', whose chunks are found beside the model."
        )
