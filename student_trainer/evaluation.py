"""Held-out figures: cross-entropy, KL to the teacher, agreement on the best token.

Each is a mean over supervised tokens of the whole held-out set. Ranks hand in sums per
row, so that rows repeated to make the ranks even can be dropped, and short rows do not
weigh as much as long ones.

Shapes: N = supervised positions, B = rows, S = samples of the whole set.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

EVALUATED = ("positions", "ce_N", "kd_N", "is_top1_N")


def per_row_sums(outputs: dict[str, Tensor], position_rows_N: Tensor, *, num_rows: int) -> Tensor:
    """Sum the values of each row's positions.

    Returns:
        [B, 4] float64: positions, cross-entropy, KL, positions where the best tokens agree;
        the last two 0 without a teacher.
    """
    sums = torch.zeros(num_rows, len(EVALUATED), dtype=torch.float64, device=position_rows_N.device)
    for column, name in enumerate(EVALUATED):
        values_N = outputs.get(name, torch.zeros_like(outputs["ce_N"]))
        if name == "positions":
            values_N = torch.ones_like(outputs["ce_N"])
        sums[:, column].index_add_(0, position_rows_N, values_N.double())
    return sums


def summarise(sums_S4: npt.NDArray[Any], *, has_teacher: bool) -> dict[str, float]:
    """Turn sums per sample into means per supervised token."""
    positions, ce, kl, agreed = sums_S4.sum(axis=0).tolist()
    divisor = max(positions, 1.0)
    figures = {"ce": ce / divisor, "supervised_tokens": positions}
    if has_teacher:
        figures |= {"kl": kl / divisor, "top1_agreement": agreed / divisor}
    return figures
