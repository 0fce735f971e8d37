"""What a run knows between its steps: how far it is, what was measured, whether it is to stop.

The Trainer asks it before and after each step (:mod:`trailmark.training.trainer`); :class:`trailmark.training.run.Run`
adds what a run is made of and where it is kept.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trailmark.data.needles.curriculum_texts import CURRICULUM, PACKED
from trailmark.models import TrailmarkConfig, TrailmarkForCausalLM
from trailmark.ops import ChunkSelection
from trailmark.processes import (
    all_reduced,
    by_main,
    connected,
    is_main,
)
from trailmark.training import states, tensors
from trailmark.training.config import RunConfig
from trailmark.training.context_parallel import Sharing
from trailmark.training.curriculum import SMOOTHING, Curriculum
from trailmark.training.distil import Lesson, Teacher
from trailmark.training.guards import Guard
from trailmark.training.loss import Meter, total_weight, weighted_loss
from trailmark.training.neighbours import rule_of
from trailmark.training.statistics import RetrievalStatistics
from trailmark.training.tasks import Task, TextTask

Evaluate = Callable[[TrailmarkForCausalLM], dict[str, float]]
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# seconds in which a second SIGTERM is the first one's echo: launcher and scheduler both send it
_REPEATED = 10.0
_MOST_SCORES = 1 << 24  # of a micro-batch, that are looked into at a logged step
# a share of the scores' variance, and entries of the history, after which it is said
_POPULAR, _LASTS = 0.8, 5


class RunningState:
    """How far a run is and what was measured on the way."""

    model_config: TrailmarkConfig
    task: Task
    micro: int
    """Micro-batches of each process in a step."""
    progress: Callable[[Any], None]
    say: Callable[[str], None]
    teacher: Teacher | None
    """What the model learns from beside the text."""
    _validation: TextTask | None
    _evaluate: Evaluate | None

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.output = Path(config.output)
        levels = (PACKED if config.data.packed else ()) + CURRICULUM[config.data.first_level :]
        self.curriculum = Curriculum(levels, config.data.level_accuracy)
        self.guard = Guard(config.training.skip_nonfinite, self.output)
        self.retrieval = RetrievalStatistics()
        self.history: list[dict[str, float]] = []
        self._said_of_popularity = False
        self.averages: dict[str, float] = {}
        self.measured: dict[str, float] = {}  # of the last step
        self.step, self.seconds, self.tokens_trained = 0, 0.0, 0
        self.stop_signal: int = 0  # asked to stop by it; all processes stop at the same step
        self.stopping = False
        self._began = time.perf_counter()
        self.sharing = Sharing(config.training.context_parallel)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_trained / max(self.seconds, 1e-9)

    def state(self) -> dict[str, Any]:
        """JSON of all this, for a checkpoint."""
        return {
            "step": self.step,
            "curriculum": self.curriculum.state(),
            "history": self.history,
            "averages": self.averages,
            "measured": self.measured,
            "seconds": self.seconds,
            "tokens": self.tokens_trained,
            "guard": self.guard.state(),
        }

    def restore(self, kept: dict[str, Any]) -> None:
        """Go on from what :meth:`state` gave."""
        self.curriculum.restore(kept["curriculum"])
        self.history, self.averages, self.measured = kept["history"], kept["averages"], kept["measured"]
        self.seconds, self.tokens_trained, self.step = kept["seconds"], kept["tokens"], kept["step"]
        self.guard.restore(kept["guard"])

    @cached_property
    def model(self) -> TrailmarkForCausalLM:
        """The whole model, not what the Trainer wraps it in."""
        raise NotImplementedError

    # --- a step --------------------------------------------------------------------------------------------

    def lesson(self, step: int) -> Lesson | None:
        """What the teacher adds to the loss of the step after ``step``; None: there is none."""
        if self.teacher is None or not self.config.distil.teaches:
            return None
        return self.teacher.lesson(step / self.config.training.steps)

    @cached_property
    def _watches_retrieval(self) -> bool:
        """By the configuration, not by what a batch holds: all processes must add up what they saw."""
        if not self.model_config.retrieves_in_training or self.config.data.separate_documents:
            return False
        # else it cannot be told here which chunks each chose among
        return self._num_candidates is not None or not getattr(
            self.model_config, "exclude_visible_chunks", False
        )

    @cached_property
    def _num_candidates(self) -> Tensor | None:
        """[C] how many of a text's first chunks each could select, where all are full; None: it depends."""
        data, config = self.config.data, self.model_config
        if (
            not config.retrieves_in_training
            or data.task != "text"
            or data.early_landmarks
            or data.needle_share
            or data.separate_documents
        ):
            return None
        chunks = self.config.training.context_length // config.chunk_size
        return torch.from_numpy(rule_of(config).num_candidates(chunks, config.chunk_size))

    @property
    def asks_for_scores(self) -> bool:
        """Whether a micro-batch of the present step says how chunks score each other."""
        return self._scores_are_few and self._is_logged(self.step + 1)

    @cached_property
    def _scores_are_few(self) -> bool:
        """By the configuration: all processes must add up what they saw. Of packed documents there is no half."""
        config: Any = self.model_config
        if (
            not (config.retrieves_in_training and config.ranks_all_chunks)
            or self.config.data.separate_documents
        ):
            return False
        chunks = self.config.training.context_length // config.chunk_size
        rows = max(1, max(self.task.row_counts()) // (self.sharing.groups * self.micro))
        return rows * config.num_retrieval_groups * chunks**2 <= _MOST_SCORES

    def look_at(self, out: Any) -> None:
        """Take in what a micro-batch retrieved, where it will be shown."""
        parallel = self.model.context_parallel
        # of a text that is shared each process looks at all: the sums are so many times as large, their ratios the same
        whole = (lambda x: x) if parallel is None else parallel.gathered
        if self._watches_retrieval and self._is_logged(self.step + 1):
            with torch.no_grad():
                retrieval = [ChunkSelection(*map(whole, chosen)) for chosen in out.retrieval]
            self.retrieval.add(retrieval, self._num_candidates)
        if self.asks_for_scores:
            recency = getattr(self.model_config, "retrieval_recency", 0.0)
            with torch.no_grad():
                scores = [whole(own) for own in out.retrieval_scores.scores]
            self.retrieval.add_scores(scores, recency)

    def may_step(self, step: int, vector: Tensor, norm: float, model: Any, repeat: Callable[[], Any]) -> bool:
        """Add up what was measured over all processes, and say whether ``step`` is taken.

        Args:
            vector: of the step's :class:`trailmark.training.loss.Meter`. norm: of its gradients.
            model, repeat: what is looked into where it is not: see :meth:`trailmark.training.guards.Guard.check`.

        Raises:
            ValueError: it must not be taken, nor left out.
        """
        asked = [float(self.stop_signal == number) for number in _SIGNALS]
        together = torch.cat([vector, torch.tensor(asked, dtype=torch.float64, device=vector.device)])
        sums = all_reduced(together).tolist()
        stops = [number for number, count in zip(_SIGNALS, sums[-len(_SIGNALS) :], strict=True) if count]
        if stops:
            self.stopping, self.stop_signal = True, stops[0]
        step_measured = Meter.read(sums[: -len(_SIGNALS)])
        self.tokens_trained += step_measured.tokens
        rows = self.task.rows(step - 1)
        first = self.task.first_sample(step - 1)
        samples = range(first, first + rows)
        if self.guard.check(step, step_measured.whole_loss, norm, samples, model, repeat) == "skip":
            self.measured = {}
            return False
        if self.config.data.task == "needles":
            self.curriculum.update(step - 1, step_measured.accuracy, rows)
        for name, value in step_measured.averages().items():
            old = self.averages.get(name, value)
            self.averages[name] = SMOOTHING * old + (1 - SMOOTHING) * value
        self.measured = {"step_loss": step_measured.loss, "grad_norm": norm}
        return True

    def step_done(self, step: int) -> None:
        now = time.perf_counter()
        self.seconds, self._began, self.step = self.seconds + now - self._began, now, step
        if self._is_logged(step):
            if self._watches_retrieval or self._scores_are_few:
                means = self.retrieval.means()
                self.measured |= {f"retrieval_{name}": value for name, value in means.items()}
            self._note(self.shown())
            self._warn_of_popularity()
        if is_main():
            self.progress(self)
        if self.stop_signal and not connected():  # alone: nobody has to agree
            self.stopping = True

    def _warn_of_popularity(self) -> None:
        """Say once, by the history, that scores hardly depend on who asks, where that lasts."""
        if not is_main() or self._said_of_popularity:
            return
        known = (own["retrieval_popular"] for own in reversed(self.history) if "retrieval_popular" in own)
        last = list(islice(known, _LASTS))
        if len(last) < _LASTS or min(last) <= _POPULAR:
            return
        self._said_of_popularity = True
        earlier, lasts = [*last[1:], *known], 0  # of a run that goes on, which has said it
        for share in earlier:
            lasts = lasts + 1 if share > _POPULAR else 0
            if lasts == _LASTS:
                return
        self.say(
            f"Mind: {last[0]:.0%} of the variance of the retrieval's scores belongs to the past chunks, whoever "
            "asks. trailmark evaluate --suite retrieval says what the right chunks would be worth."
        )

    def _is_logged(self, step: int) -> bool:
        return step % self.config.training.logging_steps == 0 or step == self.config.training.steps

    def _note(self, numbers: dict[str, float]) -> None:
        """Put numbers into the history, at this step."""
        if not self.history or self.history[-1]["step"] != self.step:
            self.history.append({"step": self.step, "seconds": self.seconds})
        self.history[-1] |= numbers

    def shown(self) -> dict[str, float]:
        """What a line of the history holds beside the step and the time: nothing that was measured before."""
        level = (
            {"level": float(self.curriculum.level_at(self.step))}
            if self.config.data.task == "needles"
            else {}
        )
        return level | self.averages | self.measured

    @torch.no_grad()
    def validate(self, model: Any) -> dict[str, float]:
        """Loss and perplexity on the first windows of ``data.validation``; what the caller measures."""
        numbers: dict[str, float] = {}
        training, parallel = model.training, self.model.context_parallel
        model.eval()
        try:
            if self._validation is not None:
                rows = max(1, self.task.rows(0) // (self.sharing.groups * self.micro))
                settings = self.config.training
                numbers |= _validation_loss(
                    model,
                    self.model,
                    self._validation,
                    settings.eval_windows,
                    rows,
                    settings.loss_slab,
                    self.sharing,
                )
            self.model.context_parallel = None  # what else is measured reads whole texts
            if self._evaluate is not None:
                numbers |= _measured_whole(self.model, self._evaluate)
        finally:
            self.model.context_parallel = parallel
            model.train(training)
        self._note({f"eval_{name}": value for name, value in numbers.items()})
        return numbers

    # --- signals -------------------------------------------------------------------------------------------

    @contextmanager
    def stopping_softly(self) -> Iterator[None]:
        """A first signal ends the step, saves and stops; a second one (SIGTERM: not its echo) stops at once."""
        previous: dict[int, Any] = {}
        asked_at = 0.0

        def stop(number: int, frame: Any) -> None:
            nonlocal asked_at
            now = time.monotonic()
            if not self.stop_signal:
                self.stop_signal, asked_at = number, now
            elif number == signal.SIGTERM and now - asked_at < _REPEATED:
                return
            else:
                restore()
                signal.raise_signal(number)

        def restore() -> None:
            for number, handler in previous.items():
                signal.signal(number, handler)

        try:
            for number in _SIGNALS:
                previous[number] = signal.signal(number, stop)
        except ValueError:  # not in the main thread: the caller handles signals
            yield
            return
        try:
            yield
        finally:
            restore()


# --- what is measured beside the training ------------------------------------------------------------------------


def _validation_loss(
    wrapped: Any,
    model: TrailmarkForCausalLM,
    task: Task,
    windows: int,
    rows: int,
    slab: int | None,
    sharing: Sharing,
) -> dict[str, float]:
    """Loss in nats and perplexity on the first ``windows`` windows of ``task``.

    The processes share the windows out, ``rows`` at a time; each takes as many, as FSDP2 needs.

    Args:
        wrapped: ``model``, as the Trainer has it.
    """
    device = next(model.parameters()).device
    total = torch.zeros(2, dtype=torch.float64, device=device)
    together = rows * sharing.groups
    for first in range(0, windows, together):
        start = first + sharing.group * rows
        own = sharing.stretch(task.batch(0, start, rows))
        batch = {key: x.to(device) for key, x in own.items()}
        counted = (torch.arange(start, start + rows) < windows).to(device)
        batch["loss_weights"] = batch["loss_weights"] * counted[:, None]
        one = torch.ones((), dtype=torch.float64, device=device)
        loss = weighted_loss(wrapped, batch, one, text_alone=True, slab=slab).loss
        total += torch.stack([loss.double(), total_weight(model, [batch])])
    loss_sum, weight = all_reduced(total).tolist()
    mean = loss_sum / max(weight, 1e-9)
    return {"loss": mean, "perplexity": math.exp(min(mean, 700.0))}


def _measured_whole(model: TrailmarkForCausalLM, evaluate: Evaluate) -> dict[str, float]:
    """By the main process, of a whole model: what reads a text piece by piece knows nothing of shards."""
    if not tensors.is_sharded(model):
        return by_main(lambda: evaluate(model))
    weights = states.whole_weights(model)  # in all processes, whole in the main one
    device = next(model.parameters()).device

    def measure() -> dict[str, float]:
        with torch.random.fork_rng(devices=[]):  # a new model draws weights, which go
            whole = type(model)(model.config)
        whole.embedder = model.embedder
        plain = states.plain_weights(model, weights)
        whole.load_state_dict(plain, strict=False, assign=True)  # tied ones are there once
        whole.tie_weights()
        return evaluate(whole.to(device).eval())

    return by_main(measure)
