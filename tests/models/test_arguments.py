"""What a model is called with: other shapes, other types and what only other models know are refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.tiny import drt, tokens

WRONG_IDS: list[Any] = [
    [1, 2, 3],
    [[1, 2, 3]],
    "a text",
    torch.tensor([1, 2, 3]),
    torch.tensor(3),
    torch.zeros(1, 2, 3, dtype=torch.int64),
    torch.zeros(1, 3),
]
CALLS = {
    "forward": lambda model, ids: model(ids),
    "read": lambda model, ids: model.read(ids),
    "generate": lambda model, ids: model.generate(ids, max_new_tokens=2),
    "generate by name": lambda model, ids: model.generate(input_ids=ids, max_new_tokens=2),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("ids", WRONG_IDS, ids=lambda ids: str(ids).replace("\n", ""))
def test_ids_of_another_type_or_shape_say_what_was_expected(call: str, ids: Any) -> None:
    with pytest.raises(ValueError, match=r"^input_ids: expected ") as caught:
        CALLS[call](drt(), ids)
    said = str(caught.value)
    assert "\n" not in said
    if isinstance(ids, torch.Tensor) and ids.dim() == 1:
        assert "Pass input_ids[None] for one text" in said


def test_no_ids_at_all() -> None:
    with pytest.raises(ValueError, match=r"^input_ids: expected a tensor .* got none"):
        drt()()


@pytest.mark.parametrize(
    "name", ["attention_mask", "labels", "document_ids", "neighbours", "neighbour_scores", "noise_seed"]
)
def test_lists_of_numbers_are_no_tensors(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor, got list"):
        drt()(tokens(3), **{name: [[1, 1, 1]]})
    if name == "attention_mask":
        for use in (lambda mask: drt().read(tokens(3), attention_mask=mask),
                    lambda mask: drt().generate(tokens(3), attention_mask=mask)):  # fmt: skip
            with pytest.raises(ValueError, match=f"^{name}: expected a tensor, got list"):
                use([[1, 1, 1]])


@pytest.mark.parametrize(
    "came",
    [torch.tensor([[1]]), torch.tensor([1, 2]), torch.tensor(1), torch.tensor([1.0]), torch.tensor([True])],
)
def test_each_row_has_a_seed(came: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"^noise_seed: expected int64 of shape \[B\] = \(1,\), got "):
        drt()(tokens(3), noise_seed=came)


@pytest.mark.parametrize(
    "other",
    [
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"inputs_embeds": torch.zeros(1, 3, 16)},
        {"position_ids": torch.arange(3)[None]},
        {"token_type_ids": torch.zeros(1, 3, dtype=torch.int64)},
        {"no_such_thing": 7},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_only_other_models_know_is_refused_in_words(other: dict[str, Any]) -> None:
    model, ids = drt(), tokens(3)
    with pytest.raises(ValueError, match=f"^{next(iter(other))}: expected none, got"):
        model(ids, **other)
    off = {name: False if value is True else None for name, value in other.items()}
    assert torch.equal(model(ids, **off).logits, model(ids).logits)
    if "inputs_embeds" in other:
        with pytest.raises(ValueError, match=r"^inputs_embeds: "):
            model(**other)


@pytest.mark.parametrize("came", [-1, 1.5, True, torch.tensor([3])], ids=str)
def test_counts_that_are_none_are_refused(came: Any) -> None:
    model = drt()
    with pytest.raises(ValueError, match=r"^logits_to_keep: expected a whole number of at least 0"):
        model(tokens(5), logits_to_keep=came)
    with pytest.raises(ValueError, match=r"^prefill_chunk_size: expected a whole number of at least 1"):
        model(tokens(5), prefill_chunk_size=came)
    with pytest.raises(ValueError, match=r"^num_tokens: expected a whole number of at least 0"):
        model.new_cache(num_tokens=came)


@pytest.mark.parametrize("came", ["bfloat16", torch.int16, torch.float8_e4m3fn], ids=str)
def test_a_memory_is_of_numbers_that_can_be_saved(came: Any) -> None:
    with pytest.raises(ValueError, match=r"^memory_dtype: expected torch\.float64, .*torch\.int8 or None"):
        drt().new_cache(memory_dtype=came)


def test_landmark_vectors_are_not_quantized() -> None:
    with pytest.raises(
        ValueError, match=r"^memory_dtype: expected float32, bfloat16 or float16 with memory_tier"
    ):
        drt().new_cache("tokens", memory_dtype=torch.int8)


def test_nothing_is_sampled_at_temperature_0() -> None:
    with pytest.raises(ValueError, match=r"^temperature: expected more than 0 with do_sample=True, got 0\."):
        drt().generate(tokens(5), do_sample=True, temperature=0.0, max_new_tokens=1)


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, float("nan"), float("inf"), -1.0, 1e300])
def test_a_temperature_that_nothing_can_be_divided_by_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        drt().generate(tokens(3), do_sample=True, temperature=temperature, max_new_tokens=2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{"do_sample": True}, {"do_sample": False}, {"num_beams": 2}], ids=str)
def test_logits_that_are_no_numbers_are_no_answer(value: float, options: dict[str, Any]) -> None:
    model = drt()
    with torch.no_grad():
        model.embed_tokens.weight[7] = value
    with pytest.raises(ValueError, match=r"^model: expected finite logits"):
        model.generate(torch.tensor([[1, 7, 2]]), max_new_tokens=3, **options)
