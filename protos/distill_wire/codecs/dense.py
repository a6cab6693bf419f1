"""All logits, in 16 bits: the reference the other codecs are measured against.

2V bytes a position, good for every loss and temperature; for tests, evaluation and
small vocabularies. On the wire `logits` float16 [N, V], before the temperature, less each
row's maximum. A softmax does not see the constant, and without it a value x, rounded by at
most |x| / 2048, is exact where it matters: the likely tokens lie near 0. Nothing can
overflow but the unlikely, at less than -65504, which become -inf. bfloat16 rounds by
|x| / 256 and would tell two nearly equal answers 1e-5 apart in the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from distill_wire.codecs.base import ALL_LOSSES, Codec, check_no_nan, take
from distill_wire.codecs.scores import TeacherScores
from distill_wire.types import CodecId, TargetSpec


class DenseCodec(Codec):
    """`dense`: every logit."""

    id = CodecId.DENSE
    name = "dense"
    losses = ALL_LOSSES

    def bytes_per_position(self, spec: TargetSpec, *, vocab_size: int, hidden_size: int) -> int:
        """2V."""
        return 2 * vocab_size

    def encode(self, scores: TeacherScores, spec: TargetSpec) -> dict[str, Tensor]:
        """Round to float16; the temperature is left to the loss, which knows the logits."""
        return {"logits": scores.centred_NV.half()}

    def decode(
        self,
        tensors: Mapping[str, Tensor],
        spec: TargetSpec,
        *,
        vocab_size: int,
        hidden_size: int,
        num_positions: int,
    ) -> dict[str, Tensor]:
        """Give `logits` as they came, float16 [N, V]; the loss widens one chunk at a time."""
        shape = (num_positions, vocab_size)
        logits_NV = take(tensors, "logits", dtype=torch.float16, shape=shape)
        check_no_nan(logits_NV, "logits")
        return {"logits": logits_NV}
