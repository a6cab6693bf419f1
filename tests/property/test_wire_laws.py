"""Oracle: the value that went in. Over generated frames, damage, cuts and requests.

Derandomized, so that a run today is the run of tomorrow.
"""

from __future__ import annotations

import struct

import msgpack
import numpy as np
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_wire.chunking import ChunkJoiner, split_frame
from distill_wire.convert import request_from_proto, request_to_proto
from distill_wire.errors import FrameCorrupt, RequestInvalid, VersionMismatch
from distill_wire.frame import ITEM_BYTES, Frame, FrameTensor, read_frame, write_frame
from distill_wire.types import CodecId, ScoreRequest, StateCodecId, TargetSpec
from distill_wire.v1 import teacher_pb2 as pb

LAW = settings(max_examples=200, deadline=None, derandomize=True, database=None)
SMALL_LAW = settings(LAW, max_examples=60)

NAMES = st.text(max_size=6)
SCALARS = (
    st.text(max_size=12)
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans()
)


@st.composite
def tensors(draw: st.DrawFn) -> FrameTensor:
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    num_bytes = ITEM_BYTES[dtype] * int(np.prod(shape, dtype=np.int64))
    data = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    return FrameTensor(dtype=dtype, shape=shape, data=np.frombuffer(data, np.uint8))


FRAMES = st.builds(
    Frame,
    meta=st.dictionaries(NAMES, SCALARS, max_size=4),
    tensors=st.dictionaries(NAMES, tensors(), max_size=4),
)
PLAIN = {"dtype": "float32", "shape": (3,), "data": np.frombuffer(b"abcdefghijkl", np.uint8)}
SEED_FRAME = bytes(
    write_frame(
        Frame(
            meta={"request_id": "r-1", "codec": 1, "num_positions": 3, "x": 0.5},
            tensors={name: FrameTensor(**PLAIN) for name in ("a", "b", "c")},
        )
    )
)


def reseal(frame: bytes) -> bytes:
    """Put the right checksum into whatever the rest has become."""
    checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(frame[16:]))
    return frame[:8] + checksum + frame[16:]


def read_or_refuse(frame: bytes) -> None:
    """Hold the law: a frame is valid, or it is refused as FrameCorrupt and nothing else."""
    try:
        found = read_frame(frame)
    except FrameCorrupt:
        return
    # What was accepted can be written, and is then the same frame.
    again = read_frame(write_frame(found))
    assert again.meta == found.meta
    assert {n: (t.dtype, t.shape, t.data.tobytes()) for n, t in again.tensors.items()} == {
        n: (t.dtype, t.shape, t.data.tobytes()) for n, t in found.tensors.items()
    }


@LAW
@given(frame=FRAMES)
def test_a_frame_comes_back_as_it_was(frame: Frame) -> None:
    found = read_frame(write_frame(frame))

    assert found.meta == frame.meta
    assert [type(value) for value in found.meta.values()] == [
        type(value) for value in frame.meta.values()
    ]
    assert list(found.tensors) == list(frame.tensors)
    for name, tensor in frame.tensors.items():
        back = found.tensors[name]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert back.data.tobytes() == tensor.data.tobytes()


@LAW
@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused_as_corrupt(data: bytes) -> None:
    read_or_refuse(data)
    read_or_refuse(b"KDW1" + data)


@LAW
@given(header=st.binary(max_size=60), body=st.binary(max_size=40))
def test_a_random_header_under_a_right_checksum_is_refused_as_corrupt(
    header: bytes, body: bytes
) -> None:
    read_or_refuse(reseal(b"KDW1" + struct.pack("<IQ", len(header), 0) + header + body))


