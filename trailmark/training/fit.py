"""Before the first step: a memory whose keys, values and landmark vectors are fitted to a teacher's layers.

A memory keeps what a projection makes of the lower layers' states; a teacher with full attention has keys and values
of its own in each layer. The best linear projection from one to the other is found at once, by least squares, where
steps of a gradient would need a great many. A token counts by how much the teacher's later tokens look at it from where
the window does not reach: most are never looked at again.

Which chunks the teacher's tokens look at is known from the same reading. The retriever's projections learn it in many
cheap steps, from what they multiply alone: no layer runs for them. Or they are set from the texts alone
(:mod:`trailmark.training.next_chunk`).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trailmark.models.watching import Seen, attention_layers, watching_attention
from trailmark.ops import attention_mass, score_chunks, selection_divergence
from trailmark.processes import all_reduced, rank, world_size
from trailmark.training.distil import Teacher, chunk_targets
from trailmark.training.loss import LAYOUT
from trailmark.training.next_chunk import NextChunk

# of the mean of the states' squares: states of few texts do not span the width
_RIDGE = 1e-3
# how much a token counts that nobody looks at from afar, where the mean of a text's tokens is this and 1
_LEAST = 0.1
# of the retriever: how often it sees each text, and how fast it learns
_EPOCHS = 10
_LEARNING_RATE = 1e-3


class Fitted(NamedTuple):
    """What a fit came to."""

    found: float
    """The share of the keys' and values' squares that is found in the states, as tokens count."""
    tokens: int
    """That it was fitted to."""
    chunks: float | None
    """Nats per landmark between the scores and where the teacher looks; None: nothing was taught."""


class _Text(NamedTuple):
    """What the retriever learns from a micro-batch."""

    summaries: Tensor  # [B, C, E]
    landmarks: list[Tensor]  # of each group, [B, C, E]
    first: Tensor  # int64 [B, C]: where the candidates begin
    end: Tensor  # int64 [B, C]: and end
    targets: Tensor  # [B, C, C]


class MemoryFit:
    """Sums over training texts that the projection is solved from, and what the retriever learns from.

    Args:
        model: answers ``fitted_memory``, in evaluation. teacher: ours, with full attention and the same heads.
        retriever: what the model's is set to; see ``distil.fit_retriever``.

    Raises:
        ValueError: the model reads already, or has no retriever that texts could set.
    """

    def __init__(self, model: Any, teacher: Teacher, retriever: str = "teacher") -> None:
        self.model, self.settings, self.teacher = model, teacher, teacher.model.to(model.device)
        self.memory = model.fitted_memory()
        self.retrievers = [] if retriever == "nothing" else self.memory.retrievers
        self.teaches = retriever == "teacher" and bool(self.retrievers)
        self.next_chunk = None
        if retriever == "text":
            if not self.retrievers:
                raise ValueError(
                    "distil.fit_retriever: expected teacher or nothing for a model whose scores are not learned, got "
                    "text. Take a DRT with retriever causal, retrieval_projections and retrieval_query landmark."
                )
            self.next_chunk = NextChunk(self.memory.summaries, [own.q_proj for own in self.retrievers])
        if self.memory.reads:
            raise ValueError(
                "distil.fit_steps: expected 0 for a model whose layers read already, which a fit would set anew, got "
                "more. Leave it out, or begin with what trailmark convert made."
            )
        low = teacher.dtype.itemsize < 4
        self.autocast = torch.autocast(model.device.type, dtype=teacher.dtype if low else None, enabled=low)
        layers = attention_layers(self.teacher)
        self.layers = [layers[number] for number in self.memory.layers]
        L, E = len(self.layers), self.memory.projection.in_features
        F = self.memory.projection.out_features // L
        # of each layer, of states x [n, E] and wanted keys and values y [n, F]: x^T w x, x^T w y, w y^2; and n
        self.states, self.both, self.squares, self.rows = (
            torch.zeros(size, dtype=torch.float64, device=model.device)
            for size in ((L, E, E), (L, E, F), (L, F), ())
        )
        self.texts: list[_Text | None] = []  # None: one without a whole chunk

    @torch.no_grad()
    def add(self, batch: dict[str, Tensor]) -> None:
        """Read one batch with both."""
        inputs = {key: x.to(self.model.device) for key, x in batch.items()}
        ids, documents = inputs["input_ids"], inputs.get("document_ids")
        B, T = ids.shape
        known: dict[Any, Any] = {}

        def keep(name: Any) -> Any:
            def see(_: nn.Module, arguments: tuple[Any, ...]) -> None:
                known[name] = arguments[0]

            return see

        def see_chunks(_: nn.Module, arguments: tuple[Any, ...], entries: Any) -> None:
            known["grid"], known["lengths"] = arguments[1], entries.lengths

        # nobody asks for logits
        call = {"use_cache": False, "logits_at": ids.new_zeros(B, 1)}
        with ExitStack() as hooks, self.autocast:
            hooks.enter_context(self.memory.projection.register_forward_pre_hook(keep("states")))
            hooks.enter_context(self.memory.summaries.register_forward_pre_hook(keep("summaries")))
            for group, retriever in enumerate(self.retrievers):
                asked = retriever if self.teaches else retriever.q_proj
                hooks.enter_context(asked.register_forward_pre_hook(keep(group)))
            hooks.enter_context(self.memory.encoder.register_forward_hook(see_chunks))
            layout = {key: inputs[key] for key in LAYOUT if key in inputs}
            scored = self.model.config.ranks_all_chunks
            out = self.model(input_ids=ids, output_retrieval_scores=scored, **layout, **call)
        if "states" not in known:  # no chunk is whole
            self.texts.append(None)
            return
        if scored:
            chunks = out.retrieval_scores.chunks
        else:
            chunks = (torch.arange(T, device=ids.device) // self.model.config.chunk_size).expand(B, T)

        wanted: list[Tensor] = []  # of each layer keys and values side by side, [B, T, 2 * J * D]
        counts: list[Tensor] = []  # and how much a token counts, [B, T]
        looks: list[Tensor] = []  # [B, N, N] where chunks look, over the upper layers
        # chunk 0 is of the tokens that the model sees wherever its window stands
        places = self.settings.sinks_first(chunks, documents)
        of_chunk = nn.functional.one_hot(places + 1)[..., 1:].to(torch.float32)  # [B, T, N]

        def see_keys(layer: Any, arguments: tuple[Any, ...]) -> None:
            _, k, v = layer.heads(arguments[0])
            wanted.append(torch.cat([k.flatten(2), v.flatten(2)], dim=2))

        def see_looks(seen: Seen) -> None:
            if seen.layer < self.settings.first_upper:
                return
            mass = attention_mass(seen.q, seen.k, places, None, documents, on_tokens=True)  # [B, N, T]
            if seen.layer in self.memory.layers:
                counts.append(self._counts(mass, places))
            if self.teaches:
                on_chunks = mass @ of_chunk.to(mass.dtype)
                looks[:] = [looks[0] + on_chunks] if looks else [on_chunks]

        with ExitStack() as hooks:
            for layer in self.layers:
                hooks.enter_context(layer.register_forward_pre_hook(see_keys))
            hooks.enter_context(watching_attention(self.teacher, see_looks))
            self.teacher(input_ids=ids, document_ids=documents, **call)
        self._take(known["states"], wanted, counts, known["grid"], known["lengths"])
        if self.next_chunk is not None:
            begins = known["grid"].begins_document_on(ids.device)
            shape = known["lengths"].shape
            follows = known["lengths"].new_ones(shape, dtype=torch.bool)
            if begins is not None:
                follows = ~begins[:, : shape[1], 0].expand(shape)
            asking = [known[group] for group in range(len(self.retrievers))]
            self.next_chunk.add(known["summaries"], asking, known["lengths"] > 0, follows)
        if self.teaches:
            self._keep(known, out.retrieval_scores.scores[0] > -torch.inf, looks[0][:, 1:, 1:])

    def _counts(self, mass: Tensor, chunks: Tensor) -> Tensor:
        """How much each token counts [B, T], by what chunks put on it [B, N, T] that do not see it in their windows."""
        place = torch.arange(chunks.shape[1], device=chunks.device)
        begins = torch.full(mass.shape[:2], len(place), device=chunks.device)
        begins.scatter_reduce_(1, chunks.clamp(min=0), place.expand_as(chunks), "amin")
        far = begins[..., None] - place >= self.model.config.sliding_window  # [B, N, T]
        looks = (mass * far).sum(1).masked_fill(chunks <= 0, 0)
        mean = looks.mean(1, keepdim=True)
        return _LEAST + looks / mean.masked_fill(mean == 0, 1)

    def _take(
        self, states: Tensor, wanted: list[Tensor], counts: list[Tensor], grid: Any, lengths: Tensor
    ) -> None:
        """States [B, C, S, E] of the chunks' tokens, and what each layer has of the text's tokens."""
        B, C, S, _ = states.shape
        there = torch.arange(S, device=states.device) < lengths[..., None]
        x = _wide(states)[there]  # [n, E]
        self.rows += len(x)

        def in_chunks(of_tokens: Tensor) -> Tensor:  # [B, T, F] -> [n, F]
            rows = grid.encoder_rows(grid.insert_landmarks(_wide(of_tokens), None))
            return rows.view(B, C, S + 1, -1)[:, :, :-1][there]

        for number, (own, count) in enumerate(zip(wanted, counts, strict=True)):
            y, counted = in_chunks(own), in_chunks(count[..., None])
            weighted = (counted * x).mT
            self.states[number] += (weighted @ x).double()
            self.both[number] += (weighted @ y).double()
            self.squares[number] += (counted * y.square()).sum(0).double()

    def _keep(self, known: dict[Any, Any], candidate: Tensor, mass: Tensor) -> None:
        """What the retriever learns from; ``candidate`` [B, C, C], the mass [B, N, N] of the text's chunks."""
        C = candidate.shape[-1]
        landmarks = [_wide(known[group]) for group in range(len(self.retrievers))]
        first = candidate.long().argmax(-1)  # they stand beside each other
        targets = chunk_targets(mass, C, self.settings.settings.retrieval_from == "reading")
        self.texts.append(
            _Text(_wide(known["summaries"]), landmarks, first, first + candidate.sum(-1), targets)
        )

    @torch.no_grad()
    def solve(self) -> Fitted:
        """Set the projection, set or teach the retriever, and let each layer read.

        Raises:
            ValueError: the texts have no whole chunk.
        """
        for sums in (self.states, self.both, self.squares, self.rows):
            all_reduced(sums)
        if not self.rows:
            raise ValueError(
                "distil.fit_steps: expected texts with whole chunks to fit the memory to, got none. Set "
                "training.context_length higher."
            )
        mean = self.states.diagonal(dim1=1, dim2=2).mean(1)
        ridge = _RIDGE * mean[:, None, None] * torch.eye(self.states.shape[1]).to(self.states)
        found = torch.linalg.solve(self.states + ridge, self.both)  # [L, E, F]
        # in the projection the keys of all layers come first
        rows = found.unflatten(2, (2, -1)).permute(2, 0, 3, 1).flatten(0, 2)
        self.memory.projection.weight.copy_(rows)
        if self.next_chunk is not None:
            self.next_chunk.solve()
        chunks = self._teach() if self.teaches else None
        self.model.read_as_attended()
        left = self.squares - 2 * (found * self.both).sum(1) + (found * (self.states @ found)).sum(1)
        return Fitted(float(1 - left.sum() / self.squares.sum()), int(self.rows), chunks)

    @torch.enable_grad()
    def _teach(self) -> float:
        """Teach the retriever a text a step, those of all processes in turn; the mean divergence of the last epoch.

        What groups after the first ask with was kept while nothing was read yet.
        """
        parts = [self.memory.summaries, *self.retrievers]
        parameters = [parameter for part in parts for parameter in part.parameters()]
        learns = [parameter.requires_grad for parameter in parameters]
        for parameter in parameters:
            parameter.requires_grad_(True)
        adam = torch.optim.Adam(parameters, lr=_LEARNING_RATE)
        count = int(all_reduced(torch.tensor(len(self.texts), device=self.model.device)))
        draw, losses = torch.Generator().manual_seed(0), torch.zeros(count, device=self.model.device)
        for _ in range(_EPOCHS):
            for number in torch.randperm(count, generator=draw).tolist():
                gradients = [torch.zeros_like(parameter) for parameter in parameters]
                losses[number] = 0
                mine = number % world_size() == rank()
                if mine and (text := self.texts[number // world_size()]):
                    loss = self._divergence(text)
                    found = torch.autograd.grad(loss, parameters, allow_unused=True)
                    gradients = [
                        none if own is None else own for own, none in zip(found, gradients, strict=True)
                    ]
                    losses[number] = loss.detach()
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = all_reduced(gradient)
                adam.step()
        for parameter, before in zip(parameters, learns, strict=True):
            parameter.grad = None
            parameter.requires_grad_(before)
        return float(all_reduced(losses).mean())

    def _divergence(self, text: _Text) -> Tensor:
        memory, keys = self.memory, self.memory.landmark_vectors(text.summaries)
        of_groups = []
        for retriever, landmarks in zip(self.retrievers, text.landmarks, strict=True):
            query = retriever(landmarks)
            scores = score_chunks(query, keys, text.end, text.first, memory.score_scale, memory.recency)
            of_groups.append(selection_divergence(scores, text.targets).mean())
        return torch.stack(of_groups).mean()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
