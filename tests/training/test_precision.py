"""``training.precision: auto``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.tiny import TEXT, run_config
from trailmark.training import precision
from trailmark.training.run import Run
from trailmark.untrusted import read_yaml


def of_processor(monkeypatch: pytest.MonkeyPatch, *instructions: str) -> None:
    """This machine, as if it had no GPU and its processor these instructions."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: dict.fromkeys(instructions, True), raising=False
    )


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ((), "float32"),
        (("avx2", "avx512_f"), "float32"),
        (("avx512_bf16",), "bfloat16"),
        (("amx_tile", "amx_bf16"), "bfloat16"),
    ],
)
def test_by_what_the_processor_multiplies(
    instructions: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_processor(monkeypatch, *instructions)
    said: list[str] = []
    config = run_config(tmp_path / "run", "text", precision="auto", steps=1)
    run = Run(config, text=TEXT, say=said.append)
    assert run.config.training.precision == expected
    assert config.training.precision == "auto"
    assert said[0].startswith(f"It computes in {expected}: the processor ")


def test_a_torch_that_names_no_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_processor(monkeypatch)
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert precision.fast_precision("cpu")[0] == "float32"


def test_a_run_goes_on_in_what_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_processor(monkeypatch)
    config = run_config(tmp_path / "run", "text", precision="auto", steps=1)
    Run(config, text=TEXT).train()
    assert read_yaml(tmp_path / "run" / "run.yaml", "run")["training"]["precision"] == "float32"
    of_processor(monkeypatch, "amx_bf16")  # the folder is taken elsewhere
    said: list[str] = []
    again = Run(config, text=TEXT, say=said.append)
    assert again.config.training.precision == "float32"
    assert "begun" in said[0]
    assert again.finished


def test_what_this_machine_does_not_multiply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor computes it all the same; a GPU without it does not."""
    of_processor(monkeypatch)
    config = run_config(tmp_path / "run", "text", precision="bfloat16", steps=1)
    said: list[str] = []
    assert Run(config, text=TEXT, say=said.append).config.training.precision == "bfloat16"
    assert "slowly" in said[0]
    assert "training.precision=auto" in said[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.raises(ValueError, match=r"^training\.precision: expected float32, .* on this GPU"):
        precision.settled(config)


def test_one_that_was_chosen_is_not_spoken_of(tmp_path: Path) -> None:
    config = run_config(tmp_path / "run", "text", precision="float64", steps=1)
    assert precision.settled(config) == (config, "")
