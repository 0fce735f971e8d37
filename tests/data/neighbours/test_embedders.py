"""Embedders: each against a direct computation, a row's bits whatever else is in its batch, and what is refused."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, T5Config, T5Model

from tests.budgets import assert_within_budget
from tests.data.corpora import prose, save_bpe
from tests.data.neighbours.encoders import LONGEST, save_bert
from trailmark.data.corpus import load_tokenizer, tokenize
from trailmark.data.neighbours.bm25 import Bm25, distinct_tokens, fit_bm25
from trailmark.data.neighbours.embedders import open_embedder
from trailmark.data.neighbours.text_embedders import SentenceTransformersEmbedder, TransformersEmbedder
from trailmark.data.neighbours.token_embedders import Places
from trailmark.data.shards import Corpus

S, N = 24, 21
EPS = float(torch.finfo(torch.float32).eps)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(save_bpe(tmp_path_factory.mktemp("bpe")))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def chunks(bpe: Any) -> tuple[Tensor, Tensor]:
    """Of a text: ids [N, S] and lengths from 0 to S; rows of equal content too."""
    ids = torch.from_numpy(tokenize([prose(5, 400)], bpe)[: N * S].reshape(N, S).astype(np.int64))
    lengths = torch.randint(1, S + 1, (N,), generator=torch.Generator().manual_seed(1))
    lengths[3], lengths[4:9] = 0, S
    ids[8] = ids[5]
    return ids, lengths


@pytest.fixture(scope="module")
def corpus(bpe: Any) -> Corpus:
    return Corpus.of_tokens(tokenize([prose(6, 3000)], bpe))


@pytest.fixture(scope="module")
def specs(bpe: Any, bert: Path, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("statistics")
    fit_bm25(corpus, S, bpe, folder / "exact.json")
    fit_bm25(corpus, S, bpe, folder / "shared.json", size=64)
    return {
        "hash": "hash",
        "hash:40": "hash:40",
        "bm25": f"bm25:{folder / 'exact.json'}",
        "shared": f"bm25:{folder / 'shared.json'}",
        "transformers": f"transformers:{bert}",
        "sentence-transformers": f"sentence-transformers:{bert}",
    }


KINDS = ["hash", "hash:40", "bm25", "shared", "transformers", "sentence-transformers"]


def opened(kind: str, specs: dict[str, str], tokenizer: Any) -> Any:
    if kind == "sentence-transformers":
        pytest.importorskip("sentence_transformers")
    return open_embedder(specs[kind], tokenizer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_its_own(kind: str, specs: dict[str, str], bpe: Any, chunks: tuple[Tensor, Tensor]) -> None:
    """Bit for bit: alone, in any order and company, with anything past its length; called again; opened again."""
    embedder = opened(kind, specs, bpe)
    ids, lengths = chunks
    found = embedder(ids, lengths)
    for x in found:
        assert (x.shape, x.dtype, x.device.type) == ((N, embedder.size), torch.float32, "cpu")
        assert not x.is_inference()
        assert x.isfinite().all()
        assert torch.equal(x[5], x[8])
        assert x[5:8].unique(dim=0).shape[0] == 3
    order = torch.randperm(N, generator=torch.Generator().manual_seed(2))
    again = opened(kind, specs, bpe)
    assert again.fingerprint == embedder.fingerprint
    assert again.spec == specs[kind] or kind == "hash"
    for x, y in zip(found, again(ids[order], lengths[order]), strict=True):
        assert torch.equal(x[order], y)
    filled = torch.where(torch.arange(S) < lengths[:, None], ids, 7)
    for x, y in zip(found, embedder(filled, lengths), strict=True):
        assert torch.equal(x, y)
    for n in (0, 3, 7, N - 1):
        for x, y in zip(found, embedder(ids[n : n + 1], lengths[n : n + 1]), strict=True):
            assert torch.equal(x[n : n + 1], y)
    for x in embedder(ids[:0], lengths[:0]):
        assert x.shape == (0, embedder.size)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        for x, y in zip(found, embedder(ids, lengths), strict=True):
            assert torch.equal(x, y)


# --- bags of tokens ----------------------------------------------------------------------------------------


def cosines_of_roots(ids: Tensor, lengths: Tensor) -> Tensor:
    """[n, n] float64 cosines of the vectors of square roots of counts."""
    bags = [Counter(row[:n]) for row, n in zip(ids.tolist(), lengths.tolist(), strict=True)]
    size = [sum(bag.values()) ** 0.5 or 1.0 for bag in bags]
    return torch.tensor(
        [
            [sum((a[t] * b[t]) ** 0.5 for t in a) / (size[i] * size[j]) for j, b in enumerate(bags)]
            for i, a in enumerate(bags)
        ],
        dtype=torch.float64,
    )


def test_hash_products_are_cosines(bpe: Any, chunks: tuple[Tensor, Tensor]) -> None:
    """Where no two tokens share a place, but for float32."""
    ids, lengths = chunks
    exact = cosines_of_roots(ids, lengths)
    queries, keys = open_embedder(f"hash:{1 << 17}", bpe)(ids, lengths)
    # numbers at most 1 with a rounding each, and a sum of at most S of their products
    assert ((queries @ keys.T).double() - exact).abs().max() <= (S + 3) * EPS


def test_shared_places_give_products_on_average(chunks: tuple[Tensor, Tensor]) -> None:
    ids, lengths = (x.numpy() for x in chunks)
    found = distinct_tokens(ids, lengths)
    wide = np.zeros((N, 300))
    wide[found.rows, found.tokens] = found.counts
    exact = wide[4] @ wide[5]
    drawn = [Places(40, 300, kind).sums(found, found.counts, N) for kind in range(10, 210)]
    errors = np.array([sums[4] @ sums[5] for sums in drawn]) - exact
    assert errors.std() > 0.1 * exact, "no token shares a place"
    assert abs(errors.mean()) <= 4 * errors.std() / len(errors) ** 0.5


def test_hash_is_always_the_same(bpe: Any) -> None:
    """A change of these bits changes every table made with them."""
    ids = torch.arange(259).view(1, 259).repeat(1, 2)[:, :400]
    query, key = open_embedder("hash:32", load_tokenizer())(ids, torch.tensor([400]))
    assert torch.equal(query, key)
    content = (query * 2**20).round().to(torch.int32).numpy().tobytes()
    assert hashlib.sha256(content).hexdigest()[:16] == "9e27ebc8d120aeb7"


@pytest.mark.parametrize("kind", ["bm25", "shared"])
def test_bm25_products_are_scores(
    kind: str, specs: dict[str, str], bpe: Any, corpus: Corpus, chunks: tuple[Tensor, Tensor]
) -> None:
    embedder = open_embedder(specs[kind], bpe)
    ids, lengths = chunks
    tokens = corpus.read(0, len(corpus)).astype(np.int64)
    whole = len(tokens) // S
    rest = np.pad(tokens[whole * S :], (0, S - len(tokens) % S))[None]
    sizes = np.append(np.full(whole, S), len(tokens) % S)
    statistics = Bm25.of(np.concatenate([tokens[: whole * S].reshape(whole, S), rest]), sizes)
    own = ids.numpy(), lengths.numpy()
    exact = torch.from_numpy(statistics.scores(*own, *own))
    queries, keys = embedder(ids, lengths)
    found = (queries @ keys.T).double()
    if kind == "bm25":
        assert embedder.size == len(bpe)
        assert ((found - exact).abs() <= (S + 3) * EPS * exact).all()  # all parts of a sum are positive
        return
    assert embedder.size == 64
    rank = [x.argsort(1, descending=True)[4:9, :4].tolist() for x in (found, exact)]
    assert sum(len({*a} & {*b}) for a, b in zip(*rank, strict=True)) >= 10  # of 20; by chance 4


# --- encoders of text --------------------------------------------------------------------------------------


def texts_of(bpe: Any, ids: Tensor, lengths: Tensor) -> list[str]:
    return [
        bpe.decode(row[:n], skip_special_tokens=True)
        for row, n in zip(ids.tolist(), lengths.tolist(), strict=True)
    ]


def pooled_alone(folder: Path, texts: list[str], dtype: torch.dtype) -> Tensor:
    """The mean of last hidden states, text by text, without padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).to(dtype).eval()
    with torch.no_grad():
        states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in texts]
    return torch.stack([F.normalize(state.mean(0), dim=0) for state in states])


