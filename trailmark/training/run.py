"""One training run: its data, its model, its folder. ``train`` begins it, or goes on with what the folder holds."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import PrinterCallback, TrainingArguments, set_seed

from trailmark.data.corpus import Tokens, load_tokenizer, tokenizer_fingerprint, vocabulary_size
from trailmark.data.summarization import SummarizationTexts
from trailmark.data.texts import expect_outside_text
from trailmark.files import (
    expect_place,
    expect_writable,
    locked,
    read_json,
    sync_file,
    write_json,
    write_text,
)
from trailmark.models import MODELS, TrailmarkForCausalLM
from trailmark.models.card.files import refresh_card
from trailmark.models.conversion.additions import ADDITIONS, Additions
from trailmark.models.size import expect_memory
from trailmark.processes import by_main, connected, is_main, rank, world_size
from trailmark.training import checkpoints, states
from trailmark.training.checkpoints import CHECKPOINTS
from trailmark.training.config import RunConfig
from trailmark.training.distil import Teacher
from trailmark.training.final_model import MODEL_MANIFEST, has_signed_model, sign_model, verify_model
from trailmark.training.fit import MemoryFit
from trailmark.training.neighbours import open_table
from trailmark.training.opening import open_corpus, open_embedder, open_validation
from trailmark.training.parts import Parts, learned
from trailmark.training.precision import expect_one_precision, with_precision
from trailmark.training.run_folder import (
    HISTORY_FILE,
    RUN_FILE,
    SAVING,
    STATE_FILE,
    config_hash,
    environment,
    holds_run,
    other_than,
    read_state,
    remove_leftovers,
    saving,
)
from trailmark.training.running import Evaluate, RunningState
from trailmark.training.tasks import Batch, SampleTask, make_task, micro_batches
from trailmark.training.trainer import Batches, RunTrainer, checkpoint_activations, training_arguments
from trailmark.values import duration

_TELLING_SECONDS = 30  # between lines about what comes before the first step
_MOST_TOKENS = 1 << 24  # at once: no model's activations of more fit anywhere


class Run(RunningState):
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
        config, told = with_precision(config)
        super().__init__(config)
        self.progress, self.say, self._evaluate = progress, say, evaluate
        if told:
            say(told)
        settings = config.training
        self.tokenizer = load_tokenizer(config.data.tokenizer)
        # what may be wrong is found before the model is made
        expect_place("output", self.output)
        for paths in (config.data.paths, config.data.validation):
            expect_outside_text(self.output, paths or ())
        if config.init_from is not None:
            states.expect_model(config.init_from)
        self.parts = Parts.of(settings)
        self._begun: Additions | None = None  # once the run trains, in the main process
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
        fields.tokenizer_fingerprint = tokenizer_fingerprint(self.tokenizer)
        self.teacher = None if config.distil.model is None else Teacher(config, fields, self.tokenizer)
        self.corpus = open_corpus(config, text, self.tokenizer, fields.vocab_size)
        self.table = None
        if self.corpus is not None:
            self.table = open_table(config, fields, self.corpus, self.tokenizer, verify=is_main())
        self.task = make_task(
            config, fields, self.corpus, self.table, self.tokenizer, self.curriculum, self.say
        )
        self.micro = self._micro_batches()
        self._validation = open_validation(config, self.tokenizer, fields.vocab_size)
        if config.data.validation is not None and self._validation is None:
            say("Mind: data.validation is not measured, as training.eval_steps does not say how often.")
        self.embedder = None
        if self.table is None or self._validation is not None:
            self.embedder = open_embedder(fields, self.tokenizer, self.table is None, self.say)
        self.trainer: RunTrainer | None = None  # once the run trains
        self._held = ExitStack()

    @cached_property
    def model(self) -> TrailmarkForCausalLM:
        """Made when it is first asked for: what a run will cost can be said before."""
        set_seed(self.config.training.seed)
        # weights, gradients and what the optimizer keeps; with a GPU only the weights lie here
        copies = 1 if torch.cuda.is_available() else 3
        expect_memory(self.model_config, copies * (8 if self.config.training.computes_in == "float64" else 4))
        return self._make_model()

    # --- the model -----------------------------------------------------------------------------------------

    def _micro_batches(self) -> int:
        """Micro-batches of each process, the same number at every step."""
        counts, size = self.task.row_counts(), self.config.training.micro_batch_size
        sharing = self.sharing
        micro = micro_batches(max(counts), sharing.processes, size, sharing.size)
        for rows in counts:
            if rows % (micro * sharing.groups):
                raise ValueError(
                    f"training.micro_batch_size: expected the same number of micro-batches at each step, got {size}, "
                    f"which makes {micro} of the largest step's {max(counts)} samples, and {rows} do not divide so. "
                    "Set it higher, or leave it out."
                )
        length = self.config.training.context_length // sharing.size
        tokens = max(counts) // (sharing.groups * micro) * length
        if tokens > _MOST_TOKENS:
            raise ValueError(
                f"training.micro_batch_size: expected at most {_MOST_TOKENS:,} tokens that a process takes at once, "
                f"got {tokens:,}. Set it lower, or training.tokens_per_step."
            )
        return micro

    def _make_model(self) -> TrailmarkForCausalLM:
        config = self.config
        cls = MODELS[self.model_config.model_type]
        if config.init_from is None:
            model = cls(self.model_config)
        else:
            model = states.initial_model(cls, self.model_config, config.init_from)
        model.embedder = self.embedder
        if config.training.computes_in == "float64":
            model = model.double()
        self.parts.apply(model)
        return model

    # --- the run -------------------------------------------------------------------------------------------

    def batch(self, step: int) -> Batch:
        """The global batch of ``step``."""
        return self.task.batch(step, 0, self.task.rows(step))

    @property
    def num_tokens(self) -> int:
        """Tokens of the training text; 0 where samples are read one by one."""
        return 0 if self.corpus is None else len(self.corpus)

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
        """Whether the output folder holds this very run, trained to its end.

        Raises:
            ValueError: it does, and its model is damaged or gone.
        """
        history = read_json(self.output / HISTORY_FILE)
        if not isinstance(history, dict) or not holds_run(self.output, self.config):
            return False
        if history.get("data", self.data_fingerprint) != self.data_fingerprint:
            return False
        if history.get("model_manifest") == MODEL_MANIFEST:
            try:
                verify_model(self.output)
            except ValueError as error:
                raise ValueError(
                    f"output: the model in {str(self.output)!r} is not as it was saved ({error}) Put it back; "
                    f"or remove that file and {HISTORY_FILE}, and the same command makes the model again, from the "
                    "newest checkpoint if there is one."
                ) from error
        return True

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
        self.sharing.expect_groups()
        # processes get to know each other here
        arguments = training_arguments(self.config.training, self.output / CHECKPOINTS, self.micro)
        expect_one_precision(self.config)
        with self._held:  # by the main process: the folder
            return self._train(arguments)

    def _train(self, arguments: TrainingArguments) -> TrailmarkForCausalLM | None:
        settings = self.config.training
        by_main(self._find_begun)
        last = by_main(self._claim_output)
        if settings.gradient_checkpointing:
            checkpoint_activations(self.model)
        self._held.callback(self.sharing.end, self.model)
        self.sharing.begin(self.model)
        batches = Batches(self.task, settings.steps, self.micro, self.sharing)
        trainer = self.trainer = RunTrainer(
            self, self.save_checkpoint, model=self.model, args=arguments, train_dataset=batches
        )
        trainer.remove_callback(PrinterCallback)
        if last is not None:
            self.restore(read_state(last))
            batches.start = self.step
        self._began = time.perf_counter()
        with self.stopping_softly():
            if last is None and self.config.distil.fit_steps:
                self._fit_memory(arguments.device)
                self._began = time.perf_counter()  # what is left is said by the steps
            elif last is None and settings.train == "retriever":
                self._expect_reading()
            if not self.stopping:
                trainer.train(resume_from_checkpoint=None if last is None else str(last))
        if self.stopping:
            if self.stop_signal == signal.SIGINT:
                raise KeyboardInterrupt
            return None
        weights = states.whole_weights(trainer.model)
        by_main(lambda: self.save(weights))
        return self.model

    def _expect_reading(self) -> None:
        """Raise a ValueError where the layers read nothing, so that the text's loss says nothing of what is chosen."""
        memory = self.model.fitted_memory()
        if memory is not None and not memory.reads:
            raise ValueError(
                "training.train: expected additions or all for a model whose layers read nothing yet, got retriever: "
                "no choice of chunks would change its loss. Set distil.fit_steps, or train the additions first."
            )

    def fitted_texts(self) -> list[tuple[int, int]]:
        """That the memory is fitted to before the first step, in all processes: those of the first steps, by row."""
        steps = range(self.config.distil.fit_steps)
        return [(step, row) for step in steps for row in range(self.task.rows(step))]

    def begin_fit(self) -> MemoryFit:
        assert self.teacher is not None
        return MemoryFit(self.model.eval(), self.teacher, self.config.distil.fit_retriever)

    def _fit_memory(self, device: torch.device) -> None:
        """Before the first step, on the texts of the first steps: each process reads its share of them."""
        self.model.to(device)
        texts = self.fitted_texts()
        self.say(f"Fitting the memory to the teacher, on {len(texts)} texts.")

        fit = self.begin_fit()
        began = told = time.perf_counter()
        for number, (step, row) in enumerate(own := texts[rank() :: world_size()], start=1):
            if self.stop_signal and not connected():  # several leave together, at the end of a step
                self.stopping = True
                return
            fit.add(self.task.batch(step, row, 1))
            if (now := time.perf_counter()) - told > _TELLING_SECONDS:
                left, told = (now - began) / number * (len(own) - number), now
                self.say(f"{number} of {len(own)} texts are read, about {duration(left)} left.")
        found, tokens, chunks = fit.solve()
        taught = "" if chunks is None else f" Scores are {chunks:.3f} nats from where it looks."
        if self.config.distil.fit_retriever == "text":
            taught = " Chunks ask for what is like the chunk that comes next."
        self.say(
            f"The memory finds {found:.0%} of the teacher's keys and values, on {tokens:,} tokens.{taught}"
        )

    # --- the folder ----------------------------------------------------------------------------------------

    def _find_begun(self) -> None:
        self._begun = self._additions_before()

    def _additions_before(self) -> Additions | None:
        """What the run's are added to; None: it trains all weights, or begins with none that a conversion wrote.

        Raises:
            ValueError: a file beside the model that it begins with is damaged.
        """
        if self.config.init_from is None or self.parts.train == "all":
            return None
        begun = Additions.of(folder := Path(self.config.init_from))
        if begun is None or begun.fresh:
            return begun
        if self.config.training.computes_in == "float64" or begun.dtype != torch.float32:
            self.say(f"No {ADDITIONS} will be left: one of two trainings after each other is in float64.")
            return None
        if has_signed_model(folder):
            try:
                verify_model(folder)
            except ValueError as error:
                self.say(f"No {ADDITIONS} will be left: {folder} is not what a training left ({error}).")
                return None
        return begun

    def _additions(self, weights: dict[str, Tensor]) -> Additions | None:
        """What is learned beside a base by now; None: nothing that is apart from it, or no conversion began it."""
        if self._begun is None:
            return None
        return self._begun.then(self.model_config, self.model.dtype, *learned(self.model, weights))

    def _claim_output(self) -> Path | None:
        """Make the output folder this run's; its newest whole checkpoint, if any."""
        expect_writable("output", self.output)
        self._held.enter_context(locked(self.output, "trailmark train"))
        if (self.output / RUN_FILE).exists() and (other := other_than(self.output, self.config)) != []:
            what = "" if other is None else f": {'; '.join(other[:3])}{' and more' if len(other) > 3 else ''}"
            raise ValueError(
                f"output: {str(self.output)!r} holds a run with another configuration ({RUN_FILE}){what}. Choose "
                "another output (init_from begins with that run's weights), or remove that folder to start anew."
            )
        folder = self.output / CHECKPOINTS
        remove_leftovers(self.output)
        checkpoints.remove_leftovers(folder)
        last, damaged = checkpoints.find_newest_whole(folder)
        for line in damaged:
            self.say(line)
        history = read_json(self.output / HISTORY_FILE)
        data = history.get("data") if isinstance(history, dict) else None  # of a run that was finished
        if last is not None:
            kept = read_state(last)
            data = kept["data"]
            unknown = not (self.output / RUN_FILE).exists()
            if unknown and checkpoints.read_about(last).get("config") != config_hash(self.config):
                raise ValueError(
                    f"output: {str(self.output)!r} holds checkpoints of a run with another configuration, and no "
                    f"{RUN_FILE}. Choose another output, or remove that folder to start anew."
                )
        elif not (self.output / RUN_FILE).exists():
            self._expect_no_model()
        if data not in (None, self.data_fingerprint):
            what = "text" if self.table is None else "text and neighbours"
            raise ValueError(
                f"data: expected the {what} that the run in {str(self.output)!r} began with ({data[:16]}), got "
                f"{self.data_fingerprint[:16]}. Put the files back as they were, choose another output, or remove that "
                "folder to start anew."
            )
        if last is not None:
            self.say(f"Going on from step {kept['step']}: the newest whole checkpoint is {last}.")
        with saving(self.output):
            write_text(self.output / RUN_FILE, self.config.to_yaml())
        return last

    def _expect_no_model(self) -> None:
        """Raise a ValueError where the output holds a model that no training wrote: it would be written over."""
        names = {"config.json", "tokenizer_config.json"}
        held = [
            path.name for path in self.output.iterdir() if path.name in names or path.suffix == ".safetensors"
        ]
        if held:
            raise ValueError(
                f"output: expected a folder of a run, or a new one, {str(self.output)!r} holds {min(held)}, which no "
                "training wrote. Choose another output."
            )

    def save_checkpoint(self, trainer: RunTrainer) -> None:
        """Write a checkpoint of this step: in all processes, the files by the main one."""
        state = states.gather(trainer.model, trainer.optimizer, trainer.lr_scheduler)
        own = self.state() | {"data": self.data_fingerprint}
        about = environment() | {"config": config_hash(self.config), "data": self.data_fingerprint}

        def write() -> None:
            folder = self.output / CHECKPOINTS
            with checkpoints.writing(folder, self.step, about, state.bytes()) as staging:
                state.write(staging, self.model)
                trainer.state.save_to_json(str(staging / "trainer_state.json"))
                write_json(staging / STATE_FILE, own)
            checkpoints.retain(folder, self.config.training.keep_checkpoints)

        by_main(write)

    def save(self, weights: dict[str, Tensor]) -> None:
        """The model, what of it is apart from its base, its tokenizer and the history, into the output folder.

        Args:
            weights: all of the model's, with its adapters apart.
        """
        with saving(self.output):
            with tempfile.TemporaryDirectory(dir=self.output, prefix=SAVING) as folder:
                self.model.save_pretrained(folder, state_dict=states.plain_weights(self.model, weights))
                if (additions := self._additions(weights)) is not None:
                    additions.write(Path(folder) / ADDITIONS)
                self.tokenizer.save_pretrained(folder)
                mode = self.output.stat().st_mode & 0o666  # safetensors' files are their owner's alone
                names = []
                for file in Path(folder).iterdir():
                    os.chmod(file, mode)
                    with open(file, "rb+") as whole:
                        sync_file(whole)  # after a power cut too, a history means a model
                    os.replace(file, self.output / file.name)
                    names.append(file.name)
            sign_model(self.output, names)
            history = {
                "data": self.data_fingerprint,
                "steps": self.history,
                "seconds": self.seconds,
                "tokens": self.tokens_trained,
                "tokens_per_second": self.tokens_per_second,
                "level_starts": self.curriculum.starts,
                "levels": [asdict(level) for level in self.curriculum.levels],
                "model_manifest": MODEL_MANIFEST,  # without it the model is not whole
            }
            refresh_card(self.output, history)
            write_json(self.output / HISTORY_FILE, history, durable=True)  # last: it says that all is there
