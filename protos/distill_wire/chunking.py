"""A frame in pieces small enough for gRPC to carry well, and whole again.

1 MiB is the measured optimum: 64 MiB messages move three times slower and make
health checks on the same event loop wait 360 ms. The first chunk says how long
the whole is, so a joiner can refuse it before it allocates. Pure: bytes only.
"""

from __future__ import annotations

from collections.abc import Iterator

from distill_wire.errors import FrameCorrupt

CHUNK_BYTES = 1 << 20


def split_frame(frame: bytes | memoryview, *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Cut a frame into pieces of at most `chunk_bytes`; at least one piece, even if empty."""
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be >= 1, got {chunk_bytes}")
    for start in range(0, max(len(frame), 1), chunk_bytes):
        # grpc takes bytes only, so this copy is the one that cannot be saved.
        yield bytes(frame[start : start + chunk_bytes])


class ChunkJoiner:
    """Puts the chunks of one answer together in a buffer allocated once."""

    def __init__(self, *, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer: bytearray | None = None
        self._filled = 0

    def add(self, data: bytes, *, frame_bytes: int) -> None:
        """Append one chunk.

        Args:
            data: the chunk's bytes.
            frame_bytes: the length of the whole frame on the first chunk, 0 on later ones.

        Raises:
            FrameCorrupt: the whole is longer than the limit, or more arrives than announced.
        """
        if self._buffer is None:
            if not 0 < frame_bytes <= self._max_frame_bytes:
                raise FrameCorrupt(
                    f"the first chunk announces a frame of {frame_bytes} bytes, "
                    f"expected 1..{self._max_frame_bytes}"
                )
            self._buffer = bytearray(frame_bytes)
        end = self._filled + len(data)
        if end > len(self._buffer):
            raise FrameCorrupt(
                f"chunks hold {end} bytes so far, the frame was announced with {len(self._buffer)}"
            )
        self._buffer[self._filled : end] = data
        self._filled = end

    def finish(self) -> bytearray:
        """Give the whole frame.

        Raises:
            FrameCorrupt: the answer ended early.
        """
        if self._buffer is None:
            raise FrameCorrupt("the answer ended without a chunk")
        if self._filled != len(self._buffer):
            raise FrameCorrupt(
                f"the answer ended after {self._filled} of {len(self._buffer)} announced bytes"
            )
        return self._buffer
