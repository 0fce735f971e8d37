"""Training by transformers' Trainer: needle tasks with a curriculum, or plain text; stops and resumes."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

from trailmark.data.batches import TextSlices
from trailmark.data.corpus import Tokens, load_tokenizer, read_texts, standard_library_texts, tokenize
from trailmark.data.files import expect_writable, read_json, write_json, write_text
from trailmark.data.needles import CURRICULUM, Level, NeedleFormat, NeedleTexts
from trailmark.models import DRTForCausalLM, TrailmarkForCausalLM
from trailmark.models.causal_lm import shift_labels
from trailmark.ops import fold_seed
from trailmark.training.config import ARCHITECTURES, RunConfig, TrainingConfig
from trailmark.training.optimizer import MuonAdamW

_SMOOTHING = 0.95  # of the moving averages that are shown and that advance the curriculum
_CURRICULUM_FILE = "curriculum.json"
HISTORY_FILE = "history.json"  # written at the end: the run is complete
_RUN_FILE = "run.yaml"


@dataclass
class Curriculum:
    """Which level a step trains: the next one once the first digits are answered well enough.

    A change takes effect two steps later, because the loader works one batch ahead; thus a resumed run
    makes the same batches.
    """

    levels: tuple[Level, ...] = CURRICULUM
    threshold: float = 0.9
    starts: list[int] = field(default_factory=lambda: [0])  # the first step of each level reached
    samples: list[int] = field(default_factory=lambda: [0])  # the first sample of each level reached
    average: float = 0.0

    def level_at(self, step: int) -> int:
        return max(n for n, start in enumerate(self.starts) if start <= step)

    def rows(self, level: int, tokens_per_step: int, chunk_size: int) -> int:
        return max(1, tokens_per_step // (self.levels[level].chunks * chunk_size))

    def update(self, step: int, accuracy: float | None, rows: int) -> None:
        """Take in the accuracy of ``step``, a batch of ``rows`` samples; None: it asked nothing."""
        if step < self.starts[-1] or accuracy is None:
            return  # a level was just reached; its first batch is still to come
        self.average = _SMOOTHING * self.average + (1 - _SMOOTHING) * accuracy
        if self.average > self.threshold and len(self.starts) < len(self.levels):
            start = step + 2
            self.samples.append(self.samples[-1] + (start - self.starts[-1]) * rows)
            self.starts.append(start)
            self.average = 0.0


class _Batches(IterableDataset[dict[str, Tensor]]):
    """Whole batches by step, from ``start``."""

    def __init__(self, make: Callable[[int], dict[str, Tensor]], steps: int) -> None:
        self.make, self.steps, self.start = make, steps, 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step in range(self.start, self.steps):
            yield self.make(step)


class _Trainer(Trainer):
    """The Trainer with our batches, optimizer and weighted loss."""

    optimizer: Any
    lr_scheduler: Any

    def __init__(self, run: Run, **kwargs: Any) -> None:
        self.run = run
        super().__init__(**kwargs)

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_size=None)  # batches are made whole

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.model, self.run.config.training)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            settings = self.run.config.training

            def factor(step: int) -> float:
                hold = settings.constant_fraction * num_training_steps
                fall = max(0.0, step - hold) / max(1.0, num_training_steps - hold)
                warm = min(1.0, (step + 1) / max(1, settings.warmup_steps))
                return warm * (1 - fall * (1 - settings.final_fraction))

            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
        return self.lr_scheduler

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with _saving(self.run.output):
            super()._save_checkpoint(model, trial)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        loss, out, labels = weighted_loss(model, self.run.retrieves, inputs)
        self.run.measure(int(self.state.global_step), loss, out, labels, inputs)
        return (loss, out) if return_outputs else loss


class _Progress(TrainerCallback):
    """Passes progress on, keeps the history, saves the curriculum, and stops when asked."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.run.step_done(state.global_step)
        if self.run.interrupted:
            control.should_save = control.should_training_stop = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        curriculum = self.run.curriculum
        kept = {"starts": curriculum.starts, "samples": curriculum.samples, "average": curriculum.average}
        kept |= {"history": self.run.history, "averages": self.run.averages, "seconds": self.run.seconds}
        kept |= {"tokens": self.run.tokens_trained, "text": self.run.text_hash}
        with _saving(self.run.output):
            write_json(folder / _CURRICULUM_FILE, kept)


