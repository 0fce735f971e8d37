"""Any model of ours from its folder: what it was trained for, on which text to ask it, and what came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trailmark.data.corpus import Tokens, read_texts, standard_library_texts, tokenize
from trailmark.data.files import expect_writable, write_json
from trailmark.data.needles import CURRICULUM, NeedleFormat
from trailmark.data.trained_embedders import embedder_of
from trailmark.evaluation.needles import evaluate_needles
from trailmark.evaluation.perplexity import evaluate_perplexity
from trailmark.models import MODELS, TrailmarkForCausalLM
from trailmark.models.fields import parse_fields

TASKS = ("needles", "perplexity")


@dataclass
class Subject:
    """A model, its tokenizer and what is known of its training."""

    folder: Path
    model: TrailmarkForCausalLM
    tokenizer: Any
    run: dict[str, Any]  # run.yaml; empty where there is none
    changed: dict[str, Any] = field(
        default_factory=dict
    )  # fields of the configuration set for this evaluation

    @property
    def chunk_size(self) -> int:
        """Of the needle task: the model's, else that of its training, else 63."""
        own = getattr(self.model.config, "chunk_size", None)
        return int(own or self.run.get("data", {}).get("chunk_size", 63))

    @property
    def train_length(self) -> int:
        """Tokens of the longest training text."""
        if self.run.get("data", {}).get("task") == "needles":
            return CURRICULUM[-1].chunks * self.chunk_size
        return int(self.run.get("training", {}).get("context_length", 16 * self.chunk_size))

    def default_lengths(self, tasks: Sequence[str] = (), num_tokens: int = 0) -> list[int]:
        """1x, 4x and 16x the training texts; for perplexity those that a text of ``num_tokens`` holds, or it."""
        lengths = [self.train_length * factor for factor in (1, 4, 16)]
        if "perplexity" not in tasks:
            return lengths
        return [length for length in lengths if length <= num_tokens] or [num_tokens]

    def default_tasks(self) -> tuple[str, ...]:
        return TASKS if self.run.get("data", {}).get("task") == "needles" else ("perplexity",)

    def trained_on(self, paths: Sequence[Path] | None) -> str:
        """Those of ``paths`` that share files with the training text, as far as run.yaml tells."""
        trained = self.run.get("data", {}).get("paths") or []
        known = [Path(path).resolve() for path in ([trained] if isinstance(trained, str) else trained)]
        return ", ".join(
            str(path)
            for path in paths or []
            if any(path.resolve().is_relative_to(k) or k.is_relative_to(path.resolve()) for k in known)
        )

    def tokens(self, paths: Sequence[Path] | None) -> Tokens:
        """The text to ask about: ``paths``, or Python sources that the demo's training leaves out."""
        texts = read_texts(paths) if paths else standard_library_texts("haystack")
        return tokenize(texts, self.tokenizer)


def load(folder: Path, changes: Sequence[str] = ()) -> Subject:
    """A model folder made by ``save_pretrained`` or a training run.

    ``changes``: fields of its configuration to set, as "retrieve_per=token"; its files stay as they are.

    Raises:
        ValueError: none of ours, damaged, a change that its weights or the other fields do not allow, or an embedder
            that is not there or not the one that the model was trained with.
    """
    if (folder / "run.yaml").is_file() and not (folder / "config.json").is_file():
        raise ValueError(
            f"model: expected a folder with a trained model, the training in {str(folder)!r} is not finished. "
            "The trailmark train command that began it goes on."
        )
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"model: expected a folder with a trained model, {str(folder)!r} has no config.json. "
            "Train one with: trailmark train configs/text.yaml"
        )
    try:
        config = AutoConfig.from_pretrained(folder)
    except (ValueError, OSError, StrictDataclassError) as error:
        raise ValueError(f"model: cannot read {str(folder / 'config.json')!r}: {_brief(error)}") from error
    if config.model_type not in MODELS:
        raise ValueError(
            f"model: expected one of trailmark's ({', '.join(sorted(MODELS))}), "
            f"{str(folder)!r} holds {config.model_type!r}."
        )
    changed = parse_fields("set", changes, type(config))
    if changed:
        config = type(config).from_dict(config.to_dict() | changed)
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, config=config, output_loading_info=True, ignore_mismatched_sizes=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (ValueError, OSError, SafetensorError) as error:
        raise ValueError(f"model: cannot load {str(folder)!r}: {_brief(error)}") from error
    for kind in ("missing", "unexpected", "mismatched"):  # transformers would draw these at random
        if names := found[f"{kind}_keys"]:
            raise ValueError(
                f"model: expected the weights that config.json describes, {str(folder)!r} has {len(names)} "
                f"{kind} ones: {min(map(str, names))} ..."
            )
    model.embedder = embedder_of(config, tokenizer)
    return Subject(folder, model.eval(), tokenizer, _read_run(folder / "run.yaml"), changed)


