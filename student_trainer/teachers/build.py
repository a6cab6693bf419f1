"""The teacher a configuration names. Loaded or pointed at here, connected by the trainer."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill_wire.handshake import token_map_of
from student_trainer.config import DistillationConfig
from student_trainer.teachers.local import LocalTeacher
from student_trainer.teachers.remote import RemoteTeacher
from student_trainer.teachers.source import TeacherSource


def build_teacher(args: DistillationConfig) -> TeacherSource | None:
    """Build the teacher that `args` name, None if they name none."""
    if args.teacher_url:
        return RemoteTeacher(
            args.teacher_url,
            num_threads=args.teacher_prefetch + 1,
            connect_timeout_s=args.teacher_connect_timeout_s,
            ready_timeout_s=args.teacher_ready_timeout_s,
            request_timeout_s=args.teacher_timeout_s,
            max_outage_s=args.teacher_max_outage_s,
        )
    if args.teacher_model_name_or_path:
        name, dtype = args.teacher_model_name_or_path, args.teacher_dtype
        return LocalTeacher(
            AutoModelForCausalLM.from_pretrained(
                name, dtype=dtype if dtype == "auto" else getattr(torch, dtype)
            ),
            token_map=token_map_of(AutoTokenizer.from_pretrained(name)),
            device=args.device,
            is_sharded=args.world_size > 1,
            head_chunk_tokens=args.loss_chunk_positions,
            keeps_head=args.needs_teacher_head,
        )
    return None
