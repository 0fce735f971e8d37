"""What a pretrained model becomes: which fields it begins with, where its layers go, how new parts start.

What is new starts so that a DRT computes, bit for bit, what its base does with the same window; Landmark Attention has
no such start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trailmark.models.conversion import parts as p
from trailmark.models.conversion.base import ARGUMENT, Base, layer_kinds
from trailmark.models.conversion.parts import Parts
from trailmark.models.drt.config import DRTConfig
from trailmark.models.hsa.config import HSAConfig

SINKS, WINDOW, GROUP_LAYERS = 4, 512, 8
Fields = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """An architecture that a pretrained model can become."""

    defaults: Callable[[Base, Mapping[str, Any]], Fields]
    """Of its fields, where a user gives none, from the base and the fields that a user gives."""
    parts: Callable[[Base, Any], Parts]
    """Of the base and the configuration."""


# --- a window alone ----------------------------------------------------------------------------------------------


def _window_fields(base: Base, given: Mapping[str, Any]) -> Fields:
    """The base's own windows; where a user gives one to layers, the first tokens stay visible beside it."""
    given_window = "sliding_window" in given
    window = given["sliding_window"] if given_window else max((w for w in base.windows if w), default=None)
    narrowed = _expect_layers(base, given)
    if given_window:
        _expect_seen(base, window)
    elif narrowed and window is None:
        window = WINDOW
    fields: Fields = {"sliding_window": window}
    if len(set(base.windows)) > 1 and (base.ours is not None or not given_window):
        fields["layer_types"] = layer_kinds(base.windows)
    beside = narrowed or given_window or base.sinks is not None
    return fields | (_sinks(base, given) if window is not None and beside else {})


def _expect_layers(base: Base, given: Mapping[str, Any]) -> bool:
    """Whether ``layer_types`` gives a window to a layer that saw all; none with a window may lose it."""
    kinds = given.get("layer_types")
    if kinds is None or len(kinds) != len(base.windows):  # which the configuration refuses
        return False
    pairs = [*zip(kinds, base.windows, strict=True)]
    for number, (kind, window) in enumerate(pairs):
        if kind == "full_attention" and window is not None:
            raise ValueError(
                f"layer_types: expected 'sliding_attention' for layer {number}, which has a window of {window} in this "
                f"{base.family}, got 'full_attention'. It was not trained to see further."
            )
    return any(kind == "sliding_attention" and window is None for kind, window in pairs)


def _sinks(base: Base, given: Mapping[str, Any]) -> Fields:
    if given.get("num_sinks") == 0:
        return {}
    if base.sinks is not None:
        return base.sinks
    return {"num_sinks": SINKS, "max_sink_distance": base.trained_length - 1}


def _expect_seen(base: Base, window: int | None) -> None:
    """No layer was trained to see further than its own window."""
    least = min((own for own in base.windows if own is not None), default=None)
    if least is not None and (window is None or window > least):
        raise ValueError(
            f"sliding_window: expected at most the {least} positions of this {base.family}'s own window, got {window}. "
            "Leave it out or choose a smaller one."
        )


def _window_parts(base: Base, config: Any) -> Parts:
    if config.mlp != "swiglu" or config.norm != "rms":
        raise ValueError(
            f"{ARGUMENT}: expected mlp 'swiglu' and norm 'rms', as this {base.family} has them, got {config.mlp!r} and "
            f"{config.norm!r}. Leave them out."
        )
    parts = p.outside_layers(base)
    for number in range(config.num_hidden_layers):
        parts |= p.layer(base, number, f"layers.{number}")
    return parts


# --- DRT ---------------------------------------------------------------------------------------------------------


def _drt_fields(base: Base, given: Mapping[str, Any]) -> Fields:
    return (
        _grouped_fields(base, given)
        | {
            "landmarks_as_keys": False,
            "exclude_visible_chunks": True,
            "memory_kv": "layer",
            "residual_gca": True,
            "virtual_key": "zero" if given.get("softmax_off_by_one") is False else "window",
            "retrieval_normalization": True,
            "retrieval_recency": 0.0 if given.get("encoder_weights") == "encoder" else 1.0,
            "chunk_size": 31,
            "num_retrieved_chunks": 32,
            "chunk_summary": "mean",
        }
        | _sinks(base, given)
    )


