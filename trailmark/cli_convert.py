"""The command that makes a model of ours of a pretrained one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
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
    # transformers' bar for a GGUF file; read when tqdm is imported
    os.environ.setdefault("TQDM_DISABLE", "1")
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
        made = quote(str(settings.output))
        if (
            "full_attention" in (record["fields"].get("layer_types") or ())
            and record["target"] == "sliding_window"
        ):
            typer.echo(
                f"Next: trailmark convert {made} -o READER --to hils reading=windows (docs/convert.md)"
            )
        else:
            typer.echo(f"Next: trailmark read {made} TEXT --memory MEMORY")


def _far_layers(settings: ConvertSettings, count: int, progress: Progress) -> str:
    """The field layer_types, of the layers that look far most. Before they are looked for all else is checked."""
    from trailmark.evaluation.far_layers import expect_far_layers, layer_types, measure_far_layers
    from trailmark.models.conversion import convert as converting
    from trailmark.report.console import bar

    def refusal(other: str) -> ValueError:
        return ValueError(f"far_layers: expected none {other}, got {count}. Leave one of them out.")

    if settings.dry_run:
        raise refusal("with --dry-run, which reads no weights")
    if settings.additions is not None:
        raise refusal("with --additions, which say it")
    if any(field.startswith("layer_types=") for field in settings.fields):
        raise refusal("beside the field layer_types")
    if settings.to not in ("hils", "sliding_window", None):
        raise refusal(
            f"with --to {settings.to}, whose layers are not of two kinds (those of hils and sliding_window are)"
        )
    converting.expect_new(settings.output)
    base = converting.open_any_base(settings.model)
    full = expect_far_layers(base, count)
    some = [number for number, sees_all in enumerate(full) if sees_all][:count]
    fields = (*settings.fields, layer_types(some, len(full)))
    converting.convert(
        settings.model, settings.output, settings.to, fields, dtype=settings.dtype, dry_run=True
    )

    def show(done: int, total: int) -> None:
        progress.show(f"Which layers look far: {bar(done, total)} {done}/{total} texts")

    found = measure_far_layers(base, progress=show)
    progress.clear()
    best = found.best(count)
    shown = ", ".join(f"{number} ({found.mass[number]:.2f})" for number in best)
    typer.echo(
        f"The {count} of {len(full)} layers that look far most, and the share of attention that a head of theirs has "
        f"on what it should repeat: {shown}. The model gave {found.right:.0%} of the answers."
    )
    if not found.right:
        typer.echo(
            "It gave none, so where it looks may say little: compare with layers of your own (layer_types)."
        )
    return layer_types(best, len(full))
