"""The command that makes a model of ours of a pretrained one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from trailmark.settings import Settings, setting, takes


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

    def show(done: int, total: int) -> None:
        progress.show(f"{bar(done, total)} {done:,}/{total:,} parameters")

    record = converting.convert(
        settings.model,
        settings.output,
        settings.to,
        settings.fields,
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
