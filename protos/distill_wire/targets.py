"""From an answer's tensors to its frame, and from a frame to what the losses use.

Shapes: N = wanted positions, T = tokens, D = hidden size, C = candidates.
Depends on: torch, numpy. Knows nothing of gRPC or models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from distill_wire.codecs import CODECS
from distill_wire.codecs.base import check_no_nan, take
from distill_wire.codecs.hidden import state_bytes, take_states
from distill_wire.errors import FrameCorrupt, IdentityMismatch
from distill_wire.frame import (
    Frame,
    FrameTensor,
    Scalar,
    frame_bytes_bound,
    read_frame,
    write_frame,
)
from distill_wire.types import ScoreRequest, TargetSpec, TeacherDescription

STATISTICS_BYTES = 4
"""Bytes a position costs besides its codec: entropy and gold log-probability, float16."""

_TORCH_DTYPE = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
_DTYPE_NAME = {dtype: name for name, dtype in _TORCH_DTYPE.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherTarget:
    """What the teacher says about the wanted positions of one micro-batch.

    Attributes:
        spec: what was asked for.
        num_positions: N.
        tensors: what the codec's `decode` gives; the first dimension is N.
        entropy_N: float32, nats, of the teacher at `spec.temperature`.
        gold_logprob_N: float32, of the next token at temperature 1.
        states: per layer asked for, the codes and scales of its [N, D] or [T, D] states.
        candidate_logprobs_NC: float32 at `spec.temperature`, None if none were named.
    """

    spec: TargetSpec
    num_positions: int
    tensors: Mapping[str, Tensor]
    entropy_N: Tensor
    gold_logprob_N: Tensor
    states: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    candidate_logprobs_NC: Tensor | None = None

    def to(self, device: torch.device) -> TeacherTarget:
        """Copy to a device; from pinned memory the copy does not wait."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> TeacherTarget:
        """Copy to page-locked memory."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> TeacherTarget:
        return TeacherTarget(
            spec=self.spec,
            num_positions=self.num_positions,
            tensors={name: function(tensor) for name, tensor in self.tensors.items()},
            entropy_N=function(self.entropy_N),
            gold_logprob_N=function(self.gold_logprob_N),
            states={
                layer: (function(codes), function(scale))
                for layer, (codes, scale) in self.states.items()
            },
            candidate_logprobs_NC=(
                None if self.candidate_logprobs_NC is None else function(self.candidate_logprobs_NC)
            ),
        )


def answer_bytes_bound(request: ScoreRequest, description: TeacherDescription) -> int:
    """Bound the bytes of an answer before anything is computed."""
    spec, width = request.target, description.hidden_size
    per_position = CODECS[spec.codec].bytes_per_position(
        spec, vocab_size=description.vocab_size, hidden_size=width
    )
    per_position += STATISTICS_BYTES + 4 * request.num_candidates
    num_states = request.num_tokens if spec.has_all_states else request.num_positions
    states = len(spec.hidden_layers) * num_states * state_bytes(spec.state_codec, width)
    num_tensors = 10 + 2 * len(spec.hidden_layers)
    return frame_bytes_bound(per_position * request.num_positions + states, num_tensors=num_tensors)


def write_target(
    encoded: Mapping[str, Tensor], request: ScoreRequest, *, weights_fingerprint: str
) -> memoryview:
    """Frame encoded tensors; they are copied to the host here if they are not there yet."""
    meta: dict[str, Scalar] = {
        "request_id": request.request_id,
        "codec": int(request.target.codec),
        "num_positions": request.num_positions,
        "weights_fingerprint": weights_fingerprint,
    }
    tensors = {name: tensor_to_frame(tensor) for name, tensor in encoded.items()}
    return write_frame(Frame(meta=meta, tensors=tensors))


def read_target(
    frame: bytes | bytearray | memoryview,
    request: ScoreRequest,
    description: TeacherDescription,
) -> TeacherTarget:
    """Check an answer against what was asked and decode it.

    Raises:
        FrameCorrupt: the bytes are damaged, or the answer is about another request.
        IdentityMismatch: another model answered than the one that was agreed on.
    """
    parsed = read_frame(frame)
    expected = {
        "request_id": request.request_id,
        "codec": int(request.target.codec),
        "num_positions": request.num_positions,
    }
    for key, value in expected.items():
        if parsed.meta.get(key) != value:
            raise FrameCorrupt(
                f"the answer to request {request.request_id} has {key} {parsed.meta.get(key)!r}, "
                f"expected {value!r}"
            )
    fingerprint = parsed.meta.get("weights_fingerprint")
    if fingerprint != description.weights_fingerprint:
        raise IdentityMismatch(
            f"request {request.request_id} was answered by weights {fingerprint}, "
            f"this run is pinned to {description.weights_fingerprint}"
        )
    tensors = {name: tensor_from_frame(tensor) for name, tensor in parsed.tensors.items()}
    return decode_target(tensors, request, description)


def decode_target(
    tensors: Mapping[str, Tensor], request: ScoreRequest, description: TeacherDescription
) -> TeacherTarget:
    """Check and widen encoded tensors, from a frame or from a teacher in this process.

    Raises:
        FrameCorrupt: a tensor is missing, misshapen or holds impossible values.
    """
    spec, num_positions, width = request.target, request.num_positions, description.hidden_size
    shape = (num_positions,)
    entropy_N = take(tensors, "entropy", dtype=torch.float16, shape=shape).float()
    gold_N = take(tensors, "gold_logprob", dtype=torch.float16, shape=shape).float()
    check_no_nan(entropy_N, "entropy")
    check_no_nan(gold_N, "gold_logprob")
    candidates_NC = None
    if request.num_candidates:
        shape_NC = (num_positions, request.num_candidates)
        candidates_NC = take(tensors, "candidate_logprobs", dtype=torch.float32, shape=shape_NC)
        check_no_nan(candidates_NC, "candidate_logprobs")
    num_states = request.num_tokens if spec.has_all_states else num_positions
    states: dict[int, tuple[Tensor, Tensor]] = {}
    for layer in spec.hidden_layers:
        name = f"layer_{layer}"
        taken = take_states(tensors, spec.state_codec, name=name, shape=(num_states, width))
        states[layer] = taken[name], taken[f"{name}_scale"]
    decoded = CODECS[spec.codec].decode(
        tensors,
        spec,
        vocab_size=description.vocab_size,
        hidden_size=width,
        num_positions=num_positions,
    )
    return TeacherTarget(
        spec=spec,
        num_positions=num_positions,
        tensors=decoded,
        entropy_N=entropy_N,
        gold_logprob_N=gold_N,
        states=states,
        candidate_logprobs_NC=candidates_NC,
    )


def tensor_to_frame(tensor: Tensor) -> FrameTensor:
    """Give a tensor's bytes to a frame; it is copied to the host if it is not there."""
    host = tensor.detach().contiguous().cpu()
    flat = host.reshape(-1).view(torch.uint8) if host.numel() else torch.empty(0, dtype=torch.uint8)
    return FrameTensor(dtype=_DTYPE_NAME[host.dtype], shape=tuple(host.shape), data=flat.numpy())


def tensor_from_frame(tensor: FrameTensor) -> Tensor:
    """Give a frame's tensor to torch, writable: a view of a mutable buffer, else a copy."""
    dtype = _TORCH_DTYPE[tensor.dtype]
    if not tensor.data.nbytes:
        return torch.empty(tensor.shape, dtype=dtype)
    data = tensor.data if tensor.data.flags.writeable else np.array(tensor.data)
    return torch.from_numpy(data).view(dtype).reshape(tensor.shape)