def _read_run(path: Path) -> dict[str, Any]:
    """How the model was trained; empty if nothing says so."""
    if not path.is_file():
        return {}
    try:
        run = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"model: cannot read {str(path)!r}: {_brief(error)}") from error
    if not isinstance(run, dict) or not all(
        isinstance(run.get(key, {}), dict) for key in ("data", "training")
    ):
        raise ValueError(f"model: expected a run's settings in {str(path)!r}. Remove it to go on without.")
    return run


def parse_lengths(text: str) -> list[int]:
    try:
        lengths = [int(part.replace("_", "")) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"lengths: expected numbers as 1024,16384, got {text!r}.") from error
    if min(lengths) < 1:
        raise ValueError(f"lengths: expected positive numbers of tokens, got {min(lengths)}.")
    return lengths


def parse_task(text: str) -> tuple[str, ...]:
    if text == "both":
        return TASKS
    if text not in TASKS:
        raise ValueError(f"task: expected 'needles', 'perplexity' or 'both', got {text!r}.")
    return (text,)


def run(
    subject: Subject,
    tokens: Tokens,
    tasks: Sequence[str],
    lengths: Sequence[int],
    questions: int,
    needles: int,
    seed: int,
    progress: Callable[[str], None],
    output: Path | None = None,
    phases: str = "any",
    memory_tier: str = "device",
) -> dict[str, Any]:
    """Every task at every length, as a record for JSON.

    ``phases``: where a needle's question ends: "end" of a chunk, or "any" place. ``memory_tier``: "device",
    "host" or "disk" (of temporary files), of what is read.
    ``output``: a file that is written after each length, so that what was found stays if a later one fails.
    """
    if questions < 1 or needles < 1:
        raise ValueError(f"questions, needles: expected at least 1, got {questions} and {needles}.")
    if phases not in ("end", "any"):
        raise ValueError(f"phases: expected 'end' or 'any', got {phases!r}.")
    record: dict[str, Any] = {"model": str(subject.folder), "seed": seed, "set": subject.changed}
    record |= {"needles": [], "perplexity": []}

    def keep(task: str, result: dict[str, Any]) -> None:
        record[task].append(result)
        if output is not None and _replaceable(output):
            save(record, output)

    if "needles" in tasks:
        format = NeedleFormat.of(subject.tokenizer)
        for length in lengths:
            whole = max(1, length // subject.chunk_size) * subject.chunk_size
            found = evaluate_needles(
                subject.model,
                format,
                tokens,
                whole,
                questions,
                needles,
                subject.chunk_size,
                seed,
                progress,
                "any" if phases == "any" else "end",
                memory_tier,
            )
            keep("needles", found.summary())
    if "perplexity" in tasks:
        for length in lengths:
            progress(f"{length:,} tokens: perplexity")
            keep("perplexity", evaluate_perplexity(subject.model, tokens, length).summary())
    return record


def expect_output(path: Path) -> None:
    """A ValueError, before any work is done, if no file can be written there."""
    if path.is_dir():
        raise ValueError(f"output: expected a file, {str(path)!r} is a folder.")
    if _replaceable(path):
        expect_writable("output", path.parent)


def _replaceable(path: Path) -> bool:
    """A device is not: it needs no folder to write in, and what was written stays."""
    return path.is_file() or not path.exists()


def save(record: dict[str, Any], path: Path) -> Path:
    write_json(path, record)
    return path


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1 if isinstance(error, StrictDataclassError) else 0].strip()
