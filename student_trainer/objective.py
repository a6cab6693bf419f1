"""What one forward pass of the student minimises.

    loss = (alpha_kd * T^2 * sum D(teacher, student) + alpha_ce * sum CE
            + alpha_hidden * sum mean over layers H) / num_items

D is JSD(beta), forward KL by default; H compares hidden states of mapped layers. T^2 keeps the soft
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
from torch import Tensor, nn

from distill_wire.causal_lm import CausalLMParts, transform_logits
from distill_wire.codecs.hidden import restore_states
from distill_wire.head import TeacherHead
from distill_wire.targets import TeacherTarget
from student_trainer.losses import chunked_loss, hidden_cosine, hidden_mse
from student_trainer.teacher_term import divergence_of

HIDDEN_LOSSES = {"mse": hidden_mse, "cosine": hidden_cosine}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """Weights and shape of the loss."""

    alpha_kd: float
    """Weight of the distillation term."""

    alpha_ce: float
    """Weight of the cross-entropy with the data's own next tokens."""

    alpha_hidden: float
    """Weight of the hidden-state term."""

    hidden_loss: str
    """A key of HIDDEN_LOSSES."""

    layer_map: tuple[tuple[int, int], ...]
    """Teacher and student layer of each hidden-state pair; 0 is the embedding output."""

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
        teacher_head: the teacher's output head, if the target is hidden states.
    """

    positions_N: Tensor
    gold_ids_N: Tensor
    target: TeacherTarget | None
    num_items: Tensor | float
    config: ObjectiveConfig
    teacher_head: TeacherHead | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class StudentStates:
    """What the student's trunk gave.

    Attributes:
        last_BTD: last hidden states after the final norm.
        layers: by index, [B, T, D], those of the layer map.
        projections: by student layer, from its width to the teacher's, where they differ.
    """

    last_BTD: Tensor
    layers: dict[int, Tensor]
    projections: dict[int, nn.Linear]


def compute_objective(
    states: StudentStates, parts: CausalLMParts, batch: DistillationBatch
) -> dict[str, Tensor]:
    """Compute the loss of a micro-batch and its parts.

    Args:
        states: what the student's trunk gave.
        parts: the student's head and logit transform.
        batch: positions, gold ids, target and divisor.

    Returns:
        `loss`, a scalar with a graph, and per position, without gradient and weights:
        `ce_N`; with a target `kd_N` (with T^2) and `is_top1_N` (the student's best token is
        the teacher's best); with a layer map `hidden_N`, the mean over its layers.
    """
    config, target = batch.config, batch.target
    hidden_ND = states.last_BTD.flatten(0, 1).index_select(0, batch.positions_N)
    head = _open_head(parts, hidden_ND, vocab_size=config.vocab_size)

    def chunk_loss(hidden_nD: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        logits_nV = head(hidden_nD)
        ce_n = F.cross_entropy(logits_nV, batch.gold_ids_N[rows], reduction="none")
        values = {"ce_N": ce_n}
        loss = config.alpha_ce * ce_n.sum()
        if target is not None:
            divergence_n, best_n = divergence_of(
                logits_nV, target, rows, beta=config.beta, teacher_head=batch.teacher_head
            )
            values["kd_N"] = divergence_n * target.spec.temperature**2
            values["is_top1_N"] = logits_nV.argmax(-1) == best_n
            loss = loss + config.alpha_kd * values["kd_N"].sum()
        return loss / batch.num_items, values

    loss, values = chunked_loss(
        hidden_ND,
        chunk_loss,
        head_parameters=list(parts.head.parameters()),
        chunk_positions=config.chunk_positions,
    )
    if target is not None and config.layer_map:
        hidden_loss, values["hidden_N"] = _hidden_term(states, target, batch)
        loss = loss + hidden_loss
    return {"loss": loss, **values}


def _hidden_term(
    states: StudentStates, target: TeacherTarget, batch: DistillationBatch
) -> tuple[Tensor, Tensor]:
    config = batch.config
    measure = HIDDEN_LOSSES[config.hidden_loss]
    total = torch.zeros((), device=states.last_BTD.device)
    values: list[Tensor] = []
    for teacher_layer, student_layer in config.layer_map:
        codes, scale = target.states[teacher_layer]
        projection = states.projections.get(student_layer)
        width = len(projection.weight) if projection else states.last_BTD.shape[-1]

        def chunk_loss(
            student_nD: Tensor,
            rows: slice,
            *,
            codes: Tensor = codes,
            scale: Tensor = scale,
            projection: nn.Linear | None = projection,
            width: int = width,
        ) -> tuple[Tensor, dict[str, Tensor]]:
            teacher_nD = restore_states(codes[rows], scale[rows], width=width)
            if projection is not None:
                student_nD = projection(student_nD.to(projection.weight.dtype))
            value_n = measure(teacher_nD, student_nD)
            weight = config.alpha_hidden / len(config.layer_map)
            return weight * value_n.sum() / batch.num_items, {"hidden_N": value_n}

        layer_ND = states.layers[student_layer].flatten(0, 1).index_select(0, batch.positions_N)
        loss, found = chunked_loss(
            layer_ND,
            chunk_loss,
            head_parameters=list(projection.parameters()) if projection else [],
            chunk_positions=config.chunk_positions,
        )
        total = total + loss
        values.append(found["hidden_N"])
    return total, torch.stack(values).mean(0)


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
