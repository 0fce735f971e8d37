"""The door for folders with models and tokenizers from anywhere: no code of theirs, safetensors alone, finite numbers.

transformers reads such a folder; what is asked of it here comes before or after, wherever a model or a tokenizer is
loaded. A folder's files are regular ones (in the cache of the hub, links to such), its config.json is small, sane and
fits its weights, no code that lies there is run and nothing is unpickled, whoever answers "y" to whom. Whatever else
transformers makes of a stranger's file, :func:`loading` makes one line of it.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trailmark import network, untrusted
from trailmark.settings import Settings, from_file, setting
from trailmark.untrusted import brief, first_line

NO_CODE: dict[str, Any] = {"trust_remote_code": False}
"""For every ``from_pretrained`` of an Auto class: None would ask whoever is at the keyboard."""
WEIGHTS_ALONE: dict[str, Any] = {"use_safetensors": True}
"""For every ``from_pretrained`` of a model: other formats can hold code."""

_CONFIG_BYTES = 16 << 20
MOST_LAYERS = 1_000
"""Of a model: each is built before its weights are asked for, and takes a millisecond or more."""
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_READ = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")  # what transformers may open in a folder


# --- before ------------------------------------------------------------------------------------------------------


def expect_readable(where: str | os.PathLike[str], argument: str, subfolder: str = "") -> dict[str, Any]:
    """Look at a folder before transformers does; a name on the hub is left to it.

    Returns:
        config.json; empty where there is none, or no folder.

    Raises:
        ValueError: a FIFO, a device or a folder where a file is expected; a config.json that is no mapping, too large,
            nested too deep, not finite, or that names code to be fetched.
    """
    folder = Path(where) / subfolder
    if not folder.is_dir():
        return {}
    for path in untrusted.files_like(folder, *_READ):
        _expect_file(path, argument)
    try:
        config = untrusted.read_json(
            folder / "config.json", argument, _CONFIG_BYTES, links=True, finite=False
        )
    except FileNotFoundError:
        return {}
    if not isinstance(config, dict):
        raise ValueError(
            f"{argument}: expected the fields of a configuration in {str(folder)!r}/config.json, got "
            f"{brief(config)}."
        )
    expect_sane(config, f"{argument}: {str(folder / 'config.json')!r}")
    with suppress(FileNotFoundError):
        path = folder / "generation_config.json"
        fields = untrusted.read_json(path, argument, _CONFIG_BYTES, links=True, finite=False)
        if isinstance(fields, dict):
            _generation(fields, argument, folder)
    return config


def _expect_file(path: Path, argument: str) -> None:
    try:
        untrusted.expect_regular(path, argument, links=True)
    except FileNotFoundError as error:
        raise ValueError(
            f"{argument}: {str(path)!r} is a link to a file that is not there. Copy or download the folder again."
        ) from error


def expect_sane(config: Mapping[str, Any], what: str) -> None:
    """That no configuration, however deep, has a number that is not finite, a million layers or foreign kernels.

    A list may hold Infinity: bounds of some models of transformers do.

    Args:
        what: what messages begin with.
    """
    todo: list[Mapping[str, Any]] = [config]
    while todo:
        for key, value in todo.pop().items():
            name = str(key)  # of labels it is a number
            if isinstance(value, Mapping):
                todo.append(value)
            elif isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{what}: {name}: expected a finite number, got {value}.")
            elif "layer" in name and _is_count(value) and value > MOST_LAYERS:
                raise ValueError(f"{what}: {name}: expected at most {MOST_LAYERS}, got {brief(value)}.")
            elif name.endswith("_implementation") and isinstance(value, str) and "/" in value:
                raise ValueError(
                    f"{what}: {name}: expected the name of an implementation that is installed, got {brief(value)}, "
                    "which would be fetched and run. Remove the line."
                )


def expect_safetensors(where: str | os.PathLike[str], argument: str, subfolder: str = "") -> None:
    """Raise a ValueError where a folder has weights in other formats alone, and say how to go on."""
    folder = Path(where) / subfolder
    if not folder.is_dir() or untrusted.files_like(folder, "*.safetensors"):
        return
    names = [
        path.name for path in untrusted.files_like(folder, *_PICKLED) if path.name != "training_args.bin"
    ]
    if names:
        raise ValueError(
            f"{argument}: expected weights in safetensors, {str(folder)!r} has {names[0]} alone, a format that can "
            "hold code and is not read. Where you trust it, convert it once, in Python, in that folder: import torch, "
            "safetensors.torch as s; s.save_file({name: x.clone() for name, x in "
            f"torch.load({names[0]!r}, weights_only=True).items()}}, 'model.safetensors', {{'format': 'pt'}})"
        )


def expect_fits(
    config: Any, where: str | os.PathLike[str], argument: str, layers: int = 1, subfolder: str = ""
) -> None:
    """That a model is no larger than the weights beside its configuration, before anything of its size is made.

    Roughly: what is missing or has another shape is told when the weights are loaded.

    Args:
        config: a configuration of transformers, or its fields.
        layers: how many may share a tensor.
    """
    import safetensors

    def of(name: str) -> Any:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    folder = Path(where) / subfolder
    files = untrusted.files_like(folder, "*.safetensors")
    if not files:
        return
    tensors = 0
    for path in files:
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                tensors += len(file.keys())
        except (OSError, safetensors.SafetensorError) as error:
            raise ValueError(
                f"{argument}: cannot load {str(path)!r}: {first_line(error)}. Save or download the model again."
            ) from error
    numbers = 8 * sum(path.stat().st_size for path in files)  # a bit each, at the least
    width = of("hidden_size")
    heads, size_of_head = of("num_attention_heads"), of("head_dim")
    for name in ("num_hidden_layers", "num_encoder_layers"):
        if _is_count(count := of(name)) and count > layers * tensors:
            raise ValueError(
                f"{argument}: {name}: expected at most {layers * tensors} with the {tensors} tensors of "
                f"{str(folder)!r}, got {brief(count)}. Its config.json belongs to other weights."
            )
    for name in ("vocab_size", "intermediate_size", "num_states", "hidden_size"):
        size = of(name)
        if _is_count(size) and _is_count(width) and size * width > numbers:
            raise ValueError(
                f"{argument}: {name}: expected a size that the weights in {str(folder)!r} can have "
                f"({numbers // 8:,} bytes), got {brief(size)}. Its config.json belongs to other weights."
            )
    if all(map(_is_count, (width, heads, size_of_head))) and heads * size_of_head * width > numbers:
        raise ValueError(
            f"{argument}: head_dim: expected a size that the weights in {str(folder)!r} can have ({numbers // 8:,} "
            f"bytes) with {brief(heads)} heads, got {brief(size_of_head)}. Its config.json belongs to other weights."
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# --- after -------------------------------------------------------------------------------------------------------


def expect_finite(named: Iterator[tuple[str, Any]], argument: str, where: str | os.PathLike[str]) -> None:
    """Raise a ValueError that names the first tensor with NaN or Infinity; those without data are left out.

    One sum of each: NaN and Infinity stay in it. Where it is not finite, each number is looked at.
    """
    for name, x in named:
        if x.is_meta or not (x.is_floating_point() or x.is_complex()):
            continue
        x = x.detach()
        if math.isfinite(_sum(x)) or bool(x.isfinite().all()):
            continue
        raise ValueError(
            f"{argument}: expected finite weights, {name} in {str(where)!r} holds NaN or Infinity. Its training went "
            "wrong, or the file was changed: use an earlier checkpoint or download it again."
        )


def _sum(x: Any) -> float:
    import torch

    if x.dtype in (torch.float32, torch.float64):
        return float(x.sum())
    if x.element_size() == 1 or x.is_complex():  # few kernels know 8 bits
        return float(x.to(torch.complex64 if x.is_complex() else torch.float32).abs().sum())
    return float(x.sum(dtype=torch.float32))


_MOST_COUNT = 2**31 - 1


def _count(least: int = 0, most: int = _MOST_COUNT) -> Any:
    return setting(None, least=least, most=most)


@dataclass(frozen=True)
class _Generation(Settings):
    """The types of what generation_config.json may hold; transformers looks at values, and at few types."""

    max_length: int | None = _count()
    max_new_tokens: int | None = _count()
    min_length: int | None = _count()
    min_new_tokens: int | None = _count()
    max_time: float | None = setting(None, least=0)
    stop_strings: list[str] | None = None
    do_sample: bool | None = None
    num_beams: int | None = _count(1, 1 << 16)
    num_beam_groups: int | None = _count(1, 1 << 16)
    num_return_sequences: int | None = _count(1, 1 << 16)
    use_cache: bool | None = None
    cache_implementation: str | None = None
    temperature: float | None = None
    top_k: int | None = _count()
    top_p: float | None = None
    min_p: float | None = None
    top_h: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    repetition_penalty: float | None = None
    encoder_repetition_penalty: float | None = None
    length_penalty: float | None = None
    diversity_penalty: float | None = None
    penalty_alpha: float | None = None
    guidance_scale: float | None = None
    no_repeat_ngram_size: int | None = _count()
    encoder_no_repeat_ngram_size: int | None = _count()
    bad_words_ids: list[list[int]] | None = None
    renormalize_logits: bool | None = None
    remove_invalid_values: bool | None = None
    forced_bos_token_id: int | None = _count()
    forced_eos_token_id: int | list[int] | None = None
    exponential_decay_length_penalty: list[float] | None = None
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None
    token_healing: bool | None = None
    output_attentions: bool | None = None
    output_hidden_states: bool | None = None
    output_scores: bool | None = None
    output_logits: bool | None = None
    return_dict_in_generate: bool | None = None
    pad_token_id: int | None = _count(-1)
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None
    decoder_start_token_id: int | list[int] | None = None
    prompt_lookup_num_tokens: int | None = _count()
    prefill_chunk_size: int | None = _count(1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("forced_eos_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
            value = getattr(self, name)
            for token in value if isinstance(value, list) else () if value is None else (value,):
                if not -1 <= token <= _MOST_COUNT:
                    raise ValueError(f"{name}: expected tokens, got {brief(token)}.")


def expect_generation(model: Any, argument: str, where: str | os.PathLike[str]) -> None:
    """Raise a ValueError for a field of generation_config.json that has another type than transformers takes."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    for name, value in vars(_generation(vars(config), argument, where)).items():
        if value is not None:
            setattr(config, name, value)  # a number that was written as a text


