"""What a conversion learned lies in a file of its own, and with the base it is the trained model again, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.training.tiny import TEXT, run_config, save_converted_llama, weights_of
from trailmark.models.conversion.additions import ADDITIONS, Additions
from trailmark.models.conversion.convert import convert
from trailmark.models.fields import saved_fields
from trailmark.training.config import RunConfig, load_run_config
from trailmark.training.run import Run
from trailmark.training.verification import verify

pytestmark = pytest.mark.usefixtures("one_thread")
DRT = ["sliding_window=16", "chunk_size=7", "num_retrieved_chunks=2", "num_encoder_layers=1"]
HILS = ["sliding_window=16", "chunk_size=8", "num_retrieved_chunks=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and its conversions."""
    folder = tmp_path_factory.mktemp("bases")
    made = {"drt": ("drt", DRT), "hils": ("hils", HILS), "window": ("sliding_window", ["sliding_window=16"])}
    save_converted_llama(folder, made)
    convert(folder / "base", folder / "half", "drt", DRT, dtype="bfloat16")
    return folder


def trained(output: Path, begin: Path, *overrides: str) -> Path:
    """A training of two steps, with adapters, that began with a model."""
    file = output.with_suffix(".yaml")
    file.write_text("model: {}\n")
    given = run_config(output, steps=2, logging_steps=1, train="additions", lora_rank=2).training
    config = load_run_config(
        file,
        [
            f"output={output}", f"init_from={begin}", "training.train=additions", "training.lora_rank=2",
            "training.optimizer=adamw", "training.learning_rate=0.01", "training.steps=2",
            f"training.tokens_per_step={given.tokens_per_step}", f"training.context_length={given.context_length}",
            *overrides,
        ],
    )  # fmt: skip
    assert isinstance(config, RunConfig)
    assert Run(config, text=TEXT).train() is not None
    return output


def assert_same_model(one: Path, other: Path) -> None:
    theirs, ours = weights_of(one), weights_of(other)
    assert theirs.keys() == ours.keys()
    for name, x in theirs.items():
        assert x.dtype == ours[name].dtype, name
        assert torch.equal(x, ours[name]), name
    fields = [saved_fields(str(folder)) for folder in (one, other)]
    for each in fields:
        each.pop("use_cache")  # the Trainer turns it off while it trains
    assert fields[0] == fields[1]


@pytest.mark.parametrize(
    ("begin", "overrides"),
    [
        ("drt", []),
        ("hils", ["model.num_retrieved_chunks=3"]),
        ("window", []),
        ("half", []),
        ("drt", ["training.train=additions_and_upper", "training.lora_rank=0"]),
        ("drt", ["training.lora_rank=0", "training.precision=float64"]),
    ],
)
@pytest.mark.sampled(3)
def test_a_base_with_the_additions_is_the_trained_model(
    begin: str, overrides: list[str], folder: Path, tmp_path: Path
) -> None:
    run = trained(tmp_path / "run", folder / begin, *overrides)
    verify(run)  # the file is one of those that are signed
    record = convert(folder / "base", tmp_path / "again", additions=run / ADDITIONS)
    assert_same_model(run, tmp_path / "again")
    assert record["parameters"]["new"] == 0
    if "training.lora_rank=0" not in overrides:
        assert record["parameters"]["adapted"] > 0
        assert (run / ADDITIONS).stat().st_size < 0.6 * (run / "model.safetensors").stat().st_size


def test_what_no_weights_have_may_have_changed_in_the_base(
    additions: Path, folder: Path, tmp_path: Path
) -> None:
    """Repositories mend which tokens end an answer; the weights stay what they were."""
    base = shutil.copytree(folder / "base", tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"eos_token_id": [1, 2]}))
    made = [tmp_path / "of-base", tmp_path / "of-mended"]
    for source, output in zip((folder / "base", base), made, strict=True):
        convert(source, output, additions=additions)
    one, other = map(weights_of, made)
    assert all(torch.equal(x, other[name]) for name, x in one.items())
    assert [saved_fields(str(output))["eos_token_id"] for output in made] == [config["eos_token_id"], [1, 2]]


def test_a_second_training_adds_to_the_first(additions: Path, folder: Path, tmp_path: Path) -> None:
    convert(folder / "base", tmp_path / "shared", additions=additions)
    for begin in (additions.parent, tmp_path / "shared"):  # what was shared is trained on as what lies here
        second = trained(tmp_path / f"second-{begin.name}", begin, "training.seed=1")
        convert(folder / "base", tmp_path / f"again-{begin.name}", additions=second / ADDITIONS)
        assert_same_model(second, tmp_path / f"again-{begin.name}")
        assert {len(changes) for changes in Additions.read(second / ADDITIONS).changes.values()} == {2}


