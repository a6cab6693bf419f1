"""Proves on one micro-batch that a remote teacher and one in process teach the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import send_to_device

from distill_wire.codecs import CODECS
from distill_wire.types import TargetSpec
from student_trainer.collator import DistillationCollator, request_of
from student_trainer.config import DistillationConfig
from student_trainer.objective import DistillationBatch
from student_trainer.student_forward import bind_distillation_forward, real_vocab_size
from student_trainer.teachers.source import ScoredTarget, TeacherSource


def compare_sources(
    model: Any,
    remote: TeacherSource,
    local: TeacherSource,
    *,
    args: DistillationConfig,
    features: list[dict[str, Any]],
    num_tokens: int,
) -> dict[str, Any]:
    """Run one micro-batch through both teachers.

    Args:
        model: the student; it is moved to the device of `args`.
        remote: a teacher behind a URL.
        local: the same teacher in process.
        args: target and loss of the run.
        features: rows with `input_ids` and `labels`.
        num_tokens: ids of the student's tokenizer.

    Returns:
        `loss_abs_diff`, nats a token, and `bytes_per_token_by_codec`, as framed.

    Raises:
        DistillError: a teacher cannot be used.
    """
    device = args.device
    bind_distillation_forward(model.to(device))
    batch = send_to_device(DistillationCollator(pad_token_id=0)(features), device)
    remote.connect()
    local.connect()
    head = remote.fetch_head().to(device)

    def score(source: TeacherSource, spec: TargetSpec) -> ScoredTarget:
        request, sample_ids = request_of(batch, spec)
        return source.submit(request, sample_ids=sample_ids).result()

    @torch.no_grad()
    def loss(scored: ScoredTarget) -> float:
        distillation = DistillationBatch(
            positions_N=batch["positions"],
            gold_ids_N=batch["gold_ids"],
            target=scored.target.to(device),
            num_items=len(batch["positions"]),
            config=args.objective_config(vocab_size=real_vocab_size(model, num_tokens)),
            teacher_head=head,
        )
        outputs = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            distillation=distillation,
        )
        return float(outputs["loss"])

    spec = args.train_target_spec()
    sizes = {}
    for codec in CODECS.values():
        top_k, num_draws = args.teacher_top_k, args.teacher_num_draws
        every = replace(spec, codec=codec.id, top_k=top_k, num_draws=num_draws)
        answer = score(remote, every)
        sizes[codec.name] = answer.answer_bytes / len(batch["positions"])
    return {
        "loss_abs_diff": abs(loss(score(remote, spec)) - loss(score(local, spec))),
        "bytes_per_token_by_codec": sizes,
    }
