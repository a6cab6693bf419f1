"""Oracle: protobuf messages written out by hand, tag by tag, from teacher.proto.

Serialization is deterministic for messages without maps and unknown fields, so the bytes
of one release must be the bytes of the next.
"""

from __future__ import annotations

import numpy as np

from distill_wire.convert import (
    description_from_proto,
    description_to_proto,
    request_from_proto,
    request_to_proto,
    timings_from_proto,
    timings_to_proto,
)
from distill_wire.types import (
    CodecId,
    Limits,
    LogitTransform,
    ScoreRequest,
    TargetSpec,
    TeacherDescription,
    Timings,
)
from distill_wire.v1 import teacher_pb2 as pb

REQUEST = ScoreRequest(
    request_id="r-1",
    token_ids_T=np.array([7, 0, 300, 1, 2**31 - 1], np.int32),
    row_lengths_R=np.array([3, 2], np.int32),
    position_mask_T=np.array([1, 1, 0, 1, 0], np.bool_),
    target=TargetSpec(codec=CodecId.TOPK, temperature=2.0, top_k=300, hidden_layers=(0, 12)),
    expected_weights_fingerprint="ab",
)
REQUEST_BYTES = bytes.fromhex(
    "08 01"  # 1 wire_version: 1
    "12 03 722d31"  # 2 request_id: r-1
    "1a 14 07000000 00000000 2c010000 01000000 ffffff7f"  # 3 token_ids: int32, little-endian
    "22 02 03 02"  # 4 row_lengths: 3, 2
    "2a 01 0b"  # 5 position_mask: 0b01011, the first token in the lowest bit
    "32 10 08 01 15 00000040 18 ac02 22 02 00 0c 38 02"  # 6 target: topk, 2.0, k 300, layers
    # 0 and 12 as mid8
    "3a 02 6162"  # 7 expected_weights_fingerprint: ab
)

DESCRIPTION = TeacherDescription(
    wire_version=1,
    model_id="m",
    revision="r",
    weights_fingerprint="w",
    token_map_fingerprint="t",
    head_rows=300,
    vocab_size=257,
    hidden_size=32,
    num_layers=2,
    logit_transform=LogitTransform(scale=0.5, softcap=30.0),
    dtype="bfloat16",
    attention_implementation="sdpa",
    codecs=(CodecId.TOPK, CodecId.DENSE),
    limits=Limits(
        max_request_tokens=4096, max_row_tokens=128, max_top_k=64, max_answer_bytes=2**33
    ),
    queue_tokens=5,
    queue_requests=1,
    token_map=("a", "", "é"),
)
DESCRIPTION_BYTES = bytes.fromhex(
    "08 01 12 01 6d 1a 01 72 22 01 77 2a 01 74"  # 1-5: version, id, revision, both fingerprints
    "30 ac02 38 8102 40 20 48 02"  # 6-9: head_rows 300, vocab_size 257, hidden_size, num_layers
    "52 0a 0d 0000003f 15 0000f041"  # 10 logit_transform: scale 0.5, softcap 30
    "5a 08 62666c6f61743136 62 04 73647061"  # 11 dtype, 12 attention_implementation
    "6a 02 01 02"  # 13 codecs: topk, dense
    "72 0e 08 8020 10 8001 18 40 20 8080808020"  # 14 limits: 4096, 128, 64, 2**33
    "7a 04 08 05 10 01"  # 15 load
    "8201 01 61 8201 00 8201 02 c3a9"  # 16 token_map: "a", "", "é"
)

CHUNK = pb.Chunk(
    data=b"KDW1",
    frame_bytes=300,
    timings=timings_to_proto(
        Timings(queue_s=0.5, forward_s=1.0, encode_s=2.0, batch_tokens=300, batch_requests=2)
    ),
)
CHUNK_BYTES = bytes.fromhex(
    "0a 04 4b445731 10 ac02"  # 1 data, 2 frame_bytes
    "1a 20 09 000000000000e03f 11 000000000000f03f 19 0000000000000040 20 ac02 28 02"  # 3 timings
)


def test_a_request_is_written_as_the_golden_bytes() -> None:
    message = request_to_proto(REQUEST)

    assert message.SerializeToString(deterministic=True).hex() == REQUEST_BYTES.hex()


def test_the_golden_bytes_are_read_as_the_request() -> None:
    request = request_from_proto(pb.ScoreRequest.FromString(REQUEST_BYTES))

    assert request.request_id == REQUEST.request_id
    assert request.token_ids_T.tolist() == [7, 0, 300, 1, 2**31 - 1]
    assert request.row_lengths_R.tolist() == [3, 2]
    assert request.position_mask_T.tolist() == [True, True, False, True, False]
    assert request.target == REQUEST.target
    assert request.expected_weights_fingerprint == "ab"
    assert (request.num_tokens, request.num_positions) == (5, 3)


def test_a_description_is_written_as_the_golden_bytes() -> None:
    message = description_to_proto(DESCRIPTION)

    assert message.SerializeToString(deterministic=True).hex() == DESCRIPTION_BYTES.hex()


def test_the_golden_bytes_are_read_as_the_description() -> None:
    message = pb.TeacherDescription.FromString(DESCRIPTION_BYTES)

    assert description_from_proto(message) == DESCRIPTION


def test_a_chunk_is_written_as_the_golden_bytes() -> None:
    assert CHUNK.SerializeToString(deterministic=True).hex() == CHUNK_BYTES.hex()


def test_the_golden_bytes_are_read_as_the_chunk() -> None:
    chunk = pb.Chunk.FromString(CHUNK_BYTES)

    assert (chunk.data, chunk.frame_bytes) == (b"KDW1", 300)
    assert timings_from_proto(chunk.timings) == Timings(
        queue_s=0.5, forward_s=1.0, encode_s=2.0, batch_tokens=300, batch_requests=2
    )


def test_fields_of_a_newer_peer_are_read_over() -> None:
    # Field 15 as text: unknown here, as an additive change of a later release would be.
    request = request_from_proto(pb.ScoreRequest.FromString(REQUEST_BYTES + b"\x7a\x01x"))

    assert request.token_ids_T.tolist() == REQUEST.token_ids_T.tolist()
