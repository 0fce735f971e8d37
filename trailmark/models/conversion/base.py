"""A pretrained model of another family: where it lies, what its configuration says in our words, what is refused.

What is not known is refused by its name: a conversion that leaves something out computes something else.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trailmark import network, pretrained, untrusted
from trailmark.models.configuration import expect
from trailmark.models.rope import ROPE_TYPES
from trailmark.untrusted import brief

ARGUMENT = "model"
GGUF = ".gguf"
_FETCHED = ("*.json", "*.jinja", "*.txt", "*.model", "model*.safetensors")

# of every family, under our names; those that a generation needs stand in generation_config.json too
SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "rms_norm_eps", "initializer_range", "tie_word_embeddings", "pad_token_id", "bos_token_id",
    "eos_token_id",
)  # fmt: skip
TOLD = ("initializer_range", "pad_token_id", "bos_token_id", "eos_token_id")
"""Those that no weights have."""
_READ = (
    "head_dim", "rope_parameters", "max_position_embeddings", "sliding_window", "use_sliding_window",
    "max_window_layers", "layer_types",
)  # fmt: skip
# keys beside a kind of scaled positions that nobody reads
_UNREAD: dict[str, tuple[str, ...]] = {
    "yarn": ("finetuned",),
    "linear": ("original_max_position_embeddings",),
}
# changes nothing in what a trained model computes
_NEUTRAL = ("use_cache", "attention_dropout", "dtype", "architectures", "return_dict", "problem_type")
# what another value would mean, of fields that a family may have
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish"), "the MLP's activation"),
    "mlp_bias": ((False,), "biases in the MLP"),
    "pretraining_tp": ((1, None), "matrices that are multiplied in parts"),
    "partial_rotary_factor": ((1, None), "positions in a part of each head alone"),
    "attn_logit_softcapping": ((None,), "capped scores"),
    "final_logit_softcapping": ((None,), "capped logits"),
    "quantization_config": ((None,), "quantized weights"),
}
# of models that nothing here computes as they do: a field, and what it tells
_FOREIGN = {
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "final_logit_softcapping": "logits that are capped",
    "attn_logit_softcapping": "scores that are capped",
    "no_rope_layers": "layers without positions",
    "vision_config": "images",
}


@dataclass(frozen=True)
class Family:
    """What tells a family of models from the others, beside the values of its fields."""

    attention_bias: bool = False
    """Biases of q, k and v."""
    qk_norm: str | None = None
    """Norms of q and k: "head": one of each head's width."""


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(attention_bias=True),
    "qwen3": Family(qk_norm="head"),
}
"""By ``model_type``."""


def layer_kinds(windows: Iterable[int | None]) -> list[str]:
    """What ``layer_types`` calls layers that see so far; None: all of a text."""
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


@dataclass(frozen=True)
class Base:
    """A pretrained model: its files, and its configuration in our words."""

    name: str
    """As a user named it, without folders of a machine."""
    folder: Path
    gguf: Path | None
    """The file that holds it; None: safetensors in the folder."""
    revision: str | None
    """The commit on the hub; None: a folder."""
    config: Any
    """Of transformers."""
    fields: dict[str, Any]
    """Fields that any of our configurations has."""
    windows: tuple[int | None, ...]
    """Of each layer; None: full attention."""
    ours: Any = None
    """The configuration of a model of ours that is converted further."""
    sinks: dict[str, Any] | None = None
    """Of such a model with windows: the fields of the first tokens that stay in sight beside them, if any do."""

    @property
    def family(self) -> str:
        found: str = self.config.model_type
        return found

    @property
    def tells(self) -> Family:
        return FAMILIES[self.family]

    @property
    def trained_length(self) -> int:
        """Tokens of the longest text that its configuration says it can tell the places of."""
        found: int = self.config.max_position_embeddings
        return found

    @property
    def options(self) -> dict[str, Any]:
        """What ``from_pretrained`` of a configuration or a tokenizer is told besides the folder."""
        return {} if self.gguf is None else {"gguf_file": self.gguf.name}


def open_base(model: str | os.PathLike[str]) -> Base:
    """Find a model and read its configuration.

    Args:
        model: a folder with safetensors or one GGUF file, such a file, or a name on the hub.

    Raises:
        ValueError: there is none, it cannot be read, or it has something that no model of ours has.
    """
    given = Path(model)
    revision, folder = None, given
    if given.suffix.lower() == GGUF and given.is_file():
        folder = given.parent
    elif not given.exists():
        if given.suffix.lower() == GGUF or not network.may_be_on_the_hub(str(model)):
            raise ValueError(
                f"{ARGUMENT}: expected a folder, a .gguf file or a name on the hub (OWNER/NAME), there is no "
                f"{str(model)!r} here. Look at how it is spelled, and in which folder the command was started."
            )
        folder = _downloaded(str(model))
        revision = folder.name
    elif not given.is_dir():
        raise ValueError(
            f"{ARGUMENT}: expected a folder, a .gguf file or a name on the hub, {str(model)!r} is another file."
        )
    gguf = _gguf_in(given, folder)
    if gguf is not None:
        _expect_gguf_reader()
        untrusted.expect_regular(gguf, ARGUMENT, links=True)
        pretrained.expect_readable(folder, ARGUMENT)
    elif not (folder / "config.json").is_file():
        raise ValueError(
            f"{ARGUMENT}: expected a folder with config.json and safetensors, or with a .gguf file, {str(folder)!r} "
            "has neither."
        )
    else:
        pretrained.expect_safetensors(folder, ARGUMENT)
    options = {} if gguf is None else {"gguf_file": gguf.name}
    config = pretrained.load_config(folder, ARGUMENT, **options)
    config.pad_token_id = known_token(config.pad_token_id, config)
    where = str(model) if revision is not None else (gguf or folder).resolve().name
    pretrained.expect_sane(config.to_dict(), f"{ARGUMENT}: {where}")
    return Base(where, folder, gguf, revision, config, fields_of(config, gguf is not None), _windows(config))


