"""transformers' Trainer with our batches, optimizer, schedule, loss, guards and checkpoints.

What is overridden here, and why: batches come whole and divided (``get_train_dataloader``), a loss is weighted over
the global batch (``_get_num_items_in_batch``, ``compute_loss``), a step that is not finite must not be taken
(``_get_grad_norm`` and the callback), and a checkpoint is one that cannot be half-written (``_save_checkpoint`` and
what loads it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from trailmark import pretrained
from trailmark.processes import all_reduced, world_size
from trailmark.training import states
from trailmark.training.config import TrainingConfig
from trailmark.training.context_parallel import Sharing
from trailmark.training.loss import Called, Meter, total_weight, weighted_loss
from trailmark.training.optimizer import MuonAdamW, by_rate, parameter_groups, vocabulary_of
from trailmark.training.parts import rate_factor
from trailmark.training.running import RunningState
from trailmark.training.tasks import Batch, Task, share_of


class Batches(IterableDataset[Batch]):
    """This process's micro-batches, step by step, from step ``start``."""

    def __init__(self, task: Task, steps: int, micro: int, sharing: Sharing) -> None:
        self.task, self.steps, self.micro, self.start, self.sharing = task, steps, micro, 0, sharing

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self.start, self.steps):
            for number in range(self.micro):
                sharing = self.sharing
                first, count = share_of(
                    self.task.rows(step), sharing.groups, sharing.group, self.micro, number
                )
                yield sharing.stretch(self.task.batch(step, first, count))


def schedule(settings: TrainingConfig, step: int) -> float:
    """The learning rate of ``step`` as a share of its peak."""
    hold = max(settings.constant_fraction * settings.steps, settings.warmup_steps)
    fall = min(1.0, max(0.0, step - hold) / max(1.0, settings.steps - hold))
    if settings.schedule == "cosine":
        fall = (1 - math.cos(math.pi * fall)) / 2
    warm = min(1.0, (step + 1) / max(1, settings.warmup_steps))
    return warm * (1 - fall * (1 - settings.final_fraction))


def make_optimizer(model: Any, settings: TrainingConfig) -> torch.optim.Optimizer:
    """What ``training.optimizer`` names, of what is trained."""
    betas = settings.adam_beta1, settings.adam_beta2
    factor_of = partial(rate_factor, model, settings)
    if settings.optimizer == "muon":
        return MuonAdamW(
            model, settings.matrix_learning_rate, settings.learning_rate, betas,
            weight_decay=settings.weight_decay, decay_vectors=settings.decay_vectors, eps=settings.adam_epsilon,
            decay_embeddings=settings.decay_embeddings, factor_of=factor_of,
        )  # fmt: skip
    rated = by_rate(model.named_parameters(), factor_of)
    spared = () if settings.decay_embeddings else vocabulary_of(model)
    groups = parameter_groups(
        rated, settings.learning_rate, settings.weight_decay, settings.decay_vectors, spared
    )
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, eps=settings.adam_epsilon)


def training_arguments(settings: TrainingConfig, output: Path, micro: int) -> TrainingArguments:
    """Of transformers' Trainer, which saves in ``output``; ``micro`` batches make a step. Processes meet here."""
    several = world_size() > 1
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=settings.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=micro,
        max_grad_norm=settings.max_grad_norm,
        bf16=settings.computes_in == "bfloat16",
        save_strategy="steps",
        save_steps=settings.save_steps,
        logging_strategy="steps" if settings.report_to else "no",
        logging_steps=settings.logging_steps,
        logging_nan_inf_filter=False,  # it waits for the device; the guard looks at every step
        report_to=settings.report_to,
        disable_tqdm=True,
        remove_unused_columns=False,
        ignore_data_skip=True,
        dataloader_pin_memory=False,
        use_cpu=not torch.cuda.is_available(),  # not Apple's GPU: it lacks float64 and is untested
        seed=settings.seed,
        # every parameter gets a gradient, if of zeros
        ddp_find_unused_parameters=False if several else None,
        ddp_broadcast_buffers=False if several else None,
        fsdp=several and settings.parallel == "fsdp",
        fsdp_config={"version": 2} if several and settings.parallel == "fsdp" else None,
    )
    # several GPUs without torchrun would be transformers' nn.DataParallel, whose replicas have no parameters
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


def checkpoint_activations(model: Any) -> None:
    """Compute each layer's activations again in the backward pass instead of keeping them."""
    # transformers 5.20 renamed it
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


