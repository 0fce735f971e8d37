"""Configurations. Fields that several models share bear one name; sizes that do not fit are refused here."""

# No ``from __future__ import annotations`` here: ``strict`` does not check types that are written as strings.

import dataclasses
import inspect
import math
from functools import wraps
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from trailmark.models.answers import ConfigAnswers
from trailmark.models.rope import Rope, expect_scaling, rope_of
from trailmark.pretrained import MOST_LAYERS
from trailmark.untrusted import brief

Config = TypeVar("Config")
# what a stranger's config.json may ask for before anything is allocated; other whole numbers have 32 bits
_MOST = {"num_hidden_layers": MOST_LAYERS, "num_encoder_layers": MOST_LAYERS} | dict.fromkeys(
    ("chunk_size", "num_retrieved_chunks", "block_size", "num_states", "num_retrieval_groups", "head_dim"),
    1 << 16,
)
_LARGEST, _LARGEST_FLOAT = 2**31 - 1, 1e30
_DTYPES = ("float64", "float32", "bfloat16", "float16")

# of a field whose default None is replaced when a configuration is made: whoever reads it finds a number
if TYPE_CHECKING:
    Filled = int
else:
    Filled = int | None


class ConfigurationError(StrictDataclassError, ValueError):
    """A field that does not fit; what ``strict`` raises by itself is no ValueError."""


def checked(cls: type[Config]) -> type[Config]:
    """``strict``: every construction, load, assignment and save checks the fields, with errors of our own."""
    checked: Any = strict(cls)
    assert not checked.attribute_map, "a field of ours has one name: see TrailmarkConfig.__getattribute__"
    set_field, validate_all = checked.__setattr__, checked.validate

    def set_checked(self: Any, name: str, value: Any) -> None:
        expect(
            name != "per_layer_config" or value is None, name, value, "None: layer_types says what layers see"
        )
        try:
            set_field(self, name, value)
        except StrictDataclassError as error:
            kind = checked.__dataclass_fields__[name].type
            raise ConfigurationError(f"{name}: expected {_in_words(kind)}, got {brief(value)}.") from error

    @wraps(validate_all)  # also its mark, by which ``strict`` knows a parent's
    def validate(self: Any) -> None:
        try:
            validate_all(self)
        except StrictDataclassError as error:
            raise ConfigurationError(str(error.__cause__)) from error

    checked.__setattr__, checked.validate = set_checked, validate
    return checked


def _in_words(kind: Any) -> str:
    """A field's type: "int or None", "'alibi' or 'rope'"."""
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join("None" if of is NoneType else _in_words(of) for of in get_args(kind))
    return inspect.formatannotation(kind).replace(" | ", " or ")


