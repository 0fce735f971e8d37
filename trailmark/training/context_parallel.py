"""Several processes that share each text of a training: which texts a process has a part in, and which part."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
import torch.nn.functional as F

from trailmark.models import TrailmarkForCausalLM
from trailmark.models.context_parallel import share_texts
from trailmark.processes import rank, world_size
from trailmark.training.tasks import Batch


@dataclass(frozen=True)
class Sharing:
    """Processes in groups of ``size``, each of which takes texts of its own and shares each of them."""

    size: int

    def expect_groups(self) -> None:
        """Raise a ValueError where the processes make no whole groups."""
        if world_size() % self.size:
            raise ValueError(
                f"training.context_parallel: expected a divisor of the {world_size()} processes, got {self.size}. "
                f"Start a multiple of {self.size} of them (torchrun --nproc-per-node), or set it to 1."
            )

    @property
    def groups(self) -> int:
        """As many as there are, at least one: a forecast is asked for by one process."""
        return max(1, world_size() // self.size)

    @property
    def processes(self) -> int:
        """That train together."""
        return self.groups * self.size

    @property
    def group(self) -> int:
        """This process's."""
        return rank() // self.size

    def begin(self, model: TrailmarkForCausalLM) -> None:
        """Let the model share its texts; all processes, which know each other, call this together."""
        if self.size == 1:
            return
        firsts = range(0, world_size(), self.size)
        timeout = timedelta(days=1)  # as long as the slowest of them takes for what it does alone
        groups = [
            dist.new_group(range(first, first + self.size), timeout=timeout) for first in firsts
        ]  # by all, in one order
        own = groups[self.group]
        assert isinstance(own, dist.ProcessGroup)
        share_texts(model, own)

    def end(self, model: TrailmarkForCausalLM) -> None:
        """Let the model take whole texts again."""
        if (parallel := model.context_parallel) is not None:
            model.context_parallel = None
            dist.destroy_process_group(parallel.group)

    def stretch(self, batch: Batch) -> Batch:
        """This process's part of texts [B, T]: T / size tokens, with one label and its weight more.

        That of the next stretch's first token, which its last token predicts; after the last one there is none.
        """
        if self.size == 1:
            return batch
        length = batch["input_ids"].shape[1] // self.size
        first = rank() % self.size * length
        part = {key: x[:, first : first + length] for key, x in batch.items() if key == "input_ids"}
        for key, nothing in (("labels", -100), ("loss_weights", 0)):
            part[key] = F.pad(batch[key], (0, 1), value=nothing)[:, first : first + length + 1]
        return part | {key: x for key, x in batch.items() if key not in part}
