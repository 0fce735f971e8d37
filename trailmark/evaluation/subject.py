"""The model to evaluate or to use, from its folder: what it is, and what it was trained for."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from os.path import realpath
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from trailmark import pretrained, untrusted
from trailmark.data.chat import beginning
from trailmark.data.corpus import (
    Tokens,
    load_tokenizer,
    read_texts,
    standard_library_texts,
    tokenize,
    tokenizer_fingerprint,
    vocabulary_size,
)
from trailmark.data.needles.curriculum_texts import CURRICULUM
from trailmark.data.neighbours.embedders import device_named
from trailmark.data.neighbours.trained_embedders import embedder_of
from trailmark.evaluation.losses import longest_text
from trailmark.evaluation.record import environment, identity
from trailmark.files import read_json
from trailmark.models import MODELS, is_ours
from trailmark.models.fields import parse_fields
from trailmark.processes import local_rank, world_size
from trailmark.settings import Settings, from_mapping, setting
from trailmark.trained import trained_length

MANIFEST = "manifest.json"  # of a checkpoint: it names all files there, and others would be found by verify
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # OWNER/NAME, or a name alone
_DEMO = Path(__file__).parents[1] / "demo_model"  # what trailmark demo trained, shipped with the package
_DEMO_NAME = "demo"


@dataclass
class Subject:
    """A model, its tokenizer and what is known of its training."""

    folder: Path
    model: Any  # a TrailmarkForCausalLM; with load(any_model=True) it may be any causal language model
    tokenizer: Any
    run: dict[str, Any]  # run.yaml; empty where there is none
    changed: dict[str, Any] = field(
        default_factory=dict
    )  # fields of the configuration set for this evaluation

    @classmethod
    def of(cls, model: Any, tokenizer: Any, chunk_size: int) -> Subject:
        """A model of the needle task that lies in no folder; ``chunk_size``: of the task, if the model has none."""
        return cls(Path(), model, tokenizer, {"data": {"task": "needles", "chunk_size": chunk_size}})

    @property
    def ours(self) -> bool:
        """Whether it has trailmark's caches, tiers and retrieval; else it is read as transformers reads it."""
        return is_ours(self.model)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def identity(self) -> dict[str, Any]:
        return identity(self.model, self.folder, self.changed)

    def environment(self) -> dict[str, Any]:
        """Versions and hardware, and the date."""
        return environment(self.model.device.type)

    @property
    def chunk_size(self) -> int:
        """Of the needle task: the model's, else that of its training, else 63."""
        own = getattr(self.model.config, "chunk_size", None)
        return int(own or self.run.get("data", {}).get("chunk_size", 63))

    @property
    def beginning(self) -> list[int]:
        """Tokens that its tokenizer puts before a text; ours learn without, unless their configuration names it."""
        if self.ours and self.model.config.bos_token_id is None:
            return []
        return beginning(self.tokenizer)

    @property
    def longest_text(self) -> int | None:
        """Tokens that it can tell the places of; None: nothing says so, or, of ours, there is no end."""
        return None if self.ours else longest_text(self.model)

    @property
    def train_length(self) -> int:
        """Tokens of the longest training text; where nothing says so, 16 chunks, of needles the curriculum's."""
        known = trained_length(self.model.config.to_dict(), self.run, read_json(self.folder / "history.json"))
        return known or (CURRICULUM[-1].chunks if self.task == "needles" else 16) * self.chunk_size

    def default_lengths(self, num_tokens: int | None = None) -> list[int]:
        """1x, 4x and 16x the training texts: of these, those that a text of ``num_tokens`` holds, or all of it."""
        lengths = [self.train_length * factor for factor in (1, 4, 16)]
        if num_tokens is None:
            return lengths
        return [length for length in lengths if length <= num_tokens] or [num_tokens]

    @property
    def task(self) -> str | None:
        """What it was trained for: "text", "needles", "niah", "summarization"; None if nothing says so."""
        return self.run.get("data", {}).get("task") if self.run else None

    def trained_on(self, paths: Sequence[Path] | None) -> str:
        """Those of ``paths`` that share files with the training text, as far as run.yaml tells."""
        trained = self.run.get("data", {}).get("paths") or []
        known = [Path(realpath(path)) for path in ([trained] if isinstance(trained, str) else trained)]
        places = {path: Path(realpath(path)) for path in paths or []}
        return ", ".join(
            str(path)
            for path, place in places.items()
            if any(place.is_relative_to(k) or k.is_relative_to(place) for k in known)
        )

    def tokens(self, paths: Sequence[Path] | None) -> Tokens:
        """The text to ask about: ``paths``, or Python sources that the demo's training leaves out."""
        texts = read_texts(paths, "text") if paths else standard_library_texts("haystack")
        return tokenize(texts, self.tokenizer)


