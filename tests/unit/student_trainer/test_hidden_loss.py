"""Oracle: both losses by their definition in float64, where nothing is near a limit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from student_trainer.objective import HIDDEN_LOSSES

KINDS = tuple(HIDDEN_LOSSES)


def hidden_loss(teacher_ND: Tensor, student_ND: Tensor, *, kind: str) -> Tensor:
    return HIDDEN_LOSSES[kind](teacher_ND, student_ND)


def exact(teacher_ND: Tensor, student_ND: Tensor, kind: str) -> Tensor:
    teacher_ND, student_ND = teacher_ND.double(), student_ND.double()
    if kind == "cosine":
        return 1.0 - F.cosine_similarity(teacher_ND, student_ND, dim=-1)
    teacher_ND = teacher_ND / teacher_ND.square().mean(-1, keepdim=True).sqrt()
    student_ND = student_ND / student_ND.square().mean(-1, keepdim=True).sqrt()
    return (teacher_ND - student_ND).square().mean(-1)


def loss_and_gradient(teacher_ND: Tensor, student_ND: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    student_ND = student_ND.detach().clone().requires_grad_()
    loss_N = hidden_loss(teacher_ND, student_ND, kind=kind)
    (gradient_ND,) = torch.autograd.grad(loss_N.sum(), student_ND)
    return loss_N.detach(), gradient_ND


@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_are_those_of_the_definition(kind: str) -> None:
    torch.manual_seed(0)
    teacher_ND, student_ND = torch.randn(2, 16, 33)

    found_N, gradient_ND = loss_and_gradient(teacher_ND, student_ND, kind)

    double_ND = student_ND.double().requires_grad_()
    expected_N = exact(teacher_ND, double_ND, kind)
    (expected_ND,) = torch.autograd.grad(expected_N.sum(), double_ND)
    assert found_N.dtype == torch.float32
    torch.testing.assert_close(found_N.double(), expected_N, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient_ND.double(), expected_ND, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_the_slope_of_the_value(kind: str) -> None:
    torch.manual_seed(0)
    teacher_ND, student_ND = torch.randn(2, 4, 7, dtype=torch.float64)
    student_ND.requires_grad_()

    assert torch.autograd.gradcheck(
        lambda states_ND: hidden_loss(teacher_ND, states_ND, kind=kind), student_ND
    )


def test_mse_is_twice_the_cosine() -> None:
    torch.manual_seed(0)
    teacher_ND, student_ND = torch.randn(2, 32, 17, dtype=torch.float64)

    mse_N = hidden_loss(teacher_ND, student_ND, kind="mse")
    cosine_N = hidden_loss(teacher_ND, student_ND, kind="cosine")

    torch.testing.assert_close(mse_N, 2.0 * cosine_N, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-6, 0.5, 1e5, 1e25])
def test_the_size_of_the_states_does_not_count(kind: str, scale: float) -> None:
    torch.manual_seed(0)
    teacher_ND, student_ND = torch.randn(2, 8, 9)

    found_N, gradient_ND = loss_and_gradient(teacher_ND * scale, student_ND * scale, kind)

    expected_N, expected_ND = loss_and_gradient(teacher_ND, student_ND, kind)
    torch.testing.assert_close(found_N, expected_N, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient_ND * scale, expected_ND, rtol=1e-4, atol=1e-6)
    # A step along the state changes only its size, so the gradient is at right angles to it.
    along_N = (gradient_ND * scale * student_ND).sum(-1)
    torch.testing.assert_close(along_N, torch.zeros(8), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_states_are_compared_in_fp32(kind: str) -> None:
    torch.manual_seed(0)
    # Massive activations as in real residual streams; fp16 ends at 65504.
    teacher_ND = torch.randn(8, 64)
    teacher_ND[:, 3] = 1e5
    teacher_ND = teacher_ND.bfloat16()
    student_ND = (teacher_ND + torch.randn(8, 64)).bfloat16()

    found_N, gradient_ND = loss_and_gradient(teacher_ND, student_ND, kind)

    assert found_N.dtype == torch.float32 and gradient_ND.dtype == torch.bfloat16
    torch.testing.assert_close(found_N, hidden_loss(teacher_ND.float(), student_ND, kind=kind))
    torch.testing.assert_close(
        found_N.double(), exact(teacher_ND, student_ND, kind), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_zero_vector_gives_a_finite_value_and_no_gradient(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    teacher_ND, student_ND = torch.randn(2, 3, 5, dtype=dtype)
    student_ND[1] = 0.0
    teacher_ND[2] = 0.0

    found_N, gradient_ND = loss_and_gradient(teacher_ND, student_ND, kind)

    # Against a side without a direction nothing is alike: mean square 1, cosine 0.
    torch.testing.assert_close(found_N[1:], torch.ones_like(found_N[1:]), rtol=1e-6, atol=0)
    assert (gradient_ND[1] == 0).all()
    assert gradient_ND.isfinite().all() and (gradient_ND[0] != 0).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_is_the_same_row_among_others(kind: str) -> None:
    torch.manual_seed(0)
    teacher_ND, student_ND = torch.randn(2, 6, 11)
    loss_mask_N = torch.tensor([True, False, True, True, False, False])
    garbled_ND = student_ND.masked_fill(~loss_mask_N[:, None], 1e30)

    found_N, gradient_ND = loss_and_gradient(teacher_ND, garbled_ND, kind)

    alone_N, alone_ND = loss_and_gradient(teacher_ND[loss_mask_N], student_ND[loss_mask_N], kind)
    torch.testing.assert_close(found_N[loss_mask_N], alone_N, rtol=0, atol=0)
    torch.testing.assert_close(gradient_ND[loss_mask_N], alone_ND, rtol=0, atol=0)


def test_no_rows_give_an_empty_loss_with_a_graph() -> None:
    student_ND = torch.randn(4, 3, requires_grad=True)

    hidden_loss(torch.randn(0, 3), student_ND[:0], kind="mse").sum().backward()

    assert student_ND.grad is not None and (student_ND.grad == 0).all()
