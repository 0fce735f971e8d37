"""The configuration of the Block-Recurrent Transformer."""

# No ``from __future__ import annotations`` here: ``strict`` does not check types that are written as strings.

from typing import Any, Literal, Self

from trailmark.models.configuration import Filled, TrailmarkConfig, checked, expect, with_fields


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
    no_arithmetic = frozenset({"truncation_blocks"})

    block_size: Filled = None  # type: ignore[assignment]
    num_states: Filled = None  # type: ignore[assignment]
    recurrent_layer: Filled = None  # type: ignore[assignment]
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
        below = min(self.recurrent_layer - 1, count)
        above = min(self.num_hidden_layers - self.recurrent_layer, count)
        return with_fields(self, num_hidden_layers=below + 1 + above, recurrent_layer=below + 1)

    def validate_architecture(self) -> None:
        super().validate_architecture()
        self.expect_own_attention()
        expect(self.sliding_window is not None, "sliding_window", None, "a number of positions")
        for name in ("block_size", "num_states"):
            number = getattr(self, name)
            expect(number is None or number >= 1, name, number, "None or at least 1")
        layer = self.recurrent_layer
        expect(
            layer is None or 1 <= layer <= self.num_hidden_layers,
            "recurrent_layer",
            layer,
            f"1 to {self.num_hidden_layers} (num_hidden_layers), or None",
        )
        blocks = self.truncation_blocks
        expect(
            blocks is None or blocks >= 2,
            "truncation_blocks",
            blocks,
            "None or at least 2 (with 1 nothing that writes the states would learn)",
        )