@checked
class TrailmarkConfig(ConfigAnswers, PreTrainedConfig):
    """What every model shares. The defaults are the papers' 128M models.

    Args:
        vocab_size: tokens; landmarks are not in the vocabulary.
        hidden_size: E. intermediate_size: width of the SwiGLU MLP.
        num_hidden_layers: lower and upper layers together, without the chunk encoder.
        num_attention_heads: H. num_key_value_heads: J, None is H; J divides H.
        head_dim: D. None: E / H, which H must divide then; else any size, and what attention computes has H D numbers.
        attention_bias: the queries, keys and values of self-attention have a bias, as Qwen2's; its output has none.
        qk_norm: RMS norms of the queries and keys of self-attention, after the projection and before RoPE. "head": of
            each head by itself, with one weight of size D for all, as Qwen3 has it. "all": of all heads at once, as
            OLMo 2 has it. What reads chunks (Grouped Cross-Attention) has neither these norms nor a bias.
        sliding_window: W in positions, itself included; None is full attention.
        layer_types: of each layer "sliding_attention", with the window, or "full_attention", without one; None: all are
            as ``sliding_window`` says. Only the model with a window alone and HiLS may mix them.
        num_sinks: n, so many first positions of a text (of each document) stay visible beside the window; 0: none.
        max_sink_distance: m, a sink outside the window is scored as if the query stood at position m of the text, where
            it stands later (RoPE: distances that a base never saw in training). None: at its own position.
        window_position: what tells positions in the window apart: "alibi", as published, or "rope".
        alibi_slopes: "geometric", as DRT's code has them, or "interpolated", as ALiBi's authors have them; they
            differ where the number of heads is no power of two (:func:`trailmark.ops.alibi_slopes`).
        rope_theta: base of the rotary positions (chunk encoder, and window if it uses them).
        rope_scaling: how these positions go beyond the length that weights were trained at, with the keys of
            transformers: rope_type "linear", "llama3" or "yarn", and what belongs to it, or HiLS' "in_range"
            (:mod:`trailmark.models.rope`).
            The chunk encoder's are scaled too, so that a layer there computes what the same layer computes in a window.
        initialization: "normal": N(0, initializer_range), as published. "fan_in": embedding std 1, matrices
            std fan_in ** -0.5, those back into the residual stream also / sqrt(2 * layers); goes with
            ``logit_scale = hidden_size ** -0.5`` when the embedding is tied.
        logit_scale: factor on the logits.
        implementation: of the ops: None (the fastest), "reference" or "torch".
        tokenizer_fingerprint: of the tokenizer that the model was trained with; another is refused where a command
            opens the model. None: any that has no more tokens than the vocabulary.
    """

    model_type = "trailmark"
    keys_to_ignore_at_inference = ["past_key_values"]
    # fields that change nothing in what a model with given weights computes; an architecture names its own
    no_arithmetic: ClassVar[frozenset[str]] = frozenset({
        "initialization", "initializer_range", "implementation", "use_cache",
        "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "tokenizer_fingerprint",
    })  # fmt: skip
    # fields that older configurations lack: what is meant without them is not written down, so that files and what is
    # known by their hashes stay as they were
    newer: ClassVar[frozenset[str]] = frozenset({
        "head_dim", "attention_bias", "qk_norm", "rope_scaling", "layer_types", "num_sinks", "max_sink_distance",
    })  # fmt: skip

    vocab_size: int = 50257
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: Filled = None  # type: ignore[assignment]
    head_dim: Filled = None  # type: ignore[assignment]
    attention_bias: bool = False
    qk_norm: Literal["head", "all"] | None = None
    sliding_window: int | None = 512
    layer_types: list[str] | None = None
    num_sinks: int = 0
    max_sink_distance: int | None = None
    window_position: Literal["alibi", "rope"] = "alibi"
    alibi_slopes: Literal["geometric", "interpolated"] = "geometric"
    rope_theta: float | int = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rms_norm_eps: float | int = 1e-6
    initialization: Literal["normal", "fan_in"] = "normal"
    initializer_range: float | int = 0.02
    logit_scale: float | int = 1.0
    implementation: str | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tokenizer_fingerprint: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        dtype = kwargs.get("torch_dtype") if self.dtype is None else self.dtype
        known = dtype is None or dtype in _DTYPES or dtype in [getattr(torch, name) for name in _DTYPES]
        expect(known, "dtype", dtype, f"{', '.join(_DTYPES)} or None")
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        heads = self.num_attention_heads
        if self.head_dim is None and heads >= 1 and self.hidden_size % heads == 0:
            self.head_dim = self.hidden_size // heads
        # transformers would take them for the field that has their meaning
        expect(
            "rope_parameters" not in kwargs,
            "rope_parameters",
            kwargs.get("rope_parameters"),
            "rope_theta and rope_scaling instead",
        )
        super().__post_init__(**kwargs)

    # A field has one name here, and one value for all layers: ``checked`` sees to it. transformers' lookup, which knows
    # of more, takes some 25 times as long, and a token that is generated asks for dozens.
    __getattribute__ = object.__getattribute__

    @property
    def attention_width(self) -> int:
        """H D: numbers of a position's queries, and of what attention gives it."""
        return self.num_attention_heads * self.head_dim

    @property
    def windows(self) -> list[int | None]:
        """W of each layer; None: it sees everything before it."""
        if self.layer_types is None:
            return [self.sliding_window] * self.num_hidden_layers
        return [self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types]

    @property
    def window_stages(self) -> list[int]:
        """Of each layer the number of its window among the different ones: layers of one see the same positions."""
        kinds = list(dict.fromkeys(self.windows))
        return [kinds.index(window) for window in self.windows]

    @property
    def mixes_windows(self) -> bool:
        """Whether the architecture may have layers with a window beside layers without one."""
        return False

    @property
    def rope(self) -> Rope:
        """What the frequencies of RoPE are made of (:func:`trailmark.models.rope.inverse_frequencies`)."""
        return rope_of(self.rope_theta, self.rope_scaling)

    @property
    def has_landmarks(self) -> bool:
        """Whether a chunk ends with a landmark, a position of its own; else with its last token."""
        return True

    @property
    def asks_landmarks(self) -> bool:
        """Whether anything depends on what landmarks see."""
        return True

    @property
    def counts_landmarks(self) -> bool:
        """Whether a landmark takes a number of its own, as a token does: what is seen in windows is counted by them."""
        return self.has_landmarks and not self.hides_landmarks

    @property
    def hides_landmarks(self) -> bool:
        """Whether nobody attends to landmarks: each stands where the next token will, and takes no number."""
        return self.has_landmarks and not getattr(self, "landmarks_as_keys", True)

    def arithmetic_fields(self) -> list[tuple[str, object]]:
        """The fields that change what a model with given weights computes, by name."""
        without: set[str] = set()
        for base in type(self).__mro__:
            if issubclass(base, TrailmarkConfig):
                without |= base.no_arithmetic
        fields = [(name, getattr(self, name)) for name in sorted(self._own_fields() - without)]
        # a file may have the keys in another order
        return [(name, sorted(x.items()) if isinstance(x, dict) else x) for name, x in fields]

    def _own_fields(self) -> set[str]:
        """The names of the fields that are not transformers'."""
        ours: set[str] = set()
        for base in type(self).__mro__:
            if issubclass(base, TrailmarkConfig):
                ours |= inspect.get_annotations(base).keys()
        return ours & {field.name for field in dataclasses.fields(self)}

    def meant_without(self) -> dict[str, Any]:
        """Of each field of ours what is meant where a file or a memory does not name it."""
        own = self._own_fields()
        meant = {field.name: field.default for field in dataclasses.fields(self) if field.name in own}
        if self.num_attention_heads >= 1 and self.hidden_size % self.num_attention_heads == 0:
            meant["head_dim"] = self.hidden_size // self.num_attention_heads
        return meant

    def to_dict(self) -> dict[str, Any]:
        """As transformers has it, without newer fields that mean what their absence means."""
        fields, meant = super().to_dict(), self.meant_without()
        return {name: x for name, x in fields.items() if name not in self.newer or x != meant[name]}

    def validate_architecture(self) -> None:
        """Called by ``strict`` on every construction, load and save, before what rests on it."""
        for name in sorted(self._own_fields()):
            self._expect_bounded(name)
        for name in ("output_hidden_states", "output_attentions"):
            expect(not getattr(self, name), name, getattr(self, name), "False: the models here return none")
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
        ):  # fmt: skip
            expect(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        expect(
            self.head_dim is not None or self.hidden_size % self.num_attention_heads == 0,
            "num_attention_heads",
            self.num_attention_heads,
            f"a divisor of hidden_size = {self.hidden_size}",
        )
        expect(self.head_dim is None or self.head_dim >= 1, "head_dim", self.head_dim, "None or at least 1")
        heads = self.num_key_value_heads
        expect(
            heads is None or (heads >= 1 and self.num_attention_heads % heads == 0),
            "num_key_value_heads",
            heads,
            f"a divisor of num_attention_heads = {self.num_attention_heads}",
        )
        expect(self.rope_theta > 0, "rope_theta", self.rope_theta, "a positive number")
        for name in ("rms_norm_eps", "initializer_range"):
            expect(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        window = self.sliding_window
        expect(window is None or window >= 1, "sliding_window", window, "None or at least 1")
        self._expect_layer_types()
        if self.rope_scaling is not None:
            expect_scaling(self.rope_scaling, self.rope_theta)
            expect(
                self.window_position == "rope",
                "rope_scaling",
                self.rope_scaling,
                f"None with window_position {self.window_position!r}, which has no angles to scale",
            )
        self._expect_sinks()
        if self.window_position == "rope":
            self.expect_rotary_heads()
            expect(
                self.alibi_slopes == "geometric",
                "alibi_slopes",
                self.alibi_slopes,
                "'geometric' (the default) with window_position 'rope', which has none",
            )
        expect(
            self.implementation in (None, "reference", "torch"),
            "implementation",
            self.implementation,
            "None, 'reference' or 'torch'",
        )

    def _expect_sinks(self) -> None:
        sinks, most = self.num_sinks, self.max_sink_distance
        expect(sinks >= 0, "num_sinks", sinks, "0 or more")
        expect(
            sinks == 0 or self.sliding_window is not None,
            "num_sinks",
            sinks,
            "0 without a sliding_window: full attention sees the first positions anyway",
        )
        if most is not None:
            expect(sinks > 0, "max_sink_distance", most, "None without sinks (num_sinks 0)")
            expect(most >= sinks, "max_sink_distance", most, f"at least num_sinks = {sinks}, or None")
            expect(
                self.window_position == "rope",
                "max_sink_distance",
                most,
                "None with window_position 'alibi', whose distances need no limit",
            )

    def _expect_bounded(self, name: str) -> None:
        """That a number is finite, and none that nothing could be made of."""
        value = getattr(self, name)
        if isinstance(value, float):
            fits = math.isfinite(value) and abs(value) <= _LARGEST_FLOAT
            expect(fits, name, value, f"a finite number, {_LARGEST_FLOAT:g} at most")
        elif isinstance(value, int):
            most = _MOST.get(name, _LARGEST)
            expect(abs(value) <= most, name, value, f"at most {most}")

    def _expect_layer_types(self) -> None:
        kinds, known = self.layer_types, ("sliding_attention", "full_attention")
        if kinds is None:
            return
        expect(
            len(kinds) == self.num_hidden_layers and set(kinds) <= set(known),
            "layer_types",
            kinds,
            f"None or one of {' and '.join(map(repr, known))} for each of the {self.num_hidden_layers} layers",
        )
        expect(
            self.sliding_window is not None or "sliding_attention" not in kinds,
            "sliding_window",
            None,
            "a number of positions for the layers of layer_types 'sliding_attention'",
        )
        expect(
            self.mixes_windows or "full_attention" not in kinds,
            "layer_types",
            kinds,
            "'sliding_attention' for every layer: only the model with a window alone can mix them",
        )

    def expect_own_attention(self) -> None:
        """Raise a ValueError where a field asks for attention that only plain layers, DRT and Landmark have."""
        expect(
            self.head_dim is None or self.attention_width == self.hidden_size,
            "head_dim",
            self.head_dim,
            f"None (hidden_size / num_attention_heads) with a {type(self).__name__}, whose heads share the width",
        )
        for name, plain in (("attention_bias", False), ("qk_norm", None), ("rope_scaling", None)):
            came = getattr(self, name)
            expect(came == plain, name, came, f"{plain} with a {type(self).__name__}, which cannot have it")

    def expect_rotary_heads(self) -> None:
        if self.head_dim is None:
            return
        if self.attention_width != self.hidden_size:
            expect(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even size (RoPE)")
        expect(
            self.head_dim % 2 == 0,
            "num_attention_heads",
            self.num_attention_heads,
            "an even head size (RoPE)",
        )


@checked
class LayeredConfig(TrailmarkConfig):
    """Of a model whose lower layers make a memory of chunks, which groups of upper layers read.

    Args:
        num_lower_layers: layers before what makes the memory; None is half.
    """

    num_lower_layers: Filled = None  # type: ignore[assignment]

    why_some_are_upper: ClassVar[str] = "one upper layer must read"

    if TYPE_CHECKING:  # fields of all that are one
        chunk_size: int
        num_retrieved_chunks: int
        num_encoder_layers: int

        @property
        def num_retrieval_groups(self) -> int: ...

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_lower_layers is None:
            self.num_lower_layers = self.num_hidden_layers // 2
        super().__post_init__(**kwargs)

    @property
    def num_upper_layers(self) -> int:
        return self.num_hidden_layers - self.num_lower_layers

    @property
    def layers_per_group(self) -> int:
        return self.num_upper_layers // self.num_retrieval_groups

    def with_fewer_layers(self, count: int) -> Self:
        """Two groups stay."""
        groups, lower = min(self.num_retrieval_groups, 2), min(self.num_lower_layers, count)
        layers, kinds = lower + groups * min(self.layers_per_group, count), self.layer_types
        return with_fields(
            self,
            num_hidden_layers=layers,
            layer_types=None if kinds is None else kinds[:layers],
            num_lower_layers=lower,
            num_retrieval_groups=groups,
            num_encoder_layers=min(self.num_encoder_layers, count),
        )

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for name in ("chunk_size", "num_retrieval_groups"):
            expect(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        expect_count(self.num_retrieved_chunks)
        lower, layers, groups = self.num_lower_layers, self.num_hidden_layers, self.num_retrieval_groups
        expect(
            lower is None or 0 <= lower < layers,
            "num_lower_layers",
            lower,
            f"0 to {layers - 1} (num_hidden_layers - 1: {self.why_some_are_upper})",
        )
        if lower is not None:
            divides = (layers - lower) % groups == 0
            expect(divides, "num_retrieval_groups", groups, f"a divisor of the {layers - lower} upper layers")
        expect(self.sliding_window is not None, "sliding_window", None, "a number of positions")
        self.expect_rotary_heads()


def with_fields(config: Config, **fields: Any) -> Config:
    """The same configuration with other values of some fields."""
    kind: Any = type(config)
    given: Any = config
    made: Config = kind.from_dict(given.to_dict() | fields)
    return made


def expect_count(num_retrieved: int) -> None:
    """Raise a ValueError unless ``num_retrieved_chunks`` is a count."""
    expect(num_retrieved >= 0, "num_retrieved_chunks", num_retrieved, "0 (retrieval off) or more")


def expect(condition: bool, argument: str, came: object, expected: str) -> None:
    """Raise a ValueError that names a field, what it should be and what came, unless the condition holds."""
    if not condition:
        raise ValueError(f"{argument}: expected {expected}, got {brief(came)}.")
