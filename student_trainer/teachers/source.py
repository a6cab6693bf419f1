"""The one interface behind which every teacher stands.

`submit` starts a request and returns at once; `result` waits for it. A remote teacher
computes in between, one in this process computes inside `result`, because its
collectives must run on the training thread in the order of the student's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from distill_wire.head import TeacherHead
from distill_wire.targets import TeacherTarget
from distill_wire.types import ScoreRequest, TeacherDescription, Timings


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredTarget:
    """A target with what it cost.

    Attributes:
        target: on the host, or on the device if the teacher is in this process.
        answer_bytes: bytes of the frame; 0 in process.
        timings: what the teacher reports.
    """

    target: TeacherTarget
    answer_bytes: int
    timings: Timings


class PendingTarget(Protocol):
    """A request that is under way."""

    def result(self) -> ScoredTarget:
        """Wait for the answer.

        Raises:
            DistillError: it was refused, is corrupt, or did not come in time; the message
                names the samples of the micro-batch.
        """


class TeacherSource(Protocol):
    """A teacher."""

    def connect(self) -> TeacherDescription:
        """Wait until the teacher can serve and say who it is.

        Raises:
            DistillError: it cannot be reached, or speaks another wire version.
        """

    def token_map(self) -> tuple[str, ...]:
        """Give the teacher's tokens by id, () if it has none; only asked for on a mismatch."""

    def fetch_head(self) -> TeacherHead:
        """Give the teacher's output head, whole, for targets that are hidden states.

        Raises:
            DistillError: it cannot be had.
        """

    def submit(self, request: ScoreRequest, *, sample_ids: tuple[str, ...]) -> PendingTarget:
        """Start a request."""

    def close(self) -> None:
        """Give up what is under way and free what is held."""


def name_samples(sample_ids: tuple[str, ...]) -> str:
    """List the samples of a micro-batch by row, for an error message."""
    return "; ".join(f"row {row} is sample {sample}" for row, sample in enumerate(sample_ids))
