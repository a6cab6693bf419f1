"""A real teacher server for tests: in this process on a thread, or in one of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from distill_wire import WIRE_VERSION
from distill_wire.chunking import ChunkJoiner
from distill_wire.convert import description_from_proto, request_to_proto, timings_from_proto
from distill_wire.targets import TeacherTarget, read_target
from distill_wire.transport import channel_options
from distill_wire.types import ScoreRequest, TargetSpec, TeacherDescription, Timings
from distill_wire.v1 import teacher_pb2 as pb
from distill_wire.v1.teacher_pb2_grpc import TeacherStub
from teacher_server.app import TeacherApp
from teacher_server.config import ServeConfig
from tests.support.places import PYTHONPATH, ROOT

_START_TIMEOUT_S = 60


@dataclass(frozen=True)
class RunningTeacher:
    """Where a server of this process listens."""

    url: str
    http_url: str
    app: TeacherApp


@contextmanager
def running_teacher(
    model: Path, *, is_awaited: bool = True, **options: Any
) -> Iterator[RunningTeacher]:
    """Serve a model on a thread with its own event loop; `is_awaited` waits until it is ready."""
    config = ServeConfig(
        **{"model": str(model), "port": 0, "http_port": 0, "device": "cpu"} | options
    )
    app = TeacherApp(config)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="test-teacher")
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(app.start(), loop).result(_START_TIMEOUT_S)
        try:
            if is_awaited:
                asyncio.run_coroutine_threadsafe(app.ready.wait(), loop).result(_START_TIMEOUT_S)
            yield RunningTeacher(
                url=f"localhost:{app.port}", http_url=f"http://localhost:{app.http_port}", app=app
            )
        finally:
            asyncio.run_coroutine_threadsafe(app.stop(grace_s=5.0), loop).result(_START_TIMEOUT_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Client:
    """A plain client of the wire, with none of the student's machinery."""

    def __init__(self, url: str) -> None:
        self._channel = grpc.insecure_channel(url, options=channel_options())
        self.stub = TeacherStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def describe(self, *, include_token_map: bool = False) -> TeacherDescription:
        message = pb.DescribeRequest(wire_version=WIRE_VERSION, include_token_map=include_token_map)
        return description_from_proto(self.stub.Describe(message, timeout=30))

    def score(self, request: ScoreRequest) -> tuple[TeacherTarget, Timings]:
        """Score and decode."""
        joiner = ChunkJoiner(max_frame_bytes=1 << 31)
        timings = None
        for chunk in self.stub.Score(request_to_proto(request), timeout=60):
            joiner.add(chunk.data, frame_bytes=chunk.frame_bytes)
            if chunk.HasField("timings"):
                timings = timings_from_proto(chunk.timings)
        description = self.describe()
        target = read_target(joiner.finish(), request, description)
        assert timings is not None, "the last chunk carries the timings"
        return target, timings

    def fetch_head(self, *, expected: str = "") -> bytearray:
        """Fetch the output head's frame."""
        message = pb.FetchHeadRequest(
            wire_version=WIRE_VERSION, expected_weights_fingerprint=expected
        )
        joiner = ChunkJoiner(max_frame_bytes=1 << 31)
        for chunk in self.stub.FetchHead(message, timeout=60):
            joiner.add(chunk.data, frame_bytes=chunk.frame_bytes)
        return joiner.finish()

    def refusal(self, message: pb.ScoreRequest) -> grpc.RpcError:
        """Send a message that must be refused; give the error."""
        try:
            list(self.stub.Score(message, timeout=30))
        except grpc.RpcError as exc:
            return exc
        raise AssertionError("the request was answered")


def make_request(
    rows: list[list[int]],
    target: TargetSpec,
    *,
    masks: list[list[bool]] | None = None,
    request_id: str = "test",
) -> ScoreRequest:
    """Ask for all positions of the rows that have a next token, or for those of `masks`."""
    wanted = masks or [[True] * (len(row) - 1) + [False] for row in rows]
    return ScoreRequest(
        request_id=request_id,
        token_ids_T=np.concatenate([np.array(row, np.int32) for row in rows]),
        row_lengths_R=np.array([len(row) for row in rows], np.int32),
        position_mask_T=np.concatenate([np.array(mask, np.bool_) for mask in wanted]),
        target=target,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def teacher_process(*flags: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run `teacher-server serve` in a process of its own; killed if it outlives the block."""
    server = subprocess.Popen(
        [sys.executable, "-m", "teacher_server", "serve", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": PYTHONPATH} | environment,
    )
    try:
        yield server
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGKILL)
        server.communicate()
