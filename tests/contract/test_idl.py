"""Oracle: the numbers and names written here once more, and the stubs read as source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import distill_wire.v1
from distill_wire import WIRE_VERSION
from distill_wire.codecs import CODECS, codec_by_name
from distill_wire.types import CodecId, StateCodecId
from distill_wire.v1 import teacher_pb2 as pb
from distill_wire.v1.teacher_pb2_grpc import TeacherStub

STUBS = Path(distill_wire.v1.__file__).parent

FIELDS = {
    "DescribeRequest": {"wire_version": 1, "include_token_map": 2},
    "TeacherDescription": {
        "wire_version": 1,
        "model_id": 2,
        "revision": 3,
        "weights_fingerprint": 4,
        "token_map_fingerprint": 5,
        "head_rows": 6,
        "vocab_size": 7,
        "hidden_size": 8,
        "num_layers": 9,
        "logit_transform": 10,
        "dtype": 11,
        "attention_implementation": 12,
        "codecs": 13,
        "limits": 14,
        "load": 15,
        "token_map": 16,
    },
    "LogitTransform": {"scale": 1, "softcap": 2},
    "Limits": {
        "max_request_tokens": 1,
        "max_row_tokens": 2,
        "max_top_k": 3,
        "max_answer_bytes": 4,
    },
    "Load": {"queue_tokens": 1, "queue_requests": 2},
    "ScoreRequest": {
        "wire_version": 1,
        "request_id": 2,
        "token_ids": 3,
        "row_lengths": 4,
        "position_mask": 5,
        "target": 6,
        "expected_weights_fingerprint": 7,
        "candidate_ids": 8,
        "num_candidates": 9,
    },
    "FetchHeadRequest": {"wire_version": 1, "expected_weights_fingerprint": 2},
    "TargetSpec": {
        "codec": 1,
        "temperature": 2,
        "top_k": 3,
        "hidden_layers": 4,
        "num_draws": 5,
        "seed": 6,
        "state_codec": 7,
        "has_all_states": 8,
    },
    "Chunk": {"data": 1, "frame_bytes": 2, "timings": 3},
    "Timings": {
        "queue_s": 1,
        "forward_s": 2,
        "encode_s": 3,
        "batch_tokens": 4,
        "batch_requests": 5,
    },
}


def test_the_wire_is_version_1() -> None:
    assert WIRE_VERSION == 1
    assert pb.DESCRIPTOR.package == "distill_wire.v1"


@pytest.mark.parametrize("message", sorted(FIELDS))
def test_a_field_keeps_its_number(message: str) -> None:
    fields = pb.DESCRIPTOR.message_types_by_name[message].fields

    assert {field.name: field.number for field in fields} == FIELDS[message]


def test_every_message_is_in_the_table() -> None:
    assert set(pb.DESCRIPTOR.message_types_by_name) == set(FIELDS)


def test_answers_of_any_size_are_streams() -> None:
    service = pb.DESCRIPTOR.services_by_name["Teacher"]

    calls = {
        method.name: (method.input_type.name, method.output_type.name, method.server_streaming)
        for method in service.methods
    }

    assert calls == {
        "Describe": ("DescribeRequest", "TeacherDescription", False),
        "Score": ("ScoreRequest", "Chunk", True),
        "FetchHead": ("FetchHeadRequest", "Chunk", True),
    }
    assert not any(method.client_streaming for method in service.methods)


def test_every_codec_of_the_idl_has_an_id_and_one_implementation() -> None:
    idl = dict(pb.Codec.items())

    assert idl.pop("CODEC_UNSPECIFIED") == 0
    assert idl == {f"CODEC_{codec.name}": codec.value for codec in CodecId}
    assert idl == {f"CODEC_{codec.name.upper()}": number for number, codec in CODECS.items()}
    assert all(codec.id is number for number, codec in CODECS.items())


def test_every_state_codec_of_the_idl_has_an_id() -> None:
    idl = dict(pb.StateCodec.items())

    assert idl.pop("STATE_CODEC_UNSPECIFIED") == 0
    assert idl == {f"STATE_CODEC_{codec.name}": codec.value for codec in StateCodecId}


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_a_codec_is_found_by_its_name(codec: object) -> None:
    assert codec_by_name(codec.name) is codec


def test_an_unknown_codec_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="codec 'zstd' is unknown; this release has topk, dense"):
        codec_by_name("zstd")


def test_the_message_stub_imports_nothing_that_checks_the_runtime() -> None:
    tree = ast.parse((STUBS / "teacher_pb2.py").read_bytes())

    modules = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert modules == {
        "google.protobuf.descriptor",
        "google.protobuf.descriptor_pool",
        "google.protobuf.symbol_database",
        "google.protobuf.internal.builder",
    }


def test_the_service_stub_passes_only_arguments_that_old_grpc_knows() -> None:
    tree = ast.parse((STUBS / "teacher_pb2_grpc.py").read_bytes())

    keywords = {
        keyword.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
    }

    # grpcio-tools of 1.63 and later write _registered_method=True, which grpcio < 1.64 refuses.
    assert keywords <= {"request_serializer", "response_serializer"} | {
        "request_deserializer",
        "response_deserializer",
    }
    assert TeacherStub.__init__.__code__.co_argcount == 2
