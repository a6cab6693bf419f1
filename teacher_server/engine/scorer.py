"""Scores a batch of requests: one pass over the rows, then head and codec per request.

Mixed codecs and temperatures share a batch, because only the head differs. A logit
that is not finite fails the request it belongs to and leaves the others alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distill_wire.causal_lm import head_function
from distill_wire.errors import TeacherFailed
from distill_wire.targets import encode_positions, write_target
from distill_wire.types import ScoreRequest, Timings
from teacher_server.engine.forward import wanted_hidden_states
from teacher_server.engine.model import LoadedTeacher


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """A frame ready to send, and where its time went."""

    frame: memoryview
    timings: Timings


class Scorer:
    """Owns the device: called from one thread only."""

    def __init__(
        self, teacher: LoadedTeacher, *, max_batch_tokens: int, head_chunk_tokens: int
    ) -> None:
        self._teacher = teacher
        self._max_batch_tokens = max_batch_tokens
        self._head_chunk_tokens = head_chunk_tokens
        vocab_size = teacher.description.vocab_size
        self._head = head_function(teacher.parts, vocab_size=vocab_size)

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoreRequest]) -> list[Answer | TeacherFailed]:
        """Score admitted requests together.

        Returns:
            Per request, in order, its answer, or why it has none.
        """
        start = time.perf_counter()
        rows = [row for request in requests for row in _split(request.token_ids_T, request)]
        masks = [mask for request in requests for mask in _split(request.position_mask_T, request)]
        hidden = wanted_hidden_states(
            self._teacher.parts.trunk,
            [row.long() for row in rows],
            masks,
            max_padded_tokens=self._max_batch_tokens,
            device=self._teacher.device,
        )
        if self._teacher.device.type == "cuda":
            torch.cuda.synchronize(self._teacher.device)
        forward_s = time.perf_counter() - start

        answers: list[Answer | TeacherFailed] = []
        first_row = 0
        for request in requests:
            own = hidden[first_row : first_row + len(request.row_lengths_R)]
            first_row += len(request.row_lengths_R)
            encode_start = time.perf_counter()
            try:
                frame = self._encode(request, torch.cat(own))
            except TeacherFailed as exc:
                answers.append(exc)
                continue
            timings = Timings(
                forward_s=forward_s,
                encode_s=time.perf_counter() - encode_start,
                batch_tokens=sum(r.num_tokens for r in requests),
                batch_requests=len(requests),
            )
            answers.append(Answer(frame=frame, timings=timings))
        return answers

    def _encode(self, request: ScoreRequest, hidden_ND: Tensor) -> memoryview:
        wanted_N = np.flatnonzero(request.position_mask_T)
        gold_ids_N = torch.from_numpy(request.token_ids_T[wanted_N + 1]).long()
        encoded = encode_positions(
            hidden_ND,
            gold_ids_N.to(hidden_ND.device),
            head=self._head,
            spec=request.target,
            chunk_tokens=self._head_chunk_tokens,
            name_position=lambda index: _name_position(request, int(wanted_N[index])),
        )
        fingerprint = self._teacher.description.weights_fingerprint
        return write_target(encoded, request, weights_fingerprint=fingerprint)


def _split(values_T: np.ndarray, request: ScoreRequest) -> list[Tensor]:
    return list(torch.from_numpy(values_T).split(request.row_lengths_R.tolist()))


def _name_position(request: ScoreRequest, token: int) -> str:
    starts_R = np.concatenate([[0], np.cumsum(request.row_lengths_R)])
    row = int(np.searchsorted(starts_R, token, side="right")) - 1
    return f"position {token - int(starts_R[row])} of row {row}"
