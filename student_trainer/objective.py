"""What one forward pass of the student minimises.

    loss = (alpha_kd * T^2 * sum D(teacher, student) + alpha_ce * sum CE) / num_items

D is JSD(beta) on the teacher's buckets, forward KL by default. T^2 keeps the soft
term's gradient at the scale of T = 1 (Hinton et al. 2015, arXiv 1503.02531, section
2.1); it is applied here, once, and is part of the logged `kd_loss`. num_items is the
count of supervised positions over all ranks and accumulation steps, so the loss does
not depend on how a batch is cut.

Shapes: B = rows, T = padded length, N = supervised positions, V = real tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from distill_wire.causal_lm import CausalLMParts, transform_logits
from distill_wire.targets import TeacherTarget
from distill_wire.types import CodecId
from student_trainer.losses import chunked_loss, generalized_jsd, log_buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """Weights and shape of the loss."""

    alpha_kd: float
    """Weight of the distillation term."""

    alpha_ce: float
    """Weight of the cross-entropy with the data's own next tokens."""

    beta: float
    """0 = forward KL, 1 = reverse KL, between = JSD(beta)."""

    chunk_positions: int
    """Positions whose logits exist at once."""

    vocab_size: int
    """Real tokens; head rows beyond are cut off before the softmax."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DistillationBatch:
    """What the objective needs beside the hidden states.

    Deliberately neither a tuple nor a dict: FSDP2 casts every floating-point tensor it
    finds in a forward's arguments to the compute dtype, and bf16 teacher log-probabilities
    would be wrong in the third digit. It does not look inside an unknown class.

    Attributes:
        positions_N: int64 indices into the flattened [B * T] hidden states.
        gold_ids_N: int64, the token that follows each position.
        target: the teacher's word on the same N positions; None = cross-entropy only.
        num_items: the loss divisor, > 0.
        config: weights of the terms.
    """

    positions_N: Tensor
    gold_ids_N: Tensor
    target: TeacherTarget | None
    num_items: Tensor | float
    config: ObjectiveConfig


def compute_objective(
    hidden_BTD: Tensor, parts: CausalLMParts, batch: DistillationBatch
) -> dict[str, Tensor]:
    """Compute the loss of a micro-batch and its parts.

    Args:
        hidden_BTD: last hidden states after the final norm.
        parts: the student's head and logit transform.
        batch: positions, gold ids, target and divisor.

    Returns:
        `loss`, a scalar with a graph, and per position, without gradient and weights:
        `ce_N`, and with a target `kd_N` (with T^2) and `is_top1_N` (the student's best
        token is the teacher's best).
    """
    config, target = batch.config, batch.target
    hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, batch.positions_N)
    head = _open_head(parts, hidden_ND, vocab_size=config.vocab_size)

    def chunk_loss(hidden_nD: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        logits_nV = head(hidden_nD)
        ce_n = F.cross_entropy(logits_nV, batch.gold_ids_N[rows], reduction="none")
        values = {"ce_N": ce_n}
        loss = config.alpha_ce * ce_n.sum()
        if target is not None:
            teacher_nB, student_nB = _buckets(logits_nV, target, rows)
            divergence_n = generalized_jsd(teacher_nB, student_nB, beta=config.beta)
            values["kd_N"] = divergence_n * target.spec.temperature**2
            values["is_top1_N"] = logits_nV.argmax(-1) == _best_token(target, rows)
            loss = loss + config.alpha_kd * values["kd_N"].sum()
        return loss / batch.num_items, values

    loss, values = chunked_loss(
        hidden_ND,
        chunk_loss,
        head_parameters=list(parts.head.parameters()),
        chunk_positions=config.chunk_positions,
    )
    return {"loss": loss, **values}


def _open_head(
    parts: CausalLMParts, hidden_ND: Tensor, *, vocab_size: int
) -> Callable[[Tensor], Tensor]:
    """Give hidden [n, D] -> fp32 logits [n, V], past the module hooks of FSDP2.

    One empty call through the hooks gathers the head's weights and ends its turn in the
    forward. The chunks then call `forward` itself: their gradients are taken at once, and a
    hook would take that for the start of the backward pass and gather the layers, as often
    as there are chunks, which differ from rank to rank.
    """
    with torch.no_grad():
        parts.head(hidden_ND[:0])

    def head(hidden_nD: Tensor) -> Tensor:
        return transform_logits(
            parts.head.forward(hidden_nD), parts.transform, vocab_size=vocab_size
        )

    return head


def _buckets(logits_nV: Tensor, target: TeacherTarget, rows: slice) -> tuple[Tensor, Tensor]:
    temperature, tensors = target.spec.temperature, target.tensors
    if target.spec.codec is CodecId.DENSE:
        teacher_nV = (tensors["logits"][rows].float() / temperature).log_softmax(-1)
        return teacher_nV, log_buckets(logits_nV, None, temperature=temperature)
    teacher_nB = torch.cat([tensors["logprobs"][rows], tensors["tail_logprob"][rows, None]], -1)
    token_ids_nK = tensors["token_ids"][rows]
    return teacher_nB, log_buckets(logits_nV, token_ids_nK, temperature=temperature)


def _best_token(target: TeacherTarget, rows: slice) -> Tensor:
    if target.spec.codec is CodecId.DENSE:
        return target.tensors["logits"][rows].argmax(-1)
    return target.tensors["token_ids"][rows, 0]
