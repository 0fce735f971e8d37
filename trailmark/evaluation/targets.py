"""Target scores for a learned retriever (RPT, Rubin and Berant 2024): how much reading a chunk helps.

In two steps, for each chunk c of a window: BM25 finds candidates j < c for the text of c and what follows it, n(c);
then any causal language model, the reference, says what each is worth:

    score(c, j) = log P(n(c) | chunk j, chunk j + 1, chunk c) - log P(n(c) | chunk c)

in nats, summed over n(c): the next chunk, or what is left of the window. Where j + 1 = c, chunk c stands there once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from trailmark import pretrained
from trailmark.data.chat import beginning
from trailmark.data.corpus import Tokens, tokenizer_fingerprint
from trailmark.data.neighbours.bm25 import Integers, candidates
from trailmark.data.neighbours.build import open_corpus
from trailmark.data.neighbours.embedders import device_named
from trailmark.data.neighbours.files import TableProgress, write_table
from trailmark.data.neighbours.table import Found, NeighbourTable, Rule, count_chunks, table_about
from trailmark.data.neighbours.text_embedders import BROKEN, has_words
from trailmark.evaluation.subject import load
from trailmark.models import MODELS, is_ours
from trailmark.models.causal_lm import fingerprint
from trailmark.untrusted import first_line

Text = list[int]  # the reference's tokens
_BATCH_SIZE = 16


class Targets(NamedTuple):
    """Of one window."""

    indices: Integers  # [C, n] candidates of each chunk, ascending, -1 last
    scores: npt.NDArray[np.float64]  # [C, n]; -inf where -1


class Reference:
    """A causal language model that scores texts.

    With the corpus' own tokenizer its tokens are scored as they are. Another one is given the text of each chunk by
    itself, so that a chunk's tokens are the same whatever stands before it: scores are of texts, tokens that are cut
    in two by a chunk's end are those of the two halves.

    Args:
        model: of transformers (ours too), in eval mode.
        tokenizer: its own. of: the corpus'.
        name: what it was opened by.
        batch_size: texts that are scored at a time.
    """

    def __init__(
        self, model: Any, tokenizer: Any, of: Any, name: str = "", batch_size: int = _BATCH_SIZE
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1 text at a time, got {batch_size}.")
        self.model, self.name, self.batch_size = model, name, batch_size
        self.tokenizer, self._of = tokenizer, of
        self.same_tokens = tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(of)
        self._begin: Text = beginning(tokenizer)
        # Landmark's are of training texts; the rest of ours read any length
        ours = is_ours(model)
        self._longest = None if ours else getattr(model.config, "max_position_embeddings", None)
        self._keeps = not ours and "logits_to_keep" in inspect.signature(model.forward).parameters
        self._vocab_size = int(model.get_input_embeddings().weight.shape[0])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its weights."""
        return fingerprint(self.model)

    def texts(self, chunks: Sequence[Tokens]) -> list[Text]:
        """Each chunk of the corpus' tokens in the reference's."""
        ids = [chunk.tolist() for chunk in chunks]
        if self.same_tokens:
            return ids
        decoded = self._of.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in decoded]

    @torch.inference_mode()
    def log_likelihoods(self, pairs: Sequence[tuple[Text, Text]]) -> npt.NDArray[np.float64]:
        """log P(second | first) in nats of each pair, [n], summed over the second's tokens; no text is empty."""
        found = [self._scored(pairs[n : n + self.batch_size]) for n in range(0, len(pairs), self.batch_size)]
        return np.concatenate(found) if found else np.zeros(0)

    def _scored(self, pairs: Sequence[tuple[Text, Text]]) -> npt.NDArray[np.float64]:
        rows = [(self._begin + first, second) for first, second in pairs]
        width = max(len(first) + len(second) for first, second in rows)
        if self._longest is not None and width > self._longest:
            raise ValueError(
                f"chunk_size: expected texts of at most {self._longest} tokens, which {self.name!r} takes, got four "
                f"chunks with {width}. Choose smaller chunks, or a model for longer texts."
            )
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
        for row, (first, second) in enumerate(rows):
            both = torch.tensor(first + second)
            ids[row, : len(both)], mask[row, : len(both)] = both, 1
            # the label of the next token, as logits predict it
            labels[row, len(first) - 1 : len(both) - 1] = both[len(first) :]
        if (most := int(ids.max())) >= self._vocab_size:
            raise ValueError(
                f"model: expected tokens below the {self._vocab_size} of {self.name!r}, got {most}. Its tokenizer is "
                "not the one that it was trained with."
            )
        keep = width - min(len(first) for first, _ in rows) + 1
        device = self.model.device
        more: dict[str, Any] = {"logits_to_keep": keep} if self._keeps else {}
        logits = self.model(ids.to(device), attention_mask=mask.to(device), **more).logits[:, -keep:]
        losses = F.cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1),
            labels[:, -keep:].to(device).flatten(),
            ignore_index=-100,
            reduction="none",
        )
        return -losses.view(len(rows), -1).double().sum(1).cpu().numpy()


