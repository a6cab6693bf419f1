"""Rows of token ids become a padded micro-batch for the student and a teacher's request.

Both are made here, from the same ids, so that they cannot drift apart.

A position t is supervised when the label at t + 1 counts. Nothing is inferred from pad
ids: with pad = eos that would drop the answer's own end. Padding is on the right and
ignored by the attention mask, and neither the loss nor the teacher ever sees it.

Shapes: B = rows, T = padded length, N = supervised positions.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from distill_wire.types import IGNORE_INDEX, Int32Array, ScoreRequest, TargetSpec

ROWS = "rows"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnpaddedRows:
    """The micro-batch as the teacher will see it; kept on the host.

    Attributes:
        token_ids_T: int32, rows back to back.
        row_lengths_R: int32.
        position_mask_T: True where the distribution of the next token is wanted.
        sample_ids: names of the rows, for messages.
    """

    token_ids_T: Int32Array
    row_lengths_R: Int32Array
    position_mask_T: np.ndarray[Any, np.dtype[np.bool_]]
    sample_ids: tuple[str, ...]


class DistillationCollator:
    """Collates rows with `input_ids`, `labels` and optionally `sample_id`."""

    def __init__(self, *, pad_token_id: int, pad_to_multiple_of: int = 1) -> None:
        self._pad_token_id = pad_token_id
        self._pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Collate.

        Returns:
            `input_ids`, `attention_mask` int64 [B, T]; `positions` int64 [N] into the
            flattened [B * T]; `gold_ids` int64 [N]; `position_rows` int64 [N]; `rows`,
            an `UnpaddedRows`.

        Raises:
            ValueError: a row is empty, or has labels of another length, naming the sample.
        """
        rows = [_row(index, feature) for index, feature in enumerate(features)]
        lengths_R = np.array([len(ids) for ids, _, _ in rows], np.int32)
        multiple = self._pad_to_multiple_of
        width = -(-int(lengths_R.max()) // multiple) * multiple
        input_ids = np.full((len(rows), width), self._pad_token_id, np.int64)
        attention_mask = np.zeros((len(rows), width), np.int64)
        masks: list[np.ndarray[Any, np.dtype[np.bool_]]] = []
        positions: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        for index, (ids, labels, _) in enumerate(rows):
            input_ids[index, : len(ids)] = ids
            attention_mask[index, : len(ids)] = 1
            # Row i is about token i + 1, so the last position supervises nothing.
            mask = np.append(labels[1:] != IGNORE_INDEX, False)
            masks.append(mask)
            positions.append(np.flatnonzero(mask) + index * width)
        positions_N = np.concatenate(positions)
        return {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(attention_mask),
            "positions": torch.from_numpy(positions_N),
            "gold_ids": torch.from_numpy(input_ids.reshape(-1)[positions_N + 1]),
            "position_rows": torch.from_numpy(positions_N // width),
            ROWS: UnpaddedRows(
                token_ids_T=np.concatenate([ids for ids, _, _ in rows]).astype(np.int32),
                row_lengths_R=lengths_R,
                position_mask_T=np.concatenate(masks),
                sample_ids=tuple(sample for _, _, sample in rows),
            ),
        }


def request_of(batch: dict[str, Any], target: TargetSpec) -> tuple[ScoreRequest, tuple[str, ...]]:
    """Make the teacher's request for a collated micro-batch, and give its samples' names."""
    rows: UnpaddedRows = batch[ROWS]
    request = ScoreRequest(
        request_id=uuid.uuid4().hex,
        token_ids_T=rows.token_ids_T,
        row_lengths_R=rows.row_lengths_R,
        position_mask_T=rows.position_mask_T,
        target=target,
    )
    return request, rows.sample_ids


def _row(
    index: int, feature: dict[str, Any]
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]], str]:
    sample = str(feature.get("sample_id", f"row {index} of its micro-batch"))
    ids = np.asarray(feature["input_ids"], np.int64)
    labels = np.asarray(feature["labels"], np.int64)
    if ids.size == 0:
        raise ValueError(f"sample {sample} holds no tokens; drop it from the data set")
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise ValueError(
            f"sample {sample} holds token ids {ids.min()}..{ids.max()}; ids are >= 0 and fit int32"
        )
    if ids.shape != labels.shape:
        raise ValueError(
            f"sample {sample} has {ids.size} input_ids but {labels.size} labels; they must match"
        )
    return ids, labels, sample
