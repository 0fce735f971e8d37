"""One training run: its data, its model, its folder. ``train`` begins it, or goes on with what the folder holds."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, TrainingArguments, set_seed

from trailmark.data.corpus import Tokens, load_tokenizer, vocabulary_size
from trailmark.data.files import (
    expect_place,
    expect_writable,
    locked,
    read_json,
    sync_file,
    write_json,
    write_text,
)
from trailmark.data.needles import CURRICULUM
from trailmark.data.summarization import SummarizationTexts
from trailmark.models import TrailmarkForCausalLM, architectures
from trailmark.models.card_files import refresh_card
from trailmark.training import checkpoints, states
from trailmark.training.config import RunConfig
from trailmark.training.curriculum import SMOOTHING, Curriculum
from trailmark.training.guards import Guard
from trailmark.training.loss import Meter
from trailmark.training.neighbours import open_table, rule_of
from trailmark.training.processes import added_up, all_reduced, by_main, connected, is_main, world_size
from trailmark.training.run_folder import (
    CHECKPOINTS,
    HISTORY_FILE,
    RUN_FILE,
    SAVING,
    STATE_FILE,
    config_hash,
    environment,
    holds_run,
    remove_leftovers,
    saving,
)
from trailmark.training.run_inputs import make_task, open_corpus, open_embedder, open_validation
from trailmark.training.statistics import RetrievalStatistics
from trailmark.training.tasks import Batch, SampleTask, micro_batches
from trailmark.training.trainer import Batches, RunCallback, RunTrainer, training_arguments
from trailmark.training.validation import Evaluate, measured_whole, validation_loss

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# seconds in which a second SIGTERM is the first one's echo: launcher and scheduler both send it
_REPEATED = 10.0


class Run:
    """One training run.

    Args:
        config: all of it.
        progress: called after every step, in the main process.
        text: tokens to train on instead of ``config.data.paths``.
        evaluate: called every ``training.eval_steps`` with the model, for what is measured beside the loss on
            ``data.validation``; a dictionary of numbers.
        say: told in a sentence where a run goes on from, and why.

    Raises:
        ValueError: data that is not there or not what the configuration says, a batch that does not divide.
    """

    def __init__(
        self,
        config: RunConfig,
        progress: Callable[[Run], None] = lambda run: None,
        text: Tokens | None = None,
        evaluate: Evaluate | None = None,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.config, self.progress, self.say, self._evaluate = config, progress, say, evaluate
        settings = config.training
        self.output = Path(config.output)
        self.tokenizer = load_tokenizer(config.data.tokenizer)
        self.curriculum = Curriculum(CURRICULUM[config.data.first_level :], config.data.level_accuracy)
        # what may be wrong is found before the model is made
        expect_place("output", self.output)
        if config.init_from is not None:
            states.expect_model(config.init_from)
        for package in settings.report_to:
            if importlib.util.find_spec(package) is None:
                raise ValueError(
                    f"training.report_to: expected installed packages, {package} is not. pip install {package}"
                )
        fields = self.model_config = config.model_config(len(self.tokenizer))
        if fields.vocab_size < (needed := vocabulary_size(self.tokenizer)):
            raise ValueError(
                f"model.vocab_size: expected at least the {needed} tokens of the tokenizer {config.data.tokenizer!r}, "
                f"got {fields.vocab_size}. Leave it out, or name the tokenizer that the model is for."
            )
        self.corpus = open_corpus(config, text, self.tokenizer, fields.vocab_size)
        self.table = None
        if self.corpus is not None:
            self.table = open_table(config, fields, self.corpus, self.tokenizer, verify=is_main())
        self.task = make_task(
            config, fields, self.corpus, self.table, self.tokenizer, self.curriculum, self.say
        )
        self.micro = self._micro_batches()
        self._validation = open_validation(config, self.tokenizer, fields.vocab_size)
        self.embedder = None
        if self.table is None or self._validation is not None:
            self.embedder = open_embedder(fields, self.tokenizer, self.table is None, self.say)
        self.guard = Guard(settings.skip_nonfinite, self.output)
        self.retrieval = RetrievalStatistics()
        self.history: list[dict[str, float]] = []
        self.averages: dict[str, float] = {}
        self.measured: dict[str, float] = {}  # of the last step
        self.step, self.seconds, self.tokens_trained = 0, 0.0, 0
        self.stop_signal: int = 0  # asked to stop by it; all processes stop at the same step
        self.stopping = False
        self._began = time.perf_counter()
        self._trainer: RunTrainer | None = None
        self._held = ExitStack()

    @cached_property
    def model(self) -> TrailmarkForCausalLM:
        """Made when it is first asked for: what a run will cost can be said before."""
        set_seed(self.config.training.seed)
        return self._make_model()

    # --- the model -----------------------------------------------------------------------------------------

    def _micro_batches(self) -> int:
        """Micro-batches of each process, the same number at every step."""
        counts, size = self.task.row_counts(), self.config.training.micro_batch_size
        micro = micro_batches(max(counts), world_size(), size)
        for rows in counts:
            micro_batches(rows, world_size() * micro, None)
        return micro

    def _make_model(self) -> TrailmarkForCausalLM:
        config = self.config
        cls = architectures()[config.model.get("architecture", "drt")]
        if config.init_from is None:
            model = cls(self.model_config)
        else:
            model = states.initial_model(cls, self.model_config, config.init_from)
        model.embedder = self.embedder
        return model.double() if config.training.precision == "float64" else model

    # --- a step --------------------------------------------------------------------------------------------

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
            or data.separate_documents
        ):
            return None
        chunks = self.config.training.context_length // config.chunk_size
        return torch.from_numpy(rule_of(config).num_candidates(chunks, config.chunk_size))

    def look_at(self, out: Any) -> None:
        """Take in what a micro-batch retrieved, where it will be shown."""
        if self._watches_retrieval and self._is_logged(self.step + 1):
            self.retrieval.add(out.retrieval, 0, self._num_candidates)

    def may_step(self, step: int) -> bool:
        """Add up what was measured over all processes; whether ``step`` is taken. A ValueError where it must not."""
        trainer = self._trainer
        assert trainer is not None
        vector = trainer.meter.vector()
        asked = [float(self.stop_signal == number) for number in _SIGNALS]
        sums = added_up(torch.cat([vector, torch.tensor(asked, dtype=torch.float64, device=vector.device)]))
        stops = [number for number, count in zip(_SIGNALS, sums[-len(_SIGNALS) :], strict=True) if count]
        if stops:
            self.stopping, self.stop_signal = True, stops[0]
        found, norm = Meter.read(sums[: -len(_SIGNALS)]), float(trainer.grad_norm)
        self.tokens_trained += found.tokens
        rows = self.task.rows(step - 1)
        if not self.guard.passes(found.whole_loss, norm):
            first = self.task.first_sample(step - 1)
            samples = range(first, first + rows)
            self.guard.refuse(step, found.whole_loss, norm, samples, trainer.model, trainer.repeat_step)
            self.measured = {}
            return False
        if self.config.data.task == "needles":
            self.curriculum.update(step - 1, found.accuracy, rows)
        for name, value in found.averages().items():
            old = self.averages.get(name, value)
            self.averages[name] = SMOOTHING * old + (1 - SMOOTHING) * value
        self.measured = {"step_loss": found.loss, "grad_norm": norm}
        return True

    def step_done(self, step: int) -> None:
        now = time.perf_counter()
        self.seconds, self._began, self.step = self.seconds + now - self._began, now, step
        if self._is_logged(step):
            if self._watches_retrieval:
                means = self.retrieval.means(all_reduced)
                self.measured |= {f"retrieval_{name}": value for name, value in means.items()}
            self._note(self.shown())
        if is_main():
            self.progress(self)
        if self.stop_signal and not connected():  # alone: nobody has to agree
            self.stopping = True

    def _is_logged(self, step: int) -> bool:
        return step % self.config.training.logging_steps == 0 or step == self.config.training.steps

    def _note(self, found: dict[str, float]) -> None:
        """Put it into the history, at this step."""
        if not self.history or self.history[-1]["step"] != self.step:
            self.history.append({"step": self.step, "seconds": self.seconds})
        self.history[-1] |= found

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
        found: dict[str, float] = {}
        training = model.training
        model.eval()
        try:
            if self._validation is not None:
                rows = max(1, self.task.rows(0) // (world_size() * self.micro))
                windows = self.config.training.eval_windows
                found |= validation_loss(model, self.model, self._validation, windows, rows)
            if self._evaluate is not None:
                found |= measured_whole(self.model, self._evaluate)
        finally:
            model.train(training)
        self._note({f"eval_{name}": value for name, value in found.items()})
        return found

    # --- the run -------------------------------------------------------------------------------------------

    def batch(self, step: int) -> Batch:
        """The global batch of ``step``."""
        return self.task.batch(step, 0, self.task.rows(step))

    @property
    def num_tokens(self) -> int:
        """Tokens of the training text; 0 where samples are read one by one."""
        return 0 if self.corpus is None else len(self.corpus)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_trained / max(self.seconds, 1e-9)

    @property
    def data_fingerprint(self) -> str:
        """Of the training text and its neighbours: a run goes on exactly only on the same ones."""
        if self.table is not None:
            assert self.corpus is not None
            return hashlib.sha256(f"{self.corpus.fingerprint} {self.table.fingerprint}".encode()).hexdigest()
        if self.corpus is not None:
            return self.corpus.fingerprint
        assert isinstance(self.task, SampleTask)
        assert isinstance(self.task.texts, SummarizationTexts)
        return self.task.texts.fingerprint

    @property
    def finished(self) -> bool:
        """Whether the output folder holds this very run, trained to its end."""
        history = read_json(self.output / HISTORY_FILE)
        if not isinstance(history, dict) or not holds_run(self.output, self.config):
            return False
        return history.get("data", self.data_fingerprint) == self.data_fingerprint

    def train(self) -> TrailmarkForCausalLM | None:
        """Train to the end, from the newest whole checkpoint if there is one.

        Ctrl-C (SIGINT) and SIGTERM end the step, save and leave; a second one leaves at once.

        Returns:
            The model; None if SIGTERM stopped the run.

        Raises:
            KeyboardInterrupt: Ctrl-C stopped the run.
            ValueError: a folder of another run, another text than it began with, no space left, a loss that is
                not finite.
        """
        # processes get to know each other here
        arguments = training_arguments(self.config.training, self.output / CHECKPOINTS, self.micro)
        with self._held:  # by the main process: the folder
            return self._train(arguments)

    def _train(self, arguments: TrainingArguments) -> TrailmarkForCausalLM | None:
        settings = self.config.training
        last = by_main(self._claim_output)
        if settings.gradient_checkpointing:
            checkpoint_activations(self.model)
        batches = Batches(self.task, settings.steps, self.micro)
        trainer = self._trainer = RunTrainer(
            self, model=self.model, args=arguments, train_dataset=batches, callbacks=[RunCallback(self)]
        )
        trainer.remove_callback(PrinterCallback)
        if last is not None:
            self._restore(last)
            batches.start = self.step
        self._began = time.perf_counter()
        with self._stopping_softly():
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
        if self.stopping:
            if self.stop_signal == signal.SIGINT:
                raise KeyboardInterrupt
            return None
        self._save(trainer)
        return self.model

    # --- the folder ----------------------------------------------------------------------------------------

    def _claim_output(self) -> Path | None:
        """Make the output folder this run's; its newest whole checkpoint, if any."""
        expect_writable("output", self.output)
        self._held.enter_context(locked(self.output, "trailmark train"))
        if (self.output / RUN_FILE).exists() and not holds_run(self.output, self.config):
            raise ValueError(
                f"output: {str(self.output)!r} holds a run with another configuration ({RUN_FILE}). "
                "Choose another output, or remove that folder to start anew."
            )
        folder = self.output / CHECKPOINTS
        remove_leftovers(self.output)
        checkpoints.remove_leftovers(folder)
        last, damaged = checkpoints.find_newest_whole(folder)
        for line in damaged:
            self.say(line)
        if last is not None:
            kept = read_json(last / STATE_FILE)
            unknown = not (self.output / RUN_FILE).exists()
            if unknown and checkpoints.read_about(last).get("config") != config_hash(self.config):
                raise ValueError(
                    f"output: {str(self.output)!r} holds checkpoints of a run with another configuration, and no "
                    f"{RUN_FILE}. Choose another output, or remove that folder to start anew."
                )
            if kept["data"] != self.data_fingerprint:
                what = "text" if self.table is None else "text and neighbours"
                raise ValueError(
                    f"data: expected the {what} that the run in {str(self.output)!r} began with ({kept['data'][:16]}), "
                    f"got {self.data_fingerprint[:16]}. Put the files back as they were, choose another "
                    "output, or remove that folder to start anew."
                )
            self.say(f"Going on from step {kept['step']}: the newest whole checkpoint is {last}.")
        with saving(self.output):
            write_text(self.output / RUN_FILE, self.config.to_yaml())
        return last

    def save_checkpoint(self, trainer: RunTrainer) -> None:
        """Write a checkpoint of this step: in all processes, the files by the main one."""
        state = states.gather(trainer.model, trainer.optimizer, trainer.lr_scheduler)
        own = {
            "step": self.step,
            "data": self.data_fingerprint,
            "curriculum": self.curriculum.state(),
            "history": self.history,
            "averages": self.averages,
            "measured": self.measured,
            "seconds": self.seconds,
            "tokens": self.tokens_trained,
            "guard": self.guard.state(),
        }
        about = environment() | {"config": config_hash(self.config), "data": self.data_fingerprint}

        def write() -> None:
            folder = self.output / CHECKPOINTS
            with checkpoints.writing(folder, self.step, about, state.bytes()) as staging:
                state.write(staging, self.model)
                trainer.state.save_to_json(str(staging / "trainer_state.json"))
                write_json(staging / STATE_FILE, own)
            checkpoints.retain(folder, self.config.training.keep_checkpoints)

        by_main(write)

    def _restore(self, checkpoint: Path) -> None:
        kept = read_json(checkpoint / STATE_FILE)
        self.curriculum.restore(kept["curriculum"])
        self.history, self.averages, self.measured = kept["history"], kept["averages"], kept["measured"]
        self.seconds, self.tokens_trained, self.step = kept["seconds"], kept["tokens"], kept["step"]
        self.guard.restore(kept["guard"])

    def _save(self, trainer: RunTrainer) -> None:
        weights = states.whole_weights(trainer.model)
        by_main(lambda: self.save(weights))

    def save(self, weights: dict[str, Tensor] | None = None) -> None:
        """The model, its tokenizer, the configuration and the history, into the output folder."""
        with saving(self.output):
            with tempfile.TemporaryDirectory(dir=self.output, prefix=SAVING) as folder:
                self.model.save_pretrained(folder, state_dict=weights)
                self.tokenizer.save_pretrained(folder)
                mode = self.output.stat().st_mode & 0o666  # safetensors' files are their owner's alone
                for file in Path(folder).iterdir():
                    os.chmod(file, mode)
                    with open(file, "rb+") as whole:
                        sync_file(whole)  # after a power cut too, a history means a model
                    os.replace(file, self.output / file.name)
            history = {
                "data": self.data_fingerprint,
                "steps": self.history,
                "seconds": self.seconds,
                "tokens": self.tokens_trained,
                "tokens_per_second": self.tokens_per_second,
                "level_starts": self.curriculum.starts,
                "levels": [asdict(level) for level in self.curriculum.levels],
            }
            refresh_card(self.output, history)
            write_json(self.output / HISTORY_FILE, history, durable=True)  # last: it says that all is there

    # --- signals -------------------------------------------------------------------------------------------

    @contextmanager
    def _stopping_softly(self) -> Iterator[None]:
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


def checkpoint_activations(model: Any) -> None:
    """Compute each layer's activations again in the backward pass instead of keeping them."""
    # transformers 5.20 renamed it
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
