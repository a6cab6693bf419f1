"""The thread that owns the device: takes a batch, has it scored, answers each request.

What the scorer cannot name is a fault of the device or of our code; after it nothing
the process says can be trusted. What is in flight is answered, then the process ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from distill_wire.errors import TeacherFailed
from distill_wire.types import ScoreRequest, Timings
from teacher_server.scheduling.queue import Entry, RequestQueue

logger = logging.getLogger(__name__)

DEVICE_THREAD = "teacher-device"


class Answered(Protocol):
    """What a scorer gives per request, unless it gives an error."""

    @property
    def frame(self) -> memoryview:
        """The answer's bytes."""

    @property
    def timings(self) -> Timings:
        """Where its time went, the queue left out."""


Score = Callable[[Sequence[ScoreRequest]], Sequence[Answered | TeacherFailed]]
"""Scores a batch: per request an answer, or a `TeacherFailed`."""


class Dispatcher:
    """Runs `prepare` and then batch after batch on one named thread."""

    def __init__(
        self,
        queue: RequestQueue,
        *,
        prepare: Callable[[], Score],
        on_batch: Callable[[Sequence[Timings]], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """Set up; nothing runs yet.

        Args:
            queue: where batches come from.
            prepare: loads what is needed, on the thread, and gives the scorer.
            on_batch: told the timings of each batch that was answered.
            on_fatal: told once, from the thread, why it ended.
        """
        self._queue = queue
        self._prepare = prepare
        self._on_batch = on_batch
        self._on_fatal = on_fatal
        self._thread = threading.Thread(target=self._run, name=DEVICE_THREAD, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end; close the queue first."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            score = self._prepare()
            while (batch := self._queue.take_batch()) is not None:
                self._answer(batch, score)
        # Any fault here ends the service; what it is decides only the exit code.
        except Exception as exc:
            self._on_fatal(exc)

    def _answer(self, batch: list[Entry], score: Score) -> None:
        start = self._queue.now()
        clock = time.perf_counter()
        try:
            answers = score([entry.request for entry in batch])
        except Exception as exc:
            logger.exception("the device failed on a batch of %d requests", len(batch))
            for entry in [*batch, *self._queue.drain()]:
                entry.on_done(TeacherFailed(f"the teacher's device failed: {exc}"))
            raise
        self._queue.batch_done(
            tokens=sum(entry.request.num_tokens for entry in batch),
            seconds=time.perf_counter() - clock,
        )
        reported = []
        for entry, answer in zip(batch, answers, strict=True):
            if isinstance(answer, TeacherFailed):
                logger.error("request %s: %s", entry.request.request_id, answer)
                entry.on_done(answer)
                continue
            timings = replace(answer.timings, queue_s=start - entry.enqueued_at)
            reported.append(timings)
            entry.on_done((answer.frame, timings))
        self._on_batch(reported)
