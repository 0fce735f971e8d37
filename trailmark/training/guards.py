"""A loss or gradient that is not finite: found before the step, looked into, reported; the run stops or skips.

Nothing here knows the Trainer: a caller asks :meth:`Guard.check` before each optimizer step, and leaves out a step that
is to be skipped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trailmark.files import write_json
from trailmark.models.text import RetrievalScores
from trailmark.ops import ChunkSelection
from trailmark.processes import gathered, is_main
from trailmark.training.tensors import unwrapped_name

REPORT_FILE = "nan-report.json"

_ADVICE = [
    "Lower training.learning_rate (and matrix_learning_rate), or make training.warmup_steps longer.",
    "Look at the samples above: a text of one repeated token, or labels outside the vocabulary, may do it.",
    "If weights of float32 on the same samples are finite, training.precision is too low for this model.",
    "training.skip_nonfinite: N goes on without up to N such steps.",
]


class NonFiniteError(ValueError, FloatingPointError):
    """Training stopped before a step that would have spoilt the weights."""


@dataclass
class NonFiniteReport:
    """What is known of a step that was not taken; written as JSON, numbers that JSON lacks as text."""

    step: int
    loss: float
    grad_norm: float | None
    samples: list[int]
    """Numbers of the global batch's samples in the run."""
    first_module: str | None = None
    """The first in order of execution whose output held a value that is not finite; None: none did."""
    gradients: list[str] = field(default_factory=list)
    """Parameters whose gradient held one, before it was clipped."""
    parameters: list[str] = field(default_factory=list)
    """Parameters that held one themselves, before the step."""
    skipped: list[int] = field(default_factory=list)
    """Steps of the run that were skipped before, for the same reason."""
    not_repeated: str | None = None
    """Why the step could not be repeated to look into it; None: it was."""
    try_this: list[str] = field(default_factory=lambda: list(_ADVICE))

    def write(self, path: Path) -> None:
        content = dataclasses.asdict(self)
        for name in ("loss", "grad_norm"):
            value = content[name]
            content[name] = value if value is None or math.isfinite(value) else str(value)
        write_json(path, content)


class Guard:
    """Says whether a step may be taken, and counts over the whole run the steps that were not.

    Args:
        skip: how many such steps are left out before the run stops; 0: the first one stops it.
        folder: where ``nan-report.json`` is written, by the main process; the newest step's.
    """

    def __init__(self, skip: int, folder: Path) -> None:
        self.skip, self.folder = skip, folder
        self.skipped: list[int] = []

    def check(
        self,
        step: int,
        loss: float,
        grad_norm: float | None,
        samples: Sequence[int] = (),
        model: nn.Module | None = None,
        repeat: Callable[[], Any] | None = None,
    ) -> Literal["go", "skip"]:
        """Say whether a step may be taken; report one that may not, in all processes, and drop its gradients.

        Args:
            step: to be taken: the weights are those of ``step - 1``.
            loss, grad_norm: of all processes, so that all answer alike. None where gradients are not clipped; then only
                the loss is looked at.
            samples: their numbers in the run.
            model: looked into, while ``repeat`` runs forward and backward of the step's micro-batches again. (A norm
                that is NaN made all gradients NaN when they were clipped; these are found anew.)

        Raises:
            NonFiniteError: as many steps as may be were skipped already.
        """
        if math.isfinite(loss) and (grad_norm is None or math.isfinite(grad_norm)):
            return "go"
        report = NonFiniteReport(step, loss, grad_norm, list(samples), skipped=list(self.skipped))
        if model is not None:
            look_into(report, model, repeat)
            _put_together(report)
        path, written = self.folder / REPORT_FILE, ""
        if is_main():
            try:
                report.write(path)
            except OSError as error:  # what happened is more than where it is written
                written = f" (it cannot be written: {error.strerror or error})"
        if len(self.skipped) < self.skip:
            self.skipped.append(step)
            return "skip"
        raise NonFiniteError(self._message(report, f"{path}{written}"))

    def state(self) -> dict[str, Any]:
        """JSON, for a checkpoint."""
        return {"skipped": list(self.skipped)}

    def restore(self, state: dict[str, Any]) -> None:
        self.skipped = list(state["skipped"])

    def _message(self, report: NonFiniteReport, path: str) -> str:
        is_loss = not math.isfinite(report.loss)
        what = f"the loss is {report.loss}" if is_loss else f"the norm of the gradients is {report.grad_norm}"
        where = f" First in the output of {report.first_module}." if report.first_module else ""
        count = len(self.skipped)
        before = f" after {count} skipped step{'s' if count > 1 else ''}" if count else ""
        return (
            f"training: {what} at step {report.step}{before}. It was not taken: the weights are those of step "
            f"{report.step - 1}.{where} Report: {path}. Let training.skip_nonfinite leave "
            "out more such steps; or begin from a checkpoint (init_from) with another output and a lower "
            "training.learning_rate."
        )