JUNK = st.recursive(
    st.none() | SCALARS | st.floats() | st.binary(max_size=4) | st.sampled_from(sorted(ITEM_BYTES)),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
ENTRIES = JUNK | st.tuples(
    st.sampled_from(sorted(ITEM_BYTES)) | JUNK,
    st.lists(st.integers(-1, 5) | st.integers(0, 2**64 - 1) | st.booleans(), max_size=5) | JUNK,
    st.sampled_from([0, 16, 32, False]) | JUNK,
    st.integers(0, 40) | st.booleans() | JUNK,
)


@LAW
@given(
    meta=st.dictionaries(NAMES, SCALARS | JUNK, max_size=2) | JUNK,
    entries=st.dictionaries(NAMES, ENTRIES, max_size=3) | JUNK,
    body=st.binary(max_size=48),
)
def test_a_well_formed_map_of_nonsense_is_refused_as_corrupt(
    meta: object, entries: object, body: bytes
) -> None:
    header = msgpack.packb({"meta": meta, "tensors": entries})
    padding = bytes(-len(header) % 16)
    read_or_refuse(reseal(b"KDW1" + struct.pack("<IQ", len(header), 0) + header + padding + body))


@LAW
@given(
    damage=st.lists(
        st.tuples(st.integers(0, len(SEED_FRAME) - 1), st.integers(0, 255)), min_size=1, max_size=4
    ),
    cut=st.integers(0, 8),
    extra=st.binary(max_size=20),
    is_resealed=st.booleans(),
)
def test_a_damaged_frame_is_valid_or_refused_as_corrupt(
    damage: list[tuple[int, int]], cut: int, extra: bytes, is_resealed: bool
) -> None:
    frame = bytearray(SEED_FRAME)
    for index, value in damage:
        frame[index] = value
    damaged = bytes(frame[: len(frame) - cut]) + extra

    read_or_refuse(reseal(damaged) if is_resealed else damaged)


@SMALL_LAW
@given(frame=FRAMES, sizes=st.lists(st.integers(0, 50), max_size=30))
def test_whole_is_byte_by_byte_is_any_chunking(frame: Frame, sizes: list[int]) -> None:
    whole = bytes(write_frame(frame))
    cuts = np.minimum(np.cumsum([0, *sizes]), len(whole)).tolist()
    pieces = [whole[a:b] for a, b in zip(cuts, [*cuts[1:], len(whole)], strict=True)]

    for chunks in ([whole], list(split_frame(whole, chunk_bytes=1)), pieces):
        joiner = ChunkJoiner(max_frame_bytes=len(whole))
        for index, chunk in enumerate(chunks):
            joiner.add(chunk, frame_bytes=0 if index else len(whole))
        assert bytes(joiner.finish()) == whole


@st.composite
def requests(draw: st.DrawFn) -> ScoreRequest:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    total = sum(lengths)
    ids = draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=total, max_size=total))
    mask = np.array(draw(st.lists(st.booleans(), min_size=total, max_size=total)), np.bool_)
    mask[np.cumsum(lengths) - 1] = False
    codec = draw(st.sampled_from(CodecId))
    layers = tuple(draw(st.lists(st.integers(0, 2**32 - 1), max_size=3, unique=True)))
    candidates = None
    if mask.any() and draw(st.booleans()):
        shape = (int(mask.sum()), draw(st.integers(1, 3)))
        candidates = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    return ScoreRequest(
        request_id=draw(st.text(max_size=256)),
        token_ids_T=np.array(ids, np.int32),
        row_lengths_R=np.array(lengths, np.int32),
        position_mask_T=mask,
        target=TargetSpec(
            codec=codec,
            # A float32 on the wire: other temperatures arrive rounded.
            temperature=draw(st.floats(min_value=2.0**-126, max_value=2.0**127, width=32)),
            top_k=draw(st.integers(1 if codec is CodecId.TOPK else 0, 2**32 - 1)),
            num_draws=draw(st.integers(2 if codec is CodecId.THRESHOLD else 0, 2**32 - 1)),
            seed=draw(st.integers(0, 2**64 - 1)),
            hidden_layers=layers,
            # Not sent where there is nothing to say with it.
            state_codec=draw(st.sampled_from(StateCodecId)) if layers else StateCodecId.MID8,
            has_all_states=draw(st.booleans()),
        ),
        expected_weights_fingerprint=draw(st.text(max_size=40)),
        candidate_ids_NC=candidates,
    )


@LAW
@given(request=requests())
def test_a_request_comes_back_as_it_was(request: ScoreRequest) -> None:
    found = request_from_proto(
        pb.ScoreRequest.FromString(request_to_proto(request).SerializeToString())
    )

    for name in ("token_ids_T", "row_lengths_R", "position_mask_T"):
        expected, back = getattr(request, name), getattr(found, name)
        assert back.dtype == expected.dtype
        np.testing.assert_array_equal(back, expected)
    assert found.target == request.target
    assert found.num_candidates == request.num_candidates
    np.testing.assert_array_equal(found.candidate_ids_NC, request.candidate_ids_NC)
    assert found.request_id == request.request_id
    assert found.expected_weights_fingerprint == request.expected_weights_fingerprint


@LAW
@given(
    token_ids=st.binary(max_size=24),
    row_lengths=st.lists(st.integers(0, 6) | st.integers(0, 2**32 - 1), max_size=4),
    position_mask=st.binary(max_size=2),
    codec=st.integers(-1, 8),
    candidates=st.binary(max_size=9),
    num_candidates=st.integers(0, 3) | st.integers(0, 2**32 - 1),
    temperature=st.floats(width=32),
    top_k=st.integers(0, 2**32 - 1),
    version=st.sampled_from([1, 1, 1, 2]),
)
def test_any_message_is_a_request_or_refused(
    token_ids: bytes,
    row_lengths: list[int],
    position_mask: bytes,
    codec: int,
    candidates: bytes,
    num_candidates: int,
    temperature: float,
    top_k: int,
    version: int,
) -> None:
    message = pb.ScoreRequest(
        wire_version=version,
        request_id="r-1",
        token_ids=token_ids,
        row_lengths=row_lengths,
        position_mask=position_mask,
        target=pb.TargetSpec(codec=codec, temperature=temperature, top_k=top_k),
        candidate_ids=candidates,
        num_candidates=num_candidates,
    )

    try:
        found = request_from_proto(message)
    except (RequestInvalid, VersionMismatch) as exc:
        assert str(exc)
    else:
        assert found.row_lengths_R.sum() == len(found.token_ids_T) == len(found.position_mask_T)
