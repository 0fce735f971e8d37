"""What a run will cost before it starts: parameters, FLOPs, memory and time.

No formula describes the layers. A micro-batch goes forward and backward through the model's own code on tensors
that have shapes and no memory (torch's fake tensors), and a ledger notes each tensor that begins or ends and each
matrix product. What repeats is run a few times and extrapolated: layers of a kind, and the rows of a large batch.
Numbers that layouts are made of (integers, masks) are real; whatever scores would choose is number 0.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn

from trailmark.models import (
    MODELS,
    BlockRecurrentConfig,
    DRTConfig,
    LandmarkConfig,
    RPTConfig,
    TrailmarkConfig,
)
from trailmark.models.layers import slopes_like
from trailmark.ops import block_attention, sliding_window_attention
from trailmark.training.ledger import Ledger, without_memory
from trailmark.training.loss import weighted_loss
from trailmark.training.optimizer import MuonAdamW

Precision = Literal["float32", "bfloat16", "float64"]

_LAYERS = 2  # of a kind (and of a group) that are run at most: what the one before the last keeps, each further keeps
_WHOLE_TOKENS = 4096  # of a micro-batch that is run whole; of a larger one, two rows and three


@dataclass(frozen=True)
class Estimate:
    """Of a training run. Sizes are of one process in bytes; ``peak`` is what its tensors take at most at once.

    The parts do not add up to the peak: gradients come as activations go, and working memory comes on top.
    """

    parameters: int  # a tied embedding is counted once
    embedding_parameters: int  # of the vocabulary: the embedding, and the output projection if it is not tied
    forward_flops: float  # per token: two for each multiply-add of all matrix products
    executed_flops: (
        float  # per token: with the backward as it is computed and what checkpointing computes again
    )
    weights: int
    gradients: int
    optimizer_state: int
    activations: int  # kept by autograd of a micro-batch, when the backward begins; with what the loss keeps
    logits: int  # of a micro-batch in float32 or wider: the loss keeps one such tensor and makes two more
    peak: int
    peak_in: Literal["forward and backward", "optimizer step"]
    tokens_per_step: int  # of all processes
    world_size: int

    @property
    def other_parameters(self) -> int:
        return self.parameters - self.embedding_parameters

    @property
    def training_flops(self) -> float:
        """Per token, forward and backward: by convention three times the forward."""
        return 3 * self.forward_flops


def estimate(
    model_config: TrailmarkConfig,
    *,
    context_length: int,
    rows: int,
    micro_rows: int | None = None,
    world_size: int = 1,
    optimizer: Literal["adamw", "muon"] = "adamw",
    precision: Precision = "float32",
    gradient_checkpointing: bool = False,
    sharded: bool = False,
    device: Literal["cpu", "cuda"] = "cpu",
    batch: dict[str, Tensor] | None = None,
) -> Estimate:
    """What training will cost. The model is not allocated, nor anything else that is large.

    FLOPs are those of the torch path, as it computes them: with the scores in blocks of window attention that a mask
    hides, and with all chunks of a Landmark Attention slab. Those of weight updates are left out, and what an embedder
    computes that is asked online.

    Memory is that of tensors. Python and its libraries (0.4 to 0.6 GB), the text, and what the allocator cannot use
    again come on top.

    Args:
        context_length: T, tokens of a row. rows: of a step, over all processes. micro_rows: that a process takes at
            once; None: its whole part.
        precision: "bfloat16": autocast, the weights stay float32.
        sharded: FSDP2: weights, gradients and states are divided by ``world_size``; two gathered layers, what belongs
            to no layer, and their whole gradients come on top. Otherwise, with several processes: DDP, whose buckets
            hold the gradients once more.
        device: "cuda": window attention and the chunk encoder keep what their kernels keep instead of scores, and
            the optimizer takes all parameters at once. The rest is as on a CPU.
        batch: a micro-batch of the run, for its layout: early landmarks and documents make more chunks, padding makes
            texts of several lengths. input_ids, labels [rows, T], loss_weights, noise_seed [rows] and, where there are
            some, attention_mask, close_chunk, document_ids, neighbours, neighbour_scores; of a large one, the rows with
            the fewest and the most marks. None: uniform, without any of these.

    Raises:
        ValueError: a size below 1, rows that do not divide, an unknown optimizer, precision or device, a batch of
            another size.
    """
    micro, accumulates = _micro_batch(context_length, rows, micro_rows, world_size)
    for name, value, known in (
        ("optimizer", optimizer, ("adamw", "muon")),
        ("precision", precision, ("float32", "bfloat16", "float64")),
        ("device", device, ("cpu", "cuda")),
    ):
        if value not in known:
            raise ValueError(f"{name}: expected {' or '.join(map(repr, known))}, got {value!r}.")
    if batch is not None and batch["input_ids"].shape != (micro, context_length):
        raise ValueError(
            f"batch: expected input_ids of {micro} rows x {context_length} tokens, got "
            f"{' x '.join(map(str, batch['input_ids'].shape))}. Give a micro-batch of this run."
        )
    dtype = torch.float64 if precision == "float64" else torch.float32
    with torch.device("meta"):
        model: Any = MODELS[model_config.model_type](model_config)
    count = sum(p.numel() for p in model.parameters())
    vocabulary = {id(p): p.numel() for p in (model.embed_tokens.weight, model.lm_head.weight)}
    share = world_size if sharded else 1
    weights = count * dtype.itemsize
    state, update = _optimizer_memory(model, optimizer, dtype, device == "cuda", share)

    settings = _Settings(
        context_length, precision, dtype, gradient_checkpointing, accumulates, device == "cuda"
    )
    trace = _trace(model_config, settings, batch or _uniform(micro, context_length))
    fixed = -(-(weights + state) // share)  # at all times
    if sharded:
        fixed += -(-weights // share) if accumulates else 0
        layers = [sum(p.numel() for p in layer.parameters()) for layer in _layers(model)]
        fixed += 2 * (2 * max(layers) + count - sum(layers)) * dtype.itemsize if world_size > 1 else 0
    else:
        fixed += (weights if accumulates else 0) + (weights if world_size > 1 else 0)
    in_step = fixed + max(other + gradients / share for other, gradients in trace.peaks)
    in_update = -(-(2 * weights + state) // share) + update + (0 if sharded or world_size == 1 else weights)
    tokens = micro * context_length
    return Estimate(
        parameters=count,
        embedding_parameters=sum(vocabulary.values()),
        forward_flops=trace.forward_flops / tokens,
        executed_flops=trace.flops / tokens,
        weights=-(-weights // share),
        gradients=-(-weights // share),
        optimizer_state=-(-state // share),
        activations=round(trace.activations),
        logits=tokens * model_config.vocab_size * dtype.itemsize,
        peak=round(max(in_step, in_update)),
        peak_in="forward and backward" if in_step >= in_update else "optimizer step",
        tokens_per_step=rows * context_length,
        world_size=world_size,
    )


def seconds(estimate: Estimate, flops_per_second: float) -> float:
    """Of one optimizer step, if each process computes so many matrix FLOPs a second and nothing else takes time.

    At the speed of large matrix products (:func:`measure_flops_per_second`) a lower bound.
    """
    if not flops_per_second > 0:
        raise ValueError(f"flops_per_second: expected a positive number, got {flops_per_second}.")
    return estimate.executed_flops * estimate.tokens_per_step / estimate.world_size / flops_per_second


def measure_flops_per_second(device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """FLOPs a second of a square matrix product, in well under a second: what a model's products come near at most.

    Args:
        dtype: what the run multiplies in: bfloat16 of bfloat16, float64 of float64.
    """
    device = torch.device(device)
    size = 512 if device.type == "cpu" else 4096
    x, y = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def run(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            x @ y
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    run(1)
    times = max(1, int(0.05 / max(run(1), 1e-6)))
    return 2 * size**3 * times / min(run(times) for _ in range(3))


def describe(
    estimate: Estimate, flops_per_second: float | None = None, steps: int | None = None
) -> list[str]:
    """Lines for people: parameters, FLOPs per token, memory by part and at most, time at a speed."""
    each = " of each process" if estimate.world_size > 1 else ""
    lines = [
        f"parameters: {_number(estimate.parameters)} ({_number(estimate.embedding_parameters)} of the vocabulary, "
        f"{_number(estimate.other_parameters)} other)",
        f"FLOPs per token: {_number(estimate.training_flops)} forward and backward (three times the forward), "
        f"{_number(estimate.executed_flops)} as computed",
        f"memory{each}: {_size(estimate.peak)} of tensors at most, in the {estimate.peak_in}",
        f"  weights {_size(estimate.weights)}, gradients {_size(estimate.gradients)}, "
        f"optimizer {_size(estimate.optimizer_state)}, activations {_size(estimate.activations)} "
        f"(logits {_size(estimate.logits)})",
    ]
    if flops_per_second is not None:
        each_step = seconds(estimate, flops_per_second)
        whole = "" if steps is None else f", {_time(each_step * steps)} for {steps} steps"
        lines.append(
            f"time: at least {_time(each_step)} per step of {estimate.tokens_per_step} tokens{whole}, at the speed of "
            f"large matrix products ({_number(flops_per_second)} FLOPs a second)"
        )
    return lines


def _number(value: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _size(value: float) -> str:
    return f"{_number(value)}B" if value < 1e3 else f"{_number(value)[:-1]} {_number(value)[-1]}B"


def _time(value: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if value >= 2 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} seconds"


def _micro_batch(length: int, rows: int, micro_rows: int | None, world_size: int) -> tuple[int, bool]:
    """Rows that a process takes at once, and whether a step takes several such turns."""
    named = {"context_length": length, "rows": rows, "world_size": world_size}
    for name, value in (named if micro_rows is None else named | {"micro_rows": micro_rows}).items():
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}.")
    micro = max(1, rows // world_size) if micro_rows is None else micro_rows
    if rows % (micro * world_size):
        raise ValueError(
            f"rows: expected a multiple of {micro * world_size} (micro_rows {micro} x world_size {world_size}), "
            f"got {rows}."
        )
    return micro, rows > micro * world_size


def _optimizer_memory(
    model: Any, name: str, dtype: torch.dtype, foreach: bool, share: int
) -> tuple[int, int]:
    """Bytes of all states, and of what an update needs in a process beside its weights, gradients and states.

    Of Muon, what is gathered is whole in each process, whatever its ``share``.
    """
    if (
        name == "adamw"
    ):  # two averages and a count of steps; roots of one of them, of all parameters or one by one
        sizes = [p.numel() * dtype.itemsize for p in model.parameters()]
        return 2 * sum(sizes) + 4 * len(sizes), -(-(sum(sizes) if foreach else 2 * max(sizes)) // share)
    ledger = Ledger()
    without_memory(model, ledger, dtype)
    optimizer = MuonAdamW(model)

    def most(parameters: Iterable[nn.Parameter]) -> int:
        """Beside all else, in a step of these."""
        model.zero_grad()
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        ledger.peak = ledger.live
        optimizer.step()
        return ledger.peak - ledger.live

    with ledger:
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        before = ledger.live
        optimizer.step()
        state = ledger.live - before
        if share == 1:
            return state, most(model.parameters())
        alike: dict[Any, list[nn.Parameter]] = {}  # portions, one of a kind
        matrices: set[nn.Parameter] = set()
        for portion in optimizer.portions(sharded=True):
            parameters = [parameter for parameter, _ in portion]
            alike[parameters[0].shape, portion[0][1], len(portion)] = parameters
            matrices.update(parameters)
        # a gathered portion's changes are not made in place
        changes = [most(parameters) + sum(p.nbytes for p in parameters) for parameters in alike.values()]
        rest = most(p for p in model.parameters() if p not in matrices)
    return state, max(-(-rest // share), *changes)


# --- a micro-batch -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Settings:
    length: int
    precision: Precision
    dtype: torch.dtype
    checkpointing: bool
    accumulates: bool
    kernels: bool  # those of CUDA


@dataclass
class _Kind:
    """Layers that are alike, of which ``more`` are not run."""

    layers: list[nn.Module]
    more: int
    attends: Literal["window", "chunks", "nothing"] = "window"  # what its attention is over
    kept: float = 0.0  # bytes of a layer that is not run, from its forward to its backward
    gradients: int = 0  # bytes of one
    flops: float = 0.0  # of one's forward
    spared: float = 0.0  # bytes that a layer does not keep with the kernels of CUDA


@dataclass
class _Trace:
    """Numbers of a micro-batch, without weights, states and gradients from before."""

    forward_flops: float
    flops: float
    activations: float
    # after each gradient of a parameter, in their order: the most since the one before, without and with gradients
    peaks: list[tuple[float, float]]

    def plus(self, other: _Trace, times: int) -> _Trace:
        """This and ``times`` the difference to ``other``, which had one row less."""

        def on(x: float, y: float) -> float:
            return x + times * (x - y)

        peaks = [(on(a, c), on(b, d)) for (a, b), (c, d) in zip(self.peaks, other.peaks, strict=True)]
        flops = on(self.forward_flops, other.forward_flops), on(self.flops, other.flops)
        return _Trace(*flops, on(self.activations, other.activations), peaks)


def _uniform(rows: int, length: int) -> dict[str, Tensor]:
    """A batch that is text from end to end."""
    ids = torch.zeros(rows, length, dtype=torch.int64)
    seeds = torch.zeros(rows, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids, "loss_weights": torch.ones(ids.shape), "noise_seed": seeds}


def _trace(config: TrailmarkConfig, settings: _Settings, batch: dict[str, Tensor]) -> _Trace:
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


def _run(config: TrailmarkConfig, settings: _Settings, batch: dict[str, Tensor]) -> _Trace:
    """One micro-batch, of a model with fewer layers, and what the others add."""
    rows = len(batch["input_ids"])
    with torch.device("meta"):
        model: Any = MODELS[config.model_type](_fewer_layers(config)).train()
    if getattr(config, "retriever", None) == "encoder":
        model.embedder = _Embedder(getattr(config, "embedder_fingerprint", None) or "")
    ledger = Ledger()
    without_memory(model, ledger, settings.dtype)
    kinds = _kinds(model, config)
    began: dict[nn.Module, tuple[int, int]] = {}  # bytes and FLOPs before a layer
    for layer in _layers(model):
        layer.register_forward_pre_hook(
            lambda layer, _: began.setdefault(layer, (ledger.live, ledger.flops)) and None
        )
    waiting = [{layer: len(list(layer.parameters())) for layer in kind.layers} for kind in kinds]
    of_parameter: dict[Tensor, tuple[int, nn.Module]] = {
        parameter: (number, layer)
        for number, kind in enumerate(kinds)
        for layer in kind.layers
        for parameter in layer.parameters()
    }
    # (most bytes, bytes of gradients, of each kind: whether some gradient came, layers without all of theirs)
    cuts: list[tuple[int, int, list[tuple[bool, int]]]] = []
    arrived = 0

    def cut(parameter: Tensor | None) -> None:
        nonlocal arrived
        stand = [
            (any(left < len(list(layer.parameters())) for layer, left in kind.items()),
             sum(left > 0 for left in kind.values()))
            for kind in waiting
        ]  # fmt: skip
        cuts.append((ledger.peak, arrived, stand))
        ledger.peak = ledger.live
        if parameter is not None:
            arrived += 0 if settings.accumulates else parameter.nbytes
            if parameter in of_parameter:
                number, layer = of_parameter[parameter]
                waiting[number][layer] -= 1

    for parameter in model.parameters():
        if settings.accumulates:
            parameter.grad = ledger.empty(parameter.shape, settings.dtype)
        parameter.register_post_accumulate_grad_hook(cut)
    if settings.checkpointing:
        enable = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})
    before = ledger.live
    with ledger:
        called = _AsTrained(model, settings.precision)
        loss, out, labels = weighted_loss(called, isinstance(config, DRTConfig | RPTConfig), batch)
        chunks = out.retrieval[0].indices.shape[1] if out.retrieval else 0
        del out, labels
        activations, forward_flops = ledger.live - before, ledger.flops
        loss.backward()
    cut(None)

    _measure_kinds(kinds, _layers(model), began, settings.dtype)
    if isinstance(config, DRTConfig):
        _measure_groups(kinds, began)
    if settings.kernels:
        _measure_kernels(kinds, config, settings, rows, chunks)
    every = 0.0 if settings.checkpointing else 1.0
    peaks = []
    for peak, gradients, stand in cuts:
        other, grads = float(peak - before - gradients), float(gradients)
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
    added = sum(kind.more * (kind.kept - kind.spared * every) for kind in kinds)
    less = sum(len(kind.layers) * kind.spared * every for kind in kinds)
    whole = forward_flops + sum(kind.more * kind.flops for kind in kinds)
    return _Trace(whole, whole * ledger.flops / forward_flops, activations + added - less, peaks)


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


def _fewer_layers(config: TrailmarkConfig) -> TrailmarkConfig:
    """The same model with few layers of a kind, and two groups."""
    # one more: Landmark Attention makes tables in the first layer that all share
    fields: dict[str, Any] = {"num_hidden_layers": min(config.num_hidden_layers, _LAYERS + 1)}
    if isinstance(config, DRTConfig):
        assert config.num_lower_layers is not None
        groups = min(config.num_retrieval_groups, 2)
        of_group = config.num_upper_layers // config.num_retrieval_groups
        lower, upper = min(config.num_lower_layers, _LAYERS), groups * min(of_group, _LAYERS)
        fields = {"num_hidden_layers": lower + upper, "num_lower_layers": lower}
        fields |= {"num_retrieval_groups": groups}
        fields |= {"num_encoder_layers": min(config.num_encoder_layers, _LAYERS)}
    if isinstance(config, RPTConfig):
        assert config.num_lower_layers is not None
        lower = min(config.num_lower_layers, _LAYERS)
        upper = min(config.num_upper_layers, _LAYERS * config.cross_attention_every)
        fields = {"num_hidden_layers": lower + upper, "num_lower_layers": lower}
        fields |= {"num_encoder_layers": min(config.num_encoder_layers, _LAYERS)}
    if isinstance(config, BlockRecurrentConfig):
        below, above = (min(count, _LAYERS) for count in _around(config))
        fields = {"num_hidden_layers": below + 1 + above, "recurrent_layer": below + 1}
    made: TrailmarkConfig = type(config).from_dict(config.to_dict() | fields)
    return made


def _around(config: BlockRecurrentConfig) -> tuple[int, int]:
    """Layers before and after the recurrent one."""
    assert config.recurrent_layer is not None
    return config.recurrent_layer - 1, config.num_hidden_layers - config.recurrent_layer


def _layers(model: Any) -> list[nn.Module]:
    """In the order of the forward."""
    if isinstance(model.config, DRTConfig | RPTConfig):
        return [*model.lower_layers, *model.encoder.layers, *model.upper_layers]
    if isinstance(model.config, BlockRecurrentConfig):
        return [*model.lower_layers, model.recurrent_layer, *model.upper_layers]
    return list(model.layers)


def _kinds(model: Any, config: TrailmarkConfig) -> list[_Kind]:
    """In the order of the forward; of a DRT the last is that of retrievers, one for each group."""

    def kind(layers: Iterable[nn.Module], count: int, attends: Any = "window") -> _Kind:
        own = list(layers)
        return _Kind(own, count - len(own), attends)

    if isinstance(config, BlockRecurrentConfig):
        below, above = _around(config)
        parts = (model.lower_layers, below), ([model.recurrent_layer], 1), (model.upper_layers, above)
        return [kind(layers, count) for layers, count in parts]
    if not isinstance(config, DRTConfig | RPTConfig):
        return [kind(model.layers, config.num_hidden_layers)]
    assert config.num_lower_layers is not None
    lower = kind(model.lower_layers, config.num_lower_layers)
    encoder = kind(model.encoder.layers, config.num_encoder_layers, "chunks")
    if isinstance(config, DRTConfig):
        groups = config.num_retrieval_groups if config.scores_chunks else 0
        upper = kind(model.upper_layers, config.num_upper_layers)
        return [lower, encoder, upper, kind(model.retrievers, groups, "nothing")]
    reading = -(-config.num_upper_layers // config.cross_attention_every)
    return [
        lower,
        encoder,
        kind((layer for layer in model.upper_layers if layer.reads), reading),
        kind((layer for layer in model.upper_layers if not layer.reads), config.num_upper_layers - reading),
    ]


def _measure_kinds(
    kinds: list[_Kind], order: list[nn.Module], began: dict[nn.Module, tuple[int, int]], dtype: torch.dtype
) -> None:
    """What a layer that is not run would keep and compute: as the last but one that is run."""
    for kind in kinds:
        if kind.more:
            kind.gradients = sum(p.numel() for p in kind.layers[0].parameters()) * dtype.itemsize
            if kind.layers[0] in began:
                last = kind.layers[-2]
                (kept, flops), (after, more_flops) = began[last], began[order[order.index(last) + 1]]
                kind.kept, kind.flops = after - kept, more_flops - flops


def _measure_groups(kinds: list[_Kind], began: dict[nn.Module, tuple[int, int]]) -> None:
    """What a group of a DRT adds beside its layers."""
    upper, groups = kinds[-2], kinds[-1]
    if groups.more:
        of_group = len(upper.layers) // len(groups.layers)
        (kept, flops), (after, more_flops) = began[upper.layers[0]], began[upper.layers[of_group]]
        # where a group is one layer, what lies between two layers is the whole group
        groups.kept = after - kept - of_group * upper.kept
        groups.flops = more_flops - flops - of_group * upper.flops


def _measure_kernels(
    kinds: list[_Kind], config: TrailmarkConfig, settings: _Settings, rows: int, chunks: int
) -> None:
    """What layers do not keep where kernels attend: those of CUDA keep q, k, v and a number per row and head."""
    if isinstance(config, LandmarkConfig):
        return  # nor do its torch paths keep more
    marks = int(config.has_landmarks)  # positions more than tokens, of a chunk
    spared = {"nothing": 0.0}
    spared["window"] = _spared(config, settings, rows, settings.length + marks * chunks, False)
    if isinstance(config, DRTConfig | RPTConfig):
        spared["chunks"] = _spared(config, settings, rows * chunks, config.chunk_size + marks, True)
    for kind in kinds:
        kind.spared = spared[kind.attends]


def _spared(
    config: TrailmarkConfig, settings: _Settings, rows: int, length: int, bidirectional: bool
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
