"""A teacher that reads the same texts: its predictions, and the chunks that it attends to, are learned beside the text.

The teacher is whole in every process, takes no gradient and is no part of the model: nothing of it is saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from trailmark import pretrained
from trailmark.data.corpus import tokenizer_fingerprint
from trailmark.files import read_json
from trailmark.models import MODELS, CausalLMOutput, TrailmarkConfig, short_name
from trailmark.models.text import at_columns
from trailmark.models.watching import Seen, attention_layers, watching_attention
from trailmark.ops import attention_mass, selection_divergence, token_divergence
from trailmark.ops.window.sinks import rank_in_document
from trailmark.trained import CONVERSION, base_length, trained_length
from trailmark.training.config import RunConfig
from trailmark.untrusted import read_yaml


class Told(NamedTuple):
    """What a teacher says of a micro-batch: its part of the divergences, and what they add to the loss."""

    tokens: Tensor  # of the next token, in nats
    chunks: Tensor | None  # of the retrieval's scores, in nats; None: they are not taught
    weighted: Tensor


class Teacher:
    """The model that ``distil`` names.

    Args:
        config: of the run. model_config: of the model that learns. tokenizer: of the run.

    Raises:
        ValueError: no causal language model, another tokenizer, training texts that are longer than its own were, or
            one whose attention cannot be looked at where that is to be learned.
    """

    def __init__(self, config: RunConfig, model_config: TrailmarkConfig, tokenizer: Any) -> None:
        assert config.distil.model is not None
        self.settings, self.folder = config.distil, config.distil.model
        self.dtype: torch.dtype = getattr(torch, config.training.computes_in)
        self.config = pretrained.load_config(self.folder, "distil.model")
        self.ours = self.config.model_type in MODELS
        lower = getattr(model_config, "num_lower_layers", 0)
        self.sinks = model_config.num_sinks
        self.first_upper = lower * self.config.num_hidden_layers // model_config.num_hidden_layers
        self._expect_same_tokens(model_config, tokenizer)
        self._expect_length(config.training.context_length)
        if config.data.separate_documents and not self.ours:
            raise ValueError(
                f"data.separate_documents: expected false with a teacher of transformers, which reads across "
                f"documents, got true. Convert {self.folder!r} (trailmark convert --to sliding_window), or leave it "
                "false."
            )
        if self.settings.retrieval_weight or self.settings.fit_steps:
            self._expect_attention()
        if self.settings.fit_steps:
            self._expect_like(model_config)

    def _expect_same_tokens(self, model_config: TrailmarkConfig, tokenizer: Any) -> None:
        own = tokenizer_fingerprint(tokenizer)
        theirs = getattr(self.config, "tokenizer_fingerprint", None)
        if theirs is None:
            theirs = tokenizer_fingerprint(pretrained.load_tokenizer(self.folder, "distil.model"))
        if theirs != own:
            raise ValueError(
                f"distil.model: expected a teacher with the run's tokenizer ({own[:16]}), {self.folder!r} has another "
                f"({theirs[:16]}). Set data.tokenizer to its folder, or choose another teacher."
            )
        if (size := self.config.get_text_config().vocab_size) != model_config.vocab_size:
            raise ValueError(
                f"distil.model: expected a teacher with the model's vocabulary of {model_config.vocab_size} tokens, "
                f"{self.folder!r} has {size}. Set model.vocab_size to that."
            )

    def _expect_length(self, length: int) -> None:
        folder = Path(self.folder)
        trained = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        if trained is None:
            trained = base_length(read_json(folder / CONVERSION))
        if trained is None and (run := folder / "run.yaml").is_file():
            trained = trained_length(self.config.to_dict(), read_yaml(run, "distil.model"), None)
        if trained is not None and length > trained:
            raise ValueError(
                f"training.context_length: expected at most the {trained} tokens that the teacher {self.folder!r} was "
                f"trained for, got {length}: beyond them it knows no better."
            )

    def _expect_attention(self) -> None:
        if not self.ours or self.config.keeps_chunks or self.config.sliding_window is not None:
            raise ValueError(
                f"distil.model: expected a model of trailmark's with full attention with distil.retrieval_weight or "
                f"distil.fit_steps, {self.folder!r} is another. Convert its base with trailmark convert --to "
                "sliding_window."
            )

    def _expect_like(self, model_config: TrailmarkConfig) -> None:
        """That the memory of such a model can be fitted to the teacher's layers."""
        if not model_config.reads_beside_window:
            raise ValueError(
                f"distil.fit_steps: expected 0 for {short_name(model_config.model_type)} as it is configured, whose "
                f"layers do not read as they attend, got {self.settings.fit_steps}. A drt with virtual_key 'window' "
                "does, as trailmark convert makes it."
            )
        for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"):
            own, theirs = getattr(model_config, name), getattr(self.config, name)
            if own != theirs:
                raise ValueError(
                    f"distil.model: expected a teacher with the model's {name} {own} with distil.fit_steps, "
                    f"{self.folder!r} has {theirs}. Take the base that the model was converted from, or leave the "
                    "steps out."
                )

    @cached_property
    def model(self) -> Any:
        """Loaded when it is first asked; it learns nothing."""
        model, found = pretrained.load_model(
            AutoModelForCausalLM, self.config, self.folder, "distil.model", dtype=self.dtype
        )
        if missing := sorted(found["missing_keys"]):
            raise ValueError(
                f"distil.model: expected the weights of a whole causal language model, {self.folder!r} lacks "
                f"{len(missing)}: {missing[0]} ..."
            )
        if self.settings.retrieval_weight:
            assert len(attention_layers(model)) == self.config.num_hidden_layers
        return model.eval().requires_grad_(False)

    def parameters(self) -> int:
        """How many numbers it has; nothing is loaded."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config)
        return sum(parameter.numel() for parameter in model.parameters())

    def lesson(self, share: float) -> Lesson:
        """What it teaches at a step, ``share`` of the run (0 to 1) being done."""
        return Lesson(self, self.settings.weight, self.settings.retrieval_weight * (1 - share))

    @torch.no_grad()
    def read(
        self, inputs: dict[str, Tensor], at: Tensor | None, chunks: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Its logits of a micro-batch, and where its upper layers look.

        Args:
            at: int64 [B, n] the tokens whose logits are wanted; None: of all.
            chunks: int64 [B, T] the chunk of each token; None: nobody asks where it looks.

        Returns:
            [B, T or n, V], and [B, N, N]: what the tokens of a chunk put on each chunk, over layers and heads, the
            model's sinks apart.
        """
        model = self.model.to(inputs["input_ids"].device)
        named: dict[str, Any] = {
            key: inputs[key] for key in ("attention_mask", "document_ids") if key in inputs
        }
        if at is not None and self.ours:
            named["logits_at"] = at
        mass: list[Tensor] = []
        if chunks is not None:
            chunks = self.sinks_first(chunks, named.get("document_ids"))

        def see(seen: Seen) -> None:
            if chunks is None or seen.layer < self.first_upper:
                return
            width = seen.q.shape[1]  # padding at the end of every row is left out
            documents = named.get("document_ids")
            own = None if documents is None else documents[:, :width]
            looks = attention_mass(seen.q, seen.k, chunks[:, :width], seen.window, own)
            mass[:] = [mass[0] + looks] if mass else [looks]

        if chunks is None:
            logits = model(input_ids=inputs["input_ids"], use_cache=False, **named).logits
        else:
            with watching_attention(model, see):
                logits = model(input_ids=inputs["input_ids"], use_cache=False, **named).logits
        if at is not None and not self.ours:
            logits = at_columns(logits, at)
        return logits, mass[0][:, 1:, 1:] if mass else None

    def sinks_first(self, chunks: Tensor, documents: Tensor | None) -> Tensor:
        """Chunks counted from 1, and chunk 0: the first tokens of each document, which the model sees anyway.

        There attention looks where it looks for nothing, more than at all else.
        """
        documents = torch.zeros_like(chunks) if documents is None else documents
        sinks = rank_in_document(documents) < self.sinks
        return torch.where(chunks < 0, chunks, (chunks + 1).masked_fill(sinks, 0))


