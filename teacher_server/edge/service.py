"""The gRPC service: reads a request, waits for its answer, streams its chunks.

Runs on the event loop and touches no tensor. A client that goes away cancels its
coroutine; that marks the request, so the queue drops it before the device.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

import grpc

from distill_wire.chunking import CHUNK_BYTES, split_frame
from distill_wire.convert import (
    check_wire_version,
    description_to_proto,
    request_from_proto,
    timings_to_proto,
)
from distill_wire.errors import STATUS_OF, DistillError, error_metadata
from distill_wire.types import Timings
from distill_wire.v1 import teacher_pb2 as pb
from distill_wire.v1.teacher_pb2_grpc import TeacherServicer
from teacher_server.metrics import TeacherMetrics
from teacher_server.scheduling.admission import Admission

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Teacher"].full_name


class TeacherService(TeacherServicer):
    """`distill_wire.v1.Teacher`."""

    def __init__(self, admission: Admission, metrics: TeacherMetrics) -> None:
        self._admission = admission
        self._metrics = metrics

    async def Describe(
        self, message: pb.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> pb.TeacherDescription:
        """Say who the teacher is."""
        try:
            check_wire_version(message.wire_version, whose="the client")
            description = self._admission.describe(include_token_map=message.include_token_map)
        except DistillError as exc:
            await _abort(context, exc)
        return description_to_proto(description)

    async def Score(
        self, message: pb.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.Chunk]:
        """Score one micro-batch."""
        try:
            frame, timings = await self._wait_for_answer(message, context)
        except DistillError as exc:
            self._metrics.requests.labels(code=STATUS_OF[type(exc)]).inc()
            await _abort(context, exc)
        for chunk in _chunks(frame, timings):
            yield chunk
        self._metrics.requests.labels(code="OK").inc()
        self._metrics.answer_bytes.inc(len(frame))

    async def FetchHead(
        self, message: pb.FetchHeadRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.Chunk]:
        """Send the output head."""
        try:
            check_wire_version(message.wire_version, whose="the client")
            expected = message.expected_weights_fingerprint
            frame = await asyncio.to_thread(self._admission.head_frame, expected)
        except DistillError as exc:
            await _abort(context, exc)
        for chunk in _chunks(frame, Timings()):
            yield chunk

    async def _wait_for_answer(
        self, message: pb.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> tuple[memoryview, Timings]:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[tuple[memoryview, Timings]] = loop.create_future()

        def on_done(outcome: Any) -> None:
            loop.call_soon_threadsafe(_resolve, answered, outcome)

        request = request_from_proto(message)
        entry = self._admission.submit(request, on_done=on_done, timeout_s=context.time_remaining())
        try:
            return await answered
        except asyncio.CancelledError:
            entry.is_cancelled = True
            # Swallowing it would leak the call in grpc (grpc#43360).
            raise


def _chunks(frame: memoryview, timings: Timings) -> Iterator[pb.Chunk]:
    num_chunks = max(1, -(-len(frame) // CHUNK_BYTES))
    for index, data in enumerate(split_frame(frame)):
        yield pb.Chunk(
            data=data,
            frame_bytes=len(frame) if index == 0 else 0,
            timings=timings_to_proto(timings) if index == num_chunks - 1 else None,
        )


def _resolve(future: asyncio.Future[Any], outcome: Any) -> None:
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


async def _abort(context: grpc.aio.ServicerContext, error: DistillError) -> NoReturn:
    status = grpc.StatusCode[STATUS_OF[type(error)]]
    await context.abort(status, str(error), error_metadata(error))
    raise AssertionError("abort raises")
