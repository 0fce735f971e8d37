"""Folders of models and tokenizers from strangers: nothing of theirs is run, and what cannot be right is one line."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.models.tiny import drt
from tests.refusals import one_line
from trailmark import pretrained
from trailmark.data.corpus import load_tokenizer, tokenizer_fingerprint
from trailmark.data.neighbours.embedders import open_embedder
from trailmark.evaluation.generation import stream
from trailmark.evaluation.subject import load
from trailmark.evaluation.targets import open_reference
from trailmark.models import DRTConfig, DRTForCausalLM
from trailmark.models.size import expect_memory
from trailmark.pretrained import MOST_LAYERS
from trailmark.training.states import initial_model

BYTES = load_tokenizer()
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    drt(vocab_size=384).float().save_pretrained(folder / "ours")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=384, **SIZES)).save_pretrained(folder / "llama")
    for name in ("ours", "llama"):
        BYTES.save_pretrained(folder / name)
    return folder


@pytest.fixture
def models(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "models"))


def change(folder: Path, name: str = "config.json", **fields: Any) -> Path:
    """Fields of a JSON file set; floats may be none of JSON's."""
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


# --- no code -------------------------------------------------------------------------------------------------------

CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, ByT5Tokenizer

class Theirs(LlamaConfig):
    model_type = "theirs"

class TheirModel(LlamaForCausalLM):
    config_class = Theirs

class TheirTokenizer(ByT5Tokenizer):
    pass
