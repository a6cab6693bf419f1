"""Oracle: the same loss with all logits at once, by plain autograd, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from student_trainer.losses import chunked_loss


def mean_cross_entropy(head: nn.Module, labels_N: Tensor, num_items: int):
    def chunk_loss(hidden_nD: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        ce_n = F.cross_entropy(head(hidden_nD), labels_N[rows], reduction="none")
        return ce_n.sum() / num_items, {"ce_N": ce_n}

    return chunk_loss


@pytest.mark.parametrize("chunk_positions", [1, 3, 7, 100])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_chunks_give_value_and_gradients_of_the_whole(
    chunk_positions: int, is_frozen: bool
) -> None:
    torch.manual_seed(0)
    head = nn.Linear(5, 11, dtype=torch.float64).requires_grad_(not is_frozen)
    hidden_ND = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    labels_N = torch.randint(0, 11, (7,))
    inputs = [hidden_ND, *(p for p in head.parameters() if p.requires_grad)]

    loss, values = chunked_loss(
        hidden_ND,
        mean_cross_entropy(head, labels_N, 7),
        head_parameters=list(head.parameters()),
        chunk_positions=chunk_positions,
    )
    found = torch.autograd.grad(3.0 * loss, inputs)

    exact = F.cross_entropy(head(hidden_ND), labels_N)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(values["ce_N"].mean(), exact)
    for gradient, expected in zip(found, torch.autograd.grad(3.0 * exact, inputs), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)


def test_a_tied_weight_gets_both_of_its_gradients() -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(11, 5, dtype=torch.float64)
    head = nn.Linear(5, 11, bias=False, dtype=torch.float64)
    head.weight = embedding.weight
    ids, labels_N = torch.randint(0, 11, (6,)), torch.randint(0, 11, (6,))

    loss, _ = chunked_loss(
        embedding(ids),
        mean_cross_entropy(head, labels_N, 6),
        head_parameters=list(head.parameters()),
        chunk_positions=4,
    )
    (found,) = torch.autograd.grad(loss, head.weight)

    (exact,) = torch.autograd.grad(F.cross_entropy(head(embedding(ids)), labels_N), head.weight)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-8)


def test_a_frozen_head_gets_no_gradient_and_none_is_stored() -> None:
    head = nn.Linear(5, 11).requires_grad_(False)
    hidden_ND = torch.randn(4, 5, requires_grad=True)

    loss, _ = chunked_loss(
        hidden_ND,
        mean_cross_entropy(head, torch.zeros(4, dtype=torch.long), 4),
        head_parameters=list(head.parameters()),
        chunk_positions=2,
    )
    loss.backward()

    assert head.weight.grad is None
    assert hidden_ND.grad is not None


def test_pbr_06_no_positions_give_a_finite_zero_with_a_graph() -> None:
    head = nn.Linear(5, 11)
    hidden_ND = torch.randn(4, 5, requires_grad=True)

    loss, values = chunked_loss(
        hidden_ND[:0],
        mean_cross_entropy(head, torch.zeros(0, dtype=torch.long), 1),
        head_parameters=list(head.parameters()),
        chunk_positions=2,
    )
    loss.backward()

    assert loss.item() == 0.0
    assert values["ce_N"].shape == (0,)
    assert hidden_ND.grad is not None and (hidden_ND.grad == 0).all()
    assert head.weight.grad is not None and (head.weight.grad == 0).all()


def test_pbr_02_valid_tokens_in_one_chunk_only_give_the_mean_over_those_tokens() -> None:
    torch.manual_seed(0)
    head = nn.Linear(5, 11, dtype=torch.float64)
    hidden_ND = torch.randn(16, 5, dtype=torch.float64)
    labels_N = torch.full((16,), -100)
    labels_N[2:5] = torch.tensor([1, 2, 3])

    def chunk_loss(hidden_nD: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        ce_n = F.cross_entropy(head(hidden_nD), labels_N[rows], reduction="none")
        return ce_n.sum() / 3, {}

    loss, _ = chunked_loss(hidden_ND, chunk_loss, head_parameters=[], chunk_positions=2)

    exact = F.cross_entropy(head(hidden_ND), labels_N)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)


def test_without_gradients_the_value_is_the_same() -> None:
    head = nn.Linear(5, 11)
    hidden_ND = torch.randn(7, 5)
    arguments = mean_cross_entropy(head, torch.arange(7), 7)

    with torch.no_grad():
        found, _ = chunked_loss(hidden_ND, arguments, head_parameters=[], chunk_positions=3)

    expected, _ = chunked_loss(hidden_ND, arguments, head_parameters=[], chunk_positions=3)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_what_a_chunk_does_not_use_gets_no_gradient_from_it() -> None:
    hidden_ND = torch.randn(4, 3, requires_grad=True)
    used, unused = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)

    def chunk_loss(hidden_nD: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        loss = used.sum() if rows.start == 0 else (hidden_nD * used).sum()
        return loss, {"x_N": hidden_nD[:, 0]}

    loss, _ = chunked_loss(hidden_ND, chunk_loss, head_parameters=[used, unused], chunk_positions=2)
    loss.backward()

    assert hidden_ND.grad is not None and used.grad is not None and unused.grad is not None
    assert torch.equal(hidden_ND.grad[:2], torch.zeros(2, 3))
    assert torch.equal(hidden_ND.grad[2:], used.detach().expand(2, 3))
    torch.testing.assert_close(used.grad, 1 + hidden_ND.detach()[2:].sum(0))
    assert torch.equal(unused.grad, torch.zeros(3))
