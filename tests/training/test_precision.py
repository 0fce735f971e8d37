"""``training.precision: auto``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.tiny import TEXT, run_config
from trailmark import machine
from trailmark.training import precision
from trailmark.training.run import Run
from trailmark.untrusted import read_yaml


def of_processor(monkeypatch: pytest.MonkeyPatch, *instructions: str) -> None:
    """This machine, as if it had no GPU and its processor these instructions."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "bfloat16_instructions", lambda: list(instructions))


def of_gpu(monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ((), "float32"),
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


@pytest.mark.parametrize(("has", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_by_what_the_gpu_multiplies(
    has: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_gpu(monkeypatch, has)
    config, told = precision.with_precision(run_config(tmp_path / "run", "text", precision="auto"))
    assert config.training.precision == expected
    assert told.startswith(f"It computes in {expected}: the GPU ")


@pytest.mark.parametrize(("before", "expected"), [((), "float32"), (("amx_bf16",), "bfloat16")])
@pytest.mark.sampled(2)
def test_a_run_goes_on_in_what_it_began_with(
    before: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_processor(monkeypatch, *before)
    config = run_config(tmp_path / "run", "text", precision="auto", steps=1)
    Run(config, text=TEXT).train()
    assert read_yaml(tmp_path / "run" / "run.yaml", "run")["training"]["precision"] == expected
    of_processor(monkeypatch, *(() if before else ("amx_bf16",)))  # the folder is taken elsewhere
    said: list[str] = []
    again = Run(config, text=TEXT, say=said.append)
    assert again.config.training.precision == expected
    assert ("begun" in said[0]) is (expected == "float32")
    assert ("slowly" in said[0]) is (expected == "bfloat16")
    assert again.finished


def test_the_folder_of_another_run_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_processor(monkeypatch)
    Run(run_config(tmp_path / "run", "text", precision="auto", steps=1), text=TEXT).train()
    of_processor(monkeypatch, "amx_bf16")
    other = run_config(tmp_path / "run", "text", precision="auto", steps=2)
    config, told = precision.with_precision(other)
    assert config.training.precision == "bfloat16"
    assert "begun" not in told
    with pytest.raises(ValueError, match="holds a run with another configuration"):
        Run(other, text=TEXT).train()
    (tmp_path / "run" / "run.yaml").write_text("nonsense: [")
    assert precision.with_precision(other)[0].training.precision == "bfloat16"


def test_what_this_machine_does_not_multiply_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(tmp_path / "run", "text", precision="bfloat16", steps=1)
    of_processor(monkeypatch)
    said: list[str] = []
    assert Run(config, text=TEXT, say=said.append).config.training.precision == "bfloat16"
    assert said[0].startswith("It computes in bfloat16, slowly: the processor has neither ")
    assert said[0].endswith(" training.precision=float32 is faster.")
    of_gpu(monkeypatch, has_bfloat16=False)
    assert precision.with_precision(config)[1].startswith("It computes in bfloat16, slowly: the GPU ")


def test_one_that_was_chosen_is_not_spoken_of(tmp_path: Path) -> None:
    config = run_config(tmp_path / "run", "text", precision="float64", steps=1)
    assert precision.with_precision(config) == (config, "")


def test_processes_that_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(tmp_path / "run", "text", precision="float32")
    precision.expect_one_precision(config)
    monkeypatch.setattr(precision, "gathered", lambda own: [own, "bfloat16"])
    with pytest.raises(
        ValueError, match=r"^training\.precision: .* float32 in process 0, bfloat16 in process 1"
    ):
        precision.expect_one_precision(config)
