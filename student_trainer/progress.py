"""A progress bar that shows what a distillation run is about.

The library's bar prints every log as a dictionary; with a log each step the bar drowns.
Here the step's figures stand behind the bar and evaluations get a line each. Loggers
(`report_to`) and `log_history` still receive everything.
"""

from __future__ import annotations

from typing import Any

from tqdm import tqdm
from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments

_BESIDE_THE_BAR = {
    "kd_loss": ("kd", ".3f"),
    "ce_loss": ("ce", ".3f"),
    "train_tokens_per_s": ("tok/s", ".0f"),
    "teacher_wait_fraction": ("wait", ".0%"),
}
_ON_A_LINE = {
    "eval_kl": ("KL to teacher", ".3f"),
    "eval_ce": ("cross-entropy", ".3f"),
    "eval_top1_agreement": ("top-1 agreement", ".1%"),
}


class DistillationProgress(ProgressCallback):
    """Shows losses, tokens/s and the share of time spent waiting for the teacher."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Put a step's figures behind the bar, an evaluation's on a line."""
        if not state.is_world_process_zero or logs is None:
            return
        step_figures = _format(logs, _BESIDE_THE_BAR)
        if step_figures and self.training_bar is not None:
            self.training_bar.set_postfix_str("  ".join(step_figures), refresh=False)
        eval_figures = _format(logs, _ON_A_LINE)
        if eval_figures:
            # Above whatever bar there is; after training there is none.
            tqdm.write(f"held out, step {state.global_step}: {', '.join(eval_figures)}")


def _format(logs: dict[str, Any], fields: dict[str, tuple[str, str]]) -> list[str]:
    return [
        f"{label} {logs[name]:{spec}}" for name, (label, spec) in fields.items() if name in logs
    ]
