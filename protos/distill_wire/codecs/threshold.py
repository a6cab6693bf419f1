"""Threshold sampling: the likely tokens exactly, the others by unbiased draws.

With N = `num_draws`, every token of probability p >= 1/N is kept; a smaller one is kept with
probability p N and then stands for 1/N. The expectation of the kept weights is p, so the
forward KL's gradient is right on average, where a top-k is wrong in one direction at every
step. The draws are systematic: one random phase a position, and a token is drawn where the
running sum of p N, plus the phase, passes an integer. That spreads the draws over the
vocabulary and leaves 4 to 6 times less variance than drawing N tokens with replacement.

The phase is the request's (see `TargetSpec.seed`): the same row gets the same draws in any
batch, on a retry and from a cache, and other ones in another epoch.

On the wire, about 33 bytes a position at V = 49152 and N = 50:

    `ids_high`, `ids_low`  the kept ids as `id_sets`
    `is_likely`     uint8, one bit an entry: 1 = kept exactly, 0 = drawn
    `codes`         uint8 per exact entry, log-probability = -code ln(N) / 255

Feeds the forward KL (cross-entropy with soft targets) at the temperature it was drawn for.
Bound: unbiased but for the rounding of the exact entries, ln(N) / 510 of each at most, and of
the others to multiples of 2**-24 / N.

Shapes: N = positions, E = entries, W = most entries of a position.
Source: Duffield, Lund, Thorup 2007 (priority sampling, JACM 54.6) on threshold sampling;
Anshumann et al. 2025 (arXiv 2503.16870) for unbiased sampling in distillation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from distill_wire.codecs.base import Codec, LossKind, take
from distill_wire.codecs.bits import num_bytes, pack_bits, unpack_bits
from distill_wire.codecs.id_sets import id_sets_bytes_bound, pack_id_sets, unpack_id_sets
from distill_wire.codecs.scores import TeacherScores
from distill_wire.errors import FrameCorrupt, RequestInvalid
from distill_wire.types import CodecId, TargetSpec

_LARGEST_CODE = 255

MAX_DRAWS = 4096


class ThresholdCodec(Codec):
    """`threshold`: every p >= 1/N, and unbiased draws of the rest."""

    id = CodecId.THRESHOLD
    name = "threshold"
    losses = frozenset({LossKind.FORWARD_KL})

    def check(self, spec: TargetSpec, *, vocab_size: int) -> None:
        """Refuse N outside 2..4096."""
        if not 2 <= spec.num_draws <= MAX_DRAWS:
            raise RequestInvalid(f"num_draws must be in [2, {MAX_DRAWS}], got {spec.num_draws}")

    def bytes_per_position(self, spec: TargetSpec, *, vocab_size: int, hidden_size: int) -> int:
        """At most N + 1 entries, because their weights add up to 1 and no weight is below 1/N."""
        most = min(spec.num_draws + 1, vocab_size)
        return id_sets_bytes_bound(most, vocab_size=vocab_size) + num_bytes(9 * most)

    def encode(self, scores: TeacherScores, spec: TargetSpec) -> dict[str, Tensor]:
        """Select; the phase decides, so nothing here is random."""
        entries = scores.sample(spec.num_draws)
        is_likely_E = entries.logprobs_E >= -math.log(spec.num_draws)
        step = math.log(spec.num_draws) / _LARGEST_CODE
        codes_E = (-entries.logprobs_E / step).round().clamp(0, _LARGEST_CODE).to(torch.uint8)
        return {
            "token_ids": entries.token_ids_E,
            "counts": entries.counts_N,
            "is_likely": is_likely_E,
            "codes": codes_E[is_likely_E],
        }

    def pack(self, tensors: dict[str, Tensor], *, vocab_size: int) -> dict[str, Tensor]:
        """Pack ids and flags."""
        ids = pack_id_sets(tensors["token_ids"], tensors["counts"], vocab_size=vocab_size)
        return ids | {"is_likely": pack_bits(tensors["is_likely"]), "codes": tensors["codes"]}

    def decode(
        self,
        tensors: Mapping[str, Tensor],
        spec: TargetSpec,
        *,
        vocab_size: int,
        hidden_size: int,
        num_positions: int,
    ) -> dict[str, Tensor]:
        """Give `token_ids` int64 [N, W], `weights` float32 [N, W] (0 = padding), `best_ids`."""
        token_ids_E, counts_N = unpack_id_sets(
            tensors,
            vocab_size=vocab_size,
            num_positions=num_positions,
            max_count=spec.num_draws + 1,
        )
        num_entries = len(token_ids_E)
        shape = (num_bytes(num_entries),)
        is_likely_E = unpack_bits(take(tensors, "is_likely", dtype=torch.uint8, shape=shape))
        is_likely_E = is_likely_E[:num_entries]
        shape = (int(is_likely_E.sum()),)
        codes_E = take(tensors, "codes", dtype=torch.uint8, shape=shape)
        device = token_ids_E.device
        weights_E = torch.full((num_entries,), 1 / spec.num_draws, device=device)
        step = math.log(spec.num_draws) / _LARGEST_CODE
        weights_E[is_likely_E] = (codes_E.float() * -step).exp()

        # A rectangle, so that a chunk of positions is a slice: W is 3 times the mean at most.
        width = int(counts_N.max()) if num_positions else 0
        first_E = torch.repeat_interleave(counts_N.cumsum(0) - counts_N, counts_N)
        column_E = torch.arange(num_entries, device=device) - first_E
        position_E = torch.repeat_interleave(counts_N)
        token_ids_NW = torch.zeros(num_positions, width, dtype=torch.int64, device=device)
        weights_NW = torch.zeros(num_positions, width, device=device)
        token_ids_NW[position_E, column_E] = token_ids_E
        weights_NW[position_E, column_E] = weights_E
        error_N = (weights_NW.sum(-1) - 1).abs()
        # A draw more or less, and the rounding of the exact ones.
        allowed = 1.01 / spec.num_draws + step
        if (error_N > allowed).any():
            raise FrameCorrupt(
                f"the weights of a position add up to 1 +- {float(error_N.max()):.3f}, "
                f"allowed {allowed:.3f}"
            )
        # A likely token's weight is 1/N at least, so a drawn one is best only where none is.
        best_N1 = weights_NW.argmax(-1, keepdim=True) if width else counts_N[:, None]
        return {
            "token_ids": token_ids_NW,
            "weights": weights_NW,
            "best_ids": token_ids_NW.gather(-1, best_N1)[:, 0] if width else counts_N,
        }
