"""Oracle: the softmax of the whole vocabulary in float64, over generated teachers."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distill_wire.targets import TeacherTarget
from distill_wire.types import CodecId, TargetSpec
from tests.unit.distill_wire.answers import round_trip

LAW = settings(max_examples=80, deadline=None, derandomize=True, database=None)


@st.composite
def teachers(draw: st.DrawFn) -> Tensor:
    """Draw logits: flat or peaked, far from zero or not, with or without masked ids."""
    vocab_size = draw(st.integers(2, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = (draw(st.integers(0, 6)), vocab_size)
    logits_NV = torch.randn(shape, generator=generator) * draw(st.sampled_from([0.0, 0.1, 3, 30]))
    logits_NV += draw(st.sampled_from([0.0, -80.0, 1000.0]))
    is_masked_NV = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.95]))
    is_masked_NV[:, draw(st.integers(0, vocab_size - 1))] = False
    return logits_NV.masked_fill(is_masked_NV, -torch.inf)


def through_a_frame(logits_NV: Tensor, spec: TargetSpec) -> TeacherTarget:
    return round_trip(logits_NV, spec, chunk_tokens=4)


def finite_range(values_NK: Tensor) -> float:
    """Give the largest distance between the finite values of a row, 0 if there are none."""
    finite_NK = values_NK.masked_fill(values_NK == -torch.inf, torch.nan)
    below_NK = (values_NK.amax(-1, keepdim=True) - finite_NK).nan_to_num(0.0)
    return float(below_NK.max()) if below_NK.numel() else 0.0


def assert_within(found: Tensor, exact: Tensor, bound: float) -> None:
    is_masked = exact == -torch.inf
    assert torch.equal(found == -torch.inf, is_masked) or (exact[found == -torch.inf] < -6e4).all()
    error = (found.double() - exact).masked_fill(found == -torch.inf, 0.0).abs()
    assert not error.numel() or error.max() <= bound


@LAW
@given(
    logits_NV=teachers(),
    share=st.floats(0, 1),
    temperature=st.sampled_from([0.01, 0.5, 1.0, 2.0, 100.0]),
)
def test_top_k_and_tail_are_the_full_distribution_within_a_step(
    logits_NV: Tensor, share: float, temperature: float
) -> None:
    vocab_size = logits_NV.shape[-1]
    k = 1 + int(share * (vocab_size - 2))
    spec = TargetSpec(codec=CodecId.TOPK, top_k=k, temperature=temperature)

    target = through_a_frame(logits_NV, spec)

    exact_NV = (logits_NV.double() / temperature).log_softmax(-1)
    kept_NK = exact_NV.gather(-1, target.tensors["token_ids"])
    tail_N = exact_NV.scatter(-1, target.tensors["token_ids"], -torch.inf).logsumexp(-1)
    # A code is off by a step at most, the sum of all by as much; float16 rounds the tail.
    tails_NK = torch.cat([kept_NK.amax(-1, keepdim=True), tail_N[:, None]], -1)
    bound = 2 * 1.01 * finite_range(kept_NK) / 254 + 2**-11 * finite_range(tails_NK) + 1e-5
    assert_within(target.tensors["logprobs"], kept_NK, bound)
    assert_within(target.tensors["tail_logprob"], tail_N, bound)
    entropy_N = torch.special.entr(exact_NV.exp()).sum(-1)
    torch.testing.assert_close(target.entropy_N.double(), entropy_N, rtol=2**-11, atol=2e-6)
    gold_N = logits_NV.double().log_softmax(-1)[:, 1]
    torch.testing.assert_close(target.gold_logprob_N.double(), gold_N, rtol=2**-11, atol=2e-6)


@LAW
@given(
    logits_NV=teachers(),
    num_draws=st.integers(2, 60),
    temperature=st.sampled_from([0.01, 0.5, 1.0, 2.0, 100.0]),
    seed=st.integers(0, 2**64 - 1),
)
def test_drawn_weights_are_the_probability_or_one_over_n(
    logits_NV: Tensor, num_draws: int, temperature: float, seed: int
) -> None:
    spec = TargetSpec(
        codec=CodecId.THRESHOLD, num_draws=num_draws, temperature=temperature, seed=seed
    )

    tensors = through_a_frame(logits_NV, spec).tensors

    p_NV = (logits_NV.double() / temperature).softmax(-1)
    found_NV = torch.zeros_like(p_NV).scatter_add_(
        -1, tensors["token_ids"], tensors["weights"].double()
    )
    half_step = math.log(num_draws) / 510
    is_likely_NV = p_NV >= 1 / num_draws * (1 + 1e-5)
    ratio = (found_NV / p_NV)[is_likely_NV]
    assert ((ratio.log()).abs() <= half_step + 1e-5).all()
    drawn = found_NV[p_NV < 1 / num_draws * (1 - 1e-5)]
    assert ((drawn == 0) | ((drawn * num_draws - 1).abs() < 1e-6)).all()
    assert not found_NV[p_NV == 0].any()
