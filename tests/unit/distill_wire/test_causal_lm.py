"""Oracle: the logits that transformers' own forward gives, on tiny random models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from distill_wire.causal_lm import (
    base_causal_lm,
    check_parts,
    head_function,
    logit_transform_of,
    split_causal_lm,
    transform_logits,
)
from distill_wire.types import CodecId, LogitTransform, TargetSpec
from tests.unit.distill_wire.answers import round_trip

V = 48
CPU = torch.device("cpu")
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    # Wide enough that a soft-cap bends and a scale shows.
    "initializer_range": 0.3,
}


def build(model: type, config: type, **options: Any) -> Any:
    torch.manual_seed(0)
    return model(config(**(SIZES | options))).eval()


def make_gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=V, initializer_range=0.3, **sizes, **ids)).eval()


MODELS: dict[str, tuple[Callable[[], Any], LogitTransform]] = {
    "gemma2, soft-cap": (
        lambda: build(Gemma2ForCausalLM, Gemma2Config, head_dim=8, final_logit_softcapping=2.0),
        LogitTransform(softcap=2.0),
    ),
    "cohere, logit_scale": (
        lambda: build(CohereForCausalLM, CohereConfig, logit_scale=0.25),
        LogitTransform(scale=0.25),
    ),
    "granite, logits_scaling": (
        lambda: build(GraniteForCausalLM, GraniteConfig, logits_scaling=8.0),
        LogitTransform(scale=0.125),
    ),
    "llama, tied": (
        lambda: build(LlamaForCausalLM, LlamaConfig, tie_word_embeddings=True),
        LogitTransform(),
    ),
    "llama, untied": (
        lambda: build(LlamaForCausalLM, LlamaConfig, tie_word_embeddings=False),
        LogitTransform(),
    ),
    "gpt2": (make_gpt2, LogitTransform()),
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_trunk_head_and_transform_give_the_models_own_logits(name: str) -> None:
    make, transform = MODELS[name]
    model = make()
    token_ids = torch.arange(30).reshape(2, 15)

    parts = split_causal_lm(model)
    check_parts(model, parts, device=CPU)
    hidden = parts.trunk(input_ids=token_ids, use_cache=False).last_hidden_state
    found = head_function(parts, vocab_size=V)(hidden)

    expected = model(input_ids=token_ids).logits
    assert (parts.transform, parts.head_rows) == (transform, V)
    assert expected.abs().max() > 0.5  # else a soft-cap of 2 would not show
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_known_model_passes_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name][0]().to(dtype)

    check_parts(model, split_causal_lm(model), device=CPU)


@pytest.mark.parametrize("name", MODELS)
def test_a_transform_that_is_one_percent_off_is_refused(name: str) -> None:
    model = MODELS[name][0]()
    parts = split_causal_lm(model)
    transform = dataclasses.replace(parts.transform, scale=parts.transform.scale * 1.01)

    with pytest.raises(ValueError, match="differs from its own logits"):
        check_parts(model, dataclasses.replace(parts, transform=transform), device=CPU)


@pytest.mark.parametrize(
    "make",
    [
        # It multiplies by what Granite divides by.
        lambda: build(HyperCLOVAXForCausalLM, HyperCLOVAXConfig, logits_scaling=0.5),
        # Its soft-cap has another name.
        lambda: build(
            RecurrentGemmaForCausalLM,
            RecurrentGemmaConfig,
            logits_soft_cap=2.0,
            lru_width=32,
            attention_window_size=16,
        ),
    ],
    ids=["hyperclovax", "recurrent_gemma"],
)
def test_a_released_model_with_an_unknown_transform_is_refused_by_name(
    make: Callable[[], Any],
) -> None:
    model = make()

    with pytest.raises(ValueError, match=f"of {type(model).__name__} differs from its own logits"):
        check_parts(model, split_causal_lm(model), device=CPU)


class ChangingLlama(LlamaForCausalLM):
    """A Llama that changes its logits, as a model with remote code may."""

    change: Callable[[Tensor], Tensor]

    def forward(self, **inputs: Any) -> Any:
        output = super().forward(**inputs)
        output.logits = type(self).change(output.logits)
        return output


@pytest.mark.parametrize("initializer_range", [0.3, 0.002])
@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits * 1.01,
        lambda logits: -logits,
        lambda logits: logits * torch.linspace(0.9, 1.1, V),
        lambda logits: logits.roll(1, dims=-1),
        lambda logits: logits * torch.nan,
    ],
    ids=["scaled", "negated", "scaled by column", "rolled", "nan"],
)
def test_logits_changed_in_an_unknown_way_are_refused_however_small_they_are(
    change: Callable[[Tensor], Tensor], initializer_range: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChangingLlama, "change", staticmethod(change), raising=False)
    model = build(ChangingLlama, LlamaConfig, initializer_range=initializer_range)

    with pytest.raises(ValueError, match="ChangingLlama differs from its own logits"):
        check_parts(model, split_causal_lm(model), device=CPU)


def test_a_head_of_zeros_is_no_reason_to_refuse() -> None:
    model = build(LlamaForCausalLM, LlamaConfig, tie_word_embeddings=False)
    nn.init.zeros_(model.lm_head.weight)

    check_parts(model, split_causal_lm(model), device=CPU)


@pytest.mark.parametrize(
    "adapter",
    [
        LoraConfig(r=2, target_modules=["q_proj", "lm_head"]),
        LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    ],
    ids=["lora on the head", "a trained copy of the head"],
)
def test_a_head_with_an_adapter_is_taken_apart(adapter: LoraConfig) -> None:
    model = build(LlamaForCausalLM, LlamaConfig, tie_word_embeddings=False)
    adapted = get_peft_model(model, adapter).eval()

    parts = split_causal_lm(base_causal_lm(adapted))

    assert parts.head_rows == V
    check_parts(base_causal_lm(adapted), parts, device=CPU)


def test_a_trunk_alone_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="LlamaModel cannot be taken apart"):
        split_causal_lm(build(LlamaModel, LlamaConfig))


@pytest.mark.parametrize("prefix", ["trunk", "base_of_me"])
def test_a_model_whose_prefix_names_no_trunk_is_refused_by_name(prefix: str) -> None:
    model = build(LlamaForCausalLM, LlamaConfig)
    object.__setattr__(model, "base_of_me", model)  # past nn.Module, which forbids the circle
    model.base_model_prefix = prefix

    with pytest.raises(ValueError, match="LlamaForCausalLM cannot be taken apart"):
        split_causal_lm(model)


def test_a_model_without_a_prefix_has_its_trunk_under_model() -> None:
    model = build(LlamaForCausalLM, LlamaConfig)
    model.base_model_prefix = ""

    assert split_causal_lm(model).trunk is model.model


@pytest.mark.parametrize(
    ("fields", "transform"),
    [
        ({}, LogitTransform()),
        ({"logit_scale": None, "final_logit_softcapping": None}, LogitTransform()),
        ({"logit_scale": 0.0625}, LogitTransform(scale=0.0625)),
        ({"logits_scaling": 16}, LogitTransform(scale=0.0625)),
        ({"final_logit_softcapping": 30}, LogitTransform(softcap=30.0)),
    ],
)
def test_a_transform_is_read_under_the_names_models_use(
    fields: dict[str, Any], transform: LogitTransform
) -> None:
    assert logit_transform_of(LlamaConfig(**fields)) == transform
    assert logit_transform_of(SimpleNamespace(**fields)) == transform  # not of transformers


def test_a_transform_is_read_from_the_text_part_of_a_model_that_also_sees() -> None:
    config = Gemma3Config(text_config={"final_logit_softcapping": 30.0})

    assert logit_transform_of(config) == LogitTransform(softcap=30.0)


@pytest.mark.parametrize(
    "transform",
    [LogitTransform(), LogitTransform(scale=0.25), LogitTransform(scale=2.0, softcap=3.0)],
)
def test_the_scale_comes_before_the_cap(transform: LogitTransform) -> None:
    raw_NV = torch.linspace(-9, 9, 12).reshape(2, 6)

    found = transform_logits(raw_NV, transform, vocab_size=6)

    exact_NV = raw_NV.double() * transform.scale
    if transform.softcap:
        exact_NV = transform.softcap * (exact_NV / transform.softcap).tanh()
    torch.testing.assert_close(found.double(), exact_NV, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("filling", [0.0, 1e4, -torch.inf, torch.nan])
def test_pbr_20_padding_columns_have_probability_zero_whatever_they_hold(
    dtype: torch.dtype, filling: float
) -> None:
    raw_NV = torch.full((1, 6), filling, dtype=dtype)
    raw_NV[0, :3] = torch.tensor([-5.0, -6.0, -7.0])

    logits_NV = transform_logits(raw_NV, LogitTransform(), vocab_size=3)

    assert (logits_NV.dtype, tuple(logits_NV.shape)) == (torch.float32, (1, 3))
    exact_NV = torch.tensor([[-5.0, -6.0, -7.0]]).double().softmax(-1)
    torch.testing.assert_close(logits_NV.double().softmax(-1), exact_NV, rtol=0, atol=1e-7)


def test_pbr_20_zeros_in_the_padding_would_take_nearly_all_the_mass() -> None:
    padded = torch.tensor([-5.0, -6.0, -7.0, 0.0, 0.0, 0.0]).double().softmax(-1)

    assert padded[3:].sum().item() == pytest.approx(0.9966, abs=5e-5)


def test_pbr_20_a_bfloat16_student_and_an_fp32_teacher_meet_in_fp32() -> None:
    teacher = transform_logits(
        torch.tensor([[-5.0, -6.0, -7.0, 0, 0, 0]]), LogitTransform(), vocab_size=3
    )
    student_raw = torch.tensor([[-5.0, -6.0, -7.0, 0, 0]]).bfloat16().requires_grad_()

    student = transform_logits(student_raw, LogitTransform(), vocab_size=3)
    loss = nn.functional.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    loss.backward()

    assert loss.item() == pytest.approx(0.0, abs=1e-7)
    assert student_raw.grad is not None and student_raw.grad.dtype == torch.bfloat16
    assert student_raw.grad[:, 3:].abs().max() == 0


@torch.no_grad()
def test_pbr_20_padding_rows_of_a_real_head_are_never_kept() -> None:
    model = build(LlamaForCausalLM, LlamaConfig, vocab_size=V + 16, tie_word_embeddings=False)
    model.lm_head.weight[V:] *= 100  # they would win every position
    parts = split_causal_lm(model)
    hidden_ND = parts.trunk(input_ids=torch.arange(20)[None]).last_hidden_state[0]
    spec = TargetSpec(codec=CodecId.TOPK, top_k=8)

    decoded = round_trip(
        hidden_ND, spec, head=head_function(parts, vocab_size=V), vocab_size=V
    ).tensors

    assert parts.head_rows == V + 16
    assert decoded["token_ids"].max() < V
    exact_NV = model(input_ids=torch.arange(20)[None]).logits[0, :, :V].double().log_softmax(-1)
    kept_NK = exact_NV.gather(-1, decoded["token_ids"])
    assert torch.equal(kept_NK.sort(-1).values, exact_NV.topk(8).values.flip(-1))
    torch.testing.assert_close(decoded["logprobs"].double(), kept_NK, rtol=0, atol=0.02)