@pytest.mark.parametrize("kind", ["transformers", "sentence-transformers"])
def test_the_mean_of_last_hidden_states(
    kind: str, specs: dict[str, str], bpe: Any, bert: Path, chunks: tuple[Tensor, Tensor]
) -> None:
    embedder = opened(kind, specs, bpe)
    texts = texts_of(bpe, *chunks)
    oracle, exact = (pooled_alone(bert, texts, dtype) for dtype in (torch.float32, torch.float64))
    queries, keys = embedder(*chunks)
    assert queries is keys
    assert_within_budget(queries, oracle, exact)
    assert (queries[5] - queries[:5]).abs().amax(1).min() > 1000 * EPS, "every text looks alike"


def test_shapes_depend_on_a_row_alone(specs: dict[str, str], bpe: Any, chunks: tuple[Tensor, Tensor]) -> None:
    """Eight rows of a width that is the row's own, however many are asked for."""
    embedder: Any = open_embedder(specs["transformers"], bpe)
    seen: list[tuple[int, ...]] = []
    embedder._model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    embedder(*chunks)
    assert set(seen) == {(8, 32)}
    seen.clear()
    texts = ["x " * count for count in (1, 30, 31, 62, 63, LONGEST - 2)]  # with two special tokens
    widths = [32, 32, 64, 64, 96, LONGEST]
    embedder.embed(texts)
    assert set(seen) == {(8, width) for width in widths}
    seen.clear()
    for text in texts:
        embedder.embed([text])
    assert seen == [(8, width) for width in widths]


