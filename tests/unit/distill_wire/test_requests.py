"""Oracle: the rules of a request in protos/README.md, on messages put together by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distill_wire.convert import check_wire_version, description_from_proto, request_from_proto
from distill_wire.errors import RequestInvalid, VersionMismatch
from distill_wire.types import MAX_REQUEST_ID_CHARACTERS, CodecId, ScoreRequest, TargetSpec
from distill_wire.v1 import teacher_pb2 as pb


def message(**changes: Any) -> pb.ScoreRequest:
    """Give rows of 3 and 2 tokens, of which positions 0, 1 and 3 are wanted, with changes."""
    fields = {
        "wire_version": 1,
        "request_id": "r-1",
        "token_ids": np.arange(5, dtype="<i4").tobytes(),
        "row_lengths": [3, 2],
        "position_mask": bytes([0b01011]),
        "target": target(),
    }
    return pb.ScoreRequest(**(fields | changes))


def target(**changes: Any) -> pb.TargetSpec:
    return pb.TargetSpec(**({"codec": "CODEC_TOPK", "temperature": 1.0, "top_k": 4} | changes))


def request(**changes: Any) -> ScoreRequest:
    fields = {
        "request_id": "r-1",
        "token_ids_T": np.arange(5, dtype=np.int32),
        "row_lengths_R": np.array([3, 2], np.int32),
        "position_mask_T": np.array([1, 1, 0, 1, 0], np.bool_),
        "target": TargetSpec(codec=CodecId.DENSE),
    }
    return ScoreRequest(**(fields | changes))


def test_the_message_of_this_file_is_a_request() -> None:
    found = request_from_proto(message())

    assert found.position_mask_T.tolist() == [True, True, False, True, False]
    assert found.token_ids_T.dtype == np.int32
    assert found.expected_weights_fingerprint == ""


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_another_wire_version_is_refused_with_both(version: int) -> None:
    with pytest.raises(VersionMismatch, match=f"client speaks wire version {version}, .* speaks 1"):
        request_from_proto(message(wire_version=version))
    with pytest.raises(VersionMismatch, match=f"teacher speaks wire version {version}"):
        description_from_proto(pb.TeacherDescription(wire_version=version))
    check_wire_version(1, whose="the client")


@pytest.mark.parametrize("num_bytes", [1, 19, 21])
def test_half_a_token_id_is_refused(num_bytes: int) -> None:
    with pytest.raises(RequestInvalid, match=f"r-1 has {num_bytes} bytes, not a multiple of 4"):
        request_from_proto(message(token_ids=bytes(num_bytes)))


@pytest.mark.parametrize("num_bytes", [0, 2])
def test_a_mask_of_another_length_is_refused(num_bytes: int) -> None:
    text = f"position_mask of request r-1 has {num_bytes} bytes, 5 tokens need 1"

    with pytest.raises(RequestInvalid, match=text):
        request_from_proto(message(position_mask=bytes(num_bytes)))


@pytest.mark.parametrize(
    ("lengths", "total"),
    [
        ([3, 3], 6),
        ([3], 3),
        ([], 0),
        # As int32 these would be 5 and 5 + 0; as uint32 sums they would wrap to 5.
        ([2**31 + 5], 2**31 + 5),
        ([2**32 - 1, 6], 2**32 + 5),
        ([2**31, 2**31, 5], 2**32 + 5),
    ],
)
def test_row_lengths_are_summed_without_wrapping(lengths: list[int], total: int) -> None:
    with pytest.raises(RequestInvalid, match=f"5 token ids but its row lengths add up to {total}"):
        request_from_proto(message(row_lengths=lengths))


@pytest.mark.parametrize(("lengths", "row"), [([0, 5], 0), ([3, 0, 2], 1), ([3, 2, 0], 2)])
def test_pbr_49_an_empty_row_is_refused_by_its_number(lengths: list[int], row: int) -> None:
    with pytest.raises(RequestInvalid, match=f"row {row} of request r-1 is empty"):
        request_from_proto(message(row_lengths=lengths))


def test_pbr_49_a_request_without_rows_is_refused() -> None:
    with pytest.raises(RequestInvalid, match="request r-1 holds no rows"):
        request_from_proto(message(row_lengths=[], token_ids=b"", position_mask=b""))


@pytest.mark.parametrize(
    ("mask", "row", "last", "before"),
    [(0b00100, 0, 2, 2), (0b10000, 1, 1, 1), (0b11111, 0, 2, 2)],
)
def test_the_last_position_of_a_row_is_refused_by_row(
    mask: int, row: int, last: int, before: int
) -> None:
    text = f"row {row} of request r-1 asks for its last position {last}, .* the {before} positions"

    with pytest.raises(RequestInvalid, match=text):
        request_from_proto(message(position_mask=bytes([mask])))


def test_the_only_position_of_a_row_of_one_token_is_its_last() -> None:
    with pytest.raises(RequestInvalid, match=r"row 1 .* last position 0, .* the 0 positions"):
        request_from_proto(message(row_lengths=[4, 1], position_mask=bytes([0b10000])))


def test_mask_bits_behind_the_last_token_are_not_read() -> None:
    found = request_from_proto(message(position_mask=bytes([0b11101011])))

    assert found.num_positions == 3


def test_a_request_without_wanted_positions_is_a_request() -> None:
    assert request_from_proto(message(position_mask=b"\x00")).num_positions == 0


@pytest.mark.parametrize("number", [0, 5, 7, -1, 2**31 - 1])
def test_an_unknown_codec_is_refused_with_the_known_ones(number: int) -> None:
    text = rf"codec {number} is unknown here; this side knows topk \(1\), dense \(2\), "

    with pytest.raises(RequestInvalid, match=text):
        request_from_proto(message(target=target(codec=number)))


def test_an_unknown_state_codec_is_refused_with_the_known_ones() -> None:
    text = r"state codec 9 is unknown here; this side knows mid4 \(1\), mid8 \(2\)"

    with pytest.raises(RequestInvalid, match=text):
        request_from_proto(message(target=target(state_codec=9)))


@pytest.mark.parametrize(
    ("ids", "number", "text"),
    [(bytes(8), 0, "has 8 bytes, 0 for each"), (bytes(8), 3, "has 8 bytes, 3 for each")],
)
def test_candidates_that_are_not_as_many_as_said_are_refused(
    ids: bytes, number: int, text: str
) -> None:
    with pytest.raises(RequestInvalid, match=text):
        request_from_proto(message(candidate_ids=ids, num_candidates=number))


def test_a_layer_named_twice_is_refused() -> None:
    with pytest.raises(RequestInvalid, match=r"hidden_layers \(3, 3\) names a layer twice"):
        request_from_proto(message(target=target(hidden_layers=[3, 3])))


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_that_is_no_unsigned_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(RequestInvalid, match=r"seed must be in \[0, 2\*\*64\), got"):
        TargetSpec(codec=CodecId.DENSE, seed=seed)


@pytest.mark.parametrize("shape", [(2, 4), (3, 0), (3,)])
def test_candidates_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(RequestInvalid, match="expected at least one for each of 3 wanted"):
        request(candidate_ids_NC=np.zeros(shape, np.int32))


def test_threshold_without_draws_is_refused() -> None:
    with pytest.raises(RequestInvalid, match="codec threshold needs num_draws >= 2, got 0"):
        request_from_proto(message(target=target(codec=3)))


def test_a_request_without_a_target_is_refused() -> None:
    bare = message()
    bare.ClearField("target")

    with pytest.raises(RequestInvalid, match="codec 0 is unknown here"):
        request_from_proto(bare)


@pytest.mark.parametrize(
    "temperature", [0.0, -0.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e-60]
)
def test_a_temperature_that_is_no_divisor_is_refused(temperature: float) -> None:
    with pytest.raises(RequestInvalid, match="temperature must be a finite number > 0, got"):
        request_from_proto(message(target=target(temperature=temperature)))


def test_topk_without_k_is_refused_and_dense_needs_none() -> None:
    with pytest.raises(RequestInvalid, match="codec topk needs top_k >= 1, got 0"):
        request_from_proto(message(target=target(top_k=0)))
    found = request_from_proto(message(target=target(codec="CODEC_DENSE", top_k=0)))

    assert found.target == TargetSpec(codec=CodecId.DENSE)


def test_a_request_id_that_would_not_fit_an_answer_is_refused() -> None:
    longest = "x" * MAX_REQUEST_ID_CHARACTERS

    assert request_from_proto(message(request_id=longest)).request_id == longest
    with pytest.raises(RequestInvalid, match=r"^request id x{32}\.\.\. has 257 characters"):
        request_from_proto(message(request_id=longest + "x"))


def test_a_refusal_stays_short_however_long_the_request_id() -> None:
    with pytest.raises(RequestInvalid) as caught:
        request_from_proto(message(request_id="x" * 100_000, token_ids=b"x"))

    assert len(str(caught.value)) < 1000


def test_pbr_49_ids_are_carried_as_they_are_for_the_teacher_to_check() -> None:
    ids = np.array([-1, 2**31 - 1, -(2**31), 0, 1], "<i4")

    assert request_from_proto(message(token_ids=ids.tobytes())).token_ids_T.tolist() == ids.tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids_T": np.array([2**32 + 5] * 5)},
        {"token_ids_T": np.zeros(5, np.uint32)},
        {"token_ids_T": np.zeros(5, np.float32)},
        {"position_mask_T": np.array([1, 2, 0, 1, 0])},
    ],
    ids=["int64 ids", "uint32 ids", "float ids", "int mask"],
)
def test_pbr_49_values_that_would_wrap_on_the_wire_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RequestInvalid, match="expected int32 and bool"):
        request(**changes)


@pytest.mark.parametrize("num_bits", [4, 6])
def test_a_value_whose_mask_has_another_length_is_refused(num_bits: int) -> None:
    mask = np.zeros(num_bits, np.bool_)

    with pytest.raises(
        RequestInvalid, match=f"5 token ids but its position mask covers {num_bits}"
    ):
        request(position_mask_T=mask)


def test_a_value_whose_lengths_do_not_add_up_is_refused() -> None:
    with pytest.raises(RequestInvalid, match="5 token ids but its row lengths add up to 4"):
        request(row_lengths_R=np.array([2, 2], np.int32))


def test_lengths_of_a_value_are_summed_in_64_bits() -> None:
    # 2**31 - 1 twice and 7 are 5 modulo 2**32.
    lengths = np.array([2**31 - 1, 2**31 - 1, 7], np.int32)

    with pytest.raises(RequestInvalid, match="add up to 4294967301"):
        request(row_lengths_R=lengths)


def test_codecs_that_this_side_does_not_know_are_left_out_of_a_description() -> None:
    found = description_from_proto(pb.TeacherDescription(wire_version=1, codecs=[7, 2, 5, 1]))

    assert found.codecs == (CodecId.DENSE, CodecId.TOPK)
