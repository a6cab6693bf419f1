"""Builds a distillation run from its configuration, runs it and saves what was learned."""

from __future__ import annotations

import json
import logging
import resource
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.logging import disable_progress_bar

from student_trainer.config import DataConfig, DistillationConfig, ModelConfig
from student_trainer.data import load_supervised_dataset
from student_trainer.parallel import leave_together, parallelism_name
from student_trainer.trainer import DistillationTrainer

logger = logging.getLogger(__name__)


def train(args: DistillationConfig, model_args: ModelConfig, data_args: DataConfig) -> None:
    """Train, evaluate before and after, and save the student under `output_dir`.

    Writes `run.json` beside the student: world size, parallelism, peak memory of the
    ranks and the log history.

    Raises:
        ValueError: a required field is missing or does not fit.
        DistillError: the teacher cannot be used.
    """
    if args.process_index:
        disable_progress_bar()
    if not model_args.model_name_or_path or not data_args.dataset_name:
        raise ValueError("model_name_or_path and dataset_name are required; set both")
    tokenizer = AutoTokenizer.from_pretrained(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        trust_remote_code=model_args.trust_remote_code,
    )
    trainer = DistillationTrainer(
        model=load_student(model_args),
        args=args,
        train_dataset=load_data(args, data_args, tokenizer, is_training=True),
        eval_dataset=(
            load_data(args, data_args, tokenizer, is_training=False)
            if data_args.dataset_test_split
            else None
        ),
        processing_class=tokenizer,
        peft_config=lora_config(model_args),
    )
    try:
        _run(trainer)
    finally:
        trainer.close()
    leave_together(trainer.accelerator)


def load_student(model_args: ModelConfig) -> nn.Module:
    """Load the student in its dtype."""
    dtype: Any = model_args.dtype
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        attn_implementation=model_args.attn_implementation,
        trust_remote_code=model_args.trust_remote_code,
    )
    return model


def load_data(
    args: DistillationConfig,
    data_args: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_training: bool,
) -> Any:
    """Load the training or the held-out split, tokenised and labelled."""
    name = data_args.dataset_name
    if not is_training:
        name = data_args.eval_dataset_name or name
    dataset, summary = load_supervised_dataset(
        name,
        split=data_args.dataset_train_split if is_training else data_args.dataset_test_split,
        tokenizer=tokenizer,
        max_length=data_args.max_length,
        num_samples=data_args.num_train_samples if is_training else data_args.num_eval_samples,
        dataset_config=data_args.dataset_config,
        seed=args.data_seed or args.seed,
    )
    logger.info("%s data: %s", "training" if is_training else "held-out", summary)
    return dataset


def lora_config(model_args: ModelConfig) -> LoraConfig | None:
    """Build the adapters' configuration, None for full training."""
    if not model_args.use_peft:
        return None
    modules = model_args.lora_target_modules
    return LoraConfig(
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules="all-linear" if modules == ["all-linear"] else modules,
        task_type="CAUSAL_LM",
    )


def _run(trainer: DistillationTrainer) -> None:
    args = trainer.args
    checkpoint: str | None = args.resume_from_checkpoint
    if checkpoint in ("last", "true", "True"):
        checkpoint = get_last_checkpoint(args.output_dir)
        if checkpoint is None:
            raise ValueError(
                f"resume_from_checkpoint is set but {args.output_dir} has no checkpoint"
            )
    trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    trainer.save_model()
    peaks = trainer.accelerator.gather(
        torch.tensor([_peak_memory_gib()], device=args.device, dtype=torch.float64)
    )
    if trainer.is_world_process_zero():
        run = {
            "world_size": args.world_size,
            "parallelism": parallelism_name(trainer.accelerator),
            "transport": "grpc" if args.teacher_url else "in_process",
            "steps": trainer.state.global_step,
            "peak_rank_rss_gib": float(peaks.max()),
            "log_history": trainer.state.log_history,
        }
        path = Path(str(args.output_dir)) / "run.json"
        path.write_text(json.dumps(run, indent=1), encoding="utf-8")


def _peak_memory_gib() -> float:
    # Linux gives ru_maxrss in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
