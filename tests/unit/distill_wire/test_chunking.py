"""Oracle: slicing and concatenation of bytes."""

from __future__ import annotations

import pytest

from distill_wire.chunking import CHUNK_BYTES, ChunkJoiner, split_frame
from distill_wire.errors import FrameCorrupt

FRAME = bytes(range(256)) * 3


def join(chunks: list[bytes], *, frame_bytes: int, limit: int = 1 << 20) -> bytes:
    joiner = ChunkJoiner(max_frame_bytes=limit)
    for index, chunk in enumerate(chunks):
        joiner.add(chunk, frame_bytes=0 if index else frame_bytes)
    return bytes(joiner.finish())


@pytest.mark.parametrize("chunk_bytes", [1, 7, 256, 767, 768, 769, CHUNK_BYTES])
def test_chunks_are_the_frame_in_order_and_none_is_too_long(chunk_bytes: int) -> None:
    chunks = list(split_frame(FRAME, chunk_bytes=chunk_bytes))

    assert b"".join(chunks) == FRAME
    assert all(1 <= len(chunk) <= chunk_bytes for chunk in chunks)
    assert {type(chunk) for chunk in chunks} == {bytes}
    assert join(chunks, frame_bytes=len(FRAME)) == FRAME


def test_a_memoryview_is_cut_like_bytes() -> None:
    assert list(split_frame(memoryview(FRAME), chunk_bytes=100)) == list(
        split_frame(FRAME, chunk_bytes=100)
    )


def test_a_chunk_is_at_most_one_mebibyte_unless_asked() -> None:
    chunks = list(split_frame(bytes(2 * CHUNK_BYTES + 1)))

    assert CHUNK_BYTES == 1_048_576
    assert [len(chunk) for chunk in chunks] == [CHUNK_BYTES, CHUNK_BYTES, 1]


def test_even_an_empty_frame_is_one_chunk() -> None:
    assert list(split_frame(b"")) == [b""]


@pytest.mark.parametrize("chunk_bytes", [0, -1])
def test_chunks_without_bytes_are_refused(chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"chunk_bytes must be >= 1, got {chunk_bytes}"):
        list(split_frame(FRAME, chunk_bytes=chunk_bytes))


def test_empty_chunks_between_change_nothing() -> None:
    assert join([b"", FRAME[:5], b"", FRAME[5:], b""], frame_bytes=len(FRAME)) == FRAME


@pytest.mark.parametrize("announced", [0, 1025, 2**40, 2**64 - 1])
def test_a_frame_that_is_announced_too_long_is_refused_before_memory_is_taken(
    announced: int,
) -> None:
    joiner = ChunkJoiner(max_frame_bytes=1024)

    # 2**40 bytes would raise MemoryError if they were asked for.
    with pytest.raises(FrameCorrupt, match=rf"announces a frame of {announced} .*1\.\.1024"):
        joiner.add(b"x", frame_bytes=announced)


def test_a_frame_exactly_at_the_limit_is_taken() -> None:
    assert join([FRAME], frame_bytes=len(FRAME), limit=len(FRAME)) == FRAME


def test_more_bytes_than_announced_are_refused_with_both_numbers() -> None:
    joiner = ChunkJoiner(max_frame_bytes=1024)
    joiner.add(b"abc", frame_bytes=4)

    with pytest.raises(FrameCorrupt, match=r"chunks hold 5 bytes so far.*announced with 4"):
        joiner.add(b"de", frame_bytes=0)


def test_a_first_chunk_longer_than_the_frame_is_refused() -> None:
    with pytest.raises(FrameCorrupt, match=r"chunks hold 3 bytes so far.*announced with 2"):
        ChunkJoiner(max_frame_bytes=1024).add(b"abc", frame_bytes=2)


def test_an_answer_that_ends_early_is_refused_with_both_numbers() -> None:
    with pytest.raises(FrameCorrupt, match="ended after 3 of 4 announced bytes"):
        join([b"abc"], frame_bytes=4)


def test_an_answer_without_a_chunk_is_refused() -> None:
    with pytest.raises(FrameCorrupt, match="ended without a chunk"):
        join([], frame_bytes=0)