def test_special_tokens_are_no_text(specs: dict[str, str], bpe: Any) -> None:
    embedder = open_embedder(specs["transformers"], bpe)
    words = bpe(" the river ran")["input_ids"]
    ids = torch.tensor([[*words, bpe.eos_token_id], [*words, 0]])
    found, _ = embedder(ids, torch.tensor([len(words) + 1, len(words)]))
    assert torch.equal(found[0], found[1])


def test_both_libraries_agree(specs: dict[str, str], bpe: Any, chunks: tuple[Tensor, Tensor]) -> None:
    pytest.importorskip("sentence_transformers")
    ours, theirs = (open_embedder(specs[kind], bpe) for kind in KINDS[-2:])
    assert isinstance(ours, TransformersEmbedder)
    assert isinstance(theirs, SentenceTransformersEmbedder)
    assert torch.equal(ours(*chunks)[0], theirs(*chunks)[0])
    texts = texts_of(bpe, *chunks)
    direct = theirs._model.encode(texts, normalize_embeddings=True, convert_to_tensor=True).clone()
    exact = pooled_alone(Path(ours.spec.partition(":")[2]), texts, torch.float64)
    assert_within_budget(theirs(*chunks)[0], direct, exact)
    assert ours.fingerprint != theirs.fingerprint


