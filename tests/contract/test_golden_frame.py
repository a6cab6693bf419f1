"""Oracle: one frame written out by hand from the layout in protos/README.md.

These bytes are the contract with students and teachers of other releases. If a test here
fails, the change needs a new magic and an entry under Wire in CHANGELOG.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash

from distill_wire.errors import FrameCorrupt
from distill_wire.frame import ITEM_BYTES, Frame, FrameTensor, read_frame, write_frame

HEADER = (
    # {"meta": {"request_id": "r-1", "codec": 1, "temperature": 0.5, "is_last": true},
    "82 a4 6d657461 84"
    "aa 726571756573745f6964 a3 722d31"
    "a5 636f646563 01"
    "ab 74656d7065726174757265 cb 3fe0000000000000"
    "a7 69735f6c617374 c3"
    # "tensors": {name: [dtype, shape, begin, end]}}
    "a7 74656e736f7273 87"
    "a1 61 94 a7 666c6f61743332 91 02 00 08"
    "a1 62 94 a7 666c6f61743136 92 01 03 10 16"
    "a1 63 94 a8 62666c6f61743136 92 02 01 20 24"
    "a1 64 94 a5 696e743332 91 02 30 38"
    "a1 65 94 a4 696e7438 91 03 40 43"
    "a1 66 94 a5 75696e7438 90 50 51"
    "a1 67 94 a7 666c6f61743332 92 00 04 60 60"
)
TENSORS = (
    "0000c03f 000080ff 0000000000000000"  # a: 1.5, -inf
    "003c 00c0 ff7b 00000000000000000000"  # b: 1, -2, 65504 (the largest float16)
    "803f 0100 000000000000000000000000"  # c: 1, the smallest subnormal bfloat16
    "ffffffff ffffff7f 0000000000000000"  # d: -1, 2**31 - 1
    "80 00 7f 00000000000000000000000000"  # e: -128, 0, 127
    "ff 000000000000000000000000000000"  # f: 255; g is empty and begins after the gap
)
GOLDEN = bytes.fromhex(
    "4b445731"  # KDW1
    "a9000000"  # 169 bytes of header
    "ff4daf31d5ecf9d8"  # XXH3-64 of all that follows
    + HEADER
    + "00000000000000"  # up to offset 192
    + TENSORS
)


def tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> FrameTensor:
    return FrameTensor(dtype=dtype, shape=shape, data=np.frombuffer(data, np.uint8))


META = {"request_id": "r-1", "codec": 1, "temperature": 0.5, "is_last": True}
VALUES = {
    "a": tensor("float32", (2,), struct.pack("<2f", 1.5, float("-inf"))),
    "b": tensor("float16", (1, 3), struct.pack("<3e", 1.0, -2.0, 65504.0)),
    "c": tensor("bfloat16", (2, 1), struct.pack("<2H", 0x3F80, 0x0001)),
    "d": tensor("int32", (2,), struct.pack("<2i", -1, 2**31 - 1)),
    "e": tensor("int8", (3,), struct.pack("<3b", -128, 0, 127)),
    "f": tensor("uint8", (), b"\xff"),
    "g": tensor("float32", (0, 4), b""),
}


def is_refused(frame: bytes) -> bool:
    try:
        read_frame(frame)
    except FrameCorrupt:
        return True
    return False


def test_a_frame_is_written_as_the_golden_bytes() -> None:
    written = write_frame(Frame(meta=META, tensors=VALUES))

    assert bytes(written).hex(" ", 16) == GOLDEN.hex(" ", 16)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_the_golden_bytes_are_read_as_the_frame(kind: type) -> None:
    frame = read_frame(kind(GOLDEN))

    assert frame.meta == META
    assert list(frame.tensors) == list(VALUES)
    for name, expected in VALUES.items():
        found = frame.tensors[name]
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.data.tobytes() == expected.data.tobytes()


def test_the_golden_frame_holds_every_dtype() -> None:
    assert {value.dtype for value in VALUES.values()} == set(ITEM_BYTES)


def test_the_checksum_is_the_published_xxh3() -> None:
    # XXH3_64bits of no bytes with seed 0, from the reference implementation.
    assert xxhash.xxh3_64_intdigest(b"") == 0x2D06800538D394C2


def test_every_cut_is_refused() -> None:
    accepted = [cut for cut in range(len(GOLDEN)) if not is_refused(GOLDEN[:cut])]

    assert accepted == []


def test_every_flipped_bit_is_refused() -> None:
    accepted = []
    for bit in range(8 * len(GOLDEN)):
        flipped = bytearray(GOLDEN)
        flipped[bit // 8] ^= 1 << bit % 8
        if not is_refused(bytes(flipped)):
            accepted.append(bit)

    assert accepted == []


@pytest.mark.parametrize("num_bytes", [1, 15, 16, 4096])
def test_trailing_bytes_are_refused(num_bytes: int) -> None:
    assert is_refused(GOLDEN + bytes(num_bytes))


def test_trailing_bytes_are_refused_under_a_right_checksum_too() -> None:
    rest = GOLDEN[16:] + bytes(16)
    frame = GOLDEN[:8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(rest)) + rest

    with pytest.raises(FrameCorrupt, match="16 bytes follow the last tensor"):
        read_frame(frame)


def test_another_magic_is_refused_by_name() -> None:
    with pytest.raises(FrameCorrupt, match=r"frame starts with b'KDW2', expected b'KDW1'"):
        read_frame(b"KDW2" + GOLDEN[4:])
