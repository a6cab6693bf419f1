"""The same weights run directly, one row at a time, in float64."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


def exact_logprobs(folder: Path, row: list[int], temperature: float = 1.0) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row])).logits[0, :-1]
    return (logits / temperature).log_softmax(-1)
