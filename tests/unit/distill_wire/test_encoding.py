"""Oracle: the softmax of the whole vocabulary in float64, and encoding all positions at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from distill_wire.codecs import CODECS
from distill_wire.errors import TeacherFailed
from distill_wire.frame import read_frame
from distill_wire.targets import STATISTICS_BYTES, answer_bytes_bound, decode_target
from distill_wire.types import CodecId, TargetSpec
from tests.unit.distill_wire.answers import (
    SPECS,
    V,
    describe,
    encode,
    frame_of,
    make_request,
    random_logits,
    read,
    round_trip,
)

every_codec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@every_codec
def test_entropy_and_gold_logprob_are_those_of_the_whole_vocabulary(spec: TargetSpec) -> None:
    logits_NV = random_logits(40)

    target = round_trip(logits_NV, spec)

    scaled_NV = (logits_NV.double() / spec.temperature).log_softmax(-1)
    exact_N = -(scaled_NV.exp() * scaled_NV).sum(-1)
    gold_N = logits_NV.double().log_softmax(-1)[:, 1]  # at temperature 1, whatever was asked
    # float16 has 11 significant bits.
    torch.testing.assert_close(target.entropy_N.double(), exact_N, rtol=2**-11, atol=1e-6)
    torch.testing.assert_close(target.gold_logprob_N.double(), gold_N, rtol=2**-11, atol=1e-6)
    assert (target.num_positions, target.spec) == (40, spec)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_framed_answer_is_the_one_of_this_process_bit_for_bit(temperature: float) -> None:
    logits_NV = random_logits(10)
    for codec in CodecId:
        spec = TargetSpec(codec=codec, top_k=4, num_draws=9, temperature=temperature)
        request = make_request(10, spec)
        encoded = encode(logits_NV, spec)

        here = decode_target(encoded, request, describe())
        there = read(frame_of(encoded, request), request)

        assert here.tensors.keys() == there.tensors.keys()
        for name, tensor in here.tensors.items():
            assert torch.equal(there.tensors[name], tensor)
        assert torch.equal(there.entropy_N, here.entropy_N)
        assert torch.equal(there.gold_logprob_N, here.gold_logprob_N)


@every_codec
@pytest.mark.parametrize("chunk_tokens", [1, 7, 39, 40, 41])
def test_chunked_encoding_is_unchunked_encoding_bit_for_bit(
    spec: TargetSpec, chunk_tokens: int
) -> None:
    logits_NV = random_logits(40)

    found = encode(logits_NV, spec, chunk_tokens=chunk_tokens)

    expected = encode(logits_NV, spec)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)


def test_chunking_around_a_real_head_moves_only_its_matmul() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(16, V, bias=False)
    hidden_ND = torch.randn(40, 16)

    whole, parts = (
        encode(hidden_ND, SPECS["dense"], head=head, vocab_size=V, chunk_tokens=chunk)
        for chunk in (40, 3)
    )

    for name, tensor in parts.items():
        torch.testing.assert_close(tensor, whole[name], rtol=2**-10, atol=1e-6)


@every_codec
def test_the_head_sees_at_most_the_asked_number_of_positions(spec: TargetSpec) -> None:
    seen = []

    def head(hidden_ND: Tensor) -> Tensor:
        seen.append(len(hidden_ND))
        return hidden_ND

    encode(random_logits(20), spec, head=head, chunk_tokens=8)

    assert seen == [8, 8, 4]


@every_codec
def test_encoding_leaves_the_logits_as_they_were_and_asks_for_no_gradient(spec: TargetSpec) -> None:
    logits_NV = random_logits(5).requires_grad_()
    before = logits_NV.detach().clone()

    encoded = encode(logits_NV, spec)

    assert torch.equal(logits_NV.detach(), before)
    assert not any(tensor.requires_grad for tensor in encoded.values())


@pytest.mark.parametrize("name", ["dense", "hidden8"])
@pytest.mark.parametrize("num_positions", [0, 1, 33])
def test_a_position_of_fixed_size_costs_exactly_the_bytes_that_were_announced(
    name: str, num_positions: int
) -> None:
    spec = SPECS[name]
    request = make_request(num_positions, spec)
    frame = frame_of(encode(random_logits(num_positions), spec), request)

    framed = sum(tensor.data.nbytes for tensor in read_frame(frame).tensors.values())

    announced = CODECS[spec.codec].bytes_per_position(spec, vocab_size=V, hidden_size=V)
    assert announced == {"dense": 2 * V, "hidden8": V + 2}[name]
    assert framed == num_positions * (announced + STATISTICS_BYTES)


@every_codec
@pytest.mark.parametrize("num_positions", [0, 1, 2, 257])
@pytest.mark.parametrize("size", [0.0, 3.0, 30.0])
def test_the_bound_is_never_below_a_real_frame(
    spec: TargetSpec, num_positions: int, size: float
) -> None:
    request = make_request(num_positions, spec, request_id="\N{GRINNING FACE}" * 256)

    frame = frame_of(encode(random_logits(num_positions) * size / 3, spec), request)

    assert len(frame) <= answer_bytes_bound(request, describe())


@every_codec
def test_a_request_without_wanted_positions_has_an_empty_answer(spec: TargetSpec) -> None:
    target = round_trip(torch.empty(0, V), spec)

    assert target.num_positions == 0
    assert target.entropy_N.shape == target.gold_logprob_N.shape == (0,)
    assert all(len(tensor) == 0 for tensor in target.tensors.values())


@every_codec
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_pbr_23_a_logit_that_is_no_number_fails_the_teacher_by_position(
    spec: TargetSpec, value: float
) -> None:
    logits_NV = random_logits(20)
    logits_NV[[13, 17], 2] = value

    message = "at 2 of 20 wanted positions, first at position 13 of row 0"
    with pytest.raises(TeacherFailed, match=message):
        encode(logits_NV, spec, chunk_tokens=8)


@every_codec
def test_pbr_23_a_row_without_any_token_fails_the_teacher(spec: TargetSpec) -> None:
    logits_NV = random_logits(3)
    logits_NV[1] = -torch.inf

    with pytest.raises(TeacherFailed, match="at 1 of 3 wanted positions, first at position 1"):
        encode(logits_NV, spec)


def test_pbr_23_minus_infinity_survives_and_adds_nothing() -> None:
    logits_NV = torch.full((1, V), -torch.inf)
    logits_NV[0, [4, 5, 6]] = torch.tensor([1.0, 2.0, 3.0])
    spec = TargetSpec(codec=CodecId.TOPK, top_k=8)

    target = round_trip(logits_NV, spec)

    p = torch.tensor([1.0, 2.0, 3.0]).double().softmax(-1)
    exact = -(p * p.log()).sum().item()
    assert target.entropy_N.item() == pytest.approx(exact, rel=2**-11)
    assert target.gold_logprob_N.item() == -torch.inf  # token 1 is masked
    assert {4, 5, 6} < set(target.tensors["token_ids"][0].tolist())
    assert target.tensors["best_ids"].tolist() == [6]
    assert target.tensors["logprobs"].isneginf().sum() == 5
    assert target.tensors["tail_logprob"].item() == -torch.inf
    dense = round_trip(logits_NV, SPECS["dense"]).tensors["logits"]
    assert dense.isneginf().sum() == V - 3


@every_codec
@pytest.mark.parametrize("temperature", [1e-38, 1e-3, 1e30])
def test_no_temperature_makes_a_sound_teacher_fail(spec: TargetSpec, temperature: float) -> None:
    spec = replace(spec, temperature=temperature)

    target = round_trip(random_logits(8) + 500, spec)

    expected = np.log(V) if temperature > 1 else 0.0
    assert target.entropy_N.tolist() == pytest.approx([expected] * 8, abs=2e-3)
