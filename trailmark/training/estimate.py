"""What a run will cost before it starts: parameters, FLOPs, memory and time.

No formula describes the layers: a micro-batch goes through the model's own code (:mod:`trailmark.training.footprint`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trailmark.models import TrailmarkConfig
from trailmark.models.size import without_weights
from trailmark.training.config import Precision
from trailmark.training.footprint import Settings, footprint, uniform
from trailmark.training.ledger import Ledger, without_memory
from trailmark.training.optimizer import MuonAdamW
from trailmark.training.parts import WHOLE, Parts


@dataclass(frozen=True)
class Estimate:
    """Of a training run. Sizes are of one process in bytes; ``peak`` is what its tensors take at most at once.

    The parts do not add up to the peak: gradients come as activations go, and working memory comes on top.
    """

    parameters: int  # a tied embedding is counted once; with adapters
    trained: int  # parameters
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
    teacher: int = 0  # bytes of its weights, whole in each process

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
    parts: Parts = WHOLE,
    loss_positions: float = 1.0,
    loss_slab: int | None = None,
    gathered: int = 0,
    teacher_parameters: int = 0,
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
        parts: what is trained, and adapters. loss_positions: share of the tokens whose logits are computed.
        loss_slab: tokens whose logits are there at a time; None: those of a micro-batch.
        gathered: bytes of a text's chunks that processes which share it have each, per row (``gathered_bytes``).
        teacher_parameters: of a teacher, 0: none. Its weights, its logits and two FLOPs per parameter and token are
            counted, not what its layers and its attention take in between.

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
    model = without_weights(model_config)
    parts.apply(model)
    count = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    vocabulary = {id(p): p.numel() for p in (model.embed_tokens.weight, model.lm_head.weight)}
    share = world_size if sharded else 1
    weights, gradients_whole = count * dtype.itemsize, trained * dtype.itemsize
    tokens = micro * context_length
    projected = micro * max(1, round(loss_positions * context_length))
    logits = (
        (projected if loss_slab is None else min(loss_slab, projected))
        * model_config.vocab_size
        * dtype.itemsize
    )
    half = precision == "bfloat16" and teacher_parameters
    teacher = teacher_parameters * (2 if half else dtype.itemsize)
    state, update = _optimizer_memory(model, optimizer, dtype, device == "cuda", share)

    settings = Settings(
        context_length,
        precision,
        dtype,
        gradient_checkpointing,
        accumulates,
        device == "cuda",
        parts,
        loss_positions,
        loss_slab,
    )
    found = footprint(model_config, settings, batch or uniform(micro, context_length))
    fixed = -(-(weights + state) // share) + teacher  # at all times
    if sharded:
        fixed += -(-gradients_whole // share) if accumulates else 0
        layers = [sum(p.numel() for p in layer.parameters()) for layer in model.split_layers()]
        fixed += 2 * (2 * max(layers) + count - sum(layers)) * dtype.itemsize if world_size > 1 else 0
    else:
        fixed += (gradients_whole if accumulates else 0) + (gradients_whole if world_size > 1 else 0)
    in_step = fixed + max(other + gradients / share for other, gradients in found.peaks)
    in_step += 3 * micro * gathered  # they, their gradients, and those of others for this process's
    in_step += 2 * logits if teacher else 0  # the teacher's, and the gradient that it adds
    in_update = -(-(weights + gradients_whole + state) // share) + update + teacher
    in_update += 0 if sharded or world_size == 1 else gradients_whole
    of_teacher = 2 * teacher_parameters
    return Estimate(
        parameters=count,
        trained=trained,
        embedding_parameters=sum(vocabulary.values()),
        forward_flops=found.forward_flops / tokens,
        executed_flops=found.flops / tokens + of_teacher,
        weights=-(-weights // share),
        gradients=-(-gradients_whole // share),
        optimizer_state=-(-state // share),
        activations=round(found.activations),
        logits=logits,
        peak=round(max(in_step, in_update)),
        peak_in="forward and backward" if in_step >= in_update else "optimizer step",
        tokens_per_step=rows * context_length,
        world_size=world_size,
        teacher=teacher,
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


def describe(estimate: Estimate, flops_per_second: float, steps: int) -> list[str]:
    """Lines for people: parameters, FLOPs per token, memory by part and at most, time at a speed."""
    each = " of each process" if estimate.world_size > 1 else ""
    part = "" if estimate.trained == estimate.parameters else f"; {_number(estimate.trained)} are trained"
    teacher = f", teacher {_size(estimate.teacher)}" if estimate.teacher else ""
    each_step = seconds(estimate, flops_per_second)
    return [
        f"parameters: {_number(estimate.parameters)} ({_number(estimate.embedding_parameters)} of the vocabulary, "
        f"{_number(estimate.other_parameters)} other){part}",
        f"FLOPs per token: {_number(estimate.training_flops)} forward and backward (three times the forward), "
        f"{_number(estimate.executed_flops)} as computed",
        f"memory{each}: {_size(estimate.peak)} of tensors at most, in the {estimate.peak_in}",
        f"  weights {_size(estimate.weights)}, gradients {_size(estimate.gradients)}, "
        f"optimizer {_size(estimate.optimizer_state)}, activations {_size(estimate.activations)} "
        f"(logits {_size(estimate.logits)}){teacher}",
        f"time: at least {_time(each_step)} per step of {estimate.tokens_per_step} tokens, {_time(each_step * steps)} "
        f"for {steps} steps, at the speed of large matrix products ({_number(flops_per_second)} FLOPs a second)",
    ]


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
        sizes = [p.numel() * dtype.itemsize for p in model.parameters() if p.requires_grad]
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

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with ledger:
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        before = ledger.live
        optimizer.step()
        state = ledger.live - before
        if share == 1:
            return state, most(trained)
        alike: dict[Any, list[nn.Parameter]] = {}  # portions, one of a kind
        matrices: set[nn.Parameter] = set()
        for portion in optimizer.portions(sharded=True):
            parameters = [parameter for parameter, _ in portion]
            alike[parameters[0].shape, portion[0][1], len(portion)] = parameters
            matrices.update(parameters)
        # a gathered portion's changes are not made in place
        changes = [most(parameters) + sum(p.nbytes for p in parameters) for parameters in alike.values()]
        rest = most(p for p in trained if p not in matrices)
    return state, max([-(-rest // share), *changes])
