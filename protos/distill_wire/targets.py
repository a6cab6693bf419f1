"""From hidden states to an answer's frame, and from a frame to what the losses use.

Every answer also carries two numbers a position that no codec can give back: the
teacher's entropy at the requested temperature (so that a KL value can be logged
from a cross-entropy) and the log-probability it gives the next token at
temperature 1 (the teacher's own hard loss).

Shapes: N = wanted positions, D = hidden size, V = real tokens.
Depends on: torch, numpy. Knows nothing of gRPC or models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distill_wire.codecs import CODECS
from distill_wire.codecs.base import check_no_nan, take
from distill_wire.errors import FrameCorrupt, IdentityMismatch, TeacherFailed
from distill_wire.frame import (
    Frame,
    FrameTensor,
    Scalar,
    frame_bytes_bound,
    read_frame,
    write_frame,
)
from distill_wire.types import ScoreRequest, TargetSpec

HEAD_CHUNK_TOKENS = 512
"""Positions whose logits exist at once: 512 x 152k fp32 is 311 MB."""

STATISTICS_BYTES = 8
"""Bytes a position costs besides its codec: entropy and gold log-probability, fp32."""

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
    """

    spec: TargetSpec
    num_positions: int
    tensors: Mapping[str, Tensor]
    entropy_N: Tensor
    gold_logprob_N: Tensor

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
        )


def answer_bytes_bound(spec: TargetSpec, *, vocab_size: int, num_positions: int) -> int:
    """Bound the bytes of an answer before anything is computed."""
    per_position = CODECS[spec.codec].bytes_per_position(spec, vocab_size=vocab_size)
    return frame_bytes_bound((per_position + STATISTICS_BYTES) * num_positions, num_tensors=8)


@torch.no_grad()
def encode_positions(
    hidden_ND: Tensor,
    gold_ids_N: Tensor,
    *,
    head: Callable[[Tensor], Tensor],
    spec: TargetSpec,
    chunk_tokens: int = HEAD_CHUNK_TOKENS,
    name_position: Callable[[int], str] = "wanted position {}".format,
) -> dict[str, Tensor]:
    """Run head and codec over chunks of positions; [N, V] never exists.

    Args:
        hidden_ND: [N, D] last hidden states after the final norm, any float dtype.
        gold_ids_N: [N] int64, the token that really follows each position.
        head: hidden [n, D] -> fp32 logits [n, V], real tokens only.
        spec: codec and temperature.
        chunk_tokens: positions whose logits exist at once.
        name_position: names the n-th wanted position in an error.

    Returns:
        The codec's tensors and `entropy`, `gold_logprob`, on the same device.

    Raises:
        TeacherFailed: a logit is NaN or +inf; the message names the first position.
    """
    codec = CODECS[spec.codec]
    parts: dict[str, list[Tensor]] = {}
    # An empty request still runs one empty chunk, which gives every tensor its shape.
    for start in range(0, max(len(hidden_ND), 1), chunk_tokens):
        logits_NV = head(hidden_ND[start : start + chunk_tokens])
        gold_N1 = gold_ids_N[start : start + chunk_tokens, None]
        chunk = codec.encode(logits_NV, spec)
        # No softmax sees the maximum, but fp32 rounds by it, and a small temperature
        # would divide it to infinity.
        logits_NV = logits_NV - logits_NV.amax(-1, keepdim=True)
        chunk["entropy"] = _entropy(logits_NV / spec.temperature)
        gold_N = logits_NV.gather(-1, gold_N1).squeeze(-1)
        chunk["gold_logprob"] = gold_N - logits_NV.logsumexp(-1)
        for name, tensor in chunk.items():
            parts.setdefault(name, []).append(tensor)
    encoded = {name: torch.cat(tensors) for name, tensors in parts.items()}
    # The entropy of a row is finite unless one of its logits is NaN or +inf, or all are -inf.
    bad_N = ~encoded["entropy"].isfinite()
    if bad_N.any():
        raise TeacherFailed(
            f"the teacher's logits are not finite at {int(bad_N.sum())} of {len(bad_N)} wanted "
            f"positions, first at {name_position(int(bad_N.nonzero()[0, 0]))}; nothing was sent"
        )
    return encoded


def _entropy(scaled_NV: Tensor) -> Tensor:
    # entr(p) = -p log p is 0 at p = 0, where p * log p would be 0 * -inf = NaN.
    entropy_N: Tensor = torch.special.entr(scaled_NV.softmax(-1)).sum(-1)
    return entropy_N


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
    *,
    vocab_size: int,
    weights_fingerprint: str,
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
    if parsed.meta.get("weights_fingerprint") != weights_fingerprint:
        raise IdentityMismatch(
            f"request {request.request_id} was answered by weights "
            f"{parsed.meta.get('weights_fingerprint')}, this run is pinned to {weights_fingerprint}"
        )
    tensors = {name: tensor_from_frame(tensor) for name, tensor in parsed.tensors.items()}
    return decode_target(tensors, request, vocab_size=vocab_size)


def decode_target(
    tensors: Mapping[str, Tensor], request: ScoreRequest, *, vocab_size: int
) -> TeacherTarget:
    """Check and widen encoded tensors, from a frame or from a teacher in this process.

    Raises:
        FrameCorrupt: a tensor is missing, misshapen or holds impossible values.
    """
    num_positions = request.num_positions
    shape = (num_positions,)
    entropy_N = take(tensors, "entropy", dtype=torch.float32, shape=shape)
    gold_N = take(tensors, "gold_logprob", dtype=torch.float32, shape=shape)
    check_no_nan(entropy_N, "entropy")
    check_no_nan(gold_N, "gold_logprob")
    decoded = CODECS[request.target.codec].decode(
        tensors, request.target, vocab_size=vocab_size, num_positions=num_positions
    )
    return TeacherTarget(
        spec=request.target,
        num_positions=num_positions,
        tensors=decoded,
        entropy_N=entropy_N,
        gold_logprob_N=gold_N,
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
