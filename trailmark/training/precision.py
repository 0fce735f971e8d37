"""What ``training.precision: auto`` is on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trailmark.machine import bfloat16_instructions
from trailmark.training.config import Precision, RunConfig
from trailmark.training.run_folder import RUN_FILE
from trailmark.untrusted import read_yaml


def fast_precision(device: str) -> tuple[Precision, str]:
    """The precision in which a device ("cuda" or "cpu") multiplies fastest without loss of range, and why."""
    if device == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bfloat16", "the GPU multiplies it"
        return "float32", "the GPU does not multiply bfloat16"
    if found := bfloat16_instructions():
        return "bfloat16", f"the processor multiplies it ({', '.join(found)})"
    return "float32", "the processor does not multiply bfloat16"


def settled(config: RunConfig) -> tuple[RunConfig, str]:
    """A configuration whose precision is one, and a sentence if it was ``auto`` or will be slow; else "".

    A folder that was begun goes on in the precision that it began with, wherever that was.

    Raises:
        ValueError: bfloat16 on a GPU that has none.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    precision, why = fast_precision(device)
    chosen = config.training.precision
    if chosen == "bfloat16" != precision:
        if device == "cuda":
            raise ValueError(
                "training.precision: expected float32, float64 or auto on this GPU, which has no bfloat16, got "
                "bfloat16."
            )
        return (
            config,
            "It computes in bfloat16, slowly: " + why + ". training.precision=auto takes float32 here.",
        )
    if chosen != "auto":
        return config, ""
    begun = _begun_in(Path(config.output))
    if begun in ("float32", "bfloat16"):
        precision, why = begun, "the run was begun with it"
    training = replace(config.training, precision=precision)
    return replace(config, training=training), f"It computes in {precision}: {why}."


def _begun_in(output: Path) -> Any:
    try:
        return read_yaml(output / RUN_FILE, "output")["training"]["precision"]
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):  # nothing is there, or something else, which others report
        return None
