"""Top-k teacher distribution with an explicit tail.

A full row of logits costs 2V bytes per position. The k largest log-probabilities
keep most of the mass; what they miss is sent as one number, measured by the
teacher at the requested temperature, so the student can form a proper (k+1)-way
distribution instead of silently renormalising. A tail cannot be rebuilt at another
temperature afterwards, so neither end tries.

On the wire, about 2.2 k + 4 bytes a position at V = 49152 and k = 64:

    `ids_high`, `ids_low`  the k ids as `id_sets`, so in order of id
    `codes`         uint8 [N, k]: 0 the most likely id, 1..254 steps below it, 255 = -inf
    `step`          bfloat16 [N, 1], nats
    `tail`          float16 [N, 1]: log of the remaining mass less that of the most likely id

Everything is relative to the most likely id, and the K + 1 numbers are normalised when they
are read, which takes the rounding of the sum out again. Rounding is at most half a step
of range / 254; on SmolLM2 it moves the gradient by less than 1e-3 of what the missing tail does.
A divergence over K + 1 buckets is never above the one over all V (data processing).

Source: Anshumann et al. 2025 (arXiv 2503.16870) on the bias of plain top-k.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from distill_wire.codecs.base import (
    ALL_LOSSES,
    Codec,
    check_no_nan,
    check_scales,
    take,
)
from distill_wire.codecs.id_sets import id_sets_bytes_bound, pack_id_sets, unpack_id_sets
from distill_wire.codecs.quantise import round_up_to_bf16
from distill_wire.codecs.scores import TeacherScores
from distill_wire.errors import FrameCorrupt, RequestInvalid
from distill_wire.types import CodecId, TargetSpec

_LARGEST_CODE = 254
_MASKED = 255


class TopKCodec(Codec):
    """`topk`: k best log-probabilities and the log of the remaining mass."""

    id = CodecId.TOPK
    name = "topk"
    losses = ALL_LOSSES

    def check(self, spec: TargetSpec, *, vocab_size: int) -> None:
        """Refuse k outside 1..V-1."""
        if not 1 <= spec.top_k < vocab_size:
            raise RequestInvalid(
                f"top_k must be in [1, {vocab_size}), got {spec.top_k}; "
                f"codec dense sends the whole distribution"
            )

    def bytes_per_position(self, spec: TargetSpec, *, vocab_size: int, hidden_size: int) -> int:
        """K (1 + bits of an id / 8) + 4, at most."""
        return id_sets_bytes_bound(spec.top_k, vocab_size=vocab_size) + spec.top_k + 4

    def encode(self, scores: TeacherScores, spec: TargetSpec) -> dict[str, Tensor]:
        """Keep the k most likely ids, sorted by id; log-probabilities are over all V."""
        kept_NK, token_ids_NK, rest_N = scores.top(spec.top_k)
        best_N1 = kept_NK[:, :1]
        tail_N1 = rest_N[:, None] - best_N1
        below_NK = best_N1 - kept_NK
        is_masked_NK = below_NK == torch.inf
        range_N1 = below_NK.masked_fill(is_masked_NK, 0.0).amax(-1, keepdim=True)
        step_N1 = round_up_to_bf16(range_N1 / _LARGEST_CODE)
        divisor_N1 = step_N1.float().masked_fill(step_N1 == 0, 1.0)
        # Only the first has code 0, so that the reader knows the most likely id in a near tie.
        codes_NK = (below_NK / divisor_N1).round().clamp(1, _LARGEST_CODE)
        codes_NK = codes_NK.masked_fill(is_masked_NK, _MASKED)
        codes_NK[:, 0] = 0
        token_ids_NK, order_NK = token_ids_NK.sort(-1)
        return {
            "token_ids": token_ids_NK,
            "codes": codes_NK.gather(-1, order_NK).to(torch.uint8),
            "step": step_N1,
            "tail": tail_N1.half(),
        }

    def pack(self, tensors: dict[str, Tensor], *, vocab_size: int) -> dict[str, Tensor]:
        """Pack the ids."""
        token_ids_NK = tensors.pop("token_ids")
        counts_N = torch.full(
            token_ids_NK.shape[:1], token_ids_NK.shape[1], device=token_ids_NK.device
        )
        return pack_id_sets(token_ids_NK.flatten(), counts_N, vocab_size=vocab_size) | tensors

    def decode(
        self,
        tensors: Mapping[str, Tensor],
        spec: TargetSpec,
        *,
        vocab_size: int,
        hidden_size: int,
        num_positions: int,
    ) -> dict[str, Tensor]:
        """Give `token_ids` int64 [N, K], `logprobs` and `tail_logprob` float32, `best_ids` [N]."""
        token_ids_E, counts_N = unpack_id_sets(
            tensors, vocab_size=vocab_size, num_positions=num_positions, max_count=spec.top_k
        )
        if (counts_N != spec.top_k).any():
            raise FrameCorrupt(f"a position holds {int(counts_N.min())} ids, expected {spec.top_k}")
        shape = (num_positions, spec.top_k)
        codes_NK = take(tensors, "codes", dtype=torch.uint8, shape=shape)
        step_N1 = take(tensors, "step", dtype=torch.bfloat16, shape=(num_positions, 1))
        tail_N1 = take(tensors, "tail", dtype=torch.float16, shape=(num_positions, 1))
        check_scales(step_N1, "step")
        check_no_nan(tail_N1, "tail")
        if ((codes_NK == 0).sum(-1) != 1).any():
            raise FrameCorrupt("a position does not have exactly one most likely id")
        kept_NK = -(codes_NK.float() * step_N1.float()).masked_fill(codes_NK == _MASKED, torch.inf)
        logprobs_NB = torch.cat([kept_NK, tail_N1.float()], -1).log_softmax(-1)
        token_ids_NK = token_ids_E.view(shape)
        return {
            "token_ids": token_ids_NK,
            "logprobs": logprobs_NB[:, :-1],
            "tail_logprob": logprobs_NB[:, -1],
            "best_ids": token_ids_NK.gather(-1, codes_NK.long().argmin(-1, keepdim=True))[:, 0],
        }
