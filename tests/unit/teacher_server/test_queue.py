"""Oracle: the rules of the queue, on a clock that moves only when told to."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from distill_wire.errors import TeacherNotReady, TeacherOverloaded, TeacherUnreachable
from distill_wire.types import CodecId, ScoreRequest, TargetSpec
from teacher_server.scheduling.queue import Entry, RequestQueue


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_entry(num_tokens: int, name: str = "r", *, deadline: float | None = None) -> Entry:
    outcomes: list[Any] = []
    request = ScoreRequest(
        request_id=name,
        token_ids_T=np.zeros(num_tokens, np.int32),
        row_lengths_R=np.array([num_tokens], np.int32),
        position_mask_T=np.zeros(num_tokens, np.bool_),
        target=TargetSpec(codec=CodecId.DENSE),
    )
    entry = Entry(request=request, on_done=outcomes.append, deadline=deadline)
    entry.outcomes = outcomes  # type: ignore[attr-defined]
    return entry


def make_queue(clock: Clock, **overrides: Any) -> tuple[RequestQueue, list[str]]:
    dropped: list[str] = []
    options = {"max_queue_tokens": 100, "max_batch_tokens": 40, "max_wait_s": 0.0} | overrides
    return RequestQueue(**options, on_dropped=dropped.append, clock=clock), dropped


def names(batch: list[Entry] | None) -> list[str]:
    assert batch is not None
    return [entry.request.request_id for entry in batch]


def test_a_batch_fills_the_token_budget_in_order_of_arrival() -> None:
    queue, _ = make_queue(Clock())
    for name, size in (("a", 10), ("b", 20), ("c", 15), ("d", 5)):
        queue.put(make_entry(size, name))

    assert names(queue.take_batch()) == ["a", "b"]
    assert names(queue.take_batch()) == ["c", "d"]
    assert queue.load == (0, 0)


def test_a_large_request_that_did_not_fit_leads_the_next_batch() -> None:
    queue, _ = make_queue(Clock())
    for name, size in (("small", 10), ("large", 39), ("late", 1)):
        queue.put(make_entry(size, name))

    assert names(queue.take_batch()) == ["small"]
    assert names(queue.take_batch()) == ["large", "late"]


def test_a_request_above_the_budget_runs_alone() -> None:
    queue, _ = make_queue(Clock())
    queue.put(make_entry(90, "huge"))
    queue.put(make_entry(1, "next"))

    assert names(queue.take_batch()) == ["huge"]


def test_cancelled_and_expired_requests_never_reach_the_device() -> None:
    clock = Clock()
    queue, dropped = make_queue(clock)
    gone, late, alive = (
        make_entry(10, "gone"),
        make_entry(10, "late", deadline=101.0),
        make_entry(5),
    )
    for entry in (gone, late, alive):
        queue.put(entry)
    gone.is_cancelled = True
    clock.now = 102.0

    assert names(queue.take_batch()) == ["r"]
    assert dropped == ["cancelled", "expired"]
    assert isinstance(late.outcomes[0], TeacherUnreachable)  # type: ignore[attr-defined]
    assert "late was expired after 2.00 s" in str(late.outcomes[0])  # type: ignore[attr-defined]
    assert queue.load == (0, 0)


def test_over_the_limit_a_request_is_refused_with_the_time_that_the_excess_takes() -> None:
    queue, _ = make_queue(Clock())
    queue.put(make_entry(10))
    queue.take_batch()
    queue.batch_done(tokens=100, seconds=2.0)
    queue.put(make_entry(80))

    with pytest.raises(
        TeacherOverloaded, match=r"80 tokens are waiting and 45 more exceed"
    ) as info:
        queue.put(make_entry(45))

    assert info.value.retry_after_s == pytest.approx(25 / 50)
    queue.put(make_entry(20))
    assert queue.load == (100, 2)


def test_a_closed_queue_refuses_and_still_gives_out_what_it_holds() -> None:
    queue, _ = make_queue(Clock())
    queue.put(make_entry(10, "a"))

    queue.close()

    with pytest.raises(TeacherNotReady, match="shutting down"):
        queue.put(make_entry(1))
    assert names(queue.take_batch()) == ["a"]
    assert queue.take_batch() is None


def test_an_idle_device_waits_for_company_no_longer_than_told() -> None:
    # A real clock: what is tested is that the wait ends, and who is in the batch.
    dropped: list[str] = []
    queue = RequestQueue(
        max_queue_tokens=100, max_batch_tokens=40, max_wait_s=30.0, on_dropped=dropped.append
    )
    batches: list[list[str]] = []
    taker = threading.Thread(target=lambda: batches.append(names(queue.take_batch())))
    queue.put(make_entry(10, "a"))
    taker.start()
    queue.put(make_entry(30, "b"))  # fills the budget, which ends the wait
    taker.join(20)

    assert batches == [["a", "b"]]


def test_empty_means_nothing_waits_and_nothing_is_computed() -> None:
    queue, _ = make_queue(Clock())
    queue.put(make_entry(10))

    assert not queue.wait_until_empty(0)
    queue.take_batch()
    assert not queue.wait_until_empty(0)
    queue.batch_done(tokens=10, seconds=1.0)
    assert queue.wait_until_empty(0)
