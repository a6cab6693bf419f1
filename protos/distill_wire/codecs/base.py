"""What every codec can do: say its price, encode on the device, decode and check.

A codec is stateless. It sees the teacher's logits of a few hundred positions at a
time, after soft-cap and scale and cut to the real vocabulary, and gives tensors
whose first dimension is the position; chunks are concatenated by the caller.

Shapes: N = positions, V = real tokens, K = kept entries.
Depends on: torch. Knows nothing of frames, gRPC or models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from distill_wire.errors import FrameCorrupt
from distill_wire.types import CodecId, TargetSpec


class Codec(Protocol):
    """Three verbs and an a-priori size."""

    id: CodecId
    name: str

    def check(self, spec: TargetSpec, *, vocab_size: int) -> None:
        """Refuse options that cannot be served.

        Raises:
            RequestInvalid: an option is out of range for this vocabulary.
        """

    def bytes_per_position(self, spec: TargetSpec, *, vocab_size: int) -> int:
        """Tensor bytes one position costs, exactly; frame header and padding excluded."""

    def encode(self, logits_NV: Tensor, spec: TargetSpec) -> dict[str, Tensor]:
        """Compress fp32 logits; `spec.temperature` is applied here, once."""

    def decode(
        self,
        tensors: Mapping[str, Tensor],
        spec: TargetSpec,
        *,
        vocab_size: int,
        num_positions: int,
    ) -> dict[str, Tensor]:
        """Check untrusted tensors and widen them for the losses.

        Raises:
            FrameCorrupt: a tensor is missing, has another shape or dtype, or holds
                values that no teacher may send (ids outside the vocabulary, NaN).
        """


def take(
    tensors: Mapping[str, Tensor], name: str, *, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """Take one tensor of an answer, or say how it differs from what was agreed.

    Raises:
        FrameCorrupt: it is missing or has another dtype or shape.
    """
    tensor = tensors.get(name)
    if tensor is None:
        raise FrameCorrupt(f"the answer lacks tensor {name}; it holds {', '.join(tensors)}")
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise FrameCorrupt(
            f"tensor {name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}"
        )
    return tensor


def check_no_nan(tensor: Tensor, name: str) -> None:
    """Refuse NaN and +inf in an answer; -inf is a probability of zero.

    Raises:
        FrameCorrupt: the tensor holds NaN or +inf.
    """
    # NaN compares false, so one comparison finds both.
    bad = ~(tensor < torch.inf)
    if bad.any():
        position = int(bad.reshape(bad.shape[0], -1).any(-1).nonzero()[0, 0])
        raise FrameCorrupt(f"tensor {name} holds NaN or +inf at wanted position {position}")
