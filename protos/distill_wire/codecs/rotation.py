"""A fixed random rotation that spreads the few large coordinates of hidden states.

One coordinate of a residual stream can hold most of its energy, and an integer code
scaled by it leaves nothing for the rest. After random signs, a Hadamard transform
within blocks and a cosine transform across them, every coordinate has about the same size;
on SmolLM2 that cuts the KL of an int8 state to a tenth. The transform is orthogonal, so
undoing it costs nothing in precision.

The block is the largest power of two that divides the width, at most 256; across blocks
coordinate j of all of them is transformed by the orthonormal DCT-II. Sign i is -1
where bit i of the SHA-256 stream is set: byte j of the stream is byte j mod 32 of
SHA-256("KDW1 rotation" + uint32 little-endian (j // 32)), and bit i is bit i mod 8 of
byte i // 8. Shapes: N = positions, D = width.

Source: Ashkboos et al. 2024 (QuaRot, arXiv 2404.00456) on rotating away outliers.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_LARGEST_BLOCK = 256


def rotate(states_ND: Tensor) -> Tensor:
    """Give the rotated states, fp32 [N, D]."""
    signs_D, hadamard_BB, cosine_MM = _rotation(states_ND.shape[-1], states_ND.device)
    shape_NMB = (len(states_ND), len(cosine_MM), len(hadamard_BB))
    signed_NMB = (states_ND.float() * signs_D).reshape(shape_NMB)
    return (cosine_MM @ (signed_NMB @ hadamard_BB)).reshape(states_ND.shape)


def unrotate(rotated_ND: Tensor) -> Tensor:
    """Undo `rotate`, fp32 [N, D]."""
    signs_D, hadamard_BB, cosine_MM = _rotation(rotated_ND.shape[-1], rotated_ND.device)
    shape_NMB = (len(rotated_ND), len(cosine_MM), len(hadamard_BB))
    # A normalised Sylvester matrix is symmetric, so it is its own inverse.
    signed_NMB = (cosine_MM.T @ rotated_ND.float().reshape(shape_NMB)) @ hadamard_BB
    return signed_NMB.reshape(rotated_ND.shape) * signs_D


@lru_cache(maxsize=16)
def _rotation(width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    # Outside inference mode, whose tensors could not be used in a student's forward.
    with torch.inference_mode(False):
        block = min(width & -width, _LARGEST_BLOCK)
        hadamard_BB = torch.ones(1, 1)
        while len(hadamard_BB) < block:
            hadamard_BB = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), hadamard_BB)
        signs_D = torch.from_numpy(1.0 - 2.0 * _sign_bits(width)).float()
        matrices = (signs_D, hadamard_BB / block**0.5, _cosines(width // block))
        signs_D, hadamard_BB, cosine_MM = (matrix.to(device) for matrix in matrices)
        return signs_D, hadamard_BB, cosine_MM


def _cosines(size: int) -> Tensor:
    """Give the orthonormal DCT-II matrix: row k, column i is cos(pi (2 i + 1) k / (2 M))."""
    index_M = torch.arange(size, dtype=torch.float64)
    angles_MM = math.pi * (2 * index_M[None] + 1) * index_M[:, None] / (2 * size)
    scale_M1 = torch.full((size, 1), (2 / size) ** 0.5, dtype=torch.float64)
    scale_M1[0] = (1 / size) ** 0.5
    return (angles_MM.cos() * scale_M1).float()


def _sign_bits(width: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    blocks = range(-(-width // 256))
    stream = b"".join(
        hashlib.sha256(b"KDW1 rotation" + block.to_bytes(4, "little")).digest() for block in blocks
    )
    bits = np.unpackbits(np.frombuffer(stream, np.uint8), count=width, bitorder="little")
    return bits.astype(np.float64)