def own_device(name: str | None) -> torch.device:
    """The device of that name that this process computes on, one of several processes its own of its machine.

    Raises:
        ValueError: no such device here, or one is named for several processes.
    """
    device = device_named(name)
    if device.type != "cuda" or world_size() == 1:
        return device
    if device.index is not None:
        raise ValueError(
            f"device: expected cuda with {world_size()} processes, each of which takes its own, got {device}. Name "
            "cuda, and the devices in CUDA_VISIBLE_DEVICES."
        )
    return torch.device("cuda", local_rank() % torch.cuda.device_count())


def load(
    folder: Path,
    changes: Sequence[str] = (),
    *,
    any_model: bool = False,
    device: torch.device | None = None,
) -> Subject:
    """A model folder made by ``save_pretrained`` or a training run, or a checkpoint of a run.

    "demo", where there is no such folder, is the DRT that ``trailmark demo`` trains, which comes with the package.

    Args:
        changes: fields of its configuration to set, as "retrieve_per=token"; its files stay as they are.
        any_model: take a causal language model of transformers too, and a name on the hub where there is no such
            folder.
        device: where it computes; None: the CPU.

    Raises:
        ValueError: none of ours, damaged, no weights for all of it, a change that its weights or the other fields do
            not allow, or an embedder that is not there or not the one that the model was trained with.
    """
    folder = _meant(folder)
    on_disk = folder.exists() or not any_model
    if on_disk:
        _expect_folder(folder)
    where = str(folder)  # a folder, or a name on the hub
    try:
        config = pretrained.load_config(where, "model")
    except ValueError as error:
        if on_disk:
            raise
        raise ValueError(f"{error} There is no folder {where!r}: give one, or a name on the hub.") from error
    ours = config.model_type in MODELS
    if not ours and not any_model:
        raise ValueError(
            f"model: expected one of trailmark's ({', '.join(sorted(MODELS))}), {where!r} holds {config.model_type!r}. "
            "trailmark convert makes one of a pretrained Llama, Mistral, Qwen2 or Qwen3."
        )
    if not ours and changes:
        raise ValueError(
            f"set: expected a model of trailmark's, {where!r} is another one: its fields stay as they are."
        )
    changed = parse_fields("set", changes, type(config)) if ours else {}
    if changed:
        config = type(config).from_dict(config.to_dict() | changed)
    run = _read_run(_run_folder(folder) / "run.yaml")
    if ours:
        with pretrained.loading("model", f"cannot load {where!r}", pretrained.AGAIN):
            model, found = MODELS[config.model_type].from_pretrained(
                where, config=config, output_loading_info=True, ignore_mismatched_sizes=True
            )
    else:  # in the precision it was saved in
        model, found = pretrained.load_model(
            AutoModelForCausalLM, config, where, "model", dtype="auto", ignore_mismatched_sizes=True
        )
    tokenizer = _tokenizer(folder, run, on_disk)
    for kind_of in ("missing", "unexpected", "mismatched"):  # transformers would draw these at random
        names = found[f"{kind_of}_keys"]
        if names and (ours or kind_of != "unexpected"):
            first = min(name if isinstance(name, str) else name[0] for name in names)
            if changed:
                raise ValueError(
                    f"set: expected fields that fit the weights of {where!r}, with {', '.join(changes)} {len(names)} "
                    f"weights are {kind_of}: {first} ..."
                )
            raise ValueError(
                f"model: expected the weights that config.json describes, {where!r} has {len(names)} "
                f"{kind_of} ones: {first} ..."
            )
    _expect_own_tokenizer(tokenizer, config, where, ours)
    if ours:
        model.embedder = embedder_of(config, tokenizer)
    if device is not None:
        model.to(device)
    return Subject(folder, model.eval(), tokenizer, run, changed)


def generating_by(model: Any, config: GenerationConfig) -> Any:
    """The model, whose ``generate`` goes by ``config``, whatever penalties, beams or temperature it came with.

    A shallow copy: all else is shared, and ``model`` stays as it is for whoever else generates with it.
    """
    found = copy.copy(model)
    found.generation_config = config
    return found


def task_of(path: Path) -> str | None:
    """As :attr:`Subject.task`, with nothing loaded."""
    return _read_run(_run_folder(_meant(path)) / "run.yaml").get("data", {}).get("task")


def _meant(folder: Path) -> Path:
    """The folder of a model's name: of "demo", where there is none, that which comes with the package."""
    return _DEMO if str(folder) == _DEMO_NAME and not folder.exists() else folder


def names_of(paths: Sequence[Path]) -> list[str]:
    """A name for each model: its folder's or file's; where two are called the same, with as many folders above as tell
    them apart, or the whole path as it was given."""
    parts = [(path.resolve() if path.exists() else path).parts for path in paths]

    def name(own: tuple[str, ...], count: int) -> str:
        return "/".join(own[-count:]).removesuffix(".yaml").removesuffix(".yml")

    def told_apart(path: Path, own: tuple[str, ...]) -> str:
        for count in range(1, len(own) + 1):
            if sum(name(other, count) == name(own, count) for other in set(parts)) == 1:
                return name(own, count)
        return str(path)

    return [told_apart(path, own) for path, own in zip(paths, parts, strict=True)]


def is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def is_sizes(path: Path) -> bool:
    """Whether it is a YAML file, of which a model with random weights is made."""
    return path.suffix.lower() in (".yaml", ".yml")


