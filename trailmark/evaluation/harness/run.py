"""Tasks of lm-eval, one after another, each kept as soon as it is done."""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from trailmark.data.corpus import tokenizer_fingerprint
from trailmark.evaluation.harness.suite import HarnessSettings
from trailmark.evaluation.record import Part, Record
from trailmark.evaluation.subject import Subject
from trailmark.settings import nearest
from trailmark.statistics import score_interval
from trailmark.untrusted import first_line


def run(
    subject: Subject,
    settings: HarnessSettings,
    record: Record,
    progress: Callable[[str], None] = lambda message: None,
) -> list[dict[str, Any]]:
    """The scores of all tasks, at all lengths where they make their texts, measured or found in the record.

    Each result has ``texts`` and ``metrics``: of each its ``score``, and the ends ``low`` and ``high`` of a 95%
    interval over texts drawn again, null where a score is no mean over texts.

    Raises:
        ValueError: no lm-eval, a task that it does not know or whose data is not there, a length at which a task has no
            text, a model of transformers that takes fewer tokens.
    """
    harness = _harness()
    from trailmark.evaluation.harness import ruler

    made = harness.tasks.TaskManager(include_path=ruler.folder(), include_defaults=False)
    manager = made
    if not set(settings.tasks) <= set(made.all_tasks):
        progress("lm-eval looks through its tasks")
        manager = harness.tasks.TaskManager()
    for task in settings.tasks:
        if task not in manager.all_tasks:
            close = nearest(task, manager.all_tasks, "")
            raise ValueError(f"tasks: expected names of lm-eval's tasks, got {task!r}.{close}")
    lengths = settings.lengths or tuple(subject.default_lengths())
    cells = [
        (task, length) for task in settings.tasks for length in (lengths if ruler.is_made(task) else (None,))
    ]
    longest = subject.longest_text
    for task, length in cells:
        if length is None:
            continue
        if longest is not None and length > longest:
            raise ValueError(
                f"lengths: expected at most the {longest:,} tokens that {subject.name!r} takes, got {length:,}."
            )
        ruler.expect_room(task, length, subject.tokenizer)
    parts = []
    for task, length in cells:
        asked: dict[str, Any] = {
            "suite": "lm-eval",
            "version": harness.__version__,
            "task": task,
            "length": length,
            "limit": settings.limit,
            "num_fewshot": settings.num_fewshot,
            "batch_size": settings.batch_size,
            "seed": settings.seed,
            "tokenizer": tokenizer_fingerprint(subject.tokenizer),
        }
        cell = _Cell(subject, settings, task, length, manager, progress)
        parts.append(Part(asked, cell.measure, cell.written))
    return record.measure_all(parts)


def _harness() -> Any:
    try:
        import lm_eval
        import lm_eval.tasks
    except ImportError as error:
        raise ValueError("suite: lm-eval is not installed. pip install 'trailmark[lm-eval]'") from error
    return lm_eval


class _Cell:
    """One task at one length."""

    def __init__(
        self,
        subject: Subject,
        settings: HarnessSettings,
        task: str,
        length: int | None,
        manager: Any,
        progress: Callable[[str], None],
    ) -> None:
        self.subject, self.settings, self.task, self.length = subject, settings, task, length
        self.manager, self.progress = manager, progress
        self._samples: Sequence[Mapping[str, Any]] = ()

    def measure(self) -> dict[str, Any]:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        from trailmark.evaluation.harness import ruler
        from trailmark.evaluation.harness.model import Reads

        settings, seed = self.settings, self.settings.seed
        with (
            tempfile.TemporaryDirectory() as folder,
            ruler.few(self.task, settings.limit, self.progress),
            quiet(),
            patch.dict(os.environ, LOCAL_RANK="0"),  # lm-eval tells no other process what it found
        ):
            manager = self.manager
            if self.length is not None:
                place = ruler.saved_tokenizer(self.subject.tokenizer, Path(folder))
                told = {"tokenizer": place, "max_seq_lengths": [self.length]}
                manager = TaskManager(include_path=ruler.folder(), include_defaults=False, metadata=told)
            try:
                found = simple_evaluate(
                    model=Reads(self.subject, settings.batch_size),
                    tasks=[self.task],
                    num_fewshot=settings.num_fewshot,
                    limit=settings.limit,
                    bootstrap_iters=0,
                    task_manager=manager,
                    random_seed=seed,
                    numpy_random_seed=seed,
                    torch_random_seed=seed,
                    fewshot_random_seed=seed,
                )
            except (ConnectionError, FileNotFoundError) as error:
                raise ValueError(
                    f"tasks: cannot have the data of {self.task} ({first_line(error)}). It comes from the "
                    "hub, which needs the network once. Tasks that make their own need none: "
                    + ", ".join(ruler.MADE)
                ) from error
        self._samples = found["samples"][self.task]
        return {"texts": len(self._samples), "metrics": dict(self._metrics(found["results"][self.task]))}

    def _metrics(self, results: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, value in results.items():
            metric, _, kind = name.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            if self.length is not None and metric != str(self.length):
                continue  # a metric for each length, of which the others are -1
            each = [sample.get(metric) for sample in self._samples if sample.get("filter", kind) == kind]
            low = high = None
            if each and all(isinstance(x, (int, float)) for x in each):
                numbers = [float(x) for x in each if x is not None]
                if math.isclose(sum(numbers) / len(numbers), value):
                    low, high = score_interval(numbers, self.settings.seed)
            title = "score" if self.length is not None else metric if kind == "none" else f"{metric}, {kind}"
            yield title, {"score": float(value), "low": low, "high": high}

    def written(self) -> list[dict[str, Any]]:
        lines = []
        for sample in self._samples:
            said = sample.get("filtered_resps")
            generated = (
                said[0] if isinstance(said, (list, tuple)) and said and isinstance(said[0], str) else None
            )
            if generated is not None:
                wanted = sample.get("target")
                wanted = ", ".join(map(str, wanted)) if isinstance(wanted, (list, tuple)) else str(wanted)
                lines.append({"number": sample["doc_id"], "wanted": wanted, "generated": generated})
        return lines


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, lm-eval's own bars and lines stay off the screen, where progress stands."""
    from lm_eval.api import task
    from lm_eval.models import huggingface

    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with ExitStack() as stack:
            for module in (task, huggingface):
                stack.enter_context(patch.object(module, "tqdm", partial(_still, module.tqdm)))
            yield
    finally:
        logger.setLevel(before)


def _still(bar: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return bar(*arguments, **options | {"disable": True})