"""


def with_code(folder: Path, mark: Path) -> Path:
    (folder / "theirs.py").write_text(CODE.format(mark=str(mark)))
    models = {"AutoConfig": "theirs.Theirs", "AutoModelForCausalLM": "theirs.TheirModel"}
    change(folder, model_type="theirs", auto_map=models | {"AutoModel": "theirs.TheirModel"})
    tokenizers = {"AutoTokenizer": ["theirs.TheirTokenizer", None]}
    return change(folder, "tokenizer_config.json", auto_map=tokenizers, tokenizer_class="TheirTokenizer")


@pytest.mark.parametrize(
    "opens",
    [
        load,
        lambda folder: load(folder, any_model=True),
        lambda folder: load_tokenizer(str(folder)),
        lambda folder: open_reference(str(folder), BYTES),
        lambda folder: open_embedder(f"transformers:{folder}", BYTES, "cpu"),
        lambda folder: initial_model(DRTForCausalLM, drt().config, str(folder)),
    ],
    ids=["load", "load-any", "tokenizer", "targets", "embedder", "init_from"],
)
def test_code_in_a_folder_is_never_run_whoever_says_yes(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opens: Callable[[Path], Any]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder = with_code(models / "llama", tmp_path / "mark")
    one_line(lambda: opens(folder))
    assert not (tmp_path / "mark").exists()


@pytest.mark.slow
def test_the_command_runs_no_code_and_asks_nobody(models: Path, tmp_path: Path) -> None:
    folder = with_code(models / "llama", tmp_path / "mark")
    done = subprocess.run(
        [sys.executable, "-m", "trailmark", "evaluate", str(folder), "--suite", "perplexity"],
        input="y\n" * 9,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert "run the custom code" not in done.stdout + done.stderr
    assert not (tmp_path / "mark").exists()


def test_code_of_a_tokenizer_beside_a_model_of_ours_is_not_run(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder = models / "ours"
    (folder / "theirs.py").write_text(CODE.format(mark=str(tmp_path / "mark")))
    tokenizers = {"AutoTokenizer": ["theirs.TheirTokenizer", None]}
    change(folder, "tokenizer_config.json", auto_map=tokenizers, tokenizer_class="TheirTokenizer")
    one_line(lambda: load(folder), "code of its own")
    BYTES.save_pretrained(folder)
    assert load(folder).ours


def test_no_kernels_are_fetched(models: Path) -> None:
    for name in ("ours", "llama"):
        change(models / name, attn_implementation="someone/kernels")
        one_line(
            lambda name=name: load(models / name, any_model=True), "attn_implementation", "Remove the line"
        )


class _Pickled:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["ours", "llama"])
def test_pickled_weights_are_not_read_and_the_line_says_how_to_convert_them(
    models: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models / name
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Pickled(tmp_path / "mark")))
    said = one_line(lambda: load(folder, any_model=True), "safetensors", "pytorch_model.bin alone")
    assert not (tmp_path / "mark").exists()
    if name == "ours":
        config = DRTConfig.from_pretrained(folder)
        wanted = "init_from: cannot load the weights in"
        one_line(lambda: initial_model(DRTForCausalLM, config, str(folder)), wanted)
        one_line(lambda: DRTForCausalLM.from_pretrained(folder), "pytorch_model.bin alone")
        one_line(lambda: DRTForCausalLM.from_pretrained(folder, use_safetensors=False), "use_safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    monkeypatch.chdir(folder)
    exec(said[said.index("import torch") :], {})  # the way out, as it stands there
    assert load(folder, any_model=True).model


# --- configurations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("ours", "logit_scale", float("nan")),
        ("ours", "logit_scale", 1e300),
        ("ours", "rms_norm_eps", float("inf")),
        ("ours", "rope_theta", float("inf")),
        ("ours", "vocab_size", 10**12),
        ("ours", "vocab_size", 10**9),
        ("ours", "hidden_size", 10**9),
        ("ours", "intermediate_size", 10**9),
        ("ours", "num_hidden_layers", 10**9),
        ("ours", "num_hidden_layers", 9_000),
        ("ours", "num_encoder_layers", 9_000),
        ("ours", "chunk_size", 10**9),
        ("ours", "num_retrieved_chunks", 10**9),
        ("ours", "dtype", "evil"),
        ("ours", "dtype", "int8"),
        ("ours", "dtype", ["float32"]),
        ("ours", "hidden_size", "8"),
        ("ours", "head_dim", 10**9),
        ("ours", "head_dim", 60_000),
        ("ours", "num_attention_heads", 5),
        ("ours", "rope_scaling", {"rope_type": "evil"}),
        ("ours", "layer_types", ["full_attention"] * 9_000),
        ("ours", "model_type", ["trailmark_drt"]),
        ("ours", "output_hidden_states", True),
        ("llama", "rms_norm_eps", float("nan")),
        ("llama", "vocab_size", 10**12),
        ("llama", "vocab_size", 10**9),
        ("llama", "num_hidden_layers", 10**9),
        ("llama", "num_hidden_layers", 9_000),
        ("llama", "dtype", "evil"),
        ("llama", "hidden_size", 0),
        ("llama", "num_attention_heads", 0),
        ("llama", "model_type", 7),
        ("llama", "model_type", "nobody"),
        ("llama", "rope_parameters", {"rope_type": "evil"}),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_before_anything_is_made(
    models: Path, name: str, field: str, value: Any
) -> None:
    folder = change(models / name, **{field: value})
    one_line(lambda: load(folder, any_model=True), "model: ")


JSON_FILES = ("config.json", "tokenizer_config.json", "generation_config.json")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *((file, content) for file in JSON_FILES for content in ("[" * 100_000, "", "7")),
        ("config.json", '{"a": 1}'),
        ("config.json", '{"model_type": "trailmark_drt", "x": 1e999}'),
    ],
    ids=lambda value: value[:24],
)
def test_json_that_is_none_is_one_line(models: Path, file: str, content: str) -> None:
    for name in ("ours", "llama"):
        (models / name / file).write_text(content)
        if file == "generation_config.json":  # transformers goes on without one that it cannot read
            with suppress(ValueError):
                load(models / name, any_model=True)
        else:
            one_line(lambda name=name: load(models / name, any_model=True), "model: ")


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        *((file, "fifo") for file in (*JSON_FILES, "model.safetensors", "run.yaml")),
        ("config.json", "folder"),
        ("config.json", "dangling"),
    ],
)
def test_what_is_no_file_does_not_hang(models: Path, file: str, kind: str) -> None:
    for name in ("ours", "llama"):
        path = models / name / file
        path.unlink(missing_ok=True)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to(models / "nowhere")
        one_line(lambda name=name: load(models / name, any_model=True), "model: ")


def test_a_folder_in_the_cache_of_the_hub_is_links_to_its_files(models: Path, tmp_path: Path) -> None:
    for name in ("ours", "llama"):
        (tmp_path / "snapshot" / name).mkdir(parents=True)
        for path in (models / name).iterdir():
            (tmp_path / "snapshot" / name / path.name).symlink_to(path)
        assert load(tmp_path / "snapshot" / name, any_model=True).model


def test_a_list_of_a_foreign_configuration_may_end_at_infinity() -> None:
    pretrained.expect_sane({"time_step_limit": [0.0, float("inf")]}, "model")
    with pytest.raises(ValueError, match=r"^model: eps: expected a finite number, got nan"):
        pretrained.expect_sane({"text_config": {"eps": float("nan")}}, "model")


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "dtype"),
    [
        ("ours", float("nan"), torch.float32),
        ("ours", float("inf"), torch.bfloat16),
        ("llama", float("-inf"), torch.float16),
    ],
)
def test_weights_that_are_not_finite_are_named(
    models: Path, name: str, value: float, dtype: torch.dtype
) -> None:
    path = models / name / "model.safetensors"
    weights = {key: x.to(dtype) for key, x in safetensors.torch.load_file(path).items()}
    last = max(weights)
    weights[last].view(-1)[-1] = value
    safetensors.torch.save_file(weights, path, {"format": "pt"})
    one_line(lambda: load(models / name, any_model=True), "finite weights", last, "NaN or Infinity")
    if name == "ours":
        one_line(lambda: DRTForCausalLM.from_pretrained(models / name), "finite weights", last)
        config = DRTForCausalLM.config_class.from_pretrained(models / name)
        one_line(lambda: initial_model(DRTForCausalLM, config, str(models / name)), "finite weights", last)


def test_large_weights_are_finite() -> None:
    """Their sum may be none: then each is looked at."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        large = torch.full((4,), torch.finfo(dtype).max, dtype=dtype)
        pretrained.expect_finite(iter([("w", large)]), "model", "x")
    pretrained.expect_finite(iter([("w", torch.zeros(3, dtype=torch.int8))]), "model", "x")
    pretrained.expect_finite(iter([("w", torch.zeros(3, device="meta"))]), "model", "x")
    pretrained.expect_finite(iter([("w", torch.full((4,), 448.0).to(torch.float8_e4m3fn))]), "model", "x")


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_weights_that_were_cut_are_one_line(models: Path, cut: int) -> None:
    for name in ("ours", "llama"):
        path = models / name / "model.safetensors"
        path.write_bytes(path.read_bytes()[:cut])
        one_line(lambda name=name: load(models / name, any_model=True), "model: cannot load")


