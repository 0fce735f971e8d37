"""Configurations: YAML, overrides, and an error that helps for everything that is wrong in them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.models import tiny
from tests.training.tiny import CHUNK_SIZE, MODELS, prose
from trailmark import demo
from trailmark.data.corpus import load_tokenizer, tokenize
from trailmark.models import (
    BlockRecurrentConfig,
    DRTConfig,
    LandmarkConfig,
    LandmarkForCausalLM,
    RPTConfig,
    SlidingWindowConfig,
    architectures,
)
from trailmark.training.config import (
    DataConfig,
    RunConfig,
    TrainingConfig,
    load_run_config,
)
from trailmark.training.run import Run
from trailmark.training.tasks import micro_batches
from trailmark.training.trainer import schedule

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def written(folder: Path, content: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_builds_its_model(path: Path) -> None:
    config = load_run_config(path)
    if not config.model:  # as a folder says that is made first: tests/models/conversion/test_configs.py
        assert config.init_from is not None
        return
    with torch.device("meta"):
        model = architectures()[config.model["architecture"]](config.model_config(259))
    assert sum(p.numel() for p in model.parameters()) > 100_000
    assert config.output == f"runs/{path.stem}"
    # every size that is written down is the model's
    for name, value in config.model.items():
        if name != "architecture":
            assert getattr(model.config, name) == value, name


def test_an_empty_mapping_gives_the_defaults(tmp_path: Path) -> None:
    config = load_run_config(written(tmp_path, "{}"))
    assert config == RunConfig(data=DataConfig(), training=TrainingConfig())
    assert config.model_config(300) == DRTConfig(vocab_size=300)


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


def test_a_list_is_not_given_in_parts(tmp_path: Path) -> None:
    path = written(tmp_path, "{}")
    with pytest.raises(ValueError, match=r"^data\.paths: .*twice\. Write data\.paths='\[first, second\]'"):
        load_run_config(path, ["data.paths=a", "data.paths=b"])
    assert load_run_config(path, ["data.paths=[a, b]"]).data.paths == ["a", "b"]


def test_a_variable_that_is_not_set_is_no_default(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data\.paths: expected a value, got an empty one"):
        load_run_config(written(tmp_path, "{}"), ["data.paths="])


def test_home_is_spelled_out_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_run_config(written(tmp_path, "{}"), ["output=~/x", "init_from=~", "data.paths=[~/a, b~]"])
    assert config.init_from == str(tmp_path)
    assert config.output == f"{tmp_path}/x"
    assert config.data.paths == [f"{tmp_path}/a", "b~"]


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
    "data.path=x": r"^data\.path: unknown key\. Did you mean 'paths'\?",
    "data.zzz=x": r"^data\.zzz: unknown key\. Valid: answer_weight, chains, chunk_size, .*tokenizer",
    "model.hiden_size=3": r"^model\.hiden_size: unknown field of drt\. Did you mean 'hidden_size'\?",
    "model.torchscript=true": r"^model\.torchscript: unknown field",  # transformers' field, not ours
    "model.1=2": r"^model\.1: unknown field",
    "1=2": r"^1: unknown key\. Valid: data, distil, init_from, model, output, training",
    "init_form=runs/x": r"^init_form: unknown key\. Did you mean 'init_from'\?",
    # a foreign value
    "data.task=summarisation": r"^data\.task: .*Did you mean 'summarization'\?",
    "training.precision=bf16": r"^training\.precision: expected 'auto' or 'float32' or 'bfloat16' or 'float64', "
    "got 'bf16'",
    "training.schedule=cos": r"^training\.schedule: .*Did you mean 'cosine'\?",
    "training.parallel=fsdp2": r"^training\.parallel: .*Did you mean 'fsdp'\?",
    "data.task=need": r"^data\.task: expected 'text' or 'needles' or .*, got 'need'\. Did you mean 'needles'\?",
    "training.optimizer=sgd": r"^training\.optimizer: expected 'muon' or 'adamw', got 'sgd'",
    "model.architecture=drtt": r"^model\.architecture: expected .*'drtt'\. Did you mean 'drt'\?",
    "model.architecture=[drt]": r"^model\.architecture: expected .*drt or",
    "model.window_position=nope": r"^model\.window_position: expected 'alibi' or 'rope', got 'nope'",
    "model.implementation=cuda": r"^model: implementation: expected None, 'reference' or 'torch', got 'cuda'",
    # a wrong type
    "training.steps=many": r"^training\.steps: expected a whole number, got 'many'",
    "training.steps=2.5": r"^training\.steps: expected a whole number, got 2\.5",
    "training.steps=.inf": r"^training\.steps: expected a whole number, got '.inf'",
    "training.learning_rate=fast": r"^training\.learning_rate: expected a number, got 'fast'",
    "training.gradient_checkpointing=1": r"^training\.gradient_checkpointing: expected true or false, got 1",
    "init_from=3": r"^init_from: expected text, got 3",
    "training.report_to=[1]": r"^training\.report_to: expected 'tensorboard' or .*got 1",
    "data.paths={a: 1}": r"^data\.paths: expected a list",
    "training=[1]": r"^training: expected a section with keys, got \[1\]",
    "training.steps.more=3": r"^training\.steps\.more: ",
    "output.folder=3": r"^output\.folder: output is no section",
    "model.hidden_size=wide": r"^model\.hidden_size: expected a whole number, got 'wide'",
    # no override at all
    "training.steps": r"^override: expected key=value, got 'training\.steps'",
    "training.steps=[": r"^training\.steps: the value .* is no YAML",
    # sizes that do not fit
    "training.tokens_per_step=4097": r"^training\.tokens_per_step: expected whole samples of context_length = 1024 "
    r"tokens, got 4097\. 4096 would be 4",
    "training.tokens_per_step=100": r"^training\.tokens_per_step: .* got 100\. 1024 would be 1",
    "training.context_length=1": r"^training\.context_length: expected 2 to [0-9]+, got 1",
    "training.micro_batch_size=0": r"^training\.micro_batch_size: expected 1 to [0-9]+, got 0",
    "training.keep_checkpoints=0": r"^training\.keep_checkpoints: expected 1 to [0-9]+, got 0",
    "training.logging_steps=0": r"^training\.logging_steps: expected 1 to [0-9]+, got 0",
    "training.eval_steps=0": r"^training\.eval_steps: expected 1 to [0-9]+, got 0",
    "training.eval_windows=0": r"^training\.eval_windows: expected 1 to [0-9]+, got 0",
    "training.skip_nonfinite=-1": r"^training\.skip_nonfinite: expected 0 to [0-9]+, got -1",
    "training.weight_decay=-1": r"^training\.weight_decay: expected 0 to [0-9]+, got -1",
    "training.adam_beta1=1.5": r"^training\.adam_beta1: expected 0 to below 1, got 1\.5",
    "training.final_fraction=2": r"^training\.final_fraction: expected 0 to 1, got 2",
    "training.eval_steps=10": r"^data\.validation: expected text to measure on .* training\.eval_steps, got none",
    "data.validation=[]": r"^data\.validation: expected files or folders, got an empty list\. Name some, or null",
    "data.hops=0": r"^data\.hops: expected 1 to [0-9]+, got 0",
    "data.task=text & data.hops=2": r"^data\.hops: expected 1 with data\.task text, got 2: it belongs to task niah",
    "data.task=text & data.chains=2": r"^data\.chains: expected null with data\.task text, got 2",
    "data.first_level=2": r"^data\.first_level: expected 0 with data\.task text, got 2",
    "data.task=niah & data.filler_weight=0.5": r"^data\.filler_weight: expected 0\.0 with data\.task niah, got 0\.5",
    "data.num_landmarks=2": r"^data\.num_landmarks: expected 1 with data\.task text, got 2",
    "data.task=needles & data.distractors=1": r"^data\.distractors: expected 0 with data\.task needles, got 1",
    "data.chains=0": r"^data\.chains: expected 1 to [0-9]+, got 0",
    "data.num_landmarks=3": r"^data\.num_landmarks: expected 1 to 2, got 3",
    "data.chunk_size=0": r"^data\.chunk_size: expected 1 to [0-9]+, got 0",
    "training.adam_beta1=1": r"^training\.adam_beta1: expected 0 to below 1, got 1\.0",
    "data.task=needles & data.packed=true & data.chunk_size=20": r"^data\.packed: expected data\.chunk_size .* 24.*20",
    "data.packed=true": r"^data\.packed: expected false with data\.task text, got true",
    "data.first_level=99": r"^data\.first_level: expected 0 to \d+, got 99",
    "data.task=niah & data.separate_documents=true": r"^data\.separate_documents: expected false with data\.task niah",
    "data.answer_weight=8": r"^data\.answer_weight: expected 1 with data\.task \w+ and data\.needle_share 0\.0, got 8",
    "data.needle_share=2": r"^data\.needle_share: expected 0 to 1, got 2",
    "data.needle_share=0.1 & data.task=niah": r"^data\.needle_share: expected 0 with data\.task niah, got 0\.1",
    "data.task=summarization": r"^data\.paths: expected files of pairs .*, got none",
    "model.num_retrieved_chunks=1": r"^model\.num_retrieved_chunks: expected at least 2 in training, got 1",
    "training.steps=0": r"^training\.steps: expected 1 to [0-9]+, got 0",
    "training.save_steps=-1": r"^training\.save_steps: expected 1 to [0-9]+, got -1",
    "training.context_length=9999": r"^training\.tokens_per_step: expected whole samples .* 9999 tokens, got 4096",
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
    "training.constant_fraction=7": r"^training\.constant_fraction: expected 0 to 1, got 7",
    "data.early_landmarks=1.5": r"^data\.early_landmarks: expected 0 to 1, got 1\.5",
    "data.level_accuracy=1": r"^data\.level_accuracy: expected 0 to below 1, got 1\.0",
    "data.paths=[]": r"^data\.paths: expected files or folders, got an empty list",
    "data.task=needles": r"^data\.chunk_size: expected the model's chunk_size 20, got 32",
    "training.loss_slab=0": r"^training\.loss_slab: expected 1 to [0-9]+, got 0",
    "training.loss_slab=64 & data.task=niah": r"^training\.loss_slab: expected none with data\.task niah, which",
    "training.loss_slab=64 & distil.model=x": r"^training\.loss_slab: expected none with distil\.model x, which",
    "training.loss_slab=64 & distil.model=x & distil.weight=0 & distil.retrieval_weight=1": r"^training\.loss_slab: "
    r"expected none with distil\.model x, which",
    # texts that cannot be shared
    "training.context_parallel=0": r"^training\.context_parallel: expected 1 to [0-9]+, got 0",
    "training.context_parallel=2": r"^data\.early_landmarks: expected 0 with training\.context_parallel 2, got 0\.1",
    "training.context_parallel=2 & data.early_landmarks=0 & data.task=niah": r"^data\.task: expected text with",
    "training.context_parallel=2 & data.early_landmarks=0 & data.separate_documents=true": r"^data\."
    r"separate_documents: expected false with training\.context_parallel 2, got true",
    "training.context_parallel=2 & data.early_landmarks=0 & training.loss_positions=0.5": r"^training\."
    r"loss_positions: expected 1 with",
    "training.context_parallel=3 & data.early_landmarks=0": r"^training\.context_length: expected stretches of whole "
    r"chunks, .* a multiple of 60, at least 60; got 1024\. 1020 would do",
    "training.context_parallel=2 & data.early_landmarks=0 & model.retriever=encoder & model.embedder=hash": r"^training"
    r"\.context_parallel: expected retriever 'causal' or 'random', got 'encoder'",
}


@pytest.mark.parametrize(("override", "message"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_named(tmp_path: Path, override: str, message: str) -> None:
    path = written(tmp_path, {"model": MODELS["drt"], "training": {"steps": 5}, "output": "runs/x"})
    load_run_config(path)
    with pytest.raises(ValueError, match=message) as caught:
        load_run_config(path, override.split(" & "))
    assert "\n" not in str(caught.value)


def test_the_chunks_of_needles_are_the_models_by_default_too(tmp_path: Path) -> None:
    """A DRT's chunk_size is 63 where none is given, the task's is 32."""
    path = written(tmp_path, {"data": {"task": "needles"}})
    with pytest.raises(ValueError, match="chunk_size: expected the model's chunk_size 63, got 32"):
        load_run_config(path)
    load_run_config(path, ["data.chunk_size=63"])
    load_run_config(path, ["model.architecture=sliding_window"])  # has no chunks


LANDMARK_MISTAKES = {
    "training.context_length=641 & training.tokens_per_step=641": r"^training\.context_length: expected at most 640 "
    r"tokens, which .* model\.max_position_embeddings=673\.$",
    "model.chunk_size=1": r"^training\.context_length: expected at most",
    "model.local_length=600": r"^model: max_position_embeddings: expected at least 63 for 2 \+ 1 chunks and",
    "model.gate_cutoff=0.5": r"^model: gate_cutoff: expected 0 for a model without a retrieval gate",
    "model.retrieve_per=heads": r"^model\.retrieve_per: expected .*Did you mean 'head'",
    "model.num_retrieved_chunks=0": r"^model\.num_retrieved_chunks: expected at least 1 in training, got 0",
    "data.task=needles": r"^data\.chunk_size: expected the model's chunk_size 20, got 32",
    "training.loss_slab=64 & model.landmark_loss=text": r"^training\.loss_slab: expected none with "
    r"model\.landmark_loss",
    "training.context_parallel=2": r"^training\.context_parallel: expected a drt or a sliding_window",
}


@pytest.mark.parametrize(("override", "message"), LANDMARK_MISTAKES.items(), ids=LANDMARK_MISTAKES)
def test_a_mistake_of_landmark_attention_is_named(tmp_path: Path, override: str, message: str) -> None:
    path = written(
        tmp_path, {"model": MODELS["landmark"], "training": {"context_length": 640, "tokens_per_step": 1280}}
    )
    load_run_config(path)  # 32 chunks of 21 positions
    with pytest.raises(ValueError, match=message) as caught:
        load_run_config(path, override.split(" & "))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("early", [0.0, 0.1])
def test_positions_that_a_long_text_wants_are_told(tmp_path: Path, early: float) -> None:
    """As many as it says are enough, and one less is not."""
    data = {"task": "niah", "early_landmarks": early}
    path = written(tmp_path, {"model": MODELS["landmark"], "data": data, "training": {"context_length": 300}})
    for length in (700, 759, 760):
        changes = [f"training.context_length={length}", f"training.tokens_per_step={length}"]
        with pytest.raises(ValueError, match=r"model\.max_position_embeddings=\d+\.$") as caught:
            load_run_config(path, changes)
        enough = int(str(caught.value).rstrip(".").rsplit("=", 1)[1])
        load_run_config(path, [*changes, f"model.max_position_embeddings={enough}"])
        with pytest.raises(ValueError, match=r"^training\.context_length: expected at most"):
            load_run_config(path, [*changes, f"model.max_position_embeddings={enough - 1}"])


def test_yamls_true_is_a_word_where_a_word_is_wanted(tmp_path: Path) -> None:
    path = written(
        tmp_path, {"model": MODELS["landmark"] | {"memory_position": True}, "data": {"chunk_size": 20}}
    )
    overrides = ["training.context_length=640", "training.tokens_per_step=640"]
    assert load_run_config(path, overrides).model_config().memory_position == "true"


def test_needles_of_landmark_attention_lie_where_its_chunks_do(tmp_path: Path) -> None:
    data = {"task": "needles", "chunk_size": CHUNK_SIZE}
    path = written(tmp_path, {"model": MODELS["landmark"], "data": data})
    load_run_config(path)
    with pytest.raises(ValueError, match=r"^model\.landmark_phase: expected 'fixed' .*got 'random'"):
        load_run_config(path, ["model.landmark_phase=random"])
    with pytest.raises(
        ValueError,
        match=r"^model\.max_position_embeddings: expected positions for the 32 chunks of 20 tokens",
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
    length, texts = config.training.context_length, config.training.tokens_per_step / 502
    assert (length + length // 50, texts) == (512, 128)


# --- the papers' rows --------------------------------------------------------------------------------------

# arXiv 2410.01651, Table 1; the sizes of Table 4 besides
ROWS = ["base-512", "base-768", "base-plus2-658", "base-plus2-704", "drt-x1", "drt-x2", "landmark"]
TABLE_1 = [f"{row}-{size}" for size in ("128m", "350m") for row in ROWS]
TABLE_4 = [f"{row}-{size}" for size in ("760m", "1.5b", "3b") for row in ("base-512", "drt-x1")]
BASELINES = [
    f"{row}-{size}" for size in ("128m", "350m", "760m", "1.5b", "3b") for row in ("rpt", "block-recurrent")
]
WIDTHS = {
    "128m": (768, 2048),
    "350m": (1024, 2816),
    "760m": (1536, 4096),
    "1.5b": (2048, 5504),
    "3b": (2560, 6912),
}
# what may differ where the paper says that all else is equal
OF_THE_MACHINE = {"micro_batch_size", "gradient_checkpointing", "parallel"}
OF_THE_TEXTS = {"context_length", "tokens_per_step"}


@cache
def paper(name: str) -> RunConfig:
    return load_run_config(CONFIGS[0].with_name(f"{name}.yaml"))


def parameters(config: RunConfig, **fields: Any) -> int:
    architecture = architectures()[config.model["architecture"]]
    with torch.device("meta"):
        model = architecture(replace(config, model=config.model | fields).model_config(259))
    return sum(p.numel() for p in model.parameters())


def training_but(config: RunConfig, names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in vars(config.training).items() if name not in names}


@pytest.mark.parametrize("name", [*TABLE_1, *TABLE_4, *BASELINES, "full-attention-128m"])
def test_all_rows_are_trained_as_the_paper_says(name: str) -> None:
    """arXiv 2410.01651, App. A; epsilon and what decays are the published code's."""
    config = paper(name)
    training, peak = config.training, config.training.learning_rate
    assert (training.optimizer, training.adam_beta1, training.adam_beta2) == ("adamw", 0.9, 0.95)
    assert (training.weight_decay, training.decay_vectors, training.adam_epsilon) == (0.001, True, 1e-6)
    assert (training.steps, training.precision, training.max_grad_norm) == (60_000, "bfloat16", 1.0)
    assert config.data.tokenizer == "gpt2"
    without_chunks = config.model["architecture"] in ("sliding_window", "block_recurrent")
    assert config.data.early_landmarks == 0 or without_chunks
    # 2 % warmup to the peak, a cosine to 4e-4
    rates = [peak * schedule(training, step) for step in (0, 1200 - 1, 1200, (1200 + 60_000) // 2, 60_000)]
    assert rates == pytest.approx([2e-3 / 1200, 2e-3, 2e-3, 1.2e-3, 4e-4])
    # all else is as in the first of them
    differs = OF_THE_MACHINE | OF_THE_TEXTS | ({"eval_steps"} if config.data.neighbours else set())
    assert training_but(config, differs) == training_but(paper("base-512-128m"), differs)
    # 8 processes share a step, in whole micro-batches of at most 2^15 tokens
    rows, micro = config.rows_per_step(), training.micro_batch_size
    assert micro is not None
    assert micro_batches(rows, 8, micro) * micro * 8 == rows
    assert micro * training.context_length <= 2**15


@pytest.mark.parametrize("name", [*TABLE_1, *TABLE_4, *BASELINES])
def test_contexts_and_token_budgets(name: str) -> None:
    config = paper(name)
    size = name.rsplit("-", 1)[1]
    if config.model["architecture"] == "landmark":  # 768 positions; texts that 8 processes can share
        assert config.training.context_length * 64 / 63 == config.model["max_position_embeddings"] == 768
        assert config.rows_per_step() == 8 * round(2**19 / 756 / 8)
    else:
        of_size = {"1.5b": 8192, "3b": 4096}.get(size, 16_384)
        assert config.training.context_length == (4096 if name == "block-recurrent-128m" else of_size)
        assert config.training.tokens_per_step == 2**19


@pytest.mark.parametrize("name", [*TABLE_1, *TABLE_4, *BASELINES])
def test_the_models_of_the_rows(name: str) -> None:
    """Sec. 4.1.2: what tells the rows apart."""
    row, size = name.rsplit("-", 1)
    config, layers = paper(name), {"128m": 12, "3b": 32}.get(size, 24)
    model = config.model_config()
    assert (model.hidden_size, model.intermediate_size) == WIDTHS[size]
    assert model.num_hidden_layers == layers + (2 if "plus2" in row else 0)
    assert model.head_dim == (128 if size in ("1.5b", "3b") else 64)
    assert model.vocab_size == 50_257
    assert model.tie_word_embeddings
    if isinstance(model, DRTConfig):
        assert (model.sliding_window, model.chunk_size, model.num_retrieved_chunks) == (512, 64, 8)
        assert (model.num_lower_layers, model.num_encoder_layers) == (layers // 2, 2)
        assert model.num_retrieval_groups == int(row.removeprefix("drt-x"))
        assert not model.residual_gca
    elif isinstance(model, LandmarkConfig):
        assert (model.chunk_size, model.num_retrieved_chunks) == (63, 4)
    elif isinstance(model, RPTConfig):
        assert (model.sliding_window, model.chunk_size, model.num_retrieved_chunks) == (512, 64, 8)
        assert (model.num_lower_layers, model.num_encoder_layers) == (layers // 2, 2)
        # what a DRT with the same encoder may read, and its table
        drt = paper("drt-x1-128m").model_config()
        assert model.retriever == "encoder"
        assert model.exclude_visible_chunks == drt.exclude_visible_chunks
    elif isinstance(model, BlockRecurrentConfig):
        assert (model.sliding_window, model.block_size, model.num_states) == (768, 512, 512)
        assert model.recurrent_layer == layers // 3
        assert model.truncation_blocks * model.block_size == 1024
    else:
        assert model.sliding_window == int(row.rsplit("-", 1)[1])
        assert model.window_position == "alibi"


# millions; of the DRT those of the published code, which has no W_h and W_l (ours, by Eq. 1: 0.6 M and a group's 0.6 M)
PUBLISHED = {"base-512-128m": 123.6, "base-plus2-658-128m": 137.7, "drt-x1-128m": 146.0, "drt-x2-128m": 146.0}
OURS = {
    "drt-x1-128m": 147_154_944, "drt-x2-128m": 147_745_536, "landmark-128m": 123_552_000,
    "base-512-350m": 359_794_688, "base-plus2-658-350m": 385_488_896, "drt-x1-350m": 414_865_408,
    "drt-x2-350m": 415_915_008, "base-512-760m": 756_747_264, "drt-x1-760m": 879_461_376,
    "rpt-128m": 151_881_216, "rpt-350m": 435_859_456, "rpt-760m": 926_681_088, "rpt-1.5b": 1_619_877_888,
    "rpt-3b": 3_244_544_000, "block-recurrent-128m": 129_057_792, "block-recurrent-350m": 369_233_920,
    "block-recurrent-760m": 777_197_568, "block-recurrent-1.5b": 1_352_933_376, "block-recurrent-3b": 2_721_433_600,
    "base-512-1.5b": 1_317_277_696, "drt-x1-1.5b": 1_535_946_752, "base-512-3b": 2_666_378_240,
    "drt-x1-3b": 3_060_966_400, "hils-345m": 292_673_536, "hils-7b": 7_314_825_216,
    "hsa-345m": 338_164_034,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({*PUBLISHED, *OURS}))
def test_parameters(name: str) -> None:
    config = paper(name)
    if name in PUBLISHED:
        without = {"retrieval_projections": False} if name.startswith("drt") else {}
        assert round(parameters(config, **without) / 1e6, 1) == PUBLISHED[name]
    if name in OURS:
        assert parameters(config) == OURS[name]


# --- from a pretrained base ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
def test_stages_from_a_pretrained_base(name: str) -> None:
    """The additions alone with a teacher, then all, at the rate that the first ended with."""
    first, second = paper(f"{name}-drt-additions"), paper(f"{name}-drt")
    assert first.data == second.data
    assert (first.training.train, second.training.train) == ("additions", "all")
    assert first.distil.retrieval_weight > 0
    assert second.distil.model is None
    rates = [first.training.learning_rate, second.training.learning_rate]
    assert [rates[0] * first.training.final_fraction, rates[1]] == pytest.approx([1e-4, 1e-4])
    assert second.training.addition_learning_rate_factor == 3
    for config in (first, second):
        rows, micro = config.rows_per_step(), config.training.micro_batch_size
        for processes in (1, 8):
            assert micro_batches(rows, processes, micro) >= 1


@pytest.mark.parametrize(("name", "layers", "rank"), [("hils-345m", 16, 64), ("hils-7b", 32, 256)])
def test_hils_as_its_paper_has_it(name: str, layers: int, rank: int) -> None:
    """arXiv 2607.02980: in every layer, or in every fourth one of the 7B, which has as many key heads as OLMo-3."""
    config = paper(name)
    model = config.model_config()
    every = 1 if name == "hils-345m" else 4
    assert model.retrieving_layers == list(range(every - 1, layers, every))
    assert (model.num_hidden_layers, model.calibration_rank) == (layers, rank)
    assert (model.sliding_window, model.chunk_size, model.num_retrieved_chunks) == (512, 63, 32)
    heads = (16, 2, 64) if every == 1 else (32, 32, 128)
    assert (model.num_attention_heads, model.num_key_value_heads, model.head_dim) == heads
    assert model.rope_scaling["original_max_position_embeddings"] == config.training.context_length == 8192
    rows, micro = config.rows_per_step(), config.training.micro_batch_size
    assert micro is not None
    assert micro_batches(rows, 8, micro) * micro * 8 == rows


def test_every_row_has_its_file_and_every_file_is_said_in_the_readme() -> None:
    names = {path.stem for path in CONFIGS}
    assert {*TABLE_1, *TABLE_4, *BASELINES, "full-attention-128m", "landmark-paper"} <= names
    readme = (CONFIGS[0].parent / "README.md").read_text()
    assert [name for name in sorted(names) if f"{name}.yaml" not in readme] == []
    for name in ("hils-345m", "hils-7b", "hsa-345m"):
        assert f"{OURS[name] / 1e6:,.1f} million" in readme, name
    said = set(re.findall(r"([\w.-]+)\.yaml", readme))
    assert said - names == set()


# --- laptop twins ------------------------------------------------------------------------------------------

TWINS = [
    "base-128", "base-192", "base-plus1-153", "base-plus1-176", "drt-x1", "drt-x2", "landmark", "full-attention",
]  # fmt: skip


@pytest.mark.parametrize("name", TWINS)
def test_twins_are_trained_alike(name: str) -> None:
    config = paper(f"laptop-{name}")
    first = paper("laptop-drt-x1")
    assert training_but(config, OF_THE_TEXTS) == training_but(first, OF_THE_TEXTS)
    assert replace(config.data, early_landmarks=0) == first.data
    if name != "landmark":
        assert config.training.context_length == first.training.context_length
        assert config.training.tokens_per_step == first.training.tokens_per_step
    else:
        assert config.training.context_length * 32 / 31 == config.model["max_position_embeddings"] == 192
        assert config.rows_per_step() == round(first.training.tokens_per_step / 186)


@pytest.mark.parametrize("vocabulary", [len(load_tokenizer()), 4096, 50_257])
def test_the_deeper_twin_has_as_many_parameters(vocabulary: int) -> None:
    """Within 5 % of the DRTs, as "+2 layers" is meant to have (of the paper's own it is 6 %)."""
    twin = parameters(paper("laptop-base-plus1-153"), vocab_size=vocabulary)
    assert twin == parameters(paper("laptop-base-plus1-176"), vocab_size=vocabulary)
    for name in ("laptop-drt-x1", "laptop-drt-x2"):
        assert 0.95 <= twin / parameters(paper(name), vocab_size=vocabulary) <= 1.05


# --- fine-tuning -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["finetune-niah-1hop", "finetune-niah-2hop", "finetune-summarization"])
@pytest.mark.parametrize(("prefix", "of"), [("", "drt-x2-128m"), ("laptop-", "laptop-drt-x2")])
def test_fine_tuning_takes_a_tenth_of_the_steps_and_all_else_as_it_was(
    name: str, prefix: str, of: str
) -> None:
    """App. D."""
    config, before = paper(prefix + name), paper(of)
    assert config.init_from == before.output
    assert config.model == {}  # of init_from
    assert config.data.tokenizer == before.data.tokenizer
    assert config.training.steps * 10 == before.training.steps
    assert config.training.warmup_steps * 10 == before.training.warmup_steps
    differs = {"steps", "warmup_steps", "save_steps", "eval_steps"}
    if name == "finetune-summarization":
        differs |= {"context_length", "micro_batch_size"}
    assert training_but(config, differs) == training_but(before, differs)


@pytest.mark.parametrize("hops", [1, 2])
def test_the_needles_of_fine_tuning_can_be_made(hops: int) -> None:
    """The laptop's; those of the papers need a tokenizer that is downloaded."""
    config = replace(
        paper(f"laptop-finetune-niah-{hops}hop"), init_from=None, model=paper("laptop-drt-x2").model
    )
    batch = Run(config, text=tokenize([prose(3000)], load_tokenizer())).batch(0)
    assert batch["input_ids"].shape == (config.rows_per_step(), config.training.context_length)
    assert batch["needles"].shape[1] == (1 if hops == 1 else 4)
    assert batch["answers"].any(1).all()


ROWS_OF_TABLE_2: dict[str, Callable[..., Any]] = {
    "drt": tiny.drt, "window": tiny.window_model, "landmark": tiny.landmark, "rpt": tiny.rpt,
    "block_recurrent": tiny.block_recurrent,
}  # fmt: skip


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("row", ROWS_OF_TABLE_2)
@pytest.mark.sampled(5)
def test_every_row_of_table_2_is_fine_tuned_by_one_file(row: str, hops: int, tmp_path: Path) -> None:
    """Its folder alone tells them apart; all have questions that end anywhere in a chunk."""
    changes: dict[str, Any] = {"vocab_size": 259}
    if row == "landmark":
        changes |= {"max_position_embeddings": 4096, "local_length": 40}
    if row == "rpt":
        changes |= {"retriever": "encoder", "embedder": "hash"}
    model = ROWS_OF_TABLE_2[row](**changes).float()
    model.save_pretrained(tmp_path / "before")
    config = load_run_config(
        CONFIGS[0].with_name(f"laptop-finetune-niah-{hops}hop.yaml"),
        [
            f"init_from={tmp_path / 'before'}", f"output={tmp_path / 'after'}", "data.chunk_size=5",
            "training.context_length=400", "training.tokens_per_step=1600", "training.steps=1",
        ],
    )  # fmt: skip
    assert config.model_config(259).model_type == model.config.model_type
    run = Run(config, text=tokenize([prose(3000)], load_tokenizer()))
    batch = run.batch(0)
    ends = {int(row.nonzero()[-1]) for row in batch["close_chunk"]}
    phases = {int(row.nonzero()[0]) for row in batch["close_chunk"]} - ends
    assert len(phases) > 1
    assert batch["answers"].any(1).all()
    run.train()
    assert run.step == 1


FILES = {
    "empty": (b"", r"expected sections with keys in .*, got nothing"),
    "a list": (b"- 1\n", r"expected sections with keys in .*, got \[1\]"),
    "text": (b"hello", r"expected sections with keys in .*, got 'hello'"),
    "broken": (b"a: [1\nb: }", r"is no YAML"),
    "binary": (bytes(range(256)), r"is no YAML"),
    "tagged": (b"a: !!python/object:os.system x", r"is no YAML"),
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
    with pytest.raises(ValueError, match=r"^config: expected a regular file, .* is a folder"):
        load_run_config(tmp_path)


@pytest.mark.parametrize("name", ["drt", "window"])
def test_the_needle_configurations_are_those_of_the_demo(name: str, tmp_path: Path) -> None:
    path = CONFIGS[0].parent / f"needle-{name}.yaml"
    demos = demo.Demo(tmp_path)._config(name, demo.STEPS[name])
    assert replace(load_run_config(path), output=demos.output) == demos
