"""Oracle: the softmax of the whole vocabulary in float64, and the bits that went in."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distill_wire.codecs import CODECS
from distill_wire.errors import FrameCorrupt, IdentityMismatch, TeacherFailed
from distill_wire.frame import read_frame, write_frame
from distill_wire.targets import (
    STATISTICS_BYTES,
    TeacherTarget,
    answer_bytes_bound,
    decode_target,
    encode_positions,
    read_target,
    write_target,
)
from distill_wire.types import CodecId, ScoreRequest, TargetSpec

V = 32
SPECS = {
    "topk": TargetSpec(codec=CodecId.TOPK, top_k=5, temperature=2.0),
    "dense": TargetSpec(codec=CodecId.DENSE, temperature=2.0),
}
every_codec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def make_request(num_positions: int, spec: TargetSpec, *, request_id: str = "r-1") -> ScoreRequest:
    """Ask for all positions of one row but the last."""
    mask = np.ones(num_positions + 1, np.bool_)
    mask[-1] = False
    return ScoreRequest(
        request_id=request_id,
        token_ids_T=np.zeros(num_positions + 1, np.int32),
        row_lengths_R=np.array([num_positions + 1], np.int32),
        position_mask_T=mask,
        target=spec,
    )


def random_logits(num_positions: int, vocab_size: int = V) -> Tensor:
    torch.manual_seed(num_positions)
    return 3 * torch.randn(num_positions, vocab_size)


def encode(logits_NV: Tensor, spec: TargetSpec, **options: Any) -> dict[str, Tensor]:
    """Encode logits as if the hidden states were the logits; token 1 follows everywhere."""
    gold_N = torch.ones(len(logits_NV), dtype=torch.long)
    return encode_positions(logits_NV, gold_N, head=lambda hidden: hidden, spec=spec, **options)


def frame_of(encoded: dict[str, Tensor], request: ScoreRequest) -> bytearray:
    return bytearray(write_target(encoded, request, weights_fingerprint="w"))


def read(frame: bytes | bytearray, request: ScoreRequest, *, vocab_size: int = V) -> TeacherTarget:
    return read_target(frame, request, vocab_size=vocab_size, weights_fingerprint="w")


def round_trip(logits_NV: Tensor, spec: TargetSpec) -> TeacherTarget:
    request = make_request(len(logits_NV), spec)
    return read(frame_of(encode(logits_NV, spec), request), request, vocab_size=logits_NV.shape[-1])


@every_codec
def test_entropy_and_gold_logprob_are_those_of_the_whole_vocabulary(spec: TargetSpec) -> None:
    logits_NV = random_logits(40)

    target = round_trip(logits_NV, spec)

    scaled_NV = (logits_NV.double() / spec.temperature).log_softmax(-1)
    exact_N = -(scaled_NV.exp() * scaled_NV).sum(-1)
    gold_N = logits_NV.double().log_softmax(-1)[:, 1]  # at temperature 1, whatever was asked
    torch.testing.assert_close(target.entropy_N.double(), exact_N, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(target.gold_logprob_N.double(), gold_N, rtol=1e-6, atol=1e-6)
    assert (target.num_positions, target.spec) == (40, spec)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_framed_answer_is_the_one_of_this_process_bit_for_bit(temperature: float) -> None:
    logits_NV = random_logits(10)
    for codec in CodecId:
        spec = TargetSpec(codec=codec, top_k=4, temperature=temperature)
        request = make_request(10, spec)
        encoded = encode(logits_NV, spec)

        here = decode_target(encoded, request, vocab_size=V)
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
    hidden_ND, gold_N = torch.randn(40, 16), torch.arange(40) % V
    spec = SPECS["topk"]

    whole = encode_positions(hidden_ND, gold_N, head=head, spec=spec)
    parts = encode_positions(hidden_ND, gold_N, head=head, spec=spec, chunk_tokens=3)

    assert torch.equal(parts.pop("token_ids"), whole["token_ids"])
    for name, tensor in parts.items():
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=1e-6)


@every_codec
def test_the_head_sees_at_most_the_asked_number_of_positions(spec: TargetSpec) -> None:
    seen = []

    def head(hidden_ND: Tensor) -> Tensor:
        seen.append(len(hidden_ND))
        return hidden_ND

    gold_N = torch.zeros(20, dtype=torch.long)
    encode_positions(random_logits(20), gold_N, head=head, spec=spec, chunk_tokens=8)

    assert seen == [8, 8, 4]


@every_codec
def test_encoding_leaves_the_logits_as_they_were_and_asks_for_no_gradient(spec: TargetSpec) -> None:
    logits_NV = random_logits(5).requires_grad_()
    before = logits_NV.detach().clone()

    encoded = encode(logits_NV, spec)

    assert torch.equal(logits_NV.detach(), before)
    assert not any(tensor.requires_grad for tensor in encoded.values())


@every_codec
@pytest.mark.parametrize("num_positions", [0, 1, 33])
def test_a_position_costs_exactly_the_bytes_that_were_announced(
    spec: TargetSpec, num_positions: int
) -> None:
    request = make_request(num_positions, spec)
    frame = frame_of(encode(random_logits(num_positions), spec), request)

    framed = sum(tensor.data.nbytes for tensor in read_frame(frame).tensors.values())

    announced = CODECS[spec.codec].bytes_per_position(spec, vocab_size=V)
    assert framed == num_positions * (announced + STATISTICS_BYTES)


@pytest.mark.parametrize(("name", "per_position"), [("topk", 8 * 5 + 4), ("dense", 2 * V)])
def test_a_position_costs_what_the_specification_says(name: str, per_position: int) -> None:
    spec = SPECS[name]

    assert CODECS[spec.codec].bytes_per_position(spec, vocab_size=V) == per_position


@every_codec
@pytest.mark.parametrize("num_positions", [0, 1, 2, 257])
def test_the_bound_is_never_below_a_real_frame(spec: TargetSpec, num_positions: int) -> None:
    request = make_request(num_positions, spec, request_id="\N{GRINNING FACE}" * 256)

    frame = frame_of(encode(random_logits(num_positions), spec), request)

    bound = answer_bytes_bound(spec, vocab_size=V, num_positions=num_positions)
    assert len(frame) <= bound
    assert bound - len(frame) <= 65_536 + 16 * 9 + 16


@every_codec
def test_a_request_without_wanted_positions_has_an_empty_answer(spec: TargetSpec) -> None:
    target = round_trip(torch.empty(0, V), spec)

    assert target.num_positions == 0
    assert target.entropy_N.shape == target.gold_logprob_N.shape == (0,)
    last = {"token_ids": (0, 5), "logprobs": (0, 5), "tail_logprob": (0,), "logits": (0, V)}
    for name, tensor in target.tensors.items():
        assert tuple(tensor.shape) == last[name]


@every_codec
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_pbr_23_a_logit_that_is_no_number_fails_the_teacher_by_position(
    spec: TargetSpec, value: float
) -> None:
    logits_NV = random_logits(20)
    logits_NV[[13, 17], 2] = value

    with pytest.raises(TeacherFailed, match="at 2 of 20 wanted positions, first at row 13 of it"):
        encode(logits_NV, spec, chunk_tokens=8, name_position="row {} of it".format)


@every_codec
def test_pbr_23_a_row_without_any_token_fails_the_teacher(spec: TargetSpec) -> None:
    logits_NV = random_logits(3)
    logits_NV[1] = -torch.inf

    with pytest.raises(
        TeacherFailed, match="at 1 of 3 wanted positions, first at wanted position 1"
    ):
        encode(logits_NV, spec)


def test_pbr_23_minus_infinity_survives_and_adds_nothing() -> None:
    logits_NV = torch.full((1, V), -torch.inf)
    logits_NV[0, [4, 5, 6]] = torch.tensor([1.0, 2.0, 3.0])
    spec = TargetSpec(codec=CodecId.TOPK, top_k=8)

    target = round_trip(logits_NV, spec)

    p = torch.tensor([1.0, 2.0, 3.0]).double().softmax(-1)
    exact = -(p * p.log()).sum().item()
    assert target.entropy_N.item() == pytest.approx(exact, rel=1e-6)
    assert target.gold_logprob_N.item() == -torch.inf  # token 1 is masked
    assert target.tensors["token_ids"][0, :3].tolist() == [6, 5, 4]
    assert target.tensors["logprobs"].isneginf().sum() == 5
    assert target.tensors["tail_logprob"].item() == -torch.inf
    dense = round_trip(logits_NV, SPECS["dense"]).tensors["logits"]
    assert dense.isneginf().sum() == V - 3


@every_codec
@pytest.mark.parametrize("temperature", [1e-38, 1e-3, 1e30])
def test_no_temperature_makes_a_sound_teacher_fail(spec: TargetSpec, temperature: float) -> None:
    spec = TargetSpec(codec=spec.codec, top_k=spec.top_k, temperature=temperature)

    target = round_trip(random_logits(8) + 500, spec)

    expected = np.log(V) if temperature > 1 else 0.0
    assert target.entropy_N.tolist() == pytest.approx([expected] * 8, abs=1e-5)


@pytest.mark.parametrize(
    ("codec", "name"),
    [
        ("topk", "entropy"),
        ("topk", "gold_logprob"),
        ("topk", "logprobs"),
        ("topk", "tail_logprob"),
        ("dense", "entropy"),
        ("dense", "gold_logprob"),
        ("dense", "logits"),
    ],
)
def test_pbr_23_a_nan_smuggled_into_a_frame_is_corrupt(codec: str, name: str) -> None:
    request = make_request(4, SPECS[codec])
    encoded = encode(random_logits(4), SPECS[codec])
    encoded[name][2] = torch.nan

    with pytest.raises(FrameCorrupt, match=rf"{name} holds NaN or \+inf at wanted position 2"):
        read(frame_of(encoded, request), request)


def test_an_id_outside_the_vocabulary_in_a_frame_is_corrupt() -> None:
    request = make_request(4, SPECS["topk"])
    frame = frame_of(encode(random_logits(4), SPECS["topk"]), request)

    with pytest.raises(FrameCorrupt, match=r"the vocabulary has ids 0\.\.[0-9]$"):
        read(frame, request, vocab_size=5)


BITS = {
    "1e30": 1e30,
    "minus zero": -0.0,
    "smallest subnormal": 2.0**-133,
    "largest": 3.3895313892515355e38,
    "minus infinity": -float("inf"),
    "minus largest": -3.3895313892515355e38,
}


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_pbr_24_bfloat16_is_bit_exact_writable_and_outlives_its_message(kind: type) -> None:
    request = make_request(2, SPECS["dense"])
    row = torch.tensor(list(BITS.values()), dtype=torch.float64).bfloat16()
    wide_NV = torch.zeros(2, 2 * len(row)).bfloat16()
    wide_NV[:, ::2] = row
    logits_NV = wide_NV[:, ::2]
    statistics = {"entropy": torch.zeros(2), "gold_logprob": torch.zeros(2)}
    assert not logits_NV.is_contiguous()

    message = kind(bytes(frame_of({"logits": logits_NV} | statistics, request)))
    found = read(message, request, vocab_size=len(row)).tensors["logits"]
    del message
    gc.collect()
    noise = [bytearray(b"\xff" * (1 << 20)) for _ in range(16)]

    assert found.dtype == torch.bfloat16
    assert torch.equal(found.view(torch.int16), logits_NV.contiguous().view(torch.int16))
    found.add_(1)  # warns, and so fails, if the memory is not ours to write
    assert len(noise) == 16


def test_pbr_24_an_empty_tensor_keeps_dtype_and_shape() -> None:
    request = make_request(0, SPECS["dense"])
    encoded = {
        "logits": torch.empty(0, V, dtype=torch.bfloat16),
        "entropy": torch.empty(0),
        "gold_logprob": torch.empty(0),
    }

    found = read(frame_of(encoded, request), request).tensors["logits"]

    assert (found.dtype, tuple(found.shape)) == (torch.bfloat16, (0, V))


def test_tensors_of_a_mutable_frame_are_not_copied() -> None:
    request = make_request(1, SPECS["dense"])
    frame = frame_of(encode(random_logits(1), SPECS["dense"]), request)

    bits = read(frame, request).tensors["logits"].view(torch.uint8)
    bits.fill_(0xAB)

    assert b"\xab" * (2 * V) in frame


@pytest.mark.parametrize(
    ("asked", "answered", "text"),
    [
        (
            make_request(3, SPECS["topk"], request_id="mine"),
            make_request(3, SPECS["topk"], request_id="yours"),
            "answer to request mine has request_id 'yours', expected 'mine'",
        ),
        (
            make_request(3, SPECS["topk"]),
            make_request(3, SPECS["dense"]),
            "answer to request r-1 has codec 2, expected 1",
        ),
        (
            make_request(93, SPECS["topk"]),
            make_request(2964, SPECS["topk"]),
            "answer to request r-1 has num_positions 2964, expected 93",
        ),
    ],
    ids=["request id", "codec", "PBR-16 count"],
)
def test_pbr_16_an_answer_to_another_question_is_refused_with_both_values(
    asked: ScoreRequest, answered: ScoreRequest, text: str
) -> None:
    logits_NV = random_logits(answered.num_positions)
    frame = frame_of(encode(logits_NV, answered.target), answered)

    with pytest.raises(FrameCorrupt, match=text):
        read(frame, asked)


def test_pbr_16_a_count_that_lies_is_refused_by_the_shapes() -> None:
    request = make_request(3, SPECS["topk"])
    frame = frame_of(encode(random_logits(2), SPECS["topk"]), request)

    with pytest.raises(FrameCorrupt, match=r"entropy is torch.float32 \(2,\), expected .* \(3,\)"):
        read(frame, request)


def test_an_answer_of_other_weights_is_refused_with_both_fingerprints() -> None:
    request = make_request(3, SPECS["topk"])
    frame = frame_of(encode(random_logits(3), SPECS["topk"]), request)

    with pytest.raises(IdentityMismatch, match="answered by weights w, this run is pinned to w2"):
        read_target(frame, request, vocab_size=V, weights_fingerprint="w2")


@pytest.mark.parametrize("key", ["request_id", "codec", "num_positions"])
def test_an_answer_that_does_not_say_what_it_answers_is_refused(key: str) -> None:
    request = make_request(3, SPECS["topk"])
    frame = read_frame(frame_of(encode(random_logits(3), SPECS["topk"]), request))
    del frame.meta[key]

    with pytest.raises(FrameCorrupt, match=f"has {key} None, expected"):
        read(bytearray(write_frame(frame)), request)


@pytest.mark.parametrize("name", ["entropy", "gold_logprob"])
def test_an_answer_without_its_statistics_is_refused(name: str) -> None:
    request = make_request(3, SPECS["dense"])
    encoded = encode(random_logits(3), SPECS["dense"])
    del encoded[name]

    with pytest.raises(FrameCorrupt, match=f"the answer lacks tensor {name}; it holds logits"):
        read(frame_of(encoded, request), request)


def test_a_tensor_that_a_later_release_adds_is_read_over() -> None:
    request = make_request(3, SPECS["dense"])
    encoded = encode(random_logits(3), SPECS["dense"]) | {
        "later": torch.zeros((), dtype=torch.int8)
    }

    assert set(read(frame_of(encoded, request), request).tensors) == {"logits"}


def test_a_target_moves_whole() -> None:
    target = round_trip(random_logits(4), SPECS["topk"])

    moved = target.to(torch.device("cpu"))

    assert (moved.spec, moved.num_positions) == (target.spec, 4)
    for name, tensor in target.tensors.items():
        assert torch.equal(moved.tensors[name], tensor)
    assert torch.equal(moved.entropy_N, target.entropy_N)
    assert torch.equal(moved.gold_logprob_N, target.gold_logprob_N)


def test_a_target_is_pinned_whole_where_there_is_a_device_to_copy_to() -> None:
    target = round_trip(random_logits(4), SPECS["topk"])

    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="accelerator"):
            target.pin_memory()
        return
    pinned = target.pin_memory()

    assert all(tensor.is_pinned() for tensor in pinned.tensors.values())
    assert pinned.entropy_N.is_pinned() and pinned.gold_logprob_N.is_pinned()