def _grouped_fields(base: Base, given: Mapping[str, Any]) -> Fields:
    """Of a window below, and groups of upper layers that read."""
    layers, lower = base.config.num_hidden_layers, given.get("num_lower_layers")
    lower = layers // 2 if lower is None else lower
    window = _window(base, given, min([WINDOW, *(w for w in base.windows if w is not None)]))
    groups = _groups(layers - lower)
    return {"num_lower_layers": lower, "sliding_window": window, "num_retrieval_groups": groups}


def _window(base: Base, given: Mapping[str, Any], usual: int) -> int:
    """The window of a model that retrieves: what it shows needs no search."""
    window = given.get("sliding_window", usual)
    if window is None:
        raise ValueError(
            f"sliding_window: expected a number of positions in a model that retrieves, got null. {usual} would do; "
            "--to sliding_window makes a model that sees all."
        )
    _expect_seen(base, window)
    return int(window)


def _groups(upper: int) -> int:
    """That give about eight layers each; the smaller of two that are as good."""
    divisors = (count for count in range(1, max(upper, 1) + 1) if upper % count == 0)
    return min(divisors, key=lambda count: abs(upper / count - GROUP_LAYERS))


def _drt_parts(base: Base, config: DRTConfig) -> Parts:
    lower, width, window = config.num_lower_layers, config.hidden_size, config.sliding_window
    assert window is not None
    for name, alone in (("gca_start", "drawn"), ("retrieval_query", "landmark")):
        if (came := getattr(config, name)) != alone:
            raise ValueError(
                f"{name}: expected {alone!r}, as a conversion says how each part begins, got {came!r}. Leave it out."
            )
    parts = p.outside_layers(base)
    for number in range(lower):
        parts |= p.layer(base, number, f"lower_layers.{number}")
    parts["landmark"] = p.mean_embedding("the mean of the embeddings; nobody attends to it")
    for number in range(config.num_encoder_layers):
        parts |= _encoder_layer(base, config, f"encoder.layers.{number}")
    norm = p.own(f"model.layers.{lower}.input_layernorm.weight")  # of the first that reads
    for name in ("input_norm", "output_norm"):
        what = "1: what reads the states has the weights of its norm"
        parts[f"encoder.{name}.weight"] = p.filled(1, (width,), what)

    def projections(kind: str) -> list[tuple[str, str]]:
        read = [f"model.layers.{number}" for number in config.first_readers]
        return [(f"{of}.self_attn.{kind}_proj.weight", f"{of}.input_layernorm.weight") for of in read]

    parts["encoder.kv_proj.weight"] = p.begun(
        p.after_norms(projections("k"), projections("v"), base),
        "k and v, without positions, of what attention_norm makes of states: of each layer that has its own, or of the "
        "first that reads them",
    )
    alike = "a chunk first finds what looks like itself"
    if config.retrieval_projections and config.scores_chunks:
        parts["encoder.landmark_proj.weight"] = p.diagonal(norm, f"attention_norm of layer {lower}: {alike}")
    for group in range(config.num_retrieval_groups if config.scores_chunks else 0):
        if config.retrieval_projections:
            parts[f"retrievers.{group}.norm.weight"] = p.begun(
                norm, f"attention_norm of layer {lower}: {alike}"
            )
            parts[f"retrievers.{group}.q_proj.weight"] = p.identity(width, f"the identity: {alike}")
        else:
            parts[f"retrievers.{group}.norm.weight"] = p.filled(1, (width,), f"1: {alike}")
    for number in range(config.num_upper_layers):
        ours, theirs = f"upper_layers.{number}", f"model.layers.{lower + number}"
        parts |= p.layer(base, lower + number, ours)
        if config.virtual_key == "zero":
            parts[f"{ours}.gca_norm.weight"] = p.begun(
                p.own(f"{theirs}.input_layernorm.weight"), "attention_norm of its layer"
            )
            parts[f"{ours}.gca_q_proj.weight"] = p.begun(
                p.turned_by(f"{theirs}.self_attn.q_proj.weight", base, window),
                f"q of its layer as it meets a key {window} positions back, wherever that stands",
            )
        size = (width, config.num_attention_heads * p.head_size(base))
        parts[f"{ours}.gca_o_proj.weight"] = p.filled(0, size, "0: what is read changes nothing yet")
    return parts