def _generation(fields: dict[str, Any], argument: str, where: str | os.PathLike[str]) -> _Generation:
    try:
        return from_file(_Generation, fields)
    except ValueError as error:
        raise ValueError(
            f"{argument}: {str(Path(where) / 'generation_config.json')!r}: {error} Mend or remove that line."
        ) from error


# --- around ------------------------------------------------------------------------------------------------------


AGAIN = "If it is damaged or a part is missing, download or save it again."


@contextmanager
def loading(argument: str, what: str, way_out: str = "") -> Iterator[None]:
    """A block in which transformers reads what a stranger may have written: any error becomes one line, a ValueError.

    transformers believes what stands in a folder: a wrong type or size is any error there is. What this module and our
    models say stays as it is.

    Args:
        what: "cannot load 'runs/x'". way_out: a sentence.
    """
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        text = _innermost(error)
        if isinstance(error, ValueError) and text.startswith(f"{argument}: "):
            raise
        if "custom code" in text:
            way_out = ""
            text = (
                "it brings code of its own, which is never run. Use a model that transformers or trailmark knows, or "
                "register its class in a program of yours"
            )
        elif network.is_offline() and _is_absent(error):
            text = "the hub's cache holds no such model, and offline nothing is downloaded"
        said = first_line(text.removeprefix("Error ").strip())
        raise ValueError(f"{argument}: {what}: {said}.{f' {way_out}' if way_out else ''}") from error


