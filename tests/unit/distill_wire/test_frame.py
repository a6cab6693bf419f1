"""Oracle: headers packed by hand under a right checksum, so that the header's reader is reached."""

from __future__ import annotations

import struct
import threading
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash

from distill_wire.errors import FrameCorrupt
from distill_wire.frame import (
    MAX_HEADER_BYTES,
    Frame,
    FrameTensor,
    frame_bytes_bound,
    read_frame,
    write_frame,
)


def seal(header: bytes, body: bytes = b"") -> bytes:
    """Put magic, length and the right checksum before a header and tensor bytes."""
    rest = header + bytes(-len(header) % 16) + body
    return struct.pack("<4sIQ", b"KDW1", len(header), xxhash.xxh3_64_intdigest(rest)) + rest


def seal_map(tensors: Any, *, meta: Any = (), body: bytes = b"") -> bytes:
    return seal(msgpack.packb({"meta": dict(meta), "tensors": tensors}), body)


def span(**changes: Any) -> list[Any]:
    """Give the entry of 16 bytes of uint8, with changes."""
    return list({"dtype": "uint8", "shape": [16], "begin": 0, "end": 16, **changes}.values())


def flat(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def test_the_tools_of_this_file_make_a_frame_that_is_read() -> None:
    frame = read_frame(seal_map({"a": span()}, meta={"n": 1}, body=bytes(range(16))))

    assert frame.meta == {"n": 1}
    assert frame.tensors["a"].data.tolist() == list(range(16))


@pytest.mark.parametrize(
    "entry",
    [
        None,
        7,
        "uint8",
        {},
        [],
        span()[:3],
        [*span(), 0],
        span(dtype="float8"),
        span(dtype="UINT8"),
        span(dtype=1),
        span(dtype=None),
        span(dtype=["uint8"]),
        span(dtype="float32"),
        span(shape=[]),
        span(shape=[8]),
        span(shape=16),
        span(shape="16"),
        span(shape={"0": 16}),
        span(shape=[-16]),
        span(shape=[-4, -4]),
        span(shape=[16.0]),
        span(shape=[True] * 4, end=1),
        span(shape=["16"]),
        span(shape=[[16]]),
        span(shape=[1, 1, 1, 1, 16]),
        span(shape=[2**32, 2**32]),
        span(shape=[2**63, 2]),
        span(shape=[2**64 - 1] * 4),
        span(begin=0.0),
        span(begin="0"),
        span(begin=None),
        span(begin=False),
        span(end=16.0),
        span(end=2**64 - 1),
        span(begin=-16, end=0),
        span(begin=16, end=32),
        span(begin=1, end=17),
        span(end=15),
        span(end=17),
        span(begin=16, end=0),
    ],
    ids=repr,
)
def test_a_hostile_tensor_entry_is_refused(entry: Any) -> None:
    with pytest.raises(FrameCorrupt, match="tensor"):
        read_frame(seal_map({"a": entry}, body=bytes(16)))


def test_a_bool_is_not_an_offset() -> None:
    entry = ["uint8", [1], False, True]

    with pytest.raises(FrameCorrupt, match="tensor entry 'a'"):
        read_frame(seal_map({"a": entry}, body=bytes(1)))


@pytest.mark.parametrize("shape", [[0, 2**63], [2**62, 0, 2**62], [0, 2**31, 2**31, 2**31]])
def test_an_empty_tensor_cannot_name_sizes_that_overflow(shape: list[int]) -> None:
    entry = ["float32", shape, 0, 0]

    with pytest.raises(FrameCorrupt, match="tensor entry 'a'"):
        read_frame(seal_map({"a": entry}))


@pytest.mark.parametrize("shape", [[], [0], [0, 262_144], [2**31, 0]])
def test_a_tensor_of_few_or_no_dimensions_is_read(shape: list[int]) -> None:
    num_bytes = 0 if shape else 4
    entry = ["float32", shape, 0, num_bytes]

    frame = read_frame(seal_map({"a": entry}, body=bytes(num_bytes)))

    assert frame.tensors["a"].shape == tuple(shape)


@pytest.mark.parametrize(
    ("second", "what"),
    [((0, 4), "overlap"), ((4, 8), "no gap"), ((8, 12), "half a gap"), ((32, 36), "a wide gap")],
)
def test_a_tensor_that_is_not_at_the_next_multiple_of_16_is_refused(
    second: tuple[int, int], what: str
) -> None:
    tensors = {"a": ["uint8", [4], 0, 4], "b": ["uint8", [4], *second]}

    with pytest.raises(FrameCorrupt, match=r"tensor b .* expected 16\.\.20"):
        read_frame(seal_map(tensors, body=bytes(48)))


def test_a_tensor_that_ends_behind_the_frame_is_refused() -> None:
    with pytest.raises(FrameCorrupt, match="ends at byte 16 but the frame holds 15 tensor bytes"):
        read_frame(seal_map({"a": span()}, body=bytes(15)))


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), float("-inf"), None, [], {}, b"raw", [1]], ids=repr
)
def test_a_meta_value_that_is_no_finite_scalar_is_refused(value: Any) -> None:
    with pytest.raises(FrameCorrupt, match="meta entry 'n'"):
        read_frame(seal_map({}, meta={"n": value}))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"\xc0",
        b"\x93\x01\x02\x03",
        b"\x80",
        msgpack.packb({"meta": {}}),
        msgpack.packb({"tensors": {}}),
        msgpack.packb({"meta": {}, "tensors": {}, "more": {}}),
        msgpack.packb({"meta": [], "tensors": {}}),
        msgpack.packb({"meta": {}, "tensors": []}),
        msgpack.packb({"meta": None, "tensors": None}),
        msgpack.packb({"meta": {}, "tensors": {}}) + b"\xc0",
        msgpack.packb({"meta": {}, "tensors": {}})[:-1],
        msgpack.packb({"meta": {}, "tensors": {1: span()}}),
        msgpack.packb({"meta": {}, "tensors": {b"a": span()}}),
        msgpack.packb({"meta": {1: 1}, "tensors": {}}),
        msgpack.packb({"meta": {b"a": 1}, "tensors": {}}),
        # A name that is not UTF-8, an array and a text of 4 GiB, a broken timestamp.
        b"\x82\xa4meta\x81\xa1\xff\x01\xa7tensors\x80",
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc7\x03\xff\x00\x00\x00",
        # Arrays in arrays, past what msgpack follows and past what Python may print.
        b"\x91" * 60_000,
        b"\x82\xa4meta\x80\xa7tensors\x81\xa1a" + b"\x91" * 1000 + b"\xc0",
        b"\x82\xa4meta\x81\xa1a" + b"\x91" * 1000 + b"\xc0" + b"\xa7tensors\x80",
    ],
    ids=lambda header: f"{header[:24]!r}x{len(header)}",
)
def test_a_hostile_header_is_refused(header: bytes) -> None:
    with pytest.raises(FrameCorrupt):
        read_frame(seal(header))


