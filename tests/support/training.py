"""Small distillation runs in this process, on rows of random ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill_wire.handshake import token_map_of
from student_trainer import DistillationConfig, DistillationTrainer, LocalTeacher
from student_trainer.teachers.source import TeacherSource

IGNORE = -100


def make_lora() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def random_rows(
    lengths: Sequence[int], *, vocab_size: int = 64, seed: int = 0
) -> list[dict[str, Any]]:
    """Make rows whose first third is a prompt."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index, length in enumerate(lengths):
        ids = torch.randint(3, vocab_size, (length,), generator=generator).tolist()
        labels = [IGNORE] * (length // 3) + ids[length // 3 :]
        rows.append({"input_ids": ids, "labels": labels, "sample_id": f"sample-{index}"})
    return rows


def local_teacher(folder: Path, *, is_sharded: bool = False) -> LocalTeacher:
    return LocalTeacher(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        token_map=token_map_of(AutoTokenizer.from_pretrained(folder)),
        device=torch.device("cpu"),
        is_sharded=is_sharded,
        head_chunk_tokens=7,
    )


def make_args(output_dir: Path, **overrides: Any) -> DistillationConfig:
    """Give plain CPU arguments: one row a micro-batch, constant rate, a log every step."""
    fields: dict[str, Any] = {
        "output_dir": str(output_dir),
        "teacher_model_name_or_path": "in this process",
        "teacher_codec": "topk",
        "teacher_top_k": 8,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 2,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "loss_chunk_positions": 5,
        "seed": 0,
    }
    return DistillationConfig(**(fields | overrides))


def make_trainer(
    student: Path,
    teacher: TeacherSource | None,
    args: DistillationConfig,
    rows: Sequence[dict[str, Any]],
    *,
    eval_rows: Sequence[dict[str, Any]] | None = None,
    uses_lora: bool = True,
    dtype: torch.dtype = torch.float32,
) -> DistillationTrainer:
    return DistillationTrainer(
        model=AutoModelForCausalLM.from_pretrained(student, dtype=dtype),
        args=args,
        train_dataset=list(rows),
        eval_dataset=list(eval_rows) if eval_rows is not None else None,
        processing_class=AutoTokenizer.from_pretrained(student),
        peft_config=make_lora() if uses_lora else None,
        teacher=teacher,
    )


def first_gradients(
    trainer: DistillationTrainer, rows: Sequence[dict[str, Any]], *, num_micro_batches: int
) -> tuple[float, dict[str, torch.Tensor]]:
    """Run one optimizer step's backward passes over `rows`; give loss and gradients."""
    size = len(rows) // num_micro_batches
    collate = trainer.data_collator
    batches = iter([collate(rows[i : i + size]) for i in range(0, len(rows), size)])
    micro_batches, num_items = trainer.get_batch_samples(
        batches, num_micro_batches, torch.device("cpu")
    )
    trainer.current_gradient_accumulation_steps = num_micro_batches
    loss = sum(
        float(trainer.training_step(trainer.model, batch, num_items)) for batch in micro_batches
    )
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.grad is not None
    }
    trainer.model.zero_grad()
    return loss, gradients
