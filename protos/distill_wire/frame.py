"""One bundle of tensors as bytes, and back. Pure: no sockets, no torch, no clock.

Layout, little-endian, version 1:

    offset  size  field
    0       4     magic, b"KDW1"
    4       4     header length H, uint32, at most MAX_HEADER_BYTES
    8       8     XXH3-64 of everything from offset 16 on, uint64
    16      H     msgpack map {"meta": {name: scalar},
                               "tensors": {name: [dtype, shape, begin, end]}}
    16+H    -     zero bytes up to the next multiple of 16, then the tensors

Tensors are row-major, in the order of the header, each starting at a multiple of
16 so that a reader may use them in place. `begin` and `end` count from the first
tensor byte. A reader checks every number against the buffer and the checksum
before it looks at a tensor, so a hostile or cut frame costs at most
MAX_HEADER_BYTES of work beyond the bytes it already holds.

The magic names the layout: another layout gets another magic. Names of tensors
belong to the codecs. Depends on: numpy, msgpack, xxhash (a checksum at memory
speed; zlib's crc32 would be slower than the socket).
"""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash

from distill_wire.errors import FrameCorrupt

MAGIC = b"KDW1"
PREFIX = struct.Struct("<4sIQ")
MAX_HEADER_BYTES = 65_536
MAX_DIMENSIONS = 4
ALIGNMENT = 16
MAX_ELEMENTS = 1 << 48
"""Product of a tensor's sizes, a size 0 counted as 1: with it an empty tensor cannot
name sizes whose strides overflow the 64 bits of whoever allocates it."""

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int8": 1, "uint8": 1}
"""The dtypes a frame may hold. numpy has no bfloat16: its bits travel as uint16."""

Scalar = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FrameTensor:
    """A tensor as the frame sees it.

    Attributes:
        dtype: a key of `ITEM_BYTES`.
        shape: sizes, outermost first.
        data: the bytes, row-major, as a flat uint8 array.
    """

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """What one answer carries: a few scalars and named tensors."""

    meta: Mapping[str, Scalar]
    tensors: Mapping[str, FrameTensor]


def frame_bytes_bound(tensor_bytes: int, num_tensors: int) -> int:
    """Bound the size of a frame from the bytes of its tensors, before it exists."""
    return PREFIX.size + MAX_HEADER_BYTES + tensor_bytes + ALIGNMENT * (num_tensors + 1)


def write_frame(frame: Frame) -> memoryview:
    """Lay a frame out as bytes; every tensor is copied once.

    Raises:
        ValueError: a dtype is not in `ITEM_BYTES`, a tensor has more than MAX_DIMENSIONS
            or its bytes do not match its shape, a meta value is not a scalar, or the
            header is longer than MAX_HEADER_BYTES.
    """
    for name, value in frame.meta.items():
        if not _is_scalar(value):
            raise ValueError(f"meta entry {name} is {value!r}, expected a text or finite number")
    spans: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    end = 0
    for name, tensor in frame.tensors.items():
        expected = _tensor_bytes(tensor.dtype, tensor.shape)
        if len(tensor.shape) > MAX_DIMENSIONS:
            raise ValueError(
                f"tensor {name} has {len(tensor.shape)} dimensions, limit {MAX_DIMENSIONS}"
            )
        if tensor.data.nbytes != expected:
            raise ValueError(
                f"tensor {name} of shape {tensor.shape} and dtype {tensor.dtype} needs {expected} "
                f"bytes, got {tensor.data.nbytes}"
            )
        begin = _aligned(end)
        end = begin + expected
        spans[name] = (tensor.dtype, tensor.shape, begin, end)
    header = msgpack.packb({"meta": dict(frame.meta), "tensors": spans})
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"the frame header has {len(header)} bytes, limit {MAX_HEADER_BYTES}")

    body_start = _aligned(PREFIX.size + len(header))
    buffer = np.zeros(body_start + end, np.uint8)
    buffer[PREFIX.size : PREFIX.size + len(header)] = np.frombuffer(header, np.uint8)
    for name, tensor in frame.tensors.items():
        _, _, begin, stop = spans[name]
        buffer[body_start + begin : body_start + stop] = tensor.data
    checksum = xxhash.xxh3_64_intdigest(buffer[PREFIX.size :].data)
    buffer[: PREFIX.size] = np.frombuffer(PREFIX.pack(MAGIC, len(header), checksum), np.uint8)
    return buffer.data


