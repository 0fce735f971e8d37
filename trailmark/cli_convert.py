"""The command that makes a model of ours of a pretrained one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import typer

from trailmark.settings import Settings, setting, takes

if TYPE_CHECKING:
    from trailmark.models.conversion.base import Base
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
    focus_heads: int | None = setting(
        None,
        "With --to hils and reading=windows: this many key/value heads decide as much as all together which "
        "passages a question is about, those that find most in other words (it reads 40 short questions); their layers "
        "choose chunks too.",
        default="all of the layers that choose",
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
    fields += tuple(_looks(settings, progress))

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


def _looks(settings: ConvertSettings, progress: Progress) -> Iterator[str]:
    """The fields that say which layers and heads look where. Before they are looked for all else is checked."""
    far, heads = settings.far_layers, settings.focus_heads
    if far is None and heads is None:
        return
    from trailmark.evaluation.far_layers import expect_far_layers, layer_types
    from trailmark.evaluation.focus_heads import expect_focus_heads
    from trailmark.models.conversion import convert as converting

    asked = {
        name: count for name, count in (("far_layers", far), ("focus_heads", heads)) if count is not None
    }

    def refusal(other: str, *names: str) -> ValueError:
        name = next(name for name in names or asked if name in asked)
        return ValueError(f"{name}: expected none {other}, got {asked[name]}. Leave one of them out.")

    given = {field.partition("=")[0] for field in settings.fields}
    if settings.dry_run:
        raise refusal("with --dry-run, which reads no weights")
    if settings.additions is not None:
        raise refusal("with --additions, which say it")
    if "layer_types" in given:
        raise refusal("beside the field layer_types")
    if heads is not None and settings.to not in ("hils", None):
        raise refusal(f"with --to {settings.to}, which has no focus (hils has)", "focus_heads")
    if settings.to not in ("hils", "sliding_window", None):
        raise refusal(
            f"with --to {settings.to}, whose layers are not of two kinds (those of hils and sliding_window are)"
        )
    if heads is not None and "focus_heads" in given:
        raise refusal("beside the field focus_heads", "focus_heads")
    if heads is not None and not {"num_focus_chunks", "reading"} & given:
        raise refusal("without reading=windows or num_focus_chunks: there is no focus", "focus_heads")
    converting.expect_new(settings.output)
    base = converting.open_any_base(settings.model)
    full = [window is None for window in base.windows]
    fields = settings.fields
    if far is not None:
        expect_far_layers(base, far)
        fields += (
            layer_types([number for number, sees_all in enumerate(full) if sees_all][:far], len(full)),
        )
    if heads is not None:
        expect_focus_heads(base, heads)
        # stands for any: whether this conversion can have them
        fields += (f"focus_heads=[[{full.index(True)},0]]",)
    converting.convert(
        settings.model, settings.output, settings.to, fields, dtype=settings.dtype, dry_run=True
    )
    found = [] if heads is None else _focus_heads(base, heads, progress)
    if found:
        yield f"focus_heads={json.dumps(found)}"
    if far is not None:
        yield layer_types({*_far_layers(base, far, progress), *(layer for layer, _ in found)}, len(full))


def _far_layers(base: Base, count: int, progress: Progress) -> set[int]:
    from trailmark.evaluation.far_layers import measure_far_layers
    from trailmark.report.console import bar

    def show(done: int, total: int) -> None:
        progress.show(f"Which layers look far: {bar(done, total)} {done}/{total} texts")

    found = measure_far_layers(base, progress=show)
    progress.clear()
    best = found.best(count)
    shown = ", ".join(f"{number} ({found.mass[number]:.2f})" for number in best)
    typer.echo(
        f"The {count} of {len(found.full)} layers that look far most, and the share of attention that a head of theirs "
        f"has on what it should repeat: {shown}. The model gave {found.right:.0%} of the answers."
    )
    if not found.right:
        typer.echo(
            "It gave none, so where it looks may say little: compare with layers of your own (layer_types)."
        )
    return set(best)


def _focus_heads(base: Base, count: int, progress: Progress) -> list[list[int]]:
    from trailmark.evaluation.focus_heads import TOLD, measure_focus_heads
    from trailmark.report.console import bar

    def show(done: int, total: int) -> None:
        progress.show(f"Which heads find what is asked for: {bar(done, total)} {done}/{total} questions")

    found = measure_focus_heads(base, progress=show)
    progress.clear()
    best = found.best(count)
    shown = ", ".join(f"layer {n} head {j} ({found.right[n, j]:.2f})" for n, j in best)
    typer.echo(
        "Key/value heads that find most in other words, and the share of questions for which the right one of "
        f"{len(TOLD)} sentences gets most of their attention: {shown}."
    )
    if min(found.right[n, j] for n, j in best) <= 2 / len(TOLD):
        typer.echo(
            f"By chance it would be {1 / len(TOLD):.2f}: they may find nothing. Compare with a conversion without them."
        )
    return best