def _downloaded(name: str) -> Path:
    from huggingface_hub import snapshot_download

    options = network.from_pretrained_options(name, ARGUMENT)
    with pretrained.loading(ARGUMENT, f"cannot load {name!r}, which is no folder here"):
        return Path(snapshot_download(name, allow_patterns=list(_FETCHED), **options))


def _gguf_in(given: Path, folder: Path) -> Path | None:
    if given.suffix.lower() == GGUF and given.is_file():
        return given
    if untrusted.files_like(folder, "model*.safetensors"):
        return None
    files = untrusted.files_like(folder, f"*{GGUF}")
    if len(files) > 1:
        raise ValueError(
            f"{ARGUMENT}: expected one .gguf file in {str(folder)!r}, it has {len(files)}: "
            f"{', '.join(file.name for file in files[:4])}. Name the file itself."
        )
    return files[0] if files else None


def _expect_gguf_reader() -> None:
    from transformers.utils import is_gguf_available

    if not is_gguf_available():
        raise ValueError(
            f"{ARGUMENT}: a .gguf file is read with the package gguf, which is not installed. Install it: pip install "
            "'trailmark[convert]'"
        )


# --- the configuration in our words ------------------------------------------------------------------------------


def known_token(token: int | None, config: Any) -> int | None:
    """A token to pad with that has an embedding; None: it was added to the tokenizer alone."""
    return None if token is None or token >= config.vocab_size else token


def fields_of(config: Any, from_gguf: bool = False) -> dict[str, Any]:
    """Of a configuration of transformers, what any of ours has.

    Raises:
        ValueError: it has something that no model of ours has.
    """
    kind, family = config.model_type, FAMILIES.get(config.model_type)
    given = config.to_dict()
    if from_gguf:
        given.pop("quantization_config", None)
    for name, what in _FOREIGN.items():
        if given.get(name) not in (None, 0, 1):
            raise ValueError(_refusal(kind, f"{name} = {brief(given[name])}", what))
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(
            f"{ARGUMENT}: expected one of the families {known}, or a model of ours with a window alone, got {kind!r}, "
            "whose layers are not known here. Convert a base of one of these."
        )
    for name, (allowed, what) in _ONLY.items():
        if name in given and given[name] not in allowed:
            raise ValueError(_refusal(kind, f"{name} = {brief(given[name])}", what))
    if given.get("attention_bias"):  # of these families it puts one on o_proj too
        raise ValueError(_refusal(kind, "attention_bias = True", "a bias of the attention's output (o_proj)"))
    _expect_known(config)
    head_dim = given.get("head_dim") or config.hidden_size // config.num_attention_heads
    fields = {name: given[name] for name in SAME if name in given}
    fields |= _rope(config, kind) | {"window_position": "rope"}
    if head_dim * config.num_attention_heads != config.hidden_size:
        fields["head_dim"] = head_dim
    if family.attention_bias:
        fields["attention_bias"] = True
    if family.qk_norm is not None:
        fields["qk_norm"] = family.qk_norm
    return fields


def _expect_known(config: Any) -> None:
    """Fields that a newer transformers gave the family, with a value that means something."""
    known = {*SAME, *_READ, *_NEUTRAL, *_ONLY, "attention_bias"}
    own = vars(type(config)).get("__annotations__", {})
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        if field.name in own and field.name not in known and value != field.default:
            raise ValueError(
                _refusal(
                    config.model_type, f"{field.name} = {brief(value)}", "a field that is not known here"
                )
            )


def _refusal(kind: str, came: str, what: str) -> str:
    return f"{ARGUMENT}: this {kind} has {came} ({what}), which no model here computes. Convert another base."


def _rope(config: Any, kind: str) -> dict[str, Any]:
    parameters = config.rope_parameters
    if not isinstance(parameters, Mapping) or "rope_theta" not in parameters:
        raise ValueError(
            _refusal(kind, f"rope_parameters = {brief(parameters)}", "positions of another kind")
        )
    scaling = {name: value for name, value in parameters.items() if name not in ("rope_theta", "type")}
    unread = _UNREAD.get(str(scaling.get("rope_type")), ())
    scaling = {name: value for name, value in scaling.items() if name not in unread}
    if scaling.pop("partial_rotary_factor", 1) not in (None, 1):
        raise ValueError(
            _refusal(
                kind, f"rope_parameters = {brief(dict(parameters))}", "positions in a part of each head alone"
            )
        )
    fields = {"rope_theta": parameters["rope_theta"]}
    rope_type = scaling.get("rope_type", "default")
    if rope_type == "default":
        return fields
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"{ARGUMENT}: expected positions (rope_type) that are default, {', '.join(ROPE_TYPES)}, this {kind} has "
            f"{brief(rope_type)}. Convert another base."
        )
    return fields | {"rope_scaling": scaling}


def _windows(config: Any) -> tuple[int | None, ...]:
    """How far each layer sees, itself included."""
    layers = config.num_hidden_layers
    # a family without this field ignores it, whatever its config.json says
    if not hasattr(type(config), "sliding_window"):
        return (None,) * layers
    window = config.sliding_window
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    expect(
        len(kinds) == layers and set(kinds) <= {"sliding_attention", "full_attention"},
        f"{ARGUMENT}: layer_types",
        kinds,
        f"'sliding_attention' or 'full_attention' for each of {layers} layers",
    )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