def read_frame(buffer: bytes | bytearray | memoryview) -> Frame:
    """Check a whole frame and give its tensors as views of `buffer`.

    The views are writable when the buffer is; they keep it alive.

    Raises:
        FrameCorrupt: anything about the bytes is not as the layout says.
    """
    whole = np.frombuffer(buffer, np.uint8)
    if whole.nbytes < PREFIX.size:
        raise FrameCorrupt(f"frame has {whole.nbytes} bytes, its prefix alone needs {PREFIX.size}")
    magic, header_bytes, checksum = PREFIX.unpack(whole[: PREFIX.size].tobytes())
    if magic != MAGIC:
        raise FrameCorrupt(f"frame starts with {magic!r}, expected {MAGIC!r}")
    rest = whole.nbytes - PREFIX.size
    if header_bytes > min(MAX_HEADER_BYTES, rest):
        raise FrameCorrupt(
            f"frame declares a {header_bytes}-byte header but holds {rest} bytes after the prefix "
            f"(limit {MAX_HEADER_BYTES})"
        )
    found = xxhash.xxh3_64_intdigest(whole[PREFIX.size :].data)
    if found != checksum:
        raise FrameCorrupt(f"frame checksum is {found:016x}, its prefix says {checksum:016x}")

    meta, spans = _parse_header(whole[PREFIX.size : PREFIX.size + header_bytes].tobytes())
    body = whole[_aligned(PREFIX.size + header_bytes) :]
    tensors: dict[str, FrameTensor] = {}
    end = 0
    for name, span in spans.items():
        dtype, shape, begin, stop = _parse_span(name, span)
        if begin != _aligned(end) or stop != begin + _tensor_bytes(dtype, shape):
            raise FrameCorrupt(
                f"tensor {name} of shape {shape} and dtype {dtype} spans bytes {begin}..{stop}, "
                f"expected {_aligned(end)}..{_aligned(end) + _tensor_bytes(dtype, shape)}"
            )
        if stop > body.nbytes:
            raise FrameCorrupt(
                f"tensor {name} ends at byte {stop} but the frame holds {body.nbytes} tensor bytes"
            )
        tensors[name] = FrameTensor(dtype=dtype, shape=shape, data=body[begin:stop])
        end = stop
    if end != body.nbytes:
        raise FrameCorrupt(f"{body.nbytes - end} bytes follow the last tensor of the frame")
    return Frame(meta=meta, tensors=tensors)


def _parse_header(header: bytes) -> tuple[dict[str, Scalar], dict[str, object]]:
    try:
        parsed = msgpack.unpackb(header, raw=False, strict_map_key=True)
    # msgpack raises its own tree, ValueError and, on deep nesting, StackError.
    except (ValueError, msgpack.exceptions.UnpackException) as exc:
        raise FrameCorrupt(f"frame header is not msgpack: {exc}") from exc
    if not isinstance(parsed, dict) or set(parsed) != {"meta", "tensors"}:
        raise FrameCorrupt("frame header is not a map with the keys meta and tensors")
    meta, tensors = parsed["meta"], parsed["tensors"]
    if not isinstance(meta, dict) or not isinstance(tensors, dict):
        raise FrameCorrupt("meta and tensors of a frame header must be maps")
    for name, value in meta.items():
        if not isinstance(name, str) or not _is_scalar(value):
            raise FrameCorrupt(
                f"meta entry {reprlib.repr(name)} of the frame header is {reprlib.repr(value)}, "
                f"expected a name with a text or finite number"
            )
    return meta, tensors


def _is_scalar(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int | bool)


def _parse_span(name: object, span: object) -> tuple[str, tuple[int, ...], int, int]:
    match span:
        case [str(dtype), list(sizes), int(begin), int(end)] if (
            isinstance(name, str)
            and dtype in ITEM_BYTES
            and len(sizes) <= MAX_DIMENSIONS
            # bool is an int to Python: True would pass for the size or offset 1.
            and all(type(number) is int and number >= 0 for number in [*sizes, begin, end])
            and math.prod(max(size, 1) for size in sizes) <= MAX_ELEMENTS
        ):
            return dtype, tuple(sizes), begin, end
    # reprlib: a header can nest deeper than repr may recurse, and holds up to 64 KiB.
    raise FrameCorrupt(
        f"tensor entry {reprlib.repr(name)} is {reprlib.repr(span)}, expected [dtype, shape, "
        f"begin, end] with a dtype of {', '.join(ITEM_BYTES)}, at most {MAX_DIMENSIONS} "
        f"dimensions and {MAX_ELEMENTS} elements"
    )


def _tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in ITEM_BYTES:
        raise ValueError(f"a frame cannot hold dtype {dtype}; it holds {', '.join(ITEM_BYTES)}")
    total = ITEM_BYTES[dtype]
    for size in shape:
        total *= size
    return total


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