@pytest.mark.slow
def test_a_matrix_may_be_trained_whole_and_then_adapted_and_the_other_way(
    folder: Path, tmp_path: Path
) -> None:
    upper = ["training.train=additions_and_upper", "training.lora_rank=0"]
    for order in ((upper, []), ([], upper), ([], upper, [])):
        begin = folder / "drt"
        for number, overrides in enumerate(order):
            begin = trained(tmp_path / f"{order.index(upper)}-{len(order)}-{number}", begin, *overrides)
        again = tmp_path / f"again-{order.index(upper)}-{len(order)}"
        convert(folder / "base", again, additions=begin / ADDITIONS)
        assert_same_model(begin, again)


def test_a_stopped_training_leaves_the_same_file(folder: Path, tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", folder / "drt", "training.save_steps=1")
    shutil.copytree(whole, tmp_path / "stopped")
    stopped = tmp_path / "stopped"
    for name in ("history.json", "model.json", "model.safetensors", ADDITIONS):
        (stopped / name).unlink()
    shutil.rmtree(sorted((stopped / "checkpoints").glob("step-*"))[-1])
    written = (stopped / "run.yaml").read_text()
    (stopped / "run.yaml").write_text(written.replace(str(whole), str(stopped)))
    trained(stopped, folder / "drt", "training.save_steps=1")
    assert (stopped / ADDITIONS).read_bytes() == (whole / ADDITIONS).read_bytes()


@pytest.mark.parametrize("begin", ["all", "no conversion"])
@pytest.mark.sampled(2)
def test_where_nothing_is_apart_there_is_no_file(begin: str, folder: Path, tmp_path: Path) -> None:
    start = folder / "drt"
    if begin == "no conversion":
        shutil.copytree(start, tmp_path / "moved")
        start = tmp_path / "moved"
        (start / "conversion.json").unlink()
    overrides = ["training.train=all", "training.lora_rank=0"] if begin == "all" else []
    assert not (trained(tmp_path / "run", start, *overrides) / ADDITIONS).exists()


def test_of_two_trainings_in_other_precisions_nothing_is_written(additions: Path, tmp_path: Path) -> None:
    wide = trained(tmp_path / "wide", additions.parent, "training.precision=float64")
    assert not (wide / ADDITIONS).exists()


@pytest.mark.slow
def test_what_cannot_be_made_again_is_not_written(additions: Path, folder: Path, tmp_path: Path) -> None:
    """Of a training in less precision than the first, of a conversion in another type, of weights that were changed."""
    wide = trained(tmp_path / "wide-first", folder / "drt", "training.precision=float64")
    assert (wide / ADDITIONS).exists()
    assert not (trained(tmp_path / "narrow", wide) / ADDITIONS).exists()
    convert(folder / "base", tmp_path / "half", additions=additions, dtype="bfloat16")
    assert not (tmp_path / "half" / ADDITIONS).exists()
    assert not (trained(tmp_path / "of-half", tmp_path / "half") / ADDITIONS).exists()
    for begin in (folder / "drt", additions.parent):
        changed = tmp_path / f"changed-{begin.name}"
        shutil.copytree(begin, changed)
        weights = weights_of(changed)
        weights["norm.weight"] = 2 * weights["norm.weight"]
        save_file(weights, changed / "model.safetensors", {"format": "pt"})
        assert not (trained(tmp_path / f"of-{changed.name}", changed) / ADDITIONS).exists()


def test_a_damaged_file_is_found_before_the_training(folder: Path, tmp_path: Path, additions: Path) -> None:
    shutil.copytree(folder / "drt", tmp_path / "begin")
    change = lambda header, tensors: header.update(format=2)  # noqa: E731
    changed(additions, tmp_path / "begin" / ADDITIONS, change)
    with pytest.raises(ValueError, match="of format 2"):
        trained(tmp_path / "run", tmp_path / "begin")
    assert not (tmp_path / "run").exists()


def test_beside_a_model_lie_the_additions_to_that_very_model(
    folder: Path, tmp_path: Path, additions: Path
) -> None:
    convert(folder / "base", tmp_path / "three", None, ["num_retrieved_chunks=3"], additions=additions)
    own = tmp_path / "three" / ADDITIONS
    convert(folder / "base", tmp_path / "again", additions=own)
    assert_same_model(tmp_path / "three", tmp_path / "again")
    assert own.stat().st_mode == (tmp_path / "three" / "config.json").stat().st_mode


# --- what does not fit -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def additions(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("trained") / "run", folder / "drt") / ADDITIONS


def changed(additions: Path, path: Path, change: Callable[[dict, dict[str, Tensor]], None]) -> Path:
    """A copy with another header or other tensors."""
    with safetensors.safe_open(additions, framework="pt") as file:
        header = json.loads(file.metadata()["trailmark"])
    tensors = load_file(additions)
    change(header, tensors)
    save_file(tensors, path, {"trailmark": json.dumps(header)})
    return path


def _infinite(header: dict, tensors: dict[str, Tensor]) -> None:
    next(iter(tensors.values())).view(-1)[0] = torch.inf


def _short(header: dict, tensors: dict[str, Tensor]) -> None:
    name = next(name for name in tensors if ".lora_A." in name)
    tensors[name] = tensors[name][:, 1:].contiguous()


def _flat(header: dict, tensors: dict[str, Tensor]) -> None:
    name = next(name for name in tensors if "o_proj" in name and ".lora_A." in name)
    other = name.replace("lora_A", "lora_B")
    tensors[name], tensors[other] = tensors[name][0].contiguous(), tensors[other][:, 0].contiguous()


def _large(header: dict, tensors: dict[str, Tensor]) -> None:
    name = next(name for name in tensors if ".lora_A." in name)
    for side in "AB":
        tensors[name.replace("lora_A", f"lora_{side}")].fill_(3e38)


def _forgetful(header: dict, tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if ".lora_" not in name]:
        del tensors[name]


def _whole_numbers(header: dict, tensors: dict[str, Tensor]) -> None:
    name = next(name for name in tensors if ".lora_" not in name)
    tensors[name] = tensors[name].to(torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_flat, r"expected factors \[out, r\] and \[r, in\]"),
        (_large, "NaN or Infinity"),
        (_forgetful, "which the base has not, there is none"),
        (_whole_numbers, "is in torch.int32"),
        (lambda header, tensors: header["factors"].update({x: [1e308] for x in header["factors"]}), "NaN or Infinity"),
        (lambda header, tensors: header["config"].update(attention_bias=True), "expected (False|those of a model)"),
        (lambda header, tensors: header["base"].update(sha256="0" * 64), "expected the weights that they were"),
        (lambda header, tensors: header.update(kind="another"), "expected trailmark additions of format 1"),
        (lambda header, tensors: header.update(format=2), "of format 2. Use the trailmark that wrote it"),
        (lambda header, tensors: header.update(dtype="float8"), "dtype: expected one of 'float64'"),
        (lambda header, tensors: header.pop("base"), "base"),
        (lambda header, tensors: header.update(target="llama"), "to: expected one of"),
        (lambda header, tensors: header["config"].update(hidden_size=48), "hidden_size: expected 24"),
        (lambda header, tensors: header["config"].update(num_hidden_layers=10**6), "expected at most 1000"),
        (lambda header, tensors: header["config"].update(chunk_size="many"), "chunk_size"),
        (lambda header, tensors: header["config"].update(colour=1), "colour: unknown field of drt"),
        (lambda header, tensors: tensors.update(other=torch.ones(1)), "other: the model has no such tensor"),
        (lambda header, tensors: tensors.pop(next(x for x in tensors if ".lora_B." in x)), "lacks"),
        (_infinite, "NaN or Infinity"),
        (_short, r"qkv_proj.weight: the model has one of shape|proj.weight: the model has one of shape"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_leaves_nothing(
    change: Callable[..., None], message: str, additions: Path, folder: Path, tmp_path: Path
) -> None:
    file = changed(additions, tmp_path / "other.safetensors", change)
    with pytest.raises(ValueError, match=message):
        convert(folder / "base", tmp_path / "out", additions=file)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_files_of_another_kind_are_refused(additions: Path, folder: Path, tmp_path: Path) -> None:
    def refused(file: Path, message: str, to: str | None = None) -> None:
        with pytest.raises(ValueError, match=message):
            convert(folder / "base", tmp_path / "out", to, additions=file)

    refused(
        tmp_path / "none", r"^additions: there is no .*Training a conversion leaves additions\.safetensors"
    )
    refused(folder / "drt" / "model.safetensors", "^additions: expected a file that trailmark train left")
    refused(folder / "drt" / "config.json", "^additions: cannot read")
    refused(folder, "^additions: expected a regular file")
    refused(additions, "^to: expected drt, of which", to="hils")
    with pytest.raises(ValueError, match=r"^to: expected one of .*, or a file with additions, got neither"):
        convert(folder / "base", tmp_path / "out")


def test_the_command_line_takes_them(
    additions: Path, folder: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, _ = command("convert", folder / "base", "-o", tmp_path / "again", "--additions", additions)
    assert code == 0
    lines = out.splitlines()
    assert any(line.startswith("adapted: ") for line in lines)
    assert any(line.startswith("learned: ") for line in lines)
    assert not any(line.startswith("What is new has learned nothing") for line in lines)
    card = (tmp_path / "again" / "README.md").read_text()
    assert " 0 new. " in card
    assert "A training before taught it" in card
    assert (tmp_path / "again" / ADDITIONS).read_bytes() == additions.read_bytes()