def _encoder_layer(base: Base, config: DRTConfig | HSAConfig, prefix: str) -> Parts:
    """The last lower layer, whose branches add nothing yet."""
    number = max(config.num_lower_layers - 1, 0)
    width, inner = config.hidden_size, config.num_attention_heads * p.head_size(base)
    copied = f"layer {number}"
    parts = {name: p.begun(part, copied) for name, part in p.layer(base, number, prefix).items()}
    nothing = "0: the layer adds nothing yet"
    parts[f"{prefix}.attention.o_proj.weight"] = p.filled(0, (width, inner), nothing)
    parts[f"{prefix}.mlp.down_proj.weight"] = p.filled(0, (width, config.intermediate_size), nothing)
    return parts


# --- Landmark Attention --------------------------------------------------------------------------------------------


def _landmark_fields(base: Base, given: Mapping[str, Any]) -> Fields:
    if any(window is not None for window in base.windows):
        raise ValueError(
            f"to: expected a base whose layers see all of a text, this {base.family} has windows in some: a landmark "
            "stands for chunks that they never saw. Convert another base, or to drt."
        )
    return {"max_position_embeddings": base.trained_length}


def _landmark_parts(base: Base, config: Any) -> Parts:
    if config.gate_probability:
        raise ValueError(
            f"{ARGUMENT}: expected gate_probability 0, for this {base.family} has no gate, got "
            f"{config.gate_probability}. Leave it out."
        )
    parts = _window_parts(base, config)
    parts["landmark"] = p.mean_embedding("the mean of the embeddings")
    return parts


# --- HiLS ----------------------------------------------------------------------------------------------------------


def _hils_fields(base: Base, given: Mapping[str, Any]) -> Fields:
    """Layers with a window of their own keep it; the others choose chunks, as far back as a window of theirs."""
    own = {window for window in base.windows if window is not None}
    if None not in base.windows:
        raise ValueError(
            f"to: expected a base with layers that see all of a text, this {base.family} has a window of {min(own)} in "
            "each: none of them knows how to look back further. Convert another base, or to drt."
        )
    window = _window(base, given, min(own, default=WINDOW))
    _expect_layers(base, given)
    fields: Fields = {
        "sliding_window": window,
        "chunk_size": 32,
        "num_retrieved_chunks": 16,
        "chunk_score": "mean",
        "chunk_weights": "keys",
        "far_position": "window",
    }
    if given.get("chunk_score") == "expansion":
        fields["summary_query"] = "tokens"  # which have queries that were trained
    summed_up = given.get("chunk_score") != "mass"
    if summed_up:
        fields["summary_tokens"] = min(8, given.get("chunk_size", 8))
    if given.get("reading") == "windows":
        # what is asked of a long memory looks closely and keeps to little of it (docs/convert.md)
        fields |= {"num_retrieved_chunks": 4}
        if summed_up:
            fields |= {"summary_tokens": 1, "num_focus_chunks": 4}
        if given.get("far_position", "window") == "window" and 2 * window <= base.trained_length:
            fields["far_distance"] = 2 * window
    if own:
        fields["layer_types"] = layer_kinds(base.windows)
    return fields | _sinks(base, given)


def _hils_parts(base: Base, config: Any) -> Parts:
    parts = p.outside_layers(base)
    for number in range(config.num_hidden_layers):
        parts |= p.layer(base, number, f"layers.{number}")
    if config.asks_landmarks:
        parts["landmark"] = p.mean_embedding("the mean of the embeddings; nobody attends to it")
    rank, width = config.calibration_rank, config.attention_width
    for number in config.retrieving_layers if rank else ():
        prefix = f"layers.{number}.calibration"
        parts[f"{prefix}.down_proj.weight"] = p.drawn((rank, config.hidden_size), number)
        parts[f"{prefix}.up_proj.weight"] = p.filled(0, (width, rank), "0: chunks are scored by the queries")
        if config.qk_norm is not None:
            norm = parts[f"layers.{number}.attention.q_norm.weight"]
            parts[f"{prefix}.norm.weight"] = p.begun(norm, "that of the queries")
    return parts


# --- HSA -----------------------------------------------------------------------------------------------------------


def _hsa_fields(base: Base, given: Mapping[str, Any]) -> Fields:
    return (
        _grouped_fields(base, given)
        | {
            "chunk_size": 32,
            "num_retrieved_chunks": 16,
            "residual_gca": True,
            "retrieval_normalization": True,
            "chunk_summary": "mean",
        }
        | _sinks(base, given)
    )


