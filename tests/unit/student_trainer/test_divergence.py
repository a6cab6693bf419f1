"""Oracle: the definition of each divergence in float64 over the whole vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from student_trainer.losses import forward_kl, generalized_jsd, log_buckets, reverse_kl


def exact_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    log_p, log_q = p_logits.double().log_softmax(-1), q_logits.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def teacher_buckets(logits_NV: Tensor, token_ids_NK: Tensor) -> Tensor:
    return log_buckets(logits_NV, token_ids_NK, temperature=1.0)


@pytest.mark.parametrize(
    ("temperature", "raw", "with_square"),
    [(1.0, 0.43304, 0.43304), (2.0, 0.12328, 0.49314), (4.0, 0.03017, 0.48267)],
)
def test_pbr_05_temperature_is_applied_once_and_its_square_is_the_callers(
    temperature: float, raw: float, with_square: float
) -> None:
    teacher = torch.tensor([[2.0, 0.0, 0.0]]) / temperature
    student = log_buckets(torch.zeros(1, 3), None, temperature=temperature)

    value = forward_kl(teacher.log_softmax(-1), student).item()

    assert value == pytest.approx(raw, abs=5e-6)
    assert value * temperature**2 == pytest.approx(with_square, abs=2e-5)


def test_pbr_08_a_bf16_teacher_gives_a_kl_that_is_not_negative_and_exact() -> None:
    torch.manual_seed(0)
    student = torch.randn(64, 32_000)
    teacher = student.bfloat16()
    student = student + 1e-3 * torch.randn_like(student)

    found = forward_kl(teacher.float().log_softmax(-1), student.log_softmax(-1))

    assert (found >= 0).all()
    torch.testing.assert_close(found.double(), exact_kl(teacher, student), rtol=0, atol=1e-6)
    mixed = generalized_jsd(teacher.float().log_softmax(-1), student.log_softmax(-1), beta=0.5)
    assert (mixed >= 0).all()


def test_pbr_09_with_a_tail_bucket_two_tokens_are_the_whole_reverse_kl() -> None:
    student = torch.tensor([[0.6, 0.4]]).log().requires_grad_()
    teacher = torch.tensor([[0.9, 0.1]]).log()
    kept = torch.tensor([[0]])

    loss = reverse_kl(teacher_buckets(teacher, kept), log_buckets(student, kept, temperature=1.0))
    (gradient,) = torch.autograd.grad(loss.sum(), student)

    assert loss.item() == pytest.approx(0.31124, abs=1e-5)
    assert gradient.abs().max() > 0.01


def test_pbr_09_one_tail_bucket_bounds_the_forward_kl_from_below_and_stays_positive() -> None:
    student = torch.tensor([[0.8, 0.1, 0.1]]).log().requires_grad_()
    teacher = torch.tensor([[0.5, 0.3, 0.2]]).log()
    kept = torch.tensor([[0]])

    loss = forward_kl(teacher_buckets(teacher, kept), log_buckets(student, kept, temperature=1.0))
    (gradient,) = torch.autograd.grad(loss.sum(), student)

    # Without the tail it would be -0.23500; over all three tokens it is 0.23321.
    assert loss.item() == pytest.approx(0.22314, abs=1e-5)
    assert exact_kl(teacher, student.detach()).item() == pytest.approx(0.23321, abs=1e-5)
    assert gradient.abs().max() > 0.01


def test_pbr_09_optimising_the_reverse_form_moves_mass_towards_the_teachers() -> None:
    torch.manual_seed(0)
    teacher = 2 * torch.randn(8, 30)
    kept = teacher.topk(2, -1).indices
    student = torch.randn(8, 30, requires_grad=True)
    target = teacher_buckets(teacher, kept)
    gap = []

    optimizer = torch.optim.Adam([student], lr=0.05)
    for _ in range(200):
        buckets = log_buckets(student, kept, temperature=1.0)
        gap.append((buckets[:, :2].exp().sum(-1) - target[:, :2].exp().sum(-1)).abs().max().item())
        optimizer.zero_grad()
        reverse_kl(target, buckets).sum().backward()
        optimizer.step()

    assert gap[0] > 0.1
    assert gap[-1] < 0.01


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_pbr_07_an_excluded_token_gives_finite_gradients_at_every_beta(beta: float) -> None:
    teacher = torch.tensor([[1.0, 0.0, -torch.inf], [0.5, 0.2, 0.1]])
    # The student excludes the same id, as it does where a vocabulary is masked.
    student = torch.tensor([[0.3, 0.1, -torch.inf], [0.1, 0.2, 0.3]], requires_grad=True)

    both = generalized_jsd(teacher.log_softmax(-1), student.log_softmax(-1), beta=beta)
    (gradient,) = torch.autograd.grad(both.sum(), student)

    assert both.isfinite().all() and gradient.isfinite().all()
    for row in range(2):
        alone = student.detach()[row : row + 1].clone().requires_grad_()
        loss = generalized_jsd(
            teacher[row : row + 1].log_softmax(-1), alone.log_softmax(-1), beta=beta
        )
        (alone_gradient,) = torch.autograd.grad(loss.sum(), alone)
        torch.testing.assert_close(gradient[row : row + 1], alone_gradient, rtol=0, atol=0)


def test_pbr_07_a_tail_of_nothing_gives_finite_gradients() -> None:
    # All mass of both sides lies in the kept ids; the rest is masked to -inf.
    logits = torch.tensor([[2.0, 1.0, -torch.inf, -torch.inf]])
    student = torch.tensor([[1.0, 1.5, -torch.inf, -torch.inf]], requires_grad=True)
    kept = torch.tensor([[0, 1]])
    target = torch.cat([logits[:, :2].log_softmax(-1), torch.tensor([[-torch.inf]])], -1)

    loss = forward_kl(target, log_buckets(student, kept, temperature=1.0))
    (gradient,) = torch.autograd.grad(loss.sum(), student)

    exact = exact_kl(logits[:, :2], student.detach()[:, :2])
    torch.testing.assert_close(loss.detach().double(), exact, rtol=1e-5, atol=1e-6)
    assert gradient.isfinite().all()


def test_the_ends_of_jsd_are_the_two_kls() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(2, 5, 11).log_softmax(-1)

    torch.testing.assert_close(generalized_jsd(p, q, beta=0.0), forward_kl(p, q))
    torch.testing.assert_close(generalized_jsd(p, q, beta=1.0), reverse_kl(p, q))
    near_forward = generalized_jsd(p, q, beta=1e-4) / 1e-4
    torch.testing.assert_close(near_forward, forward_kl(p, q), rtol=1e-2, atol=1e-2)


def test_jsd_of_a_half_is_symmetric_and_bounded_by_log_two() -> None:
    torch.manual_seed(0)
    p, q = (8 * torch.randn(2, 50, 7)).log_softmax(-1)

    found = generalized_jsd(p, q, beta=0.5)

    torch.testing.assert_close(found, generalized_jsd(q, p, beta=0.5))
    assert (found <= math.log(2)).all()


def test_top_k_of_all_but_one_token_is_the_full_forward_kl() -> None:
    torch.manual_seed(0)
    teacher, student = torch.randn(2, 6, 13)
    kept = teacher.topk(12, -1).indices

    found = forward_kl(
        log_buckets(teacher, kept, temperature=2.0), log_buckets(student, kept, temperature=2.0)
    )

    exact = exact_kl(teacher / 2, student / 2)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


def test_forward_kl_gradient_equals_soft_cross_entropy() -> None:
    torch.manual_seed(0)
    teacher, student = torch.randn(2, 4, 9, dtype=torch.float32)
    student.requires_grad_()

    kl = forward_kl(teacher.log_softmax(-1), student.log_softmax(-1)).sum()
    soft = F.cross_entropy(student, teacher.softmax(-1), reduction="sum")

    torch.testing.assert_close(
        torch.autograd.grad(kl, student)[0], torch.autograd.grad(soft, student)[0]
    )


@pytest.mark.parametrize("beta", [-0.1, 1.5, math.nan])
def test_beta_outside_the_unit_interval_is_refused(beta: float) -> None:
    with pytest.raises(ValueError, match=r"beta must be in \[0, 1\]"):
        generalized_jsd(torch.zeros(1, 2), torch.zeros(1, 2), beta=beta)
