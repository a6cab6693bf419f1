"""Oracle: divergences that are known by construction, and the whole-vocabulary loss in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from distill_wire.causal_lm import CausalLMParts
from distill_wire.head import TeacherHead
from distill_wire.targets import TeacherTarget
from distill_wire.types import CodecId, LogitTransform, TargetSpec
from student_trainer.objective import (
    DistillationBatch,
    ObjectiveConfig,
    StudentStates,
    compute_objective,
)
from tests.unit.distill_wire.answers import round_trip

VOCAB = 64


def make_target(teacher_NV: Tensor, spec: TargetSpec) -> TeacherTarget:
    """Send logits through the codec, as any source does."""
    return round_trip(teacher_NV, spec)


def loss_of(
    student_NV: Tensor,
    target: TeacherTarget | None,
    *,
    num_items: float,
    vocab_size: int = VOCAB,
    alpha_ce: float = 0.0,
    beta: float = 0.0,
) -> dict[str, Tensor]:
    # The "hidden states" are the logits themselves: the head is the identity.
    parts = CausalLMParts(
        trunk=nn.Identity(),
        head=nn.Identity(),
        transform=LogitTransform(),
        head_rows=student_NV.shape[1],
    )
    batch = DistillationBatch(
        positions_N=torch.arange(len(student_NV)),
        gold_ids_N=torch.zeros(len(student_NV), dtype=torch.long),
        target=target,
        num_items=num_items,
        config=ObjectiveConfig(
            alpha_kd=1.0,
            alpha_ce=alpha_ce,
            alpha_hidden=0.0,
            hidden_loss="mse",
            layer_map=(),
            beta=beta,
            chunk_positions=3,
            vocab_size=vocab_size,
        ),
        teacher_head=TeacherHead(
            weight_VD=torch.eye(vocab_size), bias_V=None, transform=LogitTransform()
        ),
    )
    states = StudentStates(last_BTD=student_NV[None], layers={}, projections={})
    return compute_objective(states, parts, batch)


def logits_at_kl_from_uniform(kl: float) -> Tensor:
    """Find x so that softmax(x, 0, 0, ...) has the given KL from the uniform distribution."""
    low, high = 0.0, 60.0
    for _ in range(80):
        middle = (low + high) / 2
        logits = torch.zeros(VOCAB, dtype=torch.float64)
        logits[3] = middle
        log_p = logits.log_softmax(-1)
        found = float((log_p.exp() * (log_p + math.log(VOCAB))).sum())
        low, high = (middle, high) if found < kl else (low, middle)
    return logits.float()


def test_pbr_01_one_token_of_kl_4_and_seven_of_kl_1_give_11_eighths_however_they_are_cut() -> None:
    spec = TargetSpec(codec=CodecId.TOPK, top_k=VOCAB - 1)
    hard, easy = logits_at_kl_from_uniform(4.0), logits_at_kl_from_uniform(1.0)
    teacher = torch.stack([hard, *[easy] * 7])
    student = torch.zeros(8, VOCAB, requires_grad=True)

    whole = loss_of(student, make_target(teacher, spec), num_items=8)["loss"]
    (gradient,) = torch.autograd.grad(whole, student)
    cut = torch.zeros(8, VOCAB, requires_grad=True)
    pieces = [
        loss_of(cut[rows], make_target(teacher[rows], spec), num_items=8)["loss"]
        for rows in (slice(0, 1), slice(1, 8))
    ]
    (cut_gradient,) = torch.autograd.grad(pieces[0] + pieces[1], cut)

    assert whole.item() == pytest.approx(11 / 8, rel=1e-4)
    assert (pieces[0] + pieces[1]).item() == pytest.approx(whole.item(), rel=1e-6)
    torch.testing.assert_close(cut_gradient, gradient, rtol=0, atol=1e-6)


def test_pbr_05_the_mixed_loss_at_temperature_2_carries_the_square_once() -> None:
    teacher = torch.tensor([[2.0, 0.0, 0.0]])
    student = torch.zeros(1, 3)
    spec = TargetSpec(codec=CodecId.TOPK, top_k=2, temperature=2.0)

    outputs = loss_of(student, make_target(teacher, spec), num_items=1, vocab_size=3, alpha_ce=0.5)

    assert outputs["kd_N"].item() == pytest.approx(0.49314, abs=2e-4)
    assert outputs["loss"].item() == pytest.approx(0.49314 + 0.5 * math.log(3), abs=2e-4)


@pytest.mark.parametrize("student_dtype", [torch.float32, torch.bfloat16])
def test_pbr_20_padded_columns_have_probability_zero_on_both_sides(
    student_dtype: torch.dtype,
) -> None:
    teacher = torch.tensor([[-5.0, -6.0, -7.0]])
    padded_teacher = torch.nn.functional.pad(teacher, (0, 3))
    student = torch.tensor([[-1.0, -1.0, -1.0, 0.0, 0.0, 0.0]], dtype=student_dtype)
    spec = TargetSpec(codec=CodecId.DENSE)

    found = loss_of(student, make_target(padded_teacher[:, :3], spec), num_items=1, vocab_size=3)[
        "loss"
    ]

    log_p = teacher.double().log_softmax(-1)
    exact = float((log_p.exp() * (log_p + math.log(3))).sum())
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(exact, rel=1e-2)  # 16-bit logits on the wire


def test_pbr_13_a_copy_of_the_teacher_has_loss_zero_and_a_shift_a_large_finite_one() -> None:
    # A teacher that puts all mass on the true next token of a row with distinct ids.
    next_ids = torch.tensor([11, 12, 13, 14, 15])
    teacher = 40.0 * torch.nn.functional.one_hot(next_ids, VOCAB).float()
    spec = TargetSpec(codec=CodecId.TOPK, top_k=4)
    target = make_target(teacher, spec)

    copied = loss_of(teacher.clone(), target, num_items=5)["loss"].item()
    shifted = loss_of(teacher.roll(1, 0), target, num_items=5)["loss"].item()

    assert copied == pytest.approx(0.0, abs=1e-6)
    assert 30.0 < shifted < math.inf


def test_without_a_teacher_the_loss_is_the_cross_entropy() -> None:
    torch.manual_seed(0)
    student = torch.randn(5, VOCAB)

    outputs = loss_of(student, None, num_items=5, alpha_ce=1.0)

    expected = torch.nn.functional.cross_entropy(student, torch.zeros(5, dtype=torch.long))
    torch.testing.assert_close(outputs["loss"], expected)
    assert "kd_N" not in outputs


WHOLE = {
    "dense": TargetSpec(codec=CodecId.DENSE, temperature=2.0),
    "hidden8": TargetSpec(codec=CodecId.HIDDEN8, temperature=2.0),
    "topk": TargetSpec(codec=CodecId.TOPK, top_k=VOCAB - 1, temperature=2.0),
}


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", WHOLE)
def test_every_whole_distribution_gives_the_dense_loss_and_gradient(name: str, beta: float) -> None:
    torch.manual_seed(0)
    teacher, student = 2 * torch.randn(12, VOCAB), torch.randn(12, VOCAB, requires_grad=True)

    loss = loss_of(student, make_target(teacher, WHOLE[name]), num_items=12, beta=beta)["loss"]
    (gradient,) = torch.autograd.grad(loss, student)

    exact = student.detach().double().requires_grad_()
    p, q = (teacher.double() / 2).log_softmax(-1), (exact / 2).log_softmax(-1)
    mixture = (beta * p.exp() + (1 - beta) * q.exp()).log()
    ends = {0.0: (p.exp() * (p - q)), 1.0: (q.exp() * (q - p))}
    between = beta * p.exp() * (p - mixture) + (1 - beta) * q.exp() * (q - mixture)
    expected = 4 * ends.get(beta, between).sum() / 12
    (expected_gradient,) = torch.autograd.grad(expected, exact)
    # 8 and 11 bits on the wire: a per cent of the gradient.
    assert loss.item() == pytest.approx(expected.item(), rel=0.01)
    error = (gradient - expected_gradient).norm() / expected_gradient.norm()
    assert error < 0.02


def test_the_gradient_of_drawn_tokens_is_right_on_average() -> None:
    torch.manual_seed(0)
    teacher, student = 2 * torch.randn(12, VOCAB), torch.randn(12, VOCAB, requires_grad=True)

    def gradient(spec: TargetSpec) -> tuple[Tensor, float]:
        outputs = loss_of(student, make_target(teacher, spec), num_items=12)
        return torch.autograd.grad(outputs["loss"], student)[0], outputs["loss"].item()

    exact_gradient, exact = gradient(TargetSpec(codec=CodecId.DENSE, temperature=2.0))
    draws = [
        gradient(TargetSpec(codec=CodecId.THRESHOLD, num_draws=10, temperature=2.0, seed=seed))
        for seed in range(256)
    ]

    single = float(torch.stack([(found - exact_gradient).norm() for found, _ in draws]).mean())
    mean_error = (torch.stack([found for found, _ in draws]).mean(0) - exact_gradient).norm()
    assert mean_error < 1.5 * single / 16 + 0.005 * exact_gradient.norm()
    losses = torch.tensor([loss for _, loss in draws])
    assert abs(losses.mean() - exact) < 4 * losses.std() / 16 + 0.01 * exact