class Run:
    """One training run: data, model, progress. ``train`` starts it, or resumes what its folder holds."""

    def __init__(
        self,
        config: RunConfig,
        progress: Callable[[Run], None] = lambda run: None,
        text: Tokens | None = None,
    ) -> None:
        self.config, self.progress = config, progress
        self.tokenizer = load_tokenizer(config.data.tokenizer)
        self.output = Path(config.output)
        set_seed(config.training.seed)
        self.model: TrailmarkForCausalLM = ARCHITECTURES[config.model.get("architecture", "drt")](
            config.model_config(len(self.tokenizer))
        )
        self.curriculum = Curriculum(CURRICULUM[config.data.first_level :], config.data.level_accuracy)
        self.history: list[dict[str, float]] = []
        self.averages: dict[str, float] = {}
        self.step, self.seconds, self.tokens_trained, self.interrupted = 0, 0.0, 0, False
        self._began = time.perf_counter()
        if text is None:
            paths = config.data.paths
            texts = read_texts(paths) if paths else standard_library_texts("train")
            text = tokenize(texts, self.tokenizer)
        self._tokens = text
        self._make = self._needles(text) if config.data.task == "needles" else self._text(text)

    @property
    def retrieves(self) -> bool:
        return isinstance(self.model, DRTForCausalLM)

    # --- batches -------------------------------------------------------------------------------------------

    def _needles(self, text: Tokens) -> Callable[[int], dict[str, Tensor]]:
        data, training, seed = self.config.data, self.config.training, self.config.training.seed
        texts = NeedleTexts(
            NeedleFormat.of(self.tokenizer),
            text,
            data.chunk_size,
            seed,
            data.filler_weight,
            data.first_digit_weight,
        )

        def make(step: int) -> dict[str, Tensor]:
            curriculum = self.curriculum
            level = curriculum.level_at(step)
            rows = curriculum.rows(level, training.tokens_per_step, data.chunk_size)
            first = curriculum.samples[level] + (step - curriculum.starts[level]) * rows
            batch = vars(texts.batch(first, rows, curriculum.levels[level]))
            batch["noise_seed"] = fold_seed(seed, step, batch.pop("sample_numbers"))
            return _without_trivial_layout(batch)

        return make

    def _text(self, text: Tokens) -> Callable[[int], dict[str, Tensor]]:
        training, share = self.config.training, self.config.data.early_landmarks
        chunk_size = getattr(self.model.config, "chunk_size", 1)  # a chunk of one token is always full
        slices = TextSlices(text, training.sequence_length, training.seed)
        rows = training.tokens_per_step // training.sequence_length

        def make(step: int) -> dict[str, Tensor]:
            ids = slices.batch(step * rows, rows)
            seeds = fold_seed(training.seed, step, torch.arange(step * rows, (step + 1) * rows))
            batch = {"input_ids": ids, "labels": ids, "noise_seed": seeds}
            batch["loss_weights"] = torch.ones(ids.shape)
            if share > 0 and chunk_size > 1:
                batch["close_chunk"] = slices.close_chunk(step * rows, rows, chunk_size, share)
            return _without_trivial_layout(batch)

        return make

    # --- measuring -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def measure(self, step: int, loss: Tensor, out: Any, labels: Tensor, inputs: dict[str, Any]) -> None:
        """Moving averages of the loss, and of needle accuracy and retrieval recall where there are needles."""
        mask = inputs.get("attention_mask")
        self.tokens_trained += inputs["input_ids"].numel() if mask is None else int(mask.sum())
        found = {"loss": float(loss)}
        if "first_digits" in inputs:
            asked = F.pad(inputs["first_digits"][:, 1:], (0, 1))
            correct = out.logits[asked].argmax(-1) == labels[asked]
            needles = inputs["needle_chunks"]
            if correct.numel():
                found["accuracy"] = float(correct.float().mean())
                if out.retrieval is not None:
                    hits = [(s.indices == needles[..., None]).any(-1) for s in out.retrieval]
                    found["recall"] = float(torch.stack(hits).any(0)[needles >= 0].float().mean())
            self.curriculum.update(step, found.get("accuracy"), inputs["input_ids"].shape[0])
        for name, value in found.items():
            old = self.averages.get(name, value)
            self.averages[name] = _SMOOTHING * old + (1 - _SMOOTHING) * value

    def step_done(self, step: int) -> None:
        now = time.perf_counter()
        self.seconds, self._began, self.step = self.seconds + now - self._began, now, step
        if step % 10 == 0 or step == self.config.training.steps:
            level = float(self.curriculum.level_at(step))
            self.history.append({"step": step, "seconds": self.seconds, "level": level} | self.averages)
        self.progress(self)

    @property
    def num_tokens(self) -> int:
        """Tokens of the training text."""
        return len(self._tokens)

    @cached_property
    def text_hash(self) -> str:
        """Of the training text: a run goes on exactly only on the same one."""
        return hashlib.sha256(self._tokens.data).hexdigest()

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_trained / max(self.seconds, 1e-9)

    # --- the run -------------------------------------------------------------------------------------------

    def measure_speed(self, steps: int = 8) -> float:
        """Seconds per step on batches of the last level, the slowest; the model is left as it was."""
        trial = Run(self.config, text=self._tokens)
        count = len(trial.curriculum.levels)
        trial.curriculum.starts = trial.curriculum.samples = [0] * count
        model = trial.model.train()
        optimizer = make_optimizer(model, self.config.training)
        seconds = []
        for step in range(steps):
            began = time.perf_counter()
            loss, out, labels = weighted_loss(model, trial.retrieves, inputs := trial._make(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            trial.measure(step, loss, out, labels, inputs)
            seconds.append(time.perf_counter() - began)
        return sorted(seconds)[steps // 2]

    @property
    def finished(self) -> bool:
        """Whether the output folder holds this very run, trained to its end."""
        return read_json(self.output / HISTORY_FILE) is not None and self._holds_this_run()

    def train(self) -> TrailmarkForCausalLM:
        """Train to the end, from the last checkpoint if there is one; KeyboardInterrupt saves and leaves."""
        settings = self.config.training
        if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            raise ValueError(
                f"WORLD_SIZE: expected one process, got {processes}: in this version each would train on the same "
                "batches. Start trailmark train without torchrun or accelerate launch."
            )
        last = self._claim_output()
        arguments = TrainingArguments(
            output_dir=str(self.output / "checkpoints"),
            max_steps=settings.steps,
            per_device_train_batch_size=1,
            max_grad_norm=settings.max_grad_norm,
            save_strategy="steps",
            save_steps=settings.save_steps,
            save_total_limit=2,
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            ignore_data_skip=True,
            dataloader_pin_memory=False,
            use_cpu=not torch.cuda.is_available(),  # not Apple's GPU: it lacks float64 and is untested
            seed=settings.seed,
        )
        if settings.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        batches = _Batches(self._make, settings.steps)
        trainer = _Trainer(
            self, model=self.model, args=arguments, train_dataset=batches, callbacks=[_Progress(self)]
        )
        trainer.remove_callback(PrinterCallback)
        if last is not None:
            self._restore(last)
            batches.start = self.step
        self._began = time.perf_counter()
        with _stop_softly(self):
            trainer.train(resume_from_checkpoint=str(last) if last else None)
        if self.interrupted:
            raise KeyboardInterrupt
        self.model.cpu()
        self.save()
        return self.model

    def _claim_output(self) -> Path | None:
        """Make the output folder this run's; the last whole checkpoint in it, if any."""
        expect_writable("output", self.output)
        if (self.output / _RUN_FILE).exists() and not self._holds_this_run():
            raise ValueError(
                f"output: {str(self.output)!r} holds a run with another configuration ({_RUN_FILE}). "
                "Choose another output, or remove that folder to start anew."
            )
        with _saving(self.output):
            write_text(self.output / _RUN_FILE, self.config.to_yaml())
        whole = []
        for folder in (self.output / "checkpoints").glob("checkpoint-*"):
            if read_json(folder / _CURRICULUM_FILE) is not None:  # written last
                whole.append(folder)
            elif folder.is_dir() and not (folder / _CURRICULUM_FILE).exists():
                # half, of a killed run: the Trainer would keep it and remove a whole one
                shutil.rmtree(folder)
        last = max(whole, key=lambda folder: int(folder.name.rpartition("-")[2]), default=None)
        if last and read_json(last / _CURRICULUM_FILE).get("text", self.text_hash) != self.text_hash:
            raise ValueError(
                f"data: expected the text that the run in {str(self.output)!r} began with, got another one. Put the "
                "files back as they were, choose another output, or remove that folder to start anew."
            )
        return last

    def _holds_this_run(self) -> bool:
        try:
            other = yaml.safe_load((self.output / _RUN_FILE).read_text())
        except (OSError, ValueError, yaml.YAMLError):
            return False
        if not isinstance(other, dict):
            return False
        own = yaml.safe_load(self.config.to_yaml())
        for section in ("data", "training"):  # settings that are newer than the folder
            if isinstance(other.get(section), dict):
                other[section] = vars(getattr(RunConfig(), section)) | other[section]
        return {**other, "output": ""} == {**own, "output": ""}  # a folder may be moved

    def _restore(self, checkpoint: Path) -> None:
        kept = read_json(checkpoint / _CURRICULUM_FILE)
        self.curriculum.starts, self.curriculum.samples = kept["starts"], kept["samples"]
        self.curriculum.average = kept["average"]
        self.history, self.averages, self.seconds = kept["history"], kept["averages"], kept["seconds"]
        self.step = int(checkpoint.name.rpartition("-")[2])
        self.tokens_trained = kept.get("tokens", self.step * self.config.training.tokens_per_step)

    def save(self) -> None:
        """The model, its tokenizer, the configuration and the history, into the output folder."""
        with (
            _saving(self.output),
            tempfile.TemporaryDirectory(dir=self.output, prefix=".saving-") as folder,
        ):
            self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            for file in Path(folder).iterdir():
                os.replace(file, self.output / file.name)
            history = {
                "steps": self.history,
                "seconds": self.seconds,
                "tokens_per_second": self.tokens_per_second,
                "level_starts": self.curriculum.starts,
                "levels": [asdict(level) for level in self.curriculum.levels],
            }
            write_json(self.output / HISTORY_FILE, history)


def _without_trivial_layout(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without a mask or marks that change nothing: the model keeps its layouts of uniform batches."""
    trivial = {"attention_mask": True, "close_chunk": False}
    return {key: x for key, x in batch.items() if key not in trivial or bool((x != trivial[key]).any())}


def make_optimizer(model: Any, settings: TrainingConfig) -> torch.optim.Optimizer:
    """What ``training.optimizer`` names."""
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.optimizer == "muon":
        return MuonAdamW(model, settings.matrix_learning_rate, rate, weight_decay=decay)
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=decay)


def weighted_loss(model: Any, retrieves: bool, inputs: dict[str, Any]) -> tuple[Tensor, Any, Tensor]:
    """The weighted mean of the token losses, the model's output and the shifted labels.

    Where landmarks are tokens of the text, what a token's landmark adds weighs as the token does.
    """
    layout = {key: inputs[key] for key in ("attention_mask", "close_chunk") if key in inputs}
    out = model(
        input_ids=inputs["input_ids"],
        noise_seed=inputs["noise_seed"],  # whatever a model draws, a run that goes on draws again
        output_retrieval=retrieves,
        **layout,
    )
    labels = shift_labels(model.bearing_loss(inputs["labels"], inputs["input_ids"]))
    dtype = torch.promote_types(out.logits.dtype, torch.float32)
    losses = F.cross_entropy(
        out.logits.to(dtype).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none"
    )
    if out.landmark_loss is not None:
        losses = losses + out.landmark_loss.flatten()
    weights = F.pad(inputs["loss_weights"][:, 1:], (0, 1)).masked_fill(labels == -100, 0).flatten()
    return (losses * weights).sum() / weights.sum().clamp(min=1e-9), out, labels


@contextmanager
def _saving(folder: Path) -> Iterator[None]:
    """Each library has an error of its own for a full disk; some do not say what they are."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"output: cannot save in {str(folder)!r} ({str(error).strip().splitlines()[0]}). Free some space and start "
            "the same command again; what was saved before is whole."
        ) from error


@contextmanager
def _stop_softly(run: Run) -> Iterator[None]:
    """Ctrl-C ends the step, saves and stops; a second one stops at once."""

    def stop(signum: int, frame: Any) -> None:
        run.interrupted = True
        signal.signal(signal.SIGINT, previous)

    try:
        previous = signal.signal(signal.SIGINT, stop)
    except ValueError:  # not in the main thread: the caller handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
