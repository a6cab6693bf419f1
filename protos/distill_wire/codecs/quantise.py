"""Integers for rotated hidden states: int8 with a scale a row, int4 with one a group.

Scales are bfloat16, which has the range of float32: fp16 would overflow on real residual
streams. A scale is rounded up before it divides, so that its rounding adds no error
and no code saturates. Round to nearest, not a quantiser of least squared error: that one
shrinks vectors, which flattens the logits.

Shapes: N = positions, D = width, G = groups of GROUP coordinates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
"""Coordinates that share an int4 scale: 4 + 16 / 32 = 4.5 bits each."""

_INT8_MAX = 127
_INT4_MAX = 7


def int8_from(states_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Give codes int8 [N, D] and scales bfloat16 [N, 1]."""
    return _codes(states_ND, _INT8_MAX)


def from_int8(codes_ND: Tensor, scale_N1: Tensor) -> Tensor:
    """Give the states, fp32 [N, D]."""
    return codes_ND.float() * scale_N1.float()


def int4_from(states_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Give codes uint8 [N, G * 16], the even coordinate in the low bits, and scales [N, G].

    A width that is no multiple of GROUP is filled up with zeros.
    """
    padded_ND = F.pad(states_ND, (0, -states_ND.shape[-1] % GROUP))
    shape_G32 = (num_groups(states_ND.shape[-1]), GROUP)
    codes_NG32, scale_NG1 = _codes(padded_ND.unflatten(-1, shape_G32), _INT4_MAX)
    unsigned_ND = (codes_NG32.flatten(-2) + 8).to(torch.uint8)
    return unsigned_ND[..., 0::2] | (unsigned_ND[..., 1::2] << 4), scale_NG1.squeeze(-1)


def from_int4(packed_NE: Tensor, scale_NG: Tensor, *, width: int) -> Tensor:
    """Give the states, fp32 [N, D]."""
    nibbles_NE2 = torch.stack([packed_NE & 15, packed_NE >> 4], -1)
    codes_ND = nibbles_NE2.flatten(-2).float() - 8
    scale_ND = scale_NG.float().repeat_interleave(GROUP, -1)
    return (codes_ND * scale_ND)[..., :width]


def num_groups(width: int) -> int:
    """Groups of a row, G; the last one may be part zeros."""
    return -(-width // GROUP)


def int4_bytes(width: int) -> int:
    """Bytes of one row: codes and scales."""
    return num_groups(width) * (GROUP // 2 + 2)


def _codes(states: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    scale = round_up_to_bf16(states.abs().amax(-1, keepdim=True) / largest)
    # A row of zeros has scale 0; any divisor gives its codes.
    divisor = scale.float().masked_fill(scale == 0, 1.0)
    codes = (states / divisor).round().clamp(-largest, largest)
    return codes.to(torch.int8), scale


def round_up_to_bf16(values: Tensor) -> Tensor:
    """Round non-negative fp32 values to bfloat16, never down."""
    rounded = values.bfloat16()
    # Half a unit in the last place of bfloat16 is 2**-8 of the value at most.
    return torch.where(rounded.float() < values, (values * (1 + 2.0**-7)).bfloat16(), rounded)
