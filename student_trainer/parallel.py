"""How ranks share a model, and what accelerate has to be told about it.

FSDP2 on CPU ranks, so that CPU and GPU run the same trainer:

accelerate picks its FSDP path only for process groups of accelerator kind; a gloo group
on CPUs falls to DDP, although FSDP2 itself works there. `AcceleratorState` copies the
kind from `PartialState` when it is built, so naming the group MULTI_GPU just before that
is enough. The device stays `cpu`: it was set when the group was made and is not looked at
again. Seen with accelerate 1.15 and torch 2.13: Trainer, LoRA, bf16, activation
checkpointing, accumulation, checkpoint and resume on two gloo ranks.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import TrainingArguments

_PR_SET_PDEATHSIG = 1


def present_cpu_ranks_for_fsdp(args: TrainingArguments) -> None:
    """Let the next `Accelerator` shard over CPU ranks, if FSDP is asked for on CPUs."""
    state = PartialState()
    if args.fsdp and state.distributed_type is DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def keep_losses_in_fp32(accelerator: Accelerator) -> None:
    """Stop FSDP2 from rounding the loss to bf16 and reduce gradients in fp32.

    accelerate's policy casts every output to the compute dtype, the root's loss too, and
    sums gradients over ranks in it.
    """
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    policy: Any = getattr(plugin, "mixed_precision_policy", None)
    if policy is not None and getattr(policy, "output_dtype", None) is not None:
        plugin.mixed_precision_policy = dataclasses.replace(
            policy, output_dtype=None, reduce_dtype=torch.float32
        )


def parallelism_name(accelerator: Accelerator) -> str:
    """Name how the ranks share the model: fsdp2, fsdp1, deepspeed, ddp or single."""
    kind = accelerator.distributed_type
    if kind is DistributedType.FSDP:
        return f"fsdp{accelerator.state.fsdp_plugin.fsdp_version}"
    if kind is DistributedType.DEEPSPEED:
        return "deepspeed"
    return "single" if accelerator.num_processes == 1 else "ddp"


def end_with_launcher() -> None:
    """End with torchrun, however it ends.

    Ctrl-C reaches every process of the terminal, and torchrun passes it on; a rank ends at
    once and without a traceback, of which each would write its own. When torchrun dies,
    even by kill -9, the kernel ends the rank (Linux only): it would train on, write
    checkpoints, and meet the run that was started in its place.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def leave_together(accelerator: Accelerator) -> None:
    """End the process group once every rank has got here.

    A rank that exits first tears down connections that another still uses, and gloo's
    threads then abort a run that had finished.
    """
    accelerator.wait_for_everyone()
    accelerator.end_training()
