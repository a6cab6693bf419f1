"""Everything that can go wrong between a student and a teacher, as one tree.

    DistillError
    |- WireError                the bytes are wrong; never retried
    |  |- FrameCorrupt
    |  `- VersionMismatch       the two ends speak other wire versions
    |- TeacherRefused           the teacher answered no
    |  |- RequestInvalid        caller's mistake; never retried
    |  |- IdentityMismatch      another model or tokenizer than agreed; never retried
    |  |- TeacherOverloaded     retry after `retry_after_s`
    |  |- TeacherNotReady       still loading, or draining; retry or go elsewhere
    |  `- TeacherFailed         the teacher's own fault, such as a non-finite logit
    `- TeacherUnreachable       no answer in time; retried on another endpoint

`STATUS_OF` is the one table to gRPC status names; `error_from_status` is its way
back. The class name travels in the trailing metadata key `distill-error`, because
several classes share a status; a foreign server sends none and falls back to the
status alone. Depends on: nothing.
"""

from __future__ import annotations

import math

ERROR_KEY = "distill-error"
RETRY_AFTER_KEY = "retry-after-s"


class DistillError(Exception):
    """Root of all errors that cross the wire."""

    is_retryable = False


class WireError(DistillError):
    """The bytes are wrong."""


class FrameCorrupt(WireError):
    """A frame or chunk does not hold what its header or checksum says."""


class VersionMismatch(WireError):
    """The two ends speak different wire versions."""


class TeacherRefused(DistillError):
    """The teacher answered no."""


class RequestInvalid(TeacherRefused):
    """The request breaks a limit or names something that does not exist."""


class IdentityMismatch(TeacherRefused):
    """The teacher is not the model, revision or tokenizer that was agreed on."""


class TeacherOverloaded(TeacherRefused):
    """More tokens wait than the teacher admits.

    Attributes:
        retry_after_s: seconds after which a retry has a chance.
    """

    is_retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TeacherNotReady(TeacherRefused):
    """The teacher is loading its model, or is shutting down."""

    is_retryable = True


class TeacherFailed(TeacherRefused):
    """The teacher could not compute an answer that may be trained on."""


class TeacherUnreachable(DistillError):
    """No answer arrived in time."""

    is_retryable = True


STATUS_OF: dict[type[DistillError], str] = {
    FrameCorrupt: "DATA_LOSS",
    VersionMismatch: "FAILED_PRECONDITION",
    RequestInvalid: "INVALID_ARGUMENT",
    IdentityMismatch: "FAILED_PRECONDITION",
    TeacherOverloaded: "RESOURCE_EXHAUSTED",
    TeacherNotReady: "UNAVAILABLE",
    TeacherFailed: "INTERNAL",
    TeacherUnreachable: "DEADLINE_EXCEEDED",
}
"""Leaf class -> name of the gRPC status code that carries it."""

_BY_NAME = {error.__name__: error for error in STATUS_OF}

# What a bare status means when no `distill-error` key came with it: a proxy, a
# foreign service, or grpc itself answered.
_BARE_STATUS: dict[str, type[DistillError]] = {
    "INVALID_ARGUMENT": RequestInvalid,
    "FAILED_PRECONDITION": IdentityMismatch,
    "RESOURCE_EXHAUSTED": TeacherOverloaded,
    "DATA_LOSS": FrameCorrupt,
    "PERMISSION_DENIED": RequestInvalid,
    "UNAUTHENTICATED": RequestInvalid,
    "UNIMPLEMENTED": VersionMismatch,
}

# grpc itself says RESOURCE_EXHAUSTED of a message above `transport.MAX_MESSAGE_BYTES`;
# such a request never fits, however often it is sent again.
_OVERSIZE = "message larger than max"


def error_metadata(error: DistillError) -> tuple[tuple[str, str], ...]:
    """Give the trailing metadata that lets `error_from_status` rebuild the class."""
    pairs = [(ERROR_KEY, type(error).__name__)]
    if isinstance(error, TeacherOverloaded):
        pairs.append((RETRY_AFTER_KEY, f"{error.retry_after_s:.3f}"))
    return tuple(pairs)


def error_from_status(status: str, details: str, metadata: dict[str, str]) -> DistillError:
    """Rebuild the error a server sent.

    Args:
        status: name of the gRPC status code, such as "INVALID_ARGUMENT".
        details: the status message.
        metadata: trailing metadata; keys other than ours are ignored.

    Returns:
        The class named in the metadata, else the nearest one for the bare status.
        Anything unknown is `TeacherUnreachable`: no answer was obtained.
    """
    error = _BY_NAME.get(metadata.get(ERROR_KEY, "")) or _BARE_STATUS.get(
        status, TeacherUnreachable
    )
    if ERROR_KEY not in metadata and _OVERSIZE in details:
        error = RequestInvalid
    message = details or f"the server answered {status} without a message"
    if error is TeacherOverloaded:
        return TeacherOverloaded(message, retry_after_s=_seconds(metadata.get(RETRY_AFTER_KEY)))
    return error(message)


def _seconds(text: str | None) -> float:
    try:
        seconds = float(text or 1.0)
    except ValueError:
        return 1.0
    # "nan" and "inf" are floats too, and nothing can wait for them.
    return max(seconds, 0.0) if math.isfinite(seconds) else 1.0
