"""Oracle: the whole [T, T] attention maps in float64 and autograd through their definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from student_trainer.losses.attention import AttentionRows, attention_kl

T, LENGTHS_B = 9, torch.tensor([9, 5])
# Out of order, one of them twice, the first and the last token of a row among them.
POSITIONS_N = torch.tensor([8, 0, 9, 3, 13, 4, 5, 3, 11])
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "grouped": ({"heads": (4, 2)}, {"heads": (4, 1)}),
    "sharp": ({"scaling": 100.0}, {"scaling": 1e3}),
    "softcap": ({"softcap": 1.5}, {"softcap": 2.0}),
    "windows": ({"sliding_window": 2}, {"sliding_window": 4}),
    "teacher's window": ({"sliding_window": 1}, {}),
    "a window that no row fills": ({}, {"sliding_window": T}),
    "all": (
        {"heads": (4, 2), "softcap": 3.0, "sliding_window": 3},
        {"softcap": 2.0, "sliding_window": 3, "width": 3},
    ),
}


def side(
    heads: tuple[int, int] = (4, 4), *, num_tokens: int = T, width: int = 4, **options: Any
) -> AttentionRows:
    shapes = [(2, num_heads, num_tokens, width) for num_heads in heads]
    query, key = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return AttentionRows(**{"query_BHTd": query, "key_BGTd": key, "scaling": 0.8, **options})


def pair(name: str) -> tuple[AttentionRows, AttentionRows]:
    torch.manual_seed(0)
    teacher, student = OPTIONS[name]
    return side(**teacher), side(**student)


def log_map(rows: AttentionRows) -> Tensor:
    query_BHTd, key_BGTd = rows.query_BHTd.double(), rows.key_BGTd.double()
    key_BHTd = key_BGTd.repeat_interleave(query_BHTd.shape[1] // key_BGTd.shape[1], 1)
    scores_BHTT = rows.scaling * query_BHTd @ key_BHTd.mT
    if rows.softcap:
        scores_BHTT = rows.softcap * torch.tanh(scores_BHTT / rows.softcap)
    distance_TT = torch.arange(T)[:, None] - torch.arange(T)
    is_seen_TT = (distance_TT >= 0) & (distance_TT < (rows.sliding_window or T))
    # Finite, so that 0 * log 0 is 0; exp() of it is 0.
    return scores_BHTT.masked_fill(~is_seen_TT, -1e30).log_softmax(-1)


def exact(teacher: AttentionRows, student: AttentionRows) -> Tensor:
    log_p, log_q = log_map(teacher).detach(), log_map(student)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean(1).flatten()[POSITIONS_N]


def blockwise(teacher: AttentionRows, student: AttentionRows, **changed: Any) -> Tensor:
    options = {"query_positions_N": POSITIONS_N, "lengths_B": LENGTHS_B, "block_positions": 2}
    return attention_kl(teacher, student, **(options | changed))


def tensors(*sides: AttentionRows) -> list[Tensor]:
    return [tensor for rows in sides for tensor in (rows.query_BHTd, rows.key_BGTd)]


def gradients(loss_N: Tensor, student: AttentionRows) -> tuple[Tensor, ...]:
    # Weights that differ, as a loss that is not a plain sum has them.
    weights_N = torch.linspace(0.5, 2.0, len(loss_N), dtype=loss_N.dtype)
    return torch.autograd.grad((weights_N * loss_N).sum(), tensors(student))


def converted(rows: AttentionRows, dtype: torch.dtype) -> AttentionRows:
    query, key = (tensor.detach().to(dtype, copy=True) for tensor in tensors(rows))
    return replace(rows, query_BHTd=query.requires_grad_(), key_BGTd=key.requires_grad_())


@pytest.mark.parametrize("block_positions", [1, 2, 3, 100])
@pytest.mark.parametrize("name", OPTIONS)
def test_blocks_give_value_and_gradients_of_the_whole_map(name: str, block_positions: int) -> None:
    teacher, student = pair(name)

    found_N = blockwise(teacher, student, block_positions=block_positions)

    expected_N = exact(teacher, student)
    assert (expected_N[POSITIONS_N % T > 0] > 1e-3).all()
    torch.testing.assert_close(found_N, expected_N, rtol=1e-10, atol=1e-14)
    found, expected = gradients(found_N, student), gradients(expected_N, student)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)


def test_the_gradient_is_the_slope_of_the_value() -> None:
    teacher, student = pair("all")

    assert torch.autograd.gradcheck(
        lambda query, key: blockwise(teacher, replace(student, query_BHTd=query, key_BGTd=key)),
        tensors(student),
    )


def test_the_teacher_gets_no_gradient() -> None:
    sides = pair("plain")

    blockwise(*sides).sum().backward()

    assert [tensor.grad is None for tensor in tensors(*sides)] == [True, True, False, False]


def test_equal_sides_give_zero_and_no_gradient() -> None:
    teacher, student = (converted(pair("grouped")[0], torch.float32) for _ in range(2))

    loss_N = blockwise(teacher, student)

    assert (loss_N == 0).all()
    assert all((gradient == 0).all() for gradient in gradients(loss_N, student))


@pytest.mark.parametrize("garbage", [1e4, float("nan")])
def test_padding_has_no_influence_and_gets_no_gradient(garbage: float) -> None:
    teacher, student = pair("all")
    garbled = [converted(rows, torch.float64) for rows in (teacher, student)]
    for tensor in tensors(*garbled):
        tensor.data[1, :, LENGTHS_B[1] :] = garbage

    found_N, expected_N = blockwise(*garbled), blockwise(teacher, student)

    torch.testing.assert_close(found_N, expected_N, rtol=0, atol=0)
    found, expected = gradients(found_N, garbled[1]), gradients(expected_N, student)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert all((gradient[1, :, LENGTHS_B[1] :] == 0).all() for gradient in found)


def test_a_row_alone_is_the_same_row_in_a_batch() -> None:
    batch = pair("all")
    alone = (replace(s, query_BHTd=s.query_BHTd[1:], key_BGTd=s.key_BGTd[1:]) for s in batch)

    found_N = blockwise(*alone, query_positions_N=torch.arange(5), lengths_B=LENGTHS_B[1:])

    expected_N = blockwise(*batch, query_positions_N=T + torch.arange(5))
    torch.testing.assert_close(found_N, expected_N, rtol=0, atol=0)


@pytest.mark.parametrize("is_autocast", [False, True])
def test_bf16_sides_are_compared_in_fp32_also_under_autocast(is_autocast: bool) -> None:
    teacher, student = (converted(rows, torch.bfloat16) for rows in pair("grouped"))

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
        found_N = blockwise(teacher, student)
        found = gradients(found_N, student)

    expected_N = exact(teacher, student)
    torch.testing.assert_close(found_N, expected_N.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, gradients(expected_N, student), rtol=2**-8, atol=1e-6)


def test_no_positions_give_an_empty_loss_with_a_graph() -> None:
    teacher, student = pair("plain")

    loss_N = blockwise(teacher, student, query_positions_N=POSITIONS_N[:0])

    assert loss_N.shape == (0,)
    assert all((gradient == 0).all() for gradient in gradients(loss_N, student))


class LargestTensor(TorchDispatchMode):
    numel = 0  # of the largest tensor that any operation gave

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.numel = max([self.numel, *found])
        return result


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sliding_window": 100}])
def test_only_blocks_of_rows_exist_and_only_inputs_are_kept(options: dict[str, Any]) -> None:
    sides = [side((4, 2), num_tokens=512, **options) for _ in range(2)]
    saved: list[Tensor] = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with keep, LargestTensor() as it:
        changed = {"query_positions_N": torch.arange(1024), "lengths_B": torch.tensor([512, 512])}
        blockwise(*sides, **changed, block_positions=64).sum().backward()

    assert it.numel == 4 * 64 * min(512, 63 + options.get("sliding_window", 512))
    assert sum(map(Tensor.numel, saved)) == sum(tensor.numel() for tensor in tensors(*sides))


@pytest.mark.parametrize(
    ("teacher", "student", "changed", "message"),
    [
        ({"heads": (6, 2)}, {}, {}, "teacher has 6 query heads, student 4"),
        ({"num_tokens": 8}, {}, {}, r"\[B, H, T\] is \[2, 4, 8\], student's \[2, 4, 9\]"),
        ({}, {"sliding_window": 3}, {}, "teacher sees 9 keys, student 3"),
        ({"sliding_window": 4}, {"sliding_window": 3}, {}, "teacher sees 4 keys, student 3"),
        ({"heads": (4, 3)}, {}, {}, "4 query heads cannot share 3 key heads evenly"),
        ({"key_BGTd": torch.zeros(2, 4, 9)}, {}, {}, r"keys \[B, G, T, d\]: .*, \[2, 4, 9\]"),
        ({"key_BGTd": torch.zeros(2, 4, 8, 4)}, {}, {}, r"keys \[B, G, T, d\]: .* 8, 4\]"),
        ({"key_BGTd": torch.zeros(2, 4, 9, 3)}, {}, {}, r"keys \[B, G, T, d\]: .* 9, 3\]"),
        ({"scaling": 0.0}, {}, {}, r"need scaling > 0, softcap >= 0, got 0\.0, 0\.0"),
        ({}, {"softcap": -1.0}, {}, r"need scaling > 0, softcap >= 0, got 0\.8, -1\.0"),
        ({"sliding_window": 0}, {}, {}, "sliding_window must be >= 1 or None, got 0"),
        ({}, {}, {"block_positions": 0}, "block_positions must be >= 1, got 0"),
        ({}, {}, {"query_positions_N": torch.ones(18).bool()}, r"must be int64, got torch\.bool"),
        ({}, {}, {"query_positions_N": torch.tensor([0, -1])}, "position -1 is token 8 of row -1"),
        ({}, {}, {"query_positions_N": torch.tensor([9, 14])}, r"5 of row 1, .* have \[9, 5\]"),
        ({}, {}, {"query_positions_N": torch.tensor([0, 18])}, "position 18 is token 0 of row 2"),
        ({}, {}, {"lengths_B": LENGTHS_B[:1]}, r"are \[9\], expected 2 of at most 9"),
        ({}, {}, {"lengths_B": LENGTHS_B * 2}, r"are \[18, 10\], expected 2 of at most 9"),
    ],
)
def test_a_misfit_is_refused(teacher: Any, student: Any, changed: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        blockwise(side(**teacher), side(**student), **changed)