def open_reference(name: str, of: Any, device: str | None = None, batch_size: int = _BATCH_SIZE) -> Reference:
    """A model's folder or hub name, with the tokenizer that lies beside it.

    Args:
        of: the corpus' tokenizer.
        device: None: CUDA's if there is one, else the CPU. There, in float32.

    Raises:
        ValueError: no causal language model there, weights or a tokenizer that are missing.
    """
    where = device_named(device)
    folder = Path(name)
    if folder.exists() and not (folder / "config.json").is_file():
        raise ValueError(
            f"model: expected a folder with a causal language model, {name!r} has no config.json. Name the folder that "
            "save_pretrained or trailmark train wrote, or a hub name."
        )
    local = folder.is_dir()
    try:
        config = pretrained.load_config(name, "model", local_files_only=local)
        if config.model_type in MODELS and local:  # with its embedder
            subject = load(folder)
            return Reference(subject.model.to(where), subject.tokenizer, of, name, batch_size)
        dtype: Any = torch.float32 if where.type == "cpu" else "auto"
        model, found = pretrained.load_model(
            AutoModelForCausalLM, config, name, "model", local_files_only=local, dtype=dtype
        )
        tokenizer = pretrained.load_tokenizer(name, "model", local_files_only=local)
        if not has_words(tokenizer):
            raise ValueError("there is no tokenizer")
    except BROKEN as error:
        raise ValueError(
            f"model: expected a causal language model with its tokenizer, {name!r} cannot be loaded "
            f"({first_line(error)}). Name a folder with both, or a hub name where there is a network."
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"model: expected the weights of a whole causal language model, {name!r} lacks {len(missing)}: "
            f"{missing[0]} ..."
        )
    return Reference(model.eval().to(where), tokenizer, of, name, batch_size)


def window_targets(
    ids: Tokens, chunk_size: int, count: int, limits: Integers, reference: Reference
) -> Targets:
    """Candidates and their scores for the closed chunks of one window, ids [L].

    Args:
        count: candidates of a chunk, as many as there are.
        limits: [C] chunk c may have those below ``limits[c]``, at most those before it.
    """
    S, C = chunk_size, len(ids) // chunk_size
    assert len(limits) == C
    assert (limits <= np.arange(C)).all()
    indices, scores = np.full((C, count), -1), np.full((C, count), -np.inf)
    chunks = ids[: C * S].astype(np.int64).reshape(C, S)
    texts = reference.texts([*chunks, ids[C * S :]])  # the last is open, perhaps empty
    # one that nothing follows, or whose text is empty (special tokens alone), asks nothing
    asks = np.array([c for c in range(C) if limits[c] and texts[c] and texts[c + 1]], np.int64)
    if not len(asks):
        return Targets(indices, scores)
    following = np.minimum(S, len(ids) - (asks + 1) * S)
    queries = np.zeros((len(asks), 2 * S), np.int64)
    for query, c, more in zip(queries, asks.tolist(), following.tolist(), strict=True):
        query[: S + more] = ids[c * S : (c + 1) * S + more]
    found = candidates(chunks, count, limits[asks], queries, S + following)
    indices[asks] = found
    pairs = [(texts[c], texts[c + 1]) for c in asks.tolist()]
    places = np.argwhere(found >= 0)
    for row, column in places.tolist():
        c, j = int(asks[row]), int(found[row, column])
        continued = texts[j] + texts[j + 1] if j + 1 < c else texts[j]
        pairs.append((continued + texts[c], texts[c + 1]))
    values = reference.log_likelihoods(pairs)
    alone, with_chunk = values[: len(asks)], values[len(asks) :]
    scores[asks[places[:, 0]], places[:, 1]] = with_chunk - alone[places[:, 0]]
    return Targets(indices, scores)


def make_targets(
    paths: list[Path],
    output: Path,
    model: str,
    *,
    context_length: int,
    chunk_size: int,
    count: int,
    rule: Rule,
    tokenizer: str | None = None,
    device: str | None = None,
    batch_size: int = _BATCH_SIZE,
    say: Callable[[str], None] = lambda message: None,
    progress: Callable[[TableProgress], None] | None = None,
) -> NeighbourTable:
    """Open text and reference and make a table of candidates with target scores (float32).

    The same command goes on where one was stopped, or opens the finished table.

    Args:
        paths: a prepared folder, or files and folders of text that are read as training reads them.
        model: see :func:`open_reference`. tokenizer: of the text; None: the prepared corpus' own, or "bytes".
        context_length: L, tokens of a window; chunk_size: S; count: candidates of each chunk.
        rule: which chunks may be candidates.

    Raises:
        ValueError: as :func:`trailmark.data.texts.open_text` and :func:`open_reference`; sizes that do not fit each
            other or the reference; an output that is in use, full or another table's.
    """
    corpus, loaded = open_corpus(paths, tokenizer)
    chunks, own = count_chunks(corpus, context_length, chunk_size, count), tokenizer_fingerprint(loaded)
    reference = open_reference(model, loaded, device, batch_size)
    limits = rule.num_candidates(chunks, chunk_size)
    windows = len(corpus) // context_length
    texts = "tokens as they are" if reference.same_tokens else "chunks as text, in tokens of its own"
    say(
        f"{windows:,} windows of {context_length:,} tokens: {windows * chunks:,} chunks with up to {count} candidates "
        f"each, scored by {model} ({texts}), into {output}/"
    )

    def score(first: int, stop: int) -> Found:
        found = [
            window_targets(
                corpus.read(n * context_length, (n + 1) * context_length),
                chunk_size,
                count,
                limits,
                reference,
            )
            for n in range(first, stop)
        ]
        return np.stack([x.indices for x in found]), np.stack([x.scores for x in found])

    about = {
        "kind": "targets",
        "reference": {"spec": model, "fingerprint": reference.fingerprint},
        **table_about(corpus, own, context_length, chunk_size, rule),
    }
    shape = windows, chunks, count
    write_table(output, about, shape, "float32", score, 1, progress, "trailmark targets")
    return NeighbourTable.open(output, corpus=corpus)
