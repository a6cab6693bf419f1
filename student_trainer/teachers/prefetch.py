"""Keeps requests for the next micro-batches under way while this one trains.

The loader runs `depth` micro-batches ahead; each is sent to the teacher the moment it
is drawn and carries its pending answer. Depth 0 is the plain loop: the request is sent
when the micro-batch is taken. Both give the same batches in the same order, which a
test holds. What was drawn ahead but not trained on is drawn again after a resume,
because the trainer counts the micro-batches it took, not those that were drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from distill_wire.types import TargetSpec
from student_trainer.collator import request_of
from student_trainer.teachers.source import TeacherSource

PENDING = "pending_target"


class Prefetcher:
    """Wraps an iterator of collated micro-batches; each comes out with its pending answer."""

    def __init__(
        self,
        batches: Iterator[dict[str, Any]],
        *,
        source: TeacherSource,
        target: TargetSpec,
        depth: int,
    ) -> None:
        self._batches = batches
        self._source = source
        self._target = target
        self._depth = depth
        self._ahead: deque[dict[str, Any]] = deque()

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> dict[str, Any]:
        while len(self._ahead) <= self._depth:
            try:
                batch = next(self._batches)
            except StopIteration:
                break
            request, sample_ids = request_of(batch, self._target)
            batch[PENDING] = self._source.submit(request, sample_ids=sample_ids)
            self._ahead.append(batch)
        if not self._ahead:
            raise StopIteration
        return self._ahead.popleft()


class PrefetchingLoader:
    """A data loader whose iteration goes through a prefetcher; otherwise the loader it wraps."""

    def __init__(
        self, loader: Any, prefetch: Callable[[Iterator[dict[str, Any]]], Prefetcher]
    ) -> None:
        self._loader = loader
        self._prefetch = prefetch

    def __iter__(self) -> Prefetcher:
        return self._prefetch(iter(self._loader))

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
