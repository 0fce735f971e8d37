"""``trailmark verify``: whatever was saved, compared with what was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trailmark.data import prepare, shards
from trailmark.data.neighbours import files as neighbour_files
from trailmark.data.neighbours import table as neighbours
from trailmark.training import checkpoints
from trailmark.training.checkpoints import CHECKPOINTS

Progress = Callable[[int, int], None]


def verify(folder: Path, progress: Progress = lambda done, total: None) -> list[str]:
    """Every byte of a corpus, pairs, a neighbour table, a checkpoint, all checkpoints of a run, or a memory.

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
    if (folder / prepare.PAIRS_MANIFEST).exists():
        prepare.verify_pairs(folder, progress)
        return [str(folder)]
    if checkpoints.is_checkpoint(folder):
        checkpoints.verify(folder, progress)
        return [str(folder)]
    of_run = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    if steps := checkpoints.steps(of_run):
        return _verify_all([checkpoints.step_folder(of_run, step) for step in steps], progress)
    from trailmark.memory import saved  # it needs torch, all others do not

    if not (folder / saved.MANIFEST).exists():
        raise ValueError(
            f"folder: expected a memory, a prepared corpus, a neighbour table, a checkpoint or a run with checkpoints, "
            f"{str(folder)!r} is none of these, or one that was never finished."
        )
    saved.verify(folder, progress)
    return [str(folder)]


def _verify_all(folders: list[Path], progress: Progress) -> list[str]:
    whole, wrong = [], []
    for folder in folders:
        try:
            checkpoints.verify(folder, progress)
        except ValueError as error:
            wrong.append(f"{folder.name}: {str(error).rstrip('.')}")
        else:
            whole.append(str(folder))
    if wrong:
        rest = f" Whole: {', '.join(Path(name).name for name in whole)}." if whole else " None is whole."
        raise ValueError(f"checkpoints: damaged: {'; '.join(wrong)}.{rest}")
    return whole
