"""Configurations. Fields that several models share bear one name; sizes that do not fit are refused here."""

# No ``from __future__ import annotations`` here: ``strict`` does not check types that are written as strings.

import inspect
from functools import wraps
from typing import Any, Literal, Self, TypeVar, get_args, get_origin

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from trailmark.models.answers import ConfigAnswers

Config = TypeVar("Config")


# fields that change nothing in what a model with given weights computes
_NO_ARITHMETIC = {
    "initialization", "initializer_range", "implementation", "use_cache", "retrieval_noise",
    "embedder", "embedder_fingerprint",  # the embedder itself counts: TrailmarkForCausalLM._cache_key
    "landmark_phase", "position_jump", "max_position_embeddings", "truncation_blocks",
    "ranking_weight", "ranking_margin", "ranking_threshold", "first_gold_probability", "gold_probability",
    "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id",
}  # fmt: skip


class ConfigurationError(StrictDataclassError, ValueError):
    """A field that does not fit; what ``strict`` raises by itself is no ValueError."""


def checked(cls: type[Config]) -> type[Config]:
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


@checked
class TrailmarkConfig(ConfigAnswers, PreTrainedConfig):
    """What every model shares. The defaults are the papers' 128M models.

    Args:
        vocab_size: tokens; landmarks are not in the vocabulary.
        hidden_size: E. intermediate_size: width of the SwiGLU MLP.
        num_hidden_layers: lower and upper layers together, without the chunk encoder.
        num_attention_heads: H. num_key_value_heads: J, None is H; J divides H and H divides E.
        sliding_window: W in positions, itself included; None is full attention.
        window_position: what tells positions in the window apart: "alibi", as published, or "rope".
        alibi_slopes: "geometric", as DRT's code has them, or "interpolated", as ALiBi's authors have them; they
            differ where the number of heads is no power of two (:func:`trailmark.ops.alibi_slopes`).
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
    alibi_slopes: Literal["geometric", "interpolated"] = "geometric"
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

    @property
    def has_landmarks(self) -> bool:
        """Whether a chunk ends with a landmark, a position of its own; else with its last token."""
        return True

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
        _expect(self.rope_theta > 0, "rope_theta", self.rope_theta, "a positive number")
        for name in ("rms_norm_eps", "initializer_range"):
            _expect(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        window = self.sliding_window
        _expect(window is None or window >= 1, "sliding_window", window, "None or at least 1")
        if self.window_position == "rope":
            self.expect_rotary_heads()
            _expect(
                self.alibi_slopes == "geometric",
                "alibi_slopes",
                self.alibi_slopes,
                "'geometric' (the default) with window_position 'rope', which has none",
            )
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


@checked
class SlidingWindowConfig(TrailmarkConfig):
    """The model with a window alone: Llama-like layers, sliding window, ALiBi."""

    model_type = "trailmark_sliding_window"

    def with_fewer_layers(self, count: int) -> Self:
        return _with(self, num_hidden_layers=min(self.num_hidden_layers, count))


@checked
class DRTConfig(TrailmarkConfig):
    """Differentiable Retrieval Transformer (arXiv 2410.01651).

    Args:
        num_lower_layers: layers before the chunk encoder; None is half.
        chunk_size: S tokens; a chunk has S + 1 rows with its landmark. (Papers' configurations: 64.)
        num_retrieved_chunks: K. 1 trains no retriever and is refused in training, unless the retriever is not
            learned: the chunk's weight is then 1. 0: retrieval is off. Every chunk reads what the first two read,
            nothing; no chunk is encoded or kept, no embedder asked. Refused in training.
        num_retrieval_groups: G; the upper layers divide by it.
        num_encoder_layers: bidirectional layers of the chunk encoder.
        softmax_off_by_one: a virtual key of score 0 and value 0 in every chunk (Eq. 3).
        retrieval_projections: W_h per group and W_l (Eq. 1); False: none, as in the published code.
        retrieval_normalization: RMS-normalise both sides of the score after the projections.
        retrieval_scale: factor on the score, besides E ** -0.5.
        retrieval_noise: Gumbel noise on the scores when chunks are selected in training.
        exclude_visible_chunks: do not select chunks that the window shows whole to the last row that reads.
        residual_gca: add what was read to the residual stream; False: it feeds the MLP only, as published.
        retriever: what selects. "causal": the learned scores. The ablations: "random": K chunks, drawn evenly from
            the candidates. "encoder": those that a frozen encoder finds nearest, online (the model's attribute
            ``embedder``) or beforehand (``neighbours``, from a table), the same for every group.
        encoder_weights: with retriever "encoder", what weighs the selected chunks. "learned": the scores of W_h and
            W_l. "encoder": its own, times retrieval_scale; the model then has no W_h and W_l, and a table must have
            scores (the paper's "w/ contriever" replaces the scores).
        embedder: spec of that encoder, such as "hash" or "transformers:FOLDER", for who opens the model.
        embedder_fingerprint: of the encoder that the model was trained with; another is refused. None: any.
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
    retriever: Literal["causal", "random", "encoder"] = "causal"
    encoder_weights: Literal["learned", "encoder"] = "learned"
    embedder: str | None = None
    embedder_fingerprint: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_lower_layers is None:
            self.num_lower_layers = self.num_hidden_layers // 2
        super().__post_init__(**kwargs)

    @property
    def first_visible(self) -> int | None:
        """``visible`` of :mod:`trailmark.models.candidates`: the last row that reads is S + 1 after it."""
        if not self.exclude_visible_chunks:
            return None
        assert self.sliding_window is not None
        return self.chunk_size + 1 - (self.sliding_window - 1)

    @property
    def num_upper_layers(self) -> int:
        assert self.num_lower_layers is not None
        return self.num_hidden_layers - self.num_lower_layers

    @property
    def scores_chunks(self) -> bool:
        """Whether the model weighs chunks by scores of its own; else it has no W_h and W_l."""
        return self.encoder_weights == "learned"

    def expect_trainable(self) -> None:
        super().expect_trainable()
        if self.num_retrieved_chunks == 1 and self.retriever == "causal":
            raise ValueError(
                "num_retrieved_chunks: expected at least 2 in training, got 1: the weight of a single chunk is "
                "always 1, so its score gets no gradient and the retriever learns nothing."
            )

    def with_fewer_layers(self, count: int) -> Self:
        assert self.num_lower_layers is not None
        groups = min(self.num_retrieval_groups, 2)
        lower = min(self.num_lower_layers, count)
        upper = groups * min(self.num_upper_layers // self.num_retrieval_groups, count)
        return _with(
            self,
            num_hidden_layers=lower + upper,
            num_lower_layers=lower,
            num_retrieval_groups=groups,
            num_encoder_layers=min(self.num_encoder_layers, count),
        )

    def validate_architecture(self) -> None:
        super().validate_architecture()
        if self.retriever != "encoder":
            for name, without in (
                ("encoder_weights", "learned"), ("embedder", None), ("embedder_fingerprint", None)
            ):  # fmt: skip
                came = getattr(self, name)
                _expect(came == without, name, came, f"{without!r} with retriever {self.retriever!r}")
        for name in ("chunk_size", "num_retrieval_groups", "num_encoder_layers"):
            _expect(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _expect_count(self.num_retrieved_chunks)
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


@checked
class LandmarkConfig(TrailmarkConfig):
    """Landmark Attention (arXiv 2305.16300). The defaults are the Llama-like 128M model of arXiv 2410.01651.

    Positions count a chunk as S + 1, its landmark on the last: a chunk that is closed early leaves a gap.

    Args:
        chunk_size: S tokens before a landmark. (The first paper: 50.)
        num_retrieved_chunks: k, of the memory, per token and head or as ``retrieve_per`` says. 0: retrieval is off;
            with a cache a token sees its cell alone and no chunk is kept. Without a cache, as in training, a text is
            attended to whole, whatever k is: 0 changes nothing there.
        max_position_embeddings: positions of a training text, landmarks included. With stingy positions what is
            read at once must fit: (k + 1) (S + 1) places for the memory and the positions of a cell.
        local_length: tokens of a cell. A text is cut in cells from its start; chunks completed in the present
            cell are local, earlier ones are memory. None: the most whole chunks that fit.
        retrieve_per: what selects k chunks for itself. "token_and_head": each token in each head, "token": by
            the maximum over heads, "head": by the maximum over a cell's tokens, "cell": by both.
        causal_retrieval: of "head" and "cell": a token's choice depends on tokens before it only, and is the same
            however the text is fed (:func:`trailmark.ops.select_by_landmarks`). False, the paper's way: the
            maximum is over all of the cell that is fed so far, tokens after it included.
        memory_position: "stingy": the k latest chunks at their distances, all others as if k + 1 chunks back
            (Sec. 3.2.1). "true": at their distances, for models trained with ``position_jump`` (App. E).
        max_memory_chunks: the newest so many are kept; None: all.
        landmark_phase: of training texts: "random": a text may begin inside a chunk; "fixed": at a chunk's start.
        position_jump: in training, after each landmark positions go on by 1 to this many; 0 and 1: always 1.
        landmark_loss: "none": landmarks bear no loss and the token before one predicts the token after it.
            "none_after_eos": nor does what follows an end-of-text token. "text": a landmark is a token of the text,
            predicted like the others and predicting the next. (docs/landmark.md: who trained how.)
        gate_probability: share of landmarks, in training, that only the retrieval gate token opens (App. D); 0:
            no such token. gate_cutoff: in reading, what the gate would weigh less is not retrieved.
        mlp: "swiglu" or "gelu". norm: "rms", or "layer" (no biases).
    """

    model_type = "trailmark_landmark"

    sliding_window: int | None = None
    window_position: Literal["alibi", "rope"] = "rope"
    chunk_size: int = 63
    num_retrieved_chunks: int = 4
    max_position_embeddings: int = 768
    local_length: int | None = None
    retrieve_per: Literal["token_and_head", "token", "head", "cell"] = "token_and_head"
    causal_retrieval: bool = True
    memory_position: Literal["stingy", "true"] = "stingy"
    max_memory_chunks: int | None = None
    landmark_phase: Literal["random", "fixed"] = "random"
    position_jump: int = 0
    landmark_loss: Literal["none", "none_after_eos", "text"] = "none"
    gate_probability: float | int = 0.0
    gate_cutoff: float | int = 0.0
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    norm: Literal["rms", "layer"] = "rms"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.local_length is None and self.chunk_size >= 1:
            left = self.max_position_embeddings - (self.num_retrieved_chunks + 1) * (self.chunk_size + 1)
            self.local_length = max(1, left // (self.chunk_size + 1)) * self.chunk_size
        super().__post_init__(**kwargs)

    @property
    def retrieves_in_training(self) -> bool:
        """A training text is attended to whole: chunks are retrieved in reading alone."""
        return False

    @property
    def begins_texts_inside_chunks(self) -> bool:
        return self.landmark_phase != "fixed"

    def longest_training_text(self, early_landmarks: int = 0) -> int:
        # a landmark before its chunk is full leaves a gap of up to S positions
        left = self.max_position_embeddings - early_landmarks * self.chunk_size
        return max(0, left - left // (self.chunk_size + 1))

    def with_fewer_layers(self, count: int) -> Self:
        # the first layer makes tables that all share: it is like no other
        return _with(self, num_hidden_layers=min(self.num_hidden_layers, count + 1))

    @property
    def selects_for_many(self) -> bool:
        """Whether positions of a cell share what they select: they have a say in each other's."""
        return self.retrieve_per in ("head", "cell")

    def cell_positions(self) -> int:
        """The most positions that a cell's last token sees in it: the chunk that it began in, tokens, landmarks."""
        assert self.local_length is not None
        S = self.chunk_size
        tokens = self.local_length + (0 if self.local_length % S == 0 else S - 1)
        return tokens + tokens // S

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for name in ("chunk_size", "max_position_embeddings"):
            _expect(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _expect_count(self.num_retrieved_chunks)
        for name in ("local_length", "max_memory_chunks"):
            number = getattr(self, name)
            _expect(number is None or number >= 1, name, number, "None or at least 1")
        _expect(self.position_jump >= 0, "position_jump", self.position_jump, "at least 0")
        for name in ("gate_probability", "gate_cutoff"):
            _expect(0 <= getattr(self, name) <= 1, name, getattr(self, name), "0 to 1")
        _expect(
            self.causal_retrieval or self.selects_for_many,
            "causal_retrieval",
            self.causal_retrieval,
            f"True with retrieve_per {self.retrieve_per!r}, which is causal: only 'head' and 'cell' can look ahead",
        )
        _expect(
            self.gate_cutoff == 0 or self.gate_probability > 0,
            "gate_cutoff",
            self.gate_cutoff,
            "0 for a model without a retrieval gate (gate_probability 0)",
        )
        _expect(
            self.sliding_window is None and self.window_position == "rope",
            "sliding_window, window_position",
            (self.sliding_window, self.window_position),
            "None and 'rope': local_length says what is local",
        )
        _expect(
            self.landmark_loss != "none_after_eos" or self.eos_token_id is not None,
            "landmark_loss",
            self.landmark_loss,
            "'none' or 'text' without an eos_token_id",
        )
        self.expect_rotary_heads()
        memory = (self.num_retrieved_chunks + 1) * (self.chunk_size + 1)
        if self.local_length is not None and self.memory_position == "stingy":
            _expect(
                memory + self.cell_positions() <= self.max_position_embeddings,
                "max_position_embeddings",
                self.max_position_embeddings,
                f"at least {memory} for {self.num_retrieved_chunks} + 1 chunks and {self.cell_positions()} for a "
                f"cell of {self.local_length} tokens. Lower num_retrieved_chunks, chunk_size or local_length, or "
                "train on longer texts",
            )


@checked
class BlockRecurrentConfig(TrailmarkConfig):
    """Block-Recurrent Transformer (arXiv 2203.07852), its "skip" configuration. Defaults: 128M, as arXiv 2410.01651.

    With ``sliding_window`` W = ``block_size`` a token sees at most the block before its own and what of its own came
    before it. (The port that arXiv 2410.01651 ran shows all of the block before: 768 positions in the mean with blocks
    of 512. Its row is ``sliding_window=768, block_size=512, recurrent_layer=4`` here.)

    Args:
        block_size: S tokens, counted from the beginning of a document, after which the states are written. None: W.
        num_states: M vectors of width E. None: S.
        recurrent_layer: which layer, from 1, reads and writes the states. None is half. (The first paper: the third
            from the end, 10 of 12.)
        state_gate: "fixed": a learned mixture, the same for all texts. "lstm": forget and input gates.
        truncation_blocks: in training, no gradient passes through the states from a document's block n, 2n, ... to
            those before it. None: through all of a call.
    """

    model_type = "trailmark_block_recurrent"

    block_size: int | None = None
    num_states: int | None = None
    recurrent_layer: int | None = None
    state_gate: Literal["fixed", "lstm"] = "fixed"
    truncation_blocks: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.block_size is None:
            self.block_size = self.sliding_window
        if self.num_states is None:
            self.num_states = self.block_size
        if self.recurrent_layer is None:
            self.recurrent_layer = max(1, self.num_hidden_layers // 2)
        super().__post_init__(**kwargs)

    @property
    def has_landmarks(self) -> bool:
        return False

    def with_fewer_layers(self, count: int) -> Self:
        assert self.recurrent_layer is not None
        below = min(self.recurrent_layer - 1, count)
        above = min(self.num_hidden_layers - self.recurrent_layer, count)
        return _with(self, num_hidden_layers=below + 1 + above, recurrent_layer=below + 1)

    def validate_architecture(self) -> None:
        super().validate_architecture()
        _expect(self.sliding_window is not None, "sliding_window", None, "a number of positions")
        for name in ("block_size", "num_states"):
            number = getattr(self, name)
            _expect(number is None or number >= 1, name, number, "None or at least 1")
        layer = self.recurrent_layer
        _expect(
            layer is None or 1 <= layer <= self.num_hidden_layers,
            "recurrent_layer",
            layer,
            f"1 to {self.num_hidden_layers} (num_hidden_layers), or None",
        )
        blocks = self.truncation_blocks
        _expect(
            blocks is None or blocks >= 2,
            "truncation_blocks",
            blocks,
            "None or at least 2 (with 1 nothing that writes the states would learn)",
        )


@checked
class RPTConfig(TrailmarkConfig):
    """Retrieval-Pretrained Transformer (Rubin and Berant, 2024), and RPT-Contriever as arXiv 2410.01651 runs it.

    The defaults are the second paper's sizes with the retriever of the first. RPT-Contriever is
    ``retriever="encoder"``; the first paper's RPT has ``continuation``, ``neighbour_augmentation`` and
    ``neighbour_gate`` and reads 2 chunks.

    Args:
        num_lower_layers: layers before the retriever; None is half.
        chunk_size: S tokens.
        num_retrieved_chunks: K. 0: retrieval is off. Every token reads what a text's first tokens read, the null key
            alone; no chunk is encoded or kept, no embedder asked. Refused in training.
        num_encoder_layers: bidirectional layers over a chunk's lower states, once per chunk.
        cross_attention_every: of the upper layers, the first and every so manieth after it reads. 1: all.
        continuation: read each selected chunk together with the chunk after it, 2 S tokens.
        neighbour_augmentation: what was selected attends to itself and to the chunk that asks, before it is read.
        neighbour_gate: scale each selected chunk by a learned number from 0.1 to 1 before it is read.
        retriever: "learned": queries and keys of lower states, trained by the ranking loss alone, from
            ``neighbours`` with ``neighbour_scores``. "encoder": a frozen encoder's, online (the model's attribute
            ``embedder``) or beforehand (``neighbours``, from a table).
        exclude_visible_chunks: do not select chunks that the window shows whole to the last token that reads.
        embedder: spec of that encoder, such as "hash" or "transformers:FOLDER", for who opens the model.
        embedder_fingerprint: of the encoder that the model was trained with; another is refused. None: any.
        ranking_weight: of the ranking loss. ranking_margin: of its hinge, in scores.
        ranking_threshold: only chunks with target scores above it are ranked above others; 0 or more.
        gold_probability: share of training texts that read the chunks with the best target scores instead of those
            that the retriever selects, at the end of training. first_gold_probability: at its beginning.
    """

    model_type = "trailmark_rpt"

    num_lower_layers: int | None = None
    chunk_size: int = 64
    num_retrieved_chunks: int = 8
    num_encoder_layers: int = 2
    cross_attention_every: int = 1
    continuation: bool = False
    neighbour_augmentation: bool = False
    neighbour_gate: bool = False
    retriever: Literal["learned", "encoder"] = "learned"
    exclude_visible_chunks: bool = True
    embedder: str | None = None
    embedder_fingerprint: str | None = None
    ranking_weight: float | int = 1.0
    ranking_margin: float | int = 1.0
    ranking_threshold: float | int = 0.0
    first_gold_probability: float | int = 1.0
    gold_probability: float | int = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_lower_layers is None:
            self.num_lower_layers = self.num_hidden_layers // 2
        super().__post_init__(**kwargs)

    @property
    def has_landmarks(self) -> bool:
        return False

    @property
    def first_visible(self) -> int | None:
        """``visible`` of :mod:`trailmark.models.candidates`: the last token that reads is S - 1 after it."""
        if not self.exclude_visible_chunks:
            return None
        assert self.sliding_window is not None
        return self.chunk_size - 1 - (self.sliding_window - 1)

    @property
    def num_upper_layers(self) -> int:
        assert self.num_lower_layers is not None
        return self.num_hidden_layers - self.num_lower_layers

    @property
    def num_retrieval_groups(self) -> int:
        """All upper layers that read share one retrieval."""
        return 1

    @property
    def num_reading_layers(self) -> int:
        """Upper layers that read chunks."""
        return -(-self.num_upper_layers // self.cross_attention_every)

    def with_fewer_layers(self, count: int) -> Self:
        assert self.num_lower_layers is not None
        lower = min(self.num_lower_layers, count)
        upper = min(self.num_upper_layers, count * self.cross_attention_every)
        return _with(
            self,
            num_hidden_layers=lower + upper,
            num_lower_layers=lower,
            num_encoder_layers=min(self.num_encoder_layers, count),
        )

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for name in ("chunk_size", "cross_attention_every"):
            _expect(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _expect_count(self.num_retrieved_chunks)
        for name in ("num_encoder_layers", "ranking_weight", "ranking_margin", "ranking_threshold"):
            _expect(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name in ("first_gold_probability", "gold_probability"):
            _expect(0 <= getattr(self, name) <= 1, name, getattr(self, name), "0 to 1")
        if self.retriever != "encoder":
            for name in ("embedder", "embedder_fingerprint"):
                came = getattr(self, name)
                _expect(came is None, name, came, f"None with retriever {self.retriever!r}")
        lower = self.num_lower_layers
        _expect(
            lower is None or 0 <= lower < self.num_hidden_layers,
            "num_lower_layers",
            lower,
            f"0 to {self.num_hidden_layers - 1} (num_hidden_layers - 1: one upper layer must read)",
        )
        _expect(self.sliding_window is not None, "sliding_window", None, "a number of positions")
        self.expect_rotary_heads()


def _with(config: Config, **fields: Any) -> Config:
    """The same configuration with other values of some fields."""
    kind: Any = type(config)
    given: Any = config
    made: Config = kind.from_dict(given.to_dict() | fields)
    return made


def _expect_count(num_retrieved: int) -> None:
    _expect(num_retrieved >= 0, "num_retrieved_chunks", num_retrieved, "0 (retrieval off) or more")


def _expect(condition: bool, argument: str, came: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{argument}: expected {expected}, got {came!r}.")
