"""Embedders that read text: encoders of transformers and of sentence-transformers, frozen.

A row's vector is computed in a batch of a fixed number of rows, padded to a width that its own number of tokens alone
decides: what else is in the batch changes no shape. A BLAS that computes the rows of one product in different ways by
their place may still leave the last bits to it (the tests find equal bits on the CPUs they ran on), and another device
or version of torch rounds otherwise under the same fingerprint.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from trailmark import pretrained
from trailmark.data.corpus import tokenizer_fingerprint, vocabulary_size
from trailmark.data.neighbours.token_embedders import as_arrays, fingerprint_of
from trailmark.network import from_pretrained_options
from trailmark.untrusted import first_line

logger = logging.getLogger(__name__)

_STEP = 32  # widths are multiples of it
_LONGEST = 8192  # encoder tokens, where neither its tokenizer nor its configuration says
# what transformers raises where a folder's files cannot be read, or do not fit each other
BROKEN = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)
_ON_CPU, _ON_GPU = 8, 64  # rows of a batch
_MEANINGLESS = (
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "architectures",
    "_commit_hash",
)


class TextEmbedder:
    """What both kinds share: tokens -> text -> the encoder's own tokens -> batches -> unit vectors."""

    kind: str
    size: int
    fingerprint: str

    def __init__(self, name: str, tokenizer: Any, device: torch.device) -> None:
        self.spec = f"{self.kind}:{name}"
        self.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)
        self._decoder, self._known, self._device = tokenizer, vocabulary_size(tokenizer), device
        self._rows = _ON_CPU if self._device.type == "cpu" else _ON_GPU
        self._own: Any = None  # the encoder's tokenizer
        self._longest, self._warned = _LONGEST, False

    def __call__(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Unit vectors [n, d], the same for queries and keys."""
        tokens, own = as_arrays(ids, lengths)
        texts = [
            self._decoder.decode(
                # a model with a larger vocabulary may generate tokens past the text's, which are no text
                [token for token in row[:count] if token < self._known],
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
            for row, count in zip(tokens.tolist(), own.tolist(), strict=True)
        ]
        vectors = self.embed(texts)
        return vectors, vectors

    def embed(self, texts: list[str]) -> Tensor:
        """Make unit vectors [n, d] float32 of texts; what is longer than the encoder takes is cut, with one warning."""
        out = torch.zeros(len(texts), self.size)
        if not texts:
            return out
        encoded = self._own(texts, truncation=True, max_length=self._longest)
        rows = [{name: encoded[name][n] for name in encoded} for n in range(len(texts))]
        counts = [len(row["input_ids"]) for row in rows]
        self._warn_of_cut(texts, counts)
        by_width: dict[int, list[int]] = {}
        for n, count in enumerate(counts):
            by_width.setdefault(min(self._longest, -(-max(count, 1) // _STEP) * _STEP), []).append(n)
        for width, numbers in by_width.items():
            for first in range(0, len(numbers), self._rows):
                some = numbers[first : first + self._rows]
                batch = [rows[n] for n in some]
                # the last one again: shapes are always the same
                batch += [batch[-1]] * (self._rows - len(batch))
                features = self._own.pad(batch, padding="max_length", max_length=width, return_tensors="pt")
                with torch.inference_mode(), torch.autocast(self._device.type, enabled=False):
                    vectors = self._vectors({k: v.to(self._device) for k, v in features.items()})
                out[some] = F.normalize(vectors.float(), dim=-1)[: len(some)].cpu()
        if not out.isfinite().all():
            raise ValueError(
                f"embedder: expected finite vectors, {self.spec!r} gives others. Its weights are broken."
            )
        return out

    def _vectors(self, features: dict[str, Tensor]) -> Tensor:
        """[n, d] of a padded batch."""
        raise NotImplementedError

    def _warn_of_cut(self, texts: list[str], counts: list[int]) -> None:
        if self._warned:
            return
        for text, count in zip(texts, counts, strict=True):
            if count == self._longest and len(self._own(text, verbose=False)["input_ids"]) > count:
                logger.warning(
                    "%s: a chunk's text is longer than the %d tokens that the encoder takes; what is past them is not "
                    "seen. There may be more such chunks.",
                    self.spec,
                    self._longest,
                )
                self._warned = True
                return

    def _take_tokenizer(self, tokenizer: Any, *longest: int | None) -> None:
        if tokenizer is not None and not has_words(tokenizer):
            raise no_encoder(self.spec, ValueError("there is no tokenizer"))
        if tokenizer is None or tokenizer.pad_token_id is None:
            raise ValueError(
                f"embedder: expected an encoder whose tokenizer has a padding token, {self.spec!r} has none. "
                "Give its tokenizer one (pad_token) and save it again."
            )
        self._own = tokenizer
        # advice that is not for users
        self._own.deprecation_warnings["Asking-to-pad-a-fast-tokenizer"] = True
        limits = (tokenizer.model_max_length, *longest, _LONGEST)
        self._longest = int(min(limit for limit in limits if limit))

    def _describe(self, model: torch.nn.Module, config: Any, *more: Any) -> str:
        """The fingerprint: weights, configuration, the encoder's tokenizer and special tokens, the other tokenizer."""
        settings = {name: v for name, v in sorted(config.to_diff_dict().items()) if name not in _MEANINGLESS}
        empty = self._own("")["input_ids"]
        tokenizers = tokenizer_fingerprint(self._own), empty, self._longest, self.tokenizer_fingerprint
        parts = (weights_sha256(model), settings, *tokenizers, *more)
        return fingerprint_of(self.kind, 1, *(str(part) for part in parts))


class TransformersEmbedder(TextEmbedder):
    """The mean of an encoder's last hidden states over its tokens, at length 1: what Contriever is."""

    kind = "transformers"

    def __init__(self, name: str, tokenizer: Any, device: torch.device) -> None:
        """``name``: a folder, used without the network, or a hub name.

        Raises:
            ValueError: no encoder there, weights that are missing, a tokenizer without padding.
        """
        from transformers import AutoModel

        super().__init__(name, tokenizer, device)
        local = expect_encoder(self.spec, name)
        try:
            own = pretrained.load_tokenizer(name, "embedder", local_files_only=local)
            config = pretrained.load_config(name, "embedder", local_files_only=local)
            model, info = pretrained.load_model(
                AutoModel, config, name, "embedder", local_files_only=local, dtype=torch.float32
            )
        except BROKEN as error:
            raise no_encoder(self.spec, error) from error
        if missing := sorted(key for key in info["missing_keys"] if not _is_pooler(key)):
            raise ValueError(
                f"embedder: expected the weights of a whole encoder, {self.spec!r} lacks {', '.join(missing[:3])}"
                f"{' ...' if len(missing) > 3 else ''}. Save the encoder again, or name another one."
            )
        if model.config.is_encoder_decoder:
            raise ValueError(
                f"embedder: expected an encoder, {self.spec!r} is an encoder with a decoder. Name another one, or use "
                f"sentence-transformers:{name}."
            )
        self._model = model.eval().requires_grad_(False).to(self._device)
        self.size = int(model.config.hidden_size)
        self._take_tokenizer(own, getattr(model.config, "max_position_embeddings", None))
        self.fingerprint = self._describe(model, model.config)

    def _vectors(self, features: dict[str, Tensor]) -> Tensor:
        hidden = self._model(**features).last_hidden_state  # [n, width, d]
        mask = features["attention_mask"][..., None]
        return hidden.masked_fill(mask == 0, 0).sum(1) / mask.sum(1).clamp(min=1)


class SentenceTransformersEmbedder(TextEmbedder):
    """A SentenceTransformer with its own pooling (the mean where it says nothing), at length 1, without prompts."""

    kind = "sentence-transformers"

    def __init__(self, name: str, tokenizer: Any, device: torch.device) -> None:
        """``name``: a folder, used without the network, or a hub name.

        Raises:
            ValueError: sentence-transformers is not installed; no encoder there; one without a transformer.
        """
        super().__init__(name, tokenizer, device)
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ValueError(
                f"embedder: {self.spec!r} needs sentence-transformers, which cannot be imported ({error}). "
                f"pip install 'trailmark[encoders]', or use transformers:{name}."
            ) from error
        local = expect_encoder(self.spec, name)
        theirs = logging.getLogger("sentence_transformers")
        level = theirs.level
        weights = {"dtype": torch.float32} | pretrained.WEIGHTS_ALONE
        try:
            theirs.setLevel(logging.ERROR)  # that a folder without modules.json gets a mean is no news here
            model = SentenceTransformer(
                name,
                device=str(self._device),
                local_files_only=local,
                model_kwargs=weights,
                **pretrained.NO_CODE,
            )
        except BROKEN as error:
            raise no_encoder(self.spec, error) from error
        finally:
            theirs.setLevel(level)
        config = getattr(model[0], "config", None)
        if not hasattr(config, "to_diff_dict"):
            raise ValueError(
                f"embedder: expected a SentenceTransformer that begins with a transformer, {self.spec!r} begins with "
                f"{type(model[0]).__name__}. Name another one."
            )
        self._model = model.eval().requires_grad_(False)
        self.size = int(model.get_embedding_dimension())
        self._take_tokenizer(
            model.tokenizer, model.max_seq_length, getattr(config, "max_position_embeddings", None)
        )
        modules = [
            (type(module).__name__, sorted(getattr(module, "get_config_dict", dict)().items(), key=str))
            for module in list(model)[1:]
        ]
        self.fingerprint = self._describe(model, config, modules)

    def _vectors(self, features: dict[str, Tensor]) -> Tensor:
        return self._model(features)["sentence_embedding"]


def expect_encoder(spec: str, name: str) -> bool:
    """Whether it is looked for on this machine alone: a folder, or a hub name without a network.

    Raises:
        ValueError: it is neither a folder nor a hub name, or one that cannot be reached.
    """
    path = Path(name)
    if not path.is_dir() and (path.exists() or name.startswith((".", "~", os.sep)) or name.count("/") > 1):
        raise ValueError(
            f"embedder: expected a folder with an encoder or a hub name, {name!r} of {spec!r} is "
            f"{'no folder' if path.exists() else 'not there'}. Name the folder that save_pretrained wrote."
        )
    return bool(from_pretrained_options(name, "embedder"))


def no_encoder(spec: str, error: Exception) -> ValueError:
    where = "" if Path(spec.partition(":")[2]).is_dir() else "no such folder; as a hub name: "
    return ValueError(
        f"embedder: expected an encoder that can be loaded, {spec!r} cannot ({where}{first_line(error)}). Name a "
        "folder with its weights, configuration and tokenizer, or a hub name where there is a network; hash and bm25 "
        "need no weights."
    )


def has_words(tokenizer: Any) -> bool:
    """Whether a tokenizer knows more than special tokens: where its files are missing, transformers makes one up."""
    return len(tokenizer.get_vocab()) > len(set(tokenizer.all_special_tokens))


def weights_sha256(model: torch.nn.Module) -> str:
    """SHA-256 of a model's names and values; without pooling layers, which encoders lack or never use."""
    hasher = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if not _is_pooler(name):
            content = value.detach().cpu().contiguous()
            hasher.update(f"{name} {content.dtype} {tuple(content.shape)}\n".encode())
            hasher.update(content.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _is_pooler(name: str) -> bool:
    return "pooler" in name.split(".")
