"""``trailmark verify``: whatever was saved, compared with what was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trailmark.data import pairs, shards
from trailmark.data.neighbours import files as neighbour_files
from trailmark.data.neighbours import table as neighbours
from trailmark.files import Progress, read_json
from trailmark.memory import manifest as memory_manifest
from trailmark.memory import verification as memory
from trailmark.trained import CONVERSION, weights_sha256
from trailmark.training import checkpoints
from trailmark.training.checkpoints import CHECKPOINTS
from trailmark.training.final_model import (
    MODEL_MANIFEST,
    expects_manifest,
    has_signed_model,
    lacks_manifest,
    verify_model,
)


def verify(
    folder: Path,
    progress: Progress = lambda done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Every byte of a corpus, pairs, a neighbour table, a checkpoint, a run's checkpoints and final model, or a memory;
    of a converted model every byte of its weights.

    Args:
        say: told in a sentence what lies there and has nothing to be compared with.

    Returns:
        The names of what is whole.

    Raises:
        ValueError: what is damaged, and how; a folder that is none of these.
    """
    if (folder / shards.MANIFEST).exists():
        shards.Corpus.open(folder).verify(progress)
        return [str(folder)]
    if (folder / neighbour_files.MANIFEST).exists():
        neighbours.NeighbourTable.open(folder).verify(progress)
        return [str(folder)]
    if (folder / pairs.PAIRS_MANIFEST).exists():
        pairs.verify_pairs(folder, progress)
        return [str(folder)]
    if checkpoints.is_checkpoint(folder):
        checkpoints.verify(folder, progress)
        return [str(folder)]
    of_run = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    steps = [checkpoints.step_folder(of_run, step) for step in checkpoints.steps(of_run)]
    signed = has_signed_model(folder) or expects_manifest(folder)
    if steps or signed:
        whole = _verify_run(folder, steps, signed, progress)
        if lacks_manifest(folder):
            say(f"{folder}: final model: not compared, there is no {MODEL_MANIFEST}.")
        return whole
    if (written := _written_by_convert(folder)) is not None:
        if weights_sha256(folder) != written:
            raise ValueError(
                f"folder: the weights in {str(folder)!r} are not those that trailmark convert wrote: they are damaged, "
                "or were changed since. Convert the base again."
            )
        say(f"{folder}: a converted model; configuration and tokenizer have no hash, and were not compared.")
        return [str(folder / "model.safetensors")]
    if not (folder / memory_manifest.NAME).exists():
        if lacks_manifest(folder):
            raise ValueError(
                f"folder: expected what was saved with hashes, {str(folder)!r} holds a model without {MODEL_MANIFEST}, "
                "which cannot be compared. trailmark train writes one with each model, trailmark convert a hash into "
                f"{CONVERSION}."
            )
        raise ValueError(
            "folder: expected a memory, a prepared corpus, a neighbour table, a checkpoint, a run with checkpoints or "
            f"a converted model, {str(folder)!r} is none of these, or one that was never finished."
        )
    memory.verify(folder, progress)
    return [str(folder)]


def _written_by_convert(folder: Path) -> str | None:
    """The hash of the weights that a conversion left there; None: it left none."""
    record = read_json(folder / CONVERSION)
    written = record.get("weights_sha256") if isinstance(record, dict) else None
    return written if isinstance(written, str) else None


def _verify_run(folder: Path, steps: list[Path], signed: bool, progress: Progress) -> list[str]:
    """All checkpoints, and the final model where it was ``signed``."""
    looks: dict[Path, Callable[[Path, Progress], None]] = dict.fromkeys(steps, checkpoints.verify)
    if signed:
        looks[folder] = verify_model
    whole, wrong = [], []
    for part, look in looks.items():
        name = "the final model" if part == folder else part.name
        try:
            look(part, progress)
        except ValueError as error:
            wrong.append(f"{name}: {str(error).rstrip('.')}")
        else:
            whole.append((str(part), name))
    if wrong:
        rest = f" Whole: {', '.join(name for _, name in whole)}." if whole else " None is whole."
        argument = "checkpoints" if steps else "model"
        raise ValueError(f"{argument}: damaged: {'; '.join(wrong)}.{rest}")
    return [place for place, _ in whole]
