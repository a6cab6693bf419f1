"""Top-k teacher distribution with an explicit tail.

A full row of logits costs 2V bytes per position. The k largest log-probabilities
keep most of the mass; what they miss is sent as one number, measured by the
teacher at the requested temperature, so the student can form a proper (k+1)-way
distribution instead of silently renormalising. A tail cannot be rebuilt at another
temperature afterwards, so neither end tries.

On the wire, 8k + 4 bytes a position: `token_ids` int32 [N, K] by falling
probability, `logprobs` float32 [N, K], `tail_logprob` float32 [N]. The values are
sent as computed, so the loss is bit-equal to that of a teacher in the same process
and does not move when a batch is cut differently; fewer bits would round two nearly
equal answers apart. -inf (a masked id) survives.

Source: Anshumann et al. 2025 (arXiv 2503.16870) on the bias of plain top-k.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from distill_wire.codecs.base import check_no_nan, take
from distill_wire.errors import FrameCorrupt, RequestInvalid
from distill_wire.types import CodecId, TargetSpec

LARGEST_SUM_ERROR = 1e-3
"""How far log(top-k + tail) may be from 0; fp32 sums over 262k ids stay under 1e-4."""


class TopKCodec:
    """`topk`: k best log-probabilities and the log of the remaining mass."""

    id = CodecId.TOPK
    name = "topk"

    def check(self, spec: TargetSpec, *, vocab_size: int) -> None:
        """Refuse k outside 1..V-1."""
        if not 1 <= spec.top_k < vocab_size:
            raise RequestInvalid(
                f"top_k must be in [1, {vocab_size}), got {spec.top_k}; "
                f"codec dense sends the whole distribution"
            )

    def bytes_per_position(self, spec: TargetSpec, *, vocab_size: int) -> int:
        """8k + 4."""
        return 8 * spec.top_k + 4

    def encode(self, logits_NV: Tensor, spec: TargetSpec) -> dict[str, Tensor]:
        """Keep the k most likely ids; log-probabilities are over the whole vocabulary."""
        # Less the maximum first: the normaliser's rounding grows with its size, 0.002 at
        # 30,000, which logits of 300 reach at temperature 0.01.
        scaled_NV = (logits_NV - logits_NV.amax(-1, keepdim=True)).div_(spec.temperature)
        normaliser_N1 = scaled_NV.logsumexp(-1, keepdim=True)
        kept_NK, token_ids_NK = scaled_NV.topk(spec.top_k, dim=-1)
        # The tail is summed, not taken as 1 - kept: that difference cancels to noise
        # once the kept mass passes 1 - 1e-7, the spacing of float32 at 1.
        rest_NV = scaled_NV.scatter(-1, token_ids_NK, -torch.inf)
        tail_N = rest_NV.logsumexp(-1) - normaliser_N1.squeeze(-1)
        return {
            "token_ids": token_ids_NK.int(),
            "logprobs": (kept_NK - normaliser_N1).float(),
            "tail_logprob": tail_N.float(),
        }

    def decode(
        self,
        tensors: Mapping[str, Tensor],
        spec: TargetSpec,
        *,
        vocab_size: int,
        num_positions: int,
    ) -> dict[str, Tensor]:
        """Give `token_ids` int64 [N, K], `logprobs` float32 [N, K], `tail_logprob` float32 [N]."""
        shape = (num_positions, spec.top_k)
        token_ids_NK = take(tensors, "token_ids", dtype=torch.int32, shape=shape)
        logprobs_NK = take(tensors, "logprobs", dtype=torch.float32, shape=shape)
        tail_N = take(tensors, "tail_logprob", dtype=torch.float32, shape=shape[:1])
        outside = (token_ids_NK < 0) | (token_ids_NK >= vocab_size)
        if outside.any():
            raise FrameCorrupt(
                f"the answer names token {int(token_ids_NK[outside][0])}, "
                f"the vocabulary has ids 0..{vocab_size - 1}"
            )
        check_no_nan(logprobs_NK, "logprobs")
        check_no_nan(tail_N, "tail_logprob")
        total_N = torch.cat([logprobs_NK, tail_N[:, None]], -1).logsumexp(-1)
        if num_positions and (total_N.abs() > LARGEST_SUM_ERROR).any():
            raise FrameCorrupt(
                f"top-k and tail of a position add up to exp({total_N.abs().max():.3f}), expected 1"
            )
        return {
            "token_ids": token_ids_NK.long(),
            "logprobs": logprobs_NK,
            "tail_logprob": tail_N,
        }
