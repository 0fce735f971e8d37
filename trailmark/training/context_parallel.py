"""Several processes that share each text of a training: which texts a process has a part in, and which part."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
import torch.nn.functional as F

from trailmark.models import TrailmarkForCausalLM
from trailmark.models.context_parallel import share_texts
from trailmark.processes import rank, world_size
from trailmark.training.tasks import Batch


@dataclass(frozen=True)
class Sharing:
    """Processes in groups of ``size``, each of which takes texts of its own and shares each of them.

    Raises:
        ValueError: processes that make no whole groups.
    """

    size: int

    def __post_init__(self) -> None:
        if world_size() % self.size:
            raise ValueError(
                f"training.context_parallel: expected a divisor of the {world_size()} processes, got {self.size}. "
                f"Start a multiple of {self.size} of them (torchrun --nproc-per-node), or set it to 1."
            )

    @property
    def groups(self) -> int:
        return world_size() // self.size

    @property
    def group(self) -> int:
        """This process's."""
        return rank() // self.size

    def begin(self, model: TrailmarkForCausalLM) -> None:
        """Let the model share its texts; all processes, which know each other, call this together."""
        if self.size == 1:
            return
        firsts = range(0, world_size(), self.size)
        groups = [dist.new_group(range(first, first + self.size)) for first in firsts]  # by all, in one order
        own = groups[self.group]
        assert isinstance(own, dist.ProcessGroup)
        share_texts(model, own)

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
