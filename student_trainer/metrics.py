"""What a training step reports, gathered without making the device wait.

Sums stay on the device until the trainer logs; then one reduction over the ranks turns
them into means. Waiting for the teacher is the time the training thread spent in
`result()`: 0 means that the overlap hides the teacher completely.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor

from student_trainer.collator import UnpaddedRows
from student_trainer.teachers.source import ScoredTarget

_SUMMED = (
    "kd",
    "ce",
    "hidden",
    "entropy",
    "positions",
    "tokens",
    "rows_without_labels",
    "answer_bytes",
    "wait_s",
    "queue_s",
    "forward_s",
    "encode_s",
    "answers",
)


@dataclass
class StepMetrics:
    """Running sums since the last log, of this rank."""

    device: torch.device
    sums: dict[str, Tensor | float] = field(default_factory=dict)
    num_steps: int = 0
    started_at: float | None = None

    def begin_step(self) -> None:
        """Count an optimizer step; the clock runs from the first one after a log."""
        self.num_steps += 1
        if self.started_at is None:
            self.started_at = time.perf_counter()

    def add_losses(self, outputs: dict[str, Tensor]) -> None:
        """Add one micro-batch's values per position."""
        self._add("positions", float(len(outputs["ce_N"])))
        self._add("ce", outputs["ce_N"].sum(dtype=torch.float64))
        for name in ("kd", "hidden"):
            if f"{name}_N" in outputs:
                self._add(name, outputs[f"{name}_N"].sum(dtype=torch.float64))

    def add_answer(self, scored: ScoredTarget, *, wait_s: float) -> None:
        """Add one teacher answer and the time it was waited for."""
        self._add("answers", 1.0)
        self._add("wait_s", wait_s)
        self._add("answer_bytes", float(scored.answer_bytes))
        self._add("entropy", scored.target.entropy_N.sum(dtype=torch.float64))
        self._add("queue_s", scored.timings.queue_s)
        self._add("forward_s", scored.timings.forward_s)
        self._add("encode_s", scored.timings.encode_s)

    def add_rows(self, rows: UnpaddedRows, position_rows_N: Tensor) -> None:
        """Count a micro-batch's tokens, and its rows that supervise nothing."""
        num_supervised = torch.unique(position_rows_N).numel()
        self._add("rows_without_labels", float(len(rows.row_lengths_R) - num_supervised))
        self._add("tokens", float(len(rows.token_ids_T)))

    def reduce(self, accelerator: Accelerator) -> dict[str, float]:
        """Give means over all ranks since the last call, and start anew.

        A collective: every rank calls it at the same step.
        """
        now = time.perf_counter()
        elapsed_s = max(now - (self.started_at or now), 1e-9)
        num_steps = max(self.num_steps, 1)
        local = torch.tensor([float(self.sums.get(name, 0.0)) for name in _SUMMED])
        total = accelerator.reduce(local.to(self.device), reduction="sum")
        sums = dict(zip(_SUMMED, total.tolist(), strict=True))
        # Alike on all ranks: the terms are the configuration's.
        terms = [name for name in ("hidden", "kd") if name in self.sums]
        self.sums, self.num_steps, self.started_at = {}, 0, None

        ranks = accelerator.num_processes
        positions, answers = max(sums["positions"], 1.0), max(sums["answers"], 1.0)
        logs = {
            "ce_loss": sums["ce"] / positions,
            "supervised_tokens": sums["positions"],
            "train_tokens_per_s": sums["tokens"] / elapsed_s,
            "step_s": elapsed_s / num_steps,
        }
        if sums["rows_without_labels"]:
            logs["rows_without_labels"] = sums["rows_without_labels"]
        if sums["answers"]:
            logs |= {f"{name}_loss": sums[name] / positions for name in terms}
            logs |= {
                "teacher_entropy": sums["entropy"] / positions,
                "teacher_wait_s": sums["wait_s"] / ranks / num_steps,
                "teacher_wait_fraction": sums["wait_s"] / ranks / elapsed_s,
                "teacher_bytes_per_token": sums["answer_bytes"] / positions,
                "teacher_queue_s": sums["queue_s"] / answers,
                "teacher_forward_s": sums["forward_s"] / answers,
                "teacher_encode_s": sums["encode_s"] / answers,
            }
        return logs

    def _add(self, name: str, value: Tensor | float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value
