"""Make a model of ours of a pretrained one: its weights, and new parts that change nothing yet."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trailmark import __version__, pretrained
from trailmark.files import (
    expect_place,
    expect_room,
    in_threads,
    put_in_place,
    read_json,
    remove_leftover_folders,
    sha256_of,
    staging_folder,
    sync_folder,
    telling_of_a_full_disk,
    write_json,
    write_text,
)
from trailmark.models.card.files import README, Saving
from trailmark.models.configuration import TrailmarkConfig
from trailmark.models.conversion import back, report
from trailmark.models.conversion.additions import ADDITIONS, Additions
from trailmark.models.conversion.additions import ARGUMENT as ADDITIONS_ARGUMENT
from trailmark.models.conversion.back import BACK
from trailmark.models.conversion.base import ARGUMENT, TOLD, Base, known_token, open_base
from trailmark.models.conversion.ours import OurTensors, as_base, is_folder_of_ours
from trailmark.models.conversion.parts import KINDS, Parts
from trailmark.models.conversion.targets import TARGETS
from trailmark.models.conversion.tensors import (
    NAMED,
    WEIGHTS,
    SafetensorFiles,
    Tensors,
    expect_tensors,
    num_bytes,
    open_tensors,
    pretrained_without_weights,
    write_tensors,
)
from trailmark.models.conversion.vocabulary import open_tokenizer, save_tokenizer, without_embedding
from trailmark.models.fields import field_types, parse_fields
from trailmark.models.registry import architectures
from trailmark.models.size import without_weights
from trailmark.settings import nearest, parse_override
from trailmark.trained import CONVERSION, base_length, weights_sha256
from trailmark.untrusted import brief

DTYPE_NAMES = tuple(NAMED)


def convert(
    model: str | os.PathLike[str],
    output: Path,
    to: str | None = None,
    fields: Sequence[str] = (),
    *,
    additions: Path | None = None,
    dtype: str | None = None,
    dry_run: bool = False,
    fingerprint: Callable[[Any], str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Convert a pretrained model into a folder that ``from_pretrained`` and every command open, or back.

    Args:
        model: a folder with safetensors or one .gguf file, such a file, or a name on the hub; to go back or on, a
            folder with a model of ours that has a window alone.
        output: the new folder.
        to: what it becomes, one of :func:`targets`; None with ``additions``, which say it.
        fields: of the new model's configuration, as "sliding_window=512".
        additions: what such a conversion has learned, a file that a training left: the model becomes the one that
            was trained.
        dtype: of the weights that are written, as "bfloat16"; None: that of the model, of a .gguf file float32, with
            ``additions`` that in which they were trained.
        dry_run: look at configuration and sizes, read no weights and write nothing.
        fingerprint: of a tokenizer; the folder's configuration then names the tokenizer that belongs to it.
        progress: is called with the parameters that are written and those in all.

    Returns:
        The record that also lies in the folder as conversion.json: what was copied, permuted and new.

    Raises:
        ValueError: no such model, something in it that no model here computes, a field that does not fit, a folder
            that is there already, no room, additions to another model.
    """
    learned = None if additions is None else Additions.read(additions)
    to = _target(to, learned)
    if dtype is not None and dtype not in DTYPE_NAMES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPE_NAMES)} or None, got {brief(dtype)}.")
    if not dry_run:
        expect_new(output)
    asked = _Asked(str(model), to, tuple(fields), None if dtype is None else NAMED[dtype], learned)
    work = (_back if to in BACK else _forth)(asked)
    work.config.dtype = work.dtype
    if not dry_run:
        _write(work, output, fingerprint, progress)
    return work.record


def open_any_base(model: str | os.PathLike[str]) -> Base:
    """What is converted: a pretrained model, or one of ours with a window alone.

    Raises:
        ValueError: there is none, it cannot be read, or it has something that no model of ours has.
    """
    return as_base(str(model)) if is_folder_of_ours(str(model)) else open_base(model)


def targets() -> list[str]:
    """What a model can become: architectures of ours, and families that a model with a window alone goes back to."""
    return [*TARGETS, *BACK]


def _target(to: str | None, additions: Additions | None) -> str:
    """What the model becomes; additions say it too, and are never of a model that went back."""
    known = targets() if additions is None else [*TARGETS]
    if additions is not None and to not in (None, additions.target):
        raise ValueError(
            f"to: expected {additions.target}, of which these are the additions, got {brief(to)}. Leave it out; what "
            f"comes of it can be converted once more, with --to {to}."
        )
    to = to if additions is None else additions.target
    if to is None:
        raise ValueError(
            f"to: expected one of {', '.join(known)}, or a file with additions, got neither. Set --to."
        )
    if to not in known:
        raise ValueError(f"to: expected one of {', '.join(known)}, got {brief(to)}.{nearest(to, known, '')}")
    return to


class _Asked(NamedTuple):
    """What a conversion is asked for."""

    model: str
    to: str
    fields: tuple[str, ...]
    dtype: torch.dtype | None
    additions: Additions | None


