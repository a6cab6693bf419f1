"""Requests, logits and frames that the tests of encoding and of answers share.

The hidden states are the logits: the head of these answers changes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill_wire.targets import TeacherTarget, encode_positions, read_target, write_target
from distill_wire.types import CodecId, ScoreRequest, TargetSpec

V = 32
SPECS = {
    "topk": TargetSpec(codec=CodecId.TOPK, top_k=5, temperature=2.0),
    "dense": TargetSpec(codec=CodecId.DENSE, temperature=2.0),
}


def make_request(num_positions: int, spec: TargetSpec, *, request_id: str = "r-1") -> ScoreRequest:
    """Ask for all positions of one row but the last."""
    mask = np.ones(num_positions + 1, np.bool_)
    mask[-1] = False
    return ScoreRequest(
        request_id=request_id,
        token_ids_T=np.zeros(num_positions + 1, np.int32),
        row_lengths_R=np.array([num_positions + 1], np.int32),
        position_mask_T=mask,
        target=spec,
    )


def random_logits(num_positions: int, vocab_size: int = V) -> Tensor:
    torch.manual_seed(num_positions)
    return 3 * torch.randn(num_positions, vocab_size)


def encode(logits_NV: Tensor, spec: TargetSpec, **options: Any) -> dict[str, Tensor]:
    """Encode logits as if the hidden states were the logits; token 1 follows everywhere."""
    gold_N = torch.ones(len(logits_NV), dtype=torch.long)
    return encode_positions(logits_NV, gold_N, head=lambda hidden: hidden, spec=spec, **options)


def frame_of(encoded: dict[str, Tensor], request: ScoreRequest) -> bytearray:
    return bytearray(write_target(encoded, request, weights_fingerprint="w"))


def read(frame: bytes | bytearray, request: ScoreRequest, *, vocab_size: int = V) -> TeacherTarget:
    return read_target(frame, request, vocab_size=vocab_size, weights_fingerprint="w")


def round_trip(logits_NV: Tensor, spec: TargetSpec) -> TeacherTarget:
    request = make_request(len(logits_NV), spec)
    return read(frame_of(encode(logits_NV, spec), request), request, vocab_size=logits_NV.shape[-1])
