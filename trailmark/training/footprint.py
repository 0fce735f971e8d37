"""What a micro-batch keeps and computes, without its memory: a model's own code on tensors that have shapes alone.

A ledger notes each tensor that begins or ends and each matrix product. What repeats is run a few times and
extrapolated: layers of a kind, and the rows of a large batch. Numbers that layouts are made of (integers, masks) are
real; whatever scores would choose is number 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn

from trailmark.models import TrailmarkConfig
from trailmark.models.answers import LayerKind
from trailmark.models.layers import slopes_like
from trailmark.models.size import without_weights
from trailmark.ops import block_attention, sliding_window_attention
from trailmark.training.config import Precision
from trailmark.training.ledger import Ledger, without_memory
from trailmark.training.loss import weighted_loss
from trailmark.training.parts import WHOLE, Parts
from trailmark.training.trainer import checkpoint_activations

_LAYERS = 2  # of a kind (and of a group) that are run at most: what the one before the last keeps, each further keeps
_WHOLE_TOKENS = 4096  # of a micro-batch that is run whole; of a larger one, two rows and three


@dataclass(frozen=True)
class Settings:
    """Of the training that a micro-batch is part of; ``positions``: the share of tokens that bear loss; ``slab``: how
    many of them have their logits at a time, None: all.
    """

    length: int
    precision: Precision
    dtype: torch.dtype
    checkpointing: bool
    accumulates: bool
    kernels: bool  # those of CUDA
    parts: Parts = WHOLE
    positions: float = 1.0
    slab: int | None = None


@dataclass
class _Kind:
    """Layers that are alike, of which ``more`` are not run."""

    of: LayerKind
    more: int
    kept: float = 0.0  # bytes of a layer that is not run, from its forward to its backward
    gradients: int = 0  # bytes of one
    flops: float = 0.0  # of one's forward
    spared: float = 0.0  # bytes that a layer does not keep with the kernels of CUDA

    @property
    def layers(self) -> list[nn.Module]:
        """Those that are run."""
        return list(self.of.layers)

    def stand(self, arrived: set[Tensor]) -> tuple[bool, int]:
        """Of a backward: whether some gradient of these came, and how many layers lack one."""
        came = [[parameter in arrived for parameter in _trained(layer)] for layer in self.layers]
        # of a layer that is not trained nobody hears when its backward ends
        return any(map(any, came)), sum(not (of_layer and all(of_layer)) for of_layer in came)


class _Apart:
    """What is made outside the layers (``ModelAnswers.made_for_layers``) for those that are not run."""

    def __init__(self, model: Any, whole: Any, ledger: Ledger) -> None:
        self.kept = self.flops = self.gradients = 0.0
        self._trained: list[nn.Parameter] = []
        made, full = model.made_for_layers(), whole.made_for_layers()
        if made is None or full is None:
            return
        (projection, count), more = made, full[1] - made[1]
        began: list[int] = []  # FLOPs before it

        def end(_: nn.Module, __: Any, out: Tensor) -> None:
            self.kept = out.nbytes * more / count
            self.flops = (ledger.flops - began.pop()) * more / count

        projection.register_forward_pre_hook(lambda *_: began.append(ledger.flops))
        projection.register_forward_hook(end)
        self._trained = _trained(projection)
        self.gradients = sum(p.nbytes for p in self._trained) * more / count

    def stand(self, arrived: set[Tensor]) -> tuple[float, float]:
        """Of a backward in which these gradients came: bytes without and with those of its own gradients."""
        if arrived.issuperset(self._trained):
            return 0.0, self.gradients
        # with the gradient of what was made, from the first reader on
        return self.kept * (1 + bool(arrived)), 0.0


@dataclass
class Footprint:
    """Numbers of a micro-batch, without weights, states and gradients from before."""

    forward_flops: float
    flops: float
    activations: float
    # after each gradient of a parameter, in their order: the most since the one before, without and with gradients
    peaks: list[tuple[float, float]]

    def plus(self, other: Footprint, times: int) -> Footprint:
        """This and ``times`` the difference to ``other``, which had one row less."""

        def on(x: float, y: float) -> float:
            return x + times * (x - y)

        peaks = [(on(a, c), on(b, d)) for (a, b), (c, d) in zip(self.peaks, other.peaks, strict=True)]
        flops = on(self.forward_flops, other.forward_flops), on(self.flops, other.flops)
        return Footprint(*flops, on(self.activations, other.activations), peaks)


def uniform(rows: int, length: int) -> dict[str, Tensor]:
    """A batch that is text from end to end."""
    ids = torch.zeros(rows, length, dtype=torch.int64)
    seeds = torch.zeros(rows, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids, "loss_weights": torch.ones(ids.shape), "noise_seed": seeds}


def footprint(config: TrailmarkConfig, settings: Settings, batch: dict[str, Tensor]) -> Footprint:
    """Of one micro-batch, of the tensors of a training batch by name."""
    rows = len(batch["input_ids"])
    if rows <= 3 or rows * settings.length <= _WHOLE_TOKENS:
        return _run(config, settings, batch)
    # a single row is no measure: what is copied for several is a view then. All are as long as the longest
    marks = _marks(batch)
    chosen = [int(marks.argmin()), int(marks.argmax()), int(marks.argmax())]
    three, two = ({key: x[chosen[:count]] for key, x in batch.items()} for count in (3, 2))
    return _run(config, settings, three).plus(_run(config, settings, two), rows - 3)


def _marks(batch: dict[str, Tensor]) -> Tensor:
    """int64 [rows]: tokens after which a chunk ends early, or a document."""
    marks = torch.zeros(len(batch["input_ids"]), dtype=torch.int64)
    if (close := batch.get("close_chunk")) is not None:
        marks += close.sum(1)
    if (documents := batch.get("document_ids")) is not None:
        marks += (documents.diff(dim=1) != 0).sum(1)
    return marks


def _run(config: TrailmarkConfig, settings: Settings, batch: dict[str, Tensor]) -> Footprint:
    """One micro-batch, of a model with fewer layers, and what the others add."""
    rows = len(batch["input_ids"])
    model = without_weights(config.with_fewer_layers(_LAYERS)).train()
    settings.parts.apply(model)
    if getattr(config, "retriever", None) == "encoder":
        model.embedder = _Embedder(getattr(config, "embedder_fingerprint", None) or "")
    ledger = Ledger()
    without_memory(model, ledger, settings.dtype)
    whole = without_weights(config)
    settings.parts.apply(whole)
    kinds = [
        _Kind(kind, len(full.layers) - len(kind.layers))
        for kind, full in zip(model.layer_kinds(), whole.layer_kinds(), strict=True)
    ]
    apart = _Apart(model, whole, ledger)
    began: dict[nn.Module, tuple[int, int]] = {}  # bytes and FLOPs before a layer
    for layer in model.split_layers():
        layer.register_forward_pre_hook(
            lambda layer, _: began.setdefault(layer, (ledger.live, ledger.flops)) and None
        )
    # (most bytes, bytes of gradients, the stand of each kind, and of what is made for layers)
    cuts: list[tuple[int, int, list[tuple[bool, int]], tuple[float, float]]] = []
    arrived: set[Tensor] = set()  # whose gradients came

    def cut(parameter: Tensor | None) -> None:
        gradients = 0 if settings.accumulates else sum(x.nbytes for x in arrived)
        cuts.append((ledger.peak, gradients, [kind.stand(arrived) for kind in kinds], apart.stand(arrived)))
        ledger.peak = ledger.live
        if parameter is not None:
            arrived.add(parameter)

    for parameter in _trained(model):
        if settings.accumulates:
            parameter.grad = ledger.empty(parameter.shape, settings.dtype)
        parameter.register_post_accumulate_grad_hook(cut)
    if settings.checkpointing:
        checkpoint_activations(model)
    before = ledger.live
    with ledger:
        called = _AsTrained(model, settings.precision)
        loss, out, *_ = weighted_loss(called, batch, positions=settings.positions, slab=settings.slab)
        chunks = out.retrieval[0].indices.shape[1] if out.retrieval else 0
        del out, _
        activations, forward_flops = ledger.live - before, ledger.flops
        loss.backward()
    cut(None)

    _measure_kinds(kinds, began, settings.dtype)
    if settings.kernels:
        _measure_kernels(kinds, config, settings, rows, chunks)
    every = 0.0 if settings.checkpointing else 1.0
    peaks = []
    for peak, gradients, stand, (made, of_making) in cuts:
        other = peak - before - gradients + made
        grads = gradients + (0.0 if settings.accumulates else of_making)
        for kind, (some, unfinished) in zip(kinds, stand, strict=True):
            spared = unfinished * every + (some and unfinished > 0) * (1 - every)
            other -= kind.spared * spared
            mine = 0 if settings.accumulates else kind.gradients
            kept = kind.kept - kind.spared * every
            # among the first layers of a kind the others' activations are there, among the last their gradients
            if not some or (unfinished and kept >= mine):
                other += kind.more * kept
            else:
                grads += kind.more * mine
        peaks.append((other, grads))
    added = apart.kept + sum(kind.more * (kind.kept - kind.spared * every) for kind in kinds)
    less = sum(len(kind.layers) * kind.spared * every for kind in kinds)
    flops = forward_flops + apart.flops + sum(kind.more * kind.flops for kind in kinds)
    return Footprint(flops, flops * ledger.flops / forward_flops, activations + added - less, peaks)


class _Embedder:
    """One that finds the first chunks, at no cost."""

    size = 1

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint

    def __call__(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros(len(ids), self.size)
        return zeros, zeros


class _AsTrained:
    """Calls the model as accelerate does in mixed precision."""

    def __init__(self, model: Any, precision: Precision) -> None:
        self.module = model
        self._call = model
        if precision == "bfloat16":
            self._call = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.__call__))

    def __call__(self, **inputs: Any) -> Any:
        return self._call(**inputs)


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _measure_kinds(kinds: list[_Kind], began: dict[nn.Module, tuple[int, int]], dtype: torch.dtype) -> None:
    """What a layer that is not run would keep and compute: as the last but one that is run.

    ``began`` has, in the order in which layers ran, the bytes and FLOPs before each.
    """
    order = list(began)

    def between(layer: nn.Module, other: nn.Module) -> tuple[int, int]:
        (kept, flops), (after, more_flops) = began[layer], began[other]
        return after - kept, more_flops - flops

    before: _Kind | None = None
    for kind in kinds:
        if kind.more:
            kind.gradients = sum(p.numel() for p in _trained(kind.layers[0])) * dtype.itemsize
            if kind.of.opens_group:
                assert before is not None
                of_group = len(before.layers) // len(kind.layers)
                # where a group is one layer, what lies between two layers is the whole group
                kept, flops = between(before.layers[0], before.layers[of_group])
                kind.kept, kind.flops = kept - of_group * before.kept, flops - of_group * before.flops
            else:
                last = kind.layers[-2]
                kind.kept, kind.flops = between(last, order[order.index(last) + 1])
        before = kind


def _measure_kernels(
    kinds: list[_Kind], config: TrailmarkConfig, settings: Settings, rows: int, chunks: int
) -> None:
    """What layers do not keep where kernels attend: those of CUDA keep q, k, v and a number per row and head."""
    marks = int(config.has_landmarks)  # positions more than tokens, of a chunk
    sizes = {
        "window": (rows, settings.length + marks * chunks),
        "chunks": (rows * chunks, getattr(config, "chunk_size", 0) + marks),
    }
    spared = {"nothing": 0.0}
    for attends in {kind.of.attends for kind in kinds} - spared.keys():
        spared[attends] = _spared(config, settings, *sizes[attends], attends == "chunks")
    for kind in kinds:
        kind.spared = spared[kind.of.attends]


def _spared(
    config: TrailmarkConfig, settings: Settings, rows: int, length: int, bidirectional: bool
) -> float:
    """Bytes that the torch path of attention keeps of one layer, less those that a kernel keeps."""
    H, J = config.num_attention_heads, config.num_key_value_heads
    assert J is not None
    dtype = torch.bfloat16 if settings.precision == "bfloat16" else settings.dtype
    ledger = Ledger()
    weight = nn.Parameter(ledger.empty(torch.Size((rows, length, H + 2 * J, config.head_dim)), dtype))
    if not rows:
        return 0
    with ledger:
        before, qkv = ledger.live, weight * 1
        own = qkv.nbytes
        q, k, v = qkv.split((H, J, J), dim=2)
        if bidirectional:
            out: Any = block_attention(q, k, v, None, config.head_dim**-0.5)
        else:
            slopes = slopes_like(q) if config.window_position == "alibi" else None
            out = sliding_window_attention(q, k, v, config.sliding_window, alibi_slopes=slopes)
        del qkv, q, k, v
        kept = ledger.live - before - out.nbytes
    return kept - own - 4 * rows * length * H
