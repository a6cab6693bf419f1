"""Unsigned integers of any width as a string of bits, and back.

Bit i of the string is bit i mod 8 of byte i // 8; a number's lowest bit comes first.
Both directions are whole-tensor operations on any device: nothing loops over numbers.

Shapes: E = numbers, S = bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def num_bytes(num_bits: int) -> int:
    """Bytes that hold a number of bits."""
    return -(-num_bits // 8)


def pack_bits(bits: Tensor) -> Tensor:
    """Pack bools or 0/1 integers into uint8 [S], zeros at the end."""
    padded = torch.zeros(num_bytes(len(bits)) * 8, dtype=torch.uint8, device=bits.device)
    padded[: len(bits)] = bits.to(torch.uint8)
    weights_8 = 1 << torch.arange(8, device=bits.device)
    return (padded.view(-1, 8) * weights_8).sum(-1).to(torch.uint8)


def unpack_bits(packed_S: Tensor) -> Tensor:
    """Give bool [8 S]."""
    shifts_8 = torch.arange(8, dtype=torch.uint8, device=packed_S.device)
    return ((packed_S.unsqueeze(-1) >> shifts_8) & 1).flatten().bool()


def pack_numbers(numbers_E: Tensor, widths_E: Tensor) -> Tensor:
    """Write int64 numbers with as many bits as `widths_E` says, each < 2**width."""
    ends_E = widths_E.cumsum(0)
    total, widest = (int(ends_E[-1]), int(widths_E.max())) if len(ends_E) else (0, 0)
    # What a number does not have goes to one place behind the string: to leave it out by a mask
    # would make a GPU wait at every plane.
    bits = torch.zeros(total + 1, dtype=torch.uint8, device=numbers_E.device)
    starts_E = ends_E - widths_E
    for plane in range(widest):
        place_E = torch.where(widths_E > plane, starts_E + plane, total)
        bits[place_E] = ((numbers_E >> plane) & 1).to(torch.uint8)
    return pack_bits(bits[:total])


def unpack_numbers(packed_S: Tensor, widths_E: Tensor) -> Tensor:
    """Read int64 numbers of the given widths, at most 24; the caller checks the bytes suffice."""
    starts_E = widths_E.cumsum(0) - widths_E
    padded_S = torch.cat([packed_S, packed_S.new_zeros(4)]).int()
    first_E = starts_E >> 3
    # Four bytes hold any number, wherever in its first byte it starts.
    window_E = torch.zeros_like(starts_E)
    for byte in range(4):
        window_E |= padded_S[first_E + byte].long() << (8 * byte)
    return (window_E >> (starts_E & 7)) & ((1 << widths_E) - 1)