class RunTrainer(Trainer):
    """The Trainer of one run.

    Args:
        run: is asked before and after each step.
        save: writes a checkpoint of the present step, in all processes.
    """

    loss_is_scaled_for_ga = True
    control: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, run: RunningState, save: Callable[[RunTrainer], None], **kwargs: Any) -> None:
        self.run, self._save_run, self.meter, self.grad_norm = run, save, Meter(), 0.0
        self.micro_batches: list[Batch] = []  # of the present step: a step that fails is looked into
        super().__init__(callbacks=[RunCallback(self)], **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        if self.args.fsdp_plugin_args is not None and state.distributed_type == DistributedType.MULTI_CPU:
            # accelerate passes the wish over without a word where there is no accelerator; FSDP2 itself runs on gloo
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.is_fsdp_enabled = True
        if self.is_fsdp_enabled:
            self._check_sharding(state.fsdp_plugin)

    def _check_sharding(self, plugin: Any) -> None:
        """Also of what ``accelerate launch`` was told."""
        if plugin.fsdp_version != 2:
            raise ValueError(
                f"fsdp_version: expected 2, got {plugin.fsdp_version}. Give accelerate launch --fsdp_version 2."
            )
        # weights and gradients stay as they are: autocast
        plugin.mixed_precision_policy = MixedPrecisionPolicy()
        if plugin.transformer_cls_names_to_wrap is None:
            # accelerate wants to find in the model each kind of block that its class may hold
            kinds = {type(module).__name__ for module in self.run.model.modules()}
            plugin.transformer_cls_names_to_wrap = sorted(kinds & set(self.run.model._no_split_modules or ()))

    # --- batches and loss ----------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_size=None)  # batches are made whole

    def _get_num_items_in_batch(self, batch_samples: list[Batch], device: torch.device) -> Tensor | None:
        self.micro_batches = batch_samples
        if not batch_samples:
            return None
        return all_reduced(total_weight(self.run.model, batch_samples).to(device))

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        assert num_items_in_batch is not None
        with self._autocast():
            called = self._called(model, inputs, num_items_in_batch)
        self.meter.add(called, inputs)
        self.run.look_at(called.out)
        loss = (
            called.loss * self.args.world_size
        )  # gradients are averaged over processes, this is a part of a sum
        return (loss, called.out) if return_outputs else loss

    def _called(self, model: Any, inputs: dict[str, Any], total: Tensor | None) -> Called:
        """What a micro-batch of the present step gives."""
        run, step = self.run, self.state.global_step
        rows, positions = self._begin(step), run.config.training.loss_positions
        lesson, scores, slab = run.lesson(step), run.asks_for_scores, run.config.training.loss_slab
        return weighted_loss(
            model, inputs, total, rows, positions=positions, lesson=lesson, scores=scores, slab=slab
        )

    def _begin(self, step: int) -> int:
        """Tell the model how far training is; the rows of the global batch of ``step``."""
        self.run.model.training_progress(step / self.run.config.training.steps)
        return self.run.task.rows(step)

    def _autocast(self) -> torch.autocast:
        """Also where accelerate leaves it to FSDP2, whose own mixed precision would round weights and gradients."""
        half = self.run.config.training.computes_in == "bfloat16"
        return torch.autocast(self.args.device.type, torch.bfloat16, enabled=half)

    def repeat_step(self) -> None:
        """Forward and backward of this process's part of the present step once more."""
        for batch in self.micro_batches:
            inputs = self._prepare_inputs(batch)
            with self._autocast():
                loss = self._called(self.model_wrapped, inputs, None).loss
            self.accelerator.backward(loss)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0  # transformers' guess counts the parameters anew for every batch; estimate.py knows better

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        found = super()._get_grad_norm(model, grad_norm)
        if hasattr(found, "full_tensor"):
            found = found.full_tensor()
        self.grad_norm = found
        return found

    # --- optimizer and schedule ----------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.model, self.run.config.training)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            settings = self.run.config.training
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda step: schedule(settings, step)
            )
        return self.lr_scheduler

    # --- what is shown and measured ------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs = logs | {name: value for name, value in self.run.shown().items() if name != "loss"}
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = {f"eval_{name}": value for name, value in self.run.validate(self.model_wrapped).items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # --- checkpoints ---------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._save_run(self)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with _going_on(resume_from_checkpoint):
            states.load_weights(resume_from_checkpoint, self.model if model is None else model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            with _going_on(checkpoint):
                states.load_optimizer(checkpoint, self.model, self.optimizer)
                self.lr_scheduler.load_state_dict(states.read_scheduler(checkpoint))

    def _load_scaler(self, checkpoint: str | None) -> None:
        """None is used; a pickled one in a stranger's checkpoint is not looked at."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            with _going_on(checkpoint):
                states.load_random_state(checkpoint)


def _going_on(checkpoint: str) -> AbstractContextManager[None]:
    """A block that reads a checkpoint: it was verified, but whoever can sign it can write anything."""
    return pretrained.loading("output", f"cannot go on from {checkpoint!r}")


class RunCallback(TrainerCallback):
    """Looks at a step before it is taken; keeps the history, evaluates and stops when asked."""

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer, self.run = trainer, trainer.run

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        vector, norm = trainer.meter.vector(), float(trainer.grad_norm)
        if not self.run.may_step(state.global_step + 1, vector, norm, trainer.model, trainer.repeat_step):
            kwargs["optimizer"].zero_grad(set_to_none=True)  # parameters without a gradient stay as they are

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        settings = self.run.config.training
        self.run.step_done(state.global_step)
        every = settings.eval_steps
        if every is not None and (state.global_step % every == 0 or state.global_step == settings.steps):
            control.should_evaluate = True
        if self.run.stopping:
            control.should_save = control.should_training_stop = True
        return control