def look_into(report: NonFiniteReport, model: nn.Module, repeat: Callable[[], Any] | None) -> None:
    """Fill in what this process finds: parameters, and by repeating the step, the first module and gradients."""
    report.parameters = nonfinite_parameters(model)
    if repeat is None:
        report.gradients = nonfinite_gradients(model)
        return
    model.zero_grad(set_to_none=True)
    try:
        report.first_module = first_nonfinite(model, repeat)
    except Exception as error:  # the report of the first trouble is not lost to a second one
        report.not_repeated = f"{type(error).__name__}: {error}"
    report.gradients = nonfinite_gradients(model)
    model.zero_grad(set_to_none=True)


def _put_together(report: NonFiniteReport) -> None:
    """What each process found of its samples and its shards, in all of them."""
    found = gathered([report.first_module, report.gradients, report.parameters, report.not_repeated])
    modules, gradients, parameters, reasons = zip(*found, strict=True)
    # processes run in step: of several, any is as early as the others; the first named is that of the lowest rank
    report.first_module = next((name for name in modules if name), None)
    report.gradients = list(dict.fromkeys(name for names in gradients for name in names))
    report.parameters = list(dict.fromkeys(name for names in parameters for name in names))
    report.not_repeated = next((reason for reason in reasons if reason), None)


def first_nonfinite(model: nn.Module, run_forward: Callable[[], Any]) -> str | None:
    """The first module, in order of execution, whose output holds NaN or infinity while ``run_forward`` runs.

    Leaves come before the modules that contain them. The -inf of a :class:`ChunkSelection` where nothing was selected,
    and of :class:`RetrievalScores` where there is no candidate, is none. In a sharded model this process's part of the
    outputs is looked at. Nothing is left on the model.

    Args:
        run_forward: the forward pass (backward, too, if gradients are wanted) of what is to be looked into.

    Returns:
        "lower_layers.0.mlp (MLP)", by the names of the unwrapped model; "the model (DRTForCausalLM)"; or None.

    Raises:
        Exception: that of ``run_forward``, if nothing was found before it.
    """
    found: list[str] = []
    handles = []

    def looker(label: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if not found and not all(torch.isfinite(_own_part(x)).all() for x in _tensors(output)):
                found.append(label)

        return look

    try:
        for name, module in model.named_modules():
            label = unwrapped_name(name) or "the model"
            handles.append(module.register_forward_hook(looker(f"{label} ({type(module).__name__})")))
        run_forward()
    except Exception:
        if not found:  # values that are not finite may well end in an error
            raise
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def nonfinite_gradients(model: nn.Module) -> list[str]:
    """Names of the parameters whose gradient (of which this process holds a part) is not finite."""
    return _nonfinite({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def nonfinite_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters (of which this process holds a part) that are not finite."""
    return _nonfinite({name: p.detach() for name, p in model.named_parameters()})


def _nonfinite(tensors: dict[str, Tensor]) -> list[str]:
    # all are asked before the first answer is waited for
    answers = {name: torch.isfinite(_own_part(tensor)).all() for name, tensor in tensors.items()}
    return [unwrapped_name(name) for name, finite in answers.items() if not bool(finite)]


def _own_part(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _tensors(value: Any) -> Iterator[Tensor]:
    """All in a module's output that may hold what is not finite."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, ChunkSelection):
        yield value.weights
        yield value.scores.masked_fill(value.indices < 0, 0)
    elif isinstance(value, RetrievalScores):
        for own in value.scores:
            yield own.masked_fill(own == -torch.inf, 0)
    elif isinstance(value, dict):  # ModelOutput too
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in dataclasses.fields(value):
            yield from _tensors(getattr(value, each.name, None))
