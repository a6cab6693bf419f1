"""A teacher behind a URL: one gRPC channel, requests on background threads.

Each request runs on a pool thread that sends it, joins the chunks, checks and decodes
the answer and pins it, so the training thread finds finished tensors. The channel is
made by `connect`, never at import or construction, because gRPC does not survive a
fork. A request is pure, so one that failed on the way is sent again until
`max_outage_s` has passed; what the teacher refused is not.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import grpc
import torch

from distill_wire import WIRE_VERSION
from distill_wire.chunking import ChunkJoiner
from distill_wire.convert import description_from_proto, request_to_proto, timings_from_proto
from distill_wire.errors import (
    DistillError,
    TeacherNotReady,
    TeacherOverloaded,
    TeacherUnreachable,
    VersionMismatch,
    error_from_status,
)
from distill_wire.head import TeacherHead, head_bytes_bound, read_head
from distill_wire.targets import answer_bytes_bound, read_target
from distill_wire.transport import channel_options
from distill_wire.types import ScoreRequest, TeacherDescription, Timings
from distill_wire.v1 import teacher_pb2 as pb
from distill_wire.v1.teacher_pb2_grpc import TeacherStub
from student_trainer.teachers.source import ScoredTarget, name_samples

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.2
_LONGEST_RETRY_S = 5.0
_DESCRIBE_DEADLINE_S = 5.0


class RemoteTeacher:
    """Scores rows with a `teacher-server`."""

    def __init__(
        self,
        url: str,
        *,
        num_threads: int = 3,
        connect_timeout_s: float = 60.0,
        ready_timeout_s: float = 1800.0,
        request_timeout_s: float = 300.0,
        max_outage_s: float = 120.0,
    ) -> None:
        """Remember how to reach a teacher; nothing is opened yet.

        Args:
            url: host:port, with or without grpc://.
            num_threads: requests in flight at once, >= 1.
            connect_timeout_s: how long nothing may answer at `url` before `connect` gives up.
            ready_timeout_s: how long a teacher that answers may go on loading its model.
            request_timeout_s: deadline of one attempt of one request.
            max_outage_s: how long one request is tried again before it fails.
        """
        self.url = url.removeprefix("grpc://")
        self._num_threads = num_threads
        self._connect_timeout_s = connect_timeout_s
        self._ready_timeout_s = ready_timeout_s
        self._request_timeout_s = request_timeout_s
        self._max_outage_s = max_outage_s
        self._channel: grpc.Channel | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._closing = threading.Event()
        self._description: TeacherDescription | None = None

    def connect(self) -> TeacherDescription:
        """Open the channel and wait until the teacher is ready.

        Raises:
            TeacherUnreachable: nothing answered within `connect_timeout_s`.
            TeacherNotReady: still loading after `ready_timeout_s`.
            VersionMismatch: something else answers there, or another wire version.
        """
        self.close()
        self._channel = grpc.insecure_channel(self.url, options=channel_options())
        self._closing.clear()
        self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="teacher-request")
        try:
            self._description = self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self._description

    def token_map(self) -> tuple[str, ...]:
        """Ask the teacher for its whole token map."""
        return self._describe(include_token_map=True).token_map

    def fetch_head(self) -> TeacherHead:
        """Ask the teacher for its output head."""
        if self._channel is None or self._description is None:
            raise RuntimeError(f"connect() to the teacher at {self.url} before fetching its head")
        message = pb.FetchHeadRequest(
            wire_version=WIRE_VERSION,
            expected_weights_fingerprint=self._description.weights_fingerprint,
        )
        call = TeacherStub(self._channel).FetchHead(message, timeout=self._request_timeout_s)
        frame, _ = _receive(call, max_frame_bytes=head_bytes_bound(self._description))
        return read_head(frame, self._description)

    def submit(self, request: ScoreRequest, *, sample_ids: tuple[str, ...]) -> Future[ScoredTarget]:
        """Start a request on a background thread."""
        if self._pool is None or self._description is None:
            raise RuntimeError(f"connect() to the teacher at {self.url} before submitting requests")
        fingerprint = self._description.weights_fingerprint
        pinned = dataclasses.replace(request, expected_weights_fingerprint=fingerprint)
        return self._pool.submit(self._score_until_answered, pinned, sample_ids)

    def close(self) -> None:
        """Cancel what is under way and close the channel."""
        self._closing.set()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def _wait_until_ready(self) -> TeacherDescription:
        start = time.monotonic()
        connect_by, ready_by = start + self._connect_timeout_s, start + self._ready_timeout_s
        announced, telling = "", ""
        while True:
            try:
                return self._describe(include_token_map=False)
            except TeacherNotReady as exc:
                if time.monotonic() > ready_by:
                    raise TeacherNotReady(
                        f"the teacher at {self.url} is not ready after "
                        f"{self._ready_timeout_s:g} s (teacher_ready_timeout_s): {exc}"
                    ) from exc
                state, connect_by = f"waiting for the teacher at {self.url}: {exc}", ready_by
            except TeacherUnreachable as exc:
                # A name with two addresses fails on both in turn; one where something listens
                # says more than one where nothing does.
                if "refused" not in str(exc):
                    telling = str(exc)
                if time.monotonic() > connect_by:
                    raise TeacherUnreachable(
                        f"no teacher answered at {self.url} within {self._connect_timeout_s:g} s "
                        f"(teacher_connect_timeout_s); error: {telling or exc}; start one with "
                        f"'teacher-server serve' or correct teacher_url"
                    ) from exc
                state = f"waiting for a teacher at {self.url}: {exc}"
            if state != announced:
                logger.warning(state)
                announced = state
            self._closing.wait(_FIRST_RETRY_S)

    def _describe(self, *, include_token_map: bool) -> TeacherDescription:
        assert self._channel is not None
        message = pb.DescribeRequest(wire_version=WIRE_VERSION, include_token_map=include_token_map)
        try:
            answer = TeacherStub(self._channel).Describe(message, timeout=_DESCRIBE_DEADLINE_S)
        except grpc.RpcError as exc:
            error = _error_of(exc)
            if exc.code() == grpc.StatusCode.UNIMPLEMENTED:
                raise VersionMismatch(
                    f"{self.url} answers gRPC but serves no distill_wire.v1.Teacher; "
                    f"point teacher_url at a teacher-server"
                ) from exc
            raise error from exc
        return description_from_proto(answer)

    def _score_until_answered(
        self, request: ScoreRequest, sample_ids: tuple[str, ...]
    ) -> ScoredTarget:
        give_up_at = time.monotonic() + self._max_outage_s
        pause_s = _FIRST_RETRY_S
        while True:
            try:
                return self._score(request)
            except DistillError as exc:
                gave_up = self._closing.is_set() or time.monotonic() > give_up_at
                if gave_up or not exc.is_retryable:
                    raise type(exc)(
                        f"request {request.request_id} to the teacher at {self.url} failed: {exc}; "
                        f"{name_samples(sample_ids)}"
                    ) from exc
                logger.warning("request %s is tried again: %s", request.request_id, exc)
                wait_s = exc.retry_after_s if isinstance(exc, TeacherOverloaded) else pause_s
            self._closing.wait(min(wait_s, _LONGEST_RETRY_S))
            pause_s = min(pause_s * 2, _LONGEST_RETRY_S)

    def _score(self, request: ScoreRequest) -> ScoredTarget:
        assert self._channel is not None and self._description is not None
        call = TeacherStub(self._channel).Score(
            request_to_proto(request), timeout=self._request_timeout_s
        )
        max_bytes = answer_bytes_bound(request, self._description)
        frame, timings = _receive(call, max_frame_bytes=max_bytes)
        target = read_target(frame, request, self._description)
        if torch.cuda.is_available():
            target = target.pin_memory()
        return ScoredTarget(target=target, answer_bytes=len(frame), timings=timings)


def _receive(call: Iterable[pb.Chunk], *, max_frame_bytes: int) -> tuple[bytearray, Timings]:
    joiner = ChunkJoiner(max_frame_bytes=max_frame_bytes)
    timings = Timings()
    try:
        for chunk in call:
            joiner.add(chunk.data, frame_bytes=chunk.frame_bytes)
            if chunk.HasField("timings"):
                timings = timings_from_proto(chunk.timings)
    except grpc.RpcError as exc:
        raise _error_of(exc) from exc
    return joiner.finish(), timings


def _error_of(exc: grpc.RpcError) -> DistillError:
    # A failed call of a stub is also a grpc.Call, which its type does not say.
    metadata = {key: str(value) for key, value in (exc.trailing_metadata() or ())}
    return error_from_status(exc.code().name, exc.details() or "", metadata)
