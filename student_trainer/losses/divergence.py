"""Divergences between two categorical distributions given as log-probabilities.

Both sides are over the same B buckets: the whole vocabulary, or the teacher's k
entries plus one bucket for the rest (`log_buckets`). With the tail as a bucket both
sides stay proper distributions, so a divergence is never negative and never has a
zero gradient where the sides differ; dropping the tail loses both properties.

A probability of zero (log -inf) adds nothing on the side that weighs with it. The
zeros are taken out before the product, because 0 * -inf is NaN in the value and,
masked afterwards, still NaN in the gradient.

Shapes: N = positions, B = buckets, V = vocabulary, K = kept entries.
Source: Agarwal et al. 2024 (arXiv 2306.13649) for JSD(beta).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Stands in for -inf where a gradient must pass: exp() of it is 0 in float32, and
# unlike -inf it leaves no inf - inf in the backward of logsumexp.
_NEGLIGIBLE = -1e30
# Where the two forms of a term change over; both are exact to rounding there.
_NEAR = 0.5


def log_buckets(logits_NV: Tensor, token_ids_NK: Tensor | None, *, temperature: float) -> Tensor:
    """Give the student's log-probabilities on the teacher's buckets.

    Args:
        logits_NV: [N, V] student logits, any float dtype.
        token_ids_NK: [N, K] int64, distinct ids the teacher kept, or None for all V.
        temperature: divisor of the student's logits, > 0.

    Returns:
        [N, K + 1] float32, the last one the log mass outside the K ids; [N, V] for None.
    """
    scaled_NV = logits_NV.float() / temperature
    if token_ids_NK is None:
        return scaled_NV.log_softmax(-1)
    normaliser_N1 = scaled_NV.logsumexp(-1, keepdim=True)
    kept_NK = scaled_NV.gather(-1, token_ids_NK)
    # Summed over the rest instead of 1 - kept, which cancels to noise near 1.
    rest_NV = scaled_NV.scatter(-1, token_ids_NK, _NEGLIGIBLE)
    tail_N1 = rest_NV.logsumexp(-1, keepdim=True)
    return torch.cat([kept_NK, tail_N1], -1) - normaliser_N1


def forward_kl(teacher_NB: Tensor, student_NB: Tensor) -> Tensor:
    """KL(teacher || student) per position: sum p (log p - log q).

    Args:
        teacher_NB: [N, B] log-probabilities, no gradient.
        student_NB: [N, B] log-probabilities.

    Returns:
        [N] float32, nats; inf where the student excludes what the teacher allows.
    """
    return kl_divergence(teacher_NB.float(), student_NB.float())


def reverse_kl(teacher_NB: Tensor, student_NB: Tensor) -> Tensor:
    """KL(student || teacher) per position: sum q (log q - log p). Shapes as `forward_kl`."""
    return kl_divergence(student_NB.float(), teacher_NB.float())


def generalized_jsd(teacher_NB: Tensor, student_NB: Tensor, *, beta: float) -> Tensor:
    """JSD(beta): beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q.

    The ends are defined as the two KLs, the convention of TRL: 0 is the forward, 1
    the reverse KL. Shapes as `forward_kl`.

    Raises:
        ValueError: beta is outside [0, 1].
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta must be in [0, 1], got {beta}")
    if beta == 0.0:
        return forward_kl(teacher_NB, student_NB)
    if beta == 1.0:
        return reverse_kl(teacher_NB, student_NB)
    teacher_NB, student_NB = teacher_NB.float(), student_NB.float()
    mixture_NB = torch.logaddexp(
        teacher_NB.clamp_min(_NEGLIGIBLE) + math.log(beta),
        student_NB.clamp_min(_NEGLIGIBLE) + math.log1p(-beta),
    )
    return beta * kl_divergence(teacher_NB, mixture_NB) + (1 - beta) * kl_divergence(
        student_NB, mixture_NB
    )


def sampled_forward_kl(
    logits_NV: Tensor,
    token_ids_NW: Tensor,
    weights_NW: Tensor,
    entropy_N: Tensor,
    *,
    temperature: float,
) -> Tensor:
    """Estimate KL(teacher || student) from weighted tokens: sum w (-log q) - H(teacher).

    Unbiased in value and gradient where the weights are unbiased for the teacher's
    probabilities. A single position may be below 0, because entropy and draws are apart.

    Args:
        logits_NV: [N, V] student logits, any float dtype.
        token_ids_NW: [N, W] int64; padding has weight 0.
        weights_NW: [N, W] float32, about 1 in sum.
        entropy_N: [N] float32, nats, of the teacher at `temperature`.
        temperature: divisor of the student's logits, > 0.

    Returns:
        [N] float32, nats.
    """
    scaled_NV = logits_NV.float() / temperature
    normaliser_N1 = scaled_NV.logsumexp(-1, keepdim=True)
    surprisal_NW = normaliser_N1 - scaled_NV.gather(-1, token_ids_NW)
    return (weights_NW * surprisal_NW).sum(-1) - entropy_N


def kl_divergence(weight_NB: Tensor, other_NB: Tensor) -> Tensor:
    """Sum p (log p - log q) - p + q, which is the KL because both sides sum to 1.

    Every term is >= 0, so rounding cannot make the sum negative, and where p and q are
    close (r = log p - log q small) p (exp(-r) - 1 + r) keeps the digits that cancel in
    p * r. The gradient with respect to log q is q - p, term by term.
    """
    is_zero_NB = weight_NB == -torch.inf
    p_NB, q_NB = weight_NB.exp(), other_NB.exp()
    ratio_NB = weight_NB.masked_fill(is_zero_NB, 0.0) - other_NB.masked_fill(is_zero_NB, 0.0)
    # The clamp keeps exp() in range where the other form is taken.
    near_NB = ratio_NB.clamp(-_NEAR, _NEAR)
    terms_NB = torch.where(
        ratio_NB.abs() < _NEAR,
        p_NB * (torch.expm1(-near_NB) + near_NB),
        p_NB * ratio_NB - p_NB + q_NB,
    )
    return torch.where(is_zero_NB, q_NB, terms_NB).sum(-1)
