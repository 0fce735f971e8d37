"""A pretrained model as one of ours computes what it computed; what is new changes nothing yet."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from tests.disks import largest_file
from tests.models.conversion.bases import (
    BASES,
    TEMPLATE,
    WINDOWS,
    byte_level,
    converted,
    ids,
    made,
    save,
    write_gguf,
)
from tests.models.tiny import assert_same, logits_of, split
from tests.models.transformers64 import in_float64
from trailmark.evaluation.subject import load
from trailmark.models.conversion import report
from trailmark.models.conversion.convert import convert
from trailmark.models.layers import rotary_table, rotary_where_a_window_ends, rotate

pytestmark = pytest.mark.usefixtures("one_thread")
EACH_BASE = pytest.mark.parametrize("name", BASES)
DRT = ("sliding_window=24", "chunk_size=6", "num_retrieved_chunks=3")


def expected_logits(model: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """transformers' own; ``mask`` bool [T, T] instead of the causal one."""
    with torch.no_grad(), in_float64():
        if mask is None:
            return model(tokens).logits
        return model(tokens, attention_mask=mask[None, None].expand(len(tokens), -1, -1, -1)).logits


def seen(length: int, window: int, sinks: int) -> Tensor:
    """bool [T, T]: which positions each sees."""
    at = torch.arange(length)
    back = at[:, None] - at
    return (back >= 0) & ((back < window) | (at < sinks))


@EACH_BASE
def test_with_a_window_that_sees_all_it_equals_transformers(name: str, tmp_path: Path) -> None:
    theirs, tokens = made(name), ids(90, 2)
    ours = converted(save(theirs, tmp_path / "base"), tmp_path / "ours", "sliding_window")
    assert ours.config.sliding_window is None
    assert_same(logits_of(ours, tokens), expected_logits(theirs, tokens))


def test_a_field_that_the_family_does_not_have_is_no_window(tmp_path: Path) -> None:
    """A Llama that was written with the keys of a Mistral."""
    theirs, tokens = made("llama"), ids(90)
    theirs.config.sliding_window = 5
    ours = converted(save(theirs, tmp_path / "base"), tmp_path / "ours", "sliding_window")
    assert ours.config.sliding_window is None
    assert_same(logits_of(ours, tokens), expected_logits(theirs, tokens))


@pytest.mark.parametrize("name", WINDOWS)
def test_it_has_the_windows_of_its_base(name: str, tmp_path: Path) -> None:
    theirs, tokens = made(name), ids(90)
    ours = converted(save(theirs, tmp_path / "base"), tmp_path / "ours", "sliding_window")
    assert_same(logits_of(ours, tokens), expected_logits(theirs, tokens))
    assert not torch.equal(
        logits_of(ours, tokens), logits_of(ours, torch.cat([tokens[:, 1:2], tokens[:, 1:]], 1))
    )


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_with_window_and_sinks_it_equals_transformers_with_such_a_mask(name: str, tmp_path: Path) -> None:
    theirs, tokens = made(name), ids(90, 2)
    ours = converted(
        save(theirs, tmp_path / "base"), tmp_path / "ours", "sliding_window", "sliding_window=13"
    )
    assert (ours.config.num_sinks, ours.config.max_sink_distance) == (4, 511)
    assert_same(logits_of(ours, tokens), expected_logits(theirs, tokens, seen(90, 13, 4)))


@pytest.mark.parametrize(
    ("to", "name"),
    [("drt", "llama")]
    + [(to, name) for to in ("drt", "hsa") for name in ("qwen2", "qwen3", "llama, wide heads")],
)
def test_at_step_0_it_equals_its_base_with_that_window(to: str, name: str, tmp_path: Path) -> None:
    theirs, tokens = made(name), ids(90, 2)
    ours = converted(save(theirs, tmp_path / "base"), tmp_path / "ours", to, *DRT)
    assert_same(logits_of(ours, tokens), expected_logits(theirs, tokens, seen(90, 24, 4)))


