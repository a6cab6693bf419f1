"""Oracle: the bits that went into an answer, and what its request asked for."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from distill_wire.errors import FrameCorrupt, IdentityMismatch
from distill_wire.frame import read_frame, write_frame
from distill_wire.targets import read_target, tensor_from_frame
from distill_wire.types import ScoreRequest
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


@pytest.mark.parametrize(
    ("codec", "name"),
    [
        ("topk", "entropy"),
        ("topk", "gold_logprob"),
        ("topk", "tail"),
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
    logits_NV = random_logits(4)
    logits_NV[2, V - 1] = 9
    frame = frame_of(encode(logits_NV, SPECS["topk"]), request)

    with pytest.raises(FrameCorrupt, match=r"the vocabulary has ids 0\.\.30$"):
        read(frame, request, vocab_size=V - 1)


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
    found = tensor_from_frame(read_frame(message).tensors["logits"])
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
        "logits": torch.empty(0, V, dtype=torch.float16),
        "entropy": torch.empty(0).half(),
        "gold_logprob": torch.empty(0).half(),
    }

    found = read(frame_of(encoded, request), request).tensors["logits"]

    assert (found.dtype, tuple(found.shape)) == (torch.float16, (0, V))


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

    with pytest.raises(FrameCorrupt, match=r"entropy is torch.float16 \(2,\), expected .* \(3,\)"):
        read(frame, request)


def test_an_answer_of_other_weights_is_refused_with_both_fingerprints() -> None:
    request = make_request(3, SPECS["topk"])
    frame = frame_of(encode(random_logits(3), SPECS["topk"]), request)

    with pytest.raises(IdentityMismatch, match="answered by weights w, this run is pinned to w2"):
        read_target(frame, request, replace(describe(), weights_fingerprint="w2"))


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
