"""Between the protobuf messages of the IDL and the values of `types`.

The only module that knows both. What arrives is untrusted: every field is checked
here or by the value it becomes, so the rooms behind see values only.
Depends on: numpy, the committed stubs.
"""

from __future__ import annotations

import numpy as np

from distill_wire import WIRE_VERSION
from distill_wire.errors import RequestInvalid, VersionMismatch
from distill_wire.types import (
    MAX_REQUEST_ID_CHARACTERS,
    CodecId,
    Int32Array,
    Limits,
    LogitTransform,
    ScoreRequest,
    StateCodecId,
    TargetSpec,
    TeacherDescription,
    Timings,
)
from distill_wire.v1 import teacher_pb2 as pb


def check_wire_version(found: int, *, whose: str) -> None:
    """Refuse another wire version.

    Raises:
        VersionMismatch: the other side speaks another version.
    """
    if found != WIRE_VERSION:
        raise VersionMismatch(
            f"{whose} speaks wire version {found}, this side speaks {WIRE_VERSION}; "
            f"install the same release of teacher-serving on both ends"
        )


def request_to_proto(request: ScoreRequest) -> pb.ScoreRequest:
    """Turn a request into its message; the mask is packed to bits, nothing is padded."""
    candidates = request.candidate_ids_NC
    return pb.ScoreRequest(
        wire_version=WIRE_VERSION,
        request_id=request.request_id,
        token_ids=np.ascontiguousarray(request.token_ids_T, dtype="<i4").tobytes(),
        row_lengths=request.row_lengths_R.tolist(),
        position_mask=np.packbits(request.position_mask_T, bitorder="little").tobytes(),
        target=pb.TargetSpec(
            codec=_codec_name(request.target.codec),
            temperature=request.target.temperature,
            top_k=request.target.top_k,
            hidden_layers=request.target.hidden_layers,
            num_draws=request.target.num_draws,
            seed=request.target.seed,
            state_codec=_state_codec_name(request.target),
            has_all_states=request.target.has_all_states,
        ),
        expected_weights_fingerprint=request.expected_weights_fingerprint,
        candidate_ids=b"" if candidates is None else candidates.astype("<i4").tobytes(),
        num_candidates=request.num_candidates,
    )


def _state_codec_name(target: TargetSpec) -> str:
    return f"STATE_CODEC_{target.state_codec.name if target.hidden_layers else 'UNSPECIFIED'}"


def _codec_name(codec: CodecId) -> str:
    return f"CODEC_{codec.name}"


