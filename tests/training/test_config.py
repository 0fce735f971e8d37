"""Configurations: YAML, overrides, and an error that helps for everything that is wrong in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.training.tiny import CHUNK_SIZE, MODELS, run_config
from trailmark import demo
from trailmark.models import DRTConfig, LandmarkForCausalLM, SlidingWindowConfig
from trailmark.training.config import ARCHITECTURES, DataConfig, RunConfig, TrainingConfig, load_run_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def written(folder: Path, content: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_builds_its_model(path: Path) -> None:
    config = load_run_config(path)
    with torch.device("meta"):
        model = ARCHITECTURES[config.model["architecture"]](config.model_config(259))
    assert sum(p.numel() for p in model.parameters()) > 100_000
    assert config.output.startswith("runs/")
    # every size that is written down is the model's
    for name, value in config.model.items():
        if name != "architecture":
            assert getattr(model.config, name) == value, name


def test_there_are_configs() -> None:
    assert len(CONFIGS) >= 4


def test_an_empty_mapping_gives_the_defaults(tmp_path: Path) -> None:
    config = load_run_config(written(tmp_path, "{}"))
    assert config == RunConfig(data=DataConfig(), training=TrainingConfig())
    assert config.model_config(300) == DRTConfig(vocab_size=300)


def test_yaml_round_trip(tmp_path: Path) -> None:
    config = run_config(tmp_path, "needles", learning_rate=1e-5, gradient_checkpointing=True)
    assert load_run_config(written(tmp_path, config.to_yaml())) == config


def test_overrides(tmp_path: Path) -> None:
    path = written(tmp_path, {"training": {"steps": 5, "seed": 3}, "model": MODELS["drt"]})
    overrides = [
        "training.steps=7",
        "training.learning_rate=3e-3",  # YAML reads this as text
        "training.weight_decay=1",
        "training.max_grad_norm=2.5",
        "training.gradient_checkpointing=true",
        "data.paths=[a, b c]",
        "model.num_retrieved_chunks=4",
        "model.residual_gca=true",
        "output=somewhere=else",
    ]
    config = load_run_config(path, overrides)
    training = config.training
    assert (training.steps, training.seed) == (7, 3)
    assert (training.learning_rate, training.max_grad_norm) == (3e-3, 2.5)
    assert training.weight_decay == 1.0
    assert isinstance(training.weight_decay, float)
    assert training.gradient_checkpointing is True
    assert config.data.paths == ["a", "b c"]
    assert config.output == "somewhere=else"
    model = config.model_config()
    assert isinstance(model, DRTConfig)
    assert (model.num_retrieved_chunks, model.residual_gca) == (4, True)
    assert (model.hidden_size, model.vocab_size) == (16, 259)


def test_the_later_override_holds(tmp_path: Path) -> None:
    path = written(tmp_path, "{}")
    assert load_run_config(path, ["training.steps=1", "training.steps=2"]).training.steps == 2


def test_a_single_path_and_none(tmp_path: Path) -> None:
    path = written(tmp_path, {"data": {"paths": ["a"]}})
    assert load_run_config(path, ["data.paths=b"]).data.paths == ["b"]
    assert load_run_config(path, ["data.paths=null"]).data.paths is None


def test_full_attention_by_null(tmp_path: Path) -> None:
    path = written(tmp_path, {"model": {"architecture": "sliding_window", "sliding_window": None}})
    assert load_run_config(path).model_config() == SlidingWindowConfig(sliding_window=None)


def test_the_vocabulary_of_the_config_goes_first() -> None:
    assert RunConfig(model={"vocab_size": 9}).model_config(5).vocab_size == 9
    assert RunConfig().model_config(5).vocab_size == 5


MISTAKES = {
    # misspelt
    "trainig.steps=3": r"^trainig: unknown key\. Did you mean 'training'\?",
    "training.stpes=3": r"^training\.stpes: unknown key\. Did you mean 'steps'\?",
    "training.learningrate=3": r"^training\.learningrate: .* 'learning_rate'",
    "data.path=x": r"^data\.path: unknown key\. Did you mean 'paths'\?",
    "data.zzz=x": r"^data\.zzz: unknown key\. Valid: chunk_size, .*tokenizer",
    "model.hiden_size=3": r"^model\.hiden_size: unknown field of drt\. Did you mean 'hidden_size'\?",
    "model.torchscript=true": r"^model\.torchscript: unknown field",  # transformers' field, not ours
    "model.1=2": r"^model\.1: unknown field",
    "1=2": r"^1: unknown key\. Valid: data, model, output, training",
    # a foreign value
    "data.task=need": r"^data\.task: expected 'text' or 'needles', got 'need'\. Did you mean 'needles'\?",
    "training.optimizer=sgd": r"^training\.optimizer: expected 'muon' or 'adamw', got 'sgd'",
    "model.architecture=drtt": r"^model\.architecture: expected .*'drtt'\. Did you mean 'drt'\?",
    "model.architecture=[drt]": r"^model\.architecture: expected drt or",
    "model.window_position=nope": r"^model\.window_position: expected 'alibi' or 'rope', got 'nope'",
    "model.implementation=cuda": r"^model: implementation: expected None, 'reference' or 'torch', got 'cuda'",
    # a wrong type
    "training.steps=many": r"^training\.steps: expected a whole number, got 'many'",
    "training.steps=2.5": r"^training\.steps: expected a whole number, got 2\.5",
    "training.steps=true": r"^training\.steps: expected a whole number, got True",
    "training.steps=.inf": r"^training\.steps: expected a whole number, got inf",
    "training.steps=.nan": r"^training\.steps: expected a whole number, got nan",
    "training.steps=null": r"^training\.steps: expected a whole number, got None",
    "training.learning_rate=fast": r"^training\.learning_rate: expected a number, got 'fast'",
    "training.learning_rate=.nan": r"^training\.learning_rate: expected",
    "training.gradient_checkpointing=1": r"^training\.gradient_checkpointing: expected true or false, got 1",
    "output=3": r"^output: expected text, got 3",
    "data.paths={a: 1}": r"^data\.paths: expected a list",
    "data.paths=[1]": r"^data\.paths: expected text, got 1",
    "model=3": r"^model: expected a section with keys, got 3",
    "training=[1]": r"^training: expected a section with keys, got \[1\]",
    "training.steps.more=3": r"^training\.steps\.more: ",
    "output.folder=3": r"^output\.folder: output is no section",
    "model.hidden_size=wide": r"^model\.hidden_size: expected a whole number, got 'wide'",
    # no override at all
    "training.steps": r"^override: expected key=value, got 'training\.steps'",
    "training.steps=[": r"^training\.steps: expected a YAML value, got '\['",
    # sizes that do not fit
    "training.steps=0": r"^training\.steps: expected at least 1, got 0",
    "training.save_steps=-1": r"^training\.save_steps: expected at least 1, got -1",
    "training.sequence_length=9999": r"^training\.tokens_per_step: expected at least .* 9999, got 4096",
    "model.num_attention_heads=6": r"^model: num_attention_heads: expected a divisor of hidden_size = 16",
    "model.num_key_value_heads=3": r"^model: num_key_value_heads: expected a divisor",
    "model.num_attention_heads=16": r"^model: num_attention_heads: expected an even head size",
    "model.num_retrieval_groups=2": r"^model: num_retrieval_groups: expected a divisor of the 1 upper layers",
    "model.num_lower_layers=2": r"^model: num_lower_layers: expected 0 to 1",
    "model.num_hidden_layers=0": r"^model: num_(hidden|lower)_layers: expected ",
    "model.sliding_window=0": r"^model: sliding_window: expected None or at least 1, got 0",
    "model.sliding_window=null": r"^model: sliding_window: expected a number of positions",
    "model.vocab_size=0": r"^model: vocab_size: expected at least 1, got 0",
    "training.seed=-1": r"^training\.seed: expected 0 to 4294967295, got -1",
    "training.matrix_learning_rate=-1": r"^training\.matrix_learning_rate: expected 0 or more, got -1",
    "training.warmup_steps=-1": r"^training\.warmup_steps: expected 0 or more, got -1",
    "training.constant_fraction=7": r"^training\.constant_fraction: expected 0 to 1, got 7",
    "data.early_landmarks=1.5": r"^data\.early_landmarks: expected a share from 0 to 1, got 1\.5",
    "data.early_landmarks=-0.1": r"^data\.early_landmarks: expected a share from 0 to 1, got -0\.1",
    "data.level_accuracy=1": r"^data\.level_accuracy: expected a share from 0 to below 1, got 1\.0",
    "data.paths=[]": r"^data\.paths: expected files or folders, got an empty list",
    "data.task=needles": r"^data\.chunk_size: expected the model's chunk_size 20, got 32",
}


@pytest.mark.parametrize(("override", "message"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_named(tmp_path: Path, override: str, message: str) -> None:
    path = written(tmp_path, {"model": MODELS["drt"], "training": {"steps": 5}, "output": "runs/x"})
    load_run_config(path)
    with pytest.raises(ValueError, match=message) as caught:
        load_run_config(path, [override])
    assert "\n" not in str(caught.value)


def test_the_chunks_of_needles_are_the_models_by_default_too(tmp_path: Path) -> None:
    """A DRT's chunk_size is 63 where none is given, the task's is 32."""
    path = written(tmp_path, {"data": {"task": "needles"}})
    with pytest.raises(ValueError, match="chunk_size: expected the model's chunk_size 63, got 32"):
        load_run_config(path)
    load_run_config(path, ["data.chunk_size=63"])
    load_run_config(path, ["model.architecture=sliding_window"])  # has no chunks


LANDMARK_MISTAKES = {
    "training.sequence_length=641": r"^training\.sequence_length: expected at most 640 tokens, which have 672",
    "model.chunk_size=1": r"^training\.sequence_length: expected at most",
    "model.local_length=600": r"^model: max_position_embeddings: expected at least 63 for 2 \+ 1 chunks and",
    "model.gate_cutoff=0.5": r"^model: gate_cutoff: expected 0 for a model without a retrieval gate",
    "model.retrieve_per=heads": r"^model\.retrieve_per: expected .*Did you mean 'head'",
    "model.num_retrieved_chunks=0": r"^model: num_retrieved_chunks: expected at least 1",
    "data.task=needles": r"^data\.chunk_size: expected the model's chunk_size 20, got 32",
}


@pytest.mark.parametrize(("override", "message"), LANDMARK_MISTAKES.items(), ids=LANDMARK_MISTAKES)
def test_a_mistake_of_landmark_attention_is_named(tmp_path: Path, override: str, message: str) -> None:
    path = written(tmp_path, {"model": MODELS["landmark"], "training": {"sequence_length": 640}})
    load_run_config(path)  # 32 chunks of 21 positions
    with pytest.raises(ValueError, match=message) as caught:
        load_run_config(path, [override])
    assert "\n" not in str(caught.value)


def test_yamls_true_is_a_word_where_a_word_is_wanted(tmp_path: Path) -> None:
    path = written(
        tmp_path, {"model": MODELS["landmark"] | {"memory_position": True}, "data": {"chunk_size": 20}}
    )
    assert load_run_config(path, ["training.sequence_length=640"]).model_config().memory_position == "true"


def test_needles_of_landmark_attention_lie_where_its_chunks_do(tmp_path: Path) -> None:
    data = {"task": "needles", "chunk_size": CHUNK_SIZE}
    path = written(tmp_path, {"model": MODELS["landmark"], "data": data})
    load_run_config(path)
    with pytest.raises(ValueError, match=r"^model\.landmark_phase: expected 'fixed' .*got 'random'"):
        load_run_config(path, ["model.landmark_phase=random"])
    with pytest.raises(
        ValueError, match=r"^model\.max_position_embeddings: expected at least the 672 positions"
    ):
        load_run_config(path, ["model.max_position_embeddings=671"])


def test_the_paper_model_has_the_papers_size() -> None:
    """arXiv 2305.16300, Sec. 4.1: 12 layers, 8 heads of 128, about 200M parameters."""
    config = load_run_config(CONFIGS[0].with_name("landmark-paper.yaml"))
    with torch.device("meta"):
        model = LandmarkForCausalLM(config.model_config())
    assert sum(p.numel() for p in model.parameters()) == 202_532_864
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())
    assert model.config.head_dim == 128
    assert model.lm_head.weight is model.embed_tokens.weight
    length, texts = config.training.sequence_length, config.training.tokens_per_step / 502
    assert (length + length // 50, texts) == (512, 128)


@pytest.mark.parametrize("size", ["128m", "350m"])
def test_the_comparison_models_differ_from_drt_in_what_the_paper_says(size: str) -> None:
    """arXiv 2410.01651, App. A."""
    ours, drt = (load_run_config(CONFIGS[0].with_name(f"{name}-{size}.yaml")) for name in ("landmark", "drt"))
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    ):
        assert ours.model[name] == drt.model[name]
    differs = {"sequence_length", "tokens_per_step"}
    left = [{k: v for k, v in vars(c.training).items() if k not in differs} for c in (ours, drt)]
    assert left[0] == left[1]
    assert ours.model["max_position_embeddings"] == 768
    assert ours.training.sequence_length * 64 / 63 == 768
    assert abs(ours.training.tokens_per_step / drt.training.tokens_per_step - 1) < 1e-3


FILES = {
    "empty": (b"", r"expected a mapping in .*, got NoneType"),
    "a list": (b"- 1\n", r"expected a mapping in .*, got list"),
    "text": (b"hello", r"expected a mapping in .*, got str"),
    "broken": (b"a: [1\nb: }", r"is no YAML file"),
    "binary": (bytes(range(256)), r"is no YAML file"),
    "tagged": (b"a: !!python/object:os.system x", r"is no YAML file"),
    "empty section": (b"training:\n", r"training: expected a section with keys, got None"),
}


@pytest.mark.parametrize(("content", "message"), FILES.values(), ids=FILES)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_run_config(path)
    assert "\n" not in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^config: cannot read .*absent\.yaml': No such file"):
        load_run_config(tmp_path / "absent.yaml")
    with pytest.raises(ValueError, match=r"^config: cannot read .*: Is a directory"):
        load_run_config(tmp_path)


@pytest.mark.parametrize("name", ["drt", "window"])
def test_the_needle_configurations_are_those_of_the_demo(name: str, tmp_path: Path) -> None:
    path = CONFIGS[0].parent / f"needle-{name}.yaml"
    demos = demo.Demo(tmp_path)._config(name, demo.STEPS[name])
    assert replace(load_run_config(path), output=demos.output) == demos