def test_a_pooling_of_its_own(bert: Path, bpe: Any, chunks: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    """A folder that sentence-transformers saved says how it pools."""
    st = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    base = st.SentenceTransformer(str(bert), device="cpu", local_files_only=True)
    for mode in ("cls", "mean"):
        st.SentenceTransformer(modules=[base[0], modules.Pooling(32, mode)], device="cpu").save(
            str(tmp_path / mode)
        )
    cls, mean, plain = (
        open_embedder(f"sentence-transformers:{folder}", bpe)
        for folder in (tmp_path / "cls", tmp_path / "mean", bert)
    )
    assert torch.equal(mean(*chunks)[0], plain(*chunks)[0])
    assert not torch.allclose(cls(*chunks)[0], plain(*chunks)[0])
    assert len({cls.fingerprint, mean.fingerprint}) == 2


def test_a_long_text_is_cut_with_a_warning(
    specs: dict[str, str], bpe: Any, caplog: pytest.LogCaptureFixture
) -> None:
    embedder: Any = open_embedder(specs["transformers"], bpe)
    fits, long = "x " * (LONGEST - 2), "x " * (LONGEST - 1)
    with caplog.at_level(logging.WARNING):
        kept = embedder.embed([fits])
        caplog.clear()  # transformers tells of the pooler that is not there
        assert torch.equal(embedder.embed([fits]), kept)
        assert not caplog.records
        cut = embedder.embed([long, long])
    assert len(caplog.records) == 1
    assert f"longer than the {LONGEST} tokens" in caplog.records[0].getMessage()
    assert torch.equal(cut, kept.expand(2, -1))


def test_fingerprints(bert: Path, bpe: Any, specs: dict[str, str], tmp_path: Path) -> None:
    def fingerprint(spec: str, tokenizer: Any = bpe) -> str:
        return open_embedder(spec, tokenizer).fingerprint

    byte, copied = load_tokenizer(), save_bert(tmp_path / "copied")
    assert fingerprint(f"transformers:{copied}") == fingerprint(specs["transformers"])
    different = [
        *(fingerprint(specs[kind]) for kind in KINDS[:-1]),
        fingerprint("hash", byte),
        fingerprint(specs["transformers"], byte),
        fingerprint(f"transformers:{save_bert(tmp_path / 'weights', seed=1)}"),
        fingerprint(f"transformers:{save_bert(tmp_path / 'eps', layer_norm_eps=1e-5)}"),
    ]
    assert len(set(different)) == len(different)


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("contriever", "expected hash, hash:DIM, bm25:FILE, .* got 'contriever'"),
        ("", "expected hash"),
        ("hash:0", "expected hash:DIM with DIM from 1 to 131072, got 'hash:0'"),
        ("hash:-3", "expected hash:DIM"),
        ("hash:2000000", "expected hash:DIM"),
        ("hash:x", "expected hash:DIM"),
        ("bm25", "expected bm25:FILE, got 'bm25'"),
        ("bm25:/no/such", "'/no/such' does not exist"),
        ("transformers", "expected transformers:FOLDER, or a hub name"),
        ("transformers:/no/such/encoder", "'/no/such/encoder' of .* is not there. Name the folder"),
        ("sentence-transformers:./none", r"'./none' of .* is not there|needs sentence-transformers"),
    ],
)
def test_specs_that_are_refused(spec: str, message: str, bpe: Any) -> None:
    with pytest.raises(ValueError, match=f"^embedder: .*(?:{message})"):
        open_embedder(spec, bpe)


def test_a_folder_without_a_kind(bert: Path, bpe: Any) -> None:
    with pytest.raises(ValueError, match=rf"For an encoder in a folder: transformers:{bert}"):
        open_embedder(str(bert), bpe)


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