def test_a_nested_header_is_refused_on_a_thread_with_a_short_stack_left() -> None:
    header = b"\x82\xa4meta\x80\xa7tensors\x81\xa1a" + b"\x91" * 900 + b"\xc0"
    caught: list[BaseException] = []

    def read_deep_down(depth: int) -> None:
        if depth:
            return read_deep_down(depth - 1)
        try:
            read_frame(seal(header))
        except BaseException as exc:
            caught.append(exc)

    thread = threading.Thread(target=read_deep_down, args=(500,))
    thread.start()
    thread.join(30)

    assert [type(exc) for exc in caught] == [FrameCorrupt]


@pytest.mark.parametrize("name", ["meta", "tensors"])
def test_a_refusal_stays_short_however_large_the_header(name: str) -> None:
    entries = {"meta": {}, "tensors": {}, name: {"a": ["x" * 60_000]}}

    with pytest.raises(FrameCorrupt) as caught:
        read_frame(seal(msgpack.packb(entries)))

    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("declared", [1, MAX_HEADER_BYTES, MAX_HEADER_BYTES + 1, 2**32 - 1])
def test_a_header_longer_than_the_frame_is_refused_with_both_numbers(declared: int) -> None:
    frame = struct.pack("<4sIQ", b"KDW1", declared, xxhash.xxh3_64_intdigest(b""))

    with pytest.raises(FrameCorrupt, match=f"{declared}-byte header but holds 0 bytes .*65536"):
        read_frame(frame)