# --- tokenizers ------------------------------------------------------------------------------------------------------


def words(count: int, first: str = "w") -> PreTrainedTokenizerFast:
    backend = Tokenizer(WordLevel({f"{first}{n}": n for n in range(count)}, unk_token=f"{first}0"))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=f"{first}0", eos_token=f"{first}1")


def replace_tokenizer(folder: Path, tokenizer: Any) -> None:
    for path in folder.glob("*token*"):
        path.unlink()
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("name", ["ours", "llama"])
def test_a_tokenizer_with_more_tokens_than_the_vocabulary_is_refused(models: Path, name: str) -> None:
    replace_tokenizer(models / name, words(385))
    one_line(lambda: load(models / name, any_model=True), "at most the 384 tokens", "has 385")
    replace_tokenizer(models / name, words(384))
    assert load(models / name, any_model=True).model


def test_another_tokenizer_of_the_same_size_is_known_by_its_fingerprint(models: Path) -> None:
    own, other = words(384), words(384, "v")
    folder = models / "ours"
    replace_tokenizer(folder, own)
    change(folder, tokenizer_fingerprint=tokenizer_fingerprint(own))
    assert load(folder).model.config.tokenizer_fingerprint == tokenizer_fingerprint(own)
    for wrong in (other, BYTES):
        replace_tokenizer(folder, wrong)
        one_line(lambda: load(folder), "expected the tokenizer that the model was trained with")
    change(folder, tokenizer_fingerprint=None)  # as an older trailmark saved it
    assert load(folder).model


@pytest.mark.parametrize(
    "field",
    [
        {"eos_token_id": {"a": 1}}, {"eos_token_id": ["a"]}, {"eos_token_id": 10**400}, {"top_k": "x"},
        {"num_beams": []}, {"temperature": [1]}, {"max_new_tokens": "many"}, {"do_sample": "yes"},
        {"bad_words_ids": 7},
    ],
)  # fmt: skip
def test_a_generation_configuration_of_wrong_types_is_named(models: Path, field: dict[str, Any]) -> None:
    folder, (name,) = models / "ours", field
    (folder / "generation_config.json").write_text(json.dumps(field))
    with pytest.raises(ValueError, match=r"^model: .*generation_config\.json") as caught:
        list(stream(load(folder), "the", None, None, 1, 0, 0))
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


def test_the_most_layers_that_are_allowed_are_built_in_seconds() -> None:
    """Of sizes that fit into no machine: nothing is computed."""
    sizes = {"hidden_size": 1 << 14, "intermediate_size": 1 << 16, "num_attention_heads": 16}
    config = DRTConfig(num_hidden_layers=MOST_LAYERS, num_encoder_layers=1, num_lower_layers=2, **sizes)
    began = time.process_time()
    with pytest.raises(ValueError, match=r"^model: expected one that fits"):
        expect_memory(config, 12)
    assert time.process_time() - began < 10
    with pytest.raises(ValueError, match="num_hidden_layers: expected at most 1000, got 1001"):
        DRTConfig(num_hidden_layers=MOST_LAYERS + 1)


def test_a_name_that_was_mistyped_is_told_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from trailmark.models.conversion.base import open_base

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    one_line(
        lambda: open_base("base-lama"),
        "model: cannot load 'base-lama', which is no folder here: the hub's cache holds no such model, and offline",
    )