def _is_absent(error: BaseException | None) -> bool:
    """Whether the hub's client said that what is wanted is not on this machine."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    while error is not None and not isinstance(error, LocalEntryNotFoundError):
        error = error.__cause__ or error.__context__
    return error is not None


def _innermost(error: BaseException) -> str:
    """What a field of a configuration is refused for stands in the cause of what is raised."""
    from huggingface_hub.errors import StrictDataclassError

    while isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip() or type(error).__name__


def has_tokenizer(folder: Path) -> bool:
    """Whether a file that transformers makes a tokenizer of lies in a folder."""
    names = "tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"
    return any((folder / name).is_file() for name in names)


def load_tokenizer(where: str | os.PathLike[str], argument: str, **options: Any) -> Any:
    """A tokenizer of transformers, from a folder or the hub, without code of its own.

    Raises:
        ValueError: there is none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    importlib.import_module("trailmark.byte_tokenizer")  # it registers itself
    expect_readable(where, argument)
    options = network.from_pretrained_options(where, argument) | options
    with loading(argument, f"cannot load the tokenizer of {str(where)!r}"):
        return AutoTokenizer.from_pretrained(str(where), **NO_CODE, **options)


def load_config(where: str | os.PathLike[str], argument: str, **options: Any) -> Any:
    """A configuration of transformers, from a folder or the hub, without code of its own; errors as :func:`loading`."""
    from transformers import AutoConfig

    local = expect_readable(where, argument)
    file = options.get("gguf_file", "config.json")
    name = str(Path(where) / file) if Path(where).is_dir() else str(where)
    options = network.from_pretrained_options(where, argument) | options
    with loading(argument, f"cannot read {name!r}", AGAIN if "gguf_file" in options else ""):
        config = AutoConfig.from_pretrained(str(where), **NO_CODE, **options)
    if not local:
        expect_sane(config.to_dict(), f"{argument}: {name!r}")
    return config


def load_model(
    auto: Any, config: Any, where: str | os.PathLike[str], argument: str, **options: Any
) -> tuple[Any, Any]:
    """A model of transformers and what its loading found, from a folder or the hub, checked before and after.

    Args:
        auto: AutoModelForCausalLM or another Auto class. config: from :func:`load_config`.

    Raises:
        ValueError: it cannot be loaded, has no safetensors, or weights that are not finite.
    """
    expect_safetensors(where, argument)
    expect_fits(config, where, argument, layers=4)
    options = network.from_pretrained_options(where, argument) | options
    with loading(argument, f"cannot load {str(where)!r}"):
        model, found = auto.from_pretrained(
            str(where), output_loading_info=True, **NO_CODE, **WEIGHTS_ALONE, **options
        )
    expect_finite(model.named_parameters(), argument, where)
    expect_generation(model, argument, where)
    return model, found
