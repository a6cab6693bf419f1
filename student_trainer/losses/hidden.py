"""How far a student's hidden states are from the teacher's, whatever their size.

Both sides are divided by their own root mean square first. A few coordinates of a residual
stream hold most of its energy, 43 to 96 % in a measured model, and norms grow with depth, so a
raw squared error would teach the norm. After it, the squared error is twice the cosine distance.

A vector of zeros has no direction: it counts as 0 after the division and gets no gradient.

Shapes: N = positions, D = width.
Source: Jiao et al. 2020 (TinyBERT, arXiv 1909.10351) for hidden-state losses; Muralidharan
et al. 2024 (Minitron, arXiv 2407.14679) for the cosine one.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Far below any state of a model, far above what squares to 0 in float32.
_SMALLEST_RMS = 1e-12


def hidden_mse(teacher_ND: Tensor, student_ND: Tensor) -> Tensor:
    """Mean squared difference of RMS-normalised states.

    Args:
        teacher_ND: any float dtype, no gradient.
        student_ND: any float dtype.

    Returns:
        [N] float32 (float64 for float64), in [0, 4].
    """
    return (_normalised(teacher_ND) - _normalised(student_ND)).square().mean(-1)


def hidden_cosine(teacher_ND: Tensor, student_ND: Tensor) -> Tensor:
    """1 - cosine; in [0, 2]. Shapes as `hidden_mse`."""
    return 1.0 - (_normalised(teacher_ND) * _normalised(student_ND)).mean(-1)


def _normalised(states_ND: Tensor) -> Tensor:
    if states_ND.dtype != torch.float64:
        states_ND = states_ND.float()
    # By the largest first: 1e30 squared is infinite in float32. It is a constant of the
    # normalisation, so no gradient passes through it.
    largest_N1 = states_ND.detach().abs().amax(-1, keepdim=True)
    # Over infinity a zero vector stays 0 and gets gradient 0. Over _SMALLEST_RMS it would get
    # 1e16 (measured at D = 576), and clipping by the norm would then undo the whole step.
    largest_N1 = largest_N1.masked_fill(largest_N1 < _SMALLEST_RMS, torch.inf)
    scaled_ND = states_ND / largest_N1
    mean_square_N1 = scaled_ND.square().mean(-1, keepdim=True)
    return scaled_ND * (mean_square_N1 + _SMALLEST_RMS).rsqrt()
