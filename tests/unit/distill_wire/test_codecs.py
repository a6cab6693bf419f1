"""Oracle: the softmax of the whole vocabulary in float64; half a step of each rounding."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distill_wire.codecs import CODECS, LossKind, check_loss, codec_by_name
from distill_wire.codecs.base import check_no_nan, take
from distill_wire.errors import FrameCorrupt, RequestInvalid
from distill_wire.types import CodecId, TargetSpec
from tests.unit.distill_wire.answers import encode, round_trip

TOPK = CODECS[CodecId.TOPK]
DENSE = CODECS[CodecId.DENSE]


def exact_logprobs(logits_NV: Tensor, temperature: float) -> Tensor:
    return (logits_NV.double() / temperature).log_softmax(-1)


def topk(k: int, temperature: float = 1.0) -> TargetSpec:
    return TargetSpec(codec=CodecId.TOPK, top_k=k, temperature=temperature)


def decode(
    tensors: dict[str, Tensor], spec: TargetSpec, *, vocab_size: int = 8
) -> dict[str, Tensor]:
    return CODECS[spec.codec].decode(
        tensors,
        spec,
        vocab_size=vocab_size,
        hidden_size=vocab_size,
        num_positions=len(tensors["entropy"]),
    )


def assert_near(logits_NV: Tensor, *, k: int, temperature: float = 1.0) -> dict[str, Tensor]:
    """Compare top-k and tail with the float64 distribution; give the decoded tensors."""
    decoded = dict(round_trip(logits_NV, topk(k, temperature)).tensors)
    exact_NV = exact_logprobs(logits_NV, temperature)
    kept_NK = exact_NV.gather(-1, decoded["token_ids"])
    tail_N = exact_NV.scatter(-1, decoded["token_ids"], -torch.inf).logsumexp(-1)
    assert torch.equal(kept_NK.sort(-1).values, exact_NV.topk(k, dim=-1).values.flip(-1))
    # One step for a code that had to leave 0 to the best, and as much for the normalisation.
    step = float((kept_NK.amax(-1) - kept_NK.amin(-1)).max()) / 254 * 1.01
    bound = 2 * step + 2**-11 * float((tail_N - kept_NK.amax(-1)).abs().max()) + 1e-6
    assert (decoded["logprobs"].double() - kept_NK).abs().max() <= bound
    assert (decoded["tail_logprob"].double() - tail_N).abs().max() <= bound
    total_N = torch.cat([decoded["logprobs"], decoded["tail_logprob"][:, None]], -1).logsumexp(-1)
    assert total_N.abs().max() < 1e-6
    assert torch.equal(exact_NV.gather(-1, decoded["best_ids"][:, None])[:, 0], exact_NV.amax(-1))
    return decoded


@pytest.mark.parametrize(("temperature", "mass"), [(1.0, 0.469), (2.0, 0.145)])
def test_pbr_10_top_k_is_measured_over_the_whole_vocabulary_at_its_temperature(
    temperature: float, mass: float
) -> None:
    logits_NV = torch.tensor([[4.0, 3.0, 2.0, 1.0] + [0.0] * 96])

    decoded = assert_near(logits_NV, k=4, temperature=temperature)

    assert decoded["token_ids"].tolist() == [[0, 1, 2, 3]]
    assert decoded["logprobs"].exp().sum().item() == pytest.approx(mass, abs=1e-3)
    assert decoded["tail_logprob"].exp().item() == pytest.approx(1 - mass, abs=1e-3)


def test_pbr_09_the_tail_that_travels_makes_the_divergence_of_two_buckets_positive() -> None:
    teacher, student = [0.5, 0.3, 0.2], [0.8, 0.1, 0.1]

    decoded = round_trip(torch.tensor([teacher]).log(), topk(1)).tensors

    p, tail = decoded["logprobs"].exp().item(), decoded["tail_logprob"].exp().item()
    without_tail = p * math.log(p / student[0])
    assert without_tail == pytest.approx(-0.23500, abs=5e-6)
    assert without_tail + tail * math.log(tail / 0.2) == pytest.approx(0.22314, abs=5e-6)


@pytest.mark.parametrize("temperature", [0.05, 0.5, 1.0, 2.0, 10.0])
@pytest.mark.parametrize("k", [1, 7, 63])
def test_top_k_and_tail_are_the_full_distribution(k: int, temperature: float) -> None:
    torch.manual_seed(0)

    decoded = assert_near(4 * torch.randn(32, 64), k=k, temperature=temperature)

    assert (decoded["token_ids"].diff(dim=-1) > 0).all()


@pytest.mark.parametrize("gap", [9.0, 20.0, 80.0])
def test_the_tail_survives_when_the_kept_mass_rounds_to_one(gap: float) -> None:
    decoded = assert_near(torch.tensor([[gap, 0.0, 0.0, 0.0]]), k=1)

    assert decoded["tail_logprob"].item() == pytest.approx(math.log(3) - gap, rel=2**-11)


@pytest.mark.parametrize("offset", [-3000.0, -100.0, 300.0, 30_000.0])
@pytest.mark.parametrize("temperature", [0.01, 1.0])
def test_an_answer_does_not_depend_on_a_constant_in_the_logits(
    offset: float, temperature: float
) -> None:
    torch.manual_seed(0)
    # Multiples of 1/64, so that adding the offset rounds nothing.
    logits_NV = torch.randn(16, 100).mul(128).round() / 64

    moved = encode(logits_NV + offset, topk(8, temperature))

    expected = encode(logits_NV, topk(8, temperature))
    for name, tensor in expected.items():
        torch.testing.assert_close(moved[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("temperature", "kept", "tail"),
    [(1e-38, [1.0, 0.0], 0.0), (1e-6, [1.0, 0.0], 0.0), (1e30, [0.25, 0.25], 0.5)],
)
def test_an_extreme_temperature_gives_the_limit_and_no_nan(
    temperature: float, kept: list[float], tail: float
) -> None:
    logits_NV = torch.tensor([[300.0, 1.0, -2.0, 299.0]])

    decoded = round_trip(logits_NV, topk(2, temperature)).tensors

    assert sorted(decoded["logprobs"].exp().tolist()[0], reverse=True) == pytest.approx(
        kept, abs=1e-4
    )
    assert decoded["tail_logprob"].exp().item() == pytest.approx(tail, abs=1e-4)


def test_pbr_23_a_masked_vocabulary_is_encoded_with_minus_infinity() -> None:
    logits_NV = torch.full((2, 16), -torch.inf)
    logits_NV[:, [3, 9, 12]] = torch.tensor([[0.0, 1.0, 2.0], [2.0, 2.0, 2.0]])

    decoded = round_trip(logits_NV, topk(8)).tensors

    assert decoded["logprobs"].isneginf().sum(-1).tolist() == [5, 5]
    assert decoded["tail_logprob"].isneginf().all()
    full_NV = torch.zeros(2, 16).double()
    full_NV.scatter_(-1, decoded["token_ids"], decoded["logprobs"].double().exp())
    torch.testing.assert_close(full_NV, exact_logprobs(logits_NV, 1.0).exp(), rtol=0, atol=5e-3)


def test_two_nearly_equal_tokens_keep_their_order() -> None:
    logits_NV = torch.tensor([[5.0, 5.0001, -9.0, -9.0], [5.0001, 5.0, -9.0, -9.0]])

    assert round_trip(logits_NV, topk(3)).tensors["best_ids"].tolist() == [1, 0]


@pytest.mark.parametrize("k", [0, 64, 65, 2**31])
def test_k_outside_the_vocabulary_is_refused(k: int) -> None:
    spec = TargetSpec(codec=CodecId.DENSE, top_k=k)  # TOPK with 0 is refused earlier

    with pytest.raises(RequestInvalid, match=rf"top_k must be in \[1, 64\), got {k}"):
        TOPK.check(spec, vocab_size=64)


@pytest.mark.parametrize("k", [1, 63])
def test_k_inside_the_vocabulary_is_served(k: int) -> None:
    TOPK.check(topk(k), vocab_size=64)


@pytest.mark.parametrize("codec", [CodecId.DENSE, CodecId.HIDDEN8])
def test_whole_distributions_are_served_for_every_spec(codec: CodecId) -> None:
    CODECS[codec].check(TargetSpec(codec=codec, temperature=3.0), vocab_size=2)


def encoded_topk() -> dict[str, Tensor]:
    return encode(torch.arange(24.0).reshape(3, 8), topk(2))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_pbr_23_nan_and_plus_infinity_are_refused_by_position(value: float) -> None:
    tensors = encoded_topk()
    tensors["tail"][2] = value

    with pytest.raises(FrameCorrupt, match=r"tail holds NaN or \+inf at wanted position 2"):
        decode(tensors, topk(2))


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_an_impossible_step_is_refused(value: float) -> None:
    tensors = encoded_topk()
    tensors["step"][1] = value

    with pytest.raises(FrameCorrupt, match="step holds a scale that is not finite"):
        decode(tensors, topk(2))


@pytest.mark.parametrize("codes", [[0, 0], [3, 4]])
def test_a_position_has_exactly_one_most_likely_id(codes: list[int]) -> None:
    tensors = encoded_topk()
    tensors["codes"][1] = torch.tensor(codes, dtype=torch.uint8)

    with pytest.raises(FrameCorrupt, match="exactly one most likely id"):
        decode(tensors, topk(2))


def test_another_number_of_ids_than_k_is_refused() -> None:
    with pytest.raises(FrameCorrupt, match="a position holds 2 ids, expected 3"):
        decode(encoded_topk(), topk(3))
    with pytest.raises(FrameCorrupt, match="a position holds 2 ids, at most 1 fit"):
        decode(encoded_topk(), topk(1))


@pytest.mark.parametrize(
    ("name", "tensor", "found"),
    [
        ("ids_low", torch.zeros(3, 2), "torch.float32 (3, 2)"),
        ("ids_high", torch.zeros(3, dtype=torch.int8), "torch.int8 (3,)"),
        ("codes", torch.zeros(3, 3, dtype=torch.uint8), "torch.uint8 (3, 3)"),
        ("codes", torch.zeros(3, 2, dtype=torch.int8), "torch.int8 (3, 2)"),
        ("step", torch.zeros(3, 1), "torch.float32 (3, 1)"),
        ("tail", torch.zeros(3).half(), "torch.float16 (3,)"),
    ],
)
def test_a_tensor_of_another_shape_or_dtype_is_refused(
    name: str, tensor: Tensor, found: str
) -> None:
    with pytest.raises(FrameCorrupt) as caught:
        decode(encoded_topk() | {name: tensor}, topk(2))

    assert f"tensor {name} is {found}, expected " in str(caught.value)


@pytest.mark.parametrize("name", ["codes", "step", "tail"])
def test_a_missing_tensor_is_refused_with_what_is_there(name: str) -> None:
    tensors = {key: tensor for key, tensor in encoded_topk().items() if key != name}

    with pytest.raises(FrameCorrupt, match=f"lacks tensor {name}; it holds {', '.join(tensors)}"):
        decode(tensors, topk(2))


def test_dense_rounds_a_logit_less_its_rows_maximum_to_the_nearest_float16() -> None:
    torch.manual_seed(0)
    logits_NV = 30 * torch.randn(16, 64)
    spec = TargetSpec(codec=CodecId.DENSE, temperature=2.0)

    decoded = round_trip(logits_NV, spec).tensors["logits"]

    # float16 has 11 significant bits, so the nearest one is within a 2**-11 part.
    centred_NV = logits_NV.double() - logits_NV.double().amax(-1, keepdim=True)
    assert decoded.dtype == torch.float16
    assert ((decoded.double() - centred_NV).abs() <= 2**-11 * centred_NV.abs() + 1e-5).all()
    exact_NV, found_NV = exact_logprobs(logits_NV, 2.0), exact_logprobs(decoded, 2.0)
    bound_N1 = 2 * 2**-11 * centred_NV.abs().amax(-1, keepdim=True) / 2.0 + 1e-5
    assert ((exact_NV - found_NV).abs() <= bound_N1).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_dense_refuses_nan_and_plus_infinity_but_not_minus_infinity(value: float) -> None:
    spec = TargetSpec(codec=CodecId.DENSE)
    tensors = encode(torch.zeros(3, 4), spec)
    tensors["logits"][0, 1] = -torch.inf
    decode(tensors, spec, vocab_size=4)
    tensors["logits"][2, 3] = value

    with pytest.raises(FrameCorrupt, match=r"logits holds NaN or \+inf at wanted position 2"):
        decode(tensors, spec, vocab_size=4)


def test_take_gives_the_tensor_itself_and_an_empty_one_holds_no_nan() -> None:
    empty = torch.empty(0, 5)

    assert take({"a": empty}, "a", dtype=torch.float32, shape=(0, 5)) is empty
    check_no_nan(empty, "a")


def test_a_codec_is_found_by_its_name() -> None:
    assert {codec_by_name(codec.name).id for codec in CODECS.values()} == set(CodecId)
    with pytest.raises(ValueError, match="codec 'top-k' is unknown; this release has topk, dense"):
        codec_by_name("top-k")


@pytest.mark.parametrize("loss", [LossKind.REVERSE_KL, LossKind.JSD])
def test_a_sampled_codec_is_refused_for_other_losses_with_those_that_would_do(
    loss: LossKind,
) -> None:
    check_loss(codec_by_name("threshold"), LossKind.FORWARD_KL)
    message = f"threshold feeds forward KL, not {loss.value}; codecs that do: topk, dense, hidden8"

    with pytest.raises(ValueError, match=message):
        check_loss(codec_by_name("threshold"), loss)


@pytest.mark.parametrize("codec", list(CodecId))
def test_encoding_leaves_the_logits_as_they_were(codec: CodecId) -> None:
    spec = replace(topk(2, 0.5), codec=codec, num_draws=5)
    logits_NV = torch.randn(4, 8)
    before = logits_NV.clone()

    encode(logits_NV, spec)

    assert torch.equal(logits_NV, before)
