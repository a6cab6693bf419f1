"""A Hugging Face `Trainer` that learns from a teacher elsewhere.

What it changes of `Trainer`, and why, in the order of a step:

    get_batch_samples      draws micro-batches ahead and sends each to the teacher
    _get_num_items_in_batch  counts supervised positions over ranks and accumulation
    compute_loss           waits for the answer, runs the student with the loss inside
    log                    adds the step's parts: losses, waits, bytes, tokens/s
    evaluation_loop        held-out CE, KL to the teacher and top-1 agreement

Everything else (FSDP2, DDP, accumulation, checkpoints, resume, callbacks, loggers) is
the library's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    PreTrainedTokenizerBase,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    set_seed,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput

from distill_wire.handshake import check_vocabulary, token_map_fingerprint, token_map_of
from distill_wire.head import TeacherHead
from distill_wire.targets import TeacherTarget
from distill_wire.types import TargetSpec
from student_trainer.collator import ROWS, DistillationCollator
from student_trainer.config import DistillationConfig
from student_trainer.evaluation import per_row_sums, summarise
from student_trainer.hidden_states import (
    LayerMap,
    add_projections,
    has_projections,
    layer_map,
    load_projections,
    save_projections,
    without_projections,
)
from student_trainer.metrics import StepMetrics
from student_trainer.objective import DistillationBatch
from student_trainer.parallel import keep_losses_in_fp32, present_cpu_ranks_for_fsdp
from student_trainer.progress import DistillationProgress
from student_trainer.student_forward import bind_distillation_forward, real_vocab_size
from student_trainer.teachers.build import build_teacher
from student_trainer.teachers.prefetch import PENDING, Prefetcher, PrefetchingLoader
from student_trainer.teachers.source import TeacherSource

logger = logging.getLogger(__name__)


class DistillationTrainer(Trainer):
    """Trains a causal LM on the distributions of a teacher."""

    args: DistillationConfig

    def __init__(
        self,
        model: nn.Module,
        args: DistillationConfig,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: PeftConfig | None = None,
        teacher: TeacherSource | None = None,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        """Build a trainer and shake hands with the teacher.

        Args:
            model: the student, a causal LM or a PEFT model around one.
            args: training arguments.
            train_dataset: rows with `input_ids`, `labels` and optionally `sample_id`.
            eval_dataset: the same, held out.
            processing_class: the student's tokenizer; its map is compared with the teacher's.
            peft_config: wraps the model in adapters.
            teacher: where targets come from, the one that `args` name by default. It is
                connected here and closed by `close`.
            callbacks: as in `Trainer`.

        Raises:
            ValueError: the model cannot compute its loss in chunks.
            DistillError: the teacher cannot be reached or is another one than needed.
        """
        if peft_config is not None:
            # `Trainer` seeds only after this: adapters would start elsewhere in every run.
            set_seed(args.seed)
            model = get_peft_model(model, peft_config)
        bind_distillation_forward(model)
        tokens = token_map_of(processing_class) if processing_class is not None else ()
        self._student_tokens = tokens
        self._vocab_size = real_vocab_size(model, len(tokens))
        self._layer_map: LayerMap = ()
        self._teacher_head: TeacherHead | None = None
        self._prefetcher: tuple[Iterator[Any], Prefetcher] | None = None
        super().__init__(
            model=model,
            args=args,
            data_collator=DistillationCollator(pad_token_id=_pad_token_id(processing_class)),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
        )
        # The loss is divided by the global count here, so `Trainer` must not divide again.
        self.model_accepts_loss_kwargs = True
        self.step_metrics = StepMetrics(device=args.device)
        if self.pop_callback(ProgressCallback):
            self.add_callback(DistillationProgress)
        self.teacher = teacher or build_teacher(args)
        if self.teacher is not None:
            self._shake_hands(self.teacher)

    def create_accelerator_and_postprocess(self) -> None:
        """Build the accelerator; FSDP2 also on CPU, with the loss kept in fp32."""
        present_cpu_ranks_for_fsdp(self.args)
        super().create_accelerator_and_postprocess()
        keep_losses_in_fp32(self.accelerator)

    def close(self) -> None:
        """Close the teacher."""
        if self.teacher is not None:
            self.teacher.close()

    def _shake_hands(self, teacher: TeacherSource) -> None:
        description = teacher.connect()
        endpoint = self.args.teacher_url or description.model_id
        own_fingerprint = token_map_fingerprint(self._student_tokens)
        is_other_map = description.token_map_fingerprint not in ("", own_fingerprint)
        check_vocabulary(
            description,
            endpoint=endpoint,
            student_tokens=self._student_tokens,
            student_vocab_size=self._vocab_size,
            teacher_tokens=teacher.token_map() if is_other_map else (),
            is_map_checked=self.args.teacher_check_token_map,
        )
        logger.info("teacher at %s: %s", endpoint, description)
        if self.args.needs_teacher_head:
            self._teacher_head = teacher.fetch_head().to(self.args.device)
        if self.args.alpha_hidden > 0:
            self._layer_map = layer_map(
                self.args.hidden_layers,
                num_teacher_layers=description.num_layers,
                num_student_layers=_num_layers(self.model),
            )
            add_projections(self.model, self._layer_map, teacher_width=description.hidden_size)

    # ---- a training step ----

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Take the step's micro-batches; requests for later ones are under way already."""
        self.step_metrics.begin_step()
        if self.teacher is not None:
            # One prefetcher an epoch: the trainer makes a new iterator for each.
            if self._prefetcher is None or self._prefetcher[0] is not epoch_iterator:
                prefetcher = self._prefetch(epoch_iterator, self._train_target_spec())
                self._prefetcher = epoch_iterator, prefetcher
            epoch_iterator = self._prefetcher[1]
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _train_target_spec(self) -> TargetSpec:
        # Other draws in every epoch, the same ones after a resume.
        return replace(
            self.args.train_target_spec(),
            seed=(self.args.seed * 2**32 + int(self.state.epoch or 0)) % 2**64,
            hidden_layers=tuple(teacher for teacher, _ in self._layer_map),
        )

    def _prefetch(self, batches: Iterator[Any], target: TargetSpec) -> Prefetcher:
        assert self.teacher is not None
        depth = self.args.teacher_prefetch
        return Prefetcher(batches, source=self.teacher, target=target, depth=depth)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor:
        # Own count: releases of transformers differ on whether position 0 is counted.
        local = torch.tensor(sum(len(batch["positions"]) for batch in batch_samples), device=device)
        total: Tensor = self.accelerator.gather(local.reshape(1)).sum()
        return total.clamp_min(1)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute this rank's share of the global mean, times the number of ranks.

        Gradients are averaged over ranks afterwards, which takes the factor back out.
        """
        if num_items_in_batch is None:
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        target = self._await_target(inputs)
        outputs = self._run_student(model, inputs, target, num_items=num_items_in_batch)
        self.step_metrics.add_losses(outputs)
        self.step_metrics.add_rows(inputs[ROWS], inputs["position_rows"])
        loss = outputs["loss"] * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def _await_target(self, inputs: dict[str, Any]) -> TeacherTarget | None:
        pending = inputs.pop(PENDING, None)
        if pending is None:
            return None
        start = time.perf_counter()
        scored = pending.result()
        self.step_metrics.add_answer(scored, wait_s=time.perf_counter() - start)
        target: TeacherTarget = scored.target.to(self.args.device)
        return target

    def _run_student(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        target: TeacherTarget | None,
        *,
        num_items: Tensor | int,
        is_evaluation: bool = False,
    ) -> dict[str, Tensor]:
        if target is not None and target.num_positions != len(inputs["positions"]):
            raise ValueError(
                f"the teacher answered {target.num_positions} positions, the micro-batch has "
                f"{len(inputs['positions'])}: samples {', '.join(inputs[ROWS].sample_ids)}"
            )
        batch = DistillationBatch(
            positions_N=inputs["positions"],
            gold_ids_N=inputs["gold_ids"],
            target=target,
            num_items=num_items,
            config=self.args.objective_config(
                vocab_size=self._vocab_size,
                layer_map=self._layer_map,
                is_evaluation=is_evaluation,
            ),
            teacher_head=self._teacher_head,
        )
        outputs: dict[str, Tensor] = model(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            distillation=batch,
        )
        return outputs

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the step's parts when `Trainer` logs a training step."""
        if "loss" in logs and "grad_norm" in logs:
            logs |= self.step_metrics.reduce(self.accelerator)
        super().log(logs, start_time)

    # ---- projections: kept with a checkpoint, left out of what is exported ----

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = (
            Path(str(self.args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        )
        save_projections(model, folder, is_writer=self.args.should_save)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        load_projections(model or self.model, Path(resume_from_checkpoint))

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        model = cast(nn.Module, self.model)
        if has_projections(model):
            state_dict = without_projections(state_dict or model.state_dict())
        super()._save(output_dir, state_dict)

    # ---- evaluation ----

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate: mean per supervised token over the whole held-out set, all ranks."""
        if self.teacher is not None:
            spec = self.args.eval_target_spec()
            dataloader = PrefetchingLoader(
                dataloader, lambda batches: self._prefetch(batches, spec)
            )
        # Not gather_for_metrics: it asks the loader whether this batch is the last, and the
        # prefetcher has the loader ahead of the batch. Repeated samples come last instead.
        self.gather_function = self.accelerator.gather
        output = super().evaluation_loop(
            dataloader, description, False, ignore_keys, metric_key_prefix
        )
        sums_S4 = cast(Any, output.predictions)[: output.num_samples]
        metrics = summarise(sums_S4, has_teacher=self.teacher is not None)
        loss = self.args.alpha_ce * metrics["ce"] + self.args.alpha_kd * metrics.get("kl", 0.0)
        metrics["loss"] = loss
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(
            predictions=output.predictions,
            label_ids=None,
            metrics={**(output.metrics or {}), **named},
            num_samples=output.num_samples,
        )

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, Tensor, None]:
        """Give sums per row, which `Trainer` gathers."""
        pending = inputs.pop(PENDING, None)
        target = pending.result().target.to(self.args.device) if pending is not None else None
        inputs = self._prepare_inputs(inputs)
        num_rows = len(inputs["input_ids"])
        with torch.no_grad():
            outputs = self._run_student(model, inputs, target, num_items=1, is_evaluation=True)
        return None, per_row_sums(outputs, inputs["position_rows"], num_rows=num_rows), None


def _num_layers(model: Any) -> int:
    return int(model.config.get_text_config().num_hidden_layers)


def _pad_token_id(tokenizer: PreTrainedTokenizerBase | None) -> int:
    # Any valid id will do: padding is masked by length and never supervised.
    pad_token_id = getattr(tokenizer, "pad_token_id", None)
    return int(pad_token_id) if pad_token_id is not None else 0
