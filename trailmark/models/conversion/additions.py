"""What a conversion has learned, in one file apart from its base, with which the base becomes that model again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from trailmark import pretrained, untrusted
from trailmark.files import read_json, sync_file
from trailmark.models.configuration import TrailmarkConfig
from trailmark.models.conversion.parts import Part, Parts
from trailmark.models.conversion.tensors import NAMED
from trailmark.models.fields import as_field, field_types
from trailmark.settings import Settings, from_file, setting
from trailmark.trained import CONVERSION, weights_sha256
from trailmark.untrusted import brief

ADDITIONS = "additions.safetensors"
ARGUMENT = "additions"
_KIND, _FORMAT = "trailmark additions", 1
_HEADER = "trailmark"  # where in the file's metadata


class Change(NamedTuple):
    """What an adapter adds to a matrix [out, in] (LoRA, arXiv 2106.09685, Eq. 3)."""

    down: Tensor
    """[r, in]."""
    up: Tensor
    """[out, r]."""
    factor: float

    def added_to(self, x: Tensor) -> Tensor:
        """The matrix with it; on the CPU, wherever it was trained, so that it rounds the same everywhere."""
        wide = torch.promote_types(x.dtype, torch.float32)
        up, down, x = (part.cpu() for part in (self.up, self.down, x))
        return (x.to(wide) + (up.to(wide) @ down.to(wide)) * self.factor).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class _Header(Settings):
    """What the file says of itself."""

    kind: str = setting()
    format: int = setting()
    base: dict[str, Any] = setting()
    target: str = setting()
    converted: str = setting(choices=[*NAMED])
    dtype: str = setting(choices=[*NAMED])
    config: dict[str, Any] = setting()
    factors: dict[str, list[float]] = setting()


@dataclass(frozen=True)
class Additions:
    """What was learned beside a base: by the names of the tensors of the model that it was converted to."""

    base: Mapping[str, Any]
    """Its name, family, revision and the SHA-256 of its weights, as conversion.json has them."""
    target: str
    """What it was converted to."""
    converted: torch.dtype
    """Of the weights that the conversion wrote."""
    dtype: torch.dtype
    """Of those that were trained."""
    config: Mapping[str, Any]
    """All fields of the model's configuration that are ours."""
    learned: Mapping[str, Tensor]
    """Tensors that the base has not, or that were trained whole."""
    changes: Mapping[str, tuple[Change, ...]]
    """What was added to matrices of the base, by one training after the other."""

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """Of a conversion, of which nothing is learned yet, or of one that was trained; None: the folder has neither.

        A conversion whose weights are no longer those that were written is none.

        Raises:
            ValueError: a file that is damaged.
        """
        if (folder / ADDITIONS).exists():
            return cls.read(folder / ADDITIONS)
        record = read_json(folder / CONVERSION, links=True)
        record = record if isinstance(record, dict) else {}
        base, named, counts = record.get("base"), record.get("dtype"), record.get("parameters")
        dtype = NAMED.get(named) if isinstance(named, str) else None
        if dtype is None or not isinstance(base, dict) or not isinstance(base.get("sha256"), str):
            return None
        if not isinstance(counts, dict) or "learned" in counts:  # what it has learned is not beside it
            return None
        if record.get("weights_sha256") != weights_sha256(folder):
            return None
        return cls(base, str(record.get("target")), dtype, dtype, {}, {}, {})

    @property
    def fresh(self) -> bool:
        """Whether nothing is learned yet."""
        return not self.learned and not self.changes

    def then(
        self,
        config: TrailmarkConfig,
        dtype: torch.dtype,
        learned: Mapping[str, Tensor],
        changes: Mapping[str, Change],
    ) -> Additions:
        """Those of a training that began with these; both in float32, for a change of precision rounds in between.

        Args:
            config: of the model that was trained. dtype: of its weights.
            learned: what it trained whole, and what the base has not. changes: what its adapters add.
        """
        assert self.fresh or self.dtype == dtype == torch.float32  # in which every training begins
        kept = {name: those for name, those in self.changes.items() if name not in learned}
        together = {name: (*kept.get(name, ()), change) for name, change in changes.items()}
        return replace(
            self,
            dtype=dtype,
            config=_fields(config),
            learned={**self.learned, **learned},
            changes={**kept, **together},
        )

    def with_config(self, config: TrailmarkConfig) -> Additions:
        """The same for a model with other fields."""
        return replace(self, config=_fields(config))

    # --- the file ----------------------------------------------------------------------------------------------

    def write(self, path: Path) -> None:
        tensors = dict(self.learned)
        for name, changes in self.changes.items():
            for number, change in enumerate(changes):
                tensors |= {_factor(name, "A", number): change.down, _factor(name, "B", number): change.up}
        header = {
            "kind": _KIND,
            "format": _FORMAT,
            "base": dict(self.base),
            "target": self.target,
            "converted": str(self.converted).removeprefix("torch."),
            "dtype": str(self.dtype).removeprefix("torch."),
            "config": dict(self.config),
            "factors": {name: [x.factor for x in changes] for name, changes in self.changes.items()},
        }
        whole = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
        with open(path, "wb") as file:
            file.write(save(whole, {_HEADER: json.dumps(header, sort_keys=True)}))
            sync_file(file)

    def num_bytes(self) -> int:
        """What they take in a file, but its header."""
        factors = [x for changes in self.changes.values() for one in changes for x in (one.down, one.up)]
        return sum(x.numel() * x.element_size() for x in (*self.learned.values(), *factors))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Those in a file.

        Raises:
            ValueError: no such file, one of another kind, or numbers that are not finite.
        """
        header, tensors = _read(path)
        changes: dict[str, tuple[Change, ...]] = {}
        try:
            for name, factors in header.factors.items():
                pairs = [
                    tuple(tensors.pop(_factor(name, side, n)) for side in "AB") for n in range(len(factors))
                ]
                changes[name] = tuple(
                    Change(down, up, factor) for (down, up), factor in zip(pairs, factors, strict=True)
                )
        except KeyError as error:
            raise ValueError(
                f"{ARGUMENT}: {str(path)!r} lacks {error}. Copy or download it again."
            ) from error
        converted, dtype = NAMED[header.converted], NAMED[header.dtype]
        return cls(header.base, header.target, converted, dtype, header.config, tensors, changes)

    # --- with a base -------------------------------------------------------------------------------------------

    def fields(self, cls: type[TrailmarkConfig]) -> dict[str, Any]:
        """The configuration's fields, each as its type.

        Raises:
            ValueError: an unknown field, or a value of another type.
        """
        return {name: as_field(f"{ARGUMENT}: {name}", name, x, cls) for name, x in self.config.items()}

    def expect_base(self, sha256: str, name: str) -> None:
        """Raise a ValueError unless these are the weights that the additions were learned beside."""
        if self.base.get("sha256") != sha256:
            raise ValueError(
                f"{ARGUMENT}: expected the weights that they were learned beside, {brief(self.base.get('name'))} with "
                f"SHA-256 {str(self.base.get('sha256'))[:16]}, got {name} with {sha256[:16]}. Name the very files: the "
                "same model in another format has other bytes."
            )

    def put_into(self, parts: Parts, shapes: Mapping[str, tuple[int, ...]]) -> Parts:
        """The parts of the conversion, with what was learned in place of what is new, and added to what was adapted.

        Raises:
            ValueError: a tensor that the conversion has not, or of another shape; one that is new and not learned.
        """
        for name, part in parts.items():
            if part.what == "new" and name not in self.learned:
                raise ValueError(
                    f"{ARGUMENT}: expected {name}, which the base has not, there is none. Leave out the fields that "
                    "add it, or copy the file again."
                )
        for name, expected, found in self._sizes(shapes):
            if expected != found:
                has = "no such tensor" if expected is None else f"one of shape {list(expected)}"
                raise ValueError(
                    f"{ARGUMENT}: {name}: the model has {has}, they are for one of shape {list(found)}. Leave out the "
                    "fields that change it."
                )
        return {name: self._part(name, part) for name, part in parts.items()}

    def _sizes(
        self, shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, tuple[int, ...] | None, tuple[int, ...]]]:
        """Of each tensor its name, its shape in the model, and that which it would have with these."""
        for name, x in self.learned.items():
            yield name, shapes.get(name), tuple(x.shape)
        for name, changes in self.changes.items():
            for down, up, _ in changes:
                if not (down.dim() == up.dim() == 2 and len(down) == up.shape[1]):
                    raise ValueError(
                        f"{ARGUMENT}: {name}: expected factors [out, r] and [r, in], got {list(up.shape)} and "
                        f"{list(down.shape)}. Copy or download the file again."
                    )
                yield name, shapes.get(name), (len(up), down.shape[1])

    def _part(self, name: str, part: Part) -> Part:
        changes, whole = self.changes.get(name, ()), self.learned.get(name)

        def make(read: Any) -> Tensor:
            # as the training found it
            x = part.make(read).to(self.converted).float().to(self.dtype) if whole is None else whole
            for change in changes:
                x = change.added_to(x)
            return x

        if whole is not None:
            return Part((), make, learned="learned")
        return replace(part, make=make, learned="adapted" if changes else None)


def _fields(config: TrailmarkConfig) -> dict[str, Any]:
    """Those that are ours."""
    return {name: x for name, x in config.to_dict().items() if name in field_types(type(config))}


def _factor(name: str, side: str, number: int) -> str:
    """The name of a factor in the file: "A" is what peft calls the one below, "B" the one above."""
    return f"{name}.lora_{side}.{number}"


def _read(path: Path) -> tuple[_Header, dict[str, Tensor]]:
    try:
        untrusted.expect_regular(path, ARGUMENT, links=True)
    except FileNotFoundError as error:
        raise ValueError(
            f"{ARGUMENT}: there is no {str(path)!r}. Training a conversion leaves {ADDITIONS} in its output."
        ) from error
    try:
        with safe_open(path, framework="pt") as file:
            said = (file.metadata() or {}).get(_HEADER)
            tensors = {} if said is None else {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{ARGUMENT}: cannot read {str(path)!r} ({error}). Copy it again.") from error
    if said is None:
        raise ValueError(
            f"{ARGUMENT}: expected a file that trailmark train left as {ADDITIONS}, {str(path)!r} is another one."
        )
    what = f"{ARGUMENT}: {str(path)!r}"
    content = untrusted.parse_json(said, what)
    try:
        header = from_file(_Header, content)
    except ValueError as error:
        raise ValueError(f"{what}: {error} Copy or download it again.") from error
    if (header.kind, header.format) != (_KIND, _FORMAT):
        raise ValueError(
            f"{what}: expected {_KIND} of format {_FORMAT}, got {brief(header.kind)} of format "
            f"{brief(header.format)}. Use the trailmark that wrote it."
        )
    if foreign := [name for name, x in tensors.items() if x.dtype not in NAMED.values()]:
        raise ValueError(
            f"{what}: expected numbers in {', '.join(NAMED)}, {foreign[0]} is in {tensors[foreign[0]].dtype}. Copy "
            "or download it again."
        )
    pretrained.expect_sane(header.config, what)
    pretrained.expect_finite(iter(tensors.items()), ARGUMENT, path)
    return header, tensors
