"""What every codec can do: say its price and its use, encode on the device, decode and check.

A codec is stateless. It asks the teacher's scores of a few hundred positions at a time, and gives
tensors that the caller concatenates over the chunks; `pack` then turns them into what travels.

Shapes: N = positions, V = real tokens, D = width.
Depends on: torch. Knows nothing of frames, gRPC or models.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from distill_wire.codecs.scores import TeacherScores
from distill_wire.errors import FrameCorrupt
from distill_wire.types import CodecId, TargetSpec


class LossKind(enum.Enum):
    """The distillation losses a codec may feed, by the names users know."""

    FORWARD_KL = "forward KL"
    REVERSE_KL = "reverse KL"
    JSD = "JSD"


ALL_LOSSES = frozenset(LossKind)


class Codec(Protocol):
    """A way to say a distribution in few bytes."""

    id: CodecId
    name: str
    losses: frozenset[LossKind]
    """What it may feed; everything else is refused by name."""

    def check(self, spec: TargetSpec, *, vocab_size: int) -> None:
        """Refuse options that cannot be served; a codec without options allows everything.

        Raises:
            RequestInvalid: an option is out of range for this vocabulary.
        """
        return None

    def bytes_per_position(self, spec: TargetSpec, *, vocab_size: int, hidden_size: int) -> int:
        """Tensor bytes one position costs at most; frame header and padding excluded."""

    def encode(self, scores: TeacherScores, spec: TargetSpec) -> dict[str, Tensor]:
        """Compress a chunk of positions; the tensors of chunks are concatenated."""

    def pack(self, tensors: dict[str, Tensor], *, vocab_size: int) -> dict[str, Tensor]:
        """Turn the concatenated tensors into those that travel; most are it already."""
        return tensors

    def decode(
        self,
        tensors: Mapping[str, Tensor],
        spec: TargetSpec,
        *,
        vocab_size: int,
        hidden_size: int,
        num_positions: int,
    ) -> dict[str, Tensor]:
        """Check untrusted tensors and widen them for the losses; the first dimension is N.

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


def check_scales(scale: Tensor, name: str) -> None:
    """Refuse scales that no quantiser makes: NaN, infinite or negative.

    Raises:
        FrameCorrupt: the tensor holds one.
    """
    if not ((scale >= 0) & (scale < torch.inf)).all():
        raise FrameCorrupt(f"tensor {name} holds a scale that is not finite and >= 0")