@dataclass
class _Work:
    """A conversion that was looked at, of which nothing is written yet."""

    name: str
    folder: Path
    options: dict[str, Any]
    """For who reads configuration and tokenizer there."""
    tokenizer: Any
    tensors: Tensors
    dtype: torch.dtype
    config: Any
    """Of what is made."""
    parts: Parts
    shapes: dict[str, tuple[int, ...]]
    """Of what is made, in the order of the parts."""
    record: dict[str, Any]
    additions: Additions | None = None


def _forth(asked: _Asked) -> _Work:
    """A pretrained model as one of ours."""
    base = open_any_base(asked.model)
    config = _config(base, asked)
    tokenizer = open_tokenizer(base.folder, base.name, ARGUMENT, base.options)
    left_out = without_embedding(tokenizer, config.vocab_size, ARGUMENT)
    parts = TARGETS[asked.to].parts(base, config)
    shapes = _shapes(without_weights(config), parts)
    tensors = open_tensors(base) if base.ours is None else OurTensors(base)
    dtype = _dtype(asked, tensors)
    if asked.additions is not None:
        parts = asked.additions.put_into(parts, shapes)
    rows = report.rows(parts, shapes)
    about: dict[str, Any] = {
        "name": base.name, "revision": base.revision, "family": base.family, "trained_length": base.trained_length,
    }  # fmt: skip
    if left_out:
        about["tokens_left_out"] = left_out
    if base.ours is not None and (before := report.origin(read_json(base.folder / CONVERSION, links=True))):
        about["of"] = before
    record = _record(asked, about, tensors, dtype, config, rows)
    return _Work(
        base.name, base.folder, base.options, tokenizer, tensors, dtype, config, parts, shapes, record, asked.additions
    )  # fmt: skip


def _back(asked: _Asked) -> _Work:
    """A model of ours as one of the families of transformers."""
    folder = Path(asked.model)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{ARGUMENT}: expected a folder with a model of trailmark's to go back to {asked.to}, "
            f"{str(folder)!r} has no config.json."
        )
    config, name = pretrained.load_config(folder, ARGUMENT), folder.resolve().name
    pretrained.expect_safetensors(folder, ARGUMENT)
    given = dict(parse_override("fields", text) for text in asked.fields)
    length = base_length(read_json(folder / CONVERSION, links=True))
    theirs = back.theirs(config, asked.to, given, length)
    tensors = SafetensorFiles(folder, name)
    pretrained.expect_fits(config, folder, ARGUMENT)
    expect_tensors(tensors, without_weights(config), name)
    parts = back.parts_of(config)
    shapes = _shapes(pretrained_without_weights(theirs, name), parts)
    dtype = _dtype(asked, tensors)
    about = {"name": name, "revision": None, "family": config.model_type, "trained_length": length}
    record = _record(asked, about, tensors, dtype, theirs, report.rows(parts, shapes))
    tokenizer = open_tokenizer(folder, name, ARGUMENT, {})
    return _Work(name, folder, {}, tokenizer, tensors, dtype, theirs, parts, shapes, record)


def _dtype(asked: _Asked, tensors: Tensors) -> torch.dtype:
    own = tensors.dtype if asked.additions is None else asked.additions.dtype
    made: torch.dtype = own if asked.dtype is None else asked.dtype
    return made


def _shapes(model: Any, parts: Parts) -> dict[str, tuple[int, ...]]:
    """Of a model on the meta device; every tensor of it has its part."""
    state = {name: x for name, x in model.state_dict().items() if name not in model.all_tied_weights_keys}
    if other := sorted(state.keys() ^ parts.keys()):
        raise ValueError(
            f"fields: expected those of a model with the base's tensors, {other[0]} is in one of them alone. Leave "
            "out the fields that add or remove it."
        )
    return {name: tuple(state[name].shape) for name in parts}


def expect_new(output: Path) -> None:
    """Raise a ValueError where a conversion cannot be written."""
    expect_place("output", output.parent)
    if output.is_symlink() or (output.exists() and (not output.is_dir() or any(output.iterdir()))):
        raise ValueError(
            f"output: expected a new folder, {str(output)!r} is there already. Choose another one or remove it."
        )


# --- the configuration -------------------------------------------------------------------------------------------


def _config(base: Base, asked: _Asked) -> TrailmarkConfig:
    cls = architectures()[asked.to].config_class
    given = parse_fields("fields", asked.fields, cls)
    saved = {} if asked.additions is None else asked.additions.fields(cls)
    saved = {name: x for name, x in saved.items() if name not in TOLD or name not in base.fields}
    _expect_fields_of_base(base, given, "fields", "Leave it out.")
    _expect_fields_of_base(base, saved, ADDITIONS_ARGUMENT, "Name the base that they belong to.")
    fields = base.fields | (saved or TARGETS[asked.to].defaults(base, given)) | given
    if lacking := fields.keys() - field_types(cls).keys():
        raise ValueError(
            f"to: expected a base that {asked.to} can be made of, {base.name} needs {', '.join(sorted(lacking))}, "
            f"which {asked.to} has not. Convert to another one."
        )
    made: TrailmarkConfig = cls(**fields)
    return made


