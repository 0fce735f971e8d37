"""A new architecture goes through every command without a line of the package changed."""

from __future__ import annotations

import inspect
import io
import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import your_own_model
from examples.your_own_model import GatedConfig, GatedForCausalLM
from tests.commands import commands
from tests.training.tiny import MODELS as TINY
from tests.training.tiny import prose
from trailmark.evaluation.suite import suites
from trailmark.files import read_json
from trailmark.models import DRTConfig, DRTForCausalLM, register
from trailmark.training.checkpoints import step_folder

Command = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("no_restart")
SUITES = {
    "needles": "--lengths 400 --questions 1 --kind single",
    "perplexity": "--lengths 80 --max-tokens 240",
    "retrieval": "--lengths 400 --texts 2 --sample 3",
    "summarization": "--pairs pairs.jsonl --limit 1 --max-new-tokens 4 --context-length 200",
    "cost": "--lengths 40 --tiers device,disk --generate 2 --rounds 1 --training-lengths 40",
    "lm-eval": "--tasks ruler_fwe --lengths 1200 --limit 1",
    "yardstick": "--benchmark babilong --data babilong",
}
TABLE = f"--context-length 80 --chunk-size 20 --count 2 --window {TINY['drt']['sliding_window']}"


def test_an_architecture_takes_at_most_100_lines() -> None:
    architecture, _ = inspect.getsource(your_own_model).split("if __name__")
    assert "register(GatedConfig, GatedForCausalLM)" in architecture
    assert len(architecture.splitlines()) <= 100


@pytest.mark.slow
def test_it_goes_through_every_command(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(prose(300))
    Path("pairs.jsonl").write_text(json.dumps({"document": prose(30), "summary": "the river sings"}) + "\n")
    place = Path("babilong/data/qa1/0k.json")
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps([{"input": "the river sings", "question": "who sings?", "target": "river"}]))
    model = TINY["drt"] | {"architecture": "gated", "first_gate": 0.25}
    training = {"steps": 2, "tokens_per_step": 160, "context_length": 80, "save_steps": 1, "report_to": []}
    data = {"paths": ["text.txt"]}
    run = {"output": "run", "model": model, "data": data, "training": training}
    Path("run.yaml").write_text(yaml.safe_dump(run))
    driven = set()

    def succeeds(line: str) -> str:
        words = shlex.split(line)
        driven.add(words[0])
        code, out, err = command(*words)
        assert code == 0, err or out
        return out

    assert "A step took" in succeeds("train run.yaml --dry-run output=dry")
    assert "Training GatedForCausalLM" in succeeds("train run.yaml")
    # stopped after its first step, it goes on and ends with the same bits
    weights = Path("run/model.safetensors").read_bytes()
    for name in ("run/history.json", "run/model.safetensors"):
        Path(name).unlink()
    shutil.rmtree(step_folder(Path("run/checkpoints"), 2))
    assert "Going on from step 1" in succeeds("train run.yaml")
    assert Path("run/model.safetensors").read_bytes() == weights

    card = Path("run/README.md").read_text()
    assert "a Gated Transformer. It reads through a gate." in card
    assert SUITES.keys() == suites().keys()
    for suite, options in SUITES.items():
        succeeds(f"evaluate run --suite {suite} {options} --text text.txt")
        found = read_json(Path(f"run/evaluation/{suite}.json"))
        assert found["results"]
        assert "Gated" in json.dumps(found)
        assert f"### {suite}" in Path("run/README.md").read_text().lower()

    succeeds("read run text.txt --memory memory --trace trace.jsonl")
    assert json.loads(Path("trace.jsonl").read_text().splitlines()[0])["num_groups"] == 1
    asked = "generate run --prompt the --max-new-tokens 3"
    assert succeeds(f"{asked} --memory memory") == succeeds(f"{asked} --file text.txt")
    monkeypatch.setattr(sys, "stdin", io.StringIO("who reads?\n"))
    assert "Read for this" in succeeds("chat run --memory memory --plain --max-new-tokens 3")
    for folder in ("run", "memory"):
        succeeds(f"verify {folder}")
    succeeds("explore run text.txt -o explore.html")
    succeeds("report run -o report.html")
    assert "gated" in Path("report.html").read_text().lower()
    assert Path("explore.html").stat().st_size > 10_000

    # it is trained with a table of neighbours, and scores the candidates of another
    succeeds("prepare text.txt --output corpus --processes 1")
    said = succeeds(
        f"neighbours corpus table --embedder hash:32 --architecture gated {TABLE} --scores float32"
    )
    settings = said.partition("trailmark train CONFIG")[2]
    succeeds(f"train run.yaml {settings} model.encoder_weights=encoder output=of-a-table")
    assert type(AutoModelForCausalLM.from_pretrained("of-a-table")) is GatedForCausalLM
    assert "target scores" in succeeds(f"targets corpus targets --model run {TABLE}")
    # these take no model, make one of an architecture that they know, or go on until they are stopped
    assert driven == commands().keys() - {"demo", "doctor", "convert", "serve"}

    loaded = AutoModelForCausalLM.from_pretrained("run")
    assert type(loaded) is GatedForCausalLM
    assert loaded.config.first_gate == 0.25
    loaded.save_pretrained("copy")
    AutoTokenizer.from_pretrained("run").save_pretrained("copy")
    assert "It reads through a gate." in Path("copy/README.md").read_text()


def test_it_reads_otherwise_than_a_drt() -> None:
    fields = {name: value for name, value in TINY["drt"].items() if name != "architecture"}
    torch.manual_seed(0)
    model = GatedForCausalLM(GatedConfig(**fields)).eval()
    other = DRTForCausalLM(DRTConfig(**fields)).eval()
    other.load_state_dict(model.state_dict(), strict=False)
    ids = torch.arange(100)[None]
    assert torch.equal(model(ids[:, :20]).logits, other(ids[:, :20]).logits)  # nothing to read yet
    assert not torch.equal(model(ids).logits, other(ids).logits)


def test_a_name_that_is_taken_is_refused() -> None:
    class Other(GatedForCausalLM):
        """Another model of the same configuration."""

    with pytest.raises(
        ValueError, match="config_class: expected a model_type that is not taken, got 'gated'"
    ):
        register(GatedConfig, Other)

    class Another(DRTConfig):
        """Whose short name is that of the DRT."""

        model_type = "drt"

    class AnotherModel(DRTForCausalLM):
        config_class = Another

    with pytest.raises(ValueError, match=r"config_class: .* not taken, got 'drt', which DRTForCausalLM has"):
        register(Another, AnotherModel)
    with pytest.raises(ValueError, match="model_class: expected one whose config_class is DRTConfig"):
        register(DRTConfig, GatedForCausalLM)