def test_encoders_that_are_refused(bert: Path, bpe: Any, tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(ValueError, match=r"^embedder: ") as found:
            open_embedder(f"transformers:{folder}", bpe)
        return str(found.value)

    empty = tmp_path / "empty"
    empty.mkdir()
    assert "hash and bm25 need no weights" in refused(empty)
    no_weights = save_bert(tmp_path / "no weights")
    (no_weights / "model.safetensors").unlink()
    assert "cannot (" in refused(no_weights)
    half = save_bert(tmp_path / "half")
    weights = load_file(half / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, half / "model.safetensors", {"format": "pt"})
    assert "lacks encoder.layer.1.output.dense.weight" in refused(half)
    nan = save_bert(tmp_path / "nan")
    weights = load_file(nan / "model.safetensors")
    weights["encoder.layer.1.output.dense.weight"][0, 0] = float("nan")
    save_file(weights, nan / "model.safetensors", {"format": "pt"})
    assert "expected finite weights, encoder.layer.1.output.dense.weight" in refused(nan)
    weights["encoder.layer.1.output.dense.weight"][:] = 3e38
    save_file(weights, nan / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"^embedder: expected finite vectors"):
        open_embedder(f"transformers:{nan}", bpe)(torch.tensor([[50, 51]]), torch.tensor([2]))
    both = tmp_path / "both"
    AutoTokenizer.from_pretrained(bert).save_pretrained(both)
    T5Model(T5Config(vocab_size=300, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)).save_pretrained(
        both
    )
    assert "is an encoder with a decoder" in refused(both)
    cut = save_bert(tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:1000])
    assert "cannot (" in refused(cut.parent)
    other = save_bert(tmp_path / "other") / "config.json"
    other.write_text(other.read_text().replace('"hidden_size": 32', '"hidden_size": 16'))
    assert "cannot (" in refused(other.parent)
    wordless = save_bert(tmp_path / "wordless")
    for name in TOKENIZER_FILES:
        (wordless / name).unlink(missing_ok=True)
    assert "cannot (there is no tokenizer)" in refused(wordless)
    file = tmp_path / "file"
    file.write_text("x")
    assert "is no folder" in refused(file)
    unpadded = save_bert(tmp_path / "unpadded")
    tokenizer = load_tokenizer(save_bpe(tmp_path / "bpe"))
    for name in TOKENIZER_FILES:
        (unpadded / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(unpadded)
    assert "padding token" in refused(unpadded)


@pytest.mark.parametrize("kind", ["hash", "transformers"])
@pytest.mark.parametrize("device", ["cud", "cuda:99", ""])
def test_devices_that_are_refused(kind: str, device: str, specs: dict[str, str], bpe: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"^device: expected one to compute on, cpu or cuda, got '{device}'"
    ):
        open_embedder(specs[kind], bpe, device)


def test_statistics_of_another_tokenizer(specs: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"^embedder: expected statistics of the tokenizer"):
        open_embedder(specs["bm25"], load_tokenizer())


def test_a_library_that_is_missing(bert: Path, bpe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ValueError, match=r"needs sentence-transformers.*pip install 'trailmark\[encoders\]'"):
        open_embedder(f"sentence-transformers:{bert}", bpe)


@pytest.mark.parametrize("kind", ["hash", "bm25", "transformers"])
@pytest.mark.parametrize(
    ("ids", "lengths", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), torch.ones(3), r"expected integers of shapes"),
        (torch.zeros(3, 4), torch.ones(3, dtype=torch.int64), r"expected integers of shapes"),
        (
            torch.zeros(3, 4, dtype=torch.int64),
            torch.ones(2, dtype=torch.int64),
            r"expected integers of shapes",
        ),
        (torch.zeros(1, 4, dtype=torch.int64), torch.tensor([5]), r"lengths: expected 0 .. 4, got 5"),
    ],
)
def test_chunks_that_cannot_be(
    kind: str, ids: Tensor, lengths: Tensor, message: str, specs: dict[str, str], bpe: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        open_embedder(specs[kind], bpe)(ids, lengths)


@pytest.mark.parametrize("kind", ["hash", "transformers"])
def test_tokens_past_the_vocabulary_are_no_text(kind: str, specs: dict[str, str], bpe: Any) -> None:
    """A model whose vocabulary is larger than its tokenizer's may generate them."""
    embed = open_embedder(specs[kind], bpe)
    with_one = embed(torch.tensor([[3, 5000, 7]]), torch.tensor([3]))[0]
    assert torch.equal(with_one, embed(torch.tensor([[3, 7, 0]]), torch.tensor([2]))[0])
    assert with_one.any()


def test_tokens_past_the_vocabulary_have_no_weight(specs: dict[str, str], bpe: Any) -> None:
    embed = open_embedder(specs["bm25"], bpe)
    queries, keys = embed(torch.tensor([[3, 5000, 7]]), torch.tensor([3]))
    assert torch.equal(queries, embed(torch.tensor([[3, 7, 0]]), torch.tensor([2]))[0])
    assert keys.count_nonzero() == 2