def _hsa_parts(base: Base, config: HSAConfig) -> Parts:
    lower, width = config.num_lower_layers, config.hidden_size
    heads, own = config.num_memory_heads, config.num_key_value_heads
    if heads != own:
        raise ValueError(
            f"num_memory_heads: expected {own}, as many as this {base.family} has key/value heads, got {heads}. Leave "
            "it out."
        )
    if config.chunk_summary != "mean":
        raise ValueError(
            f"chunk_summary: expected 'mean', got {config.chunk_summary!r}: the encoder's layers add nothing yet, so "
            "what stands for a chunk would be the same for all. Leave it out."
        )
    parts = p.outside_layers(base)
    for number in range(lower):
        parts |= p.layer(base, number, f"lower_layers.{number}")
    for number in range(config.num_upper_layers):
        parts |= p.layer(base, lower + number, f"upper_layers.{number}")
    first = f"model.layers.{lower}"
    norm = p.own(f"{first}.input_layernorm.weight")
    parts["encoder.landmark"] = p.mean_embedding("the mean of the embeddings")
    for number in range(config.num_encoder_layers):
        parts |= _encoder_layer(base, config, f"encoder.layers.{number}")
    parts["encoder.output_norm.weight"] = p.filled(
        1, (width,), "1: what reads the states has the weights of its norm"
    )
    layer = f"{first}.input_layernorm.weight"
    parts["encoder.kv_proj.weight"] = p.begun(
        p.after_norms(
            [(f"{first}.self_attn.k_proj.weight", layer)], [(f"{first}.self_attn.v_proj.weight", layer)], base
        ),
        f"k and v, without positions, of what attention_norm of layer {lower} makes of states",
    )
    if config.qk_norm is not None:
        norm_of_k = parts["upper_layers.0.attention.k_norm.weight"]
        parts["encoder.k_norm.weight"] = p.begun(norm_of_k, f"that of the keys of layer {lower}")
    alike = "a chunk first finds what looks like itself"
    square = config.retrieval_size == width
    size = (config.retrieval_size, width)
    parts["encoder.landmark_proj.weight"] = (
        p.diagonal(norm, f"attention_norm of layer {lower}: {alike}") if square else p.drawn(size, 0)
    )
    for group in range(config.num_retrieval_groups):
        number = lower + group * config.layers_per_group
        theirs, ours = f"model.layers.{number}", f"readers.{group}"
        parts[f"retrievers.{group}.norm.weight"] = p.begun(norm, f"attention_norm of layer {lower}: {alike}")
        parts[f"retrievers.{group}.q_proj.weight"] = (
            p.identity(width, f"the identity: {alike}") if square else p.drawn(size, 1 + group)
        )
        if config.recency_decay:
            parts[f"retrievers.{group}.decay"] = p.filled(0, (1,), "0: no chunk is preferred for its age")
        copied = p.layer(base, number, "")
        for name in ("attention_norm", "mlp_norm"):
            parts[f"{ours}.{name}.weight"] = p.begun(copied[f".{name}.weight"], f"that of layer {number}")
        parts[f"{ours}.mlp.gate_up_proj.weight"] = p.begun(
            copied[".mlp.gate_up_proj.weight"], f"that of layer {number}"
        )
        parts[f"{ours}.q_proj.weight"] = p.begun(
            p.turned_by(f"{theirs}.self_attn.q_proj.weight", base, 0),
            f"q of layer {number}, without positions",
        )
        if config.qk_norm is not None:
            norm_of_q = parts[f"upper_layers.{number - lower}.attention.q_norm.weight"]
            parts[f"{ours}.q_norm.weight"] = p.begun(norm_of_q, f"that of the queries of layer {number}")
        inner, nothing = config.attention_width, "0: what reads changes nothing yet"
        parts[f"{ours}.o_proj.weight"] = p.filled(0, (width, inner), nothing)
        parts[f"{ours}.mlp.down_proj.weight"] = p.filled(0, (width, config.intermediate_size), nothing)
    return parts


TARGETS = {
    "drt": Target(_drt_fields, _drt_parts),
    "hils": Target(_hils_fields, _hils_parts),
    "hsa": Target(_hsa_fields, _hsa_parts),
    "landmark": Target(_landmark_fields, _landmark_parts),
    "sliding_window": Target(_window_fields, _window_parts),
}
"""By the short names of architectures."""
