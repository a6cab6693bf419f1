"""Requests that were admitted and wait for the device.

A batch fills a budget of tokens, not a count of requests. The oldest request always
goes first, so a large one that did not fit leads the next batch instead of starving.
Cancelled and expired requests leave the queue here and never reach the device.
Thread-safe: the event loop puts, one worker thread takes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distill_wire.errors import TeacherNotReady, TeacherOverloaded, TeacherUnreachable
from distill_wire.types import ScoreRequest

Clock = Callable[[], float]


@dataclass(kw_only=True, eq=False)
class Entry:
    """A waiting request.

    Attributes:
        request: what was asked.
        on_done: called once, from the worker thread, with an answer or an exception.
        deadline: on the queue's clock, None = none.
        enqueued_at: on the queue's clock.
        is_cancelled: set by the event loop when the client has gone.
    """

    request: ScoreRequest
    on_done: Callable[[Any], None]
    deadline: float | None = None
    enqueued_at: float = 0.0
    is_cancelled: bool = field(default=False)


class RequestQueue:
    """A queue bounded in tokens that gives batches bounded in tokens."""

    def __init__(
        self,
        *,
        max_queue_tokens: int,
        max_batch_tokens: int,
        max_wait_s: float,
        on_dropped: Callable[[str], None] = lambda reason: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._max_queue_tokens = max_queue_tokens
        self._max_batch_tokens = max_batch_tokens
        self._max_wait_s = max_wait_s
        self._on_dropped = on_dropped
        self._clock = clock
        self._entries: deque[Entry] = deque()
        self._tokens = 0
        self._in_flight = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._tokens_per_s = 0.0

    @property
    def load(self) -> tuple[int, int]:
        """Tokens and requests that wait."""
        return self._tokens, len(self._entries)

    def now(self) -> float:
        """Read the queue's clock."""
        return self._clock()

    def put(self, entry: Entry) -> None:
        """Add a request.

        Raises:
            TeacherOverloaded: it would raise the queue above its tokens.
            TeacherNotReady: the queue is closed.
        """
        tokens = entry.request.num_tokens
        with self._changed:
            if self._is_closed:
                raise TeacherNotReady("the teacher is shutting down; ask another replica")
            if self._tokens + tokens > self._max_queue_tokens:
                retry_after_s = self._seconds_for(self._tokens + tokens - self._max_queue_tokens)
                raise TeacherOverloaded(
                    f"{self._tokens} tokens are waiting and {tokens} more exceed max_queue_tokens "
                    f"({self._max_queue_tokens}); retry in {retry_after_s:.1f} s or add a replica",
                    retry_after_s=retry_after_s,
                )
            entry.enqueued_at = self._clock()
            self._entries.append(entry)
            self._tokens += tokens
            self._changed.notify_all()

    def take_batch(self) -> list[Entry] | None:
        """Wait for work and give the next batch; None once closed and empty.

        An idle device waits up to `max_wait_s` after the first request for company.
        """
        with self._changed:
            while True:
                while not self._entries and not self._is_closed:
                    self._changed.wait()
                if not self._entries:
                    return None
                company_until = self._entries[0].enqueued_at + self._max_wait_s
                while self._tokens < self._max_batch_tokens and not self._is_closed:
                    left_s = company_until - self._clock()
                    if left_s <= 0:
                        break
                    self._changed.wait(left_s)
                batch = self._pop_batch()
                if batch:
                    self._in_flight = len(batch)
                    return batch

    def batch_done(self, *, tokens: int, seconds: float) -> None:
        """Tell that the last batch is answered; its speed prices the next refusal."""
        with self._changed:
            self._in_flight = 0
            speed = tokens / max(seconds, 1e-6)
            self._tokens_per_s = (
                0.7 * self._tokens_per_s + 0.3 * speed if self._tokens_per_s else speed
            )
            self._changed.notify_all()

    def close(self) -> None:
        """Take nothing more; what waits is still given out."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Wait until nothing waits and nothing is computed."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._entries and not self._in_flight, timeout_s
            )

    def drain(self) -> list[Entry]:
        """Empty the queue and give what waited, for a last answer."""
        with self._changed:
            waiting = list(self._entries)
            self._entries.clear()
            self._tokens = 0
            self._changed.notify_all()
            return waiting

    def _pop_batch(self) -> list[Entry]:
        batch: list[Entry] = []
        tokens = 0
        while self._entries:
            entry = self._entries[0]
            size = entry.request.num_tokens
            if reason := self._reason_to_drop(entry):
                self._drop(entry, reason)
            elif batch and tokens + size > self._max_batch_tokens:
                break
            else:
                batch.append(entry)
                tokens += size
            self._entries.popleft()
            self._tokens -= size
        self._changed.notify_all()
        return batch

    def _reason_to_drop(self, entry: Entry) -> str:
        if entry.is_cancelled:
            return "cancelled"
        if entry.deadline is not None and entry.deadline <= self._clock():
            return "expired"
        return ""

    def _drop(self, entry: Entry, reason: str) -> None:
        self._on_dropped(reason)
        waited_s = self._clock() - entry.enqueued_at
        entry.on_done(
            TeacherUnreachable(
                f"request {entry.request.request_id} was {reason} after {waited_s:.2f} s of waiting"
            )
        )

    def _seconds_for(self, tokens: int) -> float:
        return max(tokens / self._tokens_per_s, 0.1) if self._tokens_per_s else 1.0
