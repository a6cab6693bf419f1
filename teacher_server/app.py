"""A whole teacher server: built from its configuration, started, drained, stopped.

Ports are bound before the model is loaded, so a taken port fails at once and a load
balancer can already see NOT_SERVING. Ready means that a real request has gone the real
way: `Scorer`, codec, frame.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time

import grpc
import numpy as np
import uvicorn
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from distill_wire.targets import read_target
from distill_wire.transport import server_options
from distill_wire.types import CodecId, ScoreRequest, TargetSpec
from distill_wire.v1.teacher_pb2_grpc import add_TeacherServicer_to_server
from teacher_server.config import ServeConfig
from teacher_server.edge.control import build_control_plane
from teacher_server.edge.service import SERVICE_NAME, TeacherService
from teacher_server.engine.model import LoadedTeacher, load_teacher
from teacher_server.engine.scorer import Scorer
from teacher_server.metrics import TeacherMetrics
from teacher_server.scheduling.admission import Admission
from teacher_server.scheduling.dispatcher import Dispatcher, Score
from teacher_server.scheduling.queue import RequestQueue

logger = logging.getLogger(__name__)

_LAG_INTERVAL_S = 0.5
_WARM_UP_TOKENS = 8
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class PortTaken(Exception):
    """A port cannot be bound."""


class TeacherApp:
    """One server in the running event loop."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self.metrics = TeacherMetrics()
        self._queue = RequestQueue(
            max_queue_tokens=config.max_queue_tokens,
            max_batch_tokens=config.max_batch_tokens,
            max_wait_s=config.max_wait_ms / 1000,
            on_dropped=lambda reason: self.metrics.dropped.labels(reason=reason).inc(),
        )
        self._admission = Admission(self._queue)
        self.metrics.watch_queue(lambda: self._queue.load)
        self._dispatcher = Dispatcher(
            self._queue,
            prepare=self._prepare,
            on_batch=self.metrics.observe_batch,
            on_fatal=self._on_fatal,
        )
        self.port = 0
        self.http_port = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Bind the ports and begin to load; returns before the teacher is ready.

        Raises:
            PortTaken: another process listens there.
        """
        self._loop = asyncio.get_running_loop()
        self.ready = asyncio.Event()
        self.failed: asyncio.Future[BaseException] = self._loop.create_future()
        self._server = grpc.aio.server(options=server_options())
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        add_TeacherServicer_to_server(TeacherService(self._admission, self.metrics), self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        host, port = self._config.host, self._config.port
        # Tried with a plain socket first: grpc's own message names no reason, and its core
        # writes a second one to stderr.
        _listen(host, port, flag="--port").close()
        self.port = self._server.add_insecure_port(f"{host}:{port}")
        self._http = self._bind_control_plane() if self._config.http_port >= 0 else None
        await self._health.set("", _SERVING)
        await self._health.set(SERVICE_NAME, _NOT_SERVING)
        await self._server.start()
        self._tasks.append(asyncio.create_task(self._measure_loop_lag()))
        self._dispatcher.start()

    async def stop(self, *, grace_s: float) -> None:
        """Refuse new requests, finish accepted ones within the grace, close everything."""
        self._admission.close("the teacher is shutting down; ask another replica")
        self.metrics.ready.set(0)
        await self._health.set(SERVICE_NAME, _NOT_SERVING)
        finished = await asyncio.to_thread(self._queue.wait_until_empty, grace_s)
        if not finished:
            logger.error("requests were still unanswered after %g s", grace_s)
        self._queue.close()
        await self._server.stop(grace=max(1.0, grace_s if finished else 1.0))
        if self._http is not None:
            self._http.should_exit = True
        await asyncio.to_thread(self._dispatcher.join, 5.0)
        for task in self._tasks:
            if task.get_name() != "http":
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _bind_control_plane(self) -> uvicorn.Server:
        listener = _listen(self._config.host, self._config.http_port, flag="--http-port")
        self.http_port = listener.getsockname()[1]
        app = build_control_plane(self._admission, self.metrics)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        # `_serve` is `serve` without signal handlers, which belong to the process here.
        task = asyncio.create_task(server._serve([listener]), name="http")
        self._tasks.append(task)
        return server

    def _prepare(self) -> Score:
        """Load and warm up, on the device thread."""
        config = self._config
        started = time.monotonic()
        teacher = load_teacher(
            config.model,
            tokenizer=config.tokenizer,
            revision=config.revision,
            served_model_name=config.served_model_name,
            dtype=config.dtype,
            device=config.device,
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
            max_row_tokens=config.max_model_len,
            max_request_tokens=config.max_request_tokens,
            max_top_k=config.max_top_k,
            max_answer_bytes=config.max_answer_bytes,
        )
        scorer = Scorer(
            teacher,
            max_batch_tokens=config.max_batch_tokens,
            head_chunk_tokens=config.head_chunk_tokens,
        )
        warm_up(scorer, teacher)
        self._admission.open(teacher.description, teacher.token_map, frame_head=scorer.head_frame)
        self.metrics.set_model(teacher.description)
        elapsed_s = time.monotonic() - started
        self._loop.call_soon_threadsafe(self._announce_ready, teacher, elapsed_s)
        return scorer.score

    def _announce_ready(self, teacher: LoadedTeacher, elapsed_s: float) -> None:
        self.metrics.ready.set(1)
        self._tasks.append(asyncio.create_task(self._health.set(SERVICE_NAME, _SERVING)))
        logger.info(
            "ready after %.1f s: %s on %s, gRPC at %s:%d",
            elapsed_s,
            teacher.description.model_id,
            teacher.device,
            self._config.host,
            self.port,
        )
        self.ready.set()

    def _on_fatal(self, exc: BaseException) -> None:
        self._admission.close(f"the teacher failed: {exc}")

        def tell() -> None:
            if not self.failed.done():
                self.failed.set_result(exc)

        self._loop.call_soon_threadsafe(tell)

    async def _measure_loop_lag(self) -> None:
        while True:
            before = self._loop.time()
            await asyncio.sleep(_LAG_INTERVAL_S)
            self.metrics.loop_lag_s.set(max(0.0, self._loop.time() - before - _LAG_INTERVAL_S))


def _listen(host: str, port: int, *, flag: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as exc:
        raise PortTaken(f"{host} is no address of this machine: {exc.strerror}") from exc
    # As servers do, so that a port whose last connections still linger can be taken again.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as exc:
        listener.close()
        raise PortTaken(
            f"cannot listen on {host}:{port}: {exc.strerror}; choose another {flag}"
        ) from exc
    return listener


def warm_up(scorer: Scorer, teacher: LoadedTeacher) -> None:
    """Send one small request the whole way and read its answer.

    Raises:
        DistillError: the answer is not one a student would take.
    """
    description = teacher.description
    length = min(_WARM_UP_TOKENS, description.limits.max_row_tokens)
    request = ScoreRequest(
        request_id="warm-up",
        token_ids_T=np.arange(length, dtype=np.int32) % description.vocab_size,
        row_lengths_R=np.array([length], np.int32),
        position_mask_T=np.arange(length) < length - 1,
        target=TargetSpec(codec=CodecId.DENSE),
    )
    (answer,) = scorer.score([request])
    if isinstance(answer, Exception):
        raise answer
    read_target(answer.frame, request, description)


async def serve(config: ServeConfig) -> BaseException | None:
    """Serve until SIGTERM, Ctrl-C or a fault; a second signal ends the process at once.

    Returns:
        The fault, None after a clean stop.

    Raises:
        PortTaken: a port cannot be bound.
    """
    app = TeacherApp(config)
    await app.start()
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            raise SystemExit(130)
        logger.warning("stopping: no new requests, up to %g s for those accepted", grace_s)
        stopping.set()

    grace_s = config.shutdown_grace_s
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    app.failed.add_done_callback(lambda _: stopping.set())
    await stopping.wait()
    fault = app.failed.result() if app.failed.done() else None
    await app.stop(grace_s=1.0 if fault else grace_s)
    return fault
