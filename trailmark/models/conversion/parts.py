"""Of which tensors of a pretrained model each of ours is made; what a model has beside them is new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trailmark.models.conversion.base import Base
from trailmark.models.rope import attention_factor, inverse_frequencies, rope_of

Read = Callable[[str], Tensor]
"""Gives the tensor of a name."""


@dataclass(frozen=True)
class Part:
    """One tensor of a model of ours."""

    sources: tuple[str, ...]
    """The tensors that it is made of."""
    make: Callable[[Read], Tensor]
    permuted: bool = False
    """Whether rows changed places."""
    start: str | None = None
    """How it begins, of one that the base has not; None: it is the base's own."""
    learned: str | None = None
    """What a training made of it: "learned", all of it, or "adapted", a change that was added."""

    @property
    def what(self) -> str:
        """How it comes from the base, in a word of KINDS."""
        if self.learned is not None:
            return self.learned
        return "new" if self.start is not None else "permuted" if self.permuted else "copied"


KINDS = ("copied", "permuted", "new", "adapted", "learned")


Parts = dict[str, Part]
"""By the names of our tensors."""


def to_neighbours(rows: Tensor, head_dim: int) -> Tensor:
    """Rows [heads * D, ...] of q or k, or of their norm, from transformers' order to ours.

    RoPE turns pairs: there f and f + D / 2, here neighbours, so that new 2f is old f and new 2f + 1 is old f + D / 2.
    """
    parted = rows.unflatten(0, (-1, 2, head_dim // 2))  # [heads, 2, D / 2, ...]
    return parted.transpose(1, 2).flatten(0, 2)


def from_neighbours(rows: Tensor, head_dim: int) -> Tensor:
    """The other way."""
    parted = rows.unflatten(0, (-1, head_dim // 2, 2))
    return parted.transpose(1, 2).flatten(0, 2)


def own(name: str) -> Part:
    """The base's, as it is."""
    return Part((name,), lambda read: read(name))


def joined(*names: str) -> Part:
    """The rows of several, one below the other."""
    return Part(names, lambda read: torch.cat([read(name) for name in names]))


def filled(value: float, size: tuple[int, ...], start: str) -> Part:
    """New, with one value everywhere."""
    return Part((), lambda read: torch.full(size, value), start=start)


def identity(width: int, start: str) -> Part:
    return Part((), lambda read: torch.eye(width), start=start)


def drawn(size: tuple[int, int], seed: int) -> Part:
    """New, a matrix that keeps what it multiplies about as large."""

    def make(read: Read) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(size, generator=generator) * size[1] ** -0.5

    return Part((), make, start="drawn")


def begun(part: Part, start: str) -> Part:
    """New, with values of the base."""
    return Part(part.sources, part.make, part.permuted, start)


def outside_layers(base: Base) -> Parts:
    """Embedding, last norm and vocabulary's projection."""
    parts = {"embed_tokens.weight": own("model.embed_tokens.weight"), "norm.weight": own("model.norm.weight")}
    if not base.config.tie_word_embeddings:
        parts["lm_head.weight"] = own("lm_head.weight")
    return parts


def layer(base: Base, number: int, prefix: str) -> Parts:
    """A layer with attention and MLP, under the names of ours that begin with ``prefix``."""
    theirs = f"model.layers.{number}"
    return {
        f"{prefix}.attention_norm.weight": own(f"{theirs}.input_layernorm.weight"),
        **_attention(base, f"{theirs}.self_attn", f"{prefix}.attention"),
        f"{prefix}.mlp_norm.weight": own(f"{theirs}.post_attention_layernorm.weight"),
        f"{prefix}.mlp.gate_up_proj.weight": joined(
            f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight"
        ),
        f"{prefix}.mlp.down_proj.weight": own(f"{theirs}.mlp.down_proj.weight"),
    }


def _attention(base: Base, theirs: str, ours: str) -> Parts:
    head_dim = head_size(base)

    def turned(name: str) -> Part:
        return Part((name,), lambda read: to_neighbours(read(name), head_dim), permuted=True)

    def rows(kind: str) -> Part:
        names = tuple(f"{theirs}.{part}_proj.{kind}" for part in "qkv")

        def make(read: Read) -> Tensor:
            q, k, v = map(read, names)
            return torch.cat([to_neighbours(q, head_dim), to_neighbours(k, head_dim), v])

        return Part(names, make, permuted=True)

    parts = {
        f"{ours}.qkv_proj.weight": rows("weight"),
        f"{ours}.o_proj.weight": own(f"{theirs}.o_proj.weight"),
    }
    if base.tells.attention_bias:
        parts[f"{ours}.qkv_proj.bias"] = rows("bias")
    if base.tells.qk_norm is not None:
        for part in "qk":
            parts[f"{ours}.{part}_norm.weight"] = turned(f"{theirs}.{part}_norm.weight")
    return parts


def head_size(base: Base) -> int:
    """D."""
    found: int = base.fields.get("head_dim") or base.config.hidden_size // base.config.num_attention_heads
    return found


def after_norms(keys: Sequence[tuple[str, str]], values: Sequence[tuple[str, str]], base: Base) -> Part:
    """The rows of k of several layers, then those of v, each of what its own norm, of weight [E], makes of states."""
    head_dim = head_size(base)

    def make(read: Read) -> Tensor:
        rows = [to_neighbours(read(rows), head_dim) * read(norm) for rows, norm in keys]
        return torch.cat(rows + [read(rows) * read(norm) for rows, norm in values])

    return Part(tuple(name for pair in (*keys, *values) for name in pair), make, permuted=True)


def diagonal(part: Part, start: str) -> Part:
    """New, a square matrix of a vector."""
    return Part(part.sources, lambda read: torch.diag(part.make(read)), start=start)


def turned_by(name: str, base: Base, distance: int) -> Part:
    """The rows of q, so that its product with a key without positions is that with one ``distance`` positions back."""
    head_dim, scaling = head_size(base), base.fields.get("rope_scaling")
    angle = distance * inverse_frequencies(head_dim, rope_of(base.fields["rope_theta"], scaling))
    factor = attention_factor(scaling) ** 2  # of queries and keys

    def make(read: Read) -> Tensor:
        rows = read(name)
        first, second = rows.double().unflatten(0, (-1, 2, head_dim // 2)).unbind(1)  # [heads, D / 2, E]
        cos, sin = (turn[:, None] * factor for turn in (angle.cos(), angle.sin()))
        # neighbours, as keys have them
        turned = torch.stack([cos * first - sin * second, sin * first + cos * second], dim=2)
        return turned.flatten(0, 2).to(rows.dtype)

    return Part((name,), make, permuted=True)


def mean_embedding(start: str) -> Part:
    """New, the mean [E] of the embedding's rows."""
    name = "model.embed_tokens.weight"

    def make(read: Read) -> Tensor:
        x = read(name)
        parts = x.split(4096)  # wider numbers of all of it would be the largest thing that a conversion holds
        return sum(part.sum(0, dtype=torch.float64) for part in parts).div_(len(x)).to(x.dtype)

    return Part((name,), make, start=start)
