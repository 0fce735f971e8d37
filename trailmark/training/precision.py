"""What ``training.precision: auto`` is on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

from trailmark.machine import fast_precision
from trailmark.processes import gathered
from trailmark.training.config import Precision, RunConfig
from trailmark.training.run_folder import holds_run


def with_precision(config: RunConfig) -> tuple[RunConfig, str]:
    """A configuration whose precision is one, and a sentence if it was ``auto`` or will be slow; else "".

    A folder that this very run began goes on in the precision that it began with, wherever that was.
    """
    fast, why = fast_precision()
    chosen, begun = config.training.precision, None
    if chosen == "auto":
        begun = _begun_in(config)
        chosen = begun or fast
    own = _in(config, chosen)
    told = ""
    if chosen == "bfloat16" != fast:
        told = f"It computes in bfloat16, slowly: {why}."
        if not holds_run(Path(config.output), own):
            told += " training.precision=float32 is faster."
    elif config.training.precision == "auto":
        told = f"It computes in {chosen}: {'the run was begun with it' if begun else why}."
    return own, told


def expect_one_precision(config: RunConfig) -> None:
    """Raise a ValueError where processes would compute in different ones."""
    found = gathered(config.training.precision)
    if len(set(found)) > 1:
        shown = ", ".join(f"{precision} in process {rank}" for rank, precision in enumerate(found))
        raise ValueError(
            f"training.precision: expected one for all processes, got {shown}, as their machines differ. Set it to one "
            "of these instead of auto."
        )


def _begun_in(config: RunConfig) -> Precision | None:
    for precision in get_args(Precision):
        if holds_run(Path(config.output), _in(config, precision)):
            return precision
    return None


def _in(config: RunConfig, precision: Precision) -> RunConfig:
    return replace(config, training=replace(config.training, precision=precision))
