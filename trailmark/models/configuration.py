"""Configurations. Fields that several models share bear one name; sizes that do not fit are refused here."""

# No ``from __future__ import annotations`` here: ``strict`` does not check types that are written as strings.

import inspect
from functools import wraps
from typing import Any, Literal, TypeVar, get_args, get_origin

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

Config = TypeVar("Config")


# fields that change nothing in what a model with given weights computes
_NO_ARITHMETIC = {
    "initialization", "initializer_range", "implementation", "use_cache", "retrieval_noise",
    "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id",
}  # fmt: skip


class ConfigurationError(StrictDataclassError, ValueError):
    """A field that does not fit; what ``strict`` raises by itself is no ValueError."""


def _checked(cls: type[Config]) -> type[Config]:
    """``strict``: every construction, load, assignment and save checks the fields, with errors of our own."""
    checked: Any = strict(cls)
    set_field, validate_all = checked.__setattr__, checked.validate

    def set_checked(self: Any, name: str, value: Any) -> None:
        try:
            set_field(self, name, value)
        except StrictDataclassError as error:
            kind = checked.__dataclass_fields__[name].type
            raise ConfigurationError(f"{name}: expected {_in_words(kind)}, got {value!r}.") from error

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
    return inspect.formatannotation(kind).replace(" | ", " or ")


@_checked
class TrailmarkConfig(PreTrainedConfig):
    """What every model shares. The defaults are the papers' 128M models.

    Args:
        vocab_size: tokens; landmarks are not in the vocabulary.
        hidden_size: E. intermediate_size: width of the SwiGLU MLP.
        num_hidden_layers: lower and upper layers together, without the chunk encoder.
        num_attention_heads: H. num_key_value_heads: J, None is H; J divides H and H divides E.
        sliding_window: W in positions, itself included; None is full attention.
        window_position: what tells positions in the window apart: "alibi", as published, or "rope".
        rope_theta: base of the rotary positions (chunk encoder, and window if it uses them).
        initialization: "normal": N(0, initializer_range), as published. "fan_in": embedding std 1, matrices
            std fan_in ** -0.5, those back into the residual stream also / sqrt(2 * layers); goes with
            ``logit_scale = hidden_size ** -0.5`` when the embedding is tied.
        logit_scale: factor on the logits.
        implementation: of the ops: None (the fastest), "reference" or "torch".
    """

    model_type = "trailmark"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 50257
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    sliding_window: int | None = 512
    window_position: Literal["alibi", "rope"] = "alibi"
    rope_theta: float | int = 10000.0
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

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def arithmetic_fields(self) -> list[tuple[str, object]]:
        """The fields that change what a model with given weights computes, by name."""
        ours = {
            name
            for base in type(self).__mro__
            if issubclass(base, TrailmarkConfig)
            for name in inspect.get_annotations(base)
            if name not in ("model_type", "keys_to_ignore_at_inference")
        }
        return [(name, getattr(self, name)) for name in sorted(ours - _NO_ARITHMETIC)]

    def validate_architecture(self) -> None:
        """Called by ``strict`` on every construction, load and save, before what rests on it."""
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
        ):  # fmt: skip
            _expect(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _expect(
            self.hidden_size % self.num_attention_heads == 0,
            "num_attention_heads",
            self.num_attention_heads,
            f"a divisor of hidden_size = {self.hidden_size}",
        )
        heads = self.num_key_value_heads
        _expect(
            heads is None or (heads >= 1 and self.num_attention_heads % heads == 0),
            "num_key_value_heads",
            heads,
            f"a divisor of num_attention_heads = {self.num_attention_heads}",
        )
        window = self.sliding_window
        _expect(window is None or window >= 1, "sliding_window", window, "None or at least 1")
        if self.window_position == "rope":
            self.expect_rotary_heads()
        _expect(
            self.implementation in (None, "reference", "torch"),
            "implementation",
            self.implementation,
            "None, 'reference' or 'torch'",
        )

    def expect_rotary_heads(self) -> None:
        _expect(
            self.head_dim % 2 == 0,
            "num_attention_heads",
            self.num_attention_heads,
            "an even head size (RoPE)",
        )


@_checked
class SlidingWindowConfig(TrailmarkConfig):
    """The model with a window alone: Llama-like layers, sliding window, ALiBi."""

    model_type = "trailmark_sliding_window"


@_checked
class DRTConfig(TrailmarkConfig):
    """Differentiable Retrieval Transformer (arXiv 2410.01651).

    Args:
        num_lower_layers: layers before the chunk encoder; None is half.
        chunk_size: S tokens; a chunk has S + 1 rows with its landmark. (Papers' configurations: 64.)
        num_retrieved_chunks: K. 1 trains no retriever and is refused in training.
        num_retrieval_groups: G; the upper layers divide by it.
        num_encoder_layers: bidirectional layers of the chunk encoder.
        softmax_off_by_one: a virtual key of score 0 and value 0 in every chunk (Eq. 3).
        retrieval_projections: W_h per group and W_l (Eq. 1); False: none, as in the published code.
        retrieval_normalization: RMS-normalise both sides of the score after the projections.
        retrieval_scale: factor on the score, besides E ** -0.5.
        retrieval_noise: Gumbel noise on the scores when chunks are selected in training.
        exclude_visible_chunks: do not select chunks that the window shows whole to the last row that reads.
        residual_gca: add what was read to the residual stream; False: it feeds the MLP only, as published.
    """

    model_type = "trailmark_drt"

    num_lower_layers: int | None = None
    chunk_size: int = 63
    num_retrieved_chunks: int = 8
    num_retrieval_groups: int = 1
    num_encoder_layers: int = 2
    softmax_off_by_one: bool = True
    retrieval_projections: bool = True
    retrieval_normalization: bool = False
    retrieval_scale: float | int = 1.0
    retrieval_noise: bool = True
    exclude_visible_chunks: bool = False
    residual_gca: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_lower_layers is None:
            self.num_lower_layers = self.num_hidden_layers // 2
        super().__post_init__(**kwargs)

    @property
    def num_upper_layers(self) -> int:
        assert self.num_lower_layers is not None
        return self.num_hidden_layers - self.num_lower_layers

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for name in ("chunk_size", "num_retrieved_chunks", "num_retrieval_groups", "num_encoder_layers"):
            _expect(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        lower = self.num_lower_layers
        _expect(
            lower is None or 0 <= lower < self.num_hidden_layers,
            "num_lower_layers",
            lower,
            f"0 to {self.num_hidden_layers - 1} (num_hidden_layers - 1: one upper layer must read)",
        )
        if lower is not None:
            upper = self.num_hidden_layers - lower
            _expect(
                upper % self.num_retrieval_groups == 0,
                "num_retrieval_groups",
                self.num_retrieval_groups,
                f"a divisor of the {upper} upper layers",
            )
        _expect(self.sliding_window is not None, "sliding_window", None, "a number of positions")
        self.expect_rotary_heads()


def _expect(condition: bool, argument: str, came: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{argument}: expected {expected}, got {came!r}.")