@pytest.mark.parametrize("residual", ["false", "true"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("to", ["drt", "hsa"])
@pytest.mark.sampled(4)
def test_at_step_0_it_equals_itself_without_retrieval_bit_for_bit(
    to: str, name: str, residual: str, tmp_path: Path
) -> None:
    base = save(made(name), tmp_path / "base")
    ours, tokens = converted(base, tmp_path / "ours", to, *DRT, f"residual_gca={residual}"), ids(100, 2)
    for tier in ("device", "host", "disk"):
        for pieces in ([100], [7, 24, 1]):
            # the same calls: a GEMM of another shape may round otherwise
            found = [
                _read(model, tokens, pieces, tier, tmp_path / f"{tier}{pieces}{number}")
                for number, model in enumerate((ours, ours.without_retrieval()))
            ]
            assert torch.equal(*found)
    with torch.no_grad():
        chosen = ours(tokens, output_retrieval=True).retrieval
    assert all((one.indices >= 0).any() for one in chosen)  # it did retrieve


def _read(model: Any, tokens: Tensor, pieces: list[int], tier: str, folder: Path) -> Tensor:
    options = {"memory_folder": folder} if tier == "disk" else {}
    cache = model.new_cache(memory_tier=tier, **options)
    with torch.no_grad():
        parts = [logits_of(model, piece, past_key_values=cache) for piece in split(tokens, pieces)]
    return torch.cat(parts, 1)


CLOSING = {
    "drt": ("upper_layers.*.gca_o_proj.weight",),
    "hsa": ("readers.*.o_proj.weight", "readers.*.mlp.down_proj.weight"),
}


@pytest.mark.parametrize("to", ["drt", "hsa"])
def test_at_step_0_only_what_closes_the_reading_has_a_gradient(to: str, tmp_path: Path) -> None:
    """After a step all other new parts have one but the inside of the encoder's layers, which wakes a step later."""
    ours = converted(save(made("llama"), tmp_path / "base"), tmp_path / "ours", to, *DRT)
    ours.config.retrieval_noise = False
    ours.train()
    new = {row["tensors"] for row in _record(tmp_path / "ours")["parts"] if row["what"] == "new"}
    assert new.issuperset(CLOSING[to])

    def awake() -> set[str]:
        ours.zero_grad()
        ours(ids(90, 2), labels=ids(90, 2)).loss.backward()
        return {
            name
            for pattern in new
            for name, x in ours.named_parameters()
            if _like(name, pattern) and x.grad is not None and x.grad.abs().max() > 0
        }

    def step() -> None:
        with torch.no_grad():
            for x in ours.parameters():
                x -= 0.1 * (0 if x.grad is None else x.grad)

    def named(patterns: Iterable[str]) -> set[str]:
        return {name for of in patterns for name, _ in ours.named_parameters() if _like(name, of)}

    assert awake() == named(CLOSING[to])
    step()
    second, every = awake(), named(new)
    of_landmark = {"encoder.landmark"} if to == "hsa" else set()  # attended to in the encoder's layers alone
    assert every - second == of_landmark | {
        f"encoder.layers.{n}.{part}"
        for n in range(ours.config.num_encoder_layers)
        for part in (
            "attention_norm.weight",
            "attention.qkv_proj.weight",
            "mlp_norm.weight",
            "mlp.gate_up_proj.weight",
        )
    }
    step()
    assert awake() == every


def _like(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted, strict=True))


def _record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "conversion.json").read_text())


def test_what_the_encoder_makes_of_a_chunk_is_what_the_first_upper_layer_would(tmp_path: Path) -> None:
    """Keys before RoPE and values of layer 2, up to the rounding of a second norm of the same states."""
    theirs = made("llama")
    ours, tokens = converted(save(theirs, tmp_path / "base"), tmp_path / "ours", "drt", *DRT), ids(30)
    entries = ours.encode(tokens)
    with torch.no_grad(), in_float64():
        layer = theirs.model.layers[2]
        x = expected_states(theirs, tokens, seen(30, 24, 4))
        attention = layer.self_attn
        wanted = [
            part(layer.input_layernorm(x)).view(1, 5, 6, 2, 8)
            for part in (attention.k_proj, attention.v_proj)
        ]
    wanted[0] = wanted[0].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)  # neighbours are a pair here
    first = (
        x[..., : ours.config.num_key_value_heads, :] for x in (entries.k, entries.v)
    )  # of the first upper layer
    for found, exact in zip(first, wanted, strict=True):
        # RMSNorm of what has an RMS of 1 / sqrt(1 + eps / x**2) changes it by eps and no more
        assert (found - exact).abs().max() <= 4 * theirs.config.rms_norm_eps * exact.abs().max()


