"""What a run will cost: estimated from its sizes, and measured by a few steps."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil
import torch

from trailmark.models.context_parallel import gathered_bytes
from trailmark.processes import rank, world_size
from trailmark.training.estimate import Estimate, describe, estimate, measure_flops_per_second, seconds
from trailmark.training.loss import weighted_loss
from trailmark.training.run import Run
from trailmark.training.tasks import share_of
from trailmark.training.trainer import checkpoint_activations, make_optimizer
from trailmark.values import duration

_MOST_SECONDS = 60  # of two steps, at the speed of large matrix products, and of two texts of a fit
_MARGIN = 1.15  # what is allocated, at most, of what was estimated (tests/training/test_estimate.py)


def forecast(run: Run) -> Iterator[str]:
    """In lines for people; then texts are fitted and steps taken, if they fit into memory and a minute.

    The run is spent with it.
    """
    settings, cuda = run.config.training, torch.cuda.is_available()
    found, device = estimate_of(run), "cuda" if cuda else "cpu"
    speed = measure_flops_per_second(device, getattr(torch, settings.computes_in))
    yield from describe(found, speed, settings.steps)
    if texts := run.fitted_texts():
        yield f"The memory is fitted to {len(texts)} texts first."
    if run.sharing.processes > 1:
        yield "No step is taken with several processes: one process would not do what they do together."
        return
    free = torch.cuda.mem_get_info()[0] if cuda else psutil.virtual_memory().available
    if (need := _MARGIN * found.peak) > free:
        yield f"No step was taken: it may need {need / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free."
        return
    left = _MOST_SECONDS - 2 * seconds(found, speed)
    if left >= 0 and texts:  # Before the steps: a MemoryFit refuses a model whose layers read already.
        own = _seconds_of_fitted_texts(run, device, left)
        left -= sum(own)
        if len(own) == 1:
            yield f"Its first text took {own[0]:.2f} s; to measure a second one would take too long for that here."
        else:
            yield (
                f"To fit the memory, a text took {own[1]:.2f} s, after one to warm up: {duration(own[1] * len(texts))} "
                f"for all {len(texts)} of them, before the first step. Solving it comes on top."
            )
    if left < 0:
        yield "No step was taken to measure its time: it would take too long for that here."
        return
    took = seconds_per_step(run, 2)[-1]  # the first one warms caches
    hours = took * settings.steps / 3600
    yield f"A step took {took:.2f} s, after one to warm up: {hours:.2f} hours for all {settings.steps} of them."


def _seconds_of_fitted_texts(run: Run, device: str, most: float) -> list[float]:
    """Of the first, and of a second one if both take no more than ``most`` with what the first took."""
    run.model.to(device)
    fit, found = run.begin_fit(), list[float]()
    while len(found) < 2 and 2 * sum(found) <= most:
        began = time.perf_counter()
        fit.add(run.task.batch(0, 0, 1))
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return found


def estimate_of(run: Run) -> Estimate:
    """From the run's sizes alone."""
    settings, processes, sharing = run.config.training, run.sharing.processes, run.sharing
    rows, length = run.task.row_counts()[-1], settings.context_length
    chunks = 0
    if sharing.size > 1:  # stretches are as texts of their own, but for the chunks of all
        itemsize = getattr(torch, settings.computes_in).itemsize
        chunks = gathered_bytes(run.model_config, length, itemsize)
        rows, length = rows * sharing.size, length // sharing.size
    if run.config.data.task == "needles":  # the last level's texts are the longest
        length = run.curriculum.levels[-1].chunks * run.config.data.chunk_size
    return estimate(
        run.model_config,
        context_length=length,
        rows=rows,
        micro_rows=rows // (processes * run.micro),
        world_size=processes,
        optimizer=settings.optimizer,
        precision=settings.computes_in,
        gradient_checkpointing=settings.gradient_checkpointing,
        sharded=processes > 1 and settings.parallel == "fsdp",
        device="cuda" if torch.cuda.is_available() else "cpu",
        # with its early landmarks and documents; the demo's needles change their layout with the level
        batch=None
        if run.config.data.task == "needles" or sharing.size > 1
        else run.task.batch(0, 0, rows // (processes * run.micro)),
        parts=run.parts,
        loss_positions=settings.loss_positions,
        loss_slab=settings.loss_slab,
        gathered=chunks,
        teacher_parameters=0 if run.teacher is None else run.teacher.parameters(),
    )


def measure_speed(run: Run, steps: int = 8) -> float:
    """Seconds per step on batches of the last level, the slowest; the run is left as it was."""
    corpus = run.corpus
    text = corpus.read(0, len(corpus)) if corpus is not None and corpus.folder is None else None
    trial = Run(run.config, text=text)
    count = len(trial.curriculum.levels)
    trial.curriculum.starts = trial.curriculum.samples = [0] * count
    return sorted(seconds_per_step(trial, steps))[steps // 2]


def seconds_per_step(run: Run, steps: int = 1) -> list[float]:
    """Of the first steps, by a plain loop over one process's part of each batch. The run is spent with it."""
    settings, model = run.config.training, run.model.train()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    if settings.gradient_checkpointing:
        checkpoint_activations(model)
    optimizer = make_optimizer(model, settings)
    half = settings.computes_in == "bfloat16"
    seconds = []
    for step in range(steps):
        began = time.perf_counter()
        for number in range(run.micro):
            first, rows = share_of(run.task.rows(step), world_size(), rank(), run.micro, number)
            batch = {key: x.to(device) for key, x in run.task.batch(step, first, rows).items()}
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                loss = weighted_loss(
                    model,
                    batch,
                    positions=settings.loss_positions,
                    lesson=run.lesson(step),
                    slab=settings.loss_slab,
                ).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds
