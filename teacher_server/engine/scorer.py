"""Scores a batch of requests: one pass over the rows, then head and codec per request.

Mixed codecs and temperatures share a batch, because only the head differs. A logit
that is not finite fails the request it belongs to and leaves the others alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distill_wire.causal_lm import head_function
from distill_wire.errors import TeacherFailed
from distill_wire.head import head_of, write_head
from distill_wire.scoring import encode_answer
from distill_wire.targets import write_target
from distill_wire.types import ScoreRequest, Timings
from teacher_server.engine.forward import Row, RowStates, row_states
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
        rows = [_rows_of(request) for request in requests]
        if self._teacher.device.type == "cpu":
            # Company wins nothing on a CPU, and alone a request gets the same bits every time.
            states = [state for own in rows for state in self._run(own)]
        else:
            states = self._run([row for own in rows for row in own])
        if self._teacher.device.type == "cuda":
            torch.cuda.synchronize(self._teacher.device)
        forward_s = time.perf_counter() - start

        answers: list[Answer | TeacherFailed] = []
        first_row = 0
        for request in requests:
            own = states[first_row : first_row + len(request.row_lengths_R)]
            first_row += len(request.row_lengths_R)
            encode_start = time.perf_counter()
            try:
                frame = self._encode(request, own)
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

    def _run(self, rows: Sequence[Row]) -> list[RowStates]:
        return row_states(
            self._teacher.parts.trunk,
            rows,
            max_padded_tokens=self._max_batch_tokens,
            device=self._teacher.device,
        )

    def head_frame(self) -> memoryview:
        """Frame the output head."""
        description = self._teacher.description
        head = head_of(self._teacher.parts, vocab_size=description.vocab_size)
        return write_head(head, weights_fingerprint=description.weights_fingerprint)

    def _encode(self, request: ScoreRequest, rows: Sequence[RowStates]) -> memoryview:
        description = self._teacher.description
        encoded = encode_answer(
            request,
            torch.cat([row.last_nD for row in rows]),
            head=self._head,
            vocab_size=description.vocab_size,
            states={
                layer: torch.cat([row.layers[layer] for row in rows])
                for layer in request.target.hidden_layers
            },
            chunk_tokens=self._head_chunk_tokens,
        )
        fingerprint = description.weights_fingerprint
        return write_target(encoded, request, weights_fingerprint=fingerprint)


def _rows_of(request: ScoreRequest) -> list[Row]:
    lengths = request.row_lengths_R.tolist()
    return [
        Row(
            token_ids_T=ids.long(),
            mask_T=mask,
            layers=request.target.hidden_layers,
            has_all_states=request.target.has_all_states,
        )
        for ids, mask in zip(
            torch.from_numpy(request.token_ids_T).split(lengths),
            torch.from_numpy(request.position_mask_T).split(lengths),
            strict=True,
        )
    ]
