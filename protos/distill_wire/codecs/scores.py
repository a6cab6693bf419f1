"""What the teacher thinks of some positions, asked in the ways that codecs need.

Two implementations: this one is plain torch, for any device, and the reference; `scores_triton`
overrides what costs most with kernels that read the logits once or twice, where plain torch reads
and writes them a dozen times.

Shapes: N = positions, V = real tokens, D = width, K = kept entries, E = entries of all positions.
Depends on: torch.
"""

from __future__ import annotations

import logging
import math
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

_BLOCK = 64
ONE_BITS = 24
_ONE = 1 << ONE_BITS
"""A draw in units of the running sum: what the 24 bits of a float32 below 1 can say."""


class Entries(NamedTuple):
    """Tokens of all positions, in order of position and id."""

    counts_N: Tensor
    token_ids_E: Tensor
    logprobs_E: Tensor


class TeacherScores:
    """The teacher's hidden states and logits of a chunk of positions, on its device.

    Attributes:
        hidden_ND: last hidden states after the final norm, in the teacher's dtype.
        logits_NV: fp32, after soft-cap and scale, real tokens only.
        temperature: divisor of the logits in everything but `gold_logprobs`.
        phases_N: float64 in [0, 1), the random number of each position.
    """

    def __init__(
        self, hidden_ND: Tensor, logits_NV: Tensor, *, temperature: float, phases_N: Tensor
    ) -> None:
        self.hidden_ND = hidden_ND
        self.logits_NV = logits_NV
        self.temperature = temperature
        self.phases_N = phases_N

    @cached_property
    def centred_NV(self) -> Tensor:
        """Logits less each row's maximum, before the temperature.

        No softmax sees the maximum, but fp32 rounds by it, 0.002 at 30,000.
        """
        return self.logits_NV - self.logits_NV.amax(-1, keepdim=True)

    @cached_property
    def logprobs_NV(self) -> Tensor:
        """Log-probabilities, fp32."""
        # One pass over the vocabulary less, and the bits of T = 1 stay those of the logits.
        scaled_NV = (
            self.centred_NV if self.temperature == 1.0 else self.centred_NV / self.temperature
        )
        return scaled_NV.log_softmax(-1)

    def entropy(self) -> Tensor:
        """Entropy in nats, fp32 [N]; not finite where a logit is NaN or +inf, or all are -inf."""
        # entr(p) = -p log p is 0 at p = 0, where p * log p would be 0 * -inf = NaN.
        entropy_N: Tensor = torch.special.entr(self.logprobs_NV.exp()).sum(-1)
        return entropy_N

    def logprobs_of(self, token_ids_NK: Tensor) -> Tensor:
        """Log-probabilities of given tokens, fp32 [N, K]."""
        return self.logprobs_NV.gather(-1, token_ids_NK)

    def gold_logprobs(self, token_ids_N: Tensor) -> Tensor:
        """Log-probabilities of one token each at temperature 1, fp32 [N]."""
        is_plain = self.temperature == 1.0
        logprobs_NV = self.logprobs_NV if is_plain else self.centred_NV.log_softmax(-1)
        return logprobs_NV.gather(-1, token_ids_N[:, None])[:, 0]

    def top(self, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Give log-probabilities and ids of the k most likely tokens, and the log of the rest.

        Returns:
            fp32 [N, k] falling, int64 [N, k], fp32 [N].
        """
        kept_NK, token_ids_NK = self.logprobs_NV.topk(k, dim=-1)
        # The tail is summed, not taken as 1 - kept: that difference cancels to noise
        # once the kept mass passes 1 - 1e-7, the spacing of float32 at 1.
        rest_NV = self.logprobs_NV.scatter(-1, token_ids_NK, -torch.inf)
        return kept_NK, token_ids_NK, rest_NV.logsumexp(-1)

    def sample(self, num_draws: int) -> Entries:
        """Keep every p >= 1 / num_draws and draw the others with probability p * num_draws."""
        is_likely_NV = self.logprobs_NV >= -math.log(num_draws)
        expected_NV = (self.logprobs_NV.exp() * num_draws).masked_fill_(is_likely_NV, 0.0)
        is_kept_NV = is_likely_NV | systematic_draws(expected_NV, self.phases_N)
        position_E, token_ids_E = is_kept_NV.nonzero(as_tuple=True)
        return Entries(
            counts_N=is_kept_NV.sum(-1),
            token_ids_E=token_ids_E,
            logprobs_E=self.logprobs_NV[position_E, token_ids_E],
        )


def systematic_draws(expected_NV: Tensor, phases_N: Tensor) -> Tensor:
    """Draw where the running sum plus the phase passes an integer, bool [N, V].

    In whole numbers, units of 2**-24: a parallel sum of floats need not rise along the
    vocabulary, and where it falls back over an integer a token is drawn twice. So the number
    of draws is exact on every device. Blocks of 64 fit int32; sums over blocks are int64.
    """
    vocab_size = expected_NV.shape[-1]
    padded_NV = F.pad(expected_NV, (0, -vocab_size % _BLOCK))
    units_NKB = (padded_NV * _ONE).round_().int().unflatten(-1, (-1, _BLOCK))
    within_NKB = units_NKB.cumsum(-1, dtype=torch.int32)
    block_NK = within_NKB[..., -1].long()
    start_NK = block_NK.cumsum(-1) - block_NK + (phases_N[:, None] * _ONE).long()
    passed_NKB = (within_NKB + (start_NK % _ONE).int().unsqueeze(-1)) >> ONE_BITS
    is_drawn_NKB = torch.empty_like(passed_NKB, dtype=torch.bool)
    # The fraction is below 1, so nothing has passed before a block's first token.
    is_drawn_NKB[..., 0] = passed_NKB[..., 0] > 0
    torch.gt(passed_NKB[..., 1:], passed_NKB[..., :-1], out=is_drawn_NKB[..., 1:])
    return is_drawn_NKB.flatten(-2)[:, :vocab_size]


def make_scores(
    hidden_ND: Tensor, logits_NV: Tensor, *, temperature: float, phases_N: Tensor
) -> TeacherScores:
    """Choose the implementation for a device."""
    return _scores_class(logits_NV.device.type)(
        hidden_ND, logits_NV, temperature=temperature, phases_N=phases_N
    )


@lru_cache(maxsize=8)
def _scores_class(device_type: str) -> type[TeacherScores]:
    if device_type != "cuda":
        return TeacherScores
    try:
        from distill_wire.codecs.scores_triton import TritonScores
    except ImportError as exc:
        logger.warning("codecs run in plain torch, several times slower: %s", exc)
        return TeacherScores
    return TritonScores
