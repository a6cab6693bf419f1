"""How to take a causal language model apart: trunk, head, and what lies behind the head.

Teacher and student both run the head by hand, in token chunks, because [tokens,
vocabulary] must never exist. Then whatever a model does between its head and its
softmax has to be done by hand too; `check_parts` proves on a few tokens that
nothing was forgotten, so an unknown architecture is refused instead of mis-scored.

Shapes: N = positions, D = hidden size, V = real tokens.
Depends on: torch. Models are used through the conventions of transformers
(`base_model_prefix`, `get_output_embeddings`, `config`) without importing it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distill_wire.types import LogitTransform

LARGEST_PROBE_ERROR = {torch.float32: 1e-3, torch.float64: 1e-6}
_LOW_PRECISION_PROBE_ERROR = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLMParts:
    """A causal LM in the two pieces that are run one after the other.

    Attributes:
        trunk: gives `.last_hidden_state` after the final norm.
        head: gives raw logits [.., head_rows].
        transform: applied to the raw logits.
        head_rows: rows of the head, padding included.
    """

    trunk: nn.Module
    head: nn.Module
    transform: LogitTransform
    head_rows: int


def base_causal_lm(model: Any) -> Any:
    """Give the causal LM inside a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def split_causal_lm(model: Any) -> CausalLMParts:
    """Take a transformers causal LM apart.

    Raises:
        ValueError: the model has no output head or no trunk under `base_model_prefix`.
    """
    head = model.get_output_embeddings()
    trunk = getattr(model, getattr(model, "base_model_prefix", "") or "model", None)
    if head is None or trunk is None or trunk is model:
        raise ValueError(
            f"{type(model).__name__} cannot be taken apart into trunk and head; "
            f"a model loadable by AutoModelForCausalLM is expected"
        )
    return CausalLMParts(
        trunk=trunk,
        head=head,
        transform=logit_transform_of(model.config),
        # Adapters of PEFT around a head pass its weight on.
        head_rows=int(head.weight.shape[0]),
    )


def logit_transform_of(config: Any) -> LogitTransform:
    """Read soft-cap and scale from a transformers config, under the names models use."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale = float(getattr(text, "logit_scale", None) or 1.0)
    scale /= float(getattr(text, "logits_scaling", None) or 1.0)
    softcap = float(getattr(text, "final_logit_softcapping", None) or 0.0)
    return LogitTransform(scale=scale, softcap=softcap)


def transform_logits(raw_NV: Tensor, transform: LogitTransform, *, vocab_size: int) -> Tensor:
    """Give the fp32 logits a softmax may see: real tokens only, scaled, capped.

    Padding rows of the head are cut off before the softmax: even a zero logit there
    is a real probability and can take nearly all the mass.
    """
    logits_NV = raw_NV[..., :vocab_size].float()
    if transform.scale != 1.0:
        logits_NV = logits_NV * transform.scale
    if transform.softcap:
        logits_NV = transform.softcap * torch.tanh(logits_NV / transform.softcap)
    return logits_NV


def head_function(parts: CausalLMParts, *, vocab_size: int) -> Callable[[Tensor], Tensor]:
    """Give the function hidden [N, D] -> fp32 logits [N, V]; matmul in the head's dtype."""

    def head(hidden_ND: Tensor) -> Tensor:
        return transform_logits(parts.head(hidden_ND), parts.transform, vocab_size=vocab_size)

    return head


@torch.no_grad()
def check_parts(model: Any, parts: CausalLMParts, *, device: torch.device) -> None:
    """Compare the parts with the model's own logits on a few tokens.

    Raises:
        ValueError: they differ by more than rounding, so the model does something
            between head and softmax that `LogitTransform` does not describe.
    """
    token_ids = torch.arange(1, 9, device=device)[None] % parts.head_rows
    expected = model(input_ids=token_ids, use_cache=False).logits.float()
    hidden = parts.trunk(input_ids=token_ids, use_cache=False).last_hidden_state
    found = transform_logits(parts.head(hidden), parts.transform, vocab_size=parts.head_rows)
    # Relative however small the logits are: fresh models and small scales stay far below 1.
    largest = expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    error = float((found - expected).abs().max() / largest)
    allowed = LARGEST_PROBE_ERROR.get(hidden.dtype, _LOW_PRECISION_PROBE_ERROR)
    # Written so that a NaN fails too.
    if not error <= allowed:
        raise ValueError(
            f"head(trunk(ids)) of {type(model).__name__} differs from its own logits by a factor "
            f"of {error:.3g} (allowed {allowed:g}); it changes its logits in a way that "
            f"LogitTransform (scale, softcap) does not describe"
        )
