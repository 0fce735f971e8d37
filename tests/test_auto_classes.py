"""``import trailmark`` is enough for transformers to open what we saved, and imports nothing by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trailmark
from tests.models.tiny import drt
from trailmark.byte_tokenizer import ByteTokenizer
from trailmark.data.corpus import load_tokenizer, tokenizer_fingerprint
from trailmark.models import MODELS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    drt(vocab_size=384, pad_token_id=0, eos_token_id=1).float().save_pretrained(folder)
    load_tokenizer().save_pretrained(folder)
    return folder


def run(code: str, *arguments: object) -> str:
    """What a Python process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_import_alone_brings_neither_torch_nor_transformers() -> None:
    code = """
import sys, trailmark
print([x for x in ("torch", "transformers", "numpy", "yaml") if x in sys.modules])
import trailmark.ops
print([x for x in ("transformers", "yaml") if x in sys.modules])
"""
    assert run(code) == "[]\n[]"


USES = {
    "config": "AutoConfig.from_pretrained(folder)",
    "tokenizer": "AutoTokenizer.from_pretrained(folder)",
    "model": "AutoModelForCausalLM.from_pretrained(folder)",
    "pipeline": "pipeline('text-generation', model=folder).model",
}
MODULES = ("trailmark", "transformers", "transformers.models.auto.configuration_auto")


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("first", MODULES)
@pytest.mark.sampled(12)
def test_the_auto_classes_know_our_models(folder: Path, first: str, use: str) -> None:
    name = use.partition("(")[0].partition(".")[0]
    code = f"""
import sys
import {first}
import trailmark
from transformers import {name}
folder = sys.argv[1]
print(type({use}).__module__)
"""
    if first == "trailmark":  # one that was wrapped twice would still do
        code = f"import importlib, trailmark\nimportlib.reload(trailmark){code}"
    assert run(code, folder).startswith("trailmark.")


@pytest.mark.parametrize("first", ["trailmark.models", "trailmark.evaluation.subject"])
@pytest.mark.slow
def test_a_process_that_brought_the_models_knows_the_tokenizer_too(folder: Path, first: str) -> None:
    opened = "AutoTokenizer.from_pretrained(sys.argv[1])('a')['input_ids']"
    code = f"import sys, {first}; from transformers import AutoTokenizer; print({opened})"
    assert run(code, folder) == "[100]"


@pytest.mark.slow
def test_other_models_are_opened_as_without_us(tmp_path: Path) -> None:
    """Nothing of ours is imported for them, and what is unknown is said in transformers' own words."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    code = """
import sys, trailmark
from transformers import AutoConfig
print(type(AutoConfig.from_pretrained(sys.argv[1])).__name__, "trailmark.models" in sys.modules)
open(sys.argv[1] + "/config.json", "w").write('{"model_type": "nobodys"}')
try:
    AutoConfig.from_pretrained(sys.argv[1])
except ValueError as error:
    print("nobodys" in str(error), "trailmark.models" in sys.modules)
"""
    assert run(code, tmp_path) == "LlamaConfig False\nTrue False"


@pytest.mark.slow
def test_a_pipeline_continues_a_prompt_as_the_model_does(folder: Path) -> None:
    """Without an end of text between the prompt and its continuation."""
    code = """
import sys, trailmark
from transformers import pipeline
ask = pipeline("text-generation", model=sys.argv[1])
out = ask("It was", max_new_tokens=8, do_sample=False, return_tensors=True)
print(out[0]["generated_token_ids"])
print(isinstance(ask("It was", max_new_tokens=8)[0]["generated_text"], str))
"""
    generated, is_text = run(code, folder).splitlines()
    tokenizer = load_tokenizer()
    prompt = torch.tensor([tokenizer("It was", add_special_tokens=False)["input_ids"]])
    model = drt(vocab_size=384, pad_token_id=0, eos_token_id=1).float()
    assert json.loads(generated) == model.generate(prompt, max_new_tokens=8, do_sample=False)[0].tolist()
    assert is_text == "True"


def test_the_byte_tokenizer_adds_nothing_and_stays_itself_in_a_folder(tmp_path: Path) -> None:
    tokenizer = load_tokenizer()
    assert isinstance(tokenizer, ByteTokenizer)
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert type(again) is ByteTokenizer
    assert tokenizer_fingerprint(again) == tokenizer_fingerprint(tokenizer)
    for one in (tokenizer, again):
        assert one("ä")["input_ids"] == [0xC3 + 3, 0xA4 + 3]
        assert one("a", "b")["input_ids"] == [100, 101]
        masked = one("ab", return_special_tokens_mask=True)
        assert masked["special_tokens_mask"] == [0, 0]
        assert one.get_special_tokens_mask([1, 100], already_has_special_tokens=True) == [1, 0]
        assert one(["ab", "c"], padding=True)["input_ids"] == [[100, 101], [102, 0]]
        assert one.decode(one("über")["input_ids"]) == "über"
        assert one.create_token_type_ids_from_sequences([5], [6]) == [0, 0]


def test_every_model_and_its_configuration_are_public() -> None:
    for model in MODELS.values():
        for kind in (model, model.config_class):
            if kind.__module__.startswith("trailmark."):
                assert getattr(trailmark, kind.__name__) is kind