def test_a_header_over_the_limit_is_refused_even_if_it_is_there() -> None:
    header = msgpack.packb({"meta": {"a": "x" * MAX_HEADER_BYTES}, "tensors": {}})

    with pytest.raises(FrameCorrupt, match="limit 65536"):
        read_frame(seal(header))


def test_a_wrong_checksum_is_refused_with_both_values() -> None:
    frame = bytearray(seal_map({}))
    frame[8:16] = bytes(8)

    with pytest.raises(FrameCorrupt, match=r"checksum is [0-9a-f]{16}, its prefix says 0{16}"):
        read_frame(frame)


def test_the_longest_header_that_may_be_written_is_read() -> None:
    overhead = len(msgpack.packb({"meta": {"a": "x" * 65_000}, "tensors": {}})) - 65_000
    text = "x" * (MAX_HEADER_BYTES - overhead)

    frame = read_frame(write_frame(Frame(meta={"a": text}, tensors={})))

    assert frame.meta == {"a": text}
    with pytest.raises(ValueError, match="the frame header has 65537 bytes, limit 65536"):
        write_frame(Frame(meta={"a": text + "x"}, tensors={}))


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "message"),
    [
        ("int64", (1,), bytes(8), "a frame cannot hold dtype int64; it holds float32, float16"),
        ("float32", (2,), bytes(7), "needs 8 bytes, got 7"),
        ("float32", (), b"", "needs 4 bytes, got 0"),
        ("uint8", (1,) * 5, bytes(1), "tensor a has 5 dimensions, limit 4"),
    ],
)
def test_a_tensor_that_no_reader_would_take_is_not_written(
    dtype: str, shape: tuple[int, ...], data: bytes, message: str
) -> None:
    tensor = FrameTensor(dtype=dtype, shape=shape, data=flat(data))

    with pytest.raises(ValueError, match=message):
        write_frame(Frame(meta={}, tensors={"a": tensor}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, b"raw", [1]], ids=repr)
def test_a_meta_value_that_no_reader_would_take_is_not_written(value: Any) -> None:
    with pytest.raises(ValueError, match="meta entry a is"):
        write_frame(Frame(meta={"a": value}, tensors={}))


def test_tensors_are_views_of_the_buffer_and_as_writable_as_it_is() -> None:
    written = seal_map({"a": span()}, body=bytes(16))
    buffer = bytearray(written)

    view = read_frame(buffer).tensors["a"].data
    view[:] = 7

    assert buffer[-16:] == b"\x07" * 16
    assert not read_frame(bytes(written)).tensors["a"].data.flags.writeable


def test_every_tensor_begins_at_a_multiple_of_16_and_gaps_are_zero() -> None:
    tensors = {
        name: FrameTensor(dtype="uint8", shape=(size,), data=flat(b"\xff" * size))
        for name, size in {"a": 1, "b": 16, "c": 17, "d": 0, "e": 3}.items()
    }

    frame = bytes(write_frame(Frame(meta={}, tensors=tensors)))

    body = frame[frame.index(b"\xff") :]
    assert body == b"".join(
        [b"\xff", bytes(15), b"\xff" * 16, b"\xff" * 17, bytes(15), b"\xff" * 3]
    )
    assert frame.index(b"\xff") % 16 == 0


@pytest.mark.parametrize("num_tensors", [0, 1, 8])
def test_the_bound_holds_for_the_longest_header_and_the_worst_gaps(num_tensors: int) -> None:
    one = FrameTensor(dtype="uint8", shape=(1,), data=flat(b"\x01"))
    tensors = {f"t{index}": one for index in range(num_tensors)}
    overhead = len(msgpack.packb({"meta": {"a": "x" * 60_000}, "tensors": {}})) - 60_000
    entries = {name: ["uint8", [1], 100, 100] for name in tensors}
    spans = len(msgpack.packb(entries)) - 1
    frame = Frame(meta={"a": "x" * (MAX_HEADER_BYTES - overhead - spans)}, tensors=tensors)

    assert len(write_frame(frame)) <= frame_bytes_bound(num_tensors, num_tensors)