def _expect_fields_of_base(base: Base, fields: Mapping[str, Any], argument: str, way_out: str) -> None:
    for name, value in base.fields.items():
        if name in fields and fields[name] != value:
            raise ValueError(
                f"{argument}: {name}: expected {brief(value)}, which the weights of {base.name} have, got "
                f"{brief(fields[name])}. {way_out}"
            )


# --- writing -----------------------------------------------------------------------------------------------------


def _write(
    work: _Work,
    output: Path,
    fingerprint: Callable[[Any], str] | None,
    progress: Callable[[int, int], None] | None,
) -> None:
    config = work.config
    output.parent.mkdir(parents=True, exist_ok=True)
    remove_leftover_folders(output.parent, re.compile(re.escape(output.name)))
    carried = _carried(work)
    beside = 0 if carried is None else carried.num_bytes()
    expect_room(output.parent, num_bytes(work.shapes, work.dtype) + beside, "nothing was written")
    work.record["base"]["sha256"] = _sha256(work.tensors.files)
    if work.additions is not None:
        work.additions.expect_base(work.record["base"]["sha256"], work.name)
    with (
        telling_of_a_full_disk(output.parent, lambda: "Nothing is left of it."),
        staging_folder(output) as folder,
    ):
        left_out = work.record["base"].get("tokens_left_out", ())
        save_tokenizer(work.tokenizer, folder, left_out, ARGUMENT)
        ours = isinstance(config, TrailmarkConfig)
        if ours and fingerprint is not None:
            config.tokenizer_fingerprint = fingerprint(pretrained.load_tokenizer(folder, ARGUMENT))
        config.save_pretrained(folder)
        _generation(work).save_pretrained(folder)
        write_tensors(folder / WEIGHTS, work.shapes, work.dtype, _made(work, progress))
        work.record["weights_sha256"] = weights_sha256(folder)
        write_json(folder / CONVERSION, work.record, durable=True)
        if carried is not None:
            carried.write(folder / ADDITIONS)
        if ours:
            count = work.record["parameters"]["all"]
            card = Saving(str(folder), config, count, folder).text(
                work.record["weights_sha256"], output.resolve().name
            )
            write_text(folder / README, card, durable=True)
        sync_folder(folder)
        put_in_place(folder, output)


def _carried(work: _Work) -> Additions | None:
    """The additions that lie beside the new model, to train on from there: of its own fields; not in another dtype."""
    if work.additions is None or work.dtype != work.additions.dtype:
        return None
    return work.additions.with_config(work.config)


def _made(work: _Work, progress: Callable[[int, int], None] | None) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the new model, one at a time."""

    def read(name: str) -> Tensor:
        x = work.tensors.read(name)
        pretrained.expect_finite(iter([(name, x)]), ARGUMENT, work.name)
        return x

    done, total = 0, work.record["parameters"]["all"]
    for name, part in work.parts.items():
        x = part.make(read).to(work.dtype)
        if work.dtype != work.tensors.dtype or work.additions is not None:  # a number may be too large for it
            what = "dtype" if work.additions is None else ADDITIONS_ARGUMENT
            pretrained.expect_finite(iter([(name, x)]), what, work.name)
        yield name, x
        done += x.numel()
        if progress is not None:
            progress(done, total)


def _sha256(files: list[Path]) -> str:
    """Of all bytes of the files, in order of their names."""
    digests = in_threads(sha256_of, sorted(files))
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _generation(work: _Work) -> Any:
    """generation_config.json of the base; where there is none, what its configuration says."""
    from transformers import GenerationConfig

    if work.options or not (work.folder / "generation_config.json").is_file():
        return GenerationConfig.from_model_config(work.config)
    with pretrained.loading(ARGUMENT, f"cannot read generation_config.json of {work.name}"):
        found = GenerationConfig.from_pretrained(str(work.folder), local_files_only=True)
    found.pad_token_id = known_token(found.pad_token_id, work.config)
    return found


# --- the record --------------------------------------------------------------------------------------------------


def _record(
    asked: _Asked,
    about: dict[str, Any],
    tensors: Tensors,
    dtype: torch.dtype,
    config: Any,
    rows: list[dict[str, Any]],
) -> dict[str, Any]:
    kinds = KINDS if asked.additions is not None else ("copied", "permuted", "new")
    of = {what: sum(row["parameters"] for row in rows if row["what"] == what) for what in kinds}
    return {
        "kind": report.KIND,
        "format": report.FORMAT,
        "trailmark": __version__,
        "base": about | {"files": [file.name for file in tensors.files]},
        "target": asked.to,
        "dtype": str(dtype).removeprefix("torch."),
        "fields": _set_fields(config),
        "parameters": {
            "base": sum(map(math.prod, tensors.shapes.values())),
            **of,
            "all": sum(of.values()),
        },
        "parts": rows,
    }


def _set_fields(config: Any) -> dict[str, Any]:
    """Those that are not as they would be by themselves."""
    if not isinstance(config, TrailmarkConfig):
        return dict(config.to_diff_dict())
    plain, names = type(config)(), field_types(type(config))
    return {name: x for name in names if (x := getattr(config, name)) != getattr(plain, name)}
