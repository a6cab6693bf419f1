"""A loss over an output head whose logits never exist all at once.

16,384 positions of a 32k vocabulary are 2 GiB of fp32 logits, and a loss needs several
such tensors. Here head and loss run over chunks of positions, and each chunk's
gradient is taken at once, so that only gradients of the size of the hidden states
stay behind. Nothing is recomputed in the backward pass, which also means that FSDP2
need not gather the head again. A frozen head gets no weight gradient at all; a
trainable one (tied or untied, or LoRA matrices on it) gets its sum over the chunks.

Shapes: N = positions, D = hidden size.
Source: the gradient-in-forward idea of Liger-Kernel's fused linear losses
(arXiv 2410.10989), whose own versions take no sparse teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, dict[str, Tensor]]]
"""(hidden [n, D], which positions) -> (scalar loss, values per position without gradient)."""


def chunked_loss(
    hidden_ND: Tensor,
    chunk_loss: ChunkLoss,
    *,
    head_parameters: Sequence[Tensor],
    chunk_positions: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum `chunk_loss` over chunks of positions.

    Args:
        hidden_ND: [N, D]; N may be 0, then the loss is a zero that still has a graph.
        chunk_loss: loss of a chunk; already divided by the global count, so that the
            chunks add up to the loss.
        head_parameters: tensors that `chunk_loss` uses and that need a gradient.
        chunk_positions: positions whose logits exist at once.

    Returns:
        The scalar loss in float32, and the values per position, concatenated.
    """
    if not torch.is_grad_enabled():
        parts = [chunk_loss(hidden_ND[rows], rows) for rows in _chunks(hidden_ND, chunk_positions)]
        total = torch.stack([loss.float() for loss, _ in parts]).sum()
        return total, _join([values for _, values in parts])
    values: dict[str, Tensor] = {}
    trainable = [tensor for tensor in head_parameters if tensor.requires_grad]
    arguments = (hidden_ND, chunk_loss, chunk_positions, values, *trainable)
    loss: Tensor = _ChunkedLoss.apply(*arguments)  # type: ignore[no-untyped-call]
    return loss, values


class _ChunkedLoss(torch.autograd.Function):
    """Value and gradients in one pass; the backward only scales what is stored."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        chunk_loss: ChunkLoss,
        chunk_positions: int,
        values: dict[str, Tensor],
        *parameters: Tensor,
    ) -> Tensor:
        hidden_grad_ND = torch.zeros_like(hidden_ND)
        # fp32 sums: a bf16 accumulator would lose the small chunks.
        parameter_grads = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
        total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        parts: list[dict[str, Tensor]] = []
        for rows in _chunks(hidden_ND, chunk_positions):
            with torch.enable_grad():
                chunk_nD = hidden_ND[rows].detach().requires_grad_()
                loss, chunk_values = chunk_loss(chunk_nD, rows)
                grads = torch.autograd.grad(loss, [chunk_nD, *parameters], allow_unused=True)
            total += loss.detach()
            parts.append({name: value.detach() for name, value in chunk_values.items()})
            if grads[0] is not None:
                hidden_grad_ND[rows] = grads[0]
            for sum_grad, grad in zip(parameter_grads, grads[1:], strict=True):
                if grad is not None:
                    sum_grad += grad
        values.update(_join(parts))
        ctx.save_for_backward(hidden_grad_ND)
        ctx.parameter_grads = [
            grad.to(p.dtype) for grad, p in zip(parameter_grads, parameters, strict=True)
        ]
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_grad_ND,) = ctx.saved_tensors
        scale = grad_outputs[0]
        parameter_grads = (grad * scale.to(grad.dtype) for grad in ctx.parameter_grads)
        return (
            hidden_grad_ND * scale.to(hidden_grad_ND.dtype),
            None,
            None,
            None,
            *parameter_grads,
        )


def _chunks(hidden_ND: Tensor, chunk_positions: int) -> list[slice]:
    # One empty chunk for N = 0: it gives every value its dtype and the loss its zero.
    starts = range(0, max(len(hidden_ND), 1), chunk_positions)
    return [slice(start, start + chunk_positions) for start in starts]


def _join(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([values[name] for values in parts]) for name in parts[0]}