def request_from_proto(message: pb.ScoreRequest) -> ScoreRequest:
    """Read an untrusted request.

    Raises:
        VersionMismatch: the client speaks another wire version.
        RequestInvalid: lengths, mask or codec do not fit together.
    """
    check_wire_version(message.wire_version, whose="the client")
    name = message.request_id[:MAX_REQUEST_ID_CHARACTERS]
    if len(message.token_ids) % 4:
        raise RequestInvalid(
            f"token_ids of request {name} has {len(message.token_ids)} bytes, not a multiple of 4"
        )
    # Copied: a view of the message's bytes would be read-only, which torch warns of.
    token_ids_T = np.frombuffer(message.token_ids, "<i4").astype(np.int32)
    num_tokens = len(token_ids_T)
    if len(message.position_mask) != -(-num_tokens // 8):
        raise RequestInvalid(
            f"position_mask of request {name} has {len(message.position_mask)} bytes, "
            f"{num_tokens} tokens need {-(-num_tokens // 8)}"
        )
    # Summed in 64 bits: a length over 2**31 must not wrap into a valid one. No Python loop:
    # this runs on the server's event loop, and a message holds up to 13 million rows.
    lengths_R = np.array(message.row_lengths, np.int64)
    total = int(lengths_R.sum())
    if total != num_tokens:
        raise RequestInvalid(
            f"request {name} holds {num_tokens} token ids but its row lengths add up to {total}"
        )
    bits = np.frombuffer(message.position_mask, np.uint8)
    mask_T = np.unpackbits(bits, count=num_tokens, bitorder="little").astype(np.bool_)
    return ScoreRequest(
        request_id=message.request_id,
        token_ids_T=token_ids_T,
        row_lengths_R=lengths_R.astype(np.int32),
        position_mask_T=mask_T,
        target=_target_from_proto(message.target),
        expected_weights_fingerprint=message.expected_weights_fingerprint,
        candidate_ids_NC=_candidates_from_proto(message, num_positions=int(mask_T.sum())),
    )


def _candidates_from_proto(message: pb.ScoreRequest, *, num_positions: int) -> Int32Array | None:
    num_candidates = int(message.num_candidates)
    if num_candidates == 0 and not message.candidate_ids:
        return None
    if len(message.candidate_ids) != 4 * num_positions * num_candidates:
        raise RequestInvalid(
            f"candidate_ids of request {message.request_id[:MAX_REQUEST_ID_CHARACTERS]} has "
            f"{len(message.candidate_ids)} bytes, {num_candidates} for each of {num_positions} "
            f"wanted positions need {4 * num_positions * num_candidates}"
        )
    ids = np.frombuffer(message.candidate_ids, "<i4").astype(np.int32)
    return ids.reshape(num_positions, num_candidates)


def _target_from_proto(message: pb.TargetSpec) -> TargetSpec:
    try:
        codec = CodecId(message.codec)
    except ValueError as exc:
        known = ", ".join(f"{codec.name.lower()} ({codec.value})" for codec in CodecId)
        raise RequestInvalid(
            f"codec {message.codec} is unknown here; this side knows {known}"
        ) from exc
    # Who wants no states names no codec for them.
    number = message.state_codec or StateCodecId.MID8
    try:
        state_codec = StateCodecId(number)
    except ValueError as exc:
        raise RequestInvalid(
            f"state codec {number} is unknown here; this side knows "
            f"{', '.join(f'{kind.name.lower()} ({kind.value})' for kind in StateCodecId)}"
        ) from exc
    return TargetSpec(
        codec=codec,
        temperature=message.temperature,
        top_k=message.top_k,
        num_draws=message.num_draws,
        seed=message.seed,
        hidden_layers=tuple(message.hidden_layers),
        state_codec=state_codec,
        has_all_states=message.has_all_states,
    )


def description_to_proto(description: TeacherDescription) -> pb.TeacherDescription:
    """Turn a description into its message."""
    transform, limits = description.logit_transform, description.limits
    return pb.TeacherDescription(
        wire_version=description.wire_version,
        model_id=description.model_id,
        revision=description.revision,
        weights_fingerprint=description.weights_fingerprint,
        token_map_fingerprint=description.token_map_fingerprint,
        head_rows=description.head_rows,
        vocab_size=description.vocab_size,
        hidden_size=description.hidden_size,
        num_layers=description.num_layers,
        logit_transform=pb.LogitTransform(scale=transform.scale, softcap=transform.softcap),
        dtype=description.dtype,
        attention_implementation=description.attention_implementation,
        codecs=[_codec_name(codec) for codec in description.codecs],
        limits=pb.Limits(
            max_request_tokens=limits.max_request_tokens,
            max_row_tokens=limits.max_row_tokens,
            max_top_k=limits.max_top_k,
            max_answer_bytes=limits.max_answer_bytes,
        ),
        load=pb.Load(
            queue_tokens=description.queue_tokens, queue_requests=description.queue_requests
        ),
        token_map=description.token_map,
    )


def description_from_proto(message: pb.TeacherDescription) -> TeacherDescription:
    """Read a description; codecs this side does not know are left out.

    Raises:
        VersionMismatch: the server speaks another wire version.
    """
    check_wire_version(message.wire_version, whose="the teacher")
    known = {int(codec) for codec in CodecId}
    return TeacherDescription(
        wire_version=message.wire_version,
        model_id=message.model_id,
        revision=message.revision,
        weights_fingerprint=message.weights_fingerprint,
        token_map_fingerprint=message.token_map_fingerprint,
        head_rows=message.head_rows,
        vocab_size=message.vocab_size,
        hidden_size=message.hidden_size,
        num_layers=message.num_layers,
        logit_transform=LogitTransform(
            scale=message.logit_transform.scale, softcap=message.logit_transform.softcap
        ),
        dtype=message.dtype,
        attention_implementation=message.attention_implementation,
        codecs=tuple(CodecId(codec) for codec in message.codecs if int(codec) in known),
        limits=Limits(
            max_request_tokens=message.limits.max_request_tokens,
            max_row_tokens=message.limits.max_row_tokens,
            max_top_k=message.limits.max_top_k,
            max_answer_bytes=message.limits.max_answer_bytes,
        ),
        queue_tokens=message.load.queue_tokens,
        queue_requests=message.load.queue_requests,
        token_map=tuple(message.token_map),
    )


def timings_to_proto(timings: Timings) -> pb.Timings:
    """Turn timings into their message."""
    return pb.Timings(
        queue_s=timings.queue_s,
        forward_s=timings.forward_s,
        encode_s=timings.encode_s,
        batch_tokens=timings.batch_tokens,
        batch_requests=timings.batch_requests,
    )


def timings_from_proto(message: pb.Timings) -> Timings:
    """Read timings."""
    return Timings(
        queue_s=message.queue_s,
        forward_s=message.forward_s,
        encode_s=message.encode_s,
        batch_tokens=message.batch_tokens,
        batch_requests=message.batch_requests,
    )
