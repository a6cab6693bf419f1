"""Oracle: the softmax in float64; the kernels are also held to the plain implementation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distill_wire.codecs.scores import TeacherScores, make_scores

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
SHAPES = [(5, 50), (3, 4096), (7, 9001), (2, 151_936), (2, 262_144)]


def scores_of(logits_NV: Tensor, *, temperature: float = 1.0) -> TeacherScores:
    generator = torch.Generator().manual_seed(0)
    phases_N = torch.rand(len(logits_NV), generator=generator, dtype=torch.float64)
    return make_scores(
        logits_NV[:, :1],
        logits_NV,
        temperature=temperature,
        phases_N=phases_N.to(logits_NV.device),
    )


def plain(scores: TeacherScores) -> TeacherScores:
    return TeacherScores(
        scores.hidden_ND,
        scores.logits_NV,
        temperature=scores.temperature,
        phases_N=scores.phases_N,
    )


def random_logits(shape: tuple[int, int], device: str) -> Tensor:
    generator = torch.Generator().manual_seed(shape[1])
    logits_NV = 4 * torch.randn(shape, generator=generator) + 30
    logits_NV[0, ::3] = -torch.inf
    logits_NV[1] = logits_NV[1].round()  # many ties
    return logits_NV.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_entropy_log_probabilities_and_tail_are_those_of_float64(
    shape: tuple[int, int], temperature: float, device: str
) -> None:
    logits_NV = random_logits(shape, device)
    exact_NV = (logits_NV.double() / temperature).log_softmax(-1)
    ids_NK = torch.arange(shape[0] * 3, device=device).view(-1, 3)

    scores = scores_of(logits_NV, temperature=temperature)
    kept_NK, top_NK, tail_N = scores.top(7)

    # fp32 sums over up to 262,144 tokens.
    close = {"rtol": 5e-5, "atol": 5e-5, "check_dtype": False}
    # Travels as float16; a plain sum of 151,936 small terms in fp32 is off by 3e-5 of it.
    entropy_N = torch.special.entr(exact_NV.exp()).sum(-1).float()
    torch.testing.assert_close(scores.entropy(), entropy_N, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores.logprobs_of(ids_NK), exact_NV.gather(-1, ids_NK), **close)
    gold_N = logits_NV.double().log_softmax(-1)[:, 1]
    ones_N = torch.ones_like(ids_NK[:, 0])
    torch.testing.assert_close(scores.gold_logprobs(ones_N), gold_N, **close)
    torch.testing.assert_close(kept_NK, exact_NV.topk(7).values, **close)
    torch.testing.assert_close(kept_NK, exact_NV.gather(-1, top_NK).float(), **close)
    rest_NV = exact_NV.scatter(-1, top_NK, -torch.inf)
    torch.testing.assert_close(tail_N, rest_NV.logsumexp(-1), **close)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_draws", [2, 50, 500])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sample_holds_the_likely_tokens_and_the_number_of_draws_its_mass_gives(
    shape: tuple[int, int], num_draws: int, device: str
) -> None:
    logits_NV = random_logits(shape, device)
    p_NV = logits_NV.double().softmax(-1)

    entries = scores_of(logits_NV).sample(num_draws)

    positions_E = torch.repeat_interleave(entries.counts_N)
    keys_E = positions_E * shape[1] + entries.token_ids_E
    assert (keys_E.diff() > 0).all()
    exact_E = p_NV.log()[positions_E, entries.token_ids_E]
    torch.testing.assert_close(entries.logprobs_E, exact_E.float(), rtol=1e-5, atol=1e-5)
    is_likely_NV = p_NV >= 1 / num_draws
    is_kept_NV = torch.zeros_like(is_likely_NV)
    is_kept_NV[positions_E, entries.token_ids_E] = True
    assert is_kept_NV[is_likely_NV].all()
    drawn_N = (is_kept_NV & ~is_likely_NV).sum(-1)
    expected_N = p_NV.masked_fill(is_likely_NV, 0.0).sum(-1) * num_draws
    assert (drawn_N - expected_N).abs().max() < 1.01


@needs_cuda
@pytest.mark.parametrize("num_draws", [2, 50, 500])
def test_the_kernel_draws_what_plain_torch_draws(num_draws: int) -> None:
    scores = scores_of(random_logits((64, 32_256), "cuda"))
    assert type(scores) is not TeacherScores

    found, expected = scores.sample(num_draws), plain(scores).sample(num_draws)

    # A running sum within rounding of a whole number may go either way.
    found_E, expected_E = (
        (torch.repeat_interleave(e.counts_N) * 32_256 + e.token_ids_E).tolist()
        for e in (found, expected)
    )
    assert len(set(found_E) ^ set(expected_E)) <= 1e-3 * len(expected_E)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_logit_that_is_not_finite_shows_in_the_entropy_of_its_row_alone(
    bad: float, device: str
) -> None:
    logits_NV = torch.zeros(3, 5000, device=device)
    logits_NV[1, 4999] = bad
    logits_NV[2] = -torch.inf

    entropy_N = scores_of(logits_NV).entropy()

    assert entropy_N.isfinite().tolist() == [True, False, False]


@pytest.mark.parametrize("device", DEVICES)
def test_no_positions_give_empty_answers(device: str) -> None:
    scores = scores_of(torch.zeros(0, 100, device=device))

    assert len(scores.entropy()) == 0
    assert [len(part) for part in scores.top(3)] == [0, 0, 0]
    assert [len(part) for part in scores.sample(20)] == [0, 0, 0]
