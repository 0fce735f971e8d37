"""A real base: what SmolLM2-135M-Instruct says is what it said, and how long the conversion takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.smollm2 import convert_smollm2, smollm2_for_a_test
from trailmark.evaluation.far_layers import measure_far_layers
from trailmark.models import DRTForCausalLM, HiLSForCausalLM, SlidingWindowForCausalLM
from trailmark.models.conversion.convert import convert, open_any_base

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_restart")]
TEXT = Path(json.__file__).read_text()
LOGITS = 2e-4  # transformers computes norms and rotary tables in float32: 1.4e-4 of 43.7 was measured


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file converted to window/ and drt/, by processes of their own."""
    made = tmp_path_factory.mktemp("smollm2")
    smollm2_for_a_test()
    for to, name in (("sliding_window", "window"), ("drt", "drt")):
        used = convert_smollm2(made / name, to)
        # processor time: other work on the machine does not count
        assert used.seconds < 60
        # the checkpoint is what its numbers take as they are read, in float32
        assert used.peak < 2 * (made / "window" / "model.safetensors").stat().st_size
    return made


def test_the_logits_are_those_of_transformers(folder: Path) -> None:
    base = smollm2_for_a_test()
    theirs = AutoModelForCausalLM.from_pretrained(
        base.parent, gguf_file=base.name, dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(base.parent, gguf_file=base.name)
    ours = SlidingWindowForCausalLM.from_pretrained(folder / "window").eval()
    assert AutoTokenizer.from_pretrained(folder / "window")(TEXT).input_ids == tokenizer(TEXT).input_ids
    ids = torch.tensor([tokenizer(TEXT).input_ids[:600]])
    with torch.no_grad():
        assert (ours(ids).logits - theirs(ids).logits).abs().max() <= LOGITS


def test_a_drt_of_it_reads_and_changes_nothing(folder: Path) -> None:
    ours = DRTForCausalLM.from_pretrained(folder / "drt").eval()
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder / "drt")(TEXT).input_ids[:900]])
    with torch.no_grad():
        read = ours(ids, output_retrieval=True)
        assert all((one.indices >= 0).any() for one in read.retrieval)
        assert torch.equal(read.logits, ours.without_retrieval()(ids).logits)


def test_what_lies_in_models_makes_the_reader_of_it(tmp_path: Path) -> None:
    """Base and additions, converted as the card says; what the card asks for is there, and small."""
    additions = Path(__file__).parents[3] / "models" / "smollm2-135m-reader" / "additions.safetensors"
    assert additions.stat().st_size < 30_000_000
    record = convert(smollm2_for_a_test(), tmp_path / "taught", additions=additions)
    assert record["target"] == "sliding_window"
    assert record["parameters"]["new"] == 0
    assert record["parameters"]["adapted"] > 100_000_000  # of 134,515,008: all matrices of its layers
    fields = ["reading=windows"]
    convert(tmp_path / "taught", tmp_path / "reader", "hils", fields)
    convert(smollm2_for_a_test(), tmp_path / "untrained", "hils", fields)
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "reader")(TEXT).input_ids[:900]])
    losses = {}
    for name in ("reader", "untrained"):
        model = HiLSForCausalLM.from_pretrained(tmp_path / name).eval()
        with torch.no_grad():
            cache = model.read(ids[:, :800])
            out = model(ids[:, 800:], labels=ids[:, 800:], past_key_values=cache, output_retrieval=True)
        losses[name] = out.loss.item()
        for layer in out.retrieval:  # of each that chooses
            assert layer.indices.shape[-1] == 4
            assert (layer.indices >= 0).any()
    assert losses["reader"] != losses["untrained"]
    assert losses["reader"] < losses["untrained"] + 0.5  # it still reads


def test_the_layers_that_look_far() -> None:
    """Three of them stand out whatever the texts are."""
    found = measure_far_layers(open_any_base(smollm2_for_a_test()), texts=3, seed=1)
    assert {7, 17, 18} < set(found.best(7))
    assert found.right > 0
    assert max(found.mass[:3]) < 0.1  # of the first layers none does


@pytest.mark.parametrize("name", ["window", "drt"])
def test_it_knows_the_capital_of_france(
    name: str, folder: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    words = ("generate", folder / name, "--prompt", "The capital of France is", "--max-new-tokens", 1)
    code, out, _ = command(*words)
    assert code == 0
    assert out.rstrip("\n").endswith(" Paris")