@dataclass(frozen=True)
class Lesson:
    """What a teacher teaches at one step."""

    teacher: Teacher
    weight: float
    retrieval_weight: float

    @property
    def ranks_chunks(self) -> bool:
        """Whether the model is to return all its scores."""
        return self.teacher.settings.retrieval_weight > 0

    def tell(
        self,
        inputs: dict[str, Tensor],
        out: CausalLMOutput,
        weights: Tensor,
        at: Tensor | None,
        total: Tensor,
        rows: int,
    ) -> Told:
        """Compare what a call gave with the teacher's reading of the same micro-batch.

        Args:
            weights: [B, T or n] of the tokens' losses. at: int64 [B, n] the tokens that bear one; None: all.
            total: what weighted sums are divided by. rows: of the global batch.
        """
        assert out.logits is not None
        own = out.retrieval_scores if self.ranks_chunks else None  # a log may have asked for them
        logits, mass = self.teacher.read(inputs, at, None if own is None else own.chunks)
        losses = token_divergence(logits, out.logits)
        tokens = (losses * weights).masked_fill(weights == 0, 0).sum() / total.to(losses.dtype).clamp(
            min=1e-9
        )
        weighted = self.weight * tokens
        if own is None:
            return Told(tokens, None, weighted)
        assert mass is not None
        targets = chunk_targets(
            mass, own.scores[0].shape[-1], self.teacher.settings.retrieval_from == "reading"
        )
        of_groups = [selection_divergence(scores, targets).sum() / rows for scores in own.scores]
        chunks = torch.stack(of_groups).mean()
        return Told(tokens, chunks, weighted + self.retrieval_weight * chunks)


def chunk_targets(mass: Tensor, closed: int, reading: bool) -> Tensor:
    """Where the landmark of each closed chunk is to look [B, C, C], from what chunks put on chunks, mass [B, N, N].

    ``reading``: as the chunk after it did, which reads what it selects, and where nothing follows nowhere; else as the
    chunk itself did.
    """
    asking = mass[:, 1:] if reading else mass
    targets = asking[:, :closed, :closed]
    return F.pad(targets, (0, 0, 0, closed - targets.shape[1]))