def expect_model(path: Path) -> None:
    """A ValueError where ``path`` is no folder with a model, no YAML file and can be no name on the hub.

    Cheap: nothing is loaded.
    """
    if is_sizes(path):
        if not path.is_file():
            raise ValueError(f"model: expected a YAML file with a model's sizes, there is no {str(path)!r}.")
        return
    if path.exists() or not _HUB_NAME.fullmatch(str(path)):
        _expect_folder(path)
    elif path.parent != Path() and path.parent.is_dir():  # the hub would be asked for half a minute
        raise ValueError(
            f"model: expected a folder with a trained model, there is no {path.name!r} in {str(path.parent)!r}. If a "
            "name on the hub is meant, start the command in a folder without one of that name."
        )


def _expect_folder(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    if (folder / "run.yaml").is_file():
        kept = sorted(path.parent for path in folder.glob(f"checkpoints/step-*/{MANIFEST}"))
        meanwhile = f" Meanwhile its newest checkpoint is a model: {kept[-1]}." if kept else ""
        raise ValueError(
            f"model: expected a folder with a trained model, the training in {str(folder)!r} is not finished. "
            f"The trailmark train command that began it goes on.{meanwhile}"
        )
    within = sorted(path.parent for path in folder.glob("*/config.json"))
    if within:
        way_out = f"Models lie in {', '.join(map(str, within[:4]))}{' ...' if len(within) > 4 else ''}."
    else:
        way_out = "Train one (trailmark train configs/text.yaml) or make one of a pretrained model (trailmark convert)."
    missing = "has no config.json" if folder.exists() else "does not exist"
    raise ValueError(f"model: expected a folder with a trained model, {str(folder)!r} {missing}. {way_out}")


def _run_folder(folder: Path) -> Path:
    """Where run.yaml lies: of a checkpoint two folders up."""
    return folder.resolve().parent.parent if is_checkpoint(folder) else folder


def _tokenizer(folder: Path, run: dict[str, Any], on_disk: bool) -> Any:
    """The one beside the weights; of a checkpoint, which has none, that of its run."""
    if on_disk and not pretrained.has_tokenizer(folder):
        if is_checkpoint(folder) and run:
            return load_tokenizer(run.get("data", {}).get("tokenizer", "bytes"))
        raise ValueError(
            f"model: expected a tokenizer beside the weights, {str(folder)!r} has none. Save one there: "
            "tokenizer.save_pretrained(folder)."
        )
    return pretrained.load_tokenizer(folder, "model")


def _expect_own_tokenizer(tokenizer: Any, config: Any, where: str, ours: bool) -> None:
    """Raise a ValueError where the tokenizer is not the one that the model was trained with, as far as files say so.

    Models that ``save_pretrained`` alone or an older trailmark saved have no fingerprint: then its size counts.
    Models of transformers may lack rows for tokens that were added later.
    """
    known = getattr(config, "vocab_size", None)
    size = vocabulary_size(tokenizer) if ours else tokenizer.vocab_size
    if isinstance(known, int) and size > known:
        raise ValueError(
            f"model: expected a tokenizer with at most the {known} tokens of the model's vocabulary, the one in "
            f"{where!r} has {size}. Put the tokenizer there that the model was trained with."
        )
    expected = getattr(config, "tokenizer_fingerprint", None) if ours else None
    if expected is not None and (came := tokenizer_fingerprint(tokenizer)) != expected:
        raise ValueError(
            f"model: expected the tokenizer that the model was trained with ({expected[:16]}), the one in {where!r} "
            f"is another ({came[:16]}). Put the right one there; where this one is meant, remove tokenizer_fingerprint "
            "from config.json."
        )


@dataclass(frozen=True)
class _RunData(Settings):
    """What is read of the section ``data`` of run.yaml."""

    task: str | None = setting(None)
    paths: list[str] | None = setting(None)
    tokenizer: str = setting("bytes")
    chunk_size: int = setting(63, least=1)


@dataclass(frozen=True)
class _RunTraining(Settings):
    """What is read of the section ``training`` of run.yaml."""

    context_length: int | None = setting(None, least=1)


def _read_run(path: Path) -> dict[str, Any]:
    """How the model was trained; empty if nothing says so."""
    if not os.path.lexists(path):  # nor where a file is no folder
        return {}
    try:
        run = untrusted.read_yaml(path, "model", links=True)
    except FileNotFoundError:
        return {}
    if not isinstance(run, dict):
        raise ValueError(f"model: expected a run's settings in {str(path)!r}. Remove it to go on without.")
    try:
        for name, kind in (("data", _RunData), ("training", _RunTraining)):
            section = run.get(name, {})
            known = section
            if isinstance(section, dict):
                known = {key: value for key, value in section.items() if key in kind.__dataclass_fields__}
            from_mapping(kind, known, name)
    except ValueError as error:
        raise ValueError(
            f"model: expected a run's settings in {str(path)!r}: {error} Remove it to go on without."
        ) from error
    return run
