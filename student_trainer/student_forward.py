"""Makes a causal LM compute its distillation loss inside its own forward.

Under FSDP2 the parameters of the root are whole only while the root's forward runs; a
head called from outside it sees sharded DTensors. So the loss is not computed from the
model's output: the causal LM gets a forward that, given a `DistillationBatch`, runs
trunk and objective and returns the loss. Without one it is the forward it was, so
generation and saving do not change. PEFT passes unknown keyword arguments through,
so the same binding serves a bare model and one with adapters, under DDP, FSDP2 or none.
"""

from __future__ import annotations

from typing import Any

from distill_wire.causal_lm import base_causal_lm, check_parts, split_causal_lm
from student_trainer.hidden_states import projections_of
from student_trainer.objective import DistillationBatch, StudentStates, compute_objective


def bind_distillation_forward(model: Any) -> None:
    """Replace the forward of a causal LM, or of the one inside a PEFT model, in place.

    Raises:
        ValueError: the model cannot be taken apart into trunk and head, or does
            something to its logits that would be skipped.
    """
    causal_lm = base_causal_lm(model)
    parts = split_causal_lm(causal_lm)
    device = next(causal_lm.parameters()).device
    was_training = causal_lm.training
    causal_lm.eval()
    check_parts(causal_lm, parts, device=device)
    causal_lm.train(was_training)
    original_forward = causal_lm.forward

    def forward(*args: Any, distillation: DistillationBatch | None = None, **kwargs: Any) -> Any:
        if distillation is None:
            return original_forward(*args, **kwargs)
        for unused in ("labels", "output_hidden_states", "output_attentions"):
            kwargs.pop(unused, None)
        layers = sorted({student for _, student in distillation.config.layer_map})
        output = parts.trunk(*args, use_cache=False, output_hidden_states=bool(layers), **kwargs)
        states = StudentStates(
            last_BTD=output.last_hidden_state,
            layers={layer: output.hidden_states[layer] for layer in layers},
            projections=projections_of(causal_lm),
        )
        return compute_objective(states, parts, distillation)

    causal_lm.forward = forward


def real_vocab_size(model: Any, num_tokens: int) -> int:
    """Give the student's real vocabulary: head rows, or the tokenizer's ids if fewer."""
    head_rows = split_causal_lm(base_causal_lm(model)).head_rows
    return min(head_rows, num_tokens) if num_tokens else head_rows
