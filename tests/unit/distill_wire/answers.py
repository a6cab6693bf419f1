"""Requests, logits and frames that the tests of encoding and of answers share.

The hidden states are the logits: the head of these answers changes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill_wire.scoring import encode_answer
from distill_wire.targets import TeacherTarget, read_target, write_target
from distill_wire.types import (
    CodecId,
    Limits,
    LogitTransform,
    ScoreRequest,
    TargetSpec,
    TeacherDescription,
)

V = 32
SPECS = {
    "topk": TargetSpec(codec=CodecId.TOPK, top_k=5, temperature=2.0),
    "dense": TargetSpec(codec=CodecId.DENSE, temperature=2.0),
    "threshold": TargetSpec(codec=CodecId.THRESHOLD, num_draws=20, temperature=2.0),
    "hidden8": TargetSpec(codec=CodecId.HIDDEN8, temperature=2.0),
}


def describe(vocab_size: int = V, *, hidden_size: int | None = None) -> TeacherDescription:
    """A teacher whose hidden states are its logits."""
    return TeacherDescription(
        wire_version=1,
        model_id="m",
        revision="",
        weights_fingerprint="w",
        token_map_fingerprint="",
        head_rows=vocab_size,
        vocab_size=vocab_size,
        hidden_size=hidden_size or vocab_size,
        num_layers=2,
        logit_transform=LogitTransform(),
        dtype="float32",
        attention_implementation="sdpa",
        codecs=tuple(CodecId),
        limits=Limits(
            max_request_tokens=2**20,
            max_row_tokens=2**20,
            max_top_k=2**20,
            max_answer_bytes=2**40,
        ),
    )


def make_request(num_positions: int, spec: TargetSpec, *, request_id: str = "r-1") -> ScoreRequest:
    """Ask for all positions of one row but the last; token 1 follows everywhere."""
    mask = np.ones(num_positions + 1, np.bool_)
    mask[-1] = False
    return ScoreRequest(
        request_id=request_id,
        token_ids_T=np.ones(num_positions + 1, np.int32),
        row_lengths_R=np.array([num_positions + 1], np.int32),
        position_mask_T=mask,
        target=spec,
    )


def random_logits(num_positions: int, vocab_size: int = V) -> Tensor:
    torch.manual_seed(num_positions)
    return 3 * torch.randn(num_positions, vocab_size)


def encode(logits_NV: Tensor, spec: TargetSpec, **options: Any) -> dict[str, Tensor]:
    """Encode logits as if the hidden states were the logits."""
    request = make_request(len(logits_NV), spec)
    options = {"head": lambda hidden: hidden, "vocab_size": logits_NV.shape[-1]} | options
    return encode_answer(request, logits_NV, **options)


def frame_of(encoded: dict[str, Tensor], request: ScoreRequest) -> bytearray:
    return bytearray(write_target(encoded, request, weights_fingerprint="w"))


def read(frame: bytes | bytearray, request: ScoreRequest, *, vocab_size: int = V) -> TeacherTarget:
    return read_target(frame, request, describe(vocab_size))


def round_trip(logits_NV: Tensor, spec: TargetSpec, **options: Any) -> TeacherTarget:
    request = make_request(len(logits_NV), spec)
    frame = frame_of(encode(logits_NV, spec, **options), request)
    return read(frame, request, vocab_size=options.get("vocab_size", logits_NV.shape[-1]))
