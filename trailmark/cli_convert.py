"""The command that makes a model of ours of a pretrained one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from trailmark.settings import Settings, setting, takes

if TYPE_CHECKING:
    from trailmark.report.console import Progress


def _targets() -> list[str]:
    from trailmark.models.conversion.convert import targets

    return targets()


def _dtypes() -> list[str]:
    from trailmark.models.conversion.convert import DTYPE_NAMES

    return [*DTYPE_NAMES]


@dataclass(frozen=True, kw_only=True)
class ConvertSettings(Settings):
    """The options of ``trailmark convert``."""

    model: str = setting(
        help="The pretrained model: a folder with safetensors or a .gguf file, such a file, or a hub name.",
        argument=True,
    )
    fields: tuple[str, ...] = setting((), "Fields of the new model, as key=value ...", argument=True)
    output: Path = setting(help="Folder for the new model, which must not be there.", option="--output -o")
    to: str | None = setting(
        None,
        "What it becomes: drt, hils, hsa, landmark or sliding_window; a model with a window alone also llama, "
        "mistral, qwen2 or qwen3 again.",
        default="with --additions what they were learned for",
        choices=_targets,
    )
    additions: Path | None = setting(
        None,
        "What such a conversion of this very model has learned: the additions.safetensors that trailmark train left.",
    )
    far_layers: int | None = setting(
        None,
        "With --to hils or sliding_window: this many layers look at all of the past, those that do so most when the "
        "model completes sentences that stood far before (it reads 8 short texts); the others have a window.",
        default="all",
        least=1,
    )
    dtype: str | None = setting(
        None,
        "Of the weights that are written.",
        default="that of the model, of a .gguf file float32",
        choices=_dtypes,
    )
    dry_run: bool = setting(
        False, "Say what would be done, read no weights, write nothing.", option="--dry-run"
    )


@takes(ConvertSettings)
def convert(settings: ConvertSettings) -> None:
    """Make a model that reads long texts of a pretrained Llama, Mistral, Qwen2 or Qwen3, or go back to one of them."""
    from trailmark.data.corpus import tokenizer_fingerprint
    from trailmark.models import architectures
    from trailmark.models.conversion import convert as converting
    from trailmark.models.conversion import report
    from trailmark.report.console import Progress, bar

    progress = Progress()
    progress.show(f"Looking at {settings.model}")
    fields = settings.fields
    if settings.far_layers is not None:
        fields += (_far_layers(settings, settings.far_layers, progress),)

    def show(done: int, total: int) -> None:
        progress.show(f"{bar(done, total)} {done:,}/{total:,} parameters")

    record = converting.convert(
        settings.model,
        settings.output,
        settings.to,
        fields,
        additions=settings.additions,
        dtype=settings.dtype,
        dry_run=settings.dry_run,
        fingerprint=tokenizer_fingerprint,
        progress=show,
    )
    progress.clear()
    for line in report.lines(record):
        typer.echo(line)
    if settings.dry_run:
        typer.echo("Nothing was written.")
        return
    typer.echo(f"The model lies in {settings.output}/.")
    if record["target"] in architectures():
        if record["parameters"]["new"]:
            typer.echo("What is new has learned nothing yet: docs/training.md tells how it is trained.")
        typer.echo(f"Next: trailmark read {settings.output} TEXT --memory MEMORY")


def _far_layers(settings: ConvertSettings, count: int, progress: Progress) -> str:
    """The field layer_types of the layers that look far most."""
    from trailmark.evaluation.far_layers import measure_far_layers
    from trailmark.report.console import bar

    if settings.dry_run or settings.additions is not None:
        other = "--dry-run, which reads no weights" if settings.dry_run else "--additions, which say it"
        raise ValueError(f"far_layers: expected none with {other}, got {count}. Leave one of them out.")
    if any(field.startswith("layer_types=") for field in settings.fields):
        raise ValueError(f"far_layers: expected none with layer_types, got {count}. Leave one of them out.")
    if settings.to not in ("hils", "sliding_window"):
        raise ValueError(
            f"far_layers: expected none with --to {settings.to}, whose layers are not of two kinds, got {count}. "
            "Leave it out, or convert to hils or sliding_window."
        )

    def show(done: int, total: int) -> None:
        progress.show(f"Which layers look far: {bar(done, total)} {done}/{total} texts")

    found = measure_far_layers(settings.model, progress=show)
    best = found.best(count)
    progress.clear()
    shown = ", ".join(f"{number} ({found.mass[number]:.2f})" for number in best)
    typer.echo(
        f"{len(best)} of {len(found.mass)} layers look far (the share of a head's attention that lies on what it "
        f"should repeat): {shown}. It gave {found.right:.0%} of the answers."
    )
    kinds = ["full_attention" if n in best else "sliding_attention" for n in range(len(found.mass))]
    return f"layer_types={json.dumps(kinds)}"
