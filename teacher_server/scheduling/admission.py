"""The gate: is there a teacher, and may this request ask what it asks?

Everything a request can get wrong is refused here, by row, position and limit, before
it costs anything: on a GPU one id outside the vocabulary would end the process for
all clients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from distill_wire.codecs import CODECS
from distill_wire.errors import IdentityMismatch, RequestInvalid, TeacherNotReady
from distill_wire.targets import answer_bytes_bound
from distill_wire.types import ScoreRequest, TeacherDescription
from teacher_server.scheduling.queue import Entry, RequestQueue


class Admission:
    """Closed until a teacher is there, open while it serves, closed when it stops."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self._description: TeacherDescription | None = None
        self._token_map: tuple[str, ...] = ()
        self._frame_head: Callable[[], memoryview] | None = None
        self._head_frame: memoryview | None = None
        self._head_lock = threading.Lock()
        self._why_closed = "the teacher is loading its model"

    @property
    def is_open(self) -> bool:
        """Whether requests are taken."""
        return not self._why_closed

    def open(
        self,
        description: TeacherDescription,
        token_map: tuple[str, ...],
        *,
        frame_head: Callable[[], memoryview],
    ) -> None:
        """Take requests for this teacher from now on."""
        self._frame_head = frame_head
        self._description = description
        self._token_map = token_map
        self._why_closed = ""

    def close(self, reason: str) -> None:
        """Refuse requests from now on."""
        self._why_closed = reason

    def describe(self, *, include_token_map: bool) -> TeacherDescription:
        """Say who the teacher is, with its load.

        Raises:
            TeacherNotReady: there is none yet, or it stops.
        """
        if self._why_closed or self._description is None:
            raise TeacherNotReady(self._why_closed)
        tokens, requests = self._queue.load
        return replace(
            self._description,
            queue_tokens=tokens,
            queue_requests=requests,
            token_map=self._token_map if include_token_map else (),
        )

    def head_frame(self, expected_weights_fingerprint: str) -> memoryview:
        """Give the framed output head. Every rank asks for it once, so it is framed once and kept.

        Copies from the device, so it is not for the event loop.

        Raises:
            TeacherNotReady: no teacher, or it stops.
            IdentityMismatch: the client expects other weights.
        """
        description = self.describe(include_token_map=False)
        _check_identity("for the head", expected_weights_fingerprint, description)
        with self._head_lock:
            if self._head_frame is None:
                assert self._frame_head is not None
                self._head_frame = self._frame_head()
            return self._head_frame

    def submit(
        self, request: ScoreRequest, *, on_done: Callable[[Any], None], timeout_s: float | None
    ) -> Entry:
        """Check a request and let it wait for the device.

        Raises:
            TeacherNotReady: no teacher, or it stops.
            TeacherRefused: the request breaks a limit or there is no room.
        """
        description = self.describe(include_token_map=False)
        check_request(request, description)
        deadline = None if timeout_s is None else self._queue.now() + timeout_s
        entry = Entry(request=request, on_done=on_done, deadline=deadline)
        self._queue.put(entry)
        return entry


def check_request(request: ScoreRequest, description: TeacherDescription) -> None:
    """Compare a request with what the teacher is and allows.

    Raises:
        IdentityMismatch: it expects other weights.
        RequestInvalid: it breaks a limit; the message names row, position and limit.
    """
    name, limits, spec = request.request_id, description.limits, request.target
    _check_identity(name, request.expected_weights_fingerprint, description)
    for row, length in enumerate(request.row_lengths_R.tolist()):
        if length > limits.max_row_tokens:
            raise RequestInvalid(
                f"row {row} of request {name} has {length} tokens, limit {limits.max_row_tokens}; "
                f"lower max_length in the trainer or raise max_model_len"
            )
    if request.num_tokens > limits.max_request_tokens:
        raise RequestInvalid(
            f"request {name} has {request.num_tokens} tokens, limit {limits.max_request_tokens}; "
            f"send fewer rows a request or raise max_request_tokens"
        )
    _check_ids(request, num_ids=description.vocab_size)
    _check_candidates(request, num_ids=description.vocab_size)
    for layer in spec.hidden_layers:
        if layer > description.num_layers:
            raise RequestInvalid(
                f"request {name} asks for hidden layer {layer}, "
                f"this teacher has layers 0..{description.num_layers}"
            )
    asked = {
        "top_k": spec.top_k,
        "num_draws": spec.num_draws,
        "candidates a position": request.num_candidates,
    }
    for what, number in asked.items():
        if number > limits.max_top_k:
            raise RequestInvalid(
                f"request {name} asks for {what} {number}, limit {limits.max_top_k}"
            )
    CODECS[spec.codec].check(spec, vocab_size=description.vocab_size)
    answer_bytes = answer_bytes_bound(request, description)
    if answer_bytes > limits.max_answer_bytes:
        raise RequestInvalid(
            f"the answer to request {name} would have up to {answer_bytes} bytes, limit "
            f"{limits.max_answer_bytes}; ask for fewer positions a request, or another codec"
        )


def _check_identity(name: str, expected: str, description: TeacherDescription) -> None:
    if expected and expected != description.weights_fingerprint:
        raise IdentityMismatch(
            f"request {name} expects weights {expected}, this teacher has "
            f"{description.weights_fingerprint} ({description.model_id})"
        )


def _check_ids(request: ScoreRequest, *, num_ids: int) -> None:
    outside_T = (request.token_ids_T < 0) | (request.token_ids_T >= num_ids)
    if not outside_T.any():
        return
    token = int(np.argmax(outside_T))
    row, position = request.place_of(token)
    raise RequestInvalid(
        f"row {row} of request {request.request_id} holds token id "
        f"{int(request.token_ids_T[token])} at position {position}, "
        f"this teacher has ids 0..{num_ids - 1}"
    )


def _check_candidates(request: ScoreRequest, *, num_ids: int) -> None:
    ids_NC = request.candidate_ids_NC
    if ids_NC is None:
        return
    outside_NC = (ids_NC < 0) | (ids_NC >= num_ids)
    if outside_NC.any():
        position, column = (int(index) for index in np.argwhere(outside_NC)[0])
        raise RequestInvalid(
            f"candidate {column} of wanted position {position} of request {request.request_id} "
            f"is token id {int(ids_NC[position, column])}, this teacher has ids 0..{num_ids - 1}"
        )
