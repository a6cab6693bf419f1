"""KL between attention rows of teacher and student, without an attention map.

Under flash attention the maps do not exist, and must not: 4 rows of 4,096 tokens and 32 heads
are 4.3 GB a layer and model in bf16. Here the rows of a block of query positions are made from
queries and keys, compared and dropped; ten fp32 buffers of [H, n, K] live at the peak. The
backward pass makes them again, because a key's gradient sums over positions whose weights are
known only there. Arithmetic is fp32 whatever arrives, also under autocast.

Shapes: B = batch rows, H = query heads, G = key heads (H % G == 0), T = padded length,
d = head width, N = positions asked for, n = those of a block, K = keys that a block sees,
M = H / G * n, the queries of a block that share a key head.
Source: Wang et al. 2020 (MiniLM, arXiv 2002.10957) for the KL of attention rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from student_trainer.losses.divergence import kl_divergence

_Rule = tuple[float, float, int | None]  # scaling, softcap, sliding window


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionRows:
    """One side's queries and keys of a layer, as they enter the product (after the rotation).

    Attributes:
        query_BHTd: any float dtype.
        key_BGTd: query head h reads key head h // (H / G), as transformers' repeat_kv does.
        scaling: factor of the product, > 0; d ** -0.5 in most models.
        softcap: c of c * tanh(score / c), taken after the factor; 0 = none.
        sliding_window: keys that a query sees, itself included; None = all up to itself.

    Raises:
        ValueError: the shapes do not fit each other, or a number is out of range.
    """

    query_BHTd: Tensor
    key_BGTd: Tensor
    scaling: float
    softcap: float = 0.0
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        query, key = list(self.query_BHTd.shape), list(self.key_BGTd.shape)
        if len(query) != 4 or len(key) != 4 or query[::2] != key[::2] or query[3] != key[3]:
            raise ValueError(f"expected queries [B, H, T, d], keys [B, G, T, d]: {query}, {key}")
        if query[1] % key[1] != 0:
            raise ValueError(f"{query[1]} query heads cannot share {key[1]} key heads evenly")
        if not (self.scaling > 0 and self.softcap >= 0):
            raise ValueError(f"need scaling > 0, softcap >= 0, got {self.scaling}, {self.softcap}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be >= 1 or None, got {self.sliding_window}")


def attention_kl(
    teacher: AttentionRows,
    student: AttentionRows,
    *,
    query_positions_N: Tensor,
    lengths_B: Tensor,
    block_positions: int,
) -> Tensor:
    """KL(teacher row || student row) per query position, the mean over heads.

    Causal. Padding is on the right and is never read, not even where it is NaN.

    Args:
        teacher: gets no gradient.
        student: the same B, H and T; G and d may differ.
        query_positions_N: int64 into the flattened [B * T], in any order.
        lengths_B: int, real tokens of each row, 0..T. Both are read on the host.
        block_positions: query positions of one row worked on at once, >= 1; sets peak memory.

    Returns:
        [N] float32 (float64 for a float64 student), nats, >= 0; with a graph even for N = 0.

    Raises:
        ValueError: the sides do not fit each other, a position is no real token, block_positions
            is < 1, or the student's window hides keys that the teacher sees (an infinite KL).
    """
    _check_sides(teacher, student)
    result_N: Tensor = _AttentionKL.apply(  # type: ignore[no-untyped-call]
        [(s.scaling, s.softcap, s.sliding_window) for s in (student, teacher)],
        _cut(student, query_positions_N, lengths_B, block_positions),
        *(student.query_BHTd, student.key_BGTd),
        *(teacher.query_BHTd.detach(), teacher.key_BGTd.detach()),
    )
    return result_N


class _Block(NamedTuple):
    row: int
    results_n: Tensor  # which of the N
    tokens_n: Tensor  # within the row, ascending
    keys: slice  # all that one of its queries sees


class _AttentionKL(torch.autograd.Function):
    """Of rules and tensors (queries, keys) the student's come first. d KL / d score = q - p."""

    @staticmethod
    def forward(ctx: Any, rules: list[_Rule], blocks: list[_Block], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.rules, ctx.blocks = rules, blocks
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        result_N = tensors[0].new_empty(sum(len(b.results_n) for b in blocks), dtype=dtype)
        for block in blocks:
            log_q_HnK = _attend(tensors[:2], block, rules[0], dtype)[0]
            log_p_HnK = _attend(tensors[2:], block, rules[1], dtype)[0]
            result_N[block.results_n] = kl_divergence(log_p_HnK, log_q_HnK).mean(0)
        return result_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        student, teacher = ctx.saved_tensors[:2], ctx.saved_tensors[2:]
        (rule, teacher_rule), dtype = ctx.rules, grad_N.dtype
        grad_query_BHTd, grad_key_BGTd = (torch.zeros_like(tensor) for tensor in student)
        for row, blocks in groupby(ctx.blocks, key=lambda block: block.row):
            # Sums over blocks are fp32, held for one row of the batch at a time.
            query_sum_HTd = torch.zeros_like(grad_query_BHTd[row], dtype=dtype)
            key_sum_GTd = torch.zeros_like(grad_key_BGTd[row], dtype=dtype)
            for block in blocks:
                p_HnK = _attend(teacher, block, teacher_rule, dtype)[0].exp_()
                log_q_HnK, slope_HnK, query_GMd, key_GKd = _attend(student, block, rule, dtype)
                weight_n1 = grad_N[block.results_n, None] * (rule[0] / len(p_HnK))
                grad_HnK = log_q_HnK.exp_().sub_(p_HnK).mul_(slope_HnK).mul_(weight_n1)
                grad_GMK = grad_HnK.view(len(key_GKd), -1, key_GKd.shape[1])
                query_grad_Hnd = _product(grad_GMK, key_GKd).view(*grad_HnK.shape[:2], -1)
                query_sum_HTd.index_add_(1, block.tokens_n, query_grad_Hnd)
                key_sum_GTd[:, block.keys] += _product(grad_GMK.mT, query_GMd)
            grad_query_BHTd[row], grad_key_BGTd[row] = query_sum_HTd, key_sum_GTd
        return None, None, grad_query_BHTd, grad_key_BGTd, None, None


def _attend(
    tensors: Sequence[Tensor], block: _Block, rule: _Rule, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give log attention rows [H, n, K], the cap's slope, queries [G, M, d], keys [G, K, d]."""
    (query_BHTd, key_BGTd), (scaling, softcap, window) = tensors, rule
    query_Hnd = query_BHTd[block.row].index_select(1, block.tokens_n).to(dtype)
    key_GKd = key_BGTd[block.row, :, block.keys].to(dtype)
    query_GMd = query_Hnd.reshape(len(key_GKd), -1, query_Hnd.shape[-1])
    scores_HnK = _product(query_GMd, key_GKd.mT).view(*query_Hnd.shape[:2], -1).mul_(scaling)
    slope_HnK = scores_HnK.new_ones(1)
    if softcap:
        scores_HnK.div_(softcap).tanh_()
        slope_HnK = 1.0 - scores_HnK.square()
        scores_HnK.mul_(softcap)
    keys_K = torch.arange(block.keys.start, block.keys.stop, device=key_GKd.device)
    distance_nK = block.tokens_n[:, None] - keys_K
    is_hidden_nK = distance_nK < 0
    if window is not None:
        is_hidden_nK |= distance_nK >= window
    log_rows_HnK = scores_HnK.masked_fill_(is_hidden_nK, -torch.inf).log_softmax(-1)
    return log_rows_HnK, slope_HnK, query_GMd, key_GKd


def _product(left: Tensor, right: Tensor) -> Tensor:
    # Autocast would take the product of fp32 tensors in bf16.
    with torch.autocast(left.device.type, enabled=False):
        return left @ right


def _check_sides(teacher: AttentionRows, student: AttentionRows) -> None:
    found, expected = list(teacher.query_BHTd.shape[:3]), list(student.query_BHTd.shape[:3])
    if found[1] != expected[1]:
        raise ValueError(
            f"teacher has {found[1]} query heads, student {expected[1]}; rows are compared head "
            f"by head: use a student with {found[1]} or no attention term"
        )
    if found != expected:
        raise ValueError(f"teacher's [B, H, T] is {found}, student's {expected}: use one batch")
    seen, visible = (min(s.sliding_window or found[2], found[2]) for s in (teacher, student))
    if seen > visible:
        raise ValueError(
            f"KL is infinite: teacher sees {seen} keys, student {visible}; pair layers otherwise"
        )


def _cut(
    rows: AttentionRows, positions_N: Tensor, lengths_B: Tensor, block_positions: int
) -> list[_Block]:
    if block_positions < 1:
        raise ValueError(f"block_positions must be >= 1, got {block_positions}")
    if positions_N.dtype != torch.int64:
        raise ValueError(f"query positions must be int64, got {positions_N.dtype}")
    num_rows, _, num_tokens, _ = rows.query_BHTd.shape
    sorted_N, order_N = positions_N.sort()
    positions, lengths = sorted_N.tolist(), lengths_B.tolist()
    if len(lengths) != num_rows or max(lengths) > num_tokens:
        raise ValueError(f"lengths are {lengths}, expected {num_rows} of at most {num_tokens}")
    blocks: list[_Block] = []
    first = 0
    while first < len(positions):
        row, earliest = divmod(positions[first], num_tokens)
        row_end = bisect_left(positions, (row + 1) * num_tokens, first)
        stop = min(row_end, first + block_positions)
        latest = positions[stop - 1] % num_tokens
        if not 0 <= row < num_rows or latest >= lengths[row]:
            raise ValueError(
                f"query position {positions[stop - 1]} is token {latest} of row {row}, no real "
                f"token; the rows have {lengths}"
            )
        # The student's window reaches as far back as the teacher's, or both reach token 0.
        start = max(0, earliest + 1 - (rows.sliding_window or num_tokens))
        tokens_n = sorted_N[first:stop] - row * num_tokens
        blocks.append(_Block(row, order_N[first:stop], tokens_n, slice(start, latest + 1)))
        first = stop
    return blocks
