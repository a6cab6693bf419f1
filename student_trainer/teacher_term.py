"""The distillation term of a chunk of positions, whatever codec the teacher's word came in.

The one place of the student that knows what each codec's decoded tensors mean.

Shapes: N = positions, n = positions of a chunk, V = real tokens, B = buckets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distill_wire.codecs.hidden import restore_states
from distill_wire.head import TeacherHead
from distill_wire.targets import TeacherTarget
from distill_wire.types import CodecId
from student_trainer.losses import generalized_jsd, log_buckets, sampled_forward_kl


def divergence_of(
    logits_nV: Tensor,
    target: TeacherTarget,
    rows: slice,
    *,
    beta: float,
    teacher_head: TeacherHead | None,
) -> tuple[Tensor, Tensor]:
    """Compare the student's logits with the teacher.

    Args:
        logits_nV: the student's logits of a chunk, fp32, real tokens only.
        target: the teacher's word on all positions.
        rows: which positions the chunk holds.
        beta: 0 = forward KL, 1 = reverse KL, between = JSD(beta).
        teacher_head: needed for hidden states.

    Returns:
        Per position the divergence at the target's temperature, nats, without T^2; and
        the teacher's most likely token, int64.
    """
    temperature, tensors = target.spec.temperature, target.tensors
    if target.spec.codec is CodecId.THRESHOLD:
        divergence_n = sampled_forward_kl(
            logits_nV,
            tensors["token_ids"][rows],
            tensors["weights"][rows],
            target.entropy_N[rows],
            temperature=temperature,
        )
        return divergence_n, tensors["best_ids"][rows]
    if target.spec.codec is CodecId.TOPK:
        teacher_nB = torch.cat([tensors["logprobs"][rows], tensors["tail_logprob"][rows, None]], -1)
        student_nB = log_buckets(logits_nV, tensors["token_ids"][rows], temperature=temperature)
        best_n = tensors["best_ids"][rows]
    else:
        teacher_logits_nV = _teacher_logits(target, rows, teacher_head)
        teacher_nB = (teacher_logits_nV / temperature).log_softmax(-1)
        student_nB = log_buckets(logits_nV, None, temperature=temperature)
        best_n = teacher_logits_nV.argmax(-1)
    return generalized_jsd(teacher_nB, student_nB, beta=beta), best_n


def _teacher_logits(target: TeacherTarget, rows: slice, head: TeacherHead | None) -> Tensor:
    tensors = target.tensors
    if target.spec.codec is CodecId.DENSE:
        return tensors["logits"][rows].float()
    assert head is not None, "hidden states came without the head that reads them"
    codes_nD, scale_n1 = tensors["hidden"][rows], tensors["hidden_scale"][rows]
    return head.logits(restore_states(codes_nD, scale_n1, width=codes_nD.shape[-1]))
