"""The teacher's output head, fetched once a run: with it a hidden state is a distribution.

One frame: `weight` [V, D] in the teacher's dtype, `bias` [V] if there is one; `meta` has the
weights fingerprint. Soft-cap and scale come with `Describe`. Padding rows are not sent.

Shapes: n = positions, D = hidden size, V = real tokens.
Depends on: torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from distill_wire.causal_lm import CausalLMParts, transform_logits
from distill_wire.errors import FrameCorrupt, IdentityMismatch
from distill_wire.frame import Frame, frame_bytes_bound, read_frame, write_frame
from distill_wire.targets import tensor_from_frame, tensor_to_frame
from distill_wire.types import LogitTransform, TeacherDescription


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherHead:
    """What turns the teacher's last hidden states into its logits.

    Attributes:
        weight_VD: real tokens only, in the teacher's dtype.
        bias_V: None if the head has none.
        transform: soft-cap and scale.
    """

    weight_VD: Tensor
    bias_V: Tensor | None
    transform: LogitTransform

    def to(self, device: torch.device) -> TeacherHead:
        """Copy to a device."""
        return TeacherHead(
            weight_VD=self.weight_VD.to(device),
            bias_V=None if self.bias_V is None else self.bias_V.to(device),
            transform=self.transform,
        )

    def clone(self) -> TeacherHead:
        """Copy, so that nothing else can change or shard the weights."""
        return TeacherHead(
            weight_VD=self.weight_VD.clone(),
            bias_V=None if self.bias_V is None else self.bias_V.clone(),
            transform=self.transform,
        )

    @torch.no_grad()
    def logits(self, hidden_nD: Tensor) -> Tensor:
        """Give fp32 logits [n, V]; the product is in the head's dtype, as the teacher's is."""
        raw_nV = F.linear(hidden_nD.to(self.weight_VD.dtype), self.weight_VD, self.bias_V)
        return transform_logits(raw_nV, self.transform, vocab_size=len(self.weight_VD))


def head_of(parts: CausalLMParts, *, vocab_size: int) -> TeacherHead:
    """Take the head of a loaded teacher, whole and not sharded; views, nothing is copied."""
    bias: Tensor | None = getattr(parts.head, "bias", None)
    weight: Tensor = parts.head.weight  # type: ignore[assignment]
    return TeacherHead(
        weight_VD=weight.detach()[:vocab_size],
        bias_V=None if bias is None else bias.detach()[:vocab_size],
        transform=parts.transform,
    )


def write_head(head: TeacherHead, *, weights_fingerprint: str) -> memoryview:
    """Frame a head."""
    tensors = {"weight": tensor_to_frame(head.weight_VD)}
    if head.bias_V is not None:
        tensors["bias"] = tensor_to_frame(head.bias_V)
    return write_frame(Frame(meta={"weights_fingerprint": weights_fingerprint}, tensors=tensors))


def head_bytes_bound(description: TeacherDescription) -> int:
    """Bound the bytes of the frame: fp32 at most."""
    rows, width = description.vocab_size, description.hidden_size
    return frame_bytes_bound(4 * rows * (width + 1), num_tensors=2)


def read_head(
    frame: bytes | bytearray | memoryview, description: TeacherDescription
) -> TeacherHead:
    """Check a frame against what the teacher said of itself.

    Raises:
        FrameCorrupt: the bytes are damaged, or the head has another shape or dtype.
        IdentityMismatch: it belongs to other weights.
    """
    parsed = read_frame(frame)
    fingerprint = parsed.meta.get("weights_fingerprint")
    if fingerprint != description.weights_fingerprint:
        raise IdentityMismatch(
            f"the head that came belongs to weights {fingerprint}, this run is pinned to "
            f"{description.weights_fingerprint}"
        )
    if "weight" not in parsed.tensors or set(parsed.tensors) - {"weight", "bias"}:
        raise FrameCorrupt(f"a head holds weight and bias, this one {', '.join(parsed.tensors)}")
    tensors = {name: tensor_from_frame(tensor) for name, tensor in parsed.tensors.items()}
    rows, width = description.vocab_size, description.hidden_size
    shapes = {"weight": (rows, width), "bias": (rows,)}
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name] or not tensor.is_floating_point():
            raise FrameCorrupt(
                f"the head's {name} is {tensor.dtype} {tuple(tensor.shape)}, expected floating "
                f"point {shapes[name]}"
            )
    return TeacherHead(
        weight_VD=tensors["weight"],
        bias_V=tensors.get("bias"),
        transform=description.logit_transform,
    )