def expected_states(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """What enters layer 2."""
    kept: list[Tensor] = []
    handle = model.model.layers[2].register_forward_pre_hook(
        lambda _, args, kwargs: kept.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    expected_logits(model, tokens, mask)
    handle.remove()
    return kept[0]


def test_landmark_attention_equals_its_base_within_a_chunk(tmp_path: Path) -> None:
    """Before the first landmark there is nothing that is new."""
    theirs, tokens = made("llama"), ids(12, 2)
    ours = converted(
        save(theirs, tmp_path / "base"),
        tmp_path / "ours",
        "landmark",
        "chunk_size=12",
        "landmark_phase=fixed",
    )
    assert ours.config.max_position_embeddings == 512
    assert_same(logits_of(ours, tokens), expected_logits(theirs, tokens))
    mean = theirs.get_input_embeddings().weight.mean(0)
    assert (ours.landmark - mean).abs().max() < 1e-12


@pytest.mark.parametrize("score", ["mean", "expansion", "mass"])
@EACH_BASE
@pytest.mark.sampled(8)
def test_where_every_chunk_is_chosen_a_hils_equals_its_base(name: str, score: str, tmp_path: Path) -> None:
    theirs, tokens = made(name), ids(90, 2)
    fields = ("sliding_window=13", "chunk_size=8", "num_retrieved_chunks=90", f"chunk_score={score}")
    base = save(theirs, tmp_path / "base")
    ours = converted(base, tmp_path / "ours", "hils", *fields, "far_position=true")
    assert ours.config.chunk_weights == "keys"
    assert_same(logits_of(ours, tokens), expected_logits(theirs, tokens))
    cache = ours.new_cache()
    pieces = [logits_of(ours, piece, past_key_values=cache) for piece in split(tokens, [31, 5, 1])]
    assert_same(torch.cat(pieces, 1), expected_logits(theirs, tokens))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_calibrated_queries_begin_as_the_queries(name: str, tmp_path: Path) -> None:
    base, tokens = save(made(name), tmp_path / "base"), ids(90)
    fields = ("sliding_window=13", "chunk_size=8", "num_retrieved_chunks=2", "chunk_weights=score")
    plain, calibrated = (
        converted(base, tmp_path / f"{rank}", "hils", *fields, f"calibration_rank={rank}") for rank in (0, 3)
    )
    assert_same(logits_of(calibrated, tokens), logits_of(plain, tokens))


@pytest.mark.parametrize("name", WINDOWS)
def test_layers_with_a_window_keep_it_and_the_others_choose_chunks(name: str, tmp_path: Path) -> None:
    theirs, tokens = made(name), ids(90)
    base = save(theirs, tmp_path / "base")
    windows = converted(base, tmp_path / "windows", "sliding_window").config.windows
    if None not in windows:
        with pytest.raises(ValueError, match="to: expected a base with layers that see all of a text"):
            convert(model=str(base), output=tmp_path / "ours", to="hils")
        return
    fields = ("chunk_size=4", "num_retrieved_chunks=90", "far_position=true", "num_sinks=0")
    ours = converted(base, tmp_path / "ours", "hils", *fields)
    assert ours.config.retrieving_layers == [n for n, window in enumerate(windows) if window is None]
    assert_same(logits_of(ours, tokens), expected_logits(theirs, tokens))


def test_what_reads_with_windows_is_set_to_ask_of_long_texts(tmp_path: Path) -> None:
    """The settings that docs/convert.md recommends, as far as none is given and the base knows such distances."""
    base = save(made("llama"), tmp_path / "base")

    def asked(folder: str, *fields: str) -> tuple[Any, ...]:
        config = converted(base, tmp_path / folder, "hils", "sliding_window=24", *fields).config
        looks = config.num_retrieved_chunks, config.num_focus_chunks
        return *looks, config.summary_tokens, config.far_distance

    assert asked("chooses") == (16, None, 8, None)
    assert asked("windows", "reading=windows") == (4, 4, 1, 48)
    assert asked("given", "reading=windows", "num_focus_chunks=null", "summary_tokens=2") == (4, None, 2, 48)
    assert asked("wide", "reading=windows", "sliding_window=300") == (4, 4, 1, None)  # the base knows 512
    assert asked("true", "reading=windows", "far_position=true") == (4, 4, 1, None)
    assert asked("mass", "reading=windows", "chunk_score=mass") == (4, None, None, 48)


# --- where the weights come from -----------------------------------------------------------------------------------


def test_files_that_are_sharded_or_gguf_give_the_same_tensors(tmp_path: Path) -> None:
    theirs = made("llama").float()
    whole = save(theirs, tmp_path / "whole")
    parted = save(theirs, tmp_path / "parted", max_shard_size="50KB")
    assert len(list(parted.glob("*.safetensors"))) > 2
    (tmp_path / "gguf").mkdir()
    file = write_gguf(theirs, tmp_path / "gguf" / "tiny.gguf")
    weights = []
    for number, source in enumerate((whole, parted, file.parent, file)):
        converted(source, tmp_path / f"{number}", "drt", *DRT)
        weights.append(load_file(tmp_path / f"{number}" / "model.safetensors"))
    for other in weights[1:]:
        assert other.keys() == weights[0].keys()
        assert all(torch.equal(x, weights[0][name]) for name, x in other.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "3")("ab c")["input_ids"]


def test_a_tied_projection_may_lie_under_either_name(tmp_path: Path) -> None:
    """``safetensors.torch.save_model`` keeps the last of the names."""
    base = save(made("llama").float(), tmp_path / "base")
    converted(base, tmp_path / "one", "drt", *DRT)
    weights = load_file(base / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    converted(base, tmp_path / "other", "drt", *DRT)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "other"))
    assert one.keys() == other.keys()
    assert all(torch.equal(x, other[name]) for name, x in one.items())


def test_weights_are_not_narrowed_by_what_config_json_says(tmp_path: Path) -> None:
    base = save(made("llama").float(), tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    ours = converted(base, tmp_path / "ours", "drt", *DRT)
    assert ours.dtype == torch.float32
    assert torch.equal(ours.norm.weight, load_file(base / "model.safetensors")["model.norm.weight"])


@pytest.mark.parametrize(
    ("kind", "unread"), [("linear", "original_max_position_embeddings"), ("yarn", "finetuned")]
)
def test_keys_beside_scaled_positions_that_nobody_reads(kind: str, unread: str, tmp_path: Path) -> None:
    base = save(made("llama"), tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    scaling: dict[str, Any] = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64}
    config["rope_parameters"] = {"rope_theta": 500.0, "finetuned": True} | scaling
    (base / "config.json").write_text(json.dumps(config))
    if kind == "linear":  # which has no key beside its factor
        with pytest.raises(ValueError, match="got 'finetuned'"):
            converted(base, tmp_path / "refused", "sliding_window")
        del config["rope_parameters"]["finetuned"]
        (base / "config.json").write_text(json.dumps(config))
    ours = converted(base, tmp_path / "ours", "sliding_window")
    assert ours.config.rope_scaling == {name: x for name, x in scaling.items() if name != unread}


def test_what_a_file_of_llama_cpp_says_of_positions_is_not_passed_over(tmp_path: Path) -> None:
    file = write_gguf(made("llama"), tmp_path / "tiny.gguf", llama__rope__scaling__type="yarn")
    with pytest.raises(ValueError, match=r"scales its positions \(llama\.rope\.scaling\.type\)"):
        convert(model=str(file), output=tmp_path / "x", to="drt")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_weights_stay_in_their_dtype_unless_told(dtype: str, tmp_path: Path) -> None:
    base = save(made("llama").to(getattr(torch, dtype)), tmp_path / "base")
    ours = converted(base, tmp_path / "same", "drt", *DRT)
    assert {x.dtype for x in ours.parameters()} == {getattr(torch, dtype)}
    theirs = load_file(base / "model.safetensors")
    assert torch.equal(ours.norm.weight, theirs["model.norm.weight"])
    wide = converted(base, tmp_path / "wide", "drt", *DRT, dtype="float32")
    assert {x.dtype for x in wide.parameters()} == {torch.float32}
    assert torch.equal(wide.norm.weight, theirs["model.norm.weight"].float())


def test_tokenizer_template_and_generation_come_along(tmp_path: Path) -> None:
    ours = converted(save(made("llama"), tmp_path / "base"), tmp_path / "ours", "drt", *DRT)
    assert AutoTokenizer.from_pretrained(tmp_path / "ours").chat_template == TEMPLATE
    assert ours.generation_config.max_new_tokens == 7
    assert (ours.config.eos_token_id, ours.config.pad_token_id) == (1, 0)


def test_tokens_without_an_embedding_are_left_out(tmp_path: Path) -> None:
    base = made("llama")
    save(base, tmp_path / "base")
    tokenizer = byte_level()
    tokenizer.add_tokens([f"<{n}>" for n in range(base.config.vocab_size - len(tokenizer))])
    last = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<mine>", "extra_special_tokens": ["<a>", "<0>"]})
    tokenizer.save_pretrained(tmp_path / "base")
    for file in ("config.json", "generation_config.json"):  # who pads with it mostly says so there too
        path = tmp_path / "base" / file
        path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": last}))
    ours = converted(tmp_path / "base", tmp_path / "ours", "drt", *DRT)
    kept = load(tmp_path / "ours").tokenizer  # as every command does
    assert len(kept) == last == ours.config.vocab_size
    assert (kept.pad_token, kept.extra_special_tokens) == (None, ["<0>"])
    assert ours.config.pad_token_id is ours.generation_config.pad_token_id is None
    assert kept("some <0> text")["input_ids"] == tokenizer("some <0> text")["input_ids"]
    assert max(kept("<mine><a>")["input_ids"]) < last
    for record in (
        _record(tmp_path / "ours"),
        convert(tmp_path / "base", tmp_path / "dry", "drt", DRT, dry_run=True),
    ):
        assert record["base"]["tokens_left_out"] == ["<mine>", "<a>"]
        assert any("<mine>" in line for line in report.lines(record))


# --- the folder --------------------------------------------------------------------------------------------------


def test_the_record_counts_every_parameter(tmp_path: Path) -> None:
    theirs = made("llama")
    ours = converted(save(theirs, tmp_path / "base"), tmp_path / "ours", "drt", *DRT)
    record = _record(tmp_path / "ours")
    counted = record["parameters"]
    assert counted["all"] == ours.num_parameters()
    assert counted["base"] == theirs.num_parameters() == counted["copied"] + counted["permuted"]
    assert counted["new"] == sum(row["parameters"] for row in record["parts"] if row["what"] == "new")
    assert all(row["starts_as"] for row in record["parts"] if row["what"] == "new")
    card = (tmp_path / "ours" / "README.md").read_text()
    assert f"Converted from base (llama, {counted['base']:,} parameters)" in card
    assert f"{counted['new']:,} new" in card


def test_a_dry_run_says_the_same_and_writes_nothing(tmp_path: Path) -> None:
    base = save(made("qwen3"), tmp_path / "base")
    before = sorted(tmp_path.rglob("*"))
    settings = {"model": str(base), "output": tmp_path / "ours", "to": "drt", "fields": DRT}
    said = convert(**settings, dry_run=True)
    assert sorted(tmp_path.rglob("*")) == before
    done = convert(**settings)
    assert said["parts"] == done["parts"]
    assert said["parameters"] == done["parameters"]
    assert said["fields"] == done["fields"]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    base = save(made("llama"), tmp_path / "base")
    with (
        largest_file(20_000),
        pytest.raises(ValueError, match=r"is full \(File too large\)\. Nothing is left of it\."),
    ):
        convert(model=str(base), output=tmp_path / "ours", to="drt", fields=DRT)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    base = save(made("llama"), tmp_path / "base")

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(
            model=str(base),
            output=tmp_path / "ours",
            to="drt",
            fields=DRT,
            progress=interrupt,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize("virtual_key", ["zero", "window"])
@pytest.mark.parametrize("memory_kv", ["shared", "group", "layer"])
def test_queries_of_chunks_begin_as_the_base_meets_keys_a_window_back(
    tmp_path: Path, memory_kv: str, virtual_key: str
) -> None:
    """q . k of Grouped Cross-Attention at step 0 is that of the base's layer for a key W positions before the query."""
    theirs = made("llama")
    changes = (*DRT, f"memory_kv={memory_kv}", f"virtual_key={virtual_key}", "num_retrieval_groups=2")
    ours = converted(save(theirs, tmp_path / "base"), tmp_path / "ours", "drt", *changes)
    c, x = ours.config, torch.randn(2, theirs.config.hidden_size, dtype=torch.float64)
    sets = ours.encoder.kv_proj(x[1]).unflatten(0, (2, -1, c.num_key_value_heads, c.head_dim))[0]
    for number, layer in enumerate(ours.upper_layers):
        read = {"shared": 0, "group": number // c.layers_per_group, "layer": number}[memory_kv]
        if virtual_key == "zero":
            q = layer.gca_q_proj(x[0]).view(c.num_attention_heads, c.head_dim)
        else:
            q = layer.attention.heads(x[None, :1])[0]
            q = rotate(q, rotary_where_a_window_ends(q, layer.window, layer.rope))[0, 0]
        found = q.view(c.num_key_value_heads, -1, c.head_dim) @ sets[read][..., None]
        own = ours.upper_layers[read * c.layers_per_group if memory_kv == "group" else read]
        with torch.no_grad(), in_float64():
            turns = rotary_table(c.sliding_window + 1, c.head_dim, c.rope, x)
            q = layer.attention.heads(x[:1])[0]
            k = own.attention.heads(x[1:] * own.attention_norm.weight)[1]
            q = rotate(q, turns[-1:])[0].view(c.num_key_value_heads, -1, c.head_dim)
            expected = q @ k[0][..., None]
        assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()
