"""Oracle: the softmax of the whole vocabulary in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from distill_wire.codecs import CODECS
from distill_wire.codecs.base import check_no_nan, take
from distill_wire.codecs.topk import LARGEST_SUM_ERROR
from distill_wire.errors import FrameCorrupt, RequestInvalid
from distill_wire.types import CodecId, TargetSpec

TOPK = CODECS[CodecId.TOPK]
DENSE = CODECS[CodecId.DENSE]

# Two fp32 roundings of a logit's distance to the maximum, and one of the sum.
FP32 = {"rtol": 3e-7, "atol": 1e-6}


def exact_logprobs(logits_NV: Tensor, temperature: float) -> Tensor:
    return (logits_NV.double() / temperature).log_softmax(-1)


def topk(k: int, temperature: float = 1.0) -> TargetSpec:
    return TargetSpec(codec=CodecId.TOPK, top_k=k, temperature=temperature)


def decode_topk(tensors: dict[str, Tensor], *, k: int, vocab_size: int = 8) -> dict[str, Tensor]:
    num_positions = len(next(iter(tensors.values())))
    return TOPK.decode(tensors, topk(k), vocab_size=vocab_size, num_positions=num_positions)


def assert_exact(logits_NV: Tensor, *, k: int, temperature: float = 1.0) -> dict[str, Tensor]:
    """Compare top-k and tail with the float64 distribution; give the decoded tensors."""
    encoded = TOPK.encode(logits_NV, topk(k, temperature))
    decoded = decode_topk(encoded, k=k, vocab_size=logits_NV.shape[-1])
    exact_NV = exact_logprobs(logits_NV, temperature)
    expected_NK = exact_NV.topk(k, dim=-1).values
    rest_NV = exact_NV.scatter(-1, decoded["token_ids"], -torch.inf)
    torch.testing.assert_close(
        exact_NV.gather(-1, decoded["token_ids"]), expected_NK, rtol=0, atol=1e-7
    )
    torch.testing.assert_close(decoded["logprobs"].double(), expected_NK, **FP32)
    torch.testing.assert_close(decoded["tail_logprob"].double(), rest_NV.logsumexp(-1), **FP32)
    return decoded


@pytest.mark.parametrize(("temperature", "mass"), [(1.0, 0.469), (2.0, 0.145)])
def test_pbr_10_top_k_is_measured_over_the_whole_vocabulary_at_its_temperature(
    temperature: float, mass: float
) -> None:
    logits_NV = torch.tensor([[4.0, 3.0, 2.0, 1.0] + [0.0] * 96])

    decoded = assert_exact(logits_NV, k=4, temperature=temperature)

    assert decoded["token_ids"].tolist() == [[0, 1, 2, 3]]
    assert decoded["logprobs"].exp().sum().item() == pytest.approx(mass, abs=5e-4)
    assert decoded["tail_logprob"].exp().item() == pytest.approx(1 - mass, abs=5e-4)


def test_pbr_09_the_tail_that_travels_makes_the_divergence_of_two_buckets_positive() -> None:
    teacher, student = [0.5, 0.3, 0.2], [0.8, 0.1, 0.1]

    decoded = decode_topk(TOPK.encode(torch.tensor([teacher]).log(), topk(1)), k=1, vocab_size=3)

    p, tail = decoded["logprobs"].exp().item(), decoded["tail_logprob"].exp().item()
    without_tail = p * math.log(p / student[0])
    assert without_tail == pytest.approx(-0.23500, abs=5e-6)
    assert without_tail + tail * math.log(tail / 0.2) == pytest.approx(0.22314, abs=5e-6)


@pytest.mark.parametrize("temperature", [0.05, 0.5, 1.0, 2.0, 10.0])
@pytest.mark.parametrize("k", [1, 7, 63])
def test_top_k_and_tail_are_the_full_distribution(k: int, temperature: float) -> None:
    torch.manual_seed(0)

    decoded = assert_exact(4 * torch.randn(32, 64), k=k, temperature=temperature)

    assert (decoded["logprobs"].diff(dim=-1) <= 0).all()


def test_k_one_below_the_vocabulary_and_its_tail_are_the_dense_distribution() -> None:
    torch.manual_seed(0)
    logits_NV = torch.randn(16, 32)

    decoded = decode_topk(TOPK.encode(logits_NV, topk(31)), k=31, vocab_size=32)

    # The tail is the one id that is not named.
    left_N1 = (torch.arange(32).sum() - decoded["token_ids"].sum(-1))[:, None]
    sparse_NV = torch.empty(16, 32)
    sparse_NV.scatter_(-1, decoded["token_ids"], decoded["logprobs"])
    sparse_NV.scatter_(-1, left_N1, decoded["tail_logprob"][:, None])
    torch.testing.assert_close(sparse_NV.double(), exact_logprobs(logits_NV, 1.0), **FP32)


@pytest.mark.parametrize("gap", [20.0, 40.0, 80.0])
def test_the_tail_survives_when_the_kept_mass_rounds_to_one(gap: float) -> None:
    decoded = assert_exact(torch.tensor([[gap, 0.0, 0.0, 0.0]]), k=1)

    assert decoded["logprobs"].exp().item() == 1.0
    assert decoded["tail_logprob"].item() == pytest.approx(math.log(3) - gap, rel=1e-6)


@pytest.mark.parametrize("offset", [-3000.0, -100.0, 300.0, 30_000.0])
@pytest.mark.parametrize("temperature", [0.01, 1.0])
def test_an_answer_does_not_depend_on_a_constant_in_the_logits(
    offset: float, temperature: float
) -> None:
    torch.manual_seed(0)
    # Multiples of 1/64, so that adding the offset rounds nothing.
    logits_NV = torch.randn(16, 100).mul(128).round() / 64

    moved = TOPK.encode(logits_NV + offset, topk(8, temperature))

    expected = TOPK.encode(logits_NV, topk(8, temperature))
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

    decoded = decode_topk(TOPK.encode(logits_NV, topk(2, temperature)), k=2, vocab_size=4)

    assert decoded["logprobs"].exp().tolist()[0] == pytest.approx(kept)
    assert decoded["tail_logprob"].exp().item() == pytest.approx(tail)


def test_pbr_23_a_masked_vocabulary_is_encoded_with_minus_infinity() -> None:
    logits_NV = torch.full((2, 16), -torch.inf)
    logits_NV[:, [3, 9, 12]] = torch.tensor([[0.0, 1.0, 2.0], [2.0, 2.0, 2.0]])

    decoded = decode_topk(TOPK.encode(logits_NV, topk(8)), k=8, vocab_size=16)

    assert decoded["logprobs"].isneginf().sum(-1).tolist() == [5, 5]
    assert decoded["tail_logprob"].isneginf().all()
    full_NV = torch.zeros(2, 16).double()
    full_NV.scatter_(-1, decoded["token_ids"], decoded["logprobs"].double().exp())
    torch.testing.assert_close(full_NV, exact_logprobs(logits_NV, 1.0).exp(), rtol=0, atol=1e-7)


def test_encoding_leaves_the_logits_as_they_were() -> None:
    logits_NV = torch.randn(4, 8)
    before = logits_NV.clone()

    for codec, spec in ((TOPK, topk(2, 0.5)), (DENSE, TargetSpec(codec=CodecId.DENSE))):
        codec.encode(logits_NV, spec)

    assert torch.equal(logits_NV, before)


@pytest.mark.parametrize("k", [0, 64, 65, 2**31])
def test_k_outside_the_vocabulary_is_refused(k: int) -> None:
    spec = TargetSpec(codec=CodecId.DENSE, top_k=k)  # TOPK with 0 is refused earlier

    with pytest.raises(RequestInvalid, match=rf"top_k must be in \[1, 64\), got {k}"):
        TOPK.check(spec, vocab_size=64)


@pytest.mark.parametrize("k", [1, 63])
def test_k_inside_the_vocabulary_is_served(k: int) -> None:
    TOPK.check(topk(k), vocab_size=64)


def test_dense_is_served_for_every_spec() -> None:
    DENSE.check(TargetSpec(codec=CodecId.DENSE, temperature=3.0), vocab_size=2)


def encoded_topk() -> dict[str, Tensor]:
    return TOPK.encode(torch.arange(24.0).reshape(3, 8), topk(2))


@pytest.mark.parametrize(("token", "named"), [(8, 8), (-1, -1), (2**31 - 1, 2**31 - 1)])
def test_an_id_outside_the_vocabulary_is_refused_by_value(token: int, named: int) -> None:
    tensors = encoded_topk()
    tensors["token_ids"][1, 1] = token

    with pytest.raises(FrameCorrupt, match=rf"names token {named}, the vocabulary has ids 0\.\.7"):
        decode_topk(tensors, k=2)


@pytest.mark.parametrize("name", ["logprobs", "tail_logprob"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_pbr_23_nan_and_plus_infinity_are_refused_by_position(name: str, value: float) -> None:
    tensors = encoded_topk()
    tensors[name][2] = value

    with pytest.raises(FrameCorrupt, match=rf"{name} holds NaN or \+inf at wanted position 2"):
        decode_topk(tensors, k=2)


@pytest.mark.parametrize("error", [0.01, -0.01, 1.0, -math.inf])
def test_a_distribution_that_does_not_add_up_is_refused(error: float) -> None:
    tensors = encoded_topk()
    tensors["logprobs"][1] += error
    tensors["tail_logprob"][1] += error

    with pytest.raises(FrameCorrupt, match="add up to"):
        decode_topk(tensors, k=2)


def test_rounding_of_a_large_vocabulary_stays_far_from_the_sum_that_is_refused() -> None:
    torch.manual_seed(0)
    encoded = TOPK.encode(3 * torch.randn(4, 262_144) - 200, topk(256, 0.7))

    total_N = torch.cat([encoded["logprobs"], encoded["tail_logprob"][:, None]], -1).logsumexp(-1)

    assert total_N.abs().max().item() < LARGEST_SUM_ERROR / 10


@pytest.mark.parametrize(
    ("name", "tensor", "found"),
    [
        ("token_ids", torch.zeros(3, 2), "torch.float32 (3, 2)"),
        ("token_ids", torch.zeros(3, 3, dtype=torch.int32), "torch.int32 (3, 3)"),
        ("logprobs", torch.zeros(3, 2).half(), "torch.float16 (3, 2)"),
        ("logprobs", torch.zeros(2, 3), "torch.float32 (2, 3)"),
        ("tail_logprob", torch.zeros(3, 1), "torch.float32 (3, 1)"),
        ("tail_logprob", torch.zeros(2), "torch.float32 (2,)"),
    ],
)
def test_a_tensor_of_another_shape_or_dtype_is_refused(
    name: str, tensor: Tensor, found: str
) -> None:
    with pytest.raises(FrameCorrupt) as caught:
        decode_topk(encoded_topk() | {name: tensor}, k=2)

    assert f"tensor {name} is {found}, expected " in str(caught.value)


@pytest.mark.parametrize("name", ["token_ids", "logprobs", "tail_logprob"])
def test_a_missing_tensor_is_refused_with_what_is_there(name: str) -> None:
    tensors = {key: tensor for key, tensor in encoded_topk().items() if key != name}

    with pytest.raises(FrameCorrupt, match=f"lacks tensor {name}; it holds {', '.join(tensors)}"):
        decode_topk(tensors, k=2)


def test_dense_rounds_a_logit_less_its_rows_maximum_to_the_nearest_float16() -> None:
    torch.manual_seed(0)
    logits_NV = 30 * torch.randn(16, 64)
    spec = TargetSpec(codec=CodecId.DENSE, temperature=2.0)

    decoded = DENSE.decode(DENSE.encode(logits_NV, spec), spec, vocab_size=64, num_positions=16)[
        "logits"
    ]

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
    logits_NV = torch.zeros(3, 4).half()
    logits_NV[0, 1] = -torch.inf
    DENSE.decode({"logits": logits_NV}, spec, vocab_size=4, num_positions=3)
    logits_NV[2, 3] = value

    with pytest.raises(FrameCorrupt, match=r"logits holds NaN or \+inf at wanted position 2"):
        DENSE.decode({"logits": logits_NV}, spec, vocab_size=4, num_positions=3)


def test_take_gives_the_tensor_itself_and_an_empty_one_holds_no_nan() -> None:
    empty = torch.empty(0, 5)

    assert take({"a": empty}, "a", dtype=torch.float32, shape=(0, 5)) is empty
    check_no_nan(empty, "a")
